//! The literal exact index: what every worker holds, block by block, in plain maps.
//!
//! Invariant: a worker holds a block in a tier while the copies stored there outnumber the copies
//! removed, or while a placement counts. Slow and simple on purpose: the index is tested against
//! it, nothing else uses it. Memory: two hash-map entries per (worker, block), 66 to 132 bytes.

use crate::index::{Approximate, IndexSettings, Overlap, Removed, Stats, Store, Stored};
use crate::names::{BlockHash, EngineHash, Slot, Tier};
use std::collections::{BTreeMap, HashMap};

mod worker;

use worker::Worker;

/// All workers of a group.
#[derive(Debug)]
pub struct Index {
    settings: IndexSettings,
    workers: BTreeMap<Slot, Worker>,
    now_ns: u64,
}

impl Index {
    /// An empty index.
    #[must_use]
    pub fn new(settings: IndexSettings) -> Self {
        Self { settings, workers: BTreeMap::new(), now_ns: 0 }
    }

    /// See [`crate::Writer::store`].
    pub fn store(&mut self, store: &Store<'_>) -> Stored {
        let bound = self.settings.blocks_per_slot;
        self.worker(store.slot).store(store, bound)
    }

    /// See [`crate::Writer::remove`].
    pub fn remove(&mut self, slot: Slot, tier: Tier, blocks: &[EngineHash]) -> Removed {
        self.worker(slot).remove(tier, blocks)
    }

    /// See [`crate::Writer::clear`].
    pub fn clear(&mut self, slot: Slot) {
        if let Some(worker) = self.workers.get_mut(&slot) {
            worker.clear();
        }
    }

    /// See [`crate::Writer::place`].
    pub fn place(&mut self, slot: Slot, chain: &[BlockHash], now_ns: u64) {
        self.now_ns = self.now_ns.max(now_ns);
        let (settings, now_ns) = (self.settings, self.now_ns);
        self.worker(slot).place(chain, now_ns, &settings);
    }

    /// See [`crate::Writer::set_approximate`].
    pub fn set_approximate(&mut self, slot: Slot, mode: Option<Approximate>) {
        self.worker(slot).set_approximate(mode);
    }

    /// See [`crate::Writer::expire`].
    pub fn expire(&mut self, now_ns: u64) {
        self.now_ns = self.now_ns.max(now_ns);
        for worker in self.workers.values_mut() {
            worker.expire(self.now_ns, &self.settings);
        }
    }

    /// See [`crate::Reader::overlap`].
    pub fn overlap(&self, chain: &[BlockHash], out: &mut Overlap) {
        let slots = self.workers.last_key_value().map_or(0, |(slot, _)| usize::from(slot.0) + 1);
        let depths = out.reset(slots);
        for (slot, worker) in &self.workers {
            depths[usize::from(slot.0)] = worker.depth(chain);
        }
    }

    /// See [`crate::Reader::blocks`].
    #[must_use]
    pub fn blocks(&self, slot: Slot) -> u64 {
        self.workers.get(&slot).map_or(0, Worker::blocks)
    }

    /// See [`crate::Writer::stats`].
    #[must_use]
    pub fn stats(&self) -> Stats {
        let slots = self.workers.iter().map(|(slot, worker)| worker.stats(*slot)).collect();
        Stats { slots }
    }

    fn worker(&mut self, slot: Slot) -> &mut Worker {
        self.workers.entry(slot).or_default()
    }
}

/// Copies of something per tier.
type Copies = [u32; Tier::COUNT];

/// A name's meaning and its copies.
#[derive(Clone, Copy, Debug)]
struct Named {
    block: BlockHash,
    copies: Copies,
}

type Names = HashMap<EngineHash, Named>;

#[cfg(test)]
mod tests;
