//! Deciding, reserving and settling do not touch the heap once warm.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::num::NonZeroU32;
use std::time::Duration;

use pointsman_brain::{
    Ask, Brain, CostSettings, End, Factor, HealthEvent, Held, IslBounding, Ladder, Policy,
    PrefillLoad, Role, Rule, Settings, Slo, Slot, Split, Time, WorkerSpec,
};

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

struct Counting;

#[allow(unsafe_code, reason = "a global allocator can be written in no other way")]
// SAFETY: every call is handed on to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.with(|count| count.set(count.get() + 1));
        // SAFETY: as the caller promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: as the caller promises.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

const WORKERS: u16 = 64;
const LIVE: usize = 500;

fn isl_or_load() -> Rule {
    let load = PrefillLoad { prefill_busy_threshold: Factor::ONE };
    Rule::IslOrLoad(IslBounding::default(), load)
}

fn fleet(rule: Rule, temperature: f64) -> Brain {
    let shadow = vec![Policy { rule: Rule::AlwaysLocal, ..Policy::default() }; 4];
    let cost =
        CostSettings { temperature: Factor::new(temperature).unwrap(), ..Default::default() };
    let policy = Policy { rule, ..Policy::default() };
    let slo = Slo { ttft: Some(Duration::from_secs(2)), itl: Some(Duration::from_millis(50)) };
    let settings = Settings { policy, shadow, cost, slo, max_sessions: 64, ..Settings::default() };
    let mut brain = Brain::new(settings);
    for slot in 0..WORKERS {
        let role =
            [Role::Prefill, Role::Decode, Role::Decode, Role::Unified][usize::from(slot % 4)];
        let spec = WorkerSpec {
            role,
            local_prefill: slot % 8 != 1,
            block_size: NonZeroU32::new(16).unwrap(),
            capacity_blocks: Some(5_000),
            max_num_batched_tokens: Some(2_048),
            publishes_events: true,
            skips_cached_blocks: true,
            answers_when_fetched: false,
        };
        brain.add(Slot(slot), spec, Time::ZERO);
    }
    brain
}

/// A thousand requests of all kinds, with `LIVE` of them in flight.
fn serve(
    brain: &mut Brain,
    live: &mut Vec<pointsman_brain::BookingId>,
    held: &[Held],
    clock: &mut u64,
) -> usize {
    let tries = Ladder::new(brain.settings());
    let mut locals = 0;
    for step in 0..1_000_u32 {
        let ask = Ask {
            session: Some(u64::from(step * 7 % 200)),
            split: if step % 10 == 0 { Split::No } else { Split::Yes },
            sequences: 1 + step % 3,
            ..Ask::new(step * 37 % 9_000, held, &tries)
        };
        *clock += 3_000_000;
        let now = Time(*clock);
        if let Ok(decision) = brain.decide(&ask, now) {
            locals += usize::from(decision.prefill.is_none());
            brain.observe(decision.decode, HealthEvent::Answered, now);
            if live.len() == LIVE {
                let settled = std::mem::replace(&mut live[step as usize % LIVE], decision.booking);
                brain.prefill_done(settled, now);
                brain.first_token(settled, now);
                brain.progress(settled, 700, now);
                brain.settle(settled, End::Finished, now);
            } else {
                live.push(decision.booking);
            }
        }
    }
    locals
}

#[test]
fn deciding_and_settling_allocate_nothing_once_warm() {
    for (rule, temperature) in [(isl_or_load(), 0.0), (isl_or_load(), 0.7), (Rule::Predicted, 0.0)]
    {
        let mut brain = fleet(rule, temperature);
        let mut live = Vec::with_capacity(LIVE);
        let mut clock = 0;
        let held: Vec<Held> = (0..u32::from(WORKERS))
            .map(|slot| Held { device: slot * 37 % 90, host: slot % 5, disk: 0 })
            .collect();
        // Lists per worker grow to the most that the worker ever had.
        for _ in 0..15 {
            serve(&mut brain, &mut live, &held, &mut clock);
        }
        let before = ALLOCATIONS.with(Cell::get);
        let locals = serve(&mut brain, &mut live, &held, &mut clock);
        let allocated = ALLOCATIONS.with(Cell::get) - before;
        assert_eq!(allocated, 0, "{} at temperature {temperature}", rule.as_str());
        assert!(locals > 100 && locals < 900, "both paths are taken: {locals} local");
    }
}
