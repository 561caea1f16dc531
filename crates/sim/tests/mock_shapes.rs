//! The mock's replies against those of a real vLLM: same status, same members of the same types in
//! the same order, for the same request.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use std::fmt;
use std::path::Path;

use common::{Reply, call, get, quick, start};
use pointsman_sim::mock::{EngineConfig, LoadFailure, MockEngine, Role};
use serde::de::{Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::{Value, json};

/// A JSON value without its values.
#[derive(Clone, PartialEq)]
enum Shape {
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
            all.push((key, value));
        }
        Ok(Shape::Object(all))
    }
}

fn shape(text: &str) -> Shape {
    serde_json::from_str(text).unwrap_or_else(|e| panic!("{e}: {text}"))
}

/// The shapes of a body: of its events if it is a stream, where events of one shape that follow each
/// other count once (a token that completes no character makes none).
fn shapes(body: &str) -> Vec<Shape> {
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
fn sorted(shape: Shape) -> Shape {
    match shape {
        Shape::Object(mut members) => {
            members.sort_by(|a, b| a.0.cmp(&b.0));
            Shape::Object(members.into_iter().map(|(key, value)| (key, sorted(value))).collect())
        }
        Shape::List(items) => Shape::List(items.into_iter().map(sorted).collect()),
        other => other,
    }
}

fn capture(name: &str) -> Value {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/vllm");
    let text = std::fs::read_to_string(dir.join(format!("{name}.json"))).unwrap();
    serde_json::from_str(&text).unwrap()
}

async fn replay(engine: &MockEngine, request: &Value) -> Reply {
    let headers = request["headers"].as_object().unwrap();
    let headers: Vec<(&str, &str)> =
        headers.iter().map(|(name, value)| (name.as_str(), value.as_str().unwrap())).collect();
    let body = match &request["body"] {
        Value::Null => String::new(),
        Value::String(raw) => raw.clone(),
        body => body.to_string(),
    };
    let body = in_vocabulary(body, request);
    let (method, path) = (request["method"].as_str().unwrap(), request["path"].as_str().unwrap());
    call(&engine.url(), method, path, &headers, &body).await
}

/// The captured model's vocabulary is larger than the built-in one.
fn in_vocabulary(body: String, request: &Value) -> String {
    let Some(ids) = request["body"]["prompt"].as_array() else { return body };
    let Some(ids) = ids.iter().map(Value::as_u64).collect::<Option<Vec<_>>>() else { return body };
    if ids.iter().any(|id| *id > 10_000) {
        return body;
    }
    let mut folded = request["body"].clone();
    folded["prompt"] = ids.into_iter().map(|id| 10 + id % 200).collect();
    folded.to_string()
}

fn compare(name: &str, captured: &Value, reply: &Reply) {
    let captured = &captured["response"];
    assert_eq!(
        reply.status,
        captured["status"].as_u64().unwrap() as u16,
        "{name}: {}",
        reply.text()
    );
    for header in ["content-type", "server", "vary", "allow"] {
        let wanted = captured["headers"][header].as_str();
        assert_eq!(reply.header(header), wanted, "{name}: {header}");
    }
    let id = captured["headers"]["x-request-id"].is_string();
    assert_eq!(reply.header("x-request-id").is_some(), id, "{name}: x-request-id");
    let (theirs, ours) = (shapes(captured["body_raw"].as_str().unwrap()), shapes(reply.text()));
    if ORDER_IS_FREE.contains(&name) {
        let sort = |all: Vec<Shape>| -> Vec<Shape> { all.into_iter().map(sorted).collect() };
        assert_eq!(sort(ours), sort(theirs), "{name}");
    } else {
        assert_eq!(ours, theirs, "{name}: {}", reply.text());
    }
}

/// Small endpoints whose members are written in any order.
const ORDER_IS_FREE: &[&str] = &["models", "tokenize_chat", "tokenize_prompt"];

/// As the server that the captures without `pd_` came from.
fn captured_server() -> EngineConfig {
    EngineConfig {
        max_model_len: 1024,
        block_size: 32,
        prompt_tokens_details: true,
        force_include_usage: true,
        request_id_headers: true,
        kv_events: None,
        ..quick(Role::Unified)
    }
}

fn captured_pd(role: Role) -> EngineConfig {
    EngineConfig { prompt_tokens_details: false, block_size: 128, ..quick(role) }
}

const SINGLE: &[&str] = &[
    "completion",
    "completion_stream",
    "completion_stream_usage",
    "completion_stream_usage_cached",
    "completion_n2",
    "completion_batch_prompts",
    "completion_token_ids",
    "chat",
    "chat_stream",
    "chat_stream_usage",
    "chat_logprobs",
    "chat_max_completion_tokens",
    "dp_rank_header",
    "dp_rank_header_bad",
    "err_bad_json",
    "err_bad_type",
    "err_context_length",
    "err_context_length_chat",
    "err_prompt_plus_max_tokens",
    "err_stream_error",
    "err_empty_prompt",
    "err_max_tokens_0",
    "err_method_not_allowed",
    "err_missing_messages",
    "err_missing_prompt",
    "err_model_404",
    "err_model_404_chat",
    "err_n_too_big",
    "err_negative_max_tokens",
    "err_not_found_path",
    "err_temperature",
    "err_token_oov",
    "err_unknown_role",
    "err_wrong_content_type",
    "health",
    "ping",
    "kv_event_sources",
    "kv_params_without_connector",
    "load",
    "models",
    "nvext_ignored",
    "priority_field",
    "tokenize_chat",
    "tokenize_prompt",
    "detokenize",
    "unknown_field_accepted",
    "version",
];

#[tokio::test]
async fn a_single_server_answers_in_the_captured_shapes() {
    let engine = start(captured_server()).await;
    for name in SINGLE {
        let captured = capture(name);
        let reply = replay(&engine, &captured["request"]).await;
        compare(name, &captured, &reply);
    }
    engine.stop().await;
}

#[tokio::test]
async fn errors_of_a_single_server_carry_the_captured_words() {
    let engine = start(captured_server()).await;
    let exact = SINGLE
        .iter()
        .filter(|name| name.starts_with("err_") || name.starts_with("dp_rank_header_"));
    // The reader of broken JSON names another place, and Python's words are not ours.
    // A chat has another number of tokens, and what fits is answered.
    const OTHERS: [&str; 4] = [
        "err_bad_json",
        "err_unknown_role",
        "err_context_length_chat",
        "err_prompt_plus_max_tokens",
    ];
    for name in exact.filter(|name| !OTHERS.contains(name)) {
        let captured = capture(name);
        let reply = replay(&engine, &captured["request"]).await;
        assert_eq!(reply.text(), captured["response"]["body_raw"].as_str().unwrap(), "{name}");
    }
    engine.stop().await;
}

#[tokio::test]
async fn a_prompt_that_is_too_long_is_refused_in_the_captured_words() {
    let engine = start(captured_server()).await;
    let body = json!({"model": "tiny", "prompt": vec![5; 2000], "max_tokens": 3}).to_string();
    let reply = call(&engine.url(), "POST", "/v1/completions", &[], &body).await;
    assert_eq!(reply.status, 400);
    assert_eq!(
        reply.text(),
        "{\"error\":{\"message\":\"This model's maximum context length is 1024 tokens. However, your \
         prompt contains 2000 input tokens, which exceeds this limit even without any output tokens. \
         Please reduce the length of the input prompt. (parameter=input_tokens, value=2000)\",\
         \"type\":\"BadRequestError\",\"param\":\"input_tokens\",\"code\":400}}"
    );
    engine.stop().await;
}

/// A decode leg's captured request with params that a prefill engine has just given.
async fn with_fresh_params(p: &MockEngine, request: &Value) -> Value {
    let mut leg = request.clone();
    leg["body"]["max_tokens"] = json!(1);
    leg["body"]["stream"] = json!(false);
    leg["body"]["kv_transfer_params"] = json!({"do_remote_decode": true});
    leg["body"].as_object_mut().unwrap().remove("stream_options");
    let params = replay(p, &leg).await.json()["kv_transfer_params"].clone();
    assert!(params.is_object());
    let mut request = request.clone();
    request["body"]["kv_transfer_params"] = params;
    request
}

#[tokio::test]
async fn prefill_and_decode_legs_are_answered_in_the_captured_shapes() {
    let p = start(captured_pd(Role::Prefill)).await;
    let d = start(captured_pd(Role::Decode)).await;
    for name in ["pd_completion_prefill_leg", "pd_chat_prefill_leg", "pd_prefill_leg_minimal"] {
        let captured = capture(name);
        compare(name, &captured, &replay(&p, &captured["request"]).await);
    }
    for name in ["pd_prefill_leg_streaming", "pd_prefill_leg_streaming_chat"] {
        let captured = capture(name);
        compare(name, &captured, &replay(&p, &captured["request"]).await);
    }
    for name in ["pd_completion_decode_leg", "pd_chat_stream_decode_leg"] {
        let captured = capture(name);
        let request = with_fresh_params(&p, &captured["request"]).await;
        compare(name, &captured, &replay(&d, &request).await);
    }
    let captured = capture("pd_bypass_on_decode");
    compare("bypass", &captured, &replay(&d, &captured["request"]).await);
    assert_eq!(d.stats()["violation_count"], 0);
    p.stop().await;
    d.stop().await;
}

#[tokio::test]
async fn several_choices_and_log_probabilities_are_answered_in_the_captured_shapes() {
    let config = |role| EngineConfig { prompt_tokens_details: true, ..captured_pd(role) };
    let (p, d) = (start(config(Role::Prefill)).await, start(config(Role::Decode)).await);
    let captured = capture("pd_n2_prefill_leg");
    compare("n2", &captured, &replay(&p, &captured["request"]).await);
    let captured = capture("pd_completion_logprobs");
    let request = with_fresh_params(&p, &captured["request"]).await;
    let reply = replay(&d, &request).await;
    let logprobs = &reply.json()["choices"][0]["logprobs"];
    let theirs: Value =
        serde_json::from_str(captured["response"]["body_raw"].as_str().unwrap()).unwrap();
    let keys = |value: &Value| value.as_object().unwrap().keys().cloned().collect::<Vec<_>>();
    assert_eq!(keys(logprobs), keys(&theirs["choices"][0]["logprobs"]));
    for key in keys(logprobs) {
        assert_eq!(logprobs[&key].as_array().unwrap().len(), 2, "{key}");
    }
    p.stop().await;
    d.stop().await;
}

/// A captured request whose params lead nowhere.
fn to_nowhere(request: &Value) -> Value {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let mut request = request.clone();
    request["body"]["kv_transfer_params"]["remote_port"] =
        json!(listener.local_addr().unwrap().port());
    request
}

#[tokio::test]
async fn failed_kv_loads_are_answered_in_the_captured_shapes() {
    let failing = start(captured_pd(Role::Decode)).await;
    for name in ["pd_load_failure", "pd_load_failure_stream", "pd_load_failure_chat_stream"] {
        let captured = capture(name);
        compare(name, &captured, &replay(&failing, &to_nowhere(&captured["request"])).await);
    }
    let config = EngineConfig { load_failure: LoadFailure::Recompute, ..captured_pd(Role::Decode) };
    let recomputing = start(config).await;
    for name in ["pd_recompute", "pd_recompute_chat_stream"] {
        let captured = capture(name);
        compare(name, &captured, &replay(&recomputing, &to_nowhere(&captured["request"])).await);
    }
    assert_eq!(failing.stats()["kv_load_failures"], 3);
    assert_eq!(recomputing.stats()["kv_load_failures"], 2);
    failing.stop().await;
    recomputing.stop().await;
}

#[tokio::test]
async fn wrong_params_are_answered_in_the_captured_shapes() {
    let config = EngineConfig {
        on_violation: pointsman_sim::mock::OnViolation::AsReal,
        ..captured_pd(Role::Decode)
    };
    let d = start(config).await;
    let captured = capture("pd_rejected_decode_leg");
    compare("rejected", &captured, &replay(&d, &to_nowhere(&captured["request"])).await);
    let captured = capture("pd_forged_params");
    compare("forged", &captured, &replay(&d, &captured["request"]).await);
    assert_eq!(get(&d.url(), "/health").await.status, 503);
    d.stop().await;
}
