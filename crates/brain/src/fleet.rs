//! The workers of one group: what each can do, what it last reported, and whether it may be asked.
//! A slot is a worker rank's dense number. Load is not here: see the ledger.

use std::num::NonZeroU32;

use serde::Serialize;

use crate::health::Health;
use crate::time::Time;
use crate::units::Share;

/// Dense number of a worker rank within its group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub struct Slot(pub u16);

impl Slot {
    pub(crate) fn index(self) -> usize {
        usize::from(self.0)
    }
}

impl std::fmt::Display for Slot {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

/// What a worker is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// Computes prompts; the KV moves on.
    Prefill,
    /// Streams tokens from KV that it was given, or computes the prompt itself where it can.
    Decode,
    /// An ordinary engine: both on one worker.
    Unified,
}

impl Role {
    /// The role's name.
    pub const fn as_str(self) -> &'static str {
        match self {
            Role::Prefill => "prefill",
            Role::Decode => "decode",
            Role::Unified => "unified",
        }
    }
}

/// The way a request takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Path {
    /// Prefill on a prefill worker, KV moved to a decode worker.
    Remote,
    /// Prefill and decode on one worker.
    Local,
}

impl Path {
    /// The path's name, as in headers and metrics.
    pub const fn as_str(self) -> &'static str {
        match self {
            Path::Remote => "remote",
            Path::Local => "local",
        }
    }
}

/// What a worker is and can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct WorkerSpec {
    /// What the worker is for.
    pub role: Role,
    /// Whether a decode worker can compute prompts itself; unified workers always can.
    pub local_prefill: bool,
    /// Tokens per KV block.
    pub block_size: NonZeroU32,
    /// KV blocks it has, where known.
    pub capacity_blocks: Option<u64>,
    /// Its token budget per step (the chunk), where known.
    pub max_num_batched_tokens: Option<u32>,
    /// Whether it publishes KV events.
    pub publishes_events: bool,
    /// Whether a decode worker fetches only the KV that it lacks, and not that of the whole prompt.
    pub skips_cached_blocks: bool,
    /// Whether a prefill worker answers when its KV has been fetched, and not when it is computed.
    pub answers_when_fetched: bool,
}

/// What an engine reported when it was last read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Reading {
    /// Share of its KV blocks in use.
    pub kv_usage: Option<Share>,
    /// KV blocks it has; overrides the spec, and stays known when it is not reported again.
    pub capacity_blocks: Option<u64>,
    /// Requests running.
    pub running: Option<u32>,
    /// Requests waiting.
    pub waiting: Option<u32>,
    /// Prompt tokens that wait to be computed, those held already not counted.
    pub waiting_prefill_tokens: Option<u64>,
    /// Tokens whose KV its sequences have.
    pub context_tokens: Option<u64>,
    /// What it has computed of prompts.
    pub prefill: Option<PrefillTotals>,
    /// What it has streamed.
    pub decode: Option<DecodeTotals>,
}

/// The prompts that an engine has computed since its start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct PrefillTotals {
    /// Prompt tokens computed.
    pub tokens: u64,
    /// Seconds that this took.
    pub seconds: f64,
    /// The seconds of each prompt were added up, so that steps which prompts share count repeatedly.
    pub per_prompt: bool,
}

/// The tokens that an engine has streamed after first ones since its start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct DecodeTotals {
    /// Steps.
    pub steps: u64,
    /// Tokens.
    pub tokens: u64,
    /// Seconds between them: the sum of each step's time as often as it streamed a token.
    pub seconds: f64,
    /// Prompt tokens computed in the same steps; `None` where steps that do are not counted above.
    pub prompt_tokens: Option<u64>,
}

/// KV blocks of a prompt that one worker holds, by tier; each counts what is beyond the faster tiers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Held {
    /// In device memory.
    pub device: u32,
    /// Further, in host memory.
    pub host: u32,
    /// Further, on disk.
    pub disk: u32,
}

impl WorkerSpec {
    /// Whether the worker can take the local path.
    pub const fn can_prefill_locally(&self) -> bool {
        match self.role {
            Role::Prefill => false,
            Role::Decode => self.local_prefill,
            Role::Unified => true,
        }
    }
}

/// A worker of the fleet.
#[derive(Clone, Debug)]
pub(crate) struct Worker {
    pub(crate) spec: WorkerSpec,
    pub(crate) reading: Reading,
    /// When the engine was last read, and until when that counts.
    pub(crate) read: Option<(Time, Time)>,
    pub(crate) health: Health,
    /// Of the hand-offs that it gives or takes.
    pub(crate) handoffs: Health,
    pub(crate) draining: bool,
}

impl Worker {
    /// Takes note of what the engine reported; it counts until then.
    pub(crate) fn report(&mut self, reading: Reading, now: Time, until: Time) {
        let capacity_blocks = reading.capacity_blocks.or(self.reading.capacity_blocks);
        self.reading = Reading { capacity_blocks, ..reading };
        self.read = Some((now, until));
    }

    /// Share of its KV blocks in use, if the engine has said so lately.
    pub(crate) fn kv_usage(&self, now: Time) -> Option<Share> {
        let (_, until) = self.read?;
        self.reading.kv_usage.filter(|_| now <= until)
    }

    /// KV blocks it has: as its engine says, or else as it was configured.
    pub(crate) fn capacity_blocks(&self) -> Option<u64> {
        self.reading.capacity_blocks.or(self.spec.capacity_blocks)
    }
}

/// The workers of a group, by slot.
#[derive(Debug, Default)]
pub(crate) struct Fleet {
    workers: Vec<Option<Worker>>,
}

impl Fleet {
    pub(crate) fn add(&mut self, slot: Slot, spec: WorkerSpec) {
        if self.workers.len() <= slot.index() {
            self.workers.resize(slot.index() + 1, None);
        }
        if let Some(place) = self.workers.get_mut(slot.index()) {
            *place = Some(Worker {
                spec,
                reading: Reading::default(),
                read: None,
                health: Health::default(),
                handoffs: Health::default(),
                draining: false,
            });
        }
    }

    pub(crate) fn remove(&mut self, slot: Slot) -> bool {
        self.workers.get_mut(slot.index()).is_some_and(|place| place.take().is_some())
    }

    pub(crate) fn get(&self, slot: Slot) -> Option<&Worker> {
        self.workers.get(slot.index())?.as_ref()
    }

    pub(crate) fn get_mut(&mut self, slot: Slot) -> Option<&mut Worker> {
        self.workers.get_mut(slot.index())?.as_mut()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (Slot, &Worker)> {
        (0..=u16::MAX)
            .zip(&self.workers)
            .filter_map(|(slot, worker)| Some((Slot(slot), worker.as_ref()?)))
    }
}
