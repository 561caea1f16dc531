//! Small fleets for the tests: worker kinds, a brain over them, and short ways to ask.

use std::num::NonZeroU32;

use pointsman_brain::{
    Ask, Brain, Decision, Held, Ladder, NoPath, Policy, Role, Rule, Settings, Slot, Time,
    WorkerSpec,
};

pub(crate) const NOW: Time = Time::ZERO;
pub(crate) const BLOCK: u32 = 16;

pub(crate) fn worker(role: Role) -> WorkerSpec {
    WorkerSpec {
        role,
        local_prefill: role != Role::Prefill,
        block_size: NonZeroU32::new(BLOCK).unwrap(),
        capacity_blocks: Some(1 << 20),
        max_num_batched_tokens: Some(8192),
        publishes_events: true,
        skips_cached_blocks: true,
        answers_when_fetched: false,
    }
}

pub(crate) fn prefill() -> WorkerSpec {
    worker(Role::Prefill)
}

pub(crate) fn decode() -> WorkerSpec {
    worker(Role::Decode)
}

/// A decode worker that cannot prefill.
pub(crate) fn decode_only() -> WorkerSpec {
    WorkerSpec { local_prefill: false, ..decode() }
}

pub(crate) fn unified() -> WorkerSpec {
    worker(Role::Unified)
}

/// A brain over `workers`, in slots from 0.
pub(crate) fn brain(settings: Settings, workers: &[WorkerSpec]) -> Brain {
    let mut brain = Brain::new(settings);
    for (slot, spec) in (0..).zip(workers) {
        brain.add(Slot(slot), *spec, NOW);
    }
    brain
}

pub(crate) fn with_rule(rule: Rule) -> Settings {
    Settings { policy: Policy { rule, ..Policy::default() }, ..Settings::default() }
}

/// Holds `tokens` in device memory, a multiple of the block size.
pub(crate) fn held(tokens: u32) -> Held {
    assert_eq!(tokens % BLOCK, 0);
    Held { device: tokens / BLOCK, host: 0, disk: 0 }
}

pub(crate) fn fresh() -> Ladder {
    Ladder::new(&Settings::default())
}

/// Decides for a prompt of `isl` tokens of which the workers hold `held`.
pub(crate) fn ask(brain: &mut Brain, isl: u32, held: &[Held]) -> Result<Decision, NoPath> {
    brain.decide(&Ask::new(isl, held, &fresh()), NOW)
}

/// The same where there must be a plan.
pub(crate) fn decided(brain: &mut Brain, isl: u32, held: &[Held]) -> Decision {
    ask(brain, isl, held).unwrap()
}
