//! The index: chains as shared runs of hashes, workers as cuts on them, readers without locks.
//!
//! Equal to the reference in every answer. `runs.rs` says what a run is, `shared.rs` what readers
//! see of it, `seqlock.rs` is the protocol between the two, `holdings.rs` what a worker holds and
//! `names_map.rs` what it calls its blocks. No unsafe code.

mod ahead;
mod holdings;
mod memory;
mod names_map;
mod runs;
mod seqlock;
mod shared;
mod side;
mod snapshot;
mod sync;
mod table;
mod worker;

#[cfg(test)]
mod tests;

use crate::index::{
    Applied, Approximate, Event, IndexSettings, Overlap, Removed, Restored, SnapshotError, Stats,
    Store, Stored,
};
use crate::names::{BlockHash, EngineHash, Slot, Tier};
use ahead::Ahead;
use runs::Runs;
use shared::Shared;
use std::sync::Arc;
use worker::{Common, Worker};

/// The writer's index.
#[derive(Debug)]
pub(crate) struct Index {
    shared: Arc<Shared>,
    common: Common,
    workers: Vec<Option<Box<Worker>>>,
    ahead: Ahead,
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
        self.shared.held(slot)
    }
}

impl Index {
    pub(crate) fn new(settings: IndexSettings) -> Self {
        let shared = Arc::new(Shared::new());
        let common = Common::new(Runs::new(Arc::clone(&shared)), settings);
        Self { shared, common, workers: Vec::new(), ahead: Ahead::default(), now_ns: 0 }
    }

    pub(crate) fn reader(&self) -> Reader {
        Reader { shared: Arc::clone(&self.shared) }
    }

    /// Applies events in order, in windows whose memory is fetched ahead.
    pub(crate) fn apply(&mut self, events: &[Event<'_>]) -> Applied {
        let mut sum = Applied::default();
        let mut rest = events;
        while !rest.is_empty() {
            let (window, after) = rest.split_at(ahead::window(rest));
            rest = after;
            self.ahead.fetch(window, &self.workers, &self.common);
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
        if self.worker(slot).is_some() {
            self.with(slot, Worker::clear);
        }
    }

    pub(crate) fn expect(&mut self, slot: Slot, blocks: u64) {
        let bound = self.common.settings.blocks_per_slot;
        self.with(slot, |worker, _| worker.expect(blocks.min(bound)));
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
        let now_ns = self.now_ns;
        for worker in self.workers.iter_mut().flatten() {
            worker.expire(&mut self.common, now_ns);
            self.shared.publish_held(worker.slot(), worker.blocks());
        }
    }

    pub(crate) fn snapshot(&self, slot: Slot, out: &mut Vec<u8>) {
        match self.worker(slot) {
            Some(worker) => worker.snapshot(&self.common, out),
            None => Worker::new(slot).snapshot(&self.common, out),
        }
    }

    pub(crate) fn restore(&mut self, slot: Slot, bytes: &[u8]) -> Result<Restored, SnapshotError> {
        let now_ns = self.now_ns;
        self.with(slot, |worker, all| worker.restore(all, bytes, now_ns))?;
        Ok(Restored { blocks: self.shared.held(slot) })
    }

    pub(crate) fn stats(&self) -> Stats {
        Stats { slots: self.workers.iter().flatten().map(|worker| worker.stats()).collect() }
    }

    fn worker(&self, slot: Slot) -> Option<&Worker> {
        self.workers.get(usize::from(slot.0))?.as_deref()
    }

    /// Does something with a worker and publishes what it holds then.
    fn with<T>(&mut self, slot: Slot, act: impl FnOnce(&mut Worker, &mut Common) -> T) -> T {
        let at = usize::from(slot.0);
        if self.workers.len() <= at {
            self.workers.resize_with(at + 1, || None);
        }
        let worker = self.workers[at].get_or_insert_with(|| Box::new(Worker::new(slot)));
        self.shared.know(slot);
        let done = act(worker, &mut self.common);
        self.shared.publish_held(slot, worker.blocks());
        done
    }
}
