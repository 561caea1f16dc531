//! The prefix index as its users see it: one [`Writer`], any number of [`Reader`]s.
//!
//! Invariant: no answer ever exceeds the longest contiguous prefix that the applied events say a
//! worker holds; while the writer is at work a reader may see less. Readers take no lock and write
//! nothing. The body is in `fast.rs`; nothing here knows how it stores blocks.

use crate::fast;
use crate::hash::{BlockExtra, Space};
use crate::names::{BlockHash, EngineHash, Slot, Tier};
use std::error::Error;
use std::fmt;
use std::hash::{BuildHasher, RandomState};

/// A worker stored blocks.
#[derive(Clone, Copy, Debug)]
pub struct Store<'a> {
    /// Who stored them.
    pub slot: Slot,
    /// Where they lie.
    pub tier: Tier,
    /// The blocks' space; after a known `parent` only its block size and seed matter.
    pub space: Space,
    /// The worker's name of the block before the first; `None` starts a sequence.
    pub parent: Option<EngineHash>,
    /// The worker's names of the blocks, in order.
    pub blocks: &'a [EngineHash],
    /// The tokens of all blocks. Empty: the blocks are known to the worker by name already and
    /// have one more copy in `tier` (vLLM's offloading connector announces so).
    pub tokens: &'a [u32],
    /// One per block, or empty if no block has any.
    pub extra: &'a [BlockExtra],
}

/// A change of what a worker holds.
#[derive(Clone, Copy, Debug)]
pub enum Event<'a> {
    /// Blocks were stored.
    Store(Store<'a>),
    /// One copy of each block was removed.
    Remove {
        /// By whom.
        slot: Slot,
        /// From where.
        tier: Tier,
        /// The worker's names of them.
        blocks: &'a [EngineHash],
    },
    /// The worker holds nothing any more.
    Clear {
        /// Which worker.
        slot: Slot,
    },
}

/// What became of the blocks of a [`Store`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stored {
    /// Counted as held, once per copy.
    pub blocks: u64,
    /// Dropped: the parent (or, without tokens, the block) is unknown, so the prefix cannot be.
    pub orphaned: u64,
    /// Dropped: tokens or extras do not fit the blocks.
    pub malformed: u64,
    /// Of `blocks`, those whose name meant another prefix before; that prefix was forgotten.
    pub renamed: u64,
    /// Dropped: the worker's bound was reached ([`IndexSettings::blocks_per_slot`]).
    pub refused: u64,
}

/// What became of the blocks of a removal.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Removed {
    /// Copies given up.
    pub blocks: u64,
    /// Names that the worker does not hold in that tier.
    pub unknown: u64,
}

/// The sum of a batch of events.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Applied {
    /// Of all stores.
    pub stored: Stored,
    /// Of all removals.
    pub removed: Removed,
    /// How many clears.
    pub clears: u64,
}

/// How the router's own placements stand in for a worker's events.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Approximate {
    /// The worker's KV blocks: beyond it the least recently placed go. `None`: the index's own
    /// bound ([`IndexSettings::placed_per_slot`]).
    pub capacity_blocks: Option<u64>,
    /// How long a placement counts; `None`: until the capacity is reached.
    pub ttl_ns: Option<u64>,
}

/// Bounds of an index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IndexSettings {
    /// Block names per worker rank; stores beyond it are refused and counted.
    pub blocks_per_slot: u64,
    /// Placed or predicted blocks per worker rank; the least recently placed go first.
    pub placed_per_slot: u64,
    /// How long a placement on a worker with events counts unless an event confirms it.
    pub prediction_ttl_ns: u64,
    /// Seed under which workers' block names are known. Random unless given, so that nobody can
    /// choose names that collide; a restored index takes over that of the snapshot.
    pub seed: u64,
}

impl Default for IndexSettings {
    fn default() -> Self {
        Self {
            blocks_per_slot: 1 << 23,
            placed_per_slot: 1 << 20,
            prediction_ttl_ns: 5_000_000_000,
            seed: RandomState::new().hash_one(0),
        }
    }
}

/// Blocks of a chain that one worker holds contiguously from the start.
///
/// Each tier counts what it adds to the faster ones: `device` blocks are on the device, the next
/// `host` blocks are on device or host, the next `disk` blocks are in any tier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Depth {
    /// The prefix on the device.
    pub device: u32,
    /// Further blocks with the host tier.
    pub host: u32,
    /// Further blocks with the disk tier.
    pub disk: u32,
}

impl Depth {
    /// Blocks in any tier.
    #[must_use]
    pub fn total(&self) -> u32 {
        self.device.saturating_add(self.host).saturating_add(self.disk)
    }
}

/// The answer to one query, reused from query to query without allocating.
#[derive(Clone, Debug, Default)]
pub struct Overlap {
    depths: Vec<Depth>,
    /// Room that an index may use while it answers.
    scratch: Vec<u64>,
}

impl Overlap {
    /// An empty answer.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// What `slot` holds; a slot that the index does not know holds nothing.
    #[must_use]
    pub fn get(&self, slot: Slot) -> Depth {
        self.depths.get(usize::from(slot.0)).copied().unwrap_or_default()
    }

    /// Depths by slot number; slots beyond the end hold nothing.
    #[must_use]
    pub fn depths(&self) -> &[Depth] {
        &self.depths
    }

    /// Like [`Overlap::reset`], with the room beside it.
    pub(crate) fn reset_with_scratch(&mut self, slots: usize) -> (&mut [Depth], &mut Vec<u64>) {
        self.reset(slots);
        (&mut self.depths, &mut self.scratch)
    }

    /// Forgets the answer and makes room for `slots` workers.
    pub(crate) fn reset(&mut self, slots: usize) -> &mut [Depth] {
        self.depths.clear();
        self.depths.resize(slots, Depth::default());
        &mut self.depths
    }
}

/// What the index holds and has counted for one worker rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotStats {
    /// Which.
    pub slot: Slot,
    /// Distinct blocks held in any tier, placed and predicted ones included.
    pub blocks: u64,
    /// Distinct blocks per tier, by events alone.
    pub tiers: [u64; Tier::COUNT],
    /// The worker's block names.
    pub names: u64,
    /// Placed or predicted blocks.
    pub placed: u64,
    /// Of all stores so far.
    pub stored: Stored,
    /// Of all removals so far.
    pub removed: Removed,
    /// Clears so far.
    pub clears: u64,
    /// Predictions that an event confirmed.
    pub confirmed: u64,
    /// Placements that ran out of time.
    pub expired: u64,
    /// Placements that made room for others.
    pub evicted: u64,
}

/// What the index holds and has counted, per worker rank that ever had anything.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// By ascending slot number.
    pub slots: Vec<SlotStats>,
}

/// What a snapshot brought.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Restored {
    /// Distinct blocks that the worker holds by it.
    pub blocks: u64,
}

/// Why a snapshot of a worker cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SnapshotError {
    /// It has another format version than this index reads.
    Version(u8),
    /// It ends before it is complete.
    Cut,
    /// It contradicts itself, or holds more than the index's bounds allow.
    Malformed,
    /// The index has no memory left for it.
    Full,
}

impl fmt::Display for SnapshotError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Version(version) => write!(f, "format version {version} is not known here"),
            Self::Cut => write!(f, "it ends before it is complete"),
            Self::Malformed => write!(f, "it contradicts itself or exceeds the index's bounds"),
            Self::Full => write!(f, "the index has no memory left for it"),
        }
    }
}

impl Error for SnapshotError {}

/// An empty index with the default bounds.
#[must_use]
pub fn index() -> (Writer, Reader) {
    index_with(IndexSettings::default())
}

/// An empty index with these bounds.
#[must_use]
pub fn index_with(settings: IndexSettings) -> (Writer, Reader) {
    let index = fast::Index::new(settings);
    let reader = Reader { index: index.reader() };
    (Writer { index }, reader)
}

/// The one who changes the index.
#[derive(Debug)]
pub struct Writer {
    index: fast::Index,
}

impl Writer {
    /// Applies events in order; their cache misses overlap, so many at once cost less.
    pub fn apply(&mut self, events: &[Event<'_>]) -> Applied {
        self.index.apply(events)
    }

    /// A worker stored blocks.
    pub fn store(&mut self, store: &Store<'_>) -> Stored {
        self.index.store(store)
    }

    /// A worker gave up one copy of each of these blocks.
    pub fn remove(&mut self, slot: Slot, tier: Tier, blocks: &[EngineHash]) -> Removed {
        self.index.remove(slot, tier, blocks)
    }

    /// A worker holds nothing (any more): cache cleared, restarted, removed, or stale.
    pub fn clear(&mut self, slot: Slot) {
        self.index.clear(slot);
    }

    /// A worker has room for this many blocks. Only a hint: with it the memory for the worker's
    /// names is had at once and never copied.
    pub fn expect(&mut self, slot: Slot, blocks: u64) {
        self.index.expect(slot, blocks);
    }

    /// The router placed a prompt with this chain on a worker.
    ///
    /// In approximate mode the blocks count until capacity or TTL drops them. Otherwise they are
    /// a prediction that ends after [`IndexSettings::prediction_ttl_ns`] or, block by block, when
    /// an event confirms it. Time that goes backwards counts as standing still.
    pub fn place(&mut self, slot: Slot, chain: &[BlockHash], now_ns: u64) {
        self.index.place(slot, chain, now_ns);
    }

    /// Switches a worker's approximate mode on (`Some`) or off; what was placed is forgotten.
    pub fn set_approximate(&mut self, slot: Slot, mode: Option<Approximate>) {
        self.index.set_approximate(slot, mode);
    }

    /// Drops every placement whose time is over.
    pub fn expire(&mut self, now_ns: u64) {
        self.index.expire(now_ns);
    }

    /// Appends a worker's state, as bytes that [`Writer::restore`] takes.
    ///
    /// They mean something only to an index with the same [`IndexSettings::seed`] that is asked
    /// under the same [`crate::Hasher`] seed.
    pub fn snapshot(&self, slot: Slot, out: &mut Vec<u8>) {
        self.index.snapshot(slot, out);
    }

    /// Replaces what a worker holds by a snapshot. Placements count as made just now.
    ///
    /// # Errors
    ///
    /// If the bytes are no snapshot that fits: the worker then holds nothing.
    pub fn restore(&mut self, slot: Slot, bytes: &[u8]) -> Result<Restored, SnapshotError> {
        self.index.restore(slot, bytes)
    }

    /// Counters and sizes per worker.
    #[must_use]
    pub fn stats(&self) -> Stats {
        self.index.stats()
    }

    /// Another reader.
    #[must_use]
    pub fn reader(&self) -> Reader {
        Reader { index: self.index.reader() }
    }
}

/// One who asks the index. Cheap to clone; any number, on any thread, without locks.
#[derive(Clone, Debug)]
pub struct Reader {
    index: fast::Reader,
}

impl Reader {
    /// How deep each worker holds `chain`, for all workers in one walk.
    pub fn overlap(&self, chain: &[BlockHash], out: &mut Overlap) {
        self.index.overlap(chain, out);
    }

    /// Distinct blocks that a worker holds in any tier, placed and predicted ones included.
    #[must_use]
    pub fn blocks(&self, slot: Slot) -> u64 {
        self.index.blocks(slot)
    }
}

impl Stored {
    pub(crate) fn add(&mut self, more: Self) {
        self.blocks += more.blocks;
        self.orphaned += more.orphaned;
        self.malformed += more.malformed;
        self.renamed += more.renamed;
        self.refused += more.refused;
    }
}

impl Removed {
    pub(crate) fn add(&mut self, more: Self) {
        self.blocks += more.blocks;
        self.unknown += more.unknown;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hash::{Hasher, SpaceKey};

    #[test]
    fn a_batch_is_applied_in_order_and_summed_up() {
        let (mut writer, reader) = index();
        let space = Hasher::new(1).space(&SpaceKey::plain(1));
        let names = [EngineHash(1), EngineHash(2)];
        let (slot, tier) = (Slot(0), Tier::Device);
        let store =
            Store { slot, tier, space, parent: None, blocks: &names, tokens: &[8, 9], extra: &[] };
        let sum = writer.apply(&[
            Event::Store(store),
            Event::Remove { slot, tier, blocks: &names[..1] },
            Event::Clear { slot },
            Event::Remove { slot, tier, blocks: &names },
            Event::Store(store),
            Event::Remove { slot, tier, blocks: &names[1..] },
        ]);
        assert_eq!(sum.stored, Stored { blocks: 4, ..Stored::default() });
        assert_eq!(sum.removed, Removed { blocks: 2, unknown: 2 });
        assert_eq!(sum.clears, 1);
        let (mut chain, mut out) = (Vec::new(), Overlap::new());
        space.chain(&[8, 9], &mut chain);
        reader.overlap(&chain, &mut out);
        assert_eq!(out.get(slot).device, 1);
        assert_eq!(writer.stats().slots[0].stored.blocks, 4);
    }

    #[test]
    fn readers_work_on_other_threads_while_the_writer_goes_on() {
        let (mut writer, reader) = index();
        let space = Hasher::new(1).space(&SpaceKey::plain(1));
        let mut chain = Vec::new();
        space.chain(&[1, 2, 3], &mut chain);
        std::thread::scope(|scope| {
            for reader in [reader.clone(), writer.reader()] {
                let chain = &chain;
                scope.spawn(move || {
                    let mut out = Overlap::new();
                    for _ in 0..200 {
                        reader.overlap(chain, &mut out);
                        assert!(out.get(Slot(0)).total() <= 3);
                    }
                });
            }
            for now in 0..200 {
                writer.place(Slot(0), &chain, now);
                writer.clear(Slot(0));
            }
        });
    }
}
