//! The policies: each file holds one, with its formula at the top.
//! A threshold policy is a pure function from the facts of a request to a verdict with its reason.

use crate::units::{Factor, Share};

/// A rule and the bounds that hold whatever the rule says.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Policy {
    /// The rule.
    pub rule: Rule,
    /// The bounds.
    pub bounds: Bounds,
}

/// Bounds that any policy takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Bounds {
    /// `u_d <= floor_tokens` goes local; 0 is off.
    pub floor_tokens: u32,
    /// `u_d >= ceiling_tokens` goes remote; comes before the floor.
    pub ceiling_tokens: Option<u32>,
}

/// Which rule decides between the remote and the local path.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Rule {
    /// Never local.
    AlwaysRemote,
    /// Always local.
    AlwaysLocal,
    /// Local when the prompt is short.
    ShortPrompt(ShortPrompt),
    /// Local when little is left to compute, absolutely and relatively.
    IslBounding(IslBounding),
    /// Local when the prefill worker is busy.
    PrefillLoad(PrefillLoad),
    /// Local when either says so.
    IslOrLoad(IslBounding, PrefillLoad),
    /// Local when both say so.
    IslAndLoad(IslBounding, PrefillLoad),
    /// Local when few tokens are uncached, or the prompt is short.
    UncachedTokens(UncachedTokens),
    /// Local when something is cached and little is left.
    MaxLocalPrefill(MaxLocalPrefill),
}

/// Parameters of `short_prompt`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShortPrompt {
    /// The longest prompt that is short.
    pub short_prefill_tokens: u32,
}

/// Parameters of `isl_bounding`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct IslBounding {
    /// The effective ISL must be below this.
    pub eff_isl_threshold: u32,
    /// Its share of the ISL must be below this.
    pub eff_isl_ratio_threshold: Share,
}

/// Parameters of `prefill_load`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PrefillLoad {
    /// Busy means more active prefill tokens than this many times the worker's token budget per step.
    pub prefill_busy_threshold: Factor,
}

/// Parameters of `uncached_tokens`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UncachedTokens {
    /// Fewer uncached tokens than this go local; 0 is always local.
    pub non_cached_tokens: u32,
    /// Prompts shorter than this go local.
    pub prompt_tokens: u32,
}

/// Parameters of `max_local_prefill`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MaxLocalPrefill {
    /// The most uncached tokens that go local.
    pub max_local_prefill_length: u32,
}

impl Default for ShortPrompt {
    fn default() -> Self {
        ShortPrompt { short_prefill_tokens: 512 }
    }
}

impl Default for IslBounding {
    fn default() -> Self {
        const RATIO: Share = Share::constant(0.7);
        IslBounding { eff_isl_threshold: 2048, eff_isl_ratio_threshold: RATIO }
    }
}

impl Default for Rule {
    fn default() -> Self {
        Rule::IslBounding(IslBounding::default())
    }
}

impl Rule {
    /// The policy's name, as in settings, headers and metrics.
    pub const fn as_str(&self) -> &'static str {
        match self {
            Rule::AlwaysRemote => "always_remote",
            Rule::AlwaysLocal => "always_local",
            Rule::ShortPrompt(_) => "short_prompt",
            Rule::IslBounding(_) => "isl_bounding",
            Rule::PrefillLoad(_) => "prefill_load",
            Rule::IslOrLoad(..) => "isl_or_load",
            Rule::IslAndLoad(..) => "isl_and_load",
            Rule::UncachedTokens(_) => "uncached_tokens",
            Rule::MaxLocalPrefill(_) => "max_local_prefill",
        }
    }
}
