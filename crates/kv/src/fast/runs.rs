//! The writer's side of the runs: making, extending and freeing them, and finding places.
//!
//! Invariant: a run lives while a worker covers it or another run goes on from it; so every block
//! hash has one place, and a block that has a place has its predecessor's place before it.

use super::memory::{Memory, Part, Parts};
use super::seqlock;
use super::shared::{Array, CUT_BITS, Cover, Forks, HEAD, Head, INLINE_COVERS, Shared};
use super::sync::{AtomicU64, Ordering};
use super::table::Tables;
use crate::names::Slot;
use std::sync::Arc;

/// Blocks of a run at most, so that offsets and cuts fit their bits.
pub(super) const LONGEST: u32 = (1 << CUT_BITS) - 1;

/// Highest run number, so that it fits an entry of a names map and a run's parent.
pub(super) const MOST_RUNS: u32 = (1 << 26) - 2;

/// Cache lines of covers that are fetched ahead.
const TOUCHED_LINES: usize = 16;

/// Where a block is: a run and an offset in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Place {
    pub(super) run: u32,
    pub(super) offset: u16,
}

/// Blocks that lie one behind the other in a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Stretch {
    pub(super) run: u32,
    pub(super) from: u16,
    pub(super) len: u16,
}

impl Stretch {
    pub(super) fn place(self, at: u16) -> Place {
        Place { run: self.run, offset: self.from + at }
    }
}

/// Where a walk along a chain stands.
#[derive(Clone, Copy, Debug)]
pub(super) struct Walk {
    last: Option<Place>,
    /// The last block was made by this walk, so none after it is known yet.
    fresh: bool,
}

impl Walk {
    /// Before the first block of a chain.
    pub(super) const START: Self = Self { last: None, fresh: false };

    /// Behind a block.
    pub(super) fn after(place: Place) -> Self {
        Self { last: Some(place), fresh: false }
    }
}

/// What a worker covers of a run, and where in the run's covers that is written.
#[derive(Clone, Copy, Debug)]
pub(super) struct Covered {
    run: u32,
    at: usize,
    pub(super) cover: Cover,
}

/// What a run goes on from, and how many runs go on from it.
#[derive(Clone, Copy, Debug, Default)]
struct Family {
    parent: Option<Place>,
    children: u32,
}

/// Children that are counted; a run that ever had as many is never freed.
const MOST_CHILDREN: u32 = (1 << 22) - 1;

impl Family {
    fn pack(self) -> u64 {
        let parent = self.parent.map_or(0, |at| u64::from(at.run + 1) << 16 | u64::from(at.offset));
        parent << 22 | u64::from(self.children)
    }

    fn unpack(word: u64) -> Self {
        let parent = word >> 22;
        let run = u32::try_from(parent >> 16).ok().and_then(|run| run.checked_sub(1));
        let offset = u16::try_from(parent & 0xffff).unwrap_or(0);
        let children = u32::try_from(word & u64::from(MOST_CHILDREN)).unwrap_or(0);
        Self { parent: run.map(|run| Place { run, offset }), children }
    }
}

/// All runs.
#[derive(Debug)]
pub(super) struct Runs {
    shared: Arc<Shared>,
    tables: Tables,
    parts: Parts,
    heads: Parts,
    ends: u32,
    free: Vec<u32>,
    /// Runs that nobody covered when they were made.
    unclaimed: Vec<u32>,
}

impl Runs {
    pub(super) fn new(shared: Arc<Shared>) -> Self {
        Self {
            shared,
            tables: Tables::new(),
            parts: Parts::default(),
            heads: Parts::default(),
            ends: 0,
            free: Vec::new(),
            unclaimed: Vec::new(),
        }
    }

    fn head(&self, run: u32) -> Option<Head<'_>> {
        self.shared.head(run)
    }

    /// Blocks of a run; 0 if it is none.
    fn len(&self, run: u32) -> u32 {
        self.head(run).map_or(0, |head| head.hashes().len)
    }

    /// The hash of the block at a place.
    pub(super) fn hash(&self, place: Place) -> u64 {
        let hashes = self.head(place.run).map(Head::hashes).unwrap_or_default();
        self.shared.data.get(hashes.part.at + u32::from(place.offset))
    }

    /// The hashes of a run's first blocks.
    pub(super) fn first_hashes(&self, run: u32, len: u32) -> impl Iterator<Item = u64> {
        let hashes = self.head(run).map(Head::hashes).unwrap_or_default();
        let words = self.shared.hashes(hashes).iter().take(len as usize);
        words.map(|word| word.load(Ordering::Relaxed))
    }

    /// What a run goes on from.
    pub(super) fn parent(&self, run: u32) -> Option<Place> {
        self.family(run).parent
    }

    fn family(&self, run: u32) -> Family {
        self.head(run).map(|head| Family::unpack(head.parent())).unwrap_or_default()
    }

    /// Brings a run's head into the cache.
    pub(super) fn touch(&self, run: u32) -> u64 {
        self.shared.first(run)
    }

    /// Brings a run's covers into the cache, and the hash behind a place.
    pub(super) fn touch_arrays(&self, place: Place) -> u64 {
        let Some(head) = self.head(place.run) else { return 0 };
        let next = head.hashes().part.at + u32::from(place.offset) + 1;
        let lines = self.shared.covers(head).chunks(HEAD as usize).take(TOUCHED_LINES);
        let covers = lines.map(|line| line[0].load(Ordering::Relaxed));
        covers.fold(self.shared.data.get(next), |sum, word| sum ^ word)
    }

    /// The stretch of blocks that follows `walk` and begins `hashes`, made if it is not there yet;
    /// `None` if the memory is used up. It may be shorter than `hashes`: then ask again.
    pub(super) fn walk(&mut self, walk: &mut Walk, hashes: &[u64]) -> Option<Stretch> {
        let first = *hashes.first()?;
        let last = walk.last.filter(|last| self.len(last.run) > 0);
        let next = last.map(|last| Place { offset: last.offset + 1, ..last });
        let known = match next {
            Some(next) if self.hash_within(next) == Some(first) => Some(next),
            _ if walk.fresh => None,
            _ => self.shared.find(first).map(|run| Place { run, offset: 0 }),
        };
        let stretch = match known {
            Some(place) => {
                let len = self.common(place, hashes);
                Stretch { run: place.run, from: place.offset, len }
            }
            None => self.make(last, hashes)?,
        };
        let place = stretch.place(stretch.len - 1);
        *walk = Walk { last: Some(place), fresh: known.is_none() };
        Some(stretch)
    }

    fn hash_within(&self, place: Place) -> Option<u64> {
        let head = self.head(place.run)?;
        let word = self.shared.hashes(head.hashes()).get(usize::from(place.offset))?;
        Some(word.load(Ordering::Relaxed))
    }

    /// How many of `hashes` a run has from `place` on.
    fn common(&self, place: Place, hashes: &[u64]) -> u16 {
        let all = self.head(place.run).map(Head::hashes).unwrap_or_default();
        let words = self.shared.hashes(all).iter().skip(usize::from(place.offset));
        let equal = words.zip(hashes).take_while(|(a, b)| a.load(Ordering::Relaxed) == **b).count();
        u16::try_from(equal).unwrap_or(0)
    }

    /// Makes blocks that are not there yet, behind `last`: at the end of its run or in a new one.
    fn make(&mut self, last: Option<Place>, hashes: &[u64]) -> Option<Stretch> {
        if let Some(last) = last
            && let from = u32::from(last.offset) + 1
            && from == self.len(last.run)
            && from < LONGEST
        {
            let hashes = &hashes[..hashes.len().min((LONGEST - from) as usize)];
            self.append(last.run, from, hashes)?;
            return stretch(last.run, from, hashes.len());
        }
        let hashes = &hashes[..hashes.len().min(LONGEST as usize)];
        let run = self.begin(last, hashes)?;
        stretch(run, 0, hashes.len())
    }

    fn append(&mut self, run: u32, from: u32, hashes: &[u64]) -> Option<()> {
        let old = self.head(run)?.hashes();
        let len = from + u32::try_from(hashes.len()).ok()?;
        let part = self.room(old, len)?;
        let head = self.head(run)?;
        seqlock::open(head.count());
        fill(&self.shared.data, part.at + from, hashes);
        head.set_hashes(Array { part, len });
        seqlock::close(head.count());
        if part != old.part {
            self.parts.give(old.part);
        }
        Some(())
    }

    fn begin(&mut self, parent: Option<Place>, hashes: &[u64]) -> Option<u32> {
        let first = *hashes.first()?;
        self.tables.make_room(&self.shared, &mut self.parts, first)?;
        let len = u32::try_from(hashes.len()).ok()?;
        let part = self.parts.take(&self.shared.data, len)?;
        fill(&self.shared.data, part.at, hashes);
        let run = self.number()?;
        let head = self.head(run)?;
        seqlock::open(head.count());
        head.set_first(first);
        head.set_hashes(Array { part, len });
        head.set_covers(Array::default());
        head.set_parent(Family { parent, children: 0 }.pack());
        head.set_forks(Forks::default());
        seqlock::close(head.count());
        if let Some(parent) = parent {
            self.set_children(parent.run, |children| (children + 1).min(MOST_CHILDREN));
            if let Some(head) = self.head(parent.run) {
                head.set_forks(head.forks().with(parent.offset));
            }
        }
        self.unclaimed.push(run);
        self.tables.insert(&self.shared, first, run);
        Some(run)
    }

    /// The number of a run to be.
    fn number(&mut self) -> Option<u32> {
        if let Some(run) = self.free.pop() {
            return Some(run);
        }
        let run = Some(self.ends).filter(|run| *run <= MOST_RUNS)?;
        let head = self.heads.take(&self.shared.heads, HEAD)?;
        self.ends = head.at / HEAD + 1;
        Some(run)
    }

    fn set_children(&mut self, run: u32, change: impl FnOnce(u32) -> u32) {
        let family = self.family(run);
        if let Some(head) = self.head(run) {
            // Only the writer reads this word.
            head.set_parent(Family { children: change(family.children), ..family }.pack());
        }
    }

    /// A part that holds what `old` holds and has room for `len` words: the same if it fits.
    fn room(&mut self, old: Array, len: u32) -> Option<Part> {
        if old.part.words() >= len {
            return Some(old.part);
        }
        let part = self.parts.take(&self.shared.data, len)?;
        copy(self.shared.hashes(old), self.shared.data.slice(part.at, part.words()));
        Some(part)
    }

    /// What a worker covers of a run.
    pub(super) fn cover(&self, run: u32, slot: u16) -> Option<Cover> {
        self.covered(run, slot).map(|covered| covered.cover)
    }

    /// Likewise, and where that is written.
    pub(super) fn covered(&self, run: u32, slot: u16) -> Option<Covered> {
        let covers = self.shared.covers(self.head(run)?);
        let at = search(covers, slot).ok()?;
        let cover = Cover::unpack(covers[at].load(Ordering::Relaxed));
        Some(Covered { run, at, cover })
    }

    /// Changes what a worker covers to another beginning of the run, nothing to be changed between.
    pub(super) fn recut(&mut self, covered: Covered, cut: u16) {
        let Some(head) = self.head(covered.run) else { return };
        if let Some(word) = self.shared.covers(head).get(covered.at) {
            let cover = Cover::plain(Slot(covered.cover.slot), cut);
            seqlock::open(head.count());
            word.store(cover.pack(), Ordering::Relaxed);
            seqlock::close(head.count());
        }
    }

    /// Whether so many blocks are all of a run.
    pub(super) fn is_all(&self, run: u32, cut: u16) -> bool {
        u32::from(cut) >= self.len(run)
    }

    /// Sets what a worker covers of a run; says whether there was memory for it.
    pub(super) fn put_cover(&mut self, run: u32, cover: Cover) -> bool {
        self.try_put_cover(run, cover).is_some()
    }

    fn try_put_cover(&mut self, run: u32, cover: Cover) -> Option<()> {
        let head = self.head(run)?;
        let covers = self.shared.covers(head);
        let at = match search(covers, cover.slot) {
            Ok(at) => {
                seqlock::open(head.count());
                covers[at].store(cover.pack(), Ordering::Relaxed);
                seqlock::close(head.count());
                return Some(());
            }
            Err(at) => at,
        };
        let old = head.covers();
        let len = old.len + 1;
        let part = self.cover_room(run, old, len)?;
        let head = self.head(run)?;
        seqlock::open(head.count());
        head.set_covers(Array { part, len });
        let words = self.shared.covers(head);
        for at in (at..old.len as usize).rev() {
            words[at + 1].store(words[at].load(Ordering::Relaxed), Ordering::Relaxed);
        }
        words[at].store(cover.pack(), Ordering::Relaxed);
        seqlock::close(head.count());
        if part != old.part {
            self.parts.give(old.part);
        }
        Some(())
    }

    /// Where a run's covers find room if there are `len`.
    fn cover_room(&mut self, run: u32, old: Array, len: u32) -> Option<Part> {
        if old.part.words() >= len || old.part == Part::NONE && len <= INLINE_COVERS {
            return Some(old.part);
        }
        let part = self.parts.take(&self.shared.data, len)?;
        let from = self.shared.covers(self.head(run)?);
        copy(from, self.shared.data.slice(part.at, part.words()));
        Some(part)
    }

    /// A worker has nothing of a run any more. A run that nobody has is freed.
    pub(super) fn drop_cover(&mut self, run: u32, slot: u16) {
        let Some(head) = self.head(run) else { return };
        let covers = self.shared.covers(head);
        let Ok(at) = search(covers, slot) else { return };
        let old = head.covers();
        let len = old.len - 1;
        // Two steps back before covers return to the head, so that they do not go to and fro.
        let part = if len < INLINE_COVERS { Part::NONE } else { old.part };
        seqlock::open(head.count());
        for at in at..len as usize {
            covers[at].store(covers[at + 1].load(Ordering::Relaxed), Ordering::Relaxed);
        }
        if part != old.part {
            copy(&covers[..len as usize], head.inline());
        }
        head.set_covers(Array { part, len });
        seqlock::close(head.count());
        if part != old.part {
            self.parts.give(old.part);
        }
        if len == 0 { self.free_unused(run) } else { self.trim(run) }
    }

    /// Gives back the end of a run that nobody has and nothing goes on from.
    pub(super) fn trim(&mut self, run: u32) {
        let Some(head) = self.head(run).filter(|_| self.family(run).children == 0) else { return };
        let (mut len, old) = (0, head.hashes());
        for word in self.shared.covers(head) {
            let cover = Cover::unpack(word.load(Ordering::Relaxed));
            len = len.max(u32::from(cover.cuts[0]));
            // What a worker with exceptions has is not known here.
            if cover.side || len >= old.len {
                return;
            }
        }
        if len == 0 {
            return;
        }
        let small = if len * 2 <= old.part.words() {
            self.parts.take(&self.shared.data, len)
        } else {
            None
        };
        let part = small.unwrap_or(old.part);
        if small.is_some() {
            copy(self.shared.hashes(old), self.shared.data.slice(part.at, len));
        }
        let Some(head) = self.head(run) else { return };
        seqlock::open(head.count());
        head.set_hashes(Array { part, len });
        seqlock::close(head.count());
        if part != old.part {
            self.parts.give(old.part);
        }
    }

    /// Frees the runs that were made and then not covered after all.
    pub(super) fn settle(&mut self) {
        while let Some(run) = self.unclaimed.pop() {
            self.free_unused(run);
        }
    }

    /// Frees a run without covers and children, and its parent likewise.
    fn free_unused(&mut self, run: u32) {
        let mut next = Some(run);
        while let Some(run) = next
            && let Some(head) = self.head(run)
        {
            let (family, hashes, covers) = (self.family(run), head.hashes(), head.covers());
            if hashes.len == 0 || family.children > 0 {
                return;
            }
            if covers.len > 0 {
                return self.trim(run);
            }
            let first = head.first();
            self.tables.remove(&self.shared, first, run);
            let Some(head) = self.head(run) else { return };
            seqlock::open(head.count());
            head.set_first(0);
            head.set_hashes(Array::default());
            head.set_covers(Array::default());
            head.set_parent(0);
            seqlock::close(head.count());
            self.parts.give(hashes.part);
            self.parts.give(covers.part);
            self.free.push(run);
            let uncounted =
                |children| if children == MOST_CHILDREN { children } else { children - 1 };
            next = family.parent.map(|parent| parent.run);
            if let Some(parent) = next {
                self.set_children(parent, uncounted);
            }
        }
    }
}

fn stretch(run: u32, from: u32, len: usize) -> Option<Stretch> {
    Some(Stretch { run, from: u16::try_from(from).ok()?, len: u16::try_from(len).ok()? })
}

fn fill(data: &Memory, at: u32, hashes: &[u64]) {
    let len = u32::try_from(hashes.len()).unwrap_or(0);
    for (word, hash) in data.slice(at, len).iter().zip(hashes) {
        word.store(*hash, Ordering::Relaxed);
    }
}

fn copy(from: &[AtomicU64], to: &[AtomicU64]) {
    for (from, to) in from.iter().zip(to) {
        to.store(from.load(Ordering::Relaxed), Ordering::Relaxed);
    }
}

/// Where a worker's cover is, or would be.
fn search(covers: &[AtomicU64], slot: u16) -> Result<usize, usize> {
    covers.binary_search_by_key(&slot, |word| Cover::slot_of(word.load(Ordering::Relaxed)))
}

#[cfg(test)]
impl Runs {
    /// How many runs there are.
    pub(super) fn count(&self) -> usize {
        self.ends as usize - self.free.len()
    }

    /// Words ever taken.
    pub(super) fn words(&self) -> u32 {
        self.parts.end()
    }

    /// Panics if a run is not what it should be.
    pub(super) fn check(&self) {
        let mut children = vec![0_u32; self.ends as usize];
        let mut live = 0;
        for run in 0..self.ends {
            let head = self.head(run).unwrap();
            let len = head.hashes().len;
            if len == 0 {
                continue;
            }
            live += 1;
            assert_eq!(self.shared.find(head.first()), Some(run));
            assert_eq!(self.hash(Place { run, offset: 0 }), head.first());
            let family = self.family(run);
            assert!(head.covers().len > 0 || family.children > 0);
            if let Some(parent) = family.parent {
                children[parent.run as usize] += 1;
                assert!(u32::from(parent.offset) < self.len(parent.run));
            }
            let mut last = None;
            for word in self.shared.covers(head) {
                let cover = Cover::unpack(word.load(Ordering::Relaxed));
                assert!(last < Some(cover.slot));
                last = Some(cover.slot);
                let [a, b, c] = cover.cuts;
                assert!(a <= b && b <= c && u32::from(c) <= len, "{cover:?}");
                assert!(cover.side || a == c && a > 0);
            }
        }
        for (run, children) in (0..).zip(children) {
            assert_eq!(self.family(run).children, children);
        }
        assert_eq!(live, self.count());
        assert_eq!(live, self.tables.len() as usize);
        assert!(self.unclaimed.is_empty());
    }
}
