//! What a client sent, taken in within its bounds: body, headers that mean something to the router,
//! and the engine's help with counting tokens.

use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::{HeaderMap, header};
use http_body::Body as _;
use http_body_util::BodyExt;
use hyper::body::Incoming;
use pointsman_brain::{Condition, Path};
use pointsman_wire::dialect::{Api, Request};
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::{Instant, timeout_at};

use crate::error::Refusal;
use crate::fleet::{Group, Roster};
use crate::prompt::AskEngine;
use crate::router::Router;
use crate::upstream::read;
use crate::{bootstrap, headers, report};

/// The longest request id that is taken from a client.
const MAX_REQUEST_ID_BYTES: usize = 128;

/// How long an engine may take to tokenise a prompt.
const TOKENIZE_WAIT: Duration = Duration::from_secs(5);

/// Bytes of an engine's list of token ids: 1 M tokens of up to 7 digits each.
const TOKENIZE_REPLY_BYTES: usize = 8 * 1024 * 1024;

/// How many times the longest silence within a body the whole of it may take: one that drips holds
/// memory that others want.
const WHOLE_BODY: u32 = 10;

/// A body in the router's memory, and the room that it takes there.
pub(crate) struct Received {
    pub(crate) bytes: Bytes,
    pub(crate) room: OwnedSemaphorePermit,
}

/// Reads a request's body whole.
pub(crate) async fn body(
    mut body: Incoming,
    head: &HeaderMap,
    router: &Router,
) -> Result<Received, Refusal> {
    let settings = &router.settings;
    let limit = settings.limits.max_body_bytes.get();
    let too_large = || Refusal::new(413, format!("the body is larger than {limit} bytes"));
    let mut encodings = head.get_all(header::CONTENT_ENCODING).iter();
    if !encodings.all(|encoding| encoding.as_bytes().eq_ignore_ascii_case(b"identity")) {
        return Err(Refusal::new(415, "compressed bodies are not taken: send it uncompressed"));
    }
    let announced = body.size_hint().lower();
    if announced > limit as u64 {
        return Err(too_large());
    }
    let mut chunks = Chunks::default();
    let mut room = room_for(0, router)?;
    let silence = settings.timeouts.body_read;
    let end = Instant::now() + settings.timeouts.request.min(silence * WHOLE_BODY);
    loop {
        match timeout_at(end.min(Instant::now() + silence), body.frame()).await {
            Err(_elapsed) => return Err(Refusal::new(408, "the body did not come in time")),
            Ok(None) => return Ok(Received { bytes: chunks.finish(), room }),
            Ok(Some(Err(_))) => return Err(Refusal::new(400, "the body broke off")),
            Ok(Some(Ok(frame))) => {
                let Ok(data) = frame.into_data() else { continue };
                if chunks.len() + data.len() > limit {
                    return Err(too_large());
                }
                room.merge(room_for(data.len(), router)?);
                chunks.push(data);
            }
        }
    }
}

/// Room for some more bytes of bodies.
fn room_for(bytes: usize, router: &Router) -> Result<OwnedSemaphorePermit, Refusal> {
    let permits = u32::try_from(bytes).unwrap_or(u32::MAX);
    Arc::clone(&router.body_room).try_acquire_many_owned(permits).map_err(|_| {
        report::limit(router, "max_in_flight_bytes");
        let limits = &router.settings.limits;
        let room = limits.max_in_flight_bytes;
        Refusal::new(
            429,
            format!("the router holds {room} bytes of requests, its limit; try again"),
        )
        .retry_after(limits.retry_after)
    })
}

/// Bytes that come in pieces; copied only if there is more than one.
#[derive(Default)]
struct Chunks {
    first: Option<Bytes>,
    all: BytesMut,
}

impl Chunks {
    fn len(&self) -> usize {
        self.first.as_ref().map_or(self.all.len(), Bytes::len)
    }

    fn push(&mut self, data: Bytes) {
        if self.first.is_none() && self.all.is_empty() {
            self.first = Some(data);
            return;
        }
        if let Some(first) = self.first.take() {
            self.all.extend_from_slice(&first);
        }
        self.all.extend_from_slice(&data);
    }

    fn finish(self) -> Bytes {
        self.first.unwrap_or_else(|| self.all.freeze())
    }
}

/// The client's name for its request, or a random one.
pub(crate) fn request_id(head: &HeaderMap) -> String {
    let given = head.get(headers::REQUEST_ID).and_then(|value| value.to_str().ok());
    match given {
        Some(id) if !id.is_empty() && id.len() <= MAX_REQUEST_ID_BYTES => id.to_owned(),
        _ => random_id(),
    }
}

fn random_id() -> String {
    format!("{:016x}{:016x}", random_number(), random_number())
}

/// A number that no other hand-off has.
pub(crate) fn random_number() -> u64 {
    use std::hash::{BuildHasher, Hasher, RandomState};
    // A keyed hasher of the standard library: unique enough, no secret is made of it.
    RandomState::new().build_hasher().finish()
}

/// The path that the client asks for.
pub(crate) fn wish(head: &HeaderMap) -> Result<Option<Path>, Refusal> {
    match head.get(headers::PATH_WISH).map(http::HeaderValue::as_bytes) {
        None => Ok(None),
        Some(b"local") => Ok(Some(Path::Local)),
        Some(b"remote") => Ok(Some(Path::Remote)),
        Some(_) => Err(Refusal::new(400, "x-pointsman-path must be `local` or `remote`")),
    }
}

/// Which worker ranks can serve a name on an endpoint, by slot.
pub(crate) fn eligible(roster: &Roster, group: &Group, name: &str, api: Api) -> Vec<bool> {
    // A base model goes by more names than its workers list; an adapter only by its own.
    let adapter = group.is_adapter(name);
    let serves = |rank: &crate::fleet::Rank| {
        (!adapter || rank.worker.serves(name))
            && rank.worker.dialect().has(api)
            && bootstrap::can_be_met(&rank.worker, rank.rank)
    };
    roster.ranks.iter().map(|rank| rank.as_ref().is_some_and(serves)).collect()
}

/// The answer to `/tokenize`.
#[derive(serde::Deserialize)]
struct Tokenized {
    tokens: Vec<u32>,
}

/// Asks a worker of the request's own group to count tokens.
pub(crate) struct Asker<'a> {
    pub(crate) router: &'a Router,
    pub(crate) group: &'a Group,
    pub(crate) roster: &'a Roster,
}

impl AskEngine for Asker<'_> {
    async fn tokenize(&self, request: &Request) -> Option<Vec<u32>> {
        let slot = self
            .group
            .brain()
            .workers()
            .find(|worker| worker.condition == Condition::Up && !worker.draining)?
            .slot;
        let worker = &self.roster.get(slot)?.worker;
        let mut head = HeaderMap::new();
        worker.address(&mut head);
        let uri = worker.uri("/tokenize").ok()?;
        // The engine reads the fields that shape the prompt and skips the others.
        let body = match (request.api(), request.body().raw("text")) {
            (Api::Generate, Some(text)) => format!("{{\"prompt\":{text}}}").into(),
            _ => request.body().bytes().clone(),
        };
        let exchange = async {
            let response = self.router.upstream.post(uri, head, body, TOKENIZE_WAIT).await.ok()?;
            let ok = response.status().is_success();
            let bytes = read(response.into_body(), TOKENIZE_REPLY_BYTES).await.ok()?;
            ok.then_some(bytes)
        };
        let bytes = tokio::time::timeout(TOKENIZE_WAIT, exchange).await.ok()??;
        read_tokens(&bytes)
    }
}

/// The ids in an answer to `/tokenize`.
pub(crate) fn read_tokens(answer: &[u8]) -> Option<Vec<u32>> {
    serde_json::from_slice::<Tokenized>(answer).ok().map(|answer| answer.tokens)
}
