//! Cursor tests: single behaviours, then random publishers, losses and restarts.

use super::*;
use crate::model::cases;
use proptest::prelude::*;

type Message = (u64, u64);

fn stamp(seq: u64, sent_ns: u64) -> Stamp {
    Stamp { seq, sent_ns }
}

/// A cursor with its last actions.
struct Probe {
    cursor: Cursor<u64>,
    out: Vec<Action<u64>>,
}

impl Probe {
    fn new(can_replay: bool) -> Self {
        Self { cursor: Cursor::new(can_replay, CursorLimits::default()), out: Vec::new() }
    }

    /// A live message sent at second `seq`, as the actions that it leads to.
    fn live(&mut self, seq: u64) -> Vec<String> {
        self.live_at(seq, seq + 1)
    }

    fn live_at(&mut self, seq: u64, sent: u64) -> Vec<String> {
        self.cursor.live(stamp(seq, sent), 1, seq, &mut self.out);
        self.actions()
    }

    fn replayed(&mut self, seq: u64) -> Vec<String> {
        self.cursor.replayed(stamp(seq, seq + 1), seq, &mut self.out);
        self.actions()
    }

    fn replayed_at(&mut self, seq: u64, sent: u64) -> Vec<String> {
        self.cursor.replayed(stamp(seq, sent), seq, &mut self.out);
        self.actions()
    }

    fn ended(&mut self) -> Vec<String> {
        self.cursor.replay_ended(&mut self.out);
        self.actions()
    }

    fn failed(&mut self) -> Vec<String> {
        self.cursor.replay_failed(&mut self.out);
        self.actions()
    }

    fn connected(&mut self) -> Vec<String> {
        self.cursor.connected(&mut self.out);
        self.actions()
    }

    fn actions(&mut self) -> Vec<String> {
        let word = |action: Action<u64>| match action {
            Action::Apply { message, .. } => format!("apply {message}"),
            Action::Clear(cause) => format!("clear {cause:?}"),
            Action::Replay { from } => format!("replay {from}"),
        };
        self.out.drain(..).map(word).collect()
    }
}

#[test]
fn the_next_message_is_applied_and_a_repeat_dropped() {
    let mut p = Probe::new(true);
    assert_eq!(p.cursor.standing(), Standing::Waiting);
    assert_eq!(p.live(0), ["apply 0"]);
    assert_eq!(p.live(1), ["apply 1"]);
    assert_eq!(p.live(1), [""; 0]);
    assert_eq!(p.live(0), [""; 0]);
    assert_eq!(p.live(2), ["apply 2"]);
    assert_eq!(p.cursor.standing(), Standing::Current);
    assert_eq!(p.cursor.stats().repeated, 2);
}

#[test]
fn a_gap_is_closed_by_a_replay_and_what_came_meanwhile_follows() {
    let mut p = Probe::new(true);
    p.live(0);
    assert_eq!(p.live(3), ["replay 0"]);
    assert_eq!(p.cursor.standing(), Standing::CatchingUp);
    assert_eq!(p.live(4), [""; 0]);
    assert_eq!(p.replayed(0), [""; 0]);
    assert_eq!(p.replayed(1), ["apply 1"]);
    assert_eq!(p.replayed(2), ["apply 2"]);
    assert_eq!(p.replayed(3), ["apply 3"]);
    assert_eq!(p.ended(), ["apply 4"]);
    assert_eq!(p.cursor.standing(), Standing::Current);
    assert_eq!(p.live(5), ["apply 5"]);
}

#[test]
fn a_refused_replay_clears_the_worker_and_leaves_it_partial() {
    let mut p = Probe::new(true);
    p.live(0);
    p.live(3);
    assert_eq!(p.failed(), ["clear Lost", "apply 3"]);
    assert_eq!(p.cursor.standing(), Standing::Partial);
    assert_eq!(p.live(4), ["apply 4"]);
}

#[test]
fn without_a_replay_endpoint_a_gap_clears_at_once() {
    let mut p = Probe::new(false);
    p.live(0);
    assert_eq!(p.live(3), ["clear Lost", "apply 3"]);
    assert_eq!(p.cursor.standing(), Standing::Partial);
}

#[test]
fn a_replay_whose_buffer_begins_later_clears_and_goes_on_from_there() {
    let mut p = Probe::new(true);
    p.live(0);
    assert_eq!(p.live(90), ["replay 0"]);
    assert_eq!(p.replayed(88), ["clear Lost", "apply 88"]);
    assert_eq!(p.replayed(89), ["apply 89"]);
    assert_eq!(p.ended(), ["apply 90"]);
    assert_eq!(p.cursor.standing(), Standing::Partial);
}

#[test]
fn joining_mid_stream_asks_for_everything_that_is_buffered() {
    let mut p = Probe::new(true);
    assert_eq!(p.live(2), ["replay 0"]);
    assert_eq!(p.replayed(0), ["apply 0"]);
    assert_eq!(p.replayed(1), ["apply 1"]);
    assert_eq!(p.replayed(2), ["apply 2"]);
    assert_eq!(p.ended(), [""; 0]);
    assert_eq!(p.cursor.standing(), Standing::Current);
}

#[test]
fn joining_a_stream_whose_start_is_gone_is_partial_until_the_worker_clears_its_cache() {
    let mut p = Probe::new(true);
    assert_eq!(p.connected(), ["replay 0"]);
    assert_eq!(p.replayed(7), ["apply 7"]);
    p.ended();
    assert_eq!(p.cursor.standing(), Standing::Partial);
    p.cursor.live(stamp(8, 9), 1, 8, &mut p.out);
    let Some(Action::Apply { epoch, .. }) = p.out.pop() else { panic!("not applied") };
    p.cursor.all_cleared(epoch);
    assert_eq!(p.cursor.standing(), Standing::Current);
}

#[test]
fn a_clear_that_was_announced_before_a_loss_does_not_heal_it() {
    let mut p = Probe::new(false);
    p.cursor.live(stamp(0, 1), 1, 0, &mut p.out);
    let Some(Action::Apply { epoch, .. }) = p.out.pop() else { panic!("not applied") };
    p.live(5);
    p.cursor.all_cleared(epoch);
    assert_eq!(p.cursor.standing(), Standing::Partial);
}

#[test]
fn an_idle_publisher_is_asked_when_the_connection_is_made() {
    let mut p = Probe::new(true);
    assert_eq!(p.connected(), ["replay 0"]);
    assert_eq!(p.replayed(0), ["apply 0"]);
    assert_eq!(p.ended(), [""; 0]);
    assert_eq!(p.cursor.standing(), Standing::Current);
    assert_eq!(p.live(1), ["apply 1"]);
}

#[test]
fn a_sequence_that_goes_back_at_a_later_time_is_a_restart() {
    let mut p = Probe::new(true);
    p.live(0);
    p.live(1);
    assert_eq!(p.live_at(0, 100), ["clear Restart", "apply 0"]);
    assert_eq!(p.cursor.standing(), Standing::Current);
    assert_eq!(p.live_at(1, 101), ["apply 1"]);
    assert_eq!(p.live_at(1, 102), ["clear Restart", "replay 0"]);
    assert_eq!(p.replayed_at(0, 99), ["apply 0"]);
}

#[test]
fn without_times_a_sequence_that_goes_back_is_a_restart() {
    let mut p = Probe::new(true);
    p.live_at(0, 0);
    p.live_at(1, 0);
    assert_eq!(p.live_at(0, 0), ["clear Restart", "apply 0"]);
}

#[test]
fn without_times_a_message_that_the_replay_brought_first_is_a_repeat() {
    let mut p = Probe::new(true);
    p.live_at(0, 0);
    p.live_at(2, 0);
    for seq in 0..5 {
        p.replayed_at(seq, 0);
    }
    assert_eq!(p.ended(), [""; 0]);
    assert_eq!(p.live_at(3, 0), [""; 0]);
    assert_eq!(p.live_at(4, 0), [""; 0]);
    assert_eq!(p.live_at(5, 0), ["apply 5"]);
}

#[test]
fn a_restart_hidden_by_a_reconnection_is_found_though_the_sequence_fits() {
    let mut p = Probe::new(true);
    p.live(0);
    p.live(1);
    assert_eq!(p.connected(), ["replay 1"]);
    assert_eq!(p.live_at(2, 52), [""; 0]);
    assert_eq!(p.replayed_at(1, 51), ["clear Restart", "replay 0"]);
    assert_eq!(p.replayed_at(0, 50), ["apply 0"]);
    assert_eq!(p.replayed_at(1, 51), ["apply 1"]);
    assert_eq!(p.replayed_at(2, 52), ["apply 2"]);
    assert_eq!(p.ended(), [""; 0]);
    assert_eq!(p.cursor.standing(), Standing::Current);
}

#[test]
fn a_publisher_that_does_not_know_its_last_message_has_restarted() {
    let mut p = Probe::new(true);
    for seq in 0..5 {
        p.live(seq);
    }
    assert_eq!(p.connected(), ["replay 4"]);
    assert_eq!(p.ended(), ["clear Restart", "replay 0"]);
    assert_eq!(p.ended(), [""; 0]);
    assert_eq!(p.cursor.standing(), Standing::Waiting);
    assert_eq!(p.live_at(0, 100), ["apply 0"]);
}

#[test]
fn a_reconnection_without_replay_clears_because_a_restart_would_not_show() {
    let mut p = Probe::new(false);
    assert_eq!(p.connected(), [""; 0]);
    p.live(0);
    assert_eq!(p.connected(), ["clear Lost"]);
    assert_eq!(p.live(1), ["apply 1"]);
    assert_eq!(p.cursor.standing(), Standing::Partial);
}

#[test]
fn a_message_of_a_replaced_publisher_is_not_applied_though_its_number_fits() {
    let mut p = Probe::new(true);
    assert_eq!(p.live_at(2, 3), ["replay 0"]);
    assert_eq!(p.replayed_at(0, 50), ["apply 0"]);
    assert_eq!(p.replayed_at(1, 51), ["apply 1"]);
    assert_eq!(p.ended(), [""; 0]);
    assert_eq!(p.live_at(2, 4), ["replay 1"]);
    assert_eq!(p.replayed_at(1, 51), [""; 0]);
    assert_eq!(p.ended(), [""; 0]);
    assert_eq!(p.live_at(2, 52), ["apply 2"]);
}

#[test]
fn a_clock_that_is_set_back_costs_a_replay_and_nothing_else() {
    let mut p = Probe::new(true);
    p.live_at(0, 100);
    assert_eq!(p.live_at(1, 50), ["replay 0"]);
    assert_eq!(p.replayed_at(0, 100), [""; 0]);
    assert_eq!(p.replayed_at(1, 50), ["apply 1"]);
    assert_eq!(p.ended(), [""; 0]);
    assert_eq!(p.live_at(2, 51), ["apply 2"]);
    assert_eq!(p.cursor.standing(), Standing::Current);
}

#[test]
fn replays_that_bring_nothing_end_in_a_loss() {
    let mut p = Probe::new(true);
    p.live(0);
    p.live(5);
    for _ in 0..2 {
        p.replayed(0);
        assert_eq!(p.ended(), ["replay 0"]);
    }
    p.replayed(0);
    assert_eq!(p.ended(), ["clear Lost", "apply 5"]);
    assert_eq!(p.cursor.standing(), Standing::Partial);
}

#[test]
fn a_replay_that_breaks_off_is_taken_up_where_it_got_to() {
    let mut p = Probe::new(true);
    p.live(0);
    p.live(5);
    p.replayed(0);
    assert_eq!(p.replayed(1), ["apply 1"]);
    assert_eq!(p.failed(), ["replay 1"]);
    p.replayed(1);
    for seq in 2..=5 {
        p.replayed(seq);
    }
    p.ended();
    assert_eq!(p.cursor.standing(), Standing::Current);
}

#[test]
fn messages_that_find_the_hold_full_are_asked_for_again() {
    let limits = CursorLimits { held_messages: 2, held_bytes: 100, fruitless_replays: 3 };
    let mut p = Probe::new(true);
    p.cursor = Cursor::new(true, limits);
    p.live(0);
    for seq in 2..7 {
        p.live(seq);
    }
    assert_eq!(p.cursor.stats().held_dropped, 3);
    p.replayed(0);
    p.replayed(1);
    assert_eq!(p.ended(), ["apply 2", "apply 3", "replay 3"]);
    for seq in 3..7 {
        p.replayed(seq);
    }
    p.ended();
    assert_eq!(p.cursor.next_seq(), 7);
    assert_eq!(p.cursor.standing(), Standing::Current);
}

#[test]
fn the_hold_is_bounded_in_bytes() {
    let limits = CursorLimits { held_messages: 100, held_bytes: 10, fruitless_replays: 3 };
    let mut cursor = Cursor::new(true, limits);
    let mut out = Vec::new();
    cursor.live(stamp(1, 1), 11, 1, &mut out);
    cursor.live(stamp(2, 2), 9, 2, &mut out);
    cursor.live(stamp(3, 3), usize::MAX, 3, &mut out);
    assert_eq!(cursor.stats().held_dropped, 2);
}

#[test]
fn a_resync_brings_back_what_was_lost_if_the_publisher_still_has_it() {
    let mut p = Probe::new(true);
    p.live(0);
    p.live(3);
    p.failed();
    p.cursor.resync(&mut p.out);
    assert_eq!(p.actions(), ["replay 0"]);
    assert_eq!(p.replayed(0), ["clear Resync", "apply 0"]);
    for seq in 1..4 {
        p.replayed(seq);
    }
    assert_eq!(p.live(4), [""; 0]);
    assert_eq!(p.ended(), ["apply 4"]);
    assert_eq!(p.cursor.standing(), Standing::Current);
    p.cursor.resync(&mut p.out);
    assert_eq!(p.actions(), [""; 0]);
}

#[test]
fn a_resync_that_would_bring_less_changes_nothing() {
    let mut p = Probe::new(true);
    p.live(0);
    p.live(3);
    p.failed();
    p.cursor.resync(&mut p.out);
    p.actions();
    p.live(4);
    assert_eq!(p.replayed(3), ["apply 4"]);
    assert_eq!(p.cursor.standing(), Standing::Partial);
    assert_eq!(p.replayed(4), [""; 0]);
    p.cursor.resync(&mut p.out);
    p.actions();
    assert_eq!(p.failed(), [""; 0]);
    assert_eq!(p.live(5), ["apply 5"]);
}

#[test]
fn absurd_sequence_numbers_do_no_lasting_harm() {
    let mut p = Probe::new(true);
    p.live(0);
    assert_eq!(p.live_at(u64::MAX, 2), [""; 0]);
    assert_eq!(p.live_at(u64::MAX - 1, 2), ["replay 0"]);
    assert_eq!(p.failed(), ["clear Lost", "apply 18446744073709551614"]);
    assert_eq!(p.live_at(1, 3), ["clear Restart", "replay 0"]);
    assert_eq!(p.replayed_at(0, 1), ["apply 0"]);
    assert_eq!(p.replayed_at(1, 3), ["apply 1"]);
    p.ended();
    assert_eq!(p.cursor.standing(), Standing::Current);
}

/// What can happen between a publisher and its subscriber.
#[derive(Clone, Debug)]
enum Step {
    Publish,
    Deliver,
    Lose,
    Duplicate,
    Swap,
    Replay(u8),
    Refuse,
    Reconnect,
    Restart { lost: u8 },
    Resync,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        8 => Just(Step::Publish),
        8 => Just(Step::Deliver),
        2 => Just(Step::Lose),
        1 => Just(Step::Duplicate),
        1 => Just(Step::Swap),
        6 => (1..6_u8).prop_map(Step::Replay),
        1 => Just(Step::Refuse),
        1 => Just(Step::Reconnect),
        1 => (0..6_u8).prop_map(|lost| Step::Restart { lost }),
        1 => Just(Step::Resync),
    ];
    prop::collection::vec(step, 0..120)
}

/// What travels on the subscription.
#[derive(Clone, Copy, Debug)]
enum Wire {
    Connected,
    Message(u64, Message),
}

/// A publisher, its wires, and an index that is the list of messages applied since a clear.
struct World {
    cursor: Cursor<Message>,
    timed: bool,
    buffer: usize,
    clock: u64,
    incarnation: u64,
    published: Vec<u64>,
    wire: VecDeque<Wire>,
    asked: Option<u64>,
    serving: Option<VecDeque<(u64, Message)>>,
    index: Vec<Message>,
}

impl World {
    fn new(can_replay: bool, timed: bool, buffer: usize) -> Self {
        let limits = CursorLimits { held_messages: 3, held_bytes: 100, fruitless_replays: 2 };
        let mut world = Self {
            cursor: Cursor::new(can_replay, limits),
            timed,
            buffer,
            clock: 1,
            incarnation: 0,
            published: Vec::new(),
            wire: VecDeque::new(),
            asked: None,
            serving: None,
            index: Vec::new(),
        };
        world.wire.push_back(Wire::Connected);
        world
    }

    fn stamp(&self, sent: u64, message: Message) -> Stamp {
        Stamp { seq: message.1, sent_ns: if self.timed { sent } else { 0 } }
    }

    fn run(&mut self, step: &Step) {
        match step {
            Step::Publish => self.publish(true),
            Step::Deliver => self.deliver(),
            Step::Lose => {
                if matches!(self.wire.front(), Some(Wire::Message(..))) {
                    self.wire.pop_front();
                }
            }
            Step::Duplicate if self.timed => {
                if let Some(first @ Wire::Message(..)) = self.wire.front().copied() {
                    self.wire.push_front(first);
                }
            }
            Step::Swap if self.timed => {
                let front: Vec<_> = self.wire.iter().take(2).collect();
                if matches!(front[..], [Wire::Message(..), Wire::Message(..)]) {
                    self.wire.swap(0, 1);
                }
            }
            Step::Duplicate | Step::Swap => {}
            Step::Replay(count) => self.replay(usize::from(*count)),
            Step::Refuse => self.refuse(),
            Step::Reconnect => self.reconnect(),
            Step::Restart { lost } => self.restart(*lost),
            Step::Resync => self.act(Cursor::resync),
        }
    }

    fn publish(&mut self, heard: bool) {
        self.clock += 1;
        let message = (self.incarnation, self.published.len() as u64);
        self.published.push(self.clock);
        if heard {
            self.wire.push_back(Wire::Message(self.clock, message));
        }
    }

    fn deliver(&mut self) {
        match self.wire.pop_front() {
            Some(Wire::Connected) => self.act(Cursor::connected),
            Some(Wire::Message(sent, message)) => {
                let stamp = self.stamp(sent, message);
                self.act(|cursor, out| cursor.live(stamp, 10, message, out));
            }
            None => {}
        }
    }

    /// The publisher serves the replay that was asked for, `count` messages of it.
    fn replay(&mut self, count: usize) {
        if let Some(from) = self.asked.take() {
            let oldest = self.published.len().saturating_sub(self.buffer) as u64;
            let range = from.max(oldest)..self.published.len() as u64;
            let sent = |seq: u64| self.published[usize::try_from(seq).unwrap_or(0)];
            let served = range.map(|seq| (sent(seq), (self.incarnation, seq)));
            self.serving = Some(served.collect());
        }
        for _ in 0..count {
            let Some(serving) = &mut self.serving else { return };
            if let Some((sent, message)) = serving.pop_front() {
                let stamp = self.stamp(sent, message);
                self.act(|cursor, out| cursor.replayed(stamp, message, out));
            } else {
                self.serving = None;
                self.act(Cursor::replay_ended);
            }
        }
    }

    fn refuse(&mut self) {
        if self.asked.take().is_some() || self.serving.take().is_some() {
            self.act(Cursor::replay_failed);
        }
    }

    /// The connection breaks; what is under way may still come, what follows waits for the next.
    fn reconnect(&mut self) {
        if !self.timed {
            self.wire.clear();
        }
        self.wire.push_back(Wire::Connected);
    }

    fn restart(&mut self, lost: u8) {
        if self.serving.is_some() {
            self.refuse();
        }
        self.incarnation += 1;
        self.published.clear();
        for _ in 0..lost {
            self.publish(false);
        }
        self.reconnect();
    }

    fn act(&mut self, input: impl FnOnce(&mut Cursor<Message>, &mut Vec<Action<Message>>)) {
        let mut out = Vec::new();
        input(&mut self.cursor, &mut out);
        for action in out {
            match action {
                Action::Apply { message, .. } => {
                    if let Some(last) = self.index.last() {
                        assert_eq!((last.0, last.1 + 1), message, "not the next one");
                    }
                    self.index.push(message);
                }
                Action::Clear(_) => self.index.clear(),
                Action::Replay { from } => {
                    self.asked = Some(from);
                    self.serving = None;
                }
            }
        }
    }

    /// Lets everything under way arrive, replays included.
    fn settle(&mut self) {
        for _ in 0..200 {
            while !self.wire.is_empty() {
                self.deliver();
            }
            if self.asked.is_none() && self.serving.is_none() {
                return;
            }
            self.replay(100);
        }
        panic!("it goes on asking");
    }
}

proptest! {
    #![proptest_config(cases(300))]

    /// What is applied since the last clear is always one unbroken piece of one incarnation
    /// (asserted on the way), and in the end it is the whole of what the publisher can still say.
    #[test]
    fn whatever_is_lost_the_index_ends_equal_to_the_publisher(
        steps in steps(), timed: bool, large_buffer: bool,
    ) {
        let buffer = if large_buffer { 1000 } else { 4 };
        let mut world = World::new(true, timed, buffer);
        for step in &steps {
            world.run(step);
        }
        world.settle();
        world.publish(true);
        world.settle();
        world.act(Cursor::resync);
        world.settle();
        let all: Vec<Message> =
            (0..world.published.len() as u64).map(|seq| (world.incarnation, seq)).collect();
        if large_buffer {
            prop_assert_eq!(&world.index, &all);
            prop_assert_eq!(world.cursor.standing(), Standing::Current);
        } else {
            let kept = world.index.len().max(buffer.min(all.len()));
            prop_assert_eq!(&world.index[..], &all[all.len() - kept..]);
            let whole = world.index.len() == all.len();
            let current = world.cursor.standing() == Standing::Current;
            prop_assert_eq!(whole, current);
        }
    }

    #[test]
    fn without_replay_the_index_never_holds_too_much_and_goes_on(
        steps in steps(), timed: bool,
    ) {
        let mut world = World::new(false, timed, 0);
        for step in &steps {
            world.run(step);
        }
        world.settle();
        world.publish(true);
        world.settle();
        let newest = (world.incarnation, world.published.len() as u64 - 1);
        prop_assert_eq!(world.index.last(), Some(&newest));
    }
}
