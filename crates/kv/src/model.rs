//! For tests: an index so literal that it needs no proof, and random events to compare others.
//!
//! A worker is the list of all copies it holds, each with the hash of its whole prefix; a query
//! looks for every prefix of the prompt in that list. No maps, no counters.

use crate::index::{Approximate, Depth, IndexSettings, Overlap, Removed, Store, Stored};
use crate::names::{BlockHash, EngineHash, Slot, Tier};
use proptest::prelude::*;

mod ops;
mod pair;

pub(crate) use ops::ops;
pub(crate) use pair::Pair;

/// How many slots take part; the one after them never holds anything.
const SLOTS: u16 = 3;

/// What the model and every index under test can do.
pub(crate) trait Subject {
    fn store(&mut self, store: &Store<'_>) -> Stored;
    fn remove(&mut self, slot: Slot, tier: Tier, blocks: &[EngineHash]) -> Removed;
    fn clear(&mut self, slot: Slot);
    fn place(&mut self, slot: Slot, chain: &[BlockHash], now_ns: u64);
    fn set_approximate(&mut self, slot: Slot, mode: Option<Approximate>);
    fn expire(&mut self, now_ns: u64);
    fn overlap(&self, chain: &[BlockHash], out: &mut Overlap);
    fn blocks(&self, slot: Slot) -> u64;
    /// Panics if the subject's own invariants do not hold.
    fn check(&self) {}
}

pub(crate) fn settings() -> IndexSettings {
    IndexSettings { blocks_per_slot: 40, placed_per_slot: 12, prediction_ttl_ns: 10, seed: 3 }
}

/// One copy of a block on a worker. The chain hash stands for the prefix: within the few prompts
/// of a test it is taken to be unique, which `hash.rs` has its own tests for.
#[derive(Clone, Copy, Debug)]
struct Copy {
    name: EngineHash,
    block: BlockHash,
    tier: Tier,
}

#[derive(Debug, Default)]
struct ModelWorker {
    copies: Vec<Copy>,
    /// Least recently placed first.
    placed: Vec<(BlockHash, u64)>,
    approximate: Option<Approximate>,
}

/// The model.
pub(crate) struct Model {
    settings: IndexSettings,
    workers: Vec<ModelWorker>,
    now: u64,
}

impl Model {
    pub(crate) fn new(settings: IndexSettings) -> Self {
        let workers = (0..=SLOTS).map(|_| ModelWorker::default()).collect();
        Self { settings, workers, now: 0 }
    }

    fn worker(&mut self, slot: Slot) -> &mut ModelWorker {
        &mut self.workers[usize::from(slot.0)]
    }
}

impl ModelWorker {
    fn meaning(&self, name: EngineHash) -> Option<BlockHash> {
        self.copies.iter().find(|copy| copy.name == name).map(|copy| copy.block)
    }

    fn names(&self) -> usize {
        let mut names: Vec<_> = self.copies.iter().map(|copy| copy.name).collect();
        names.sort_unstable();
        names.dedup();
        names.len()
    }

    fn add(&mut self, copy: Copy) -> bool {
        let before = self.copies.len();
        self.copies.retain(|old| old.name != copy.name || old.block == copy.block);
        let renamed = self.copies.len() != before;
        self.copies.push(copy);
        if self.approximate.is_none() {
            self.placed.retain(|(placed, _)| *placed != copy.block);
        }
        renamed
    }

    fn holds(&self, block: BlockHash, tier: Tier) -> bool {
        self.copies.iter().any(|copy| copy.block == block && copy.tier <= tier)
            || self.placed.iter().any(|(placed, _)| *placed == block)
    }

    fn expire(&mut self, now: u64, settings: &IndexSettings) {
        let ttl = match self.approximate {
            Some(mode) => mode.ttl_ns,
            None => Some(settings.prediction_ttl_ns),
        };
        self.placed.retain(|(_, at)| ttl.is_none_or(|ttl| now - at < ttl));
    }
}

impl Subject for Model {
    fn store(&mut self, store: &Store<'_>) -> Stored {
        let bound = usize::try_from(self.settings.blocks_per_slot).unwrap();
        let worker = self.worker(store.slot);
        let mut outcome = Stored::default();
        if store.tokens.is_empty() {
            for name in store.blocks {
                match worker.meaning(*name) {
                    Some(block) => {
                        worker.add(Copy { name: *name, block, tier: store.tier });
                        outcome.blocks += 1;
                    }
                    None => outcome.orphaned += 1,
                }
            }
            return outcome;
        }
        let mut last = match store.parent {
            None => store.space.root(),
            Some(parent) => match worker.meaning(parent) {
                Some(block) => block,
                None => return Stored { orphaned: store.blocks.len() as u64, ..outcome },
            },
        };
        let size = store.space.block_size() as usize;
        for (i, name) in store.blocks.iter().enumerate() {
            let extra = store.extra.get(i).copied().unwrap_or_default();
            last = store.space.extend(last, &store.tokens[i * size..][..size], extra);
            if worker.meaning(*name).is_none() && worker.names() >= bound {
                outcome.refused += 1;
                continue;
            }
            let renamed = worker.add(Copy { name: *name, block: last, tier: store.tier });
            outcome.blocks += 1;
            outcome.renamed += u64::from(renamed);
        }
        outcome
    }

    fn remove(&mut self, slot: Slot, tier: Tier, blocks: &[EngineHash]) -> Removed {
        let worker = self.worker(slot);
        let mut outcome = Removed::default();
        for name in blocks {
            let at = worker.copies.iter().position(|copy| copy.name == *name && copy.tier == tier);
            match at {
                Some(at) => {
                    worker.copies.remove(at);
                    outcome.blocks += 1;
                }
                None => outcome.unknown += 1,
            }
        }
        outcome
    }

    fn clear(&mut self, slot: Slot) {
        let worker = self.worker(slot);
        worker.copies.clear();
        worker.placed.clear();
    }

    fn place(&mut self, slot: Slot, chain: &[BlockHash], now_ns: u64) {
        self.now = self.now.max(now_ns);
        let (settings, now) = (self.settings, self.now);
        let worker = self.worker(slot);
        worker.expire(now, &settings);
        let capacity = worker.approximate.and_then(|mode| mode.capacity_blocks);
        let bound = capacity.unwrap_or(u64::MAX).min(settings.placed_per_slot);
        let bound = usize::try_from(bound).unwrap();
        for block in chain.iter().take(bound).rev() {
            if worker.approximate.is_none()
                && worker.copies.iter().any(|c| c.block == *block && c.tier == Tier::Device)
            {
                continue;
            }
            worker.placed.retain(|(placed, _)| placed != block);
            worker.placed.push((*block, now));
        }
        let excess = worker.placed.len().saturating_sub(bound);
        worker.placed.drain(..excess);
    }

    fn set_approximate(&mut self, slot: Slot, mode: Option<Approximate>) {
        let worker = self.worker(slot);
        if worker.approximate != mode {
            worker.approximate = mode;
            worker.placed.clear();
        }
    }

    fn expire(&mut self, now_ns: u64) {
        self.now = self.now.max(now_ns);
        let (settings, now) = (self.settings, self.now);
        for worker in &mut self.workers {
            worker.expire(now, &settings);
        }
    }

    fn overlap(&self, chain: &[BlockHash], out: &mut Overlap) {
        let depths = out.reset(self.workers.len());
        for (worker, depth) in self.workers.iter().zip(depths) {
            let reach = |tier| {
                let held = |n: &usize| chain[..*n].iter().all(|b| worker.holds(*b, tier));
                u32::try_from((0..=chain.len()).rev().find(held).unwrap_or(0)).unwrap()
            };
            let (device, host, disk) = (reach(Tier::Device), reach(Tier::Host), reach(Tier::Disk));
            *depth = Depth { device, host: host - device, disk: disk - host };
        }
    }

    fn blocks(&self, slot: Slot) -> u64 {
        let worker = &self.workers[usize::from(slot.0)];
        let copies = worker.copies.iter().map(|copy| copy.block);
        let mut all: Vec<_> = copies.chain(worker.placed.iter().map(|(b, _)| *b)).collect();
        all.sort_unstable();
        all.dedup();
        all.len() as u64
    }
}

/// The cases of an everyday run of the histories that cost least.
const EVERY_DAY: u32 = 200;

/// Cases: few under miri, or this many, or as many times more as `PROPTEST_CASES` asks of the
/// histories that cost least.
pub(crate) fn cases(most: u32) -> ProptestConfig {
    let default = ProptestConfig { failure_persistence: None, ..ProptestConfig::default() };
    match default.cases {
        _ if cfg!(miri) => ProptestConfig { cases: 4, ..default },
        256 => ProptestConfig { cases: most, ..default },
        asked => ProptestConfig { cases: (most * (asked / EVERY_DAY)).max(1), ..default },
    }
}
