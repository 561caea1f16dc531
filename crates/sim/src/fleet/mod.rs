//! A whole fleet on one virtual clock: the brain and the prefix index of the server over engine
//! models, with arrivals, cancels, failures, late and lost events.
//!
//! Everything a run depends on is passed in, so equal runs are equal. [`Fleet::check`] holds after
//! every call. Arrivals, reports and policies' tuning are the caller's.

mod life;
mod sight;
mod worker;

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;

use pointsman_brain::{
    Brain, Decision, Line, Reading, Role, Settings, Slo, Slot, Tenant, Time, WorkerSpec,
};

use crate::engine::{Content, JobId, Nanos, Outbox, Spec};
use life::Live;
use sight::Sight;
use worker::Worker;

/// One worker of a fleet.
#[derive(Clone, Copy, Debug)]
pub struct WorkerPlan {
    /// What it is for.
    pub role: Role,
    /// Whether a decode worker may prefill.
    pub local_prefill: bool,
    /// Its engine.
    pub engine: Spec,
}

/// What a fleet is made of.
#[derive(Clone, Debug)]
pub struct FleetPlan {
    /// Its workers, by slot; all with the same block size.
    pub workers: Vec<WorkerPlan>,
    /// How the brain decides.
    pub settings: Settings,
    /// Time from an event to its place in the index.
    pub event_lag: Nanos,
    /// Chance that a batch of events is lost for good.
    pub event_loss: f64,
    /// Time between readings of the engines' load; 0 for none.
    pub reading_every: Nanos,
    /// Time from a reading to when it is known.
    pub reading_lag: Nanos,
    /// Seed of what is drawn here.
    pub seed: u64,
}

/// Number of a request, chosen by the caller and unique for ever.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(pub u64);

/// A request.
#[derive(Clone, Debug)]
pub struct FleetRequest {
    /// Its number.
    pub id: RequestId,
    /// Prompt tokens.
    pub prompt_tokens: u32,
    /// Tokens to generate.
    pub output_tokens: u32,
    /// Names of the blocks of prompt and output; only names are looked at.
    pub content: Arc<Content>,
    /// The session it belongs to.
    pub session: Option<u64>,
    /// What it is to be served within.
    pub slo: Slo,
    /// Its priority among those that wait in the router.
    pub priority: i8,
    /// Whose it is.
    pub tenant: Tenant,
}

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// With its last token.
    Finished,
    /// No plan was left for it, or it broke after its first token.
    Failed,
    /// The line of those that wait was full, or it waited too long.
    Refused,
    /// The client left.
    Cancelled,
}

/// What became of a request.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// Its number.
    pub id: RequestId,
    /// When it came.
    pub arrived: Nanos,
    /// When its first token came.
    pub first_token: Option<Nanos>,
    /// When it ended.
    pub ended: Nanos,
    /// Tokens that came.
    pub tokens: u32,
    /// The last decision that was taken for it.
    pub decision: Option<Decision>,
    /// How it ended.
    pub ending: Ending,
}

/// Part of a request that an engine works on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    Prefill,
    Decode,
}

/// A fleet under way.
pub struct Fleet {
    now: Nanos,
    brain: Brain,
    workers: Vec<Worker>,
    sight: Sight,
    live: HashMap<RequestId, Live>,
    /// Who a job of an engine belongs to.
    jobs: BTreeMap<(usize, JobId), (RequestId, Part)>,
    next_job: u64,
    reading_every: Nanos,
    next_reading: Nanos,
    reading_lag: Nanos,
    /// On their way, in order.
    readings: VecDeque<(Nanos, Slot, Reading)>,
    outcomes: Vec<Outcome>,
    /// Who was told to wait, by whose turn it is and by when they are refused, and when to ask for the
    /// first in line at the latest.
    held: Line<RequestId>,
    expiring: VecDeque<(Nanos, RequestId)>,
    ask_again: Option<Nanos>,
    /// Something that was booked has been released since they were asked about.
    freed: bool,
}

impl Fleet {
    /// An idle fleet at time 0.
    #[must_use]
    pub fn new(plan: FleetPlan) -> Fleet {
        let held = Line::new(plan.settings.admission.max_waiting);
        let mut brain = Brain::new(plan.settings);
        for (at, worker) in plan.workers.iter().enumerate() {
            brain.add(slot(at), spec_of(worker), Time(0));
        }
        Fleet {
            now: 0,
            brain,
            sight: Sight::new(plan.event_lag, plan.event_loss, plan.seed),
            workers: plan.workers.into_iter().map(Worker::new).collect(),
            live: HashMap::new(),
            jobs: BTreeMap::new(),
            next_job: 0,
            reading_every: plan.reading_every,
            next_reading: plan.reading_every,
            reading_lag: plan.reading_lag,
            readings: VecDeque::new(),
            outcomes: Vec::new(),
            held,
            expiring: VecDeque::new(),
            ask_again: None,
            freed: false,
        }
    }

    /// The time up to which everything has happened.
    #[must_use]
    pub fn now(&self) -> Nanos {
        self.now
    }

    /// The brain, to look at.
    #[must_use]
    pub fn brain(&self) -> &Brain {
        &self.brain
    }

    /// Requests under way.
    #[must_use]
    pub fn live(&self) -> usize {
        self.live.len()
    }

    /// What has ended since the last call.
    pub fn take_outcomes(&mut self) -> Vec<Outcome> {
        std::mem::take(&mut self.outcomes)
    }

    /// When something happens next; none when nothing is under way.
    #[must_use]
    pub fn wakeup(&self) -> Option<Nanos> {
        let engines = self.workers.iter().filter_map(Worker::wakeup);
        let reading =
            (!self.live.is_empty() && self.reading_every > 0).then_some(self.next_reading);
        let expires = self.expiring.front().map(|(at, _)| *at);
        let own =
            self.sight.wakeup().into_iter().chain(reading).chain(self.ask_again).chain(expires);
        engines.chain(own).min().map(|at| at.max(self.now))
    }

    /// Lets everything happen up to and at `until`.
    pub fn advance(&mut self, until: Nanos) {
        while let Some(at) = self.wakeup().filter(|&at| at <= until) {
            self.step(at);
        }
        self.step(until.max(self.now));
    }

    /// Lets everything happen at the time of the next thing that happens; false when idle.
    pub fn turn(&mut self) -> bool {
        let Some(at) = self.wakeup() else { return false };
        self.step(at);
        true
    }

    fn step(&mut self, at: Nanos) {
        self.now = at;
        self.sight.advance(at);
        if self.reading_every > 0 && self.next_reading <= at {
            self.read_loads();
            self.next_reading = at + self.reading_every;
        }
        while let Some((_, slot, reading)) = self.readings.pop_front_if(|(due, ..)| *due <= at) {
            self.brain.reading(slot, reading, Time(at));
        }
        // What one engine does may free another one's blocks.
        while let Some(worker) = self.workers.iter().position(|worker| worker.is_due(at)) {
            self.pump(worker);
        }
        self.refuse_expired();
        if std::mem::take(&mut self.freed) || self.ask_again.is_some_and(|due| due <= at) {
            self.release_held();
        }
    }

    /// Brings one engine to the present and follows what came out.
    fn pump(&mut self, worker: usize) {
        let mut out = Outbox::default();
        self.workers[worker].advance(self.now, &mut out);
        for batch in out.batches {
            self.sight.observe(slot(worker), batch);
        }
        for output in &out.outputs {
            self.follow(worker, output);
        }
    }

    fn read_loads(&mut self) {
        for (at, worker) in self.workers.iter().enumerate() {
            if let Some(reading) = worker.reading() {
                self.readings.push_back((self.now + self.reading_lag, slot(at), reading));
            }
        }
    }

    /// Ends a worker's process: what ran there fails, its cache is gone.
    pub fn kill(&mut self, worker: usize) {
        self.note_progress(worker);
        if !self.workers[worker].kill() {
            return;
        }
        self.sight.clear(slot(worker));
        let on_it = |(&(at, job), &of): (&(usize, JobId), &(RequestId, Part))| {
            (at == worker).then_some((job, of))
        };
        let lost: Vec<_> = self.jobs.iter().filter_map(on_it).collect();
        for (job, (request, part)) in lost {
            self.jobs.remove(&(worker, job));
            self.lost(request, part);
        }
    }

    /// Starts a killed worker again, with an empty cache.
    pub fn revive(&mut self, worker: usize) {
        self.workers[worker].revive(self.now);
    }

    /// What every worker is told to hold of these blocks, by slot, in blocks.
    pub fn overlap(&mut self, names: &[u64]) -> Vec<u32> {
        self.sight.overlap(names, self.workers.len())
    }

    /// What a worker really holds of these blocks, unless it has not told everything yet.
    #[must_use]
    pub fn truth(&self, worker: usize, names: &[u64]) -> Option<u32> {
        self.workers[worker].truth(names).filter(|_| self.sight.is_current())
    }

    /// Checks the brain's ledger, every engine, and that each books and runs what lives here.
    ///
    /// # Errors
    /// What is wrong, in words.
    pub fn check(&self) -> Result<(), String> {
        self.brain.audit()?;
        let (booked, live, held) = (self.brain.live_bookings(), self.live.len(), self.held.len());
        if booked + held != live {
            return Err(format!("{booked} bookings, {live} requests of which {held} are held"));
        }
        for (at, worker) in self.workers.iter().enumerate() {
            worker.check().map_err(|error| format!("worker {at}: {error}"))?;
        }
        for (&(worker, job), (request, _)) in &self.jobs {
            let Some(live) = self.live.get(request) else {
                return Err(format!("job {} of request {} that is gone", job.0, request.0));
            };
            if !live.runs(worker, job) {
                return Err(format!("request {} does not know its job {}", request.0, job.0));
            }
        }
        if self.live.is_empty() {
            return self.check_idle();
        }
        Ok(())
    }

    fn check_idle(&self) -> Result<(), String> {
        for view in self.brain.workers() {
            let load = view.load;
            if (load.prefill_tokens, load.kv_blocks, load.active) != (0, 0, 0) {
                return Err(format!("nothing lives, yet worker {} has {load:?}", view.slot));
            }
        }
        for (at, worker) in self.workers.iter().enumerate() {
            let load = worker.load();
            if load.running + load.waiting + load.pulling + load.pins > 0 {
                return Err(format!("nothing lives, yet engine {at} has {load:?}"));
            }
        }
        Ok(())
    }
}

fn slot(worker: usize) -> Slot {
    Slot(worker as u16)
}

fn spec_of(worker: &WorkerPlan) -> WorkerSpec {
    let one = std::num::NonZeroU32::MIN;
    WorkerSpec {
        role: worker.role,
        local_prefill: worker.local_prefill,
        block_size: std::num::NonZeroU32::new(worker.engine.block_size).unwrap_or(one),
        capacity_blocks: Some(u64::from(worker.engine.capacity_blocks)),
        max_num_batched_tokens: Some(worker.engine.max_num_batched_tokens),
        publishes_events: true,
        skips_cached_blocks: true,
        answers_when_fetched: false,
    }
}
