//! What is counted of KV events: by worker, what became of them, of their blocks and of their streams.

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;

use crate::metrics::{ByWorker, Float, counter, float};

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct KvEvent {
    model: String,
    worker: String,
    kind: &'static str,
}

/// What can become of KV events and their stream.
const EVENT_KINDS: [&str; 14] = [
    "cleared",
    "disconnected",
    "dropped",
    "gap",
    "lost",
    "malformed",
    "removed",
    "repeated",
    "replay",
    "replay_failed",
    "restart",
    "resync",
    "skipped",
    "stored",
];

/// What can become of the blocks that KV events name.
const BLOCK_KINDS: [&str; 7] =
    ["malformed", "orphaned", "refused", "removed", "renamed", "stored", "unknown"];

/// The metrics of KV events.
pub(crate) struct KvMetrics {
    events: Family<KvEvent, Counter>,
    blocks: Family<KvEvent, Counter>,
    pub(crate) lag_seconds: Family<ByWorker, Float>,
}

impl KvMetrics {
    pub(crate) fn new(r: &mut Registry) -> KvMetrics {
        KvMetrics {
            events: counter(r, "kv_events", "KV events by what became of them"),
            blocks: counter(
                r,
                "kv_event_blocks",
                "Blocks that KV events named, by what became of them",
            ),
            lag_seconds: float(
                r,
                "kv_event_lag_seconds",
                "Age of the latest KV event when it was applied",
            ),
        }
    }

    /// Drops the series of a worker that went.
    pub(crate) fn forget(&self, model: &str, worker: &str, ranks: u32) {
        let labels = |kind| KvEvent { model: model.to_owned(), worker: worker.to_owned(), kind };
        for kind in EVENT_KINDS {
            self.events.remove(&labels(kind));
        }
        for kind in BLOCK_KINDS {
            self.blocks.remove(&labels(kind));
        }
        for rank in 0..ranks {
            let (model, worker) = (model.to_owned(), worker.to_owned());
            self.lag_seconds.remove(&ByWorker { model, worker, rank });
        }
    }
}

/// One publisher's counters of KV events, each looked up once.
pub(crate) struct Tally {
    model: String,
    worker: String,
    events: Vec<(&'static str, Counter)>,
    blocks: Vec<(&'static str, Counter)>,
}

impl Tally {
    pub(crate) fn new(labels: &ByWorker) -> Tally {
        let ByWorker { model, worker, .. } = labels.clone();
        Tally { model, worker, events: Vec::new(), blocks: Vec::new() }
    }

    /// Counts events, or what happened to their stream.
    pub(crate) fn events(&mut self, metrics: &KvMetrics, kind: &'static str, count: u64) {
        let labels = || KvEvent { model: self.model.clone(), worker: self.worker.clone(), kind };
        add(&mut self.events, &metrics.events, kind, count, labels);
    }

    /// Counts the blocks that events named.
    pub(crate) fn blocks(&mut self, metrics: &KvMetrics, kind: &'static str, count: u64) {
        let labels = || KvEvent { model: self.model.clone(), worker: self.worker.clone(), kind };
        add(&mut self.blocks, &metrics.blocks, kind, count, labels);
    }
}

/// Adds to the counter of a kind. A series is there from the first count on.
fn add(
    known: &mut Vec<(&'static str, Counter)>,
    family: &Family<KvEvent, Counter>,
    kind: &'static str,
    count: u64,
    labels: impl Fn() -> KvEvent,
) {
    if count == 0 {
        return;
    }
    let at = known.iter().position(|(own, _)| *own == kind).unwrap_or_else(|| {
        known.push((kind, family.get_or_create_owned(&labels())));
        known.len() - 1
    });
    known[at].1.inc_by(count);
}
