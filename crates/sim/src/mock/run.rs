//! Runs a plan: claims the KV of a decode leg, submits the sequences, and follows what comes out.
//!
//! Dropping a run aborts what is unfinished and releases what it claimed: a client that leaves
//! frees everything.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use futures_util::future::select_all;

use super::app::App;
use super::config::{Dialect, LoadFailure, OnViolation};
use super::errors::Failure;
use super::faults::{Action, Leg};
use super::handoff::Verdict;
use super::ledger::Violation;
use super::plan::Plan;
use super::rank::{Tick, Ticks};
use super::sglang;
use super::side::{Claim, Remote, claim, meet};
use crate::engine::{Job, JobId};

/// The next token of one sequence.
pub(super) struct Step {
    pub(super) sequence: usize,
    /// Its place in the sequence's answer.
    pub(super) token: usize,
}

pub(super) struct Run {
    pub(super) app: Arc<App>,
    pub(super) plan: Plan,
    ticks: Option<Ticks>,
    /// Of each prompt that is on its way.
    claims: Vec<Claim>,
    /// Job of each sequence.
    jobs: Vec<JobId>,
    /// Block names of each sequence.
    names: Vec<Arc<crate::engine::Content>>,
    unfinished: usize,
    unpulled: usize,
    slow: Duration,
    expire: bool,
    /// SGLang's prefill leg: its tokens are told when the KV has been handed over.
    hands_over: bool,
    held: VecDeque<Step>,
    _in_flight: InFlight,
}

/// Counts a request while it lives.
struct InFlight(Arc<App>);

impl Drop for InFlight {
    fn drop(&mut self) {
        self.0.in_flight.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Run {
    pub(super) fn new(app: &Arc<App>, plan: Plan, fault: Option<&Action>) -> Run {
        app.ledger.leg(plan.leg);
        app.in_flight.fetch_add(1, Ordering::Relaxed);
        let slow = match fault {
            Some(Action::SlowTokens { delay_ms }) => Duration::from_millis(*delay_ms),
            _ => Duration::ZERO,
        };
        Run {
            expire: matches!(fault, Some(Action::ExpiredKv)),
            hands_over: app.config.dialect == Dialect::Sglang && plan.leg == Leg::Prefill,
            held: VecDeque::new(),
            app: app.clone(),
            plan,
            ticks: None,
            claims: Vec::new(),
            jobs: Vec::new(),
            names: Vec::new(),
            unfinished: 0,
            unpulled: 0,
            slow,
            _in_flight: InFlight(app.clone()),
        }
    }

    /// Claims what is needed and submits the sequences.
    pub(super) async fn start(&mut self) -> Result<(), Failure> {
        let mut leg = self.plan.leg;
        if leg == Leg::Decode && !self.claim_prompts().await? {
            leg = Leg::Local;
        }
        self.submit(leg)
    }

    /// The next token; none when all sequences are finished.
    pub(super) async fn next(&mut self) -> Result<Option<Step>, Failure> {
        while self.unfinished > 0 {
            let (sequence, tick) = self.tick().await?;
            let sequence = sequence as usize;
            match tick {
                Tick::Started(cached_tokens) => self.note_start(sequence, cached_tokens),
                Tick::Pulled => {
                    self.unpulled -= 1;
                    if self.unpulled == 0 {
                        self.claims.clear();
                    }
                }
                Tick::Token => {
                    if !self.slow.is_zero() {
                        tokio::time::sleep(self.slow).await;
                    }
                    let token = self.plan.sequences[sequence].done;
                    self.plan.sequences[sequence].done += 1;
                    let step = Step { sequence, token };
                    if !self.hands_over {
                        return Ok(Some(step));
                    }
                    self.held.push_back(step);
                }
                Tick::Finished(pinned) => {
                    self.unfinished -= 1;
                    if let Some(blocks) = pinned {
                        self.note_pin(sequence, blocks);
                    }
                    if self.hands_over && self.unfinished == 0 {
                        self.hand_over().await?;
                    }
                }
            }
        }
        Ok(self.held.pop_front())
    }

    /// Waits until all prompts have been fetched.
    async fn hand_over(&self) -> Result<(), Failure> {
        for (sequence, job) in self.jobs.iter().enumerate() {
            let name = self.plan.pin_name(sequence, *job);
            if !self.app.registry.handed_over(&name).await {
                return Err(Failure::bootstrap("prefill"));
            }
        }
        Ok(())
    }

    async fn tick(&mut self) -> Result<(u32, Tick), Failure> {
        loop {
            let Some(ticks) = &mut self.ticks else { return Err(Failure::engine_dead()) };
            let lost = async {
                if self.claims.is_empty() {
                    std::future::pending::<()>().await;
                }
                let lost = self.claims.iter_mut().map(|claim| Box::pin(claim.lost()));
                let _any = select_all(lost).await;
            };
            tokio::select! {
                biased;
                tick = ticks.recv() => return tick.ok_or_else(Failure::engine_dead),
                () = lost => {}
            }
            // The prefill engine died while its KV was on the way.
            self.claims.clear();
            self.abort();
            self.fail_load()?;
            self.submit(Leg::Local)?;
        }
    }

    /// Whether the prompts' KV will be pulled; if not they are computed here.
    async fn claim_prompts(&mut self) -> Result<bool, Failure> {
        let prompts = self.plan.prompts.len();
        let rooms = self.plan.request.kv.bootstrap.clone();
        if prompts > 1 && rooms.is_none() {
            return self.violated(Violation::Batch).map(|()| false);
        }
        let Some(remote) = self.plan.remote.clone() else {
            return self.violated(Violation::Incomplete).map(|()| false);
        };
        for prompt in 0..prompts {
            let mut remote = remote.clone();
            if let Some(rooms) = &rooms {
                remote.request = rooms.room(prompt);
            }
            if !self.claim_prompt(remote, prompt).await? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    async fn claim_prompt(&mut self, mut remote: Remote, prompt: usize) -> Result<bool, Failure> {
        let (tokens, digest) = self.plan.identity(prompt);
        let app = self.app.clone();
        if self.plan.request.kv.transfer_id.is_none() {
            app.peers.amend(&mut remote);
        } else if !app.peers.look_up(&mut remote).await {
            return self.fail_load().map(|()| false);
        }
        if self.plan.request.kv.bootstrap.is_some() && remote.host == sglang::FAKE_HOST {
            return self.violated(Violation::Unknown).map(|()| false);
        }
        let kv = &self.plan.request.kv;
        let claimed = if kv.bootstrap.is_some() || kv.transfer_id.is_some() {
            meet(remote.clone(), tokens, digest, app.config.lease, &app.tasks, &app.stop).await
        } else {
            claim(remote.clone(), tokens, digest, &app.tasks, &app.stop).await
        };
        let Ok((verdict, claim)) = claimed else { return self.fail_load().map(|()| false) };
        self.claims.push(claim);
        if verdict != Verdict::OtherEngine {
            self.app.peers.met(remote);
        }
        let violation = match verdict {
            Verdict::Granted => return Ok(true),
            Verdict::OtherEngine | Verdict::NoSuchBlock => {
                self.claims.clear();
                return self.fail_load().map(|()| false);
            }
            Verdict::Unknown => Violation::Unknown,
            Verdict::Used => Violation::UsedTwice,
            Verdict::Expired => Violation::Expired,
            Verdict::OtherPrompt { tokens: prefilled } if tokens > prefilled => {
                Violation::LongerPrompt
            }
            Verdict::OtherPrompt { .. } => Violation::OtherPrompt,
        };
        self.violated(violation)?;
        Ok(true)
    }

    fn violated(&mut self, violation: Violation) -> Result<(), Failure> {
        self.app.ledger.violation(violation, &self.plan.id);
        let dies = match self.app.config.on_violation {
            OnViolation::Refuse => {
                let message = format!("kv_transfer_params: {}", violation.name());
                return Err(Failure::bad(Some("kv_transfer_params"), message));
            }
            OnViolation::Die => true,
            OnViolation::AsReal => violation.kills(),
            OnViolation::Corrupt => false,
        };
        if dies {
            self.app.die();
            return Err(Failure::engine_dead());
        }
        for sequence in &mut self.plan.sequences {
            sequence.answer.garble(&self.app.words);
        }
        for job in self.plan.jobs(&self.app, Leg::Local) {
            let prompt_blocks = job.prompt_tokens / self.app.config.block_size;
            self.app.poison(&job.content.names[..prompt_blocks as usize]);
        }
        Ok(())
    }

    /// The KV cannot be loaded: an error, or nothing when it is recomputed.
    fn fail_load(&self) -> Result<(), Failure> {
        self.app.ledger.load_failure();
        match self.app.config.load_failure {
            LoadFailure::Fail if self.app.config.dialect == Dialect::Sglang => {
                Err(Failure::bootstrap("decode"))
            }
            LoadFailure::Fail => Err(Failure::internal()),
            LoadFailure::Recompute => Ok(()),
        }
    }

    fn submit(&mut self, leg: Leg) -> Result<(), Failure> {
        let jobs: Vec<Job> = self.plan.jobs(&self.app, leg);
        if leg == Leg::Decode {
            for job in &jobs {
                let prompt = (job.prompt_tokens / self.app.config.block_size) as usize;
                self.app.received(self.plan.rank, &job.content.names[..prompt]);
            }
        }
        self.jobs = jobs.iter().map(|job| job.id).collect();
        self.names = jobs.iter().map(|job| job.content.clone()).collect();
        self.unfinished = jobs.len();
        self.unpulled = jobs.len();
        let ticks = self.app.ranks[self.plan.rank].submit(jobs);
        self.ticks = Some(ticks.map_err(|refused| {
            self.unfinished = 0;
            Failure::bad(None, refused.to_string())
        })?);
        Ok(())
    }

    fn note_start(&mut self, sequence: usize, cached_tokens: u32) {
        let blocks = (cached_tokens / self.app.config.block_size) as usize;
        let poisoned = self.app.is_poisoned(&self.names[sequence].names[..blocks]);
        // A decode engine tells what was cached where the prompt was computed, if it was told.
        let remote = self.plan.request.kv.remote_prefill_cached_tokens;
        let told = remote.filter(|_| self.plan.leg == Leg::Decode);
        let sequence = &mut self.plan.sequences[sequence];
        sequence.cached_tokens = told.unwrap_or(cached_tokens);
        if poisoned {
            sequence.answer.garble(&self.app.words);
        }
    }

    fn note_pin(&mut self, sequence: usize, blocks: Box<[u32]>) {
        let job = self.jobs[sequence];
        let name = self.plan.pin_name(sequence, job);
        let identity = self.plan.identity(self.plan.sequences[sequence].prompt);
        self.app.registry.pinned(name.clone(), self.plan.rank, job, identity);
        if self.expire {
            self.app.registry.expire_now(job);
        }
        self.plan.sequences[sequence].pinned = Some((name, blocks));
    }

    /// Ends the sequences that have not finished; what is pinned stays.
    fn abort(&mut self) {
        if self.unfinished > 0 {
            let of = |at: &usize| self.plan.sequences[*at].pinned.is_none();
            let jobs: Vec<JobId> =
                (0..self.jobs.len()).filter(of).map(|at| self.jobs[at]).collect();
            self.app.ranks[self.plan.rank].abort(&jobs);
        }
        self.unfinished = 0;
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        self.abort();
        if self.hands_over {
            // Nobody listens any more: what was kept for the other leg goes.
            for job in &self.jobs {
                self.app.registry.give_up(*job);
            }
        }
    }
}
