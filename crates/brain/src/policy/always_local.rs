//! `always_local`: local iff always.

use super::Verdict;
use crate::why::Why;

pub(super) fn verdict() -> Verdict {
    Verdict::Local(Why::AlwaysLocal)
}
