//! The policies: each file holds one, with its formula at the top.
//! A threshold rule is a pure function from the facts of a request to a verdict with its reason;
//! the workers are then the cheapest ones. `predicted` scores every candidate instead, and the plan
//! compares its scores. Guards come after, and are not here.

mod always_local;
mod always_remote;
mod bounds;
mod isl_and_load;
mod isl_bounding;
mod isl_or_load;
mod max_local_prefill;
pub(crate) mod predicted;
mod prefill_load;
mod short_prompt;
mod uncached_tokens;

pub use bounds::Bounds;
pub use isl_bounding::IslBounding;
pub use max_local_prefill::MaxLocalPrefill;
pub use predicted::{Predicted, Score, Scores};
pub use prefill_load::PrefillLoad;
pub use short_prompt::ShortPrompt;
pub use uncached_tokens::UncachedTokens;

use crate::candidates::Candidate;
use crate::field::Field;
use crate::signals::Fallbacks;
use crate::why::Why;

/// A rule and the bounds that hold whatever the rule says.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Policy {
    /// The rule.
    pub rule: Rule,
    /// The bounds.
    pub bounds: Bounds,
}

/// Which rule decides between the remote and the local path.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
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
    /// Whichever is predicted to cost less, to the request and to those that run already.
    #[default]
    Predicted,
}

/// What a threshold rule looks at. `d` is the worker that would take the local path.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Facts {
    /// Prompt tokens.
    pub(crate) isl: u32,
    /// Prompt tokens that `d` holds.
    pub(crate) overlap: u32,
    /// Effective ISL: what `d` would have to compute.
    pub(crate) u: u32,
    /// Prefill tokens active on the prefill worker, without this request.
    pub(crate) prefill_active: u64,
    /// The prefill worker's `max_num_batched_tokens`.
    pub(crate) prefill_budget: Option<u32>,
}

/// A path and its reason.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Verdict {
    Local(Why),
    Remote(Why),
}

/// What a policy decides on: a field that has a remote path.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Board<'a> {
    /// Prompt tokens.
    pub(crate) isl: u32,
    /// Every candidate.
    pub(crate) field: Field<'a>,
    /// The cheapest pair.
    pub(crate) prefill: Candidate,
    pub(crate) decode: Candidate,
}

impl Board<'_> {
    /// The worker on which a threshold rule measures the effective ISL: the one that would compute
    /// on the local path, or else the one that would decode.
    pub(crate) fn measured(&self) -> Candidate {
        self.field.local.unwrap_or(self.decode)
    }

    pub(crate) fn facts(&self) -> Facts {
        let measured = self.measured();
        Facts {
            isl: self.isl,
            overlap: measured.overlap,
            u: measured.u,
            prefill_active: self.prefill.load.prefill_tokens,
            prefill_budget: self.prefill.max_num_batched_tokens,
        }
    }
}

impl Policy {
    /// The bounds' verdict, or else the rule's.
    pub(crate) fn verdict(&self, facts: &Facts, used: &mut Fallbacks) -> Verdict {
        self.bounds.verdict(facts).unwrap_or_else(|| self.rule.verdict(facts, used))
    }

    /// Whether what workers hold of a prompt can change the verdict.
    pub(crate) fn reads_overlap(&self) -> bool {
        self.bounds != Bounds::default() || self.rule.reads_overlap()
    }
}

impl Rule {
    fn verdict(&self, facts: &Facts, used: &mut Fallbacks) -> Verdict {
        match self {
            // Facts do not tell `predicted` anything: the plan compares scores. Whoever asks it all
            // the same gets the path that the operator built.
            Rule::AlwaysRemote | Rule::Predicted => always_remote::verdict(),
            Rule::AlwaysLocal => always_local::verdict(),
            Rule::ShortPrompt(rule) => rule.verdict(facts),
            Rule::IslBounding(rule) => rule.verdict(facts),
            Rule::PrefillLoad(rule) => rule.verdict(facts, used),
            Rule::IslOrLoad(isl, load) => isl_or_load::verdict(isl, load, facts, used),
            Rule::IslAndLoad(isl, load) => isl_and_load::verdict(isl, load, facts, used),
            Rule::UncachedTokens(rule) => rule.verdict(facts),
            Rule::MaxLocalPrefill(rule) => rule.verdict(facts),
        }
    }

    fn reads_overlap(&self) -> bool {
        match self {
            Rule::AlwaysRemote
            | Rule::AlwaysLocal
            | Rule::ShortPrompt(_)
            | Rule::PrefillLoad(_) => false,
            Rule::IslBounding(_)
            | Rule::IslOrLoad(..)
            | Rule::IslAndLoad(..)
            | Rule::UncachedTokens(_)
            | Rule::MaxLocalPrefill(_)
            | Rule::Predicted => true,
        }
    }

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
            Rule::Predicted => "predicted",
        }
    }
}

#[cfg(test)]
mod testing {
    use super::{Facts, Verdict};
    use crate::fleet::Path;

    /// A prompt of `isl` tokens of which `overlap` are held; a calm prefill worker.
    pub(super) fn prompt(isl: u32, overlap: u32) -> Facts {
        let overlap = overlap.min(isl);
        let u = isl - overlap;
        Facts { isl, overlap, u, prefill_active: 0, prefill_budget: Some(8192) }
    }

    /// The same with `active` prefill tokens on a worker that takes `budget` a step.
    pub(super) fn under_load(facts: Facts, active: u64, budget: Option<u32>) -> Facts {
        Facts { prefill_active: active, prefill_budget: budget, ..facts }
    }

    impl Verdict {
        /// The path and the label of the reason.
        pub(super) fn labels(self) -> (Path, &'static str) {
            match self {
                Verdict::Local(why) => (Path::Local, why.as_str()),
                Verdict::Remote(why) => (Path::Remote, why.as_str()),
            }
        }
    }
}
