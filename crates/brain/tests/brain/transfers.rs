//! What it takes to move KV: how much of it a worker fetches, and what is learned where the end of
//! computing is not seen.

use pointsman_brain::{Ask, Brain, End, Path, Profile, Role, Settings, Slot, WorkerSpec};

use crate::fleets::*;
use crate::predicted::{Engine, at, predicted};

#[test]
fn a_worker_that_fetches_whole_prompts_is_reckoned_with_all_of_their_kv() {
    let whole = WorkerSpec { skips_cached_blocks: false, ..decode_only() };
    let mut brain = brain(predicted(), &[prefill(), whole, decode_only()]);
    let tries = fresh();
    let transfer = |brain: &Brain, slot: u16, tokens| {
        let held = [held(0), held(tokens), held(tokens)];
        let record = brain.explain(&Ask::new(16_000, &held, &tries), NOW).unwrap();
        let of = record.candidates.iter().find(|candidate| candidate.slot == Slot(slot));
        of.map(|candidate| candidate.outlook.transfer).unwrap()
    };
    let seconds = |tokens| {
        let (hop, busy) = Profile::default().transfer_time(tokens);
        hop + busy
    };
    for (slot, tokens, moved) in [(1, 0, 16_000), (1, 12_000, 16_000), (2, 12_000, 4_000)] {
        assert!((transfer(&brain, slot, tokens) - seconds(moved)).abs() < 1e-9, "{slot} {tokens}");
    }
    // Holding the same, the one that uses it is taken.
    let held = [held(0), held(12_000), held(12_000)];
    assert_eq!(decided(&mut brain, 16_000, &held).decode, Slot(2));
}

/// Serves prompts of which each worker has something else, as engines do whose prefill workers answer
/// when the KV has been fetched: an answer is told either before or after the first token.
fn serve_together(brain: &mut Brain, truth: Profile, turns: u32) {
    let mut engine = Engine { truth, chunk: 8192.0, now: 0.0, noise: 3 };
    for turn in 0..turns {
        let isl = 2_000 + turn * 7_919 % 12_000;
        let (prefix, fetched) = (isl / 4 * (turn % 4) / BLOCK * BLOCK, turn % 3 * isl / 3);
        let held = [held(prefix), held(fetched / BLOCK * BLOCK)];
        let tries = fresh();
        let ask = Ask { wish: Some(Path::Remote), ..Ask::new(isl, &held, &tries) };
        let decision = brain.decide(&ask, at(engine.now)).unwrap();
        let (u, context) = (f64::from(isl - prefix), f64::from(prefix));
        let (hop, busy) = truth.transfer_time(isl - held[1].device * BLOCK);
        engine.now += engine.prefill(u) + truth.a2 * u * context + engine.noisy(hop + busy);
        let (answered, first) = (at(engine.now), at(engine.now + 1e-4));
        if turn % 2 == 0 {
            brain.prefill_done(decision.booking, answered);
            brain.first_token(decision.booking, first);
        } else {
            brain.first_token(decision.booking, answered);
            brain.prefill_done(decision.booking, first);
        }
        for tokens in 1..60 {
            engine.now += engine.step(1.0, f64::from(isl + tokens));
            brain.progress(decision.booking, tokens, at(engine.now));
        }
        brain.settle(decision.booking, End::Finished, at(engine.now));
        engine.now += 0.01;
    }
}

#[test]
fn computing_and_moving_are_told_apart_where_only_the_end_of_both_is_seen() {
    let fetched = WorkerSpec { answers_when_fetched: true, ..prefill() };
    // A link eight times slower than the default profile's, so that it cannot be overlooked.
    let profile = Profile { bandwidth: 5e9, ..Profile::default() };
    let settings = Settings { allow_path_override: true, profile, ..predicted() };
    let mut brain = brain(settings, &[fetched, decode()]);
    let truth = Profile { a1: profile.a1 * 1.5, bandwidth: 4e9, ..profile };
    serve_together(&mut brain, truth, 300);
    let calibration = brain.calibration(at(1e6));
    assert!(!calibration.cold, "{calibration:?}");
    let learned = |pool, name| {
        let mut constants = calibration.constants.iter();
        constants.find(|c| c.pool == pool && c.name == name).map(|c| c.value).unwrap()
    };
    let close = |value: f64, truth: f64| {
        assert!((value / truth - 1.0).abs() < 0.1, "{value} is not {truth}");
    };
    let ms = 1e3;
    let link = truth.kv_bytes_per_token / truth.bandwidth * ms;
    let prefill = |name| learned(Some(Role::Prefill), name);
    let computing = |a1: f64, a2: f64| a1 * 8_000.0 + a2 * 8_000.0 * 4_000.0;
    close(computing(prefill("a1"), prefill("a2")), computing(truth.a1 * ms, truth.a2 * ms));
    close(learned(None, "token"), link);
}
