//! Fetching the memory that a window of events needs, before the events are applied.
//!
//! A cache miss costs hundreds of instructions, so misses must overlap. Each pass below is a short
//! loop whose loads depend on nothing but what the pass before has fetched: first the buckets of all
//! names, then those that full ones have overflowed into, then the runs of names to remove and of
//! parents, then what these runs lead to.

use super::names_map::Key;
use super::runs::Place;
use super::worker::{Common, Worker};
use crate::index::Event;
use std::hint::black_box;

/// Names of a window.
const WINDOW: usize = 128;
/// Buckets behind a full one that are looked at; few names are further from their own.
const OVERFLOWS: usize = 2;

/// Room for one window.
#[derive(Debug, Default)]
pub(super) struct Ahead {
    names: Vec<Name>,
    places: Vec<Place>,
}

#[derive(Clone, Copy, Debug)]
struct Name {
    worker: usize,
    bucket: usize,
    /// Only of names whose place is needed: parents, and names that are to be removed.
    key: Option<Key>,
}

/// How many events make up the next window.
pub(super) fn window(events: &[Event<'_>]) -> usize {
    let mut names = 0;
    let fits = events.iter().take_while(|event| {
        let fits = names < WINDOW;
        names += match event {
            Event::Store(store) => store.blocks.len(),
            Event::Remove { blocks, .. } => blocks.len(),
            Event::Clear { .. } => 0,
        };
        fits
    });
    fits.count()
}

impl Ahead {
    pub(super) fn fetch(
        &mut self,
        window: &[Event<'_>],
        workers: &[Option<Box<Worker>>],
        all: &Common,
    ) {
        self.names.clear();
        self.places.clear();
        let seed = all.settings.seed;
        for event in window {
            let (slot, parent, names, removal) = match event {
                Event::Store(store) => (store.slot, store.parent, store.blocks, false),
                Event::Remove { slot, blocks, .. } => (*slot, None, *blocks, true),
                Event::Clear { .. } => continue,
            };
            let worker = usize::from(slot.0);
            let Some(Some(of)) = workers.get(worker) else { continue };
            let own = names.iter().take(WINDOW).map(|name| (*name, removal));
            for (name, placed) in own.chain(parent.map(|name| (name, true))) {
                let key = Key::new(name, seed);
                let bucket = of.names().home(key);
                self.names.push(Name { worker, bucket, key: placed.then_some(key) });
            }
        }
        let names = |name: &Name| workers.get(name.worker)?.as_ref().map(|of| of.names());
        let mut sum = 0;
        for name in &self.names {
            sum ^= names(name).map_or(0, |names| names.touch(name.bucket));
        }
        black_box(sum);
        for behind in 1..=OVERFLOWS {
            for name in &self.names {
                sum ^= names(name).map_or(0, |names| names.touch_overflow(name.bucket, behind));
            }
            black_box(sum);
        }
        for name in &self.names {
            if let Some(key) = name.key {
                let meant = names(name).and_then(|names| names.get(key));
                self.places.extend(meant.map(|named| named.place));
            }
        }
        self.places.dedup_by_key(|place| place.run);
        black_box(self.places.iter().fold(sum, |sum, place| sum ^ all.runs.touch(place.run)));
        black_box(self.places.iter().fold(sum, |sum, place| sum ^ all.runs.touch_arrays(*place)));
    }
}
