//! Who may do what: keys of clients and their limits, keys of the administration and its listener.
#![allow(clippy::expect_used, clippy::panic, reason = "it is all test")]

mod command;
mod support;

use pointsman_sim::mock::{Action, Leg};
use serde_json::{Value, json};
use support::client::error_message;
use support::fleet::{MODEL, completion, configuration, prompt, rule};
use support::{Fleet, Head, Request, Router, unified, wait_until};

const KEY: &str = "pk-the-clients-key";

fn hash(key: &str) -> String {
    let ended = command::run(&["key", "--hash"], &[], key);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    ended.out.trim().to_owned()
}

/// Settings with one key named `one`, and what it is limited to.
fn auth(limits: &Value) -> Value {
    let mut key = json!({"name": "one", "sha256": hash(KEY)});
    support::merge(&mut key, limits.clone());
    json!({"auth": {"keys": [key]}, "admin": {"key_sha256": hash("root")}})
}

fn bearing(request: Request, key: &str) -> Request {
    request.header("authorization", &format!("Bearer {key}"))
}

fn ask(seed: u32) -> Request {
    Request::completion(&completion(&prompt(seed, 20), 2, false))
}

fn seconds(head: &Head) -> u64 {
    head.header("retry-after").expect("it says when").parse().expect("whole seconds")
}

#[test]
fn a_key_is_made_with_the_hash_that_the_configuration_wants() {
    let [one, two] = [(), ()].map(|()| command::run(&["key"], &[], "").out);
    assert_ne!(one, two);
    let field = |name| one.lines().find_map(|line| line.strip_prefix(name)).expect("a line").trim();
    let (key, sha256) = (field("key "), field("sha256 "));
    assert!(key.len() > 64 && sha256.len() == 64, "{one}");
    assert_eq!(hash(key), sha256);
    // The hash of FIPS 180-2, appendix B.1.
    let known = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
    assert_eq!(hash("abc\n"), known);
}

#[tokio::test]
async fn without_a_known_key_only_health_can_be_asked() {
    let fleet = Fleet::with([unified("u0")], auth(&json!({}))).await;
    for (request, words) in [
        (ask(1), "no API key"),
        (bearing(ask(1), "pk-wrong"), "not known"),
        (bearing(ask(1), ""), "no API key"),
        (bearing(ask(1), &hash(KEY)), "not known"),
        (Request::get("/v1/models"), "no API key"),
        (Request::get("/nothing"), "no API key"),
    ] {
        let (head, body) = request.json(fleet.addr()).await;
        assert_eq!(head.status, 401, "{body}");
        assert!(error_message(&body).contains(words), "{body}");
        assert!(body["error"]["type"].is_string(), "{body}");
    }
    for path in ["/health", "/live", "/ready"] {
        assert_eq!(Request::get(path).send(fleet.addr()).await.0.status, 200, "{path}");
    }
    assert_eq!(fleet.requests("u0").len(), 0);
    for request in [bearing(ask(1), KEY), ask(2).header("x-api-key", KEY)] {
        let (head, body) = request.json(fleet.addr()).await;
        assert_eq!(head.status, 200, "{body}");
    }
    let metrics = fleet.router.metrics().await;
    let counted =
        metrics.count("pointsman_key_requests_total", &[("key", "one"), ("status", "200")]);
    assert_eq!(counted, 2);
    assert_eq!(metrics.count("pointsman_requests_refused_total", &[("signal", "api_key")]), 6);
}

#[tokio::test]
async fn a_clients_key_goes_no_further_than_the_router() {
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("key");
    std::fs::write(&file, "engine-key\n").expect("a file");
    for (own, expected) in
        [(json!({}), Value::Null), (json!({"api_key_file": file}), json!("Bearer engine-key"))]
    {
        let fleet = Fleet::with([unified("u0").worker(own)], auth(&json!({}))).await;
        let request = bearing(ask(1), KEY).header("x-api-key", "pk-another");
        let (head, body) = request.json(fleet.addr()).await;
        assert_eq!(head.status, 200, "{body}");
        let headers = fleet.requests("u0").pop().expect("it came")["headers"].clone();
        assert_eq!(headers["authorization"], expected);
        assert_eq!(headers["x-api-key"], Value::Null);
        let metrics = Request::get("/metrics").send(fleet.addr()).await.1.text();
        let told = fleet.router.log() + &metrics + &body.to_string();
        for secret in [KEY, "pk-another", "engine-key", &hash(KEY)] {
            assert!(!told.contains(secret), "{secret} is told");
        }
    }
}

#[tokio::test]
async fn a_model_that_a_key_may_not_use_does_not_exist_for_it() {
    let mut over = auth(&json!({"models": ["other"]}));
    over["auth"]["keys"]
        .as_array_mut()
        .expect("a list")
        .push(json!({"name": "two", "sha256": hash("pk-two"), "models": [MODEL]}));
    let fleet = Fleet::with([unified("u0")], over).await;
    let listed = async |key: &str| {
        let (_, body) = bearing(Request::get("/v1/models"), key).json(fleet.addr()).await;
        body["data"].as_array().expect("a list").len()
    };
    assert_eq!((listed(KEY).await, listed("pk-two").await), (0, 1));
    let one = format!("/v1/models/{MODEL}");
    for (key, status) in [(KEY, 404), ("pk-two", 200)] {
        assert_eq!(bearing(Request::get(&one), key).send(fleet.addr()).await.0.status, status);
        let (head, body) = bearing(ask(1), key).json(fleet.addr()).await;
        assert_eq!(head.status, status, "{body}");
    }
    let (_, refused) = bearing(ask(1), KEY).json(fleet.addr()).await;
    let mut unknown = completion(&prompt(1, 20), 2, false);
    unknown["model"] = json!("nowhere");
    let (_, unknown) = bearing(Request::completion(&unknown), KEY).json(fleet.addr()).await;
    let same = error_message(&unknown).replace("nowhere", MODEL);
    assert_eq!(error_message(&refused), same, "nothing tells that it exists");
}

#[tokio::test]
async fn past_its_requests_a_minute_a_key_gets_429_and_is_told_when_to_come_back() {
    let fleet = Fleet::with([unified("u0")], auth(&json!({"requests_per_minute": 2}))).await;
    for seed in 0..2 {
        assert_eq!(bearing(ask(seed), KEY).send(fleet.addr()).await.0.status, 200);
    }
    let (head, body) = bearing(ask(3), KEY).json(fleet.addr()).await;
    assert_eq!(head.status, 429, "{body}");
    assert!((20..=30).contains(&seconds(&head)), "half a minute for one of two: {head:?}");
    // To look at what there is costs nothing.
    assert_eq!(bearing(Request::get("/v1/models"), KEY).send(fleet.addr()).await.0.status, 200);
    let metrics = fleet.router.metrics().await;
    assert_eq!(metrics.count("pointsman_requests_refused_total", &[("signal", "key_requests")]), 1);
}

#[tokio::test]
async fn tokens_of_prompts_and_replies_count_against_a_keys_tokens_a_minute() {
    let fleet = Fleet::with([unified("u0")], auth(&json!({"tokens_per_minute": 100}))).await;
    let body = completion(&prompt(1, 20), 70, false);
    let (head, reply) = bearing(Request::completion(&body), KEY).json(fleet.addr()).await;
    assert_eq!(head.status, 200, "{reply}");
    // 10 are left, and some that came in meanwhile.
    wait_until(async || {
        let body = completion(&prompt(2, 60), 1, false);
        let (head, reply) = bearing(Request::completion(&body), KEY).json(fleet.addr()).await;
        if head.status != 429 {
            return Err(format!("{}: {reply}", head.status));
        }
        assert!((1..=30).contains(&seconds(&head)), "{head:?}");
        Ok(())
    })
    .await;
}

#[tokio::test]
async fn past_its_requests_in_flight_a_key_gets_429_until_one_ends() {
    let hang = rule(Leg::Local, Action::HangBeforeHeaders);
    let fleet = Fleet::with([unified("u0").faults(hang)], auth(&json!({"max_in_flight": 1}))).await;
    let held = bearing(ask(1), KEY).open(fleet.addr()).await;
    wait_until(async || match fleet.requests("u0").len() {
        0 => Err("the first request to reach the engine".to_owned()),
        _ => Ok(()),
    })
    .await;
    let (head, body) = bearing(ask(2), KEY).json(fleet.addr()).await;
    assert_eq!(head.status, 429, "{body}");
    assert!(seconds(&head) >= 1);
    drop(held);
    fleet.set_faults("u0", pointsman_sim::mock::Faults::default());
    wait_until(async || match bearing(ask(3), KEY).send(fleet.addr()).await.0.status {
        200 => Ok(()),
        status => Err(format!("a place that is not given back: {status}")),
    })
    .await;
}

#[tokio::test]
async fn the_administration_wants_its_own_key_and_is_closed_to_clients() {
    let fleet = Fleet::with([unified("u0")], auth(&json!({}))).await;
    let status = || Request::get("/v1/pointsman/status");
    for (request, code) in [
        (status(), 401),
        (bearing(status(), KEY), 401),
        (bearing(status(), "root"), 200),
        (bearing(ask(1), "root"), 401),
    ] {
        assert_eq!(request.send(fleet.addr()).await.0.status, code, "{request:?}");
    }
    // Without a key of its own it is closed where clients come.
    let mut keyless = auth(&json!({}));
    keyless["admin"] = json!({});
    let fleet = Fleet::with([unified("u0")], keyless).await;
    for request in [status(), bearing(status(), KEY)] {
        let (head, body) = request.json(fleet.addr()).await;
        assert_eq!(head.status, 401);
        assert!(error_message(&body).contains("admin.key_sha256"), "{body}");
    }
}

#[tokio::test]
async fn a_router_that_asks_for_a_key_is_explained_and_its_index_had_with_it() {
    let mut over = auth(&json!({}));
    over["admin"]["index_snapshot"] = json!(true);
    let fleet = Fleet::with([unified("u0")], over).await;
    let url = format!("http://{}", fleet.addr());
    let body = completion(&prompt(1, 20), 2, false).to_string();
    let dir = tempfile::tempdir().expect("a directory");
    let file = |name: &str, text: &str| {
        std::fs::write(dir.path().join(name), text).expect("it is written");
        dir.path().join(name).to_str().expect("text").to_owned()
    };
    let (right, wrong) = (file("right", " root\n"), file("wrong", KEY));
    let explain = |more: &[&str]| {
        let args = [&["explain", "--url", &url, "-"], more].concat();
        command::run(&args, &[], &body)
    };
    let told = explain(&["--key-file", &right]);
    assert_eq!(told.code, Some(0), "{told:?}");
    assert!(told.out.contains("candidates"), "{told:?}");
    for (refused, words) in [
        (explain(&[]), "a key is wanted here"),
        (explain(&["--key-file", &wrong]), "not that of"),
        (explain(&["--key-file", &file("empty", "\n")]), "holds no key"),
        (explain(&["--key-file", "/nowhere"]), "\"/nowhere\" cannot be read"),
    ] {
        assert_ne!(refused.code, Some(0), "{refused:?}");
        let said = refused.out.clone() + &refused.err;
        assert!(said.contains(words) && !said.contains("root"), "{words}: {refused:?}");
    }
    let second = async |kv: Value| {
        let mut over = json!({"kv": {"restore_from": url}});
        support::merge(&mut over["kv"], kv);
        Router::start(&configuration(&json!([fleet.engines[0].worker]), over)).await
    };
    let taken = "taken over from another router";
    let let_in = second(json!({"restore_api_key_file": right})).await;
    assert!(let_in.log().contains(taken), "{}", let_in.log());
    for kv in [json!({}), json!({"restore_api_key_file": wrong})] {
        let kept_out = second(kv).await;
        assert!(!kept_out.log().contains(taken) && kept_out.log().contains("401"));
    }
}

#[tokio::test]
async fn metrics_and_administration_are_on_their_own_listener_alone() {
    let over = json!({"admin": {"listen": {"address": "127.0.0.1", "port": 0}}});
    let fleet = Fleet::with([unified("u0")], over).await;
    let admin = fleet.router.admin_addr();
    for path in ["/metrics", "/v1/pointsman/status", "/v1/pointsman/workers"] {
        assert_eq!(Request::get(path).send(fleet.addr()).await.0.status, 404, "{path}");
        assert_eq!(Request::get(path).send(admin).await.0.status, 200, "{path}");
    }
    let drain =
        Request::new("POST", &format!("/v1/pointsman/workers/{MODEL}/u0/drain"), Vec::new());
    assert_eq!(drain.send(fleet.addr()).await.0.status, 404);
    assert_eq!(ask(1).send(fleet.addr()).await.0.status, 200);
    assert_eq!(ask(1).send(admin).await.0.status, 404);
    assert_eq!(Request::get("/v1/models").send(admin).await.0.status, 404);
    for to in [fleet.addr(), admin] {
        assert_eq!(Request::get("/ready").send(to).await.0.status, 200);
    }
}
