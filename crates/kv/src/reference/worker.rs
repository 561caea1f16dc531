//! What one worker rank holds.

use super::{Copies, Named, Names};
use crate::hash::BlockExtra;
use crate::index::{Approximate, Depth, IndexSettings, Removed, SlotStats, Store, Stored};
use crate::names::{BlockHash, EngineHash, Slot, Tier};
use crate::placed::Placed;
use std::collections::HashMap;

/// One worker rank: its names, the copies they add up to, and what the router placed there.
#[derive(Debug, Default)]
pub(super) struct Worker {
    names: Names,
    /// Copies per block over all names that mean it.
    held: HashMap<BlockHash, Copies>,
    placed: Placed,
    approximate: Option<Approximate>,
    stored: Stored,
    removed: Removed,
    clears: u64,
    confirmed: u64,
    expired: u64,
    evicted: u64,
}

impl Worker {
    pub(super) fn store(&mut self, store: &Store<'_>, bound: u64) -> Stored {
        let outcome = self.try_store(store, bound);
        self.stored.add(outcome);
        outcome
    }

    fn try_store(&mut self, store: &Store<'_>, bound: u64) -> Stored {
        let count = store.blocks.len() as u64;
        if store.tokens.is_empty() {
            return self.copy_known(store.tier, store.blocks);
        }
        let size = store.space.block_size() as usize;
        let fits = size.checked_mul(store.blocks.len()) == Some(store.tokens.len())
            && (store.extra.is_empty() || store.extra.len() == store.blocks.len());
        if !fits {
            return Stored { malformed: count, ..Stored::default() };
        }
        let parent = match store.parent {
            None => store.space.root(),
            Some(name) => match self.names.get(&name) {
                Some(named) => named.block,
                None => return Stored { orphaned: count, ..Stored::default() },
            },
        };
        let mut outcome = Stored::default();
        let mut last = parent;
        for (i, (name, tokens)) in
            store.blocks.iter().zip(store.tokens.chunks_exact(size)).enumerate()
        {
            let extra = store.extra.get(i).copied().unwrap_or(BlockExtra::NONE);
            last = store.space.extend(last, tokens, extra);
            if !self.names.contains_key(name) && self.names.len() as u64 >= bound {
                outcome.refused += 1;
                continue;
            }
            outcome.blocks += 1;
            outcome.renamed += u64::from(self.add(*name, last, store.tier));
        }
        outcome
    }

    /// One more copy in `tier` of each block that has a name already.
    fn copy_known(&mut self, tier: Tier, blocks: &[EngineHash]) -> Stored {
        let mut outcome = Stored::default();
        for name in blocks {
            match self.names.get(name) {
                Some(named) => {
                    self.add(*name, named.block, tier);
                    outcome.blocks += 1;
                }
                None => outcome.orphaned += 1,
            }
        }
        outcome
    }

    /// One more copy of `block` under `name`; says whether the name meant another block before.
    fn add(&mut self, name: EngineHash, block: BlockHash, tier: Tier) -> bool {
        let renamed = match self.names.get(&name).copied() {
            Some(old) if old.block != block => {
                self.names.remove(&name);
                self.release(old.block, old.copies);
                true
            }
            _ => false,
        };
        let named = self.names.entry(name).or_insert(Named { block, copies: Copies::default() });
        named.copies[tier.index()] = named.copies[tier.index()].saturating_add(1);
        let held = self.held.entry(block).or_default();
        held[tier.index()] = held[tier.index()].saturating_add(1);
        if self.approximate.is_none() && self.placed.remove(block) {
            self.confirmed += 1;
        }
        renamed
    }

    /// Gives up these copies of a block.
    fn release(&mut self, block: BlockHash, copies: Copies) {
        if let Some(held) = self.held.get_mut(&block) {
            for (held, gone) in held.iter_mut().zip(copies) {
                *held = held.saturating_sub(gone);
            }
            if *held == Copies::default() {
                self.held.remove(&block);
            }
        }
    }

    pub(super) fn remove(&mut self, tier: Tier, blocks: &[EngineHash]) -> Removed {
        let mut outcome = Removed::default();
        for name in blocks {
            let Some(named) = self.names.get_mut(name).filter(|n| n.copies[tier.index()] > 0)
            else {
                outcome.unknown += 1;
                continue;
            };
            named.copies[tier.index()] -= 1;
            let named = *named;
            if named.copies == Copies::default() {
                self.names.remove(name);
            }
            let mut gone = Copies::default();
            gone[tier.index()] = 1;
            self.release(named.block, gone);
            outcome.blocks += 1;
        }
        self.removed.add(outcome);
        outcome
    }

    pub(super) fn clear(&mut self) {
        // New maps, so that the memory of a full cache is given back.
        self.names = Names::new();
        self.held = HashMap::new();
        self.placed = Placed::default();
        self.clears += 1;
    }

    pub(super) fn set_approximate(&mut self, mode: Option<Approximate>) {
        if self.approximate != mode {
            self.approximate = mode;
            self.placed = Placed::default();
        }
    }

    pub(super) fn place(&mut self, chain: &[BlockHash], now_ns: u64, settings: &IndexSettings) {
        self.expire(now_ns, settings);
        let bound = self
            .approximate
            .and_then(|mode| mode.capacity_blocks)
            .map_or(settings.placed_per_slot, |capacity| capacity.min(settings.placed_per_slot));
        let fitting = usize::try_from(bound).unwrap_or(usize::MAX).min(chain.len());
        // Deepest first, so that the end of a prefix is the first of it to make room.
        for block in chain[..fitting].iter().rev() {
            let device = |held: &Copies| held[Tier::Device.index()] > 0;
            if self.approximate.is_none() && self.held.get(block).is_some_and(device) {
                continue;
            }
            self.placed.touch(*block, now_ns);
        }
        while self.placed.len() > bound {
            self.placed.pop_oldest();
            self.evicted += 1;
        }
    }

    pub(super) fn expire(&mut self, now_ns: u64, settings: &IndexSettings) {
        let ttl_ns = match self.approximate {
            Some(mode) => mode.ttl_ns,
            None => Some(settings.prediction_ttl_ns),
        };
        let Some(ttl_ns) = ttl_ns else { return };
        while self.placed.oldest_ns().is_some_and(|at| now_ns.saturating_sub(at) >= ttl_ns) {
            self.placed.pop_oldest();
            self.expired += 1;
        }
    }

    pub(super) fn depth(&self, chain: &[BlockHash]) -> Depth {
        let mut reach = [0_u32; Tier::COUNT];
        for (tier, reach) in Tier::ALL.into_iter().zip(&mut reach) {
            let blocks = chain.iter().take_while(|block| self.holds(**block, tier)).count();
            *reach = u32::try_from(blocks).unwrap_or(u32::MAX);
        }
        let [device, host, disk] = reach;
        Depth { device, host: host - device, disk: disk - host }
    }

    /// Whether the block is in this tier or a faster one.
    fn holds(&self, block: BlockHash, tier: Tier) -> bool {
        let copies = self.held.get(&block);
        copies.is_some_and(|copies| copies[..=tier.index()].iter().any(|n| *n > 0))
            || self.placed.contains(block)
    }

    pub(super) fn blocks(&self) -> u64 {
        let placed_only = self.placed.blocks().filter(|b| !self.held.contains_key(b)).count();
        (self.held.len() + placed_only) as u64
    }

    pub(super) fn stats(&self, slot: Slot) -> SlotStats {
        let mut tiers = [0_u64; Tier::COUNT];
        for copies in self.held.values() {
            for (count, copies) in tiers.iter_mut().zip(copies) {
                *count += u64::from(*copies > 0);
            }
        }
        SlotStats {
            slot,
            blocks: self.blocks(),
            tiers,
            names: self.names.len() as u64,
            placed: self.placed.len(),
            stored: self.stored,
            removed: self.removed,
            clears: self.clears,
            confirmed: self.confirmed,
            expired: self.expired,
            evicted: self.evicted,
        }
    }
}
