//! A small set of named things as one word: which guards vetoed, which fallbacks were used.
//! A set is `Copy`, so a decision carries several without touching the heap.

use std::fmt;
use std::marker::PhantomData;

use serde::{Serialize, Serializer};

/// A kind of thing that has few members, each with a short name.
pub trait Flag: Copy + 'static {
    /// Every member, in the order of their bits.
    const ALL: &'static [Self];

    /// The member's place in `ALL`.
    fn place(self) -> u8;

    /// Short `snake_case` name, as in metric labels.
    fn as_str(self) -> &'static str;
}

/// A set of flags.
pub struct Set<F> {
    bits: u16,
    kind: PhantomData<F>,
}

impl<F: Flag> Set<F> {
    /// The empty set.
    pub const EMPTY: Set<F> = Set { bits: 0, kind: PhantomData };

    /// The set of one flag.
    pub fn of(flag: F) -> Set<F> {
        Set { bits: 1 << flag.place(), kind: PhantomData }
    }

    /// Whether nothing is in it.
    pub fn is_empty(self) -> bool {
        self.bits == 0
    }

    /// Whether `flag` is in it.
    pub fn contains(self, flag: F) -> bool {
        self.bits & (1 << flag.place()) != 0
    }

    /// Puts `flag` in.
    pub fn insert(&mut self, flag: F) {
        self.bits |= 1 << flag.place();
    }

    /// What is in either set.
    #[must_use]
    pub fn union(self, other: Set<F>) -> Set<F> {
        Set { bits: self.bits | other.bits, kind: PhantomData }
    }

    /// The members, in order.
    pub fn iter(self) -> impl Iterator<Item = F> {
        F::ALL.iter().copied().filter(move |flag| self.contains(*flag))
    }

    /// The first member, in order.
    pub fn first(self) -> Option<F> {
        self.iter().next()
    }
}

impl<F> Clone for Set<F> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<F> Copy for Set<F> {}

impl<F> PartialEq for Set<F> {
    fn eq(&self, other: &Self) -> bool {
        self.bits == other.bits
    }
}

impl<F> Eq for Set<F> {}

impl<F: Flag> Default for Set<F> {
    fn default() -> Self {
        Self::EMPTY
    }
}

impl<F: Flag> fmt::Debug for Set<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.iter().map(Flag::as_str)).finish()
    }
}

impl<F: Flag> FromIterator<F> for Set<F> {
    fn from_iter<I: IntoIterator<Item = F>>(flags: I) -> Self {
        let mut set = Self::EMPTY;
        for flag in flags {
            set.insert(flag);
        }
        set
    }
}

impl<F: Flag> Serialize for Set<F> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.iter().map(Flag::as_str))
    }
}
