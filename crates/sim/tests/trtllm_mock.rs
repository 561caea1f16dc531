//! The mock of TensorRT-LLM: both legs by `disaggregated_params`, answers that are complete after the
//! context, KV events that are handed out once. By the engine's sources; nothing here was captured.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use common::{complete, get, ids, post, quick, start, until};
use pointsman_sim::mock::{Action, Dialect, EngineConfig, Fault, Faults, Leg, MockEngine, Role};
use serde_json::{Value, json};

async fn trtllm(role: Role) -> MockEngine {
    start(EngineConfig { dialect: Dialect::Trtllm, ..quick(role) }).await
}

fn context(prompt: &[u32], max_tokens: u32) -> Value {
    json!({"model": "tiny", "prompt": prompt, "max_tokens": max_tokens,
        "disaggregated_params": {"request_type": "context_only", "disagg_request_id": 7}})
}

/// The events that an engine has for whoever asks.
async fn events(engine: &MockEngine) -> Vec<Value> {
    let reply = post(&engine.url(), "/kv_cache_events", &json!({})).await;
    assert_eq!(reply.status, 200);
    reply.json().as_array().unwrap().clone()
}

fn kinds(events: &[Value]) -> Vec<&str> {
    events.iter().map(|event| event["data"]["type"].as_str().unwrap()).collect()
}

#[tokio::test]
async fn a_context_is_handed_over_once() {
    let (prefill, decode) = (trtllm(Role::Prefill).await, trtllm(Role::Decode).await);
    let prompt = ids(0, 64);
    let answer = complete(&prefill.url(), &context(&prompt, 8)).await.json();
    let choice = &answer["choices"][0];
    assert_eq!(choice["finish_reason"], "not_finished");
    assert_eq!(answer["prompt_token_ids"], json!(prompt));
    let mut params = choice["disaggregated_params"].clone();
    assert_eq!(
        (&params["ctx_request_id"], params["first_gen_tokens"].as_array().unwrap().len()),
        (&json!(7), 1)
    );
    params["request_type"] = json!("generation_only");
    let body =
        json!({"model": "tiny", "prompt": prompt, "max_tokens": 8, "disaggregated_params": params});
    let reply = complete(&decode.url(), &body).await.json();
    let alone = trtllm(Role::Unified).await;
    let plain = json!({"model": "tiny", "prompt": prompt, "max_tokens": 8});
    let expected = complete(&alone.url(), &plain).await.json();
    assert_eq!(reply["choices"], expected["choices"]);
    assert_eq!(decode.stats()["violations"], json!([]));
    until(&prefill, |stats| stats["pins"] == 0).await;
    // A second time its KV may be another's.
    complete(&decode.url(), &body).await;
    assert_eq!(decode.stats()["violations"][0]["kind"], "params_used_twice");
}

#[tokio::test]
async fn a_context_is_refused_as_a_stream_or_with_choices() {
    let prefill = trtllm(Role::Prefill).await;
    for (key, value) in [("stream", json!(true)), ("n", json!(2))] {
        let mut body = context(&ids(0, 8), 4);
        body[key] = value;
        let reply = complete(&prefill.url(), &body).await;
        assert_eq!((reply.status, &reply.json()["object"]), (400, &json!("error")));
    }
}

#[tokio::test]
async fn a_context_that_ends_at_once_leaves_nothing_to_hand_over() {
    let prefill = trtllm(Role::Prefill).await;
    let rule = Fault { leg: Leg::Prefill, count: None, action: Action::EosAtOnce };
    prefill.set_faults(Faults { rules: vec![rule], ..Faults::default() });
    let answer = complete(&prefill.url(), &context(&ids(0, 64), 8)).await.json();
    let choice = &answer["choices"][0];
    assert_eq!(
        (&choice["finish_reason"], &choice["disaggregated_params"]),
        (&json!("stop"), &Value::Null)
    );
    until(&prefill, |stats| stats["pins"] == 0 && stats["live"] == 0).await;
}

#[tokio::test]
async fn events_are_handed_out_once_and_not_of_blocks_that_were_received() {
    let (prefill, decode) = (trtllm(Role::Prefill).await, trtllm(Role::Decode).await);
    let prompt = ids(0, 64);
    let answer = complete(&prefill.url(), &context(&prompt, 8)).await.json();
    let told = events(&prefill).await;
    assert_eq!(kinds(&told)[..2], ["created", "stored"]);
    assert_eq!(told[1]["data"]["blocks"][0]["tokens"][0]["token_id"], json!(prompt[0]));
    assert_eq!(events(&prefill).await, Vec::<Value>::new());
    let mut params = answer["choices"][0]["disaggregated_params"].clone();
    params["request_type"] = json!("generation_only");
    let body = json!({"prompt": prompt, "max_tokens": 8, "disaggregated_params": params});
    assert_eq!(complete(&decode.url(), &body).await.status, 200);
    assert_eq!(kinds(&events(&decode).await), ["created"]);
    // What it computes itself it tells.
    assert_eq!(
        complete(&decode.url(), &json!({"prompt": ids(100, 32), "max_tokens": 2})).await.status,
        200
    );
    assert_eq!(kinds(&events(&decode).await), ["stored"]);
}

#[tokio::test]
async fn statistics_are_json() {
    let engine = trtllm(Role::Unified).await;
    let stats = get(&engine.url(), "/metrics").await.json();
    assert_eq!(stats[0]["kvCacheStats"]["tokensPerBlock"], 16);
    assert_eq!(get(&engine.url(), "/version").await.status, 200);
    assert_eq!(get(&engine.url(), "/kv_event_sources").await.status, 404);
}
