//! For tests: an index so literal that it needs no proof, and random events to compare others.
//!
//! A worker is the list of all copies it holds, each with the whole prefix written out; a query
//! looks for every prefix of the prompt in that list. No hashes, no maps, no counters.

use crate::hash::{BlockExtra, Hasher, Space, SpaceKey};
use crate::index::{Approximate, Depth, IndexSettings, Overlap, Removed, Store, Stored};
use crate::names::{BlockHash, EngineHash, Slot, Tier};
use proptest::prelude::*;

/// Slots, spaces and prompts are drawn from these few, so that they collide all the time.
const SLOTS: u16 = 3;
const SPACES: usize = 4;
const MAX_BLOCKS: usize = 9;

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

/// One block of a literal prompt: what its tokens and extra keys are made of.
pub(crate) type Block = (u8, u8);

/// A prompt, written out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Prompt {
    pub(crate) space: usize,
    pub(crate) blocks: Vec<Block>,
}

/// The spaces of the tests, and how literal prompts become tokens and chains.
pub(crate) struct World {
    hasher: Hasher,
    spaces: Vec<Space>,
}

impl World {
    pub(crate) fn new() -> Self {
        let hasher = Hasher::new(7);
        let plain = SpaceKey::plain(4);
        let keys = [
            plain,
            SpaceKey::plain(2),
            plain.with_lora(Some("adapter")),
            plain.with_salt(Some("tenant")),
        ];
        let spaces = keys.iter().map(|key| hasher.space(key)).collect();
        Self { hasher, spaces }
    }

    pub(crate) fn space(&self, space: usize) -> Space {
        self.spaces[space]
    }

    pub(crate) fn tokens(&self, space: usize, block: Block) -> Vec<u32> {
        (0..self.spaces[space].block_size()).map(|i| u32::from(block.0) * 100 + i).collect()
    }

    pub(crate) fn extra(&self, block: Block) -> BlockExtra {
        match block.1 {
            0 => BlockExtra::NONE,
            n => self.hasher.extra().multimodal("image", i64::from(n)).build(),
        }
    }

    pub(crate) fn chain(&self, prompt: &Prompt) -> Vec<BlockHash> {
        let space = self.spaces[prompt.space];
        let mut last = space.root();
        let step = |block: &Block| {
            last = space.extend(last, &self.tokens(prompt.space, *block), self.extra(*block));
            last
        };
        prompt.blocks.iter().map(step).collect()
    }
}

/// A random change, in the words of the model.
#[derive(Clone, Debug)]
pub(crate) enum Op {
    /// Arbitrary names for arbitrary blocks: engines that contradict themselves.
    Wild {
        slot: u16,
        tier: Tier,
        space: usize,
        parent: Option<u8>,
        blocks: Vec<(u8, Block)>,
    },
    /// Blocks `from..` of a prompt under the worker's own names for those prefixes.
    Store {
        slot: u16,
        tier: Tier,
        prompt: Prompt,
        from: usize,
    },
    /// One more copy of a prompt's blocks, by name alone.
    Copy {
        slot: u16,
        tier: Tier,
        prompt: Prompt,
        from: usize,
    },
    /// Removal of a prompt's blocks `from..to`.
    Remove {
        slot: u16,
        tier: Tier,
        prompt: Prompt,
        from: usize,
        to: usize,
    },
    /// Removal by arbitrary names.
    WildRemove {
        slot: u16,
        tier: Tier,
        names: Vec<u8>,
    },
    Clear {
        slot: u16,
    },
    Place {
        slot: u16,
        prompt: Prompt,
        wait: u64,
    },
    Approximate {
        slot: u16,
        capacity: Option<u64>,
        ttl: Option<u64>,
    },
    Exact {
        slot: u16,
    },
    Expire {
        wait: u64,
    },
    /// Tokens that do not fit the blocks.
    Malformed {
        slot: u16,
        blocks: usize,
        tokens: usize,
    },
}

pub(crate) fn settings() -> IndexSettings {
    IndexSettings { blocks_per_slot: 40, placed_per_slot: 12, prediction_ttl_ns: 10 }
}

fn tier() -> impl Strategy<Value = Tier> {
    prop_oneof![4 => Just(Tier::Device), 1 => Just(Tier::Host), 1 => Just(Tier::Disk)]
}

fn block() -> impl Strategy<Value = Block> {
    (prop_oneof![9 => Just(0_u8), 1 => Just(1_u8)], prop_oneof![30 => Just(0_u8), 1 => Just(1_u8)])
}

pub(crate) fn prompt() -> impl Strategy<Value = Prompt> {
    let space = prop_oneof![6 => Just(0), 1 => 0..SPACES];
    (space, prop::collection::vec(block(), 0..MAX_BLOCKS))
        .prop_map(|(space, blocks)| Prompt { space, blocks })
}

fn slot() -> impl Strategy<Value = u16> {
    prop_oneof![4 => Just(0_u16), 1 => 0..SLOTS]
}

fn op() -> impl Strategy<Value = Op> {
    let from = || prop_oneof![2 => Just(0), 1 => 0..MAX_BLOCKS];
    let wild = prop::collection::vec((0..12_u8, block()), 0..4);
    prop_oneof![
        12 => (slot(), tier(), prompt(), from())
            .prop_map(|(slot, tier, prompt, from)| Op::Store { slot, tier, prompt, from }),
        2 => (slot(), tier(), prompt(), from())
            .prop_map(|(slot, tier, prompt, from)| Op::Copy { slot, tier, prompt, from }),
        9 => (slot(), tier(), prompt(), 0..MAX_BLOCKS, 0..MAX_BLOCKS).prop_map(
            |(slot, tier, prompt, from, to)| Op::Remove { slot, tier, prompt, from, to }
        ),
        3 => (slot(), tier(), 0..SPACES, prop::option::of(0..12_u8), wild).prop_map(
            |(slot, tier, space, parent, blocks)| Op::Wild { slot, tier, space, parent, blocks }
        ),
        2 => (slot(), tier(), prop::collection::vec(0..12_u8, 0..4))
            .prop_map(|(slot, tier, names)| Op::WildRemove { slot, tier, names }),
        1 => slot().prop_map(|slot| Op::Clear { slot }),
        3 => (slot(), prompt(), 0..8_u64)
            .prop_map(|(slot, prompt, wait)| Op::Place { slot, prompt, wait }),
        1 => (slot(), prop::option::of(0..8_u64), prop::option::of(0..20_u64)).prop_map(
            |(slot, capacity, ttl)| Op::Approximate { slot, capacity, ttl }
        ),
        1 => slot().prop_map(|slot| Op::Exact { slot }),
        1 => (0..8_u64).prop_map(|wait| Op::Expire { wait }),
        1 => (slot(), 0..4_usize, 1..20_usize)
            .prop_map(|(slot, blocks, tokens)| Op::Malformed { slot, blocks, tokens }),
    ]
}

pub(crate) fn ops(most: usize) -> impl Strategy<Value = Vec<Op>> {
    prop::collection::vec(op(), 0..most)
}

/// The worker's name of a prefix; no two workers agree on one.
fn name(world: &World, slot: u16, prompt: &Prompt, blocks: usize) -> EngineHash {
    let chain = world.chain(prompt);
    let prefix = blocks.checked_sub(1).map_or(0, |last| chain[last].0);
    EngineHash(prefix ^ (u64::from(slot) << 40) ^ 0x5555)
}

/// A model and a subject that live through the same changes.
pub(crate) struct Pair<S> {
    pub(crate) world: World,
    pub(crate) model: Model,
    pub(crate) subject: S,
    now: u64,
    /// Every prompt that was ever spoken of.
    known: Vec<Prompt>,
}

impl<S: Subject> Pair<S> {
    pub(crate) fn new(subject: S) -> Self {
        let (world, model) = (World::new(), Model::new(settings()));
        Self { world, model, subject, now: 0, known: Vec::new() }
    }

    /// Does the same to both and compares what they say of it.
    pub(crate) fn run(&mut self, op: &Op) {
        match op {
            Op::Store { slot, tier, prompt, from } => self.store(*slot, *tier, prompt, *from),
            Op::Copy { slot, tier, prompt, from } => {
                let from = (*from).min(prompt.blocks.len());
                let names = self.names(*slot, prompt, from, prompt.blocks.len());
                self.raw_store(*slot, *tier, prompt.space, None, &names, &[]);
            }
            Op::Remove { slot, tier, prompt, from, to } => {
                let to = (*to).min(prompt.blocks.len());
                let names = self.names(*slot, prompt, (*from).min(to), to);
                self.raw_remove(*slot, *tier, &names);
            }
            Op::Wild { slot, tier, space, parent, blocks } => {
                let names: Vec<_> = blocks.iter().map(|(n, _)| wild(*n)).collect();
                let blocks: Vec<_> = blocks.iter().map(|(_, block)| *block).collect();
                self.raw_store(*slot, *tier, *space, parent.map(wild), &names, &blocks);
            }
            Op::WildRemove { slot, tier, names } => {
                let names: Vec<_> = names.iter().copied().map(wild).collect();
                self.raw_remove(*slot, *tier, &names);
            }
            Op::Clear { slot } => {
                self.model.clear(Slot(*slot));
                self.subject.clear(Slot(*slot));
            }
            Op::Place { slot, prompt, wait } => {
                self.now += wait;
                let chain = self.world.chain(prompt);
                self.model.place(Slot(*slot), &chain, self.now);
                self.subject.place(Slot(*slot), &chain, self.now);
                self.known.push(prompt.clone());
            }
            Op::Approximate { slot, capacity, ttl } => {
                let mode = Approximate { capacity_blocks: *capacity, ttl_ns: *ttl };
                self.model.set_approximate(Slot(*slot), Some(mode));
                self.subject.set_approximate(Slot(*slot), Some(mode));
            }
            Op::Exact { slot } => {
                self.model.set_approximate(Slot(*slot), None);
                self.subject.set_approximate(Slot(*slot), None);
            }
            Op::Expire { wait } => {
                self.now += wait;
                self.model.expire(self.now);
                self.subject.expire(self.now);
            }
            Op::Malformed { slot, blocks, tokens } => self.malformed(*slot, *blocks, *tokens),
        }
        self.subject.check();
    }

    /// Compares the depth of every prompt spoken of and the number of blocks per worker.
    pub(crate) fn compare(&self) {
        let (mut expected, mut found) = (Overlap::new(), Overlap::new());
        for prompt in &self.known {
            let chain = self.world.chain(prompt);
            self.model.overlap(&chain, &mut expected);
            self.subject.overlap(&chain, &mut found);
            for slot in (0..=SLOTS).map(Slot) {
                assert_eq!(found.get(slot), expected.get(slot), "{slot:?} of {prompt:?}");
            }
        }
        for slot in (0..=SLOTS).map(Slot) {
            assert_eq!(self.subject.blocks(slot), self.model.blocks(slot), "blocks of {slot:?}");
        }
    }

    fn store(&mut self, slot: u16, tier: Tier, prompt: &Prompt, from: usize) {
        let from = from.min(prompt.blocks.len());
        let names = self.names(slot, prompt, from, prompt.blocks.len());
        let parent = (from > 0).then(|| name(&self.world, slot, prompt, from));
        self.known.push(prompt.clone());
        let blocks = prompt.blocks[from..].to_vec();
        self.raw_store(slot, tier, prompt.space, parent, &names, &blocks);
    }

    fn names(&self, slot: u16, prompt: &Prompt, from: usize, to: usize) -> Vec<EngineHash> {
        (from..to).map(|i| name(&self.world, slot, prompt, i + 1)).collect()
    }

    fn raw_store(
        &mut self,
        slot: u16,
        tier: Tier,
        space: usize,
        parent: Option<EngineHash>,
        names: &[EngineHash],
        blocks: &[Block],
    ) {
        let tokens: Vec<u32> =
            blocks.iter().flat_map(|block| self.world.tokens(space, *block)).collect();
        let extra: Vec<_> = blocks.iter().map(|block| self.world.extra(*block)).collect();
        let plain = extra.iter().all(|extra| *extra == BlockExtra::NONE);
        let store = Store {
            slot: Slot(slot),
            tier,
            space: self.world.space(space),
            parent,
            blocks: names,
            tokens: &tokens,
            extra: if plain { &[] } else { &extra },
        };
        assert_eq!(self.subject.store(&store), self.model.store(&store), "{store:?}");
    }

    fn raw_remove(&mut self, slot: u16, tier: Tier, names: &[EngineHash]) {
        let found = self.subject.remove(Slot(slot), tier, names);
        assert_eq!(found, self.model.remove(Slot(slot), tier, names), "{names:?}");
    }

    fn malformed(&mut self, slot: u16, blocks: usize, tokens: usize) {
        let (names, tokens) = (vec![EngineHash(1); blocks], vec![3; tokens]);
        let store = Store {
            slot: Slot(slot),
            tier: Tier::Device,
            space: self.world.hasher.space(&SpaceKey::plain(0)),
            parent: None,
            blocks: &names,
            tokens: &tokens,
            extra: &[BlockExtra::NONE; 5],
        };
        let dropped = Stored { malformed: blocks as u64, ..Stored::default() };
        assert_eq!(self.subject.store(&store), dropped);
    }
}

fn wild(name: u8) -> EngineHash {
    EngineHash(u64::from(name))
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

/// Cases: few under miri, as many as `PROPTEST_CASES` says, or this many.
pub(crate) fn cases(most: u32) -> ProptestConfig {
    let default = ProptestConfig { failure_persistence: None, ..ProptestConfig::default() };
    match default.cases {
        _ if cfg!(miri) => ProptestConfig { cases: 4, ..default },
        256 => ProptestConfig { cases: most, ..default },
        _ => default,
    }
}
