//! Prefill and decode legs between mock engines: what is pinned, pulled, released, and how wrong
//! hand-offs show.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use std::time::Duration;

use common::{Client, Reply, chat, complete, ids, prefill, quick, start, until};
use pointsman_sim::mock::{
    Action, EngineConfig, Fault, Faults, Leg, LoadFailure, MockEngine, OnViolation, Role,
};
use serde_json::{Value, json};

async fn pair() -> (MockEngine, MockEngine) {
    (start(quick(Role::Prefill)).await, start(quick(Role::Decode)).await)
}

fn decode(prompt: &[u32], params: &Value) -> Value {
    json!({"prompt": prompt, "max_tokens": 8, "kv_transfer_params": params})
}

fn text(reply: &Reply) -> String {
    assert_eq!(reply.status, 200, "{}", reply.text());
    reply.json()["choices"][0]["text"].as_str().unwrap().to_owned()
}

async fn local_text(engine: &MockEngine, prompt: &[u32]) -> String {
    // Another salt keeps it out of the cache under test.
    let body = json!({"prompt": prompt, "max_tokens": 8, "cache_salt": "reference"});
    text(&complete(&engine.url(), &body).await)
}

fn violations(engine: &MockEngine) -> Vec<String> {
    let stats = engine.stats();
    let all = stats["violations"].as_array().unwrap();
    all.iter().map(|one| one["kind"].as_str().unwrap().to_owned()).collect()
}

#[tokio::test]
async fn remote_and_local_give_the_same_text_and_the_pin_is_released() {
    let (p, d) = pair().await;
    let prompt = ids(0, 100);
    let params = prefill(&p, &prompt).await;
    assert_eq!(params["remote_num_tokens"], 100);
    assert_eq!(params["remote_block_ids"][0].as_array().unwrap().len(), 7);
    assert_eq!(p.stats()["pinned_blocks"], 7);
    let reply = complete(&d.url(), &decode(&prompt, &params)).await;
    assert_eq!(text(&reply), local_text(&d, &prompt).await);
    until(&p, |stats| stats["pins"] == 0 && stats["used_blocks"] == 0).await;
    let stats = d.stats();
    assert_eq!(stats["legs"], json!({"prefill": 0, "decode_remote": 1, "local": 1}));
    assert_eq!(stats["external_kv_transfer_tokens"], 100);
    assert_eq!(stats["violation_count"], 0);
    p.stop().await;
    d.stop().await;
}

#[tokio::test]
async fn cached_tokens_are_those_of_the_engine_that_computed_the_prompt() {
    let (p, d) = pair().await;
    let cached = async |engine: &MockEngine, length: u32| {
        let prompt = ids(0, length);
        let params = prefill(&p, &prompt).await;
        let reply = complete(&engine.url(), &decode(&prompt, &params)).await.json();
        reply["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap()
    };
    // Nothing, then the whole blocks of the first prompt, then all but the last.
    assert_eq!(cached(&d, 100).await, 0);
    assert_eq!(cached(&d, 200).await, 96);
    assert_eq!(cached(&d, 200).await, 192);
    // Another decode engine has nothing of its own.
    let other = start(quick(Role::Decode)).await;
    assert_eq!(cached(&other, 200).await, 192);
    assert_eq!(other.stats()["local_cache_hit_tokens"], 0);
    // A prompt that the decode engine alone has seen.
    let prompt = ids(9, 100);
    text(&complete(&d.url(), &json!({"prompt": prompt, "max_tokens": 1})).await);
    let params = prefill(&p, &prompt).await;
    let reply = complete(&d.url(), &decode(&prompt, &params)).await.json();
    assert_eq!(reply["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
    p.stop().await;
    d.stop().await;
    other.stop().await;
}

#[tokio::test]
async fn several_choices_share_one_pull() {
    let (p, d) = pair().await;
    let prompt = ids(0, 100);
    let params = prefill(&p, &prompt).await;
    let mut body = decode(&prompt, &params);
    body["n"] = json!(3);
    let remote = complete(&d.url(), &body).await.json();
    let local = json!({"prompt": prompt, "max_tokens": 8, "n": 3, "cache_salt": "reference"});
    let local = complete(&d.url(), &local).await.json();
    assert_eq!(remote["choices"], local["choices"]);
    until(&p, |stats| stats["pins"] == 0).await;
    assert_eq!(d.stats()["violation_count"], 0);
    p.stop().await;
    d.stop().await;
}

#[tokio::test]
async fn a_streamed_prefill_leg_returns_no_params_and_stays_pinned() {
    let p = start(quick(Role::Prefill)).await;
    let body = json!({
        "prompt": ids(0, 50), "max_tokens": 1, "stream": true,
        "kv_transfer_params": {"do_remote_decode": true},
    });
    let reply = complete(&p.url(), &body).await;
    assert!(!reply.text().contains("kv_transfer_params"));
    assert_eq!(p.stats()["pins"], 1);
    p.stop().await;
}

#[tokio::test]
async fn a_prefill_that_ends_by_itself_hands_nothing_off() {
    let p = start(quick(Role::Prefill)).await;
    let body = json!({
        "prompt": ids(0, 50), "max_tokens": 1, "stop": [" "],
        "kv_transfer_params": {"do_remote_decode": true},
    });
    let reply = complete(&p.url(), &body).await.json();
    assert_eq!(reply["choices"][0]["finish_reason"], "stop");
    assert_eq!(reply["kv_transfer_params"], Value::Null);
    assert_eq!(p.stats()["pins"], 0);
    p.stop().await;
}

#[tokio::test]
async fn chat_takes_its_prompt_from_prompt_token_ids_on_every_leg() {
    let (p, d) = pair().await;
    let prompt = ids(7, 60);
    let ask = |params: Value| {
        json!({
            "messages": [{"role": "user", "content": "not this"}], "max_tokens": 8,
            "kv_transfer_params": params,
        })
    };
    let mut leg = ask(json!({"do_remote_decode": true, "prompt_token_ids": prompt}));
    leg["max_tokens"] = json!(1);
    let mut params = chat(&p.url(), &leg).await.json()["kv_transfer_params"].clone();
    params["prompt_token_ids"] = json!(prompt);
    let remote = chat(&d.url(), &ask(params)).await.json();
    let local = chat(&d.url(), &ask(json!({"prompt_token_ids": prompt}))).await.json();
    assert_eq!(remote["usage"]["prompt_tokens"], 60);
    assert_eq!(remote["choices"], local["choices"]);
    assert_eq!(d.stats()["violation_count"], 0);
    p.stop().await;
    d.stop().await;
}

#[tokio::test]
async fn params_used_twice_give_wrong_text_and_are_noted() {
    let (p, d) = pair().await;
    let prompt = ids(0, 100);
    let right = local_text(&d, &prompt).await;
    let params = prefill(&p, &prompt).await;
    assert_eq!(text(&complete(&d.url(), &decode(&prompt, &params)).await), right);
    until(&p, |stats| stats["pins"] == 0).await;
    assert_ne!(text(&complete(&d.url(), &decode(&prompt, &params)).await), right);
    assert_eq!(violations(&d), ["params_used_twice"]);
    p.stop().await;
    d.stop().await;
}

#[tokio::test]
async fn params_of_another_prompt_poison_the_cache() {
    let (p, d) = pair().await;
    let (one, other) = (ids(0, 100), ids(50, 100));
    let right = local_text(&d, &other).await;
    let params = prefill(&p, &one).await;
    assert_ne!(text(&complete(&d.url(), &decode(&other, &params)).await), right);
    assert_eq!(violations(&d), ["params_of_another_prompt"]);
    let local = complete(&d.url(), &json!({"prompt": other, "max_tokens": 8})).await;
    assert_ne!(text(&local), right, "it used the blocks that were wrong");
    common::post(&d.url(), "/reset_prefix_cache", &json!({})).await;
    let local = complete(&d.url(), &json!({"prompt": other, "max_tokens": 8})).await;
    assert_eq!(text(&local), right);
    p.stop().await;
    d.stop().await;
}

#[tokio::test]
async fn params_past_their_lease_are_noted() {
    let p = start(EngineConfig { lease: Duration::from_millis(20), ..quick(Role::Prefill) }).await;
    let d = start(quick(Role::Decode)).await;
    let prompt = ids(0, 100);
    let params = prefill(&p, &prompt).await;
    until(&p, |stats| stats["expired"] == 1 && stats["used_blocks"] == 0).await;
    complete(&d.url(), &decode(&prompt, &params)).await;
    assert_eq!(violations(&d), ["params_expired"]);
    p.stop().await;
    d.stop().await;
}

#[tokio::test]
async fn the_expired_kv_fault_ends_the_lease_at_once() {
    let (p, d) = pair().await;
    let rule = Fault { leg: Leg::Prefill, count: Some(1), action: Action::ExpiredKv };
    p.set_faults(Faults { rules: vec![rule], ..Faults::default() });
    let prompt = ids(0, 100);
    let params = prefill(&p, &prompt).await;
    assert_eq!(p.stats()["pins"], 0);
    complete(&d.url(), &decode(&prompt, &params)).await;
    assert_eq!(violations(&d), ["params_expired"]);
    p.stop().await;
    d.stop().await;
}

#[tokio::test]
async fn forged_unknown_and_batched_params_are_noted() {
    let (p, d) = pair().await;
    let prompt = ids(0, 100);
    let params = prefill(&p, &prompt).await;
    let mut unknown = params.clone();
    unknown["remote_request_id"] = json!("cmpl-never");
    complete(&d.url(), &decode(&prompt, &unknown)).await;
    complete(&d.url(), &decode(&prompt, &json!({"do_remote_prefill": true}))).await;
    let batch = json!({"prompt": [prompt, prompt], "kv_transfer_params": params});
    complete(&d.url(), &batch).await;
    complete(&d.url(), &decode(&ids(0, 120), &params)).await;
    let noted = violations(&d);
    let wanted = [
        "unknown_params",
        "incomplete_params",
        "batch_with_params",
        "prompt_longer_than_prefilled",
    ];
    assert_eq!(noted, wanted);
    p.stop().await;
    d.stop().await;
}

#[tokio::test]
async fn a_violation_can_be_refused_or_kill_the_engine() {
    let forged = decode(&ids(0, 40), &json!({"do_remote_prefill": true}));
    let refusing =
        start(EngineConfig { on_violation: OnViolation::Refuse, ..quick(Role::Decode) }).await;
    assert_eq!(complete(&refusing.url(), &forged).await.status, 400);
    let dying = start(EngineConfig { on_violation: OnViolation::Die, ..quick(Role::Decode) }).await;
    assert_eq!(complete(&dying.url(), &forged).await.status, 500);
    assert_eq!(complete(&dying.url(), &json!({"prompt": "x"})).await.status, 503);
    assert_eq!(common::get(&dying.url(), "/health").await.status, 503);
    dying.set_faults(Faults::default());
    assert_eq!(complete(&dying.url(), &json!({"prompt": "x"})).await.status, 200);
    refusing.stop().await;
    dying.stop().await;
}

#[tokio::test]
async fn a_decode_leg_that_is_refused_releases_the_pin() {
    let (p, d) = pair().await;
    let params = prefill(&p, &ids(0, 100)).await;
    let release = json!({"prompt": [1], "max_tokens": 1_000_000, "kv_transfer_params": params});
    let reply = complete(&d.url(), &release).await;
    assert_eq!(reply.status, 400);
    assert!(reply.text().contains("cannot be greater than max_model_len=8192"));
    until(&p, |stats| stats["pins"] == 0 && stats["used_blocks"] == 0).await;
    assert_eq!(d.stats()["violation_count"], 0);
    p.stop().await;
    d.stop().await;
}

#[tokio::test]
async fn a_dead_prefill_engine_fails_the_load_or_has_it_recomputed() {
    for (policy, status) in [(LoadFailure::Fail, 500), (LoadFailure::Recompute, 200)] {
        let p = start(quick(Role::Prefill)).await;
        let d = start(EngineConfig { load_failure: policy, ..quick(Role::Decode) }).await;
        let prompt = ids(0, 100);
        let params = prefill(&p, &prompt).await;
        p.stop().await;
        let reply = complete(&d.url(), &decode(&prompt, &params)).await;
        assert_eq!(reply.status, status);
        assert_eq!(d.stats()["kv_load_failures"], 1);
        assert_eq!(d.stats()["used_blocks"], 0);
        d.stop().await;
    }
}

#[tokio::test]
async fn a_prefill_engine_that_dies_during_the_transfer_fails_the_load() {
    let p = start(quick(Role::Prefill)).await;
    // Slow enough that the transfer lasts until the test kills the other side.
    let d = start(EngineConfig { speed: 0.001, ..quick(Role::Decode) }).await;
    let prompt = ids(0, 100);
    let params = prefill(&p, &prompt).await;
    let mut client = Client::connect(&d.url()).await.unwrap();
    client.send("POST", "/v1/completions", &[], &decode(&prompt, &params).to_string()).await;
    until(&d, |stats| stats["pulling"] == 1).await;
    p.stop().await;
    let reply = client.reply().await;
    assert_eq!(reply.status, 500);
    assert_eq!(d.stats()["used_blocks"], 0);
    d.stop().await;
}

#[tokio::test]
async fn the_side_channel_can_be_closed_and_opened_again() {
    let (p, d) = pair().await;
    let prompt = ids(0, 100);
    let params = prefill(&p, &prompt).await;
    p.set_faults(Faults { side_channel_down: true, ..Faults::default() });
    let body = decode(&prompt, &params);
    let refused = async { while complete(&d.url(), &body).await.status != 500 {} };
    // The first tries may still get through before the listener is gone.
    tokio::time::timeout(common::PATIENCE, refused).await.unwrap();
    p.set_faults(Faults::default());
    let again = async {
        loop {
            let params = prefill(&p, &prompt).await;
            if complete(&d.url(), &decode(&prompt, &params)).await.status == 200 {
                return;
            }
        }
    };
    tokio::time::timeout(common::PATIENCE, again).await.unwrap();
    p.stop().await;
    d.stop().await;
}

#[tokio::test]
async fn a_client_that_leaves_frees_both_sides() {
    let p = start(quick(Role::Prefill)).await;
    let d = start(EngineConfig { speed: 0.001, ..quick(Role::Decode) }).await;
    let prompt = ids(0, 100);
    let params = prefill(&p, &prompt).await;
    let mut client = Client::connect(&d.url()).await.unwrap();
    client.send("POST", "/v1/completions", &[], &decode(&prompt, &params).to_string()).await;
    until(&d, |stats| stats["pulling"] == 1).await;
    assert_eq!(p.stats()["pins"], 1);
    drop(client);
    until(&d, |stats| stats["in_flight"] == 0 && stats["used_blocks"] == 0).await;
    until(&p, |stats| stats["pins"] == 0).await;
    p.stop().await;
    d.stop().await;
}

#[tokio::test]
async fn a_decode_engine_that_waits_keeps_the_lease_and_one_that_dies_lets_it_end() {
    let p = start(EngineConfig { lease: Duration::from_millis(50), ..quick(Role::Prefill) }).await;
    let d = start(EngineConfig { speed: 0.001, ..quick(Role::Decode) }).await;
    let prompt = ids(0, 100);
    let params = prefill(&p, &prompt).await;
    let mut client = Client::connect(&d.url()).await.unwrap();
    client.send("POST", "/v1/completions", &[], &decode(&prompt, &params).to_string()).await;
    until(&d, |stats| stats["pulling"] == 1).await;
    // Twice the lease passes while the decode engine is there.
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert_eq!(p.stats()["pins"], 1);
    d.stop().await;
    until(&p, |stats| stats["pins"] == 0 && stats["expired"] == 1).await;
    p.stop().await;
}

#[tokio::test]
async fn a_unified_engine_ignores_params() {
    let engine = start(quick(Role::Unified)).await;
    let body = json!({
        "prompt": ids(0, 40), "max_tokens": 4,
        "kv_transfer_params": {"do_remote_decode": true},
    });
    let reply = complete(&engine.url(), &body).await.json();
    assert_eq!(reply["kv_transfer_params"], Value::Null);
    assert_eq!(engine.stats()["legs"]["local"], 1);
    assert_eq!(engine.stats()["pins"], 0);
    engine.stop().await;
}

#[tokio::test]
async fn a_decode_engine_can_prefill_for_others_too() {
    let (one, other) = (start(quick(Role::Decode)).await, start(quick(Role::Decode)).await);
    let prompt = ids(3, 80);
    let params = prefill(&one, &prompt).await;
    let reply = complete(&other.url(), &decode(&prompt, &params)).await;
    assert_eq!(text(&reply), local_text(&other, &prompt).await);
    one.stop().await;
    other.stop().await;
}
