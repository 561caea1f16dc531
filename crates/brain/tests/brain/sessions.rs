//! Session affinity: a session's turns stay on one decode worker while it is well.

use pointsman_brain::{
    Ask, Brain, Decision, End, HealthEvent, Path, Reading, Rule, Settings, Share, Slot, WorkerSpec,
};

use crate::fleets::*;

fn turn(brain: &mut Brain, session: u64, isl: u32) -> Decision {
    let tries = fresh();
    let ask = Ask { session: Some(session), ..Ask::new(isl, &[], &tries) };
    let decision = brain.decide(&ask, NOW).unwrap();
    brain.first_token(decision.booking, NOW);
    decision
}

fn two_decodes(rule: Rule) -> Brain {
    brain(with_rule(rule), &[prefill(), decode(), decode()])
}

#[test]
fn a_session_stays_though_another_worker_is_cheaper() {
    for rule in [Rule::AlwaysLocal, Rule::AlwaysRemote] {
        let mut brain = two_decodes(rule);
        for _ in 0..5 {
            assert_eq!(turn(&mut brain, 1, 1000).decode, Slot(1));
        }
        assert_eq!(turn(&mut brain, 2, 1000).decode, Slot(2), "another session is free");
    }
}

#[test]
fn without_affinity_it_goes_where_it_is_cheaper() {
    let settings = Settings { session_affinity: false, ..with_rule(Rule::AlwaysLocal) };
    let mut brain = brain(settings, &[prefill(), decode(), decode()]);
    assert_eq!(turn(&mut brain, 1, 1000).decode, Slot(1));
    assert_eq!(turn(&mut brain, 1, 1000).decode, Slot(2));
}

#[test]
fn a_session_leaves_a_worker_that_is_down_draining_or_gone() {
    let leave: [fn(&mut Brain); 3] = [
        |brain| {
            for _ in 0..2 {
                brain.observe(Slot(1), HealthEvent::CheckFailed, NOW);
            }
        },
        |brain| brain.drain(Slot(1), true),
        |brain| brain.remove(Slot(1)),
    ];
    for leave in leave {
        let mut brain = two_decodes(Rule::AlwaysLocal);
        assert_eq!(turn(&mut brain, 1, 1000).decode, Slot(1));
        leave(&mut brain);
        assert_eq!(turn(&mut brain, 1, 1000).decode, Slot(2));
    }
}

#[test]
fn another_worker_in_the_same_slot_is_not_the_sessions() {
    let mut brain = two_decodes(Rule::AlwaysRemote);
    assert_eq!(turn(&mut brain, 1, 1000).decode, Slot(1));
    brain.add(Slot(1), decode(), NOW);
    let tries = fresh();
    let only_there = [true, true, false];
    let ask = Ask { eligible: Some(&only_there), ..Ask::new(1000, &[], &tries) };
    assert_eq!(brain.decide(&ask, NOW).unwrap().decode, Slot(1));
    assert_eq!(turn(&mut brain, 1, 1000).decode, Slot(2), "the cheaper one");
}

#[test]
fn a_session_comes_to_stay_where_it_went() {
    let mut brain = two_decodes(Rule::AlwaysLocal);
    turn(&mut brain, 1, 1000);
    brain.drain(Slot(1), true);
    turn(&mut brain, 1, 1000);
    brain.drain(Slot(1), false);
    assert_eq!(turn(&mut brain, 1, 1000).decode, Slot(2));
}

#[test]
fn a_session_leaves_a_worker_whose_kv_is_full() {
    for rule in [Rule::AlwaysLocal, Rule::AlwaysRemote] {
        let mut brain = two_decodes(rule);
        turn(&mut brain, 1, 1000);
        let full = Reading { kv_usage: Share::new(0.95), ..Reading::default() };
        brain.reading(Slot(1), full, NOW);
        assert_eq!(turn(&mut brain, 1, 1000).decode, Slot(2), "{}", rule.as_str());
    }
}

#[test]
fn a_session_whose_worker_is_past_its_budget_keeps_it_for_the_remote_path_only() {
    let mut local = two_decodes(Rule::AlwaysLocal);
    turn(&mut local, 1, 1000);
    assert_eq!(turn(&mut local, 1, 100_000).decode, Slot(1), "remote: every budget is passed");
    let small = WorkerSpec { max_num_batched_tokens: Some(100), ..decode() };
    let mut remote = brain(with_rule(Rule::AlwaysRemote), &[prefill(), small, decode()]);
    for _ in 0..3 {
        let decision = turn(&mut remote, 1, 1000);
        assert_eq!((decision.path, decision.decode), (Path::Remote, Slot(1)));
    }
}

#[test]
fn a_session_whose_worker_is_past_its_budget_may_go_local_elsewhere() {
    let mut brain = two_decodes(Rule::AlwaysLocal);
    assert_eq!(turn(&mut brain, 1, 1000).decode, Slot(1));
    let tries = fresh();
    let only_there = [true, true, false];
    let ask = Ask { eligible: Some(&only_there), ..Ask::new(32_000, &[], &tries) };
    assert_eq!(brain.decide(&ask, NOW).unwrap().path, Path::Local);
    let decision = turn(&mut brain, 1, 1000);
    assert_eq!((decision.path, decision.decode), (Path::Local, Slot(2)));
}

#[test]
fn a_session_on_a_unified_worker_stays_there_for_the_local_path() {
    let mut brain =
        brain(with_rule(Rule::AlwaysLocal), &[unified(), unified(), prefill(), decode()]);
    let first = turn(&mut brain, 1, 1000);
    for _ in 0..4 {
        assert_eq!(turn(&mut brain, 1, 1000).decode, first.decode);
    }
}

#[test]
fn sessions_beyond_the_limit_are_forgotten_oldest_first() {
    let settings = Settings { max_sessions: 2, ..with_rule(Rule::AlwaysLocal) };
    let mut brain = brain(settings, &[prefill(), decode(), decode()]);
    for session in [1, 2, 3] {
        let decision = turn(&mut brain, session, 1000);
        brain.settle(decision.booking, End::Finished, NOW);
    }
    let tries = fresh();
    let last = |brain: &Brain, session| {
        let ask = Ask { session: Some(session), ..Ask::new(10, &[], &tries) };
        brain.explain(&ask, NOW).unwrap().session
    };
    assert_eq!(last(&brain, 1), None);
    assert!(last(&brain, 2).is_some_and(|turn| turn.path == Path::Local));
    assert!(last(&brain, 3).is_some());
}
