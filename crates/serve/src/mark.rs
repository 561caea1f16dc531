//! How far the index has got with a rank's KV events, for another router to go on from there.
//!
//! Invariant: a rank's mark is changed only while the index's writer is held, so that whoever holds it
//! finds the mark to be that of the blocks. There is none in the middle of a message.

use std::sync::{Mutex, PoisonError};

use pointsman_brain::Slot;
use pointsman_kv::{Groups, Position};

use crate::fleet::Worker;

/// What it takes besides the blocks to go on with a publisher's events.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Mark {
    /// `None` while nothing of it counts.
    pub(crate) position: Option<Position>,
    /// Which KV-cache group is indexed.
    pub(crate) groups: Groups,
}

/// How far the index has got.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Reached {
    /// Nobody follows the rank's events.
    #[default]
    Nothing,
    /// The middle of a message.
    Within,
    /// A place between two messages.
    Mark(Mark),
}

/// The marks of a worker, by rank.
#[derive(Debug)]
pub(crate) struct Marks(Box<[OfRank]>);

#[derive(Debug, Default)]
struct OfRank {
    reached: Mutex<Reached>,
    /// What a snapshot said, until somebody goes on from there.
    restored: Mutex<Option<Mark>>,
}

impl Marks {
    pub(crate) fn new(ranks: usize) -> Marks {
        Marks((0..ranks).map(|_| OfRank::default()).collect())
    }
}

impl Worker {
    /// Sets how far a rank's events are in the index; the caller holds its writer.
    pub(crate) fn set_reached(&self, slot: Slot, reached: Reached) {
        if let Some(rank) = self.marks_of(slot) {
            *rank.reached.lock().unwrap_or_else(PoisonError::into_inner) = reached;
        }
    }

    /// How far a rank's events are in the index.
    pub(crate) fn reached(&self, slot: Slot) -> Reached {
        let reached = |rank: &OfRank| *rank.reached.lock().unwrap_or_else(PoisonError::into_inner);
        self.marks_of(slot).map_or(Reached::Nothing, reached)
    }

    /// The index holds for a rank what a snapshot said.
    pub(crate) fn set_restored(&self, slot: Slot, mark: Option<Mark>) {
        if let Some(rank) = self.marks_of(slot) {
            *rank.restored.lock().unwrap_or_else(PoisonError::into_inner) = mark;
        }
    }

    /// Where a snapshot left off with a rank, for the one who goes on from there.
    pub(crate) fn take_restored(&self, slot: Slot) -> Option<Mark> {
        self.marks_of(slot)?.restored.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    fn marks_of(&self, slot: Slot) -> Option<&OfRank> {
        self.marks.0.get(self.slots.iter().position(|own| *own == slot)?)
    }
}
