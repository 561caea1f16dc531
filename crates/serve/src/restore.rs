//! Starting with another router's index, so that the fleet is known at once and not after hours.
//!
//! Invariants: either all of a snapshot is taken over or nothing of it; whatever fails costs a warning
//! and at most `kv.restore_timeout`. A rank's blocks count as stale until its publisher has been asked
//! whether it still is the one that they are of.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::BytesMut;
use http::Uri;
use http_body_util::BodyExt;
use hyper::body::Incoming;
use pointsman_brain::Cause;
use pointsman_config::{KvEvents, Restore};
use pointsman_kv::{Slot, SnapshotError};
use tokio::time::{sleep, timeout_at};
use xxhash_rust::xxh3::Xxh3;

use crate::fleet::{Group, Rank};
use crate::headers;
use crate::router::Router;
use crate::snapshot::{EndLine, Line, PATH, Seeds, SlotLine, VERSION};
use crate::upstream::Upstream;
use rustls::ClientConfig;

/// How long to wait before asking again a router that hands its index to another one.
const TURN_PAUSE: Duration = Duration::from_millis(200);

/// Longest line of a snapshot.
const LINE_BYTES: usize = 1 << 20;

/// Largest slot of a snapshot: more than the index takes of one worker rank.
const SLOT_BYTES: u64 = 1 << 30;

/// Why another router's index cannot be had.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RestoreError {
    #[error("{0}")]
    Http(Cause),
    #[error("{0}")]
    Trust(String),
    #[error("it answered {status}: {body}")]
    Status { status: u16, body: String },
    #[error("it took longer than `kv.restore_timeout`")]
    Late,
    #[error("it ended early")]
    Cut,
    #[error("it is of version {0}, and only {VERSION} is known here: run the same release on both")]
    Version(u32),
    #[error("it is not a snapshot of an index: {0}")]
    Form(&'static str),
    #[error("its checksum is wrong")]
    Checksum,
    #[error("the blocks of {worker} cannot be used: {source}")]
    Slot { worker: String, source: SnapshotError },
}

/// A snapshot of which the head has been read.
pub(crate) struct Snapshot {
    from: Uri,
    begun: Instant,
    deadline: tokio::time::Instant,
    stream: Stream,
    seeds: HashMap<String, Seeds>,
}

/// Asks for a snapshot; `None`, with a warning, where there is none to be had.
pub(crate) async fn open(restore: &Restore, tls: ClientConfig) -> Option<Snapshot> {
    let begun = Instant::now();
    let deadline = tokio::time::Instant::now() + restore.timeout;
    let opened = timeout_at(deadline, ask_in_turn(restore, &tls)).await;
    let opened = opened.unwrap_or(Err(RestoreError::Late));
    match opened {
        Ok((stream, seeds)) => {
            Some(Snapshot { from: restore.from.clone(), begun, deadline, stream, seeds })
        }
        Err(error) => {
            warn(&restore.from, &error);
            None
        }
    }
}

/// Asks until it is this router's turn: the other one hands its index to one reader at a time.
async fn ask_in_turn(
    restore: &Restore,
    tls: &ClientConfig,
) -> Result<(Stream, HashMap<String, Seeds>), RestoreError> {
    loop {
        match ask(restore, tls.clone()).await {
            Err(RestoreError::Status { status: 429, .. }) => sleep(TURN_PAUSE).await,
            asked => return asked,
        }
    }
}

async fn ask(
    restore: &Restore,
    tls: ClientConfig,
) -> Result<(Stream, HashMap<String, Seeds>), RestoreError> {
    let base = restore.from.to_string();
    let uri: Uri = format!("{}{PATH}", base.trim_end_matches('/'))
        .parse()
        .map_err(|_| RestoreError::Form("its URL is none"))?;
    let upstream = Upstream::new(0, restore.timeout, restore.timeout, tls);
    let head = headers::bearing(restore.api_key.as_ref());
    let response = match upstream.open(uri, head, restore.timeout).await {
        Ok(response) => response,
        Err(Cause::Timeout) => return Err(RestoreError::Late),
        Err(cause) => {
            let trouble = upstream.trouble(&restore.from).map(RestoreError::Trust);
            return Err(trouble.unwrap_or(RestoreError::Http(cause)));
        }
    };
    let status = response.status().as_u16();
    let mut stream =
        Stream { body: response.into_body(), read: BytesMut::new(), sum: Xxh3::new(), behind: 0 };
    if status != 200 {
        let body = stream.text().await;
        return Err(RestoreError::Status { status, body });
    }
    match stream.line().await? {
        Line::Head { version: VERSION, models } => {
            let seeds = models.into_iter().map(|model| (model.name, model.seeds)).collect();
            Ok((stream, seeds))
        }
        Line::Head { version, .. } => Err(RestoreError::Version(version)),
        _ => Err(RestoreError::Form("it does not begin with its head")),
    }
}

fn warn(from: &Uri, error: &RestoreError) {
    tracing::warn!(%from, %error, "the index of the other router cannot be had; this one starts empty");
}

impl Snapshot {
    /// What a model's hashes must be made with, for its blocks to be known again.
    pub(crate) fn seeds(&self, model: &str) -> Option<Seeds> {
        self.seeds.get(model).copied()
    }

    /// Takes the blocks of all known workers over, before anybody follows their events.
    pub(crate) async fn fill(mut self, router: &Router) {
        let known = known(router);
        let deadline = self.deadline;
        let filled = timeout_at(deadline, fill(&mut self.stream, &known)).await;
        match filled.unwrap_or(Err(RestoreError::Late)) {
            Ok(Filled { slots, skipped, blocks }) => tracing::info!(
                from = %self.from,
                slots,
                skipped,
                blocks,
                took_ms = self.begun.elapsed().as_millis() as u64,
                "the index was taken over from another router"
            ),
            Err(error) => {
                // What came so far may be as wrong as what follows it.
                for (group, rank) in known.values() {
                    group.writer().clear(Slot(rank.slot.0));
                    rank.worker.set_restored(rank.slot, None);
                    rank.worker.set_stale(rank.slot, false);
                }
                warn(&self.from, &error);
            }
        }
    }
}

/// What was taken over.
#[derive(Default)]
struct Filled {
    slots: u64,
    skipped: u64,
    blocks: u64,
}

type Known = HashMap<(String, String, u32), (Arc<Group>, Rank)>;

/// The worker ranks whose events will be followed, by what a snapshot calls them.
fn known(router: &Router) -> Known {
    let mut known = Known::new();
    for group in &router.fleet.groups {
        for rank in group.roster.load().ranks.iter().flatten() {
            if rank.worker.settings.kv_events != KvEvents::Off {
                let url = rank.worker.settings.url.to_string();
                let key = (group.name().to_owned(), url, rank.rank.unwrap_or(0));
                known.insert(key, (Arc::clone(group), rank.clone()));
            }
        }
    }
    known
}

async fn fill(stream: &mut Stream, known: &Known) -> Result<Filled, RestoreError> {
    let (mut filled, mut bytes) = (Filled::default(), Vec::new());
    loop {
        match stream.line().await? {
            Line::Slot(line) => {
                stream.bytes(line.bytes, &mut bytes).await?;
                let SlotLine { model, url, rank, events, .. } = line;
                let worker = format!("{url} rank {rank}");
                let Some((group, rank)) = known.get(&(model, url, rank)) else {
                    filled.skipped += 1;
                    continue;
                };
                let restored = group.writer().restore(Slot(rank.slot.0), &bytes);
                let restored = restored.map_err(|source| RestoreError::Slot { worker, source })?;
                rank.worker.set_restored(rank.slot, Some(events.mark()));
                rank.worker.set_stale(rank.slot, true);
                filled.slots += 1;
                filled.blocks += restored.blocks;
            }
            Line::End(EndLine { slots, checksum }) => {
                let whole = slots == filled.slots + filled.skipped && checksum == stream.behind;
                return if whole { Ok(filled) } else { Err(RestoreError::Checksum) };
            }
            Line::Head { .. } => return Err(RestoreError::Form("it has two heads")),
        }
    }
}

/// The bytes of a snapshot as they come.
struct Stream {
    body: Incoming,
    read: BytesMut,
    sum: Xxh3,
    /// The checksum of everything before the last line.
    behind: u64,
}

impl Stream {
    async fn line(&mut self) -> Result<Line, RestoreError> {
        let mut looked = 0;
        let end = loop {
            if let Some(at) = self.read[looked..].iter().position(|byte| *byte == b'\n') {
                break looked + at;
            }
            looked = self.read.len();
            if looked > LINE_BYTES {
                return Err(RestoreError::Form("a line is too long"));
            }
            self.more().await?;
        };
        let line = self.read.split_to(end + 1);
        self.behind = self.sum.digest();
        self.sum.update(&line);
        serde_json::from_slice(&line)
            .map_err(|_| RestoreError::Form("a line is not what it should be"))
    }

    /// Puts the next `count` bytes in place of what is in `out`, which grows only as they come.
    async fn bytes(&mut self, count: u64, out: &mut Vec<u8>) -> Result<(), RestoreError> {
        out.clear();
        let Some(count) = usize::try_from(count).ok().filter(|_| count <= SLOT_BYTES) else {
            return Err(RestoreError::Form("a slot is too large"));
        };
        while out.len() < count {
            if self.read.is_empty() {
                self.more().await?;
            }
            let piece = self.read.split_to(self.read.len().min(count - out.len()));
            self.sum.update(&piece);
            out.extend_from_slice(&piece);
        }
        Ok(())
    }

    async fn more(&mut self) -> Result<(), RestoreError> {
        loop {
            match self.body.frame().await {
                None | Some(Err(_)) => return Err(RestoreError::Cut),
                Some(Ok(frame)) => {
                    if let Ok(data) = frame.into_data() {
                        self.read.extend_from_slice(&data);
                        return Ok(());
                    }
                }
            }
        }
    }

    /// The beginning of a body that is for people.
    async fn text(&mut self) -> String {
        const SHOWN: usize = 400;
        while self.read.len() < SHOWN && self.more().await.is_ok() {}
        String::from_utf8_lossy(&self.read[..self.read.len().min(SHOWN)]).into_owned()
    }
}
