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
