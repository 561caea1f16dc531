//! The prefill leg fails, one way a test: with another prefill worker, with none, and where the
//! guards leave no way.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod support;

use pointsman_sim::mock::{Action, Cut, Faults, Leg};
use serde_json::{Value, json};
use support::client::error_message;
use support::fleet::{completion, prompt, rule, unwatched};
use support::{Fleet, Head, Request, decode, prefill};

fn settings(more: Value) -> Value {
    let mut settings = unwatched(json!({"timeouts": {"prefill": "400ms"}}));
    support::merge(&mut settings, more);
    settings
}

async fn two_prefill_workers(faults: Faults) -> Fleet {
    let specs = [prefill("p0"), prefill("p1"), decode("d0")];
    let fleet = Fleet::with(specs, settings(json!({}))).await;
    fleet.set_faults("p0", faults);
    fleet
}

async fn one_prefill_worker(faults: Faults) -> Fleet {
    let fleet = Fleet::with([prefill("p0"), decode("d0")], settings(json!({}))).await;
    fleet.set_faults("p0", faults);
    fleet
}

fn request(seed: u32) -> Request {
    Request::completion(&completion(&prompt(seed, 200), 8, false))
}

/// The other prefill worker does it, the failed one is not asked again; alone, the local path.
async fn another_takes_over_or_the_local_path(faults: Faults, cause: &str) {
    and_leaves_pinned(0, faults, cause).await;
}

/// The same where what was computed stays pinned, because the worker did not say under which name.
async fn and_leaves_pinned(pins: u64, faults: Faults, cause: &str) {
    tokio::join!(
        another_takes_over(faults.clone(), cause, pins),
        it_goes_local(faults, cause, pins)
    );
}

async fn another_takes_over(faults: Faults, cause: &str, pins: u64) {
    let fleet = two_prefill_workers(faults).await;
    let asked = request(1);
    let (head, reply) = asked.json(fleet.addr()).await;
    assert_eq!((head.status, head.path(), head.reason()), (200, "remote", "retry_prefill"));
    fleet.assert_as_alone(&asked, &reply).await;
    assert_eq!(fleet.legs("p1", "prefill"), 1);
    assert!(fleet.requests("p0").len() <= 1, "asked again: {:?}", fleet.requests("p0"));
    assert_eq!(fleet.failures("prefill", cause).await, 1);
    fleet.assert_nothing_leaks_but_pins(pins).await;
}

async fn it_goes_local(faults: Faults, cause: &str, pins: u64) {
    let fleet = one_prefill_worker(faults).await;
    let asked = request(2);
    let (head, reply) = asked.json(fleet.addr()).await;
    assert_eq!((head.status, head.path(), head.reason()), (200, "local", "retry_local"));
    assert_eq!(head.worker(), "d0");
    fleet.assert_as_alone(&asked, &reply).await;
    assert_eq!((fleet.legs("d0", "local"), fleet.legs("d0", "decode_remote")), (1, 0));
    assert!(fleet.requests("p0").len() <= 1, "asked again: {:?}", fleet.requests("p0"));
    assert_eq!(fleet.failures("prefill", cause).await, 1);
    fleet.assert_nothing_leaks_but_pins(pins).await;
}

fn status(status: u16) -> Faults {
    rule(Leg::Prefill, Action::Status { status, body: None })
}

#[tokio::test]
async fn a_healthy_fleet_serves_a_cold_prompt_remotely() {
    let fleet = Fleet::start([prefill("p0"), decode("d0")]).await;
    let asked = request(1);
    let (head, reply) = asked.json(fleet.addr()).await;
    assert_eq!((head.status, head.path(), head.worker()), (200, "remote", "d0"), "{reply}");
    fleet.assert_as_alone(&asked, &reply).await;
    assert_eq!((fleet.legs("p0", "prefill"), fleet.legs("d0", "decode_remote")), (1, 1));
    fleet.assert_nothing_leaks().await;
}

#[tokio::test]
async fn a_prefill_worker_that_refuses_connections_is_passed_over() {
    let down = Faults { down: true, ..Faults::default() };
    another_takes_over_or_the_local_path(down, "connect").await;
}

#[tokio::test]
async fn a_prefill_worker_that_resets_the_connection_is_passed_over() {
    another_takes_over_or_the_local_path(rule(Leg::Prefill, Action::Refuse), "cut").await;
}

#[tokio::test]
async fn a_prefill_worker_that_closes_before_the_headers_is_passed_over() {
    let cut = Action::CutBeforeHeaders { cut: Cut::Fin };
    another_takes_over_or_the_local_path(rule(Leg::Prefill, cut), "cut").await;
}

#[tokio::test]
async fn a_prefill_worker_that_dies_in_the_middle_of_its_answer_is_passed_over() {
    let cut = Action::CutMidStream { after_tokens: 0, cut: Cut::Rst };
    and_leaves_pinned(1, rule(Leg::Prefill, cut), "cut").await;
}

#[tokio::test]
async fn a_prefill_worker_that_ends_in_the_middle_of_its_answer_is_passed_over() {
    let cut = Action::CutMidStream { after_tokens: 0, cut: Cut::Fin };
    and_leaves_pinned(1, rule(Leg::Prefill, cut), "cut").await;
}

#[tokio::test]
async fn a_prefill_worker_that_answers_500_is_passed_over() {
    another_takes_over_or_the_local_path(status(500), "server_error").await;
}

#[tokio::test]
async fn a_prefill_worker_that_answers_503_is_passed_over() {
    another_takes_over_or_the_local_path(status(503), "overload").await;
}

#[tokio::test]
async fn a_prefill_worker_that_answers_429_is_passed_over() {
    another_takes_over_or_the_local_path(status(429), "overload").await;
}

#[tokio::test]
async fn a_prefill_worker_that_hangs_before_the_headers_is_passed_over() {
    another_takes_over_or_the_local_path(rule(Leg::Prefill, Action::HangBeforeHeaders), "timeout")
        .await;
}

#[tokio::test]
async fn a_prefill_worker_that_hangs_after_the_headers_is_passed_over() {
    another_takes_over_or_the_local_path(rule(Leg::Prefill, Action::HangAfterHeaders), "timeout")
        .await;
}

#[tokio::test]
async fn a_prefill_worker_that_hands_nothing_over_is_passed_over() {
    and_leaves_pinned(1, rule(Leg::Prefill, Action::NoParams), "protocol").await;
}

#[tokio::test]
async fn a_prefill_worker_that_answers_nonsense_is_passed_over() {
    let nonsense = Action::Status { status: 200, body: Some("<html>".into()) };
    another_takes_over_or_the_local_path(rule(Leg::Prefill, nonsense), "protocol").await;
}

#[tokio::test]
async fn a_stream_whose_prefill_fails_is_as_whole_as_any() {
    let fleet = one_prefill_worker(status(500)).await;
    let body = completion(&prompt(3, 200), 8, true);
    let (head, streamed) = Request::completion(&body).send(fleet.addr()).await;
    assert_eq!((head.status, head.path(), head.reason()), (200, "local", "retry_local"));
    fleet.assert_streamed_as_alone("/v1/completions", &body, &streamed).await;
    fleet.assert_nothing_leaks().await;
}

#[tokio::test]
async fn a_worker_that_closes_a_connection_it_promised_to_keep_costs_no_request() {
    let fleet = Fleet::start([prefill("p0"), decode("d0")]).await;
    for name in ["p0", "d0"] {
        fleet.set_faults(name, rule(Leg::Any, Action::CloseAfterReply));
    }
    for seed in 0..12 {
        let (head, reply) = request(seed).json(fleet.addr()).await;
        assert_eq!((head.status, head.path()), (200, "remote"), "{reply}");
    }
    fleet.assert_nothing_leaks().await;
}

/// What the engine says to a bad request is what the client gets, and is nobody's fault.
async fn the_refusal_is_the_clients(status: u16, body: &str) {
    let action = Action::Status { status, body: Some(body.to_owned()) };
    let fleet = two_prefill_workers(rule(Leg::Prefill, action)).await;
    // More often than would open the breaker.
    for seed in 0..5 {
        let (head, got) = request(seed).send(fleet.addr()).await;
        assert_eq!((head.status, got.text().as_str()), (status, body));
        assert!(head.header("content-type").unwrap().starts_with("application/json"));
    }
    assert_eq!((fleet.requests("p0").len(), fleet.requests("p1").len()), (5, 0));
    assert_eq!(fleet.requests("d0").len(), 0);
    let worker = fleet.router.worker("p0").await.unwrap();
    assert_eq!(worker["condition"], "up");
    fleet.assert_nothing_leaks().await;
    fleet.set_faults("p0", Faults::default());
    let (head, _) = request(9).send(fleet.addr()).await;
    assert_eq!((head.status, head.reason()), (200, "eff_isl_ratio_over"));
    assert_eq!(fleet.legs("p0", "prefill"), 1);
}

#[tokio::test]
async fn a_400_of_the_prefill_worker_is_the_clients_answer_byte_for_byte() {
    let body = r#"{"error": {"message": "no \u0061", "type": "BadRequestError", "param": null, "code": 400}, "x":1.50}"#;
    the_refusal_is_the_clients(400, body).await;
}

#[tokio::test]
async fn a_401_of_the_prefill_worker_is_the_clients_answer_byte_for_byte() {
    the_refusal_is_the_clients(401, r#"{"error":"Unauthorized"}"#).await;
}

#[tokio::test]
async fn a_request_that_every_engine_refuses_gets_the_engines_own_words() {
    let fleet = Fleet::start([prefill("p0"), decode("d0")]).await;
    let body = json!({"model": "mock", "prompt": prompt(1, 100), "temperature": -1.0});
    let (head, refused) = Request::completion(&body).send(fleet.addr()).await;
    let (alone, words) = Request::completion(&body).send(fleet.get("d0").mock.addr()).await;
    assert_eq!((head.status, refused.text()), (alone.status, words.text()));
    assert_eq!(head.status, 400);
    fleet.assert_nothing_leaks().await;
}

/// A 503 that names every try and says when to come again.
fn assert_names_every_try(head: &Head, reply: &Value, words: &[&str]) {
    let message = error_message(reply);
    assert_eq!((head.status, reply["error"]["code"].as_u64()), (503, Some(503)), "{message}");
    let again = head.header("retry-after").and_then(|pause| pause.parse::<u32>().ok());
    assert!(again.is_some_and(|seconds| seconds >= 1), "{head:?}");
    for word in words {
        assert!(message.contains(word), "{word:?} is missing in {message:?}");
    }
}

async fn no_way_is_left(local: Value, config: Value) {
    let specs = [
        prefill("p0").faults(status(500)),
        prefill("p1").faults(rule(Leg::Prefill, Action::Refuse)),
        decode("d0").worker(local),
    ];
    let fleet = Fleet::with(specs, settings(config)).await;
    let (head, reply) = request(1).json(fleet.addr()).await;
    let tries = ["`p0` answered 500", "`p1` cut its answer off"];
    assert_names_every_try(&head, &reply, &tries);
    assert_eq!(fleet.requests("d0").len(), 0, "the guards hold in the ladder too");
    fleet.assert_nothing_leaks().await;
}

#[tokio::test]
async fn where_no_worker_prefills_locally_failed_prefills_are_a_503_that_names_them() {
    no_way_is_left(json!({"local_prefill": false}), json!({})).await;
}

#[tokio::test]
async fn where_decode_workers_are_full_failed_prefills_are_a_503_that_names_them() {
    no_way_is_left(json!({}), json!({"routing": {"decode_busy_threshold": 0.0}})).await;
}

#[tokio::test]
async fn where_the_prompt_is_over_the_local_budget_failed_prefills_are_a_503_that_names_them() {
    let budget = json!({"routing": {"local_prefill_budget": {"tokens": 100}}});
    no_way_is_left(json!({}), budget).await;
}

#[tokio::test]
async fn where_remote_is_required_failed_prefills_are_a_503_that_names_them() {
    no_way_is_left(json!({}), json!({"routing": {"require_remote": true}})).await;
}

#[tokio::test]
async fn no_more_prefill_workers_are_tried_than_retries_allow() {
    let specs = ["p0", "p1", "p2"].map(|name| prefill(name).faults(status(500)));
    let specs = specs.into_iter().chain([decode("d0")]);
    let fleet = Fleet::with(specs, settings(json!({"routing": {"retries": 1}}))).await;
    let (head, _) = request(1).json(fleet.addr()).await;
    assert_eq!((head.status, head.path(), head.reason()), (200, "local", "retry_local"));
    let asked = ["p0", "p1", "p2"].map(|name| fleet.requests(name).len());
    assert_eq!(asked, [1, 1, 0]);
    fleet.assert_nothing_leaks().await;
}

#[tokio::test]
async fn a_prompt_that_another_length_was_prefilled_for_is_not_handed_on() {
    let params = json!({"do_remote_prefill": true, "remote_block_ids": [[1]],
        "remote_engine_id": "e", "remote_request_id": "r", "remote_host": "127.0.0.1",
        "remote_port": 1, "tp_size": 1, "remote_num_tokens": 999});
    let body = json!({"id": "x", "choices": [], "usage": {"prompt_tokens": 999},
        "kv_transfer_params": params});
    let action = Action::Status { status: 200, body: Some(body.to_string()) };
    another_takes_over_or_the_local_path(rule(Leg::Prefill, action), "protocol").await;
}
