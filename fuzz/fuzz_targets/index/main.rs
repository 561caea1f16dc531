//! Arbitrary bytes as changes of the index, compared with a literal model after every batch.
//!
//! Names, contents and slots are few and bounds are low, so that they meet all the time. After each
//! input all slots are cleared, and nothing remains.
#![no_main]

mod model;
mod script;

use libfuzzer_sys::fuzz_target;
use pointsman_kv::{
    Applied, Depth, Event, IndexSettings, Overlap, Reader, Slot, SlotStats, Writer, index_with,
};

use model::Model;
use script::{Change, Op, SLOTS, Script};

/// Small enough to be reached.
const SETTINGS: IndexSettings =
    IndexSettings { blocks_per_slot: 24, placed_per_slot: 10, prediction_ttl_ns: 10, seed: 3 };

fuzz_target!(|bytes: &[u8]| {
    let (writer, reader) = index_with(SETTINGS);
    let mut pair = Pair { writer, reader, model: Model::new(SETTINGS), now: 0 };
    let mut batch = Vec::new();
    for op in Script::new(bytes) {
        match op {
            Op::Change(change) => batch.push(change),
            other => {
                pair.apply(&std::mem::take(&mut batch));
                pair.run(&other);
            }
        }
    }
    pair.apply(&batch);
    pair.end();
});

/// The index and the model.
struct Pair {
    writer: Writer,
    reader: Reader,
    model: Model,
    now: u64,
}

impl Pair {
    /// Applies a batch of events to both.
    fn apply(&mut self, batch: &[Change]) {
        let events: Vec<Event<'_>> = batch.iter().map(Change::event).collect();
        let found = self.writer.apply(&events);
        let mut expected = Applied::default();
        events.iter().for_each(|event| self.model.apply(event, &mut expected));
        assert_eq!(found, expected, "{batch:?}");
        self.compare();
    }

    fn run(&mut self, op: &Op) {
        match op {
            Op::Change(_) | Op::Flush => return,
            Op::Place { slot, chain, wait } => {
                self.now += wait;
                self.writer.place(*slot, chain, self.now);
                self.model.place(*slot, chain, self.now);
            }
            Op::Approximate { slot, mode } => {
                self.writer.set_approximate(*slot, *mode);
                self.model.set_approximate(*slot, *mode);
            }
            Op::Expire { wait } => {
                self.now += wait;
                self.writer.expire(self.now);
                self.model.expire(self.now);
            }
        }
        self.compare();
    }

    /// Every chain that was ever spoken of is answered as the model does.
    fn compare(&self) {
        let mut out = Overlap::new();
        let views: Vec<_> = (0..=SLOTS).map(|slot| self.model.view(Slot(slot))).collect();
        for chain in self.model.chains() {
            self.reader.overlap(chain, &mut out);
            for (slot, view) in (0..).map(Slot).zip(&views) {
                assert_eq!(out.get(slot), view.depth(chain), "{slot:?} of {chain:?}");
            }
        }
        for slot in (0..=SLOTS).map(Slot) {
            assert_eq!(self.reader.blocks(slot), self.model.blocks(slot), "blocks of {slot:?}");
        }
        for SlotStats { slot, blocks, names, placed, .. } in self.writer.stats().slots {
            let expected =
                (self.model.blocks(slot), self.model.names(slot), self.model.placed(slot));
            assert_eq!((blocks, names, placed), expected, "statistics of {slot:?}");
        }
    }

    /// Clears every slot: nothing remains.
    fn end(mut self) {
        (0..SLOTS).for_each(|slot| self.writer.clear(Slot(slot)));
        let mut out = Overlap::new();
        for chain in self.model.chains() {
            self.reader.overlap(chain, &mut out);
            assert!(out.depths().iter().all(|depth| *depth == Depth::default()), "{chain:?}");
        }
        for SlotStats { slot, blocks, tiers, names, placed, .. } in self.writer.stats().slots {
            assert_eq!((blocks, tiers, names, placed), (0, [0; 3], 0, 0), "{slot:?}");
            assert_eq!(self.reader.blocks(slot), 0, "{slot:?}");
        }
    }
}
