//! How requests find their path, as written. Defaults are the brain's own.

use pointsman_brain as brain;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::section;
use crate::scalar::{OffOr, Span};

section! {
    /// How requests find their path.
    Routing {
        /// The policy and its parameters.
        #[serde(flatten)]
        parameters: Policy = Policy::default();
        /// Policies that are evaluated on the same snapshot and counted, never acted on: a name, or a
        /// mapping of `policy` and its own parameters; parameters not given are those of `routing`.
        #[schemars(extend("x-max-items" = 32))]
        shadow: Vec<Shadow> = Vec::new();
        /// Guard `decode_kv`: no local path where the decode worker's KV blocks in use would pass this
        /// share of its capacity.
        decode_busy_threshold: OffOr<f64> = decode_busy_threshold(), min 0, max 1;
        /// Guard `local_prefill_budget`: most local prefill tokens in flight on one worker.
        local_prefill_budget: LocalPrefillBudget = LocalPrefillBudget::default();
        /// Who waits in the router, where it can still be decided anew, instead of in an engine's queue.
        admission: Admission = Admission::default();
        /// For `predicted`: how it weighs what it predicts.
        predicted: Predicted = Predicted::default();
        /// In a mixed fleet, requests of at most this many tokens only use unified workers, longer ones
        /// only prefill and decode workers.
        isl_gate: OffOr<u32> = OffOr::OFF;
        /// Which worker of a kind is taken: the one with the lowest cost.
        cost: Cost = Cost::default();
        /// What names a session, whose turns stay on one decode worker while it is healthy.
        session_affinity: SessionAffinity = SessionAffinity::Off;
        /// Sessions remembered; the one unused for longest goes first.
        max_sessions: u32 = brain::Settings::default().max_sessions, min 1, max 16777216;
        /// Further prefill workers tried after one failed, and likewise decode workers.
        retries: u8 = brain::Settings::default().retries, max 16;
        /// When a worker that fails is left alone.
        breaker: Breaker = Breaker::default();
        /// Answer 503 instead of going local where no prefill worker is healthy.
        require_remote: bool = brain::Settings::default().require_remote;
        /// Whether a request may ask for its path with the header `x-pointsman-path: local|remote`.
        allow_path_override: bool = brain::Settings::default().allow_path_override;
        /// Output tokens for which KV blocks are booked in advance, fewer where the request asks for fewer.
        output_allowance_tokens: u32 = brain::Settings::default().output_allowance_tokens;
        /// Seed of random choices. Default: another one at each start, so that replicas do not herd.
        seed: Option<u64> = None;
    }
}

section! {
    /// A policy and its parameters; each policy reads its own.
    Policy {
        /// The rule between local and remote prefill. `u` is the effective ISL: prompt tokens that the
        /// decode worker would have to compute.
        policy: PolicyName = PolicyName::Predicted;
        /// For `short_prompt`: local when ISL <= this.
        short_prefill_tokens: u32 = brain::ShortPrompt::default().short_prefill_tokens;
        /// For `isl_bounding`, `isl_or_load`, `isl_and_load`: local needs u < this.
        eff_isl_threshold: u32 = brain::IslBounding::default().eff_isl_threshold;
        /// For the same policies: local also needs u / ISL < this.
        eff_isl_ratio_threshold: f64 = brain::IslBounding::default().eff_isl_ratio_threshold.get(), min 0, max 1;
        /// For `prefill_load`, `isl_or_load`, `isl_and_load`, which need it: a prefill worker is busy when
        /// its active prefill tokens > this x its `max_num_batched_tokens`. As `cold_policy` they take 1
        /// where it is not given.
        prefill_busy_threshold: Option<f64> = None, min 0;
        /// For `uncached_tokens`: local when u < this; 0 is always local.
        non_cached_tokens: u32 = brain::UncachedTokens::default().non_cached_tokens;
        /// For `uncached_tokens`: local also when ISL < this.
        prompt_tokens: u32 = brain::UncachedTokens::default().prompt_tokens;
        /// For `max_local_prefill`: local when something is cached and u <= this.
        max_local_prefill_length: u32 = brain::MaxLocalPrefill::default().max_local_prefill_length;
        /// For any policy: local when u <= this, whatever the rule says; 0 is off.
        floor_tokens: u32 = brain::Bounds::default().floor_tokens;
        /// For any policy: remote when u >= this, whatever rule and floor say.
        ceiling_tokens: OffOr<u32> = OffOr::OFF;
    }
}

/// The rule between local and remote prefill.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
#[schemars(inline)]
pub enum PolicyName {
    /// Never local.
    AlwaysRemote,
    /// Always local.
    AlwaysLocal,
    /// Local when the prompt is short.
    ShortPrompt,
    /// Local when little is left to compute, absolutely and as a share of the prompt.
    IslBounding,
    /// Local when the prefill worker is busy.
    PrefillLoad,
    /// Local when `isl_bounding` or `prefill_load` is.
    IslOrLoad,
    /// Local when `isl_bounding` and `prefill_load` are.
    IslAndLoad,
    /// Local when few tokens are uncached or the prompt is short, as in llm-d.
    UncachedTokens,
    /// Local when something is cached and little is left, as in TensorRT-LLM.
    MaxLocalPrefill,
    /// Whichever path is predicted to cost less, to the request and to those that run already.
    Predicted,
}

/// A policy that is only counted.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
#[schemars(inline)]
pub enum Shadow {
    /// By name, with the parameters of `routing`.
    Name(PolicyName),
    /// With parameters of its own.
    Full(Policy),
}

/// Most local prefill tokens in flight on one worker.
#[derive(Clone, Copy, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
#[schemars(inline)]
pub enum LocalPrefillBudget {
    /// `{chunks: 4}`; no bound under the policy `predicted`, which weighs what a local prefill does to
    /// others.
    ByPolicy,
    /// No bound.
    Off,
    /// This many times the worker's `max_num_batched_tokens`.
    Chunks(#[schemars(extend("x-minimum" = 0))] f64),
    /// This many tokens.
    Tokens(u32),
}

section! {
    /// Who waits in the router, instead of in an engine's queue. Those with a higher
    /// `x-pointsman-priority` go first, tenants of one priority take turns by the tokens of their
    /// prompts, and a tenant's own requests go in order.
    Admission {
        /// Requests wait while the worker that would compute them has `prefill_queue` before it, or the
        /// one that would decode them has no KV block left. Under the policy `predicted`, unless its
        /// `hold_late` is off, those with a `ttft_ms` wait while their worker has more than two steps of
        /// prompts before it.
        hold_busy: bool = brain::Admission::default().hold_busy;
        /// Prompt tokens sent to a worker and not yet computed, from which on it is busy.
        prefill_queue: PrefillQueue = PrefillQueue::default();
        /// Requests of one model that wait at most. Beyond, the last in line gets 429 with
        /// `Retry-After`.
        max_waiting: u32 = brain::Admission::default().max_waiting as u32, min 0, max 1048576;
        /// How long a request waits at most; then it gets 503 with `Retry-After`. Its own
        /// `x-pointsman-deadline-ms` can make it less.
        max_wait: Span = Span(brain::Admission::default().max_wait), min "1ms", max "1d";
        /// Header that names the tenant where clients have no API keys, such as `x-tenant`; where they
        /// have, the key does. Requests with neither are one tenant.
        tenant_header: Option<String> = None;
    }
}

/// Prompt tokens that wait at a worker at most.
#[derive(Clone, Copy, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
#[schemars(inline)]
pub enum PrefillQueue {
    /// No bound.
    Off,
    /// This many times the worker's `max_num_batched_tokens`.
    Chunks(#[schemars(extend("x-minimum" = 0))] f64),
    /// This many tokens.
    Tokens(u32),
}

section! {
    /// How the policy `predicted` weighs what it predicts.
    Predicted {
        /// The policy that decides close cases until enough was measured, with the parameters of
        /// `routing`; `predicted` leaves them to the predictions.
        cold_policy: PolicyName = PolicyName::IslOrLoad;
        /// Taken off the cost of the path that a session's previous turn took.
        stickiness: f64 = brain::Predicted::default().stickiness.get(), min 0, max 10;
        /// Cost of delaying a request that streams already by one second, where it has no `itl_ms`.
        lambda: f64 = brain::Predicted::default().lambda.get(), min 0, max 1000;
        /// A request that is late for its `ttft_ms` whatever is done waits in the router until a
        /// worker is about to run dry, so that it does not make others late as well.
        hold_late: bool = brain::Predicted::default().hold_late;
    }
}

/// What names a session.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
#[schemars(inline)]
pub enum SessionAffinity {
    /// Nothing: turns are routed one by one.
    Off,
    /// The request's `user` field.
    User,
    /// This request header.
    Header(String),
    /// The first so many tokens of the prompt.
    PrefixTokens(#[schemars(extend("x-minimum" = 1))] u32),
}

section! {
    /// The cost of a worker: `overlap_weight` x blocks to compute or receive + KV blocks in use +
    /// `active_requests_weight` x active requests.
    Cost {
        /// Weight of the blocks that the worker would have to compute or receive.
        overlap_weight: f64 = brain::CostSettings::default().overlap_weight.get(), min 0;
        /// Weight of an active request, in blocks.
        active_requests_weight: f64 = brain::CostSettings::default().active_requests_weight.get(), min 0;
        /// 0 takes the cheapest worker; above, one is drawn from the softmax of the negative costs.
        temperature: f64 = brain::CostSettings::default().temperature.get(), min 0;
    }
}

section! {
    /// When a worker that fails is left alone.
    Breaker {
        /// Failures in a row after which it gets no more requests.
        failures: u32 = brain::BreakerSettings::default().failures, min 1;
        /// How long, at first; doubles with each failed probe.
        open: Span = Span(brain::BreakerSettings::default().open), min "1ms", max "1d";
        /// How long at most.
        open_max: Span = Span(brain::BreakerSettings::default().open_max), min "1ms", max "1d";
        /// Failed health checks in a row after which it counts as down.
        failed_checks: u32 = brain::BreakerSettings::default().failed_checks, min 1;
    }
}

fn decode_busy_threshold() -> OffOr<f64> {
    match brain::GuardSettings::default().decode_kv {
        brain::KvGuard::Off => OffOr::OFF,
        brain::KvGuard::Above(share) => OffOr::On(share.get()),
    }
}

impl Default for PrefillQueue {
    fn default() -> Self {
        match brain::Admission::default().prefill_queue {
            brain::Queue::Off => PrefillQueue::Off,
            brain::Queue::Chunks(chunks) => PrefillQueue::Chunks(chunks.get()),
            brain::Queue::Tokens(tokens) => PrefillQueue::Tokens(tokens),
        }
    }
}

impl Default for LocalPrefillBudget {
    fn default() -> Self {
        match brain::GuardSettings::default().local_prefill_budget {
            brain::Budget::ByPolicy => LocalPrefillBudget::ByPolicy,
            brain::Budget::Off => LocalPrefillBudget::Off,
            brain::Budget::Chunks(chunks) => LocalPrefillBudget::Chunks(chunks.get()),
            brain::Budget::Tokens(tokens) => LocalPrefillBudget::Tokens(tokens),
        }
    }
}
