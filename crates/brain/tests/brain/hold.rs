//! Who waits in the router: requests that are late for their TTFT SLO whatever is done, and those
//! whose workers are busy.

use std::time::Duration;

use pointsman_brain::{
    Admission, Ask, Brain, Cause, Decision, End, Ladder, Leg, NoPath, Predicted, Queue, Reading,
    Rule, Settings, Share, Slo, Slot, Time, Wait, WorkerSpec,
};

use crate::fleets::*;

fn slo(ttft_ms: u64) -> Slo {
    Slo { ttft: Some(Duration::from_millis(ttft_ms)), itl: None }
}

fn settings() -> Settings {
    let settings = with_rule(Rule::Predicted);
    Settings { predicted: Predicted { cold: Rule::Predicted, ..Predicted::default() }, ..settings }
}

fn after(seconds: f64) -> Time {
    NOW.after(Duration::from_secs_f64(seconds))
}

/// Asks for 4000 tokens, some 0.2 s of prefill, by one who may wait.
fn ask(brain: &mut Brain, slo: Slo, waited: Duration, now: Time) -> Result<Decision, NoPath> {
    let tries = fresh();
    let ask = Ask { slo, waited, wait: Wait::IfNeeded, ..Ask::new(4_000, &[], &tries) };
    brain.decide(&ask, now)
}

/// One unified worker with two and a half seconds of prompts before it.
fn busy(settings: Settings) -> Brain {
    busy_with(settings, 40_000)
}

fn busy_with(settings: Settings, tokens: u32) -> Brain {
    let mut brain = brain(settings, &[unified()]);
    let tries = fresh();
    brain.decide(&Ask::new(tokens, &[], &tries), NOW).unwrap();
    brain
}

fn waits(answer: Result<Decision, NoPath>) -> Option<Duration> {
    match answer {
        Err(NoPath::Held { again_in, .. }) => Some(again_in),
        Err(other) => panic!("{other:?}"),
        Ok(_) => None,
    }
}

#[test]
fn what_is_late_whatever_is_done_waits_until_its_worker_is_about_to_run_dry() {
    let mut brain = busy(settings());
    let none = Duration::ZERO;
    let again_in = waits(ask(&mut brain, slo(500), none, NOW)).expect("late");
    assert_eq!(brain.live_bookings(), 1, "who waits holds nothing");
    // Just before, it is told to wait for the rest of that time; then it is served, late as it is.
    let rest = Duration::from_millis(10);
    let before = NOW.after(again_in - rest);
    let left = waits(ask(&mut brain, slo(500), again_in - rest, before)).expect("late");
    assert!(left.abs_diff(rest) < Duration::from_micros(10), "{left:?}");
    let due = NOW.after(again_in + Duration::from_micros(10));
    assert_eq!(waits(ask(&mut brain, slo(500), again_in, due)), None);
    assert_eq!(brain.live_bookings(), 2);
}

#[test]
fn what_can_be_served_in_time_goes_ahead_of_it() {
    // Some half a second: more than is next to nothing, less than a worker's fill.
    let mut brain = busy_with(settings(), 10_000);
    assert!(waits(ask(&mut brain, slo(300), Duration::ZERO, NOW)).is_some());
    assert_eq!(waits(ask(&mut brain, slo(5_000), Duration::ZERO, NOW)), None);
    // The time that it has waited counts.
    assert!(waits(ask(&mut brain, slo(5_000), Duration::from_millis(4_500), NOW)).is_some());
}

#[test]
fn what_is_in_time_waits_while_its_worker_has_its_fill() {
    let late = |answer| match answer {
        Err(NoPath::Held { late, .. }) => Some(late),
        _ => None,
    };
    let mut brain = busy(settings());
    assert_eq!(late(ask(&mut brain, slo(5_000), Duration::ZERO, NOW)), Some(false));
    assert_eq!(late(ask(&mut brain, slo(500), Duration::ZERO, NOW)), Some(true));
    // Two steps of 8192 tokens take some 0.8 s.
    assert_eq!(late(ask(&mut brain, slo(5_000), Duration::ZERO, after(2.0))), None);
    let off = Admission { hold_busy: false, ..Admission::default() };
    let mut brain = busy(Settings { admission: off, ..settings() });
    assert_eq!(late(ask(&mut brain, slo(5_000), Duration::ZERO, NOW)), None);
    assert_eq!(late(ask(&mut brain, slo(500), Duration::ZERO, NOW)), Some(true));
}

#[test]
fn nobody_waits_for_a_worker_that_is_idle_or_without_an_objective_or_when_it_is_off() {
    let none = Duration::ZERO;
    let mut idle = brain(settings(), &[unified()]);
    assert_eq!(waits(ask(&mut idle, slo(1), none, NOW)), None);
    assert_eq!(waits(ask(&mut busy(settings()), Slo::default(), none, NOW)), None);
    let predicted = Predicted { hold_late: false, ..settings().predicted };
    let off = Settings { predicted, ..settings() };
    assert_eq!(waits(ask(&mut busy(off), slo(500), none, NOW)), None);
    let threshold = Settings { shadow: vec![settings().policy], ..with_rule(Rule::AlwaysLocal) };
    assert_eq!(waits(ask(&mut busy(threshold), slo(500), none, NOW)), None);
}

#[test]
fn who_may_not_wait_and_who_has_been_tried_is_sent_at_once() {
    let tries = fresh();
    let mut brain = busy(settings());
    let impatient = Ask { slo: slo(500), ..Ask::new(4_000, &[], &tries) };
    assert!(brain.decide(&impatient, NOW).is_ok());

    let mut brain = crate::fleets::brain(settings(), &[unified(), unified()]);
    for _ in 0..2 {
        brain.decide(&Ask::new(40_000, &[], &tries), NOW).unwrap();
    }
    let mut failed = Ladder::new(brain.settings());
    failed.failed(Leg::Local, Slot(0), Cause::Connect);
    let again = Ask { slo: slo(500), wait: Wait::IfNeeded, ..Ask::new(4_000, &[], &failed) };
    assert!(brain.decide(&again, after(0.1)).is_ok());
}

#[test]
fn what_has_no_objective_does_not_pass_those_that_wait() {
    let mut brain = busy_with(settings(), 10_000);
    let tries = fresh();
    let ask = Ask { wait: Wait::InLine, ..Ask::new(4_000, &[], &tries) };
    assert!(waits(brain.decide(&ask, NOW)).is_some());
    let in_time = Ask { slo: slo(5_000), ..ask };
    assert!(brain.decide(&in_time, NOW).is_ok(), "what can be served in time does");
    let mut idle = crate::fleets::brain(settings(), &[unified()]);
    assert!(idle.decide(&ask, NOW).is_ok());
}

#[test]
fn the_record_says_who_would_wait() {
    let brain = busy_with(settings(), 10_000);
    let tries = fresh();
    let with = |ttft_ms| Ask { slo: slo(ttft_ms), ..Ask::new(4_000, &[], &tries) };
    assert!(brain.explain(&with(300), NOW).unwrap().waits);
    assert!(!brain.explain(&with(5_000), NOW).unwrap().waits);
}

/// One prefill and one decode worker, and what they may have before them.
fn pair(rule: Rule, admission: Admission) -> Brain {
    brain(Settings { admission, ..with_rule(rule) }, &[prefill(), decode()])
}

fn asks(brain: &mut Brain, isl: u32, wait: Wait) -> Result<Decision, NoPath> {
    let tries = fresh();
    brain.decide(&Ask { wait, ..Ask::new(isl, &[], &tries) }, NOW)
}

const QUEUE: Admission = Admission {
    hold_busy: true,
    prefill_queue: Queue::Tokens(10_000),
    max_waiting: 8,
    max_wait: Duration::from_secs(1),
};

#[test]
fn while_the_prefill_worker_has_its_fill_requests_wait_in_the_router() {
    let mut brain = pair(Rule::AlwaysRemote, QUEUE);
    // Its own size does not count, so that a long one is not passed for ever.
    let long = asks(&mut brain, 30_000, Wait::IfNeeded).unwrap();
    let waiting = asks(&mut brain, 100, Wait::IfNeeded);
    assert!(waits(waiting).is_some());
    brain.prefill_done(long.booking, NOW);
    assert!(asks(&mut brain, 9_999, Wait::InLine).is_ok());
    assert!(asks(&mut brain, 1, Wait::InLine).is_ok());
    assert!(waits(asks(&mut brain, 1, Wait::InLine)).is_some());
}

#[test]
fn who_comes_while_others_wait_stands_behind_them() {
    let mut brain = pair(Rule::AlwaysRemote, QUEUE);
    assert!(waits(asks(&mut brain, 100, Wait::Behind)).is_some(), "though the worker is free");
    assert!(asks(&mut brain, 100, Wait::InLine).is_ok());
}

#[test]
fn while_the_decode_worker_has_no_block_left_requests_wait_in_the_router() {
    let decode = WorkerSpec { capacity_blocks: Some(200), ..decode() };
    let settings = || Settings { output_allowance_tokens: 0, ..with_rule(Rule::AlwaysRemote) };
    let mut brain = crate::fleets::brain(settings(), &[prefill(), decode]);
    let first = asks(&mut brain, 190 * BLOCK, Wait::IfNeeded).unwrap();
    assert!(asks(&mut brain, 20 * BLOCK, Wait::IfNeeded).is_ok(), "there was room");
    assert!(waits(asks(&mut brain, BLOCK, Wait::IfNeeded)).is_some());
    brain.settle(first.booking, End::Finished, NOW);
    assert!(asks(&mut brain, BLOCK, Wait::InLine).is_ok());
    // What others have on it does not hold for ever what finds none of the router's own there.
    let mut brain = crate::fleets::brain(settings(), &[prefill(), decode]);
    let reading = Reading { kv_usage: Share::new(1.0), ..Reading::default() };
    brain.reading(Slot(1), reading, NOW);
    assert!(asks(&mut brain, BLOCK, Wait::IfNeeded).is_ok());
    assert!(waits(asks(&mut brain, BLOCK, Wait::IfNeeded)).is_some());
}

#[test]
fn nobody_waits_for_busy_workers_where_that_is_off_or_may_not_be() {
    let off = Admission { hold_busy: false, ..QUEUE };
    let unbounded = Admission { prefill_queue: Queue::Off, ..QUEUE };
    for (admission, wait) in
        [(off, Wait::Behind), (unbounded, Wait::IfNeeded), (QUEUE, Wait::Never)]
    {
        let mut brain = pair(Rule::AlwaysRemote, admission);
        asks(&mut brain, 30_000, wait).unwrap();
        assert!(asks(&mut brain, 30_000, wait).is_ok(), "{admission:?}");
    }
}

#[test]
fn what_is_in_time_passes_late_ones_alone() {
    let tries = fresh();
    let in_time = |wait| Ask { slo: slo(5_000), wait, ..Ask::new(4_000, &[], &tries) };
    for (wait, goes) in [(Wait::BehindLate, true), (Wait::Behind, false), (Wait::InLine, true)] {
        let mut idle = brain(settings(), &[unified()]);
        assert_eq!(idle.decide(&in_time(wait), NOW).is_ok(), goes, "{wait:?}");
    }
}
