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

#[cfg(test)]
mod tests {
    use super::super::testing::prompt;
    use super::*;
    use crate::fleet::Path::{Local, Remote};

    #[test]
    fn something_must_be_cached_and_the_bound_is_inclusive() {
        // (bound, ISL, overlap, path, label)
        let cases = [
            (0, 1000, 1000, Local, "local_prefill_within"),
            (0, 1000, 5000, Local, "local_prefill_within"),
            (0, 1000, 999, Remote, "local_prefill_over"),
            (0, 1000, 0, Remote, "no_overlap"),
            (0, 0, 0, Remote, "no_overlap"),
            (0, 0, 16, Remote, "no_overlap"),
            (100, 1000, 901, Local, "local_prefill_within"),
            (100, 1000, 900, Local, "local_prefill_within"),
            (100, 1000, 899, Remote, "local_prefill_over"),
            (100, 50, 0, Remote, "no_overlap"),
            (100, 101, 1, Local, "local_prefill_within"),
            (100, 102, 1, Remote, "local_prefill_over"),
            (u32::MAX, u32::MAX, 1, Local, "local_prefill_within"),
            (u32::MAX, u32::MAX, 0, Remote, "no_overlap"),
        ];
        for (max_local_prefill_length, isl, overlap, path, label) in cases {
            let rule = MaxLocalPrefill { max_local_prefill_length };
            let case = format!("ISL {isl}, overlap {overlap}, {rule:?}");
            assert_eq!(rule.verdict(&prompt(isl, overlap)).labels(), (path, label), "{case}");
        }
        assert_eq!(MaxLocalPrefill::default().max_local_prefill_length, 0);
    }
}
