//! Bytes become changes of an index. Every byte string is a script; `seeds.py` writes some.
//!
//! A change is a byte of what, slot and tier, and then its own bytes; where the input ends, zeros
//! follow.

use pointsman_kv::{
    Approximate, BlockExtra, BlockHash, EngineHash, Event, Hasher, Slot, Space, SpaceKey, Store,
    Tier,
};

/// Slots that take part; the one after them never holds anything.
pub(crate) const SLOTS: u16 = 3;
/// Most blocks in one change; batches of them pass what an index does in one go.
const MOST_BLOCKS: u8 = 12;
/// Contents from here on have an extra key.
const WITH_EXTRA: u8 = 240;

/// One step.
#[derive(Debug)]
pub(crate) enum Op {
    Change(Change),
    /// Ends a batch of changes, as every other step does too.
    Flush,
    Place {
        slot: Slot,
        chain: Vec<BlockHash>,
        wait: u64,
    },
    Approximate {
        slot: Slot,
        mode: Option<Approximate>,
    },
    Expire {
        wait: u64,
    },
}

/// An event and what it borrows.
#[derive(Debug)]
pub(crate) enum Change {
    Store {
        slot: Slot,
        tier: Tier,
        space: Space,
        parent: Option<EngineHash>,
        names: Vec<EngineHash>,
        tokens: Vec<u32>,
        extra: Vec<BlockExtra>,
    },
    Remove {
        slot: Slot,
        tier: Tier,
        names: Vec<EngineHash>,
    },
    Clear {
        slot: Slot,
    },
}

impl Change {
    pub(crate) fn event(&self) -> Event<'_> {
        match self {
            Change::Store { slot, tier, space, parent, names, tokens, extra } => {
                Event::Store(Store {
                    slot: *slot,
                    tier: *tier,
                    space: *space,
                    parent: *parent,
                    blocks: names,
                    tokens,
                    extra,
                })
            }
            Change::Remove { slot, tier, names } => {
                Event::Remove { slot: *slot, tier: *tier, blocks: names }
            }
            Change::Clear { slot } => Event::Clear { slot: *slot },
        }
    }
}

/// Reads a script to its end.
pub(crate) struct Script<'a> {
    rest: &'a [u8],
    hasher: Hasher,
}

impl<'a> Script<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Script<'a> {
        Script { rest: bytes, hasher: Hasher::new(7) }
    }

    fn byte(&mut self) -> u8 {
        let (first, rest) = self.rest.split_first().unwrap_or((&0, &[]));
        self.rest = rest;
        *first
    }

    fn bytes(&mut self) -> Vec<u8> {
        let count = self.byte() % (MOST_BLOCKS + 1);
        (0..count).map(|_| self.byte()).collect()
    }

    fn names(&mut self) -> Vec<EngineHash> {
        self.bytes().into_iter().map(name).collect()
    }

    /// Blocks of one token or of two.
    fn space(&self, which: u8) -> Space {
        self.hasher.space(&SpaceKey::plain(u32::from(which % 2) + 1))
    }

    /// Flags, a parent's name, how many, and a name and a content for each block.
    fn store(&mut self, slot: Slot, tier: Tier) -> Change {
        let flags = self.byte();
        let (has_parent, is_short) = (flags & 2 != 0, flags & 4 != 0);
        let parent = name(self.byte());
        let space = self.space(flags);
        let count = self.byte() % (MOST_BLOCKS + 1);
        let blocks: Vec<(u8, u8)> = (0..count).map(|_| (self.byte(), self.byte())).collect();
        let size = space.block_size() as usize;
        let mut tokens: Vec<u32> =
            blocks.iter().flat_map(|(_, content)| vec![u32::from(*content); size]).collect();
        if is_short {
            tokens.pop();
        }
        let has_extra = blocks.iter().any(|(_, content)| *content >= WITH_EXTRA);
        let key = |content: u8| match content {
            WITH_EXTRA.. => self.hasher.extra().multimodal("image", i64::from(content)).build(),
            _ => BlockExtra::NONE,
        };
        let extra = if has_extra { blocks.iter().map(|b| key(b.1)).collect() } else { Vec::new() };
        let names = blocks.iter().map(|b| name(b.0)).collect();
        let parent = has_parent.then_some(parent);
        Change::Store { slot, tier, space, parent, names, tokens, extra }
    }

    /// The chain of a literal prompt: which space, how many blocks, their contents.
    fn chain(&mut self) -> Vec<BlockHash> {
        let which = self.byte();
        let space = self.space(which);
        let size = space.block_size() as usize;
        let contents = self.bytes();
        let tokens: Vec<u32> = contents.iter().flat_map(|c| vec![u32::from(*c); size]).collect();
        let mut chain = Vec::new();
        space.chain(&tokens, &mut chain);
        chain
    }

    /// Zero is none.
    fn limit(&mut self) -> Option<u64> {
        match self.byte() % 16 {
            0 => None,
            limit => Some(u64::from(limit)),
        }
    }
}

/// A worker's name of a block.
fn name(byte: u8) -> EngineHash {
    // Spread over the whole word, as real ones are.
    EngineHash(u64::from(byte).wrapping_mul(0x9e37_79b9_7f4a_7c15))
}

impl Iterator for Script<'_> {
    type Item = Op;

    fn next(&mut self) -> Option<Op> {
        if self.rest.is_empty() {
            return None;
        }
        let head = self.byte();
        let slot = Slot(u16::from(head >> 4) % SLOTS);
        let tier = Tier::ALL[usize::from(head >> 6) % Tier::COUNT];
        Some(match head & 15 {
            0..=5 => Op::Change(self.store(slot, tier)),
            6..=9 => Op::Change(Change::Remove { slot, tier, names: self.names() }),
            10 => Op::Change(Change::Clear { slot }),
            11 => {
                // Another copy by name alone.
                let (space, names) = (self.space(0), self.names());
                let (parent, tokens, extra) = (None, Vec::new(), Vec::new());
                Op::Change(Change::Store { slot, tier, space, parent, names, tokens, extra })
            }
            12 => Op::Place { slot, wait: u64::from(self.byte() % 8), chain: self.chain() },
            13 if self.byte() % 2 == 0 => Op::Approximate { slot, mode: None },
            13 => {
                let mode = Approximate { capacity_blocks: self.limit(), ttl_ns: self.limit() };
                Op::Approximate { slot, mode: Some(mode) }
            }
            14 => Op::Expire { wait: u64::from(self.byte() % 8) },
            _ => Op::Flush,
        })
    }
}
