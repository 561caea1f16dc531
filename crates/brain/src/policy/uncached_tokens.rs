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

#[cfg(test)]
mod tests {
    use super::super::testing::prompt;
    use super::*;
    use crate::fleet::Path::{Local, Remote};

    #[test]
    fn either_threshold_is_enough_and_both_are_strict() {
        // (non_cached_tokens, prompt_tokens, ISL, overlap, path, label)
        let cases = [
            // Off: always local.
            (0, 0, 100_000, 0, Local, "uncached_off"),
            (0, 0, 0, 0, Local, "uncached_off"),
            (0, 512, 100_000, 0, Local, "uncached_off"),
            // Uncached tokens.
            (256, 0, 1000, 745, Local, "uncached_under"),
            (256, 0, 1000, 744, Remote, "uncached_over"),
            (256, 0, 1000, 743, Remote, "uncached_over"),
            (256, 0, 1000, 5000, Local, "uncached_under"),
            (1, 0, 1000, 1000, Local, "uncached_under"),
            (1, 0, 1000, 999, Remote, "uncached_over"),
            (1, 0, 0, 0, Local, "uncached_under"),
            // Short prompts.
            (256, 512, 511, 0, Local, "prompt_under"),
            (256, 512, 512, 0, Remote, "uncached_over"),
            (256, 512, 513, 0, Remote, "uncached_over"),
            (256, 512, 255, 0, Local, "uncached_under"),
            (u32::MAX, 0, u32::MAX, 0, Remote, "uncached_over"),
        ];
        for (non_cached_tokens, prompt_tokens, isl, overlap, path, label) in cases {
            let rule = UncachedTokens { non_cached_tokens, prompt_tokens };
            let case = format!("ISL {isl}, overlap {overlap}, {rule:?}");
            assert_eq!(rule.verdict(&prompt(isl, overlap)).labels(), (path, label), "{case}");
        }
    }
}
