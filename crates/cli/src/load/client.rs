//! One streamed completion over HTTP, and when its tokens came.

use std::fmt::Write as _;
use std::time::Duration;

use anyhow::{Context, ensure};
use bytes::Bytes;
use http::{Request, Uri};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use pointsman_sim::replay::Path;
use tokio::time::{Instant, timeout};

/// Bytes of one line of a stream at most.
const MAX_LINE: usize = 1 << 20;

/// Characters of an error that are kept.
const ERROR_CHARS: usize = 160;

/// Whom requests are sent to.
#[derive(Clone, Debug)]
pub(super) struct Target {
    client: Client<HttpConnector, Full<Bytes>>,
    uri: Uri,
    model: String,
    timeout: Duration,
}

/// One request.
#[derive(Debug)]
pub(super) struct Ask {
    pub(super) prompt: Vec<u32>,
    pub(super) output_tokens: u32,
    /// What it is to be served within, as the target's clock has it.
    pub(super) ttft: Duration,
    pub(super) itl: Duration,
    /// Number of its session.
    pub(super) session: Option<u32>,
}

/// What came of it.
#[derive(Debug, Default)]
pub(super) struct Reply {
    pub(super) first: Option<Instant>,
    pub(super) last: Option<Instant>,
    pub(super) tokens: u32,
    pub(super) path: Option<Path>,
    /// TTFT in milliseconds, as the target predicted it.
    pub(super) predicted_ttft_ms: Option<f64>,
    /// Why it failed, if it did.
    pub(super) error: Option<String>,
}

impl Target {
    pub(super) fn new(url: &str, model: &str, timeout: Duration) -> anyhow::Result<Target> {
        let base: Uri = url.parse().with_context(|| format!("--target {url:?} is not a URL"))?;
        ensure!(
            base.scheme_str() == Some("http") && base.authority().is_some(),
            "--target {url:?} is not a URL such as http://127.0.0.1:8000"
        );
        let uri = format!("{}/v1/completions", url.trim_end_matches('/'));
        let mut connector = HttpConnector::new();
        connector.set_nodelay(true);
        Ok(Target {
            client: Client::builder(TokioExecutor::new()).build(connector),
            uri: uri.parse().with_context(|| format!("--target {url:?} is not a URL"))?,
            model: model.to_owned(),
            timeout,
        })
    }

    /// Sends one request and follows its stream to the end.
    pub(super) async fn send(&self, ask: &Ask) -> Reply {
        let mut reply = Reply::default();
        let error = match timeout(self.timeout, self.follow(ask, &mut reply)).await {
            Ok(Ok(())) => None,
            Ok(Err(error)) => Some(format!("{error:#}")),
            Err(_) => Some(format!("no end within {} s", self.timeout.as_secs_f64())),
        };
        reply.error = error.map(|error| error.chars().take(ERROR_CHARS).collect());
        reply
    }

    async fn follow(&self, ask: &Ask, reply: &mut Reply) -> anyhow::Result<()> {
        let ms = |time: Duration| format!("{:.3}", time.as_secs_f64() * 1e3);
        let mut request = Request::post(self.uri.clone())
            .header("content-type", "application/json")
            .header("x-slo-ttft-ms", ms(ask.ttft))
            .header("x-slo-itl-ms", ms(ask.itl));
        if let Some(session) = ask.session {
            request = request.header("x-session-id", session.to_string());
        }
        let request = request.body(Full::from(self.body(ask)))?;
        let response = self.client.request(request).await?;
        let told = |name| response.headers().get(name).and_then(|value| value.to_str().ok());
        reply.path = match told("x-pointsman-path") {
            Some("local") => Some(Path::Local),
            Some("remote") => Some(Path::Remote),
            _ => None,
        };
        reply.predicted_ttft_ms = told("x-pointsman-predicted-ttft-ms")
            .and_then(|ms| ms.parse().ok())
            .filter(|ms: &f64| ms.is_finite());
        let status = response.status();
        let mut body = response.into_body();
        if !status.is_success() {
            let text = first_bytes(&mut body).await;
            anyhow::bail!("status {status}: {text}");
        }
        let mut stream = Stream::default();
        while let Some(frame) = body.frame().await {
            let frame = frame?;
            let Some(data) = frame.data_ref() else { continue };
            let events = stream.feed(data)?;
            if events > 0 {
                let now = Instant::now();
                reply.first.get_or_insert(now);
                reply.last = Some(now);
                reply.tokens += events;
            }
        }
        ensure!(stream.done, "the stream ended early");
        if let Some(tokens) = stream.tokens {
            reply.tokens = tokens;
        }
        Ok(())
    }

    /// Written by hand because there are so many ids in it.
    fn body(&self, ask: &Ask) -> Bytes {
        let mut body =
            format!("{{\"model\":{},\"prompt\":[", serde_json::Value::from(&*self.model));
        body.reserve(ask.prompt.len() * 6);
        for (at, id) in ask.prompt.iter().enumerate() {
            let comma = if at == 0 { "" } else { "," };
            let _ = write!(body, "{comma}{id}");
        }
        let _ = write!(
            body,
            "],\"max_tokens\":{},\"ignore_eos\":true,\"stream\":true,\
             \"stream_options\":{{\"include_usage\":true}}",
            ask.output_tokens
        );
        if let Some(session) = ask.session {
            let _ = write!(body, ",\"user\":\"session-{session}\"");
        }
        body.push('}');
        Bytes::from(body)
    }
}

async fn first_bytes(body: &mut Incoming) -> String {
    match body.frame().await {
        Some(Ok(frame)) => {
            let data = frame.data_ref().map(|data| data.slice(..data.len().min(ERROR_CHARS)));
            String::from_utf8_lossy(&data.unwrap_or_default()).into_owned()
        }
        _ => String::new(),
    }
}

/// The events of a stream, as far as they are looked at.
#[derive(Debug, Default)]
struct Stream {
    line: Vec<u8>,
    done: bool,
    /// Completion tokens, where the target says how many there were.
    tokens: Option<u32>,
}

impl Stream {
    /// Takes in what came; how many events with text there were.
    fn feed(&mut self, data: &[u8]) -> anyhow::Result<u32> {
        let mut events = 0;
        for part in data.split_inclusive(|byte| *byte == b'\n') {
            ensure!(
                self.line.len() + part.len() <= MAX_LINE,
                "a line of more than {MAX_LINE} bytes"
            );
            self.line.extend_from_slice(part);
            if self.line.ends_with(b"\n") {
                let line = std::mem::take(&mut self.line);
                events += u32::from(self.event(line.trim_ascii())?);
            }
        }
        Ok(events)
    }

    /// Whether the line is an event with text.
    fn event(&mut self, line: &[u8]) -> anyhow::Result<bool> {
        let Some(data) = line.strip_prefix(b"data:") else { return Ok(false) };
        let data = data.trim_ascii();
        if data == b"[DONE]" {
            self.done = true;
            return Ok(false);
        }
        let event: serde_json::Value =
            serde_json::from_slice(data).context("an event is no JSON")?;
        if let Some(error) = event.get("error").filter(|error| !error.is_null()) {
            anyhow::bail!("error event: {error}");
        }
        let tokens = event.pointer("/usage/completion_tokens").and_then(serde_json::Value::as_u64);
        if let Some(tokens) = tokens {
            self.tokens = u32::try_from(tokens).ok();
        }
        Ok(event.pointer("/choices/0/text").and_then(|text| text.as_str()).is_some())
    }
}

#[cfg(test)]
mod tests {
    use super::Stream;

    #[test]
    fn events_are_counted_wherever_the_stream_is_cut() {
        let text = b"data: {\"choices\":[{\"text\":\"a\"}]}\r\n\r\n: ping\n\n\
                     data: {\"choices\":[{\"text\":\"b\"}]}\n\n\
                     data: {\"choices\":[],\"usage\":{\"completion_tokens\":7}}\n\ndata: [DONE]\n\n";
        for cut in 0..text.len() {
            let mut stream = Stream::default();
            let (before, after) = text.split_at(cut);
            let events = stream.feed(before).unwrap() + stream.feed(after).unwrap();
            assert_eq!((events, stream.tokens, stream.done), (2, Some(7), true), "cut at {cut}");
        }
    }

    #[test]
    fn an_error_event_is_an_error() {
        let mut stream = Stream::default();
        let error = stream.feed(b"data: {\"error\":{\"message\":\"gone\"}}\n\n").unwrap_err();
        assert!(error.to_string().contains("gone"));
    }
}
