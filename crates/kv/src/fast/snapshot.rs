//! A worker's state as bytes, and back: pieces of chains, what the worker calls their blocks, and
//! what the router placed there.
//!
//! A piece is the beginning of a run, as far as the worker needs it; pieces that others go on from
//! come first, so that every place can be found again whatever the restoring index has by then.
//! Block hashes and names mean something only under the seeds of the index that they come from.

use super::names_map::{Copies, Key, Named};
use super::runs::{Place, Walk};
use super::worker::{Common, Worker};
use crate::index::SnapshotError;
use crate::names::{BlockHash, Tier};
use std::collections::HashMap;

/// The first byte.
const VERSION: u8 = 1;
/// No piece.
const NONE: u32 = u32::MAX;
/// The count that says: three counts follow.
const MANY: u64 = 31;
/// Bits of a name's word that count its copies on the device.
const COUNT_BITS: u32 = 5;

/// What a run is needed for: so many blocks of it, these names, sorted by offset.
#[derive(Default)]
struct Need {
    len: u32,
    names: Vec<(u16, Key, Copies)>,
}

impl Worker {
    pub(super) fn snapshot(&self, all: &Common, out: &mut Vec<u8>) {
        let needs = self.needs(all);
        let order = order(all, &needs);
        out.push(VERSION);
        put(out, order.len());
        let numbers: HashMap<u32, u32> = order.iter().copied().zip(0..).collect();
        for run in &order {
            let Some(need) = needs.get(run) else { continue };
            let parent = all.runs.parent(*run);
            let number = parent.and_then(|parent| numbers.get(&parent.run)).copied();
            out.extend(number.unwrap_or(NONE).to_le_bytes());
            out.extend(parent.map_or(0, |parent| parent.offset).to_le_bytes());
            out.extend(need.len.to_le_bytes());
            for hash in all.runs.first_hashes(*run, need.len) {
                out.extend(hash.to_le_bytes());
            }
            put(out, need.names.len());
            for (offset, key, copies) in &need.names {
                put_name(out, *offset, *key, *copies);
            }
        }
        let placed = self.placed_places();
        put(out, placed.len());
        for place in placed {
            let piece = numbers.get(&place.run).copied().unwrap_or(NONE);
            out.extend(piece.to_le_bytes());
            out.extend(place.offset.to_le_bytes());
        }
    }

    /// The runs that the worker's names and placements are in, and those that they go on from.
    fn needs(&self, all: &Common) -> HashMap<u32, Need> {
        let mut needs: HashMap<u32, Need> = HashMap::new();
        for (key, Named { place, copies }) in self.names().iter() {
            let need = needs.entry(place.run).or_default();
            need.len = need.len.max(u32::from(place.offset) + 1);
            need.names.push((place.offset, key, copies));
        }
        for place in self.placed_places() {
            let need = needs.entry(place.run).or_default();
            need.len = need.len.max(u32::from(place.offset) + 1);
        }
        let mut open: Vec<u32> = needs.keys().copied().collect();
        while let Some(run) = open.pop() {
            let Some(parent) = all.runs.parent(run) else { continue };
            let need = needs.entry(parent.run).or_insert_with(|| {
                open.push(parent.run);
                Need::default()
            });
            need.len = need.len.max(u32::from(parent.offset) + 1);
        }
        for need in needs.values_mut() {
            need.names.sort_unstable_by_key(|(offset, ..)| *offset);
        }
        needs
    }

    /// Replaces all that the worker holds; after an error it holds nothing.
    pub(super) fn restore(
        &mut self,
        all: &mut Common,
        bytes: &[u8],
        now_ns: u64,
    ) -> Result<(), SnapshotError> {
        self.drop_all(all);
        let done = self.try_restore(all, &mut Bytes(bytes), now_ns);
        all.runs.settle();
        if done.is_err() {
            self.drop_all(all);
        }
        done
    }

    fn try_restore(
        &mut self,
        all: &mut Common,
        bytes: &mut Bytes<'_>,
        now_ns: u64,
    ) -> Result<(), SnapshotError> {
        match bytes.take()? {
            [VERSION] => {}
            [other] => return Err(SnapshotError::Version(other)),
        }
        let mut pieces: Vec<Vec<Place>> = Vec::new();
        for _ in 0..bytes.u32()? {
            let parent = (bytes.u32()?, bytes.u16()?);
            let walk = match parent {
                (NONE, _) => Walk::START,
                parent => Walk::after(find(&pieces, parent)?),
            };
            let places = walk_piece(all, walk, bytes)?;
            for _ in 0..bytes.u32()? {
                let (offset, key, copies) = bytes.name()?;
                let place = *places.get(usize::from(offset)).ok_or(SnapshotError::Malformed)?;
                self.restore_name(all, key, Named { place, copies })?;
            }
            pieces.push(places);
        }
        for _ in 0..bytes.u32()? {
            let place = find(&pieces, (bytes.u32()?, bytes.u16()?))?;
            self.restore_placed(all, place, now_ns);
        }
        if bytes.0.is_empty() { Ok(()) } else { Err(SnapshotError::Malformed) }
    }
}

/// The places of a piece's blocks, found or made.
fn walk_piece(
    all: &mut Common,
    mut walk: Walk,
    bytes: &mut Bytes<'_>,
) -> Result<Vec<Place>, SnapshotError> {
    let len = bytes.u32()?;
    let len = usize::try_from(len).map_err(|_| SnapshotError::Malformed)?;
    let (words, _) = bytes.split(len.checked_mul(8).ok_or(SnapshotError::Malformed)?)?.as_chunks();
    let hashes: Vec<u64> = words.iter().map(|word| u64::from_le_bytes(*word)).collect();
    let mut places = Vec::with_capacity(hashes.len());
    while places.len() < hashes.len() {
        let stretch = all.runs.walk(&mut walk, &hashes[places.len()..]);
        let stretch = stretch.ok_or(SnapshotError::Full)?;
        places.extend((0..stretch.len).map(|at| stretch.place(at)));
    }
    Ok(places)
}

fn find(pieces: &[Vec<Place>], (piece, offset): (u32, u16)) -> Result<Place, SnapshotError> {
    let piece = usize::try_from(piece).ok().and_then(|piece| pieces.get(piece));
    let place = piece.and_then(|places| places.get(usize::from(offset)));
    place.copied().ok_or(SnapshotError::Malformed)
}

/// Runs in an order in which those that others go on from come first.
fn order(all: &Common, needs: &HashMap<u32, Need>) -> Vec<u32> {
    let mut order = Vec::with_capacity(needs.len());
    let mut seen = std::collections::HashSet::with_capacity(needs.len());
    let mut runs: Vec<u32> = needs.keys().copied().collect();
    runs.sort_unstable();
    for run in runs {
        let begin = order.len();
        let mut next = Some(run);
        while let Some(run) = next
            && seen.insert(run)
        {
            order.push(run);
            next = all.runs.parent(run).map(|parent| parent.run);
        }
        order[begin..].reverse();
    }
    order
}

fn put(out: &mut Vec<u8>, count: usize) {
    out.extend(u32::try_from(count).unwrap_or(u32::MAX).to_le_bytes());
}

fn put_name(out: &mut Vec<u8>, offset: u16, key: Key, copies: Copies) {
    let count = match copies {
        [device, 0, 0] if u64::from(device) < MANY => u64::from(device),
        _ => MANY,
    };
    out.extend(offset.to_le_bytes());
    out.extend((key.bits() << COUNT_BITS | count).to_le_bytes());
    if count == MANY {
        copies.iter().for_each(|copies| out.extend(copies.to_le_bytes()));
    }
}

/// What is left to read.
struct Bytes<'a>(&'a [u8]);

impl<'a> Bytes<'a> {
    fn split(&mut self, len: usize) -> Result<&'a [u8], SnapshotError> {
        let (first, rest) = self.0.split_at_checked(len).ok_or(SnapshotError::Cut)?;
        self.0 = rest;
        Ok(first)
    }

    fn take<const N: usize>(&mut self) -> Result<[u8; N], SnapshotError> {
        let (first, rest) = self.0.split_first_chunk().ok_or(SnapshotError::Cut)?;
        self.0 = rest;
        Ok(*first)
    }

    fn u16(&mut self) -> Result<u16, SnapshotError> {
        self.take().map(u16::from_le_bytes)
    }

    fn u32(&mut self) -> Result<u32, SnapshotError> {
        self.take().map(u32::from_le_bytes)
    }

    fn name(&mut self) -> Result<(u16, Key, Copies), SnapshotError> {
        let offset = self.u16()?;
        let word = self.take().map(u64::from_le_bytes)?;
        let copies = match word & MANY {
            0 => return Err(SnapshotError::Malformed),
            MANY => {
                let mut copies = [0; Tier::COUNT];
                for count in &mut copies {
                    *count = self.u32()?;
                }
                copies
            }
            device => [u32::try_from(device).unwrap_or(0), 0, 0],
        };
        Ok((offset, Key::from_bits(word >> COUNT_BITS), copies))
    }
}

impl Worker {
    fn restore_name(
        &mut self,
        all: &mut Common,
        key: Key,
        named: Named,
    ) -> Result<(), SnapshotError> {
        let fits = self.stats().names < all.settings.blocks_per_slot;
        if !fits || self.names().get(key).is_some() || named.copies == Copies::default() {
            return Err(SnapshotError::Malformed);
        }
        self.take_over(all, key, named);
        Ok(())
    }

    fn restore_placed(&mut self, all: &mut Common, place: Place, now_ns: u64) {
        let block = BlockHash(all.runs.hash(place));
        self.take_over_placed(all, block, place, now_ns);
    }
}
