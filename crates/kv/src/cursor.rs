//! Where the router stands in one publisher's event stream.
//!
//! A pure state machine: messages go in with their [`Stamp`], [`Action`]s come out in the order
//! in which the caller must do them. Invariant: a message is applied only if the index holds
//! exactly what the publisher announced before it, or less because it was cleared at a loss;
//! so an index never holds too much. Sockets, timeouts and decoding are not here.

mod types;

pub use types::{Action, ClearCause, CursorLimits, CursorStats, Position, Stamp, Standing};

use std::collections::VecDeque;

/// The cursor of one publisher; `M` is whatever the caller applies.
///
/// A gap is closed by asking for a replay *from the last applied message on*: if the publisher
/// repeats that very message (same sequence number and time) it is still the same publisher; if
/// it does not know it, it has started anew or its buffer is too short, and the worker is cleared.
/// The same question is asked after every reconnection, because a restarted publisher may have
/// come to any sequence number by the time its first message gets here.
#[derive(Debug)]
pub struct Cursor<M> {
    limits: CursorLimits,
    can_replay: bool,
    /// The sequence number to apply next.
    next: u64,
    /// The sequence number of the first message applied since the last clear.
    first: u64,
    /// Whether `next` is binding; after a loss any message may come next.
    anchored: bool,
    /// Whether the index holds all that was announced before `next`.
    complete: bool,
    /// The last message applied since the last clear.
    last: Option<Stamp>,
    /// The highest-numbered message seen of this incarnation of the publisher.
    newest: Option<Stamp>,
    /// The highest-numbered one of them that came on the subscription.
    newest_live: Option<u64>,
    epoch: u32,
    replay: Option<Replay>,
    held: VecDeque<Held<M>>,
    held_bytes: usize,
    stats: CursorStats,
}

#[derive(Debug)]
struct Held<M> {
    stamp: Stamp,
    bytes: usize,
    message: M,
}

/// A replay under way.
#[derive(Clone, Copy, Debug)]
struct Replay {
    goal: Goal,
    /// Its first message came.
    begun: bool,
    /// What was to be applied next when it was asked for.
    next: u64,
    /// It brought a message that was not applied before.
    progressed: bool,
    /// How many replays before it brought nothing.
    fruitless: u32,
}

#[derive(Clone, Copy, Debug)]
enum Goal {
    /// Go on after this message, which must be the first that the replay brings.
    Resume(Stamp),
    /// Start from whatever there is.
    Begin,
    /// Replace what the index holds if the replay goes further back.
    Replace,
}

impl<M> Cursor<M> {
    /// A cursor that has heard nothing; `can_replay`: the publisher has a replay endpoint.
    #[must_use]
    pub fn new(can_replay: bool, limits: CursorLimits) -> Self {
        Self {
            limits,
            can_replay,
            next: 0,
            first: 0,
            anchored: true,
            complete: true,
            last: None,
            newest: None,
            newest_live: None,
            epoch: 0,
            replay: None,
            held: VecDeque::new(),
            held_bytes: 0,
            stats: CursorStats::default(),
        }
    }

    /// A cursor that goes on where another one was, over an index that holds what that one's did.
    ///
    /// Nothing vouches for what happened since, so the first thing that it does when connected is
    /// what a reconnection does: it asks for a replay from the last message on, and clears if the
    /// publisher does not know it, or cannot be asked.
    #[must_use]
    pub fn resume(position: Position, can_replay: bool, limits: CursorLimits) -> Self {
        Self {
            next: position.last.seq.saturating_add(1),
            first: position.first,
            complete: position.complete,
            last: Some(position.last),
            newest: Some(position.last),
            ..Self::new(can_replay, limits)
        }
    }

    /// Where it stands once all its actions so far are done; `None` while the index, as far as
    /// this publisher is concerned, is empty.
    #[must_use]
    pub fn position(&self) -> Option<Position> {
        let last = self.last.filter(|_| self.anchored)?;
        Some(Position { last, first: self.first, complete: self.complete })
    }

    /// The subscription's connection was made, or made again.
    ///
    /// Call it before any message of the new connection, also for a publisher that connects to
    /// us. Without a replay endpoint, or times, nobody can tell whether a publisher that comes
    /// back is the one that went, so its worker is cleared.
    pub fn connected(&mut self, out: &mut Vec<Action<M>>) {
        // What is held may be of another publisher than what comes, and the replay covers it.
        self.stats.held_dropped += self.held.len() as u64;
        self.drop_held();
        if self.newest.is_some_and(|newest| !self.can_replay || newest.sent_ns == 0) {
            self.lose(out);
            self.newest = None;
            self.newest_live = None;
        }
        if self.can_replay {
            self.ask(0, out);
        }
    }

    /// A message came on the subscription; `bytes` is what holding it costs.
    pub fn live(&mut self, stamp: Stamp, bytes: usize, message: M, out: &mut Vec<Action<M>>) {
        if stamp.seq == u64::MAX {
            self.stats.repeated += 1; // vLLM's end marker; no publisher gets this far
            return;
        }
        if self.went_back(stamp) {
            self.restart(out);
            self.replay = None;
        }
        if self.can_replay && self.straggles(stamp) {
            self.stats.stragglers += 1;
            if self.replay.is_none() {
                self.ask(0, out);
            }
            return;
        }
        let known = self.anchored && stamp.seq < self.next;
        let reordered = self.held.back().is_some_and(|held| held.stamp.seq >= stamp.seq);
        self.see(stamp);
        self.newest_live = self.newest_live.max(Some(stamp.seq));
        if known || reordered {
            self.stats.repeated += 1;
        } else if self.replay.is_some() {
            self.hold(stamp, bytes, message);
        } else if !self.anchored || stamp.seq == self.next {
            self.apply(stamp, message, out);
        } else {
            self.stats.gaps += 1;
            if self.can_replay {
                self.hold(stamp, bytes, message);
                self.ask(0, out);
            } else {
                self.lose(out);
                self.apply(stamp, message, out);
            }
        }
    }

    /// A message came as part of the replay.
    pub fn replayed(&mut self, stamp: Stamp, message: M, out: &mut Vec<Action<M>>) {
        let Some(replay) = self.replay.filter(|_| stamp.seq != u64::MAX) else {
            self.stats.repeated += 1;
            return;
        };
        if !replay.begun && !self.begin(replay, stamp, out) {
            self.stats.repeated += 1;
            return;
        }
        self.see(stamp);
        if self.anchored && stamp.seq < self.next {
            self.stats.repeated += 1;
        } else if !self.anchored || stamp.seq == self.next {
            if let Some(replay) = &mut self.replay {
                replay.progressed |= stamp.seq >= replay.next;
            }
            self.apply(stamp, message, out);
        }
        // What comes after a hole in the replay is asked for again at its end.
    }

    /// The replay's end marker came.
    pub fn replay_ended(&mut self, out: &mut Vec<Action<M>>) {
        let Some(replay) = self.replay.take() else { return };
        match replay.goal {
            Goal::Resume(_) if !replay.begun => {
                // The publisher does not know the last message that it sent: it is another one.
                self.restart(out);
                self.again(replay, out);
                return;
            }
            Goal::Replace if !replay.begun => self.lose(out),
            _ => {}
        }
        self.catch_up(replay, true, out);
    }

    /// The replay was refused, timed out or broke off.
    pub fn replay_failed(&mut self, out: &mut Vec<Action<M>>) {
        let Some(replay) = self.replay.take() else { return };
        self.stats.replays_failed += 1;
        match replay.goal {
            Goal::Replace if !replay.begun => {
                self.catch_up(replay, true, out); // what is known stays as good as it was
            }
            _ if replay.progressed => self.ask(0, out),
            _ => {
                self.lose(out);
                self.catch_up(replay, false, out);
            }
        }
    }

    /// Tries to get back what was lost, if the publisher still has it; for a caller's slow timer.
    /// Does nothing unless the standing is [`Standing::Partial`].
    pub fn resync(&mut self, out: &mut Vec<Action<M>>) {
        if self.can_replay && self.standing() == Standing::Partial {
            let goal = if self.anchored { Goal::Replace } else { Goal::Begin };
            self.ask_for(goal, 0, out);
        }
    }

    /// The message applied under `epoch` said that the worker's cache was cleared: from here on
    /// nothing older is missing.
    pub fn all_cleared(&mut self, epoch: u32) {
        if epoch == self.epoch && self.anchored {
            self.complete = true;
            self.first = 0;
        }
    }

    /// The message applied under `epoch` could not be read, or not wholly: what it said is lost.
    pub fn unreadable(&mut self, epoch: u32, out: &mut Vec<Action<M>>) {
        if epoch == self.epoch {
            self.lose(out);
        }
    }

    /// How far the index can be trusted.
    #[must_use]
    pub fn standing(&self) -> Standing {
        if self.replay.is_some() {
            Standing::CatchingUp
        } else if !self.complete || !self.anchored {
            Standing::Partial
        } else if self.next == 0 {
            Standing::Waiting
        } else {
            Standing::Current
        }
    }

    /// The sequence number to be applied next.
    #[must_use]
    pub fn next_seq(&self) -> u64 {
        self.next
    }

    /// Counters.
    #[must_use]
    pub fn stats(&self) -> CursorStats {
        self.stats
    }

    /// Whether a message says that its publisher has started anew.
    ///
    /// A number that was reached before is a repeat or comes from a new publisher: a new one's
    /// clock is later than the newest message of the old one. Without times, only a number that
    /// the replay brought first can be a repeat, since subscriptions neither repeat nor reorder.
    fn went_back(&self, stamp: Stamp) -> bool {
        let Some(newest) = self.newest.filter(|newest| stamp.seq <= newest.seq) else {
            return false;
        };
        if stamp.sent_ns != 0 && newest.sent_ns != 0 {
            stamp.sent_ns > newest.sent_ns
        } else {
            self.newest_live.is_some_and(|seq| stamp.seq <= seq)
        }
    }

    /// Whether a message has a higher number than the newest one but an earlier time.
    ///
    /// Either it is left over from a publisher that has been replaced, or the publisher's clock
    /// was set back. A replay brings it if it belongs.
    fn straggles(&self, stamp: Stamp) -> bool {
        self.newest.is_some_and(|newest| Self::contradicts(stamp, newest))
    }

    fn contradicts(later: Stamp, earlier: Stamp) -> bool {
        later.seq > earlier.seq && later.sent_ns != 0 && later.sent_ns < earlier.sent_ns
    }

    /// Judges a replay by its first message; says whether the message is to be looked at.
    fn begin(&mut self, replay: Replay, stamp: Stamp, out: &mut Vec<Action<M>>) -> bool {
        match replay.goal {
            Goal::Resume(last) if stamp.seq < last.seq => return false, // not what was asked for
            Goal::Resume(last) if stamp.seq == last.seq => {
                if stamp.sent_ns != last.sent_ns {
                    self.restart(out);
                    self.again(replay, out);
                    return false;
                }
            }
            Goal::Resume(_) => self.lose(out),
            Goal::Begin if self.last.is_some() => self.forget(ClearCause::Resync, out),
            Goal::Begin => self.anchored = false,
            Goal::Replace if stamp.seq >= self.first => {
                self.replay = None; // it brings nothing that is not here already
                self.catch_up(replay, true, out);
                return false;
            }
            Goal::Replace => self.forget(ClearCause::Resync, out),
        }
        self.replay = Some(Replay { begun: true, ..replay });
        true
    }

    /// After a replay: applies what was held, and asks again if messages are still missing.
    fn catch_up(&mut self, replay: Replay, may_ask: bool, out: &mut Vec<Action<M>>) {
        let mut may_ask = may_ask;
        while self.behind() {
            let fruitless = if replay.progressed { 0 } else { replay.fruitless + 1 };
            let front = self.held.front().map(|held| held.stamp);
            match front {
                Some(Stamp { seq, .. }) if self.anchored && seq < self.next => {
                    self.stats.repeated += 1;
                    self.unhold();
                }
                Some(stamp) if self.last.is_some_and(|last| Self::contradicts(stamp, last)) => {
                    self.stats.stragglers += 1;
                    self.unhold();
                }
                Some(Stamp { seq, .. }) if !self.anchored || seq == self.next => {
                    if let Some(held) = self.unhold() {
                        self.apply(held.stamp, held.message, out);
                    }
                }
                _ if may_ask && fruitless < self.limits.fruitless_replays => {
                    self.ask(fruitless, out);
                    return;
                }
                _ => {
                    self.stats.replays_failed += u64::from(may_ask);
                    may_ask = false;
                    self.lose(out);
                    if front.is_none() {
                        return;
                    }
                }
            }
        }
        self.stats.repeated += self.held.len() as u64;
        self.drop_held();
    }

    /// Whether messages were seen that are not applied.
    fn behind(&self) -> bool {
        match self.newest {
            Some(newest) if self.anchored => newest.seq >= self.next,
            _ => !self.held.is_empty(),
        }
    }

    fn apply(&mut self, stamp: Stamp, message: M, out: &mut Vec<Action<M>>) {
        if !self.anchored {
            self.anchored = true;
            self.first = stamp.seq;
            self.complete = stamp.seq == 0;
        }
        self.next = stamp.seq.saturating_add(1);
        self.last = Some(stamp);
        self.stats.applied += 1;
        out.push(Action::Apply { message, epoch: self.epoch });
    }

    fn see(&mut self, stamp: Stamp) {
        // A higher number with an earlier time is a replaced publisher's.
        if self.newest.is_none_or(|n| stamp.seq > n.seq || stamp.sent_ns > n.sent_ns) {
            self.newest = Some(stamp);
        }
    }

    fn hold(&mut self, stamp: Stamp, bytes: usize, message: M) {
        let room = self.limits.held_bytes.saturating_sub(self.held_bytes);
        // Without a time it could not be told from one of another publisher when its turn comes.
        let untimed = stamp.sent_ns == 0;
        if untimed || self.held.len() >= self.limits.held_messages || bytes > room {
            self.stats.held_dropped += 1;
            return;
        }
        self.held_bytes += bytes;
        self.held.push_back(Held { stamp, bytes, message });
    }

    fn unhold(&mut self) -> Option<Held<M>> {
        let held = self.held.pop_front()?;
        self.held_bytes -= held.bytes;
        Some(held)
    }

    fn drop_held(&mut self) {
        self.held.clear();
        self.held_bytes = 0;
    }

    /// Asks for what comes after the last applied message; for everything if there is none, or
    /// none that could be told from another publisher's.
    fn ask(&mut self, fruitless: u32, out: &mut Vec<Action<M>>) {
        let last = self.last.filter(|last| last.sent_ns != 0);
        self.ask_for(last.map_or(Goal::Begin, Goal::Resume), fruitless, out);
    }

    /// Asks once more after a replay that only showed that the publisher is another one.
    fn again(&mut self, replay: Replay, out: &mut Vec<Action<M>>) {
        self.ask(replay.fruitless.saturating_add(1), out);
    }

    fn ask_for(&mut self, goal: Goal, fruitless: u32, out: &mut Vec<Action<M>>) {
        let next = self.next;
        self.replay = Some(Replay { goal, begun: false, next, progressed: false, fruitless });
        self.stats.replays += 1;
        let from = match goal {
            Goal::Resume(last) => last.seq,
            Goal::Begin | Goal::Replace => 0,
        };
        out.push(Action::Replay { from });
    }

    /// The publisher is another one: nothing known of the old one counts.
    fn restart(&mut self, out: &mut Vec<Action<M>>) {
        self.forget(ClearCause::Restart, out);
        self.stats.restarts += 1;
        self.anchored = true;
        self.complete = true;
        self.next = 0;
        self.first = 0;
        self.newest = None;
        self.newest_live = None;
        self.stats.held_dropped += self.held.len() as u64;
        self.drop_held();
    }

    /// Messages are missing for good: the worker may hold less, and any message may come next.
    fn lose(&mut self, out: &mut Vec<Action<M>>) {
        self.forget(ClearCause::Lost, out);
        self.stats.losses += 1;
    }

    fn forget(&mut self, cause: ClearCause, out: &mut Vec<Action<M>>) {
        self.epoch = self.epoch.wrapping_add(1);
        self.anchored = false;
        self.complete = false;
        self.last = None;
        out.push(Action::Clear(cause));
    }
}

#[cfg(test)]
mod tests;
