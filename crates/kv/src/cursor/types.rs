//! What a cursor takes, gives and counts.

/// What names a message of a publisher.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stamp {
    /// Its sequence number.
    pub seq: u64,
    /// When the publisher sent it, by the publisher's clock in nanoseconds; 0 if unknown.
    pub sent_ns: u64,
}

/// Where a cursor stands, for another one to go on from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Position {
    /// The last message applied. Number and time together say which publisher it is of.
    pub last: Stamp,
    /// The first message applied since the last clear.
    pub first: u64,
    /// Whether nothing older than the first is missing.
    pub complete: bool,
}

/// What the caller must do, in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action<M> {
    /// Apply this message's events.
    Apply {
        /// The message.
        message: M,
        /// To give back to [`Cursor::all_cleared`] if the message says that all was cleared.
        ///
        /// [`Cursor::all_cleared`]: crate::Cursor::all_cleared
        epoch: u32,
    },
    /// Forget all blocks of this publisher's worker.
    Clear(ClearCause),
    /// Ask for a replay from this sequence number. A replay under way is void: break it off and
    /// hand in nothing more of it. Every replay must come to [`Cursor::replay_ended`] or, also
    /// when it takes too long, to [`Cursor::replay_failed`].
    ///
    /// [`Cursor::replay_ended`]: crate::Cursor::replay_ended
    /// [`Cursor::replay_failed`]: crate::Cursor::replay_failed
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
    /// Messages are, or may be, lost for good.
    Lost,
    /// A replay from further back replaces what is known.
    Resync,
}

/// How far the index can be trusted for this publisher.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// The publisher has announced nothing that is known of.
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
    /// Live messages dropped because the hold was full or their publisher was replaced.
    pub held_dropped: u64,
    /// Live messages dropped because they were sent before others that came earlier.
    pub stragglers: u64,
    /// Publisher restarts.
    pub restarts: u64,
    /// Times that messages were lost for good.
    pub losses: u64,
}
