//! vLLM workers with MooncakeConnector: both legs at once under one transfer, each way in which either can
//! fail, and what the router does where nobody names a prefill worker's engine.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod command;
mod support;

use std::time::Duration;

use pointsman_sim::mock::{Action, Connector, Cut, EngineConfig, Faults, Leg, MockEngine, Role};
use serde_json::{Value, json};
use support::fleet::{MODEL, chat, completion, prompt, rule, times, unwatched};
use support::{Fleet, Request, Spec, wait_for};

fn mooncake(spec: Spec) -> Spec {
    spec.engine(|engine| engine.connector = Connector::Mooncake)
}

fn prefill(name: &str) -> Spec {
    mooncake(support::prefill(name))
}

fn decode(name: &str) -> Spec {
    mooncake(support::decode(name))
}

fn request(seed: u32) -> Request {
    Request::completion(&completion(&prompt(seed, 200), 8, false))
}

fn remote(more: Value) -> Value {
    let mut settings = json!({"routing": {"policy": "always_remote"}});
    support::merge(&mut settings, more);
    settings
}

/// Settings of a router that meets faults in requests alone.
fn faulty(more: Value) -> Value {
    let mut settings = unwatched(json!({"timeouts": {"prefill": "600ms"}}));
    support::merge(&mut settings, more);
    remote(settings)
}

/// The hand-off parameters that an engine was sent.
fn params(fleet: &Fleet, worker: &str) -> Vec<Value> {
    let of = |request: &Value| request["json"]["kv_transfer_params"].clone();
    fleet.requests(worker).iter().map(of).filter(|params| !params.is_null()).collect()
}

/// What a bootstrap server answers.
async fn engines(fleet: &Fleet, worker: &str) -> Value {
    let at = ([127, 0, 0, 1], fleet.get(worker).mock.bootstrap_port()).into();
    Request::get("/query").json(at).await.1
}

#[tokio::test]
async fn both_legs_name_one_transfer_and_the_text_is_that_of_an_engine_alone() {
    let fleet = Fleet::with([prefill("p0"), decode("d0")], remote(json!({}))).await;
    for (seed, stream) in [(0, false), (1, true)] {
        let asked = completion(&prompt(seed, 200), 8, stream);
        let (head, body) = Request::completion(&asked).send(fleet.addr()).await;
        assert_eq!((head.status, head.path(), head.worker()), (200, "remote", "d0"), "{body:?}");
        fleet.assert_completed_as_alone(&asked, &body).await;
    }
    let asked = chat("tell me of rooms where two meet and neither waits for ever", 6, true);
    let (head, body) = Request::chat(&asked).send(fleet.addr()).await;
    assert_eq!((head.status, head.path()), (200, "remote"), "{body:?}");
    fleet.assert_streamed_as_alone("/v1/chat/completions", &asked, &body).await;

    let engine_id = engines(&fleet, "p0").await["0"]["engine_id"].clone();
    let port = fleet.get("p0").mock.bootstrap_port();
    let (to_prefill, to_decode) = (params(&fleet, "p0"), params(&fleet, "d0"));
    assert_eq!((to_prefill.len(), to_decode.len()), (3, 3));
    for (prefill, decode) in to_prefill.iter().zip(&to_decode) {
        assert_eq!(prefill["do_remote_decode"], json!(true));
        assert_eq!(decode["do_remote_prefill"], json!(true));
        assert_eq!(decode["remote_engine_id"], engine_id);
        assert_eq!(decode["remote_bootstrap_addr"], json!(format!("http://127.0.0.1:{port}")));
        assert_eq!(prefill["transfer_id"], decode["transfer_id"]);
    }
    let transfers: std::collections::HashSet<&str> =
        to_decode.iter().map(|params| params["transfer_id"].as_str().unwrap()).collect();
    assert_eq!(transfers.len(), 3);

    // By the engines' own counters every prompt was computed on one worker and fetched by the other.
    let (of_prefill, of_decode) = (fleet.stats("p0"), fleet.stats("d0"));
    assert!(of_decode["external_kv_transfer_tokens"].as_u64().unwrap() >= 400, "{of_decode}");
    assert!(of_prefill["local_compute_tokens"].as_u64().unwrap() >= 400, "{of_prefill}");
    assert_eq!((fleet.legs("d0", "decode_remote"), fleet.legs("d0", "local")), (3, 0));
    fleet.assert_nothing_leaks().await;
    let log = fleet.router.log();
    assert!(!log.contains("panicked"), "{log}");
}

#[tokio::test]
async fn the_engine_of_the_rank_that_prefills_is_named() {
    let ranked = |spec: Spec| spec.engine(|e| e.ranks = 2).worker(json!({"ranks": 2}));
    let fleet = Fleet::with([ranked(prefill("p0")), ranked(decode("d0"))], remote(json!({}))).await;
    let known = engines(&fleet, "p0").await;
    // Each takes long enough for the next one to find its rank busy.
    fleet.set_faults("p0", rule(Leg::Prefill, Action::SlowTokens { delay_ms: 300 }));
    let ask = async |seed| {
        let (head, reply) = request(seed).json(fleet.addr()).await;
        assert_eq!((head.status, head.path()), (200, "remote"), "{reply}");
    };
    tokio::join!(ask(0), ask(1), ask(2), ask(3));
    let mut ranks = std::collections::HashSet::new();
    let to_decode = params(&fleet, "d0");
    for to_prefill in fleet.requests("p0") {
        let rank = to_prefill["headers"]["x-data-parallel-rank"].as_str().unwrap().to_owned();
        let transfer = &to_prefill["json"]["kv_transfer_params"]["transfer_id"];
        let to_decode = to_decode.iter().find(|params| params["transfer_id"] == *transfer).unwrap();
        assert_eq!(to_decode["remote_engine_id"], known[&rank]["engine_id"]);
        ranks.insert(rank);
    }
    assert_eq!(ranks.len(), 2, "one rank did it all");
    fleet.assert_nothing_leaks().await;
}

#[tokio::test]
async fn a_client_cannot_name_a_transfer_of_its_own() {
    let fleet = Fleet::with([prefill("p0"), decode("d0")], remote(json!({}))).await;
    let mut asked = completion(&prompt(1, 200), 8, false);
    let clean = Request::completion(&asked);
    asked["kv_transfer_params"] = json!({"do_remote_prefill": true, "transfer_id": "xfer-mine",
        "remote_engine_id": "e", "remote_bootstrap_addr": "http://2.2.2.2:1"});
    let (head, reply) = Request::completion(&asked).json(fleet.addr()).await;
    assert_eq!((head.status, head.path()), (200, "remote"), "{reply}");
    fleet.assert_as_alone(&clean, &reply).await;
    assert_ne!(params(&fleet, "d0")[0]["transfer_id"], json!("xfer-mine"));
    fleet.assert_nothing_leaks().await;
}

// ---- the prefill leg fails -------------------------------------------------------------------

/// The decode worker is let go at once and computes the prompt itself.
async fn it_is_repeated_locally(faults: Faults, cause: &str) {
    let fleet = Fleet::with([prefill("p0"), decode("d0")], faulty(json!({}))).await;
    fleet.set_faults("p0", faults);
    for stream in [false, true] {
        let failures = fleet.failures("prefill", cause).await;
        let asked = completion(&prompt(u32::from(stream), 200), 8, stream);
        let (head, body) = Request::completion(&asked).send(fleet.addr()).await;
        assert_eq!((head.status, head.path(), head.worker()), (200, "local", "d0"), "{body:?}");
        fleet.assert_completed_as_alone(&asked, &body).await;
        if !stream {
            assert_eq!(head.reason(), "retry_local");
            assert_eq!(fleet.failures("prefill", cause).await, failures + 1);
        }
    }
    assert_eq!(fleet.failures("decode", "timeout").await, 0);
    assert_eq!(fleet.stats("d0")["external_kv_transfer_tokens"], json!(0));
    fleet.assert_nothing_leaks().await;
}

#[tokio::test]
async fn a_prefill_worker_that_is_dead_leaves_the_prompt_to_the_decode_worker() {
    it_is_repeated_locally(Faults { down: true, ..Faults::default() }, "connect").await;
}

#[tokio::test]
async fn a_prefill_worker_that_dies_with_the_request_leaves_it_to_the_decode_worker() {
    let cut = rule(Leg::Prefill, Action::CutBeforeHeaders { cut: Cut::Rst });
    it_is_repeated_locally(cut, "cut").await;
}

#[tokio::test]
async fn a_prefill_worker_that_answers_500_leaves_the_prompt_to_the_decode_worker() {
    let broken = rule(Leg::Prefill, Action::Status { status: 500, body: None });
    it_is_repeated_locally(broken, "server_error").await;
}

#[tokio::test]
async fn a_prefill_worker_that_is_overloaded_leaves_the_prompt_to_the_decode_worker() {
    let busy = rule(Leg::Prefill, Action::Status { status: 503, body: None });
    it_is_repeated_locally(busy, "overload").await;
}

#[tokio::test]
async fn a_prefill_worker_that_hangs_is_given_up_when_its_time_is_over() {
    it_is_repeated_locally(rule(Leg::Prefill, Action::HangBeforeHeaders), "timeout").await;
}

#[tokio::test]
async fn a_prefill_leg_that_ends_early_hands_nothing_over_and_is_not_waited_for() {
    it_is_repeated_locally(rule(Leg::Prefill, Action::EosAtOnce), "protocol").await;
}

#[tokio::test]
async fn a_prefill_worker_that_answers_with_nonsense_leaves_the_prompt_to_the_decode_worker() {
    for body in ["", "hello", r#"{"choices":[]}"#] {
        let body = Some(body.to_owned());
        let nonsense = rule(Leg::Prefill, Action::Status { status: 200, body });
        it_is_repeated_locally(nonsense, "protocol").await;
    }
}

#[tokio::test]
async fn another_prefill_worker_goes_before_the_local_path() {
    let specs = [prefill("p0"), prefill("p1"), decode("d0")];
    let fleet = Fleet::with(specs, faulty(json!({}))).await;
    fleet.set_faults("p0", rule(Leg::Prefill, Action::Status { status: 500, body: None }));
    let asked = request(1);
    let (head, reply) = asked.json(fleet.addr()).await;
    assert_eq!((head.path(), head.reason()), ("remote", "retry_prefill"), "{reply}");
    fleet.assert_as_alone(&asked, &reply).await;
    let [first, second] = ["p0", "p1"].map(|name| params(&fleet, name)[0]["transfer_id"].clone());
    assert_ne!(first, second);
    let last = params(&fleet, "d0").pop().expect("a decode leg");
    assert_eq!(last["transfer_id"], second);
    fleet.assert_nothing_leaks().await;
}

#[tokio::test]
async fn what_the_prefill_worker_refuses_is_the_clients_answer_at_once() {
    let fleet = Fleet::with([prefill("p0"), decode("d0")], faulty(json!({}))).await;
    fleet.set_faults("p0", rule(Leg::Prefill, Action::Status { status: 400, body: None }));
    for stream in [false, true] {
        let asked = completion(&prompt(1, 200), 8, stream);
        let (head, body) = Request::completion(&asked).send(fleet.addr()).await;
        assert_eq!((head.status, body.json()["error"]["code"].as_u64()), (400, Some(400)));
    }
    assert_eq!(fleet.legs("d0", "local"), 0);
    fleet.assert_nothing_leaks().await;
}

// ---- the decode leg fails --------------------------------------------------------------------

#[tokio::test]
async fn kv_that_cannot_be_fetched_is_computed_by_the_same_worker_before_the_client_sees_a_byte() {
    let fleet = Fleet::with([prefill("p0"), decode("d0")], faulty(json!({}))).await;
    // The router knows the engine; the decode worker cannot look it up any more.
    fleet.set_faults("p0", Faults { bootstrap_down: true, ..Faults::default() });
    for (at, stream) in [false, true].into_iter().enumerate() {
        let asked = completion(&prompt(u32::from(stream), 200), 8, stream);
        let (head, body) = Request::completion(&asked).send(fleet.addr()).await;
        let came = (head.status, head.path(), head.reason(), head.worker());
        assert_eq!(came, (200, "local", "retry_local", "d0"), "{body:?}");
        fleet.assert_completed_as_alone(&asked, &body).await;
        assert_eq!(fleet.failures("decode", "kv_load").await, at as u64 + 1);
    }
    assert_eq!(fleet.router.worker("d0").await.unwrap()["condition"], "up");
    // Who cannot be asked where the KV is cannot be told to let go either.
    let pinned = fleet.stats("p0")["pins"].as_u64().unwrap();
    fleet.assert_nothing_leaks_but_pins(pinned).await;
}

/// Another one does all of it, and the prefill worker keeps nothing for the first one.
async fn another_serves_it(faults: Faults, cause: &str) {
    let specs = [prefill("p0"), decode("d0"), decode("d1")];
    let more = json!({"timeouts": {"first_byte": "500ms", "stream_idle": "500ms"}});
    let fleet = Fleet::with(specs, faulty(more)).await;
    fleet.set_faults("d0", faults);
    let asked = completion(&prompt(1, 200), 8, true);
    let (head, body) = Request::completion(&asked).send(fleet.addr()).await;
    assert_eq!((head.status, head.path(), head.worker()), (200, "local", "d1"), "{body:?}");
    fleet.assert_streamed_as_alone("/v1/completions", &asked, &body).await;
    assert_eq!(fleet.failures("decode", cause).await, 1);
    fleet.assert_nothing_leaks().await;
}

#[tokio::test]
async fn a_decode_worker_that_is_dead_is_passed_over() {
    another_serves_it(Faults { down: true, ..Faults::default() }, "connect").await;
}

#[tokio::test]
async fn a_decode_worker_that_dies_with_the_request_is_passed_over() {
    let cut = Action::CutBeforeHeaders { cut: Cut::Rst };
    another_serves_it(times(1, Leg::Decode, cut), "cut").await;
}

#[tokio::test]
async fn a_decode_worker_that_hangs_is_passed_over_and_what_waits_for_it_is_released() {
    another_serves_it(times(1, Leg::Decode, Action::HangBeforeHeaders), "timeout").await;
}

#[tokio::test]
async fn what_the_decode_worker_refuses_is_the_clients_answer_and_the_prefill_leaves_nothing() {
    let fleet = Fleet::with([prefill("p0"), decode("d0")], faulty(json!({}))).await;
    fleet.set_faults("d0", times(1, Leg::Decode, Action::Status { status: 422, body: None }));
    let (head, body) = request(1).send(fleet.addr()).await;
    assert_eq!((head.status, body.json()["error"]["code"].as_u64()), (422, Some(422)));
    fleet.assert_nothing_leaks().await;
}

#[tokio::test]
async fn a_transfer_that_the_prefill_worker_does_not_know_is_given_up() {
    let hasty = |spec: Spec| spec.engine(|e| e.lease = Duration::from_millis(500));
    let fleet = Fleet::with([hasty(prefill("p0")), hasty(decode("d0"))], faulty(json!({}))).await;
    fleet.set_faults("p0", rule(Leg::Prefill, Action::OtherRoom));
    let asked = request(1);
    let (head, reply) = asked.json(fleet.addr()).await;
    assert_eq!((head.status, head.path(), head.worker()), (200, "local", "d0"), "{reply}");
    fleet.assert_as_alone(&asked, &reply).await;
    assert_eq!(fleet.failures("decode", "kv_load").await, 1);
    fleet.assert_nothing_leaks().await;
}

#[tokio::test]
async fn hand_offs_go_on_where_some_work_in_between() {
    let breaker = json!({"routing": {"breaker": {"failures": 2, "open": "1h", "open_max": "1h"}}});
    let fleet = Fleet::with([prefill("p0"), decode("d0")], faulty(breaker)).await;
    for seed in 0..6 {
        if seed % 2 == 0 {
            fleet.set_faults(
                "d0",
                times(1, Leg::Decode, Action::Status { status: 500, body: None }),
            );
        }
        let (head, reply) = request(seed).json(fleet.addr()).await;
        assert_eq!(head.path(), if seed % 2 == 0 { "local" } else { "remote" }, "{reply}");
    }
    fleet.assert_nothing_leaks().await;
}

#[tokio::test]
async fn hand_offs_that_fail_in_a_row_end_for_a_while() {
    let breaker = json!({"routing": {"breaker": {"failures": 2, "open": "1h", "open_max": "1h"}}});
    let fleet = Fleet::with([prefill("p0"), decode("d0")], faulty(breaker)).await;
    fleet.set_faults("d0", rule(Leg::Decode, Action::Status { status: 500, body: None }));
    for seed in 0..4 {
        let (head, reply) = request(seed).json(fleet.addr()).await;
        let reason = if seed < 2 { "retry_local" } else { "no_prefill" };
        assert_eq!((head.path(), head.reason()), ("local", reason), "{reply}");
    }
    assert_eq!(params(&fleet, "p0").len(), 2);
}

#[tokio::test]
async fn a_client_that_leaves_ends_both_legs() {
    // Both are under way: the prefill worker computes, the decode worker waits for it.
    let more = json!({"timeouts": {"prefill": "1h"}});
    let fleet = Fleet::with([prefill("p0"), decode("d0")], faulty(more)).await;
    fleet.set_faults("p0", rule(Leg::Prefill, Action::SlowTokens { delay_ms: 3_600_000 }));
    let exchange = request(1).open(fleet.addr()).await;
    wait_for("both legs", async || {
        let waits = |name: &str| fleet.stats(name)["in_flight"] == 1;
        (waits("p0") && waits("d0")).then_some(())
    })
    .await;
    drop(exchange);
    fleet.assert_nothing_leaks().await;
    // And one that leaves in the middle of its stream.
    fleet.set_faults("p0", Faults::default());
    fleet.set_faults("d0", rule(Leg::Decode, Action::SlowTokens { delay_ms: 50 }));
    let asked = Request::completion(&completion(&prompt(2, 200), 200, true));
    let mut exchange = asked.open(fleet.addr()).await;
    exchange.tokens(2).await;
    drop(exchange);
    fleet.assert_nothing_leaks().await;
}

// ---- engines and their names -----------------------------------------------------------------

#[tokio::test]
async fn an_engine_that_was_started_again_is_called_by_its_other_name() {
    let mut fleet = Fleet::with([prefill("p0"), decode("d0")], remote(json!({}))).await;
    assert_eq!(request(1).json(fleet.addr()).await.0.path(), "remote");
    let before = engines(&fleet, "p0").await["0"]["engine_id"].clone();
    let killed = fleet.kill("p0").await;
    wait_for("the worker to be down", async || {
        (fleet.router.worker("p0").await?["condition"] != "up").then_some(())
    })
    .await;
    fleet.revive(killed, false).await;
    let after = engines(&fleet, "p0").await["0"]["engine_id"].clone();
    assert_ne!(before, after);
    let mut seed = 2;
    wait_for("the remote path", async || {
        seed += 1;
        let (head, reply) = request(seed).json(fleet.addr()).await;
        assert_eq!(head.status, 200, "{reply}");
        (head.path() == "remote").then_some(())
    })
    .await;
    assert_eq!(params(&fleet, "d0").last().unwrap()["remote_engine_id"], after);
    fleet.assert_nothing_leaks().await;
}

#[tokio::test]
async fn a_name_that_is_out_of_date_costs_a_repetition_and_no_answer() {
    let blind = |spec: Spec| spec.worker(json!({"kv_events": "off"}));
    let mut fleet =
        Fleet::with([blind(prefill("p0")), blind(decode("d0"))], faulty(json!({}))).await;
    let killed = fleet.kill("p0").await;
    fleet.revive(killed, false).await;
    let asked = request(1);
    let (head, reply) = asked.json(fleet.addr()).await;
    assert_eq!((head.status, head.path(), head.reason()), (200, "local", "retry_local"), "{reply}");
    fleet.assert_as_alone(&asked, &reply).await;
    assert_eq!(fleet.failures("decode", "kv_load").await, 1);
    fleet.assert_no_violation();
}

#[tokio::test]
async fn without_an_engine_that_is_named_all_goes_local_until_there_is_one() {
    let silent = Faults { bootstrap_down: true, ..Faults::default() };
    let specs = [prefill("p0").faults(silent), decode("d0")];
    let fleet = Fleet::with(specs, remote(json!({}))).await;
    let (head, reply) = request(1).json(fleet.addr()).await;
    assert_eq!((head.path(), head.reason()), ("local", "no_prefill"), "{reply}");
    assert_eq!(fleet.requests("p0").len(), 0);
    let told = fleet.router.worker("p0").await.unwrap();
    let port = fleet.get("p0").mock.bootstrap_port();
    let words = format!(
        "`p0` can hand no prompts over, because no Mooncake engine is known at \
         http://127.0.0.1:{port}/query"
    );
    assert!(told["problem"].as_str().unwrap().starts_with(&words), "{told}");
    assert!(fleet.router.log().contains(&words), "{}", fleet.router.log());
    assert_eq!(fleet.router.worker("d0").await.unwrap()["problem"], Value::Null);
    fleet.set_faults("p0", Faults::default());
    wait_for("the engine's name", async || {
        fleet.router.worker("p0").await?["problem"].is_null().then_some(())
    })
    .await;
    let (head, reply) = request(2).json(fleet.addr()).await;
    assert_eq!((head.path(), head.reason()), ("remote", "always_remote"), "{reply}");
    fleet.assert_nothing_leaks().await;
}

async fn check(prefill: &MockEngine, decode: &MockEngine) -> command::Ended {
    let worker = |role: &str, engine: &MockEngine| json!({"name": format!("{role}-0"), "role": role, "url": engine.url(), "kv_connector": "mooncake"});
    let mut workers = [worker("prefill", prefill), worker("decode", decode)];
    workers[0]["bootstrap_port"] = json!(prefill.bootstrap_port());
    let config = json!({"models": [{"name": MODEL, "tokenizer": "builtin", "workers": workers}]});
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("pointsman.yaml");
    std::fs::write(&file, config.to_string()).unwrap();
    let file = file.to_string_lossy().into_owned();
    let checked = move || command::run(&["check", "-c", &file], &[], "");
    tokio::task::spawn_blocking(checked).await.unwrap()
}

#[tokio::test]
async fn check_asks_the_bootstrap_server_too() {
    let engine = |role| {
        let connector = Connector::Mooncake;
        let config = EngineConfig { connector, model: MODEL.into(), ..EngineConfig::of(role) };
        MockEngine::start(config)
    };
    let (prefill, decode) =
        (engine(Role::Prefill).await.unwrap(), engine(Role::Decode).await.unwrap());
    let ended = check(&prefill, &decode).await;
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert!(ended.out.contains("both legs at once"), "{}", ended.out);
    assert!(!ended.out.contains("PROBLEM"), "{}", ended.out);
    prefill.set_faults(Faults { bootstrap_down: true, ..Faults::default() });
    let ended = check(&prefill, &decode).await;
    assert_eq!(ended.code, Some(1), "{ended:?}");
    let words =
        "PROBLEM  `prefill-0` can hand no prompts over, because no Mooncake engine is known";
    assert!(ended.out.contains(words), "{}", ended.out);
    assert!(ended.out.contains("VLLM_MOONCAKE_BOOTSTRAP_PORT"), "{}", ended.out);
}

#[tokio::test]
async fn a_mock_engine_of_the_command_line_names_itself_at_its_bootstrap_port() {
    let arguments = ["engine", "--role", "prefill", "--kv-connector", "mooncake"];
    let start = move || command::Running::start(&arguments, &[], "state");
    let engine = tokio::task::spawn_blocking(start).await.unwrap();
    let (head, known) = Request::get("/query").json(engine.addr("bootstrap")).await;
    assert_eq!(head.status, 200);
    let entry = &known["0"];
    assert!(entry["engine_id"].as_str().is_some_and(|id| id.len() == 36), "{known}");
    assert!(entry["worker_addr"]["0"]["0"].as_str().unwrap().starts_with("tcp://127.0.0.1:"));
}
