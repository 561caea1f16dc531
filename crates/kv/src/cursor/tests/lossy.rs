//! Whatever happens between a publisher and the cursor, nothing wrong is ever applied, and once
//! replays are possible the end is the publisher's true state.

use super::super::*;
use crate::model::cases;
use proptest::prelude::*;

/// Incarnation of the publisher, sequence number.
type Message = (u64, u64);

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
    Restart {
        lost: u8,
    },
    Resync,
    /// What is known is written down.
    Save,
    /// The router starts anew from what was written down last: all that came since is lost to it.
    Restore,
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
        1 => Just(Step::Save),
        1 => Just(Step::Restore),
    ];
    prop::collection::vec(step, 0..120)
}

/// What travels on the subscription.
#[derive(Clone, Copy, Debug)]
enum Wire {
    Connected,
    Message(u64, Message),
}

const LIMITS: CursorLimits =
    CursorLimits { held_messages: 3, held_bytes: 100, fruitless_replays: 2 };

/// A publisher, its wires, and an index that is the list of messages applied since a clear.
struct World {
    cursor: Cursor<Message>,
    can_replay: bool,
    timed: bool,
    buffer: usize,
    clock: u64,
    incarnation: u64,
    published: Vec<u64>,
    wire: VecDeque<Wire>,
    asked: Option<u64>,
    serving: Option<VecDeque<(u64, Message)>>,
    index: Vec<Message>,
    saved: Option<(Option<Position>, Vec<Message>)>,
}

impl World {
    fn new(can_replay: bool, timed: bool, buffer: usize) -> Self {
        let mut world = Self {
            cursor: Cursor::new(can_replay, LIMITS),
            can_replay,
            timed,
            buffer,
            clock: 1,
            incarnation: 0,
            published: Vec::new(),
            wire: VecDeque::new(),
            asked: None,
            serving: None,
            index: Vec::new(),
            saved: None,
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
            Step::Save => {
                let position = self.cursor.position();
                assert_eq!(position.map(|p| p.last.seq), self.index.last().map(|last| last.1));
                assert_eq!(position.map(|p| p.first), self.index.first().map(|first| first.1));
                self.saved = Some((position, self.index.clone()));
            }
            Step::Restore => self.restore(),
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

    /// Another router, with connections of its own, takes over what was written down.
    fn restore(&mut self) {
        let Some((position, index)) = self.saved.clone() else { return };
        self.cursor = match position {
            Some(position) => Cursor::resume(position, self.can_replay, LIMITS),
            None => Cursor::new(self.can_replay, LIMITS),
        };
        assert_eq!(self.cursor.position(), position);
        self.index = index;
        self.asked = None;
        self.serving = None;
        self.wire.clear();
        self.wire.push_back(Wire::Connected);
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
