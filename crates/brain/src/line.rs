//! The line of requests that wait in the router: who is next, and who gives way when it is full.
//!
//! Those that can still be served in time come before those that cannot, and of both a higher priority
//! comes first. Within one, tenants take turns by the tokens that they ask for
//! (start-time fair queueing: an entry's tag is where its tenant's last one ended, or the line's own
//! time if that is later), and a tenant's own requests come in order. Nothing here waits or knows time.

use std::collections::{BTreeMap, HashMap};

/// So many of those that wait, the first in line, are asked about at a time: what the first of them
/// needs may be what is busy.
pub const LINE_HEADS: usize = 8;

/// Tenants of one priority that are remembered while nothing of theirs waits. Who is forgotten begins
/// as a new one does: at the line's time.
const IDLE_TENANTS: usize = 1024;

/// A place in the line. The order of keys is the order of the line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Key {
    rank: Rank,
    /// Tokens that its tenant, or the line, is past when its turn comes.
    tag: u64,
    number: u64,
}

/// What comes before tenants.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Rank {
    late: bool,
    /// Priority, negated.
    behind: i16,
}

/// Names an entry for as long as it is in the line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Place(Key);

/// What a request brings to the line.
#[derive(Clone, Copy, Debug, Default)]
pub struct Claim {
    /// It cannot be served in time: it comes after all that can.
    pub late: bool,
    /// Higher comes first.
    pub priority: i8,
    /// Whose it is.
    pub tenant: Tenant,
    /// Prompt tokens that it wants computed.
    pub tokens: u32,
}

/// One priority's tenants.
#[derive(Debug, Default)]
struct Class {
    /// The tag of the entry that was served last.
    time: u64,
    waiting: usize,
    tenants: HashMap<Tenant, Used>,
}

/// Whose a request is, as a hash of whatever names it; those of nobody are one tenant.
pub type Tenant = Option<u64>;

/// What a tenant has had.
#[derive(Debug, Default)]
struct Used {
    /// Where its last entry ends.
    end: u64,
    waiting: usize,
}

/// The line of one model; `T` is what its owner needs to find the request again.
#[derive(Debug)]
pub struct Line<T> {
    most: usize,
    entries: BTreeMap<Key, (Tenant, T)>,
    classes: BTreeMap<Rank, Class>,
    number: u64,
}

/// What became of a request that joined.
#[derive(Debug, PartialEq, Eq)]
pub enum Joined<T> {
    /// It has a place.
    In(Place),
    /// It has the place of the last of the line, who gave way.
    Displaced(Place, T),
    /// The line is full of requests that come before it.
    Full,
}

impl<T> Line<T> {
    /// An empty line that holds `most` requests.
    pub fn new(most: usize) -> Line<T> {
        Line { most, entries: BTreeMap::new(), classes: BTreeMap::new(), number: 0 }
    }

    /// Requests that wait.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether nobody waits.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Whether somebody waits who can still be served in time.
    pub fn is_in_time(&self) -> bool {
        self.entries.first_key_value().is_some_and(|(first, _)| !first.rank.late)
    }

    /// Gives a request its place. A full line is left by its last where the new one comes before that.
    pub fn join(&mut self, claim: Claim, entry: T) -> Joined<T> {
        let rank = Rank { late: claim.late, behind: -i16::from(claim.priority) };
        let tag = self.classes.get(&rank).map_or(0, |class| class.turn_of(claim.tenant));
        let key = Key { rank, tag, number: self.number };
        let full = self.entries.len() >= self.most;
        if full && self.entries.last_key_value().is_none_or(|(last, _)| *last < key) {
            return Joined::Full;
        }
        self.number += 1;
        let end = tag.saturating_add(claim.tokens.max(1).into());
        self.classes.entry(rank).or_default().enter(claim.tenant, end);
        let displaced =
            if full { self.entries.last_key_value().map(|(key, _)| *key) } else { None };
        let displaced = displaced.and_then(|last| self.left(Place(last)));
        self.entries.insert(key, (claim.tenant, entry));
        match displaced {
            Some(entry) => Joined::Displaced(Place(key), entry),
            None => Joined::In(Place(key)),
        }
    }

    /// Those whose turn comes first, in order.
    pub fn heads(&self, count: usize) -> impl Iterator<Item = (Place, &T)> {
        self.entries.iter().take(count).map(|(key, (_, entry))| (Place(*key), entry))
    }

    /// The one whose turn comes next after this place, whether or not that is still taken.
    pub fn after(&self, place: Place) -> Option<(Place, &T)> {
        use std::ops::Bound::{Excluded, Unbounded};
        let mut behind = self.entries.range((Excluded(place.0), Unbounded));
        behind.next().map(|(key, (_, entry))| (Place(*key), entry))
    }

    /// Its turn has come: it is out of the line, and the line's time is its own.
    pub fn served(&mut self, place: Place) -> Option<T> {
        if let Some(class) = self.classes.get_mut(&place.0.rank)
            && self.entries.contains_key(&place.0)
        {
            class.time = class.time.max(place.0.tag);
        }
        self.left(place)
    }

    /// It waits no longer and was not served: its tenant has lost the turn.
    pub fn left(&mut self, place: Place) -> Option<T> {
        let (tenant, entry) = self.entries.remove(&place.0)?;
        if let Some(class) = self.classes.get_mut(&place.0.rank) {
            class.leave(tenant);
            if class.waiting == 0 {
                // Nobody is owed anything.
                self.classes.remove(&place.0.rank);
            }
        }
        Some(entry)
    }
}

impl Class {
    /// The tag of a tenant's next entry.
    fn turn_of(&self, tenant: Tenant) -> u64 {
        self.tenants.get(&tenant).map_or(self.time, |used| used.end.max(self.time))
    }

    fn enter(&mut self, tenant: Tenant, end: u64) {
        let used = self.tenants.entry(tenant).or_default();
        (used.end, used.waiting) = (end, used.waiting + 1);
        self.waiting += 1;
    }

    fn leave(&mut self, tenant: Tenant) {
        self.waiting -= 1;
        if let Some(used) = self.tenants.get_mut(&tenant) {
            used.waiting -= 1;
        }
        if self.tenants.len() > IDLE_TENANTS + self.waiting {
            self.tenants.retain(|_, used| used.waiting > 0);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const FLOOD: u64 = 100;
    const QUIET: u64 = 200;

    fn claim(priority: i8, tenant: u64, tokens: u32) -> Claim {
        Claim { late: false, priority, tenant: Some(tenant), tokens }
    }

    fn all(line: &Line<u32>) -> Vec<u32> {
        line.heads(usize::MAX).map(|(_, entry)| *entry).collect()
    }

    fn first<T: Copy>(line: &Line<T>) -> Option<(Place, T)> {
        line.heads(1).next().map(|(place, entry)| (place, *entry))
    }

    #[test]
    fn a_higher_priority_passes_and_equals_keep_their_order() {
        let mut line = Line::new(8);
        for (priority, entry) in [(0, 1), (0, 2), (5, 3), (-1, 4), (5, 5)] {
            line.join(claim(priority, 1, 10), entry);
        }
        assert_eq!(all(&line), [3, 5, 1, 2, 4]);
    }

    #[test]
    fn those_that_are_late_come_after_all_that_are_not() {
        let mut line = Line::new(3);
        line.join(Claim { late: true, ..claim(9, 1, 10) }, 1);
        assert!(!line.is_in_time());
        line.join(claim(0, 1, 10), 2);
        assert!(line.is_in_time());
        line.join(Claim { late: true, ..claim(0, 1, 10) }, 3);
        assert_eq!(all(&line), [2, 1, 3]);
        assert!(matches!(line.join(claim(-9, 1, 10), 4), Joined::Displaced(_, 3)));
        assert_eq!(all(&line), [2, 4, 1]);
    }

    #[test]
    fn a_flood_of_one_tenant_delays_no_other() {
        let mut line = Line::new(100);
        for entry in 0..50 {
            line.join(claim(0, FLOOD, 100), entry);
        }
        line.join(claim(0, QUIET, 100), 99);
        // Beside the first of the flood, which came before.
        assert_eq!(all(&line)[..3], [0, 99, 1]);
    }

    #[test]
    fn a_full_line_is_left_by_its_last_for_one_that_comes_before() {
        let mut line = Line::new(3);
        for entry in 0..3 {
            line.join(claim(0, FLOOD, 100), entry);
        }
        assert_eq!(line.join(claim(0, FLOOD, 100), 3), Joined::Full);
        assert_eq!(line.join(claim(-1, QUIET, 1), 4), Joined::Full);
        assert!(matches!(line.join(claim(0, QUIET, 100), 5), Joined::Displaced(_, 2)));
        assert!(matches!(line.join(claim(1, FLOOD, 100), 6), Joined::Displaced(_, 1)));
        assert_eq!(all(&line), [6, 0, 5]);
        assert_eq!(line.len(), 3);
    }

    #[test]
    fn a_line_of_no_length_takes_nobody() {
        assert_eq!(Line::new(0).join(claim(9, 1, 1), 0), Joined::Full);
    }

    proptest! {
        /// Tenants that always have something waiting get equal tokens, within one request of each.
        #[test]
        fn tenants_that_wait_all_the_time_get_the_same(
            sizes in prop::collection::vec((0usize..4, 1u32..5_000), 50..400),
        ) {
            let mut line = Line::new(usize::MAX);
            let mut waiting = [0_usize; 4];
            for (n, (tenant, tokens)) in sizes.iter().enumerate() {
                line.join(claim(0, *tenant as u64, *tokens), n);
                waiting[*tenant] += 1;
            }
            let mut got = [0_u64; 4];
            while waiting.iter().all(|left| *left > 0) {
                let Some((place, n)) = first(&line) else { break };
                prop_assert_eq!(line.served(place), Some(n));
                let (tenant, tokens) = sizes[n];
                waiting[tenant] -= 1;
                got[tenant] += u64::from(tokens);
                let (least, most) = (got.iter().min(), got.iter().max());
                prop_assert!(most.zip(least).is_some_and(|(most, least)| most - least <= 10_000));
            }
        }

        /// Whoever joined is served, left, displaced or still there, once; the order holds.
        #[test]
        fn nobody_is_lost_or_there_twice(
            steps in prop::collection::vec((0u8..4, -3i8..3, 0u8..5, 1u32..1_000), 1..300),
        ) {
            let mut line = Line::new(16);
            let mut inside: Vec<(Place, u32)> = Vec::new();
            for (n, (step, priority, tenant, tokens)) in (0u32..).zip(steps) {
                match step {
                    0 | 1 => match line.join(claim(priority, tenant.into(), tokens), n) {
                        Joined::In(place) => inside.push((place, n)),
                        Joined::Displaced(place, gone) => {
                            prop_assert!(inside.iter().any(|(_, entry)| *entry == gone));
                            inside.retain(|(_, entry)| *entry != gone);
                            inside.push((place, n));
                        }
                        Joined::Full => prop_assert_eq!(line.len(), 16),
                    },
                    2 => {
                        if let Some((place, entry)) = first(&line) {
                            prop_assert_eq!(line.served(place), Some(entry));
                            prop_assert_eq!(line.served(place), None);
                            inside.retain(|(_, other)| *other != entry);
                        }
                    }
                    _ => {
                        if let Some((place, entry)) = inside.pop() {
                            prop_assert_eq!(line.left(place), Some(entry));
                        }
                    }
                }
                let mut expected: Vec<_> = inside.clone();
                expected.sort_by_key(|(place, _)| place.0);
                let there: Vec<_> = line.heads(99).map(|(place, entry)| (place, *entry)).collect();
                prop_assert_eq!(there, expected);
            }
        }

        /// Tenants of the past take no room.
        #[test]
        fn idle_tenants_are_forgotten(count in 2_000u32..4_000) {
            let mut line = Line::new(4);
            line.join(claim(0, 0, 10), 0);
            for n in 1..count {
                if let Joined::In(place) = line.join(claim(0, n.into(), 10), n) {
                    line.served(place);
                }
                let tenants = line.classes.values().map(|class| class.tenants.len()).sum::<usize>();
                prop_assert!(tenants <= IDLE_TENANTS + 2);
            }
            prop_assert_eq!(all(&line), [0]);
            let place = first(&line).map(|(place, _)| place);
            prop_assert_eq!(place.and_then(|place| line.served(place)), Some(0));
            prop_assert!(line.classes.is_empty());
        }
    }
}
