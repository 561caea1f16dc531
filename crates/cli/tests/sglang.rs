//! A fleet of SGLang workers: both legs at once, in one room; each way in which either can fail; what
//! such a fleet cannot do; and its own endpoint.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod command;
mod support;

use std::time::Duration;

use pointsman_sim::mock::{Action, Cut, Dialect, EngineConfig, Faults, Leg, MockEngine, Role};
use serde_json::{Value, json};
use support::fleet::{MODEL, chat, completion, prompt, rule, times, unwatched};
use support::{Fleet, Head, Request, Spec, wait_for, wait_until};

fn prefill(name: &str) -> Spec {
    support::prefill(name).sglang()
}

fn decode(name: &str) -> Spec {
    support::decode(name).sglang()
}

fn unified(name: &str) -> Spec {
    support::unified(name).sglang()
}

fn request(seed: u32) -> Request {
    Request::completion(&completion(&prompt(seed, 200), 8, false))
}

fn without_bootstrap(body: &Value) -> Value {
    let mut body = body.clone();
    let members = body.as_object_mut().unwrap();
    for name in ["bootstrap_host", "bootstrap_port", "bootstrap_room"] {
        assert!(members.remove(name).is_some(), "no {name} in {members:?}");
    }
    body
}

#[tokio::test]
async fn a_request_goes_to_both_workers_at_once_with_the_place_where_they_meet() {
    let fleet = Fleet::start([prefill("p0"), decode("d0")]).await;
    for (at, stream) in [false, true].into_iter().enumerate() {
        let asked = completion(&prompt(at as u32, 200), 8, stream);
        let (head, body) = Request::completion(&asked).send(fleet.addr()).await;
        assert_eq!((head.status, head.path(), head.worker()), (200, "remote", "d0"), "{body:?}");
        fleet.assert_completed_as_alone(&asked, &body).await;
        let (to_prefill, to_decode) = (fleet.bodies("p0"), fleet.bodies("d0"));
        assert_eq!(to_prefill[at], to_decode[at]);
        assert_eq!(without_bootstrap(&to_prefill[at]), asked);
        // Nobody told the port to the router but the engine.
        let port = fleet.get("p0").mock.bootstrap_port();
        assert_eq!(to_decode[at]["bootstrap_port"], json!(port));
        assert_eq!(to_decode[at]["bootstrap_host"], json!("127.0.0.1"));
    }
    let rooms: Vec<u64> =
        fleet.bodies("d0").iter().map(|body| body["bootstrap_room"].as_u64().unwrap()).collect();
    assert!(rooms[0] != rooms[1] && rooms.iter().all(|room| *room < 1 << 63), "{rooms:?}");
    let asked = chat("tell me of rooms where two meet and neither waits for ever", 6, true);
    let (head, body) = Request::chat(&asked).send(fleet.addr()).await;
    assert_eq!(head.status, 200);
    fleet.assert_streamed_as_alone("/v1/chat/completions", &asked, &body).await;
    fleet.assert_nothing_leaks().await;
    let log = fleet.router.log();
    assert!(!log.contains("panicked"), "{log}");
}

#[tokio::test]
async fn ranks_are_named_to_both_workers() {
    let ranked = |spec: Spec| spec.engine(|e| e.ranks = 2).worker(json!({"ranks": 2}));
    let fleet = Fleet::start([ranked(prefill("p0")), ranked(decode("d0"))]).await;
    for seed in 0..6 {
        let (head, reply) = request(seed).json(fleet.addr()).await;
        assert_eq!((head.status, head.path()), (200, "remote"), "{reply}");
    }
    for (to_prefill, to_decode) in fleet.bodies("p0").iter().zip(fleet.bodies("d0")) {
        let rank = to_prefill["routed_dp_rank"].as_u64().unwrap();
        assert_eq!(to_prefill["bootstrap_room"].as_u64().unwrap() % 2, rank);
        assert_eq!(to_decode["disagg_prefill_dp_rank"].as_u64(), Some(rank));
        assert!(to_decode["routed_dp_rank"].as_u64().unwrap() < 2);
    }
    fleet.assert_nothing_leaks().await;
}

#[tokio::test]
async fn where_decode_workers_meet_a_prefill_worker_can_be_configured() {
    // Nobody is there: the leg is the thing.
    let named = prefill("p0").worker(json!({"bootstrap_host": "p0.cluster", "bootstrap_port": 9}));
    let fleet = Fleet::with([named, decode("d0")], settings(json!({}))).await;
    let (head, body) = request(1).send(fleet.addr()).await;
    assert_eq!(head.status, 503, "{body:?}");
    let sent = &fleet.bodies("d0")[0];
    assert_eq!(
        (&sent["bootstrap_host"], &sent["bootstrap_port"]),
        (&json!("p0.cluster"), &json!(9))
    );
}

#[tokio::test]
async fn what_a_decode_worker_fetches_is_what_is_reckoned_with() {
    let whole = decode("d1").worker(json!({"skips_cached_blocks": false}));
    let fleet = Fleet::start([prefill("p0"), decode("d0"), whole]).await;
    let turn = prompt(1, 400);
    // Both have seen it.
    for held in ["d0", "d1"] {
        let other = if held == "d0" { "d1" } else { "d0" };
        fleet.set_faults(other, Faults { down: true, ..Faults::default() });
        fleet.set_faults(held, Faults::default());
        let asked = Request::completion(&completion(&turn, 4, false));
        let (head, reply) = asked.json(fleet.addr()).await;
        assert_eq!((head.status, head.worker()), (200, held), "{reply}");
    }
    for worker in ["d0", "d1"] {
        fleet.set_faults(worker, Faults::default());
    }
    let asked = Request::post("/v1/pointsman/explain", &completion(&turn, 4, false));
    wait_until(async || {
        let (_, record) = asked.json(fleet.addr()).await;
        let of = |worker: &str, what: &str| {
            let candidates = record["candidates"].as_array().unwrap().iter();
            let own = candidates.filter(|candidate| candidate["worker"] == worker);
            own.map(|own| own.pointer(what).and_then(Value::as_f64).unwrap()).next().unwrap()
        };
        let overlaps = [of("d0", "/overlap_tokens"), of("d1", "/overlap_tokens")];
        if overlaps.iter().any(|tokens| *tokens < 400.0) {
            return Err(format!("{overlaps:?}"));
        }
        let transfers = [of("d0", "/outlook/transfer"), of("d1", "/outlook/transfer")];
        assert!(transfers[0] < transfers[1], "{transfers:?}: {record}");
        Ok(())
    })
    .await;
}

#[tokio::test]
async fn a_client_cannot_name_a_room_of_its_own() {
    let fleet = Fleet::start([prefill("p0"), decode("d0")]).await;
    let mut asked = completion(&prompt(1, 200), 8, false);
    let clean = Request::completion(&asked);
    for (name, value) in [
        ("bootstrap_host", json!("2.2.2.2")),
        ("bootstrap_port", json!(1)),
        ("bootstrap_room", json!(7)),
        ("routed_dp_rank", json!(5)),
    ] {
        asked[name] = value;
    }
    let (head, reply) = Request::completion(&asked).json(fleet.addr()).await;
    assert_eq!((head.status, head.path()), (200, "remote"), "{reply}");
    fleet.assert_as_alone(&clean, &reply).await;
    fleet.assert_nothing_leaks().await;
}

// ---- the prefill leg fails -------------------------------------------------------------------

fn settings(more: Value) -> Value {
    let mut settings = unwatched(json!({"timeouts": {"prefill": "600ms"}}));
    support::merge(&mut settings, more);
    settings
}

async fn pairs(faults: Faults) -> Fleet {
    let fleet =
        Fleet::with([prefill("p0"), prefill("p1"), decode("d0")], settings(json!({}))).await;
    fleet.set_faults("p0", faults);
    fleet
}

/// The other prefill worker does it, and the decode worker does not wait for the one that failed.
async fn another_prefills(faults: Faults, cause: &str) {
    let fleet = pairs(faults).await;
    for stream in [false, true] {
        let failures = fleet.failures("prefill", cause).await;
        let asked = completion(&prompt(u32::from(stream), 200), 8, stream);
        let (head, body) = Request::completion(&asked).send(fleet.addr()).await;
        assert_eq!((head.status, head.path()), (200, "remote"), "{body:?}");
        fleet.assert_completed_as_alone(&asked, &body).await;
        if !stream {
            assert_eq!(head.reason(), "retry_prefill");
            assert_eq!(fleet.failures("prefill", cause).await, failures + 1);
        }
    }
    assert_eq!(fleet.failures("decode", "timeout").await, 0);
    fleet.assert_nothing_leaks().await;
}

/// Where there is no other one, the client is told, soon, and the decode worker is free again.
async fn alone_it_is_told(faults: Faults, words: &str) {
    let fleet = Fleet::with([prefill("p0"), decode("d0")], settings(json!({}))).await;
    fleet.set_faults("p0", faults);
    let (head, body) = request(1).send(fleet.addr()).await;
    assert_eq!(head.status, 503, "{body:?}");
    assert!(body.error().contains(words), "{body:?}");
    fleet.assert_nothing_leaks().await;
}

#[tokio::test]
async fn a_prefill_worker_that_is_dead_is_passed_over_and_the_decode_worker_let_go() {
    let down = Faults { down: true, ..Faults::default() };
    tokio::join!(
        another_prefills(down.clone(), "connect"),
        alone_it_is_told(down, "`p0` could not be reached")
    );
}

#[tokio::test]
async fn a_prefill_worker_that_dies_with_the_request_is_passed_over() {
    let cut = rule(Leg::Prefill, Action::CutBeforeHeaders { cut: Cut::Rst });
    tokio::join!(
        another_prefills(cut.clone(), "cut"),
        alone_it_is_told(cut, "`p0` cut its answer off")
    );
}

#[tokio::test]
async fn a_prefill_worker_that_answers_500_is_passed_over() {
    let broken = rule(Leg::Prefill, Action::Status { status: 500, body: None });
    tokio::join!(
        another_prefills(broken.clone(), "server_error"),
        alone_it_is_told(broken, "`p0` answered 500")
    );
}

#[tokio::test]
async fn a_prefill_worker_that_answers_with_nonsense_is_passed_over() {
    for body in ["", "hello", "{}", r#"{"choices":[]}"#, "[]"] {
        let body = Some(body.to_owned());
        let nonsense = rule(Leg::Prefill, Action::Status { status: 200, body });
        another_prefills(nonsense, "protocol").await;
    }
}

#[tokio::test]
async fn a_prefill_worker_that_is_overloaded_is_passed_over() {
    let busy = rule(Leg::Prefill, Action::Status { status: 503, body: None });
    another_prefills(busy, "overload").await;
}

#[tokio::test]
async fn a_prefill_worker_that_hangs_is_passed_over_when_its_time_is_up() {
    another_prefills(rule(Leg::Prefill, Action::HangBeforeHeaders), "timeout").await;
}

#[tokio::test]
async fn what_the_prefill_worker_refuses_is_the_clients_answer_at_once() {
    let fleet = pairs(rule(Leg::Prefill, Action::Status { status: 400, body: None })).await;
    for stream in [false, true] {
        fleet.set_faults("p1", rule(Leg::Prefill, Action::Status { status: 400, body: None }));
        let asked = completion(&prompt(1, 200), 8, stream);
        let (head, body) = Request::completion(&asked).send(fleet.addr()).await;
        assert_eq!(head.status, 400);
        // As SGLang has it: no key around it.
        let json = body.json();
        assert_eq!(
            (&json["object"], json["code"].as_u64()),
            (&json!("error"), Some(400)),
            "{json}"
        );
    }
    assert_eq!(fleet.requests("p0").len() + fleet.requests("p1").len(), 2, "tried again");
    fleet.assert_nothing_leaks().await;
}

// ---- the decode leg fails --------------------------------------------------------------------

async fn another_decodes(faults: Faults, cause: &str) {
    let specs = [prefill("p0"), decode("d0"), decode("d1")];
    let more =
        json!({"timeouts": {"first_byte": "500ms", "stream_idle": "500ms", "prefill": "5s"}});
    let fleet = Fleet::with(specs, settings(more)).await;
    fleet.set_faults("d0", faults);
    let asked = completion(&prompt(1, 200), 8, true);
    let (head, body) = Request::completion(&asked).send(fleet.addr()).await;
    assert_eq!((head.status, head.path(), head.worker()), (200, "remote", "d1"), "{body:?}");
    fleet.assert_streamed_as_alone("/v1/completions", &asked, &body).await;
    assert_eq!(fleet.failures("decode", cause).await, 1);
    // The first prefill leg, if it went out at all, was ended: it would have waited for ever.
    assert!((1..=2).contains(&fleet.requests("p0").len()));
    fleet.assert_nothing_leaks().await;
}

#[tokio::test]
async fn a_decode_worker_that_is_dead_is_passed_over_and_the_prefill_worker_let_go() {
    another_decodes(Faults { down: true, ..Faults::default() }, "connect").await;
}

#[tokio::test]
async fn a_decode_worker_that_dies_with_the_request_is_passed_over() {
    another_decodes(rule(Leg::Decode, Action::CutBeforeHeaders { cut: Cut::Rst }), "cut").await;
}

#[tokio::test]
async fn a_decode_worker_that_is_overloaded_is_passed_over() {
    another_decodes(rule(Leg::Decode, Action::Status { status: 503, body: None }), "overload")
        .await;
}

#[tokio::test]
async fn a_decode_worker_that_answers_with_nonsense_is_passed_over() {
    for body in ["", "hello", r#"{"choices":[{"index":0,"text":"no stream"}]}"#] {
        let body = Some(body.to_owned());
        let nonsense = rule(Leg::Decode, Action::Status { status: 200, body });
        another_decodes(nonsense, "protocol").await;
    }
}

#[tokio::test]
async fn a_decode_worker_that_hangs_is_passed_over() {
    another_decodes(rule(Leg::Decode, Action::HangBeforeHeaders), "timeout").await;
}

#[tokio::test]
async fn a_decode_worker_that_cannot_fetch_the_kv_is_held_against_nobody() {
    let failed = rule(Leg::Decode, Action::Status { status: 500, body: None });
    another_decodes(failed, "kv_load").await;
}

#[tokio::test]
async fn what_the_decode_worker_refuses_is_the_clients_answer_and_ends_the_prefill() {
    let fleet = Fleet::with([prefill("p0"), decode("d0")], settings(json!({}))).await;
    fleet.set_faults("d0", rule(Leg::Decode, Action::Status { status: 422, body: None }));
    let (head, body) = request(1).send(fleet.addr()).await;
    assert_eq!((head.status, body.json()["code"].as_u64()), (422, Some(422)));
    fleet.assert_nothing_leaks().await;
}

#[tokio::test]
async fn a_decode_worker_that_dies_in_its_stream_ends_it_with_an_error_event() {
    let fleet = Fleet::with([prefill("p0"), decode("d0")], settings(json!({}))).await;
    let cut = Action::CutMidStream { after_tokens: 3, cut: Cut::Rst };
    fleet.set_faults("d0", rule(Leg::Decode, cut));
    let asked = completion(&prompt(1, 200), 16, true);
    let (head, body) = Request::completion(&asked).send(fleet.addr()).await;
    assert_eq!(head.status, 200);
    let chunks = body.chunks();
    assert_eq!(chunks[chunks.len() - 1]["error"]["code"], json!(502), "{body:?}");
    assert!(!body.is_done());
    fleet.assert_nothing_leaks().await;
}

#[tokio::test]
async fn legs_that_wait_in_different_rooms_are_given_up_and_sent_anew() {
    let hasty = |spec: Spec| spec.engine(|e| e.lease = Duration::from_millis(500));
    let specs =
        [hasty(prefill("p0")), hasty(prefill("p1")), hasty(decode("d0")), hasty(decode("d1"))];
    let fleet = Fleet::with(specs, unwatched(json!({}))).await;
    for name in ["p0", "p1"] {
        fleet.set_faults(name, times(1, Leg::Prefill, Action::OtherRoom));
    }
    fleet.set_faults("p1", Faults::default());
    for seed in 0..2 {
        let asked = request(seed);
        let (head, reply) = asked.json(fleet.addr()).await;
        assert_eq!((head.status, head.path()), (200, "remote"), "{reply}");
        fleet.assert_as_alone(&asked, &reply).await;
    }
    let failed =
        fleet.failures("prefill", "server_error").await + fleet.failures("decode", "kv_load").await;
    assert_eq!(failed, 1);
    fleet.assert_nothing_leaks().await;
}

#[tokio::test]
async fn a_reply_that_ends_with_its_first_token_is_whole() {
    let fleet = Fleet::start([prefill("p0"), decode("d0")]).await;
    for name in ["p0", "d0"] {
        fleet.set_faults(name, rule(Leg::Any, Action::EosAtOnce));
    }
    for stream in [false, true] {
        let asked = completion(&prompt(u32::from(stream), 200), 8, stream);
        let (head, body) = Request::completion(&asked).send(fleet.addr()).await;
        assert_eq!((head.status, head.path()), (200, "remote"), "{body:?}");
        let choice = match stream {
            true => body.chunks()[0]["choices"][0].clone(),
            false => body.json()["choices"][0].clone(),
        };
        assert_eq!((&choice["text"], &choice["finish_reason"]), (&json!(""), &json!("stop")));
        assert!(!stream || body.is_done(), "{body:?}");
    }
    fleet.assert_nothing_leaks().await;
}

#[tokio::test]
async fn a_client_that_leaves_ends_both_legs() {
    let fleet = Fleet::with([prefill("p0"), decode("d0")], unwatched(json!({}))).await;
    // The decode worker waits in vain, as does the prefill worker.
    fleet.set_faults("p0", rule(Leg::Prefill, Action::OtherRoom));
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

// ---- what such a fleet cannot do, and who can ------------------------------------------------

fn wishes() -> Value {
    json!({"routing": {"allow_path_override": true}})
}

fn wish(request: Request, path: &str) -> Request {
    request.header("x-pointsman-path", path)
}

#[tokio::test]
async fn a_wish_for_the_local_path_gets_a_clear_400_where_no_worker_has_one() {
    let fleet = Fleet::with([prefill("p0"), decode("d0")], wishes()).await;
    let (head, body) = wish(request(1), "local").send(fleet.addr()).await;
    assert_eq!(head.status, 400);
    assert!(body.error().contains("local"), "{body:?}");
    let all = fleet.requests("d0").len() + fleet.requests("p0").len();
    assert_eq!(all, 0, "no engine was asked");
}

#[tokio::test]
async fn a_unified_worker_takes_what_the_pairs_cannot() {
    let fleet = Fleet::with([prefill("p0"), decode("d0"), unified("u0")], wishes()).await;
    let asked = request(1);
    let (head, reply) = wish(asked.clone(), "local").json(fleet.addr()).await;
    assert_eq!((head.status, head.path(), head.worker()), (200, "local", "u0"), "{reply}");
    fleet.assert_as_alone(&asked, &reply).await;
    let mut choices = completion(&prompt(2, 64), 4, false);
    choices["n"] = json!(2);
    let (head, _) = Request::completion(&choices).json(fleet.addr()).await;
    assert_eq!((head.status, head.worker()), (200, "u0"));
    // Nothing of a hand-off goes to it.
    assert_eq!(fleet.bodies("u0")[1], choices);
    let (head, _) = wish(request(3), "remote").json(fleet.addr()).await;
    assert_eq!((head.path(), head.worker()), ("remote", "d0"));
    fleet.assert_nothing_leaks().await;
}

#[tokio::test]
async fn a_decode_worker_that_says_it_prefills_does_so_when_told() {
    let able = |spec: Spec| spec.engine(|engine| engine.conditional_agg = true);
    let fleet = Fleet::with([prefill("p0"), able(decode("d0"))], wishes()).await;
    let asked = request(1);
    let (head, reply) = wish(asked.clone(), "local").json(fleet.addr()).await;
    assert_eq!((head.status, head.path(), head.worker()), (200, "local", "d0"), "{reply}");
    fleet.assert_as_alone(&asked, &reply).await;
    assert_eq!(fleet.bodies("d0")[0]["do_local_prefill"], json!(true));
    // A client cannot say so.
    let mut forged = completion(&prompt(2, 200), 4, false);
    forged["do_local_prefill"] = json!(true);
    let (head, _) = wish(Request::completion(&forged), "remote").json(fleet.addr()).await;
    assert_eq!((head.status, head.path()), (200, "remote"));
    assert!(fleet.bodies("d0")[1].get("do_local_prefill").is_none());
    fleet.assert_nothing_leaks().await;
}

#[tokio::test]
async fn the_next_turn_goes_where_its_prefix_is_by_signed_events() {
    let able = |spec: Spec| spec.engine(|engine| engine.conditional_agg = true);
    let fleet = Fleet::start([prefill("p0"), able(decode("d0"))]).await;
    let turn = prompt(1, 400);
    let (head, _) = Request::completion(&completion(&turn, 8, false)).json(fleet.addr()).await;
    assert_eq!(head.path(), "remote");
    wait_until(async || {
        let worker = fleet.router.worker("d0").await.unwrap();
        match worker["index_blocks"].as_u64() {
            Some(25..) => Ok(()),
            _ => Err(format!("{worker}")),
        }
    })
    .await;
    let mut next = turn.clone();
    next.extend(prompt(2, 30));
    let (head, _) = Request::completion(&completion(&next, 8, false)).json(fleet.addr()).await;
    assert_eq!((head.path(), head.reason()), ("local", "eff_isl_under"));
    fleet.assert_nothing_leaks().await;
}

#[tokio::test]
async fn what_a_worker_says_of_itself_is_known() {
    let fleet = Fleet::start([prefill("p0"), decode("d0")]).await;
    let worker = fleet.router.worker("d0").await.unwrap();
    assert_eq!((&worker["engine"], &worker["version"]), (&json!("sglang"), &json!("0.32.0")));
    assert_eq!((&worker["block_size"], &worker["capacity_blocks"]), (&json!(16), &json!(40_000)));
    assert_eq!(
        worker["capabilities"],
        json!({"local_prefill": false, "events": "all", "skips_cached_blocks": true,
               "legs": "together", "takes_ids": "completions"})
    );
}

#[tokio::test]
async fn the_load_that_a_worker_tells_is_read() {
    let timed = |spec: Spec| spec.engine(|engine| engine.speed = 50.0);
    let fleet = Fleet::start([timed(prefill("p0")), timed(decode("d0"))]).await;
    let (head, reply) = request(1).json(fleet.addr()).await;
    assert_eq!((head.status, head.path()), (200, "remote"), "{reply}");
    let mut seen = [Value::Null, Value::Null];
    wait_until(async || {
        for (name, seen) in ["p0", "d0"].into_iter().zip(&mut seen) {
            *seen = fleet.router.worker(name).await.unwrap();
        }
        let [prefill, decode] = &seen;
        let told = prefill["reading"]["prefill"]["tokens"] == 200
            && decode["reading"]["decode"]["tokens"] == 8;
        told.then_some(()).ok_or_else(|| format!("not the load after a request: {seen:?}"))
    })
    .await;
    for worker in &seen {
        assert!(worker["reading_age_seconds"].as_f64().is_some(), "{worker}");
        assert_eq!(worker["reading_counts"], true, "{worker}");
        let reading = &worker["reading"];
        assert_eq!((&reading["running"], &reading["waiting"]), (&json!(0), &json!(0)));
        assert_eq!(reading["capacity_blocks"], 40_000);
    }
    let [prefill, decode] = seen.map(|worker| worker["reading"].clone());
    assert!(prefill["prefill"]["seconds"].as_f64() > Some(0.0), "{prefill}");
    assert_eq!(
        (&prefill["prefill"]["per_prompt"], &prefill["decode"]),
        (&json!(false), &Value::Null)
    );
    assert_eq!(decode["decode"]["steps"], 8, "{decode}");
    assert!(decode["decode"]["seconds"].as_f64() > Some(0.0), "{decode}");
    fleet.assert_nothing_leaks().await;
}

#[tokio::test]
async fn what_computing_and_moving_take_is_learned_though_only_their_end_is_seen() {
    let timed = |spec: Spec| spec.engine(|engine| engine.speed = 20.0);
    let fleet = Fleet::start([timed(prefill("p0")), timed(decode("d0"))]).await;
    assert_eq!(fleet.router.status().await["models"][0]["calibration"]["cold"], true);
    for seed in 0..35 {
        let asked = Request::completion(&completion(&prompt(seed, 200), 24, true));
        let (head, body) = asked.send(fleet.addr()).await;
        assert_eq!((head.status, head.path()), (200, "remote"), "{body:?}");
    }
    let status = fleet.router.status().await;
    let calibration = &status["models"][0]["calibration"];
    assert_eq!(calibration["cold"], false, "{calibration}");
    let constants = calibration["constants"].as_array().unwrap();
    for (name, pool) in [("a1", json!("prefill")), ("token", Value::Null)] {
        let learned = constants.iter().find(|c| c["name"] == name && c["pool"] == pool).unwrap();
        assert_eq!(learned["samples"], 35, "{learned}");
    }
    fleet.assert_nothing_leaks().await;
}

/// What `check` says of these engines, each in a role.
async fn check(engines: &[(&str, &MockEngine)]) -> command::Ended {
    let worker = |(role, engine): &(&str, &MockEngine)| json!({"name": format!("{role}-0"), "role": role, "url": engine.url(), "engine": "sglang"});
    let workers: Vec<Value> = engines.iter().map(worker).collect();
    let config = json!({"models": [{"name": MODEL, "tokenizer": "builtin", "workers": workers}]});
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("pointsman.yaml");
    std::fs::write(&file, config.to_string()).unwrap();
    let file = file.to_string_lossy().into_owned();
    let checked = move || command::run(&["check", "-c", &file], &[], "");
    tokio::task::spawn_blocking(checked).await.unwrap()
}

fn config_of(role: Role) -> EngineConfig {
    EngineConfig { dialect: Dialect::Sglang, model: MODEL.into(), ..EngineConfig::of(role) }
}

async fn engine(role: Role) -> MockEngine {
    MockEngine::start(config_of(role)).await.unwrap()
}

#[tokio::test]
async fn check_says_what_each_worker_can_do_and_what_follows() {
    let (prefill, decode) = (engine(Role::Prefill).await, engine(Role::Decode).await);
    let ended = check(&[("prefill", &prefill), ("decode", &decode)]).await;
    assert_eq!(ended.code, Some(0), "{ended:?}");
    for words in [
        "sglang 0.32.0",
        "can      tells its KV events, both legs at once, takes token ids of completions",
        "can      tells its KV events, never prefills, fetches what it lacks, both legs at once",
        "note     it refuses a request that was not prefilled elsewhere",
        "warning  no decode worker can prefill locally and there is no unified worker",
    ] {
        assert!(ended.out.contains(words), "{words:?} is not in {}", ended.out);
    }
    assert!(!ended.out.contains("token budget"), "the engine told it: {}", ended.out);
}

#[tokio::test]
async fn check_finds_a_worker_that_is_started_for_something_else() {
    let decode = EngineConfig { ranks: 2, ..config_of(Role::Decode) };
    let decode = MockEngine::start(decode).await.unwrap();
    let ended = check(&[("unified", &decode)]).await;
    let ranks = "warning  has 2 data-parallel ranks and `ranks` is 1";
    assert!(ended.out.contains(ranks), "{}", ended.out);
    assert_eq!(ended.code, Some(1), "{ended:?}");
    let words = "PROBLEM  runs with --disaggregation-mode decode, which is no `role: unified`";
    assert!(ended.out.contains(words), "{}", ended.out);
}

// ---- its own endpoint ------------------------------------------------------------------------

fn generate(body: &Value) -> Request {
    Request::post("/generate", body)
}

async fn assert_generated(fleet: &Fleet, head: &Head, reply: &Value, asked: &Value) {
    assert_eq!(head.status, 200, "{reply}");
    let expected = fleet.expected(&generate(asked)).await;
    assert_eq!(
        (&reply["text"], &reply["output_ids"]),
        (&expected["text"], &expected["output_ids"])
    );
}

#[tokio::test]
async fn the_native_endpoint_is_routed_likewise() {
    let fleet = Fleet::start([prefill("p0"), decode("d0")]).await;
    let sampling = json!({"max_new_tokens": 6, "temperature": 0});
    let ids = json!({"input_ids": prompt(1, 200), "sampling_params": sampling});
    let (head, reply) = generate(&ids).json(fleet.addr()).await;
    assert_eq!((head.path(), head.worker()), ("remote", "d0"));
    assert_generated(&fleet, &head, &reply, &ids).await;
    assert_eq!(without_bootstrap(&fleet.bodies("p0")[0]), ids);
    let text =
        json!({"text": "two workers meet in a room ".repeat(20), "sampling_params": sampling});
    let (head, reply) = generate(&text).json(fleet.addr()).await;
    assert_eq!(head.path(), "remote");
    assert_generated(&fleet, &head, &reply, &text).await;
    // Its tokens were counted as those of any other prompt.
    let (_, explained) = Request::post("/v1/pointsman/explain", &text).json(fleet.addr()).await;
    assert_eq!(explained["isl_tokens"], reply["meta_info"]["prompt_tokens"], "{explained}");
    fleet.assert_nothing_leaks().await;
}

#[tokio::test]
async fn the_native_stream_passes_as_it_is() {
    let fleet = Fleet::start([prefill("p0"), decode("d0")]).await;
    let mut asked = json!({"input_ids": prompt(1, 200), "sampling_params": {"max_new_tokens": 6},
        "stream": true});
    let (head, body) = generate(&asked).send(fleet.addr()).await;
    assert_eq!((head.status, head.path()), (200, "remote"));
    assert!(body.is_done(), "{body:?}");
    let chunks = body.chunks();
    let counts: Vec<_> =
        chunks.iter().map(|chunk| chunk["meta_info"]["completion_tokens"].as_u64()).collect();
    assert_eq!(counts, (1..=6).map(Some).collect::<Vec<_>>());
    asked["stream"] = json!(false);
    let expected = fleet.expected(&generate(&asked)).await;
    // Each event holds all text so far.
    assert_eq!(chunks[5]["text"], expected["text"]);
    fleet.assert_nothing_leaks().await;
}

#[tokio::test]
async fn the_native_endpoint_survives_a_dead_prefill_worker() {
    let fleet = pairs(Faults { down: true, ..Faults::default() }).await;
    let asked = json!({"input_ids": prompt(1, 200), "sampling_params": {"max_new_tokens": 4}});
    let (head, reply) = generate(&asked).json(fleet.addr()).await;
    assert_eq!((head.path(), head.reason()), ("remote", "retry_prefill"));
    assert_generated(&fleet, &head, &reply, &asked).await;
    fleet.assert_nothing_leaks().await;
}

#[tokio::test]
async fn other_engines_do_not_have_the_native_endpoint() {
    let fleet = Fleet::start([support::unified("u0")]).await;
    let (head, body) = generate(&json!({"text": "a"})).send(fleet.addr()).await;
    assert_eq!(head.status, 404);
    assert!(body.error().contains("SGLang"), "{body:?}");
    assert_eq!(fleet.requests("u0").len(), 0);
}
