//! One worker's map from engine hashes to places and copies: 16 bytes a name, at 64 to 80 % load.
//!
//! Open addressing with linear probing; a removal moves later entries up, so there are no
//! tombstones. Exact: whole names are kept. Copies beyond the device tier, which are rare, lie in a
//! side table. Invariant: an entry's copies are never all zero.

use super::runs::Place;
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

/// Bits of an entry's value that count device copies.
const COPY_BITS: u32 = 20;
/// The count that says: look into the side table.
const MANY: u32 = (1 << COPY_BITS) - 1;
/// Highest run number that fits an entry.
pub(super) const MOST_RUNS: u32 = (1 << 28) - 2;

/// A name and its packed meaning: run + 1, offset, device copies. A value of 0 is a free entry.
type Entry = (u64, u64);

/// The map.
#[derive(Debug, Default)]
pub(super) struct NamesMap {
    seed: u64,
    entries: Vec<Entry>,
    len: usize,
    many: HashMap<u64, Copies, Mixed>,
}

impl NamesMap {
    /// An empty map; an unknown `seed` keeps engines from choosing names that collide.
    pub(super) fn new(seed: u64) -> Self {
        Self { seed, ..Self::default() }
    }

    /// Empties the map; returns what it held.
    pub(super) fn take(&mut self) -> Self {
        let empty = Self::new(self.seed);
        std::mem::replace(self, empty)
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn get(&self, name: EngineHash) -> Option<Named> {
        let at = self.find(name.0).ok()?;
        let (_, value) = *self.entries.get(at)?;
        let device = low(value, COPY_BITS);
        let copies = if device == MANY {
            self.many.get(&name.0).copied().unwrap_or_default()
        } else {
            [device, 0, 0]
        };
        Some(Named { place: place(value), copies })
    }

    /// Touches the entries of these names, so that their cache misses overlap instead of
    /// following each other.
    pub(super) fn warm(&self, names: &[EngineHash]) {
        let touch = |sum, name: &EngineHash| {
            sum ^ self.entries.get(self.home(name.0)).map_or(0, |(name, _)| *name)
        };
        black_box(names.iter().fold(0, touch));
    }

    /// Sets a name's meaning; one without copies is no name any more.
    pub(super) fn set(&mut self, name: EngineHash, named: Named) {
        let [device, others @ ..] = named.copies;
        let in_side = device >= MANY || others != [0; Tier::COUNT - 1];
        let old = self.find(name.0);
        if let Ok(at) = old
            && self.entries.get(at).is_some_and(|(_, value)| low(*value, COPY_BITS) == MANY)
            && !in_side
        {
            self.many.remove(&name.0);
        }
        if named.copies == Copies::default() {
            if let Ok(at) = old {
                self.free(at);
            }
            return;
        }
        if in_side {
            self.many.insert(name.0, named.copies);
        }
        let at = match old {
            Ok(at) => at,
            Err(at) if self.has_room() => self.count(at),
            Err(_) => {
                self.grow();
                let (Ok(at) | Err(at)) = self.find(name.0);
                self.count(at)
            }
        };
        let count = if in_side { MANY } else { device };
        if let Some(entry) = self.entries.get_mut(at) {
            *entry = (name.0, pack(named.place, count));
        }
    }

    /// All places, once per name, in no order.
    pub(super) fn places(&self) -> impl Iterator<Item = Place> {
        self.entries.iter().filter(|(_, value)| *value != 0).map(|(_, value)| place(*value))
    }

    fn count(&mut self, at: usize) -> usize {
        self.len += 1;
        at
    }

    fn has_room(&self) -> bool {
        (self.len + 1) * 5 <= self.entries.len() * 4
    }

    /// A quarter more entries. Homes keep their order, so this is one pass through memory.
    fn grow(&mut self) {
        let size = (self.entries.len() + self.entries.len() / 4).max(self.len + 8);
        let old = std::mem::replace(&mut self.entries, vec![(0, 0); size]);
        for entry in old.into_iter().filter(|(_, value)| *value != 0) {
            let (Ok(at) | Err(at)) = self.find(entry.0);
            if let Some(free) = self.entries.get_mut(at) {
                *free = entry;
            }
        }
    }

    /// Where a name would be if nothing were in its way.
    fn home(&self, name: u64) -> usize {
        let wide = u128::from(mix(name ^ self.seed)) * self.entries.len() as u128;
        usize::try_from(wide >> 64).unwrap_or(0)
    }

    /// The name's entry, or the free one where it would be.
    fn find(&self, name: u64) -> Result<usize, usize> {
        let mut at = self.home(name);
        for _ in 0..self.entries.len() {
            match self.entries[at] {
                (_, 0) => return Err(at),
                (found, _) if found == name => return Ok(at),
                _ => at = self.after(at),
            }
        }
        Err(at)
    }

    fn after(&self, at: usize) -> usize {
        if at + 1 == self.entries.len() { 0 } else { at + 1 }
    }

    /// Steps from one entry on to another.
    fn steps(&self, from: usize, to: usize) -> usize {
        if to >= from { to - from } else { to + self.entries.len() - from }
    }

    fn free(&mut self, at: usize) {
        let (mut hole, mut next) = (at, self.after(at));
        while let Some((name, value)) = self.entries.get(next).copied()
            && value != 0
        {
            // It may move to the hole if that is not before its home.
            if self.steps(self.home(name), next) >= self.steps(hole, next) {
                self.entries[hole] = (name, value);
                hole = next;
            }
            next = self.after(next);
        }
        self.entries[hole] = (0, 0);
        self.len -= 1;
    }
}

fn pack(place: Place, count: u32) -> u64 {
    u64::from(place.run + 1) << 36 | u64::from(place.offset) << COPY_BITS | u64::from(count)
}

fn place(value: u64) -> Place {
    let offset = u16::try_from(low(value >> COPY_BITS, 16)).unwrap_or(0);
    Place { run: low(value >> 36, 28).wrapping_sub(1), offset }
}

fn low(value: u64, bits: u32) -> u32 {
    u32::try_from(value & ((1 << bits) - 1)).unwrap_or(0)
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
    use crate::model::cases;
    use proptest::prelude::*;

    #[test]
    fn an_entry_survives_packing() {
        for (run, offset) in [(0, 0), (MOST_RUNS, u16::MAX), (77, 3)] {
            let at = Place { run, offset };
            let value = pack(at, MANY);
            assert_eq!((place(value), low(value, COPY_BITS)), (at, MANY));
        }
    }

    proptest! {
        #![proptest_config(cases(300))]

        #[test]
        fn it_equals_a_map_of_the_standard_library(
            ops in prop::collection::vec(
                (0..90_u64, 0..5_u32, prop_oneof![8 => 0..3_u32, 1 => MANY - 1..=u32::MAX], 0..2_u32),
                0..400,
            ),
            seed: u64,
        ) {
            let (mut map, mut expected) = (NamesMap::new(seed), HashMap::new());
            for (name, run, device, host) in ops {
                let host = if run == 0 { host } else { 0 };
                let named = Named {
                    place: Place { run, offset: 9 },
                    copies: [device, host, 0],
                };
                map.set(EngineHash(name), named);
                if named.copies == Copies::default() {
                    expected.remove(&name);
                } else {
                    expected.insert(name, named);
                }
                prop_assert_eq!(map.len(), expected.len());
            }
            for name in 0..90 {
                prop_assert_eq!(map.get(EngineHash(name)), expected.get(&name).copied());
            }
            let sides = expected.values().filter(|n| n.copies[0] >= MANY || n.copies[1] > 0).count();
            prop_assert_eq!(map.many.len(), sides);
            prop_assert_eq!(map.places().count(), expected.len());
        }
    }
}
