//! An engine made of bare sockets, for what an HTTP server never does: it ends a connection at any byte
//! of a request or of its reply.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;

use super::fleet::MODEL;

/// How an inference request begins.
const INFERENCE: &[u8] = b"POST /v1/";

/// How a connection goes on after what an engine did with a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Then {
    /// It is kept for a further request.
    Keep,
    /// It is reset.
    Rst,
    /// It is closed.
    Fin,
    /// Nothing more comes, until the router leaves.
    Hang,
}

/// What the engine does with an inference request.
#[derive(Clone, Debug)]
pub enum Act {
    /// Reads so many bytes of it.
    Read(usize, Then),
    /// Reads it and sends these bytes.
    Send(Vec<u8>, Then),
    /// Reads it and sends what follows from it.
    Reply(fn(&str) -> (Vec<u8>, Then)),
}

/// An inference request that has come, or has begun to.
#[derive(Clone, Debug)]
pub struct Seen {
    /// What of it was read.
    pub text: String,
    /// Which connection it came on.
    pub connection: usize,
    /// When its first byte came.
    pub came: Instant,
    /// When the router left, where the engine hung.
    pub left: Option<Instant>,
}

/// A running engine of bare sockets.
pub struct Raw {
    addr: SocketAddr,
    shared: Arc<Shared>,
    accepting: JoinHandle<()>,
}

struct Shared {
    /// What is done with the requests to come; the last one stays.
    acts: Mutex<Vec<Act>>,
    seen: Mutex<Vec<Seen>>,
}

fn locked<T>(of: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A whole reply to a completion that is no stream.
pub fn whole(text: &str) -> Vec<u8> {
    let body = json!({"id": "raw", "object": "text_completion", "created": 1, "model": MODEL,
        "choices": [{"index": 0, "text": text, "finish_reason": "length", "logprobs": null}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}});
    let body = body.to_string();
    let length = body.len();
    let head = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n";
    format!("{head}content-length: {length}\r\n\r\n{body}").into_bytes()
}

/// The head of a streamed reply and its first `tokens` events, each in a chunk of its own.
pub fn stream(tokens: usize) -> Vec<u8> {
    let mut bytes = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\
        transfer-encoding: chunked\r\n\r\n"
        .to_vec();
    for token in 0..tokens {
        let data = json!({"id": "raw", "object": "text_completion", "created": 1, "model": MODEL,
            "choices": [{"index": 0, "text": format!(" t{token}"), "finish_reason": null}]});
        let event = format!("data: {data}\n\n");
        bytes.extend(format!("{:x}\r\n{event}\r\n", event.len()).into_bytes());
    }
    bytes
}

impl Raw {
    /// Starts one that does these things with the inference requests that come, the last one for ever.
    pub async fn start(acts: impl IntoIterator<Item = Act>) -> Raw {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        Raw::on(listener, acts)
    }

    /// The same where it is listened already.
    pub fn on(listener: TcpListener, acts: impl IntoIterator<Item = Act>) -> Raw {
        let addr = listener.local_addr().expect("it has an address");
        let acts = acts.into_iter().collect();
        let shared = Arc::new(Shared { acts: Mutex::new(acts), seen: Mutex::default() });
        let accepting = tokio::spawn(accept(listener, Arc::clone(&shared)));
        Raw { addr, shared, accepting }
    }

    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Replaces what is done with the requests to come.
    pub fn act(&self, acts: impl IntoIterator<Item = Act>) {
        *locked(&self.shared.acts) = acts.into_iter().collect();
    }

    /// The inference requests so far.
    pub fn seen(&self) -> Vec<Seen> {
        locked(&self.shared.seen).clone()
    }

    /// Its worker in a configuration.
    pub fn worker(&self, name: &str, role: &str) -> Value {
        let url = format!("http://{}", self.addr);
        json!({"name": name, "role": role, "url": url, "kv_events": "off"})
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

async fn accept(listener: TcpListener, shared: Arc<Shared>) {
    let mut connections = 0;
    while let Ok((stream, _peer)) = listener.accept().await {
        let _ = stream.set_nodelay(true);
        tokio::spawn(converse(stream, connections, Arc::clone(&shared)));
        connections += 1;
    }
}

/// Serves a connection until one side ends it.
async fn converse(mut stream: TcpStream, connection: usize, shared: Arc<Shared>) {
    let mut read = Vec::new();
    loop {
        while read.len() < INFERENCE.len() {
            if !more(&mut stream, &mut read).await {
                return;
            }
        }
        if !read.starts_with(INFERENCE) {
            let Some(text) = whole_request(&mut stream, &mut read).await else { return };
            let reply = match text.split(' ').nth(1) {
                Some("/health") => "HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n",
                _ => "HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n",
            };
            if stream.write_all(reply.as_bytes()).await.is_err() {
                return;
            }
            continue;
        }
        let at = {
            let mut seen = locked(&shared.seen);
            let text = String::new();
            seen.push(Seen { text, connection, came: Instant::now(), left: None });
            seen.len() - 1
        };
        let act = {
            let mut acts = locked(&shared.acts);
            if acts.len() > 1 { acts.remove(0) } else { acts[0].clone() }
        };
        let then = match act {
            Act::Read(bytes, then) => {
                while read.len() < bytes && more(&mut stream, &mut read).await {}
                locked(&shared.seen)[at].text = String::from_utf8_lossy(&read).into_owned();
                then
            }
            Act::Send(..) | Act::Reply(_) => {
                let Some(text) = whole_request(&mut stream, &mut read).await else { return };
                let (bytes, then) = match act {
                    Act::Reply(reply) => reply(&text),
                    Act::Send(bytes, then) => (bytes, then),
                    Act::Read(..) => return,
                };
                locked(&shared.seen)[at].text = text;
                if stream.write_all(&bytes).await.is_err() {
                    return;
                }
                then
            }
        };
        match then {
            Then::Keep => {}
            Then::Fin => return,
            Then::Rst => return drop(stream.set_zero_linger()),
            Then::Hang => {
                while more(&mut stream, &mut read).await {}
                locked(&shared.seen)[at].left = Some(Instant::now());
                return;
            }
        }
    }
}

async fn more(stream: &mut TcpStream, read: &mut Vec<u8>) -> bool {
    let mut buffer = [0; 16 * 1024];
    match stream.read(&mut buffer).await {
        Ok(count @ 1..) => {
            read.extend_from_slice(&buffer[..count]);
            true
        }
        _ => false,
    }
}

/// Takes a request off what is read.
async fn whole_request(stream: &mut TcpStream, read: &mut Vec<u8>) -> Option<String> {
    loop {
        if let Some(end) = read.windows(4).position(|window| window == b"\r\n\r\n") {
            let head = String::from_utf8_lossy(&read[..end]).to_ascii_lowercase();
            let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
            let length = length.and_then(|length| length.trim().parse().ok()).unwrap_or(0);
            let whole = end + 4 + length;
            while read.len() < whole {
                if !more(stream, read).await {
                    return None;
                }
            }
            let request: Vec<u8> = read.drain(..whole).collect();
            return Some(String::from_utf8_lossy(&request).into_owned());
        }
        if !more(stream, read).await {
            return None;
        }
    }
}
