//! The bytes that the load and the engines exchange, and the little HTTP/1.1 that both need.
//!
//! Invariant: each reply is a constant, so that every byte that comes back can be compared. A case
//! tells the engine how to stream in the field `user`, which every router passes on.

use anyhow::{Context, bail, ensure};
use memchr::memmem;

/// The model that engines, routers and load agree on.
pub(crate) const MODEL: &str = "bench";

/// Tokens of every prompt, as every engine counts them: a router may put the prefill worker's count into
/// the reply.
pub(crate) const PROMPT_TOKENS: usize = 256;

/// A head longer than this is an error.
const MAX_HEAD_BYTES: usize = 16 * 1024;

const MAX_HEADERS: usize = 64;

/// The API that the load uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Api {
    /// `/v1/completions`
    Completions,
    /// `/v1/chat/completions`
    Chat,
}

impl Api {
    pub(crate) const ALL: [Api; 2] = [Api::Completions, Api::Chat];

    pub(crate) fn path(self) -> &'static str {
        match self {
            Api::Completions => "/v1/completions",
            Api::Chat => "/v1/chat/completions",
        }
    }

    /// A reply that is not streamed: about 600 bytes.
    pub(crate) fn whole(self) -> String {
        let text = "The quick brown fox jumps over the lazy dog, and then again. ".repeat(4);
        let (id, object, choice) = match self {
            Api::Completions => ("cmpl", "text_completion", format!("\"text\":\"{text}\"")),
            Api::Chat => (
                "chatcmpl",
                "chat.completion",
                format!("\"message\":{{\"role\":\"assistant\",\"content\":\"{text}\"}}"),
            ),
        };
        format!(
            "{{\"id\":\"{id}-0123456789abcdef0123456789abcdef\",\"object\":\"{object}\",\
             \"created\":1700000000,\"model\":\"{MODEL}\",\"choices\":[{{\"index\":0,{choice},\
             \"logprobs\":null,\"finish_reason\":\"length\",\"stop_reason\":null,\
             \"token_ids\":null}}],\"service_tier\":null,\"system_fingerprint\":null,\
             \"usage\":{{\"prompt_tokens\":{PROMPT_TOKENS},\"total_tokens\":{},\"completion_tokens\":64,\
             \"prompt_tokens_details\":null}},\"kv_transfer_params\":null}}",
            PROMPT_TOKENS + 64
        )
    }

    /// The event of one token: about 200 bytes.
    pub(crate) fn event(self) -> String {
        let (id, object, choice) = match self {
            Api::Completions => ("cmpl", "text_completion", "\"text\":\" token\""),
            Api::Chat => {
                ("chatcmpl", "chat.completion.chunk", "\"delta\":{\"content\":\" token\"}")
            }
        };
        format!(
            "data: {{\"id\":\"{id}-0123456789abcdef0123456789abcdef\",\"object\":\"{object}\",\
             \"created\":1700000000,\"model\":\"{MODEL}\",\"choices\":[{{\"index\":0,{choice},\
             \"logprobs\":null,\"finish_reason\":null}}]}}\n\n"
        )
    }
}

/// What ends a stream.
pub(crate) const DONE: &str = "data: [DONE]\n\n";

/// How an engine streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stream {
    /// Tokens, one event each.
    pub(crate) tokens: usize,
    /// Events that leave in one write.
    pub(crate) per_write: usize,
    /// Pause between two writes, in milliseconds.
    pub(crate) pause_ms: u64,
}

impl Stream {
    /// For the field `user`.
    pub(crate) fn written(self) -> String {
        format!("tokens={} per_write={} pause_ms={};", self.tokens, self.per_write, self.pause_ms)
    }

    /// What a request's body asks for, if it asks for a stream.
    pub(crate) fn read(body: &[u8]) -> Option<Stream> {
        if !is_true(body, b"\"stream\"") {
            return None;
        }
        let number = |name: &[u8]| {
            let rest = body.get(memmem::find(body, name)? + name.len()..)?;
            let digits = rest.iter().take_while(|byte| byte.is_ascii_digit()).count();
            std::str::from_utf8(rest.get(..digits)?).ok()?.parse::<u64>().ok()
        };
        let count = |name| number(name).and_then(|number| usize::try_from(number).ok());
        Some(Stream {
            tokens: count(b"tokens=").unwrap_or(1),
            per_write: count(b"per_write=").unwrap_or(1).max(1),
            pause_ms: number(b"pause_ms=").unwrap_or(0),
        })
    }

    /// The body of the reply, chunk encoding aside.
    pub(crate) fn body(self, api: Api) -> String {
        api.event().repeat(self.tokens) + DONE
    }
}

/// Whether a body holds `key`, quotes included, with the value `true`.
pub(crate) fn is_true(body: &[u8], key: &[u8]) -> bool {
    let after = memmem::find(body, key).and_then(|at| body.get(at + key.len()..));
    let value = after.map(|rest| {
        let skipped = rest.iter().take_while(|byte| matches!(byte, b' ' | b':')).count();
        rest.get(skipped..).unwrap_or_default()
    });
    value.is_some_and(|value| value.starts_with(b"true"))
}

/// How many bytes a head takes, once it is complete.
pub(crate) fn head_end(bytes: &[u8]) -> anyhow::Result<Option<usize>> {
    match memmem::find(bytes, b"\r\n\r\n") {
        Some(at) => Ok(Some(at + 4)),
        None if bytes.len() > MAX_HEAD_BYTES => bail!("a head of more than {MAX_HEAD_BYTES} bytes"),
        None => Ok(None),
    }
}

/// A request's method, path and body length.
pub(crate) fn request_head(head: &[u8]) -> anyhow::Result<(String, String, usize)> {
    let mut headers = [httparse::EMPTY_HEADER; MAX_HEADERS];
    let mut request = httparse::Request::new(&mut headers);
    request.parse(head).context("a request's head")?;
    let path = request.path.unwrap_or_default().to_owned();
    let method = request.method.unwrap_or_default().to_owned();
    Ok((method, path, content_length(request.headers)?.unwrap_or(0)))
}

fn content_length(headers: &[httparse::Header<'_>]) -> anyhow::Result<Option<usize>> {
    let length = headers.iter().find(|h| h.name.eq_ignore_ascii_case("content-length"));
    let parse = |value| anyhow::Ok(std::str::from_utf8(value)?.trim().parse()?);
    length.map(|header| parse(header.value)).transpose().context("a content length")
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Head,
    Sized,
    ChunkSize,
    Chunk,
    ChunkEnd,
    LastEnd,
    Complete,
}

/// One reply being read and compared with what it should be.
#[derive(Debug)]
pub(crate) struct Reply<'a> {
    expected: &'a [u8],
    /// Bytes of the body so far, all of them as expected.
    received: usize,
    stage: Stage,
    /// Bytes left of the current chunk, or of the body.
    left: usize,
}

impl<'a> Reply<'a> {
    pub(crate) fn new(expected: &'a [u8]) -> Reply<'a> {
        Reply { expected, received: 0, stage: Stage::Head, left: 0 }
    }

    pub(crate) fn received(&self) -> usize {
        self.received
    }

    pub(crate) fn is_complete(&self) -> bool {
        self.stage == Stage::Complete
    }

    /// Takes in what it can of `bytes`; returns how many it took.
    pub(crate) fn feed(&mut self, bytes: &[u8]) -> anyhow::Result<usize> {
        let mut at = 0;
        while let Some(rest) = bytes.get(at..).filter(|rest| !rest.is_empty()) {
            let taken = self.step(rest)?;
            if taken == 0 {
                break;
            }
            at += taken;
        }
        Ok(at)
    }

    fn step(&mut self, rest: &[u8]) -> anyhow::Result<usize> {
        match self.stage {
            Stage::Head => match head_end(rest)? {
                Some(end) => self.head(rest, end),
                None => Ok(0),
            },
            Stage::Sized => self.take(rest, Stage::Complete),
            Stage::Chunk => self.take(rest, Stage::ChunkEnd),
            Stage::ChunkSize => self.chunk_size(rest),
            Stage::ChunkEnd => self.line_end(rest, Stage::ChunkSize),
            Stage::LastEnd => self.line_end(rest, Stage::Complete),
            Stage::Complete => bail!("{} bytes after the end of the reply", rest.len()),
        }
    }

    fn head(&mut self, rest: &[u8], end: usize) -> anyhow::Result<usize> {
        let mut headers = [httparse::EMPTY_HEADER; MAX_HEADERS];
        let mut response = httparse::Response::new(&mut headers);
        response.parse(rest).context("a reply's head")?;
        ensure!(response.code == Some(200), "{}", shown(rest));
        let has = |name: &str, value: &[u8]| {
            let mut named = response.headers.iter().filter(|h| h.name.eq_ignore_ascii_case(name));
            named.any(|header| header.value.eq_ignore_ascii_case(value))
        };
        ensure!(!has("connection", b"close"), "the connection is not kept: {}", shown(rest));
        if has("transfer-encoding", b"chunked") {
            self.stage = Stage::ChunkSize;
            return Ok(end);
        }
        let length = content_length(response.headers)?.context("a reply without a length")?;
        ensure!(length == self.expected.len(), "a reply of {length} bytes: {}", shown(rest));
        (self.stage, self.left) = (Stage::Sized, length);
        Ok(end)
    }

    fn take(&mut self, rest: &[u8], next: Stage) -> anyhow::Result<usize> {
        let taken = self.left.min(rest.len());
        let upto = self.received + taken;
        let right = self.expected.get(self.received..upto);
        ensure!(right == rest.get(..taken), "wrong at byte {}: {}", self.received, shown(rest));
        self.received = upto;
        self.left -= taken;
        if self.left == 0 {
            self.stage = next;
        }
        Ok(taken)
    }

    fn chunk_size(&mut self, rest: &[u8]) -> anyhow::Result<usize> {
        let Some(end) = memmem::find(rest, b"\r\n") else {
            ensure!(rest.len() < 32, "a chunk without a size: {}", shown(rest));
            return Ok(0);
        };
        let line = std::str::from_utf8(rest.get(..end).unwrap_or_default())?;
        self.left = usize::from_str_radix(line.trim(), 16).context("the size of a chunk")?;
        self.stage = Stage::Chunk;
        if self.left == 0 {
            let (received, expected) = (self.received, self.expected.len());
            ensure!(received == expected, "the reply ends after {received} of {expected} bytes");
            self.stage = Stage::LastEnd;
        }
        Ok(end + 2)
    }

    fn line_end(&mut self, rest: &[u8], next: Stage) -> anyhow::Result<usize> {
        if rest.len() < 2 {
            return Ok(0);
        }
        ensure!(rest.starts_with(b"\r\n"), "a chunk that goes on: {}", shown(rest));
        self.stage = next;
        Ok(2)
    }
}

/// The beginning of some bytes, for a message.
fn shown(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes.get(..bytes.len().min(400)).unwrap_or_default()).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read_in_pieces(bytes: &[u8], size: usize, expected: &str) -> anyhow::Result<bool> {
        let mut reply = Reply::new(expected.as_bytes());
        let mut buffer = Vec::new();
        for piece in bytes.chunks(size) {
            buffer.extend_from_slice(piece);
            let taken = reply.feed(&buffer)?;
            buffer.drain(..taken);
        }
        Ok(reply.is_complete() && buffer.is_empty())
    }

    #[test]
    fn a_reply_is_read_however_it_is_split() {
        let sized = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello";
        let chunked =
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n";
        for size in 1..chunked.len() {
            assert!(read_in_pieces(sized, size, "hello").unwrap());
            assert!(read_in_pieces(chunked, size, "hello").unwrap());
        }
    }

    #[test]
    fn a_wrong_reply_is_an_error() {
        for wrong in [
            "HTTP/1.1 503 No\r\nContent-Length: 5\r\n\r\nhello",
            "HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nhell",
            "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhallo",
            "HTTP/1.1 200 OK\r\nContent-Length: 5\r\nConnection: close\r\n\r\nhello",
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nhell\r\n0\r\n\r\n",
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n6\r\nhello!\r\n0\r\n\r\n",
        ] {
            assert!(read_in_pieces(wrong.as_bytes(), 9, "hello").is_err(), "{wrong}");
        }
    }

    #[test]
    fn what_a_case_asks_for_reaches_the_engine() {
        let stream = Stream { tokens: 64, per_write: 8, pause_ms: 5 };
        let body = format!("{{\"stream\": true,\"user\":\"{}\"}}", stream.written());
        assert_eq!(Stream::read(body.as_bytes()), Some(stream));
        assert_eq!(Stream::read(b"{\"stream\":false}"), None);
    }

    #[test]
    fn replies_have_the_sizes_that_are_reported() {
        for api in Api::ALL {
            assert!((550..700).contains(&api.whole().len()), "{}", api.whole().len());
            assert!((180..230).contains(&api.event().len()), "{}", api.event().len());
        }
    }
}
