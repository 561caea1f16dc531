//! One worker's map from engine hashes to places and copies: 12.8 bytes a slot, 67 to 83 % full.
//!
//! A name is known by 59 bits of a seeded bijection, ten names to a pair of cache lines. Two names
//! of a worker are taken for one if they agree in all 59 bits: as likely as a collision of the
//! 64-bit chain hashes themselves. Buckets overflow into the next; a removal pulls entries back, so
//! there are no tombstones. Copies that are not one or two on the device lie in a side table.

use super::runs::{MOST_RUNS, Place};
use crate::hash::mix;
use crate::names::{EngineHash, Tier};
use std::collections::HashMap;
use std::hash::{BuildHasher, Hasher};

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

    /// The bucket where the key would be if nothing were in its way. Buckets keep the order of keys.
    fn home(self, buckets: usize) -> usize {
        let wide = u128::from(self.0 << Self::DROPPED) * buckets as u128;
        usize::try_from(wide >> 64).unwrap_or(0)
    }
}

/// How full the map may be: fuller, and searches run through many buckets.
const FULLEST: (usize, usize) = (5, 6);
/// Buckets up to which a map that knows where it is bound grows step by step.
const SMALL: usize = 64;
/// Entries of a bucket.
const WIDTH: usize = 10;
/// Bits of an offset, at the bottom of an entry's word.
const OFFSET_BITS: u32 = 15;
/// Bits of the key that are in the tail and in the bucket's rest.
const TAIL_BITS: u32 = 6;
const REST_BITS: u32 = 4;
/// Bits of a run's number, at the bottom of an entry's tail.
const RUN_BITS: u32 = 32 - TAIL_BITS;
/// Bits of an entry in the bucket's rest: some of the key, and two that count device copies.
const SHARE: usize = REST_BITS as usize + 2;
/// The lowest bit of every entry's share of the rest.
const EACH: u64 = {
    let (mut each, mut at) = (0, 0);
    while at < WIDTH {
        each |= 1 << (at * SHARE);
        at += 1;
    }
    each
};
/// The count that says: look into the side table.
const MANY: u32 = 3;

const _: () = assert!(MOST_RUNS < 1 << RUN_BITS);

/// Ten entries in two cache lines that come together. An entry whose count is 0 is free, whatever
/// else it says.
#[derive(Clone, Copy, Debug, Default)]
#[repr(align(128))]
struct Bucket {
    words: [u64; WIDTH],
    tails: [u32; WIDTH],
    rest: u64,
}

impl Bucket {
    fn share(&self, at: usize) -> u32 {
        u32::try_from(self.rest >> (at * SHARE) & ((1 << SHARE) - 1)).unwrap_or(0)
    }

    fn count(&self, at: usize) -> u32 {
        self.share(at) & MANY
    }

    fn key(&self, at: usize) -> Key {
        let high = self.words[at] >> OFFSET_BITS << (TAIL_BITS + REST_BITS);
        let middle = u64::from(self.tails[at] >> RUN_BITS << REST_BITS);
        Key(high | middle | u64::from(self.share(at) >> 2))
    }

    fn place(&self, at: usize) -> Place {
        let offset = u16::try_from(self.words[at] & ((1 << OFFSET_BITS) - 1)).unwrap_or(0);
        Place { run: self.tails[at] & ((1 << RUN_BITS) - 1), offset }
    }

    fn set(&mut self, at: usize, key: Key, place: Place, count: u32) {
        self.words[at] = key.0 >> (TAIL_BITS + REST_BITS) << OFFSET_BITS | u64::from(place.offset);
        let tail = u32::try_from(key.0 >> REST_BITS & ((1 << TAIL_BITS) - 1)).unwrap_or(0);
        self.tails[at] = tail << RUN_BITS | place.run;
        self.set_share(at, (key.0 & ((1 << REST_BITS) - 1)) << 2 | u64::from(count));
    }

    fn set_share(&mut self, at: usize, share: u64) {
        let shift = at * SHARE;
        self.rest = self.rest & !(((1 << SHARE) - 1) << shift) | share << shift;
    }

    fn find(&self, key: Key) -> Option<usize> {
        let high = key.0 >> (TAIL_BITS + REST_BITS);
        let like = |at: &usize| self.words[*at] >> OFFSET_BITS == high;
        (0..WIDTH).filter(like).find(|at| self.count(*at) > 0 && self.key(*at) == key)
    }

    fn free(&self) -> Option<usize> {
        let free = !(self.rest | self.rest >> 1) & EACH;
        (free != 0).then(|| free.trailing_zeros() as usize / SHARE)
    }

    /// The entries that are taken.
    fn taken(&self) -> impl Iterator<Item = usize> {
        (0..WIDTH).filter(|at| self.count(*at) > 0)
    }

    /// Reads a little of both cache lines.
    fn touch(&self) -> u64 {
        self.words[0] ^ self.rest
    }
}

/// Where an entry is.
type At = (usize, usize);

/// The map.
#[derive(Debug, Default)]
pub(super) struct NamesMap {
    buckets: Vec<Bucket>,
    len: usize,
    /// Buckets for as many names as there will be at most, if that is known.
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

    pub(super) fn get(&self, key: Key) -> Option<Named> {
        self.find(key).ok().map(|at| self.named(at))
    }

    /// The bucket where a key would be if nothing were in its way.
    pub(super) fn home(&self, key: Key) -> usize {
        key.home(self.buckets.len())
    }

    /// Reads a bucket, so that it is in the cache when it is needed.
    pub(super) fn touch(&self, bucket: usize) -> u64 {
        self.buckets.get(bucket).map_or(0, Bucket::touch)
    }

    /// Reads the bucket so many behind this one, if all before it are full: some of its keys may be
    /// there.
    pub(super) fn touch_overflow(&self, bucket: usize, behind: usize) -> u64 {
        let mut at = bucket;
        for _ in 0..behind {
            match self.buckets.get(at) {
                Some(bucket) if bucket.free().is_none() => at = self.after(at),
                _ => return 0,
            }
        }
        self.touch(at)
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
        if let Ok((bucket, at)) = old
            && self.buckets[bucket].count(at) == MANY
            && count != MANY
        {
            self.many.remove(&key.0);
        }
        if count == MANY {
            self.many.insert(key.0, named.copies);
        }
        match old {
            Ok(at) if count == 0 => self.remove_at(at),
            Ok((bucket, at)) => self.buckets[bucket].set(at, key, named.place, count),
            Err(_) if count == 0 => {}
            Err(at) => self.put(key, named.place, count, at),
        }
    }

    /// Takes one device copy of a key away; `None` if it has none. In the common case this is one
    /// look at one bucket.
    pub(super) fn take_one(&mut self, key: Key) -> Option<Named> {
        let (bucket, at) = self.find(key).ok()?;
        match self.buckets[bucket].count(at) {
            MANY => {
                let mut named = self.named((bucket, at));
                named.copies[0] = named.copies[0].checked_sub(1)?;
                self.set(key, named);
                Some(named)
            }
            count => {
                let place = self.buckets[bucket].place(at);
                if count == 1 {
                    self.remove_at((bucket, at));
                } else {
                    self.buckets[bucket].set(at, key, place, count - 1);
                }
                Some(Named { place, copies: [count - 1, 0, 0] })
            }
        }
    }

    /// All keys and what they mean, in no order.
    pub(super) fn iter(&self) -> impl Iterator<Item = (Key, Named)> {
        let all = self.buckets.iter().enumerate();
        let all = all.flat_map(|(i, bucket)| bucket.taken().map(move |at| (bucket, (i, at))));
        all.map(|(bucket, at)| (bucket.key(at.1), self.named(at)))
    }

    /// The runs of all keys, once per key.
    pub(super) fn runs(&self) -> impl Iterator<Item = u32> {
        self.buckets.iter().flat_map(|bucket| bucket.taken().map(|at| bucket.place(at).run))
    }

    fn named(&self, (bucket, at): At) -> Named {
        let bucket = &self.buckets[bucket];
        let copies = match bucket.count(at) {
            MANY => self.many.get(&bucket.key(at).0).copied().unwrap_or_default(),
            device => [device, 0, 0],
        };
        Named { place: bucket.place(at), copies }
    }

    /// The key's entry, or the free one where it would be; nonsense if all are taken.
    fn find(&self, key: Key) -> Result<At, At> {
        let mut bucket = key.home(self.buckets.len());
        for _ in 0..self.buckets.len() {
            let here = &self.buckets[bucket];
            if let Some(at) = here.find(key) {
                return Ok((bucket, at));
            }
            if let Some(at) = here.free() {
                return Err((bucket, at));
            }
            bucket = self.after(bucket);
        }
        Err((bucket, 0))
    }

    /// Puts a key that is not there into the free entry where it belongs.
    fn put(&mut self, key: Key, place: Place, count: u32, (bucket, at): At) {
        let (bucket, at) = if (self.len + 1) * FULLEST.1 <= self.buckets.len() * WIDTH * FULLEST.0 {
            (bucket, at)
        } else {
            self.grow();
            let (Ok(at) | Err(at)) = self.find(key);
            at
        };
        self.buckets[bucket].set(at, key, place, count);
        self.len += 1;
    }

    /// A quarter more buckets; a map that knows where it is bound grows faster. Homes keep their
    /// order, so this is one pass through memory.
    fn grow(&mut self) {
        let buckets = self.buckets.len();
        // A map that holds something takes all that it is expected to need.
        let ahead = if buckets < SMALL { 4 * buckets } else { self.expected };
        let ahead = ahead.min(self.expected);
        // Who has more than was expected has little more.
        let step = if self.expected > 0 && buckets >= self.expected { 16 } else { 4 };
        let size = ahead.max(buckets + buckets / step + 1);
        let old = std::mem::replace(&mut self.buckets, vec![Bucket::default(); size]);
        for bucket in old {
            for at in bucket.taken() {
                let key = bucket.key(at);
                let mut to = key.home(size);
                let free = loop {
                    match self.buckets[to].free() {
                        Some(free) => break free,
                        None => to = self.after(to),
                    }
                };
                self.buckets[to].set(free, key, bucket.place(at), bucket.count(at));
            }
        }
    }

    fn after(&self, bucket: usize) -> usize {
        if bucket + 1 == self.buckets.len() { 0 } else { bucket + 1 }
    }

    /// Steps from one bucket on to another.
    fn steps(&self, from: usize, to: usize) -> usize {
        if to >= from { to - from } else { to + self.buckets.len() - from }
    }

    /// Frees an entry, and pulls those back that had to pass its full bucket.
    fn remove_at(&mut self, (bucket, at): At) {
        self.len -= 1;
        let (mut hole, mut next) = ((bucket, at), bucket);
        let mut full = self.buckets[bucket].free().is_none();
        self.buckets[bucket].set_share(at, 0);
        for _ in 1..self.buckets.len() {
            if !full {
                return;
            }
            next = self.after(next);
            let here = self.buckets[next];
            full = here.free().is_none();
            // An entry may move to the hole if that is not before its home.
            let behind = self.steps(hole.0, next);
            let far = |at: &usize| {
                here.count(*at) > 0
                    && self.steps(here.key(*at).home(self.buckets.len()), next) >= behind
            };
            if let Some(from) = (0..WIDTH).find(far) {
                let (key, place, count) = (here.key(from), here.place(from), here.count(from));
                self.buckets[hole.0].set(hole.1, key, place, count);
                self.buckets[next].set_share(from, 0);
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
    fn a_bucket_is_two_cache_lines_and_an_entry_survives_packing() {
        assert_eq!((size_of::<Bucket>(), align_of::<Bucket>()), (128, 128));
        let offset = u16::try_from(LONGEST - 1).unwrap();
        let places = [
            Place { run: 0, offset: 0 },
            Place { run: MOST_RUNS, offset },
            Place { run: 77, offset: 3 },
            Place { run: 1 << 25, offset: 1 << 14 },
            Place { run: 5, offset: 0 },
        ];
        let mut bucket = Bucket::default();
        for round in 0..1000 {
            let keys: Vec<_> = (0..10).map(|at| key(round * 10 + at, 1)).collect();
            for (at, key) in keys.iter().enumerate() {
                assert!(round > 0 || bucket.free() == Some(at));
                bucket.set(at, *key, places[at % 5], 1 + (at as u32 + 1) % 3);
            }
            for (at, key) in keys.iter().enumerate() {
                assert_eq!((bucket.key(at), bucket.place(at)), (*key, places[at % 5]));
                assert_eq!(bucket.count(at), 1 + (at as u32 + 1) % 3);
                assert_eq!(bucket.find(*key), Some(at));
            }
            assert_eq!(bucket.free(), None);
        }
    }

    /// Keys that crowd into the same buckets, so that entries move.
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
