//! Captured exchanges: sending their requests to a mock, and comparing its reply with the captured one.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, dead_code, unreachable_pub)]

use std::fmt;
use std::path::PathBuf;

use pointsman_sim::mock::MockEngine;
use serde::de::{Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::{Value, json};

use crate::common::{Reply, call};

/// A JSON value without its values.
#[derive(Clone, PartialEq)]
pub enum Shape {
    Null,
    Bool,
    Number,
    Text,
    /// Lists of numbers or texts are alike whatever their length.
    Numbers,
    Texts,
    List(Vec<Shape>),
    Object(Vec<(String, Shape)>),
}

impl fmt::Debug for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Shape::Null => f.write_str("null"),
            Shape::Bool => f.write_str("bool"),
            Shape::Number => f.write_str("number"),
            Shape::Text => f.write_str("text"),
            Shape::Numbers => f.write_str("[number..]"),
            Shape::Texts => f.write_str("[text..]"),
            Shape::List(items) => f.debug_list().entries(items).finish(),
            Shape::Object(members) => {
                f.debug_map().entries(members.iter().map(|(key, value)| (key, value))).finish()
            }
        }
    }
}

impl<'de> Deserialize<'de> for Shape {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Shape, D::Error> {
        from.deserialize_any(Shaper)
    }
}

struct Shaper;

/// Members that are numbers in objects of nothing else. Other such objects are keyed by what was said.
const NUMBERS: &[&str] = &["prompt_tokens", "completion_tokens", "total_tokens", "server_load"];

impl<'de> Visitor<'de> for Shaper {
    type Value = Shape;
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }
    fn visit_unit<E>(self) -> Result<Shape, E> {
        Ok(Shape::Null)
    }
    fn visit_bool<E>(self, _: bool) -> Result<Shape, E> {
        Ok(Shape::Bool)
    }
    fn visit_u64<E>(self, _: u64) -> Result<Shape, E> {
        Ok(Shape::Number)
    }
    fn visit_i64<E>(self, _: i64) -> Result<Shape, E> {
        Ok(Shape::Number)
    }
    fn visit_f64<E>(self, _: f64) -> Result<Shape, E> {
        Ok(Shape::Number)
    }
    fn visit_str<E>(self, _: &str) -> Result<Shape, E> {
        Ok(Shape::Text)
    }
    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Shape, A::Error> {
        let mut all = Vec::new();
        while let Some(item) = items.next_element()? {
            all.push(item);
        }
        let all_are = |kind| !all.is_empty() && all.iter().all(|item| *item == kind);
        Ok(match () {
            () if all_are(Shape::Number) => Shape::Numbers,
            () if all_are(Shape::Text) => Shape::Texts,
            () => Shape::List(all),
        })
    }
    fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<Shape, A::Error> {
        let mut all = Vec::new();
        while let Some((key, value)) = members.next_entry::<String, Shape>()? {
            // Token ids are keys of log probabilities.
            let is_id = !key.is_empty() && key.bytes().all(|byte| byte.is_ascii_digit());
            all.push((if is_id { "#".to_owned() } else { key }, value));
        }
        // Log probabilities by token: of the best ones, and of the one drawn if it is none of them.
        let by_token = |(key, value): &(String, Shape)| {
            *value == Shape::Number && !NUMBERS.contains(&key.as_str())
        };
        if !all.is_empty() && all.iter().all(by_token) {
            return Ok(Shape::Numbers);
        }
        Ok(Shape::Object(all))
    }
}

fn shape(text: &str) -> Shape {
    serde_json::from_str(text).unwrap_or_else(|e| panic!("{e}: {text}"))
}

/// The shapes of a body: of its events if it is a stream, where events of one shape that follow each
/// other count once (a token that completes no character makes none).
pub fn shapes(body: &str) -> Vec<Shape> {
    if body.is_empty() {
        return Vec::new();
    }
    if !body.starts_with("data: ") {
        return vec![shape(body)];
    }
    let events = body.split_terminator("\n\n").map(|event| event.strip_prefix("data: ").unwrap());
    let mut shapes: Vec<Shape> =
        events.map(|event| if event == "[DONE]" { Shape::Bool } else { shape(event) }).collect();
    shapes.dedup();
    shapes
}

/// With sorted members, where the order is no part of the contract.
pub fn sorted(shape: Shape) -> Shape {
    match shape {
        Shape::Object(mut members) => {
            members.sort_by(|a, b| a.0.cmp(&b.0));
            Shape::Object(members.into_iter().map(|(key, value)| (key, sorted(value))).collect())
        }
        Shape::List(items) => Shape::List(items.into_iter().map(sorted).collect()),
        other => other,
    }
}

/// The names of the captures in a folder of fixtures, without `.json`.
pub fn names(folder: &str) -> Vec<String> {
    let files = std::fs::read_dir(path(folder)).unwrap().map(|file| file.unwrap().file_name());
    let names = files.map(|name| name.into_string().unwrap());
    let mut names: Vec<String> =
        names.filter_map(|name| name.strip_suffix(".json").map(str::to_owned)).collect();
    names.sort();
    names
}

/// One of them.
pub fn capture(folder: &str, name: &str) -> Value {
    let text = std::fs::read_to_string(path(folder).join(format!("{name}.json"))).unwrap();
    serde_json::from_str(&text).unwrap()
}

fn path(folder: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(folder)
}

pub async fn replay(engine: &MockEngine, request: &Value) -> Reply {
    let headers = request["headers"].as_object().unwrap();
    let headers: Vec<(&str, &str)> =
        headers.iter().map(|(name, value)| (name.as_str(), value.as_str().unwrap())).collect();
    let mut body = request["body"].clone();
    fold(&mut body);
    let body = match body {
        Value::Null => String::new(),
        Value::String(raw) => raw,
        body => body.to_string(),
    };
    let (method, path) = (request["method"].as_str().unwrap(), request["path"].as_str().unwrap());
    call(&engine.url(), method, path, &headers, &body).await
}

/// The captured model's vocabulary is larger than the built-in one.
const CAPTURED_VOCABULARY: u64 = 10_000;

/// Brings token ids into the mock's vocabulary; those that the captured model had not stay.
fn fold(body: &mut Value) {
    let Some(members) = body.as_object_mut() else { return };
    for (key, value) in members {
        match (key.as_str(), &mut *value) {
            ("prompt" | "token_ids" | "prompt_token_ids", ids) => fold_ids(ids),
            (_, Value::Array(items)) => items.iter_mut().for_each(fold),
            (_, other) => fold(other),
        }
    }
}

fn fold_ids(ids: &mut Value) {
    for id in ids.as_array_mut().into_iter().flatten() {
        match id.as_u64() {
            Some(known) if known <= CAPTURED_VOCABULARY => *id = json!(10 + known % 200),
            _ => fold_ids(id),
        }
    }
}

/// Status, headers, and members of the same types in the same order (or in any).
pub fn assert_alike(name: &str, exchange: &Value, reply: &Reply, any_order: bool) {
    let captured = &exchange["response"];
    let status = captured["status"].as_u64().unwrap();
    assert_eq!(u64::from(reply.status), status, "{name}: {}", reply.text());
    for header in ["content-type", "server", "vary", "allow"] {
        let wanted = captured["headers"][header].as_str();
        assert_eq!(reply.header(header), wanted, "{name}: {header}");
    }
    let id = captured["headers"]["x-request-id"].is_string();
    assert_eq!(reply.header("x-request-id").is_some(), id, "{name}: x-request-id");
    let (theirs, ours) = (shapes(captured["body_raw"].as_str().unwrap()), shapes(reply.text()));
    if any_order {
        let sort = |all: Vec<Shape>| -> Vec<Shape> { all.into_iter().map(sorted).collect() };
        assert_eq!(sort(ours), sort(theirs), "{name}");
    } else {
        assert_eq!(ours, theirs, "{name}: {}", reply.text());
    }
}

/// The values that depend on the request alone; those that follow from the prompt's length only where
/// it came as token ids.
pub fn assert_same_values(name: &str, exchange: &Value, reply: &Reply) {
    let captured = exchange["response"]["body_raw"].as_str().unwrap();
    if reply.status >= 400 {
        assert_eq!(reply.text(), captured, "{name}");
        return;
    }
    let request = &exchange["request"]["body"];
    let has_ids = request["prompt"].is_array()
        || request["token_ids"].is_array()
        || request["kv_transfer_params"]["prompt_token_ids"].is_array();
    let (ours, theirs) = (told(reply.text(), has_ids), told(captured, has_ids));
    assert_eq!(ours, theirs, "{name}");
}

/// What a body, or the events of a stream together, say of what can be compared.
fn told(body: &str, has_ids: bool) -> Vec<(&'static str, Value)> {
    const ALWAYS: &[&str] = &[
        "/object",
        "/model",
        "/usage/completion_tokens",
        "/choices/0/finish_reason",
        "/choices/0/stop_reason",
        "/choices/1/finish_reason",
        "/choices/0/message/role",
        "/kv_transfer_params/do_remote_prefill",
        "/kv_transfer_params/do_remote_decode",
        "/kv_transfer_params/transfer_mode",
        "/kv_transfer_params/tp_size",
    ];
    const OF_PROMPT: &[&str] = &[
        "/usage/prompt_tokens",
        "/usage/total_tokens",
        "/usage/prompt_tokens_details/cached_tokens",
        "/kv_transfer_params/remote_num_tokens",
        "/kv_transfer_params/remote_prefill_cached_tokens",
    ];
    let events = body.split_terminator("\n\n").map(|event| event.trim_start_matches("data: "));
    let events: Vec<Value> = events.filter_map(|event| serde_json::from_str(event).ok()).collect();
    let mut all = Vec::new();
    for at in ALWAYS.iter().chain(if has_ids { OF_PROMPT } else { &[] }) {
        let mut values = events.iter().filter_map(|event| event.pointer(at));
        let last = values.rfind(|value| !value.is_null());
        all.extend(last.map(|value| (*at, value.clone())));
    }
    let blocks = |event: &Value| {
        Some(event.pointer("/kv_transfer_params/remote_block_ids/0")?.as_array()?.len())
    };
    if has_ids {
        all.extend(events.iter().find_map(blocks).map(|count| ("blocks", json!(count))));
    }
    all
}

/// A decode leg's request with other hand-off parameters. The prompt's ids that were captured with it
/// stay, and no member comes to it that was not captured.
pub fn with_params(request: &Value, params: &Value) -> Value {
    let mut request = request.clone();
    let captured = request["body"]["kv_transfer_params"].as_object_mut().unwrap();
    for (key, value) in captured {
        if let Some(told) = params.get(key) {
            *value = told.clone();
        }
    }
    request
}

/// The prefill leg that goes before a decode leg.
pub fn prefill_leg(decode: &Value) -> Value {
    let mut leg = decode.clone();
    let body = leg["body"].as_object_mut().unwrap();
    for key in ["stream", "stream_options", "n", "logprobs", "prompt_logprobs"] {
        body.remove(key);
    }
    if let Some(sampling) = body.get_mut("sampling_params") {
        sampling["max_tokens"] = json!(1);
    } else {
        body.insert("max_tokens".into(), json!(1));
    }
    let ids = body["kv_transfer_params"].get("prompt_token_ids").cloned();
    body["kv_transfer_params"] = json!({"do_remote_decode": true});
    if let Some(ids) = ids {
        body["kv_transfer_params"]["prompt_token_ids"] = ids;
    }
    leg
}

/// What a prefill engine answers to it.
pub async fn params_of(p: &MockEngine, leg: &Value) -> Value {
    let reply = replay(p, leg).await;
    assert_eq!(reply.status, 200, "{}", reply.text());
    let params = reply.json()["kv_transfer_params"].clone();
    assert!(params.is_object(), "{}", reply.text());
    params
}
