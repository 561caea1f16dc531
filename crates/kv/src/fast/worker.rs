//! One worker's names and placements, as places in the runs.

use super::holders::Holders;
use super::names_map::{Copies, Named, NamesMap};
use super::runs::{Place, Runs, Walk};
use crate::hash::BlockExtra;
use crate::index::{Approximate, IndexSettings, Removed, Store, Stored};
use crate::names::{BlockHash, EngineHash, Slot, Tier};
use crate::reference::Placed;
use std::collections::HashMap;

/// What the workers share.
#[derive(Debug)]
pub(super) struct Common {
    pub(super) runs: Runs,
    pub(super) holders: Holders,
    pub(super) settings: IndexSettings,
}

/// One worker rank.
#[derive(Debug)]
pub(super) struct Worker {
    slot: Slot,
    names: NamesMap,
    placed: Placed,
    places: HashMap<BlockHash, Place>,
    approximate: Option<Approximate>,
    blocks: u64,
}

impl Worker {
    pub(super) fn new(slot: Slot, seed: u64) -> Self {
        Self {
            slot,
            names: NamesMap::new(seed),
            placed: Placed::default(),
            places: HashMap::new(),
            approximate: None,
            blocks: 0,
        }
    }

    /// Distinct blocks held in any tier.
    pub(super) fn blocks(&self) -> u64 {
        self.blocks
    }

    /// Brings what the next events need into the cache.
    pub(super) fn warm(&self, names: &[EngineHash]) {
        self.names.warm(names);
    }

    pub(super) fn store(&mut self, all: &mut Common, store: &Store<'_>) -> Stored {
        let count = store.blocks.len() as u64;
        if store.tokens.is_empty() {
            return self.copy_known(all, store.tier, store.blocks);
        }
        let size = store.space.block_size() as usize;
        let fits = size.checked_mul(store.blocks.len()) == Some(store.tokens.len())
            && (store.extra.is_empty() || store.extra.len() == store.blocks.len());
        if !fits {
            return Stored { malformed: count, ..Stored::default() };
        }
        let (mut walk, mut last) = match store.parent {
            None => (Walk::START, store.space.root()),
            Some(name) => match self.names.get(name) {
                Some(named) => (Walk::after(named.place), BlockHash(all.runs.hash(named.place))),
                None => return Stored { orphaned: count, ..Stored::default() },
            },
        };
        let mut outcome = Stored::default();
        for (i, (name, tokens)) in
            store.blocks.iter().zip(store.tokens.chunks_exact(size)).enumerate()
        {
            let extra = store.extra.get(i).copied().unwrap_or(BlockExtra::NONE);
            last = store.space.extend(last, tokens, extra);
            let full = self.names.len() as u64 >= all.settings.blocks_per_slot;
            let Some(place) = all.runs.step(&mut walk, last.0) else {
                outcome.refused += count - i as u64;
                break;
            };
            if full && self.names.get(*name).is_none() {
                outcome.refused += 1;
                continue;
            }
            outcome.blocks += 1;
            outcome.renamed += u64::from(self.add(all, *name, last, place, store.tier));
        }
        all.runs.settle();
        outcome
    }

    fn copy_known(&mut self, all: &mut Common, tier: Tier, blocks: &[EngineHash]) -> Stored {
        let mut outcome = Stored::default();
        for name in blocks {
            match self.names.get(*name) {
                Some(named) => {
                    let (place, block) = (named.place, BlockHash(all.runs.hash(named.place)));
                    self.add(all, *name, block, place, tier);
                    outcome.blocks += 1;
                }
                None => outcome.orphaned += 1,
            }
        }
        outcome
    }

    /// One more copy of a block; says whether the name meant another block before.
    fn add(
        &mut self,
        all: &mut Common,
        name: EngineHash,
        block: BlockHash,
        place: Place,
        tier: Tier,
    ) -> bool {
        let old = self.names.get(name);
        let same = old.filter(|old| old.place == place);
        let renamed = old.filter(|old| old.place != place);
        if same.is_none() {
            all.runs.refer(place.run); // before anything is released
        }
        if let Some(old) = renamed {
            for tier in Tier::ALL {
                if old.copies[tier.index()] > 0 {
                    self.give_up(all, tier, old.place);
                }
            }
            all.runs.unrefer(old.place.run);
        }
        let mut copies = same.map_or(Copies::default(), |same| same.copies);
        copies[tier.index()] = copies[tier.index()].saturating_add(1);
        self.names.set(name, Named { place, copies });
        if copies[tier.index()] == 1 {
            self.hold(all, tier, place);
        }
        let predicted = self.approximate.is_none() && self.placed.len() > 0;
        if predicted && self.placed.remove(block) {
            self.unplace(all, block);
        }
        renamed.is_some()
    }

    pub(super) fn remove(
        &mut self,
        all: &mut Common,
        tier: Tier,
        blocks: &[EngineHash],
    ) -> Removed {
        let mut outcome = Removed::default();
        for name in blocks {
            let named = self.names.get(*name);
            let Some(mut named) = named.filter(|named| named.copies[tier.index()] > 0) else {
                outcome.unknown += 1;
                continue;
            };
            outcome.blocks += 1;
            named.copies[tier.index()] -= 1;
            self.names.set(*name, named);
            if named.copies[tier.index()] == 0 {
                self.give_up(all, tier, named.place);
            }
            if named.copies == Copies::default() {
                all.runs.unrefer(named.place.run);
            }
        }
        outcome
    }

    pub(super) fn clear(&mut self, all: &mut Common) {
        let names = self.names.take();
        let places = std::mem::take(&mut self.places);
        self.placed = Placed::default();
        let refs = names.places().chain(places.into_values());
        let mut refs: Vec<u32> = refs.map(|place| place.run).collect();
        refs.sort_unstable();
        for group in refs.chunk_by(|a, b| a == b) {
            all.holders.drop_run(&mut all.runs, self.slot, group[0]);
        }
        all.holders.drop_rest(self.slot);
        for run in refs {
            all.runs.unrefer(run);
        }
        self.blocks = 0;
    }

    pub(super) fn set_approximate(&mut self, all: &mut Common, mode: Option<Approximate>) {
        if self.approximate != mode {
            self.approximate = mode;
            while self.placed.len() > 0 {
                self.forget_oldest(all);
            }
        }
    }

    pub(super) fn place(&mut self, all: &mut Common, chain: &[BlockHash], now_ns: u64) {
        self.expire(all, now_ns);
        let most = all.settings.placed_per_slot;
        let capacity = self.approximate.and_then(|mode| mode.capacity_blocks);
        let bound = capacity.map_or(most, |capacity| capacity.min(most));
        let fitting = usize::try_from(bound).unwrap_or(usize::MAX).min(chain.len());
        let mut walk = Walk::START;
        let step = |block: &BlockHash| all.runs.step(&mut walk, block.0);
        let places: Vec<Place> = chain[..fitting].iter().map_while(step).collect();
        // Deepest first, so that the end of a prefix is the first of it to make room.
        for (block, place) in chain.iter().zip(places).rev() {
            if !self.placed.contains(*block) {
                let held = all.holders.has(&all.runs, self.slot, Tier::Device, place);
                if self.approximate.is_none() && held {
                    continue;
                }
                all.runs.refer(place.run);
                self.hold(all, Tier::Device, place);
                self.places.insert(*block, place);
            }
            self.placed.touch(*block, now_ns);
        }
        while self.placed.len() > bound {
            self.forget_oldest(all);
        }
        all.runs.settle();
    }

    pub(super) fn expire(&mut self, all: &mut Common, now_ns: u64) {
        let ttl_ns = match self.approximate {
            Some(mode) => mode.ttl_ns,
            None => Some(all.settings.prediction_ttl_ns),
        };
        let Some(ttl_ns) = ttl_ns else { return };
        while self.placed.oldest_ns().is_some_and(|at| now_ns.saturating_sub(at) >= ttl_ns) {
            self.forget_oldest(all);
        }
    }

    fn forget_oldest(&mut self, all: &mut Common) {
        if let Some(block) = self.placed.pop_oldest() {
            self.unplace(all, block);
        }
    }

    fn unplace(&mut self, all: &mut Common, block: BlockHash) {
        if let Some(place) = self.places.remove(&block) {
            self.give_up(all, Tier::Device, place);
            all.runs.unrefer(place.run);
        }
    }

    fn hold(&mut self, all: &mut Common, tier: Tier, place: Place) {
        let first = all.holders.add(&mut all.runs, self.slot, tier, place);
        self.blocks += u64::from(first);
    }

    fn give_up(&mut self, all: &mut Common, tier: Tier, place: Place) {
        let last = all.holders.remove(&mut all.runs, self.slot, tier, place);
        self.blocks -= u64::from(last);
    }
}
