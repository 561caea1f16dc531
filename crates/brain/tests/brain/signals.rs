//! Signals that are missing: what stands in for them, and that every use is counted.

use pointsman_brain::{
    Ask, Bounds, Factor, Fallbacks, Flag, IslBounding, IslGate, Path, Policy, PrefillLoad, Rule,
    Settings, Signal, WorkerSpec,
};

use crate::fleets::*;

fn names(fallbacks: Fallbacks) -> Vec<&'static str> {
    fallbacks.iter().map(Flag::as_str).collect()
}

#[test]
fn a_fleet_that_tells_everything_uses_no_fallback() {
    let load = PrefillLoad { prefill_busy_threshold: Factor::ONE };
    let rule = Rule::IslOrLoad(IslBounding::default(), load);
    let mut brain = brain(with_rule(rule), &[prefill(), decode()]);
    for isl in [10, 100_000] {
        assert!(decided(&mut brain, isl, &[]).fallbacks.is_empty());
    }
}

#[test]
fn a_prefill_worker_of_unknown_budget_is_calm() {
    let load = PrefillLoad { prefill_busy_threshold: Factor::ZERO };
    let unknown = WorkerSpec { max_num_batched_tokens: None, ..prefill() };
    let mut brain = brain(with_rule(Rule::PrefillLoad(load)), &[unknown, decode()]);
    for _ in 0..3 {
        let decision = decided(&mut brain, 100_000, &[]);
        assert_eq!((decision.path, decision.why.as_str()), (Path::Remote, "prefill_calm"));
        assert_eq!(names(decision.fallbacks), ["prefill_capacity"]);
    }
}

#[test]
fn a_worker_without_events_is_counted_where_overlap_matters() {
    let silent = WorkerSpec { publishes_events: false, ..decode() };
    let floor = Bounds { floor_tokens: 10, ceiling_tokens: None };
    let isl = Rule::IslBounding(IslBounding::default());
    // (rule, bounds, counted)
    let cases = [
        (isl, Bounds::default(), true),
        (Rule::AlwaysRemote, Bounds::default(), false),
        (Rule::AlwaysRemote, floor, true),
    ];
    for (rule, bounds, counted) in cases {
        let policy = Policy { rule, bounds };
        let mut brain = brain(Settings { policy, ..Settings::default() }, &[prefill(), silent]);
        let decision = decided(&mut brain, 1000, &[]);
        assert_eq!(decision.fallbacks.contains(Signal::KvEvents), counted, "{policy:?}");
    }
}

#[test]
fn what_the_request_itself_lacks_is_marked_on_every_path() {
    let fleets: [&[WorkerSpec]; 2] = [&[prefill(), decode()], &[unified()]];
    for fleet in fleets {
        let mut brain = brain(Settings::default(), fleet);
        let tries = fresh();
        let ask = Ask { estimated: true, partial: true, ..Ask::new(1000, &[], &tries) };
        let decision = brain.decide(&ask, NOW).unwrap();
        assert_eq!(names(decision.fallbacks), ["tokenizer", "multimodal"]);
    }
}

#[test]
fn shadow_policies_do_not_add_to_the_fallbacks() {
    let load = PrefillLoad { prefill_busy_threshold: Factor::ZERO };
    let shadow = vec![Policy { rule: Rule::PrefillLoad(load), ..Policy::default() }];
    let unknown = WorkerSpec { max_num_batched_tokens: None, ..prefill() };
    let settings = Settings { shadow, ..with_rule(Rule::AlwaysRemote) };
    assert!(decided(&mut brain(settings, &[unknown, decode()]), 10, &[]).fallbacks.is_empty());
}

#[test]
fn every_signal_has_a_name_and_a_bit_of_its_own() {
    let all: Fallbacks = Signal::ALL.iter().copied().collect();
    assert_eq!(all.iter().count(), Signal::ALL.len());
    let mut names = names(all);
    names.dedup();
    assert_eq!(names.len(), Signal::ALL.len());
}

#[test]
fn what_can_never_fire_is_said_in_plain_words() {
    let isl = |threshold, ratio| {
        Rule::IslBounding(IslBounding {
            eff_isl_threshold: threshold,
            eff_isl_ratio_threshold: pointsman_brain::Share::new(ratio).unwrap(),
        })
    };
    let load = PrefillLoad { prefill_busy_threshold: Factor::ONE };
    let silent = WorkerSpec { publishes_events: false, ..decode() };
    let unmeasured = WorkerSpec { capacity_blocks: None, ..decode() };
    let unlimited = WorkerSpec { max_num_batched_tokens: None, ..prefill() };
    let gated = Settings { isl_gate: IslGate::UnifiedUpTo(512), ..Settings::default() };
    let remote_only = Settings { require_remote: true, ..Settings::default() };
    let two = prefill();
    // (settings, workers, what one of the lines must say; nothing: no line at all)
    let cases: [(Settings, &[WorkerSpec], Option<&str>); 17] = [
        (Settings::default(), &[], None),
        (Settings::default(), &[prefill(), two, decode()], None),
        (with_rule(isl(2048, 0.0)), &[prefill(), decode()], Some("eff_isl_ratio_threshold is 0")),
        (with_rule(isl(0, 0.7)), &[prefill(), decode()], Some("eff_isl_threshold is 0")),
        (with_rule(isl(2048, 0.7)), &[prefill(), silent], Some("publishes KV events")),
        (with_rule(Rule::ShortPrompt(Default::default())), &[prefill(), two, silent], None),
        (
            with_rule(Rule::MaxLocalPrefill(Default::default())),
            &[prefill(), silent],
            Some("events"),
        ),
        (
            with_rule(Rule::PrefillLoad(load)),
            &[unlimited, decode()],
            Some("max_num_batched_tokens"),
        ),
        (
            with_rule(Rule::IslOrLoad(IslBounding::default(), load)),
            &[unlimited, silent],
            Some(
                "events, so nothing counts as cached unless approximate mode fills in, and max_num",
            ),
        ),
        (
            with_rule(Rule::IslOrLoad(IslBounding::default(), load)),
            &[unlimited, two, decode()],
            None,
        ),
        (Settings::default(), &[prefill(), decode_only()], Some("no request can go local")),
        (Settings::default(), &[decode()], Some("no prefill worker, so no remote path")),
        (remote_only, &[unified()], Some("every request is refused")),
        (Settings::default(), &[prefill(), unmeasured], Some("guard decode_kv can never veto")),
        (gated.clone(), &[prefill(), decode()], Some("there is no unified worker")),
        (gated, &[unified()], Some("unified workers only")),
        (Settings::default(), &[prefill(), decode()], Some("no other one can be tried")),
    ];
    for (settings, workers, says) in cases {
        let lines = brain(settings, workers).never_fires();
        match says {
            None => assert!(lines.is_empty(), "{lines:?}"),
            Some(words) => assert!(lines.iter().any(|line| line.contains(words)), "{lines:?}"),
        }
    }
}

#[test]
fn bounds_that_cannot_fire_are_named_for_shadows_too() {
    let ceiling = |ceiling, floor_tokens| Policy {
        rule: Rule::AlwaysLocal,
        bounds: Bounds { floor_tokens, ceiling_tokens: Some(ceiling) },
    };
    let shadow = vec![ceiling(0, 0), ceiling(10, 10), ceiling(11, 10)];
    let settings = Settings { shadow, ..with_rule(Rule::UncachedTokens(Default::default())) };
    let lines = brain(settings, &[prefill(), prefill(), decode()]).never_fires();
    assert_eq!(lines.len(), 3, "{lines:?}");
    assert!(lines[0].contains("policy uncached_tokens always goes local"));
    assert!(
        lines[1].contains("shadow policy always_local can never go local: ceiling_tokens is 0")
    );
    assert!(lines[2].contains("ceiling_tokens 10 <= floor_tokens 10"));
}
