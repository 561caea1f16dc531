//! Settings of routing through the real binary: each has the effect that its page promises, seen
//! from outside.
#![allow(clippy::expect_used, clippy::panic, reason = "it is all test")]

mod cache;
mod support;

use cache::{candidates, caught_up, explain};
use pointsman_sim::mock::{Action, Faults, Leg};
use serde_json::{Value, json};
use support::client::error_message;
use support::fleet::{MODEL, completion, configuration, prompt, rule, times};
use support::{Fleet, Head, Request, Router, Spec, decode, prefill, unified, wait_until};

/// What an engine does not tell, and load-based policies go by.
fn with_budget(spec: Spec) -> Spec {
    spec.worker(json!({"max_num_batched_tokens": 8192}))
}

fn pair() -> [Spec; 2] {
    [prefill("p0"), decode("d0")].map(with_budget)
}

async fn send(fleet: &Fleet, seed: u32, tokens: u32) -> Head {
    let (head, body) = fleet.router.complete(&completion(&prompt(seed, tokens), 4, false)).await;
    assert_eq!(head.status, 200, "{body:?}");
    head
}

fn way(head: &Head) -> (&str, &str) {
    (head.path(), head.reason())
}

#[tokio::test]
async fn explain_says_what_would_be_done_and_does_none_of_it() {
    let fleet = Fleet::start([prefill("p0"), prefill("p1"), decode("d0"), decode("d1")]).await;
    let body = completion(&prompt(1, 200), 4, false);
    for _ in 0..3 {
        let request = Request::post("/v1/pointsman/explain", &body).header("x-request-id", "asked");
        let (head, record) = request.json(fleet.addr()).await;
        assert_eq!(head.status, 200, "{record}");
        assert_eq!((&record["request"], &record["model"]), (&json!("asked"), &json!(MODEL)));
        assert_eq!(
            (&record["path"], &record["policy"]),
            (&json!("remote"), &json!("isl_bounding"))
        );
        assert_eq!(record["reason"], "eff_isl_ratio_over");
        assert_eq!(
            (&record["isl_tokens"], &record["effective_isl_tokens"]),
            (&json!(200), &json!(200))
        );
        assert_eq!((&record["estimated"], &record["partial"]), (&json!(false), &json!(false)));
        assert_eq!(record["prefill_worker"], "p0");
        assert_eq!(record["decode_worker"], "d0");
        let all = record["candidates"].as_array().expect("candidates");
        let workers: Vec<&Value> = all.iter().map(|candidate| &candidate["worker"]).collect();
        assert_eq!(workers, ["p0", "p1", "d0", "d1"]);
        for candidate in all {
            assert_eq!(candidate["left_out"], Value::Null);
            assert_eq!(candidate["effective_isl_tokens"], 200);
            assert!(candidate["cost"].as_f64().is_some_and(|cost| cost > 0.0), "{candidate}");
        }
    }
    let metrics = fleet.router.metrics().await;
    for name in ["decisions_total", "effective_isl_tokens_count", "fallbacks_total"] {
        assert_eq!(metrics.count(&format!("pointsman_{name}"), &[]), 0, "{name}");
    }
    assert_eq!(fleet.leaks().await, [""; 0]);
    assert!(["p0", "p1", "d0", "d1"].iter().all(|name| fleet.requests(name).is_empty()));
    let head = send(&fleet, 1, 200).await;
    assert_eq!((way(&head), head.worker()), (("remote", "eff_isl_ratio_over"), "d0"));
    assert_eq!(fleet.legs("p0", "prefill"), 1);
}

#[tokio::test]
async fn explain_shows_what_is_booked_and_who_is_left_out() {
    let fleet = Fleet::start([prefill("p0"), decode("d0"), decode("d1")]).await;
    fleet.set_faults("d0", rule(Leg::Any, Action::SlowTokens { delay_ms: 20 }));
    let mut body = completion(&prompt(1, 200), 10_000, true);
    body["ignore_eos"] = json!(true);
    let mut running = Request::completion(&body).open(fleet.addr()).await;
    running.tokens(1).await;
    let (head, _) = Request::new("POST", "/v1/pointsman/workers/mock/d1/drain", Vec::new())
        .json(fleet.addr())
        .await;
    assert_eq!(head.status, 200);
    let record = explain(&fleet, &completion(&prompt(2, 200), 4, false)).await;
    let (busy, drained) = (candidates(&record, "d0")[0], candidates(&record, "d1")[0]);
    assert_eq!(drained["left_out"], "draining");
    assert_eq!(busy["load"]["active"], 1);
    // 200 tokens of prompt and 256 that are allowed for in advance, in blocks of 16.
    assert!(busy["load"]["kv_blocks"].as_u64() >= Some(29), "{busy}");
    drop(running);
    fleet.assert_nothing_leaks().await;
}

#[tokio::test]
async fn explain_refuses_what_the_endpoint_itself_would() {
    let fleet = Fleet::with([decode("d0")], json!({"model": {"expect_workers": true}})).await;
    let ask =
        async |body: &Value| Request::post("/v1/pointsman/explain", body).json(fleet.addr()).await;
    let (head, error) = ask(&json!({"model": "nobody", "prompt": "x"})).await;
    assert_eq!((head.status, &error["error"]["param"]), (404, &json!("model")));
    let (head, _) = Request::new("DELETE", "/v1/pointsman/workers/mock/d0", Vec::new())
        .json(fleet.addr())
        .await;
    assert_eq!(head.status, 200);
    let (head, error) = ask(&json!({"model": MODEL, "prompt": "x"})).await;
    assert_eq!(head.status, 503);
    assert!(error_message(&error).contains("no decode or unified worker"), "{error}");
}

/// Policy, further keys of `routing`, and the way of a cold prompt of 200 tokens.
type Case = (&'static str, Value, (&'static str, &'static str));

fn policies() -> Vec<Case> {
    vec![
        ("always_remote", json!({}), ("remote", "always_remote")),
        ("always_local", json!({}), ("local", "always_local")),
        ("short_prompt", json!({}), ("local", "short_prompt")),
        ("short_prompt", json!({"short_prefill_tokens": 199}), ("remote", "long_prompt")),
        ("isl_bounding", json!({}), ("remote", "eff_isl_ratio_over")),
        ("prefill_load", json!({"prefill_busy_threshold": 0.5}), ("remote", "prefill_calm")),
        ("isl_or_load", json!({"prefill_busy_threshold": 0.5}), ("remote", "")),
        ("isl_and_load", json!({"prefill_busy_threshold": 0.5}), ("remote", "")),
        ("uncached_tokens", json!({}), ("local", "uncached_off")),
        ("uncached_tokens", json!({"non_cached_tokens": 201}), ("local", "uncached_under")),
        ("uncached_tokens", json!({"non_cached_tokens": 200}), ("remote", "uncached_over")),
        ("max_local_prefill", json!({"max_local_prefill_length": 500}), ("remote", "no_overlap")),
        ("always_remote", json!({"floor_tokens": 200}), ("local", "floor")),
        ("always_local", json!({"ceiling_tokens": 200}), ("remote", "ceiling")),
        (
            "always_local",
            json!({"local_prefill_budget": {"tokens": 199}}),
            ("remote", "guard_local_prefill_budget"),
        ),
    ]
}

#[tokio::test]
async fn every_policy_can_be_chosen_and_says_why() {
    let fleet = Fleet::start(pair()).await;
    let workers: Vec<&Value> = fleet.engines.iter().map(|engine| &engine.worker).collect();
    for (seed, (policy, keys, (path, reason))) in (0..).zip(policies()) {
        let mut routing = json!({"policy": policy});
        support::merge(&mut routing, keys);
        let router =
            Router::start(&configuration(&json!(workers), json!({"routing": routing}))).await;
        // Each router begins with what the engines have, so each has a prompt of its own.
        let (head, body) = router.complete(&completion(&prompt(seed, 200), 4, false)).await;
        assert_eq!((head.status, head.path()), (200, path), "{routing}: {body:?}");
        if reason.is_empty() {
            assert!(!head.reason().is_empty());
        } else {
            assert_eq!(head.reason(), reason, "{routing}");
        }
        let status = router.status().await;
        assert_eq!(status["models"][0]["policy"], policy);
        let labels = [("policy", policy), ("path", path), ("reason", head.reason())];
        assert_eq!(router.metrics().await.count("pointsman_decisions_total", &labels), 1);
    }
    fleet.assert_nothing_leaks().await;
}

#[tokio::test]
async fn load_policies_go_local_while_the_prefill_worker_is_busy() {
    for (policy, reason) in [("prefill_load", "prefill_busy"), ("isl_or_load", "prefill_busy")] {
        let routing = json!({"policy": policy, "prefill_busy_threshold": 0.02});
        let fleet = Fleet::with(pair(), json!({"routing": routing})).await;
        // More than 0.02 x 8192 tokens that never get computed.
        fleet.set_faults("p0", times(1, Leg::Prefill, Action::HangBeforeHeaders));
        let hanging = Request::completion(&completion(&prompt(1, 200), 4, false));
        let hanging = hanging.open(fleet.addr()).await;
        wait_until(async || match fleet.requests("p0").len() {
            0 => Err("no prefill leg".to_owned()),
            _ => Ok(()),
        })
        .await;
        assert_eq!(way(&send(&fleet, 2, 200).await), ("local", reason));
        drop(hanging);
        fleet.assert_nothing_leaks().await;
        assert_eq!(send(&fleet, 3, 200).await.path(), "remote");
    }
}

#[tokio::test]
async fn shadow_policies_are_counted_and_not_acted_on() {
    let shadow = json!(["always_local", {"policy": "short_prompt", "short_prefill_tokens": 100}]);
    let fleet = Fleet::with(pair(), json!({"routing": {"shadow": shadow}})).await;
    for (seed, tokens) in [(1, 50), (2, 100), (3, 101), (4, 300)] {
        let body = completion(&prompt(seed, tokens), 4, false);
        let record = explain(&fleet, &body).await;
        let short = if tokens <= 100 { "local" } else { "remote" };
        let expected = json!([{"policy": "always_local", "path": "local"},
                              {"policy": "short_prompt", "path": short}]);
        assert_eq!(record["shadows"], expected);
        assert_eq!(send(&fleet, seed, tokens).await.path(), "remote");
    }
    let metrics = fleet.router.metrics().await;
    let would = |policy, path| {
        let labels = [("model", MODEL), ("policy", policy), ("path", path)];
        metrics.count("pointsman_shadow_decisions_total", &labels)
    };
    assert_eq!((would("always_local", "local"), would("always_local", "remote")), (4, 0));
    assert_eq!((would("short_prompt", "local"), would("short_prompt", "remote")), (2, 2));
    let status = fleet.router.status().await;
    assert_eq!(status["models"][0]["shadow"], json!(["always_local", "short_prompt"]));
}

async fn wish(fleet: &Fleet, path: &str) -> (Head, support::Body) {
    let body = completion(&prompt(1, 200), 4, false);
    Request::completion(&body).header("x-pointsman-path", path).send(fleet.addr()).await
}

#[tokio::test]
async fn a_wish_for_a_path_is_heard_only_where_it_is_allowed() {
    let deaf = Fleet::start(pair()).await;
    let (head, _) = wish(&deaf, "local").await;
    assert_eq!(way(&head), ("remote", "eff_isl_ratio_over"));

    let fleet = Fleet::with(pair(), json!({"routing": {"allow_path_override": true}})).await;
    for path in ["local", "remote", "local"] {
        let (head, _) = wish(&fleet, path).await;
        assert_eq!(way(&head), (path, "override"));
    }
    let (head, body) = wish(&fleet, "LOCAL").await;
    assert_eq!(head.status, 400);
    assert!(body.error().contains("must be `local` or `remote`"), "{body:?}");
    // Explain hears it too.
    let request = Request::post("/v1/pointsman/explain", &completion(&prompt(2, 200), 4, false));
    let (_, record) = request.header("x-pointsman-path", "local").json(fleet.addr()).await;
    assert_eq!((&record["path"], &record["reason"]), (&json!("local"), &json!("override")));
}

#[tokio::test]
async fn a_wish_that_the_fleet_cannot_take_is_refused_at_once() {
    let allowed = || json!({"routing": {"allow_path_override": true}});
    let no_local = decode("d0").worker(json!({"local_prefill": false}));
    let fleet = Fleet::with([prefill("p0"), no_local], allowed()).await;
    let (head, body) = wish(&fleet, "local").await;
    assert_eq!(head.status, 400);
    assert!(body.error().contains("can prefill locally"), "{body:?}");
    assert_eq!(way(&wish(&fleet, "remote").await.0), ("remote", "override"));
    assert_eq!(fleet.requests("d0").len(), 1);

    let fleet = Fleet::with([unified("u0")], allowed()).await;
    let (head, body) = wish(&fleet, "remote").await;
    assert_eq!(head.status, 400);
    assert!(body.error().contains("prefill and decode workers"), "{body:?}");
    assert_eq!(wish(&fleet, "local").await.0.path(), "local");
    assert_eq!(fleet.requests("u0").len(), 1);
}

#[tokio::test]
async fn where_no_worker_can_prefill_locally_everything_goes_remote() {
    let no_local = decode("d0").worker(json!({"local_prefill": false}));
    let fleet =
        Fleet::with([prefill("p0"), no_local], json!({"routing": {"policy": "always_local"}}))
            .await;
    assert_eq!(way(&send(&fleet, 1, 200).await), ("remote", "guard_capability"));
    let metrics = fleet.router.metrics().await;
    assert_eq!(metrics.count("pointsman_guard_vetoes_total", &[("guard", "capability")]), 1);
    // A batch cannot be split, and nobody takes it whole.
    let batch = json!({"model": MODEL, "prompt": [prompt(1, 20), prompt(2, 20)]});
    let (head, error) = Request::completion(&batch).json(fleet.addr()).await;
    assert_eq!(head.status, 400);
    assert!(error_message(&error).contains("one by one"), "{error}");
}

#[tokio::test]
async fn the_length_gate_parts_a_mixed_fleet() {
    let specs = [prefill("p0"), decode("d0"), unified("u0")];
    let fleet = Fleet::with(specs, json!({"routing": {"isl_gate": 100}})).await;
    for (tokens, expected) in [
        (99, ("local", "gate_short", "u0")),
        (100, ("local", "gate_short", "u0")),
        (101, ("remote", "eff_isl_ratio_over", "d0")),
    ] {
        let head = send(&fleet, tokens, tokens).await;
        assert_eq!((head.path(), head.reason(), head.worker()), expected, "{tokens} tokens");
    }
    let record = explain(&fleet, &completion(&prompt(9, 50), 4, false)).await;
    assert_eq!(candidates(&record, "d0")[0]["left_out"], "gate");
    // Without a healthy unified worker the gate is waived, and that is counted.
    fleet.set_faults("u0", Faults { unhealthy: true, ..Faults::default() });
    wait_until(async || match fleet.router.worker("u0").await.map(|u0| u0["condition"].clone()) {
        Some(condition) if condition == "down" => Ok(()),
        other => Err(format!("u0 is {other:?}")),
    })
    .await;
    assert_eq!(send(&fleet, 10, 50).await.worker(), "d0");
    let metrics = fleet.router.metrics().await;
    assert_eq!(metrics.count("pointsman_fallbacks_total", &[("signal", "isl_gate")]), 1);
}

#[tokio::test]
async fn any_openai_compatible_server_can_be_a_unified_worker() {
    let plain = |spec: Spec| {
        spec.engine(|engine| engine.kv_events = None)
            .worker(json!({"engine": "openai", "kv_events": "off"}))
    };
    let fleet = Fleet::start([unified("u0"), unified("u1")].map(plain)).await;
    let first = send(&fleet, 1, 400).await;
    assert_eq!(way(&first), ("local", "unified"));
    // By the router's own record the prompt is cached there.
    let record = explain(&fleet, &completion(&prompt(1, 400), 4, false)).await;
    assert_eq!(candidates(&record, first.worker())[0]["overlap_tokens"], 400);
    assert_eq!(send(&fleet, 1, 400).await.worker(), first.worker());
    // Nothing that only vLLM understands is in the body.
    for request in fleet.requests(first.worker()) {
        assert_eq!(request["json"].get("kv_transfer_params"), None);
        assert_eq!(request["body"], completion(&prompt(1, 400), 4, false).to_string());
    }
    fleet.assert_nothing_leaks().await;
}

#[tokio::test]
async fn a_unified_worker_beside_prefill_and_decode_workers_is_a_candidate_of_its_own() {
    let fleet = Fleet::start([prefill("p0"), decode("d0"), unified("u0")]).await;
    assert_eq!(send(&fleet, 1, 400).await.path(), "remote");
    caught_up(&fleet).await;
    assert_eq!(send(&fleet, 1, 400).await.worker(), "d0");
    // What u0 alone has in its cache goes there.
    let body = completion(&prompt(2, 400), 4, false);
    let (head, _) = Request::completion(&body).send(fleet.get("u0").mock.addr()).await;
    assert_eq!(head.status, 200);
    caught_up(&fleet).await;
    let head = send(&fleet, 2, 400).await;
    assert_eq!((way(&head), head.worker()), (("local", "eff_isl_under"), "u0"));
}

#[tokio::test]
async fn an_adapter_is_served_by_the_workers_that_have_it() {
    let has = |spec: Spec| spec.engine(|engine| engine.adapters = vec!["sql".into()]);
    let specs = [prefill("p0"), has(prefill("p1")), decode("d0"), has(decode("d1"))];
    let fleet = Fleet::start(specs).await;
    let mut body = completion(&prompt(1, 200), 4, false);
    body["model"] = json!("sql");
    for (seed, path) in [(1, "remote"), (2, "remote"), (2, "local")] {
        caught_up(&fleet).await;
        body["prompt"] = json!(prompt(seed, 200));
        let (head, reply) = Request::completion(&body).json(fleet.addr()).await;
        assert_eq!((head.status, &reply["model"]), (200, &json!("sql")), "{reply}");
        assert_eq!((head.path(), head.worker()), (path, "d1"));
    }
    assert_eq!((fleet.legs("p1", "prefill"), fleet.legs("p0", "prefill")), (2, 0));
    assert!(fleet.requests("d0").is_empty());
    let record = explain(&fleet, &body).await;
    assert_eq!(candidates(&record, "d0")[0]["left_out"], "not_eligible");
    // The base model is on all of them, and knows nothing of the adapter's cache.
    let head = send(&fleet, 2, 200).await;
    assert_eq!((head.path(), head.worker()), ("remote", "d0"));
    let (_, list) = Request::get("/v1/models").json(fleet.addr()).await;
    assert_eq!(list["data"][1]["parent"], MODEL);
    fleet.assert_nothing_leaks().await;
}

#[tokio::test]
async fn an_adapter_that_no_prefill_worker_has_goes_local() {
    let d0 = decode("d0").engine(|engine| engine.adapters = vec!["sql".into()]);
    let fleet = Fleet::start([prefill("p0"), d0]).await;
    let mut body = completion(&prompt(1, 200), 4, false);
    body["model"] = json!("sql");
    let (head, _) = Request::completion(&body).send(fleet.addr()).await;
    assert_eq!((head.status, way(&head)), (200, ("local", "no_prefill")));
}

#[tokio::test]
async fn each_rank_is_scheduled_on_its_own_and_told_to_the_engine() {
    let ranked = |spec: Spec| spec.engine(|engine| engine.ranks = 2).worker(json!({"ranks": 2}));
    let fleet = Fleet::start([prefill("p0"), decode("d0")].map(ranked)).await;
    fleet.set_faults("d0", rule(Leg::Any, Action::SlowTokens { delay_ms: 20 }));
    // Two that run at once: what is booked on one rank sends the second to the other one.
    let request = |seed| {
        let mut body = completion(&prompt(seed, 200), 30, true);
        body["ignore_eos"] = json!(true);
        Request::completion(&body).header("x-data-parallel-rank", "1")
    };
    let mut first = request(1).open(fleet.addr()).await;
    first.tokens(1).await;
    let mut second = request(2).open(fleet.addr()).await;
    assert!(first.rest().await.is_done() && second.rest().await.is_done());
    fleet.set_faults("d0", Faults::default());
    let ranks = |engine: &str| -> Vec<Value> {
        let rank = |request: &Value| request["headers"]["x-data-parallel-rank"].clone();
        fleet.requests(engine).iter().map(rank).collect()
    };
    assert_eq!(ranks("d0"), ["0", "1"], "the client's own is not taken");
    // Each comes back to the rank that has its cache.
    let caches = caught_up(&fleet).await;
    for (seed, rank) in [(1, 0), (2, 1)] {
        let body = completion(&prompt(seed, 200), 4, false);
        let record = explain(&fleet, &body).await;
        for engine in ["p0", "d0"] {
            for (candidate, cache) in candidates(&record, engine).iter().zip(&caches[engine]) {
                assert_eq!(candidate["overlap_tokens"], cache.overlap(&prompt(seed, 200)));
            }
        }
        let held = candidates(&record, "d0")[rank]["overlap_tokens"].as_u64();
        assert_eq!(held, Some(192), "{record}");
        let (head, _) = fleet.router.complete(&body).await;
        assert_eq!(way(&head), ("local", "eff_isl_under"));
    }
    assert_eq!(ranks("d0")[2..], ["0", "1"]);
    let listed = Request::get("/v1/pointsman/workers").json(fleet.addr()).await.1;
    assert_eq!(listed["workers"].as_array().map(Vec::len), Some(4));
    fleet.assert_nothing_leaks().await;
}

#[tokio::test]
async fn a_session_stays_on_its_decode_worker() {
    let by_header = (json!({"header": "x-session"}), json!({}), Some(("x-session", "s1")));
    let by_user = (json!("user"), json!({"user": "s1"}), None);
    for (affinity, member, header) in [by_header, by_user] {
        let routing = json!({"session_affinity": affinity});
        let specs = [prefill("p0"), decode("d0"), decode("d1")];
        let fleet = Fleet::with(specs, json!({"routing": routing})).await;
        let ask = async |seed: u32, in_session: bool| {
            let mut body = completion(&prompt(seed, 200), 4, false);
            if in_session {
                support::merge(&mut body, member.clone());
            }
            let mut request = Request::completion(&body);
            if let (true, Some((name, value))) = (in_session, header) {
                request = request.header(name, value);
            }
            request.send(fleet.addr()).await.0.worker().to_owned()
        };
        assert_eq!(ask(1, true).await, "d0");
        // Something else runs there, so that it is no longer the cheaper one.
        fleet.set_faults("d0", times(1, Leg::Any, Action::SlowTokens { delay_ms: 20 }));
        let mut body = completion(&prompt(2, 200), 10_000, true);
        body["ignore_eos"] = json!(true);
        let mut running = Request::completion(&body).open(fleet.addr()).await;
        running.tokens(1).await;
        assert_eq!(ask(3, false).await, "d1");
        assert_eq!(ask(4, true).await, "d0", "{affinity}");
        drop(running);
        fleet.assert_nothing_leaks().await;
    }
}

#[tokio::test]
async fn what_can_never_fire_is_said_in_the_status() {
    let blind = |spec: Spec| spec.engine(|engine| engine.kv_events = None);
    let deaf = || decode("d0").worker(json!({"local_prefill": false}));
    let cases: Vec<(Vec<Spec>, Value, &str)> = vec![
        (
            vec![prefill("p0"), blind(decode("d0"))],
            json!({}),
            "no worker that can prefill locally publishes KV events",
        ),
        (
            vec![prefill("p0"), decode("d0")],
            json!({"routing": {"eff_isl_ratio_threshold": 0}}),
            "eff_isl_ratio_threshold is 0",
        ),
        (
            vec![prefill("p0"), decode("d0")],
            json!({"routing": {"policy": "prefill_load", "prefill_busy_threshold": 1}}),
            "max_num_batched_tokens of no prefill worker is known",
        ),
        (
            vec![prefill("p0"), decode("d0")],
            json!({"metrics": {"scrape_interval": "off"}}),
            "guard decode_kv can never veto",
        ),
        (vec![prefill("p0"), deaf()], json!({}), "no decode worker can prefill locally"),
        (vec![unified("u0")], json!({}), "there is no prefill worker, so no remote path"),
        (
            vec![prefill("p0"), decode("d0")],
            json!({"routing": {"isl_gate": 100}}),
            "isl_gate is always waived",
        ),
        (
            vec![prefill("p0"), decode("d0")],
            json!({"routing": {"policy": "uncached_tokens"}}),
            "uncached_tokens always goes local: non_cached_tokens is 0",
        ),
        (
            vec![prefill("p0"), decode("d0")],
            json!({"routing": {"shadow": [{"policy": "isl_bounding", "eff_isl_threshold": 0}]}}),
            "shadow policy isl_bounding can never go local: eff_isl_threshold is 0",
        ),
    ];
    for (specs, config, words) in cases {
        let fleet = Fleet::with(specs, config.clone()).await;
        let status = fleet.router.status().await;
        let lines = status["models"][0]["never_fires"].as_array().expect("lines").clone();
        let said = lines.iter().any(|line| line.as_str().is_some_and(|line| line.contains(words)));
        assert!(said, "{config}: {words:?} is not in {lines:?}");
    }
    // Where all is well there is nothing to say but that nobody could stand in.
    let fleet = Fleet::start([prefill("p0"), prefill("p1"), decode("d0")]).await;
    assert_eq!(fleet.router.status().await["models"][0]["never_fires"], json!([]));
}
