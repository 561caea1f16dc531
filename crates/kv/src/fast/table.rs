//! The table that finds runs by the hash of their first block: many small ones, so that growth
//! moves little at a time.
//!
//! Open addressing with linear probing; a removal moves later entries up. What readers find is a
//! hint until they have read the run itself; while the writer moves entries they may find nothing.

use super::memory::{Memory, Part, Parts};
use super::shared::Shared;
use super::sync::Ordering;

/// Logarithm of the number of small tables. Each holds up to three quarters of the largest part,
/// so there can be 25 million runs.
const TABLES: u32 = 9;

/// Words of the directory, one a table.
pub(super) const DIRECTORY: u32 = 1 << TABLES;

/// The small table of a block.
fn table_of(first: u64) -> u32 {
    u32::try_from(first >> (64 - TABLES)).unwrap_or(0)
}

/// Where a block would be in a table of this size if nothing were in its way.
fn home(first: u64, size: u32) -> u32 {
    let fraction = u128::from(first << TABLES);
    u32::try_from((fraction * u128::from(size)) >> 64).unwrap_or(0)
}

/// An entry: the lower half of the first block's hash, and one more than the run's number.
fn entry(first: u64, run: u32) -> u64 {
    first << 32 | u64::from(run + 1)
}

fn run_of(entry: u64) -> Option<u32> {
    u32::try_from(entry & u64::from(u32::MAX)).ok()?.checked_sub(1)
}

/// Address and size of a table, in one word.
fn span(word: u64) -> (u32, u32) {
    let half = |word: u64| u32::try_from(word & u64::from(u32::MAX)).unwrap_or(0);
    (half(word), half(word >> 32))
}

fn after(at: u32, size: u32) -> u32 {
    if at + 1 == size { 0 } else { at + 1 }
}

/// Steps from one place on to another.
fn steps(from: u32, to: u32, size: u32) -> u32 {
    if to >= from { to - from } else { to + size - from }
}

impl Shared {
    /// The run that begins with this block.
    pub(super) fn find(&self, first: u64) -> Option<u32> {
        let (at, size) =
            span(self.directory.get(table_of(first) as usize)?.load(Ordering::Acquire));
        let entries = self.data.slice(at, size);
        let mut place = home(first, size);
        for _ in 0..entries.len() {
            let found = entries.get(place as usize)?.load(Ordering::Relaxed);
            if found == 0 {
                return None;
            }
            if (found >> 32 ^ first) << 32 == 0
                && let Some(run) = run_of(found)
                && self.first(run) == first
            {
                return Some(run);
            }
            place = after(place, size);
        }
        None
    }
}

/// What the writer alone knows of the tables.
#[derive(Debug)]
pub(super) struct Tables {
    parts: Vec<(Part, u32)>,
}

impl Tables {
    pub(super) fn new() -> Self {
        Self { parts: vec![(Part::NONE, 0); DIRECTORY as usize] }
    }

    /// How many runs are in the tables.
    #[cfg(test)]
    pub(super) fn len(&self) -> u32 {
        self.parts.iter().map(|(_, used)| used).sum()
    }

    /// Makes room for one more run beginning with this block: at most three quarters are used.
    pub(super) fn make_room(
        &mut self,
        shared: &Shared,
        parts: &mut Parts,
        first: u64,
    ) -> Option<()> {
        let table = table_of(first);
        let (old, used) = *self.parts.get(table as usize)?;
        if (used + 1) * 4 <= old.words() * 3 {
            return Some(());
        }
        let new = parts.take(&shared.data, (old.words() + old.words() / 2).max(8))?;
        let words = shared.data.slice(new.at, new.words());
        words.iter().for_each(|word| word.store(0, Ordering::Relaxed));
        for word in shared.data.slice(old.at, old.words()) {
            let run = run_of(word.load(Ordering::Relaxed));
            if let Some(run) = run {
                put(&shared.data, new, shared.first(run), run);
            }
        }
        let word = u64::from(new.at) | u64::from(new.words()) << 32;
        shared.directory.get(table as usize)?.store(word, Ordering::Release);
        parts.give(old);
        self.parts[table as usize].0 = new;
        Some(())
    }

    /// Adds a run, after [`Tables::make_room`].
    pub(super) fn insert(&mut self, shared: &Shared, first: u64, run: u32) {
        let (part, used) = &mut self.parts[table_of(first) as usize];
        *used += 1;
        put(&shared.data, *part, first, run);
    }

    /// Removes a run and moves up those that had to make way for it.
    pub(super) fn remove(&mut self, shared: &Shared, first: u64, run: u32) {
        let (part, used) = &mut self.parts[table_of(first) as usize];
        let size = part.words();
        let words = shared.data.slice(part.at, size);
        let get = |at: u32| words.get(at as usize).map_or(0, |word| word.load(Ordering::Relaxed));
        let mut hole = home(first, size);
        while get(hole) != entry(first, run) {
            if get(hole) == 0 {
                return;
            }
            hole = after(hole, size);
        }
        *used -= 1;
        let mut next = after(hole, size);
        while let Some(found) = run_of(get(next)) {
            // It may move to the hole if that is not before its home.
            let wanted = home(shared.first(found), size);
            if steps(wanted, next, size) >= steps(hole, next, size) {
                words[hole as usize].store(get(next), Ordering::Relaxed);
                hole = next;
            }
            next = after(next, size);
        }
        words[hole as usize].store(0, Ordering::Relaxed);
    }
}

/// Puts a run into the first free place.
fn put(data: &Memory, part: Part, first: u64, run: u32) {
    let words = data.slice(part.at, part.words());
    let mut place = home(first, part.words());
    for _ in 0..words.len() {
        let Some(word) = words.get(place as usize) else { return };
        if word.load(Ordering::Relaxed) == 0 {
            return word.store(entry(first, run), Ordering::Relaxed);
        }
        place = after(place, part.words());
    }
}
