//! The guards: what they veto, at the boundary, and where they are waived.

use pointsman_brain::{
    Ask, Brain, Budget, Decision, Factor, Flag, Guard, GuardSettings, KvGuard, Path, Reading, Rule,
    Settings, Share, Signal, Slot, Time, WorkerSpec,
};

use crate::fleets::*;

const P: Slot = Slot(0);
const D: Slot = Slot(1);

fn local_settings(guards: GuardSettings) -> Settings {
    Settings { guards, output_allowance_tokens: 0, ..with_rule(Rule::AlwaysLocal) }
}

fn kv_only(threshold: f64) -> Settings {
    local_settings(GuardSettings {
        decode_kv: KvGuard::Above(Share::new(threshold).unwrap()),
        local_prefill_budget: Budget::Off,
    })
}

fn budget_only(local_prefill_budget: Budget) -> Settings {
    local_settings(GuardSettings { decode_kv: KvGuard::Off, local_prefill_budget })
}

fn capacity(blocks: u64) -> WorkerSpec {
    WorkerSpec { capacity_blocks: Some(blocks), ..decode() }
}

fn vetoed(decision: &Decision) -> Vec<&'static str> {
    decision.vetoes.iter().map(Flag::as_str).collect()
}

fn report(brain: &mut Brain, usage: f64) {
    let kv_usage = Share::clamped(usage);
    brain.reading(D, Reading { kv_usage, ..Reading::default() }, NOW);
}

#[test]
fn a_worker_that_cannot_prefill_vetoes_the_local_path() {
    let mut brain = brain(with_rule(Rule::AlwaysLocal), &[prefill(), decode_only()]);
    let decision = decided(&mut brain, 100, &[]);
    assert_eq!((decision.path, decision.prefill), (Path::Remote, Some(P)));
    assert_eq!(decision.why.as_str(), "guard_capability");
    assert_eq!(vetoed(&decision), ["capability"]);
    assert!(brain.audit().is_ok());
}

#[test]
fn kv_blocks_may_reach_the_threshold_and_not_pass_it() {
    // (ISL, path): 900 of 1000 blocks may be in use.
    for (isl, path) in
        [(899 * 16, Path::Local), (900 * 16, Path::Local), (900 * 16 + 1, Path::Remote)]
    {
        let mut brain = brain(kv_only(0.9), &[prefill(), capacity(1000)]);
        let decision = decided(&mut brain, isl, &[]);
        assert_eq!(decision.path, path, "ISL {isl}");
        if path == Path::Remote {
            assert_eq!(decision.why.as_str(), "guard_decode_kv");
            assert_eq!(vetoed(&decision), ["decode_kv"]);
        }
    }
}

#[test]
fn the_larger_of_the_own_count_and_the_report_counts() {
    // (own blocks, reported usage, blocks asked for, path)
    let cases = [
        (500, 0.0, 400, Path::Local),
        (500, 0.0, 401, Path::Remote),
        (500, 0.5, 400, Path::Local),
        (500, 0.6, 300, Path::Local),
        (500, 0.6, 301, Path::Remote),
        (0, 0.9, 0, Path::Local),
        (0, 0.9, 1, Path::Remote),
        (0, 0.95, 0, Path::Remote),
        (0, 1.7, 0, Path::Remote),
        (0, f64::NAN, 900, Path::Local),
    ];
    for (own, usage, blocks, path) in cases {
        let mut brain = brain(kv_only(0.9), &[prefill(), capacity(1000)]);
        decided(&mut brain, own * 16, &[]);
        report(&mut brain, usage);
        let decision = decided(&mut brain, blocks * 16, &[]);
        assert_eq!(decision.path, path, "{own} own, {usage} reported, {blocks} asked for");
    }
}

#[test]
fn blocks_that_the_worker_holds_are_not_counted_again() {
    let mut brain = brain(kv_only(0.9), &[prefill(), capacity(1000)]);
    for _ in 0..8 {
        let decision = decided(&mut brain, 900 * 16, &[held(0), held(800 * 16)]);
        assert_eq!(decision.decode, D);
    }
    assert_eq!(brain.workers().nth(1).unwrap().load.kv_blocks, 800);
    assert_eq!(decided(&mut brain, 900 * 16, &[held(0), held(800 * 16)]).path, Path::Local);
    assert_eq!(decided(&mut brain, 900 * 16, &[held(0), held(800 * 16)]).path, Path::Remote);
}

#[test]
fn each_sequence_is_allowed_room_for_its_output() {
    let settings = Settings { output_allowance_tokens: 256, ..kv_only(1.0) };
    // (max_new_tokens, sequences, capacity, path): the prompt takes 10 blocks.
    let cases = [
        (None, 1, 26, Path::Local),
        (None, 1, 25, Path::Remote),
        (Some(16), 1, 11, Path::Local),
        (Some(16), 1, 10, Path::Remote),
        (Some(100_000), 1, 26, Path::Local),
        (None, 4, 74, Path::Local),
        (None, 4, 73, Path::Remote),
    ];
    for (max_new_tokens, sequences, blocks, path) in cases {
        let mut brain = brain(settings.clone(), &[prefill(), capacity(blocks)]);
        let tries = fresh();
        let ask = Ask { max_new_tokens, sequences, ..Ask::new(160, &[], &tries) };
        assert_eq!(brain.decide(&ask, NOW).unwrap().path, path, "{max_new_tokens:?} {sequences}");
    }
}

#[test]
fn an_unknown_capacity_skips_the_kv_guard_and_is_counted() {
    let unknown = WorkerSpec { capacity_blocks: None, ..decode() };
    let mut brain = brain(kv_only(0.0), &[prefill(), unknown]);
    report(&mut brain, 1.0);
    let decision = decided(&mut brain, 100_000, &[]);
    assert_eq!(decision.path, Path::Local);
    assert!(decision.fallbacks.contains(Signal::KvCapacity));
    // Once the engine says what it has, the guard holds.
    let reading = Reading { capacity_blocks: Some(10), ..Reading::default() };
    brain.reading(D, reading, NOW);
    let decision = decided(&mut brain, 100_000, &[]);
    assert_eq!(decision.why.as_str(), "guard_decode_kv");
    assert!(!decision.fallbacks.contains(Signal::KvCapacity));
}

#[test]
fn what_the_engine_says_of_its_capacity_is_stronger_than_the_configuration() {
    let mut brain = brain(kv_only(0.9), &[prefill(), capacity(1000)]);
    brain.reading(D, Reading { capacity_blocks: Some(100), ..Reading::default() }, NOW);
    assert_eq!(decided(&mut brain, 91 * 16, &[]).why.as_str(), "guard_decode_kv");
}

#[test]
fn what_the_engine_says_of_its_use_counts_for_a_while() {
    let mut brain = brain(kv_only(0.9), &[prefill(), capacity(1000)]);
    report(&mut brain, 1.0);
    let until = NOW.after(brain.settings().reading_max_age);
    let tries = fresh();
    let ask = Ask::new(1600, &[], &tries);
    let reason = |brain: &Brain, now| brain.explain(&ask, now).unwrap().reason;
    assert_eq!(reason(&brain, until), "guard_decode_kv");
    assert_eq!(reason(&brain, Time(until.0 + 1)), "always_local");
    // What it has does not age.
    brain.reading(D, Reading { capacity_blocks: Some(99), ..Reading::default() }, NOW);
    assert_eq!(reason(&brain, Time(until.0 + 1)), "guard_decode_kv");
}

#[test]
fn local_prefills_in_flight_may_reach_the_budget_and_not_pass_it() {
    let chunk = |tokens| WorkerSpec { max_num_batched_tokens: Some(tokens), ..decode() };
    let four = Budget::Chunks(Factor::new(4.0).unwrap());
    // (budget, chunk, in flight, asked for, path)
    let cases = [
        (four, 2048, 0, 8192, Path::Local),
        (four, 2048, 0, 8193, Path::Remote),
        (four, 2048, 8000, 192, Path::Local),
        (four, 2048, 8000, 193, Path::Remote),
        (Budget::Tokens(1000), 2048, 999, 1, Path::Local),
        (Budget::Tokens(1000), 2048, 1000, 0, Path::Local),
        (Budget::Tokens(1000), 2048, 1000, 1, Path::Remote),
        (Budget::Tokens(0), 2048, 0, 1, Path::Remote),
        (Budget::Off, 2048, 8192, 1_000_000, Path::Local),
    ];
    for (budget, tokens, in_flight, isl, path) in cases {
        let mut brain = brain(budget_only(budget), &[prefill(), chunk(tokens)]);
        assert_eq!(decided(&mut brain, in_flight, &[]).path, Path::Local);
        let decision = decided(&mut brain, isl, &[]);
        assert_eq!(decision.path, path, "{budget:?}: {in_flight} + {isl}");
        if path == Path::Remote {
            assert_eq!(decision.why.as_str(), "guard_local_prefill_budget");
        }
    }
}

#[test]
fn the_first_token_gives_the_budget_back() {
    let mut brain = brain(budget_only(Budget::Tokens(1000)), &[prefill(), decode()]);
    let first = decided(&mut brain, 1000, &[]);
    assert_eq!(decided(&mut brain, 1, &[]).path, Path::Remote);
    brain.first_token(first.booking, NOW);
    assert_eq!(decided(&mut brain, 1000, &[]).path, Path::Local);
}

#[test]
fn an_unknown_chunk_still_has_a_budget_and_is_counted() {
    let unknown = WorkerSpec { max_num_batched_tokens: None, ..decode() };
    let budget = GuardSettings::default().local_prefill_budget;
    let mut brain = brain(budget_only(budget), &[prefill(), unknown]);
    assert_eq!(decided(&mut brain, 8192, &[]).path, Path::Local);
    let decision = decided(&mut brain, 1, &[]);
    assert_eq!(decision.path, Path::Remote);
    assert!(decision.fallbacks.contains(Signal::Chunk));
}

#[test]
fn every_guard_that_vetoes_is_named_and_the_first_is_the_reason() {
    let settings = Settings { output_allowance_tokens: 0, ..with_rule(Rule::AlwaysLocal) };
    let mut brain = brain(settings, &[prefill(), capacity(10)]);
    let decision = decided(&mut brain, 1_000_000, &[]);
    assert_eq!(decision.why.as_str(), "guard_decode_kv");
    assert_eq!(vetoed(&decision), ["decode_kv", "local_prefill_budget"]);
}

#[test]
fn a_guard_does_not_look_at_requests_that_go_remote_anyway() {
    let mut brain = brain(with_rule(Rule::AlwaysRemote), &[prefill(), capacity(1)]);
    let decision = decided(&mut brain, 1_000_000, &[]);
    assert_eq!(decision.why.as_str(), "always_remote");
    assert!(decision.vetoes.is_empty() && decision.fallbacks.is_empty());
}

#[test]
fn load_guards_are_waived_and_counted_where_there_is_no_remote_path() {
    let mut brain = brain(with_rule(Rule::AlwaysRemote), &[capacity(1)]);
    let decision = decided(&mut brain, 1_000_000, &[]);
    assert_eq!((decision.path, decision.decode), (Path::Local, Slot(0)));
    assert!(decision.fallbacks.contains(Signal::Guards));
    assert_eq!(vetoed(&decision), ["decode_kv", "local_prefill_budget"]);
}

#[test]
fn where_guards_would_be_waived_a_worker_within_them_is_taken_instead() {
    let settings = Settings { output_allowance_tokens: 0, ..with_rule(Rule::AlwaysRemote) };
    let mut brain = brain(settings, &[capacity(100), capacity(1000)]);
    // The first is the cheapest, and full.
    let held = [held(1600), held(0)];
    brain.reading(Slot(0), Reading { kv_usage: Share::new(0.99), ..Reading::default() }, NOW);
    let decision = decided(&mut brain, 1600, &held);
    assert_eq!(decision.decode, Slot(1));
    assert!(decision.vetoes.is_empty() && !decision.fallbacks.contains(Signal::Guards));
}

#[test]
fn capability_is_never_waived() {
    let mut brain = brain(with_rule(Rule::AlwaysLocal), &[decode_only()]);
    assert_eq!(ask(&mut brain, 100, &[]).unwrap_err().as_str(), "no_prefill");
    assert_eq!(Guard::ALL.len(), 3);
}
