//! `short_prompt`: local iff `ISL <= short_prefill_tokens`.

use super::{Facts, Verdict};
use crate::why::Why;

/// Parameters of `short_prompt`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShortPrompt {
    /// The longest prompt that is short.
    pub short_prefill_tokens: u32,
}

impl Default for ShortPrompt {
    fn default() -> Self {
        ShortPrompt { short_prefill_tokens: 512 }
    }
}

impl ShortPrompt {
    pub(super) fn verdict(&self, facts: &Facts) -> Verdict {
        let (isl, bound) = (facts.isl, self.short_prefill_tokens);
        if isl <= bound {
            Verdict::Local(Why::ShortPrompt { isl, bound })
        } else {
            Verdict::Remote(Why::LongPrompt { isl, bound })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::prompt;
    use super::*;
    use crate::fleet::Path::{Local, Remote};

    #[test]
    fn the_bound_is_inclusive_and_looks_at_the_whole_prompt() {
        // (bound, ISL, overlap, path)
        let cases = [
            (512, 0, 0, Local),
            (512, 511, 0, Local),
            (512, 512, 0, Local),
            (512, 513, 0, Remote),
            (512, 513, 513, Remote),
            (512, u32::MAX, 0, Remote),
            (0, 0, 0, Local),
            (0, 1, 0, Remote),
            (u32::MAX, u32::MAX, 0, Local),
        ];
        for (short_prefill_tokens, isl, overlap, path) in cases {
            let rule = ShortPrompt { short_prefill_tokens };
            let label = if path == Local { "short_prompt" } else { "long_prompt" };
            let case = format!("ISL {isl} against {short_prefill_tokens}");
            assert_eq!(rule.verdict(&prompt(isl, overlap)).labels(), (path, label), "{case}");
        }
        assert_eq!(ShortPrompt::default().short_prefill_tokens, 512);
    }
}
