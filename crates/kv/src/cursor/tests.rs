//! The cursor's single behaviours; `lossy.rs` has random publishers, losses and restarts.

use super::*;

mod lossy;

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
fn an_unreadable_message_is_a_loss_once() {
    let mut p = Probe::new(true);
    p.cursor.live(stamp(0, 1), 1, 0, &mut p.out);
    let Some(Action::Apply { epoch, .. }) = p.out.pop() else { panic!("not applied") };
    p.cursor.unreadable(epoch, &mut p.out);
    p.cursor.unreadable(epoch, &mut p.out);
    assert_eq!(p.actions(), ["clear Lost"]);
    assert_eq!(p.cursor.standing(), Standing::Partial);
    assert_eq!(p.live(1), ["apply 1"]);
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

/// A cursor that goes on where another one was, after messages 0 to 2.
fn resumed(can_replay: bool) -> Probe {
    let mut first = Probe::new(can_replay);
    for seq in 0..3 {
        first.live(seq);
    }
    let position = first.cursor.position().expect("messages were applied");
    assert_eq!(position, Position { last: stamp(2, 3), first: 0, complete: true });
    let cursor = Cursor::resume(position, can_replay, CursorLimits::default());
    Probe { cursor, out: Vec::new() }
}

#[test]
fn a_resumed_cursor_goes_on_with_the_next_message_once_the_publisher_is_known_to_be_the_same() {
    let mut p = resumed(true);
    assert_eq!(p.connected(), ["replay 2"]);
    assert_eq!(p.live(4), [""; 0]);
    assert_eq!(p.replayed(2), [""; 0]);
    assert_eq!(p.replayed(3), ["apply 3"]);
    assert_eq!(p.ended(), ["apply 4"]);
    assert_eq!(p.cursor.standing(), Standing::Current);
}

#[test]
fn a_resumed_cursor_clears_when_the_publisher_has_started_anew() {
    let mut p = resumed(true);
    p.connected();
    // The same number, sent at another time.
    assert_eq!(p.replayed_at(2, 50), ["clear Restart", "replay 0"]);
    let mut p = resumed(true);
    p.connected();
    assert_eq!(p.ended(), ["clear Restart", "replay 0"]);
}

#[test]
fn a_resumed_cursor_clears_when_nobody_can_tell_what_was_missed() {
    let mut p = resumed(false);
    assert_eq!(p.connected(), ["clear Lost"]);
    assert_eq!(p.live(3), ["apply 3"]);
    assert_eq!(p.cursor.standing(), Standing::Partial);
    let mut p = resumed(true);
    p.connected();
    assert_eq!(p.failed(), ["clear Lost"]);
}

#[test]
fn a_cursor_that_has_applied_nothing_since_a_clear_has_no_position() {
    let mut p = Probe::new(false);
    assert_eq!(p.cursor.position(), None);
    p.live(0);
    assert!(p.cursor.position().is_some());
    p.connected();
    assert_eq!(p.cursor.position(), None);
}
