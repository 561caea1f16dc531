//! `always_local`: local iff always.

use super::Verdict;
use crate::why::Why;

pub(super) fn verdict() -> Verdict {
    Verdict::Local(Why::AlwaysLocal)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fleet::Path;

    #[test]
    fn everything_goes_local() {
        assert_eq!(verdict().labels(), (Path::Local, "always_local"));
    }
}
