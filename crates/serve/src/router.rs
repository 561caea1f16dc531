//! The router as a whole: what every request and every background task shares.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use pointsman_brain::Condition;
use pointsman_config::{Engine, KvEvents, Settings, Worker as WorkerSettings};
use tokio::sync::Semaphore;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::admission::Gate;
use crate::auth::Keys;
use crate::fleet::{AddError, Fleet, Group, Rank, Worker};
use crate::metrics::{ByWorker, GroupReading, Metrics, WorkerReading};
use crate::restore::Snapshot;
use crate::tls::{self, TlsError};
use crate::upstream::Upstream;
use crate::{events, polled, watch};

/// What every request and every background task shares.
pub(crate) struct Router {
    pub(crate) settings: Settings,
    pub(crate) fleet: Fleet,
    pub(crate) upstream: Upstream,
    /// Who may use the API; `None` = everybody.
    pub(crate) keys: Option<Keys>,
    pub(crate) metrics: Metrics,
    pub(crate) gate: Gate,
    /// Room for bodies, in bytes.
    pub(crate) body_room: Arc<Semaphore>,
    /// One permit for each prompt that may be tokenised apart at once.
    pub(crate) tokenising: Arc<Semaphore>,
    /// One permit for the snapshot that may be read at once.
    pub(crate) snapshots: Arc<Semaphore>,
    pub(crate) tasks: TaskTracker,
    /// Cancelled when the process is to end.
    pub(crate) stop: CancellationToken,
    /// Cancelled when no request is left.
    pub(crate) served: CancellationToken,
    draining: AtomicBool,
    cutting: AtomicBool,
    /// Cancelled at that moment.
    pub(crate) cut_off: CancellationToken,
}

impl Router {
    pub(crate) fn new(settings: Settings, fleet: Fleet) -> Result<Router, TlsError> {
        Ok(Router {
            upstream: Upstream::new(
                settings.upstream.max_idle_per_worker,
                settings.upstream.idle,
                settings.timeouts.connect,
                tls::client(&settings.upstream.tls)?,
            ),
            keys: settings.auth.as_deref().map(Keys::new),
            metrics: Metrics::new(),
            gate: Gate::new(settings.limits.max_in_flight.get()),
            body_room: Arc::new(Semaphore::new(
                settings.limits.max_in_flight_bytes.get().min(Semaphore::MAX_PERMITS),
            )),
            tokenising: Arc::new(Semaphore::new(
                std::thread::available_parallelism().map_or(1, usize::from),
            )),
            snapshots: Arc::new(Semaphore::new(1)),
            tasks: TaskTracker::new(),
            stop: CancellationToken::new(),
            served: CancellationToken::new(),
            draining: AtomicBool::new(false),
            cutting: AtomicBool::new(false),
            cut_off: CancellationToken::new(),
            settings,
            fleet,
        })
    }

    /// Whether the router takes no further requests.
    pub(crate) fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Relaxed)
    }

    /// Takes no further requests, and sends away those that wait.
    pub(crate) fn drain(&self) {
        self.draining.store(true, Ordering::Relaxed);
        for group in &self.fleet.groups {
            group.hold.close();
        }
    }

    /// Whether the grace period is over: streams end with their next event.
    pub(crate) fn is_cutting(&self) -> bool {
        self.cutting.load(Ordering::Relaxed)
    }

    /// Ends the grace period.
    pub(crate) fn cut(&self) {
        self.cutting.store(true, Ordering::Relaxed);
        self.cut_off.cancel();
    }

    /// Adds every worker that the configuration names, and starts with what a snapshot says of them.
    pub(crate) async fn add_configured_workers(
        self: &Arc<Self>,
        snapshot: Option<Snapshot>,
    ) -> Result<(), AddError> {
        let mut added = Vec::new();
        for group in &self.fleet.groups {
            for worker in &group.settings.workers {
                added.push((group, group.add(worker.clone())?));
            }
        }
        if let Some(snapshot) = snapshot {
            snapshot.fill(self).await;
        }
        for (group, worker) in added {
            self.attend(group, &worker);
        }
        Ok(())
    }

    /// Adds every worker that the configuration names and looks at it, without taking anything from it:
    /// events that are handed out once are for the router that serves.
    pub(crate) fn look_at_configured_workers(self: &Arc<Self>) -> Result<(), AddError> {
        for group in &self.fleet.groups {
            for worker in &group.settings.workers {
                let worker = group.add(worker.clone())?;
                self.watch(group, &worker);
            }
        }
        Ok(())
    }

    fn watch(self: &Arc<Self>, group: &Arc<Group>, worker: &Arc<Worker>) {
        let task = watch::watch(Arc::clone(self), Arc::clone(group), Arc::clone(worker));
        self.tasks.spawn(task);
    }

    /// Ends every background task.
    pub(crate) async fn end(&self) {
        for group in &self.fleet.groups {
            for worker in group.roster.load().workers() {
                worker.gone.cancel();
            }
        }
        self.tasks.close();
        self.tasks.wait().await;
    }

    /// Adds a worker and starts what keeps the router informed of it.
    pub(crate) fn add_worker(
        self: &Arc<Self>,
        group: &Arc<Group>,
        settings: WorkerSettings,
    ) -> Result<Arc<Worker>, AddError> {
        let worker = group.add(settings)?;
        self.attend(group, &worker);
        Ok(worker)
    }

    /// Starts what keeps the router informed of a worker.
    fn attend(self: &Arc<Self>, group: &Arc<Group>, worker: &Arc<Worker>) {
        self.watch(group, worker);
        let s = &worker.settings;
        if s.engine == Engine::Trtllm && s.kv_events == KvEvents::Auto {
            let task = polled::poll(Arc::clone(self), Arc::clone(group), Arc::clone(worker));
            self.tasks.spawn(task);
        }
        if let KvEvents::At(stream) = &worker.settings.kv_events {
            // These are written down, so that nothing takes their place.
            let ranks = 0..worker.settings.ranks.get();
            let streams: Vec<_> = ranks.map(|rank| events::of_rank(stream, rank)).collect();
            let _following = self.follow(group, worker, &streams);
        }
    }

    /// Subscribes to the KV events of a worker, `streams` being those of its ranks.
    pub(crate) fn follow(
        self: &Arc<Self>,
        group: &Arc<Group>,
        worker: &Arc<Worker>,
        streams: &[pointsman_config::KvStream],
    ) -> Following {
        let roster = group.roster.load();
        let stop = worker.gone.child_token();
        let mut tasks = Vec::new();
        for (stream, slot) in streams.iter().zip(&worker.slots) {
            let (Some(rank), stream) = (roster.get(*slot), stream.clone()) else { continue };
            let (router, group) = (Arc::clone(self), Arc::clone(group));
            let task = events::follow(router, group, rank.clone(), stream, stop.clone());
            tasks.push(self.tasks.spawn(task));
        }
        Following { stop, tasks }
    }

    /// Removes a worker; requests on it run to their end.
    pub(crate) fn remove_worker(&self, group: &Group, name: &str) -> Option<Arc<Worker>> {
        let worker = group.remove(name)?;
        let ranks = u32::from(worker.settings.ranks.get());
        self.metrics.forget(group.name(), worker.name(), ranks);
        self.fleet.rename();
        Some(worker)
    }

    /// The text of `/metrics`.
    pub(crate) fn metrics_text(&self) -> String {
        let workers = self.fleet.groups.iter().flat_map(|group| worker_readings(group));
        let groups = self.fleet.groups.iter().map(|group| group_reading(group));
        self.metrics.text(workers.collect::<Vec<_>>(), groups.collect::<Vec<_>>())
    }
}

/// The subscriptions to a worker's KV events. They last until the worker is removed or they are ended.
#[must_use = "another publisher may take the place of this one"]
pub(crate) struct Following {
    stop: CancellationToken,
    tasks: Vec<JoinHandle<()>>,
}

impl Following {
    /// Ends them: when this returns, nothing more comes of them.
    pub(crate) async fn end(self) {
        self.stop.cancel();
        for task in self.tasks {
            // A panic has been reported by its task already.
            let _ended = task.await;
        }
    }
}

fn worker_readings(group: &Group) -> Vec<WorkerReading> {
    let roster = group.roster.load();
    let (brain, now) = (group.brain(), group.now());
    let reading = |rank: &Rank, view: &pointsman_brain::WorkerView| WorkerReading {
        labels: labels(group, rank),
        up: view.condition == Condition::Up,
        active_requests: u64::from(view.load.active),
        reserved_prefill_tokens: view.load.prefill_tokens,
        reserved_kv_blocks: view.load.kv_blocks,
        kv_usage: view
            .reading
            .kv_usage
            .filter(|_| view.reading_counts(now))
            .map(pointsman_brain::Share::get),
        index_blocks: group.reader.blocks(pointsman_kv::Slot(rank.slot.0)),
        index_stale: rank.worker.is_stale(rank.slot),
    };
    brain.workers().filter_map(|view| Some(reading(roster.get(view.slot)?, &view))).collect()
}

/// The labels of a worker rank's metrics.
pub(crate) fn labels(group: &Group, rank: &Rank) -> ByWorker {
    ByWorker {
        model: group.name().to_owned(),
        worker: rank.worker.name().to_owned(),
        rank: rank.rank.unwrap_or(0),
    }
}

fn group_reading(group: &Group) -> GroupReading {
    let token_cache_bytes = match &group.tokenizer {
        crate::prompt::Tokenizer::Local(model) => model.cache_stats().bytes,
        _ => 0,
    };
    let labels = crate::metrics::ByModel { model: group.name().to_owned() };
    let live_bookings = group.brain().live_bookings() as u64;
    GroupReading { labels, live_bookings, held: group.hold.held(), token_cache_bytes }
}
