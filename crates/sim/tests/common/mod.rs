//! A small HTTP/1.1 client that sees how a connection ends, and helpers around mock engines.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, dead_code, unreachable_pub)]

use std::io::ErrorKind;
use std::time::Duration;

use pointsman_sim::mock::{EngineConfig, MockEngine, Role};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// How long anything may take before a test gives up.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// How a reply ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// All of it came.
    Whole,
    /// The connection ended in the middle.
    Fin,
    /// It was reset.
    Rst,
}

#[derive(Clone, Debug)]
pub struct Reply {
    /// 0 when not even headers came.
    pub status: u16,
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
    pub end: End,
}

impl Reply {
    pub fn text(&self) -> &str {
        std::str::from_utf8(&self.body).unwrap()
    }
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|e| panic!("{e}: {}", self.text()))
    }
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str())
    }
    /// The data of each server-sent event.
    pub fn events(&self) -> Vec<&str> {
        let text = self.text();
        assert!(text.is_empty() || text.ends_with("\n\n"), "cut inside an event: {text}");
        text.split_terminator("\n\n").map(|event| event.strip_prefix("data: ").unwrap()).collect()
    }
    /// The events that are JSON.
    pub fn chunks(&self) -> Vec<Value> {
        let json = self.events().into_iter().filter(|event| *event != "[DONE]");
        json.map(|event| serde_json::from_str(event).unwrap()).collect()
    }
    /// All text of one choice.
    pub fn said(&self, choice: u64) -> String {
        let of = |chunk: &Value| -> String {
            let choices = chunk["choices"].as_array().unwrap().iter();
            let mine = choices.filter(|c| c["index"] == choice);
            mine.filter_map(|c| c["text"].as_str().or(c["delta"]["content"].as_str())).collect()
        };
        self.chunks().iter().map(of).collect()
    }
}

/// One keep-alive connection.
pub struct Client {
    stream: TcpStream,
    buffer: Vec<u8>,
}

impl Client {
    pub async fn connect(url: &str) -> std::io::Result<Client> {
        let addr = url.strip_prefix("http://").unwrap();
        Ok(Client { stream: TcpStream::connect(addr).await?, buffer: Vec::new() })
    }

    pub async fn send(&mut self, method: &str, path: &str, headers: &[(&str, &str)], body: &str) {
        let mut head = format!("{method} {path} HTTP/1.1\r\nhost: test\r\n");
        if !headers.iter().any(|(name, _)| name.eq_ignore_ascii_case("content-type")) {
            head += "content-type: application/json\r\n";
        }
        for (name, value) in headers {
            head += &format!("{name}: {value}\r\n");
        }
        head += &format!("content-length: {}\r\n\r\n{body}", body.len());
        let _ = self.stream.write_all(head.as_bytes()).await;
    }

    pub async fn reply(&mut self) -> Reply {
        tokio::time::timeout(PATIENCE, self.read_reply()).await.expect("no reply in time")
    }

    /// More bytes; how the connection ended if it did.
    async fn fill(&mut self) -> Option<End> {
        match self.stream.read_buf(&mut self.buffer).await {
            Ok(0) => Some(End::Fin),
            Ok(_) => None,
            Err(error) if error.kind() == ErrorKind::ConnectionReset => Some(End::Rst),
            Err(error) => panic!("{error}"),
        }
    }

    /// Status and headers alone.
    pub async fn head(&mut self) -> Reply {
        loop {
            if let Some(at) = self.buffer.windows(4).position(|w| w == b"\r\n\r\n") {
                let head = String::from_utf8(self.buffer.drain(..at + 4).collect()).unwrap();
                let mut lines = head.trim_end().split("\r\n");
                let status = lines.next().unwrap().split(' ').nth(1).unwrap().parse().unwrap();
                let header = |line: &str| {
                    let (name, value) = line.split_once(": ").unwrap();
                    (name.to_ascii_lowercase(), value.to_owned())
                };
                let headers = lines.map(header).collect();
                return Reply { status, headers, body: Vec::new(), end: End::Whole };
            }
            if let Some(end) = self.fill().await {
                return Reply { status: 0, headers: Vec::new(), body: Vec::new(), end };
            }
        }
    }

    async fn read_reply(&mut self) -> Reply {
        let mut reply = self.head().await;
        if reply.status == 0 {
            return reply;
        }
        if let Some(length) = reply.header("content-length") {
            let length: usize = length.parse().unwrap();
            reply.end = self.upto(length).await;
            reply.body = self.buffer.drain(..length.min(self.buffer.len())).collect();
            return reply;
        }
        loop {
            match self.chunk().await {
                Ok(chunk) if chunk.is_empty() => return reply,
                Ok(chunk) => reply.body.extend(chunk),
                Err(end) => {
                    reply.end = end;
                    return reply;
                }
            }
        }
    }

    /// The next chunk of a chunked body, empty at its end.
    pub async fn chunk(&mut self) -> Result<Vec<u8>, End> {
        let line_end = loop {
            if let Some(at) = self.buffer.windows(2).position(|w| w == b"\r\n") {
                break at;
            }
            if let Some(end) = self.fill().await {
                return Err(end);
            }
        };
        let size = std::str::from_utf8(&self.buffer[..line_end]).unwrap();
        let size = usize::from_str_radix(size, 16).unwrap();
        match self.upto(line_end + 2 + size + 2).await {
            End::Whole => {}
            end => return Err(end),
        }
        let chunk: Vec<u8> = self.buffer.drain(..line_end + 2 + size + 2).collect();
        Ok(chunk[line_end + 2..line_end + 2 + size].to_vec())
    }

    async fn upto(&mut self, length: usize) -> End {
        while self.buffer.len() < length {
            if let Some(end) = self.fill().await {
                return end;
            }
        }
        End::Whole
    }

    /// Waits for the other side to end the connection.
    pub async fn wait_end(&mut self) -> End {
        let wait = async {
            loop {
                if let Some(end) = self.fill().await {
                    return end;
                }
            }
        };
        tokio::time::timeout(PATIENCE, wait).await.expect("the connection did not end")
    }
}

pub async fn call(
    url: &str,
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
    body: &str,
) -> Reply {
    let mut client = Client::connect(url).await.unwrap();
    client.send(method, path, headers, body).await;
    client.reply().await
}

pub async fn get(url: &str, path: &str) -> Reply {
    call(url, "GET", path, &[], "").await
}

pub async fn post(url: &str, path: &str, body: &Value) -> Reply {
    call(url, "POST", path, &[], &body.to_string()).await
}

pub async fn complete(url: &str, body: &Value) -> Reply {
    post(url, "/v1/completions", body).await
}

pub async fn chat(url: &str, body: &Value) -> Reply {
    post(url, "/v1/chat/completions", body).await
}

/// An instantaneous engine of the model `tiny`.
pub fn quick(role: Role) -> EngineConfig {
    EngineConfig {
        model: "tiny".to_owned(),
        speed: f64::INFINITY,
        capacity_blocks: 1000,
        max_model_len: 8192,
        ..EngineConfig::of(role)
    }
}

pub async fn start(config: EngineConfig) -> MockEngine {
    MockEngine::start(config).await.unwrap()
}

/// Waits until the engine's statistics are as wanted.
pub async fn until(engine: &MockEngine, what: impl Fn(&Value) -> bool) -> Value {
    let wait = async {
        loop {
            let stats = engine.stats();
            if what(&stats) {
                return stats;
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    match tokio::time::timeout(PATIENCE, wait).await {
        Ok(stats) => stats,
        Err(_) => panic!("still {}", engine.stats()),
    }
}

/// A prompt of token ids that starts at `from`.
pub fn ids(from: u32, count: u32) -> Vec<u32> {
    (0..count).map(|at| 10 + (from + at) % 200).collect()
}

/// A prefill leg's params for this prompt.
pub async fn prefill(engine: &MockEngine, prompt: &[u32]) -> Value {
    let body = json!({
        "prompt": prompt, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": true},
    });
    let reply = complete(&engine.url(), &body).await;
    assert_eq!(reply.status, 200, "{}", reply.text());
    reply.json()["kv_transfer_params"].clone()
}
