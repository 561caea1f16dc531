//! Where the router stands in one publisher's event stream.
//!
//! A pure state machine: messages go in with their [`Stamp`], [`Action`]s come out in the order
//! in which the caller must do them. Invariant: a message is applied only if the index holds
//! exactly what the publisher announced before it, or was cleared since the last loss.
//! Sockets, timeouts and decoding are not here.

use std::collections::VecDeque;

/// What names a message of a publisher.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stamp {
    /// Its sequence number.
    pub seq: u64,
    /// When the publisher sent it, by the publisher's clock in nanoseconds; 0 if unknown.
    pub sent_ns: u64,
}

/// What the caller must do, in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action<M> {
    /// Apply this message's events.
    Apply {
        /// The message.
        message: M,
        /// To give back to [`Cursor::all_cleared`] if the message says that all was cleared.
        epoch: u32,
    },
    /// Forget all blocks of this publisher's worker.
    Clear(ClearCause),
    /// Ask for a replay from this sequence number; a replay under way is void.
    Replay {
        /// The first sequence number wanted.
        from: u64,
    },
}

/// Why a worker's blocks had to be forgotten.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClearCause {
    /// The publisher started anew.
    Restart,
    /// Messages are lost for good.
    Lost,
}

/// How far the index can be trusted for this publisher.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// Nothing was heard yet.
    Waiting,
    /// A replay is under way; the index may be behind.
    CatchingUp,
    /// Everything announced is in the index.
    Current,
    /// Older messages are lost: the index holds less than the worker.
    Partial,
}

/// Bounds of a cursor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CursorLimits {
    /// Live messages kept during a replay; later ones are dropped and asked for again.
    pub held_messages: usize,
    /// Their bytes.
    pub held_bytes: usize,
    /// Replays in a row that bring nothing before the messages count as lost.
    pub fruitless_replays: u32,
}

impl Default for CursorLimits {
    fn default() -> Self {
        Self { held_messages: 4096, held_bytes: 16 << 20, fruitless_replays: 3 }
    }
}

/// What a cursor has counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CursorStats {
    /// Messages handed out to be applied.
    pub applied: u64,
    /// Messages dropped because they were applied before.
    pub repeated: u64,
    /// Gaps found in the stream.
    pub gaps: u64,
    /// Replays asked for.
    pub replays: u64,
    /// Replays that failed or did not help.
    pub replays_failed: u64,
    /// Live messages dropped because the hold was full.
    pub held_dropped: u64,
    /// Publisher restarts.
    pub restarts: u64,
    /// Times that messages were lost for good.
    pub losses: u64,
}

/// The cursor of one publisher; `M` is whatever the caller applies.
#[derive(Debug)]
pub struct Cursor<M> {
    limits: CursorLimits,
    can_replay: bool,
    held: VecDeque<(Stamp, usize, M)>,
    stats: CursorStats,
}

impl<M> Cursor<M> {
    /// A cursor that has heard nothing; `can_replay`: the publisher has a replay endpoint.
    #[must_use]
    pub fn new(can_replay: bool, limits: CursorLimits) -> Self {
        Self { limits, can_replay, held: VecDeque::new(), stats: CursorStats::default() }
    }

    /// The subscription's connection was made, or made again.
    pub fn connected(&mut self, out: &mut Vec<Action<M>>) {
        let _ = (self.can_replay, self.limits, out);
    }

    /// A message came on the subscription; `bytes` is what holding it costs.
    pub fn live(&mut self, stamp: Stamp, bytes: usize, message: M, out: &mut Vec<Action<M>>) {
        let _ = (stamp, bytes);
        out.push(Action::Apply { message, epoch: 0 });
    }

    /// A message came as part of the replay.
    pub fn replayed(&mut self, stamp: Stamp, message: M, out: &mut Vec<Action<M>>) {
        let _ = stamp;
        out.push(Action::Apply { message, epoch: 0 });
    }

    /// The replay's end marker came.
    pub fn replay_ended(&mut self, out: &mut Vec<Action<M>>) {
        let _ = out;
    }

    /// The replay was refused, timed out or broke off.
    pub fn replay_failed(&mut self, out: &mut Vec<Action<M>>) {
        let _ = out;
    }

    /// Starts over from the oldest message that the publisher still has.
    pub fn resync(&mut self, out: &mut Vec<Action<M>>) {
        let _ = out;
    }

    /// The message applied under `epoch` said that the worker's cache was cleared.
    pub fn all_cleared(&mut self, epoch: u32) {
        let _ = epoch;
    }

    /// How far the index can be trusted.
    #[must_use]
    pub fn standing(&self) -> Standing {
        let _ = &self.held;
        Standing::Waiting
    }

    /// The next sequence number to apply.
    #[must_use]
    pub fn next(&self) -> u64 {
        0
    }

    /// Counters.
    #[must_use]
    pub fn stats(&self) -> CursorStats {
        self.stats
    }
}
