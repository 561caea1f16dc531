//! The decision record, and that explaining changes nothing.

use pointsman_brain::{
    Ask, Bounds, CostSettings, Factor, HealthEvent, Held, IslGate, LeftOut, Path, Policy, Rule,
    Settings, ShortPrompt, Slot, Why,
};

use crate::fleets::*;

#[test]
fn the_record_names_every_worker_and_why_it_was_left_out() {
    let settings = Settings { isl_gate: IslGate::UnifiedUpTo(512), ..Settings::default() };
    let workers = [prefill(), prefill(), prefill(), prefill(), decode(), unified()];
    let mut brain = brain(settings, &workers);
    brain.drain(Slot(1), true);
    brain.observe(Slot(2), HealthEvent::CheckFailed, NOW);
    brain.observe(Slot(2), HealthEvent::CheckFailed, NOW);
    let tries = fresh();
    let eligible = [true, true, true, false, true, true];
    let ask = Ask { eligible: Some(&eligible), ..Ask::new(9000, &[], &tries) };
    let record = brain.explain(&ask, NOW).unwrap();
    let left_out: Vec<_> = record.candidates.iter().map(|worker| worker.left_out).collect();
    let expected = [
        None,
        Some(LeftOut::Draining),
        Some(LeftOut::Unhealthy),
        Some(LeftOut::NotEligible),
        None,
        Some(LeftOut::Gate),
    ];
    assert_eq!(left_out, expected);
}

#[test]
fn explaining_says_what_deciding_then_does_and_changes_nothing() {
    let cost = CostSettings { temperature: Factor::ONE, ..CostSettings::default() };
    let workers = [prefill(), prefill(), decode(), decode(), unified()];
    let mut brain = brain(Settings { cost, ..Settings::default() }, &workers);
    let tries = fresh();
    for step in 0..200 {
        let held = [Held { device: step % 60, host: step % 3, disk: 1 }; 5];
        let session = Some(u64::from(step % 7));
        let ask = Ask { session, ..Ask::new(1000 + step, &held, &tries) };
        let first = brain.explain(&ask, NOW).unwrap();
        assert_eq!(brain.explain(&ask, NOW).unwrap(), first);
        let decision = brain.decide(&ask, NOW).unwrap();
        assert_eq!(
            (first.path, first.prefill, first.decode, first.reason, first.effective_isl_tokens),
            (
                decision.path,
                decision.prefill,
                decision.decode,
                decision.why.as_str(),
                decision.effective_isl_tokens
            )
        );
        assert_eq!(brain.live_bookings(), step as usize + 1);
    }
}

#[test]
fn shadows_are_evaluated_on_the_same_snapshot_and_never_acted_on() {
    let policy = |rule| Policy { rule, bounds: Bounds::default() };
    let shadow = vec![
        policy(Rule::AlwaysLocal),
        policy(Rule::ShortPrompt(ShortPrompt::default())),
        policy(Rule::AlwaysRemote),
    ];
    let settings = Settings { shadow, ..with_rule(Rule::AlwaysRemote) };
    let mut brain = brain(settings, &[prefill(), decode()]);
    let paths = |decision: pointsman_brain::Decision| -> Vec<Path> {
        assert_eq!(decision.path, Path::Remote);
        decision.shadows.iter().collect()
    };
    let [local, remote] = [Path::Local, Path::Remote];
    assert_eq!(paths(decided(&mut brain, 512, &[])), [local, local, remote]);
    assert_eq!(paths(decided(&mut brain, 513, &[])), [local, remote, remote]);
    // Guards hold for shadows too.
    assert_eq!(paths(decided(&mut brain, 1_000_000, &[])), [remote, remote, remote]);
}

#[test]
fn shadows_are_silent_where_no_policy_is_asked() {
    let shadow = vec![Policy { rule: Rule::AlwaysLocal, ..Policy::default() }];
    let mut brain = brain(Settings { shadow, ..Settings::default() }, &[unified()]);
    assert_eq!(decided(&mut brain, 10, &[]).shadows.iter().count(), 0);
}

#[test]
fn the_record_prints_as_json_with_plain_names() {
    let shadow = vec![Policy { rule: Rule::AlwaysLocal, ..Policy::default() }];
    let full = pointsman_brain::WorkerSpec { capacity_blocks: Some(1), ..decode() };
    let settings = Settings { shadow, ..with_rule(Rule::AlwaysLocal) };
    let brain = brain(settings, &[prefill(), full]);
    let tries = fresh();
    let held = [held(0), held(160)];
    let ask = Ask { estimated: true, ..Ask::new(1600, &held, &tries) };
    let json = serde_json::to_value(brain.explain(&ask, NOW).unwrap()).unwrap();
    assert_eq!(json["path"], "remote");
    assert_eq!(json["prefill"], 0);
    assert_eq!(json["decode"], 1);
    assert_eq!(json["policy"], "always_local");
    assert_eq!(json["reason"], "guard_decode_kv");
    assert_eq!(json["because"], "KV blocks would not fit on the worker");
    assert_eq!(json["guards"], serde_json::json!(["decode_kv"]));
    assert_eq!(json["fallbacks"], serde_json::json!(["tokenizer"]));
    assert_eq!(json["shadows"], serde_json::json!([{"policy": "always_local", "path": "remote"}]));
    let d = &json["candidates"][1];
    assert_eq!(d["role"], "decode");
    assert_eq!(d["overlap_tokens"], 160);
    assert_eq!(d["effective_isl_tokens"], 1440);
    assert_eq!(d["guards"], serde_json::json!(["decode_kv"]));
    assert_eq!(d["load"]["kv_blocks"], 0);
    assert!(serde_json::to_string(&brain.workers().collect::<Vec<_>>()).is_ok());
}

#[test]
fn a_reason_is_a_label_and_a_sentence_with_its_numbers() {
    let why = Why::EffIslOver { u: 4321, bound: 2048 };
    assert_eq!(why.as_str(), "eff_isl_over");
    assert_eq!(why.to_string(), "effective ISL 4321 >= 2048 tokens");
}
