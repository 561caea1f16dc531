//! Section 3 through the whole brain: each policy at its boundary, on one prefill and one decode
//! worker. The tables of every rule are next to its formula.

use pointsman_brain::{
    Bounds, Budget, Factor, GuardSettings, IslBounding, KvGuard, MaxLocalPrefill, Path, Policy,
    PrefillLoad, Rule, Settings, ShortPrompt, Slot, UncachedTokens,
};

use crate::fleets::*;

const LOAD: PrefillLoad = PrefillLoad { prefill_busy_threshold: Factor::ONE };
const P: Slot = Slot(0);
const D: Slot = Slot(1);

fn unguarded(policy: Policy) -> Settings {
    let guards = GuardSettings { decode_kv: KvGuard::Off, local_prefill_budget: Budget::Off };
    Settings { policy, guards, ..Settings::default() }
}

/// Decides with `active` prefill tokens on the prefill worker.
fn path(policy: Policy, active: u32, isl: u32, held_tokens: u32) -> (Path, &'static str) {
    let mut brain = brain(unguarded(policy), &[prefill(), decode()]);
    if active > 0 {
        let before = decided(&mut brain, active, &[]);
        assert_eq!(before.path, Path::Remote, "the load before must go to the prefill worker");
    }
    let decision = decided(&mut brain, isl, &[held(0), held(held_tokens)]);
    assert_eq!(decision.decode, D);
    assert_eq!(decision.prefill, (decision.path == Path::Remote).then_some(P));
    assert_eq!(decision.isl_tokens, isl);
    assert_eq!(decision.effective_isl_tokens, isl.saturating_sub(held_tokens));
    let computed =
        if decision.path == Path::Remote { isl } else { isl.saturating_sub(held_tokens) };
    assert_eq!(decision.prefill_tokens, computed);
    (decision.path, decision.why.as_str())
}

fn rule(rule: Rule) -> Policy {
    Policy { rule, bounds: Bounds::default() }
}

#[test]
fn each_policy_decides_at_its_boundary() {
    use Path::{Local, Remote};
    let isl = IslBounding::default();
    let uncached = UncachedTokens { non_cached_tokens: 256, prompt_tokens: 64 };
    let within = MaxLocalPrefill { max_local_prefill_length: 100 };
    // (rule, active prefill tokens, ISL, held on d, path, reason)
    let cases = [
        (Rule::AlwaysRemote, 0, 1000, 992, Remote, "always_remote"),
        (Rule::AlwaysLocal, 0, 100_000, 0, Local, "always_local"),
        (Rule::ShortPrompt(ShortPrompt::default()), 0, 512, 0, Local, "short_prompt"),
        (Rule::ShortPrompt(ShortPrompt::default()), 0, 513, 512, Remote, "long_prompt"),
        (Rule::IslBounding(isl), 0, 10_047, 8000, Local, "eff_isl_under"),
        (Rule::IslBounding(isl), 0, 10_048, 8000, Remote, "eff_isl_over"),
        (Rule::IslBounding(isl), 0, 1600, 480, Remote, "eff_isl_ratio_over"),
        (Rule::IslBounding(isl), 0, 1599, 480, Local, "eff_isl_under"),
        (Rule::IslBounding(isl), 0, 2000, 0, Remote, "eff_isl_ratio_over"),
        (Rule::IslBounding(isl), 0, 100, 1600, Local, "eff_isl_under"),
        (Rule::IslBounding(isl), 0, 0, 0, Local, "eff_isl_under"),
        (Rule::PrefillLoad(LOAD), 8192, 100_000, 0, Remote, "prefill_calm"),
        (Rule::PrefillLoad(LOAD), 8193, 100_000, 0, Local, "prefill_busy"),
        (Rule::IslOrLoad(isl, LOAD), 8192, 1600, 480, Remote, "eff_isl_ratio_over"),
        (Rule::IslOrLoad(isl, LOAD), 8193, 1600, 480, Local, "prefill_busy"),
        (Rule::IslOrLoad(isl, LOAD), 0, 1599, 480, Local, "eff_isl_under"),
        (Rule::IslAndLoad(isl, LOAD), 8192, 1599, 480, Remote, "prefill_calm"),
        (Rule::IslAndLoad(isl, LOAD), 8193, 1599, 480, Local, "eff_isl_under_and_prefill_busy"),
        (Rule::IslAndLoad(isl, LOAD), 8193, 1600, 480, Remote, "eff_isl_ratio_over"),
        (Rule::UncachedTokens(uncached), 0, 1055, 800, Local, "uncached_under"),
        (Rule::UncachedTokens(uncached), 0, 1056, 800, Remote, "uncached_over"),
        (Rule::UncachedTokens(UncachedTokens::default()), 0, 100_000, 0, Local, "uncached_off"),
        (Rule::MaxLocalPrefill(within), 0, 900, 800, Local, "local_prefill_within"),
        (Rule::MaxLocalPrefill(within), 0, 901, 800, Remote, "local_prefill_over"),
        (Rule::MaxLocalPrefill(within), 0, 50, 0, Remote, "no_overlap"),
    ];
    for (kind, active, isl, held, expected, label) in cases {
        let case = format!("{} active {active} ISL {isl} held {held}", kind.as_str());
        assert_eq!(path(rule(kind), active, isl, held), (expected, label), "{case}");
    }
}

#[test]
fn a_long_cold_prompt_goes_local_under_load_unless_a_ceiling_forbids_it() {
    let kind = Rule::PrefillLoad(LOAD);
    assert_eq!(path(rule(kind), 8193, 100_000, 0), (Path::Local, "prefill_busy"));
    let bounds = Bounds { ceiling_tokens: Some(100_000), ..Bounds::default() };
    assert_eq!(path(Policy { rule: kind, bounds }, 8193, 100_000, 0), (Path::Remote, "ceiling"));
}

#[test]
fn a_floor_lets_a_short_cold_prompt_go_local() {
    let bounds = Bounds { floor_tokens: 64, ..Bounds::default() };
    let policy = Policy { bounds, ..Policy::default() };
    assert_eq!(path(policy, 0, 64, 0), (Path::Local, "floor"));
    assert_eq!(path(policy, 0, 65, 0), (Path::Remote, "eff_isl_ratio_over"));
}

#[test]
fn a_conversation_goes_remote_first_and_local_later_under_the_defaults() {
    let mut brain = brain(Settings::default(), &[prefill(), decode()]);
    let mut cached = 0;
    for turn in 1..=6 {
        let isl = turn * 800;
        let decision = decided(&mut brain, isl, &[held(0), held(cached)]);
        let expected = if turn == 1 { Path::Remote } else { Path::Local };
        assert_eq!(decision.path, expected, "turn {turn}: {}", decision.why);
        cached = isl;
        brain.settle(decision.booking, pointsman_brain::End::Finished, NOW);
    }
}

#[test]
fn this_request_is_not_counted_as_load() {
    assert_eq!(path(rule(Rule::PrefillLoad(LOAD)), 0, 1_000_000, 0).1, "prefill_calm");
}

#[test]
fn the_load_is_that_of_the_prefill_worker_that_would_be_used() {
    let mut brain =
        brain(unguarded(rule(Rule::PrefillLoad(LOAD))), &[prefill(), prefill(), decode()]);
    assert_eq!(decided(&mut brain, 9000, &[]).prefill, Some(Slot(0)));
    // The other one is idle and cheaper.
    assert_eq!(decided(&mut brain, 9000, &[]).prefill, Some(Slot(1)));
    assert_eq!(decided(&mut brain, 9000, &[]).why.as_str(), "prefill_busy");
}
