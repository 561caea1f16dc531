//! Captured sessions of a real prefill and decode vLLM, replayed against two mocks: same status, same
//! members of the same types in the same order, and what matters of the values.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "common/capture.rs"]
mod captures;
mod common;

use std::collections::BTreeSet;
use std::time::Duration;

use captures::{
    assert_alike, assert_same_values, capture, names, params_of, prefill_leg, replay, with_params,
};
use common::{Reply, get, post, quick, start, until};
use pointsman_sim::mock::{
    Connector, EngineConfig, Faults, LoadFailure, MockEngine, OnViolation, Role,
};
use serde_json::{Value, json};

/// Parts of the sessions that hold nothing to replay: session, place in it, and why.
const NOT_REPLAYED: &[(&str, &str, &str)] = &[
    (
        "11_decode_leg_param_errors",
        "/without_remote_request_id",
        "neither the request nor a reply was kept: the engine died and the client gave up",
    ),
    ("14_release_and_aborts", "/client_abort_on_prefill", "figures alone; see `mock_handoff`"),
    ("14_release_and_aborts", "/client_abort_on_decode_midstream", "figures alone"),
    ("14_release_and_aborts", "/client_abort_on_decode_immediately", "figures alone"),
    ("14_release_and_aborts", "/decode_queued_heartbeat_keeps_lease", "figures alone"),
    (
        "21_mooncake_connector",
        "/decode_without_prefill/d",
        "neither the request nor a reply was kept: the client gave up after a minute",
    ),
];

/// One session, and which of its exchanges have been replayed.
struct Session {
    name: String,
    all: Value,
    replayed: BTreeSet<String>,
}

impl Session {
    fn open(name: &str) -> Session {
        let all = capture("vllm_pd", name);
        Session { name: name.to_owned(), all, replayed: BTreeSet::new() }
    }

    /// The exchange at this place.
    fn take(&mut self, at: &str) -> Value {
        self.replayed.insert(at.to_owned());
        self.all.pointer(at).unwrap_or_else(|| panic!("{}: no {at}", self.name)).clone()
    }

    fn keys(&self) -> Vec<String> {
        let keys = self.all.as_object().unwrap().keys().filter(|key| *key != "note");
        keys.map(|key| format!("/{key}")).collect()
    }

    /// Sends the request as it was captured.
    async fn as_it_is(&mut self, engine: &MockEngine, at: &str) -> Reply {
        let request = self.take(at)["request"].clone();
        self.sent(engine, at, &request).await
    }

    /// Sends a request in place of the captured one.
    async fn sent(&mut self, engine: &MockEngine, at: &str, request: &Value) -> Reply {
        let exchange = self.take(at);
        let reply = replay(engine, request).await;
        let name = format!("{}{at}", self.name);
        assert_alike(&name, &exchange, &reply, false);
        assert_same_values(&name, &exchange, &reply);
        reply
    }

    /// Sends a decode leg with the parameters of a prefill leg that has just been answered.
    async fn decode(&mut self, d: &MockEngine, at: &str, params: &Value) -> Reply {
        let request = with_params(&self.take(at)["request"], params);
        self.sent(d, at, &request).await
    }

    /// Has the prompt of a decode leg prefilled, and sends the leg.
    async fn both(&mut self, p: &MockEngine, d: &MockEngine, at: &str) -> Reply {
        let params = params_of(p, &prefill_leg(&self.take(at)["request"])).await;
        self.decode(d, at, &params).await
    }

    /// Sends a prefill leg as it was captured, and then the decode leg.
    async fn legs(&mut self, (p, d): (&MockEngine, &MockEngine), prefill: &str, decode: &str) {
        let params = self.as_it_is(p, prefill).await.json()["kv_transfer_params"].clone();
        self.decode(d, decode, &params).await;
    }

    /// Everything has been replayed but what is listed.
    fn end(self) {
        let listed = NOT_REPLAYED.iter().filter(|(session, ..)| *session == self.name);
        let listed: BTreeSet<String> = listed.map(|(_, at, _)| (*at).to_owned()).collect();
        let mut all = BTreeSet::new();
        if self.all.get("response").is_some() {
            all.insert(String::new());
        } else {
            for key in self.keys() {
                let before = all.len();
                exchanges(&self.all[&key[1..]], key.clone(), &mut all);
                if all.len() == before {
                    all.insert(key);
                }
            }
        }
        let covered: BTreeSet<String> = self.replayed.union(&listed).cloned().collect();
        assert_eq!(covered, all, "{}", self.name);
    }
}

/// Where the exchanges in `of` are.
fn exchanges(of: &Value, at: String, all: &mut BTreeSet<String>) {
    if of.get("response").is_some() {
        all.insert(at);
        return;
    }
    match of {
        Value::Object(members) => {
            members.iter().for_each(|(key, of)| exchanges(of, format!("{at}/{key}"), all));
        }
        Value::Array(items) => {
            let items = items.iter().enumerate();
            items.for_each(|(index, of)| exchanges(of, format!("{at}/{index}"), all));
        }
        _ => {}
    }
}

fn config(role: Role) -> EngineConfig {
    EngineConfig {
        prompt_tokens_details: false,
        block_size: 128,
        on_violation: OnViolation::AsReal,
        ..quick(role)
    }
}

async fn pair(change: impl Fn(EngineConfig) -> EngineConfig) -> (MockEngine, MockEngine) {
    (start(change(config(Role::Prefill))).await, start(change(config(Role::Decode))).await)
}

/// A port where nobody listens.
fn nowhere() -> u16 {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

#[tokio::test]
async fn every_captured_session_is_replayed_and_answered_alike() {
    for name in names("vllm_pd") {
        let mut session = Session::open(&name);
        let s = &mut session;
        match &*name {
            "01_completions_pd" | "03_chat_pd_stream" => {
                let (p, d) = pair(|config| config).await;
                s.legs((&p, &d), "/steps/0", "/steps/1").await;
                assert_eq!(d.stats()["violation_count"], 0);
            }
            "02_completions_bypass_on_decode" => {
                s.as_it_is(&start(config(Role::Decode)).await, "").await;
            }
            "04_prefill_minimal_params"
            | "05_prefill_leg_streaming"
            | "05b_prefill_leg_streaming_chat" => {
                s.as_it_is(&start(config(Role::Prefill)).await, "").await;
            }
            "06_prefill_token_ids_prefix_hit" => {
                let p = start(config(Role::Prefill)).await;
                // It was captured the second time.
                replay(&p, &s.take("")["request"]).await;
                s.as_it_is(&p, "").await;
            }
            "07_partial_and_full_local_hit_on_decode" => local_hits(s).await,
            "10_abandoned_prefill_then_expired" => abandoned(s).await,
            "11_decode_leg_param_errors" => odd_params(s).await,
            "12_failures_policy_fail" => failures(s, LoadFailure::Fail).await,
            "12_failures_policy_recompute" => failures(s, LoadFailure::Recompute).await,
            "13_stale_params_silent_corruption" => stale(s).await,
            "14_release_and_aborts" => releases(s).await,
            "15_n_batch_logprobs_short" => choices_and_batches(s).await,
            "21_mooncake_connector" => mooncake(s).await,
            other => panic!("{other} is not replayed"),
        }
        session.end();
    }
}

async fn local_hits(s: &mut Session) {
    let detailed = |config| EngineConfig { prompt_tokens_details: true, block_size: 32, ..config };
    let (p, d) = pair(detailed).await;
    s.both(&p, &d, "/steps/1").await;
    s.both(&p, &d, "/steps/2").await;
    s.legs((&p, &d), "/steps/0", "/steps/3").await;
    s.as_it_is(&d, "/steps/4").await;
    assert_eq!(d.stats()["violation_count"], 0);
}

/// Short leases, and prompts of several blocks although the captured ones were cut.
fn short_lease(config: EngineConfig) -> EngineConfig {
    EngineConfig { lease: Duration::from_millis(50), block_size: 16, ..config }
}

async fn abandoned(s: &mut Session) {
    let (p, d) = pair(short_lease).await;
    let params = s.as_it_is(&p, "/prefill").await.json()["kv_transfer_params"].clone();
    until(&p, |stats| stats["pins"] == 0).await;
    // As in the last figures of the captured ones.
    let figures = get(&p.url(), "/metrics").await.text().to_owned();
    for name in ["kv_cache_usage_perc", "nixl_num_kv_expired_reqs_total"] {
        let theirs = s.all.pointer(&format!("/p_metrics_timeline/10/{name}")).unwrap();
        let before = s.all.pointer(&format!("/p_metrics_timeline/9/{name}")).unwrap();
        let start = format!("vllm:{name}{{");
        let ours = figures.lines().find(|line| line.starts_with(&start)).unwrap();
        let ours: f64 = ours.rsplit(' ').next().unwrap().parse().unwrap();
        let counts = name.ends_with("_total");
        let before = if counts { before.as_f64().unwrap() } else { 0.0 };
        assert_eq!(ours, theirs.as_f64().unwrap() - before, "{name}");
    }
    s.replayed.insert("/p_metrics_timeline".into());
    s.decode(&d, "/decode_after_expiry", &params).await;
    assert_eq!(d.stats()["violation_count"], 1);
    s.as_it_is(&d, "/local_reference").await;
}

/// The prompt's token ids, as an engine tells them.
async fn ids_of(engine: &MockEngine, request: &Value) -> Vec<u32> {
    let body = json!({"model": "tiny", "prompt": request["body"]["prompt"]});
    let reply = post(&engine.url(), "/tokenize", &body).await.json();
    serde_json::from_value(reply["tokens"].clone()).unwrap()
}

async fn odd_params(s: &mut Session) {
    let (p, d) = pair(|config| config).await;
    let mut used_before = None;
    for at in s.keys() {
        let what = at.trim_start_matches('/');
        if what == "without_remote_request_id" {
            continue;
        }
        let request = s.take(&at)["request"].clone();
        let captured = request["body"]["kv_transfer_params"].clone();
        let mut leg = prefill_leg(&request);
        if what.starts_with("prompt_") || what.starts_with("different_") {
            let mut ids = ids_of(&p, &request).await;
            match what {
                "prompt_longer_than_prefilled" => ids.truncate(ids.len() / 2),
                "prompt_shorter_than_prefilled" => ids.extend(ids.clone()),
                _ => ids.reverse(),
            }
            leg["body"]["prompt"] = ids.into();
        }
        let mut params = params_of(&p, &leg).await;
        match what {
            "params_first_use" => used_before = Some(params.clone()),
            "params_second_use" => params = used_before.take().unwrap(),
            "remote_block_ids_out_of_range" => {
                params["remote_block_ids"] = captured["remote_block_ids"].clone();
            }
            "unreachable_side_channel_unknown_engine" => {
                params["remote_engine_id"] = captured["remote_engine_id"].clone();
                params["remote_port"] = nowhere().into();
            }
            "engine_id_mismatch_right_port" => {
                params["remote_engine_id"] = captured["remote_engine_id"].clone();
            }
            "known_engine_wrong_port" => params["remote_port"] = nowhere().into(),
            _ => {}
        }
        let request = match captured["do_remote_prefill"] == true {
            true => with_params(&request, &params),
            false => request,
        };
        let pins = p.stats()["pins"].as_u64().unwrap();
        s.sent(&d, &at, &request).await;
        if what == "decode_rejected_400" {
            until(&p, |stats| stats["pins"] == pins - 1).await;
        }
        let alive = get(&d.url(), "/health").await.status == 200;
        assert_eq!(s.all[what]["decode_alive_after"], alive, "{what}");
        d.set_faults(Faults::default());
    }
}

async fn failures(s: &mut Session, load_failure: LoadFailure) {
    let (p, d) = pair(|config| EngineConfig { load_failure, ..config }).await;
    for at in ["/stream_unreachable", "/chat_stream_unreachable", "/stream_bad_block_ids"] {
        let request = s.take(at)["request"].clone();
        let captured = request["body"]["kv_transfer_params"].clone();
        let mut params = params_of(&p, &prefill_leg(&request)).await;
        if at == "/stream_bad_block_ids" {
            params["remote_block_ids"] = captured["remote_block_ids"].clone();
        } else {
            params["remote_engine_id"] = captured["remote_engine_id"].clone();
            params["remote_port"] = nowhere().into();
        }
        s.decode(&d, at, &params).await;
    }
    let dead =
        ["/prefill_dead_decode_stream", "/prefill_dead_decode", "/prefill_dead_decode_again_30s"];
    let mut params = Vec::new();
    for at in dead {
        params.push(params_of(&p, &prefill_leg(&s.take(at)["request"])).await);
    }
    p.stop().await;
    for (at, params) in dead.iter().zip(&params) {
        s.decode(&d, at, params).await;
    }
    s.as_it_is(&d, "/prefill_dead_bypass_on_same_decode").await;
    assert_eq!(d.stats()["kv_load_failures"], 6);
    assert_eq!(d.stats()["violation_count"], 0);
}

async fn stale(s: &mut Session) {
    let (p, d) = pair(short_lease).await;
    let text = |reply: &Reply| reply.json()["choices"][0]["text"].clone();
    let reference = text(&s.as_it_is(&d, "/reference_local").await);
    let params = s.as_it_is(&p, "/prefill").await.json()["kv_transfer_params"].clone();
    until(&p, |stats| stats["pins"] == 0).await;
    assert_ne!(text(&s.decode(&d, "/decode_stale", &params).await), reference);
    // What it has in its cache now is wrong too.
    assert_ne!(text(&s.as_it_is(&d, "/same_prompt_without_params_afterwards").await), reference);
    assert_eq!(d.stats()["violation_count"], 1);
}

async fn releases(s: &mut Session) {
    let (p, d) = pair(|config| config).await;
    let whole = "/release_by_rejected_decode_request/decode";
    let leg = prefill_leg(&s.take(whole)["request"]);
    for at in [whole, "/release_by_rejected_decode_request_one_token_prompt/decode"] {
        let params = params_of(&p, &leg).await;
        assert_eq!(p.stats()["pins"], 1);
        s.decode(&d, at, &params).await;
        until(&p, |stats| stats["pins"] == 0).await;
    }
    assert_eq!(d.stats()["violation_count"], 0);
}

async fn choices_and_batches(s: &mut Session) {
    let detailed = |config| EngineConfig { prompt_tokens_details: true, block_size: 32, ..config };
    let (p, d) = pair(detailed).await;
    s.as_it_is(&p, "/prefill_finishes_by_stop").await;
    for of in ["n2_both_legs", "n2_decode_only", "logprobs", "prompt_logprobs", "five_token_prompt"]
    {
        s.legs((&p, &d), &format!("/{of}/0"), &format!("/{of}/1")).await;
    }
    assert_eq!(d.stats()["violation_count"], 0);
    s.legs((&p, &d), "/batch_prompts/0", "/batch_prompts/1").await;
    // There the process ended too.
    assert_eq!(get(&d.url(), "/health").await.status, 503);
}

async fn mooncake(s: &mut Session) {
    let (p, d) = pair(|config| EngineConfig { connector: Connector::Mooncake, ..config }).await;
    let engines = get(&format!("http://127.0.0.1:{}", p.bootstrap_port()), "/query").await;
    let place = json!({
        "remote_bootstrap_addr": format!("http://127.0.0.1:{}", p.bootstrap_port()),
        "remote_engine_id": engines.json()["0"]["engine_id"],
    });
    let to_p = s.take("/concurrent/p")["request"].clone();
    let to_d = with_params(&s.take("/concurrent/d")["request"], &place);
    let (of_p, of_d) = tokio::join!(replay(&p, &to_p), replay(&d, &to_d));
    for (at, reply) in [("/concurrent/p", of_p), ("/concurrent/d", of_d)] {
        assert_alike(at, &s.take(at), &reply, false);
        assert_same_values(at, &s.take(at), &reply);
    }
    s.as_it_is(&p, "/sequential/p").await;
    s.decode(&d, "/sequential/d", &place).await;
    s.as_it_is(&d, "/bypass").await;
    until(&p, |stats| stats["pins"] == 0).await;
    let stats = d.stats();
    assert_eq!(
        (&stats["legs"]["decode_remote"], &stats["violation_count"]),
        (&json!(2), &json!(0))
    );
}
