//! What goes into the engine model and what comes out of it.

use std::sync::Arc;

use crate::profile::Profile;

/// Nanoseconds on the virtual clock.
pub type Nanos = u64;

/// Number of a job, chosen by the caller, unique among the live jobs and pins of one engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct JobId(pub u64);

/// A transfer path into an engine; transfers of one link queue one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LinkId(pub u64);

/// Settings of one engine.
#[derive(Clone, Copy, Debug)]
pub struct Spec {
    /// Physics of a step and of a transfer.
    pub profile: Profile,
    /// Tokens of one KV block.
    pub block_size: u32,
    /// KV blocks.
    pub capacity_blocks: u32,
    /// Tokens of one step.
    pub max_num_batched_tokens: u32,
    /// Sequences that run at once.
    pub max_num_seqs: u32,
    /// How long a handed-off prompt stays pinned.
    pub lease: Nanos,
    /// Relative standard deviation of step times; 0 for exact steps.
    pub noise: f64,
    /// Seed of the noise.
    pub seed: u64,
    /// Whether each token is told. Else only the first of a job is, and steps in which nothing but
    /// decoding happens are one turn of the clock.
    pub every_token: bool,
}

impl Default for Spec {
    fn default() -> Self {
        Spec {
            profile: Profile::default(),
            block_size: 16,
            capacity_blocks: 40_000,
            max_num_batched_tokens: 8192,
            max_num_seqs: 256,
            lease: 30_000_000_000,
            noise: 0.0,
            seed: 0,
            every_token: true,
        }
    }
}

/// The content of one sequence: its prompt followed by everything it will generate.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Content {
    /// Name of each full block, chained: equal names mean equal prefixes. Blocks beyond the end of
    /// this list are never cached.
    pub names: Box<[u64]>,
    /// The tokens, for event publishers; a simulation leaves them out.
    pub tokens: Box<[u32]>,
    /// LoRA adapter, part of the names.
    pub lora: Option<Box<str>>,
    /// Cache salt, part of the names.
    pub salt: Option<Box<str>>,
}

/// How a job's prompt gets its KV and what becomes of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Prefill and decode here.
    Local,
    /// Prefill here, then pin the prompt's KV until it is pulled or its lease passes.
    HandOff,
    /// Pull the prompt's KV over this link, then decode.
    Pull(LinkId),
}

/// One sequence to run.
#[derive(Clone, Debug)]
pub struct Job {
    /// Its number.
    pub id: JobId,
    /// Prompt tokens, at least 1.
    pub prompt_tokens: u32,
    /// Tokens it will generate, at least 1.
    pub output_tokens: u32,
    /// Where its KV comes from and goes to.
    pub kind: Kind,
    /// What it consists of.
    pub content: Arc<Content>,
}

/// Why a job was not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// It needs more KV blocks than the engine has.
    #[error("the sequence needs {needed} KV blocks, the engine has {capacity}")]
    TooLarge {
        /// Blocks of prompt and output together.
        needed: u32,
        /// Blocks of the engine.
        capacity: u32,
    },
    /// The prompt or the output is empty.
    #[error("prompt and output must each have at least one token")]
    Empty,
    /// A live job or pin has this number.
    #[error("job number {0} is in use")]
    Duplicate(u64),
}

/// Something that happened to a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Output {
    /// First scheduled, with this many prompt tokens found in the prefix cache.
    Started {
        /// The job.
        job: JobId,
        /// When.
        at: Nanos,
        /// Tokens found here, those of a later transfer not counted.
        cached_tokens: u32,
    },
    /// The KV that it lacked has arrived.
    Pulled {
        /// The job.
        job: JobId,
        /// When.
        at: Nanos,
        /// Blocks that were moved.
        blocks: u32,
    },
    /// It generated its next token.
    Token {
        /// The job.
        job: JobId,
        /// When.
        at: Nanos,
    },
    /// It generated its last token and is gone; comes right after that token.
    Finished {
        /// The job.
        job: JobId,
        /// When.
        at: Nanos,
        /// For a hand-off: the blocks that stay pinned under the job's number.
        pinned: Option<Box<[u32]>>,
    },
    /// The lease of a pin passed and its blocks are free.
    Expired {
        /// The job that was handed off.
        job: JobId,
        /// When.
        at: Nanos,
    },
}

/// A change of the prefix cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// Blocks `first .. first + count` of a sequence can be found from here on.
    Stored {
        /// The sequence.
        content: Arc<Content>,
        /// First block.
        first: u32,
        /// How many.
        count: u32,
    },
    /// One copy of a block is gone.
    Removed {
        /// Its name.
        name: u64,
    },
    /// All blocks are gone.
    Cleared,
}

/// Events that leave the engine together, with one step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Batch {
    /// When.
    pub at: Nanos,
    /// In order.
    pub events: Vec<Event>,
}

/// Where an engine puts what happened; the caller drains it.
#[derive(Clone, Debug, Default)]
pub struct Outbox {
    /// In order of time.
    pub outputs: Vec<Output>,
    /// In order of time.
    pub batches: Vec<Batch>,
}

/// What an engine is doing right now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Load {
    /// Sequences in the running batch.
    pub running: u32,
    /// Sequences waiting for a place, those waiting for a transfer not counted.
    pub waiting: u32,
    /// Sequences whose KV is on its way.
    pub pulling: u32,
    /// Blocks held by sequences and pins.
    pub used_blocks: u32,
    /// Blocks held by pins alone or with others.
    pub pinned_blocks: u32,
    /// Prompts that are pinned.
    pub pins: u32,
    /// Blocks that can be found by a prefix, in use or not, copies counted.
    pub cached_blocks: u32,
    /// All blocks.
    pub capacity_blocks: u32,
    /// Tokens of all running sequences that have KV.
    pub context_tokens: u64,
}

/// Sums over the steps that computed no prompt; `batch` is how many sequences one decodes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DecodeTotals {
    /// How many they were.
    pub steps: u64,
    /// Sum of `batch`, which is the tokens that they gave.
    pub batch: u64,
    /// Sum of `batch` squared.
    pub batch_squared: u64,
    /// Sum of the steps' times.
    pub time: Nanos,
    /// Sum of `batch` times the step's time.
    pub batch_time: u64,
}

/// Sums since the engine's start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Prompt tokens computed here.
    pub local_compute: u64,
    /// Prompt tokens found in the prefix cache.
    pub local_cache_hit: u64,
    /// Prompt tokens whose KV was pulled.
    pub external_kv_transfer: u64,
    /// Tokens generated.
    pub generated: u64,
    /// Sequences put back for want of blocks.
    pub preemptions: u64,
    /// Steps done.
    pub steps: u64,
    /// Prompt tokens computed in the steps done, again after a preemption too.
    pub prefilled: u64,
    /// How long the steps took that computed prompt tokens.
    pub prefill_time: Nanos,
    /// Steps that only decoded.
    pub decode: DecodeTotals,
    /// Pins whose lease passed.
    pub expired: u64,
    /// Sequences that ended with their last token.
    pub finished: u64,
    /// Sequences that were aborted.
    pub aborted: u64,
}
