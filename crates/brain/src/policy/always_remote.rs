//! `always_remote`: local iff never.

use super::Verdict;
use crate::why::Why;

pub(super) fn verdict() -> Verdict {
    Verdict::Remote(Why::AlwaysRemote)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fleet::Path;

    #[test]
    fn nothing_goes_local() {
        assert_eq!(verdict().labels(), (Path::Remote, "always_remote"));
    }
}
