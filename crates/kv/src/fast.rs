//! The fast index: chains as shared runs of hashes, workers as cuts on them, readers without locks.
//!
//! Equal to the reference in every answer; compiled for its tests only. See `runs.rs` for what a
//! run is, `shared.rs` for the readers' side and `seqlock.rs` for the protocol between the two.

mod holders;
mod names_map;
mod runs;
mod seqlock;
mod shared;
mod side;
mod words;
mod worker;

#[cfg(test)]
mod tests;

use crate::index::{Applied, Approximate, Event, IndexSettings, Overlap, Removed, Store, Stored};
use crate::names::{BlockHash, EngineHash, Slot, Tier};
use holders::Holders;
use runs::Runs;
use shared::Shared;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use worker::{Common, Worker};

/// Events whose memory is fetched together, and names of each.
const WINDOW: usize = 64;

/// The writer's index.
#[derive(Debug)]
pub(crate) struct Index {
    shared: Arc<Shared>,
    common: Common,
    workers: Vec<Option<Box<Worker>>>,
    seed: u64,
    now_ns: u64,
}

/// A reader: asks without locks while the writer goes on.
#[derive(Clone, Debug)]
pub(crate) struct Reader {
    shared: Arc<Shared>,
}

impl Reader {
    pub(crate) fn overlap(&self, chain: &[BlockHash], out: &mut Overlap) {
        self.shared.overlap(chain, out);
    }

    pub(crate) fn blocks(&self, slot: Slot) -> u64 {
        self.shared.blocks.get(u32::from(slot.0))
    }
}

impl Index {
    pub(crate) fn new(settings: IndexSettings) -> Self {
        let shared = Arc::new(Shared::new());
        let runs = Runs::new(Arc::clone(&shared));
        let common = Common { runs, holders: Holders::default(), settings };
        let seed = RandomState::new().hash_one(0);
        Self { shared, common, workers: Vec::new(), seed, now_ns: 0 }
    }

    pub(crate) fn reader(&self) -> Reader {
        Reader { shared: Arc::clone(&self.shared) }
    }

    /// Applies events in order, in windows whose memory is fetched ahead.
    pub(crate) fn apply(&mut self, events: &[Event<'_>]) -> Applied {
        let mut sum = Applied::default();
        for window in events.chunks(WINDOW) {
            for event in window {
                let (slot, names) = match event {
                    Event::Store(store) => (store.slot, store.blocks),
                    Event::Remove { slot, blocks, .. } => (*slot, *blocks),
                    Event::Clear { .. } => continue,
                };
                if let Some(Some(worker)) = self.workers.get(usize::from(slot.0)) {
                    worker.warm(&names[..names.len().min(WINDOW)]);
                }
            }
            for event in window {
                match event {
                    Event::Store(store) => sum.stored.add(self.store(store)),
                    Event::Remove { slot, tier, blocks } => {
                        sum.removed.add(self.remove(*slot, *tier, blocks));
                    }
                    Event::Clear { slot } => {
                        self.clear(*slot);
                        sum.clears += 1;
                    }
                }
            }
        }
        sum
    }

    pub(crate) fn store(&mut self, store: &Store<'_>) -> Stored {
        self.with(store.slot, |worker, all| worker.store(all, store))
    }

    pub(crate) fn remove(&mut self, slot: Slot, tier: Tier, blocks: &[EngineHash]) -> Removed {
        self.with(slot, |worker, all| worker.remove(all, tier, blocks))
    }

    pub(crate) fn clear(&mut self, slot: Slot) {
        self.with(slot, Worker::clear);
    }

    pub(crate) fn place(&mut self, slot: Slot, chain: &[BlockHash], now_ns: u64) {
        self.now_ns = self.now_ns.max(now_ns);
        let now_ns = self.now_ns;
        self.with(slot, |worker, all| worker.place(all, chain, now_ns));
    }

    pub(crate) fn set_approximate(&mut self, slot: Slot, mode: Option<Approximate>) {
        self.with(slot, |worker, all| worker.set_approximate(all, mode));
    }

    pub(crate) fn expire(&mut self, now_ns: u64) {
        self.now_ns = self.now_ns.max(now_ns);
        for slot in 0..u16::try_from(self.workers.len()).unwrap_or(u16::MAX) {
            let now_ns = self.now_ns;
            self.with(Slot(slot), |worker, all| worker.expire(all, now_ns));
        }
    }

    /// Does something with a worker and publishes what it holds then.
    fn with<T>(&mut self, slot: Slot, act: impl FnOnce(&mut Worker, &mut Common) -> T) -> T {
        let at = usize::from(slot.0);
        if self.workers.len() <= at {
            self.workers.resize_with(at + 1, || None);
        }
        let seed = self.seed;
        let worker = self.workers[at].get_or_insert_with(|| Box::new(Worker::new(slot, seed)));
        let done = act(worker, &mut self.common);
        self.shared.publish_blocks(slot, worker.blocks());
        self.shared.slots.fetch_max(at as u64 + 1, Ordering::Release);
        done
    }
}
