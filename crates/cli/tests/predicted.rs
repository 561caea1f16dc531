//! The policy `predicted` in the real binary: what it predicts is shown beside what came of it, is
//! kept over a restart, and clients say what they need by header.
#![allow(clippy::expect_used, clippy::panic, reason = "it is all test")]

mod support;

use serde_json::{Value, json};
use support::client::error_message;
use support::fleet::{completion, configuration, prompt};
use support::{Fleet, Request, Router, Spec, decode, prefill, wait_until};

/// Engines whose steps take time, so that there is something to learn.
fn pair() -> [Spec; 2] {
    [prefill("p0"), decode("d0")].map(|spec| {
        let told = json!({"max_num_batched_tokens": 8192});
        spec.engine(|engine| engine.speed = 20.0).worker(told)
    })
}

fn predicted(more: &Value) -> Value {
    let mut config = json!({"routing": {"policy": "predicted", "allow_path_override": true}});
    for (key, value) in more.as_object().into_iter().flatten() {
        config[key] = value.clone();
    }
    config
}

/// Streams a completion by a path, to its end.
async fn stream(router: &Router, seed: u32, path: &str) {
    let body = completion(&prompt(seed, 400 + seed % 7 * 100), 24, true);
    let request = Request::completion(&body).header("x-pointsman-path", path);
    let (head, body) = request.send(router.addr()).await;
    assert_eq!((head.status, head.path()), (200, path), "{body:?}");
    assert!(body.is_done());
}

fn calibration(status: &Value) -> &Value {
    &status["models"][0]["calibration"]
}

#[tokio::test]
async fn what_was_predicted_is_shown_beside_what_came_of_it() {
    let fleet = Fleet::with(pair(), predicted(&json!({}))).await;
    assert_eq!(calibration(&fleet.router.status().await)["cold"], true);
    for seed in 0..70 {
        stream(&fleet.router, seed, if seed % 2 == 0 { "remote" } else { "local" }).await;
    }
    let metrics = fleet.router.metrics().await;
    for path in ["remote", "local"] {
        let count = "pointsman_ttft_prediction_error_ratio_count";
        assert_eq!(metrics.count(count, &[("path", path)]), 35, "{path}");
    }
    let status = fleet.router.status().await;
    let learned = calibration(&status);
    assert_eq!(learned["cold"], false, "{learned}");
    assert!(learned["expected_osl_tokens"].as_f64().is_some_and(|osl| (osl - 24.0).abs() < 1.0));
    let constants = learned["constants"].as_array().expect("constants");
    // Twenty times as fast as the prior: half way there by any clock.
    let a1 = constants.iter().find(|c| c["name"] == "a1" && c["pool"] == "prefill");
    let a1 = a1.expect("the time per prompt token");
    let ratio = a1["value"].as_f64().unwrap_or(1.0) / a1["prior"].as_f64().unwrap_or(1.0);
    assert!(ratio < 0.5, "{a1}");
    assert!(a1["samples"].as_u64().is_some_and(|samples| samples >= 30), "{a1}");
    let d0 = &learned["workers"][1];
    assert_eq!(d0["name"], "d0");
    for error in d0["ttft_errors"].as_array().expect("errors by path") {
        assert_eq!(error["samples"], 35, "{d0}");
    }
    wait_until(async || {
        let log = fleet.router.log();
        let told = |words: &str| log.lines().any(|line| line.contains(words));
        let both = told("predicted_ttft_ms=") && told("actual_ttft_ms=");
        both.then_some(()).ok_or_else(|| format!("no first token is logged: {log}"))
    })
    .await;
    fleet.assert_nothing_leaks().await;
}

#[tokio::test]
async fn a_request_says_by_header_what_it_is_to_be_served_within() {
    let config = predicted(&json!({"model": {"slo": {"ttft_ms": 800, "itl_ms": 50}}}));
    let fleet = Fleet::with(pair(), config).await;
    let status = fleet.router.status().await;
    assert_eq!(status["models"][0]["slo"], json!({"ttft_ms": 800.0, "itl_ms": 50.0}));
    let body = completion(&prompt(1, 200), 4, false);
    let explain = async |name: &str, value: &str| {
        let request = Request::post("/v1/pointsman/explain", &body).header(name, value);
        request.json(fleet.addr()).await
    };
    let (_, record) = explain("x-slo-ttft-ms", "120").await;
    assert_eq!(record["slo"], json!({"ttft_ms": 120.0, "itl_ms": 50.0}), "{record}");
    let (_, record) = explain("x-llm-d-slo-itl-ms", "20").await;
    assert_eq!(record["slo"], json!({"ttft_ms": 800.0, "itl_ms": 20.0}), "{record}");
    for kind in ["local", "remote"] {
        let score = &record["scores"][kind];
        for key in ["j", "ttft_seconds", "itl_seconds"] {
            assert!(score[key].as_f64().is_some_and(|x| x > 0.0), "{kind} {key}: {record}");
        }
    }
    for path in ["/v1/completions", "/v1/pointsman/explain"] {
        let request = Request::post(path, &body).header("x-slo-itl-ms", "soon");
        let (head, refusal) = request.json(fleet.addr()).await;
        assert_eq!(head.status, 400, "{path}: {refusal}");
        let message = error_message(&refusal);
        assert!(message.contains("x-slo-itl-ms must be milliseconds"), "{path}: {message}");
    }
}

/// How many prompts of the prefill pool were measured.
fn measured(status: &Value) -> u64 {
    let constants = calibration(status)["constants"].as_array().expect("constants");
    let k0 = constants.iter().find(|c| c["name"] == "k0" && c["pool"] == "prefill");
    k0.and_then(|k0| k0["samples"].as_u64()).expect("its samples")
}

#[tokio::test]
async fn what_was_measured_is_kept_over_a_restart() {
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("calibration.json");
    let config = predicted(&json!({"calibration": {"state_file": file}}));
    let mut fleet = Fleet::with(pair(), config.clone()).await;
    for seed in 0..10 {
        stream(&fleet.router, seed, "remote").await;
    }
    let before = measured(&fleet.router.status().await);
    assert!(before > 0);
    fleet.router.terminate();
    assert!(fleet.router.ended().await.success());
    assert!(file.is_file(), "written at the end");
    assert_eq!(std::fs::read_dir(dir.path()).expect("the directory").count(), 1, "nothing beside");

    let workers: Vec<&Value> = fleet.engines.iter().map(|engine| &engine.worker).collect();
    let tree = configuration(&json!(workers), config);
    let again = Router::start(&tree).await;
    assert_eq!(measured(&again.status().await), before);
    drop(again);

    // A file that is none of ours is said so, and the router serves.
    for broken in ["", "{\"models\": 7}", "\u{0}\u{1}"] {
        std::fs::write(&file, broken).expect("a broken file");
        let third = Router::start(&tree).await;
        assert_eq!(measured(&third.status().await), 0);
        assert!(third.log().contains("what was measured before is not used"), "{}", third.log());
        stream(&third, 3, "local").await;
    }
}

#[tokio::test]
async fn a_slow_engine_is_told_by_its_own_counters_where_the_router_sees_no_token() {
    // Half as fast as the other decode worker, and both are as fast as the constants say.
    let spec = |spec: Spec, speed| spec.engine(|engine| engine.speed = speed);
    let specs = [spec(prefill("p0"), 10.0), spec(decode("d0"), 10.0), spec(decode("d1"), 5.0)];
    let constants = json!({"k0_ms": 0.8, "a1_ms": 0.00445, "a2_ms": 9.8e-8,
                           "c0_ms": 1.04, "c1_ms": 0.0038, "c2_ms": 2.9e-6});
    let config = json!({
        "metrics": {"scrape_interval": "100ms"},
        "model": {"constants": constants},
        "routing": {"policy": "predicted", "allow_path_override": true},
    });
    let fleet = Fleet::with(specs, config).await;
    let addr = fleet.addr();
    let biases = async || {
        let status = fleet.router.status().await;
        let workers = calibration(&status)["workers"].as_array().expect("workers").clone();
        [1, 2].map(|at| {
            let worker: &Value = &workers[at];
            let number = |key: &str| worker[key].as_f64().expect("a number");
            assert_eq!(worker["running"], 0, "a stream was seen: {worker}");
            (number("decode_bias"), number("decode_samples_of_engine"))
        })
    };
    let clients = (0..6).map(|client| {
        tokio::spawn(async move {
            for turn in 0.. {
                let body = completion(&prompt(client * 1000 + turn, 300), 400, false);
                let request = Request::completion(&body).header("x-pointsman-path", "remote");
                let (head, answer) = request.json(addr).await;
                assert_eq!(head.status, 200, "{answer}");
            }
        })
    });
    let clients: Vec<_> = clients.collect();
    wait_until(async || {
        // Once it is known to be slow it is given less.
        let both = biases().await;
        let [(fast, fast_samples), (slow, slow_samples)] = both;
        let measured = fast_samples.min(slow_samples) >= 1.0;
        let told = measured && slow > 1.5 && (0.7..1.4).contains(&fast);
        told.then_some(()).ok_or_else(|| format!("biases and samples: {both:?}"))
    })
    .await;
    for client in clients {
        client.abort();
    }
}

#[tokio::test]
async fn the_default_policy_is_predicted() {
    let mut tree = configuration(&json!([]), json!({}));
    tree.as_object_mut().expect("a mapping").remove("routing");
    tree["models"][0]["expect_workers"] = json!(true);
    let router = Router::start(&tree).await;
    assert_eq!(router.status().await["models"][0]["policy"], "predicted");
}
