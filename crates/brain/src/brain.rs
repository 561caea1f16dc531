//! The brain of one group: its fleet, its ledger and its settings behind one set of calls.
//! Deciding and reserving are one call, so that the next request sees what this one booked.
//! One caller at a time; what a request does with its plan is the caller's.

use crate::ask::{Ask, Wait};
use crate::candidates::{Seen, Slate, kv_demand};
use crate::decision::{Decision, NoPath};
use crate::field::Draws;
use crate::fleet::{Fleet, Reading, Role, Slot, Worker, WorkerSpec};
use crate::health::{Health, HealthChange, HealthEvent};
use crate::hold;
use crate::ledger::{BookingId, End, Entry, Ledger, Settled};
use crate::never_fires::never_fires;
use crate::plan::{Plan, Scene, plan};
use crate::predict::{Booked, Calibration, FirstToken, Learned, NotRestored, Predictor};
use crate::random::Random;
use crate::readiness::{Readiness, readiness};
use crate::record::{Record, WorkerView};
use crate::sessions::{Sessions, Turn};
use crate::settings::Settings;
use crate::time::Time;

/// Decides for the workers of one group.
#[derive(Debug)]
pub struct Brain {
    settings: Settings,
    fleet: Fleet,
    ledger: Ledger,
    sessions: Sessions,
    predictor: Predictor,
    random: Random,
    slate: Slate,
}

impl Brain {
    /// A brain without workers.
    pub fn new(settings: Settings) -> Brain {
        Brain {
            fleet: Fleet::default(),
            ledger: Ledger::default(),
            sessions: Sessions::new(settings.max_sessions),
            predictor: Predictor::new(settings.profile),
            random: Random::new(settings.seed),
            slate: Slate::default(),
            settings,
        }
    }

    /// The settings it was made with.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Adds a worker, healthy until something else is observed. One that had the slot before is
    /// removed first.
    pub fn add(&mut self, slot: Slot, spec: WorkerSpec, _now: Time) {
        self.remove(slot);
        self.fleet.add(slot, spec);
        self.predictor.place(slot, spec.role, spec.max_num_batched_tokens);
    }

    /// Replaces what is known of a worker; its load, health and readings stay.
    pub fn update(&mut self, slot: Slot, spec: WorkerSpec) {
        if let Some(worker) = self.fleet.get_mut(slot) {
            worker.spec = spec;
            self.predictor.place(slot, spec.role, spec.max_num_batched_tokens);
        }
    }

    /// Removes a worker. Bookings on it can still be settled; what they held on it is void.
    pub fn remove(&mut self, slot: Slot) {
        self.fleet.remove(slot);
        self.ledger.reset(slot);
        self.predictor.forget(slot);
        self.sessions.forget(slot);
    }

    /// Starts or stops draining a worker: it finishes what it has and is given nothing more.
    pub fn drain(&mut self, slot: Slot, draining: bool) {
        if let Some(worker) = self.fleet.get_mut(slot) {
            worker.draining = draining;
        }
    }

    /// Takes note of what was seen of a worker's health.
    pub fn observe(&mut self, slot: Slot, event: HealthEvent, now: Time) -> Option<HealthChange> {
        let worker = self.fleet.get_mut(slot)?;
        let breaker = &self.settings.breaker;
        let condition = |worker: &Worker| [worker.health, worker.handoffs].map(Health::condition);
        let from = condition(worker);
        worker.health = worker.health.step(event, breaker, now);
        worker.handoffs = worker.handoffs.step_handoffs(event, breaker, now);
        // One event is about one of the two.
        let changes = from.into_iter().zip(condition(worker));
        changes.map(|(from, to)| HealthChange { from, to }).find(|change| change.from != change.to)
    }

    /// Takes note of what an engine reported. Its load counts for [`Settings::reading_max_age`].
    pub fn reading(&mut self, slot: Slot, reading: Reading, now: Time) {
        if let Some(worker) = self.fleet.get_mut(slot) {
            worker.report(reading, now, now.after(self.settings.reading_max_age));
            self.predictor.read(slot, &reading, now);
        }
    }

    /// Chooses the plan for a request and books its load, in one step. The booking of an earlier
    /// try must be settled before. One that is told to wait is asked about again when something has
    /// ended, those that have waited longest first.
    pub fn decide(&mut self, ask: &Ask<'_>, now: Time) -> Result<Decision, NoPath> {
        let draws = Draws::new(&self.settings, &mut self.random);
        let mut slate = std::mem::take(&mut self.slate);
        let mut planned = self.plan(&mut slate, ask, draws, now, false);
        if planned.as_ref().is_err_and(NoPath::is_for_now) {
            planned = self.plan(&mut slate, ask, draws, now, true);
        }
        self.slate = slate;
        match planned {
            Ok(plan) => Ok(self.reserve(&plan, ask, now)),
            Err(no_path) if no_path.is_for_now() => {
                Err(hold::for_a_probe(&self.fleet, ask, now).unwrap_or(no_path))
            }
            Err(no_path) => Err(no_path),
        }
    }

    /// The plan of a request, unless it is to wait; `in_need` as for [`Slate::fill`].
    fn plan(
        &self,
        slate: &mut Slate,
        ask: &Ask<'_>,
        draws: Draws,
        now: Time,
        in_need: bool,
    ) -> Result<Plan, NoPath> {
        slate.fill(&self.seen(), &self.settings, ask, now, in_need);
        let scene = self.scene(ask, slate, draws, now);
        let plan = plan(&scene)?;
        match hold::wait(&scene, &plan) {
            Some(hold::Held { again_in, late }) if ask.wait != Wait::Never => {
                Err(NoPath::Held { again_in, late })
            }
            _ => Ok(plan),
        }
    }

    /// What [`Brain::decide`] would answer, with everything that went into it; changes nothing.
    pub fn explain(&self, ask: &Ask<'_>, now: Time) -> Result<Record, NoPath> {
        let draws = Draws::new(&self.settings, &mut self.random.clone());
        let mut slate = Slate::default();
        slate.fill(&self.seen(), &self.settings, ask, now, false);
        let scene = self.scene(ask, &slate, draws, now);
        Ok(Record::new(&scene, &plan(&scene)?, &self.ledger))
    }

    /// The prefill leg of a remote path was answered: releases what it held on the prefill worker.
    pub fn prefill_done(&mut self, booking: BookingId, now: Time) {
        self.ledger.prefill_done(booking);
        self.predictor.prefill_done(booking, now);
    }

    /// The first token was streamed: releases the prefill part on whichever worker computed. Answers
    /// what TTFT was predicted and what it was, the first time.
    pub fn first_token(&mut self, booking: BookingId, now: Time) -> Option<FirstToken> {
        self.ledger.first_token(booking);
        self.predictor.first_token(booking, now)
    }

    /// Each sequence has `generated_tokens` tokens so far: books more KV blocks if those booked do
    /// not cover them. Told often, the cost model learns more; told last, it knows the output length.
    pub fn progress(&mut self, booking: BookingId, generated_tokens: u32, now: Time) {
        self.ledger.progress(booking, generated_tokens);
        self.predictor.progress(booking, generated_tokens, now);
    }

    /// Releases everything that is still booked. `None`, and nothing done, the second time.
    pub fn settle(&mut self, booking: BookingId, end: End, now: Time) -> Option<Settled> {
        let settled = self.ledger.settle(booking, end, now)?;
        self.predictor.settle(booking, end, now);
        for slot in settled.prefill.into_iter().chain([settled.decode]) {
            if let Some(worker) = self.fleet.get_mut(slot) {
                worker.health = worker.health.over(booking, now);
                worker.handoffs = worker.handoffs.over(booking, now);
            }
        }
        Some(settled)
    }

    /// Checks that what is reserved on each worker is the sum over live bookings.
    pub fn audit(&self) -> Result<(), String> {
        self.ledger.audit()
    }

    /// How many bookings are live.
    pub fn live_bookings(&self) -> usize {
        self.ledger.live()
    }

    /// What the group can serve.
    pub fn can_serve(&self, now: Time) -> Readiness {
        readiness(&self.fleet, &self.settings, now)
    }

    /// In plain words, what of the settings can never fire given the fleet.
    pub fn never_fires(&self) -> Vec<String> {
        never_fires(&self.settings, &self.fleet)
    }

    /// What the cost model has learned.
    pub fn calibration(&self, now: Time) -> Calibration {
        let has = |role| self.fleet.iter().any(|(_, worker)| worker.spec.role == role);
        self.predictor.calibration(has(Role::Prefill) && has(Role::Decode), now)
    }

    /// What the cost model has learned, to be kept over a restart.
    pub fn learned(&self) -> Learned {
        self.predictor.learned()
    }

    /// Takes over what was learned before a restart.
    ///
    /// # Errors
    /// It is of another version or for other constants, or broken; nothing has changed then.
    pub fn restore(&mut self, learned: &Learned) -> Result<(), NotRestored> {
        self.predictor.restore(learned)
    }

    /// Every worker, by slot.
    pub fn workers(&self) -> impl Iterator<Item = WorkerView> {
        let view =
            |(slot, worker): (Slot, &Worker)| WorkerView::new(slot, worker, self.ledger.load(slot));
        self.fleet.iter().map(view)
    }

    fn seen(&self) -> Seen<'_> {
        Seen { fleet: &self.fleet, ledger: &self.ledger, predictor: &self.predictor }
    }

    fn scene<'a>(
        &'a self,
        ask: &'a Ask<'a>,
        slate: &'a Slate,
        draws: Draws,
        now: Time,
    ) -> Scene<'a> {
        let session = ask.session.filter(|_| self.settings.session_affinity);
        Scene {
            settings: &self.settings,
            fleet: &self.fleet,
            predictor: &self.predictor,
            ask,
            candidates: slate.all(),
            session: session.and_then(|session| self.sessions.last(session)),
            draws,
            now,
        }
    }

    fn reserve(&mut self, plan: &Plan, ask: &Ask<'_>, now: Time) -> Decision {
        let decode = plan.decode.slot;
        let prefill = plan.prefill.map(|prefill| prefill.slot);
        let entry = Entry {
            prefill,
            decode,
            prefilled: plan.prefilled,
            prefill_tokens: plan.prefill_tokens(),
            kv: kv_demand(decode, plan.decode.block_size, &self.settings, ask),
        };
        let booking = self.ledger.book(&entry, now);
        let (ttft_seconds, itl_seconds) = self.follow(booking, plan, ask, now);
        for slot in prefill.filter(|_| !plan.prefilled).into_iter().chain([decode]) {
            if let Some(worker) = self.fleet.get_mut(slot) {
                worker.health = worker.health.sent(booking, now);
                if prefill.is_some() {
                    worker.handoffs = worker.handoffs.sent(booking, now);
                }
            }
        }
        if let Some(session) = ask.session.filter(|_| self.settings.session_affinity) {
            self.sessions.record(session, Turn { decode, path: plan.path() });
        }
        Decision {
            booking,
            path: plan.path(),
            prefill,
            decode,
            prefilled: plan.prefilled,
            why: plan.why,
            policy: self.settings.policy.rule.as_str(),
            isl_tokens: ask.isl_tokens,
            effective_isl_tokens: plan.u,
            prefill_tokens: plan.prefill_tokens(),
            vetoes: plan.vetoes,
            fallbacks: plan.fallbacks,
            shadows: plan.shadows,
            waited: ask.waited,
            ttft_seconds,
            itl_seconds,
            scores: plan.scores,
        }
    }

    /// Lets the cost model follow a plan; the TTFT and ITL that it predicts for it.
    fn follow(&mut self, booking: BookingId, plan: &Plan, ask: &Ask<'_>, now: Time) -> (f64, f64) {
        let forecast = self.predictor.forecast(plan, ask, now);
        let computes = plan.prefill.unwrap_or(plan.decode);
        let booked = Booked {
            prefill: plan.prefill.map(|prefill| prefill.slot),
            decode: plan.decode.slot,
            prefilled: plan.prefilled,
            work: self.predictor.work(computes.slot, computes.u, ask.isl_tokens),
            moved: plan.decode.moved,
            answers_when_fetched: plan.prefill.is_some_and(|prefill| {
                let worker = self.fleet.get(prefill.slot);
                worker.is_some_and(|worker| worker.spec.answers_when_fetched)
            }),
            sequences: ask.sequences,
            isl: ask.isl_tokens,
            slo: ask.slo.or(self.settings.slo),
            ttft: forecast.0,
            streams: ask.streams,
        };
        self.predictor.book(booking, &booked, now);
        forecast
    }
}
