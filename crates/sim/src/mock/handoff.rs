//! The prefill side of a hand-off: which prompts are pinned for whom, and what became of the rest.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

use serde::{Deserialize, Serialize};

use tokio::sync::Notify;

use super::mooncake;
use super::rank::Rank;
use crate::engine::JobId;

/// Hand-offs remembered, pinned or past; beyond it the oldest are forgotten.
const REMEMBERED: usize = 65_536;

/// What a decode engine wants.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "snake_case")]
pub(super) enum Wish {
    /// Is about to pull; the pin stays while the connection does.
    Claim { engine: String, request: String, tokens: u32, digest: u64, last_block: u32 },
    /// Waits until the other leg of its request has come here, and then claims it.
    Meet { engine: String, request: String, tokens: u32, digest: u64 },
    /// Has pulled, or never will.
    Done { request: String },
}

/// What a prefill engine says to a claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "verdict", rename_all = "snake_case")]
pub(super) enum Verdict {
    /// The KV of this very prompt is here.
    Granted,
    /// This is another engine than the one named.
    OtherEngine,
    /// It has fewer blocks than the one asked for.
    NoSuchBlock,
    /// No such request was ever handed off here.
    Unknown,
    /// Its KV was pulled or released before.
    Used,
    /// Its lease has passed.
    Expired,
    /// Its prompt is another one, this many tokens long.
    OtherPrompt { tokens: u32 },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Pinned,
    Claimed,
    Used,
    Expired,
}

struct Entry {
    rank: usize,
    job: JobId,
    tokens: u32,
    digest: u64,
    state: State,
}

#[derive(Default)]
struct Inner {
    entries: HashMap<String, Entry>,
    by_job: HashMap<JobId, String>,
    order: VecDeque<String>,
}

/// The hand-offs of one mock engine, all ranks. Its lock is never held while a rank's is taken.
pub(super) struct Registry {
    pub(super) engine_id: String,
    ranks: OnceLock<Vec<Weak<Rank>>>,
    inner: Mutex<Inner>,
    /// Told of every change of an entry.
    changed: Notify,
}

impl Registry {
    pub(super) fn new(engine_id: String) -> Registry {
        let (ranks, inner, changed) = Default::default();
        Registry { engine_id, ranks, inner, changed }
    }

    /// Tells the ranks, once, after they were made.
    pub(super) fn set_ranks(&self, ranks: &[Arc<Rank>]) {
        let _ = self.ranks.set(ranks.iter().map(Arc::downgrade).collect());
    }

    /// Notes a prompt that its rank has pinned.
    pub(super) fn pinned(&self, request: String, rank: usize, job: JobId, prompt: (u32, u64)) {
        let (tokens, digest) = prompt;
        let mut inner = self.lock();
        if inner.order.len() >= REMEMBERED
            && let Some(oldest) = inner.order.pop_front()
            && let Some(entry) = inner.entries.remove(&oldest)
        {
            inner.by_job.remove(&entry.job);
        }
        inner.by_job.insert(job, request.clone());
        inner.order.push_back(request.clone());
        inner.entries.insert(request, Entry { rank, job, tokens, digest, state: State::Pinned });
        drop(inner);
        self.changed.notify_waiters();
    }

    /// Waits until a prompt of this name is here, and claims it.
    /// `engine` is the one that it has to be of, empty for any.
    pub(super) async fn meet(
        &self,
        engine: &str,
        request: &str,
        tokens: u32,
        digest: u64,
    ) -> Verdict {
        self.wait(|inner| inner.entries.contains_key(request)).await;
        let rank = self.lock().entries.get(request).map(|entry| entry.rank);
        let ranks = self.ranks.get().map_or(0, Vec::len);
        let is_of = |rank| engine == mooncake::engine_of(&self.engine_id, ranks, rank);
        if !engine.is_empty() && !rank.is_some_and(is_of) {
            return Verdict::OtherEngine;
        }
        self.claim(&self.engine_id, request, tokens, digest)
    }

    /// Waits until a prompt is no longer kept for anybody; whether it was pulled.
    pub(super) async fn handed_over(&self, request: &str) -> bool {
        let state = |inner: &Inner| inner.entries.get(request).map(|entry| entry.state);
        let over = |inner: &Inner| !matches!(state(inner), Some(State::Pinned | State::Claimed));
        self.wait(over).await;
        state(&self.lock()) == Some(State::Used)
    }

    async fn wait(&self, until: impl Fn(&Inner) -> bool) {
        loop {
            let mut changed = std::pin::pin!(self.changed.notified());
            changed.as_mut().enable();
            if until(&self.lock()) {
                return;
            }
            changed.await;
        }
    }

    /// Notes that the lease of a pin has passed.
    pub(super) fn expired(&self, job: JobId) {
        let mut inner = self.lock();
        let Some(request) = inner.by_job.get(&job).cloned() else { return };
        if let Some(entry) = inner.entries.get_mut(&request) {
            entry.state = State::Expired;
        }
        drop(inner);
        self.changed.notify_waiters();
    }

    /// Ends a lease at once.
    pub(super) fn expire_now(&self, job: JobId) {
        self.expired(job);
        let rank = self.lock().find(job).map(|entry| entry.rank);
        self.rank(rank, |rank| rank.unpin(job));
    }

    /// Ends a lease at once, if nobody has claimed it.
    pub(super) fn give_up(&self, job: JobId) {
        let waits = self.lock().find(job).is_some_and(|entry| entry.state == State::Pinned);
        if waits {
            self.expire_now(job);
        }
    }

    /// Whether its ranks have a block of this number; 0 is a block that holds nothing.
    pub(super) fn has_block(&self, number: u32) -> bool {
        let capacity = self.rank(Some(0), |rank| rank.load().capacity_blocks);
        capacity.is_some_and(|blocks| number <= blocks)
    }

    /// Answers a claim and keeps the pin from expiring.
    pub(super) fn claim(&self, engine: &str, request: &str, tokens: u32, digest: u64) -> Verdict {
        if engine != self.engine_id {
            return Verdict::OtherEngine;
        }
        let (rank, job, verdict) = {
            let mut inner = self.lock();
            let Some(entry) = inner.entries.get_mut(request) else { return Verdict::Unknown };
            match entry.state {
                State::Used | State::Claimed => return Verdict::Used,
                State::Expired => return Verdict::Expired,
                State::Pinned => entry.state = State::Claimed,
            }
            let same = (entry.tokens, entry.digest) == (tokens, digest);
            let other = Verdict::OtherPrompt { tokens: entry.tokens };
            (entry.rank, entry.job, if same { Verdict::Granted } else { other })
        };
        match self.rank(Some(rank), |rank| rank.hold(job)) {
            Some(true) => verdict,
            _ => Verdict::Expired,
        }
    }

    /// The claim's connection was lost before the pull was over: the lease starts again.
    pub(super) fn lost(&self, request: &str) {
        let found = {
            let mut inner = self.lock();
            let entry = inner.entries.get_mut(request).filter(|e| e.state == State::Claimed);
            entry.map(|entry| {
                entry.state = State::Pinned;
                (entry.rank, entry.job)
            })
        };
        if let Some((rank, job)) = found {
            self.rank(Some(rank), |rank| rank.lease_again(job));
        }
    }

    /// The KV was pulled or is not wanted: releases the pin, unless another one has claimed it.
    pub(super) fn done(&self, request: &str, claimed: bool) {
        let found = {
            let mut inner = self.lock();
            let Some(entry) = inner.entries.get_mut(request) else { return };
            let expected = if claimed { State::Claimed } else { State::Pinned };
            if entry.state != expected {
                return;
            }
            entry.state = State::Used;
            (entry.rank, entry.job)
        };
        self.changed.notify_waiters();
        self.rank(Some(found.0), |rank| rank.unpin(found.1));
    }

    fn rank<R>(&self, rank: Option<usize>, what: impl FnOnce(&Rank) -> R) -> Option<R> {
        self.ranks.get()?.get(rank?)?.upgrade().map(|rank| what(&rank))
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    fn find(&self, job: JobId) -> Option<&Entry> {
        self.entries.get(self.by_job.get(&job)?)
    }
}
