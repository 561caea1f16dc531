//! A client that says what only the router may say gains nothing: engines never see it.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod support;

use serde_json::{Value, json};
use support::fleet::{completion, prompt};
use support::{Fleet, Head, Request, decode, prefill, unified};

/// Stands in every forged value, so that it can be looked for.
const FORGED: &str = "forged-4711";

fn forged_params() -> Value {
    json!({"do_remote_prefill": true, "do_remote_decode": false, "remote_block_ids": [[1, 2, 3]],
        "remote_engine_id": FORGED, "remote_request_id": FORGED, "remote_host": FORGED,
        "remote_port": 1, "tp_size": 1, "prompt_token_ids": [4711, 4711]})
}

/// The text of a completion's body with further members, written as they are.
fn body_with(members: &str, stream: bool) -> String {
    let body = completion(&prompt(1, 100), 4, stream).to_string();
    format!("{},{members}}}", body.trim_end_matches('}'))
}

/// Sends what is forged over both paths, and looks at what the engines got.
async fn gains_nothing(members: &str) {
    for policy in ["always_remote", "always_local"] {
        let config = json!({"routing": {"policy": policy}});
        let fleet = Fleet::with([prefill("p0"), decode("d0")], config).await;
        for stream in [true, false] {
            let forged = Request::raw("/v1/completions", body_with(members, stream));
            let (head, body) = forged.send(fleet.addr()).await;
            assert_eq!((head.status, head.path()), (200, &policy[7..]), "{body:?}");
            let asked = completion(&prompt(1, 100), 4, stream);
            fleet.assert_completed_as_alone(&asked, &body).await;
        }
        assert_engines_saw_nothing_forged(&fleet);
        fleet.assert_nothing_leaks().await;
    }
}

fn assert_engines_saw_nothing_forged(fleet: &Fleet) {
    for engine in &fleet.engines {
        for request in fleet.requests(&engine.name) {
            let seen = request["body"].as_str().unwrap();
            assert!(!seen.contains(FORGED) && !seen.contains("4711"), "{}: {seen}", engine.name);
            for name in ["bootstrap", "disaggregated_params", "routed_dp_rank"] {
                assert!(!seen.contains(name), "{}: {seen}", engine.name);
            }
            let params = &request["json"]["kv_transfer_params"];
            let own = match request["leg"].as_str().unwrap() {
                "prefill" => *params == json!({"do_remote_decode": true}),
                "decode" => params["do_remote_prefill"] == true,
                _ => params.is_null(),
            };
            assert!(own, "{}: {seen}", engine.name);
            // Members that are written twice are read differently by different readers.
            assert!(seen.matches("kv_transfer").count() <= 1, "{}: {seen}", engine.name);
        }
    }
}

#[tokio::test]
async fn forged_kv_transfer_params_gain_nothing() {
    gains_nothing(&format!(r#""kv_transfer_params":{}"#, forged_params())).await;
}

#[tokio::test]
async fn params_that_only_ask_for_a_prefill_gain_nothing() {
    gains_nothing(r#""kv_transfer_params":{"do_remote_decode":true}"#).await;
}

#[tokio::test]
async fn incomplete_params_that_would_kill_an_engine_gain_nothing() {
    gains_nothing(r#""kv_transfer_params":{"do_remote_prefill":true}"#).await;
}

#[tokio::test]
async fn forged_params_under_an_escaped_key_gain_nothing() {
    gains_nothing(&format!(r#""kv_transfer\u005fpar\u0061ms":{}"#, forged_params())).await;
}

#[tokio::test]
async fn forged_params_written_twice_gain_nothing() {
    let params = forged_params();
    gains_nothing(&format!(
        r#""kv_transfer_params":null,"kv_transfer_params":{params},"\u006bv_transfer_params":{params}"#
    ))
    .await;
}

#[tokio::test]
async fn forged_params_inside_vllm_xargs_gain_nothing() {
    let params = forged_params();
    gains_nothing(&format!(r#""vllm_xargs":{{"a":1,"kv_transfer_params":{params}}}"#)).await;
    gains_nothing(&format!(r#""vllm\u005fxargs":{{"kv_transfer\u005fparams":{params}}}"#)).await;
}

#[tokio::test]
async fn a_forged_bootstrap_gains_nothing() {
    gains_nothing(&format!(
        r#""bootstrap_host":"{FORGED}","bootstrap_port":8998,"bootstrap_room":4711"#
    ))
    .await;
}

#[tokio::test]
async fn forged_disaggregated_params_gain_nothing() {
    gains_nothing(&format!(
        r#""disaggregated_params":{{"request_type":"generation_only","opaque_state":"{FORGED}"}}"#
    ))
    .await;
}

#[tokio::test]
async fn forged_params_of_a_chat_gain_nothing_and_its_text_is_left_alone() {
    let fleet = Fleet::start([prefill("p0"), decode("d0")]).await;
    let text = r#"What does "kv_transfer_params": {"do_remote_prefill": true} mean?"#;
    let body = json!({"model": "mock", "messages": [{"role": "user", "content": text}],
        "max_tokens": 4, "kv_transfer_params": forged_params()});
    let (head, reply) = Request::chat(&body).json(fleet.addr()).await;
    assert_eq!((head.status, head.path()), (200, "remote"), "{reply}");
    for name in ["p0", "d0"] {
        for request in fleet.requests(name) {
            assert!(!request["body"].as_str().unwrap().contains(FORGED));
            assert_eq!(request["json"]["messages"][0]["content"], text);
        }
    }
    let honest = json!({"model": "mock", "messages": [{"role": "user", "content": text}],
        "max_tokens": 4});
    fleet.assert_as_alone(&Request::chat(&honest), &reply).await;
    fleet.assert_nothing_leaks().await;
}

#[tokio::test]
async fn forged_params_of_a_batch_gain_nothing() {
    let fleet = Fleet::start([prefill("p0"), decode("d0")]).await;
    let body = json!({"model": "mock", "prompt": [prompt(1, 64), prompt(2, 64)], "max_tokens": 4,
        "kv_transfer_params": forged_params()});
    let (head, reply) = Request::completion(&body).json(fleet.addr()).await;
    assert_eq!((head.status, head.path(), head.reason()), (200, "local", "batch"), "{reply}");
    assert_engines_saw_nothing_forged(&fleet);
    fleet.assert_nothing_leaks().await;
}

#[tokio::test]
async fn forged_params_to_other_endpoints_gain_nothing() {
    let fleet = Fleet::start([unified("u0")]).await;
    let body = json!({"model": "mock", "input": "text", "kv_transfer_params": forged_params(),
        "bootstrap_host": FORGED});
    let (head, _) = Request::post("/v1/embeddings", &body).send(fleet.addr()).await;
    assert_eq!(head.status, 200);
    for request in fleet.requests("u0") {
        assert!(!request["body"].as_str().unwrap().contains(FORGED), "{request}");
    }
}

/// Headers that engines got, by name.
fn header_names(fleet: &Fleet) -> Vec<String> {
    let requests = fleet.engines.iter().flat_map(|engine| fleet.requests(&engine.name));
    let names = requests.flat_map(|request| {
        request["headers"].as_object().unwrap().keys().cloned().collect::<Vec<_>>()
    });
    names.collect()
}

async fn with_headers(fleet: &Fleet, headers: &[(&str, &str)]) -> Head {
    let asked = Request::completion(&completion(&prompt(1, 100), 4, false));
    let with = |request: Request, (name, value): &(&str, &str)| request.header(name, value);
    let (head, body) = headers.iter().fold(asked, with).send(fleet.addr()).await;
    assert!(head.status == 200 || !body.error().is_empty());
    head
}

#[tokio::test]
async fn a_forged_rank_gains_nothing() {
    let fleet = Fleet::start([prefill("p0"), decode("d0")]).await;
    let head = with_headers(&fleet, &[("X-Data-Parallel-Rank", "7"), ("x-kept", "1")]).await;
    assert_eq!((head.status, head.path()), (200, "remote"));
    let names = header_names(&fleet);
    assert!(!names.contains(&"x-data-parallel-rank".to_owned()), "{names:?}");
    assert!(names.contains(&"x-kept".to_owned()), "other headers pass");
    fleet.assert_nothing_leaks().await;
}

#[tokio::test]
async fn where_a_worker_has_ranks_engines_see_only_the_routers_choice() {
    let two = |engine: &mut pointsman_sim::mock::EngineConfig| engine.ranks = 2;
    let u0 = unified("u0").engine(two).worker(json!({"ranks": 2, "kv_events": "off"}));
    let fleet = Fleet::start([u0]).await;
    let head = with_headers(&fleet, &[("x-data-parallel-rank", "7")]).await;
    assert_eq!(head.status, 200);
    let requests = fleet.requests("u0");
    assert_eq!(requests[0]["headers"]["x-data-parallel-rank"], "0");
    fleet.assert_nothing_leaks().await;
}

#[tokio::test]
async fn a_path_that_is_asked_for_without_leave_gains_nothing() {
    let fleet = Fleet::start([prefill("p0"), decode("d0")]).await;
    let head = with_headers(&fleet, &[("X-Pointsman-Path", "local")]).await;
    assert_eq!((head.status, head.path(), head.reason()), (200, "remote", "eff_isl_ratio_over"));
    let forged = [("x-pointsman-worker", FORGED), ("x-pointsman-reason", FORGED)];
    let head = with_headers(&fleet, &forged).await;
    assert_ne!(head.worker(), FORGED);
    assert_ne!(head.reason(), FORGED);
    let names = header_names(&fleet);
    assert!(!names.iter().any(|name| name.starts_with("x-pointsman")), "{names:?}");
    fleet.assert_nothing_leaks().await;
}

#[tokio::test]
async fn a_path_that_is_asked_for_with_leave_is_taken_and_the_engine_does_not_hear_of_it() {
    let config = json!({"routing": {"allow_path_override": true}});
    let fleet = Fleet::with([prefill("p0"), decode("d0")], config).await;
    let head = with_headers(&fleet, &[("x-pointsman-path", "local")]).await;
    assert_eq!((head.status, head.path(), head.reason()), (200, "local", "override"));
    let head = with_headers(&fleet, &[("x-pointsman-path", "sideways")]).await;
    assert_eq!(head.status, 400);
    let names = header_names(&fleet);
    assert!(!names.iter().any(|name| name.starts_with("x-pointsman")), "{names:?}");
    fleet.assert_nothing_leaks().await;
}
