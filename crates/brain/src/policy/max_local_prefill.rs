//! `max_local_prefill` (the TRT-LLM rule): local iff `overlap(d) > 0`
//! and `u_d <= max_local_prefill_length`.

use super::{Facts, Verdict};
use crate::why::Why;

/// Parameters of `max_local_prefill`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MaxLocalPrefill {
    /// The most uncached tokens that go local.
    pub max_local_prefill_length: u32,
}

impl MaxLocalPrefill {
    pub(super) fn verdict(&self, facts: &Facts) -> Verdict {
        let (u, bound) = (facts.u, self.max_local_prefill_length);
        if facts.overlap == 0 {
            Verdict::Remote(Why::NoOverlap)
        } else if u <= bound {
            Verdict::Local(Why::LocalPrefillWithin { u, bound })
        } else {
            Verdict::Remote(Why::LocalPrefillOver { u, bound })
        }
    }
}
