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

#[cfg(test)]
mod tests {
    use super::*;

    fn demand(isl: u32, device: u32, sequences: u32, allowance: u32) -> KvDemand {
        let held = Held { device, host: 9, disk: 9 };
        KvDemand::new(isl, held, NonZeroU32::new(16).unwrap(), sequences, allowance)
    }

    #[test]
    fn it_counts_what_the_worker_would_have_to_allocate() {
        // (ISL, device blocks held, sequences, allowance, blocks)
        let cases = [
            (160, 0, 1, 0, 10),
            (161, 0, 1, 0, 11),
            (160, 4, 1, 0, 6),
            (160, 40, 1, 0, 0),
            (160, 0, 1, 32, 12),
            (160, 0, 1, 33, 13),
            (160, 0, 4, 32, 18),
            (160, 0, 0, 32, 12),
            (0, 0, 1, 0, 0),
            (u32::MAX, 0, u32::MAX, u32::MAX, MAX_BLOCKS),
        ];
        for (isl, device, sequences, allowance, blocks) in cases {
            let demand = demand(isl, device, sequences, allowance);
            assert_eq!(demand.at_start(), blocks, "{demand:?}");
        }
    }

    #[test]
    fn it_grows_with_what_is_generated() {
        let demand = demand(160, 0, 2, 32);
        assert_eq!([demand.after(0), demand.after(32), demand.after(33)], [10, 14, 16]);
    }
}
