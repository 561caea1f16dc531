//! The breaker: what counts as a failure, when it opens, and how one probe closes it.

use std::time::Duration;

use pointsman_brain::{
    Ask, Brain, BreakerSettings, Cause, Condition, Decision, End, HealthChange, HealthEvent,
    NoPath, Path, Policy, Rule, Settings, Slot, Time, Wait,
};

use crate::fleets::*;

const D: Slot = Slot(0);

fn settings() -> Settings {
    let breaker = BreakerSettings {
        failures: 3,
        open: Duration::from_secs(1),
        open_max: Duration::from_secs(5),
        failed_checks: 2,
    };
    Settings { breaker, ..with_rule(Rule::AlwaysLocal) }
}

fn one() -> Brain {
    brain(settings(), &[unified()])
}

fn fail(brain: &mut Brain, cause: Cause, now: Time) -> Option<HealthChange> {
    brain.observe(D, HealthEvent::Failed(cause), now)
}

fn trip(brain: &mut Brain, now: Time) {
    for _ in 0..3 {
        fail(brain, Cause::Connect, now);
    }
}

fn condition(brain: &Brain) -> Condition {
    brain.workers().next().unwrap().condition
}

fn ask_at(brain: &mut Brain, now: Time) -> Result<Decision, NoPath> {
    brain.decide(&Ask::new(10, &[], &fresh()), now)
}

fn admits(brain: &Brain, now: Time) -> bool {
    brain.can_serve(now).unified_up > 0
}

fn millis(millis: u64) -> Time {
    Time::ZERO.after(Duration::from_millis(millis))
}

#[test]
fn consecutive_failures_open_the_breaker() {
    let mut brain = one();
    assert_eq!(fail(&mut brain, Cause::Connect, NOW), None);
    assert_eq!(fail(&mut brain, Cause::Timeout, NOW), None);
    assert!(admits(&brain, NOW));
    let change = HealthChange { from: Condition::Up, to: Condition::Tripped };
    assert_eq!(fail(&mut brain, Cause::Status(500), NOW), Some(change));
    assert_eq!(ask_at(&mut brain, NOW).unwrap_err(), NoPath::NoDecode);
}

#[test]
fn an_answer_in_between_starts_the_count_again() {
    let mut brain = one();
    for _ in 0..10 {
        fail(&mut brain, Cause::Cut, NOW);
        fail(&mut brain, Cause::Protocol, NOW);
        brain.observe(D, HealthEvent::Answered, NOW);
    }
    assert_eq!(condition(&brain), Condition::Up);
}

#[test]
fn client_errors_load_and_expired_kv_never_count() {
    let mut brain = one();
    for cause in [
        Cause::Status(400),
        Cause::Status(404),
        Cause::Status(499),
        Cause::Overload(429),
        Cause::Overload(503),
        Cause::Expired,
    ] {
        for _ in 0..10 {
            assert_eq!(fail(&mut brain, cause, NOW), None, "{cause}");
        }
    }
    assert_eq!(condition(&brain), Condition::Up);
}

#[test]
fn what_does_not_count_does_not_clear_the_count_either() {
    let mut brain = one();
    for cause in [Cause::Connect, Cause::Connect, Cause::Status(400), Cause::Overload(429)] {
        fail(&mut brain, cause, NOW);
    }
    fail(&mut brain, Cause::Connect, NOW);
    assert_eq!(condition(&brain), Condition::Tripped);
}

#[test]
fn statuses_of_overload_are_told_from_failures() {
    assert_eq!(Cause::of_status(429), Cause::Overload(429));
    assert_eq!(Cause::of_status(503), Cause::Overload(503));
    assert_eq!(Cause::of_status(500), Cause::Status(500));
    assert!(Cause::of_status(404).is_client_error());
    assert!(!Cause::of_status(429).is_client_error());
    assert!(!Cause::of_status(502).is_client_error());
}

#[test]
fn an_open_breaker_lets_one_probe_through_when_its_time_has_come() {
    let mut brain = one();
    trip(&mut brain, NOW);
    assert!(ask_at(&mut brain, millis(999)).is_err());
    let probe = ask_at(&mut brain, millis(1000)).unwrap();
    assert!(ask_at(&mut brain, millis(1000)).is_err(), "one probe at a time");
    let change = HealthChange { from: Condition::Tripped, to: Condition::Up };
    assert_eq!(brain.observe(D, HealthEvent::Answered, millis(1001)), Some(change));
    assert!(ask_at(&mut brain, millis(1001)).is_ok());
    brain.settle(probe.booking, End::Finished, millis(1002));
    assert_eq!(condition(&brain), Condition::Up);
}

#[test]
fn each_failed_probe_doubles_the_wait_up_to_a_limit() {
    let mut brain = one();
    trip(&mut brain, NOW);
    let mut now = NOW;
    for wait in [1, 2, 4, 5, 5, 5] {
        let wait = Duration::from_secs(wait);
        assert!(!admits(&brain, now.after(wait - Duration::from_nanos(1))));
        now = now.after(wait);
        let probe = ask_at(&mut brain, now).unwrap();
        fail(&mut brain, Cause::Timeout, now);
        brain.settle(probe.booking, End::Failed, now);
        assert!(!admits(&brain, now));
    }
}

#[test]
fn the_wait_doubles_also_when_the_probe_is_settled_before_it_is_observed() {
    let mut brain = one();
    trip(&mut brain, NOW);
    let probe = ask_at(&mut brain, millis(1000)).unwrap();
    brain.settle(probe.booking, End::Failed, millis(1000));
    fail(&mut brain, Cause::Timeout, millis(1000));
    assert!(!admits(&brain, millis(2999)));
    assert!(admits(&brain, millis(3000)));
}

#[test]
fn where_nobody_else_can_serve_a_worker_is_asked_after_the_first_wait_again() {
    let in_vain = |brain: &mut Brain| {
        trip(brain, NOW);
        let probe = ask_at(brain, millis(1000)).unwrap();
        fail(brain, Cause::Status(500), millis(1000));
        brain.settle(probe.booking, End::Failed, millis(1000));
    };
    let mut alone = one();
    in_vain(&mut alone);
    assert!(ask_at(&mut alone, millis(1999)).is_err() && !alone.can_serve(millis(1999)).ready);
    assert!(!admits(&alone, millis(2000)) && alone.can_serve(millis(2000)).ready);
    assert_eq!(ask_at(&mut alone, millis(2000)).unwrap().decode, D);
    // With another one it is not needed, and left alone for as long as it is to be.
    let mut beside = one();
    in_vain(&mut beside);
    beside.add(Slot(1), unified(), NOW);
    for now in [2000, 2999] {
        assert_eq!(ask_at(&mut beside, millis(now)).unwrap().decode, Slot(1));
    }
}

#[test]
fn those_that_come_while_a_probe_is_out_wait_for_what_it_tells() {
    let tries = fresh();
    let ask = |wait| Ask { wait, ..Ask::new(10, &[], &tries) };
    let mut brain = one();
    trip(&mut brain, NOW);
    assert_eq!(brain.decide(&ask(Wait::IfNeeded), millis(500)), Err(NoPath::NoDecode));
    let probe = brain.decide(&ask(Wait::IfNeeded), millis(1000)).unwrap();
    let waits = |brain: &mut Brain, now| {
        matches!(brain.decide(&ask(Wait::IfNeeded), now), Err(NoPath::Held { late: false, .. }))
    };
    assert!(waits(&mut brain, millis(1000)) && waits(&mut brain, millis(5999)));
    // Who may not wait is told at once, and so are all when the probe says nothing.
    assert_eq!(brain.decide(&ask(Wait::Never), millis(1000)), Err(NoPath::NoDecode));
    assert_eq!(brain.decide(&ask(Wait::IfNeeded), millis(6000)), Err(NoPath::NoDecode));
    // In vain, the next one has to wait too.
    fail(&mut brain, Cause::Timeout, millis(6000));
    brain.settle(probe.booking, End::Failed, millis(6000));
    assert_eq!(brain.decide(&ask(Wait::IfNeeded), millis(6001)), Err(NoPath::NoDecode));
}

#[test]
fn a_probe_whose_answer_begins_lets_others_in_and_the_next_failure_keeps_them_out() {
    let mut brain = one();
    trip(&mut brain, NOW);
    ask_at(&mut brain, millis(1000)).unwrap();
    let change = HealthChange { from: Condition::Tripped, to: Condition::Up };
    assert_eq!(brain.observe(D, HealthEvent::Began, millis(1001)), Some(change));
    assert!(ask_at(&mut brain, millis(1001)).is_ok());
    assert_eq!(brain.observe(D, HealthEvent::Began, millis(1002)), None);
    let change = HealthChange { from: Condition::Up, to: Condition::Tripped };
    assert_eq!(fail(&mut brain, Cause::Cut, millis(1003)), Some(change));
    // Of one that is in use it says nothing: what it begins it has to finish.
    let mut brain = one();
    for now in 0..3 {
        brain.observe(D, HealthEvent::Began, millis(now));
        fail(&mut brain, Cause::Cut, millis(now));
    }
    assert_eq!(condition(&brain), Condition::Tripped);
}

#[test]
fn a_closed_breaker_starts_over() {
    let mut brain = one();
    trip(&mut brain, NOW);
    ask_at(&mut brain, millis(1000)).unwrap();
    fail(&mut brain, Cause::Connect, millis(1000));
    ask_at(&mut brain, millis(3000)).unwrap();
    brain.observe(D, HealthEvent::Answered, millis(3000));
    trip(&mut brain, millis(4000));
    assert!(!admits(&brain, millis(4999)));
    assert!(admits(&brain, millis(5000)), "the first wait again");
}

#[test]
fn a_probe_that_nothing_is_heard_of_leaves_its_place_to_the_next() {
    let mut brain = one();
    trip(&mut brain, NOW);
    let probe = ask_at(&mut brain, millis(1000)).unwrap();
    brain.settle(probe.booking, End::Cancelled, millis(1500));
    assert!(ask_at(&mut brain, millis(1500)).is_ok());
}

#[test]
fn a_probe_answered_with_a_client_error_or_overload_shows_that_the_worker_lives() {
    for cause in [Cause::Status(400), Cause::Overload(503)] {
        let mut brain = one();
        trip(&mut brain, NOW);
        ask_at(&mut brain, millis(1000)).unwrap();
        fail(&mut brain, cause, millis(1000));
        assert_eq!(condition(&brain), Condition::Up, "{cause}");
    }
}

#[test]
fn legs_sent_before_it_opened_neither_close_it_nor_prolong_it() {
    let mut brain = one();
    trip(&mut brain, NOW);
    brain.observe(D, HealthEvent::Answered, millis(500));
    assert!(!admits(&brain, millis(999)));
    fail(&mut brain, Cause::Cut, millis(999));
    assert!(admits(&brain, millis(1000)));
}

#[test]
fn failed_health_checks_take_a_worker_down_and_one_that_passes_brings_it_back() {
    let mut brain = one();
    assert_eq!(brain.observe(D, HealthEvent::CheckFailed, NOW), None);
    brain.observe(D, HealthEvent::CheckPassed, NOW);
    assert_eq!(brain.observe(D, HealthEvent::CheckFailed, NOW), None);
    let change = HealthChange { from: Condition::Up, to: Condition::Down };
    assert_eq!(brain.observe(D, HealthEvent::CheckFailed, NOW), Some(change));
    assert!(!admits(&brain, Time::from_secs(1_000_000)), "time alone does not help");
    let change = HealthChange { from: Condition::Down, to: Condition::Up };
    assert_eq!(brain.observe(D, HealthEvent::CheckPassed, NOW), Some(change));
    assert!(admits(&brain, NOW));
}

#[test]
fn a_passed_check_does_not_close_the_breaker_nor_clear_failures() {
    let mut brain = one();
    for _ in 0..3 {
        fail(&mut brain, Cause::Status(500), NOW);
        brain.observe(D, HealthEvent::CheckPassed, NOW);
    }
    assert_eq!(condition(&brain), Condition::Tripped);
    assert!(!admits(&brain, NOW));
}

#[test]
fn a_tripped_worker_that_went_down_and_came_back_is_probed_first() {
    let mut brain = one();
    trip(&mut brain, NOW);
    brain.observe(D, HealthEvent::CheckFailed, NOW);
    assert_eq!(condition(&brain), Condition::Down);
    assert!(!admits(&brain, Time::from_secs(60)));
    brain.observe(D, HealthEvent::CheckPassed, millis(10));
    assert!(ask_at(&mut brain, millis(10)).is_ok());
    assert!(ask_at(&mut brain, millis(10)).is_err());
}

#[test]
fn a_worker_added_anew_is_healthy() {
    let mut brain = one();
    trip(&mut brain, NOW);
    brain.add(D, unified(), NOW);
    assert!(admits(&brain, NOW));
}

#[test]
fn unknown_workers_are_ignored() {
    let mut brain = one();
    assert_eq!(brain.observe(Slot(77), HealthEvent::CheckFailed, NOW), None);
    brain.remove(Slot(78));
    brain.drain(Slot(79), true);
    brain.update(Slot(80), unified());
    assert!(brain.audit().is_ok());
}

#[test]
fn both_workers_of_a_pair_can_be_probes() {
    let mut brain = brain(settings(), &[prefill(), decode_only()]);
    for slot in [Slot(0), Slot(1)] {
        for _ in 0..3 {
            brain.observe(slot, HealthEvent::Failed(Cause::Connect), NOW);
        }
    }
    let probe = ask_at(&mut brain, millis(1000)).unwrap();
    assert!(ask_at(&mut brain, millis(1000)).is_err());
    brain.observe(Slot(0), HealthEvent::Answered, millis(1001));
    brain.settle(probe.booking, End::Cancelled, millis(1002));
    assert!(ask_at(&mut brain, millis(1002)).is_ok());
}

const P: Slot = Slot(0);
const D0: Slot = Slot(1);
const D1: Slot = Slot(2);

/// One prefill and two decode workers whose requests go remote.
fn disaggregated() -> Brain {
    let policy = Policy { rule: Rule::AlwaysRemote, ..Policy::default() };
    brain(Settings { policy, ..settings() }, &[prefill(), decode(), decode()])
}

fn hand_over(brain: &mut Brain, decode: Slot, event: HealthEvent, now: Time) {
    for slot in [P, decode] {
        brain.observe(slot, event, now);
    }
}

const COULD_NOT_FETCH: HealthEvent = HealthEvent::Failed(Cause::KvLoad);

#[test]
fn a_decode_worker_that_fetches_from_nobody_is_handed_nothing_and_stays_in_use() {
    let mut brain = disaggregated();
    for _ in 0..3 {
        hand_over(&mut brain, D0, COULD_NOT_FETCH, NOW);
        hand_over(&mut brain, D1, HealthEvent::HandedOver, NOW);
    }
    assert!(brain.workers().all(|worker| worker.condition == Condition::Up));
    for _ in 0..8 {
        let decision = ask_at(&mut brain, NOW).unwrap();
        assert_eq!((decision.prefill, decision.decode), (Some(P), D1));
    }
}

#[test]
fn a_prefill_worker_that_nobody_can_fetch_from_is_left_alone_and_then_probed_once() {
    let mut brain = disaggregated();
    for decode in [D0, D1, D0] {
        hand_over(&mut brain, decode, COULD_NOT_FETCH, NOW);
        // Its prompts are computed well all the while.
        brain.observe(P, HealthEvent::Answered, NOW);
    }
    let path = |brain: &mut Brain, now| ask_at(brain, now).unwrap().path;
    assert_eq!(path(&mut brain, NOW), Path::Local);
    let probe = ask_at(&mut brain, millis(1000)).unwrap();
    assert_eq!(probe.path, Path::Remote);
    assert_eq!(path(&mut brain, millis(1000)), Path::Local, "one probe at a time");
    hand_over(&mut brain, probe.decode, HealthEvent::HandedOver, millis(1001));
    assert_eq!(path(&mut brain, millis(1001)), Path::Remote);
}
