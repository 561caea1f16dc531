//! The bootstrap server of vLLM's MooncakeConnector: it names the engine of each data-parallel rank and
//! says where its KV is. Here all ranks share one side channel.

use std::io;
use std::time::Duration;

use http::Method;
use serde_json::{Map, Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::app::App;
use super::body::{self, Reply};
use super::config::{Connector, Dialect, EngineConfig, Role};
use super::reply::reachable;
use super::request::{KvParams, host_and_port};

/// How long a bootstrap server may take, as long as vLLM's decode engines wait.
const PATIENCE: Duration = Duration::from_secs(30);
/// Longest answer of one.
const ANSWER_BYTES: u64 = 1 << 20;

/// Whether an engine hands KV over with MooncakeConnector.
pub(super) fn is_used(config: &EngineConfig) -> bool {
    config.dialect == Dialect::Vllm && config.connector == Connector::Mooncake
}

/// Whether it has a bootstrap server.
pub(super) fn has_server(config: &EngineConfig) -> bool {
    is_used(config) && config.role == Role::Prefill
}

/// What a connector reads of a request's parameters: those of the other one mean nothing to it.
pub(super) fn read(config: &EngineConfig, kv: &mut KvParams) {
    if is_used(config) {
        kv.remote_request_id = None;
    } else {
        kv.transfer_id = None;
    }
}

/// The name of one rank's engine, as vLLM makes it.
pub(super) fn engine_of(engine_id: &str, ranks: usize, rank: usize) -> String {
    if ranks > 1 { format!("{engine_id}_dp{rank}") } else { engine_id.to_owned() }
}

/// What the bootstrap server answers.
pub(super) fn answer(app: &App, method: &Method, path: &str) -> Reply {
    if path != "/query" || method != Method::GET {
        return body::json(404, r#"{"detail":"Not Found"}"#);
    }
    let ranks = app.ranks.len();
    let at = format!("tcp://{}:{}", reachable(app.config.host), app.side_port);
    let entry = |rank: usize| {
        let engine_id = engine_of(&app.registry.engine_id, ranks, rank);
        (rank.to_string(), json!({"engine_id": engine_id, "worker_addr": {"0": {"0": at}}}))
    };
    let known: Map<String, Value> = (0..ranks).map(entry).collect();
    body::json(200, Value::Object(known).to_string())
}

/// Asks a bootstrap server where an engine's KV is; None if it does not know that engine.
pub(super) async fn find(at: (&str, u16), engine: &str) -> io::Result<Option<(String, u16)>> {
    let known = tokio::time::timeout(PATIENCE, query(at)).await??;
    let ranks = known.as_object().ok_or(io::ErrorKind::InvalidData)?;
    let entry = ranks.values().find(|entry| entry["engine_id"] == engine);
    let addr = entry.and_then(|entry| entry["worker_addr"]["0"]["0"].as_str());
    Ok(addr.and_then(|addr| host_and_port(addr, "tcp://")))
}

async fn query((host, port): (&str, u16)) -> io::Result<Value> {
    let mut stream = TcpStream::connect((host, port)).await?;
    let ask = format!("GET /query HTTP/1.1\r\nhost: {host}:{port}\r\nconnection: close\r\n\r\n");
    stream.write_all(ask.as_bytes()).await?;
    let mut answer = String::new();
    stream.take(ANSWER_BYTES).read_to_string(&mut answer).await?;
    let (_, body) = answer.split_once("\r\n\r\n").ok_or(io::ErrorKind::InvalidData)?;
    Ok(serde_json::from_str(body)?)
}
