//! Every fault that a mock engine can be told to have.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use std::time::{Duration, Instant};

use common::{Client, End, call, chat, complete, get, ids, post, quick, start, until};
use pointsman_sim::mock::{Action, Cut, EngineConfig, Fault, Faults, Leg, MockEngine, Role};
use serde_json::{Value, json};

async fn faulty(rules: Value) -> MockEngine {
    let engine = start(quick(Role::Decode)).await;
    let reply = post(&engine.url(), "/mock/faults", &json!({"rules": rules})).await;
    assert_eq!(reply.status, 200, "{}", reply.text());
    engine
}

fn streaming(max_tokens: u32) -> Value {
    json!({"prompt": "hello there", "max_tokens": max_tokens, "stream": true})
}

#[tokio::test]
async fn refuse_resets_the_connection() {
    let engine = faulty(json!([{"fault": "refuse", "count": 1}])).await;
    let reply = complete(&engine.url(), &json!({"prompt": "x"})).await;
    assert_eq!((reply.status, reply.end), (0, End::Rst));
    assert_eq!(complete(&engine.url(), &json!({"prompt": "x"})).await.status, 200);
    engine.stop().await;
}

#[tokio::test]
async fn down_closes_the_listener_and_resets_what_is_open() {
    let engine = start(quick(Role::Unified)).await;
    let mut open = Client::connect(&engine.url()).await.unwrap();
    open.send("GET", "/health", &[], "").await;
    assert_eq!(open.reply().await.status, 200);
    post(&engine.control_url(), "/mock/faults", &json!({"down": true})).await;
    assert_eq!(open.wait_end().await, End::Rst);
    let closed = async {
        while Client::connect(&engine.url()).await.is_ok() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(common::PATIENCE, closed).await.unwrap();
    post(&engine.control_url(), "/mock/faults", &json!({})).await;
    let again = async {
        while Client::connect(&engine.url()).await.is_err() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(common::PATIENCE, again).await.unwrap();
    assert_eq!(get(&engine.url(), "/health").await.status, 200);
    engine.stop().await;
}

#[tokio::test]
async fn status_answers_with_the_given_body_as_often_as_told() {
    let engine = faulty(json!([
        {"fault": "status", "status": 503, "body": "{\"error\":\"full\"}", "count": 2},
        {"fault": "status", "status": 429, "count": 1},
    ]))
    .await;
    let mut seen = Vec::new();
    for _ in 0..4 {
        let reply = complete(&engine.url(), &json!({"prompt": "x"})).await;
        seen.push((reply.status, reply.json()["error"].clone()));
    }
    assert_eq!(seen[0], (503, json!("full")));
    assert_eq!(seen[1], (503, json!("full")));
    assert_eq!((seen[2].0, &seen[2].1["type"]), (429, &json!("RateLimitError")));
    assert_eq!(seen[3].0, 200);
    assert_eq!(engine.stats()["faults_hit"], 3);
    engine.stop().await;
}

#[tokio::test]
async fn a_rule_hits_its_leg_alone() {
    let engine = faulty(json!([{"fault": "status", "status": 500, "leg": "prefill"}])).await;
    let local = json!({"prompt": "x"});
    let prefill = json!({"prompt": "x", "kv_transfer_params": {"do_remote_decode": true}});
    assert_eq!(complete(&engine.url(), &local).await.status, 200);
    assert_eq!(complete(&engine.url(), &prefill).await.status, 500);
    assert_eq!(complete(&engine.url(), &prefill).await.status, 500);
    engine.stop().await;
}

#[tokio::test]
async fn hang_before_headers_answers_nothing_until_the_client_leaves() {
    let engine = faulty(json!([{"fault": "hang_before_headers"}])).await;
    let mut client = Client::connect(&engine.url()).await.unwrap();
    client.send("POST", "/v1/completions", &[], &json!({"prompt": "x"}).to_string()).await;
    until(&engine, |stats| stats["faults_hit"] == 1).await;
    let quiet = tokio::time::timeout(Duration::from_millis(50), client.reply()).await;
    assert!(quiet.is_err());
    engine.stop().await;
}

#[tokio::test]
async fn hang_after_headers_sends_the_head_alone() {
    for stream in [true, false] {
        let engine = faulty(json!([{"fault": "hang_after_headers"}])).await;
        let mut client = Client::connect(&engine.url()).await.unwrap();
        let body = json!({"prompt": "x", "stream": stream}).to_string();
        client.send("POST", "/v1/completions", &[], &body).await;
        assert_eq!(client.head().await.status, 200);
        let quiet = tokio::time::timeout(Duration::from_millis(50), client.chunk()).await;
        assert!(quiet.is_err());
        drop(client);
        until(&engine, |stats| stats["in_flight"] == 0).await;
        engine.stop().await;
    }
}

#[tokio::test]
async fn a_connection_can_be_cut_before_headers() {
    for (cut, end) in [("rst", End::Rst), ("fin", End::Fin)] {
        let engine = faulty(json!([{"fault": "cut_before_headers", "cut": cut}])).await;
        let reply = complete(&engine.url(), &json!({"prompt": "x"})).await;
        assert_eq!((reply.status, reply.end), (0, end));
        engine.stop().await;
    }
}

#[tokio::test]
async fn a_stream_can_be_cut_after_any_number_of_tokens() {
    for (cut, end) in [("rst", End::Rst), ("fin", End::Fin)] {
        for after_tokens in [0, 1, 5] {
            let rule =
                json!([{"fault": "cut_mid_stream", "after_tokens": after_tokens, "cut": cut}]);
            let engine = faulty(rule).await;
            let reply = complete(&engine.url(), &streaming(9)).await;
            assert_eq!((reply.status, reply.end), (200, end));
            assert_eq!(reply.chunks().len(), after_tokens);
            let body = json!({
                "messages": [{"role": "user", "content": "x"}], "max_tokens": 9, "stream": true,
            });
            let reply = chat(&engine.url(), &body).await;
            assert_eq!(reply.chunks().len(), after_tokens + usize::from(after_tokens > 0));
            until(&engine, |stats| stats["in_flight"] == 0 && stats["used_blocks"] == 0).await;
            engine.stop().await;
        }
    }
}

#[tokio::test]
async fn a_whole_reply_can_be_cut_in_the_middle() {
    let engine =
        faulty(json!([{"fault": "cut_mid_stream", "after_tokens": 1, "cut": "fin"}])).await;
    let reply = complete(&engine.url(), &json!({"prompt": "x"})).await;
    assert_eq!((reply.status, reply.end), (200, End::Fin));
    assert!(serde_json::from_slice::<Value>(&reply.body).is_err());
    engine.stop().await;
}

#[tokio::test]
async fn slow_tokens_come_later() {
    let engine = faulty(json!([{"fault": "slow_tokens", "delay_ms": 10}])).await;
    let before = Instant::now();
    let reply = complete(&engine.url(), &streaming(8)).await;
    assert_eq!(reply.end, End::Whole);
    assert!(before.elapsed() >= Duration::from_millis(80));
    engine.stop().await;
}

#[tokio::test]
async fn no_params_leaves_them_out_and_the_prompt_pinned() {
    let engine = faulty(json!([{"fault": "no_params", "leg": "prefill", "count": 1}])).await;
    let body = json!({
        "prompt": ids(0, 50), "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": true},
    });
    let reply = complete(&engine.url(), &body).await.json();
    assert_eq!(reply["kv_transfer_params"], Value::Null);
    assert_eq!(engine.stats()["pins"], 1);
    assert!(complete(&engine.url(), &body).await.json()["kv_transfer_params"].is_object());
    engine.stop().await;
}

#[tokio::test]
async fn close_after_reply_ends_a_connection_that_promised_to_stay() {
    let engine = faulty(json!([{"fault": "close_after_reply"}])).await;
    for body in [json!({"prompt": "x"}), streaming(3)] {
        let mut client = Client::connect(&engine.url()).await.unwrap();
        client.send("POST", "/v1/completions", &[], &body.to_string()).await;
        let reply = client.reply().await;
        assert_eq!((reply.status, reply.end), (200, End::Whole));
        assert_eq!(reply.header("connection"), None);
        assert_eq!(client.wait_end().await, End::Fin);
    }
    engine.stop().await;
}

#[tokio::test]
async fn health_and_metrics_can_fail() {
    let engine = start(quick(Role::Unified)).await;
    let faults = json!({"unhealthy": true, "metrics": {"fail": true}});
    post(&engine.url(), "/mock/faults", &faults).await;
    assert_eq!(get(&engine.url(), "/health").await.status, 503);
    assert_eq!(get(&engine.url(), "/metrics").await.status, 500);
    assert_eq!(complete(&engine.url(), &json!({"prompt": "x"})).await.status, 200);
    post(&engine.url(), "/mock/faults", &json!({})).await;
    assert_eq!(get(&engine.url(), "/health").await.status, 200);
    assert_eq!(get(&engine.url(), "/metrics").await.status, 200);
    engine.stop().await;
}

#[tokio::test]
async fn metrics_can_lie() {
    let engine = start(quick(Role::Unified)).await;
    let lies = json!({"kv_usage": 0.99, "running": 7, "waiting": 8, "num_gpu_blocks": 5});
    post(&engine.url(), "/mock/faults", &json!({"metrics": lies})).await;
    let page = get(&engine.url(), "/metrics").await;
    let load = pointsman_wire::load::read_vllm(page.text(), 0);
    assert_eq!((load.kv_usage, load.running, load.waiting), (Some(0.99), Some(7.0), Some(8.0)));
    assert_eq!(load.num_gpu_blocks, Some(5));
    engine.stop().await;
}

#[tokio::test]
async fn faults_can_be_given_at_the_start_and_read_back() {
    let rule = Fault {
        leg: Leg::Local,
        count: Some(2),
        action: Action::CutMidStream { after_tokens: 3, cut: Cut::Fin },
    };
    let faults = Faults { rules: vec![rule], ..Faults::default() };
    let engine = start(EngineConfig { faults: faults.clone(), ..quick(Role::Unified) }).await;
    let read: Faults =
        serde_json::from_slice(&get(&engine.url(), "/mock/faults").await.body).unwrap();
    assert_eq!(read, faults);
    engine.stop().await;
}

#[tokio::test]
async fn a_fault_that_is_not_known_is_refused_and_changes_nothing() {
    let engine = faulty(json!([{"fault": "refuse", "leg": "prefill"}])).await;
    for wrong in ["{\"rules\":[{\"fault\":\"explode\"}]}", "{\"dwon\":true}", "nothing"] {
        let reply = call(&engine.url(), "POST", "/mock/faults", &[], wrong).await;
        assert_eq!(reply.status, 400, "{wrong}");
    }
    let read = get(&engine.url(), "/mock/faults").await.json();
    assert_eq!(read["rules"][0]["fault"], "refuse");
    engine.stop().await;
}
