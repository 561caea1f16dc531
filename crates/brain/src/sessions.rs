//! What the last turn of each session did, so that the next can stay on its worker.
//! A hash map over an intrusive list: every operation is O(1), and the session unused for longest
//! makes room for a new one. Whether a worker can still be used is not decided here.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use serde::Serialize;

use crate::fleet::{Path, Slot};
use crate::random::mix;

/// What a session's last turn did.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Turn {
    /// The worker that streamed.
    pub decode: Slot,
    /// The path.
    pub path: Path,
}

/// No place: the end of the list.
const NONE: u32 = u32::MAX;

#[derive(Debug)]
pub(crate) struct Sessions {
    capacity: u32,
    places: HashMap<u64, u32, BuildHasherDefault<Mix>>,
    nodes: Vec<Node>,
    newest: u32,
    oldest: u32,
}

#[derive(Debug)]
struct Node {
    session: u64,
    /// `None` once its worker was removed.
    turn: Option<Turn>,
    newer: u32,
    older: u32,
}

impl Sessions {
    pub(crate) fn new(capacity: u32) -> Sessions {
        Sessions {
            capacity,
            places: HashMap::default(),
            nodes: Vec::new(),
            newest: NONE,
            oldest: NONE,
        }
    }

    pub(crate) fn last(&self, session: u64) -> Option<Turn> {
        self.nodes.get(*self.places.get(&session)? as usize)?.turn
    }

    /// Remembers a turn.
    pub(crate) fn record(&mut self, session: u64, turn: Turn) {
        let place = match self.places.get(&session) {
            Some(&place) => {
                self.unlink(place);
                place
            }
            None => match self.place_for(session) {
                Some(place) => place,
                None => return,
            },
        };
        if let Some(node) = self.node(place) {
            node.session = session;
            node.turn = Some(turn);
        }
        self.link_newest(place);
    }

    /// Forgets every turn on a worker.
    pub(crate) fn forget(&mut self, slot: Slot) {
        for node in &mut self.nodes {
            node.turn = node.turn.filter(|turn| turn.decode != slot);
        }
    }

    /// A place that is not in the list, for a session that is not remembered.
    fn place_for(&mut self, session: u64) -> Option<u32> {
        let place = if self.nodes.len() < self.capacity as usize {
            self.nodes.push(Node { session, turn: None, newer: NONE, older: NONE });
            (self.nodes.len() - 1) as u32
        } else {
            let place = self.oldest;
            let evicted = self.node(place)?.session;
            self.unlink(place);
            self.places.remove(&evicted);
            place
        };
        self.places.insert(session, place);
        Some(place)
    }

    fn node(&mut self, place: u32) -> Option<&mut Node> {
        self.nodes.get_mut(place as usize)
    }

    fn unlink(&mut self, place: u32) {
        let Some(&mut Node { newer, older, .. }) = self.node(place) else { return };
        match self.node(newer) {
            Some(node) => node.older = older,
            None => self.newest = older,
        }
        match self.node(older) {
            Some(node) => node.newer = newer,
            None => self.oldest = newer,
        }
    }

    fn link_newest(&mut self, place: u32) {
        let older = self.newest;
        if let Some(node) = self.node(place) {
            node.newer = NONE;
            node.older = older;
        }
        match self.node(older) {
            Some(node) => node.newer = place,
            None => self.oldest = place,
        }
        self.newest = place;
    }
}

/// Session numbers are hashes already; this only spreads those that are not.
#[derive(Debug, Default)]
pub(crate) struct Mix(u64);

impl Hasher for Mix {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u64(u64::from(*byte));
        }
    }

    fn write_u64(&mut self, number: u64) {
        self.0 = mix(self.0 ^ number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn turn(slot: u16) -> Turn {
        Turn { decode: Slot(slot), path: Path::Local }
    }

    #[test]
    fn the_session_unused_for_longest_makes_room() {
        let mut sessions = Sessions::new(2);
        sessions.record(1, turn(1));
        sessions.record(2, turn(2));
        sessions.record(1, turn(3));
        sessions.record(3, turn(4));
        assert_eq!(sessions.last(1), Some(turn(3)));
        assert_eq!(sessions.last(2), None);
        assert_eq!(sessions.last(3), Some(turn(4)));
    }

    #[test]
    fn turns_on_a_removed_worker_are_forgotten() {
        let mut sessions = Sessions::new(8);
        sessions.record(1, turn(1));
        sessions.record(2, turn(2));
        sessions.forget(Slot(1));
        assert_eq!(sessions.last(1), None);
        assert_eq!(sessions.last(2), Some(turn(2)));
    }

    #[test]
    fn no_room_at_all_remembers_nothing() {
        let mut sessions = Sessions::new(0);
        sessions.record(1, turn(1));
        assert_eq!(sessions.last(1), None);
    }

    #[test]
    fn it_agrees_with_a_plain_list() {
        let mut random = crate::random::Random::new(7);
        for capacity in [1, 2, 3, 8] {
            let mut sessions = Sessions::new(capacity);
            let mut plain: Vec<(u64, Turn)> = Vec::new();
            for _ in 0..2_000 {
                let session = (random.unit() * 12.0) as u64;
                let slot = (random.unit() * 4.0) as u16;
                if random.unit() < 0.02 {
                    sessions.forget(Slot(slot));
                    // A forgotten turn keeps its place in the order of use.
                    for (_, turn) in plain.iter_mut().filter(|(_, turn)| turn.decode.0 == slot) {
                        turn.decode = Slot(99);
                    }
                } else {
                    sessions.record(session, turn(slot));
                    plain.retain(|(known, _)| *known != session);
                    plain.push((session, turn(slot)));
                    if plain.len() > capacity as usize {
                        plain.remove(0);
                    }
                }
                for session in 0..12 {
                    let expected = plain.iter().find(|(known, _)| *known == session);
                    let expected = expected.map(|(_, turn)| *turn).filter(|t| t.decode.0 != 99);
                    assert_eq!(sessions.last(session), expected);
                }
            }
        }
    }
}
