//! Decide and reserve, then settle, in fleets of several sizes with 64 live bookings per worker: by
//! thresholds, and by prediction.

use std::hint::black_box;
use std::num::NonZeroU32;
use std::time::Duration;

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use pointsman_brain::{
    Ask, Brain, End, Factor, Held, IslBounding, Ladder, Path, Policy, PrefillLoad, Role, Rule,
    Settings, Slo, Slot, Time, WorkerSpec,
};

const BOOKINGS_PER_WORKER: usize = 64;
const BLOCK_SIZE: NonZeroU32 = NonZeroU32::new(16).unwrap();

fn spec(role: Role) -> WorkerSpec {
    WorkerSpec {
        role,
        local_prefill: true,
        block_size: BLOCK_SIZE,
        capacity_blocks: Some(1 << 20),
        max_num_batched_tokens: Some(8192),
        publishes_events: true,
        skips_cached_blocks: true,
        answers_when_fetched: false,
    }
}

fn busy_brain(workers: u16) -> Brain {
    let load = PrefillLoad { prefill_busy_threshold: Factor::new(100.0).unwrap_or(Factor::ONE) };
    let rule = Rule::IslOrLoad(IslBounding::default(), load);
    let policy = Policy { rule, ..Policy::default() };
    let mut brain = Brain::new(Settings { policy, max_sessions: 1024, ..Settings::default() });
    for slot in 0..workers {
        let role = if slot % 2 == 0 { Role::Prefill } else { Role::Decode };
        brain.add(Slot(slot), spec(role), Time::ZERO);
    }
    let tries = Ladder::new(brain.settings());
    for _ in 0..usize::from(workers / 2) * BOOKINGS_PER_WORKER {
        let _ = brain.decide(&Ask::new(3_000, &[], &tries), Time::ZERO);
    }
    brain
}

fn decide(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("decide and reserve, then settle");
    for workers in [8, 64, 512] {
        let mut brain = busy_brain(workers);
        let tries = Ladder::new(brain.settings());
        let held: Vec<Held> = (0..u32::from(workers))
            .map(|slot| Held { device: slot * 37 % 90, host: slot % 5, disk: 0 })
            .collect();
        let mut session = 0;
        group.bench_function(BenchmarkId::from_parameter(workers), |bencher| {
            bencher.iter(|| {
                session = (session + 1) % 1024;
                let ask = Ask { session: Some(session), ..Ask::new(3_000, &held, &tries) };
                if let Ok(decision) = brain.decide(black_box(&ask), Time::ZERO) {
                    brain.settle(black_box(decision.booking), End::Finished, Time::ZERO);
                }
            });
        });
        assert_eq!(brain.live_bookings(), usize::from(workers / 2) * BOOKINGS_PER_WORKER);
    }
    group.finish();
}

/// Fleets with as many prefill as decode workers, 64 sequences streaming from each of these.
fn predicting_brain(workers: u16) -> Brain {
    let slo = Slo { ttft: Some(Duration::from_secs(2)), itl: Some(Duration::from_millis(50)) };
    let settings =
        Settings { slo, allow_path_override: true, max_sessions: 1024, ..Settings::default() };
    let mut brain = Brain::new(settings);
    for slot in 0..workers {
        let role = if slot % 2 == 0 { Role::Prefill } else { Role::Decode };
        brain.add(Slot(slot), spec(role), Time::ZERO);
    }
    let tries = Ladder::new(brain.settings());
    for at in 0..u64::from(workers / 2) * BOOKINGS_PER_WORKER as u64 {
        let now = Time(at * 100_000);
        let ask = Ask { wish: Some(Path::Remote), ..Ask::new(3_000, &[], &tries) };
        if let Ok(decision) = brain.decide(&ask, now) {
            brain.prefill_done(decision.booking, now);
            brain.first_token(decision.booking, now);
            brain.progress(decision.booking, (at * 37 % 300) as u32, now);
        }
    }
    brain
}

fn predict(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("predicted: decide and reserve, then settle");
    for workers in [16_u16, 256] {
        let mut brain = predicting_brain(workers);
        let tries = Ladder::new(brain.settings());
        let cached: Vec<Held> = (0..u32::from(workers))
            .map(|slot| Held { device: slot * 37 % 180, host: 0, disk: 0 })
            .collect();
        let now = Time(u64::from(workers) * 64 * 100_000);
        // Where nothing is cached all workers are alike, so that many have to be looked at closely.
        for (case, held) in [("partly cached", cached.as_slice()), ("cold", &[])] {
            group.bench_function(BenchmarkId::new(case, workers), |bencher| {
                bencher.iter(|| {
                    let ask = Ask::new(3_000, held, &tries);
                    if let Ok(decision) = brain.decide(black_box(&ask), now) {
                        brain.settle(black_box(decision.booking), End::Cancelled, now);
                    }
                });
            });
        }
    }
    group.finish();
}

criterion_group!(benches, decide, predict);
criterion_main!(benches);
