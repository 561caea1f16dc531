//! Brain, index and engines together on one virtual clock.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::sync::Arc;

use pointsman_brain::{
    Bounds, Budget, Factor, GuardSettings, IslBounding, Path, Policy, PrefillLoad, Role, Rule,
    Settings, Share, Signal, Slo,
};
use pointsman_sim::engine::{Content, Spec};
use pointsman_sim::fleet::{
    Ending, Fleet, FleetPlan, FleetRequest, Outcome, RequestId, WorkerPlan,
};
use pointsman_sim::profile::Profile;
use pointsman_sim::rng::mix;
use proptest::prelude::*;

const CHUNK: u32 = 256;

fn engine(capacity_blocks: u32, speed: f64) -> Spec {
    Spec {
        profile: Profile::default().faster(speed),
        capacity_blocks,
        max_num_batched_tokens: CHUNK,
        max_num_seqs: 8,
        ..Spec::default()
    }
}

fn worker(role: Role, engine: Spec) -> WorkerPlan {
    WorkerPlan { role, local_prefill: role == Role::Decode, engine }
}

fn plan(settings: Settings, workers: Vec<WorkerPlan>) -> FleetPlan {
    FleetPlan {
        workers,
        settings,
        event_lag: 0,
        event_loss: 0.0,
        reading_every: 1_000_000_000,
        reading_lag: 0,
        seed: 1,
    }
}

fn two_and_two(settings: Settings) -> FleetPlan {
    let roles = [Role::Prefill, Role::Prefill, Role::Decode, Role::Decode];
    plan(settings, roles.map(|role| worker(role, engine(400, 1.0))).to_vec())
}

/// Families share the first blocks of all and go their own way after.
fn request(id: u64, family: u64, prompt_tokens: u32, output_tokens: u32) -> FleetRequest {
    let blocks = u64::from((prompt_tokens + output_tokens) / 16);
    // Outputs are the request's own.
    let prompt_blocks = u64::from(prompt_tokens / 16);
    let name = |at: u64| match at {
        0..2 => mix(at),
        _ if at < prompt_blocks => mix(at | family << 20 | 1 << 40),
        _ => mix(at | id << 20 | 1 << 41),
    };
    let content = Content { names: (0..blocks).map(name).collect(), ..Content::default() };
    FleetRequest {
        id: RequestId(id),
        prompt_tokens,
        output_tokens,
        content: Arc::new(content),
        session: Some(family),
        slo: Slo::default(),
        priority: 0,
        tenant: None,
    }
}

fn run(fleet: &mut Fleet) -> Vec<Outcome> {
    while fleet.turn() {
        fleet.check().unwrap();
    }
    let mut outcomes = fleet.take_outcomes();
    outcomes.sort_by_key(|outcome| outcome.id);
    outcomes
}

fn path(outcome: &Outcome) -> Path {
    outcome.decision.unwrap().path
}

fn with(rule: Rule) -> Settings {
    let policy = Policy { rule, bounds: Bounds::default() };
    Settings { policy, ..Settings::default() }
}

#[test]
fn a_cold_prompt_goes_remote_and_the_next_turn_stays_local() {
    let mut fleet = Fleet::new(two_and_two(with(Rule::IslBounding(IslBounding::default()))));
    fleet.submit(request(1, 1, 1000, 50));
    let first = run(&mut fleet);
    fleet.submit(request(2, 1, 1200, 50));
    let second = run(&mut fleet);
    assert_eq!((path(&first[0]), path(&second[0])), (Path::Remote, Path::Local));
    // 62 blocks of the first prompt are on the decode worker that had it.
    assert_eq!(second[0].decision.unwrap().effective_isl_tokens, 1200 - 992);
    assert_eq!(first[0].decision.unwrap().decode, second[0].decision.unwrap().decode);
    assert_eq!((first[0].tokens, first[0].ending), (50, Ending::Finished));
}

#[test]
fn a_remote_request_takes_prefill_transfer_and_one_decode_step_to_its_first_token() {
    let mut fleet = Fleet::new(two_and_two(with(Rule::AlwaysRemote)));
    fleet.submit(request(1, 1, 256, 4));
    let outcome = run(&mut fleet).remove(0);
    let prefill = 8.0 + 0.0445 * 256.0 + 9.8e-7 * 256.0 * 256.0;
    let transfer = 10.0 + 256.0 * 327_680.0 / 40e9 * 1e3;
    let step = 10.4 + 0.038 + 2.9e-5 * 256.0;
    let ttft = (outcome.first_token.unwrap() - outcome.arrived) as f64 / 1e6;
    assert!((ttft - (prefill + transfer + step)).abs() < 1e-3, "{ttft}");
}

#[test]
fn equal_runs_are_equal() {
    let go = || {
        let mut fleet = Fleet::new(two_and_two(with(Rule::IslBounding(IslBounding::default()))));
        for id in 0..60 {
            fleet.submit(request(id, id % 7, 200 + 37 * (id as u32 % 11), 20));
            fleet.advance(id * 30_000_000);
        }
        let outcomes = run(&mut fleet);
        outcomes.iter().map(|o| (o.id, o.first_token, o.ended)).collect::<Vec<_>>()
    };
    assert_eq!(go(), go());
}

#[test]
fn a_prefill_worker_that_dies_is_replaced_by_the_other() {
    let mut fleet = Fleet::new(two_and_two(with(Rule::AlwaysRemote)));
    fleet.submit(request(1, 1, 1000, 10));
    let chosen = fleet.decision(RequestId(1)).unwrap().prefill.unwrap();
    fleet.kill(usize::from(chosen.0));
    fleet.check().unwrap();
    let outcome = run(&mut fleet).remove(0);
    assert_eq!((outcome.ending, path(&outcome)), (Ending::Finished, Path::Remote));
    assert_ne!(outcome.decision.unwrap().prefill, Some(chosen));
}

#[test]
fn without_prefill_workers_requests_are_served_locally() {
    let mut fleet = Fleet::new(two_and_two(with(Rule::AlwaysRemote)));
    fleet.kill(0);
    fleet.kill(1);
    fleet.submit(request(1, 1, 1000, 10));
    let outcome = run(&mut fleet).remove(0);
    assert_eq!((outcome.ending, path(&outcome)), (Ending::Finished, Path::Local));
}

#[test]
fn a_decode_worker_that_dies_before_the_first_token_is_replaced_and_after_it_fails_the_request() {
    for late in [false, true] {
        let mut fleet = Fleet::new(two_and_two(with(Rule::AlwaysRemote)));
        fleet.submit(request(1, 1, 1000, 10));
        fleet.advance(if late { 150_000_000 } else { 90_000_000 });
        let decode = fleet.decision(RequestId(1)).unwrap().decode;
        fleet.kill(usize::from(decode.0));
        fleet.check().unwrap();
        let outcome = run(&mut fleet).remove(0);
        assert!(outcome.first_token.is_some());
        assert_eq!(outcome.ending, if late { Ending::Failed } else { Ending::Finished });
    }
}

#[test]
fn a_burst_never_passes_the_local_prefill_budget_together() {
    let rule = Rule::IslBounding(IslBounding {
        eff_isl_threshold: 100_000,
        eff_isl_ratio_threshold: Share::ONE,
    });
    let mut settings = with(rule);
    // A floor above every prompt: the policy would send all of them to the local path.
    settings.policy.bounds.floor_tokens = 100_000;
    settings.guards =
        GuardSettings { local_prefill_budget: Budget::Tokens(1000), ..GuardSettings::default() };
    let mut fleet = Fleet::new(two_and_two(settings));
    for id in 0..30 {
        fleet.submit(request(id, id, 300, 10));
        for view in fleet.brain().workers().filter(|view| view.role == Role::Decode) {
            assert!(view.load.prefill_tokens <= 1000, "{view:?}");
        }
    }
    let outcomes = run(&mut fleet);
    let local = outcomes.iter().filter(|outcome| path(outcome) == Path::Local).count();
    assert_eq!(local, 6, "three on each decode worker");
    assert!(outcomes.iter().all(|outcome| outcome.ending == Ending::Finished));
}

#[derive(Clone, Debug)]
enum Op {
    Submit { family: u64, prompt: u32, output: u32 },
    Advance { micros: u64 },
    Cancel { nth: u64 },
    Kill { worker: usize },
    Revive { worker: usize },
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        6 => (0..5u64, 1..900u32, 1..60u32)
            .prop_map(|(family, prompt, output)| Op::Submit { family, prompt, output }),
        6 => (0..120_000u64).prop_map(|micros| Op::Advance { micros }),
        2 => any::<u64>().prop_map(|nth| Op::Cancel { nth }),
        1 => (0..5usize).prop_map(|worker| Op::Kill { worker }),
        1 => (0..5usize).prop_map(|worker| Op::Revive { worker }),
    ]
}

fn rule() -> impl Strategy<Value = Rule> {
    let busy = PrefillLoad { prefill_busy_threshold: Factor::ONE };
    prop_oneof![
        Just(Rule::AlwaysRemote),
        Just(Rule::AlwaysLocal),
        Just(Rule::IslBounding(IslBounding::default())),
        Just(Rule::IslOrLoad(IslBounding::default(), busy)),
        Just(Rule::IslAndLoad(IslBounding::default(), busy)),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, ..ProptestConfig::default() })]

    #[test]
    fn the_ledger_and_the_index_are_right_after_every_step(
        ops in prop::collection::vec(op(), 1..60),
        rule in rule(),
        capacity in 70..200u32,
        lag in prop_oneof![Just(0u64), 1..50_000_000u64],
        loss in prop_oneof![4 => Just(0.0), 1 => Just(0.3)],
        instant in prop::bool::weighted(0.2),
        unified in any::<bool>(),
    ) {
        let engine = engine(capacity, if instant { f64::INFINITY } else { 1.0 });
        let mut roles = vec![Role::Prefill, Role::Prefill, Role::Decode, Role::Decode];
        roles.extend(unified.then_some(Role::Unified));
        let workers: Vec<WorkerPlan> = roles.iter().map(|&role| worker(role, engine)).collect();
        let count = workers.len();
        let mut fleet = Fleet::new(FleetPlan {
            event_lag: lag,
            event_loss: loss,
            ..plan(with(rule), workers)
        });
        let (mut next, mut now, mut ended) = (0, 0, 0);
        let mut prompts: Vec<FleetRequest> = Vec::new();
        for op in ops {
            match op {
                Op::Submit { family, prompt, output } => {
                    let request = request(next, family, prompt, output);
                    next += 1;
                    prompts.push(request.clone());
                    fleet.submit(request);
                }
                Op::Advance { micros } => {
                    now += micros * 1000;
                    while let Some(at) = fleet.wakeup().filter(|&at| at <= now) {
                        fleet.advance(at);
                        fleet.check().map_err(TestCaseError::fail)?;
                    }
                    fleet.advance(now);
                }
                Op::Cancel { nth } if next > 0 => fleet.cancel(RequestId(nth % next)),
                Op::Kill { worker } if worker < count => fleet.kill(worker),
                Op::Revive { worker } if worker < count => fleet.revive(worker),
                Op::Cancel { .. } | Op::Kill { .. } | Op::Revive { .. } => {}
            }
            fleet.check().map_err(TestCaseError::fail)?;
            if let Some(request) = prompts.last() {
                let names = &request.content.names[..(request.prompt_tokens / 16) as usize];
                let seen = fleet.overlap(names);
                for (at, &seen) in seen.iter().enumerate() {
                    if let Some(truth) = fleet.truth(at, names) {
                        prop_assert_eq!(seen, truth, "worker {}", at);
                    }
                }
            }
            ended += fleet.take_outcomes().len();
        }
        while fleet.turn() {
            fleet.check().map_err(TestCaseError::fail)?;
        }
        ended += fleet.take_outcomes().len();
        prop_assert_eq!(fleet.live(), 0);
        prop_assert_eq!(ended as u64, next);
    }
}

#[test]
fn a_guard_that_is_waived_is_told() {
    let settings = Settings {
        guards: GuardSettings {
            local_prefill_budget: Budget::Tokens(10),
            ..GuardSettings::default()
        },
        ..with(Rule::AlwaysRemote)
    };
    let mut fleet = Fleet::new(plan(settings, vec![worker(Role::Decode, engine(400, 1.0))]));
    fleet.submit(request(1, 1, 500, 4));
    let decision = fleet.decision(RequestId(1)).unwrap();
    assert!(decision.fallbacks.contains(Signal::Guards));
    assert_eq!(run(&mut fleet)[0].ending, Ending::Finished);
}
