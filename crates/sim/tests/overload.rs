//! A fleet far beyond its capacity: what it serves in time stays what it can serve at best, and what
//! waits is bounded.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::sync::Arc;
use std::time::Duration;

use pointsman_brain::{Admission, IslBounding, Policy, Predicted, Role, Rule, Settings, Slo};
use pointsman_sim::engine::{Content, Spec};
use pointsman_sim::fleet::{
    Ending, Fleet, FleetPlan, FleetRequest, Outcome, RequestId, WorkerPlan,
};
use pointsman_sim::profile::Profile;
use pointsman_sim::rng::mix;

const SECOND: u64 = 1_000_000_000;
const PROMPT: u32 = 4_096;
const OUTPUT: u32 = 32;
const SLO: Duration = Duration::from_secs(30);
/// Ten minutes of ten times as many as can be served.
const FLOOD: (u64, u64) = (1_080, 600);
/// Requests a minute, some below and some beyond what can be served.
const AROUND: [u64; 5] = [84, 96, 102, 108, 120];
const PEAK_SECONDS: u64 = 300;
const WAITING: usize = 64;

fn fleet(rule: Rule) -> Fleet {
    let engine = Spec {
        // Slow, so that ten minutes are few requests.
        profile: Profile::default().faster(0.1),
        capacity_blocks: 20_000,
        max_num_batched_tokens: 2_048,
        max_num_seqs: 64,
        ..Spec::default()
    };
    let worker = |role| WorkerPlan { role, local_prefill: role == Role::Decode, engine };
    let settings = Settings {
        policy: Policy { rule, ..Policy::default() },
        predicted: Predicted { cold: Rule::Predicted, ..Predicted::default() },
        admission: Admission { max_waiting: WAITING, ..Admission::default() },
        ..Settings::default()
    };
    Fleet::new(FleetPlan {
        workers: [Role::Prefill, Role::Prefill, Role::Decode, Role::Decode].map(worker).to_vec(),
        settings,
        event_lag: 0,
        event_loss: 0.0,
        reading_every: SECOND,
        reading_lag: 0,
        seed: 1,
    })
}

fn request(id: u64, slo: Slo) -> FleetRequest {
    let names = (0..u64::from((PROMPT + OUTPUT) / 16)).map(|at| mix(at | id << 20)).collect();
    FleetRequest {
        id: RequestId(id),
        prompt_tokens: PROMPT,
        output_tokens: OUTPUT,
        content: Arc::new(Content { names, ..Content::default() }),
        session: None,
        slo,
        priority: 0,
        tenant: None,
    }
}

/// Everything that ended within `seconds` of `per_minute` requests a minute, and the most that waited.
fn offered(rule: Rule, slo: Slo, per_minute: u64, seconds: u64) -> (Vec<Outcome>, usize) {
    let mut fleet = fleet(rule);
    let (mut outcomes, mut most) = (Vec::new(), 0);
    for id in 0..per_minute * seconds / 60 {
        fleet.advance(id * 60 * SECOND / per_minute);
        fleet.submit(request(id, slo));
        most = most.max(fleet.live() - fleet.brain().live_bookings());
        outcomes.append(&mut fleet.take_outcomes());
    }
    fleet.check().unwrap();
    fleet.advance(seconds * SECOND);
    outcomes.append(&mut fleet.take_outcomes());
    (outcomes, most)
}

fn finished(outcome: &Outcome) -> bool {
    outcome.ending == Ending::Finished
}

fn in_time(outcome: &Outcome) -> bool {
    let first = outcome.first_token.unwrap_or(u64::MAX);
    finished(outcome) && first - outcome.arrived <= SLO.as_nanos() as u64
}

#[test]
fn at_ten_times_capacity_as_many_are_served_in_time_as_at_best() {
    let slo = Slo { ttft: Some(SLO), itl: None };
    let goodput = |per_minute, seconds| {
        let (outcomes, most) = offered(Rule::Predicted, slo, per_minute, seconds);
        assert!(most <= WAITING, "{most} waited");
        outcomes.iter().filter(|outcome| in_time(outcome)).count() as f64 / seconds as f64
    };
    let peak = AROUND.map(|rate| goodput(rate, PEAK_SECONDS)).into_iter().fold(0.0, f64::max);
    let over = goodput(FLOOD.0, FLOOD.1);
    assert!(over > 0.95 * peak, "{over} a second of {peak}");
}

#[test]
fn at_ten_times_capacity_as_many_are_finished_as_at_best_and_the_rest_are_refused() {
    let rule = Rule::IslBounding(IslBounding::default());
    let throughput = |per_minute, seconds| {
        let (outcomes, most) = offered(rule, Slo::default(), per_minute, seconds);
        assert!(most <= WAITING, "{most} waited");
        assert!(outcomes.iter().all(|o| finished(o) || o.ending == Ending::Refused));
        outcomes.iter().filter(|outcome| finished(outcome)).count() as f64 / seconds as f64
    };
    let peak = AROUND.map(|rate| throughput(rate, PEAK_SECONDS)).into_iter().fold(0.0, f64::max);
    let over = throughput(FLOOD.0, FLOOD.1);
    assert!(over > 0.95 * peak, "{over} a second of {peak}");
}
