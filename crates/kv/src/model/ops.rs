//! Random changes, in literal prompts.

use super::SLOTS;
use crate::hash::{BlockExtra, Hasher, Space, SpaceKey};
use crate::names::{BlockHash, Tier};
use proptest::prelude::*;

/// Slots, spaces and prompts are drawn from these few, so that they collide all the time.
const SPACES: usize = 4;
const MAX_BLOCKS: usize = 9;

/// One block of a literal prompt: what its tokens and extra keys are made of.
pub(crate) type Block = (u8, u8);

/// A prompt, written out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Prompt {
    pub(crate) space: usize,
    pub(crate) blocks: Vec<Block>,
}

/// The spaces of the tests, and how literal prompts become tokens and chains.
pub(crate) struct World {
    hasher: Hasher,
    spaces: Vec<Space>,
}

impl World {
    pub(crate) fn new() -> Self {
        let hasher = Hasher::new(7);
        let plain = SpaceKey::plain(4);
        let keys = [
            plain,
            SpaceKey::plain(2),
            plain.with_lora(Some("adapter")),
            plain.with_salt(Some("tenant")),
        ];
        let spaces = keys.iter().map(|key| hasher.space(key)).collect();
        Self { hasher, spaces }
    }

    pub(crate) fn space(&self, space: usize) -> Space {
        self.spaces[space]
    }

    pub(crate) fn tokens(&self, space: usize, block: Block) -> Vec<u32> {
        (0..self.spaces[space].block_size()).map(|i| u32::from(block.0) * 100 + i).collect()
    }

    pub(crate) fn extra(&self, block: Block) -> BlockExtra {
        match block.1 {
            0 => BlockExtra::NONE,
            n => self.hasher.extra().multimodal("image", i64::from(n)).build(),
        }
    }

    pub(crate) fn chain(&self, prompt: &Prompt) -> Vec<BlockHash> {
        let space = self.spaces[prompt.space];
        let mut last = space.root();
        let step = |block: &Block| {
            last = space.extend(last, &self.tokens(prompt.space, *block), self.extra(*block));
            last
        };
        prompt.blocks.iter().map(step).collect()
    }
}

/// A random change, in the words of the model.
#[derive(Clone, Debug)]
pub(crate) enum Op {
    /// Arbitrary names for arbitrary blocks: engines that contradict themselves.
    Wild {
        slot: u16,
        tier: Tier,
        space: usize,
        parent: Option<u8>,
        blocks: Vec<(u8, Block)>,
    },
    /// Blocks `from..` of a prompt under the worker's own names for those prefixes.
    Store {
        slot: u16,
        tier: Tier,
        prompt: Prompt,
        from: usize,
    },
    /// One more copy of a prompt's blocks, by name alone.
    Copy {
        slot: u16,
        tier: Tier,
        prompt: Prompt,
        from: usize,
    },
    /// Removal of a prompt's blocks `from..to`.
    Remove {
        slot: u16,
        tier: Tier,
        prompt: Prompt,
        from: usize,
        to: usize,
    },
    /// Removal by arbitrary names.
    WildRemove {
        slot: u16,
        tier: Tier,
        names: Vec<u8>,
    },
    Clear {
        slot: u16,
    },
    Place {
        slot: u16,
        prompt: Prompt,
        wait: u64,
    },
    Approximate {
        slot: u16,
        capacity: Option<u64>,
        ttl: Option<u64>,
    },
    Exact {
        slot: u16,
    },
    Expire {
        wait: u64,
    },
    /// Tokens that do not fit the blocks.
    Malformed {
        slot: u16,
        blocks: usize,
        tokens: usize,
    },
}

fn tier() -> impl Strategy<Value = Tier> {
    prop_oneof![4 => Just(Tier::Device), 1 => Just(Tier::Host), 1 => Just(Tier::Disk)]
}

fn block() -> impl Strategy<Value = Block> {
    (prop_oneof![9 => Just(0_u8), 1 => Just(1_u8)], prop_oneof![30 => Just(0_u8), 1 => Just(1_u8)])
}

pub(crate) fn prompt() -> impl Strategy<Value = Prompt> {
    let space = prop_oneof![6 => Just(0), 1 => 0..SPACES];
    (space, prop::collection::vec(block(), 0..MAX_BLOCKS))
        .prop_map(|(space, blocks)| Prompt { space, blocks })
}

fn slot() -> impl Strategy<Value = u16> {
    prop_oneof![4 => Just(0_u16), 1 => 0..SLOTS]
}

fn op() -> impl Strategy<Value = Op> {
    let from = || prop_oneof![2 => Just(0), 1 => 0..MAX_BLOCKS];
    let wild = prop::collection::vec((0..12_u8, block()), 0..4);
    prop_oneof![
        12 => (slot(), tier(), prompt(), from())
            .prop_map(|(slot, tier, prompt, from)| Op::Store { slot, tier, prompt, from }),
        2 => (slot(), tier(), prompt(), from())
            .prop_map(|(slot, tier, prompt, from)| Op::Copy { slot, tier, prompt, from }),
        9 => (slot(), tier(), prompt(), 0..MAX_BLOCKS, 0..MAX_BLOCKS).prop_map(
            |(slot, tier, prompt, from, to)| Op::Remove { slot, tier, prompt, from, to }
        ),
        3 => (slot(), tier(), 0..SPACES, prop::option::of(0..12_u8), wild).prop_map(
            |(slot, tier, space, parent, blocks)| Op::Wild { slot, tier, space, parent, blocks }
        ),
        2 => (slot(), tier(), prop::collection::vec(0..12_u8, 0..4))
            .prop_map(|(slot, tier, names)| Op::WildRemove { slot, tier, names }),
        1 => slot().prop_map(|slot| Op::Clear { slot }),
        3 => (slot(), prompt(), 0..8_u64)
            .prop_map(|(slot, prompt, wait)| Op::Place { slot, prompt, wait }),
        1 => (slot(), prop::option::of(0..8_u64), prop::option::of(0..20_u64)).prop_map(
            |(slot, capacity, ttl)| Op::Approximate { slot, capacity, ttl }
        ),
        1 => slot().prop_map(|slot| Op::Exact { slot }),
        1 => (0..8_u64).prop_map(|wait| Op::Expire { wait }),
        1 => (slot(), 0..4_usize, 1..20_usize)
            .prop_map(|(slot, blocks, tokens)| Op::Malformed { slot, blocks, tokens }),
    ]
}

pub(crate) fn ops(most: usize) -> impl Strategy<Value = Vec<Op>> {
    prop::collection::vec(op(), 0..most)
}
