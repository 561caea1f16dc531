//! The worker API: what it lists, and what it takes and refuses. What becomes of the requests of a
//! worker that is drained or removed is in `faults_fleet`.
#![allow(clippy::expect_used, clippy::panic, reason = "it is all test")]

mod support;

use serde_json::{Value, json};
use support::client::error_message;
use support::fleet::{MODEL, completion, prompt};
use support::{Fleet, Head, Request, decode, prefill, wait_until};

const WORKERS: &str = "/v1/pointsman/workers";

async fn list(fleet: &Fleet) -> Vec<Value> {
    let (head, json) = Request::get(WORKERS).json(fleet.addr()).await;
    assert_eq!(head.status, 200);
    json["workers"].as_array().expect("a list").clone()
}

async fn names(fleet: &Fleet) -> Vec<String> {
    let name = |worker: &Value| worker["name"].as_str().expect("a name").to_owned();
    list(fleet).await.iter().map(name).collect()
}

async fn ask(fleet: &Fleet, method: &str, path: &str) -> (Head, Value) {
    Request::new(method, &format!("{WORKERS}{path}"), Vec::new()).json(fleet.addr()).await
}

#[tokio::test]
async fn workers_are_listed_with_what_is_known_of_them() {
    let p0 = prefill("p0").worker(json!({"labels": {"zone": "a"}, "max_num_batched_tokens": 4096}));
    let d0 = decode("d0").engine(|engine| {
        engine.capacity_blocks = 5000;
        engine.block_size = 32;
        engine.adapters = vec!["sql".into()];
        engine.version = "0.31.4".into();
    });
    let fleet = Fleet::start([p0, d0]).await;
    let listed = list(&fleet).await;
    let [p0, d0] = listed.as_slice() else { panic!("{listed:?}") };
    for (worker, name, role) in [(p0, "p0", "prefill"), (d0, "d0", "decode")] {
        assert_eq!(worker["name"], name);
        assert_eq!((&worker["model"], &worker["role"]), (&json!(MODEL), &json!(role)));
        let url = fleet.get(name).mock.url();
        assert!(worker["url"].as_str().is_some_and(|told| told.trim_end_matches('/') == url));
        assert_eq!((&worker["condition"], &worker["draining"]), (&json!("up"), &json!(false)));
        assert_eq!(worker["load"], json!({"prefill_tokens": 0, "kv_blocks": 0, "active": 0}));
        assert_eq!((&worker["rank"], &worker["publishes_events"]), (&json!(0), &json!(true)));
        assert_eq!((&worker["index_blocks"], &worker["index_stale"]), (&json!(0), &json!(false)));
    }
    assert_eq!(p0["labels"], json!({"zone": "a"}));
    assert_eq!((&p0["local_prefill"], &d0["local_prefill"]), (&json!(false), &json!(true)));
    assert_eq!((&d0["capacity_blocks"], &d0["block_size"]), (&json!(5000), &json!(32)));
    assert_eq!(d0["serves"], json!([MODEL, "sql"]));
    assert_eq!(d0["version"], "0.31.4");

    let (head, _) = fleet.router.complete(&completion(&prompt(1, 200), 8, false)).await;
    assert_eq!(head.status, 200);
    wait_until(async || match &list(&fleet).await[1]["index_blocks"] {
        blocks if *blocks == 6 => Ok(()),
        blocks => Err(format!("{blocks} blocks of a prompt of six")),
    })
    .await;
}

#[tokio::test]
async fn a_worker_joins_under_any_name_of_its_model_and_leaves_again() {
    let over = json!({"model": {"aliases": ["also-mock"], "expect_workers": true}});
    let mut fleet = Fleet::with([], over).await;
    assert_eq!(names(&fleet).await, [""; 0]);
    assert!(!fleet.router.ready().await.0);
    for (spec, model) in [(prefill("p 0/a"), MODEL), (decode("d0"), "also-mock")] {
        let engine = fleet.join(spec).await;
        let mut body = engine.worker.clone();
        body["model"] = json!(model);
        let name = engine.name.clone();
        let (head, said) = Request::post(WORKERS, &body).json(fleet.addr()).await;
        assert_eq!(head.status, 201, "{said}");
        assert_eq!(said, json!({"model": MODEL, "name": name, "added": true}));
    }
    assert_eq!(names(&fleet).await, ["p 0/a", "d0"]);
    wait_until(
        async || if fleet.router.ready().await.0 { Ok(()) } else { Err("not ready".into()) },
    )
    .await;
    let (head, _) = fleet.router.complete(&completion(&prompt(1, 200), 4, false)).await;
    assert_eq!((head.status, head.path()), (200, "remote"));

    // Names that are no path segments as they are.
    for (method, draining) in [("POST", true), ("DELETE", false)] {
        let (head, said) = ask(&fleet, method, "/mock/p%200%2Fa/drain").await;
        assert_eq!(head.status, 200, "{said}");
        assert_eq!(said["draining"], draining);
        assert_eq!(list(&fleet).await[0]["draining"], draining);
    }
    let (head, said) = ask(&fleet, "DELETE", "/mock/p%200%2Fa").await;
    assert_eq!((head.status, &said["removed"]), (200, &json!(true)));
    assert_eq!(names(&fleet).await, ["d0"]);
    let metrics = fleet.router.metrics().await;
    assert_eq!(metrics.count("pointsman_worker_up", &[("worker", "p 0/a")]), 0);
    fleet.assert_nothing_leaks().await;
}

#[tokio::test]
async fn what_is_no_worker_is_refused_with_the_key_at_fault() {
    let fleet = Fleet::start([prefill("p0"), decode("d0")]).await;
    let url = fleet.get("d0").mock.url();
    let wrong = [
        (json!({"role": "decode", "url": url}), 400, "model"),
        (json!({"model": 3, "role": "decode", "url": url}), 400, "model"),
        (json!({"model": MODEL, "url": url}), 400, "role"),
        (json!({"model": MODEL, "role": "both", "url": url}), 400, "role"),
        (json!({"model": MODEL, "role": "decode"}), 400, "url"),
        (json!({"model": MODEL, "role": "decode", "url": "nowhere"}), 400, "url"),
        (json!({"model": MODEL, "role": "decode", "url": url, "ranks": 0}), 400, "ranks"),
        (json!({"model": MODEL, "role": "decode", "url": url, "block_siez": 1}), 400, "block_siez"),
        (json!({"model": MODEL, "role": "decode", "url": url, "engine": "openai"}), 400, "openai"),
        (
            json!({"model": MODEL, "role": "decode", "url": url, "api_key_file": "/etc/passwd"}),
            400,
            "api_key_file",
        ),
        (
            json!({"model": MODEL, "role": "decode", "url": url, "api_key_env": "HOME"}),
            400,
            "api_key_env",
        ),
        (json!([1]), 400, "object"),
        (json!({"model": "nobody", "role": "decode", "url": url}), 404, "nobody"),
        (json!({"model": MODEL, "role": "decode", "url": url, "name": "d0"}), 409, "d0"),
    ];
    for (body, status, word) in wrong {
        let (head, error) = Request::post(WORKERS, &body).json(fleet.addr()).await;
        assert_eq!(head.status, status, "{body}: {error}");
        let message = error_message(&error);
        assert!(message.contains(word), "{body}: {message}");
        assert!(!message.contains("root:"), "{message}");
    }
    let (head, error) = Request::raw(WORKERS, "{\"model\": ").json(fleet.addr()).await;
    assert_eq!(head.status, 400);
    assert!(error_message(&error).contains("line 1"), "it says where: {error}");
    assert_eq!(names(&fleet).await, ["p0", "d0"]);
}

#[tokio::test]
async fn who_is_not_there_cannot_be_drained_or_removed() {
    let fleet = Fleet::start([prefill("p0"), decode("d0")]).await;
    for path in ["/mock/nobody", "/nobody/d0"] {
        for (method, path) in [
            ("DELETE", path.to_owned()),
            ("POST", format!("{path}/drain")),
            ("DELETE", format!("{path}/drain")),
        ] {
            let (head, error) = ask(&fleet, method, &path).await;
            assert_eq!(head.status, 404, "{method} {path}");
            assert!(error_message(&error).contains("nobody"), "{error}");
        }
    }
    for (method, path) in [("PUT", "/mock/d0"), ("GET", "/mock/d0/drain"), ("DELETE", "")] {
        let (head, error) = ask(&fleet, method, path).await;
        assert_eq!(head.status, 405, "{method} {path}: {error}");
        assert!(head.header("allow").is_some());
    }
    let (head, _) = ask(&fleet, "POST", "/mock/d0/undrain").await;
    assert_eq!(head.status, 404);
    assert_eq!(names(&fleet).await, ["p0", "d0"]);
}

#[tokio::test]
async fn by_default_workers_can_be_looked_at_and_not_changed() {
    let over = json!({"admin": {"worker_api": false}});
    let fleet = Fleet::with([prefill("p0"), decode("d0")], over).await;
    assert_eq!(names(&fleet).await, ["p0", "d0"]);
    let body = json!({"model": MODEL, "role": "decode", "url": "http://127.0.0.1:1", "name": "d1"});
    let add = Request::post(WORKERS, &body).json(fleet.addr()).await;
    let remove = ask(&fleet, "DELETE", "/mock/d0").await;
    let drain = ask(&fleet, "POST", "/mock/d0/drain").await;
    for (head, error) in [add, remove, drain] {
        assert_eq!(head.status, 403);
        assert!(error_message(&error).contains("admin.worker_api"), "{error}");
    }
    assert_eq!(names(&fleet).await, ["p0", "d0"]);
    let (head, _) = fleet.router.complete(&completion(&prompt(1, 200), 4, false)).await;
    assert_eq!((head.status, head.path()), (200, "remote"));
}
