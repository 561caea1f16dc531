//! The requests under way: each is followed from its booking to its end, and what happens to it is
//! told to the workers' desks. Invariants: a flight belongs to one booking (place and serial); late,
//! repeated and unknown calls do nothing; events that never come (a prefill's answer, a first token)
//! cost a measurement and nothing else.

use super::desk::{Left, Mark};
use super::physics::Batch;
use super::{BIAS_WEIGHT, Booked, FirstToken, Predictor};
use crate::fleet::{Path, Slot};
use crate::ledger::{BookingId, End};
use crate::time::Time;

/// Relative errors above this count as this, so that one stuck request does not hide the rest.
const LARGEST_ERROR: f64 = 2.0;

/// By the booking's place.
#[derive(Debug, Default)]
pub(crate) struct Flights(Vec<Option<Flight>>);

#[derive(Clone, Copy, Debug)]
struct Flight {
    serial: u64,
    since: Time,
    path: Path,
    /// The worker that computes the prompt; none once it is gone.
    computes: Option<Slot>,
    /// The worker that streams; none once it is gone.
    streams: Option<Slot>,
    moved: u32,
    /// The end of its prefill is told when its KV has been moved.
    answers_when_fetched: bool,
    /// What it adds to the batch, as it has grown so far.
    batch: Batch,
    strict: f32,
    ttft: f64,
    tokens: u32,
    phase: Phase,
}

#[derive(Clone, Copy, Debug)]
enum Phase {
    /// In the queue of the worker that computes.
    Queued,
    /// Computed elsewhere, on its way to the worker that streams.
    Moving { since: Time, mark: Mark },
    /// Computed and moved.
    Moved,
    /// Streams, in this row of its worker.
    Running { row: u32, mark: Mark },
}

impl Flights {
    fn get(&self, id: BookingId) -> Option<Flight> {
        let flight = (*self.0.get(id.place() as usize)?)?;
        (flight.serial == id.serial()).then_some(flight)
    }

    fn put(&mut self, place: u32, flight: Option<Flight>) {
        let place = place as usize;
        if self.0.len() <= place {
            self.0.resize(place + 1, None);
        }
        if let Some(entry) = self.0.get_mut(place) {
            *entry = flight;
        }
    }

    /// A worker is gone: what it had is not followed there any more.
    pub(super) fn detach(&mut self, slot: Slot) {
        for flight in self.0.iter_mut().flatten() {
            flight.computes = flight.computes.filter(|computes| *computes != slot);
            flight.streams = flight.streams.filter(|streams| *streams != slot);
        }
    }

    fn moved_to(&mut self, place: u32, to: u32) {
        if let Some(Some(Flight { phase: Phase::Running { row, .. }, .. })) =
            self.0.get_mut(place as usize)
        {
            *row = to;
        }
    }
}

impl Predictor {
    /// Follows a plan from here on.
    pub(crate) fn book(&mut self, id: BookingId, booked: &Booked, now: Time) {
        let batch = Batch::new(booked.sequences, booked.isl);
        let computes = booked.prefill.unwrap_or(booked.decode);
        if let Some(desk) = self.desk_mut(Some(booked.decode)) {
            desk.coming = desk.coming.plus(batch);
        }
        let phase = if booked.prefilled {
            let mark = self.desk(booked.decode).map(|desk| desk.mark(0)).unwrap_or_default();
            Phase::Moving { since: now, mark }
        } else {
            // The end of a remote prefill is seen whatever the client asked for.
            let seen = booked.streams || booked.prefill.is_some();
            let silent_until = (!seen).then(|| self.computed_by(computes, booked.work, now));
            if let Some(desk) = self.desk_mut(Some(computes)) {
                desk.enqueue(id.place(), booked.work, silent_until, now);
            }
            Phase::Queued
        };
        let flight = Flight {
            serial: id.serial(),
            since: now,
            path: if booked.prefill.is_some() { Path::Remote } else { Path::Local },
            computes: Some(computes),
            streams: Some(booked.decode),
            moved: booked.moved,
            answers_when_fetched: booked.answers_when_fetched,
            batch,
            strict: booked.slo.itl_seconds().map_or(0.0, |slo| (1.0 / slo) as f32),
            ttft: booked.ttft,
            tokens: 0,
            phase,
        };
        self.flights.put(id.place(), Some(flight));
    }

    /// The prefill leg of a remote path was answered.
    pub(crate) fn prefill_done(&mut self, id: BookingId, now: Time) {
        let Some(mut flight) = self.flights.get(id) else { return };
        if flight.path != Path::Remote || !matches!(flight.phase, Phase::Queued) {
            return;
        }
        if flight.answers_when_fetched {
            self.fetched(id, &flight, now);
            flight.phase = Phase::Moved;
        } else {
            self.leave_queue(id.place(), flight.computes, Left::Computed, now, now);
            let desk = self.desk_mut(flight.streams);
            let mark = desk.map(|desk| desk.mark(0)).unwrap_or_default();
            flight.phase = Phase::Moving { since: now, mark };
        }
        self.flights.put(id.place(), Some(flight));
    }

    /// A prompt was computed and moved, and only the end of both was seen: each is taken to have had its
    /// predicted part of that time, else moving would count as computing.
    fn fetched(&mut self, id: BookingId, flight: &Flight, now: Time) {
        let both = now.since(flight.since);
        let part = self.knowledge.link().seconds(flight.moved) / flight.ttft;
        let moving = both.mul_f64(if part.is_finite() { part.clamp(0.0, 1.0) } else { 0.0 });
        self.leave_queue(id.place(), flight.computes, Left::Computed, now.before(moving), now);
        self.knowledge.learn_transfer(flight.moved, moving.as_secs_f64());
    }

    /// The first token was streamed.
    pub(crate) fn first_token(&mut self, id: BookingId, now: Time) -> Option<FirstToken> {
        let flight = self.flights.get(id)?;
        match flight.phase {
            Phase::Running { .. } => return None,
            Phase::Moved => {}
            // Its KV has come, which the prefill worker has not said yet.
            Phase::Queued if flight.answers_when_fetched => self.fetched(id, &flight, now),
            Phase::Queued => {
                // Without its answer, a remote prefill may have ended long ago.
                let known = flight.path == Path::Local;
                let left = if known { Left::Computed } else { Left::Dropped };
                self.leave_queue(id.place(), flight.computes, left, now, now);
            }
            Phase::Moving { since, mark } => {
                let calm = |slot: Slot| self.desk(slot).is_some_and(|d| d.is_calm_since(&mark));
                if let Some(slot) = flight.streams.filter(|slot| calm(*slot)) {
                    self.learn_transfer(slot, flight.moved, now.since(since).as_secs_f64());
                }
            }
        }
        self.run(id, flight, now);
        Some(self.note_error(&flight, now))
    }

    fn note_error(&mut self, flight: &Flight, now: Time) -> FirstToken {
        let actual = now.since(flight.since).as_secs_f64();
        let first = FirstToken { path: flight.path, predicted: flight.ttft, actual };
        if let Some(desk) = self.desk_mut(flight.streams)
            && actual > 0.0
        {
            let error = (first.predicted / actual - 1.0).abs().min(LARGEST_ERROR);
            let [remote, local] = &mut desk.errors;
            let of_path = if flight.path == Path::Remote { remote } else { local };
            of_path.learn(error, BIAS_WEIGHT);
        }
        first
    }

    /// Lets a flight stream.
    fn run(&mut self, id: BookingId, mut flight: Flight, now: Time) {
        let osl = self.osl();
        let Some(desk) = self.desk_mut(flight.streams) else { return };
        desk.coming = desk.coming.minus(flight.batch);
        let row = desk.join(id.place(), flight.batch, flight.strict, osl, now);
        flight.phase = Phase::Running { row, mark: desk.mark(0) };
        self.flights.put(id.place(), Some(flight));
    }

    /// Each sequence has `tokens` tokens so far.
    pub(crate) fn progress(&mut self, id: BookingId, tokens: u32, now: Time) {
        let Some(flight) = self.flights.get(id) else { return };
        if !matches!(flight.phase, Phase::Running { .. }) {
            // It streams, so its first token has passed unseen.
            self.leave_queue(id.place(), flight.computes, Left::Dropped, now, now);
            self.run(id, flight, now);
        }
        let osl = self.osl();
        let Some(mut flight) = self.flights.get(id) else { return };
        let Phase::Running { row, mut mark } = flight.phase else { return };
        let grown = tokens.saturating_sub(flight.tokens);
        let context = flight.batch.sequences * f64::from(grown);
        flight.tokens = flight.tokens.max(tokens);
        flight.batch.context += context;
        let Some(desk) = self.desk_mut(flight.streams) else { return };
        desk.grow(context, now);
        desk.running.progress(row, flight.tokens, osl);
        let sample = desk.measure(&mut mark, flight.tokens);
        flight.phase = Phase::Running { row, mark };
        self.flights.put(id.place(), Some(flight));
        if let (Some(sample), Some(slot)) = (sample, flight.streams) {
            self.learn_decode(slot, sample);
        }
    }

    /// A request is over.
    pub(crate) fn settle(&mut self, id: BookingId, end: End, now: Time) {
        let Some(flight) = self.flights.get(id) else { return };
        match flight.phase {
            Phase::Queued => {
                self.leave_queue(id.place(), flight.computes, Left::Dropped, now, now);
                self.drop_coming(&flight);
            }
            Phase::Moving { .. } | Phase::Moved => self.drop_coming(&flight),
            Phase::Running { row, .. } => {
                if let Some(desk) = self.desk_mut(flight.streams)
                    && let Some(place) = desk.leave(row, flight.batch, now)
                {
                    self.flights.moved_to(place, row);
                }
                if end == End::Finished {
                    self.knowledge.learn_osl(f64::from(flight.tokens));
                }
            }
        }
        self.flights.put(id.place(), None);
    }

    fn drop_coming(&mut self, flight: &Flight) {
        if let Some(desk) = self.desk_mut(flight.streams) {
            desk.coming = desk.coming.minus(flight.batch);
        }
    }

    fn leave_queue(
        &mut self,
        place: u32,
        slot: Option<Slot>,
        left: Left,
        computed: Time,
        now: Time,
    ) {
        let sample = self.desk_mut(slot).and_then(|desk| desk.dequeue(place, left, computed, now));
        if let (Some(sample), Some(slot)) = (sample, slot) {
            self.learn_prefill(slot, sample);
        }
    }

    fn desk_mut(&mut self, slot: Option<Slot>) -> Option<&mut super::Desk> {
        self.desks.get_mut(slot?.index())?.as_mut()
    }
}
