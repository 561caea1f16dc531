//! Who holds which block in which tier: cuts on the runs, with the exceptions beside them.
//!
//! A worker without a [`Side`] on a run holds exactly the blocks before its cut, on the device.
//! Invariant: a block is held in a tier if its holders (names, placement) there are one or more;
//! only holders beyond the first are counted, in `more`.

use super::runs::{Place, Runs};
use super::side::Side;
use crate::names::{Slot, Tier};
use std::collections::HashMap;
use std::collections::hash_map::Entry;

/// The holders of all workers.
#[derive(Debug, Default)]
pub(super) struct Holders {
    sides: HashMap<(Slot, u32), Side>,
    more: HashMap<(Slot, Tier, Place), u32>,
}

impl Holders {
    pub(super) fn has(&self, runs: &Runs, slot: Slot, tier: Tier, place: Place) -> bool {
        match self.sides.get(&(slot, place.run)) {
            Some(side) => side.has(tier, place.offset),
            None => tier == Tier::Device && place.offset < runs.cover(place.run, slot.0)[0],
        }
    }

    fn has_any(&self, runs: &Runs, slot: Slot, place: Place) -> bool {
        match self.sides.get(&(slot, place.run)) {
            Some(side) => side.has_any(place.offset),
            None => place.offset < runs.cover(place.run, slot.0)[0],
        }
    }

    /// One more holder; says whether the worker did not have the block in any tier before.
    pub(super) fn add(&mut self, runs: &mut Runs, slot: Slot, tier: Tier, place: Place) -> bool {
        if self.has(runs, slot, tier, place) {
            *self.more.entry((slot, tier, place)).or_default() += 1;
            return false;
        }
        let first = !self.has_any(runs, slot, place);
        let key = (slot, place.run);
        let side = match self.sides.entry(key) {
            Entry::Occupied(side) => side.into_mut(),
            Entry::Vacant(vacant) => {
                let cut = runs.cover(place.run, slot.0)[0];
                if tier == Tier::Device && place.offset == cut {
                    runs.set_cover(place.run, slot.0, [cut + 1; 3]);
                    return first;
                }
                vacant.insert(Side::plain(cut))
            }
        };
        side.set(tier, place.offset);
        self.publish(runs, key);
        first
    }

    /// One holder less; says whether the worker has the block in no tier any more.
    pub(super) fn remove(&mut self, runs: &mut Runs, slot: Slot, tier: Tier, place: Place) -> bool {
        if let Some(more) = self.more.get_mut(&(slot, tier, place)) {
            *more -= 1;
            if *more == 0 {
                self.more.remove(&(slot, tier, place));
            }
            return false;
        }
        if !self.has(runs, slot, tier, place) {
            return false;
        }
        let key = (slot, place.run);
        let side = match self.sides.entry(key) {
            Entry::Occupied(side) => side.into_mut(),
            Entry::Vacant(vacant) => {
                let cut = runs.cover(place.run, slot.0)[0];
                if place.offset + 1 == cut {
                    runs.set_cover(place.run, slot.0, [cut - 1; 3]);
                    return true;
                }
                vacant.insert(Side::plain(cut))
            }
        };
        side.unset(tier, place.offset);
        self.publish(runs, key);
        !self.has_any(runs, slot, place)
    }

    /// A worker gives up all that it holds of a run.
    pub(super) fn drop_run(&mut self, runs: &mut Runs, slot: Slot, run: u32) {
        self.sides.remove(&(slot, run));
        runs.set_cover(run, slot.0, [0; 3]);
    }

    /// A worker has given up all its runs.
    pub(super) fn drop_rest(&mut self, slot: Slot) {
        self.more.retain(|(holder, ..), _| *holder != slot);
    }

    /// After a change of a side: the run's cover follows, and a side that is plain goes.
    fn publish(&mut self, runs: &mut Runs, key: (Slot, u32)) {
        let Some(side) = self.sides.get(&key) else { return };
        let cuts = side.cuts();
        if side.as_plain().is_some() {
            self.sides.remove(&key);
        }
        let (slot, run) = key;
        if runs.cover(run, slot.0) != cuts {
            runs.set_cover(run, slot.0, cuts);
        }
    }
}
