//! Where the policy is not what decides: missing workers, batches, the gate, wishes, drains.

use std::time::Duration;

use pointsman_brain::{
    Ask, Brain, Decision, End, HealthEvent, IslGate, NoPath, Path, Readiness, Rule, Settings,
    Signal, Slot, Split, WorkerSpec,
};

use crate::fleets::*;

fn down(brain: &mut Brain, slot: u16) {
    for _ in 0..2 {
        brain.observe(Slot(slot), HealthEvent::CheckFailed, NOW);
    }
}

fn batch(brain: &mut Brain) -> Result<Decision, NoPath> {
    let tries = fresh();
    brain.decide(&Ask { split: Split::No, sequences: 4, ..Ask::new(9000, &[], &tries) }, NOW)
}

fn wish(brain: &mut Brain, path: Path) -> Result<Decision, NoPath> {
    let tries = fresh();
    brain.decide(&Ask { wish: Some(path), ..Ask::new(9000, &[], &tries) }, NOW)
}

fn took(result: Result<Decision, NoPath>) -> (Path, u16, &'static str) {
    let decision = result.unwrap();
    (decision.path, decision.decode.0, decision.why.as_str())
}

#[test]
fn without_a_healthy_prefill_worker_requests_go_local() {
    let mut brain = brain(with_rule(Rule::AlwaysRemote), &[prefill(), decode()]);
    down(&mut brain, 0);
    assert_eq!(took(ask(&mut brain, 9000, &[])), (Path::Local, 1, "no_prefill"));
    brain.observe(Slot(0), HealthEvent::CheckPassed, NOW);
    assert_eq!(took(ask(&mut brain, 9000, &[])), (Path::Remote, 1, "always_remote"));
}

#[test]
fn without_a_healthy_prefill_worker_a_required_remote_path_refuses() {
    let settings = Settings { require_remote: true, ..Settings::default() };
    let mut brain = brain(settings, &[prefill(), decode()]);
    down(&mut brain, 0);
    let refused = ask(&mut brain, 9000, &[]).unwrap_err();
    assert_eq!(refused, NoPath::RemoteRequired);
    assert!(!refused.is_request_fault());
    assert_eq!(brain.live_bookings(), 0);
}

#[test]
fn a_required_remote_path_still_lets_the_policy_go_local() {
    let settings = Settings { require_remote: true, ..with_rule(Rule::AlwaysLocal) };
    let mut brain = brain(settings, &[prefill(), decode()]);
    assert_eq!(took(ask(&mut brain, 9000, &[])), (Path::Local, 1, "always_local"));
}

#[test]
fn without_a_healthy_decode_worker_a_unified_one_serves() {
    let mut brain = brain(with_rule(Rule::AlwaysRemote), &[prefill(), decode(), unified()]);
    down(&mut brain, 1);
    assert_eq!(took(ask(&mut brain, 9000, &[])), (Path::Local, 2, "no_decode"));
}

#[test]
fn a_fleet_of_unified_workers_serves_everything_locally() {
    let mut brain = brain(with_rule(Rule::AlwaysRemote), &[unified(), unified()]);
    assert_eq!(took(ask(&mut brain, 9000, &[])), (Path::Local, 0, "unified"));
    assert_eq!(took(ask(&mut brain, 9000, &[])), (Path::Local, 1, "unified"));
    assert_eq!(took(batch(&mut brain)), (Path::Local, 0, "batch"));
}

#[test]
fn without_workers_there_is_no_path_and_the_reason_says_so() {
    // (workers, those that are down, label)
    let cases: [(&[WorkerSpec], &[u16], &str); 6] = [
        (&[], &[], "no_decode"),
        (&[prefill()], &[], "no_decode"),
        (&[prefill(), decode()], &[1], "no_decode"),
        (&[prefill(), decode(), unified()], &[1, 2], "no_decode"),
        (&[prefill(), decode_only()], &[0], "no_prefill"),
        (&[decode_only()], &[], "no_prefill"),
    ];
    for (workers, downs, label) in cases {
        let mut brain = brain(Settings::default(), workers);
        for slot in downs {
            down(&mut brain, *slot);
        }
        let no_path = ask(&mut brain, 100, &[]).unwrap_err();
        assert_eq!(no_path.as_str(), label, "{workers:?} without {downs:?}");
        assert!(!no_path.is_request_fault());
        assert!(no_path.to_string().contains("at present"), "{no_path}");
    }
}

#[test]
fn a_batch_goes_local_whatever_the_policy_and_the_guards_say() {
    let full = WorkerSpec { capacity_blocks: Some(1), ..decode() };
    let settings = Settings { require_remote: true, ..with_rule(Rule::AlwaysRemote) };
    let mut brain = brain(settings, &[prefill(), full]);
    let decision = batch(&mut brain).unwrap();
    assert_eq!((decision.path, decision.why.as_str()), (Path::Local, "batch"));
    assert!(decision.fallbacks.contains(Signal::Guards));
}

#[test]
fn a_batch_that_no_worker_can_ever_take_is_the_requests_fault() {
    let mut brain = brain(Settings::default(), &[prefill(), decode_only()]);
    let refused = batch(&mut brain).unwrap_err();
    assert_eq!(refused, NoPath::NotDisaggregable);
    assert!(refused.is_request_fault() && refused.to_string().contains("one by one"));
}

#[test]
fn a_batch_whose_worker_is_down_is_not_the_requests_fault() {
    let mut brain = brain(Settings::default(), &[prefill(), decode_only(), decode()]);
    down(&mut brain, 2);
    assert_eq!(batch(&mut brain).unwrap_err(), NoPath::NoDecode);
}

fn gated() -> Settings {
    Settings { isl_gate: IslGate::UnifiedUpTo(512), ..with_rule(Rule::AlwaysRemote) }
}

#[test]
fn the_gate_sends_short_prompts_to_unified_workers_and_keeps_long_ones_from_them() {
    let mut brain = brain(gated(), &[prefill(), decode(), unified()]);
    for (isl, path) in [
        (0, (Path::Local, 2, "gate_short")),
        (512, (Path::Local, 2, "gate_short")),
        (513, (Path::Remote, 1, "always_remote")),
    ] {
        assert_eq!(took(ask(&mut brain, isl, &[])), path, "ISL {isl}");
    }
}

#[test]
fn behind_the_gate_the_local_path_of_a_long_prompt_is_a_decode_worker() {
    let settings = Settings { isl_gate: IslGate::UnifiedUpTo(512), ..with_rule(Rule::AlwaysLocal) };
    let mut brain = brain(settings, &[prefill(), decode(), unified()]);
    let held = [held(0), held(0), held(9008)];
    assert_eq!(took(ask(&mut brain, 9008, &held)), (Path::Local, 1, "always_local"));
}

#[test]
fn the_gate_is_waived_and_counted_where_the_wanted_kind_cannot_serve() {
    // (workers that are down, ISL, expected, waived)
    let cases = [
        (&[2][..], 100, (Path::Remote, 1, "always_remote"), true),
        (&[1], 9000, (Path::Local, 2, "no_decode"), true),
        // The local path of the decode worker still serves long prompts.
        (&[0], 9000, (Path::Local, 1, "no_prefill"), false),
        (&[0, 1], 9000, (Path::Local, 2, "no_prefill"), true),
        (&[1], 100, (Path::Local, 2, "gate_short"), false),
    ];
    for (downs, isl, expected, waived) in cases {
        let mut brain = brain(gated(), &[prefill(), decode(), unified()]);
        for slot in downs {
            down(&mut brain, *slot);
        }
        let decision = ask(&mut brain, isl, &[]).unwrap();
        assert_eq!(decision.fallbacks.contains(Signal::IslGate), waived, "{downs:?} ISL {isl}");
        assert_eq!(took(Ok(decision)), expected, "{downs:?} ISL {isl}");
    }
}

#[test]
fn a_batch_passes_the_gate_where_only_unified_workers_can_take_it() {
    let mut brain = brain(gated(), &[prefill(), decode_only(), unified()]);
    let decision = batch(&mut brain).unwrap();
    assert!(decision.fallbacks.contains(Signal::IslGate));
    assert_eq!(took(Ok(decision)), (Path::Local, 2, "batch"));
}

fn overridable(rule: Rule) -> Settings {
    Settings { allow_path_override: true, ..with_rule(rule) }
}

#[test]
fn a_wish_is_ignored_unless_it_is_allowed() {
    let mut brain = brain(with_rule(Rule::AlwaysRemote), &[prefill(), decode()]);
    assert_eq!(took(wish(&mut brain, Path::Local)), (Path::Remote, 1, "always_remote"));
}

#[test]
fn a_wish_is_stronger_than_the_policy_and_the_gate() {
    let mut local = brain(overridable(Rule::AlwaysRemote), &[prefill(), decode()]);
    assert_eq!(took(wish(&mut local, Path::Local)), (Path::Local, 1, "override"));
    let mut remote = brain(overridable(Rule::AlwaysLocal), &[prefill(), decode()]);
    assert_eq!(took(wish(&mut remote, Path::Remote)), (Path::Remote, 1, "override"));
    let settings = Settings { allow_path_override: true, ..gated() };
    let mut gated = brain(settings, &[prefill(), decode(), unified()]);
    let tries = fresh();
    let short = Ask { wish: Some(Path::Remote), ..Ask::new(10, &[], &tries) };
    assert_eq!(took(gated.decide(&short, NOW)), (Path::Remote, 1, "override"));
}

#[test]
fn a_wish_for_local_is_not_stronger_than_the_guards() {
    let full = WorkerSpec { capacity_blocks: Some(1), ..decode() };
    let mut brain = brain(overridable(Rule::AlwaysRemote), &[prefill(), full]);
    assert_eq!(took(wish(&mut brain, Path::Local)), (Path::Remote, 1, "guard_decode_kv"));
}

#[test]
fn a_wish_that_the_fleet_cannot_take_is_refused_with_a_clear_text() {
    // (workers, wish, refusal)
    let cases: [(&[WorkerSpec], Path, NoPath); 4] = [
        (&[prefill(), decode_only()], Path::Local, NoPath::WishLocal),
        (&[unified()], Path::Remote, NoPath::WishRemote),
        (&[decode()], Path::Remote, NoPath::WishRemote),
        (&[prefill(), unified()], Path::Remote, NoPath::WishRemote),
    ];
    for (workers, path, refusal) in cases {
        let mut brain = brain(overridable(Rule::AlwaysLocal), workers);
        let refused = wish(&mut brain, path).unwrap_err();
        assert_eq!(refused, refusal, "{workers:?}");
        assert!(refused.is_request_fault());
        assert!(refused.to_string().contains(&format!("the {} path", path.as_str())));
    }
}

#[test]
fn a_batch_that_wishes_to_be_split_is_refused() {
    let mut brain = brain(overridable(Rule::AlwaysLocal), &[prefill(), decode()]);
    let tries = fresh();
    let wish = Some(Path::Remote);
    let ask = Ask { wish, split: Split::No, ..Ask::new(10, &[], &tries) };
    assert_eq!(brain.decide(&ask, NOW).unwrap_err(), NoPath::WishRemote);
}

#[test]
fn a_batch_that_engines_hand_over_prompt_by_prompt_is_split_where_no_worker_takes_it_whole() {
    let batch = |brain: &mut Brain| {
        let tries = fresh();
        brain.decide(
            &Ask { split: Split::IfNeeded, sequences: 4, ..Ask::new(9000, &[], &tries) },
            NOW,
        )
    };
    let settings = || Settings { isl_gate: IslGate::Off, ..with_rule(Rule::AlwaysRemote) };
    let mut pairs = brain(settings(), &[prefill(), decode_only()]);
    assert_eq!(took(batch(&mut pairs)), (Path::Remote, 1, "guard_capability"));
    let mut mixed = brain(settings(), &[prefill(), decode_only(), unified()]);
    assert_eq!(took(batch(&mut mixed)), (Path::Local, 2, "batch"));
    // The one that could is down.
    down(&mut mixed, 2);
    assert_eq!(took(batch(&mut mixed)), (Path::Remote, 1, "guard_capability"));
    down(&mut pairs, 0);
    let refused = batch(&mut pairs).unwrap_err();
    assert_eq!((refused, refused.is_request_fault()), (NoPath::NoPrefill, false));
}

#[test]
fn a_wish_whose_workers_are_down_is_served_otherwise() {
    let mut brain = brain(overridable(Rule::AlwaysLocal), &[prefill(), decode()]);
    down(&mut brain, 0);
    assert_eq!(took(wish(&mut brain, Path::Remote)), (Path::Local, 1, "no_prefill"));
}

#[test]
fn only_workers_that_can_serve_the_request_are_asked() {
    let workers = [prefill(), prefill(), decode(), decode()];
    let mut brain = brain(overridable(Rule::AlwaysRemote), &workers);
    let tries = fresh();
    let mut among = |eligible: &[bool], wish| {
        brain.decide(&Ask { eligible: Some(eligible), wish, ..Ask::new(100, &[], &tries) }, NOW)
    };
    let decision = among(&[false, true, false, true], None).unwrap();
    assert_eq!((decision.prefill, decision.decode), (Some(Slot(1)), Slot(3)));
    // Slots beyond the end of the list are not.
    let decision = among(&[true, false, true], None).unwrap();
    assert_eq!((decision.prefill, decision.decode), (Some(Slot(0)), Slot(2)));
    assert_eq!(took(among(&[false, false, true], None)), (Path::Local, 2, "no_prefill"));
    assert_eq!(among(&[], None).unwrap_err(), NoPath::NoDecode);
    // A wish looks at no others either.
    let refused = among(&[false, false, true], Some(Path::Remote));
    assert_eq!(refused.unwrap_err(), NoPath::WishRemote);
}

#[test]
fn a_draining_worker_finishes_what_it_has_and_gets_nothing_more() {
    let mut brain = brain(with_rule(Rule::AlwaysRemote), &[prefill(), decode(), decode()]);
    let before = decided(&mut brain, 100, &[]);
    assert_eq!(before.decode, Slot(1));
    brain.drain(Slot(1), true);
    for _ in 0..8 {
        assert_eq!(decided(&mut brain, 100, &[]).decode, Slot(2));
    }
    assert!(brain.settle(before.booking, End::Finished, NOW).is_some());
    assert_eq!(brain.workers().nth(1).unwrap().load.active, 0);
    brain.drain(Slot(1), false);
    assert_eq!(decided(&mut brain, 100, &[]).decode, Slot(1));
}

#[test]
fn an_update_keeps_load_and_health() {
    let mut brain = brain(with_rule(Rule::AlwaysLocal), &[prefill(), decode()]);
    decided(&mut brain, 100, &[]);
    brain.update(Slot(1), decode_only());
    assert_eq!(took(ask(&mut brain, 100, &[])), (Path::Remote, 1, "guard_capability"));
    assert_eq!(brain.workers().nth(1).unwrap().load.active, 2);
    assert!(brain.audit().is_ok());
}

#[test]
fn readiness_says_what_can_be_served() {
    let settings = |require_remote| Settings { require_remote, ..Settings::default() };
    // (workers, down, remote required, ready, remote, local)
    let none: &[u16] = &[];
    let cases = [
        (&[][..], none, false, false, false, false),
        (&[prefill()], &[], false, false, false, false),
        (&[prefill(), decode()], &[], false, true, true, true),
        (&[prefill(), decode()], &[0], false, true, false, true),
        (&[prefill(), decode()], &[0], true, false, false, true),
        (&[prefill(), decode_only()], &[0], false, false, false, false),
        (&[prefill(), decode_only()], &[], false, true, true, false),
        (&[unified()], &[], false, true, false, true),
    ];
    for (workers, downs, required, ready, remote, local) in cases {
        let mut brain = brain(settings(required), workers);
        for slot in downs {
            down(&mut brain, *slot);
        }
        let Readiness { ready: r, remote: m, local: l, .. } = brain.can_serve(NOW);
        assert_eq!((r, m, l), (ready, remote, local), "{workers:?} without {downs:?}");
    }
    let mut brain = brain(settings(false), &[prefill(), decode(), decode(), unified()]);
    brain.drain(Slot(1), true);
    let readiness = brain.can_serve(NOW.after(Duration::from_secs(1)));
    assert_eq!((readiness.prefill_up, readiness.decode_up, readiness.unified_up), (1, 1, 1));
}
