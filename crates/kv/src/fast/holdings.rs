//! What one worker holds, block by block and tier by tier: cuts on the runs, and the exceptions.
//!
//! A worker without a [`Side`] on a run holds exactly the blocks before its cut, on the device.
//! Invariant: a block is held in a tier if its holders (names, placement) there are one or more;
//! only holders beyond the first are counted, in `more`. A worker that holds nothing of a run has
//! no cover there.

use super::names_map::Mixed;
use super::runs::{Covered, Place, Runs, Stretch};
use super::shared::Cover;
use super::side::Side;
use crate::names::{Slot, Tier};
use std::collections::HashMap;

/// One worker's exceptions; what is regular is in the covers.
#[derive(Debug)]
pub(super) struct Holdings {
    slot: Slot,
    sides: HashMap<u32, Side, Mixed>,
    more: HashMap<(Tier, Place), u32, Mixed>,
}

/// What one more holder of a block in a tier changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Added {
    /// Holders in this tier before.
    pub(super) before: u32,
    /// The worker did not have the block in any tier.
    pub(super) first: bool,
}

/// What one holder less changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Gone {
    /// Holders in this tier that are left.
    pub(super) after: u32,
    /// The worker has the block in no tier any more.
    pub(super) last: bool,
}

impl Holdings {
    pub(super) fn new(slot: Slot) -> Self {
        Self { slot, sides: HashMap::default(), more: HashMap::default() }
    }

    pub(super) fn has(&self, runs: &Runs, tier: Tier, place: Place) -> bool {
        match runs.cover(place.run, self.slot.0) {
            Some(Cover { side: true, .. }) => {
                self.sides.get(&place.run).is_some_and(|side| side.has(tier, place.offset))
            }
            cover => tier == Tier::Device && place.offset < cut_of(cover),
        }
    }

    /// One more holder of each block of a stretch, on the device, where that only moves the
    /// worker's cut on; otherwise changes nothing and says so.
    pub(super) fn extend(&mut self, runs: &mut Runs, stretch: Stretch) -> bool {
        let cut = stretch.from + stretch.len;
        match runs.covered(stretch.run, self.slot.0) {
            Some(Covered { cover: Cover { side: true, .. }, .. }) => false,
            Some(covered) if covered.cover.cuts[0] == stretch.from => {
                runs.recut(covered, cut);
                true
            }
            None if stretch.from == 0 => runs.put_cover(stretch.run, Cover::plain(self.slot, cut)),
            _ => false,
        }
    }

    /// One more holder.
    pub(super) fn add(&mut self, runs: &mut Runs, tier: Tier, place: Place) -> Added {
        let cover = runs.cover(place.run, self.slot.0);
        if !cover.is_some_and(|cover| cover.side) {
            let cut = cut_of(cover);
            if tier == Tier::Device && place.offset == cut {
                runs.put_cover(place.run, Cover::plain(self.slot, cut + 1));
                return Added { before: 0, first: true };
            }
            if tier == Tier::Device && place.offset < cut {
                return Added { before: self.add_more(tier, place), first: false };
            }
            self.sides.insert(place.run, Side::plain(cut));
        }
        let side = self.sides.entry(place.run).or_default();
        if side.has(tier, place.offset) {
            return Added { before: self.add_more(tier, place), first: false };
        }
        let first = !side.has_any(place.offset);
        side.set(tier, place.offset);
        self.publish(runs, place.run);
        Added { before: 0, first }
    }

    /// Another holder beyond the first; returns how many there were.
    fn add_more(&mut self, tier: Tier, place: Place) -> u32 {
        let more = self.more.entry((tier, place)).or_default();
        *more = more.saturating_add(1);
        *more
    }

    /// One holder less; nothing if there is none.
    pub(super) fn remove(&mut self, runs: &mut Runs, tier: Tier, place: Place) -> Gone {
        if !self.more.is_empty()
            && let Some(more) = self.more.get_mut(&(tier, place))
        {
            let after = *more;
            *more -= 1;
            if *more == 0 {
                self.more.remove(&(tier, place));
            }
            return Gone { after, last: false };
        }
        let nothing = Gone { after: 0, last: false };
        let Some(covered) = runs.covered(place.run, self.slot.0) else { return nothing };
        if !covered.cover.side {
            let cut = covered.cover.cuts[0];
            if tier != Tier::Device || place.offset >= cut {
                return nothing;
            }
            if place.offset + 1 == cut {
                if cut == 1 {
                    runs.drop_cover(place.run, self.slot.0);
                } else {
                    let was_all = runs.is_all(place.run, cut);
                    runs.recut(covered, cut - 1);
                    if was_all {
                        runs.trim(place.run);
                    }
                }
                return Gone { after: 0, last: true };
            }
            self.sides.insert(place.run, Side::plain(cut));
        }
        let Some(side) = self.sides.get_mut(&place.run) else { return nothing };
        let had = side.has(tier, place.offset);
        side.unset(tier, place.offset);
        let last = had && !side.has_any(place.offset);
        self.publish(runs, place.run);
        runs.trim(place.run);
        Gone { after: 0, last }
    }

    /// The worker gives up all that it holds of a run.
    pub(super) fn drop_run(&mut self, runs: &mut Runs, run: u32) {
        self.sides.remove(&run);
        runs.drop_cover(run, self.slot.0);
    }

    /// The worker has given up all its runs.
    pub(super) fn drop_rest(&mut self) {
        *self = Self::new(self.slot);
    }

    fn set_plain(&self, runs: &mut Runs, run: u32, cut: u16) {
        if cut == 0 {
            runs.drop_cover(run, self.slot.0);
        } else {
            runs.put_cover(run, Cover::plain(self.slot, cut));
        }
    }

    /// After a change of a side: the run's cover follows, and a side that is plain goes.
    fn publish(&mut self, runs: &mut Runs, run: u32) {
        let Some(side) = self.sides.get(&run) else { return };
        if let Some(cut) = side.as_plain() {
            self.sides.remove(&run);
            self.set_plain(runs, run, cut);
        } else {
            let cover = Cover { slot: self.slot.0, side: true, cuts: side.cuts() };
            if runs.cover(run, self.slot.0) != Some(cover) {
                runs.put_cover(run, cover);
            }
        }
    }
}

fn cut_of(cover: Option<Cover>) -> u16 {
    cover.map_or(0, |cover| cover.cuts[0])
}
