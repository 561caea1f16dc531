//! The decision record: everything that went into one decision, for people and for the API.
//! Built on request only; a decision itself carries no list.

use serde::Serialize;

use crate::candidates::{left_out, measure};
use crate::fleet::{Path, Reading, Role, Slot, Worker};
use crate::gate::Pool;
use crate::guards::Vetoes;
use crate::health::Condition;
use crate::hold;
use crate::ledger::{Ledger, Load};
use crate::plan::{Plan, Scene};
use crate::policy::predicted;
use crate::policy::{Score, Scores};
use crate::predict::Outlook;
use crate::sessions::Turn;
use crate::signals::Fallbacks;
use crate::slo::Slo;
use crate::time::Time;

/// Everything that went into one decision.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Record {
    /// The path.
    pub path: Path,
    /// The prefill worker of a remote path.
    pub prefill: Option<Slot>,
    /// The worker that streams tokens.
    pub decode: Slot,
    /// The policy in force.
    pub policy: &'static str,
    /// Short label of the reason.
    pub reason: &'static str,
    /// The reason in words, with its numbers.
    pub because: String,
    /// Prompt tokens.
    pub isl_tokens: u32,
    /// What the worker that the policy looked at would have to compute.
    pub effective_isl_tokens: u32,
    /// The ISL was estimated from bytes.
    pub estimated: bool,
    /// Not all of the prompt could be hashed.
    pub partial: bool,
    /// Guards that vetoed the local path, or would have if they had not been waived.
    pub guards: Vetoes,
    /// Fallbacks that were used.
    pub fallbacks: Fallbacks,
    /// What the shadow policies would have done.
    pub shadows: Vec<ShadowRecord>,
    /// What the session's last turn did.
    pub session: Option<Turn>,
    /// Predicted time to first token, in seconds.
    pub ttft_seconds: f64,
    /// Predicted mean time between tokens, in seconds.
    pub itl_seconds: f64,
    /// What the best of each kind is predicted to be like, where a policy asks for it.
    pub scores: Scores,
    /// What the request is to be served within.
    pub slo: Slo,
    /// It is late for that whatever is done, and would wait for a worker that is about to run dry.
    pub waits: bool,
    /// Every worker, and what it would cost.
    pub candidates: Vec<CandidateRecord>,
}

/// What one shadow policy would have done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct ShadowRecord {
    /// The policy.
    pub policy: &'static str,
    /// Its path.
    pub path: Path,
}

/// One worker as a candidate.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CandidateRecord {
    /// The worker.
    pub slot: Slot,
    /// What it is for.
    pub role: Role,
    /// Whether it can prefill locally.
    pub local_prefill: bool,
    /// Why it was not considered, if it was not.
    pub left_out: Option<LeftOut>,
    /// Prompt tokens whose KV it holds, tier-weighted.
    pub overlap_tokens: u32,
    /// What it would have to compute.
    pub effective_isl_tokens: u32,
    /// Ordinary cost; lower wins.
    pub cost: f64,
    /// What its part would take, in seconds.
    pub outlook: Outlook,
    /// What the local path on it is predicted to be like, where it can take it.
    pub predicted_local: Option<Score>,
    /// Guards that veto the local path on it.
    pub guards: Vetoes,
    /// What is booked on it.
    pub load: Load,
}

/// Why a worker was not considered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum LeftOut {
    /// It is not healthy.
    Unhealthy,
    /// It takes no further requests.
    Draining,
    /// It cannot serve this request (LoRA residency, labels).
    NotEligible,
    /// It failed this request before.
    Failed,
    /// The length gate wants another kind of worker.
    Gate,
}

/// One worker, for gauges and status pages.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct WorkerView {
    /// The worker.
    pub slot: Slot,
    /// What it is for.
    pub role: Role,
    /// Whether it can prefill locally.
    pub local_prefill: bool,
    /// Its health.
    pub condition: Condition,
    /// Whether it is being drained.
    pub draining: bool,
    /// What is booked on it.
    pub load: Load,
    /// KV blocks it has, where known.
    pub capacity_blocks: Option<u64>,
    /// What its engine last reported.
    pub reading: Reading,
    /// When that was.
    #[serde(skip)]
    pub read_at: Option<Time>,
    /// Until when it counts as its load.
    #[serde(skip)]
    pub read_until: Option<Time>,
}

impl Record {
    pub(crate) fn new(scene: &Scene<'_>, plan: &Plan, ledger: &Ledger) -> Record {
        let Scene { settings, ask, .. } = *scene;
        let shadows = settings.shadow.iter().zip(plan.shadows.iter());
        let pool = scene.gate().pool;
        let (ttft_seconds, itl_seconds) = scene.predictor.forecast(plan, ask, scene.now);
        let candidates = scene.fleet.iter().map(|(slot, worker)| {
            CandidateRecord::new(scene, pool, slot, worker, ledger.load(slot))
        });
        Record {
            path: plan.path(),
            prefill: plan.prefill.map(|prefill| prefill.slot),
            decode: plan.decode.slot,
            policy: settings.policy.rule.as_str(),
            reason: plan.why.as_str(),
            because: plan.why.to_string(),
            isl_tokens: ask.isl_tokens,
            effective_isl_tokens: plan.u,
            estimated: ask.estimated,
            partial: ask.partial,
            guards: plan.vetoes,
            fallbacks: plan.fallbacks,
            shadows: shadows
                .map(|(policy, path)| ShadowRecord { policy: policy.rule.as_str(), path })
                .collect(),
            session: scene.session,
            ttft_seconds,
            itl_seconds,
            scores: plan.scores,
            slo: scene.slo(),
            waits: hold::wait(scene, plan).is_some(),
            candidates: candidates.collect(),
        }
    }
}

impl CandidateRecord {
    fn new(
        scene: &Scene<'_>,
        pool: Pool,
        slot: Slot,
        worker: &Worker,
        load: Load,
    ) -> CandidateRecord {
        let mut candidate = measure(slot, worker, load, scene.settings, scene.ask);
        candidate.outlook = scene.predictor.outlook_for(&candidate, scene.ask, scene.now);
        let gated_out = !pool.has(candidate.role);
        CandidateRecord {
            slot,
            role: candidate.role,
            local_prefill: candidate.local,
            left_out: left_out(slot, worker, scene.ask, |health| health.admits(scene.now))
                .or(gated_out.then_some(LeftOut::Gate)),
            overlap_tokens: candidate.overlap,
            effective_isl_tokens: candidate.u,
            cost: candidate.cost,
            outlook: candidate.outlook,
            predicted_local: candidate.local.then(|| predicted::local_score(scene, &candidate)),
            guards: scene.check(&candidate, scene.settings.policy.rule).vetoes,
            load,
        }
    }
}

impl WorkerView {
    /// Whether what the engine last reported counts as its load still.
    pub fn reading_counts(&self, now: Time) -> bool {
        self.read_until.is_some_and(|until| now <= until)
    }

    pub(crate) fn new(slot: Slot, worker: &Worker, load: Load) -> WorkerView {
        WorkerView {
            slot,
            role: worker.spec.role,
            local_prefill: worker.spec.can_prefill_locally(),
            condition: worker.health.condition(),
            draining: worker.draining,
            load,
            capacity_blocks: worker.capacity_blocks(),
            reading: worker.reading,
            read_at: worker.read.map(|(at, _)| at),
            read_until: worker.read.map(|(_, until)| until),
        }
    }
}
