//! Following one publisher's KV events: subscribe, keep the order, ask for what was missed, apply.
//!
//! Invariants: the cursor decides what is applied, replayed or forgotten; one publisher, however slow,
//! dead or noisy, costs its own task, a bounded buffer, and of the writer one window in its turn.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use pointsman_config::{Endpoint, KvStream, SocketMode};
use pointsman_kv::{Action, ClearCause, Cursor, CursorLimits, CursorStats, Slot, Stamp, Standing};
use pointsman_wire::kv_events::Batch;
use pointsman_wire::zmtp::{Limits, SocketType};
use tokio::time::{Instant, sleep, sleep_until, timeout, timeout_at};
use tokio_util::sync::CancellationToken;

use crate::apply::{Message, Read, WINDOW_CHANGES, Window};
use crate::fleet::{Group, Rank};
use crate::kv_metrics::Tally;
use crate::mark::{Mark, Reached};
use crate::metrics::ByWorker;
use crate::router::{Router, labels};
use crate::zmq::{Listener, Socket, ZmqError};

/// The first pause before connecting again; doubles up to `LONGEST_PAUSE`.
const FIRST_PAUSE: Duration = Duration::from_millis(50);

/// The longest pause between two attempts to connect.
const LONGEST_PAUSE: Duration = Duration::from_secs(2);

/// How long connecting may take.
const CONNECT_WAIT: Duration = Duration::from_secs(5);

/// How long a replay may be silent before it counts as failed.
const REPLAY_WAIT: Duration = Duration::from_secs(5);

/// The first pause before lost events are asked for again; doubles up to `LONGEST_RESYNC`.
const FIRST_RESYNC: Duration = Duration::from_secs(5);

/// The longest pause before lost events are asked for again: it takes a replay of all there is.
const LONGEST_RESYNC: Duration = Duration::from_secs(600);

/// What one message of events may take.
const MESSAGE_LIMITS: Limits = Limits { max_frames: 8, max_message: 32 * 1024 * 1024 };

/// The sequence number that marks the end of a replay.
const REPLAY_END: u64 = u64::MAX;

/// The sockets of rank `shift`: every port is that much higher than rank 0's.
pub(crate) fn of_rank(stream: &KvStream, shift: u16) -> KvStream {
    let shifted = |endpoint: &Endpoint| match endpoint {
        Endpoint::Tcp { host, port } => {
            Endpoint::Tcp { host: host.clone(), port: port.saturating_add(shift) }
        }
        // vLLM names a rank's ipc socket by a suffix.
        Endpoint::Ipc(path) if shift > 0 => {
            let mut path = path.clone().into_os_string();
            path.push(format!("_dp{shift}"));
            Endpoint::Ipc(path.into())
        }
        Endpoint::Ipc(path) => Endpoint::Ipc(path.clone()),
    };
    KvStream {
        endpoint: shifted(&stream.endpoint),
        replay: stream.replay.as_ref().map(shifted),
        ..stream.clone()
    }
}

/// An endpoint that an engine binds, as seen from here: `*` is the engine's own host. `None` if it
/// is no endpoint that can be connected to.
pub(crate) fn endpoint_at(endpoint: &str, host: &str) -> Option<Endpoint> {
    if let Some(path) = endpoint.strip_prefix("ipc://") {
        return Some(Endpoint::Ipc(path.into()));
    }
    let (bound, port) = endpoint.strip_prefix("tcp://")?.rsplit_once(':')?;
    let port = port.parse().ok()?;
    let host = match bound {
        "*" | "::" | "[::]" | "0.0.0.0" => host.trim_matches(['[', ']']),
        other => other.trim_matches(['[', ']']),
    };
    Some(Endpoint::Tcp { host: host.to_owned(), port })
}

/// Follows a publisher until it is told to stop.
pub(crate) async fn follow(
    router: Arc<Router>,
    group: Arc<Group>,
    rank: Rank,
    stream: KvStream,
    stop: CancellationToken,
) {
    let follower = Follower::new(router, group, rank, stream);
    tokio::select! {
        () = stop.cancelled() => {}
        () = follower.run() => {}
    }
}

struct Follower {
    router: Arc<Router>,
    group: Arc<Group>,
    rank: Rank,
    stream: KvStream,
    cursor: Cursor<Bytes>,
    window: Window,
    /// The index has been changed, and the rank's mark not been set, since all was done that the
    /// cursor wanted.
    behind: bool,
    labels: ByWorker,
    tally: Tally,
    /// What of the cursor's counters is in the metrics.
    counted: CursorStats,
    replay: Option<Replay>,
    /// When lost events are asked for again.
    resync_at: Option<Instant>,
    resync_pause: Duration,
    actions: Vec<Action<Bytes>>,
    /// The connection has brought a message.
    heard: bool,
}

/// A replay under way.
struct Replay {
    socket: Option<Socket>,
    from: u64,
    until: Instant,
}

/// What came next.
enum Heard {
    /// Nothing, and it is time to ask for what was lost.
    Resync,
    Live(Result<Vec<Bytes>, ZmqError>),
    Replayed(Result<Vec<Bytes>, ZmqError>),
}

impl Follower {
    fn new(router: Arc<Router>, group: Arc<Group>, rank: Rank, stream: KvStream) -> Follower {
        let (limits, can_replay) = (CursorLimits::default(), stream.replay.is_some());
        let labels = labels(&group, &rank);
        let mark = rank.worker.take_restored(rank.slot).unwrap_or_default();
        Follower {
            cursor: match mark.position {
                Some(position) => Cursor::resume(position, can_replay, limits),
                None => Cursor::new(can_replay, limits),
            },
            window: Window::new(Slot(rank.slot.0), group.hasher, mark.groups),
            behind: true,
            tally: Tally::new(&labels),
            labels,
            counted: CursorStats::default(),
            replay: None,
            resync_at: None,
            resync_pause: FIRST_RESYNC,
            actions: Vec::new(),
            heard: false,
            router,
            group,
            rank,
            stream,
        }
    }

    async fn run(mut self) {
        let mut pause = FIRST_PAUSE;
        // Another router may ask for what is known before the publisher has been reached.
        self.write(true).await;
        let listener = self.listen().await;
        loop {
            match self.open(listener.as_ref()).await {
                Ok(socket) => {
                    let begun = Instant::now();
                    self.heard = false;
                    self.cursor.connected(&mut self.actions);
                    self.perform().await;
                    let error = self.hear(socket).await;
                    // Whoever accepts and ends it at once is not asked more and more often.
                    if self.heard || begun.elapsed() > LONGEST_PAUSE {
                        pause = FIRST_PAUSE;
                    }
                    self.rank.worker.set_stale(self.rank.slot, true);
                    self.rank.worker.look_again.notify_one();
                    self.count("disconnected", 1);
                    tracing::warn!(
                        model = self.labels.model,
                        worker = self.labels.worker,
                        %error,
                        "the KV event stream ended; connecting again"
                    );
                }
                Err(error) => tracing::debug!(
                    model = self.labels.model,
                    worker = self.labels.worker,
                    %error,
                    "the KV event publisher could not be reached"
                ),
            }
            sleep(pause).await;
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    /// The listening socket, where the publisher is the one that connects.
    async fn listen(&self) -> Option<Listener> {
        if self.stream.mode == SocketMode::Connect {
            return None;
        }
        loop {
            match Listener::bind(&self.stream.endpoint).await {
                Ok(listener) => return Some(listener),
                Err(error) => {
                    tracing::warn!(
                        model = self.labels.model,
                        worker = self.labels.worker,
                        endpoint = ?self.stream.endpoint,
                        %error,
                        "the socket for KV events cannot be bound"
                    );
                    sleep(LONGEST_PAUSE).await;
                }
            }
        }
    }

    async fn open(&self, listener: Option<&Listener>) -> Result<Socket, ZmqError> {
        let mut socket = match listener {
            Some(listener) => listener.accept(SocketType::Sub, MESSAGE_LIMITS).await?,
            None => {
                let connect =
                    Socket::connect(&self.stream.endpoint, SocketType::Sub, MESSAGE_LIMITS);
                timeout(CONNECT_WAIT, connect).await.unwrap_or_else(|_| Err(ZmqError::Closed))?
            }
        };
        socket.subscribe(self.stream.topic.as_bytes());
        Ok(socket)
    }

    /// Applies what the publisher says until the connection ends.
    async fn hear(&mut self, mut live: Socket) -> ZmqError {
        loop {
            let heard = match &mut self.replay {
                None => tokio::select! {
                    message = live.next() => Heard::Live(message),
                    () = until(self.resync_at) => Heard::Resync,
                },
                Some(replay) => tokio::select! {
                    message = live.next() => Heard::Live(message),
                    message = replay.next(self.stream.replay.as_ref()) => Heard::Replayed(message),
                },
            };
            match heard {
                Heard::Resync => {
                    self.resync_at = None;
                    self.resync_pause = (self.resync_pause * 2).min(LONGEST_RESYNC);
                    self.cursor.resync(&mut self.actions);
                }
                Heard::Live(Err(error)) => return error,
                Heard::Live(Ok(frames)) => {
                    self.live(&frames);
                    // What has come together is applied together.
                    while self.actions.len() < WINDOW_CHANGES {
                        let Some(frames) = live.buffered() else { break };
                        self.live(&frames);
                    }
                }
                Heard::Replayed(Ok(frames)) => {
                    self.replayed(&frames);
                    while self.actions.len() < WINDOW_CHANGES && !self.asks_again() {
                        let replay = self.replay.as_mut();
                        let Some(frames) = replay.and_then(Replay::buffered) else { break };
                        self.replayed(&frames);
                    }
                }
                Heard::Replayed(Err(error)) => {
                    tracing::warn!(
                        model = self.labels.model,
                        worker = self.labels.worker,
                        %error,
                        "missed KV events could not be replayed"
                    );
                    self.replay = None;
                    self.cursor.replay_failed(&mut self.actions);
                }
            }
            self.perform().await;
        }
    }

    /// Whether the replay under way is void because the cursor wants another one.
    fn asks_again(&self) -> bool {
        self.actions.iter().any(|action| matches!(action, Action::Replay { .. }))
    }

    fn live(&mut self, frames: &[Bytes]) {
        let [_topic, seq, payload] = frames else { return self.count("malformed", 1) };
        let Some(seq) = sequence(seq) else { return self.count("malformed", 1) };
        let stamp = Stamp { seq, sent_ns: sent_ns(payload) };
        self.heard = true;
        // A copy: what the cursor holds must not keep the frames beside it, nor the buffer that other
        // messages were read into.
        let message = Bytes::copy_from_slice(payload);
        self.cursor.live(stamp, payload.len(), message, &mut self.actions);
    }

    fn replayed(&mut self, frames: &[Bytes]) {
        // After the delimiter: topic (from vLLM 0.26), sequence, payload.
        let frames = frames.strip_prefix(&[Bytes::new()]).unwrap_or(frames);
        let ([seq, payload] | [_, seq, payload]) = frames else {
            return self.count("malformed", 1);
        };
        match sequence(seq) {
            Some(REPLAY_END) => {
                self.replay = None;
                self.cursor.replay_ended(&mut self.actions);
            }
            Some(seq) => {
                let stamp = Stamp { seq, sent_ns: sent_ns(payload) };
                self.cursor.replayed(stamp, payload.clone(), &mut self.actions);
            }
            None => self.count("malformed", 1),
        }
    }

    /// Does what the cursor wants done.
    async fn perform(&mut self) {
        // What is applied may lead to further actions, in order behind those that are there.
        while !self.actions.is_empty() {
            for action in std::mem::take(&mut self.actions) {
                match action {
                    Action::Apply { message, epoch } => self.apply(&message, epoch).await,
                    Action::Replay { from } => {
                        let until = Instant::now() + REPLAY_WAIT;
                        self.replay = Some(Replay { socket: None, from, until });
                    }
                    Action::Clear(cause) => self.forget(cause).await,
                }
            }
        }
        self.write(true).await;
        self.count_stream();
        match self.cursor.standing() {
            // Not known before the replay is over.
            Standing::CatchingUp => {}
            Standing::Partial => {
                self.rank.worker.set_stale(self.rank.slot, true);
                let at = Instant::now() + self.resync_pause;
                self.resync_at.get_or_insert(at);
            }
            Standing::Current | Standing::Waiting => {
                self.rank.worker.set_stale(self.rank.slot, false);
                self.resync_at = None;
                self.resync_pause = FIRST_RESYNC;
            }
        }
    }

    async fn forget(&mut self, cause: ClearCause) {
        self.window.reset();
        self.behind = true;
        {
            let _turn = self.group.turn().await;
            let mut writer = self.group.writer();
            if self.rank.worker.gone.is_cancelled() {
                return;
            }
            writer.clear(Slot(self.rank.slot.0));
            self.rank.worker.set_reached(self.rank.slot, Reached::Within);
        }
        let what = match cause {
            ClearCause::Restart => "the publisher of KV events started anew",
            ClearCause::Lost => "KV events are lost",
            ClearCause::Resync => {
                self.count("resync", 1);
                "KV events are read again from the oldest"
            }
        };
        let ByWorker { model, worker, .. } = &self.labels;
        let then = "the worker's cache counts as empty until events say otherwise";
        if self.rank.worker.is_stale(self.rank.slot) {
            // Known already: a publisher that makes no sense must not fill the log.
            tracing::debug!(model, worker, "{what}; {then}");
        } else {
            tracing::warn!(model, worker, "{what}; {then}");
        }
    }

    /// Reads a message, and applies of it what does not fit into the window with what was read before.
    async fn apply(&mut self, payload: &Bytes, epoch: u32) {
        let read = match Message::new(payload) {
            Ok(mut message) => {
                if self.window.is_short_of(message.len()) {
                    self.write(false).await;
                }
                while !self.window.fill(&mut message) {
                    self.write(false).await;
                    tokio::task::yield_now().await;
                }
                message.read
            }
            Err(_) => Read { malformed: 1, unreadable: 1, ..Read::default() },
        };
        if read.cleared > 0 {
            self.cursor.all_cleared(epoch);
        }
        if read.unreadable > 0 {
            self.cursor.unreadable(epoch, &mut self.actions);
        }
        let Read { stored, removed, cleared, skipped, malformed, .. } = read;
        for (kind, count) in [
            ("stored", stored),
            ("removed", removed),
            ("cleared", cleared),
            ("skipped", skipped),
            ("malformed", malformed),
        ] {
            self.count(kind, count);
        }
        let lag = now_ns().saturating_sub(sent_ns(payload));
        let lag = Duration::from_nanos(lag).as_secs_f64();
        self.router.metrics.kv.lag_seconds.get_or_create(&self.labels).set(lag);
    }

    /// Applies what has been read when it is this rank's turn. `done`: that is all that the cursor
    /// wanted done, so that the index holds what it says.
    async fn write(&mut self, done: bool) {
        if self.window.is_empty() && !(done && self.behind) {
            return;
        }
        let applied = {
            let _turn = self.group.turn().await;
            let mut writer = self.group.writer();
            if self.rank.worker.gone.is_cancelled() {
                // Another worker may have its slot by now.
                self.window.reset();
                return;
            }
            let applied = self.window.apply(&mut writer);
            let mark = Mark { position: self.cursor.position(), groups: self.window.groups() };
            let reached = if done { Reached::Mark(mark) } else { Reached::Within };
            self.rank.worker.set_reached(self.rank.slot, reached);
            applied
        };
        self.behind = !done;
        let (stored, removed) = (applied.stored, applied.removed);
        for (kind, count) in [
            ("stored", stored.blocks),
            ("orphaned", stored.orphaned),
            ("malformed", stored.malformed),
            ("renamed", stored.renamed),
            ("refused", stored.refused),
            ("removed", removed.blocks),
            ("unknown", removed.unknown),
        ] {
            self.tally.blocks(&self.router.metrics.kv, kind, count);
        }
        // However much there is to read, others are heard between two windows.
        tokio::task::yield_now().await;
    }

    /// Puts what the cursor has counted into the metrics.
    fn count_stream(&mut self) {
        let (stats, before) = (self.cursor.stats(), self.counted);
        self.counted = stats;
        let dropped = |stats: &CursorStats| stats.held_dropped + stats.stragglers;
        for (kind, count) in [
            ("repeated", stats.repeated - before.repeated),
            ("gap", stats.gaps - before.gaps),
            ("replay", stats.replays - before.replays),
            ("replay_failed", stats.replays_failed - before.replays_failed),
            ("dropped", dropped(&stats) - dropped(&before)),
            ("restart", stats.restarts - before.restarts),
            ("lost", stats.losses - before.losses),
        ] {
            self.count(kind, count);
        }
    }

    fn count(&mut self, kind: &'static str, count: u64) {
        self.tally.events(&self.router.metrics.kv, kind, count);
    }
}

impl Replay {
    /// The next replayed message; connects and asks first if that is still to do. Cancel-safe: what
    /// is half done is done again.
    async fn next(&mut self, endpoint: Option<&Endpoint>) -> Result<Vec<Bytes>, ZmqError> {
        let exchange = async {
            let socket = match &mut self.socket {
                Some(socket) => socket,
                None => {
                    let endpoint = endpoint.ok_or(ZmqError::Closed)?;
                    let mut socket =
                        Socket::connect(endpoint, SocketType::Dealer, MESSAGE_LIMITS).await?;
                    socket.send(&[&[], &self.from.to_be_bytes()]);
                    self.socket.insert(socket)
                }
            };
            socket.next().await
        };
        let message = timeout_at(self.until, exchange).await.unwrap_or(Err(ZmqError::Closed))?;
        self.until = Instant::now() + REPLAY_WAIT;
        Ok(message)
    }

    /// A replayed message that has come already.
    fn buffered(&mut self) -> Option<Vec<Bytes>> {
        self.socket.as_mut()?.buffered()
    }
}

/// Waits for a moment, or for ever.
async fn until(moment: Option<Instant>) {
    match moment {
        Some(moment) => sleep_until(moment).await,
        None => std::future::pending().await,
    }
}

fn sequence(frame: &Bytes) -> Option<u64> {
    Some(u64::from_be_bytes(frame.as_ref().try_into().ok()?))
}

fn sent_ns(payload: &[u8]) -> u64 {
    // Saturates; NaN is 0, which means unknown.
    Batch::timestamp_of(payload).map_or(0, |seconds| (seconds * 1e9) as u64)
}

fn now_ns() -> u64 {
    let elapsed = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(elapsed.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests;
