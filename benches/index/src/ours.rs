//! `pointsman-kv`, by its public interface alone.

use std::hint::black_box;
use std::time::Duration;

use pointsman_kv::{
    BlockHash, EngineHash, Event, Hasher, Overlap, Reader, Slot, Space, SpaceKey, Store, Tier,
    Writer, index,
};
use pointsman_wire::kv_events::{self, Announce, Batch, BlockName, Encoding};

use crate::cpu::timed;
use crate::subject::{Read, Subject, Write};
use crate::workload::{BLOCK, Kind, Op, Window, tokens_of};

/// Events that are handed over together.
pub(crate) const BATCH: usize = 64;

pub(crate) struct Ours {
    writer: Writer,
    reader: Reader,
    space: Space,
    names: Vec<EngineHash>,
    tokens: Vec<u32>,
    answer: Overlap,
}

/// A window's events in the types of the index.
fn events<'a>(
    window: &'a Window,
    space: Space,
    names: &'a mut Vec<EngineHash>,
    out: &mut Vec<Event<'a>>,
) {
    names.clear();
    names.extend(window.names.iter().copied().map(EngineHash));
    let (names, tier) = (&*names, Tier::Device);
    out.extend(window.ops.iter().map(|op| {
        let (slot, blocks) = (Slot(op.worker), &names[op.start..op.end]);
        match op.kind {
            Kind::Store { parent } => Event::Store(Store {
                slot,
                tier,
                space,
                parent: parent.map(EngineHash),
                blocks,
                tokens: &window.tokens[op.start * BLOCK..op.end * BLOCK],
                extra: &[],
            }),
            Kind::Remove => Event::Remove { slot, tier, blocks },
            Kind::Clear => Event::Clear { slot },
        }
    }));
}

fn apply_all(writer: &mut Writer, events: &[Event<'_>]) {
    for batch in events.chunks(BATCH) {
        black_box(writer.apply(batch));
    }
}

impl Subject for Ours {
    type Chain = Vec<BlockHash>;

    fn new(capacities: &[usize]) -> Ours {
        let (mut writer, reader) = index();
        // As the router does, which reads it from the engines.
        for (worker, blocks) in (0..).zip(capacities) {
            writer.expect(Slot(worker), *blocks as u64);
        }
        let space = Hasher::new(0x706f_696e).space(&SpaceKey::plain(BLOCK as u32));
        let (names, tokens) = (Vec::new(), Vec::new());
        Ours { writer, reader, space, names, tokens, answer: Overlap::new() }
    }

    fn apply(&mut self, window: &Window) -> Duration {
        let mut all = Vec::with_capacity(window.ops.len());
        events(window, self.space, &mut self.names, &mut all);
        let writer = &mut self.writer;
        timed(|| apply_all(writer, &all)).0
    }

    fn chain(&mut self, content: &[u64], out: &mut Vec<BlockHash>) {
        self.tokens.clear();
        content.iter().for_each(|content| tokens_of(*content, &mut self.tokens));
        self.space.chain(&self.tokens, out);
    }

    fn ask(&mut self, chain: &Vec<BlockHash>) {
        self.reader.overlap(chain, &mut self.answer);
    }

    fn depths(&self, out: &mut [u32]) {
        for (slot, depth) in (0..).zip(out) {
            *depth = self.answer.get(Slot(slot)).device;
        }
    }

    fn split(self) -> (Write, Read<Vec<BlockHash>>) {
        let Ours { mut writer, reader, space, mut names, mut answer, .. } = self;
        let write = move |window: &Window| {
            let mut all = Vec::with_capacity(window.ops.len());
            events(window, space, &mut names, &mut all);
            apply_all(&mut writer, &all);
        };
        let read = move |chain: &Vec<BlockHash>| {
            reader.overlap(chain, &mut answer);
            black_box(&answer);
        };
        (Box::new(write), Box::new(read))
    }
}

/// The stores of a window as messages of vLLM 0.32, `each` events of one worker to a message.
pub(crate) fn messages(window: &Window, each: usize) -> Vec<(u16, Vec<u8>)> {
    let names: Vec<BlockName<'_>> = window.names.iter().map(|name| BlockName::Int(*name)).collect();
    let announce = |op: &Op| {
        let hashes = &names[op.start..op.end];
        match op.kind {
            Kind::Store { parent } => Announce::Stored {
                hashes,
                parent: parent.map(BlockName::Int),
                tokens: &window.tokens[op.start * BLOCK..op.end * BLOCK],
                block_size: BLOCK as u32,
                lora_name: None,
                medium: Some("GPU"),
                cache_salt: None,
            },
            Kind::Remove => Announce::Removed { hashes, medium: Some("GPU") },
            Kind::Clear => Announce::Cleared,
        }
    };
    let mut messages = Vec::new();
    for ops in window.ops.chunk_by(|a, b| a.worker == b.worker) {
        for ops in ops.chunks(each) {
            let announces: Vec<_> = ops.iter().map(announce).collect();
            let payload = kv_events::encode(1.8e9, Some(0), &announces, Encoding::Map);
            messages.push((ops[0].worker, payload));
        }
    }
    messages
}

/// Room for what is read from messages until it is applied.
#[derive(Default)]
pub(crate) struct Decoded {
    names: Vec<EngineHash>,
    tokens: Vec<u32>,
    stores: Vec<(u16, Option<EngineHash>, usize, usize)>,
}

impl Decoded {
    /// Reads one message. Events other than stores, which these messages have not, are left out.
    pub(crate) fn read(&mut self, worker: u16, payload: &[u8]) {
        let Ok(events) = Batch::events_of(payload) else { return };
        for event in events {
            let Ok(kv_events::Event::Stored(stored)) = event else { continue };
            let start = self.names.len();
            self.names.extend(stored.hashes.map(|name| EngineHash(name.id())));
            self.tokens.extend(stored.tokens);
            let parent = stored.parent.map(|name| EngineHash(name.id()));
            self.stores.push((worker, parent, start, self.names.len()));
        }
    }

    pub(crate) fn reset(&mut self) {
        self.names.clear();
        self.tokens.clear();
        self.stores.clear();
    }
}

impl Ours {
    /// The space of all prompts.
    pub(crate) fn space(&self) -> Space {
        self.space
    }

    /// Reads and applies messages, as many at once as make a batch.
    pub(crate) fn apply_messages(&mut self, messages: &[(u16, Vec<u8>)], room: &mut Decoded) {
        room.reset();
        for (worker, payload) in messages {
            room.read(*worker, payload);
            if room.stores.len() >= BATCH {
                self.apply_decoded(room);
                room.reset();
            }
        }
        self.apply_decoded(room);
    }

    fn apply_decoded(&mut self, room: &Decoded) {
        let event = |(worker, parent, start, end): &(u16, Option<EngineHash>, usize, usize)| {
            Event::Store(Store {
                slot: Slot(*worker),
                tier: Tier::Device,
                space: self.space,
                parent: *parent,
                blocks: &room.names[*start..*end],
                tokens: &room.tokens[*start * BLOCK..*end * BLOCK],
                extra: &[],
            })
        };
        let batch: Vec<Event<'_>> = room.stores.iter().map(event).collect();
        self.writer.apply(&batch);
    }
}
