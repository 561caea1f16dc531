//! The decision record: everything that went into one decision, for people and for the API.

use serde::Serialize;

use crate::fleet::{Path, Role, Slot};
use crate::guards::Vetoes;
use crate::health::Condition;
use crate::ledger::Load;
use crate::signals::Fallbacks;

/// Everything that went into one decision.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Record {
    /// The path.
    pub path: Path,
    /// The prefill worker of a remote path.
    pub prefill: Option<Slot>,
    /// The worker that streams tokens.
    pub decode: Slot,
    /// The policy in force.
    pub policy: &'static str,
    /// Short label of the reason.
    pub reason: &'static str,
    /// The reason in words, with its numbers.
    pub because: String,
    /// Prompt tokens.
    pub isl_tokens: u32,
    /// What the worker that the policy looked at would have to compute.
    pub effective_isl_tokens: u32,
    /// The ISL was estimated from bytes.
    pub estimated: bool,
    /// Not all of the prompt could be hashed.
    pub partial: bool,
    /// Guards that vetoed the local path, or would have if they had not been waived.
    pub guards: Vetoes,
    /// Fallbacks that were used.
    pub fallbacks: Fallbacks,
    /// What the shadow policies would have done.
    pub shadows: Vec<ShadowRecord>,
    /// Every worker, and what it would cost.
    pub candidates: Vec<CandidateRecord>,
}

/// What one shadow policy would have done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct ShadowRecord {
    /// The policy.
    pub policy: &'static str,
    /// Its path.
    pub path: Path,
}

/// One worker as a candidate.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CandidateRecord {
    /// The worker.
    pub slot: Slot,
    /// What it is for.
    pub role: Role,
    /// Whether it can prefill locally.
    pub local_prefill: bool,
    /// Why it was not considered, if it was not.
    pub left_out: Option<LeftOut>,
    /// Prompt tokens whose KV it holds, tier-weighted.
    pub overlap_tokens: u32,
    /// What it would have to compute.
    pub effective_isl_tokens: u32,
    /// Ordinary cost; lower wins.
    pub cost: f64,
    /// Guards that veto the local path on it.
    pub guards: Vetoes,
    /// What is booked on it.
    pub load: Load,
}

/// Why a worker was not considered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum LeftOut {
    /// It is not healthy.
    Unhealthy,
    /// It takes no further requests.
    Draining,
    /// It cannot serve this request (LoRA residency, labels).
    NotEligible,
    /// It failed this request before.
    Failed,
    /// The length gate wants another kind of worker.
    Gate,
}

/// What a group can serve.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Readiness {
    /// A single prompt can be served.
    pub ready: bool,
    /// By the remote path.
    pub remote: bool,
    /// By the local path.
    pub local: bool,
    /// Prefill workers that take requests.
    pub prefill_up: u16,
    /// Decode workers that take requests.
    pub decode_up: u16,
    /// Unified workers that take requests.
    pub unified_up: u16,
}

/// One worker, for gauges and status pages.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct WorkerView {
    /// The worker.
    pub slot: Slot,
    /// What it is for.
    pub role: Role,
    /// Whether it can prefill locally.
    pub local_prefill: bool,
    /// Its health.
    pub condition: Condition,
    /// Whether it is being drained.
    pub draining: bool,
    /// What is booked on it.
    pub load: Load,
    /// KV blocks it has, where known.
    pub capacity_blocks: Option<u64>,
    /// What its engine last reported.
    pub reading: crate::fleet::Reading,
}

/// What settling a booking released.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settled {
    /// The path that the request took.
    pub path: Path,
    /// The prefill worker of a remote path.
    pub prefill: Option<Slot>,
    /// The worker that streamed.
    pub decode: Slot,
    /// How it ended.
    pub end: crate::ledger::End,
    /// How long it was booked.
    pub held_for: std::time::Duration,
}
