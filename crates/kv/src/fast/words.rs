//! Shared memory of atomic words that grows and never moves, and who owns which part of it.
//!
//! Invariant: a word once there stays where it is for the life of the index, so that a reader with
//! an outdated address reads an outdated value and nothing worse. Freed parts are reused by size.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

/// Words per chunk (512 KiB).
const CHUNK: usize = 1 << 16;
/// Chunks at most: 8 GiB of words.
const CHUNKS: usize = 1 << 14;

/// The memory.
#[derive(Debug)]
pub(super) struct Words {
    chunks: Box<[OnceLock<Box<[AtomicU64]>>]>,
}

impl Words {
    pub(super) fn new() -> Self {
        Self { chunks: (0..CHUNKS).map(|_| OnceLock::new()).collect() }
    }

    /// A word, if it is there yet.
    pub(super) fn word(&self, at: u32) -> Option<&AtomicU64> {
        let at = at as usize;
        self.chunks.get(at / CHUNK)?.get()?.get(at % CHUNK)
    }

    /// A word's value; 0 if it is not there yet.
    pub(super) fn get(&self, at: u32) -> u64 {
        self.word(at).map_or(0, |word| word.load(Ordering::Relaxed))
    }

    /// Words that lie in one chunk; empty if they do not, or are not there yet.
    pub(super) fn slice(&self, at: u32, len: u32) -> &[AtomicU64] {
        let (chunk, from) = (at as usize / CHUNK, at as usize % CHUNK);
        let chunk = self.chunks.get(chunk).and_then(OnceLock::get);
        chunk.and_then(|chunk| chunk.get(from..from + len as usize)).unwrap_or_default()
    }

    pub(super) fn set(&self, at: u32, value: u64) {
        if let Some(word) = self.word(at) {
            word.store(value, Ordering::Relaxed);
        }
    }

    /// Makes all words below `end` exist; says whether there is room for them.
    pub(super) fn grow(&self, end: u64) -> bool {
        let chunks = usize::try_from(end.div_ceil(CHUNK as u64)).unwrap_or(usize::MAX);
        if chunks > CHUNKS {
            return false;
        }
        for chunk in self.chunks[..chunks].iter().rev() {
            let mut made = false;
            chunk.get_or_init(|| {
                made = true;
                (0..CHUNK).map(|_| AtomicU64::new(0)).collect()
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

/// Sizes: powers of two and the halves between them.
const CLASSES: usize = 33;

/// A part of the memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Part {
    pub(super) at: u32,
    class: u8,
}

impl Part {
    /// No words.
    pub(super) const NONE: Self = Self { at: 0, class: 0 };

    pub(super) fn words(self) -> u32 {
        size(self.class)
    }
}

/// Words of a class: 0, 1, 2, 3, 4, 6, 8, 12, ...
fn size(class: u8) -> u32 {
    match class {
        0..=3 => u32::from(class),
        _ if class & 1 == 0 => 1 << (class / 2),
        _ => 3 << ((class - 3) / 2),
    }
}

fn class_of(words: u32) -> Option<u8> {
    (0..CLASSES).filter_map(|class| u8::try_from(class).ok()).find(|class| size(*class) >= words)
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
    pub(super) fn take(&mut self, words: &Words, least: u32) -> Option<Part> {
        let class = class_of(least)?;
        if class == 0 || least > LARGEST {
            return (least == 0).then_some(Part::NONE);
        }
        if let Some(at) = self.free[usize::from(class)].pop() {
            return Some(Part { at, class });
        }
        let rest = (CHUNK - self.end as usize % CHUNK) % CHUNK;
        if rest < size(class) as usize {
            self.give_up_rest(u32::try_from(rest).unwrap_or(0));
        }
        let end = self.end.checked_add(size(class))?;
        if !words.grow(u64::from(end)) {
            return None;
        }
        let part = Part { at: self.end, class };
        self.end = end;
        Some(part)
    }

    /// Words one behind the other, as many as asked for, also across chunks; never given back.
    pub(super) fn take_run(&mut self, words: &Words, count: u64) -> Option<u32> {
        let end = u32::try_from(u64::from(self.end) + count).ok()?;
        let at = self.end;
        if !words.grow(u64::from(end)) {
            return None;
        }
        self.end = end;
        Some(at)
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
    fn give_up_rest(&mut self, mut rest: u32) {
        while rest > 0 {
            let class = (1..CLASSES).rev().filter_map(|class| u8::try_from(class).ok());
            let Some(class) = class.into_iter().find(|class| size(*class) <= rest) else { return };
            self.free[usize::from(class)].push(self.end);
            self.end += size(class);
            rest -= size(class);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_grow_by_halves_and_the_smallest_fitting_is_taken() {
        let sizes: Vec<_> = (0..12).map(size).collect();
        assert_eq!(sizes, [0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48]);
        assert_eq!(size(31), 3 << 14);
        assert_eq!(class_of(5), Some(5));
        assert_eq!(class_of(49152), Some(31));
        assert_eq!(class_of(LARGEST), Some(32));
        assert_eq!(class_of(LARGEST + 1), None);
    }

    #[test]
    fn parts_never_overlap_nor_straddle_chunks() {
        let words = Words::new();
        let (mut parts, mut taken) = (Parts::default(), Vec::new());
        for round in 0..200_u32 {
            let least = round * 977 % 6000;
            let part = parts.take(&words, least).unwrap();
            assert_eq!(words.slice(part.at, part.words()).len() as u32, part.words());
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
    fn words_that_are_not_there_read_as_nothing() {
        let words = Words::new();
        assert_eq!(words.get(u32::MAX), 0);
        assert!(words.slice(5, 3).is_empty());
        words.set(7, 1);
    }
}
