//! One engine model in real time: a data-parallel rank of a mock engine.
//!
//! Everything that touches the model goes through one short lock and ends by pumping what came out
//! to the requests and to the event publisher, so a reply never waits for the driver task.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use tokio::sync::{Notify, mpsc};
use tokio_util::sync::CancellationToken;

use super::handoff::Registry;
use super::histogram::Latencies;
use super::publisher::Publisher;
use crate::engine::{
    Content, Engine, Event, Job, JobId, Kind, Load, Nanos, Outbox, Output, Refused, Spec, Totals,
};

/// Something that happened to one sequence of a request.
#[derive(Clone, Debug)]
pub(super) enum Tick {
    /// Scheduled; this many prompt tokens were cached here.
    Started(u32),
    /// The KV that it lacked has arrived.
    Pulled,
    /// Its next token.
    Token,
    /// Its last token has come; for a hand-off the blocks that stay pinned.
    Finished(Option<Box<[u32]>>),
}

/// Ticks of a request: the sequence's place in it, and what happened.
pub(super) type Ticks = mpsc::UnboundedReceiver<(u32, Tick)>;

struct Route {
    sequence: u32,
    to: mpsc::UnboundedSender<(u32, Tick)>,
    prompt_tokens: u32,
    pulls: bool,
    cached_tokens: u32,
    submitted: Nanos,
    /// When it was put into the batch; of a prompt that is pulled, when its KV was there.
    started: Nanos,
    first_token: Option<Nanos>,
    last_token: Option<Nanos>,
}

struct Inner {
    engine: Engine,
    routes: HashMap<JobId, Route>,
    out: Outbox,
    publisher: Option<Arc<Publisher>>,
    latencies: Latencies,
    /// End of the step whose tokens are being counted, and its tokens so far. Of an infinitely fast
    /// engine, steps that end together are one.
    step: (Nanos, u32),
    /// Of each block in the cache: a sequence that it is in, its place there, and its copies.
    known: HashMap<u64, (Arc<Content>, u32, u32)>,
}

pub(super) struct Rank {
    pub(super) index: u16,
    inner: Mutex<Inner>,
    wake: Notify,
    origin: Instant,
    registry: Arc<Registry>,
}

impl Rank {
    pub(super) fn new(
        index: u16,
        spec: Spec,
        publisher: Option<Arc<Publisher>>,
        registry: Arc<Registry>,
    ) -> Rank {
        let inner = Inner {
            engine: Engine::new(spec),
            routes: HashMap::new(),
            out: Outbox::default(),
            publisher,
            latencies: Latencies::default(),
            step: (0, 0),
            known: HashMap::new(),
        };
        let (wake, origin) = (Notify::new(), Instant::now());
        Rank { index, inner: Mutex::new(inner), wake, origin, registry }
    }

    /// Runs jobs as the sequences of one request; all or none are taken.
    pub(super) fn submit(&self, jobs: Vec<Job>) -> Result<Ticks, Refused> {
        let (to, ticks) = mpsc::unbounded_channel();
        let ids: Vec<JobId> = jobs.iter().map(|job| job.id).collect();
        self.with(|inner, now| {
            for (sequence, job) in jobs.into_iter().enumerate() {
                let id = job.id;
                let route = Route {
                    sequence: sequence as u32,
                    to: to.clone(),
                    prompt_tokens: job.prompt_tokens,
                    pulls: matches!(job.kind, Kind::Pull(_)),
                    cached_tokens: 0,
                    submitted: now,
                    started: now,
                    first_token: None,
                    last_token: None,
                };
                if let Err(refused) = inner.engine.submit(job) {
                    for id in &ids {
                        inner.drop_job(*id);
                    }
                    return Err(refused);
                }
                inner.routes.insert(id, route);
            }
            Ok(ticks)
        })
    }

    /// Ends these jobs, whatever they are doing.
    pub(super) fn abort(&self, ids: &[JobId]) {
        self.with(|inner, _| ids.iter().for_each(|id| inner.drop_job(*id)));
    }

    /// Ends every job without a last tick, as an engine that dies does.
    pub(super) fn fail_all(&self) {
        self.with(|inner, _| {
            let jobs: Vec<JobId> = inner.routes.keys().copied().collect();
            jobs.into_iter().for_each(|id| inner.drop_job(id));
        });
    }

    /// Releases a pinned prompt.
    pub(super) fn unpin(&self, id: JobId) -> bool {
        self.with(|inner, _| inner.engine.unpin(id))
    }

    /// Keeps a pinned prompt while its decode engine is there; false when it is gone already.
    pub(super) fn hold(&self, id: JobId) -> bool {
        self.with(|inner, _| inner.engine.set_lease(id, Nanos::MAX))
    }

    /// Starts the lease of a pinned prompt again.
    pub(super) fn lease_again(&self, id: JobId) {
        self.with(|inner, now| {
            let until = now.saturating_add(inner.engine.spec().lease);
            inner.engine.set_lease(id, until)
        });
    }

    pub(super) fn reset_cache(&self) -> bool {
        self.with(|inner, _| inner.engine.reset_cache())
    }

    /// As if the process had restarted: the cache is empty and the event sequence begins again.
    pub(super) fn restart_publisher(&self) {
        self.with(|inner, _| {
            inner.engine.lose_cache();
            inner.known.clear();
            if let Some(publisher) = &inner.publisher {
                publisher.restart();
            }
        });
    }

    pub(super) fn load(&self) -> Load {
        self.with(|inner, _| inner.engine.load())
    }

    pub(super) fn totals(&self) -> Totals {
        self.with(|inner, _| inner.engine.totals())
    }

    pub(super) fn waiting_prefill_tokens(&self) -> u64 {
        self.with(|inner, _| inner.engine.waiting_prefill_tokens())
    }

    pub(super) fn latencies(&self) -> Latencies {
        self.with(|inner, _| inner.latencies.clone())
    }

    /// The cached chains as block names from the root on, and where their tokens stand.
    pub(super) fn cached_chains(&self) -> Vec<(Vec<u64>, Option<Arc<Content>>)> {
        self.with(|inner, _| {
            let content_of = |chain: &[u64]| {
                let (content, at, _) = inner.known.get(chain.last()?)?;
                (*at as usize + 1 == chain.len()).then(|| content.clone())
            };
            let chains = inner.engine.cached_chains().into_iter();
            chains.map(|chain| (content_of(&chain), chain)).map(|(c, chain)| (chain, c)).collect()
        })
    }

    pub(super) fn check(&self) -> Result<(), String> {
        self.with(|inner, _| inner.engine.check())
    }

    /// Advances the model whenever something is due, until cancelled.
    pub(super) async fn drive(self: Arc<Self>, stop: CancellationToken) {
        loop {
            let due = self.with(|inner, _| inner.engine.wakeup());
            let nap = async {
                match due {
                    Some(at) => {
                        let at = self.origin + Duration::from_nanos(at);
                        tokio::time::sleep_until(at.into()).await;
                    }
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = stop.cancelled() => return,
                () = self.wake.notified() => {}
                () = nap => {}
            }
        }
    }

    /// Brings the model to the present, does `what`, and passes on everything that came out.
    fn with<R>(&self, what: impl FnOnce(&mut Inner, Nanos) -> R) -> R {
        let mut inner = self.lock();
        let now = self.origin.elapsed().as_nanos() as Nanos;
        let Inner { engine, out, .. } = &mut *inner;
        engine.advance(now, out);
        let due_before = engine.wakeup();
        let result = what(&mut inner, now);
        let Inner { engine, out, .. } = &mut *inner;
        engine.advance(now, out);
        if engine.wakeup() != due_before {
            self.wake.notify_one();
        }
        inner.pass_on(&self.registry, self.index);
        result
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    fn drop_job(&mut self, id: JobId) {
        self.routes.remove(&id);
        self.engine.abort(id);
    }

    fn pass_on(&mut self, registry: &Registry, rank: u16) {
        let batches = std::mem::take(&mut self.out.batches);
        for batch in &batches {
            batch.events.iter().for_each(|event| self.note_event(event));
            if let Some(publisher) = &self.publisher {
                publisher.publish(unix_seconds(), u32::from(rank), &batch.events);
            }
        }
        let outputs = std::mem::take(&mut self.out.outputs);
        for output in &outputs {
            self.deliver(output, registry);
        }
        self.end_step();
        self.out.outputs = outputs;
        self.out.outputs.clear();
    }

    fn deliver(&mut self, output: &Output, registry: &Registry) {
        let (job, tick) = match output {
            Output::Started { job, at, cached_tokens } => {
                if let Some(route) = self.routes.get_mut(job) {
                    (route.started, route.cached_tokens) = (*at, *cached_tokens);
                }
                (*job, Tick::Started(*cached_tokens))
            }
            Output::Pulled { job, at, .. } => {
                if let Some(route) = self.routes.get_mut(job) {
                    route.started = *at;
                }
                (*job, Tick::Pulled)
            }
            Output::Token { job, at } => {
                self.note_token(*job, *at);
                (*job, Tick::Token)
            }
            Output::Finished { job, pinned, .. } => (*job, Tick::Finished(pinned.clone())),
            Output::Expired { job, .. } => return registry.expired(*job),
        };
        let Some(route) = self.routes.get(&job) else { return };
        let last = matches!(tick, Tick::Finished(_));
        // Nobody listens when the client has just left; its jobs are about to be aborted.
        let _ = route.to.send((route.sequence, tick));
        if last && let Some(route) = self.routes.remove(&job) {
            self.note_end(&route);
        }
    }

    fn note_event(&mut self, event: &Event) {
        match event {
            Event::Stored { content, first, count } => {
                for at in *first..first + count {
                    let name = content.names[at as usize];
                    self.known.entry(name).or_insert_with(|| (content.clone(), at, 0)).2 += 1;
                }
            }
            Event::Removed { name } => {
                if let Some((.., copies)) = self.known.get_mut(name) {
                    *copies -= 1;
                    if *copies == 0 {
                        self.known.remove(name);
                    }
                }
            }
            Event::Cleared => self.known.clear(),
        }
    }

    fn note_token(&mut self, job: JobId, at: Nanos) {
        let Some(route) = self.routes.get_mut(&job) else { return };
        let mut tokens = 1;
        match route.last_token.replace(at) {
            None => {
                route.first_token = Some(at);
                self.latencies.first_token.add(seconds(at.saturating_sub(route.submitted)));
                if !route.pulls {
                    // As vLLM does: a prompt counts in the step that ends it.
                    tokens += route.prompt_tokens - route.cached_tokens;
                }
            }
            Some(before) => self.latencies.between_tokens.add(seconds(at - before)),
        }
        if self.step.0 != at {
            self.end_step();
        }
        self.step = (at, self.step.1 + tokens);
    }

    fn end_step(&mut self) {
        let tokens = std::mem::take(&mut self.step.1);
        if tokens > 0 {
            self.latencies.steps.add(f64::from(tokens));
        }
    }

    /// What is measured of a request is told when it has ended.
    fn note_end(&mut self, route: &Route) {
        let Route { submitted, started, .. } = *route;
        let end = route.last_token.unwrap_or(submitted);
        let first = route.first_token.unwrap_or(end);
        let of = &mut self.latencies;
        of.whole.add(seconds(end - submitted));
        of.queue.add(seconds(started - submitted));
        of.prefill.add(seconds(first.saturating_sub(started)));
        of.decode.add(seconds(end - first));
        // What was pulled counts too.
        of.computed.add(f64::from(route.prompt_tokens - route.cached_tokens));
    }
}

fn seconds(nanos: Nanos) -> f64 {
    nanos as f64 / 1e9
}

fn unix_seconds() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}
