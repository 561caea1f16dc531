//! Every number that a decision depends on and that an operator may set, with its default.
//! These are the resolved settings: parsing, ranges and messages live in the config crate.

use std::time::Duration;

use crate::policy::{Policy, Predicted, Rule};
use crate::profile::Profile;
use crate::slo::Slo;
use crate::units::{Factor, Share};

/// How many shadow policies one decision evaluates at most; the rest of a longer list is not looked at.
pub const MAX_SHADOWS: usize = 32;

/// How the brain decides.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The policy that decides.
    pub policy: Policy,
    /// Policies that are evaluated on the same snapshot and only counted; at most [`MAX_SHADOWS`].
    pub shadow: Vec<Policy>,
    /// What vetoes the local path.
    pub guards: GuardSettings,
    /// Who waits in the router, and how many.
    pub admission: Admission,
    /// Length gate for fleets that have both unified and prefill/decode workers.
    pub isl_gate: IslGate,
    /// Which worker of a pool is the cheapest.
    pub cost: CostSettings,
    /// Whether a session's turns stay on one decode worker.
    pub session_affinity: bool,
    /// How many sessions are remembered; the one unused for longest goes first.
    pub max_sessions: u32,
    /// How many further prefill workers are tried after one failed, and likewise decode workers.
    pub retries: u8,
    /// When a worker that fails is left alone, and for how long.
    pub breaker: BreakerSettings,
    /// Refuse instead of going local where no prefill worker is healthy.
    pub require_remote: bool,
    /// Whether a request may ask for its path.
    pub allow_path_override: bool,
    /// How long what an engine reported of its load counts.
    pub reading_max_age: Duration,
    /// Output tokens per sequence for which KV blocks are booked in advance (fewer if the request asks for fewer).
    pub output_allowance_tokens: u32,
    /// Seed of the brain's random choices.
    pub seed: u64,
    /// Parameters of the policy `predicted`.
    pub predicted: Predicted,
    /// What requests are to be served within, unless they say otherwise.
    pub slo: Slo,
    /// Constants that the cost model starts from.
    pub profile: Profile,
}

impl Settings {
    /// Whether any policy asks the cost model.
    pub(crate) fn predicts(&self) -> bool {
        let mut policies = std::iter::once(&self.policy).chain(&self.shadow);
        policies.any(|policy| policy.rule == Rule::Predicted)
    }

    /// Whether requests that are late for their SLO wait in the router.
    pub(crate) fn holds_late(&self) -> bool {
        self.policy.rule == Rule::Predicted && self.predicted.hold_late
    }
}

/// What vetoes the local path.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GuardSettings {
    /// The `decode_kv` guard.
    pub decode_kv: KvGuard,
    /// The `local_prefill_budget` guard.
    pub local_prefill_budget: Budget,
}

/// Who waits in the router, and how many.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Admission {
    /// Whether requests wait while the workers of their plan are busy.
    pub hold_busy: bool,
    /// The prompts that a worker may have before it, beyond which it is busy.
    pub prefill_queue: Queue,
    /// Requests that wait at most.
    pub max_waiting: usize,
    /// How long each waits at most.
    pub max_wait: Duration,
}

/// How many prompt tokens a worker may have to compute.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Queue {
    /// Any number.
    Off,
    /// This many times the worker's chunk (`max_num_batched_tokens`).
    Chunks(Factor),
    /// This many.
    Tokens(u32),
}

/// The `decode_kv` guard.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum KvGuard {
    /// Never vetoes.
    Off,
    /// Vetoes when KV blocks in use would pass this share of the capacity (`decode_busy_threshold`).
    Above(Share),
}

/// The `local_prefill_budget` guard.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Budget {
    /// Four chunks under a threshold policy; off under `predicted`, which weighs itself what a local
    /// prefill does to others.
    ByPolicy,
    /// Never vetoes.
    Off,
    /// This many times the worker's chunk (`max_num_batched_tokens`).
    Chunks(Factor),
    /// This many tokens.
    Tokens(u32),
}

/// Length gate for mixed fleets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IslGate {
    /// No gate.
    Off,
    /// Requests of at most this many tokens may only use unified workers, longer ones only prefill/decode workers.
    UnifiedUpTo(u32),
}

/// The weights of the ordinary cost.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CostSettings {
    /// Weight of the blocks that the worker would have to compute or receive.
    pub overlap_weight: Factor,
    /// Weight of each request active on the worker, in blocks.
    pub active_requests_weight: Factor,
    /// 0 takes the cheapest; above, a sample from the softmax of the normalised negative cost.
    pub temperature: Factor,
}

/// When a worker that fails is left alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BreakerSettings {
    /// Consecutive failures that open the breaker.
    pub failures: u32,
    /// How long it stays open the first time; doubles with each failed probe.
    pub open: Duration,
    /// How long it stays open at most.
    pub open_max: Duration,
    /// Consecutive failed health checks after which a worker is down.
    pub failed_checks: u32,
}

impl Default for Settings {
    fn default() -> Self {
        Settings {
            policy: Policy::default(),
            shadow: Vec::new(),
            reading_max_age: Duration::from_secs(5),
            guards: GuardSettings::default(),
            admission: Admission::default(),
            isl_gate: IslGate::Off,
            cost: CostSettings::default(),
            session_affinity: true,
            max_sessions: 65_536,
            retries: 2,
            breaker: BreakerSettings::default(),
            require_remote: false,
            allow_path_override: false,
            output_allowance_tokens: 256,
            seed: 0,
            predicted: Predicted::default(),
            slo: Slo::default(),
            profile: Profile::default(),
        }
    }
}

impl Default for GuardSettings {
    fn default() -> Self {
        const THRESHOLD: Share = Share::constant(0.9);
        GuardSettings {
            decode_kv: KvGuard::Above(THRESHOLD),
            local_prefill_budget: Budget::ByPolicy,
        }
    }
}

impl Default for Admission {
    fn default() -> Self {
        // An engine that has eight full steps before it does not run dry before it can be told more.
        const QUEUE: Factor = Factor::constant(8.0);
        Admission {
            hold_busy: true,
            prefill_queue: Queue::Chunks(QUEUE),
            max_waiting: 1_024,
            max_wait: Duration::from_secs(60),
        }
    }
}

impl Default for CostSettings {
    fn default() -> Self {
        CostSettings {
            overlap_weight: Factor::ONE,
            active_requests_weight: Factor::ONE,
            temperature: Factor::ZERO,
        }
    }
}

impl Default for BreakerSettings {
    fn default() -> Self {
        BreakerSettings {
            failures: 3,
            open: Duration::from_secs(1),
            open_max: Duration::from_secs(60),
            failed_checks: 2,
        }
    }
}
