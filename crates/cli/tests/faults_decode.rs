//! The leg whose answer is the client's fails, one way a test: before the client has seen anything it
//! is made good, afterwards the stream ends with an error event. Decode legs here; local legs below.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod support;

use pointsman_sim::mock::{Action, Cut, EngineConfig, Faults, Leg, OnViolation};
use serde_json::{Value, json};
use support::client::error_message;
use support::fleet::{chat, completion, prompt, rule, times, unwatched};
use support::{Body, Fleet, Request, Spec, decode, prefill, unified, wait_for, wait_until};

fn settings() -> Value {
    unwatched(json!({"timeouts": {"first_byte": "500ms", "stream_idle": "500ms"}}))
}

fn always_local() -> Value {
    let mut settings = settings();
    support::merge(&mut settings, json!({"routing": {"policy": "always_local"}}));
    settings
}

/// A prefill worker and two decode workers, the first of which has faults from the first request on.
async fn two_decode_workers(config: Value, faults: &Faults) -> Fleet {
    let fleet = Fleet::with([prefill("p0"), decode("d0"), decode("d1")], config).await;
    fleet.set_faults("d0", faults.clone());
    fleet
}

/// How a failed decode leg was made good.
struct Outcome {
    path: &'static str,
    reason: &'static str,
    worker: &'static str,
    /// Prefill legs altogether.
    prefills: u64,
    failure: (&'static str, &'static str),
    /// Hand-offs that were sent and not fetched: they stay pinned until their lease ends.
    pinned: u64,
}

/// Another decode worker goes on with the KV that is there.
const HANDED_ON: Outcome = Outcome {
    path: "remote",
    reason: "retry_decode",
    worker: "d1",
    prefills: 1,
    failure: ("decode", "connect"),
    pinned: 0,
};

/// The hand-off went with the leg: another decode worker computes the prompt itself.
const fn without_it(cause: &'static str) -> Outcome {
    Outcome {
        path: "local",
        reason: "retry_local",
        worker: "d1",
        prefills: 1,
        failure: ("decode", cause),
        pinned: 1,
    }
}

/// The worker computes the prompt itself.
const RECOMPUTED: Outcome = Outcome {
    path: "local",
    reason: "retry_local",
    worker: "d0",
    prefills: 1,
    failure: ("decode", "kv_load"),
    pinned: 1,
};

async fn is_made_good(faults: Faults, stream: bool, outcome: Outcome) {
    let fleet = two_decode_workers(settings(), &faults).await;
    let asked = completion(&prompt(1, 200), 8, stream);
    let (head, body) = Request::completion(&asked).send(fleet.addr()).await;
    let went = (head.status, head.path(), head.reason(), head.worker());
    assert_eq!(went, (200, outcome.path, outcome.reason, outcome.worker), "{body:?}");
    fleet.assert_completed_as_alone(&asked, &body).await;
    assert_eq!(fleet.legs("p0", "prefill"), outcome.prefills);
    let (leg, cause) = outcome.failure;
    assert_eq!(fleet.failures(leg, cause).await, 1);
    fleet.assert_nothing_leaks_but_pins(outcome.pinned).await;
}

fn status(leg: Leg, status: u16) -> Faults {
    rule(leg, Action::Status { status, body: None })
}

fn cut(leg: Leg, after_tokens: u32, cut: Cut) -> Faults {
    rule(leg, Action::CutMidStream { after_tokens, cut })
}

fn down() -> Faults {
    Faults { down: true, ..Faults::default() }
}

#[tokio::test]
async fn a_decode_worker_that_refuses_connections_leaves_the_hand_off_to_another() {
    tokio::join!(is_made_good(down(), true, HANDED_ON), is_made_good(down(), false, HANDED_ON),);
}

#[tokio::test]
async fn a_decode_worker_that_resets_the_connection_is_replaced() {
    tokio::join!(
        is_made_good(rule(Leg::Decode, Action::Refuse), true, without_it("cut")),
        is_made_good(rule(Leg::Decode, Action::Refuse), false, without_it("cut")),
    );
}

#[tokio::test]
async fn a_decode_worker_that_closes_before_the_headers_is_replaced() {
    let close = || rule(Leg::Decode, Action::CutBeforeHeaders { cut: Cut::Fin });
    tokio::join!(
        is_made_good(close(), true, without_it("cut")),
        is_made_good(close(), false, without_it("cut")),
    );
}

#[tokio::test]
async fn a_decode_worker_that_dies_between_headers_and_content_is_replaced() {
    is_made_good(cut(Leg::Decode, 0, Cut::Rst), true, without_it("cut")).await;
}

#[tokio::test]
async fn a_decode_worker_that_ends_between_headers_and_content_is_replaced() {
    is_made_good(cut(Leg::Decode, 0, Cut::Fin), true, without_it("cut")).await;
}

#[tokio::test]
async fn a_decode_worker_that_dies_in_the_middle_of_a_whole_reply_is_replaced() {
    // It had fetched the KV by then.
    let fetched = || Outcome { pinned: 0, ..without_it("cut") };
    tokio::join!(
        is_made_good(cut(Leg::Decode, 0, Cut::Rst), false, fetched()),
        is_made_good(cut(Leg::Decode, 0, Cut::Fin), false, fetched()),
    );
}

#[tokio::test]
async fn a_decode_worker_that_is_overloaded_is_replaced() {
    tokio::join!(
        is_made_good(status(Leg::Decode, 503), true, without_it("overload")),
        is_made_good(status(Leg::Decode, 429), false, without_it("overload")),
    );
}

#[tokio::test]
async fn a_decode_worker_that_hangs_before_the_headers_of_a_stream_is_replaced() {
    let hang = rule(Leg::Decode, Action::HangBeforeHeaders);
    is_made_good(hang, true, without_it("timeout")).await;
}

#[tokio::test]
async fn a_decode_worker_that_hangs_between_headers_and_content_is_replaced() {
    let hang = rule(Leg::Decode, Action::HangAfterHeaders);
    is_made_good(hang, true, without_it("timeout")).await;
}

#[tokio::test]
async fn a_decode_worker_that_answers_500_to_a_hand_off_computes_the_prompt_itself() {
    tokio::join!(
        is_made_good(status(Leg::Decode, 500), true, RECOMPUTED),
        is_made_good(status(Leg::Decode, 500), false, RECOMPUTED),
    );
}

#[tokio::test]
async fn a_decode_worker_that_answers_500_to_everything_is_replaced() {
    for stream in [true, false] {
        let fleet = two_decode_workers(settings(), &status(Leg::Any, 500)).await;
        let asked = completion(&prompt(1, 200), 8, stream);
        let (head, body) = Request::completion(&asked).send(fleet.addr()).await;
        assert_eq!((head.status, head.worker()), (200, "d1"), "{body:?}");
        fleet.assert_completed_as_alone(&asked, &body).await;
        fleet.assert_nothing_leaks_but_pins(1).await;
    }
}

#[tokio::test]
async fn where_no_worker_prefills_locally_a_decode_worker_that_answers_500_is_replaced() {
    for stream in [true, false] {
        let specs = [
            prefill("p0"),
            decode("d0").worker(json!({"local_prefill": false})).faults(status(Leg::Decode, 500)),
            decode("d1").worker(json!({"local_prefill": false})),
        ];
        let fleet = Fleet::with(specs, settings()).await;
        let asked = completion(&prompt(1, 200), 8, stream);
        let (head, body) = Request::completion(&asked).send(fleet.addr()).await;
        assert_eq!((head.status, head.path(), head.worker()), (200, "remote", "d1"), "{body:?}");
        fleet.assert_completed_as_alone(&asked, &body).await;
        fleet.assert_nothing_leaks_but_pins(1).await;
    }
}

#[tokio::test]
async fn with_no_other_decode_worker_the_client_is_told_of_the_try() {
    for (faults, words, pinned) in [
        (rule(Leg::Any, Action::Refuse), "decode worker `d0` cut its answer off", 1),
        (status(Leg::Any, 503), "decode worker `d0` is overloaded (503)", 1),
        (down(), "decode worker `d0` could not be reached", 1),
    ] {
        let fleet = Fleet::with([prefill("p0"), decode("d0")], settings()).await;
        fleet.set_faults("d0", faults);
        let (head, body) =
            Request::completion(&completion(&prompt(1, 200), 8, true)).send(fleet.addr()).await;
        assert_eq!(head.status, 503, "{body:?}");
        assert!(body.error().contains(words), "{body:?}");
        assert_eq!(head.header("retry-after"), Some("1"));
        assert_eq!(head.header("content-type"), Some("application/json"));
        fleet.assert_nothing_leaks_but_pins(pinned).await;
    }
}

#[tokio::test]
async fn a_400_of_the_decode_worker_is_the_clients_answer_byte_for_byte() {
    let words = r#"{"error": {"message": "no", "type":"BadRequestError","param":null,"code":400}, "f":1.0}"#;
    let refuse = Action::Status { status: 400, body: Some(words.to_owned()) };
    let fleet = two_decode_workers(settings(), &Faults::default()).await;
    for stream in [true, false] {
        fleet.set_faults("d0", times(1, Leg::Decode, refuse.clone()));
        let asked = completion(&prompt(1, 200), 8, stream);
        let (head, body) = Request::completion(&asked).send(fleet.addr()).await;
        assert_eq!((head.status, body.text().as_str()), (400, words));
        // The engine did not look at the hand-off; it is released.
        fleet.assert_nothing_leaks().await;
    }
    assert_eq!(fleet.requests("d1").len(), 0);
}

#[tokio::test]
async fn a_401_of_a_local_worker_is_the_clients_answer_byte_for_byte() {
    let words = r#"{"error":"Unauthorized"}"#;
    let refuse = Action::Status { status: 401, body: Some(words.to_owned()) };
    let fleet = Fleet::with([unified("u0"), unified("u1")], always_local()).await;
    fleet.set_faults("u0", rule(Leg::Any, refuse));
    for seed in 0..5 {
        let asked = completion(&prompt(seed, 64), 8, seed % 2 == 0);
        let (head, body) = Request::completion(&asked).send(fleet.addr()).await;
        assert_eq!((head.status, body.text().as_str()), (401, words));
    }
    assert_eq!(fleet.requests("u1").len(), 0);
    assert_eq!(fleet.router.worker("u0").await.unwrap()["condition"], "up");
    fleet.assert_nothing_leaks().await;
}

/// What no router can see beforehand: the engine dies of what it was handed.
#[tokio::test]
async fn a_decode_worker_that_dies_of_a_hand_off_is_passed_over() {
    for stream in [true, false] {
        let dies = |engine: &mut EngineConfig| engine.on_violation = OnViolation::Die;
        let p0 = prefill("p0").faults(rule(Leg::Prefill, Action::ExpiredKv));
        let specs = [p0, decode("d0").engine(dies), decode("d1")];
        let fleet = Fleet::with(specs, settings()).await;
        let asked = completion(&prompt(1, 200), 8, stream);
        let (head, body) = Request::completion(&asked).send(fleet.addr()).await;
        assert_eq!((head.status, head.path(), head.worker()), (200, "local", "d1"), "{body:?}");
        fleet.assert_completed_as_alone(&asked, &body).await;
        assert_eq!(fleet.stats("d0")["dead"], true);
        wait_until(async || match fleet.leaks().await {
            leaks if leaks.is_empty() => Ok(()),
            leaks => Err(leaks.join("; ")),
        })
        .await;
    }
}

/// The KV cannot be fetched: the same request, on the same only decode worker, without the hand-off.
async fn kv_that_cannot_be_fetched_is_recomputed(path: &str, asked: Value) {
    let unreachable = Faults { side_channel_down: true, ..Faults::default() };
    let specs = [prefill("p0").faults(unreachable), decode("d0")];
    let fleet = Fleet::with(specs, settings()).await;
    let (head, body) = Request::post(path, &asked).send(fleet.addr()).await;
    let went = (head.status, head.path(), head.reason(), head.worker());
    assert_eq!(went, (200, "local", "retry_local", "d0"), "{body:?}");
    if asked["stream"] == true {
        fleet.assert_streamed_as_alone(path, &asked, &body).await;
    } else {
        fleet.assert_as_alone(&Request::post(path, &asked), &body.json()).await;
    }
    assert_eq!(fleet.stats("d0")["kv_load_failures"], 1);
    assert_eq!(fleet.failures("decode", "kv_load").await, 1);
    for name in ["p0", "d0"] {
        assert_eq!(fleet.router.worker(name).await.unwrap()["condition"], "up");
    }
    fleet.assert_nothing_leaks_but_pins(1).await;
}

#[tokio::test]
async fn kv_that_cannot_be_fetched_is_recomputed_for_a_completion() {
    let asked = completion(&prompt(1, 200), 8, false);
    kv_that_cannot_be_fetched_is_recomputed("/v1/completions", asked).await;
}

#[tokio::test]
async fn kv_that_cannot_be_fetched_is_recomputed_for_a_streamed_completion() {
    let asked = completion(&prompt(1, 200), 8, true);
    kv_that_cannot_be_fetched_is_recomputed("/v1/completions", asked).await;
}

const LONG_QUESTION: &str =
    "Which way does this request go, and who computes what of it, and why? ";

#[tokio::test]
async fn kv_that_cannot_be_fetched_is_recomputed_for_a_chat() {
    let asked = chat(&LONG_QUESTION.repeat(8), 8, false);
    kv_that_cannot_be_fetched_is_recomputed("/v1/chat/completions", asked).await;
}

#[tokio::test]
async fn kv_that_cannot_be_fetched_is_recomputed_for_a_streamed_chat_with_one_role_event() {
    let asked = chat(&LONG_QUESTION.repeat(8), 8, true);
    kv_that_cannot_be_fetched_is_recomputed("/v1/chat/completions", asked.clone()).await;
    let unreachable = Faults { side_channel_down: true, ..Faults::default() };
    let specs = [prefill("p0").faults(unreachable), decode("d0")];
    let fleet = Fleet::with(specs, settings()).await;
    let (_, body) = Request::chat(&asked).send(fleet.addr()).await;
    let roles =
        body.chunks().into_iter().filter(|c| c["choices"][0]["delta"]["role"] == "assistant");
    assert_eq!(roles.count(), 1, "the role of the failed try is not seen: {body:?}");
}

/// The client has seen content: then an error event, the end, nothing after it.
async fn breaks_off(fleet: &Fleet, asked: &Value, words: &str) -> Body {
    let (head, body) = Request::completion(asked).send(fleet.addr()).await;
    assert_eq!(head.status, 200);
    assert_ends_with_an_error(&body, words);
    body
}

fn assert_ends_with_an_error(body: &Body, words: &str) {
    assert!(!body.cut, "the connection itself ends well: {body:?}");
    let mut chunks = body.chunks();
    let last = chunks.pop().unwrap();
    assert!(error_message(&last).contains(words), "{last}");
    assert!(!body.events().contains(&"[DONE]".to_owned()), "{body:?}");
    assert!(!chunks.is_empty(), "content came first");
    assert!(chunks.iter().all(|chunk| chunk.get("error").is_none()), "{body:?}");
}

async fn a_cut_stream(how: Cut, config: Value, leg: Leg) {
    let specs = [prefill("p0"), decode("d0").faults(cut(leg, 3, how)), decode("d1")];
    let fleet = Fleet::with(specs, config).await;
    let asked = completion(&prompt(1, 200), 8, true);
    let body = breaks_off(&fleet, &asked, "worker `d0` cut its answer off after 3 tokens").await;
    assert_eq!(body.events().len(), 4, "three tokens, one error: {body:?}");
    assert_eq!(fleet.requests("d1").len(), 0, "what was begun is not begun again");
    let leg = if leg == Leg::Local { "local" } else { "decode" };
    assert_eq!(fleet.failures(leg, "cut").await, 1);
    fleet.assert_nothing_leaks().await;
}

#[tokio::test]
async fn a_decode_worker_that_dies_in_mid_stream_is_told_of_in_an_error_event() {
    a_cut_stream(Cut::Rst, settings(), Leg::Decode).await;
}

#[tokio::test]
async fn a_decode_worker_that_ends_in_mid_stream_is_told_of_in_an_error_event() {
    a_cut_stream(Cut::Fin, settings(), Leg::Decode).await;
}

#[tokio::test]
async fn a_decode_worker_that_falls_silent_in_mid_stream_is_told_of_in_an_error_event() {
    let slow = rule(Leg::Any, Action::SlowTokens { delay_ms: 20 });
    let specs = [prefill("p0"), decode("d0").behind_a_valve().faults(slow)];
    let mut fleet = Fleet::with(specs, settings()).await;
    let asked = completion(&prompt(1, 200), 16, true);
    let mut exchange = Request::completion(&asked).open(fleet.addr()).await;
    let mut body = exchange.tokens(2).await;
    fleet.valve("d0").freeze();
    body.bytes.extend(exchange.rest().await.bytes);
    assert_ends_with_an_error(&body, "worker `d0` did not answer in time after");
    assert_eq!(fleet.failures("decode", "timeout").await, 1);
    fleet.valve("d0").open();
    fleet.assert_nothing_leaks().await;
}

#[tokio::test]
async fn a_stream_that_outlives_the_time_of_a_request_ends_with_an_error_event() {
    let slow = rule(Leg::Any, Action::SlowTokens { delay_ms: 100 });
    let config = unwatched(json!({"timeouts": {"request": "800ms"}}));
    let fleet = Fleet::with([prefill("p0"), decode("d0").faults(slow)], config).await;
    // More often than would open the breaker.
    for seed in 0..4 {
        let mut asked = completion(&prompt(seed, 100), 60, true);
        asked["ignore_eos"] = json!(true);
        breaks_off(&fleet, &asked, "tokens: a request may not take longer").await;
    }
    let worker = fleet.router.worker("d0").await.unwrap();
    assert_eq!(worker["condition"], "up", "the limit is the router's, the worker did its part");
    fleet.assert_nothing_leaks().await;
}

#[tokio::test]
async fn slow_tokens_are_no_failure() {
    let slow = rule(Leg::Any, Action::SlowTokens { delay_ms: 60 });
    let fleet = Fleet::with([prefill("p0"), decode("d0").faults(slow)], settings()).await;
    let asked = completion(&prompt(1, 200), 12, true);
    let (head, body) = Request::completion(&asked).send(fleet.addr()).await;
    assert_eq!((head.status, head.path()), (200, "remote"));
    fleet.assert_streamed_as_alone("/v1/completions", &asked, &body).await;
    let metrics = fleet.router.metrics().await;
    assert!(metrics.not_zero("pointsman_leg_failures_total").is_empty());
    fleet.assert_nothing_leaks().await;
}

#[tokio::test]
async fn wherever_an_engine_is_cut_the_client_sees_whole_events_and_how_it_ended() {
    let specs = [unified("u0").behind_a_valve(), unified("u1")];
    let mut fleet = Fleet::with(specs, settings()).await;
    let asked = completion(&prompt(1, 64), 6, true);
    let whole = Request::completion(&asked).open(fleet.get("u0").mock.addr()).await.rest().await;
    let most = whole.bytes.len() + 300;
    for bytes in (20..most).step_by(97) {
        fleet.valve("u0").cut_after(bytes);
        // One request at a time: the first worker is asked first unless its breaker is open.
        let (head, body) = Request::completion(&asked).send(fleet.addr()).await;
        assert_eq!(head.status, 200, "cut after {bytes}: {body:?}");
        if head.worker() == "u1" || body.is_done() {
            fleet.assert_streamed_as_alone("/v1/completions", &asked, &body).await;
        } else {
            assert_ends_with_an_error(&body, "worker `u0` cut its answer off after");
        }
    }
    fleet.assert_nothing_leaks().await;
}

/// The first of two workers fails in its local leg: the other one does it.
async fn the_other_does_it_locally(specs: [Spec; 2], faults: Faults, stream: bool, cause: &str) {
    let fleet = Fleet::with(specs, always_local()).await;
    let (first, second) = (fleet.engines[0].name.clone(), fleet.engines[1].name.clone());
    fleet.set_faults(&first, faults);
    let asked = completion(&prompt(1, 200), 8, stream);
    let (head, body) = Request::completion(&asked).send(fleet.addr()).await;
    assert_eq!(
        (head.status, head.path(), head.worker()),
        (200, "local", second.as_str()),
        "{body:?}"
    );
    fleet.assert_completed_as_alone(&asked, &body).await;
    assert!(fleet.requests(&first).len() <= 1, "never the same again");
    assert_eq!(fleet.failures("local", cause).await, 1);
    fleet.assert_nothing_leaks().await;
}

async fn local_is_made_good(faults: Faults, stream: bool, cause: &str) {
    let unified = [unified("u0"), unified("u1")];
    the_other_does_it_locally(unified, faults.clone(), stream, cause).await;
}

#[tokio::test]
async fn a_local_worker_that_refuses_connections_is_replaced() {
    tokio::join!(
        local_is_made_good(down(), true, "connect"),
        local_is_made_good(down(), false, "connect"),
    );
}

#[tokio::test]
async fn a_local_worker_that_resets_the_connection_is_replaced() {
    local_is_made_good(rule(Leg::Local, Action::Refuse), true, "cut").await;
}

#[tokio::test]
async fn a_local_worker_that_closes_before_the_headers_is_replaced() {
    let close = Action::CutBeforeHeaders { cut: Cut::Fin };
    local_is_made_good(rule(Leg::Local, close), false, "cut").await;
}

#[tokio::test]
async fn a_local_worker_that_dies_between_headers_and_content_is_replaced() {
    local_is_made_good(cut(Leg::Local, 0, Cut::Rst), true, "cut").await;
}

#[tokio::test]
async fn a_local_worker_that_dies_in_the_middle_of_a_whole_reply_is_replaced() {
    local_is_made_good(cut(Leg::Local, 0, Cut::Rst), false, "cut").await;
}

#[tokio::test]
async fn a_local_worker_that_answers_500_is_replaced() {
    tokio::join!(
        local_is_made_good(status(Leg::Local, 500), true, "server_error"),
        local_is_made_good(status(Leg::Local, 500), false, "server_error"),
    );
}

#[tokio::test]
async fn a_local_worker_that_is_overloaded_is_replaced() {
    tokio::join!(
        local_is_made_good(status(Leg::Local, 503), true, "overload"),
        local_is_made_good(status(Leg::Local, 429), false, "overload"),
    );
}

#[tokio::test]
async fn a_local_worker_that_hangs_before_the_headers_of_a_stream_is_replaced() {
    local_is_made_good(rule(Leg::Local, Action::HangBeforeHeaders), true, "timeout").await;
}

#[tokio::test]
async fn a_local_worker_that_hangs_between_headers_and_content_is_replaced() {
    local_is_made_good(rule(Leg::Local, Action::HangAfterHeaders), true, "timeout").await;
}

#[tokio::test]
async fn a_local_worker_that_dies_in_mid_stream_is_told_of_in_an_error_event() {
    tokio::join!(
        a_cut_stream(Cut::Rst, always_local(), Leg::Local),
        a_cut_stream(Cut::Fin, always_local(), Leg::Local),
    );
}

#[tokio::test]
async fn a_reply_of_another_kind_that_is_cut_is_not_passed_off_as_whole() {
    let mut fleet = Fleet::with([unified("u0").behind_a_valve()], settings()).await;
    let asked = json!({"model": "mock", "input": "a text to embed"});
    let (head, whole) = Request::post("/v1/embeddings", &asked).send(fleet.addr()).await;
    assert_eq!((head.status, whole.cut), (200, false));
    fleet.valve("u0").cut_after(300);
    let mut exchange = Request::post("/v1/embeddings", &asked).open(fleet.addr()).await;
    assert_eq!(exchange.head().await.status, 200);
    assert!(exchange.rest().await.cut);
    assert_eq!(fleet.failures("local", "cut").await, 1);
    fleet.assert_nothing_leaks().await;
}

/// One try that uses up all the time of its request is the end of it, and blames nobody else.
#[tokio::test]
async fn a_reply_that_takes_longer_than_a_request_may_is_given_up_and_blames_one_worker() {
    for hang in [Action::HangBeforeHeaders, Action::HangAfterHeaders] {
        let mut config = always_local();
        support::merge(&mut config, json!({"timeouts": {"request": "500ms"}}));
        let fleet = Fleet::with([unified("u0"), unified("u1")], config).await;
        fleet.set_faults("u0", rule(Leg::Local, hang));
        let asked = Request::completion(&completion(&prompt(1, 200), 8, false));
        let (head, body) = asked.send(fleet.addr()).await;
        assert_eq!(head.status, 504, "{body:?}");
        assert!(body.error().contains("`u0` did not answer in time"), "{body:?}");
        assert!(!body.error().contains("u1"), "{body:?}");
        assert_eq!(fleet.requests("u1").len(), 0);
        assert_eq!(fleet.failures("local", "timeout").await, 1);
        fleet.assert_nothing_leaks().await;
    }
}

#[tokio::test]
async fn what_a_timed_out_leg_left_running_is_aborted_on_the_engine() {
    // So slow that the prompt alone takes a second.
    let slow = unified("u0").engine(|engine| engine.speed = 0.01);
    let config = unwatched(json!({"timeouts": {"first_byte": "300ms", "stream_idle": "300ms"}}));
    let fleet = Fleet::with([slow, unified("u1")], config).await;
    let asked = completion(&prompt(1, 200), 8, true);
    let (head, body) = Request::completion(&asked).send(fleet.addr()).await;
    assert_eq!((head.status, head.worker()), (200, "u1"), "{body:?}");
    let stats = wait_for("the abort", async || {
        let stats = fleet.stats("u0");
        (stats["aborted"] == 1).then_some(stats)
    })
    .await;
    assert_eq!(stats["live"], 0);
    fleet.assert_nothing_leaks().await;
}
