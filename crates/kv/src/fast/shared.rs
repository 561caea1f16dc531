//! What the writer publishes and readers walk: runs, who covers them, and the table that finds them.
//!
//! A run is a contiguous piece of a chain, as an array of block hashes; the table maps the hash of
//! its first block to it. Invariant: whatever a reader concludes about a run it has read under the
//! run's sequence count, first hash included; the table and addresses are hints until then.

use super::seqlock;
use super::words::Words;
use crate::index::{Depth, Overlap};
use crate::names::{BlockHash, Slot};
use std::sync::atomic::{AtomicU64, Ordering};

/// Words of a run's header: sequence count, first hash, hashes, cover.
const HEADER: u32 = 4;

/// How far a worker covers a run from its start, in one word: the slot, then the blocks per level
/// (device; device or host; any tier), each at most a run's length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Cover {
    pub(super) slot: u16,
    pub(super) cuts: [u16; 3],
}

impl Cover {
    pub(super) fn pack(self) -> u64 {
        let [a, b, c] = self.cuts.map(u64::from);
        u64::from(self.slot) << 48 | a << 32 | b << 16 | c
    }

    pub(super) fn unpack(word: u64) -> Self {
        let part = |shift: u32| u16::try_from(word >> shift & 0xffff).unwrap_or(0);
        Self { slot: part(48), cuts: [part(32), part(16), part(0)] }
    }
}

/// Address and length of an array, in one word.
pub(super) fn pack_array(at: u32, len: u32) -> u64 {
    u64::from(at) | u64::from(len) << 32
}

fn unpack_array(word: u64) -> (u32, u32) {
    let half = |word: u64| u32::try_from(word & 0xffff_ffff).unwrap_or(0);
    (half(word), half(word >> 32))
}

/// Everything that is shared between the writer and its readers.
#[derive(Debug)]
pub(super) struct Shared {
    /// Run headers, by run number.
    headers: Words,
    /// Hash and cover arrays.
    pub(super) data: Words,
    /// Places of the table, the current one and its forerunners.
    pub(super) table: Words,
    /// Where the current table lies, and the logarithm of its size.
    pub(super) table_at: AtomicU64,
    /// Distinct blocks held, by slot.
    pub(super) blocks: Words,
    /// One more than the highest slot that ever held anything.
    pub(super) slots: AtomicU64,
}

/// A table place: the upper half of the first block's hash, and one more than the run's number.
pub(super) fn table_word(first: u64, run: u32) -> u64 {
    first & !0xffff_ffff | u64::from(run + 1)
}

impl Shared {
    pub(super) fn new() -> Self {
        Self {
            headers: Words::new(),
            data: Words::new(),
            table: Words::new(),
            table_at: AtomicU64::new(pack_array(0, 0)),
            blocks: Words::new(),
            slots: AtomicU64::new(0),
        }
    }

    pub(super) fn publish_blocks(&self, slot: Slot, blocks: u64) {
        let at = u32::from(slot.0);
        if self.blocks.grow(u64::from(at) + 1) {
            self.blocks.set(at, blocks);
        }
    }

    pub(super) fn headers(&self) -> &Words {
        &self.headers
    }

    /// The address of a run's header, and how many words all headers up to it take.
    pub(super) fn header_at(run: u32) -> u32 {
        run.saturating_mul(HEADER)
    }

    pub(super) const HEADER_WORDS: u32 = HEADER;

    /// Where the current table begins, and its mask.
    pub(super) fn table_span(&self) -> (u32, u32) {
        let (at, log) = unpack_array(self.table_at.load(Ordering::Acquire));
        (at, (1_u32 << log.min(31)) - 1)
    }

    /// The run that begins with this block.
    pub(super) fn find(&self, first: u64) -> Option<u32> {
        let (at, mask) = self.table_span();
        let start = u32::try_from(first & u64::from(mask)).ok()?;
        for step in 0..=mask {
            let word = self.table.get(at + (start.wrapping_add(step) & mask));
            if word == 0 {
                return None;
            }
            if (word ^ first) >> 32 == 0 {
                let run = u32::try_from(word & 0xffff_ffff).ok()?.checked_sub(1)?;
                if self.headers.get(Self::header_at(run) + 1) == first {
                    return Some(run);
                }
            }
        }
        None
    }

    /// A run's hashes and covers. For readers only a hint unless under the run's count.
    pub(super) fn arrays(&self, run: u32) -> (&[AtomicU64], &[AtomicU64]) {
        let header = Self::header_at(run);
        let (hashes_at, len) = unpack_array(self.headers.get(header + 2));
        let (covers_at, covers) = unpack_array(self.headers.get(header + 3));
        (self.data.slice(hashes_at, len), self.data.slice(covers_at, covers))
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
        let header = Self::header_at(run);
        let count = self.headers.word(header)?;
        seqlock::read(count, || {
            let (hashes, all) = self.arrays(run);
            covers.clear();
            covers.extend(all.iter().map(|word| word.load(Ordering::Relaxed)));
            common(hashes, chain)
        })
    }
}

/// The length of the common prefix. Hashes are chained: where one is equal, all before it are.
fn common(hashes: &[AtomicU64], chain: &[BlockHash]) -> usize {
    let most = hashes.len().min(chain.len());
    let equal = |i: usize| hashes[i].load(Ordering::Relaxed) == chain[i].0;
    if most == 0 || !equal(0) {
        return 0;
    }
    if equal(most - 1) {
        return most;
    }
    // `low` is equal, `high` is not. Four independent loads per round.
    let (mut low, mut high) = (0, most - 1);
    while high - low > 1 {
        let step = ((high - low) / 5).max(1);
        let at = [1, 2, 3, 4].map(|i| (low + i * step).min(high));
        let is = at.map(|i| i < high && equal(i));
        let equals = is.iter().take_while(|is| **is).count();
        if equals < 4 {
            high = at[equals];
        }
        if equals > 0 {
            low = at[equals - 1];
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
        let Cover { slot, cuts } = Cover::unpack(*cover);
        let Some(depth) = depths.get_mut(usize::from(slot)) else { continue };
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
                    assert_eq!(common(&hashes, &chain), usize::try_from(same).unwrap());
                }
            }
        }
    }

    #[test]
    fn a_cover_survives_packing() {
        let cover = Cover { slot: 65_535, cuts: [1, 40_000, 65_535] };
        assert_eq!(Cover::unpack(cover.pack()), cover);
    }
}
