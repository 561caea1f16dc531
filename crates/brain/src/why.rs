//! The reason of a decision: a short label for metrics and headers, a sentence with numbers for people.

use std::fmt;

use crate::guards::Guard;

/// Why a request takes its path. Numbers are tokens.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Why {
    /// The policy is `always_remote`.
    AlwaysRemote,
    /// The policy is `always_local`.
    AlwaysLocal,
    /// The prompt is short.
    ShortPrompt {
        /// Prompt length.
        isl: u32,
        /// The longest that is short.
        bound: u32,
    },
    /// The prompt is not short.
    LongPrompt {
        /// Prompt length.
        isl: u32,
        /// The longest that is short.
        bound: u32,
    },
    /// Little is left to compute.
    EffIslUnder {
        /// Effective ISL.
        u: u32,
        /// Prompt length.
        isl: u32,
    },
    /// Too much is left to compute.
    EffIslOver {
        /// Effective ISL.
        u: u32,
        /// It had to be below this.
        bound: u32,
    },
    /// Too large a share is left to compute.
    EffIslRatioOver {
        /// Effective ISL.
        u: u32,
        /// Prompt length.
        isl: u32,
        /// The share had to be below this.
        bound: f64,
    },
    /// The prefill worker is busy.
    PrefillBusy {
        /// Its active prefill tokens.
        active: u64,
        /// Above this it is busy.
        bound: f64,
    },
    /// The prefill worker is not busy.
    PrefillCalm {
        /// Its active prefill tokens.
        active: u64,
    },
    /// Little is left to compute and the prefill worker is busy.
    EffIslUnderAndPrefillBusy {
        /// Effective ISL.
        u: u32,
        /// The prefill worker's active prefill tokens.
        active: u64,
    },
    /// `uncached_tokens` with a threshold of 0.
    UncachedOff,
    /// Few tokens are uncached.
    UncachedUnder {
        /// Effective ISL.
        u: u32,
        /// It had to be below this.
        bound: u32,
    },
    /// The prompt is below the threshold of `uncached_tokens`.
    PromptUnder {
        /// Prompt length.
        isl: u32,
        /// It had to be below this.
        bound: u32,
    },
    /// Too many tokens are uncached.
    UncachedOver {
        /// Effective ISL.
        u: u32,
        /// It had to be below this.
        bound: u32,
    },
    /// Something is cached and what is left may be computed locally.
    LocalPrefillWithin {
        /// Effective ISL.
        u: u32,
        /// The most that goes local.
        bound: u32,
    },
    /// What is left is too much for the local path.
    LocalPrefillOver {
        /// Effective ISL.
        u: u32,
        /// The most that goes local.
        bound: u32,
    },
    /// Nothing is cached.
    NoOverlap,
    /// The local path is predicted to cost less.
    PredictedLocal {
        /// J of the best local candidate.
        local: f64,
        /// J of the best pair.
        remote: Option<f64>,
    },
    /// The remote path is predicted to cost less.
    PredictedRemote {
        /// J of the best local candidate.
        local: Option<f64>,
        /// J of the best pair.
        remote: Option<f64>,
    },
    /// At or under the floor.
    Floor {
        /// Effective ISL.
        u: u32,
        /// The floor.
        bound: u32,
    },
    /// At or over the ceiling.
    Ceiling {
        /// Effective ISL.
        u: u32,
        /// The ceiling.
        bound: u32,
    },
    /// A guard vetoed the local path.
    Guard(Guard),
    /// The client asked for the path.
    Override,
    /// The length gate sends short prompts to unified workers.
    GateShort {
        /// Prompt length.
        isl: u32,
        /// The longest that is short.
        bound: u32,
    },
    /// The request cannot be split over two workers, or is not where one can take it whole.
    Batch,
    /// No prefill worker can take the request.
    NoPrefill,
    /// No decode worker can take the request; a unified one does.
    NoDecode,
    /// The fleet has unified workers only.
    Unified,
    /// A prefill worker failed: another one is tried.
    RetryPrefill,
    /// Prefill workers failed: the local path is tried.
    RetryLocal,
    /// A decode worker failed: the KV computed already goes to another one.
    RetryDecode,
}

impl Why {
    /// Short `snake_case` label.
    pub const fn as_str(&self) -> &'static str {
        match self {
            Why::AlwaysRemote => "always_remote",
            Why::AlwaysLocal => "always_local",
            Why::ShortPrompt { .. } => "short_prompt",
            Why::LongPrompt { .. } => "long_prompt",
            Why::EffIslUnder { .. } => "eff_isl_under",
            Why::EffIslOver { .. } => "eff_isl_over",
            Why::EffIslRatioOver { .. } => "eff_isl_ratio_over",
            Why::PrefillBusy { .. } => "prefill_busy",
            Why::PrefillCalm { .. } => "prefill_calm",
            Why::EffIslUnderAndPrefillBusy { .. } => "eff_isl_under_and_prefill_busy",
            Why::UncachedOff => "uncached_off",
            Why::UncachedUnder { .. } => "uncached_under",
            Why::PromptUnder { .. } => "prompt_under",
            Why::UncachedOver { .. } => "uncached_over",
            Why::LocalPrefillWithin { .. } => "local_prefill_within",
            Why::LocalPrefillOver { .. } => "local_prefill_over",
            Why::NoOverlap => "no_overlap",
            Why::PredictedLocal { .. } => "predicted_local",
            Why::PredictedRemote { .. } => "predicted_remote",
            Why::Floor { .. } => "floor",
            Why::Ceiling { .. } => "ceiling",
            Why::Guard(Guard::Capability) => "guard_capability",
            Why::Guard(Guard::DecodeKv) => "guard_decode_kv",
            Why::Guard(Guard::LocalPrefillBudget) => "guard_local_prefill_budget",
            Why::Override => "override",
            Why::GateShort { .. } => "gate_short",
            Why::Batch => "batch",
            Why::NoPrefill => "no_prefill",
            Why::NoDecode => "no_decode",
            Why::Unified => "unified",
            Why::RetryPrefill => "retry_prefill",
            Why::RetryLocal => "retry_local",
            Why::RetryDecode => "retry_decode",
        }
    }
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // tidy: long because every reason has its words here.
        match *self {
            Why::AlwaysRemote => write!(f, "the policy always goes remote"),
            Why::AlwaysLocal => write!(f, "the policy always goes local"),
            Why::ShortPrompt { isl, bound } => write!(f, "ISL {isl} <= {bound} tokens"),
            Why::LongPrompt { isl, bound } => write!(f, "ISL {isl} > {bound} tokens"),
            Why::EffIslUnder { u, isl } => {
                write!(f, "effective ISL {u} of {isl} tokens is under both thresholds")
            }
            Why::EffIslOver { u, bound } => write!(f, "effective ISL {u} >= {bound} tokens"),
            Why::EffIslRatioOver { u, isl, bound } => {
                write!(f, "effective ISL {u} / ISL {isl} >= {bound}")
            }
            Why::PrefillBusy { active, bound } => {
                write!(f, "prefill worker is busy: {active} > {bound} tokens active")
            }
            Why::PrefillCalm { active } => {
                write!(f, "prefill worker is not busy: {active} tokens active")
            }
            Why::EffIslUnderAndPrefillBusy { u, active } => write!(
                f,
                "effective ISL {u} tokens is under the thresholds and the prefill worker is busy: \
                 {active} tokens active"
            ),
            Why::UncachedOff => write!(f, "a threshold of 0 uncached tokens always goes local"),
            Why::UncachedUnder { u, bound } => write!(f, "{u} < {bound} tokens are uncached"),
            Why::PromptUnder { isl, bound } => write!(f, "ISL {isl} < {bound} tokens"),
            Why::UncachedOver { u, bound } => write!(f, "{u} >= {bound} tokens are uncached"),
            Why::LocalPrefillWithin { u, bound } => {
                write!(f, "a prefix is cached and {u} <= {bound} tokens are left")
            }
            Why::LocalPrefillOver { u, bound } => write!(f, "{u} > {bound} tokens are left"),
            Why::NoOverlap => write!(f, "nothing of the prompt is cached"),
            Why::PredictedLocal { local, remote: Some(remote) } => {
                write!(f, "predicted cost {local:.3} locally, {remote:.3} remotely")
            }
            Why::PredictedLocal { local, remote: None } => {
                write!(f, "predicted cost {local:.3} locally, no pair has room")
            }
            Why::PredictedRemote { local: Some(local), remote: Some(remote) } => {
                write!(f, "predicted cost {remote:.3} remotely, {local:.3} locally")
            }
            Why::PredictedRemote { local: None, remote: Some(remote) } => {
                write!(f, "predicted cost {remote:.3} remotely, no local candidate")
            }
            Why::PredictedRemote { remote: None, .. } => {
                write!(f, "no candidate could be scored: the cheapest pair")
            }
            Why::Floor { u, bound } => write!(f, "effective ISL {u} <= floor of {bound} tokens"),
            Why::Ceiling { u, bound } => {
                write!(f, "effective ISL {u} >= ceiling of {bound} tokens")
            }
            Why::Guard(Guard::Capability) => write!(f, "no worker can prefill locally"),
            Why::Guard(Guard::DecodeKv) => write!(f, "KV blocks would not fit on the worker"),
            Why::Guard(Guard::LocalPrefillBudget) => {
                write!(f, "the worker's local prefill budget would be passed")
            }
            Why::Override => write!(f, "the client asked for this path"),
            Why::GateShort { isl, bound } => {
                write!(f, "ISL {isl} <= {bound} tokens goes to a unified worker")
            }
            Why::Batch => write!(f, "the request is not to be split over two workers"),
            Why::NoPrefill => write!(f, "no prefill worker can take the request"),
            Why::NoDecode => write!(f, "no decode worker can take the request"),
            Why::Unified => write!(f, "the fleet has unified workers only"),
            Why::RetryPrefill => write!(f, "a prefill worker failed, another one is tried"),
            Why::RetryLocal => write!(f, "prefill workers failed, the local path is tried"),
            Why::RetryDecode => {
                write!(f, "a decode worker failed, the computed KV goes to another one")
            }
        }
    }
}
