//! `uncached_tokens` (the llm-d rule): local iff `u_d < non_cached_tokens` or `ISL < prompt_tokens`;
//! `non_cached_tokens` of 0 is always local.

use super::{Facts, Verdict};
use crate::why::Why;

/// Parameters of `uncached_tokens`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UncachedTokens {
    /// Fewer uncached tokens than this go local; 0 is always local.
    pub non_cached_tokens: u32,
    /// Prompts shorter than this go local.
    pub prompt_tokens: u32,
}

impl UncachedTokens {
    pub(super) fn verdict(&self, facts: &Facts) -> Verdict {
        let &Facts { isl, u, .. } = facts;
        let bound = self.non_cached_tokens;
        if bound == 0 {
            Verdict::Local(Why::UncachedOff)
        } else if u < bound {
            Verdict::Local(Why::UncachedUnder { u, bound })
        } else if isl < self.prompt_tokens {
            Verdict::Local(Why::PromptUnder { isl, bound: self.prompt_tokens })
        } else {
            Verdict::Remote(Why::UncachedOver { u, bound })
        }
    }
}
