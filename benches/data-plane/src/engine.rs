//! Instant engines: as little work per request as a server can do, so that what is measured is what
//! stands in front of them.
//!
//! Invariant: one thread; a JSON reply leaves in one write, a stream's head in one and then its
//! events as the request asks. The process ends when its standard input does, that is with the bench.

use std::collections::HashMap;
use std::io::Write as _;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{Instant, sleep_until};

use crate::wire::{self, Api, DONE, MODEL, PROMPT_TOKENS, Stream};

/// Room for a request of 32 KiB; a longer one makes the buffer grow.
const BUFFER_BYTES: usize = 64 * 1024;

/// A prefill answer lists one KV block per this many bytes of the request: 16 tokens of 4 bytes.
const BYTES_PER_BLOCK: usize = 64;

/// What an engine answers where nothing depends on the request but its path.
struct Replies {
    whole: [Vec<u8>; 2],
    event: [String; 2],
    other: HashMap<&'static str, Vec<u8>>,
    not_found: Vec<u8>,
}

impl Replies {
    fn new() -> Replies {
        let models = format!(
            "{{\"object\":\"list\",\"data\":[{{\"id\":\"{MODEL}\",\"object\":\"model\",\
             \"created\":1700000000,\"owned_by\":\"vllm\",\"root\":\"{MODEL}\",\"parent\":null,\
             \"max_model_len\":131072}}]}}"
        );
        let metrics = "vllm:num_requests_running{engine=\"0\",model_name=\"bench\"} 0.0\n\
                       vllm:num_requests_waiting{engine=\"0\",model_name=\"bench\"} 0.0\n\
                       vllm:kv_cache_usage_perc{engine=\"0\",model_name=\"bench\"} 0.1\n\
                       vllm:cache_config_info{block_size=\"16\",engine=\"0\",\
                       num_gpu_blocks=\"1000000\"} 1.0\n";
        let json = |body: &str| sized(200, "application/json", body);
        Replies {
            whole: Api::ALL.map(|api| json(&api.whole())),
            event: Api::ALL.map(Api::event),
            other: HashMap::from([
                ("/health", json("")),
                ("/version", json("{\"version\":\"0.31.0\"}")),
                ("/v1/models", json(&models)),
                ("/kv_event_sources", json("{}")),
                ("/metrics", sized(200, "text/plain; version=0.0.4", metrics)),
            ]),
            not_found: sized(404, "application/json", "{\"detail\":\"Not Found\"}"),
        }
    }
}

fn sized(status: u16, kind: &str, body: &str) -> Vec<u8> {
    let length = body.len();
    format!(
        "HTTP/1.1 {status} Is\r\ndate: Thu, 01 Jan 2026 00:00:00 GMT\r\nserver: uvicorn\r\n\
         content-length: {length}\r\ncontent-type: {kind}\r\n\r\n{body}"
    )
    .into_bytes()
}

const STREAM_HEAD: &str = "HTTP/1.1 200 OK\r\ndate: Thu, 01 Jan 2026 00:00:00 GMT\r\n\
                           server: uvicorn\r\ncontent-type: text/event-stream; charset=utf-8\r\n\
                           transfer-encoding: chunked\r\n\r\n";

/// Serves on `count` free ports of the loopback, printed on one line, until standard input ends.
pub(crate) async fn run(count: usize) -> anyhow::Result<()> {
    let replies = Arc::new(Replies::new());
    let mut ports = Vec::new();
    for _ in 0..count {
        let listener = TcpListener::bind("127.0.0.1:0").await.context("an engine's port")?;
        ports.push(listener.local_addr()?.port().to_string());
        tokio::spawn(accept(listener, Arc::clone(&replies)));
    }
    println!("ready {}", ports.join(" "));
    std::io::stdout().flush()?;
    tokio::task::spawn_blocking(|| std::io::copy(&mut std::io::stdin(), &mut std::io::sink()))
        .await?
        .context("standard input")?;
    Ok(())
}

async fn accept(listener: TcpListener, replies: Arc<Replies>) {
    loop {
        match listener.accept().await {
            Ok((stream, _)) => drop(tokio::spawn(serve(stream, Arc::clone(&replies)))),
            Err(error) => {
                eprintln!("engine: {error}");
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        }
    }
}

/// A connection, until its other side closes it; an error ends it, which the load reports.
async fn serve(mut stream: TcpStream, replies: Arc<Replies>) -> anyhow::Result<()> {
    stream.set_nodelay(true)?;
    let mut buffer = Vec::with_capacity(BUFFER_BYTES);
    loop {
        let end = loop {
            if let Some(end) = wire::head_end(&buffer)? {
                break end;
            }
            if stream.read_buf(&mut buffer).await? == 0 {
                return Ok(());
            }
        };
        let (_method, path, length) = wire::request_head(&buffer)?;
        while buffer.len() < end + length {
            if stream.read_buf(&mut buffer).await? == 0 {
                return Ok(());
            }
        }
        let body = buffer.get(end..end + length).unwrap_or_default();
        answer(&mut stream, &replies, &path, body).await?;
        buffer.drain(..end + length);
    }
}

async fn answer(
    stream: &mut TcpStream,
    replies: &Replies,
    path: &str,
    body: &[u8],
) -> anyhow::Result<()> {
    let Some(api) = Api::ALL.iter().position(|api| api.path() == path) else {
        let reply = replies.other.get(path).unwrap_or(&replies.not_found);
        return Ok(stream.write_all(reply).await?);
    };
    if wire::is_true(body, b"\"do_remote_decode\"") {
        return Ok(stream.write_all(&prefilled(body.len())).await?);
    }
    match Stream::read(body) {
        None => Ok(stream.write_all(&replies.whole[api]).await?),
        Some(how) => stream_events(stream, &replies.event[api], how).await,
    }
}

/// The answer to a prefill leg, as vLLM gives it.
fn prefilled(body_bytes: usize) -> Vec<u8> {
    let blocks: Vec<String> = (1..=body_bytes / BYTES_PER_BLOCK).map(|n| n.to_string()).collect();
    let tokens = PROMPT_TOKENS;
    let body = format!(
        "{{\"id\":\"cmpl-0123456789abcdef0123456789abcdef\",\"object\":\"text_completion\",\
         \"created\":1700000000,\"model\":\"{MODEL}\",\"choices\":[{{\"index\":0,\"text\":\" a\",\
         \"logprobs\":null,\"finish_reason\":\"length\",\"stop_reason\":null}}],\
         \"usage\":{{\"prompt_tokens\":{tokens},\"total_tokens\":{},\"completion_tokens\":1}},\
         \"kv_transfer_params\":{{\"do_remote_prefill\":true,\"do_remote_decode\":false,\
         \"remote_block_ids\":[[{}]],\"remote_engine_id\":\"0b0e7a52-4f0c-4f7e-9d0e-3f5b4d1c2a10\",\
         \"remote_request_id\":\"cmpl-0123456789abcdef0123456789abcdef\",\
         \"remote_host\":\"127.0.0.1\",\"remote_port\":5600,\"tp_size\":1,\
         \"remote_num_tokens\":{tokens}}}}}",
        tokens + 1,
        blocks.join(",")
    );
    sized(200, "application/json", &body)
}

async fn stream_events(stream: &mut TcpStream, event: &str, how: Stream) -> anyhow::Result<()> {
    let chunk = format!("{:x}\r\n{event}\r\n", event.len());
    let chunks = chunk.repeat(how.per_write);
    stream.write_all(STREAM_HEAD.as_bytes()).await?;
    let mut due = Instant::now();
    let mut left = how.tokens;
    while left > 0 {
        let events = left.min(how.per_write);
        let bytes = chunks.as_bytes().get(..chunk.len() * events).unwrap_or_default();
        stream.write_all(bytes).await?;
        left -= events;
        if how.pause_ms == 0 {
            // Other streams have their turn: events of one stream do not come in a row.
            tokio::task::yield_now().await;
        } else {
            due += Duration::from_millis(how.pause_ms);
            sleep_until(due).await;
        }
    }
    let done = format!("{:x}\r\n{DONE}\r\n0\r\n\r\n", DONE.len());
    Ok(stream.write_all(done.as_bytes()).await?)
}
