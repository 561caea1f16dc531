//! What a group can serve at this moment.

use serde::Serialize;

use crate::fleet::{Fleet, Role};
use crate::time::Time;

/// What a group can serve.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Readiness {
    /// A single prompt can be served.
    pub ready: bool,
    /// By the remote path.
    pub remote: bool,
    /// By the local path.
    pub local: bool,
    /// Prefill workers that take requests.
    pub prefill_up: u16,
    /// Decode workers that take requests.
    pub decode_up: u16,
    /// Unified workers that take requests.
    pub unified_up: u16,
}

pub(crate) fn readiness(fleet: &Fleet, require_remote: bool, now: Time) -> Readiness {
    let mut readiness = Readiness::default();
    let takes = fleet.iter().map(|(_, worker)| worker).filter(|worker| worker.takes_requests(now));
    for worker in takes {
        readiness.local |= worker.spec.can_prefill_locally();
        match worker.spec.role {
            Role::Prefill => readiness.prefill_up += 1,
            Role::Decode => readiness.decode_up += 1,
            Role::Unified => readiness.unified_up += 1,
        }
    }
    readiness.remote = readiness.prefill_up > 0 && readiness.decode_up > 0;
    readiness.ready = readiness.remote || (readiness.local && !require_remote);
    readiness
}
