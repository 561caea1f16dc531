//! How many file descriptors the process may have.

use rustix::process::{Resource, getrlimit, setrlimit};

/// Takes all that the process is allowed: a shell's usual 1024 are 500 streams.
pub(crate) fn take_all() {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    if let Err(error) = setrlimit(Resource::Nofile, limit) {
        tracing::warn!(%error, "the limit of file descriptors could not be raised");
    }
}
