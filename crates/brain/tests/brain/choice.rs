//! Which worker: the ordinary cost, and sampling by temperature.

use pointsman_brain::{
    Ask, CostSettings, Decision, End, Factor, Held, Path, Role, Rule, Settings, Slot, WorkerSpec,
};

use crate::fleets::*;

fn factor(value: f64) -> Factor {
    Factor::new(value).unwrap()
}

#[test]
fn the_pair_is_the_cheapest_of_each_pool() {
    let mut brain =
        brain(with_rule(Rule::AlwaysRemote), &[prefill(), prefill(), decode(), decode()]);
    let held = [held(0), held(160), held(0), held(320)];
    let decision = decided(&mut brain, 1600, &held);
    assert_eq!((decision.prefill, decision.decode), (Some(Slot(1)), Slot(3)));
    assert_eq!(decision.prefill_tokens, 1440, "the prefill worker's own overlap counts");
    assert_eq!(decision.effective_isl_tokens, 1280);
}

#[test]
fn the_lower_slot_wins_among_equals() {
    let mut brain =
        brain(with_rule(Rule::AlwaysRemote), &[decode(), decode(), prefill(), prefill()]);
    let decision = decided(&mut brain, 1600, &[]);
    assert_eq!((decision.prefill, decision.decode), (Some(Slot(2)), Slot(0)));
}

#[test]
fn bookings_spread_cold_prompts_evenly() {
    let workers = [prefill(), prefill(), prefill(), decode(), decode(), decode(), decode()];
    let mut brain = brain(with_rule(Rule::AlwaysRemote), &workers);
    let mut uses = [0; 7];
    for _ in 0..120 {
        let decision = decided(&mut brain, 1000, &[]);
        uses[usize::from(decision.decode.0)] += 1;
        uses[usize::from(decision.prefill.unwrap().0)] += 1;
    }
    assert_eq!(uses, [40, 40, 40, 30, 30, 30, 30]);
}

#[test]
fn the_cost_is_the_formula() {
    let cost = CostSettings {
        overlap_weight: factor(2.0),
        active_requests_weight: factor(3.5),
        temperature: Factor::ZERO,
    };
    let settings = Settings { cost, ..with_rule(Rule::AlwaysRemote) };
    let mut brain = brain(settings, &[prefill(), decode()]);
    for _ in 0..2 {
        decided(&mut brain, 1000, &[held(0), held(0)]);
    }
    let tries = fresh();
    let held = [held(16), Held { device: 1, host: 1, disk: 1 }];
    let record = brain.explain(&Ask::new(1000, &held, &tries), NOW).unwrap();
    let [p, d] = &record.candidates[..] else { panic!("two candidates") };
    // Two prompts of 1000 tokens to compute, two requests.
    assert_eq!(p.cost, 2.0 * 984.0 / 16.0 + 2000.0 / 16.0 + 3.5 * 2.0);
    // Two times 63 prompt blocks and 16 for 256 output tokens; 16 + 12 + 4 tokens are held.
    assert_eq!(d.cost, 2.0 * 968.0 / 16.0 + 2.0 * 79.0 + 3.5 * 2.0);
}

#[test]
fn a_worker_that_holds_the_prefix_wins_until_its_load_outweighs_it() {
    let mut brain = brain(with_rule(Rule::AlwaysLocal), &[prefill(), decode(), decode()]);
    let held = [held(0), held(0), held(1600)];
    let chosen: Vec<u16> = (0..12).map(|_| decided(&mut brain, 1616, &held).decode.0).collect();
    // Each on slot 2 costs 1 + 16 blocks and 1 for the request: 100 blocks of overlap are worth six.
    assert_eq!(chosen[..6], [2; 6]);
    assert!(chosen.contains(&1));
}

#[test]
fn the_local_candidate_is_the_cheapest_of_decode_and_unified_workers() {
    let mut brain = brain(with_rule(Rule::AlwaysLocal), &[prefill(), decode(), unified()]);
    let decision = decided(&mut brain, 1600, &[held(0), held(0), held(800)]);
    assert_eq!((decision.path, decision.decode), (Path::Local, Slot(2)));
}

#[test]
fn a_unified_worker_never_takes_the_decode_leg() {
    let mut brain = brain(with_rule(Rule::AlwaysRemote), &[prefill(), decode(), unified()]);
    let decision = decided(&mut brain, 1600, &[held(0), held(0), held(1600)]);
    assert_eq!((decision.path, decision.decode), (Path::Remote, Slot(1)));
}

#[test]
fn effective_isl_is_measured_where_the_prompt_would_be_computed() {
    // The unified worker holds the prefix, the decode worker does not.
    let mut brain = brain(Settings::default(), &[prefill(), decode(), unified()]);
    let decision = decided(&mut brain, 1600, &[held(0), held(0), held(1440)]);
    assert_eq!((decision.path, decision.decode), (Path::Local, Slot(2)));
    assert_eq!(decision.effective_isl_tokens, 160);
}

fn sampled(seed: u64, temperature: f64, asks: usize) -> Vec<Decision> {
    let cost = CostSettings { temperature: factor(temperature), ..CostSettings::default() };
    let settings = Settings { cost, seed, ..with_rule(Rule::AlwaysRemote) };
    let workers = [prefill(), prefill(), prefill(), decode(), decode(), decode()];
    let mut brain = brain(settings, &workers);
    // u = 1600, 800, 0 on either pool: normalised costs 1, 0.5, 0.
    let held = [held(0), held(800), held(1600), held(0), held(800), held(1600)];
    let decide = |_| {
        let decision = decided(&mut brain, 1600, &held);
        brain.settle(decision.booking, End::Finished, NOW);
        decision
    };
    (0..asks).map(decide).collect()
}

#[test]
fn temperature_samples_from_the_softmax_of_the_normalised_negative_cost() {
    let asks = 20_000;
    for temperature in [0.2, 0.5, 2.0] {
        let decisions = sampled(1, temperature, asks);
        let weights = [1.0, 0.5, 0.0].map(|cost: f64| (-cost / temperature).exp());
        let total: f64 = weights.iter().sum();
        for (place, weight) in (0..).zip(weights) {
            let of = |is: &dyn Fn(&Decision) -> bool| {
                decisions.iter().filter(|decision| is(decision)).count() as f64 / asks as f64
            };
            let expected = weight / total;
            let prefills = of(&|decision| decision.prefill == Some(Slot(place)));
            let decodes = of(&|decision| decision.decode == Slot(3 + place));
            assert!((prefills - expected).abs() < 0.015, "{temperature}: {prefills} {expected}");
            assert!((decodes - expected).abs() < 0.015, "{temperature}: {decodes} {expected}");
        }
    }
}

#[test]
fn samples_repeat_with_the_seed_and_differ_without() {
    let pairs = |seed| -> Vec<_> {
        sampled(seed, 1.0, 64).iter().map(|decision| (decision.prefill, decision.decode)).collect()
    };
    assert_eq!(pairs(7), pairs(7));
    assert_ne!(pairs(7), pairs(8));
}

#[test]
fn the_lowest_temperature_above_zero_still_takes_the_cheapest() {
    for decision in sampled(3, f64::MIN_POSITIVE, 64) {
        assert_eq!((decision.prefill, decision.decode), (Some(Slot(2)), Slot(5)));
    }
}

#[test]
fn with_a_temperature_the_effective_isl_is_that_of_the_decode_worker_of_the_pair() {
    for decision in sampled(5, 1.0, 200) {
        let expected = [1600, 800, 0][usize::from(decision.decode.0 - 3)];
        assert_eq!(decision.effective_isl_tokens, expected);
    }
}

#[test]
fn workers_may_differ_in_block_size() {
    let large = WorkerSpec { block_size: 64.try_into().unwrap(), ..decode() };
    let mut brain = brain(with_rule(Rule::AlwaysLocal), &[prefill(), decode(), large]);
    // Twenty blocks of 64 tokens are more than twenty of 16.
    let blocks = Held { device: 20, host: 0, disk: 0 };
    let decision = decided(&mut brain, 1600, &[held(0), blocks, blocks]);
    assert_eq!((decision.decode, decision.effective_isl_tokens), (Slot(2), 320));
    assert_eq!(worker(Role::Decode), decode());
}
