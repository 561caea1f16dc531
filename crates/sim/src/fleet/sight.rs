//! What the router sees of the engines' caches: the real index, fed with events that may come late
//! or not at all.
//!
//! A simulation has block names but no tokens, so the index is given each name as the one token of
//! a block: the same code runs, over the same chains.

use std::collections::VecDeque;

use pointsman_kv::{
    BlockHash, EngineHash, Hasher, Overlap, Reader, Slot as KvSlot, Space, SpaceKey, Store, Tier,
    Writer, index,
};

use crate::engine::{Batch, Event, Nanos};
use crate::rng::Rng;

use pointsman_brain::Slot;

pub(super) struct Sight {
    writer: Writer,
    reader: Reader,
    space: Space,
    lag: Nanos,
    loss: f64,
    lost: u64,
    rng: Rng,
    /// On their way, in order of arrival; None clears a worker.
    late: VecDeque<(Nanos, Slot, Option<Batch>)>,
    chain: Vec<BlockHash>,
    overlap: Overlap,
}

impl Sight {
    pub(super) fn new(lag: Nanos, loss: f64, seed: u64) -> Sight {
        let (writer, reader) = index();
        Sight {
            writer,
            reader,
            space: Hasher::new(seed).space(&SpaceKey::plain(1)),
            lag,
            loss,
            lost: 0,
            rng: Rng::new(seed),
            late: VecDeque::new(),
            chain: Vec::new(),
            overlap: Overlap::new(),
        }
    }

    pub(super) fn wakeup(&self) -> Option<Nanos> {
        self.late.front().map(|&(at, ..)| at)
    }

    /// Takes in what has arrived by now.
    pub(super) fn advance(&mut self, now: Nanos) {
        while let Some((_, slot, batch)) = self.late.pop_front_if(|(at, ..)| *at <= now) {
            match batch {
                Some(batch) => self.apply(slot, &batch.events),
                None => self.writer.clear(KvSlot(slot.0)),
            }
        }
    }

    /// An engine has told something.
    pub(super) fn observe(&mut self, slot: Slot, batch: Batch) {
        if self.loss > 0.0 && self.rng.unit() < self.loss {
            self.lost += 1;
            return;
        }
        let at = batch.at + self.lag;
        if self.lag == 0 {
            self.apply(slot, &batch.events);
        } else {
            self.late.push_back((at, slot, Some(batch)));
        }
    }

    /// An engine is gone, which shows at once; what it told before and is under way is void.
    pub(super) fn clear(&mut self, slot: Slot) {
        self.late.retain(|&(_, of, _)| of != slot);
        self.writer.clear(KvSlot(slot.0));
    }

    /// Whether the index knows all that was told.
    pub(super) fn is_current(&self) -> bool {
        self.late.is_empty() && self.lost == 0
    }

    /// Blocks of a chain that each worker is known to hold.
    pub(super) fn overlap(&mut self, names: &[u64], workers: usize) -> Vec<u32> {
        let tokens: Vec<u32> = names.iter().map(|&name| token(name)).collect();
        self.space.chain(&tokens, &mut self.chain);
        self.reader.overlap(&self.chain, &mut self.overlap);
        (0..workers).map(|at| self.overlap.get(KvSlot(at as u16)).device).collect()
    }

    fn apply(&mut self, slot: Slot, events: &[Event]) {
        let slot = KvSlot(slot.0);
        for event in events {
            match event {
                Event::Stored { content, first, count } => {
                    let (first, end) = (*first as usize, (first + count) as usize);
                    let blocks: Vec<EngineHash> =
                        content.names[first..end].iter().map(|&name| EngineHash(name)).collect();
                    let tokens: Vec<u32> =
                        content.names[first..end].iter().map(|&name| token(name)).collect();
                    self.writer.store(&Store {
                        slot,
                        tier: Tier::Device,
                        space: self.space,
                        parent: first.checked_sub(1).map(|at| EngineHash(content.names[at])),
                        blocks: &blocks,
                        tokens: &tokens,
                        extra: &[],
                    });
                }
                Event::Removed { name } => {
                    self.writer.remove(slot, Tier::Device, &[EngineHash(*name)]);
                }
                Event::Cleared => self.writer.clear(slot),
            }
        }
    }
}

/// The one token that stands for a block.
fn token(name: u64) -> u32 {
    (name ^ name >> 32) as u32
}
