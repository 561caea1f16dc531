//! The state of one mock engine that its connections share.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use pointsman_tokens::Model;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::config::{EngineConfig, Role};
use super::faults::{Action, Faults, Leg};
use super::handoff::Registry;
use super::ledger::Ledger;
use super::publisher::Publisher;
use super::rank::Rank;
use super::side::Peers;
use super::text::Words;
use crate::engine::JobId;
use crate::rng::mix;

/// Which listeners are closed by a fault.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Closed {
    pub(super) api: bool,
    pub(super) side_channel: bool,
    pub(super) bootstrap: bool,
}

pub(super) struct App {
    pub(super) config: EngineConfig,
    pub(super) model: Arc<Model>,
    pub(super) words: Arc<Words>,
    pub(super) ranks: Vec<Arc<Rank>>,
    pub(super) publishers: Vec<Arc<Publisher>>,
    pub(super) registry: Arc<Registry>,
    pub(super) ledger: Ledger,
    /// Endpoints as `/kv_event_sources` tells them, per rank.
    pub(super) event_sources: Vec<(String, String)>,
    pub(super) side_port: u16,
    /// Of the bootstrap server, if it has one.
    pub(super) bootstrap_port: Option<u16>,
    pub(super) peers: Peers,
    pub(super) fingerprint: String,
    pub(super) in_flight: AtomicU64,
    pub(super) dead: AtomicBool,
    pub(super) closed: watch::Sender<Closed>,
    pub(super) tasks: TaskTracker,
    pub(super) stop: CancellationToken,
    faults: Mutex<Faults>,
    /// Names of blocks whose content is not what their name says.
    poisoned: Mutex<HashSet<u64>>,
    next_job: AtomicU64,
    next_id: AtomicU64,
}

/// What is known before the sockets are bound, and what they turned out to be.
pub(super) struct Parts {
    pub(super) config: EngineConfig,
    pub(super) model: Arc<Model>,
    pub(super) words: Arc<Words>,
    pub(super) ranks: Vec<Arc<Rank>>,
    pub(super) publishers: Vec<Arc<Publisher>>,
    pub(super) registry: Arc<Registry>,
    pub(super) event_sources: Vec<(String, String)>,
    pub(super) side_port: u16,
    /// Of the bootstrap server, if it has one.
    pub(super) bootstrap_port: Option<u16>,
}

impl App {
    pub(super) fn new(parts: Parts) -> App {
        let Parts { config, model, words, ranks, publishers, registry, .. } = parts;
        let Parts { event_sources, side_port, bootstrap_port, .. } = parts;
        // Ids must differ between engines and runs; nothing else depends on them.
        let born = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_nanos() as u64);
        let salt = mix(born ^ u64::from(side_port) << 48);
        let fingerprint = format!("vllm-{}-{:08x}", config.version, salt as u32);
        let app = App {
            ledger: Ledger::new(config.keep_requests),
            faults: Mutex::default(),
            peers: Peers::default(),
            poisoned: Mutex::default(),
            in_flight: AtomicU64::new(0),
            dead: AtomicBool::new(false),
            closed: watch::Sender::default(),
            tasks: TaskTracker::new(),
            stop: CancellationToken::new(),
            next_job: AtomicU64::new(0),
            next_id: AtomicU64::new(salt),
            config,
            model,
            words,
            ranks,
            publishers,
            registry,
            event_sources,
            side_port,
            bootstrap_port,
            fingerprint,
        };
        app.set_faults(app.config.faults.clone());
        app
    }

    /// Whether it has a KV connector at all.
    pub(super) fn has_connector(&self) -> bool {
        self.config.role != Role::Unified
    }

    pub(super) fn job_id(&self) -> JobId {
        JobId(self.next_job.fetch_add(1, Ordering::Relaxed))
    }

    /// 16 hex digits that no other request has.
    pub(super) fn fresh_hex(&self) -> String {
        format!("{:016x}", mix(self.next_id.fetch_add(1, Ordering::Relaxed)))
    }

    pub(super) fn faults(&self) -> Faults {
        self.lock_faults().clone()
    }

    /// Replaces all faults; a dead engine is alive again.
    pub(super) fn set_faults(&self, faults: Faults) {
        if faults.restart_publisher {
            self.ranks.iter().for_each(|rank| rank.restart_publisher());
            self.lock_poisoned().clear();
        }
        for publisher in &self.publishers {
            publisher.set_faults(faults.events);
        }
        let closed = Closed {
            api: faults.down,
            side_channel: faults.side_channel_down,
            bootstrap: faults.bootstrap_down,
        };
        self.closed.send_if_modified(|now| std::mem::replace(now, closed) != closed);
        self.dead.store(false, Ordering::Relaxed);
        *self.lock_faults() = faults;
    }

    /// The fault that hits this request, if any; its count goes down.
    pub(super) fn fault_for(&self, leg: Leg) -> Option<Action> {
        let mut faults = self.lock_faults();
        let hits = |of: Leg| of == Leg::Any || of == leg;
        let at = faults.rules.iter().position(|rule| hits(rule.leg) && rule.count != Some(0))?;
        if let Some(count) = &mut faults.rules[at].count {
            *count -= 1;
        }
        self.ledger.fault_hit();
        Some(faults.rules[at].action.clone())
    }

    /// The engine dies: everything that runs fails.
    pub(super) fn die(&self) {
        self.dead.store(true, Ordering::Relaxed);
        self.ranks.iter().for_each(|rank| rank.fail_all());
    }

    /// Blocks that came from another engine.
    pub(super) fn received(&self, rank: usize, names: &[u64]) {
        if let Some(publisher) = self.publishers.get(rank) {
            publisher.received(names);
        }
    }

    pub(super) fn poison(&self, names: &[u64]) {
        self.lock_poisoned().extend(names);
    }

    /// Empties the prefix caches of all ranks that are idle.
    pub(super) fn reset_caches(&self) {
        // Every rank is asked, whatever the others say.
        let emptied = self.ranks.iter().filter(|rank| rank.reset_cache()).count();
        if emptied == self.ranks.len() {
            self.lock_poisoned().clear();
        }
    }

    pub(super) fn is_poisoned(&self, names: &[u64]) -> bool {
        let poisoned = self.lock_poisoned();
        !poisoned.is_empty() && names.iter().any(|name| poisoned.contains(name))
    }

    fn lock_poisoned(&self) -> MutexGuard<'_, HashSet<u64>> {
        self.poisoned.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock_faults(&self) -> MutexGuard<'_, Faults> {
        self.faults.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Unix seconds.
pub(super) fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}
