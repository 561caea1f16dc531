//! The writer's side of the runs: making, extending and freeing them, and finding places.
//!
//! Invariant: a run lives while anything refers to it, and its parent run lives as long; so every
//! block hash has one place, and a block that has a place has its predecessor's place before it.

use super::names_map::MOST_RUNS;
use super::seqlock;
use super::shared::{Cover, Shared, pack_array, table_word};
use super::words::{Part, Parts, Words};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Blocks of a run at most, so that offsets and cuts fit 16 bits.
pub(super) const LONGEST: u32 = u16::MAX as u32;

/// The number of no run.
const NO_RUN: u32 = u32::MAX;

/// Where a block is: a run and an offset in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Place {
    pub(super) run: u32,
    pub(super) offset: u16,
}

/// Where a walk along a chain stands.
#[derive(Clone, Copy, Debug)]
pub(super) struct Walk {
    run: u32,
    /// The offset of the next block, if it is in the same run.
    next: u32,
    /// The last block was made by this walk, so none after it is known yet.
    fresh: bool,
}

impl Walk {
    /// Before the first block of a chain.
    pub(super) const START: Self = Self { run: NO_RUN, next: 0, fresh: false };

    /// Behind a block.
    pub(super) fn after(place: Place) -> Self {
        Self { run: place.run, next: u32::from(place.offset) + 1, fresh: false }
    }
}

/// What the writer alone knows of a run.
#[derive(Debug)]
struct Meta {
    first: u64,
    parent: u32,
    /// Names, placements and child runs that refer to it.
    refs: u64,
    len: u32,
    hashes: Part,
    covers: u32,
    cover: Part,
}

/// All runs.
#[derive(Debug)]
pub(super) struct Runs {
    shared: Arc<Shared>,
    metas: Vec<Meta>,
    free: Vec<u32>,
    headers: Parts,
    parts: Parts,
    tables: Parts,
    table_used: u32,
    /// Runs that nothing referred to when they were made.
    unclaimed: Vec<u32>,
}

impl Runs {
    pub(super) fn new(shared: Arc<Shared>) -> Self {
        Self {
            shared,
            metas: Vec::new(),
            free: Vec::new(),
            headers: Parts::default(),
            parts: Parts::default(),
            tables: Parts::default(),
            table_used: 0,
            unclaimed: Vec::new(),
        }
    }

    /// How many runs there are.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.metas.len() - self.free.len()
    }

    /// Words ever taken for hashes and covers.
    #[cfg(test)]
    pub(super) fn words(&self) -> u32 {
        self.parts.end()
    }

    /// The hash of the block at a place.
    pub(super) fn hash(&self, place: Place) -> u64 {
        let at = self.meta(place.run).map_or(0, |meta| meta.hashes.at + u32::from(place.offset));
        self.shared.data.get(at)
    }

    /// The place of the block `hash` that follows `walk`, made if it is not there yet; `None` if
    /// the memory is used up.
    pub(super) fn step(&mut self, walk: &mut Walk, hash: u64) -> Option<Place> {
        let len = self.meta(walk.run).map(|meta| meta.len);
        let inside = len.filter(|len| walk.next < *len).map(|_| walk.next);
        if let Some(next) = inside {
            let place = Place { run: walk.run, offset: u16::try_from(next).ok()? };
            if self.hash(place) == hash {
                walk.next += 1;
                return Some(place);
            }
        }
        let found = if walk.fresh { None } else { self.shared.find(hash) };
        if let Some(run) = found {
            *walk = Walk { run, next: 1, fresh: false };
            return Some(Place { run, offset: 0 });
        }
        let fits = len.is_some_and(|len| walk.next == len && len < LONGEST);
        let place = if fits { self.append(walk.run, hash)? } else { self.make(walk.run, hash)? };
        *walk = Walk { fresh: true, ..Walk::after(place) };
        Some(place)
    }

    pub(super) fn refer(&mut self, run: u32) {
        if let Some(meta) = self.metas.get_mut(run as usize).filter(|meta| meta.len > 0) {
            meta.refs += 1;
        }
    }

    /// One reference less; a run without any is freed, and its parent likewise.
    pub(super) fn unrefer(&mut self, run: u32) {
        let mut run = run;
        while let Some(meta) = self.metas.get_mut(run as usize).filter(|meta| meta.len > 0) {
            meta.refs = meta.refs.saturating_sub(1);
            if meta.refs > 0 {
                return;
            }
            run = self.discard(run);
        }
    }

    /// Frees the runs that were made and then not used after all.
    pub(super) fn settle(&mut self) {
        while let Some(run) = self.unclaimed.pop() {
            let unused = |meta: &Meta| meta.refs == 0 && meta.len > 0;
            if self.meta(run).is_some_and(unused) {
                let parent = self.discard(run);
                self.unrefer(parent);
            }
        }
    }

    /// How far a worker covers a run.
    pub(super) fn cover(&self, run: u32, slot: u16) -> [u16; 3] {
        match self.find_cover(run, slot) {
            Ok(at) => Cover::unpack(self.shared.data.get(at)).cuts,
            Err(_) => [0; 3],
        }
    }

    /// Sets how far a worker covers a run; says whether there was memory for it.
    pub(super) fn set_cover(&mut self, run: u32, slot: u16, cuts: [u16; 3]) -> bool {
        let Some(meta) = self.meta(run) else { return false };
        let (part, count) = (meta.cover, meta.covers);
        let word = Cover { slot, cuts }.pack();
        match self.find_cover(run, slot) {
            Ok(at) if cuts[2] > 0 => self.change(run, |data, _| data.set(at, word)),
            Ok(at) => {
                self.change(run, |data, meta| {
                    for at in at..meta.cover.at + count - 1 {
                        data.set(at, data.get(at + 1));
                    }
                    meta.covers -= 1;
                });
                if count == 1 {
                    self.parts.give(part);
                    self.change(run, |_, meta| meta.cover = Part::NONE);
                }
            }
            Err(_) if cuts[2] == 0 => {}
            Err(at) => {
                let index = at - part.at;
                let Some(room) = self.room(part, count, count + 1) else { return false };
                self.change(run, |data, meta| {
                    for i in (index..count).rev() {
                        data.set(room.at + i + 1, data.get(room.at + i));
                    }
                    data.set(room.at + index, word);
                    meta.cover = room;
                    meta.covers += 1;
                });
                if room != part {
                    self.parts.give(part);
                }
            }
        }
        true
    }

    fn meta(&self, run: u32) -> Option<&Meta> {
        self.metas.get(run as usize)
    }

    /// The address of a worker's cover on a run, or where it would be.
    fn find_cover(&self, run: u32, slot: u16) -> Result<u32, u32> {
        let Some(meta) = self.meta(run) else { return Err(0) };
        let (mut low, mut high) = (meta.cover.at, meta.cover.at + meta.covers);
        while low < high {
            let middle = low + (high - low) / 2;
            let found = Cover::unpack(self.shared.data.get(middle)).slot;
            match found.cmp(&slot) {
                std::cmp::Ordering::Less => low = middle + 1,
                std::cmp::Ordering::Equal => return Ok(middle),
                std::cmp::Ordering::Greater => high = middle,
            }
        }
        Err(low)
    }

    /// A part with the `count` first words of `part` and room for `most`: the same if it fits.
    fn room(&mut self, part: Part, count: u32, most: u32) -> Option<Part> {
        if part.words() >= most {
            return Some(part);
        }
        let room = self.parts.take(&self.shared.data, most)?;
        seqlock::reuse();
        for i in 0..count {
            self.shared.data.set(room.at + i, self.shared.data.get(part.at + i));
        }
        Some(room)
    }

    /// Changes a run's shared data under its sequence count and publishes its header.
    fn change(&mut self, run: u32, change: impl FnOnce(&Words, &mut Meta)) {
        let header = Shared::header_at(run);
        let headers = self.shared.headers();
        let (Some(meta), Some(count)) = (self.metas.get_mut(run as usize), headers.word(header))
        else {
            return;
        };
        seqlock::open(count);
        change(&self.shared.data, meta);
        headers.set(header + 1, meta.first);
        headers.set(header + 2, pack_array(meta.hashes.at, meta.len));
        headers.set(header + 3, pack_array(meta.cover.at, meta.covers));
        seqlock::close(count);
    }

    fn append(&mut self, run: u32, hash: u64) -> Option<Place> {
        let meta = self.meta(run)?;
        let (part, len) = (meta.hashes, meta.len);
        let room = self.room(part, len, len + 1)?;
        self.change(run, |data, meta| {
            data.set(room.at + len, hash);
            meta.hashes = room;
            meta.len += 1;
        });
        if room != part {
            self.parts.give(part);
        }
        Some(Place { run, offset: u16::try_from(len).ok()? })
    }

    fn make(&mut self, parent: u32, first: u64) -> Option<Place> {
        if self.metas.len() > MOST_RUNS as usize || !self.table_room() {
            return None;
        }
        let hashes = self.parts.take(&self.shared.data, 1)?;
        // A chain that contradicts itself may have lost its earlier run on the way.
        let parent = self.meta(parent).filter(|meta| meta.len > 0).map_or(NO_RUN, |_| parent);
        let meta = Meta { first, parent, refs: 0, len: 1, hashes, covers: 0, cover: Part::NONE };
        let run = match self.free.pop() {
            Some(run) => {
                self.metas[run as usize] = meta;
                run
            }
            None => {
                self.headers.take(self.shared.headers(), Shared::HEADER_WORDS)?;
                self.metas.push(meta);
                u32::try_from(self.metas.len() - 1).ok()?
            }
        };
        self.change(run, |data, _| data.set(hashes.at, first));
        self.refer(parent);
        self.unclaimed.push(run);
        self.table_insert(first, run);
        Some(Place { run, offset: 0 })
    }

    /// Takes a run that nothing refers to out of everything; returns its parent.
    fn discard(&mut self, run: u32) -> u32 {
        let Some(meta) = self.meta(run) else { return NO_RUN };
        let (first, parent, hashes, cover) = (meta.first, meta.parent, meta.hashes, meta.cover);
        self.table_remove(first, run);
        self.change(run, |_, meta| {
            *meta = Meta {
                first: 0,
                parent: NO_RUN,
                refs: 0,
                len: 0,
                hashes: Part::NONE,
                covers: 0,
                cover: Part::NONE,
            };
        });
        self.parts.give(hashes);
        self.parts.give(cover);
        self.free.push(run);
        parent
    }

    /// Keeps the table at most three quarters full.
    fn table_room(&mut self) -> bool {
        let (_, mask) = self.shared.table_span();
        let places = u64::from(mask) + 1;
        if (u64::from(self.table_used) + 1) * 4 <= places * 3 {
            return true;
        }
        let log = (places * 2).max(16).ilog2();
        // Tables grow past the largest part, so they lie one behind the other.
        let Some(at) = self.tables.take_run(&self.shared.table, 1_u64 << log) else {
            return false;
        };
        let mask = (1_u32 << log) - 1;
        for (run, meta) in self.metas.iter().enumerate() {
            if meta.len > 0
                && let Ok(run) = u32::try_from(run)
            {
                let place = self.free_place(at, mask, meta.first);
                self.shared.table.set(place, table_word(meta.first, run));
            }
        }
        self.shared.table_at.store(pack_array(at, log), Ordering::Release);
        true
    }

    fn free_place(&self, at: u32, mask: u32, first: u64) -> u32 {
        let mut place = home(first, mask);
        while self.shared.table.get(at + place) != 0 {
            place = (place + 1) & mask;
        }
        at + place
    }

    fn table_insert(&mut self, first: u64, run: u32) {
        let (at, mask) = self.shared.table_span();
        let place = self.free_place(at, mask, first);
        self.shared.table.set(place, table_word(first, run));
        self.table_used += 1;
    }

    /// Removes a run and moves up those that had to make way for it.
    fn table_remove(&mut self, first: u64, run: u32) {
        let (at, mask) = self.shared.table_span();
        let table = &self.shared.table;
        let mut hole = home(first, mask);
        for _ in 0..=mask {
            let word = table.get(at + hole);
            if word == 0 {
                return;
            }
            if word == table_word(first, run) {
                break;
            }
            hole = (hole + 1) & mask;
        }
        let mut next = (hole + 1) & mask;
        loop {
            let word = table.get(at + next);
            if word == 0 {
                break;
            }
            let owner = u32::try_from(word & 0xffff_ffff).unwrap_or(0).wrapping_sub(1);
            let wanted = home(self.meta(owner).map_or(0, |meta| meta.first), mask);
            // It may move to the hole if that is not before its home.
            if next.wrapping_sub(wanted) & mask >= next.wrapping_sub(hole) & mask {
                table.set(at + hole, word);
                hole = next;
            }
            next = (next + 1) & mask;
        }
        table.set(at + hole, 0);
        self.table_used -= 1;
    }

    /// Panics if a run is not what it should be.
    #[cfg(test)]
    pub(super) fn check(&self) {
        let mut refs = vec![0_u64; self.metas.len()];
        let mut live = 0;
        for (run, meta) in self.metas.iter().enumerate() {
            if meta.len == 0 {
                continue;
            }
            live += 1;
            assert_eq!(self.shared.find(meta.first), Some(u32::try_from(run).unwrap()));
            assert!(meta.refs > 0);
            if meta.parent != NO_RUN {
                refs[meta.parent as usize] += 1;
            }
            let mut last = None;
            for i in 0..meta.covers {
                let cover = Cover::unpack(self.shared.data.get(meta.cover.at + i));
                assert!(last < Some(cover.slot));
                last = Some(cover.slot);
                let [a, b, c] = cover.cuts;
                assert!(a <= b && b <= c && c > 0 && u32::from(c) <= meta.len, "{cover:?}");
            }
        }
        for (meta, children) in self.metas.iter().zip(refs) {
            assert!(meta.refs >= children);
        }
        assert_eq!(live, self.len());
        assert_eq!(live, self.table_used as usize);
    }
}

fn home(first: u64, mask: u32) -> u32 {
    u32::try_from(first & u64::from(mask)).unwrap_or(0)
}
