//! `prefill_load`: local iff p is busy:
//! `active_prefill_tokens(p) > prefill_busy_threshold x max_num_batched_tokens(p)`, strict, this
//! request not counted. Where the token budget is unknown, p is calm.

use super::{Facts, Verdict};
use crate::signals::{Fallbacks, Signal};
use crate::units::Factor;
use crate::why::Why;

/// Parameters of `prefill_load`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PrefillLoad {
    /// Busy means more active prefill tokens than this many times the worker's token budget per step.
    pub prefill_busy_threshold: Factor,
}

impl PrefillLoad {
    pub(super) fn verdict(&self, facts: &Facts, used: &mut Fallbacks) -> Verdict {
        let active = facts.prefill_active;
        let Some(budget) = facts.prefill_budget else {
            used.insert(Signal::PrefillCapacity);
            return Verdict::Remote(Why::PrefillCalm { active });
        };
        let bound = self.prefill_busy_threshold.get() * f64::from(budget);
        if active as f64 > bound {
            Verdict::Local(Why::PrefillBusy { active, bound })
        } else {
            Verdict::Remote(Why::PrefillCalm { active })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{prompt, under_load};
    use super::*;
    use crate::fleet::Path::{Local, Remote};

    #[test]
    fn busy_is_strictly_above_the_threshold() {
        // (threshold, active, budget, path)
        let cases = [
            (1.0, 8191, Some(8192), Remote),
            (1.0, 8192, Some(8192), Remote),
            (1.0, 8193, Some(8192), Local),
            (0.5, 4096, Some(8192), Remote),
            (0.5, 4097, Some(8192), Local),
            (2.5, 20_480, Some(8192), Remote),
            (2.5, 20_481, Some(8192), Local),
            // A bound between two whole numbers.
            (0.7, 5734, Some(8192), Remote),
            (0.7, 5735, Some(8192), Local),
            // Nothing to wait for is never busy, whatever the threshold.
            (0.0, 0, Some(8192), Remote),
            (0.0, 1, Some(8192), Local),
            (1.0, 0, Some(0), Remote),
            (1.0, 1, Some(0), Local),
            (1.0, u64::MAX, Some(8192), Local),
            (f64::MAX, u64::MAX, Some(8192), Remote),
            // An unknown budget is calm.
            (0.0, u64::MAX, None, Remote),
        ];
        for (threshold, active, budget, path) in cases {
            let rule = PrefillLoad { prefill_busy_threshold: Factor::new(threshold).unwrap() };
            let facts = under_load(prompt(100_000, 0), active, budget);
            let label = if path == Local { "prefill_busy" } else { "prefill_calm" };
            let mut used = Fallbacks::EMPTY;
            let case = format!("{active} of {budget:?} against {threshold}");
            assert_eq!(rule.verdict(&facts, &mut used).labels(), (path, label), "{case}");
            assert_eq!(used.contains(Signal::PrefillCapacity), budget.is_none(), "{case}");
        }
    }

    #[test]
    fn the_length_of_the_prompt_does_not_matter() {
        let rule = PrefillLoad { prefill_busy_threshold: Factor::ONE };
        for isl in [0, 1, 100_000, u32::MAX] {
            let busy = under_load(prompt(isl, 0), 8193, Some(8192));
            let verdict = rule.verdict(&busy, &mut Fallbacks::default());
            assert_eq!(verdict.labels(), (Local, "prefill_busy"), "ISL {isl}");
        }
    }
}
