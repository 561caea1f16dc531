//! More than the workers can take: requests wait in the router, in an order, within bounds.
#![allow(clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "it is all test")]

mod support;

use serde_json::{Value, json};
use support::client::Exchange;
use support::fleet::{completion, prompt, unwatched};
use support::{Fleet, Request, Spec, decode, prefill, unified, wait_until};
use tokio::task::JoinSet;

/// So slow that nothing ends unless its client leaves.
fn stuck(spec: Spec) -> Spec {
    spec.engine(|engine| engine.speed = 0.002)
}

/// One prompt at a time on a worker, whatever the policy.
fn one_at_a_time(admission: Value) -> Value {
    let mut config = json!({
        "routing": {"policy": "isl_bounding", "admission": {"prefill_queue": {"tokens": 1}}},
    });
    support::merge(&mut config["routing"]["admission"], admission);
    unwatched(config)
}

/// A request that can be told from others in what an engine was sent.
struct Asked {
    seed: u32,
    exchange: Exchange,
}

async fn ask(fleet: &Fleet, seed: u32, headers: &[(&str, &str)]) -> Asked {
    let request = Request::completion(&completion(&prompt(seed, 64), 4, true));
    let request =
        headers.iter().fold(request, |request, (name, value)| request.header(name, value));
    Asked { seed, exchange: request.open(fleet.addr()).await }
}

async fn held(fleet: &Fleet, wanted: u64) {
    wait_until(async || {
        let held = fleet.router.metrics().await.count("pointsman_held_requests", &[]);
        if held == wanted { Ok(()) } else { Err(format!("{held} held, not {wanted}")) }
    })
    .await;
}

/// Waits until the worker has been sent so many requests; the seeds of their prompts.
async fn sent(fleet: &Fleet, worker: &str, wanted: usize) -> Vec<u32> {
    wait_until(async || match fleet.bodies(worker).len() {
        now if now == wanted => Ok(()),
        now => Err(format!("{worker} was sent {now}, not {wanted}")),
    })
    .await;
    let seed_of = |body: &Value| (1..100).find(|seed| body["prompt"] == json!(prompt(*seed, 64)));
    fleet.bodies(worker).iter().map(|body| seed_of(body).expect("one of ours")).collect()
}

/// A worker that computes one prompt, and those that wait for it, in the order asked.
async fn line(config: Value, waiting: &[&[(&str, &str)]]) -> (Fleet, Vec<Asked>) {
    let fleet = Fleet::with([stuck(unified("u0"))], config).await;
    let mut all = vec![ask(&fleet, 1, &[]).await];
    sent(&fleet, "u0", 1).await;
    for (seed, headers) in (2..).zip(waiting) {
        all.push(ask(&fleet, seed, headers).await);
        held(&fleet, u64::from(seed) - 1).await;
    }
    (fleet, all)
}

/// Lets the client of whatever runs leave until all have; the order in which they were sent.
async fn order(fleet: &Fleet, mut all: Vec<Asked>) -> Vec<u32> {
    let mut order = sent(fleet, "u0", 1).await;
    for count in 2..=all.len() {
        let runs = *order.last().expect("one runs");
        all.retain(|asked| asked.seed != runs);
        order = sent(fleet, "u0", count).await;
    }
    order
}

async fn refusal(asked: &mut Asked) -> (u16, Option<u64>, String) {
    let head = asked.exchange.head().await;
    let retry_after = head.header("retry-after").and_then(|value| value.parse().ok());
    (head.status, retry_after, asked.exchange.rest().await.error())
}

async fn refused(fleet: &Fleet, why: &str) -> u64 {
    let metrics = fleet.router.metrics().await;
    metrics.count("pointsman_requests_refused_total", &[("signal", why)])
}

#[tokio::test]
async fn a_higher_priority_is_served_first_and_equals_in_order() {
    let priority: [&[(&str, &str)]; 5] = [
        &[],
        &[("x-pointsman-priority", "-5")],
        &[("x-pointsman-priority", "7")],
        &[("x-pointsman-priority", "0")],
        &[("x-pointsman-priority", "7")],
    ];
    let (fleet, all) = line(one_at_a_time(json!({})), &priority).await;
    assert_eq!(order(&fleet, all).await, [1, 4, 6, 2, 5, 3]);
    fleet.assert_nothing_leaks().await;
}

#[tokio::test]
async fn a_flood_of_one_tenant_does_not_delay_another() {
    let flood: &[(&str, &str)] = &[("x-tenant", "flood")];
    let quiet: &[(&str, &str)] = &[("x-tenant", "quiet")];
    let config = one_at_a_time(json!({"tenant_header": "x-tenant"}));
    let (fleet, all) = line(config, &[flood, flood, flood, flood, quiet, quiet]).await;
    assert_eq!(order(&fleet, all).await, [1, 2, 6, 3, 7, 4, 5]);
    fleet.assert_nothing_leaks().await;
}

#[tokio::test]
async fn a_key_names_its_tenant_and_bounds_its_priority() {
    let key = |name: &str, sha256: &str, priority: i32| json!({"name": name, "sha256": sha256, "max_priority": priority});
    // Of the keys `a` and `b`.
    let a = "ca978112ca1bbdcafac231b39a23dc4da786eff8147c4e72b9807785afee48bb";
    let b = "3e23e8160039594a33894f6564e1b1348bbd7a0088d42c4acb73eeaed59c009d";
    let mut config = one_at_a_time(json!({"tenant_header": "x-tenant"}));
    support::merge(&mut config, json!({"auth": {"keys": [key("a", a, 0), key("b", b, 3)]}}));
    let fleet = Fleet::with([stuck(unified("u0"))], config).await;
    let (a, b) = (("authorization", "Bearer a"), ("authorization", "Bearer b"));
    let mut all = vec![ask(&fleet, 1, &[a]).await];
    sent(&fleet, "u0", 1).await;
    let (high, made_up) = (("x-pointsman-priority", "100"), ("x-tenant", "another"));
    let waiting: [&[(&str, &str)]; 5] = [&[a], &[a, made_up], &[a, high], &[b], &[b, high]];
    for (seed, headers) in (2..).zip(waiting) {
        all.push(ask(&fleet, seed, headers).await);
        held(&fleet, u64::from(seed) - 1).await;
    }
    assert_eq!(order(&fleet, all).await, [1, 6, 2, 5, 3, 4]);
}

#[tokio::test]
async fn beyond_the_line_requests_are_refused_and_told_when_to_come_back() {
    let (fleet, mut all) = line(one_at_a_time(json!({"max_waiting": 2})), &[&[], &[]]).await;
    let mut late = ask(&fleet, 9, &[]).await;
    let (status, retry_after, error) = refusal(&mut late).await;
    assert_eq!((status, retry_after.is_some_and(|wait| wait >= 1)), (429, true));
    assert!(error.contains("2 requests wait before this one"), "{error}");
    assert_eq!(refused(&fleet, "line_full").await, 1);
    // One that comes before them takes the place of the last.
    let before = ask(&fleet, 10, &[("x-pointsman-priority", "1")]).await;
    let (status, retry_after, _) = refusal(&mut all[2]).await;
    assert_eq!((status, retry_after.is_some()), (429, true));
    assert_eq!(refused(&fleet, "displaced").await, 1);
    all.remove(2);
    all.push(before);
    assert_eq!(order(&fleet, all).await, [1, 10, 2]);
    fleet.assert_nothing_leaks().await;
}

#[tokio::test]
async fn a_client_that_leaves_while_it_waits_frees_its_place() {
    let (fleet, mut all) = line(one_at_a_time(json!({"max_waiting": 1})), &[&[]]).await;
    all.pop();
    held(&fleet, 0).await;
    all.push(ask(&fleet, 3, &[]).await);
    held(&fleet, 1).await;
    assert_eq!(order(&fleet, all).await, [1, 3]);
    fleet.assert_nothing_leaks().await;
}

#[tokio::test]
async fn nobody_waits_longer_than_the_router_or_the_client_allows() {
    let config = one_at_a_time(json!({"max_wait": "700ms"}));
    let (fleet, mut all) = line(config, &[&[("x-pointsman-deadline-ms", "60000")]]).await;
    let mut hasty = ask(&fleet, 9, &[("x-pointsman-deadline-ms", "20")]).await;
    let (status, retry_after, error) = refusal(&mut hasty).await;
    assert_eq!((status, retry_after), (503, Some(1)));
    assert!(error.contains("no worker was free within 20ms"), "{error}");
    let (status, _, error) = refusal(&mut all[1]).await;
    assert_eq!(status, 503);
    assert!(error.contains("no worker was free within 700ms"), "{error}");
    assert_eq!(refused(&fleet, "max_wait").await, 2);
    drop(all);
    fleet.assert_nothing_leaks().await;
}

#[tokio::test]
async fn what_is_no_priority_or_deadline_is_refused() {
    let fleet = Fleet::start([unified("u0")]).await;
    for (name, value) in [
        ("x-pointsman-priority", "101"),
        ("x-pointsman-priority", "-101"),
        ("x-pointsman-priority", "1.5"),
        ("x-pointsman-priority", "high"),
        ("x-pointsman-deadline-ms", "soon"),
        ("x-pointsman-deadline-ms", "-1"),
    ] {
        let (status, _, error) = refusal(&mut ask(&fleet, 1, &[(name, value)]).await).await;
        assert_eq!(status, 400, "{name}: {value}");
        assert!(error.contains(name), "{error}");
    }
    assert_eq!(fleet.bodies("u0").len(), 0);
}

#[tokio::test]
async fn requests_wait_in_the_router_and_not_in_the_queue_of_a_busy_prefill_worker() {
    let config = one_at_a_time(json!({}));
    let fleet = Fleet::with([stuck(prefill("p0")), decode("d0")], config).await;
    let long = |seed| Request::completion(&completion(&prompt(seed, 4_000), 4, true));
    let first = long(1).open(fleet.addr()).await;
    wait_until(async || match fleet.bodies("p0").len() {
        1 => Ok(()),
        sent => Err(format!("{sent} sent")),
    })
    .await;
    let second = long(2).open(fleet.addr()).await;
    held(&fleet, 1).await;
    assert_eq!(fleet.bodies("p0").len(), 1);
    // It waits where it can be decided anew: when the prefill worker goes, it is computed locally.
    fleet.drain("p0", true).await;
    let mut second = second;
    let head = second.head().await;
    assert_eq!((head.status, head.path()), (200, "local"));
    assert!(second.rest().await.is_done());
    drop(first);
    fleet.assert_nothing_leaks().await;
}

#[tokio::test]
async fn everything_is_sent_at_once_where_holding_is_off() {
    let config = one_at_a_time(json!({"hold_busy": false}));
    let fleet = Fleet::with([stuck(unified("u0"))], config).await;
    let mut all = Vec::new();
    for seed in 1..=3 {
        all.push(ask(&fleet, seed, &[]).await);
    }
    assert_eq!(sent(&fleet, "u0", 3).await.len(), 3);
    held(&fleet, 0).await;
    drop(all);
    fleet.assert_nothing_leaks().await;
}

#[tokio::test]
async fn in_a_flood_everybody_is_served_or_told_to_come_back() {
    let config = one_at_a_time(json!({"max_waiting": 20}));
    let fleet = Fleet::with([unified("u0").engine(|engine| engine.speed = 10.0)], config).await;
    let mut asked = JoinSet::new();
    for seed in 1..=200 {
        let (addr, body) = (fleet.addr(), completion(&prompt(seed, 64), 4, true));
        asked.spawn(async move { Request::completion(&body).send(addr).await });
    }
    let mut served = 0;
    for (head, body) in asked.join_all().await {
        match head.status {
            200 => assert!(body.is_done()),
            status => assert_eq!((status, head.header("retry-after").is_some()), (429, true)),
        }
        served += usize::from(head.status == 200);
    }
    assert!((20..200).contains(&served), "{served} of 200");
    let refused = refused(&fleet, "line_full").await + refused(&fleet, "displaced").await;
    assert_eq!(refused as usize + served, 200);
    held(&fleet, 0).await;
    fleet.assert_nothing_leaks().await;
}
