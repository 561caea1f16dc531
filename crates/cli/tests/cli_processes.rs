//! Commands that go on until they are told to end: what they print, what their flags do, and that
//! they end in good order.
#![allow(clippy::expect_used, clippy::panic, reason = "it is all test")]

mod command;
mod support;

use std::net::SocketAddr;
use std::process::Command;
use std::time::Duration;

use command::{Running, run};
use serde_json::{Value, json};
use support::Request;
use support::client::connect;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

/// How long an end may take where nothing runs.
const AT_ONCE: Duration = Duration::from_secs(2);

const READY: &str = "pointsman is ready on";
const ENGINE_READY: &str = "mock engine is ready on";

fn up(more: &[&str]) -> Running {
    Running::start(&[&["up", "--port", "0", "--speed", "inf"], more].concat(), &[], "Ctrl-C")
}

fn engine(more: &[&str]) -> Running {
    Running::start(&[&["engine", "--speed", "inf"], more].concat(), &[], "state")
}

async fn get(to: SocketAddr, path: &str) -> Value {
    let (head, json) = Request::get(path).json(to).await;
    assert_eq!(head.status, 200, "{path}: {json}");
    json
}

#[tokio::test]
async fn up_prints_where_everything_is_and_a_request_to_try() {
    let up = up(&[]);
    let addr = up.addr(READY);
    for name in ["prefill-0", "prefill-1", "decode-0", "decode-1"] {
        assert_eq!(get(up.addr(name), "/v1/models").await["data"][0]["id"], "mock");
    }
    let is_engine = |line: &&String| line.starts_with("  ") && line.contains(" http://");
    assert_eq!(up.greeting.iter().filter(is_engine).count(), 4);
    assert_eq!(up.told("metrics:"), format!("http://{addr}/metrics"));
    assert_eq!(up.told("workers:"), format!("http://{addr}/v1/pointsman/workers"));
    assert_eq!(Request::get("/metrics").send(addr).await.0.status, 200);
    let workers = get(addr, "/v1/pointsman/workers").await;
    assert_eq!(workers["workers"].as_array().map(Vec::len), Some(4));
    // The line to try, as a shell would take it; only the program is another one.
    let at = up.greeting.iter().position(|line| line.starts_with("try:")).expect("a line to try");
    let tried = format!("{}\n{}", &up.greeting[at]["try:".len()..], up.greeting[at + 1]);
    let tried = tried.trim_start().strip_prefix("curl ").expect("a call of curl");
    let shell = Command::new("sh").args(["-c", &format!("printf '%s\\n' {tried}")]).output();
    let words = String::from_utf8(shell.expect("a shell").stdout).expect("text");
    let words: Vec<&str> = words.lines().collect();
    let [url, "-H", "content-type: application/json", "-d", body, "-i"] = words[..] else {
        panic!("{words:?}");
    };
    let path = url.strip_prefix(&format!("http://{addr}")).expect("the router's URL");
    let (head, reply) = Request::raw(path, body).json(addr).await;
    assert_eq!((head.status, head.path()), (200, "remote"), "{reply}");
    assert!(reply["choices"][0]["message"]["content"].is_string());
}

#[tokio::test]
async fn the_flags_of_up_make_the_fleet() {
    let up = up(&[
        "--prefill",
        "1",
        "--decode",
        "3",
        "--unified",
        "1",
        "--model",
        "my/model",
        "--policy",
        "always_local",
        "--set",
        "routing.allow_path_override=true",
        "--set",
        "response_headers=false",
    ]);
    let addr = up.addr(READY);
    let workers = get(addr, "/v1/pointsman/workers").await;
    let names: Vec<&Value> = workers["workers"]
        .as_array()
        .expect("workers")
        .iter()
        .map(|worker| &worker["name"])
        .collect();
    assert_eq!(names, ["prefill-0", "decode-0", "decode-1", "decode-2", "unified-0"]);
    assert_eq!(get(addr, "/v1/models").await["data"][0]["id"], "my/model");
    let status = get(addr, "/v1/pointsman/status").await;
    assert_eq!(status["models"][0]["policy"], "always_local");
    let body = json!({"model": "my/model", "prompt": "x"});
    let (head, _) = Request::completion(&body).send(addr).await;
    assert_eq!((head.status, head.path()), (200, ""));
}

#[tokio::test]
async fn load_policies_work_in_the_embedded_fleet() {
    let up = up(&["--policy", "isl_or_load", "--set", "routing.prefill_busy_threshold=1"]);
    let status = get(up.addr(READY), "/v1/pointsman/status").await;
    assert_eq!(status["models"][0]["never_fires"], json!([]));
}

#[test]
fn a_fleet_that_makes_no_sense_does_not_start() {
    for (flags, words) in [
        (&["--prefill", "0"][..], "prefill and a decode engine"),
        (&["--decode", "0"], "prefill and a decode engine"),
        (&["--policy", "fastest"], "flag --policy"),
        (&["--policy", "prefill_load"], "prefill_busy_threshold"),
        (&["--set", "routing.polcy=x"], "routing.polcy"),
        (&["--speed", "0"], "speed"),
        (&["--speed", "nan"], "speed"),
    ] {
        let ended = run(&[&["up", "--port", "0"], flags].concat(), &[], "");
        assert_eq!(ended.code, Some(1), "{flags:?}: {ended:?}");
        assert!(ended.err.contains(words), "{flags:?}: {ended:?}");
        assert_eq!(ended.out, "");
    }
    for flags in [&["--prefill", "65"][..], &["--prefill", "-1"], &["--port", "x"], &["--nonsense"]]
    {
        assert_eq!(run(&[&["up"], flags].concat(), &[], "").code, Some(2), "{flags:?}");
    }
}

#[tokio::test]
async fn up_ends_at_once_and_well_on_either_signal() {
    for signal in ["INT", "TERM"] {
        let up = up(&[]);
        let addr = up.addr(READY);
        let body = json!({"model": "mock", "prompt": "some words", "stream": true});
        assert_eq!(Request::completion(&body).send(addr).await.0.status, 200);
        // A connection that is kept for further requests, and one that never had any.
        let mut kept = connect(addr).await.expect("it takes connections");
        kept.write_all(b"GET /health HTTP/1.1\r\nhost: r\r\n\r\n").await.expect("it is open");
        assert!(kept.read(&mut [0; 1024]).await.is_ok_and(|count| count > 0));
        let _silent = connect(addr).await.expect("it takes connections");
        let (status, took, log) = up.end(signal);
        assert_eq!(status.code(), Some(0), "{signal}: {log}");
        assert!(took < AT_ONCE, "{signal}: it took {took:?}\n{log}");
        assert!(!log.contains("panicked"), "{log}");
        assert!(connect(addr).await.is_err(), "somebody still listens");
    }
}

#[tokio::test]
async fn a_further_signal_does_not_wait_for_what_runs() {
    let up = Running::start(&["up", "--port", "0"], &[], "Ctrl-C");
    let addr = up.addr(READY);
    let body = json!({"model": "mock", "prompt": "go on", "max_tokens": 100_000, "stream": true});
    let mut stream = Request::completion(&body).open(addr).await;
    assert_eq!(stream.head().await.status, 200);
    up.signal("INT");
    support::wait_for("it takes no connections", async || connect(addr).await.err()).await;
    let (status, took, log) = up.end("INT");
    assert_eq!(status.code(), Some(0), "{log}");
    assert!(took < AT_ONCE, "it took {took:?}\n{log}");
    assert!(log.contains("asked again"), "{log}");
}

#[tokio::test]
async fn serve_and_engine_end_at_once_and_well_on_either_signal() {
    for signal in ["INT", "TERM"] {
        let unified = engine(&["--role", "unified"]);
        let dir = tempfile::tempdir().expect("a directory");
        let file = dir.path().join("pointsman.yaml");
        let worker = json!({"role": "unified", "url": unified.told(ENGINE_READY)});
        let model = json!({"name": "mock", "tokenizer": "builtin", "workers": [worker]});
        std::fs::write(&file, json!({"models": [model]}).to_string()).expect("a file");
        let file = file.to_str().expect("text");
        let router = Running::start(&["serve", "-c", file, "--port", "0"], &[], READY);
        let body = json!({"model": "mock", "prompt": "some words"});
        assert_eq!(Request::completion(&body).send(router.addr(READY)).await.0.status, 200);
        for process in [router, unified] {
            let (status, took, log) = process.end(signal);
            assert_eq!(status.code(), Some(0), "{signal}: {log}");
            assert!(took < AT_ONCE, "{signal}: it took {took:?}\n{log}");
        }
    }
}

#[tokio::test]
async fn the_flags_of_an_engine_are_what_it_says_of_itself() {
    let port = || {
        let free = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
        free.local_addr().expect("an address").port().to_string()
    };
    let (api, events, replay) = (port(), port(), port());
    let engine = engine(&[
        "--role",
        "decode",
        "--port",
        &api,
        "--model",
        "my/model",
        "--adapter",
        "a",
        "--adapter",
        "b",
        "--ranks",
        "1",
        "--block-size",
        "32",
        "--capacity-blocks",
        "123",
        "--max-num-batched-tokens",
        "512",
        "--max-model-len",
        "1000",
        "--lease-ms",
        "5000",
        "--kv-port",
        &events,
        "--replay-port",
        &replay,
        "--seed",
        "5",
    ]);
    assert_eq!(engine.told(ENGINE_READY), format!("http://127.0.0.1:{api}"));
    assert_eq!(engine.told("KV events"), format!("tcp://127.0.0.1:{events}"));
    assert_eq!(engine.told("replay"), format!("tcp://127.0.0.1:{replay}"));
    let to = engine.addr(ENGINE_READY);
    let models = get(to, "/v1/models").await;
    let ids: Vec<&Value> =
        models["data"].as_array().expect("models").iter().map(|m| &m["id"]).collect();
    assert_eq!(ids, ["my/model", "a", "b"]);
    assert_eq!(models["data"][0]["max_model_len"], 1000);
    let sources = get(to, "/kv_event_sources").await;
    assert_eq!(sources["0"]["endpoint"], format!("tcp://*:{events}"));
    let (_, metrics) = Request::get("/metrics").send(to).await;
    assert!(
        metrics.text().contains("block_size=\"32\"")
            && metrics.text().contains("num_gpu_blocks=\"123\"")
    );
    // The state is also told where the API cannot be closed by a fault.
    let control = engine.addr("GET");
    assert_ne!(control, to);
    assert_eq!(get(control, "/mock/stats").await["role"], "decode");
}

#[tokio::test]
async fn an_engine_has_the_faults_that_it_is_told() {
    let faults = json!({"rules": [{"leg": "local", "count": 1, "fault": "status", "status": 418}],
                        "metrics": {"kv_usage": 0.5}});
    let engine = engine(&[
        "--role",
        "unified",
        "--ranks",
        "2",
        "--no-kv-events",
        "--faults",
        &faults.to_string(),
    ]);
    assert!(
        !engine.greeting.iter().any(|line| line.contains("KV events")),
        "{:?}",
        engine.greeting
    );
    let to = engine.addr(ENGINE_READY);
    assert_eq!(get(to, "/kv_event_sources").await, json!({}));
    let body = json!({"model": "mock", "prompt": "x"});
    for status in [418, 200] {
        assert_eq!(Request::completion(&body).send(to).await.0.status, status);
    }
    let (_, metrics) = Request::get("/metrics").send(to).await;
    assert!(
        metrics.text().contains("vllm:kv_cache_usage_perc{engine=\"1\",model_name=\"mock\"} 0.5")
    );
    // And others while it runs.
    let down = json!({"rules": [{"fault": "status", "status": 503}]});
    let control = engine.told("POST").to_owned();
    assert!(control.ends_with("/mock/faults"), "{control}");
    let (head, _) = Request::post("/mock/faults", &down).json(engine.addr("POST")).await;
    assert_eq!(head.status, 200);
    assert_eq!(Request::completion(&body).send(to).await.0.status, 503);
}

#[test]
fn an_engine_that_makes_no_sense_does_not_start() {
    for (flags, words) in [
        (&["--faults", "{\"x\": 1}"][..], "--faults: unknown field `x`"),
        (&["--faults", "nonsense"], "--faults"),
        (&["--speed", "-1"], "speed"),
        (&["--block-size", "0"], "block_size"),
        (&["--ranks", "0"], "ranks"),
        (&["--capacity-blocks", "0"], "capacity_blocks"),
    ] {
        let args = [&["engine", "--role", "decode"], flags].concat();
        let ended = run(&args, &[], "");
        // Either the reader of flags or the engine says it.
        assert!(matches!(ended.code, Some(1 | 2)), "{flags:?}: {ended:?}");
        assert!(ended.err.contains(words) || ended.code == Some(2), "{flags:?}: {ended:?}");
    }
    assert_eq!(run(&["engine"], &[], "").code, Some(2));
    assert_eq!(run(&["engine", "--role", "both"], &[], "").code, Some(2));
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
    let port = taken.local_addr().expect("an address").port().to_string();
    let ended = run(&["engine", "--role", "decode", "--port", &port], &[], "");
    assert_eq!(ended.code, Some(1));
    assert!(ended.err.contains(&format!("127.0.0.1:{port}")), "{ended:?}");
}

#[tokio::test]
async fn explain_prints_the_record_of_a_request_in_a_file_or_on_standard_input() {
    let up = up(&[]);
    let url = format!("http://{}", up.addr(READY));
    let body = json!({"model": "mock", "messages": [{"role": "user", "content": "Which way?"}]});
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("request.json");
    std::fs::write(&file, body.to_string()).expect("a file");
    let file = file.to_str().expect("text");
    for (request, input) in [(file, String::new()), ("-", body.to_string())] {
        let ended = run(&["explain", "--url", &url, request], &[], &input);
        assert_eq!((ended.code, ended.err.as_str()), (Some(0), ""));
        let record: Value = serde_json::from_str(&ended.out).expect("JSON");
        assert_eq!((&record["path"], &record["model"]), (&json!("remote"), &json!("mock")));
        assert!(ended.out.lines().count() > 20, "for people to read: {}", ended.out);
    }
    let unknown = body.to_string().replace("mock", "nobody");
    let ended = run(&["explain", "--url", &url, "-"], &[], &unknown);
    assert_eq!(ended.code, Some(1));
    assert!(ended.out.contains("`nobody`"), "{ended:?}");
    let ended = run(&["explain", "--url", &url, "/nowhere"], &[], "");
    assert_eq!(ended.code, Some(1));
    assert!(ended.err.contains("/nowhere cannot be read"), "{ended:?}");
    // A URL with a path and a slash at its end names the same router.
    let ended = run(&["explain", "--url", &format!("{url}/"), file], &[], "");
    assert_eq!(ended.code, Some(0), "{ended:?}");
    drop(up);
    let ended = run(&["explain", "--url", &url, file], &[], "");
    assert_eq!(ended.code, Some(1));
    assert!(ended.err.contains(&url), "{ended:?}");
    assert_eq!(run(&["explain", "--url", "nonsense", file], &[], "").code, Some(1));
}
