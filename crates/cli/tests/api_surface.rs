//! Every endpoint: what it answers, which methods it takes, and the shape of what it refuses.
#![allow(clippy::expect_used, clippy::panic, reason = "it is all test")]

mod support;

use std::net::SocketAddr;

use pointsman_sim::mock::{Action, EngineConfig, Faults, Leg, MockEngine, Role};
use serde_json::{Value, json};
use support::client::error_message;
use support::fleet::{MODEL, completion, configuration, prompt, times};
use support::{Fleet, Request, Router, Spec, decode, prefill, wait_until};

/// Every metric that is promised by name.
const METRICS: &[(&str, &str)] = &[
    ("decisions", "counter"),
    ("shadow_decisions", "counter"),
    ("guard_vetoes", "counter"),
    ("fallbacks", "counter"),
    ("effective_isl_tokens", "histogram"),
    ("ttft_seconds", "histogram"),
    ("itl_seconds", "histogram"),
    ("leg_failures", "counter"),
    ("requests_in_flight", "gauge"),
    ("held_requests", "gauge"),
    ("reserved_prefill_tokens", "gauge"),
    ("reserved_kv_blocks", "gauge"),
    ("worker_up", "gauge"),
    ("kv_event_lag_seconds", "gauge"),
    ("kv_events", "counter"),
    ("index_blocks", "gauge"),
];

fn pair() -> [Spec; 2] {
    [prefill("p0"), decode("d0")]
}

async fn bare(method: &str, path: &str, to: SocketAddr) -> (support::Head, Value) {
    Request::new(method, path, Vec::new()).json(to).await
}

#[tokio::test]
async fn every_endpoint_refuses_other_methods_and_says_which_it_takes() {
    let fleet = Fleet::start(pair()).await;
    let get = ["/health", "/live", "/ready", "/metrics", "/v1/models", "/v1/models/mock"];
    let get = get.iter().chain(&["/v1/pointsman/status"]).map(|path| (*path, "GET"));
    let post = ["/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/tokenize"];
    let post = post.iter().chain(&["/v1/pointsman/explain"]).map(|path| (*path, "POST"));
    for (path, allowed) in get.chain(post) {
        for method in ["GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"] {
            if method == allowed {
                continue;
            }
            let (head, error) = bare(method, path, fleet.addr()).await;
            assert_eq!(head.status, 405, "{method} {path}: {error}");
            let told = head.header("allow").unwrap_or_default();
            assert!(told.contains(allowed) && !told.contains(method), "{method} {path}: {told}");
            assert!(error_message(&error).contains(allowed), "{error}");
        }
    }
    assert_eq!(fleet.router.metrics().await.count("pointsman_decisions_total", &[]), 0);
}

#[tokio::test]
async fn a_head_request_gets_the_head_alone() {
    let fleet = Fleet::start(pair()).await;
    for path in ["/health", "/ready", "/v1/models"] {
        let request = Request::new("HEAD", path, Vec::new()).header("connection", "close");
        let mut exchange = request.open(fleet.addr()).await;
        assert_eq!(exchange.head().await.status, 200);
        let body = exchange.rest().await;
        assert!(body.bytes.is_empty(), "{body:?}");
    }
}

/// What engines have beside inference is not for clients of the router.
#[tokio::test]
async fn nothing_else_is_there_and_nothing_else_of_an_engine_can_be_reached() {
    let fleet = Fleet::start(pair()).await;
    let paths = [
        "/",
        "/nope",
        "/v1",
        "/v1/nope",
        "/v1/pointsman/",
        "/v1/pointsman/nope",
        "/reset_prefix_cache",
        "/kv_event_sources",
        "/mock/stats",
        "/mock/faults",
        "/version",
        "/v1/chat/completions/",
        "//v1/models",
    ];
    for path in paths {
        for method in ["GET", "POST"] {
            let request = match method {
                "GET" => Request::get(path),
                _ => Request::post(path, &json!({"model": MODEL, "prompt": "x"})),
            };
            let (head, error) = request.json(fleet.addr()).await;
            assert_eq!(head.status, 404, "{method} {path}: {error}");
            error_message(&error);
        }
    }
    for engine in ["p0", "d0"] {
        assert!(fleet.requests(engine).is_empty());
    }
}

#[tokio::test]
async fn live_is_whoever_answers_and_ready_is_who_can_serve() {
    let fleet = Fleet::start(pair()).await;
    let (head, health) = bare("GET", "/health", fleet.addr()).await;
    assert_eq!((head.status, health), (200, json!({"status": "live"})));
    let (ready, said) = fleet.router.ready().await;
    assert!(ready);
    let model = &said["models"][MODEL];
    assert_eq!((&said["ready"], &said["draining"]), (&json!(true), &json!(false)));
    assert_eq!((&model["prefill_up"], &model["decode_up"]), (&json!(1), &json!(1)));
    assert_eq!((&model["local"], &model["remote"]), (&json!(true), &json!(true)));

    // Without prefill workers there is still the local path.
    let unhealthy = Faults { unhealthy: true, ..Faults::default() };
    let is_ready = async |expected: bool, prefills: u64| {
        wait_until(async || {
            let (ready, said) = fleet.router.ready().await;
            let up = &said["models"][MODEL]["prefill_up"];
            if ready == expected && *up == prefills { Ok(()) } else { Err(said.to_string()) }
        })
        .await;
    };
    fleet.set_faults("p0", unhealthy.clone());
    is_ready(true, 0).await;
    let (head, _) = fleet.router.complete(&completion(&prompt(1, 200), 4, false)).await;
    assert_eq!((head.status, head.path(), head.reason()), (200, "local", "no_prefill"));

    fleet.set_faults("d0", unhealthy);
    is_ready(false, 0).await;
    let (head, body) = fleet.router.complete(&completion(&prompt(1, 200), 4, false)).await;
    assert_eq!(head.status, 503);
    assert!(head.header("retry-after").is_some());
    assert!(body.error().contains("no decode or unified worker"), "{body:?}");
    assert_eq!(bare("GET", "/health", fleet.addr()).await.0.status, 200);

    for engine in ["p0", "d0"] {
        fleet.set_faults(engine, Faults::default());
    }
    is_ready(true, 1).await;
    let (head, _) = fleet.router.complete(&completion(&prompt(2, 200), 4, false)).await;
    assert_eq!((head.status, head.path()), (200, "remote"));
}

#[tokio::test]
async fn every_promised_metric_is_there_under_its_name() {
    let routing = json!({"policy": "always_local", "shadow": ["always_remote"],
                         "local_prefill_budget": {"tokens": 100}});
    let [p0, d0] = pair();
    let fleet = Fleet::with([p0, prefill("p1"), d0], json!({"routing": routing})).await;
    // A leg that fails, a guard that vetoes, a part that is no text, and what streams.
    fleet.set_faults("p0", times(1, Leg::Prefill, Action::Status { status: 500, body: None }));
    let image = json!({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}});
    let text = json!({"type": "text", "text": "What is this?"});
    let chat = json!({"model": MODEL, "messages": [{"role": "user", "content": [text, image]}]});
    let requests = [
        Request::completion(&completion(&prompt(1, 200), 8, true)),
        Request::completion(&completion(&prompt(2, 50), 8, true)),
        Request::chat(&chat),
    ];
    for request in requests {
        let (head, body) = request.send(fleet.addr()).await;
        assert_eq!(head.status, 200, "{body:?}");
    }
    let (head, body) = Request::get("/metrics").send(fleet.addr()).await;
    let kind = Some("application/openmetrics-text; version=1.0.0; charset=utf-8");
    assert_eq!(head.header("content-type"), kind);
    let text = body.text();
    for (name, kind) in METRICS {
        let lines =
            [format!("# TYPE pointsman_{name} {kind}\n"), format!("# HELP pointsman_{name} ")];
        assert!(lines.iter().all(|line| text.contains(line)), "{name} is not there");
    }
    assert!(text.ends_with("# EOF\n"));

    let metrics = fleet.router.metrics().await;
    let count =
        |name: &str, labels: &[(&str, &str)]| metrics.count(&format!("pointsman_{name}"), labels);
    let by_policy = [("model", MODEL), ("path", "local"), ("policy", "always_local")];
    assert_eq!(
        count("decisions_total", &[&by_policy[..], &[("reason", "always_local")]].concat()),
        1
    );
    let shadow = [("model", MODEL), ("policy", "always_remote"), ("path", "remote")];
    assert!(count("shadow_decisions_total", &shadow) >= 3);
    assert!(count("guard_vetoes_total", &[("guard", "local_prefill_budget")]) >= 1);
    assert_eq!(count("fallbacks_total", &[("signal", "multimodal")]), 1);
    assert_eq!(count("leg_failures_total", &[("leg", "prefill"), ("cause", "server_error")]), 1);
    for path in ["remote", "local"] {
        assert_eq!(count("ttft_seconds_count", &[("path", path)]), 1);
        assert_eq!(count("itl_seconds_count", &[("path", path)]), 7);
    }
    for worker in ["p0", "p1", "d0"] {
        let labels = [("model", MODEL), ("worker", worker), ("rank", "0")];
        assert_eq!(count("worker_up", &labels), 1);
    }
    let stored = [("model", MODEL), ("worker", "d0"), ("kind", "stored")];
    assert!(count("kv_events_total", &stored) > 0);
}

#[tokio::test]
async fn what_is_no_request_is_refused_in_the_shape_that_clients_know() {
    let fleet = Fleet::start(pair()).await;
    let deep =
        format!("{{\"model\":\"{MODEL}\",\"prompt\":{}1{}}}", "[".repeat(5000), "]".repeat(5000));
    let wrong: [(&[u8], &str); 9] = [
        (b"", ""),
        (b"nonsense", ""),
        (b"[1, 2]", ""),
        (b"{\"model\": \"mock\", ", ""),
        (b"{\"model\": \"mock\"} trailing", ""),
        (b"{\"model\": \"mock\", \"prompt\": \"\xff\xfe\"}", ""),
        (deep.as_bytes(), ""),
        (b"{\"model\": 7, \"prompt\": \"x\"}", "model"),
        (b"{\"model\": \"mock\", \"prompt\": {\"a\": 1}}", "prompt"),
    ];
    for (body, param) in wrong {
        for path in ["/v1/completions", "/v1/pointsman/explain"] {
            let (head, error) = Request::raw(path, body).json(fleet.addr()).await;
            let shown = String::from_utf8_lossy(&body[..body.len().min(60)]);
            assert_eq!(head.status, 400, "{path} {shown}: {error}");
            error_message(&error);
            if !param.is_empty() {
                assert_eq!(error["error"]["param"], param, "{error}");
            }
        }
    }
    let unknown = json!({"model": "nobody", "prompt": "x", "messages": []});
    for path in ["/v1/completions", "/v1/chat/completions", "/v1/embeddings"] {
        let (head, error) = Request::post(path, &unknown).json(fleet.addr()).await;
        assert_eq!(head.status, 404);
        assert!(error_message(&error).contains("`nobody`"), "{error}");
        assert_eq!(error["error"]["param"], "model");
    }
    for engine in ["p0", "d0"] {
        assert!(fleet.requests(engine).is_empty(), "an engine was asked");
    }
    let metrics = fleet.router.metrics().await;
    assert_eq!(metrics.count("pointsman_requests_total", &[("status", "400")]), 9);
    assert_eq!(metrics.count("pointsman_requests_total", &[("status", "404")]), 3);
}

#[tokio::test]
async fn a_body_without_a_model_is_for_the_only_one() {
    let fleet = Fleet::start(pair()).await;
    let (head, reply) = Request::completion(&json!({"prompt": prompt(1, 40), "max_tokens": 2}))
        .json(fleet.addr())
        .await;
    assert_eq!((head.status, &reply["model"]), (200, &json!(MODEL)));
}

/// A router in front of engines that each have a model of their own.
struct Several {
    engines: Vec<MockEngine>,
    router: Router,
}

impl Several {
    async fn start(models: &[Value], served: &[(&str, Role)]) -> Several {
        let mut engines = Vec::new();
        for (name, role) in served {
            let model = (*name).to_owned();
            let config = EngineConfig { model, speed: f64::INFINITY, ..EngineConfig::of(*role) };
            engines.push(MockEngine::start(config).await.expect("the engine starts"));
        }
        let mut tree = configuration(&json!([]), json!({}));
        tree["models"] = json!(models);
        let urls: Vec<String> = engines.iter().map(MockEngine::url).collect();
        for worker in tree["models"].as_array_mut().into_iter().flatten() {
            for worker in worker["workers"].as_array_mut().into_iter().flatten() {
                let at = worker["url"].as_u64().and_then(|at| usize::try_from(at).ok());
                worker["url"] = json!(urls[at.expect("the number of an engine")]);
            }
        }
        let router = Router::start(&tree).await;
        Several { engines, router }
    }

    fn asked(&self, engine: usize) -> usize {
        self.engines[engine].stats()["requests"].as_array().map_or(0, Vec::len)
    }
}

fn worker(engine: usize, role: &str) -> Value {
    json!({"url": engine, "role": role})
}

#[tokio::test]
async fn several_models_behind_one_address_are_kept_apart() {
    let models = [
        json!({"name": "org/small", "tokenizer": "builtin", "adapters": ["sql"],
               "workers": [worker(0, "prefill"), worker(1, "decode")]}),
        json!({"name": "large", "tokenizer": "builtin", "workers": [worker(2, "unified")],
               "routing": {"policy": "always_local"}}),
    ];
    let served =
        [("org/small", Role::Prefill), ("org/small", Role::Decode), ("large", Role::Unified)];
    let several = Several::start(&models, &served).await;
    let to = several.router.addr();
    for (model, path, asked) in [("org/small", "remote", [1, 1, 0]), ("large", "local", [1, 1, 1])]
    {
        let mut body = completion(&prompt(1, 200), 4, false);
        body["model"] = json!(model);
        let (head, reply) = Request::completion(&body).json(to).await;
        assert_eq!((head.status, head.path(), &reply["model"]), (200, path, &json!(model)));
        assert_eq!([several.asked(0), several.asked(1), several.asked(2)], asked);
    }
    // Which one is meant has to be said.
    let (head, error) = Request::completion(&json!({"prompt": "x"})).json(to).await;
    assert_eq!((head.status, &error["error"]["param"]), (400, &json!("model")));
    let (_, ready) = several.router.ready().await;
    let named = ready["models"].as_object().expect("models");
    assert_eq!(named.keys().collect::<Vec<_>>(), ["large", "org/small"]);
    let metrics = several.router.metrics().await;
    for model in ["org/small", "large"] {
        assert_eq!(metrics.count("pointsman_decisions_total", &[("model", model)]), 1);
    }
    let status = several.router.status().await;
    let policies = status["models"].as_array().expect("models").iter();
    let policies: Vec<&Value> = policies.map(|model| &model["policy"]).collect();
    assert_eq!(policies, ["isl_bounding", "always_local"]);
    assert_models_are_listed(to).await;
}

async fn assert_models_are_listed(to: SocketAddr) {
    let (_, list) = Request::get("/v1/models").json(to).await;
    assert_eq!(list["object"], "list");
    let cards = list["data"].as_array().expect("a list");
    let id = |card: &Value| card["id"].as_str().expect("an id").to_owned();
    assert_eq!(cards.iter().map(id).collect::<Vec<_>>(), ["org/small", "sql", "large"]);
    for card in cards {
        assert_eq!(card["object"], "model");
        assert!(card["created"].as_u64() > Some(1_700_000_000));
        let path = format!("/v1/models/{}", card["id"].as_str().expect("an id"));
        let (head, alone) = Request::get(&path).json(to).await;
        assert_eq!((head.status, &alone), (200, card));
    }
    assert_eq!((&cards[0]["parent"], &cards[1]["parent"]), (&Value::Null, &json!("org/small")));
    assert_eq!(cards[0]["max_model_len"], 131_072);
    // Clients write a slash in a path this way too.
    let (head, card) = Request::get("/v1/models/org%2Fsmall").json(to).await;
    assert_eq!((head.status, &card["id"]), (200, &json!("org/small")));
    let (head, error) = Request::get("/v1/models/nobody").json(to).await;
    assert_eq!((head.status, &error["error"]["param"]), (404, &json!("model")));
}

#[tokio::test]
async fn an_alias_is_a_further_name_of_the_same_workers() {
    // The engines go by the alias, as they do with several `--served-model-name`.
    let models = [json!({"name": "mock", "aliases": ["mock-8b"], "tokenizer": "builtin",
                         "workers": [worker(0, "prefill"), worker(1, "decode")]})];
    let several =
        Several::start(&models, &[("mock-8b", Role::Prefill), ("mock-8b", Role::Decode)]).await;
    let to = several.router.addr();
    let mut body = completion(&prompt(1, 200), 4, false);
    body["model"] = json!("mock-8b");
    let (head, reply) = Request::completion(&body).json(to).await;
    assert_eq!((head.status, head.path(), &reply["model"]), (200, "remote", &json!("mock-8b")));
    let metrics = several.router.metrics().await;
    assert_eq!(metrics.count("pointsman_decisions_total", &[("model", "mock")]), 1);
    let (_, list) = Request::get("/v1/models").json(to).await;
    let ids: Vec<&Value> =
        list["data"].as_array().expect("a list").iter().map(|m| &m["id"]).collect();
    assert_eq!(ids, ["mock", "mock-8b"]);
    // The name is the client's own on its way to the engine, which knows it or not.
    body["model"] = json!("mock");
    let (head, error) = Request::completion(&body).json(to).await;
    assert_eq!(head.status, 404);
    assert!(error_message(&error).contains("Valid aliases: mock-8b"), "{error}");
    let status = several.router.status().await;
    assert_eq!(status["models"][0]["live_bookings"], 0);
}

#[tokio::test]
async fn other_bodies_with_a_model_pass_through_to_a_worker_that_can_serve_them() {
    let fleet = Fleet::start(pair()).await;
    let asked = json!({"model": MODEL, "input": ["one", "two"]});
    let (head, reply) = Request::post("/v1/embeddings", &asked).json(fleet.addr()).await;
    assert_eq!((head.status, head.path(), head.worker()), (200, "local", "d0"));
    assert_eq!(reply["data"].as_array().map(Vec::len), Some(2));
    let asked = json!({"model": MODEL, "prompt": "one two three"});
    let (head, reply) = Request::post("/tokenize", &asked).json(fleet.addr()).await;
    assert_eq!(head.status, 200);
    let asked = json!({"model": MODEL, "tokens": reply["tokens"]});
    let (_, reply) = Request::post("/detokenize", &asked).json(fleet.addr()).await;
    assert_eq!(reply["prompt"], "one two three");
    // What the engine does not have it says itself.
    let asked = json!({"model": MODEL, "query": "q", "documents": ["d"]});
    let (head, _) = Request::post("/v1/rerank", &asked).json(fleet.addr()).await;
    assert_eq!((head.status, head.path()), (404, ""));
    fleet.assert_nothing_leaks().await;
}
