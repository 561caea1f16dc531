//! A model and an index under test, side by side.

use super::ops::{Block, Op, Prompt, World};
use super::{Model, SLOTS, Subject, settings};
use crate::hash::{BlockExtra, Hasher, SpaceKey};
use crate::index::{Approximate, Overlap, Store, Stored};
use crate::names::{EngineHash, Slot, Tier};

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
            space: Hasher::new(7).space(&SpaceKey::plain(0)),
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
