//! Traces through a simulated fleet: equal runs, closed loops, figures that add up, goodput.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::path::Path as FilePath;

use pointsman_brain::{Policy, Rule};
use pointsman_sim::replay::{
    Faults, FleetShape, Kill, Path, Scenario, Served, Settings, Slow, Summary, Workload, goodput,
    percentile, ttft_slo,
};
use pointsman_sim::trace::open;

fn workload(name: &str) -> Workload {
    let dir = FilePath::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/traces");
    Workload::new(&open(&dir.join(name)).unwrap(), 512, usize::MAX)
}

fn conversation() -> Workload {
    workload("mooncake_first40.jsonl")
}

fn under(rule: Rule) -> Scenario {
    let policy = Policy { rule, ..Policy::default() };
    Scenario { settings: Settings { policy, ..Settings::default() }, ..Scenario::default() }
}

#[test]
fn a_fleet_is_read_from_words_and_written_back() {
    for text in ["2p2d", "4u", "1p2d1u", "16p8d"] {
        assert_eq!(text.parse::<FleetShape>().unwrap().to_string(), text);
    }
    assert_eq!("1d2p".parse::<FleetShape>().unwrap().to_string(), "2p1d");
    for text in ["", "2", "p2d", "2p", "2d", "0u", "2p2p2d", "2p2d ", "2x", "9999u", "99999999u"] {
        assert!(text.parse::<FleetShape>().is_err(), "{text:?}");
    }
}

#[test]
fn equal_scenarios_give_equal_results_and_another_seed_others() {
    let workload = conversation();
    let with = |seed| workload.serve(&Scenario { seed, ..under(Rule::Predicted) });
    assert_eq!(with(1), with(1));
    assert_ne!(with(1), with(2));
}

#[test]
fn every_request_is_served_and_the_figures_add_up() {
    let workload = conversation();
    for rule in [Rule::AlwaysRemote, Rule::AlwaysLocal, Rule::Predicted] {
        let served = workload.serve(&under(rule));
        assert_eq!(served.len(), 40);
        assert!(served.iter().all(|served| served.finished));
        let summary = Summary::of(&served);
        let met = served.iter().filter(|served| served.meets_both()).count();
        assert_eq!(summary.slo_attainment, met as f64 / 40.0);
        assert_eq!(summary.misses.total(), 40 - met);
        let local = served.iter().filter(|served| served.path == Some(Path::Local)).count();
        assert_eq!(summary.local_share, local as f64 / 40.0);
        assert!(summary.ttft_ms.is_sorted());
        if rule == Rule::AlwaysRemote {
            assert_eq!(local, 0);
        }
    }
}

#[test]
fn a_turn_starts_when_the_one_before_has_ended_and_its_delay_passed() {
    let workload = workload("session_first3x3.jsonl");
    let rate = 4.0;
    let served = workload.serve(&Scenario { rate, ..under(Rule::Predicted) });
    // The second turn of the first session comes 4146.4 ms after the end of the first one.
    let first = &served[0];
    let ended = first.arrived + first.ttft.unwrap() + first.itl.unwrap() * 109.0;
    assert!((served[1].arrived - ended - 4.1464 / rate).abs() < 1e-6);
}

#[test]
fn a_prompt_without_company_meets_its_slo_which_is_that_of_the_study() {
    let served =
        conversation().serve(&Scenario { rate: 1e-3, noise: 0.0, ..under(Rule::AlwaysRemote) });
    let Scenario { profile, prefill_chunk, .. } = Scenario::default();
    assert!(served.iter().all(Served::meets_both));
    let tokens = 6758.0;
    let prefill = 8e-3 + 44.5e-6 * tokens + 9.8e-10 * tokens * tokens / 2.0;
    assert!((served[0].ttft_slo - 0.5 - 2.0 * prefill).abs() < 1e-9);
    assert_eq!(ttft_slo(&profile, 6758, prefill_chunk), served[0].ttft_slo);
}

#[test]
fn at_its_goodput_a_policy_meets_the_slos_and_a_little_above_it_does_not() {
    let workload = conversation();
    let scenario = under(Rule::AlwaysRemote);
    let mut replays = 0;
    let found = goodput(&workload, &scenario, |replay| replays = replay).rate;
    let met =
        |rate| Summary::of(&workload.serve(&Scenario { rate, ..scenario.clone() })).slo_attainment;
    assert!(met(found) >= 0.95 && met(found * 1.02) < 0.95, "{found}");
    assert!(replays > 3);
    assert!(goodput(&workload, &under(Rule::Predicted), |_| {}).rate > 1.5 * found);
}

#[test]
fn what_goes_wrong_shows_and_a_dead_prefill_worker_fails_nobody() {
    let workload = conversation();
    let ttft = |faults| {
        let served = workload.serve(&Scenario { faults, ..under(Rule::AlwaysRemote) });
        assert!(served.iter().all(|served| served.finished), "{faults:?}");
        Summary::of(&served).ttft_ms[0]
    };
    let plain = ttft(Faults::default());
    let slow = Slow { worker: 0, factor: 3.0 };
    assert!(ttft(Faults { slow: Some(slow), ..Faults::default() }) > plain);
    let kill = Kill { worker: 1, at: 0.5 };
    assert!(ttft(Faults { kill: Some(kill), ..Faults::default() }) > plain);
    let late =
        Faults { lag: 5_000_000_000, event_loss: 0.5, prior_scale: 3.0, ..Faults::default() };
    assert!(ttft(late) > 0.0);
}

#[test]
fn percentiles_are_values_that_were_there() {
    let values: Vec<f64> = (1..=100).map(f64::from).collect();
    let of = |share| percentile(&values, share);
    assert_eq!((of(0.0), of(0.5), of(0.95), of(1.0)), (1.0, 50.0, 95.0, 100.0));
    assert_eq!(percentile(&[], 0.5), 0.0);
    assert_eq!(percentile(&[7.0], 0.99), 7.0);
}

#[test]
fn under_overload_more_are_served_in_time_where_late_requests_wait() {
    let workload = conversation();
    let met = |hold_late| {
        let mut scenario = under(Rule::Predicted);
        scenario.settings.predicted.hold_late = hold_late;
        scenario.rate = 10.0;
        let served = workload.serve(&scenario);
        assert!(served.iter().all(|served| served.finished), "nobody waits for ever");
        served.iter().filter(|served| served.meets_both()).count()
    };
    let (waiting, at_once) = (met(true), met(false));
    assert!(waiting > at_once, "{waiting} of 40 with a line, {at_once} without");
}
