//! The guards: each can veto the local path after a policy said yes, by a name that shows.
//! `capability`: the worker cannot prefill locally.
//! `decode_kv`: blocks in use + this request > `decode_busy_threshold` x capacity, where blocks in
//! use are the larger of the router's own count and what the engine has reported lately.
//! `local_prefill_budget`: local prefill tokens in flight + this request > budget.

use crate::demand::KvDemand;
use crate::flags::{Flag, Set};
use crate::fleet::Worker;
use crate::ledger::Load;
use crate::policy::Rule;
use crate::predict::DEFAULT_CHUNK_TOKENS;
use crate::settings::{Budget, GuardSettings, KvGuard, Queue};
use crate::signals::{Fallbacks, Signal};
use crate::time::Time;
use crate::units::Factor;

/// The budget of a threshold policy where none is set.
const DEFAULT_BUDGET_CHUNKS: Factor = Factor::constant(4.0);

/// An engine whose KV cache is used to this share has room for the growth of what runs, if for that.
const FULL: f64 = 0.98;

/// A reason for which the local path is vetoed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Guard {
    /// The worker cannot prefill locally.
    Capability,
    /// Its KV blocks would not fit.
    DecodeKv,
    /// Too many prompt tokens are being computed on it already.
    LocalPrefillBudget,
}

/// The guards that vetoed.
pub type Vetoes = Set<Guard>;

impl Flag for Guard {
    const ALL: &'static [Guard] = &[Guard::Capability, Guard::DecodeKv, Guard::LocalPrefillBudget];

    fn place(self) -> u8 {
        self as u8
    }

    fn as_str(self) -> &'static str {
        match self {
            Guard::Capability => "capability",
            Guard::DecodeKv => "decode_kv",
            Guard::LocalPrefillBudget => "local_prefill_budget",
        }
    }
}

/// What the guards say of one worker, and what they had to do without.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Checked {
    pub(crate) vetoes: Vetoes,
    pub(crate) fallbacks: Fallbacks,
}

/// Asks every guard about the local path on a worker, where `prefill_tokens` would be computed.
pub(crate) fn check(
    settings: &GuardSettings,
    rule: Rule,
    worker: &Worker,
    load: &Load,
    prefill_tokens: u32,
    demand: &KvDemand,
    now: Time,
) -> Checked {
    let mut checked = Checked::default();
    if !worker.spec.can_prefill_locally() {
        checked.vetoes.insert(Guard::Capability);
    }
    check_kv(settings.decode_kv, worker, load, demand, now, &mut checked);
    let budget = match (settings.local_prefill_budget, rule) {
        (Budget::ByPolicy, Rule::Predicted) => Budget::Off,
        (Budget::ByPolicy, _) => Budget::Chunks(DEFAULT_BUDGET_CHUNKS),
        (budget, _) => budget,
    };
    check_budget(budget, worker, load, prefill_tokens, &mut checked);
    checked
}

/// Whether the request's KV has room on a worker at all; where the capacity is unknown, it has.
pub(crate) fn fits(worker: &Worker, load: &Load, demand: &KvDemand, now: Time) -> bool {
    let Some(capacity) = worker.capacity_blocks() else { return true };
    in_use(worker, load, capacity as f64, now) + demand.at_start() as f64 <= capacity as f64
}

/// Whether next to no KV block of a worker is free for what comes beside what runs there; where its
/// capacity is unknown, or nothing of the router's own runs there, there is one.
pub(crate) fn is_full(worker: &Worker, load: &Load, now: Time) -> bool {
    let Some(capacity) = worker.capacity_blocks().filter(|_| load.active > 0) else { return false };
    let capacity = capacity as f64;
    in_use(worker, load, capacity, now) >= FULL * capacity
}

/// Whether a worker has as many prompt tokens to compute as it may.
pub(crate) fn queue_is_full(queue: Queue, worker: &Worker, load: &Load) -> bool {
    let most = match queue {
        Queue::Off => return false,
        Queue::Tokens(tokens) => f64::from(tokens),
        Queue::Chunks(chunks) => in_tokens(chunks, worker),
    };
    load.prefill_tokens > 0 && load.prefill_tokens as f64 >= most
}

/// So many chunks of a worker; of the usual size where it has not told its own.
fn in_tokens(chunks: Factor, worker: &Worker) -> f64 {
    let chunk = worker.spec.max_num_batched_tokens.unwrap_or(DEFAULT_CHUNK_TOKENS);
    chunks.get() * f64::from(chunk)
}

/// KV blocks in use: the larger of the router's own count and what the engine has reported lately.
fn in_use(worker: &Worker, load: &Load, capacity: f64, now: Time) -> f64 {
    let reported = worker.kv_usage(now).map_or(0.0, |usage| usage.get() * capacity);
    reported.max(load.kv_blocks as f64)
}

fn check_kv(
    guard: KvGuard,
    worker: &Worker,
    load: &Load,
    demand: &KvDemand,
    now: Time,
    checked: &mut Checked,
) {
    let KvGuard::Above(threshold) = guard else { return };
    let Some(capacity) = worker.capacity_blocks() else {
        checked.fallbacks.insert(Signal::KvCapacity);
        return;
    };
    let capacity = capacity as f64;
    if in_use(worker, load, capacity, now) + demand.at_start() as f64 > threshold.get() * capacity {
        checked.vetoes.insert(Guard::DecodeKv);
    }
}

fn check_budget(
    budget: Budget,
    worker: &Worker,
    load: &Load,
    prefill_tokens: u32,
    checked: &mut Checked,
) {
    let budget = match budget {
        Budget::Off | Budget::ByPolicy => return,
        Budget::Tokens(tokens) => f64::from(tokens),
        Budget::Chunks(chunks) => {
            if worker.spec.max_num_batched_tokens.is_none() {
                checked.fallbacks.insert(Signal::Chunk);
            }
            in_tokens(chunks, worker)
        }
    };
    if (load.prefill_tokens + u64::from(prefill_tokens)) as f64 > budget {
        checked.vetoes.insert(Guard::LocalPrefillBudget);
    }
}
