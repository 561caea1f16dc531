//! The workers of one group: what each can do, what it last reported, and whether it may be asked.
//! A slot is a worker rank's dense number; an incarnation tells two workers that had the same slot apart.
//! Load is not here: see the ledger.

use std::num::NonZeroU32;

use serde::Serialize;

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
}

/// What an engine reported when it was last read; `None` leaves what was known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Reading {
    /// Share of its KV blocks in use.
    pub kv_usage: Option<Share>,
    /// KV blocks it has; overrides the spec.
    pub capacity_blocks: Option<u64>,
    /// Requests running.
    pub running: Option<u32>,
    /// Requests waiting.
    pub waiting: Option<u32>,
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
