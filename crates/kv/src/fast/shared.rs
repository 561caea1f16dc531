//! What the writer publishes and readers walk: runs, who covers them, and the table that finds them.
//!
//! A run is a contiguous piece of a chain, as an array of block hashes, with a cache line of its
//! own that leads to it. Invariant: whatever a reader concludes about a run it has read under the
//! run's sequence count, first hash included; the table and addresses are hints until then.

use super::memory::{Memory, Part};
use super::runs::MOST_RUNS;
use super::seqlock;
use super::sync::{AtomicU64, Ordering};
use super::table::DIRECTORY;
use crate::index::{Depth, Overlap};
use crate::names::{BlockHash, Slot};
use std::hint::black_box;

/// Words of a run's head, which is a cache line.
pub(super) const HEAD: u32 = 8;
/// Its words: the sequence count, the first hash, where the hashes and the covers are, what the
/// writer alone reads, where other runs go on from this one, and the first covers.
const COUNT: usize = 0;
const FIRST: usize = 1;
const HASHES: usize = 2;
const COVERS: usize = 3;
const PARENT: usize = 4;
const FORKS: usize = 5;
const INLINE: usize = 6;
/// Covers that fit the head.
pub(super) const INLINE_COVERS: u32 = HEAD - INLINE as u32;

/// How far a worker covers a run from its start, in one word: the slot, whether the worker has
/// exceptions, and the blocks per level (device; device or host; any tier).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Cover {
    pub(super) slot: u16,
    /// Holes, blocks behind holes, or blocks in slower tiers: the worker has a side for the run.
    pub(super) side: bool,
    pub(super) cuts: [u16; 3],
}

/// Bits of a cut, and of a run's length.
pub(super) const CUT_BITS: u32 = 15;

impl Cover {
    /// The first `cut` blocks on the device.
    pub(super) fn plain(slot: Slot, cut: u16) -> Self {
        Self { slot: slot.0, side: false, cuts: [cut; 3] }
    }

    pub(super) fn pack(self) -> u64 {
        let [a, b, c] = self.cuts.map(u64::from);
        u64::from(self.slot) << 48
            | u64::from(self.side) << 47
            | a << (2 * CUT_BITS)
            | b << CUT_BITS
            | c
    }

    pub(super) fn unpack(word: u64) -> Self {
        let cut = |shift: u32| u16::try_from(word >> shift & ((1 << CUT_BITS) - 1)).unwrap_or(0);
        Self {
            slot: Self::slot_of(word),
            side: word >> 47 & 1 == 1,
            cuts: [cut(2 * CUT_BITS), cut(CUT_BITS), cut(0)],
        }
    }

    pub(super) fn slot_of(word: u64) -> u16 {
        u16::try_from(word >> 48).unwrap_or(0)
    }
}

/// The offsets behind which other runs last went on from a run: there chains are likely to leave it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Forks(u64);

impl Forks {
    /// How many are remembered.
    const MOST: u32 = 4;
    const BITS: u32 = u64::BITS / Self::MOST;

    /// One more, in place of the oldest.
    pub(super) fn with(self, offset: u16) -> Self {
        if self.offsets().any(|known| known == usize::from(offset)) {
            return self;
        }
        Self(self.0 << Self::BITS | (u64::from(offset) + 1))
    }

    fn offsets(self) -> impl Iterator<Item = usize> {
        let part = move |i| usize::from((self.0 >> (i * Self::BITS)) as u16);
        (0..Self::MOST).map(part).filter_map(|offset| offset.checked_sub(1))
    }
}

/// Words of arrays and tables at most: 8 GiB.
const MOST_DATA: u32 = 1 << 30;

/// An array in the memory: its part, and how much of it is used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Array {
    pub(super) part: Part,
    pub(super) len: u32,
}

impl Array {
    pub(super) fn pack(self) -> u64 {
        u64::from(self.part.at) | u64::from(self.len) << 32 | u64::from(self.part.class) << 56
    }

    fn unpack(word: u64) -> Self {
        let part =
            |shift: u32, bits: u32| u32::try_from(word >> shift & ((1 << bits) - 1)).unwrap_or(0);
        let class = u8::try_from(word >> 56).unwrap_or(0);
        Self { part: Part { at: part(0, 32), class }, len: part(32, 24) }
    }
}

/// A run's head.
#[derive(Clone, Copy, Debug)]
pub(super) struct Head<'a>(&'a [AtomicU64; HEAD as usize]);

impl<'a> Head<'a> {
    pub(super) fn count(self) -> &'a AtomicU64 {
        &self.0[COUNT]
    }

    pub(super) fn first(self) -> u64 {
        self.0[FIRST].load(Ordering::Relaxed)
    }

    pub(super) fn hashes(self) -> Array {
        Array::unpack(self.0[HASHES].load(Ordering::Relaxed))
    }

    /// The covers; in the head itself if they have no part.
    pub(super) fn covers(self) -> Array {
        Array::unpack(self.0[COVERS].load(Ordering::Relaxed))
    }

    /// What the writer keeps here for itself.
    pub(super) fn parent(self) -> u64 {
        self.0[PARENT].load(Ordering::Relaxed)
    }

    pub(super) fn forks(self) -> Forks {
        Forks(self.0[FORKS].load(Ordering::Relaxed))
    }

    /// A hint, so it needs no count.
    pub(super) fn set_forks(self, forks: Forks) {
        self.0[FORKS].store(forks.0, Ordering::Relaxed);
    }

    pub(super) fn inline(self) -> &'a [AtomicU64] {
        &self.0[INLINE..]
    }

    pub(super) fn set_first(self, first: u64) {
        self.0[FIRST].store(first, Ordering::Relaxed);
    }

    pub(super) fn set_hashes(self, hashes: Array) {
        self.0[HASHES].store(hashes.pack(), Ordering::Relaxed);
    }

    pub(super) fn set_covers(self, covers: Array) {
        self.0[COVERS].store(covers.pack(), Ordering::Relaxed);
    }

    pub(super) fn set_parent(self, parent: u64) {
        self.0[PARENT].store(parent, Ordering::Relaxed);
    }
}

/// Everything that is shared between the writer and its readers.
#[derive(Debug)]
pub(super) struct Shared {
    /// Heads of runs, by run number.
    pub(super) heads: Memory,
    /// Arrays of hashes and covers, and tables.
    pub(super) data: Memory,
    /// Where the tables lie.
    pub(super) directory: Box<[AtomicU64]>,
    /// Distinct blocks held, by slot.
    pub(super) blocks: Memory,
    /// One more than the highest slot that ever held anything.
    pub(super) slots: AtomicU64,
}

impl Shared {
    pub(super) fn new() -> Self {
        Self {
            heads: Memory::new(MOST_RUNS * HEAD),
            data: Memory::new(MOST_DATA),
            directory: (0..DIRECTORY).map(|_| AtomicU64::new(0)).collect(),
            blocks: Memory::new(u32::from(u16::MAX)),
            slots: AtomicU64::new(0),
        }
    }

    /// Distinct blocks that a worker holds.
    pub(super) fn held(&self, slot: Slot) -> u64 {
        self.blocks.get(u32::from(slot.0))
    }

    pub(super) fn publish_held(&self, slot: Slot, blocks: u64) {
        let at = u32::from(slot.0);
        if self.blocks.word(at).is_some() || self.blocks.grow(at + 1) {
            self.blocks.set(at, blocks);
        }
    }

    /// Readers are to look as far as this slot. Only the writer calls it, so there is no race.
    pub(super) fn know(&self, slot: Slot) {
        let slots = u64::from(slot.0) + 1;
        if self.slots.load(Ordering::Relaxed) < slots {
            self.slots.store(slots, Ordering::Release);
        }
    }

    pub(super) fn head(&self, run: u32) -> Option<Head<'_>> {
        let words = self.heads.slice(run.checked_mul(HEAD)?, HEAD);
        words.first_chunk().map(Head)
    }

    /// The first block of a run, 0 if there is no such run.
    pub(super) fn first(&self, run: u32) -> u64 {
        self.head(run).map_or(0, Head::first)
    }

    pub(super) fn hashes(&self, hashes: Array) -> &[AtomicU64] {
        self.data.slice(hashes.part.at, hashes.len)
    }

    pub(super) fn covers<'a>(&'a self, head: Head<'a>) -> &'a [AtomicU64] {
        let covers = head.covers();
        if covers.part.class == 0 {
            head.inline().get(..covers.len as usize).unwrap_or_default()
        } else {
            self.data.slice(covers.part.at, covers.len)
        }
    }

    /// How deep each worker holds `chain`, for all workers in one walk over its runs.
    pub(super) fn overlap(&self, chain: &[BlockHash], out: &mut Overlap) {
        let slots = usize::try_from(self.slots.load(Ordering::Acquire)).unwrap_or(0);
        let (depths, covers) = out.reset_with_scratch(slots);
        let mut from = 0;
        while let Some(first) = chain.get(from)
            && let Some(run) = self.find(first.0)
        {
            let Some(matched) = self.view(run, &chain[from..], covers) else { return };
            if matched == 0 || !advance(depths, covers, from, matched) {
                return;
            }
            from += matched;
        }
    }

    /// How many blocks of a run begin `chain`, and who covers the run, as of one moment.
    fn view(&self, run: u32, chain: &[BlockHash], covers: &mut Vec<u64>) -> Option<usize> {
        let head = self.head(run)?;
        seqlock::read(head.count(), || {
            let all = self.covers(head);
            // Their misses overlap with those of the hashes.
            let ends =
                [all.first(), all.last()].map(|w| w.map_or(0, |w| w.load(Ordering::Relaxed)));
            black_box(ends);
            let matched = common(self.hashes(head.hashes()), chain, head.forks());
            covers.clear();
            covers.extend(all.iter().map(|word| word.load(Ordering::Relaxed)));
            matched
        })
    }
}

/// The length of the common prefix. Hashes are chained: where one is equal, all before it are.
fn common(hashes: &[AtomicU64], chain: &[BlockHash], forks: Forks) -> usize {
    let most = hashes.len().min(chain.len());
    let (hashes, chain) = (&hashes[..most], &chain[..most]);
    let equal = |i: usize| hashes[i].load(Ordering::Relaxed) == chain[i].0;
    if most == 0 || !equal(0) {
        return 0;
    }
    // `low` is equal, `high` is not. All looks of a round are independent of each other.
    let (mut low, mut high) = (0, most);
    let look = |low: &mut usize, high: &mut usize, at: usize| {
        if equal(at) { *low = (*low).max(at) } else { *high = (*high).min(at) }
    };
    look(&mut low, &mut high, most - 1);
    for at in forks.offsets().filter(|at| at + 1 < most) {
        look(&mut low, &mut high, at);
        look(&mut low, &mut high, at + 1);
    }
    while high - low > 1 {
        let (from, step) = (low, ((high - low) / 5).max(1));
        for at in (1..5).map(|i| from + i * step).filter(|at| *at < most) {
            look(&mut low, &mut high, at);
        }
    }
    low + 1
}

/// Moves every worker that holds the chain up to `from` on by what it covers of the next run, of
/// which `matched` blocks belong to the chain; says whether any worker came to the end of them.
fn advance(depths: &mut [Depth], covers: &[u64], from: usize, matched: usize) -> bool {
    let narrow = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
    let (from, matched) = (narrow(from), narrow(matched));
    let mut through = false;
    for cover in covers {
        let slot = usize::from(Cover::slot_of(*cover));
        let Some(depth) = depths.get_mut(slot) else { continue };
        let Cover { side, cuts, .. } = Cover::unpack(*cover);
        if !side && depth.host | depth.disk == 0 {
            // All on the device so far, and all on the device here.
            if depth.device == from {
                let more = u32::from(cuts[2]).min(matched);
                depth.device += more;
                through |= more == matched;
            }
            continue;
        }
        let mut reach = [depth.device, depth.device + depth.host, depth.total()];
        for (reach, cut) in reach.iter_mut().zip(cuts) {
            if *reach == from {
                *reach += u32::from(cut).min(matched);
                through |= *reach == from + matched;
            }
        }
        let [device, host, disk] = reach;
        *depth = Depth {
            device,
            host: host.saturating_sub(device),
            disk: disk.saturating_sub(host.max(device)),
        };
    }
    through
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_common_prefix_is_found_at_every_length() {
        for len in [0_u64, 1, 2, 3, 5, 6, 17, 64, 1000] {
            let hashes: Vec<_> = (0..len).map(|i| AtomicU64::new(i + 10)).collect();
            for same in (0..=len).filter(|same| *same < 70 || same % 97 == 0 || *same > len - 3) {
                for more in [0, 1, 40] {
                    let chain = (0..same).map(|i| i + 10).chain((0..more).map(|i| i + 5000));
                    let chain: Vec<_> = chain.map(BlockHash).collect();
                    let forks = [same / 2, same, 3, same.saturating_sub(1)];
                    let forks = |n| {
                        forks
                            .iter()
                            .take(n)
                            .fold(Forks::default(), |all, at| all.with(u16::try_from(*at).unwrap()))
                    };
                    for n in 0..=4 {
                        let found = common(&hashes, &chain, forks(n));
                        assert_eq!(found, usize::try_from(same).unwrap());
                    }
                }
            }
        }
    }

    #[test]
    fn the_last_forks_are_remembered() {
        let forks = [5, 9, 5, 0, 7, 32_766].into_iter().fold(Forks::default(), Forks::with);
        let mut offsets: Vec<_> = forks.offsets().collect();
        offsets.sort_unstable();
        assert_eq!(offsets, [0, 7, 9, 32_766]);
    }

    #[test]
    fn covers_and_arrays_survive_packing() {
        let cover = Cover { slot: 65_535, side: true, cuts: [1, 20_000, 32_767] };
        assert_eq!(Cover::unpack(cover.pack()), cover);
        let plain = Cover::plain(Slot(7), 32_767);
        assert_eq!(Cover::unpack(plain.pack()), plain);
        let array = Array { part: Part { at: u32::MAX, class: 60 }, len: 65_536 };
        assert_eq!(Array::unpack(array.pack()), array);
    }
}
