//! The index as a stream, for another router to start with: `GET /v1/pointsman/index/snapshot`.
//!
//! A line of JSON per step: `head` with the seeds of every model, then a `slot` for each worker rank,
//! followed by as many bytes as it says, then `end` with a checksum of all before. Invariant: a slot's
//! bytes and its place in the event stream are of one instant; one slot at a time is in memory.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderValue, Response, header};
use http_body_util::Either;
use http_body_util::channel::{SendError, Sender};
use pointsman_kv::{Groups, IndexedGroup, Position, Slot, Stamp};
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::Xxh3;

use crate::error::{Refusal, Reply, Streamed};
use crate::fleet::{Group, Rank};
use crate::mark::{Mark, Reached};
use crate::router::Router;

/// The form of the stream. Routers take over from each other only where it is the same.
pub(crate) const VERSION: u32 = 1;

/// Path of the snapshot, below a router's URL.
pub(crate) const PATH: &str = "/v1/pointsman/index/snapshot";

/// How long a rank may be in the middle of a message before it is left out.
const SLOT_WAIT: Duration = Duration::from_secs(2);

/// Pieces of the stream that wait for a reader.
const WAITING_PIECES: usize = 1;

/// Bytes of one piece, so that a slow reader holds back little.
const PIECE_BYTES: usize = 1 << 20;

/// A line of the stream.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "line", rename_all = "snake_case")]
pub(crate) enum Line {
    Head { version: u32, models: Vec<ModelLine> },
    Slot(SlotLine),
    End(EndLine),
}

/// What all slots of a model have in common.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ModelLine {
    pub(crate) name: String,
    pub(crate) seeds: Seeds,
    pub(crate) block_sizes: Vec<u32>,
}

/// The secrets of an index: what its block hashes and its names depend on.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Seeds {
    pub(crate) hasher: u64,
    pub(crate) names: u64,
}

impl std::fmt::Debug for Seeds {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Seeds(***)")
    }
}

/// A worker rank; `bytes` of its blocks follow.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SlotLine {
    pub(crate) model: String,
    pub(crate) url: String,
    pub(crate) rank: u32,
    pub(crate) bytes: u64,
    pub(crate) events: EventsLine,
}

/// Where the index is in a rank's events.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct EventsLine {
    /// The last message applied.
    pub(crate) last_seq: u64,
    /// When its publisher sent it: with the number the publisher's identity.
    pub(crate) last_sent_ns: u64,
    /// The first message applied since the last clear.
    pub(crate) first_seq: u64,
    /// Whether nothing older is missing.
    pub(crate) complete: bool,
    /// The KV-cache group that is indexed, and whether another one may take its place.
    pub(crate) group: Option<(u32, bool)>,
}

impl EventsLine {
    fn of(mark: Mark) -> Option<EventsLine> {
        let Position { last, first, complete } = mark.position?;
        Some(EventsLine {
            last_seq: last.seq,
            last_sent_ns: last.sent_ns,
            first_seq: first,
            complete,
            group: mark.groups.indexed.map(|indexed| (indexed.group, indexed.stand_in)),
        })
    }

    /// What it takes to go on from there.
    pub(crate) fn mark(&self) -> Mark {
        let last = Stamp { seq: self.last_seq, sent_ns: self.last_sent_ns };
        let position = Position { last, first: self.first_seq, complete: self.complete };
        let indexed = self.group.map(|(group, stand_in)| IndexedGroup { group, stand_in });
        Mark { position: Some(position), groups: Groups { indexed } }
    }
}

/// The end of a stream that is whole.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct EndLine {
    pub(crate) slots: u64,
    /// xxh3 of every byte before this line.
    pub(crate) checksum: u64,
}

/// Answers with the snapshot.
pub(crate) fn reply(router: &Arc<Router>) -> Result<Reply, Refusal> {
    if !router.settings.index_snapshot {
        let message = "the index is not handed out: set `admin.index_snapshot: true`";
        return Err(Refusal::new(403, message));
    }
    let Ok(permit) = Arc::clone(&router.snapshots).try_acquire_owned() else {
        let refusal =
            Refusal::new(429, "another router reads the index: try again when it is done");
        return Err(refusal.retry_after(router.settings.limits.retry_after));
    };
    let (sender, body) = Streamed::new(WAITING_PIECES);
    let router = Arc::clone(router);
    // It ends by itself, or with its connection.
    tokio::spawn(async move {
        let _one_at_a_time = permit;
        let mut out = Out { sender, sum: Xxh3::new() };
        match write(&router, &mut out).await {
            Ok(slots) => tracing::info!(slots, "the index was handed out to another router"),
            Err(_gone) => tracing::warn!("the reader of the index left before its end"),
        }
    });
    let mut reply = Response::new(Either::Left(Either::Right(body)));
    let kind = HeaderValue::from_static("application/octet-stream");
    reply.headers_mut().insert(header::CONTENT_TYPE, kind);
    Ok(reply)
}

async fn write(router: &Router, out: &mut Out) -> Result<u64, SendError> {
    let models = router.fleet.groups.iter().map(|group| ModelLine {
        name: group.name().to_owned(),
        seeds: group.seeds,
        block_sizes: group.roster.load().distinct_block_sizes().collect(),
    });
    out.line(&Line::Head { version: VERSION, models: models.collect() }).await?;
    let mut slots = 0;
    for group in &router.fleet.groups {
        let roster = group.roster.load_full();
        for rank in roster.ranks.iter().flatten() {
            let taken = tokio::time::timeout(SLOT_WAIT, take(group, rank)).await;
            let Ok(Some((events, bytes))) = taken else { continue };
            slots += 1;
            out.line(&Line::Slot(SlotLine {
                model: group.name().to_owned(),
                url: rank.worker.settings.url.to_string(),
                rank: rank.rank.unwrap_or(0),
                bytes: bytes.len() as u64,
                events,
            }))
            .await?;
            out.bytes(bytes.into()).await?;
        }
    }
    let end = EndLine { slots, checksum: out.sum.digest() };
    out.line(&Line::End(end)).await?;
    Ok(slots)
}

/// A rank's place in its events and its blocks; `None` if nothing is known by events.
async fn take(group: &Arc<Group>, rank: &Rank) -> Option<(EventsLine, Vec<u8>)> {
    loop {
        let _turn = group.turn().await;
        let (group, rank) = (Arc::clone(group), rank.clone());
        // A large slot takes a while, in which requests go on.
        let taken = tokio::task::spawn_blocking(move || take_now(&group, &rank)).await;
        if let Taken::All(taken) = taken.ok()? {
            return taken;
        }
    }
}

/// What there was at one instant.
enum Taken {
    All(Option<(EventsLine, Vec<u8>)>),
    /// The middle of a message: it is the turn of those who apply the rest.
    Within,
}

fn take_now(group: &Group, rank: &Rank) -> Taken {
    let writer = group.writer();
    let events = match rank.worker.reached(rank.slot) {
        Reached::Within => return Taken::Within,
        Reached::Nothing => None,
        Reached::Mark(mark) => EventsLine::of(mark),
    };
    Taken::All(events.map(|events| {
        let mut bytes = Vec::new();
        writer.snapshot(Slot(rank.slot.0), &mut bytes);
        (events, bytes)
    }))
}

struct Out {
    sender: Sender<Bytes, Infallible>,
    sum: Xxh3,
}

impl Out {
    async fn line(&mut self, line: &Line) -> Result<(), SendError> {
        // Nothing in a line can fail to be written.
        let mut text = serde_json::to_vec(line).unwrap_or_default();
        text.push(b'\n');
        self.bytes(text.into()).await
    }

    async fn bytes(&mut self, mut bytes: Bytes) -> Result<(), SendError> {
        while !bytes.is_empty() {
            let piece = bytes.split_to(bytes.len().min(PIECE_BYTES));
            self.sum.update(&piece);
            self.sender.send_data(piece).await?;
        }
        Ok(())
    }
}
