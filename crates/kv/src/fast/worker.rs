//! One worker's names and placements, as places in the runs.

use super::holdings::{Added, Gone, Holdings};
use super::names_map::{Copies, Key, Named, NamesMap};
use super::runs::{Place, Runs, Stretch, Walk};
use crate::hash::BlockExtra;
use crate::index::{Approximate, IndexSettings, Removed, SlotStats, Store, Stored};
use crate::names::{BlockHash, EngineHash, Slot, Tier};
use crate::placed::Placed;
use std::collections::HashMap;

/// What the workers share.
#[derive(Debug)]
pub(super) struct Common {
    pub(super) runs: Runs,
    pub(super) settings: IndexSettings,
    /// Room for the hashes of one store.
    hashes: Vec<u64>,
}

impl Common {
    pub(super) fn new(runs: Runs, settings: IndexSettings) -> Self {
        Self { runs, settings, hashes: Vec::new() }
    }
}

/// Counters since the worker's first event.
#[derive(Clone, Copy, Debug, Default)]
struct Counters {
    stored: Stored,
    removed: Removed,
    clears: u64,
    confirmed: u64,
    expired: u64,
    evicted: u64,
}

/// One worker rank.
#[derive(Debug)]
pub(super) struct Worker {
    slot: Slot,
    names: NamesMap,
    holdings: Holdings,
    placed: Placed,
    places: HashMap<BlockHash, Place>,
    approximate: Option<Approximate>,
    /// Distinct blocks held in any tier.
    blocks: u64,
    /// Distinct blocks held by name, per tier.
    tiers: [u64; Tier::COUNT],
    counters: Counters,
    /// Places that names meant before, until the store that gave them others is over.
    released: Vec<(Copies, Place)>,
}

impl Worker {
    pub(super) fn new(slot: Slot) -> Self {
        Self {
            slot,
            names: NamesMap::default(),
            holdings: Holdings::new(slot),
            placed: Placed::default(),
            places: HashMap::new(),
            approximate: None,
            blocks: 0,
            tiers: [0; Tier::COUNT],
            counters: Counters::default(),
            released: Vec::new(),
        }
    }

    pub(super) fn slot(&self) -> Slot {
        self.slot
    }

    /// The worker will have this many blocks at most, as far as is known.
    pub(super) fn expect(&mut self, blocks: u64) {
        self.names.expect(blocks);
    }

    /// Distinct blocks held in any tier.
    pub(super) fn blocks(&self) -> u64 {
        self.blocks
    }

    pub(super) fn stats(&self) -> SlotStats {
        SlotStats {
            slot: self.slot,
            blocks: self.blocks,
            tiers: self.tiers,
            names: self.names.len() as u64,
            placed: self.placed.len(),
            stored: self.counters.stored,
            removed: self.counters.removed,
            clears: self.counters.clears,
            confirmed: self.counters.confirmed,
            expired: self.counters.expired,
            evicted: self.counters.evicted,
        }
    }

    pub(super) fn store(&mut self, all: &mut Common, store: &Store<'_>) -> Stored {
        let outcome = if store.tokens.is_empty() {
            self.copy_known(all, store.tier, store.blocks)
        } else {
            self.store_chain(all, store)
        };
        self.release(all);
        all.runs.settle();
        self.counters.stored.add(outcome);
        outcome
    }

    fn store_chain(&mut self, all: &mut Common, store: &Store<'_>) -> Stored {
        let count = store.blocks.len() as u64;
        let size = store.space.block_size() as usize;
        let fits = size.checked_mul(store.blocks.len()) == Some(store.tokens.len())
            && (store.extra.is_empty() || store.extra.len() == store.blocks.len());
        if !fits {
            return Stored { malformed: count, ..Stored::default() };
        }
        let seed = all.settings.seed;
        let parent = store.parent.map(|name| self.names.get(Key::new(name, seed)));
        let (mut walk, mut last) = match parent {
            None => (Walk::START, store.space.root()),
            Some(Some(named)) => (Walk::after(named.place), BlockHash(all.runs.hash(named.place))),
            Some(None) => return Stored { orphaned: count, ..Stored::default() },
        };
        let mut hashes = std::mem::take(&mut all.hashes);
        hashes.clear();
        for (i, tokens) in store.tokens.chunks_exact(size).enumerate() {
            let extra = store.extra.get(i).copied().unwrap_or(BlockExtra::NONE);
            last = store.space.extend(last, tokens, extra);
            hashes.push(last.0);
        }
        let mut outcome = Stored::default();
        let mut at = 0;
        while at < hashes.len() {
            let Some(stretch) = all.runs.walk(&mut walk, &hashes[at..]) else {
                outcome.refused += (hashes.len() - at) as u64;
                break;
            };
            let names = &store.blocks[at..at + usize::from(stretch.len)];
            self.name(all, store.tier, names, stretch, &mut outcome);
            at += usize::from(stretch.len);
        }
        all.hashes = hashes;
        outcome
    }

    /// Names a stretch of blocks. What is regular, that is new names for blocks on the device
    /// behind the worker's cut, moves the cut once.
    fn name(
        &mut self,
        all: &mut Common,
        tier: Tier,
        names: &[EngineHash],
        stretch: Stretch,
        outcome: &mut Stored,
    ) {
        let bound = all.settings.blocks_per_slot;
        let room = self.names.len() as u64 + names.len() as u64 <= bound;
        let seed = all.settings.seed;
        let mut at = 0;
        if tier == Tier::Device && room && self.placed.len() == 0 {
            for (name, i) in names.iter().zip(0..) {
                if self.names.insert(Key::new(*name, seed), stretch.place(i)).is_some() {
                    break;
                }
                at += 1;
            }
            let begun = Stretch { len: at, ..stretch };
            outcome.blocks += u64::from(at);
            if at > 0 && self.holdings.extend(&mut all.runs, begun) {
                self.blocks += u64::from(at);
                self.tiers[0] += u64::from(at);
            } else {
                (0..at).for_each(|i| self.hold_named(all, tier, begun.place(i)));
            }
        }
        for (name, i) in names.iter().zip(0..).skip(usize::from(at)) {
            let key = Key::new(*name, seed);
            if self.names.len() as u64 >= bound && self.names.get(key).is_none() {
                outcome.refused += 1;
                continue;
            }
            outcome.blocks += 1;
            outcome.renamed += u64::from(self.add(all, key, stretch.place(i), tier));
        }
    }

    fn copy_known(&mut self, all: &mut Common, tier: Tier, blocks: &[EngineHash]) -> Stored {
        let mut outcome = Stored::default();
        for name in blocks {
            let key = Key::new(*name, all.settings.seed);
            match self.names.get(key) {
                Some(named) => {
                    self.add(all, key, named.place, tier);
                    outcome.blocks += 1;
                }
                None => outcome.orphaned += 1,
            }
        }
        outcome
    }

    /// One more copy of a block; says whether the name meant another block before.
    fn add(&mut self, all: &mut Common, key: Key, place: Place, tier: Tier) -> bool {
        let old = self.names.get(key);
        let mut copies = Copies::default();
        let mut renamed = false;
        match old {
            Some(old) if old.place == place => copies = old.copies,
            Some(old) => {
                renamed = true;
                self.released.push((old.copies, old.place));
            }
            None => {}
        }
        copies[tier.index()] = copies[tier.index()].saturating_add(1);
        self.names.set(key, Named { place, copies });
        if copies[tier.index()] == 1 {
            self.hold_named(all, tier, place);
        }
        if self.approximate.is_none() && self.placed.len() > 0 {
            let block = BlockHash(all.runs.hash(place));
            if self.placed.remove(block) {
                self.counters.confirmed += 1;
                self.unplace(all, block);
            }
        }
        renamed
    }

    /// Gives up what names meant before.
    fn release(&mut self, all: &mut Common) {
        while let Some((copies, place)) = self.released.pop() {
            for tier in Tier::ALL {
                if copies[tier.index()] > 0 {
                    self.give_up_named(all, tier, place);
                }
            }
        }
    }

    pub(super) fn remove(
        &mut self,
        all: &mut Common,
        tier: Tier,
        blocks: &[EngineHash],
    ) -> Removed {
        let mut outcome = Removed::default();
        for name in blocks {
            match self.take_one(Key::new(*name, all.settings.seed), tier) {
                Some(named) => {
                    outcome.blocks += 1;
                    if named.copies[tier.index()] == 0 {
                        self.give_up_named(all, tier, named.place);
                    }
                }
                None => outcome.unknown += 1,
            }
        }
        self.counters.removed.add(outcome);
        outcome
    }

    fn take_one(&mut self, key: Key, tier: Tier) -> Option<Named> {
        if tier == Tier::Device {
            return self.names.take_one(key);
        }
        let mut named = self.names.get(key)?;
        let copies = &mut named.copies[tier.index()];
        *copies = copies.checked_sub(1)?;
        self.names.set(key, named);
        Some(named)
    }

    pub(super) fn clear(&mut self, all: &mut Common) {
        self.counters.clears += 1;
        self.drop_all(all);
    }

    /// Everything goes, but the counters stay.
    pub(super) fn drop_all(&mut self, all: &mut Common) {
        let mut runs: Vec<u32> = self.names.runs().collect();
        runs.extend(self.places.values().map(|place| place.run));
        runs.sort_unstable();
        runs.dedup();
        for run in runs {
            self.holdings.drop_run(&mut all.runs, run);
        }
        self.holdings.drop_rest();
        self.names.clear();
        self.places = HashMap::new();
        self.placed = Placed::default();
        self.blocks = 0;
        self.tiers = [0; Tier::COUNT];
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
        let hashes: Vec<u64> = chain[..fitting].iter().map(|block| block.0).collect();
        let (mut walk, mut at) = (Walk::START, 0);
        while let Some(stretch) = all.runs.walk(&mut walk, &hashes[at..]) {
            for i in 0..stretch.len {
                let (block, place) = (chain[at + usize::from(i)], stretch.place(i));
                if self.places.contains_key(&block) {
                    continue;
                }
                let held = self.holdings.has(&all.runs, Tier::Device, place);
                if self.approximate.is_some() || !held {
                    self.hold(all, Tier::Device, place);
                    self.places.insert(block, place);
                }
            }
            at += usize::from(stretch.len);
        }
        // Deepest first, so that the end of a prefix is the first of it to make room.
        for block in chain[..at].iter().rev() {
            if self.places.contains_key(block) {
                self.placed.touch(*block, now_ns);
            }
        }
        while self.placed.len() > bound {
            self.forget_oldest(all);
            self.counters.evicted += 1;
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
            self.counters.expired += 1;
        }
    }

    fn forget_oldest(&mut self, all: &mut Common) {
        if let Some(block) = self.placed.pop_oldest() {
            self.unplace(all, block);
        }
    }

    fn unplace(&mut self, all: &mut Common, block: BlockHash) {
        if let Some(place) = self.places.remove(&block) {
            let gone = self.holdings.remove(&mut all.runs, Tier::Device, place);
            self.blocks -= u64::from(gone.last);
        }
    }

    fn hold(&mut self, all: &mut Common, tier: Tier, place: Place) -> Added {
        let added = self.holdings.add(&mut all.runs, tier, place);
        self.blocks += u64::from(added.first);
        added
    }

    fn hold_named(&mut self, all: &mut Common, tier: Tier, place: Place) {
        let placed = self.placements(all, tier, place);
        let added = self.hold(all, tier, place);
        self.tiers[tier.index()] += u64::from(added.before == placed);
    }

    fn give_up_named(&mut self, all: &mut Common, tier: Tier, place: Place) {
        let placed = self.placements(all, tier, place);
        let Gone { after, last } = self.holdings.remove(&mut all.runs, tier, place);
        self.blocks -= u64::from(last);
        self.tiers[tier.index()] -= u64::from(after == placed);
    }

    /// Holders of a block that are no names: one if it is placed.
    fn placements(&self, all: &Common, tier: Tier, place: Place) -> u32 {
        let may = tier == Tier::Device && self.placed.len() > 0;
        u32::from(may && self.places.contains_key(&BlockHash(all.runs.hash(place))))
    }

    /// Where the placed blocks are, least recently placed first.
    pub(super) fn placed_places(&self) -> Vec<Place> {
        self.placed.in_order().filter_map(|block| self.places.get(block).copied()).collect()
    }

    /// The worker's names.
    pub(super) fn names(&self) -> &NamesMap {
        &self.names
    }

    /// Takes over a name with its copies from a snapshot.
    pub(super) fn take_over(&mut self, all: &mut Common, key: Key, named: Named) {
        self.names.set(key, named);
        for tier in Tier::ALL {
            if named.copies[tier.index()] > 0 {
                self.hold_named(all, tier, named.place);
            }
        }
    }

    /// Takes over a placement from a snapshot, as if it were just made.
    pub(super) fn take_over_placed(
        &mut self,
        all: &mut Common,
        block: BlockHash,
        place: Place,
        now_ns: u64,
    ) {
        if !self.places.contains_key(&block) {
            self.hold(all, Tier::Device, place);
            self.places.insert(block, place);
        }
        self.placed.touch(block, now_ns);
    }
}
