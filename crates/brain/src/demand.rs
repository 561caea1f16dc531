//! KV blocks that a request needs on the worker that decodes it.
//! Counted: the prompt's blocks that the worker would have to allocate, and an allowance for the
//! output. Blocks that it holds in device memory are not: requests that share a prefix share them,
//! and counting them for each would close the worker to just those. What that leaves out (cached
//! blocks in use) is in the usage that the engine reports, and the guard takes the larger.

use std::num::NonZeroU32;

use crate::fleet::Held;

/// The most blocks one request is counted for, so that no sum of bookings overflows.
const MAX_BLOCKS: u64 = 1 << 40;

/// What a request needs on one worker.
#[derive(Clone, Copy, Debug)]
pub(crate) struct KvDemand {
    block_size: NonZeroU32,
    prompt_blocks: u32,
    sequences: u32,
    allowance_tokens: u32,
}

impl KvDemand {
    /// The demand of `sequences` outputs that share one prompt, each allowed for `allowance_tokens`.
    pub(crate) fn new(
        isl_tokens: u32,
        held: Held,
        block_size: NonZeroU32,
        sequences: u32,
        allowance_tokens: u32,
    ) -> KvDemand {
        let prompt_blocks = isl_tokens.div_ceil(block_size.get()).saturating_sub(held.device);
        KvDemand { block_size, prompt_blocks, sequences: sequences.max(1), allowance_tokens }
    }

    /// Blocks to book at the start.
    pub(crate) fn at_start(&self) -> u64 {
        self.with_output(self.allowance_tokens)
    }

    /// Blocks needed once each sequence has `generated` tokens.
    pub(crate) fn after(&self, generated: u32) -> u64 {
        self.with_output(generated)
    }

    fn with_output(&self, tokens: u32) -> u64 {
        let growth = u64::from(tokens.div_ceil(self.block_size.get()));
        let output = growth.saturating_mul(u64::from(self.sequences));
        u64::from(self.prompt_blocks).saturating_add(output).min(MAX_BLOCKS)
    }
}
