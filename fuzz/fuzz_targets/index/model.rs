//! An index so literal that it needs no proof: each worker is the list of its copies.
//!
//! A copy has the hash of its whole prefix, which stands for the prefix itself.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use pointsman_kv::{
    Applied, Approximate, BlockExtra, BlockHash, Depth, EngineHash, Event, IndexSettings, Slot,
    Store, Stored, Tier,
};

/// One copy of a block on a worker.
#[derive(Clone, Copy, Debug)]
struct Copy {
    name: EngineHash,
    block: BlockHash,
    tier: Tier,
}

#[derive(Debug, Default)]
struct Worker {
    copies: Vec<Copy>,
    /// Least recently placed first.
    placed: Vec<(BlockHash, u64)>,
    approximate: Option<Approximate>,
}

/// The model.
pub(crate) struct Model {
    settings: IndexSettings,
    workers: BTreeMap<Slot, Worker>,
    now: u64,
    /// The whole prefix of every block that was ever spoken of.
    chains: BTreeMap<BlockHash, Vec<BlockHash>>,
}

/// What one worker holds in each tier or a faster one.
#[derive(Debug, Default)]
pub(crate) struct View {
    held: [HashSet<BlockHash>; Tier::COUNT],
}

impl View {
    pub(crate) fn depth(&self, chain: &[BlockHash]) -> Depth {
        let reach = |tier: Tier| {
            chain.iter().take_while(|block| self.held[tier.index()].contains(block)).count() as u32
        };
        let (device, host, disk) = (reach(Tier::Device), reach(Tier::Host), reach(Tier::Disk));
        Depth { device, host: host - device, disk: disk - host }
    }
}

impl Worker {
    fn meaning(&self, name: EngineHash) -> Option<BlockHash> {
        self.copies.iter().find(|copy| copy.name == name).map(|copy| copy.block)
    }

    fn names(&self) -> u64 {
        self.copies.iter().map(|copy| copy.name).collect::<BTreeSet<_>>().len() as u64
    }

    /// One more copy; says whether the name meant another block before, which is then forgotten.
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

    fn expire(&mut self, now: u64, settings: &IndexSettings) {
        let ttl = match self.approximate {
            Some(mode) => mode.ttl_ns,
            None => Some(settings.prediction_ttl_ns),
        };
        self.placed.retain(|(_, at)| ttl.is_none_or(|ttl| now - at < ttl));
    }
}

impl Model {
    pub(crate) fn new(settings: IndexSettings) -> Model {
        Model { settings, workers: BTreeMap::new(), now: 0, chains: BTreeMap::new() }
    }

    fn worker(&mut self, slot: Slot) -> &mut Worker {
        self.workers.entry(slot).or_default()
    }

    pub(crate) fn apply(&mut self, event: &Event<'_>, sum: &mut Applied) {
        match event {
            Event::Store(store) => self.store(store, &mut sum.stored),
            Event::Remove { slot, tier, blocks } => {
                let worker = self.worker(*slot);
                for name in *blocks {
                    let is_it = |copy: &Copy| copy.name == *name && copy.tier == *tier;
                    match worker.copies.iter().position(is_it) {
                        Some(at) => {
                            worker.copies.remove(at);
                            sum.removed.blocks += 1;
                        }
                        None => sum.removed.unknown += 1,
                    }
                }
            }
            Event::Clear { slot } => {
                let worker = self.worker(*slot);
                worker.copies.clear();
                worker.placed.clear();
                sum.clears += 1;
            }
        }
    }

    fn store(&mut self, store: &Store<'_>, sum: &mut Stored) {
        let (count, size) = (store.blocks.len(), store.space.block_size() as usize);
        let (bound, tier) = (self.settings.blocks_per_slot, store.tier);
        let mut chains = std::mem::take(&mut self.chains);
        let worker = self.worker(store.slot);
        if store.tokens.is_empty() {
            for name in store.blocks {
                match worker.meaning(*name) {
                    Some(block) => {
                        worker.add(Copy { name: *name, block, tier });
                        sum.blocks += 1;
                    }
                    None => sum.orphaned += 1,
                }
            }
        } else if store.tokens.len() != size * count {
            sum.malformed += count as u64;
        } else if let Some(parent) =
            store.parent.map_or(Some(store.space.root()), |parent| worker.meaning(parent))
        {
            let mut chain = chains.get(&parent).cloned().unwrap_or_default();
            let mut last = parent;
            for (i, name) in store.blocks.iter().enumerate() {
                let extra = store.extra.get(i).copied().unwrap_or(BlockExtra::NONE);
                last = store.space.extend(last, &store.tokens[i * size..][..size], extra);
                chain.push(last);
                chains.entry(last).or_insert_with(|| chain.clone());
                if worker.meaning(*name).is_none() && worker.names() >= bound {
                    sum.refused += 1;
                    continue;
                }
                sum.blocks += 1;
                sum.renamed += u64::from(worker.add(Copy { name: *name, block: last, tier }));
            }
        } else {
            sum.orphaned += count as u64;
        }
        self.chains = chains;
    }

    pub(crate) fn place(&mut self, slot: Slot, chain: &[BlockHash], now: u64) {
        self.now = now;
        for (i, block) in chain.iter().enumerate() {
            self.chains.entry(*block).or_insert_with(|| chain[..=i].to_vec());
        }
        let settings = self.settings;
        let worker = self.worker(slot);
        worker.expire(now, &settings);
        let capacity = worker.approximate.and_then(|mode| mode.capacity_blocks);
        let bound = capacity.unwrap_or(u64::MAX).min(settings.placed_per_slot) as usize;
        for block in chain.iter().take(bound).rev() {
            let is_held = |copy: &Copy| copy.block == *block && copy.tier == Tier::Device;
            if worker.approximate.is_none() && worker.copies.iter().any(is_held) {
                continue;
            }
            worker.placed.retain(|(placed, _)| placed != block);
            worker.placed.push((*block, now));
        }
        let excess = worker.placed.len().saturating_sub(bound);
        worker.placed.drain(..excess);
    }

    pub(crate) fn set_approximate(&mut self, slot: Slot, mode: Option<Approximate>) {
        let worker = self.worker(slot);
        if worker.approximate != mode {
            worker.approximate = mode;
            worker.placed.clear();
        }
    }

    pub(crate) fn expire(&mut self, now: u64) {
        self.now = now;
        let settings = self.settings;
        self.workers.values_mut().for_each(|worker| worker.expire(now, &settings));
    }

    /// Chains of which every prefix that was ever spoken of is one.
    pub(crate) fn chains(&self) -> impl Iterator<Item = &Vec<BlockHash>> {
        let parents: HashSet<_> =
            self.chains.values().filter_map(|chain| chain.iter().rev().nth(1)).collect();
        self.chains.iter().filter(move |(block, _)| !parents.contains(block)).map(|(_, c)| c)
    }

    pub(crate) fn view(&self, slot: Slot) -> View {
        let mut view = View::default();
        let Some(worker) = self.workers.get(&slot) else { return view };
        for (tier, held) in Tier::ALL.into_iter().zip(&mut view.held) {
            let copies = worker.copies.iter().filter(|copy| copy.tier <= tier);
            held.extend(copies.map(|copy| copy.block));
            held.extend(worker.placed.iter().map(|(block, _)| *block));
        }
        view
    }

    /// Distinct blocks held in any way.
    pub(crate) fn blocks(&self, slot: Slot) -> u64 {
        let Some(worker) = self.workers.get(&slot) else { return 0 };
        let copies = worker.copies.iter().map(|copy| copy.block);
        copies.chain(worker.placed.iter().map(|(b, _)| *b)).collect::<BTreeSet<_>>().len() as u64
    }

    pub(crate) fn names(&self, slot: Slot) -> u64 {
        self.workers.get(&slot).map_or(0, Worker::names)
    }

    pub(crate) fn placed(&self, slot: Slot) -> u64 {
        self.workers.get(&slot).map_or(0, |worker| worker.placed.len() as u64)
    }
}
