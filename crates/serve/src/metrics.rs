//! What the router counts, in Prometheus' words; one place for every metric's name and labels.
//!
//! Counters and histograms move as things happen; gauges of workers and groups are read from their
//! owners when somebody scrapes, so that they cannot drift.

use std::fmt::Write as _;
use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;
use std::sync::atomic::AtomicU64;

use crate::kv_metrics::KvMetrics;

/// Declares a label set: a struct whose fields are the labels.
macro_rules! labels {
    ($name:ident { $($field:ident: $kind:ty),+ }) => {
        #[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
        pub(crate) struct $name { $(pub(crate) $field: $kind),+ }
    };
}

labels!(Decision { model: String, path: &'static str, policy: &'static str, reason: &'static str });
labels!(Shadow { model: String, policy: &'static str, path: &'static str });
labels!(Guard { guard: &'static str });
labels!(Signal { signal: &'static str });
labels!(ByPath { path: &'static str });
labels!(LegFailure { leg: &'static str, cause: &'static str });
labels!(ByLeg { leg: &'static str });
labels!(ByModel { model: String });
labels!(Answer { model: String, endpoint: &'static str, status: u16 });
labels!(ByKey { key: String, status: u16 });
labels!(ByWorker { model: String, worker: String, rank: u32 });
pub(crate) type Float = Gauge<f64, AtomicU64>;

/// Every metric that moves as things happen.
pub(crate) struct Metrics {
    registry: Registry,
    pub(crate) requests: Family<Answer, Counter>,
    pub(crate) request_seconds: Family<ByModel, Histogram>,
    pub(crate) decisions: Family<Decision, Counter>,
    pub(crate) shadow_decisions: Family<Shadow, Counter>,
    pub(crate) guard_vetoes: Family<Guard, Counter>,
    pub(crate) fallbacks: Family<Signal, Counter>,
    pub(crate) effective_isl_tokens: Histogram,
    pub(crate) ttft_seconds: Family<ByPath, Histogram>,
    pub(crate) ttft_prediction_error_ratio: Family<ByPath, Histogram>,
    pub(crate) held_seconds: Family<ByModel, Histogram>,
    pub(crate) itl_seconds: Family<ByPath, Histogram>,
    pub(crate) leg_failures: Family<LegFailure, Counter>,
    pub(crate) leg_seconds: Family<ByLeg, Histogram>,
    pub(crate) requests_in_flight: Family<ByModel, Gauge>,
    pub(crate) requests_refused: Family<Signal, Counter>,
    pub(crate) key_requests: Family<ByKey, Counter>,
    pub(crate) kv: KvMetrics,
    workers: WorkerGauges,
}

/// Gauges of workers, set when somebody scrapes.
struct WorkerGauges {
    up: Family<ByWorker, Gauge>,
    active_requests: Family<ByWorker, Gauge>,
    reserved_prefill_tokens: Family<ByWorker, Gauge>,
    reserved_kv_blocks: Family<ByWorker, Gauge>,
    kv_usage: Family<ByWorker, Float>,
    index_blocks: Family<ByWorker, Gauge>,
    index_stale: Family<ByWorker, Gauge>,
    live_bookings: Family<ByModel, Gauge>,
    held: Family<ByModel, Gauge>,
    token_cache_bytes: Family<ByModel, Gauge>,
}

/// One worker rank's gauges.
pub(crate) struct WorkerReading {
    pub(crate) labels: ByWorker,
    pub(crate) up: bool,
    pub(crate) active_requests: u64,
    pub(crate) reserved_prefill_tokens: u64,
    pub(crate) reserved_kv_blocks: u64,
    pub(crate) kv_usage: Option<f64>,
    pub(crate) index_blocks: u64,
    pub(crate) index_stale: bool,
}

/// One group's gauges.
pub(crate) struct GroupReading {
    pub(crate) labels: ByModel,
    pub(crate) live_bookings: u64,
    pub(crate) held: usize,
    pub(crate) token_cache_bytes: u64,
}

fn seconds() -> Histogram {
    // 1 ms to about 4 min.
    Histogram::new(exponential_buckets(0.001, 2.0, 18))
}

fn gaps() -> Histogram {
    // 0.5 ms to about 4 s.
    Histogram::new(exponential_buckets(0.0005, 1.6, 20))
}

fn errors() -> Histogram {
    Histogram::new([0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0, 10.0])
}

fn tokens() -> Histogram {
    // 16 to 512 k, zero apart.
    Histogram::new(std::iter::once(0.0).chain(exponential_buckets(16.0, 2.0, 16)))
}

impl Metrics {
    pub(crate) fn new() -> Metrics {
        let mut registry = Registry::with_prefix("pointsman");
        let r = &mut registry;
        let workers = WorkerGauges::new(r);
        let effective_isl_tokens = tokens();
        r.register(
            "effective_isl_tokens",
            "Prompt tokens that the chosen worker had to compute",
            effective_isl_tokens.clone(),
        );
        Metrics {
            requests: counter(r, "requests", "Requests answered"),
            request_seconds: histogram(
                r,
                "request_seconds",
                "From a request's head to the end of its reply",
                seconds,
            ),
            decisions: counter(r, "decisions", "Decisions"),
            shadow_decisions: counter(
                r,
                "shadow_decisions",
                "What shadow policies would have said",
            ),
            guard_vetoes: counter(r, "guard_vetoes", "Local paths that a guard vetoed"),
            fallbacks: counter(r, "fallbacks", "Decisions made without a signal"),
            effective_isl_tokens,
            ttft_seconds: histogram(r, "ttft_seconds", "Time to first token", seconds),
            ttft_prediction_error_ratio: histogram(
                r,
                "ttft_prediction_error_ratio",
                "How far predicted times to first token were off: |predicted / actual - 1|",
                errors,
            ),
            held_seconds: histogram(
                r,
                "held_seconds",
                "How long requests waited in the router, of those that did",
                seconds,
            ),
            itl_seconds: histogram(r, "itl_seconds", "Time between streamed tokens", gaps),
            leg_failures: counter(r, "leg_failures", "Legs that failed"),
            leg_seconds: histogram(r, "leg_seconds", "From sending a leg to its end", seconds),
            requests_in_flight: gauge(r, "requests_in_flight", "Requests in the router"),
            key_requests: counter(r, "key_requests", "Requests answered, by the client's API key"),
            requests_refused: counter(r, "requests_refused", "Requests refused by a limit"),
            kv: KvMetrics::new(r),
            workers,
            registry,
        }
    }

    /// The text of `/metrics`.
    pub(crate) fn text(
        &self,
        workers: impl IntoIterator<Item = WorkerReading>,
        groups: impl IntoIterator<Item = GroupReading>,
    ) -> String {
        self.workers.set(workers, groups);
        let mut text = String::new();
        if encode(&mut text, &self.registry).is_err() {
            text.clear();
            let _ = writeln!(text, "# the metrics could not be written");
        }
        text
    }

    /// One model's requests in the router, and how long they stay.
    pub(crate) fn stay(&self, model: &str) -> (Gauge, Histogram) {
        let labels = ByModel { model: model.to_owned() };
        let inside = self.requests_in_flight.get_or_create_owned(&labels);
        (inside, self.request_seconds.get_or_create_owned(&labels))
    }

    /// Drops the series of a worker that went: names may come and go without end.
    pub(crate) fn forget(&self, model: &str, worker: &str, ranks: u32) {
        self.kv.forget(model, worker, ranks);
    }

    /// Counts how long a request waited for its turn.
    pub(crate) fn held(&self, model: &str, wait: Duration) {
        let labels = ByModel { model: model.to_owned() };
        self.held_seconds.get_or_create(&labels).observe(wait.as_secs_f64());
    }

    /// Counts how long a leg took.
    pub(crate) fn leg_took(&self, leg: &'static str, took: Duration) {
        self.leg_seconds.get_or_create(&ByLeg { leg }).observe(took.as_secs_f64());
    }
}

impl WorkerGauges {
    fn new(r: &mut Registry) -> WorkerGauges {
        WorkerGauges {
            up: gauge(r, "worker_up", "Whether the worker may be asked"),
            active_requests: gauge(r, "worker_active_requests", "Requests booked on the worker"),
            reserved_prefill_tokens: gauge(
                r,
                "reserved_prefill_tokens",
                "Prompt tokens booked on the worker and not yet computed",
            ),
            reserved_kv_blocks: gauge(r, "reserved_kv_blocks", "KV blocks booked on the worker"),
            kv_usage: float(
                r,
                "worker_kv_usage_ratio",
                "Share of KV blocks in use, as the worker last reported",
            ),
            index_blocks: gauge(r, "index_blocks", "KV blocks known to be on the worker"),
            index_stale: gauge(
                r,
                "index_stale",
                "1 while the worker's KV events have a gap that could not be filled",
            ),
            live_bookings: gauge(r, "live_bookings", "Requests booked in the ledger"),
            held: gauge(r, "held_requests", "Requests that wait in the router"),
            token_cache_bytes: gauge(r, "token_cache_bytes", "Memory of tokens of known prefixes"),
        }
    }

    fn set(
        &self,
        workers: impl IntoIterator<Item = WorkerReading>,
        groups: impl IntoIterator<Item = GroupReading>,
    ) {
        // Workers that went must not go on being reported.
        self.clear();
        for worker in workers {
            let l = &worker.labels;
            set(&self.up, l, u64::from(worker.up));
            set(&self.active_requests, l, worker.active_requests);
            set(&self.reserved_prefill_tokens, l, worker.reserved_prefill_tokens);
            set(&self.reserved_kv_blocks, l, worker.reserved_kv_blocks);
            set(&self.index_blocks, l, worker.index_blocks);
            set(&self.index_stale, l, u64::from(worker.index_stale));
            if let Some(usage) = worker.kv_usage {
                self.kv_usage.get_or_create(l).set(usage);
            }
        }
        for group in groups {
            set(&self.live_bookings, &group.labels, group.live_bookings);
            set(&self.held, &group.labels, group.held as u64);
            set(&self.token_cache_bytes, &group.labels, group.token_cache_bytes);
        }
    }

    fn clear(&self) {
        self.up.clear();
        self.active_requests.clear();
        self.reserved_prefill_tokens.clear();
        self.reserved_kv_blocks.clear();
        self.index_blocks.clear();
        self.index_stale.clear();
        self.kv_usage.clear();
    }
}

fn set<L>(family: &Family<L, Gauge>, labels: &L, value: u64)
where
    L: Clone + std::hash::Hash + Eq,
{
    family.get_or_create(labels).set(i64::try_from(value).unwrap_or(i64::MAX));
}

pub(crate) trait Labels:
    Clone + std::hash::Hash + Eq + EncodeLabelSet + std::fmt::Debug + Send + Sync + 'static
{
}
impl<T> Labels for T where
    T: Clone + std::hash::Hash + Eq + EncodeLabelSet + std::fmt::Debug + Send + Sync + 'static
{
}

pub(crate) fn counter<L: Labels>(r: &mut Registry, name: &str, help: &str) -> Family<L, Counter> {
    let family = Family::default();
    r.register(name, help, family.clone());
    family
}

fn gauge<L: Labels>(r: &mut Registry, name: &str, help: &str) -> Family<L, Gauge> {
    let family = Family::default();
    r.register(name, help, family.clone());
    family
}

pub(crate) fn float<L: Labels>(r: &mut Registry, name: &str, help: &str) -> Family<L, Float> {
    let family = Family::default();
    r.register(name, help, family.clone());
    family
}

fn histogram<L: Labels>(
    r: &mut Registry,
    name: &str,
    help: &str,
    new: fn() -> Histogram,
) -> Family<L, Histogram> {
    let family = Family::new_with_constructor(new);
    r.register(name, help, family.clone());
    family
}
