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
pub(crate) struct Index {
    settings: IndexSettings,
    workers: BTreeMap<Slot, Worker>,
    now_ns: u64,
}

impl Index {
    pub(crate) fn new(settings: IndexSettings) -> Self {
        Self { settings, workers: BTreeMap::new(), now_ns: 0 }
    }

    pub(crate) fn store(&mut self, store: &Store<'_>) -> Stored {
        let bound = self.settings.blocks_per_slot;
        self.worker(store.slot).store(store, bound)
    }

    pub(crate) fn remove(&mut self, slot: Slot, tier: Tier, blocks: &[EngineHash]) -> Removed {
        self.worker(slot).remove(tier, blocks)
    }

    pub(crate) fn clear(&mut self, slot: Slot) {
        if let Some(worker) = self.workers.get_mut(&slot) {
            worker.clear();
        }
    }

    pub(crate) fn place(&mut self, slot: Slot, chain: &[BlockHash], now_ns: u64) {
        self.now_ns = self.now_ns.max(now_ns);
        let (settings, now_ns) = (self.settings, self.now_ns);
        self.worker(slot).place(chain, now_ns, &settings);
    }

    pub(crate) fn set_approximate(&mut self, slot: Slot, mode: Option<Approximate>) {
        self.worker(slot).set_approximate(mode);
    }

    pub(crate) fn expire(&mut self, now_ns: u64) {
        self.now_ns = self.now_ns.max(now_ns);
        for worker in self.workers.values_mut() {
            worker.expire(self.now_ns, &self.settings);
        }
    }

    pub(crate) fn overlap(&self, chain: &[BlockHash], out: &mut Overlap) {
        let slots = self.workers.last_key_value().map_or(0, |(slot, _)| usize::from(slot.0) + 1);
        let depths = out.reset(slots);
        for (slot, worker) in &self.workers {
            depths[usize::from(slot.0)] = worker.depth(chain);
        }
    }

    pub(crate) fn blocks(&self, slot: Slot) -> u64 {
        self.workers.get(&slot).map_or(0, Worker::blocks)
    }

    pub(crate) fn stats(&self) -> Stats {
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
