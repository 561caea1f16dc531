//! Who holds which block in which tier: cuts on the runs, with the exceptions beside them.
//!
//! A worker without a [`Side`] on a run holds exactly the blocks before its cut, on the device.
//! Invariant: a block is held in a tier if its holders (names, placement) there are one or more;
//! only holders beyond the first are counted, in `more`.

use super::names_map::Mixed;
use super::runs::{Place, Runs};
use super::side::Side;
use crate::names::{Slot, Tier};
use std::collections::HashMap;

/// The holders of all workers.
#[derive(Debug, Default)]
pub(super) struct Holders {
    sides: HashMap<(Slot, u32), Side, Mixed>,
    more: HashMap<(Slot, Tier, Place), u32, Mixed>,
}

impl Holders {
    pub(super) fn has(&self, runs: &Runs, slot: Slot, tier: Tier, place: Place) -> bool {
        match self.sides.get(&(slot, place.run)) {
            Some(side) => side.has(tier, place.offset),
            None => tier == Tier::Device && place.offset < runs.cover(place.run, slot.0)[0],
        }
    }

    /// One more holder; says whether the worker did not have the block in any tier before.
    pub(super) fn add(&mut self, runs: &mut Runs, slot: Slot, tier: Tier, place: Place) -> bool {
        let (key, offset) = ((slot, place.run), place.offset);
        let (had, first);
        if let Some(side) = self.side(key) {
            (had, first) = (side.has(tier, offset), !side.has_any(offset));
            side.set(tier, offset);
        } else {
            let cut = runs.cover(place.run, slot.0)[0];
            (had, first) = (tier == Tier::Device && offset < cut, offset >= cut);
            if tier == Tier::Device && offset == cut {
                runs.set_cover(place.run, slot.0, [cut + 1; 3]);
                return true;
            }
            if !had {
                let mut side = Side::plain(cut);
                side.set(tier, offset);
                self.sides.insert(key, side);
            }
        }
        if had {
            *self.more.entry((slot, tier, place)).or_default() += 1;
        } else {
            self.publish(runs, key);
        }
        first
    }

    /// One holder less; says whether the worker has the block in no tier any more.
    pub(super) fn remove(&mut self, runs: &mut Runs, slot: Slot, tier: Tier, place: Place) -> bool {
        if !self.more.is_empty()
            && let Some(more) = self.more.get_mut(&(slot, tier, place))
        {
            *more -= 1;
            if *more == 0 {
                self.more.remove(&(slot, tier, place));
            }
            return false;
        }
        let (key, offset) = ((slot, place.run), place.offset);
        let last;
        if let Some(side) = self.side(key) {
            let had = side.has(tier, offset);
            side.unset(tier, offset);
            last = had && !side.has_any(offset);
        } else {
            let cut = runs.cover(place.run, slot.0)[0];
            if tier != Tier::Device || offset >= cut {
                return false;
            }
            if offset + 1 == cut {
                runs.set_cover(place.run, slot.0, [cut - 1; 3]);
                return true;
            }
            let mut side = Side::plain(cut);
            side.unset(tier, offset);
            self.sides.insert(key, side);
            last = true;
        }
        self.publish(runs, key);
        last
    }

    fn side(&mut self, key: (Slot, u32)) -> Option<&mut Side> {
        if self.sides.is_empty() { None } else { self.sides.get_mut(&key) }
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
