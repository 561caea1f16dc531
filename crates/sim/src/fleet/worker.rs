//! One worker: an engine model that may be dead.

use pointsman_brain::{Reading, Share};

use super::WorkerPlan;
use crate::engine::{Engine, Job, JobId, Load, Nanos, Outbox, Spec};

pub(super) struct Worker {
    plan: WorkerPlan,
    /// None while its process is dead.
    engine: Option<Engine>,
    /// Lives so far, so that each has other noise.
    lives: u64,
    /// A job came, left, or gave blocks back since the engine was last brought to the present.
    touched: bool,
}

/// Why a worker did not take a job.
pub(super) enum NotTaken {
    Dead,
    /// It can never run there.
    Refused,
}

impl Worker {
    pub(super) fn new(plan: WorkerPlan) -> Worker {
        let engine = Spec { every_token: false, ..plan.engine };
        let plan = WorkerPlan { engine, ..plan };
        Worker { plan, engine: Some(Engine::new(engine)), lives: 1, touched: false }
    }

    pub(super) fn block_size(&self) -> u32 {
        self.plan.engine.block_size
    }

    pub(super) fn submit(&mut self, job: Job, now: Nanos) -> Result<(), NotTaken> {
        let engine = self.engine.as_mut().ok_or(NotTaken::Dead)?;
        engine.cut_run(now);
        self.touched = true;
        engine.submit(job).map_err(|_| NotTaken::Refused)
    }

    pub(super) fn abort(&mut self, job: JobId, now: Nanos) {
        if let Some(engine) = self.engine.as_mut().filter(|engine| engine.has(job)) {
            engine.cut_run(now);
            self.touched |= engine.abort(job);
        }
    }

    /// Tells job, tokens so far, and when the last of them came, of each sequence that streams.
    pub(super) fn progress(&self, now: Nanos, tell: impl FnMut(JobId, u32, Nanos)) {
        if let Some(engine) = &self.engine {
            engine.progress(now, tell);
        }
    }

    /// Whether something is to happen by then.
    pub(super) fn is_due(&self, now: Nanos) -> bool {
        self.touched || self.wakeup().is_some_and(|at| at <= now)
    }

    /// Keeps a pin while its decode engine pulls.
    pub(super) fn hold(&mut self, job: JobId) -> bool {
        self.engine.as_mut().is_some_and(|engine| engine.set_lease(job, Nanos::MAX))
    }

    pub(super) fn wakeup(&self) -> Option<Nanos> {
        self.engine.as_ref()?.wakeup()
    }

    pub(super) fn advance(&mut self, now: Nanos, out: &mut Outbox) {
        self.touched = false;
        if let Some(engine) = &mut self.engine {
            engine.advance(now, out);
        }
    }

    pub(super) fn kill(&mut self) -> bool {
        self.engine.take().is_some()
    }

    pub(super) fn revive(&mut self, now: Nanos) {
        if self.engine.is_none() {
            let seed = self.plan.engine.seed.wrapping_add(self.lives);
            let mut engine = Engine::new(Spec { seed, ..self.plan.engine });
            engine.advance(now, &mut Outbox::default());
            self.engine = Some(engine);
            self.lives += 1;
        }
    }

    pub(super) fn reading(&self) -> Option<Reading> {
        let load = self.engine.as_ref()?.load();
        let usage = f64::from(load.used_blocks) / f64::from(load.capacity_blocks);
        Some(Reading {
            kv_usage: Share::clamped(usage),
            capacity_blocks: Some(u64::from(load.capacity_blocks)),
            running: Some(load.running),
            waiting: Some(load.waiting + load.pulling),
            ..Reading::default()
        })
    }

    pub(super) fn load(&self) -> Load {
        self.engine.as_ref().map(Engine::load).unwrap_or_default()
    }

    pub(super) fn truth(&self, names: &[u64]) -> Option<u32> {
        match &self.engine {
            None => Some(0),
            Some(engine) => (!engine.has_untold_events()).then(|| engine.cached_prefix(names)),
        }
    }

    pub(super) fn check(&self) -> Result<(), String> {
        self.engine.as_ref().map_or(Ok(()), Engine::check)
    }
}
