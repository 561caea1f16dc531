//! Many identical requests at one instant: each sees what those before it booked, so that no
//! threshold and no guard lets more through than it allows.

use std::sync::Mutex;

use pointsman_brain::{
    Ask, Brain, Budget, Decision, Factor, GuardSettings, KvGuard, Path, PrefillLoad, Rule,
    Settings, Share, Signal, WorkerSpec,
};

use crate::fleets::*;

const BURST: usize = 400;

/// Asks from eight threads at once.
fn burst(brain: Brain, isl: u32) -> (Brain, Vec<Decision>) {
    let brain = Mutex::new(brain);
    let decisions = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                for _ in 0..BURST / 8 {
                    let decision = decided(&mut brain.lock().unwrap(), isl, &[]);
                    decisions.lock().unwrap().push(decision);
                }
            });
        }
    });
    (brain.into_inner().unwrap(), decisions.into_inner().unwrap())
}

fn count(decisions: &[Decision], path: Path) -> usize {
    decisions.iter().filter(|decision| decision.path == path).count()
}

fn unguarded(rule: Rule) -> Settings {
    let guards = GuardSettings { decode_kv: KvGuard::Off, local_prefill_budget: Budget::Off };
    Settings { guards, ..with_rule(rule) }
}

#[test]
fn a_burst_fills_the_prefill_workers_to_the_threshold_and_no_further() {
    let load = PrefillLoad { prefill_busy_threshold: Factor::new(1.5).unwrap() };
    let settings = unguarded(Rule::PrefillLoad(load));
    let (brain, decisions) = burst(brain(settings, &[prefill(), prefill(), decode()]), 1000);
    // Busy above 12 288 tokens: each prefill worker takes thirteen prompts of 1000.
    assert_eq!(count(&decisions, Path::Remote), 26);
    for worker in brain.workers().take(2) {
        assert_eq!(worker.load.prefill_tokens, 13_000);
    }
    assert!(brain.audit().is_ok());
}

#[test]
fn a_burst_never_passes_the_local_prefill_budget_together() {
    let (brain, decisions) =
        burst(brain(with_rule(Rule::AlwaysLocal), &[prefill(), decode(), decode()]), 1000);
    // Four chunks of 8192 tokens hold 32 prompts of 1000 on each decode worker.
    assert_eq!(count(&decisions, Path::Local), 64);
    for worker in brain.workers().skip(1) {
        assert_eq!(worker.load.prefill_tokens, 32_000);
    }
    assert!(brain.audit().is_ok());
}

#[test]
fn a_burst_never_passes_the_kv_guard_together() {
    let guards = GuardSettings {
        decode_kv: KvGuard::Above(Share::new(0.9).unwrap()),
        local_prefill_budget: Budget::Off,
    };
    let settings = Settings { guards, output_allowance_tokens: 0, ..with_rule(Rule::AlwaysLocal) };
    let small = WorkerSpec { capacity_blocks: Some(1000), ..decode() };
    let (brain, decisions) = burst(brain(settings, &[prefill(), small]), 1600);
    // 900 blocks hold nine prompts of 100 blocks.
    assert_eq!(count(&decisions, Path::Local), 9);
    let vetoed = decisions.iter().filter(|decision| decision.why.as_str() == "guard_decode_kv");
    assert_eq!(vetoed.count(), BURST - 9);
    assert!(brain.audit().is_ok());
}

#[test]
fn a_burst_without_a_remote_path_spreads_before_guards_are_waived() {
    let (_, decisions) = burst(brain(with_rule(Rule::AlwaysLocal), &[unified(), unified()]), 1000);
    let waived = decisions.iter().filter(|decision| decision.fallbacks.contains(Signal::Guards));
    assert_eq!(waived.count(), BURST - 64);
}

#[test]
fn a_burst_of_probes_sends_one() {
    use pointsman_brain::{Cause, HealthEvent, Slot, Time};
    let mut brain = brain(with_rule(Rule::AlwaysRemote), &[prefill(), decode()]);
    for _ in 0..3 {
        brain.observe(Slot(0), HealthEvent::Failed(Cause::Connect), NOW);
    }
    let later = Time::from_secs(1);
    let tries = fresh();
    let paths: Vec<Path> =
        (0..BURST).map(|_| brain.decide(&Ask::new(10, &[], &tries), later).unwrap().path).collect();
    assert_eq!(paths[0], Path::Remote);
    assert!(paths[1..].iter().all(|path| *path == Path::Local));
}
