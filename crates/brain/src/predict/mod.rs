//! The cost model of one group: how long each way to serve a request will take, learned from how
//! long earlier ones took. It follows every booking, whatever policy decides, so that a policy that
//! asks it starts warm. It decides nothing; measurements that make no sense are not looked at.

mod desk;
mod filter;
mod flights;
mod learned;
mod physics;
mod running;
mod status;
mod told;

pub use learned::{Learned, NotRestored};
pub use status::{Calibration, Constant, PathError, WorkerCalibration};

pub(crate) use physics::{Batch, Prefill};
pub(crate) use running::Setting;

use serde::Serialize;

use crate::ask::Ask;
use crate::candidates::Candidate;
use crate::fleet::{Path, Reading, Role, Slot};
use crate::plan::Plan;
use crate::profile::Profile;
use crate::slo::Slo;
use crate::time::Time;
use desk::{DecodeSample, Desk, PrefillSample};
use flights::Flights;
use learned::Knowledge;
use physics::Constants;

/// The chunk of a worker that does not say its own; what vLLM serves with unless told otherwise.
pub(crate) const DEFAULT_CHUNK_TOKENS: u32 = 2048;

/// Weight of one measurement in a worker's bias, and in the figures of prediction errors.
const BIAS_WEIGHT: f64 = 0.05;

/// How far one measurement may put a worker from its pool.
const BIAS_LOWEST: f64 = 0.2;
const BIAS_HIGHEST: f64 = 5.0;

/// What is known of a group's workers, and of the requests under way.
#[derive(Debug)]
pub(crate) struct Predictor {
    knowledge: Knowledge,
    desks: Vec<Option<Desk>>,
    flights: Flights,
}

/// How much of what a decode worker has to compute itself is still before a request when its KV can
/// come: some has been computed meanwhile, and some has come. Found by replays, with and without overload.
const LEFT_AT_JOIN: f64 = 0.5;

/// What one worker's part in serving a request would take. Seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Outlook {
    /// `W`: what it has to compute before.
    pub wait: f64,
    /// `T_pf`: computing what it lacks.
    pub compute: f64,
    /// Decoding beside that, and the step that must end first.
    pub beside: f64,
    /// `t_dec` once the request runs there.
    pub step: f64,
    /// The same without it.
    pub others: f64,
    /// `X`: moving what it lacks, or all of the prompt if it fetches no less.
    pub transfer: f64,
}

impl Outlook {
    /// TTFT of the local path on this worker.
    pub fn local_ttft(&self) -> f64 {
        self.wait + self.compute + self.beside
    }

    /// Until a prefill worker has computed the prompt.
    pub fn computed(&self) -> f64 {
        self.wait + self.compute
    }

    /// From there to the first token on this worker. A leg that brings its KV stands in the engine's
    /// line behind what is to be computed there.
    pub fn joined(&self) -> f64 {
        LEFT_AT_JOIN * self.wait + self.transfer + self.step
    }
}

/// A plan, as the cost model follows it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Booked {
    pub(crate) prefill: Option<Slot>,
    pub(crate) decode: Slot,
    /// The prompt was computed in an earlier try.
    pub(crate) prefilled: bool,
    /// What the computing worker has to do.
    pub(crate) work: Prefill,
    /// Tokens whose KV is to be moved.
    pub(crate) moved: u32,
    /// The prefill worker answers when they have been moved.
    pub(crate) answers_when_fetched: bool,
    pub(crate) sequences: u32,
    pub(crate) isl: u32,
    pub(crate) slo: Slo,
    /// Predicted TTFT in seconds.
    pub(crate) ttft: f64,
    /// Whether a first token will be seen.
    pub(crate) streams: bool,
}

/// A first token: what was predicted, and what it was.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FirstToken {
    /// The path.
    pub path: Path,
    /// Predicted TTFT in seconds.
    pub predicted: f64,
    /// TTFT in seconds, from the decision on.
    pub actual: f64,
}

impl FirstToken {
    /// `predicted / actual`: 1 is right, above was too careful.
    pub fn ratio(&self) -> f64 {
        self.predicted / self.actual.max(1e-9)
    }

    /// `|predicted / actual - 1|`
    pub fn error(&self) -> f64 {
        (self.ratio() - 1.0).abs()
    }
}

impl Predictor {
    pub(crate) fn new(profile: Profile) -> Predictor {
        Predictor {
            knowledge: Knowledge::new(profile),
            desks: Vec::new(),
            flights: Flights::default(),
        }
    }

    /// A worker is there, as it was or afresh.
    pub(crate) fn place(&mut self, slot: Slot, role: Role, chunk: Option<u32>) {
        if self.desks.len() <= slot.index() {
            self.desks.resize(slot.index() + 1, None);
        }
        let chunk = chunk.unwrap_or(DEFAULT_CHUNK_TOKENS).max(1);
        match self.desks.get_mut(slot.index()) {
            Some(Some(desk)) => (desk.role, desk.chunk) = (role, chunk),
            Some(empty) => *empty = Some(Desk::new(role, chunk)),
            None => {}
        }
    }

    /// A worker is gone, and with it whatever it had.
    pub(crate) fn forget(&mut self, slot: Slot) {
        if let Some(desk) = self.desks.get_mut(slot.index()) {
            *desk = None;
        }
        self.flights.detach(slot);
    }

    fn desk(&self, slot: Slot) -> Option<&Desk> {
        self.desks.get(slot.index())?.as_ref()
    }

    /// The constants of a worker: those of its pool, times what it is slower or faster than that.
    fn constants(&self, desk: &Desk) -> Constants {
        let pool = self.knowledge.of(desk.role);
        pool.scaled([desk.prefill_bias.value; 3], [desk.decode_bias.value; 3])
    }

    /// What a candidate's part would take.
    pub(crate) fn outlook_for(&self, candidate: &Candidate, ask: &Ask<'_>, now: Time) -> Outlook {
        let Some(desk) = self.desk(candidate.slot) else { return Outlook::default() };
        let by = self.constants(desk);
        let work = Prefill::new(candidate.u, ask.isl_tokens, desk.chunk);
        let mine = Batch::new(ask.sequences, ask.isl_tokens);
        let booked = desk.batch.plus(desk.coming);
        let running = if desk.batch.sequences > 0.0 { desk.batch.step(&by) / 2.0 } else { 0.0 };
        Outlook {
            wait: desk.wait(&by, now),
            compute: work.seconds(&by),
            beside: (work.steps + desk.waiting.steps) * desk.batch.beside(&by) + running,
            step: booked.plus(mine).step(&by),
            others: booked.step(&by),
            transfer: self.knowledge.link().seconds(candidate.moved),
        }
    }

    /// TTFT and ITL of a plan, in seconds.
    pub(crate) fn forecast(&self, plan: &Plan, ask: &Ask<'_>, now: Time) -> (f64, f64) {
        let outlook = |candidate: &Candidate| self.outlook_for(candidate, ask, now);
        let decode = outlook(&plan.decode);
        match &plan.prefill {
            None => (decode.local_ttft(), decode.step),
            Some(prefill) => {
                let computed = if plan.prefilled { 0.0 } else { outlook(prefill).computed() };
                (computed + decode.joined(), self.remote_itl(&decode))
            }
        }
    }

    /// ITL on a worker that was handed the KV: what it still computes itself comes in between once.
    pub(crate) fn remote_itl(&self, decode: &Outlook) -> f64 {
        decode.step + decode.wait / self.osl().max(1.0)
    }

    /// What the worker has to compute, for [`Booked::work`].
    pub(crate) fn work(&self, slot: Slot, u: u32, isl: u32) -> Prefill {
        let chunk = self.desk(slot).map_or(DEFAULT_CHUNK_TOKENS, |desk| desk.chunk);
        Prefill::new(u, isl, chunk)
    }

    /// When a worker will have computed a prompt that it is given now.
    fn computed_by(&self, slot: Slot, work: Prefill, now: Time) -> Time {
        let seconds = self.desk(slot).map_or(0.0, |desk| {
            let by = self.constants(desk);
            desk.wait(&by, now) + work.seconds(&by)
        });
        now.after(std::time::Duration::try_from_secs_f64(seconds).unwrap_or_default())
    }

    /// What computing for `delay` seconds does to the SLOs of those that stream from a worker.
    pub(crate) fn harm_beyond_least(&self, slot: Slot, delay: f64, setting: &Setting) -> f64 {
        self.desk(slot).map_or(0.0, |desk| desk.running.harm_beyond_least(delay, setting))
    }

    /// What it costs them beside that; quickly told.
    pub(crate) fn harm_at_least(&self, slot: Slot, delay: f64, setting: &Setting) -> f64 {
        self.desk(slot).map_or(0.0, |desk| desk.running.harm_at_least(delay, setting))
    }

    /// A step of prompts alone that is as full as it can be, in seconds.
    pub(crate) fn full_step(&self, slot: Slot) -> f64 {
        self.desk(slot).map_or(0.0, |desk| {
            Prefill::new(desk.chunk, desk.chunk, desk.chunk).seconds(&self.constants(desk))
        })
    }

    /// `t_dec` of what streams from a worker and is booked on it.
    pub(crate) fn step(&self, slot: Slot) -> f64 {
        self.desk(slot).map_or(0.0, |desk| desk.batch.plus(desk.coming).step(&self.constants(desk)))
    }

    /// Tokens that a sequence is expected to have.
    pub(crate) fn osl(&self) -> f64 {
        self.knowledge.osl()
    }

    /// Whether too little was measured to rely on, where remote paths are possible or not.
    pub(crate) fn is_cold(&self, remote: bool) -> bool {
        self.knowledge.is_cold(remote)
    }

    /// Takes note of what an engine says of itself. It corrects how a worker differs from its pool;
    /// the pool's constants come from what the router itself measures.
    pub(crate) fn read(&mut self, slot: Slot, reading: &Reading, now: Time) {
        let Some(Some(desk)) = self.desks.get_mut(slot.index()) else { return };
        let (prefill, decode) = desk.read(reading, now);
        let pool = self.knowledge.of(desk.role);
        // Where decoding goes on beside, an engine does not say what a prompt alone took.
        if let Some(sample) = prefill.filter(|_| desk.role == Role::Prefill) {
            let ratio = sample.seconds / sample.work.seconds(pool);
            desk.own_prefills += u64::from(correct(&mut desk.prefill_bias, ratio));
        }
        if let Some(sample) = decode {
            let ratio = sample.seconds / sample.batch.step(pool);
            desk.own_decodes += u64::from(correct(&mut desk.decode_bias, ratio));
        }
    }

    fn learn_prefill(&mut self, slot: Slot, sample: PrefillSample) {
        let Some(Some(desk)) = self.desks.get_mut(slot.index()) else { return };
        let by = self.knowledge.of(desk.role).scaled([1.0; 3], [desk.decode_bias.value; 3]);
        let step = if sample.mid_step { sample.beside.step(&by) / 2.0 } else { 0.0 };
        let seconds = sample.seconds - sample.work.steps * sample.beside.beside(&by) - step;
        let expected = sample.work.seconds(&by);
        if self.knowledge.learn_prefill(desk.role, sample.work, seconds) {
            learn_bias(&mut desk.prefill_bias, seconds / expected);
        }
    }

    fn learn_decode(&mut self, slot: Slot, sample: DecodeSample) {
        let Some(Some(desk)) = self.desks.get_mut(slot.index()) else { return };
        let expected = sample.batch.step(self.knowledge.of(desk.role));
        if self.knowledge.learn_decode(desk.role, sample.batch, sample.seconds) {
            learn_bias(&mut desk.decode_bias, sample.seconds / expected);
        }
    }

    fn learn_transfer(&mut self, slot: Slot, moved: u32, seconds: f64) {
        let Some(desk) = self.desk(slot) else { return };
        let step = desk.batch.step(&self.constants(desk));
        self.knowledge.learn_transfer(moved, seconds - step);
    }

    /// What was learned, to be kept.
    pub(crate) fn learned(&self) -> Learned {
        self.knowledge.keep()
    }

    /// Takes over what was kept.
    pub(crate) fn restore(&mut self, learned: &Learned) -> Result<(), NotRestored> {
        self.knowledge.restore(learned)
    }
}

/// By its engine's own counters a worker took `ratio` times what its pool would have; whether that is
/// believed. What is beyond all bounds is no slow worker but a broken counter.
fn correct(bias: &mut filter::Average, ratio: f64) -> bool {
    let believed = (BIAS_LOWEST..=BIAS_HIGHEST).contains(&ratio);
    if believed {
        bias.learn(ratio, BIAS_WEIGHT);
    }
    believed
}

/// A worker took `ratio` times what its pool would have.
fn learn_bias(bias: &mut filter::Average, ratio: f64) {
    if ratio.is_finite() && ratio > 0.0 {
        bias.learn(ratio.clamp(BIAS_LOWEST, BIAS_HIGHEST), BIAS_WEIGHT);
    }
}
