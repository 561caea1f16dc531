//! Requests that are late for their objective whatever is done wait in the router, and those that can
//! be served in time go ahead of them.
#![allow(clippy::expect_used, clippy::panic, reason = "it is all test")]

mod support;

use serde_json::{Value, json};
use support::client::Exchange;
use support::fleet::{completion, prompt};
use support::{Fleet, Request, Spec, unified, wait_until};

/// An engine that takes some seconds, or by far longer than the test, for 2000 tokens.
fn engine(speed: f64) -> [Spec; 1] {
    let told = json!({"max_num_batched_tokens": 256});
    [unified("u0")
        .engine(|engine| {
            engine.speed = speed;
            engine.max_num_batched_tokens = 256;
        })
        .worker(told)]
}

/// As slow as the engine is, so that the first prediction is right.
fn config(speed: f64, over: &Value) -> Value {
    let constants = json!({
        "k0_ms": 8.0 / speed, "a1_ms": 0.0445 / speed, "a2_ms": 9.8e-7 / speed,
        "c0_ms": 10.4 / speed, "c1_ms": 0.038 / speed, "c2_ms": 2.9e-5 / speed,
    });
    let mut config = json!({
        "routing": {"policy": "predicted"},
        "model": {"constants": constants},
    });
    support::merge(&mut config, over.clone());
    config
}

/// Sends a streamed completion that wants its first token within so many milliseconds.
async fn begin(fleet: &Fleet, seed: u32, tokens: u32, ttft_ms: u32) -> Exchange {
    let body = completion(&prompt(seed, tokens), 2, true);
    let request = Request::completion(&body).header("x-slo-ttft-ms", &ttft_ms.to_string());
    request.open(fleet.addr()).await
}

async fn held(fleet: &Fleet, wanted: u64) {
    wait_until(async || {
        let held = fleet.router.metrics().await.count("pointsman_held_requests", &[]);
        if held == wanted { Ok(()) } else { Err(format!("{held} held, not {wanted}")) }
    })
    .await;
}

async fn booked(fleet: &Fleet, wanted: u64) {
    wait_until(async || {
        let status = fleet.router.status().await;
        let booked = status["models"][0]["live_bookings"].as_u64();
        if booked == Some(wanted) { Ok(()) } else { Err(format!("{status}")) }
    })
    .await;
}

/// A long prompt that is being computed, and a late request that waits for its end.
async fn one_waits(fleet: &Fleet, ttft_ms: u32) -> (Exchange, Exchange) {
    let long = begin(fleet, 1, 2_000, ttft_ms).await;
    booked(fleet, 1).await;
    let late = begin(fleet, 2, 300, 100).await;
    held(fleet, 1).await;
    (long, late)
}

#[tokio::test]
async fn a_late_request_is_served_after_one_that_came_later_and_is_in_time() {
    let fleet = Fleet::with(engine(0.1), config(0.1, &json!({}))).await;
    let (mut long, mut late) = one_waits(&fleet, 60_000).await;
    let mut in_time = begin(&fleet, 3, 300, 60_000).await;
    booked(&fleet, 2).await;
    held(&fleet, 1).await;
    assert_eq!(in_time.head().await.status, 200);
    assert!(in_time.rest().await.is_done());
    let head = late.head().await;
    assert_eq!(head.status, 200);
    // What is told of its TTFT counts from when it came.
    let predicted = head.header("x-pointsman-predicted-ttft-ms").expect("a prediction");
    assert!(predicted.parse::<f64>().is_ok_and(|ms| ms > 500.0), "{predicted}");
    assert!(late.rest().await.is_done());
    assert_eq!(long.head().await.status, 200);
    assert!(long.rest().await.is_done());
    held(&fleet, 0).await;
    fleet.assert_nothing_leaks().await;
}

#[tokio::test]
async fn a_client_that_leaves_while_it_waits_leaves_nothing_behind() {
    let fleet = Fleet::with(engine(0.002), config(0.002, &json!({}))).await;
    let (long, first) = one_waits(&fleet, 0).await;
    let second = begin(&fleet, 3, 300, 100).await;
    held(&fleet, 2).await;
    drop(first);
    held(&fleet, 1).await;
    // Whoever is next is asked about again: the worker has nothing before it any more.
    drop(long);
    held(&fleet, 0).await;
    booked(&fleet, 1).await;
    drop(second);
    fleet.assert_nothing_leaks().await;
}

#[tokio::test]
async fn who_waits_longer_than_a_request_may_take_is_told_so() {
    // What is in time is sent, however much is before it.
    let admission = json!({"hold_busy": false});
    let over = json!({"timeouts": {"request": "6s"}, "routing": {"admission": admission}});
    let fleet = Fleet::with(engine(0.002), config(0.002, &over)).await;
    let (mut long, mut late) = one_waits(&fleet, 0).await;
    // When the first one's time is over, there is still this one.
    let mut other = begin(&fleet, 3, 2_000, 3_600_000).await;
    booked(&fleet, 2).await;
    let head = late.head().await;
    assert_eq!(head.status, 503);
    assert!(head.header("retry-after").is_some());
    let error = late.rest().await.error();
    assert!(error.contains("no worker was free within 6s"), "{error}");
    for exchange in [&mut long, &mut other] {
        assert_eq!(exchange.head().await.status, 504);
    }
    fleet.assert_nothing_leaks().await;
}

#[tokio::test]
async fn what_has_no_objective_stands_in_line_behind_those_that_wait() {
    let fleet = Fleet::with(engine(0.002), config(0.002, &json!({}))).await;
    let (long, late) = one_waits(&fleet, 0).await;
    let without = begin(&fleet, 3, 300, 0).await;
    held(&fleet, 2).await;
    drop((long, late, without));
    fleet.assert_nothing_leaks().await;
}

#[tokio::test]
async fn those_that_wait_are_told_when_the_router_is_to_end() {
    let mut fleet = Fleet::with(engine(0.002), config(0.002, &json!({}))).await;
    let (long, mut late) = one_waits(&fleet, 0).await;
    fleet.router.terminate();
    let head = late.head().await;
    assert_eq!(head.status, 503);
    assert!(head.header("retry-after").is_some());
    let error = late.rest().await.error();
    assert!(error.contains("shutting down"), "{error}");
    drop(long);
    assert!(fleet.router.ended().await.success());
}

#[tokio::test]
async fn nobody_waits_where_it_is_off() {
    let off = json!({"routing": {"predicted": {"hold_late": false}}});
    let fleet = Fleet::with(engine(0.002), config(0.002, &off)).await;
    let long = begin(&fleet, 1, 2_000, 0).await;
    booked(&fleet, 1).await;
    let late = begin(&fleet, 2, 300, 100).await;
    booked(&fleet, 2).await;
    held(&fleet, 0).await;
    drop((long, late));
    fleet.assert_nothing_leaks().await;
}
