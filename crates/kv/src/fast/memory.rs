//! Shared memory of atomic words that grows and never moves, and who owns which part of it.
//!
//! Invariant: a word once there stays where it is for the life of the index, so that a reader with
//! an outdated address reads an outdated value and nothing worse. Freed parts are reused by size.

use super::sync::{AtomicU64, Ordering};
use std::sync::OnceLock;

/// Logarithm of the words of the first chunk (8 KiB). Chunks double until [`LAST`].
const FIRST: u32 = 10;
/// Logarithm of the words of every further chunk (8 MiB).
const LAST: u32 = 20;
/// Words of a cache line.
const LINE: usize = 8;

/// Words that begin on a cache line.
#[derive(Debug)]
struct Chunk {
    words: Box<[AtomicU64]>,
    start: usize,
    len: usize,
}

impl Chunk {
    fn new(len: usize) -> Self {
        let words: Box<[AtomicU64]> = (0..len + LINE).map(|_| AtomicU64::new(0)).collect();
        let start = words.as_ptr().align_offset(LINE * size_of::<u64>()).min(LINE);
        Self { words, start, len }
    }

    fn words(&self) -> &[AtomicU64] {
        &self.words[self.start..self.start + self.len]
    }
}

/// The memory. Its address book is made at once, for as many words as there may ever be.
#[derive(Debug)]
pub(super) struct Memory {
    chunks: Box<[OnceLock<Chunk>]>,
}

/// The chunk of a word, and where it is in there.
fn locate(at: u32) -> (usize, usize) {
    let x = at as usize + (1 << FIRST);
    let log = x.ilog2().min(LAST);
    if log < LAST {
        ((log - FIRST) as usize, x - (1 << log))
    } else {
        ((LAST - FIRST) as usize + (x >> LAST) - 1, x & ((1 << LAST) - 1))
    }
}

/// Words of a chunk.
fn chunk_len(chunk: usize) -> usize {
    1 << (FIRST as usize + chunk).min(LAST as usize)
}

impl Memory {
    /// Memory of up to about this many words.
    pub(super) fn new(most: u32) -> Self {
        Self { chunks: (0..=locate(most).0).map(|_| OnceLock::new()).collect() }
    }

    /// A word, if it is there yet.
    pub(super) fn word(&self, at: u32) -> Option<&AtomicU64> {
        let (chunk, at) = locate(at);
        self.chunks.get(chunk)?.get()?.words().get(at)
    }

    /// A word's value; 0 if it is not there yet.
    pub(super) fn get(&self, at: u32) -> u64 {
        self.word(at).map_or(0, |word| word.load(Ordering::Relaxed))
    }

    /// Words that lie in one chunk; empty if they do not, or are not there yet.
    pub(super) fn slice(&self, at: u32, len: u32) -> &[AtomicU64] {
        let (chunk, from) = locate(at);
        let chunk = self.chunks.get(chunk).and_then(OnceLock::get);
        chunk.and_then(|chunk| chunk.words().get(from..from + len as usize)).unwrap_or_default()
    }

    pub(super) fn set(&self, at: u32, value: u64) {
        if let Some(word) = self.word(at) {
            word.store(value, Ordering::Relaxed);
        }
    }

    /// Makes all words below `end` exist; says whether there is room for them.
    pub(super) fn grow(&self, end: u32) -> bool {
        let last = locate(end.saturating_sub(1)).0;
        let Some(chunks) = self.chunks.get(..=last) else { return false };
        for (at, chunk) in chunks.iter().enumerate().rev() {
            let mut made = false;
            chunk.get_or_init(|| {
                made = true;
                Chunk::new(chunk_len(at))
            });
            if !made {
                break;
            }
        }
        true
    }
}

/// The largest part that can be had.
pub(super) const LARGEST: u32 = 1 << 16;

/// Sizes: four between every two powers of two.
const CLASSES: usize = 61;

/// A part of the memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Part {
    pub(super) at: u32,
    pub(super) class: u8,
}

impl Part {
    /// No words.
    pub(super) const NONE: Self = Self { at: 0, class: 0 };

    pub(super) fn words(self) -> u32 {
        size(self.class)
    }
}

/// Words of a class: 0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, ...
fn size(class: u8) -> u32 {
    match class {
        0..=3 => u32::from(class),
        _ => (4 + u32::from(class) % 4) << (u32::from(class) / 4 - 1),
    }
}

/// The smallest class of at least this many words.
fn class_of(words: u32) -> Option<u8> {
    if words > LARGEST {
        return None;
    }
    let class = match words {
        0..=3 => words,
        _ => {
            let shift = words.ilog2() - 2;
            let quarter = words.div_ceil(1 << shift);
            (shift + 1) * 4 + quarter - 4
        }
    };
    u8::try_from(class).ok()
}

/// Who owns which part.
#[derive(Debug)]
pub(super) struct Parts {
    free: [Vec<u32>; CLASSES],
    end: u32,
}

impl Default for Parts {
    fn default() -> Self {
        Self { free: std::array::from_fn(|_| Vec::new()), end: 0 }
    }
}

impl Parts {
    /// A part of at least this many words, at most [`LARGEST`]; its values are left over from
    /// whoever had it before. `None` if the memory is used up.
    pub(super) fn take(&mut self, memory: &Memory, least: u32) -> Option<Part> {
        let class = class_of(least)?;
        if class == 0 {
            return Some(Part::NONE);
        }
        if let Some(at) = self.free[usize::from(class)].pop() {
            return Some(Part { at, class });
        }
        loop {
            let (chunk, from) = locate(self.end);
            let rest = u32::try_from(chunk_len(chunk) - from).unwrap_or(u32::MAX);
            if rest >= size(class) {
                break;
            }
            self.give_up(memory, rest)?;
        }
        let end = self.end.checked_add(size(class))?;
        if !memory.grow(end) {
            return None;
        }
        let part = Part { at: self.end, class };
        self.end = end;
        Some(part)
    }

    /// Words ever taken.
    #[cfg(test)]
    pub(super) fn end(&self) -> u32 {
        self.end
    }

    pub(super) fn give(&mut self, part: Part) {
        if part.class > 0 {
            self.free[usize::from(part.class)].push(part.at);
        }
    }

    /// The end of a chunk that is too small for what was asked becomes smaller parts.
    fn give_up(&mut self, memory: &Memory, mut rest: u32) -> Option<()> {
        if !memory.grow(self.end.checked_add(rest)?) {
            return None;
        }
        while rest > 0 {
            let mut class = class_of(rest.min(LARGEST))?;
            if size(class) > rest {
                class -= 1;
            }
            self.free[usize::from(class)].push(self.end);
            self.end += size(class);
            rest -= size(class);
        }
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_lie_one_behind_the_other_in_their_chunks() {
        let mut expected = (0, 0);
        for at in 0..5 << LAST {
            assert_eq!(locate(at), expected, "{at}");
            expected.1 += 1;
            if expected.1 == chunk_len(expected.0) {
                expected = (expected.0 + 1, 0);
            }
        }
    }

    #[test]
    fn sizes_grow_by_quarters_and_the_smallest_fitting_is_taken() {
        let sizes: Vec<_> = (0..18).map(size).collect();
        assert_eq!(sizes, [0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40]);
        assert_eq!(size(60), LARGEST);
        for words in 1..=LARGEST {
            let class = class_of(words).unwrap();
            assert!(usize::from(class) < CLASSES);
            assert!(size(class) >= words && size(class - 1) < words, "{words}");
        }
        assert_eq!(class_of(LARGEST + 1), None);
    }

    #[test]
    fn parts_never_overlap_nor_straddle_chunks() {
        let memory = Memory::new(1 << 24);
        let (mut parts, mut taken) = (Parts::default(), Vec::new());
        for round in 0..200_u32 {
            let least = round * 977 % 6000;
            let part = parts.take(&memory, least).unwrap();
            assert_eq!(memory.slice(part.at, part.words()).len() as u32, part.words());
            taken.push(part);
            if round % 3 == 0 {
                parts.give(taken.swap_remove(taken.len() / 2));
            }
        }
        taken.sort_by_key(|part| part.at);
        taken.retain(|part| part.words() > 0);
        for pair in taken.windows(2) {
            assert!(pair[0].at + pair[0].words() <= pair[1].at);
        }
    }

    #[test]
    fn chunks_begin_on_a_cache_line() {
        for len in [1024, 2048] {
            let chunk = Chunk::new(len);
            assert_eq!(chunk.words().as_ptr().align_offset(64), 0);
            assert_eq!(chunk.words().len(), len);
        }
    }

    #[test]
    fn words_that_are_not_there_read_as_nothing() {
        let memory = Memory::new(1 << 12);
        assert_eq!(memory.get(u32::MAX), 0);
        assert!(memory.grow(1 << 12) && !memory.grow(1 << 13));
        assert!(memory.slice(1 << 20, 3).is_empty());
        memory.set(1 << 20, 1);
    }
}
