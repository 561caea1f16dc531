//! The brain of one group: its fleet, its ledger and its settings behind one set of calls.

use crate::ask::Ask;
use crate::decision::{Decision, NoPath};
use crate::fleet::{Reading, Slot, WorkerSpec};
use crate::health::{HealthChange, HealthEvent};
use crate::ledger::{BookingId, End};
use crate::record::{Readiness, Record, Settled, WorkerView};
use crate::settings::Settings;
use crate::time::Time;

/// Decides for the workers of one group. One caller at a time.
#[derive(Debug)]
pub struct Brain {
    settings: Settings,
}

impl Brain {
    /// A brain without workers.
    pub fn new(settings: Settings) -> Brain {
        Brain { settings }
    }

    /// The settings it was made with.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Adds a worker; one that had the slot before is removed first.
    pub fn add(&mut self, _slot: Slot, _spec: WorkerSpec, _now: Time) {}

    /// Replaces what is known of a worker; its load and health stay.
    pub fn update(&mut self, _slot: Slot, _spec: WorkerSpec) {}

    /// Removes a worker. Bookings on it stay valid and can be settled as ever.
    pub fn remove(&mut self, _slot: Slot) {}

    /// Starts or stops draining a worker: it finishes what it has and is given nothing more.
    pub fn drain(&mut self, _slot: Slot, _draining: bool) {}

    /// Takes note of what was seen of a worker's health.
    pub fn observe(
        &mut self,
        _slot: Slot,
        _event: HealthEvent,
        _now: Time,
    ) -> Option<HealthChange> {
        None
    }

    /// Takes note of what an engine reported.
    pub fn reading(&mut self, _slot: Slot, _reading: Reading, _now: Time) {}

    /// Chooses the plan for a request and books its load, in one step.
    pub fn decide(&mut self, _ask: &Ask<'_>, _now: Time) -> Result<Decision, NoPath> {
        Err(NoPath::NoDecode)
    }

    /// What [`Brain::decide`] would answer, with everything that went into it; changes nothing.
    pub fn explain(&self, _ask: &Ask<'_>, _now: Time) -> Result<Record, NoPath> {
        Err(NoPath::NoDecode)
    }

    /// The prefill leg of a remote path was answered.
    pub fn prefill_done(&mut self, _booking: BookingId, _now: Time) {}

    /// The first token was streamed: the prompt is computed.
    pub fn first_token(&mut self, _booking: BookingId, _now: Time) {}

    /// Each sequence has `generated_tokens` tokens so far: books more KV blocks if those booked do not cover them.
    pub fn progress(&mut self, _booking: BookingId, _generated_tokens: u32, _now: Time) {}

    /// Releases everything that is still booked. Does nothing the second time.
    pub fn settle(&mut self, _booking: BookingId, _end: End, _now: Time) -> Option<Settled> {
        None
    }

    /// Checks that what is reserved on each worker is the sum over live bookings.
    pub fn audit(&self) -> Result<(), String> {
        Ok(())
    }

    /// How many bookings are live.
    pub fn live_bookings(&self) -> usize {
        0
    }

    /// What the group can serve.
    pub fn can_serve(&self, _now: Time) -> Readiness {
        Readiness::default()
    }

    /// In plain words, what of the settings can never fire given the fleet.
    pub fn never_fires(&self) -> Vec<String> {
        Vec::new()
    }

    /// Every worker, by slot.
    pub fn workers(&self) -> impl Iterator<Item = WorkerView> {
        std::iter::empty()
    }
}
