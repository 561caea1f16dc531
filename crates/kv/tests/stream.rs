//! Engine, publisher, lossy wire, cursor and index together: the index is the engine's cache as of
//! the last message applied, or less if history is missing, whatever is lost, replayed or restarted.

// Helpers outside of a test function count as production code for these lints.
#![allow(clippy::unwrap_used, clippy::panic)]

use pointsman_kv::{
    Action, BlockHash, Cursor, CursorLimits, EngineHash, Hasher, Overlap, Reader, Slot, Space,
    SpaceKey, Stamp, Standing, Store, Tier, Writer, index,
};
use proptest::prelude::*;
use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;

const SLOT: Slot = Slot(4);
const BLOCK: usize = 2;

type Prompt = Vec<u8>;

#[derive(Debug)]
enum Event {
    Stored { parent: Option<EngineHash>, names: Vec<EngineHash>, tokens: Vec<u32> },
    Removed(EngineHash),
    Cleared,
}

/// A cache that names blocks its own way, holds copies and may have holes.
#[derive(Clone, Debug, Default)]
struct Engine {
    incarnation: u64,
    copies: BTreeMap<Prompt, u32>,
}

impl Engine {
    /// Every second incarnation gives other names; in between they stay.
    fn name(&self, prefix: &[u8]) -> EngineHash {
        let fold = |sum: u64, block: &u8| sum.wrapping_mul(31).wrapping_add(u64::from(*block) + 1);
        EngineHash(prefix.iter().fold((self.incarnation / 2) << 50, fold))
    }

    fn depth(&self, prompt: &[u8]) -> usize {
        (1..=prompt.len()).take_while(|n| self.copies.contains_key(&prompt[..*n])).count()
    }

    /// Computes what is missing behind the contiguous prefix, as one event.
    fn serve(&mut self, prompt: &[u8]) -> Option<Event> {
        let held = self.depth(prompt);
        if held == prompt.len() {
            return None;
        }
        for n in held + 1..=prompt.len() {
            *self.copies.entry(prompt[..n].to_vec()).or_default() += 1;
        }
        Some(Event::Stored {
            parent: (held > 0).then(|| self.name(&prompt[..held])),
            names: (held + 1..=prompt.len()).map(|n| self.name(&prompt[..n])).collect(),
            tokens: prompt[held..].iter().flat_map(|b| [u32::from(*b), 7]).collect(),
        })
    }

    /// Drops one copy of the `nth` block.
    fn evict(&mut self, nth: usize) -> Option<Event> {
        let prefix = self.copies.keys().nth(nth % self.copies.len().max(1))?.clone();
        let name = self.name(&prefix);
        if let Some(copies) = self.copies.get_mut(&prefix) {
            *copies -= 1;
            if *copies == 0 {
                self.copies.remove(&prefix);
            }
        }
        Some(Event::Removed(name))
    }
}

#[derive(Clone, Debug)]
enum Step {
    Serve(Prompt),
    Evict(usize),
    ClearCache,
    Deliver,
    Lose,
    Duplicate,
    Replay(usize),
    Refuse,
    Reconnect,
    Restart(Vec<Prompt>),
    Resync,
}

fn prompt() -> impl Strategy<Value = Prompt> {
    prop::collection::vec(prop_oneof![5 => Just(0_u8), 1 => Just(1)], 1..7)
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        8 => prompt().prop_map(Step::Serve),
        6 => (0..20_usize).prop_map(Step::Evict),
        1 => Just(Step::ClearCache),
        14 => Just(Step::Deliver),
        2 => Just(Step::Lose),
        1 => Just(Step::Duplicate),
        6 => (1..6_usize).prop_map(Step::Replay),
        1 => Just(Step::Refuse),
        1 => Just(Step::Reconnect),
        1 => prop::collection::vec(prompt(), 0..4).prop_map(Step::Restart),
        1 => Just(Step::Resync),
    ];
    prop::collection::vec(step, 0..100)
}

/// A message and the engine's cache right after it.
struct Message {
    stamp: Stamp,
    event: Event,
    cache: Engine,
}

#[derive(Clone)]
enum Wire {
    Connected,
    Message(Rc<Message>),
}

struct World {
    engine: Engine,
    clock: u64,
    buffer: usize,
    published: Vec<Rc<Message>>,
    wire: VecDeque<Wire>,
    asked: Option<u64>,
    serving: Option<VecDeque<Rc<Message>>>,
    cursor: Cursor<Rc<Message>>,
    space: Space,
    writer: Writer,
    reader: Reader,
    applied: Option<Rc<Message>>,
    prompts: Vec<Prompt>,
}

impl World {
    fn new(can_replay: bool, buffer: usize) -> Self {
        let limits = CursorLimits { held_messages: 3, ..CursorLimits::default() };
        let (writer, reader) = index();
        Self {
            engine: Engine::default(),
            clock: 1,
            buffer,
            published: Vec::new(),
            wire: VecDeque::from([Wire::Connected]),
            asked: None,
            serving: None,
            cursor: Cursor::new(can_replay, limits),
            space: Hasher::new(3).space(&SpaceKey::plain(u32::try_from(BLOCK).unwrap())),
            writer,
            reader,
            applied: None,
            prompts: Vec::new(),
        }
    }

    fn step(&mut self, step: &Step) {
        match step {
            Step::Serve(prompt) => self.serve(prompt, true),
            Step::Evict(nth) => {
                let event = self.engine.evict(*nth);
                self.publish(event, true);
            }
            Step::ClearCache => {
                self.engine.copies.clear();
                self.publish(Some(Event::Cleared), true);
            }
            Step::Deliver => self.deliver(),
            Step::Lose => {
                if let Some(Wire::Message(_)) = self.wire.front() {
                    self.wire.pop_front();
                }
            }
            Step::Duplicate => {
                if let Some(first @ Wire::Message(_)) = self.wire.front().cloned() {
                    self.wire.push_front(first);
                }
            }
            Step::Replay(count) => self.replay(*count),
            Step::Refuse => self.refuse(),
            Step::Reconnect => self.wire.push_back(Wire::Connected),
            Step::Restart(unheard) => {
                if self.serving.is_some() {
                    self.refuse();
                }
                let incarnation = self.engine.incarnation + 1;
                self.engine = Engine { incarnation, ..Engine::default() };
                self.published.clear();
                for prompt in unheard {
                    self.serve(prompt, false);
                }
                self.wire.push_back(Wire::Connected);
            }
            Step::Resync => self.act(Cursor::resync),
        }
        self.check();
    }

    fn serve(&mut self, prompt: &Prompt, heard: bool) {
        self.prompts.push(prompt.clone());
        let event = self.engine.serve(prompt);
        self.publish(event, heard);
    }

    fn publish(&mut self, event: Option<Event>, heard: bool) {
        let Some(event) = event else { return };
        self.clock += 1;
        let stamp = Stamp { seq: self.published.len() as u64, sent_ns: self.clock };
        let message = Rc::new(Message { stamp, event, cache: self.engine.clone() });
        self.published.push(Rc::clone(&message));
        if heard {
            self.wire.push_back(Wire::Message(message));
        }
    }

    fn deliver(&mut self) {
        match self.wire.pop_front() {
            Some(Wire::Connected) => self.act(Cursor::connected),
            Some(Wire::Message(m)) => self.act(|cursor, out| cursor.live(m.stamp, 1, m, out)),
            None => {}
        }
    }

    fn replay(&mut self, count: usize) {
        if let Some(from) = self.asked.take() {
            let oldest = self.published.len().saturating_sub(self.buffer);
            let from = usize::try_from(from).unwrap().max(oldest).min(self.published.len());
            self.serving = Some(self.published[from..].iter().cloned().collect());
        }
        for _ in 0..count {
            let Some(serving) = &mut self.serving else { return };
            if let Some(m) = serving.pop_front() {
                self.act(|cursor, out| cursor.replayed(m.stamp, m, out));
            } else {
                self.serving = None;
                self.act(Cursor::replay_ended);
            }
        }
    }

    fn refuse(&mut self) {
        if self.asked.take().is_some() || self.serving.take().is_some() {
            self.act(Cursor::replay_failed);
        }
    }

    fn act(&mut self, f: impl FnOnce(&mut Cursor<Rc<Message>>, &mut Vec<Action<Rc<Message>>>)) {
        let mut out = Vec::new();
        f(&mut self.cursor, &mut out);
        for action in out {
            match action {
                Action::Apply { message, epoch } => {
                    self.apply(&message.event, epoch);
                    self.applied = Some(message);
                }
                Action::Clear(_) => {
                    self.writer.clear(SLOT);
                    self.applied = None;
                }
                Action::Replay { from } => {
                    self.asked = Some(from);
                    self.serving = None;
                }
            }
        }
    }

    fn apply(&mut self, event: &Event, epoch: u32) {
        match event {
            Event::Stored { parent, names, tokens } => {
                self.writer.store(&Store {
                    slot: SLOT,
                    tier: Tier::Device,
                    space: self.space,
                    parent: *parent,
                    blocks: names,
                    tokens,
                    extra: &[],
                });
            }
            Event::Removed(name) => {
                self.writer.remove(SLOT, Tier::Device, &[*name]);
            }
            Event::Cleared => {
                self.writer.clear(SLOT);
                self.cursor.all_cleared(epoch);
            }
        }
    }

    fn chain(&self, prompt: &[u8]) -> Vec<BlockHash> {
        let tokens: Vec<u32> = prompt.iter().flat_map(|b| [u32::from(*b), 7]).collect();
        let mut chain = Vec::new();
        self.space.chain(&tokens, &mut chain);
        chain
    }

    /// The index against the cache as it was after the last message applied.
    fn check(&self) {
        let mut out = Overlap::new();
        let whole = self.cursor.standing() == Standing::Current;
        for prompt in &self.prompts {
            self.reader.overlap(&self.chain(prompt), &mut out);
            let found = out.get(SLOT).device as usize;
            let true_depth = self.applied.as_ref().map_or(0, |m| m.cache.depth(prompt));
            assert!(found <= true_depth, "{found} of {true_depth} for {prompt:?}");
            if whole {
                assert_eq!(found, true_depth, "{prompt:?}");
            }
        }
        if whole && let Some(applied) = &self.applied {
            assert_eq!(self.reader.blocks(SLOT), applied.cache.copies.len() as u64);
        }
    }

    fn settle(&mut self) {
        for _ in 0..200 {
            while !self.wire.is_empty() {
                self.deliver();
                self.check();
            }
            if self.asked.is_none() && self.serving.is_none() {
                return;
            }
            self.replay(100);
            self.check();
        }
        panic!("it goes on asking");
    }
}

/// As many cases as `PROPTEST_CASES` says, or enough for every day.
fn cases() -> ProptestConfig {
    let default = ProptestConfig { failure_persistence: None, ..ProptestConfig::default() };
    let cases = if default.cases == 256 { 300 } else { default.cases };
    ProptestConfig { cases, ..default }
}

proptest! {
    #![proptest_config(cases())]

    #[test]
    fn the_index_follows_the_engine_through_losses_replays_and_restarts(
        steps in steps(), can_replay: bool, large_buffer: bool,
    ) {
        let mut world = World::new(can_replay, if large_buffer { 1000 } else { 5 });
        for step in &steps {
            world.step(step);
        }
        world.settle();
        world.step(&Step::Serve(vec![2]));
        world.settle();
        world.step(&Step::Resync);
        world.settle();
        if can_replay && large_buffer {
            prop_assert_eq!(world.cursor.standing(), Standing::Current);
        }
        let newest = world.published.last().map(|m| m.stamp);
        prop_assert_eq!(world.applied.as_ref().map(|m| m.stamp), newest);
        // A cache that is cleared leaves nothing unknown.
        world.step(&Step::ClearCache);
        world.step(&Step::Serve(vec![0, 0]));
        world.settle();
        prop_assert_eq!(world.cursor.standing(), Standing::Current);
    }
}
