//! `always_remote`: local iff never.

use super::Verdict;
use crate::why::Why;

pub(super) fn verdict() -> Verdict {
    Verdict::Remote(Why::AlwaysRemote)
}
