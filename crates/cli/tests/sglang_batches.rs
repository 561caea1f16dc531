//! Batches of prompts on SGLang workers: each prompt has a room of its own, whatever fails; and what has
//! to stay whole gets a clear answer where no worker can take it so.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod support;

use std::time::Duration;

use pointsman_sim::mock::{Action, Faults, Leg};
use serde_json::{Value, json};
use support::fleet::{MODEL, completion, prompt, rule, times, unwatched};
use support::{Fleet, Request, Spec};

fn prefill(name: &str) -> Spec {
    support::prefill(name).sglang()
}

fn decode(name: &str) -> Spec {
    support::decode(name).sglang()
}

/// Prompts of different lengths, as ids.
fn batch(seed: u32) -> Value {
    let prompts: Vec<_> = (0..3).map(|at| prompt(seed + at, 120 + 40 * at)).collect();
    json!({"model": MODEL, "prompt": prompts, "max_tokens": 6, "temperature": 0})
}

fn rooms(body: &Value) -> Vec<u64> {
    body["bootstrap_room"].as_array().unwrap().iter().map(|room| room.as_u64().unwrap()).collect()
}

/// What a stream says for each prompt.
fn said(chunks: &[Value], prompts: u64) -> Vec<String> {
    let of = |prompt: u64| {
        let choices =
            chunks.iter().flat_map(|chunk| chunk["choices"].as_array().into_iter().flatten());
        let own = choices.filter(|choice| choice["index"] == prompt);
        own.filter_map(|choice| choice["text"].as_str()).collect()
    };
    (0..prompts).map(of).collect()
}

#[tokio::test]
async fn each_prompt_of_a_batch_meets_in_a_room_of_its_own() {
    let fleet = Fleet::start([prefill("p0"), decode("d0")]).await;
    let asked = Request::completion(&batch(1));
    let (head, reply) = asked.json(fleet.addr()).await;
    assert_eq!((head.status, head.path(), head.worker()), (200, "remote", "d0"), "{reply}");
    assert_eq!(head.reason(), "guard_capability");
    fleet.assert_as_alone(&asked, &reply).await;
    let (to_prefill, to_decode) = (&fleet.bodies("p0")[0], &fleet.bodies("d0")[0]);
    assert_eq!(to_prefill, to_decode);
    let mut rooms = rooms(to_decode);
    rooms.dedup();
    assert_eq!(rooms.len(), 3, "{to_decode}");
    fleet.assert_nothing_leaks().await;
}

#[tokio::test]
async fn a_batch_that_is_streamed_says_the_same() {
    let fleet = Fleet::start([prefill("p0"), decode("d0")]).await;
    let mut asked = batch(1);
    asked["prompt"] = json!(["one prompt of words", "another one", "and a third that is longer"]);
    let expected = fleet.expected(&Request::completion(&asked)).await;
    asked["stream"] = json!(true);
    let (head, body) = Request::completion(&asked).send(fleet.addr()).await;
    assert_eq!((head.status, head.path()), (200, "remote"), "{body:?}");
    assert!(body.is_done(), "{body:?}");
    let choices = expected["choices"].as_array().unwrap();
    let alone: Vec<_> = choices.iter().map(|choice| choice["text"].as_str().unwrap()).collect();
    assert_eq!(said(&body.chunks(), 3), alone);
    fleet.assert_nothing_leaks().await;
}

#[tokio::test]
async fn a_batch_of_the_native_endpoint_is_split_likewise() {
    let fleet = Fleet::start([prefill("p0"), decode("d0")]).await;
    let sampling = json!({"max_new_tokens": 5, "temperature": 0});
    let batches = [
        json!({"text": ["one prompt of words", "another"], "sampling_params": sampling}),
        json!({"input_ids": [prompt(1, 90), prompt(2, 120)], "sampling_params": sampling}),
    ];
    for asked in batches {
        let asked = Request::post("/generate", &asked);
        let (head, reply) = asked.json(fleet.addr()).await;
        assert_eq!((head.status, head.path()), (200, "remote"), "{reply}");
        let texts = |reply: &Value| -> Vec<Value> {
            reply.as_array().unwrap().iter().map(|one| one["text"].clone()).collect()
        };
        assert_eq!(texts(&reply), texts(&fleet.expected(&asked).await));
    }
    fleet.assert_nothing_leaks().await;
}

#[tokio::test]
async fn all_rooms_of_a_batch_lead_to_the_rank_that_computes_it() {
    let ranked = |spec: Spec| spec.engine(|e| e.ranks = 2).worker(json!({"ranks": 2}));
    let fleet = Fleet::start([ranked(prefill("p0")), ranked(decode("d0"))]).await;
    for seed in [1, 11] {
        let (head, reply) = Request::completion(&batch(seed)).json(fleet.addr()).await;
        assert_eq!((head.status, head.path()), (200, "remote"), "{reply}");
    }
    for body in fleet.bodies("d0") {
        let rank = body["disagg_prefill_dp_rank"].as_u64().unwrap();
        assert!(rooms(&body).iter().all(|room| room % 2 == rank), "{body}");
    }
    fleet.assert_nothing_leaks().await;
}

fn settings() -> Value {
    unwatched(json!({"timeouts": {"prefill": "5s"}}))
}

/// A batch is served as by one engine, though the first worker of a kind has faults.
async fn survives(worker: &str, faults: Faults, path: &str) {
    let hasty = |spec: Spec| spec.engine(|e| e.lease = Duration::from_millis(500));
    let specs = [prefill("p0"), prefill("p1"), decode("d0"), decode("d1")].map(hasty);
    let fleet = Fleet::with(specs, settings()).await;
    fleet.set_faults(worker, faults);
    // Whoever is chosen first, the one with the faults has its turn.
    for seed in [1, 11] {
        let asked = Request::completion(&batch(seed));
        let (head, reply) = asked.json(fleet.addr()).await;
        assert_eq!((head.status, head.path()), (200, path), "{reply}");
        fleet.assert_as_alone(&asked, &reply).await;
    }
    fleet.assert_nothing_leaks().await;
}

#[tokio::test]
async fn a_batch_survives_workers_that_are_dead_and_rooms_that_differ() {
    let down = || Faults { down: true, ..Faults::default() };
    tokio::join!(
        survives("p0", down(), "remote"),
        survives("d0", down(), "remote"),
        survives("p0", times(1, Leg::Prefill, Action::OtherRoom), "remote"),
    );
}

#[tokio::test]
async fn what_the_prefill_worker_refuses_of_a_batch_is_the_clients_answer() {
    let fleet = Fleet::with([prefill("p0"), decode("d0")], settings()).await;
    fleet.set_faults("p0", rule(Leg::Prefill, Action::Status { status: 400, body: None }));
    let (head, body) = Request::completion(&batch(1)).send(fleet.addr()).await;
    assert_eq!((head.status, &body.json()["object"]), (400, &json!("error")));
    fleet.assert_nothing_leaks().await;
}

#[tokio::test]
async fn a_batch_that_ends_with_its_first_tokens_is_whole() {
    let fleet = Fleet::with([prefill("p0"), decode("d0")], settings()).await;
    for name in ["p0", "d0"] {
        fleet.set_faults(name, rule(Leg::Any, Action::EosAtOnce));
    }
    let (head, reply) = Request::completion(&batch(1)).json(fleet.addr()).await;
    assert_eq!((head.status, head.path()), (200, "remote"), "{reply}");
    let choices = reply["choices"].as_array().unwrap();
    assert_eq!(choices.len(), 3);
    assert!(choices.iter().all(|choice| choice["finish_reason"] == "stop"), "{reply}");
    fleet.assert_nothing_leaks().await;
}

#[tokio::test]
async fn a_client_that_leaves_a_batch_leaves_nothing_behind() {
    let fleet = Fleet::with([prefill("p0"), decode("d0")], settings()).await;
    fleet.set_faults("d0", rule(Leg::Decode, Action::SlowTokens { delay_ms: 50 }));
    let mut asked = batch(1);
    (asked["stream"], asked["max_tokens"]) = (json!(true), json!(200));
    let mut exchange = Request::completion(&asked).open(fleet.addr()).await;
    exchange.tokens(2).await;
    drop(exchange);
    fleet.assert_nothing_leaks().await;
}

#[tokio::test]
async fn a_worker_that_takes_a_batch_whole_is_given_it() {
    let unified = support::unified("u0").sglang();
    let fleet = Fleet::start([prefill("p0"), decode("d0"), unified]).await;
    let (head, reply) = Request::completion(&batch(1)).json(fleet.addr()).await;
    assert_eq!((head.status, head.reason(), head.worker()), (200, "batch", "u0"), "{reply}");
    assert_eq!(fleet.bodies("u0")[0], batch(1), "nothing of a hand-off goes to it");
    fleet.assert_nothing_leaks().await;
}

#[tokio::test]
async fn what_has_to_stay_whole_gets_a_clear_400_where_no_worker_prefills_locally() {
    let fleet = Fleet::start([prefill("p0"), decode("d0")]).await;
    let with = |mut body: Value, name: &str, value: Value| {
        body[name] = value;
        body
    };
    let one = completion(&prompt(1, 64), 4, false);
    let echo = with(with(one.clone(), "echo", json!(true)), "logprobs", json!(1));
    for (asked, what) in [
        (with(one, "n", json!(2)), "several choices need"),
        (with(batch(1), "n", json!(2)), "several choices need"),
        (echo, "log probabilities of a prompt need"),
    ] {
        let (head, body) = Request::completion(&asked).send(fleet.addr()).await;
        assert_eq!(head.status, 400, "{body:?}");
        let said = body.error();
        assert!(said.starts_with(what) && said.contains("prefill locally"), "{body:?}");
    }
    let native = json!({"text": ["a", "b"], "sampling_params": [{"n": 2}, {"n": 2}]});
    let (head, body) = Request::post("/generate", &native).send(fleet.addr()).await;
    assert_eq!(head.status, 400);
    assert!(body.error().starts_with("several choices need"), "{body:?}");
    assert_eq!(fleet.requests("d0").len() + fleet.requests("p0").len(), 0);
}
