//! Keeping an eye on one worker: health checks, what it says of itself, and its load.
//!
//! Invariant: one slow worker holds up nothing but its own task. Each fact is learned again whenever
//! the worker comes back, because another engine may stand behind the same URL by then.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use http::{HeaderMap, Uri};
use pointsman_brain::{Cause, HealthEvent};
use pointsman_config::{Engine, KvEvents, KvStream, SocketMode};
use pointsman_wire::{discovery, load};
use tokio::time::{Interval, MissedTickBehavior, interval};

use crate::fleet::{Group, Learned, Worker};
use crate::router::{Following, Router};
use crate::{bootstrap, events, probe, reading, run, sglang};

/// Bytes of a health answer or model list that are read.
const SMALL_REPLY_BYTES: usize = 1024 * 1024;

/// Bytes of an engine's `/metrics` that are read.
const METRICS_REPLY_BYTES: usize = 8 * 1024 * 1024;

/// Pause between two looks at whether all workers have been checked.
const FIRST_LOOK_PAUSE: Duration = std::time::Duration::from_millis(2);

/// Watches a worker until it is removed.
pub(crate) async fn watch(router: Arc<Router>, group: Arc<Group>, worker: Arc<Worker>) {
    let gone = worker.gone.clone();
    let place = Place::of(&worker.settings.url);
    let watching =
        Watching { router, group, worker, up: false, place, followed: None, trouble: None };
    tokio::select! {
        () = gone.cancelled() => {}
        () = watching.run() => {}
    }
}

struct Watching {
    router: Arc<Router>,
    group: Arc<Group>,
    worker: Arc<Worker>,
    up: bool,
    /// Where it is, if that may change.
    place: Option<Place>,
    /// Why it could not be spoken to by TLS, as last told.
    trouble: Option<String>,
    /// The event sockets that the engine told, once it has.
    followed: Option<(Vec<KvStream>, Following)>,
}

impl Watching {
    async fn run(mut self) {
        let mut checks = paced(self.router.settings.health.interval);
        let mut readings = self.router.settings.scrape_interval.map(paced);
        loop {
            tokio::select! {
                biased;
                () = self.worker.look_again.notified() => {
                    self.up = false;
                    self.forget_engines();
                    self.look().await;
                }
                _ = checks.tick() => self.look().await,
                () = next(readings.as_mut()), if self.up => self.scrape().await,
            }
        }
    }

    /// Checks the worker, and learns all about it if it has just come up.
    async fn look(&mut self) {
        if let Some(place) = &mut self.place
            && place.has_changed(self.router.settings.health.timeout).await
        {
            let (model, worker) = (self.group.name(), self.worker.name());
            tracing::info!(
                model,
                worker,
                host = place.host,
                "the worker's host has another address"
            );
            self.router.upstream.connect_anew();
            self.up = false;
            self.forget_engines();
        }
        let Some(passed) = self.check().await else { return };
        self.tell_trouble();
        if passed && !self.up {
            self.discover().await;
            if self.router.settings.scrape_interval.is_some() {
                self.scrape().await;
            }
        } else if passed {
            self.read_models().await;
            if let Some(engine_ids) = self.engine_ids().await {
                self.group.amend(&self.worker, |learned| learned.engine_ids = engine_ids);
            }
        } else {
            self.forget_engines();
        }
        self.up = passed;
        self.worker.seen.store(true, Ordering::Relaxed);
    }

    /// Says once why the worker cannot be spoken to by TLS.
    fn tell_trouble(&mut self) {
        let trouble = self.router.upstream.trouble(&self.worker.settings.url);
        if let Some(problem) = trouble.as_ref().filter(|_| trouble != self.trouble) {
            let (model, worker) = (self.group.name(), self.worker.name());
            tracing::warn!(model, worker, "the worker cannot be reached by TLS: {problem}");
        }
        self.trouble = trouble;
    }

    /// Asks once whether the worker is alive. One that has never been is down at the first failure.
    /// `None` where the router cannot ask.
    async fn check(&mut self) -> Option<bool> {
        let path = self.router.settings.health.path.to_string();
        let status = match self.try_get(&path, SMALL_REPLY_BYTES).await {
            Ok((status, _)) => Some(status),
            Err(Cause::Descriptors) => return None,
            Err(_) => None,
        };
        let passed = match self.worker.settings.engine {
            Engine::Vllm | Engine::Sglang | Engine::Trtllm => {
                status.is_some_and(|status| status < 300)
            }
            // Such a server need not have the path; it has to answer.
            Engine::OpenAi => status.is_some_and(|status| status < 500),
        };
        let first = !self.worker.seen.load(Ordering::Relaxed);
        let failures = self.group.brain().settings().breaker.failed_checks.max(1);
        let (event, times) = match (passed, first) {
            (true, _) => (HealthEvent::CheckPassed, 1),
            (false, true) => (HealthEvent::CheckFailed, failures),
            (false, false) => (HealthEvent::CheckFailed, 1),
        };
        let roster = self.group.roster.load();
        for rank in self.worker.slots.iter().filter_map(|slot| roster.get(*slot)) {
            for _ in 0..times {
                run::health(&self.group, rank, event);
            }
        }
        Some(passed)
    }

    /// Learns what the worker says of itself when it has come up.
    async fn discover(&mut self) {
        self.read_models().await;
        match self.worker.settings.engine {
            Engine::Vllm => self.discover_vllm().await,
            Engine::Sglang => self.discover_sglang().await,
            Engine::Trtllm => self.discover_trtllm().await,
            Engine::OpenAi => {}
        }
    }

    async fn discover_vllm(&mut self) {
        let mut learned = Learned::clone(&self.worker.learned.load());
        if let Some(body) = self.document("/version").await {
            learned.version = discovery::version(&body).ok();
        }
        learned.same_tokens = probe::same_tokens(&self.router, &self.group, &self.worker).await;
        if self.worker.settings.kv_events == KvEvents::Auto {
            learned.publishes_events = self.find_events().await;
            if !learned.publishes_events {
                self.forget_restored();
            }
        }
        learned.engine_ids = self.engine_ids().await.unwrap_or_default();
        self.learn(learned);
        if let Some(problem) = bootstrap::problem(&self.worker, None) {
            tracing::warn!(model = self.group.name(), worker = self.worker.name(), "{problem}");
        }
    }

    /// Whoever answers next may be another engine, of another name.
    fn forget_engines(&self) {
        self.group.amend(&self.worker, |learned| learned.engine_ids.clear());
    }

    /// What its engines are called, where a bootstrap server tells.
    async fn engine_ids(&self) -> Option<BTreeMap<u32, String>> {
        if !bootstrap::has_server(&self.worker) {
            return None;
        }
        let wait = self.router.settings.health.timeout;
        match bootstrap::engine_ids(&self.router.upstream, &self.worker, wait).await? {
            Ok(engine_ids) => Some(engine_ids),
            Err(error) => {
                self.complain(&error);
                None
            }
        }
    }

    async fn discover_sglang(&mut self) {
        let Some(body) = self.document("/server_info").await else { return };
        let info = match discovery::server_info(&body) {
            Ok(info) => info,
            Err(error) => return self.complain(&error),
        };
        let auto = self.worker.settings.kv_events == KvEvents::Auto;
        let publishes = match &info.events {
            Some(source) if auto => self.follow_sources(std::slice::from_ref(source)).await,
            _ => false,
        };
        if auto && !publishes {
            self.forget_restored();
        }
        let role = self.worker.settings.role;
        let group = Arc::clone(&self.group);
        group.amend(&self.worker, |learned| {
            sglang::learn(learned, &info, role, auto.then_some(publishes));
        });
    }

    async fn discover_trtllm(&mut self) {
        let Some(body) = self.document("/version").await else { return };
        let version = discovery::version(&body).ok();
        self.group.amend(&self.worker, |learned| learned.version = version);
        self.forget_restored();
    }

    /// Learns which models the worker lists: adapters come and go while it runs.
    async fn read_models(&self) {
        let Some(body) = self.document("/v1/models").await else { return };
        let models = match discovery::models(&body) {
            Ok(models) => models,
            Err(error) => return self.complain(&error),
        };
        if self.worker.learned.load().models != models {
            self.group.amend(&self.worker, |learned| learned.models = models);
            self.router.fleet.rename();
        }
    }

    /// Follows the event sockets that the engine tells; whether there are any.
    async fn find_events(&mut self) -> bool {
        let Some(body) = self.document("/kv_event_sources").await else {
            return self.followed.is_some();
        };
        let sources = match discovery::event_sources(&body) {
            Ok(sources) => sources,
            Err(error) => {
                self.complain(&error);
                return false;
            }
        };
        self.follow_sources(&sources).await
    }

    async fn follow_sources(&mut self, sources: &[discovery::EventSource]) -> bool {
        let Some(streams) = self.streams(sources) else { return false };
        if self.followed.as_ref().is_some_and(|(followed, _)| *followed == streams) {
            return true;
        }
        if let Some((_, following)) = self.followed.take() {
            // Another engine: nothing is known of what it holds.
            following.end().await;
            for slot in &self.worker.slots {
                self.group.writer().clear(pointsman_kv::Slot(slot.0));
                self.worker.set_stale(*slot, false);
            }
        }
        let following = self.router.follow(&self.group, &self.worker, &streams);
        self.followed = Some((streams, following));
        true
    }

    /// Nobody will say what became of the blocks that a snapshot told of.
    fn forget_restored(&self) {
        for &slot in &self.worker.slots {
            if self.worker.take_restored(slot).is_some() {
                self.group.writer().clear(pointsman_kv::Slot(slot.0));
                self.worker.set_stale(slot, false);
            }
        }
    }

    /// The sockets of each rank: where the engine says, else where vLLM puts them.
    fn streams(&self, sources: &[discovery::EventSource]) -> Option<Vec<KvStream>> {
        let told = |rank: u16| sources.iter().find(|source| source.rank == u32::from(rank));
        let first = told(0)?;
        let host = self.worker.settings.url.host().unwrap_or_default();
        let Some(of_first) = reachable(first, host) else {
            tracing::warn!(
                model = self.group.name(),
                worker = self.worker.name(),
                endpoint = first.endpoint,
                "the worker connects out to publish its KV events; set `kv_events` with `mode: bind`"
            );
            return None;
        };
        let of = |rank| {
            let told = told(rank).and_then(|source| reachable(source, host));
            told.unwrap_or_else(|| events::of_rank(&of_first, rank))
        };
        Some((0..self.worker.settings.ranks.get()).map(of).collect())
    }

    /// Reads the worker's load and counters, and its capacity and block size where they come along.
    async fn scrape(&self) {
        match self.worker.settings.engine {
            Engine::Vllm => self.scrape_vllm().await,
            Engine::Sglang => self.scrape_sglang().await,
            Engine::Trtllm => self.scrape_trtllm().await,
            Engine::OpenAi => {}
        }
    }

    async fn scrape_trtllm(&self) {
        let Some(body) = self.document("/metrics").await else { return };
        let load = match load::read_trtllm(&body) {
            Ok(load) => load,
            Err(error) => return self.complain(&error),
        };
        let Some(slot) = self.worker.slots.first().filter(|_| load.running.is_some()) else {
            return;
        };
        self.group.brain().reading(*slot, reading::of_trtllm(&load), self.group.now());
        self.group.amend(&self.worker, |learned| {
            learned.block_size = load.block_size.and_then(NonZeroU32::new).or(learned.block_size);
            learned.capacity_blocks = load.num_gpu_blocks.or(learned.capacity_blocks);
        });
    }

    async fn scrape_vllm(&self) {
        let Some((200, body)) = self.get("/metrics", METRICS_REPLY_BYTES).await else { return };
        let text = String::from_utf8_lossy(&body);
        let mut learned = Learned::clone(&self.worker.learned.load());
        for (rank, slot) in (0_u32..).zip(&self.worker.slots) {
            let load = load::read_vllm(&text, rank);
            learned.block_size = load.block_size.and_then(NonZeroU32::new).or(learned.block_size);
            learned.capacity_blocks = load.num_gpu_blocks.or(learned.capacity_blocks);
            let reading = reading::of_vllm(&load);
            self.group.brain().reading(*slot, reading, self.group.now());
        }
        self.learn(learned);
    }

    async fn scrape_sglang(&self) {
        let Some(body) = self.document(load::SGLANG_LOADS).await else { return };
        let block_size = self.worker.spec().block_size;
        for (rank, slot) in (0_u32..).zip(&self.worker.slots) {
            match load::read_sglang(&body, rank) {
                Ok(load) => {
                    let reading = reading::of_sglang(&load, block_size);
                    self.group.brain().reading(*slot, reading, self.group.now());
                }
                Err(error) => return self.complain(&error),
            }
        }
    }

    fn learn(&self, learned: Learned) {
        self.group.learn(&self.worker, learned);
    }

    async fn document(&self, path: &str) -> Option<bytes::Bytes> {
        let (status, body) = self.get(path, SMALL_REPLY_BYTES).await?;
        (status == 200).then_some(body)
    }

    async fn get(&self, path: &str, limit: usize) -> Option<(u16, bytes::Bytes)> {
        self.try_get(path, limit).await.ok()
    }

    async fn try_get(&self, path: &str, limit: usize) -> Result<(u16, bytes::Bytes), Cause> {
        let mut headers = HeaderMap::new();
        self.worker.address(&mut headers);
        let uri = self.worker.uri(path).map_err(|_| Cause::Connect)?;
        let wait = self.router.settings.health.timeout;
        self.router.upstream.get(uri, headers, wait, limit).await
    }

    fn complain(&self, error: &discovery::DiscoveryError) {
        tracing::warn!(model = self.group.name(), worker = self.worker.name(), %error, "discovery");
    }
}

/// A host by name, and its addresses when it was last looked up.
struct Place {
    host: String,
    addresses: BTreeSet<IpAddr>,
}

impl Place {
    /// The host of a URL, unless that is an address.
    fn of(url: &Uri) -> Option<Place> {
        let host =
            url.host().filter(|host| !host.starts_with('[') && host.parse::<IpAddr>().is_err())?;
        Some(Place { host: host.to_owned(), addresses: BTreeSet::new() })
    }

    /// Looks it up again; whether none of its addresses is left. Connections that are in use would
    /// otherwise stay with the former host for as long as that answers.
    async fn has_changed(&mut self, wait: Duration) -> bool {
        let found = tokio::time::timeout(wait, tokio::net::lookup_host((&*self.host, 0))).await;
        let Ok(Ok(found)) = found else { return false };
        let found: BTreeSet<IpAddr> = found.map(|addr| addr.ip()).collect();
        let before = std::mem::replace(&mut self.addresses, found);
        !before.is_empty() && before.is_disjoint(&self.addresses)
    }
}

/// Ticks that do not catch up when the worker was slow.
fn paced(period: Duration) -> Interval {
    let mut ticks = interval(period);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    ticks
}

/// The next tick, or never.
async fn next(ticks: Option<&mut Interval>) {
    match ticks {
        Some(ticks) => {
            ticks.tick().await;
        }
        None => std::future::pending().await,
    }
}

/// The sockets that an engine tells, as seen from here; `None` if it connects out instead.
fn reachable(source: &discovery::EventSource, host: &str) -> Option<KvStream> {
    // vLLM binds for these alone, and connects to anything else.
    let binds = ["*", "::", "ipc://"].iter().any(|part| source.endpoint.contains(part));
    if !binds {
        return None;
    }
    let endpoint = events::endpoint_at(&source.endpoint, host)?;
    let replay = source.replay_endpoint.as_deref();
    Some(KvStream {
        endpoint,
        replay: replay.and_then(|replay| events::endpoint_at(replay, host)),
        topic: source.topic.clone(),
        mode: SocketMode::Connect,
    })
}

/// Waits until every worker has been checked once, at most as long as one check may take.
pub(crate) async fn first_look(router: &Router) {
    let all_seen = async {
        let workers = || router.fleet.groups.iter().map(|group| group.roster.load_full());
        while workers().any(|roster| roster.workers().any(|w| !w.seen.load(Ordering::Relaxed))) {
            tokio::time::sleep(FIRST_LOOK_PAUSE).await;
        }
    };
    let _late = tokio::time::timeout(router.settings.health.timeout * 2, all_seen).await;
}
