//! One continuous-batching engine on a virtual clock: what a vLLM worker does with its requests.
//!
//! The caller passes time in and calls [`Engine::advance`] at [`Engine::wakeup`]; nothing here
//! reads a clock or does IO. Every block is free or used by someone at any time ([`Engine::check`]).
//! Not here: HTTP, token texts, routing.

mod check;
mod pool;
mod schedule;
mod seq;
mod types;

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};

use pool::Pool;
use schedule::Step;
use seq::{Seq, Slab, Stage};
pub use types::{
    Batch, Content, DecodeTotals, Event, Job, JobId, Kind, LinkId, Load, Nanos, Outbox, Output,
    Refused, Spec, Totals,
};

use crate::rng::Rng;

/// Blocks of a handed-off prompt, kept for its decode engine.
struct Pin {
    blocks: Box<[u32]>,
    expires: Nanos,
}

/// The model of one engine (one data-parallel rank).
pub struct Engine {
    spec: Spec,
    pool: Pool,
    seqs: Slab,
    by_id: HashMap<JobId, u32>,
    /// First come, first served; a preempted sequence goes back to the front.
    waiting: VecDeque<u32>,
    /// Sequences whose KV is on its way, by arrival.
    pulling: BTreeSet<(Nanos, u32)>,
    /// Sequences whose KV has arrived and that wait for a place in the batch.
    pulled: VecDeque<u32>,
    running: Vec<u32>,
    step: Option<Step>,
    pins: BTreeMap<JobId, Pin>,
    leases: BTreeSet<(Nanos, JobId)>,
    link_free_at: HashMap<LinkId, Nanos>,
    events: Vec<Event>,
    totals: Totals,
    rng: Rng,
    /// End of the last step.
    stepped: Nanos,
    now: Nanos,
}

impl Engine {
    /// An idle engine with an empty cache.
    #[must_use]
    pub fn new(spec: Spec) -> Engine {
        Engine {
            pool: Pool::new(spec.capacity_blocks),
            seqs: Slab::default(),
            by_id: HashMap::new(),
            waiting: VecDeque::new(),
            pulling: BTreeSet::new(),
            pulled: VecDeque::new(),
            running: Vec::new(),
            step: None,
            pins: BTreeMap::new(),
            leases: BTreeSet::new(),
            link_free_at: HashMap::new(),
            events: Vec::new(),
            totals: Totals::default(),
            rng: Rng::new(spec.seed),
            stepped: 0,
            now: 0,
            spec,
        }
    }

    /// Its settings.
    #[must_use]
    pub fn spec(&self) -> &Spec {
        &self.spec
    }

    /// Queues a job that arrives at the time of the last [`Engine::advance`]; advance to that time
    /// again afterwards so that an idle engine starts on it.
    ///
    /// # Errors
    /// When it can never run here.
    pub fn submit(&mut self, job: Job) -> Result<(), Refused> {
        if job.prompt_tokens == 0 || job.output_tokens == 0 {
            return Err(Refused::Empty);
        }
        if self.by_id.contains_key(&job.id) || self.pins.contains_key(&job.id) {
            return Err(Refused::Duplicate(job.id.0));
        }
        let needed = self.blocks_for(job.prompt_tokens.saturating_add(job.output_tokens - 1));
        if needed > self.spec.capacity_blocks {
            return Err(Refused::TooLarge { needed, capacity: self.spec.capacity_blocks });
        }
        let id = job.id;
        let slot = self.seqs.insert(Seq::new(job));
        self.by_id.insert(id, slot);
        self.waiting.push_back(slot);
        Ok(())
    }

    /// Tells job, tokens so far, and when the last of them came, of each sequence that streams.
    pub fn progress(&self, now: Nanos, mut tell: impl FnMut(JobId, u32, Nanos)) {
        let over = self.step.as_ref().and_then(|step| step.over(now));
        let (steps, at) = over.unwrap_or((0, self.stepped));
        for &slot in &self.running {
            let seq = self.seqs.get(slot);
            // A step that computes a prompt is no run, so none of it is over.
            if seq.generated > 0 {
                tell(seq.job.id, seq.generated + steps, at);
            }
        }
    }

    /// Whether a job or a pin of this number is here.
    #[must_use]
    pub fn has(&self, id: JobId) -> bool {
        self.by_id.contains_key(&id) || self.pins.contains_key(&id)
    }

    /// Ends a job at once, whatever it is doing; a pin of that number is released too.
    /// False when there is neither.
    pub fn abort(&mut self, id: JobId) -> bool {
        let pinned = self.unpin(id);
        let Some(slot) = self.by_id.remove(&id) else { return pinned };
        let seq = self.seqs.remove(slot);
        match seq.stage {
            Stage::Vacant => {}
            Stage::Waiting => self.waiting.retain(|&other| other != slot),
            Stage::Pulling(ready) => {
                self.pulling.remove(&(ready, slot));
            }
            Stage::Pulled => self.pulled.retain(|&other| other != slot),
            Stage::Running => {
                self.running.retain(|&other| other != slot);
                if let Some(step) = &mut self.step {
                    step.drop_slot(slot);
                }
            }
        }
        self.pool.release(&seq.blocks);
        self.totals.aborted += 1;
        true
    }

    /// Releases the pinned blocks of a handed-off prompt: they have been pulled.
    pub fn unpin(&mut self, id: JobId) -> bool {
        let Some(pin) = self.pins.remove(&id) else { return false };
        self.leases.remove(&(pin.expires, id));
        self.pool.release(&pin.blocks);
        true
    }

    /// Sets the end of a pin's lease; `Nanos::MAX` keeps it while its decode engine is there.
    pub fn set_lease(&mut self, id: JobId, until: Nanos) -> bool {
        let Some(pin) = self.pins.get_mut(&id) else { return false };
        self.leases.remove(&(pin.expires, id));
        pin.expires = until;
        self.leases.insert((until, id));
        true
    }

    /// Forgets the prefix cache; refused (false) while any block is in use, as vLLM does.
    pub fn reset_cache(&mut self) -> bool {
        if self.pool.used() > 0 {
            return false;
        }
        self.pool.forget();
        self.events.push(Event::Cleared);
        true
    }

    /// Forgets the prefix cache without telling, as if the process had restarted under the same
    /// requests: what runs goes on, but none of its blocks will be found or announced.
    pub fn lose_cache(&mut self) {
        self.pool.forget();
        self.events.clear();
        for seq in self.seqs.iter_mut() {
            if !seq.blocks.is_empty() {
                seq.unnameable = true;
            }
        }
    }

    /// When something happens next if nothing is submitted; none when idle.
    #[must_use]
    pub fn wakeup(&self) -> Option<Nanos> {
        let step = self.step.as_ref().map(Step::end);
        let pull = self.pulling.first().map(|&(at, _)| at);
        let lease = self.leases.first().map(|&(at, _)| at).filter(|&at| at != Nanos::MAX);
        [step, pull, lease].into_iter().flatten().min()
    }

    /// Does everything that happens up to and at `now`, and starts a step if there is work.
    pub fn advance(&mut self, now: Nanos, out: &mut Outbox) {
        loop {
            while let Some(at) = self.wakeup().filter(|&at| at <= now) {
                self.now = self.now.max(at);
                self.finish_step(self.now, out);
                self.finish_pulls(self.now, out);
                self.expire_leases(self.now, out);
                self.start_step(self.now, out);
            }
            self.now = self.now.max(now);
            self.start_step(self.now, out);
            // Steps and transfers of an infinitely fast engine are over at once.
            if self.wakeup().is_none_or(|at| at > now) {
                return;
            }
        }
    }

    /// What it is doing.
    #[must_use]
    pub fn load(&self) -> Load {
        let context_tokens =
            self.running.iter().map(|&slot| u64::from(self.seqs.get(slot).computed)).sum();
        Load {
            running: self.running.len() as u32,
            waiting: (self.waiting.len() + self.pulled.len()) as u32,
            pulling: self.pulling.len() as u32,
            used_blocks: self.pool.used(),
            pinned_blocks: self.pins.values().map(|pin| pin.blocks.len() as u32).sum(),
            pins: self.pins.len() as u32,
            cached_blocks: self.pool.named_count(),
            capacity_blocks: self.spec.capacity_blocks,
            context_tokens,
        }
    }

    /// Sums since the start.
    #[must_use]
    pub fn totals(&self) -> Totals {
        self.totals
    }

    /// Prompt tokens that wait to be computed here: of each waiting sequence what is not cached.
    #[must_use]
    pub fn waiting_prefill_tokens(&self) -> u64 {
        let waiting = self.waiting.iter().map(|&slot| self.seqs.get(slot));
        let computes = waiting.filter(|seq| !matches!(seq.job.kind, Kind::Pull(_)));
        let rest = |seq: &Seq| {
            let (size, names) = (self.spec.block_size, &seq.job.content.names);
            let most = names.len().min(((seq.tokens() - 1) / size) as usize);
            u64::from(seq.tokens() - self.cached_prefix(&names[..most]) * size)
        };
        computes.map(rest).sum()
    }

    /// Whether the prompt of this job is pinned.
    #[must_use]
    pub fn is_pinned(&self, id: JobId) -> bool {
        self.pins.contains_key(&id)
    }

    /// Every cached chain that no other one continues, as block names from the root on.
    #[must_use]
    pub fn cached_chains(&self) -> Vec<Vec<u64>> {
        self.pool.chains()
    }

    /// Blocks at the start of this chain that a prompt would find cached.
    #[must_use]
    pub fn cached_prefix(&self, names: &[u64]) -> u32 {
        let mut found = Vec::new();
        self.pool.find(names, &mut found);
        found.len() as u32
    }

    /// Whether cache events wait for the next step to leave.
    #[must_use]
    pub fn has_untold_events(&self) -> bool {
        !self.events.is_empty()
    }

    fn blocks_for(&self, tokens: u32) -> u32 {
        tokens.div_ceil(self.spec.block_size)
    }

    fn finish_pulls(&mut self, now: Nanos, out: &mut Outbox) {
        while let Some(&(ready, slot)) = self.pulling.first().filter(|&&(at, _)| at <= now) {
            self.pulling.remove(&(ready, slot));
            let seq = self.seqs.get_mut(slot);
            seq.stage = Stage::Pulled;
            let hits = seq.computed / self.spec.block_size;
            // The last token is computed again, for its logits.
            seq.computed = seq.job.prompt_tokens - 1;
            seq.pulled = true;
            let (id, blocks) = (seq.job.id, seq.blocks.len() as u32 - hits);
            self.announce(slot, self.seqs.get(slot).job.prompt_tokens);
            self.pulled.push_back(slot);
            out.outputs.push(Output::Pulled { job: id, at: now, blocks });
        }
    }

    fn expire_leases(&mut self, now: Nanos, out: &mut Outbox) {
        while let Some(&(_, id)) = self.leases.first().filter(|&&(at, _)| at <= now) {
            self.unpin(id);
            self.cut_run(now);
            self.totals.expired += 1;
            out.outputs.push(Output::Expired { job: id, at: now });
        }
    }
}
