//! One worker's map from engine hashes to places and copies: 12.8 bytes a slot, 72 to 90 % full.
//!
//! A name is known by 59 bits of a seeded bijection, five names to a cache line. Two names of one
//! worker are taken for one if they agree in all 59 bits: as likely as a collision of the 64-bit
//! chain hashes themselves. Lines overflow into the next; a removal pulls entries back, so there
//! are no tombstones. Copies that are not one or two on the device lie in a side table.

use super::runs::{MOST_RUNS, Place};
use crate::hash::mix;
use crate::names::{EngineHash, Tier};
use std::collections::HashMap;
use std::hash::{BuildHasher, Hasher};
use std::hint::black_box;

/// Copies per tier.
pub(super) type Copies = [u32; Tier::COUNT];

/// What a name means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Named {
    pub(super) place: Place,
    pub(super) copies: Copies,
}

/// A name as the map knows it: the upper 59 bits of its bijection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Key(u64);

impl Key {
    /// Bits that are dropped.
    const DROPPED: u32 = 5;

    pub(super) fn new(name: EngineHash, seed: u64) -> Self {
        Self(mix(name.0 ^ seed) >> Self::DROPPED)
    }

    /// A key from its bits, and the bits: for snapshots.
    pub(super) fn from_bits(bits: u64) -> Self {
        Self(bits & (u64::MAX >> Self::DROPPED))
    }

    pub(super) fn bits(self) -> u64 {
        self.0
    }

    /// The line where the key would be if nothing were in its way. Lines keep the order of keys.
    fn home(self, lines: usize) -> usize {
        let wide = u128::from(self.0 << Self::DROPPED) * lines as u128;
        usize::try_from(wide >> 64).unwrap_or(0)
    }
}

/// How full the map may be: nine tenths.
const FULLEST: (usize, usize) = (9, 10);
/// Entries of a line.
const WIDTH: usize = 5;
/// Bits of an offset, at the bottom of an entry's word.
const OFFSET_BITS: u32 = 15;
/// Bits of the key that are in the tail and in the line's rest.
const TAIL_BITS: u32 = 6;
const REST_BITS: u32 = 4;
/// Bits of a run's number, at the bottom of an entry's tail.
const RUN_BITS: u32 = 32 - TAIL_BITS;
/// Bits of an entry in the line's rest: some of the key, and two that count device copies.
const SHARE: u32 = REST_BITS + 2;
/// The lowest bit of every entry's share of the rest.
const EACH: u32 = 0b1 | 1 << SHARE | 1 << (2 * SHARE) | 1 << (3 * SHARE) | 1 << (4 * SHARE);
/// The count that says: look into the side table.
const MANY: u32 = 3;

const _: () = assert!(MOST_RUNS < 1 << RUN_BITS);

/// Five entries in a cache line. An entry whose count is 0 is free, whatever else it says.
#[derive(Clone, Copy, Debug, Default)]
#[repr(align(64))]
struct Line {
    words: [u64; WIDTH],
    tails: [u32; WIDTH],
    rest: u32,
}

impl Line {
    fn count(&self, at: usize) -> u32 {
        self.rest >> (at as u32 * SHARE) & MANY
    }

    fn key(&self, at: usize) -> Key {
        let rest = self.rest >> (at as u32 * SHARE + 2) & ((1 << REST_BITS) - 1);
        let high = self.words[at] >> OFFSET_BITS << (TAIL_BITS + REST_BITS);
        Key(high | u64::from(self.tails[at] >> RUN_BITS << REST_BITS) | u64::from(rest))
    }

    fn place(&self, at: usize) -> Place {
        let offset = u16::try_from(self.words[at] & ((1 << OFFSET_BITS) - 1)).unwrap_or(0);
        Place { run: self.tails[at] & ((1 << RUN_BITS) - 1), offset }
    }

    fn set(&mut self, at: usize, key: Key, place: Place, count: u32) {
        self.words[at] = key.0 >> (TAIL_BITS + REST_BITS) << OFFSET_BITS | u64::from(place.offset);
        let tail = u32::try_from(key.0 >> REST_BITS & ((1 << TAIL_BITS) - 1)).unwrap_or(0);
        self.tails[at] = tail << RUN_BITS | place.run;
        let rest = u32::try_from(key.0 & ((1 << REST_BITS) - 1)).unwrap_or(0);
        self.set_rest(at, rest << 2 | count);
    }

    fn set_rest(&mut self, at: usize, share: u32) {
        let shift = at as u32 * SHARE;
        self.rest = self.rest & !(((1 << SHARE) - 1) << shift) | share << shift;
    }

    fn find(&self, key: Key) -> Option<usize> {
        let high = key.0 >> (TAIL_BITS + REST_BITS);
        let like = |at: &usize| self.words[*at] >> OFFSET_BITS == high;
        (0..WIDTH).filter(like).find(|at| self.count(*at) > 0 && self.key(*at) == key)
    }

    fn free(&self) -> Option<usize> {
        let free = !(self.rest | self.rest >> 1) & EACH;
        (free != 0).then(|| (free.trailing_zeros() / SHARE) as usize)
    }
}

/// Where an entry is.
type At = (usize, usize);

/// The map.
#[derive(Debug, Default)]
pub(super) struct NamesMap {
    lines: Vec<Line>,
    len: usize,
    /// Lines for as many names as there will be at most, if that is known.
    expected: usize,
    many: HashMap<u64, Copies, Mixed>,
}

impl NamesMap {
    /// There will be this many names at most, as far as is known: a hint, not a bound.
    pub(super) fn expect(&mut self, names: u64) {
        let names = usize::try_from(names).unwrap_or(usize::MAX);
        self.expected = names.saturating_mul(FULLEST.1) / (WIDTH * FULLEST.0) + 1;
    }

    /// Empties the map; what is expected of it stays.
    pub(super) fn clear(&mut self) {
        *self = Self { expected: self.expected, ..Self::default() };
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Bytes of memory.
    pub(super) fn bytes(&self) -> u64 {
        let side = self.many.capacity() * size_of::<(u64, Copies)>();
        (self.lines.capacity() * size_of::<Line>() + side) as u64
    }

    pub(super) fn get(&self, key: Key) -> Option<Named> {
        self.find(key).ok().map(|at| self.named(at))
    }

    /// Touches the lines of these keys, so that their cache misses overlap instead of following
    /// each other.
    pub(super) fn warm(&self, keys: impl Iterator<Item = Key>) {
        let lines = self.lines.len();
        let touch = |sum, key: Key| sum ^ self.lines.get(key.home(lines)).map_or(0, |l| l.rest);
        black_box(keys.fold(0, touch));
    }

    /// Adds a key that has one copy on the device; if it is there already, says what it means and
    /// changes nothing.
    pub(super) fn insert(&mut self, key: Key, place: Place) -> Option<Named> {
        match self.find(key) {
            Ok(at) => Some(self.named(at)),
            Err(at) => {
                self.put(key, place, 1, at);
                None
            }
        }
    }

    /// Sets a key's meaning; one without copies is none any more.
    pub(super) fn set(&mut self, key: Key, named: Named) {
        let count = match named.copies {
            [0, 0, 0] => 0,
            [device @ 1..MANY, 0, 0] => device,
            _ => MANY,
        };
        let old = self.find(key);
        if let Ok((line, at)) = old
            && self.lines[line].count(at) == MANY
            && count != MANY
        {
            self.many.remove(&key.0);
        }
        if count == MANY {
            self.many.insert(key.0, named.copies);
        }
        match old {
            Ok(at) if count == 0 => self.remove_at(at),
            Ok((line, at)) => self.lines[line].set(at, key, named.place, count),
            Err(_) if count == 0 => {}
            Err(at) => self.put(key, named.place, count, at),
        }
    }

    /// Takes one device copy of a key away; `None` if it has none. In the common case this is one
    /// look at one line.
    pub(super) fn take_one(&mut self, key: Key) -> Option<Named> {
        let (line, at) = self.find(key).ok()?;
        match self.lines[line].count(at) {
            MANY => {
                let mut named = self.named((line, at));
                named.copies[0] = named.copies[0].checked_sub(1)?;
                self.set(key, named);
                Some(named)
            }
            count => {
                let place = self.lines[line].place(at);
                if count == 1 {
                    self.remove_at((line, at));
                } else {
                    self.lines[line].set(at, key, place, count - 1);
                }
                Some(Named { place, copies: [count - 1, 0, 0] })
            }
        }
    }

    /// All keys and what they mean, in no order.
    pub(super) fn iter(&self) -> impl Iterator<Item = (Key, Named)> {
        let all = self.lines.iter().enumerate();
        let all = all.flat_map(|(line, lines)| (0..WIDTH).map(move |at| (line, lines, at)));
        let held = all.filter(|(_, lines, at)| lines.count(*at) > 0);
        held.map(|(line, lines, at)| (lines.key(at), self.named((line, at))))
    }

    /// The runs of all keys, once per key.
    pub(super) fn runs(&self) -> impl Iterator<Item = u32> {
        let all = self.lines.iter().flat_map(|line| (0..WIDTH).map(move |at| (line, at)));
        all.filter(|(line, at)| line.count(*at) > 0).map(|(line, at)| line.place(at).run)
    }

    fn named(&self, (line, at): At) -> Named {
        let line = &self.lines[line];
        let copies = match line.count(at) {
            MANY => self.many.get(&line.key(at).0).copied().unwrap_or_default(),
            device => [device, 0, 0],
        };
        Named { place: line.place(at), copies }
    }

    /// The key's entry, or the free one where it would be; nonsense if all are taken.
    fn find(&self, key: Key) -> Result<At, At> {
        let mut line = key.home(self.lines.len());
        for _ in 0..self.lines.len() {
            let here = &self.lines[line];
            if let Some(at) = here.find(key) {
                return Ok((line, at));
            }
            if let Some(at) = here.free() {
                return Err((line, at));
            }
            line = self.after(line);
        }
        Err((line, 0))
    }

    /// Puts a key that is not there into the free entry where it belongs.
    fn put(&mut self, key: Key, place: Place, count: u32, (line, at): At) {
        let (line, at) = if (self.len + 1) * FULLEST.1 <= self.lines.len() * WIDTH * FULLEST.0 {
            (line, at)
        } else {
            self.grow();
            let (Ok(at) | Err(at)) = self.find(key);
            at
        };
        self.lines[line].set(at, key, place, count);
        self.len += 1;
    }

    /// A quarter more lines; a map that knows where it is bound grows faster. Homes keep their
    /// order, so this is one pass through memory.
    fn grow(&mut self) {
        let lines = self.lines.len();
        let ahead = self.expected.min(lines * 4);
        let size = ahead.max(lines + lines / 4 + 1);
        let old = std::mem::replace(&mut self.lines, vec![Line::default(); size]);
        for line in old {
            for at in (0..WIDTH).filter(|at| line.count(*at) > 0) {
                let key = line.key(at);
                let mut to = key.home(size);
                let free = loop {
                    match self.lines[to].free() {
                        Some(free) => break free,
                        None => to = self.after(to),
                    }
                };
                self.lines[to].set(free, key, line.place(at), line.count(at));
            }
        }
    }

    fn after(&self, line: usize) -> usize {
        if line + 1 == self.lines.len() { 0 } else { line + 1 }
    }

    /// Steps from one line on to another.
    fn steps(&self, from: usize, to: usize) -> usize {
        if to >= from { to - from } else { to + self.lines.len() - from }
    }

    /// Frees an entry, and pulls those back that had to pass its full line.
    fn remove_at(&mut self, (line, at): At) {
        self.len -= 1;
        let (mut hole, mut next) = ((line, at), line);
        let mut full = self.lines[line].free().is_none();
        self.lines[line].set_rest(at, 0);
        for _ in 1..self.lines.len() {
            if !full {
                return;
            }
            next = self.after(next);
            let here = self.lines[next];
            full = here.free().is_none();
            // An entry may move to the hole if that is not before its home.
            let behind = self.steps(hole.0, next);
            let far = |at: &usize| {
                here.count(*at) > 0
                    && self.steps(here.key(*at).home(self.lines.len()), next) >= behind
            };
            if let Some(from) = (0..WIDTH).find(far) {
                let (key, place, count) = (here.key(from), here.place(from), here.count(from));
                self.lines[hole.0].set(hole.1, key, place, count);
                self.lines[next].set_rest(from, 0);
                hole = (next, from);
            }
        }
    }
}

/// Hashes small internal keys: one mix per word.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Mixed;

impl BuildHasher for Mixed {
    type Hasher = Mixer;

    fn build_hasher(&self) -> Mixer {
        Mixer(0)
    }
}

/// The hasher of [`Mixed`].
#[derive(Clone, Copy, Debug)]
pub(super) struct Mixer(u64);

impl Hasher for Mixer {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u64(u64::from(*byte));
        }
    }

    fn write_u16(&mut self, value: u16) {
        self.write_u64(u64::from(value));
    }

    fn write_u32(&mut self, value: u32) {
        self.write_u64(u64::from(value));
    }

    fn write_u64(&mut self, value: u64) {
        self.0 = mix(self.0 ^ value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fast::runs::LONGEST;
    use crate::model::cases;
    use proptest::prelude::*;

    fn key(name: u64, seed: u64) -> Key {
        Key::new(EngineHash(name), seed)
    }

    #[test]
    fn a_line_is_a_cache_line_and_an_entry_survives_packing() {
        assert_eq!((size_of::<Line>(), align_of::<Line>()), (64, 64));
        let offset = u16::try_from(LONGEST - 1).unwrap();
        let places = [
            Place { run: 0, offset: 0 },
            Place { run: MOST_RUNS, offset },
            Place { run: 77, offset: 3 },
            Place { run: 1 << 25, offset: 1 << 14 },
            Place { run: 5, offset: 0 },
        ];
        let mut line = Line::default();
        for round in 0..1000 {
            for (at, place) in places.into_iter().enumerate() {
                line.set(at, key(round * 5 + at as u64, 1), place, 1 + (at as u32 + 1) % 3);
            }
            for (at, place) in places.into_iter().enumerate() {
                let key = key(round * 5 + at as u64, 1);
                assert_eq!((line.key(at), line.place(at)), (key, place));
                assert_eq!(line.count(at), 1 + (at as u32 + 1) % 3);
                assert_eq!(line.find(key), Some(at));
            }
            assert_eq!(line.free(), None);
        }
    }

    /// Keys that crowd into the same lines, so that entries move.
    fn crowded(name: u64) -> Key {
        Key::from_bits((name % 3) << 57 | name << 20)
    }

    proptest! {
        #![proptest_config(cases(300))]

        #[test]
        fn it_equals_a_map_of_the_standard_library(
            ops in prop::collection::vec(
                (0..90_u64, 0..6_u32, prop_oneof![8 => 0..5_u32, 1 => any::<u32>()], 0..2_u32),
                0..400,
            ),
            seed: u64,
            crowd: bool,
        ) {
            let key = |name| if crowd { crowded(name) } else { key(name, seed) };
            let (mut map, mut expected) = (NamesMap::default(), HashMap::<u64, Named>::new());
            for (name, run, device, host) in ops {
                let place = Place { run, offset: 9 };
                let host = if run == 0 { host } else { 0 };
                let named = Named { place, copies: [device, host, 0] };
                if run == 5 {
                    let found = map.take_one(key(name));
                    let has = expected.get_mut(&name).filter(|named| named.copies[0] > 0);
                    let left = has.map(|named| { named.copies[0] -= 1; *named });
                    prop_assert_eq!(found, left);
                    if left.is_some_and(|named| named.copies == [0; 3]) {
                        expected.remove(&name);
                    }
                } else if run == 4 {
                    let found = map.insert(key(name), place);
                    prop_assert_eq!(found, expected.get(&name).copied());
                    expected.entry(name).or_insert(Named { place, copies: [1, 0, 0] });
                } else {
                    map.set(key(name), named);
                    if named.copies == [0; 3] {
                        expected.remove(&name);
                    } else {
                        expected.insert(name, named);
                    }
                }
                prop_assert_eq!(map.len(), expected.len());
            }
            for name in 0..90 {
                prop_assert_eq!(map.get(key(name)), expected.get(&name).copied());
            }
            let one_or_two = |named: &&Named| !matches!(named.copies, [1 | 2, 0, 0]);
            prop_assert_eq!(map.many.len(), expected.values().filter(one_or_two).count());
            prop_assert_eq!(map.runs().count(), expected.len());
            let all: HashMap<u64, Named> = map.iter().map(|(key, named)| (key.bits(), named)).collect();
            let expected = expected.into_iter().map(|(name, named)| (key(name).bits(), named));
            prop_assert_eq!(all, expected.collect());
        }
    }
}
