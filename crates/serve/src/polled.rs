//! KV events that have to be asked for: TensorRT-LLM's `/kv_cache_events`, which hands each event out
//! once.
//!
//! Invariants: one request at a time, because two would share the events between them; where some may
//! be lost (a gap in their numbers, an answer cut off) the worker counts as empty, as nobody can say
//! what was removed. Blocks that a decode worker received are told by nobody: see `sight::place`.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use pointsman_kv::{Groups, Slot};
use pointsman_wire::kv_events::{Change, PolledEvent, as_message, drained};
use tokio::time::sleep;

use crate::apply::{Message, Read, Window};
use crate::fleet::{Group, Rank, Worker};
use crate::kv_metrics::Tally;
use crate::router::{Router, labels};
use crate::upstream::read;

/// Where they are.
const PATH: &str = "/kv_cache_events";

/// Pause between two requests while there are events. The engine itself waits for some before it
/// answers with none.
const PAUSE: Duration = Duration::from_millis(50);

/// The longest pause where there are none or it cannot be reached; doubles up to it.
const LONGEST_PAUSE: Duration = Duration::from_secs(2);

/// How long an answer may take.
const WAIT: Duration = Duration::from_secs(15);

/// Bytes of one answer.
const MAX_BYTES: usize = 64 * 1024 * 1024;

/// Asks a worker for its events until it is removed.
pub(crate) async fn poll(router: Arc<Router>, group: Arc<Group>, worker: Arc<Worker>) {
    let Some(rank) = worker.slots.first().and_then(|slot| group.roster.load().get(*slot).cloned())
    else {
        return;
    };
    let gone = worker.gone.clone();
    let poller = Poller {
        window: Window::new(Slot(rank.slot.0), group.hasher, Groups::default()),
        tally: Tally::new(&labels(&group, &rank)),
        next: None,
        window_tokens: 0,
        router,
        group,
        rank,
    };
    gone.run_until_cancelled(poller.run()).await;
}

struct Poller {
    router: Arc<Router>,
    group: Arc<Group>,
    rank: Rank,
    window: Window,
    tally: Tally,
    /// The number of the next event; None before the first.
    next: Option<u64>,
    /// The largest attention window seen: blocks of smaller ones are of no whole prefix.
    window_tokens: u64,
}

/// Why nothing was drained.
enum Empty {
    /// Nothing was asked, or the engine has none to give: nothing is lost.
    Nothing,
    /// The engine may have given them away, and they did not arrive.
    Lost,
}

impl Poller {
    async fn run(mut self) {
        let mut pause = PAUSE;
        loop {
            match self.drain().await {
                Ok(events) if !events.is_empty() => {
                    pause = PAUSE;
                    self.take(events).await;
                }
                Ok(_) | Err(Empty::Nothing) => pause = (pause * 2).min(LONGEST_PAUSE),
                Err(Empty::Lost) => {
                    pause = (pause * 2).min(LONGEST_PAUSE);
                    self.lose("an answer with KV events did not arrive").await;
                }
            }
            sleep(pause).await;
        }
    }

    async fn drain(&self) -> Result<Vec<PolledEvent>, Empty> {
        let uri = self.rank.worker.uri(PATH).map_err(|_| Empty::Nothing)?;
        let mut headers = http::HeaderMap::new();
        self.rank.worker.address(&mut headers);
        let posted = self.router.upstream.post(uri, headers, Bytes::from_static(b"{}"), WAIT).await;
        let response = match posted {
            Ok(response) if response.status().is_success() => response,
            Ok(_) | Err(pointsman_brain::Cause::Connect) => return Err(Empty::Nothing),
            Err(_) => return Err(Empty::Lost),
        };
        let body = tokio::time::timeout(WAIT, read(response.into_body(), MAX_BYTES)).await;
        let Ok(Ok(body)) = body else { return Err(Empty::Lost) };
        drained(&body).map_err(|_| Empty::Lost)
    }

    /// Applies what was drained, after a look at whether anything is missing before or in it.
    async fn take(&mut self, drained: Vec<PolledEvent>) {
        // Where attention runs data-parallel, each rank numbers its events by itself; a request cannot
        // be sent to one of them, so that what the others hold is of no use.
        let (events, others): (Vec<_>, Vec<_>) =
            drained.into_iter().partition(|event| event.rank.unwrap_or(0) == 0);
        self.tally.events(&self.router.metrics.kv, "skipped", others.len() as u64);
        if events.is_empty() {
            return;
        }
        let mut from = 0;
        for (at, event) in events.iter().enumerate() {
            if self.next.is_some_and(|next| next != event.id) {
                self.apply(&events[from..at]).await;
                from = at;
                let restarted = event.id == 0;
                if restarted {
                    self.tally.events(&self.router.metrics.kv, "restart", 1);
                    self.clear().await;
                } else {
                    self.tally.events(&self.router.metrics.kv, "gap", 1);
                    self.lose("KV events are missing").await;
                }
            }
            self.next = event.id.checked_add(1);
        }
        self.apply(&events[from..]).await;
        self.rank.worker.set_stale(self.rank.slot, false);
        let worker = Arc::clone(&self.rank.worker);
        self.group.amend(&worker, |learned| {
            learned.publishes_events = true;
            if let Some(blocks) = events.iter().rev().find_map(device_blocks) {
                learned.capacity_blocks = Some(blocks);
            }
        });
    }

    async fn apply(&mut self, events: &[PolledEvent]) {
        let largest = events.iter().filter_map(|event| event.window).max().unwrap_or(0);
        self.window_tokens = self.window_tokens.max(largest);
        let whole =
            |event: &&PolledEvent| event.window.is_none_or(|window| window >= self.window_tokens);
        let block_size = self.rank.worker.spec().block_size.get();
        let payload = as_message(events.iter().filter(whole), block_size);
        let skipped = events.iter().filter(|event| !whole(event)).count() as u64;
        self.tally.events(&self.router.metrics.kv, "skipped", skipped);
        // It was written here, so that it can be read.
        let Ok(mut message) = Message::new(&payload) else { return };
        loop {
            let done = self.window.fill(&mut message);
            self.write().await;
            if done {
                break;
            }
        }
        let Read { stored, removed, cleared, malformed, .. } = message.read;
        for (kind, count) in [
            ("stored", stored),
            ("removed", removed),
            ("cleared", cleared),
            ("malformed", malformed),
        ] {
            self.tally.events(&self.router.metrics.kv, kind, count);
        }
    }

    async fn write(&mut self) {
        if self.window.is_empty() {
            return;
        }
        let applied = {
            let _turn = self.group.turn().await;
            let mut writer = self.group.writer();
            if self.rank.worker.gone.is_cancelled() {
                // Another worker may have its slot by now.
                return self.window.reset();
            }
            self.window.apply(&mut writer)
        };
        for (kind, count) in [
            ("stored", applied.stored.blocks),
            ("orphaned", applied.stored.orphaned),
            ("removed", applied.removed.blocks),
        ] {
            self.tally.blocks(&self.router.metrics.kv, kind, count);
        }
        tokio::task::yield_now().await;
    }

    /// Events are lost: what is known of the worker no longer holds.
    async fn lose(&mut self, what: &'static str) {
        self.next = None;
        self.tally.events(&self.router.metrics.kv, "lost", 1);
        tracing::warn!(
            model = self.group.name(),
            worker = self.rank.worker.name(),
            "{what}; the worker's cache counts as empty until events say otherwise"
        );
        self.rank.worker.set_stale(self.rank.slot, true);
        self.clear().await;
    }

    async fn clear(&mut self) {
        self.window.reset();
        let _turn = self.group.turn().await;
        let mut writer = self.group.writer();
        if !self.rank.worker.gone.is_cancelled() {
            writer.clear(Slot(self.rank.slot.0));
        }
    }
}

/// KV blocks on the device, where an event tells them.
fn device_blocks(event: &PolledEvent) -> Option<u64> {
    match &event.change {
        Change::Created { blocks } => blocks.first().copied().filter(|blocks| *blocks > 0),
        _ => None,
    }
}
