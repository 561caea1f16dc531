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
