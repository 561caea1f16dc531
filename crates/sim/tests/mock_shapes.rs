//! The mock's replies against those of a real vLLM: same status, same members of the same types in
//! the same order, for the same request. Every capture of a single server is replayed.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "common/capture.rs"]
mod captures;
mod common;

use captures::{
    assert_alike, assert_same_values, capture, names, params_of, prefill_leg, replay, with_params,
};
use common::{call, quick, start};
use pointsman_sim::mock::{EngineConfig, Role};
use serde_json::json;

/// Small endpoints whose members are written in any order.
const ORDER_IS_FREE: &[&str] = &["models", "tokenize_chat", "tokenize_prompt"];

/// Captured of a prefill and a decode server, with `--enable-scale-out`.
const OF_A_PAIR: &[&str] = &[
    "chat_bypass_with_prompt_token_ids_only",
    "chat_decode_leg_with_prompt_token_ids_in_kv_params",
    "chat_prefill_leg_return_token_ids",
];

fn is_of_a_pair(name: &str) -> bool {
    name.starts_with("scaleout_") || OF_A_PAIR.contains(&name)
}

/// As the server that the other captures came from.
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

/// What follows from the prompt's tokens, which are not the captured model's, is not the same here.
const OTHER_VALUES: &[&str] = &[
    // The reader of broken JSON names another place, and Python's words are not ours.
    "err_bad_json",
    "err_unknown_role",
    "err_context_length_chat",
    // With fewer tokens it fits.
    "err_prompt_plus_max_tokens",
];

#[tokio::test]
async fn a_single_server_answers_as_captured() {
    let engine = start(captured_server()).await;
    for name in names("vllm").iter().filter(|name| !is_of_a_pair(name)) {
        let exchange = capture("vllm", name);
        let reply = replay(&engine, &exchange["request"]).await;
        assert_alike(name, &exchange, &reply, ORDER_IS_FREE.contains(&name.as_str()));
        if !OTHER_VALUES.contains(&name.as_str()) {
            assert_same_values(name, &exchange, &reply);
        }
    }
    engine.stop().await;
}

#[tokio::test]
async fn a_pair_with_scale_out_answers_as_captured() {
    let config = |role| EngineConfig {
        scale_out: true,
        prompt_tokens_details: false,
        block_size: 128,
        ..quick(role)
    };
    let (p, d) = (start(config(Role::Prefill)).await, start(config(Role::Decode)).await);
    let mut all = names("vllm");
    all.retain(|name| is_of_a_pair(name));
    // Their prompts were not cached.
    all.sort_by_key(|name| !name.contains("prefill"));
    for name in &all {
        let exchange = capture("vllm", name);
        let mut request = exchange["request"].clone();
        let params = &request["body"]["kv_transfer_params"];
        let engine = if params["do_remote_decode"] == true { &p } else { &d };
        if params["do_remote_prefill"] == true {
            request = with_params(&request, &params_of(&p, &prefill_leg(&request)).await);
        }
        let reply = replay(engine, &request).await;
        assert_alike(name, &exchange, &reply, false);
        assert_same_values(name, &exchange, &reply);
    }
    assert_eq!(d.stats()["violation_count"], 0);
    assert_eq!(d.stats()["legs"]["decode_remote"], 2);
    p.stop().await;
    d.stop().await;
}

#[tokio::test]
async fn rendered_prompts_are_generated_from_and_come_back_as_the_same_text() {
    let engine = start(EngineConfig { scale_out: true, ..quick(Role::Unified) }).await;
    let post = async |path: &str, body: &serde_json::Value| {
        call(&engine.url(), "POST", path, &[], &body.to_string()).await.json()
    };
    let ask = json!({"model": "tiny", "prompt": "hello world", "max_tokens": 5, "temperature": 0});
    let rendered = post("/v1/completions/render", &ask).await[0].clone();
    let generated = post("/inference/v1/generate", &rendered).await;
    let derender = json!({"model": "tiny", "generate_responses": [generated]});
    let text = post("/v1/completions/derender", &derender).await["choices"][0]["text"].clone();
    assert_eq!(text, post("/v1/completions", &ask).await["choices"][0]["text"]);
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
