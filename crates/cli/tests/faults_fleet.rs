//! Workers come, go, fall ill and recover; the router itself ends: what clients and `/ready` see.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod support;

use std::io::ErrorKind;

use pointsman_sim::mock::{Action, Faults, Leg, Lies};
use serde_json::{Value, json};
use support::client::connect;
use support::fleet::{completion, prompt, rule, times, unwatched};
use support::{Fleet, Head, Request, decode, merge, prefill, unified, wait_for, wait_until};

fn asked(seed: u32, tokens: u32, stream: bool) -> Value {
    let mut body = completion(&prompt(seed, 200), tokens, stream);
    body["ignore_eos"] = json!(true);
    body
}

/// A short request, whose reply is whole.
async fn send(fleet: &Fleet, seed: u32) -> Head {
    let request = Request::completion(&asked(seed, 4, false));
    let (head, body) = request.send(fleet.addr()).await;
    if head.status != 200 {
        assert!(!body.error().is_empty());
    }
    head
}

/// Looks at workers' health often.
fn watched(more: Value) -> Value {
    let mut config = json!({
        "health": {"interval": "100ms", "timeout": "2s"},
        "metrics": {"scrape_interval": "100ms"},
    });
    merge(&mut config, more);
    config
}

fn slow_tokens(delay_ms: u64) -> Faults {
    rule(Leg::Any, Action::SlowTokens { delay_ms })
}

async fn until_condition(fleet: &Fleet, name: &str, condition: &str) {
    wait_until(async || match fleet.router.worker(name).await {
        Some(worker) if worker["condition"] == condition => Ok(()),
        other => Err(format!("{name} is not {condition}: {other:?}")),
    })
    .await;
}

/// What `/ready` says of the model, and that its status agrees.
async fn readiness(fleet: &Fleet) -> Value {
    let (ready, body) = fleet.router.ready().await;
    assert_eq!(body["ready"], ready, "{body}");
    assert_eq!(body["models"]["mock"]["ready"], ready, "{body}");
    body["models"]["mock"].clone()
}

async fn until_ready(fleet: &Fleet, expected: Value) {
    wait_until(async || {
        let mut now = readiness(fleet).await;
        let before = now.clone();
        merge(&mut now, expected.clone());
        if now == before { Ok(()) } else { Err(format!("{before}, not {expected}")) }
    })
    .await;
}

#[tokio::test]
async fn a_worker_that_is_removed_finishes_what_it_has_and_gets_nothing_more() {
    let specs = [prefill("p0"), decode("d0").faults(slow_tokens(40)), decode("d1")];
    let fleet = Fleet::start(specs).await;
    let running = asked(1, 20, true);
    let mut exchange = Request::completion(&running).open(fleet.addr()).await;
    assert_eq!(exchange.head().await.worker(), "d0");
    let mut body = exchange.tokens(2).await;
    fleet.remove("d0").await;
    assert!(fleet.router.worker("d0").await.is_none());
    for seed in 2..5 {
        assert_eq!(send(&fleet, seed).await.worker(), "d1");
    }
    body.bytes.extend(exchange.rest().await.bytes);
    fleet.assert_streamed_as_alone("/v1/completions", &running, &body).await;
    assert_eq!(fleet.legs("d0", "decode_remote"), 1);
    fleet.assert_nothing_leaks().await;
    let metrics = fleet.router.metrics().await;
    assert_eq!(metrics.not_zero("pointsman_index_blocks").len(), 2, "p0 and d1, no d0");
}

#[tokio::test]
async fn workers_that_are_removed_between_the_legs_finish_what_they_have() {
    let slow = prefill("p0").engine(|engine| engine.speed = 0.02);
    let fleet = Fleet::start([slow, decode("d0")]).await;
    let running = asked(1, 8, true);
    let mut exchange = Request::completion(&running).open(fleet.addr()).await;
    wait_for("the prefill", async || (fleet.stats("p0")["live"] == 1).then_some(())).await;
    fleet.remove("p0").await;
    fleet.remove("d0").await;
    let head = exchange.head().await;
    assert_eq!((head.status, head.path(), head.worker()), (200, "remote", "d0"));
    let body = exchange.rest().await;
    fleet.assert_streamed_as_alone("/v1/completions", &running, &body).await;
    fleet.assert_nothing_leaks().await;
}

#[tokio::test]
async fn a_worker_that_is_removed_and_added_again_is_used_again() {
    let fleet = Fleet::start([prefill("p0"), decode("d0"), decode("d1")]).await;
    assert_eq!(send(&fleet, 1).await.worker(), "d0");
    fleet.remove("d0").await;
    assert_eq!(send(&fleet, 2).await.worker(), "d1");
    fleet.add("d0").await;
    until_condition(&fleet, "d0", "up").await;
    // What it holds is known again from its events, read from the oldest on.
    wait_until(async || {
        let (known, holds) =
            (fleet.router.worker("d0").await.unwrap(), fleet.stats("d0")["cached_blocks"].clone());
        if known["index_blocks"] == holds { Ok(()) } else { Err(format!("{known}, not {holds}")) }
    })
    .await;
    assert_eq!(send(&fleet, 3).await.worker(), "d0");
    fleet.assert_nothing_leaks().await;
}

#[tokio::test]
async fn bookings_on_a_removed_worker_do_not_count_on_the_one_that_takes_its_place() {
    let specs = [prefill("p0"), decode("d0").faults(slow_tokens(40))];
    let mut fleet = Fleet::start(specs).await;
    let running = asked(1, 20, true);
    let mut exchange = Request::completion(&running).open(fleet.addr()).await;
    let mut body = exchange.tokens(1).await;
    fleet.remove("d0").await;
    fleet.join(decode("d1")).await;
    fleet.add("d1").await;
    let metrics = fleet.router.metrics().await;
    assert_eq!(metrics.not_zero("pointsman_reserved_kv_blocks"), Vec::<String>::new());
    assert_eq!(send(&fleet, 2).await.worker(), "d1");
    body.bytes.extend(exchange.rest().await.bytes);
    fleet.assert_streamed_as_alone("/v1/completions", &running, &body).await;
    fleet.assert_nothing_leaks().await;
}

#[tokio::test]
async fn a_request_that_is_planned_again_knows_the_workers_of_that_moment() {
    let hang = rule(Leg::Prefill, Action::HangBeforeHeaders);
    let config = json!({"timeouts": {"prefill": "1500ms"}});
    let mut fleet = Fleet::with([prefill("p0").faults(hang), decode("d0")], config).await;
    let mut exchange = Request::completion(&asked(1, 4, false)).open(fleet.addr()).await;
    wait_for("the prefill leg", async || (fleet.requests("p0").len() == 1).then_some(())).await;
    // While the prefill hangs, another worker takes the place of the decode worker.
    fleet.remove("d0").await;
    fleet.join(decode("d1")).await;
    fleet.add("d1").await;
    until_condition(&fleet, "d1", "up").await;
    let head = exchange.head().await;
    let body = exchange.rest().await;
    assert_eq!((head.status, head.path(), head.worker()), (200, "local", "d1"), "{body:?}");
    assert_eq!(fleet.requests("d0").len(), 0);
    fleet.assert_nothing_leaks().await;
}

#[tokio::test]
async fn a_worker_that_is_drained_gets_nothing_until_it_is_not() {
    let specs = [prefill("p0"), decode("d0").faults(slow_tokens(40)), decode("d1")];
    let fleet = Fleet::start(specs).await;
    let running = asked(1, 20, true);
    let mut exchange = Request::completion(&running).open(fleet.addr()).await;
    let mut body = exchange.tokens(2).await;
    fleet.drain("d0", true).await;
    assert_eq!(fleet.router.worker("d0").await.unwrap()["draining"], true);
    for seed in 2..5 {
        assert_eq!(send(&fleet, seed).await.worker(), "d1");
    }
    fleet.drain("d1", true).await;
    assert_eq!(readiness(&fleet).await["decode_up"], 0);
    assert_eq!(send(&fleet, 5).await.status, 503);
    body.bytes.extend(exchange.rest().await.bytes);
    fleet.assert_streamed_as_alone("/v1/completions", &running, &body).await;
    fleet.drain("d0", false).await;
    assert_eq!(send(&fleet, 6).await.worker(), "d0");
    fleet.assert_nothing_leaks().await;
}

#[tokio::test]
async fn without_workers_requests_are_refused_and_with_workers_again_served() {
    let fleet = Fleet::start([prefill("p0"), decode("d0")]).await;
    assert_eq!(send(&fleet, 1).await.status, 200);
    fleet.remove("p0").await;
    fleet.remove("d0").await;
    assert_eq!(readiness(&fleet).await["ready"], false);
    let head = send(&fleet, 2).await;
    assert_eq!((head.status, head.header("retry-after")), (503, Some("1")));
    fleet.add("d0").await;
    until_ready(&fleet, json!({"ready": true, "remote": false, "local": true})).await;
    let head = send(&fleet, 3).await;
    assert_eq!((head.status, head.path(), head.reason()), (200, "local", "no_prefill"));
    fleet.add("p0").await;
    until_ready(&fleet, json!({"ready": true, "remote": true})).await;
    assert_eq!(send(&fleet, 4).await.path(), "remote");
    fleet.assert_nothing_leaks().await;
}

#[tokio::test]
async fn workers_whose_checks_fail_are_left_alone_until_they_pass() {
    let fleet = Fleet::with([prefill("p0"), decode("d0"), decode("d1")], watched(json!({}))).await;
    until_ready(&fleet, json!({"ready": true, "remote": true, "prefill_up": 1, "decode_up": 2}))
        .await;
    let ill = || Faults { unhealthy: true, ..Faults::default() };
    fleet.set_faults("d0", ill());
    until_condition(&fleet, "d0", "down").await;
    assert_eq!(send(&fleet, 1).await.worker(), "d1");
    fleet.set_faults("p0", ill());
    until_ready(&fleet, json!({"ready": true, "remote": false, "local": true, "prefill_up": 0}))
        .await;
    let head = send(&fleet, 2).await;
    assert_eq!((head.path(), head.reason()), ("local", "no_prefill"));
    fleet.set_faults("d1", ill());
    until_ready(&fleet, json!({"ready": false, "decode_up": 0})).await;
    assert_eq!(send(&fleet, 3).await.status, 503);
    let up = fleet.router.metrics().await.not_zero("pointsman_worker_up");
    assert_eq!(up, Vec::<String>::new());
    for name in ["p0", "d0", "d1"] {
        fleet.set_faults(name, Faults::default());
    }
    until_ready(&fleet, json!({"ready": true, "remote": true, "prefill_up": 1, "decode_up": 2}))
        .await;
    assert_eq!(send(&fleet, 4).await.path(), "remote");
    assert_eq!(fleet.requests("d0").len(), 1);
    fleet.assert_nothing_leaks().await;
}

#[tokio::test]
async fn where_remote_is_required_a_fleet_without_prefill_workers_is_not_ready() {
    let config = watched(json!({"routing": {"require_remote": true}}));
    let fleet = Fleet::with([prefill("p0"), decode("d0")], config).await;
    fleet.set_faults("p0", Faults { unhealthy: true, ..Faults::default() });
    until_ready(&fleet, json!({"ready": false, "local": true, "remote": false})).await;
    assert_eq!(send(&fleet, 1).await.status, 503);
    assert_eq!(fleet.requests("d0").len(), 0);
    fleet.assert_nothing_leaks().await;
}

#[tokio::test]
async fn a_worker_that_cannot_be_reached_at_the_start_is_used_once_it_can() {
    let down = Faults { down: true, ..Faults::default() };
    let fleet = Fleet::with([unified("u0").faults(down)], watched(json!({}))).await;
    assert_eq!(readiness(&fleet).await["unified_up"], 0);
    assert_eq!(send(&fleet, 1).await.status, 503);
    fleet.set_faults("u0", Faults::default());
    until_ready(&fleet, json!({"ready": true, "unified_up": 1})).await;
    assert_eq!(send(&fleet, 2).await.status, 200);
    wait_until(async || match fleet.router.worker("u0").await.unwrap() {
        worker if worker["version"] == "0.32.0" && worker["publishes_events"] == true => Ok(()),
        worker => Err(format!("what it says of itself is not learned: {worker}")),
    })
    .await;
}

/// An engine dies and starts again on its port, empty.
async fn an_engine_starts_anew(same_event_ports: bool) {
    let mut fleet = Fleet::with([unified("u0")], watched(json!({}))).await;
    assert_eq!(send(&fleet, 1).await.status, 200);
    let known = async |fleet: &Fleet| {
        let worker = fleet.router.worker("u0").await.unwrap();
        worker["index_blocks"].as_u64().unwrap()
    };
    wait_for("events", async || (known(&fleet).await > 0).then_some(())).await;
    let killed = fleet.kill("u0").await;
    let old_events = killed.events.unwrap();
    until_condition(&fleet, "u0", "down").await;
    assert_eq!(send(&fleet, 2).await.status, 503);
    fleet.revive(killed, same_event_ports).await;
    until_condition(&fleet, "u0", "up").await;
    wait_until(async || match known(&fleet).await {
        0 => Ok(()),
        blocks => Err(format!("{blocks} blocks of the engine that died are still known")),
    })
    .await;
    assert_eq!(send(&fleet, 1).await.status, 200);
    wait_until(async || {
        let (known, holds) = (known(&fleet).await, fleet.stats("u0")["cached_blocks"].clone());
        if holds == known { Ok(()) } else { Err(format!("{known} known, holds {holds}")) }
    })
    .await;
    fleet.assert_nothing_leaks().await;
    if !same_event_ports {
        // Nobody asks at the old sockets: whoever takes those ports next is another engine.
        let old = tokio::net::TcpListener::bind(("127.0.0.1", old_events.0)).await.unwrap();
        let longest_pause = std::time::Duration::from_millis(2500);
        let asked = tokio::time::timeout(longest_pause, old.accept()).await;
        assert!(asked.is_err(), "the router still asks for events at the old port");
    }
}

#[tokio::test]
async fn an_engine_that_starts_anew_is_known_to_be_empty() {
    an_engine_starts_anew(true).await;
}

#[tokio::test]
async fn an_engine_that_starts_anew_with_other_event_sockets_is_followed_there() {
    an_engine_starts_anew(false).await;
}

fn breaker(open: &str) -> Value {
    unwatched(json!({
        "routing": {"breaker": {"failures": 3, "open": open, "open_max": open}},
        "timeouts": {"first_byte": "30s"},
    }))
}

/// Makes `u0` fail as often as opens its breaker.
async fn trip(fleet: &Fleet) {
    fleet.set_faults("u0", rule(Leg::Any, Action::Status { status: 500, body: None }));
    for seed in 0..3 {
        let head = send(fleet, seed).await;
        assert_eq!((head.status, head.worker()), (200, "u1"), "made good each time");
    }
    assert_eq!(fleet.requests("u0").len(), 3);
}

#[tokio::test]
async fn a_worker_that_fails_in_a_row_is_left_alone() {
    let fleet = Fleet::with([unified("u0"), unified("u1")], breaker("1h")).await;
    trip(&fleet).await;
    assert_eq!(fleet.router.worker("u0").await.unwrap()["condition"], "tripped");
    assert_eq!(readiness(&fleet).await["unified_up"], 1);
    for seed in 10..14 {
        assert_eq!(send(&fleet, seed).await.worker(), "u1");
    }
    assert_eq!(fleet.requests("u0").len(), 3);
    assert_eq!(fleet.failures("local", "server_error").await, 3);
    fleet.assert_nothing_leaks().await;
}

#[tokio::test]
async fn failures_that_are_not_in_a_row_leave_a_worker_in_use() {
    let fleet = Fleet::with([unified("u0"), unified("u1")], breaker("1h")).await;
    let fail = Action::Status { status: 500, body: None };
    for seed in 0..4 {
        fleet.set_faults("u0", times(2, Leg::Any, fail.clone()));
        for more in 0..3 {
            let head = send(&fleet, seed * 10 + more).await;
            assert_eq!(head.worker(), if more < 2 { "u1" } else { "u0" });
        }
    }
    assert_eq!(fleet.router.worker("u0").await.unwrap()["condition"], "up");
    // Load is no failure, however often.
    fleet.set_faults("u0", rule(Leg::Any, Action::Status { status: 503, body: None }));
    for seed in 50..54 {
        assert_eq!(send(&fleet, seed).await.worker(), "u1");
    }
    assert_eq!(fleet.router.worker("u0").await.unwrap()["condition"], "up");
    fleet.assert_nothing_leaks().await;
}

#[tokio::test]
async fn a_worker_whose_time_has_come_is_asked_once_and_if_it_answers_used_again() {
    let fleet = Fleet::with([unified("u0"), unified("u1")], breaker("300ms")).await;
    trip(&fleet).await;
    fleet.set_faults("u0", rule(Leg::Any, Action::HangBeforeHeaders));
    until_ready(&fleet, json!({"unified_up": 2})).await;
    let mut probe = Request::completion(&asked(20, 4, false)).open(fleet.addr()).await;
    wait_for("the probe", async || (fleet.requests("u0").len() == 4).then_some(())).await;
    assert_eq!(readiness(&fleet).await["unified_up"], 1);
    for seed in 21..25 {
        assert_eq!(send(&fleet, seed).await.worker(), "u1", "one probe at a time");
    }
    assert_eq!(fleet.requests("u0").len(), 4);
    // A probe that nothing was heard of leaves its place to the next.
    probe.send(b"").await;
    drop(probe);
    until_ready(&fleet, json!({"unified_up": 2})).await;
    fleet.set_faults("u0", Faults::default());
    assert_eq!(send(&fleet, 30).await.worker(), "u0");
    assert_eq!(fleet.router.worker("u0").await.unwrap()["condition"], "up");
    fleet.assert_nothing_leaks().await;
}

#[tokio::test]
async fn a_probe_that_fails_keeps_the_breaker_open() {
    let fleet = Fleet::with([unified("u0"), unified("u1")], breaker("300ms")).await;
    trip(&fleet).await;
    until_ready(&fleet, json!({"unified_up": 2})).await;
    assert_eq!(send(&fleet, 10).await.worker(), "u1");
    assert_eq!(fleet.requests("u0").len(), 4);
    assert_eq!(fleet.router.worker("u0").await.unwrap()["condition"], "tripped");
    fleet.assert_nothing_leaks().await;
}

#[tokio::test]
async fn an_engine_that_says_its_kv_is_full_gets_no_local_prefill() {
    let config = watched(json!({"routing": {"policy": "always_local"}}));
    let fleet = Fleet::with([prefill("p0"), decode("d0")], config).await;
    assert_eq!(send(&fleet, 1).await.path(), "local");
    let metrics = Lies { kv_usage: Some(1.0), ..Lies::default() };
    fleet.set_faults("d0", Faults { metrics, ..Faults::default() });
    let until_usage = async |is: fn(f64) -> bool| {
        wait_until(async || {
            let worker = fleet.router.worker("d0").await.unwrap();
            match worker["reading"]["kv_usage"].as_f64() {
                Some(usage) if is(usage) => Ok(()),
                other => Err(format!("kv_usage is {other:?}")),
            }
        })
        .await;
    };
    until_usage(|usage| usage == 1.0).await;
    let head = send(&fleet, 2).await;
    assert_eq!((head.path(), head.reason()), ("remote", "guard_decode_kv"));
    let vetoes = fleet.router.metrics().await;
    assert_eq!(vetoes.count("pointsman_guard_vetoes_total", &[("guard", "decode_kv")]), 1);
    fleet.set_faults("d0", Faults::default());
    until_usage(|usage| usage < 0.1).await;
    assert_eq!(send(&fleet, 3).await.path(), "local");
    fleet.assert_nothing_leaks().await;
}

#[tokio::test]
async fn an_engine_whose_metrics_fail_or_lie_is_served_on() {
    let lies = [
        Lies { fail: true, ..Lies::default() },
        Lies { num_gpu_blocks: Some(0), ..Lies::default() },
        Lies { num_gpu_blocks: Some(u64::MAX), running: Some(u64::MAX), ..Lies::default() },
        Lies { kv_usage: Some(1e300), waiting: Some(u64::MAX), ..Lies::default() },
    ];
    for metrics in lies {
        let fleet = Fleet::with([prefill("p0"), decode("d0")], watched(json!({}))).await;
        for name in ["p0", "d0"] {
            fleet.set_faults(name, Faults { metrics, ..Faults::default() });
        }
        for seed in 0..3 {
            assert_eq!(send(&fleet, seed).await.status, 200, "{metrics:?}");
        }
        assert_eq!(readiness(&fleet).await["ready"], true, "{metrics:?}");
        fleet.assert_nothing_leaks().await;
    }
}

/// Waits until nobody listens where the router did.
async fn until_refused(fleet: &Fleet) {
    wait_until(async || match connect(fleet.addr()).await {
        Err(error) if error.kind() == ErrorKind::ConnectionRefused => Ok(()),
        other => Err(format!("new connections are taken: {other:?}")),
    })
    .await;
}

fn assert_engines_are_idle(fleet: &Fleet) -> Result<(), String> {
    for engine in &fleet.engines {
        let stats = engine.mock.stats();
        for key in ["live", "in_flight", "pins"] {
            if stats[key] != 0 {
                return Err(format!("{} has {key} {}", engine.name, stats[key]));
            }
        }
    }
    Ok(())
}

#[tokio::test]
async fn a_router_that_is_asked_to_end_lets_running_streams_finish() {
    let specs = [prefill("p0"), decode("d0").faults(slow_tokens(40))];
    let mut fleet = Fleet::start(specs).await;
    // A connection that is kept and unused does not hold up the end.
    let (_, _) = Request::get("/health").send(fleet.addr()).await;
    let idle = connect(fleet.addr()).await.unwrap();
    let (streamed, whole) = (asked(1, 30, true), asked(2, 30, false));
    let mut stream = Request::completion(&streamed).open(fleet.addr()).await;
    let mut plain = Request::completion(&whole).open(fleet.addr()).await;
    let mut body = stream.tokens(2).await;
    wait_for("both", async || (fleet.stats("d0")["in_flight"] == 2).then_some(())).await;
    fleet.router.terminate();
    until_refused(&fleet).await;
    body.bytes.extend(stream.rest().await.bytes);
    fleet.assert_streamed_as_alone("/v1/completions", &streamed, &body).await;
    assert_eq!(plain.head().await.status, 200);
    let reply = plain.rest().await.json();
    fleet.assert_as_alone(&Request::completion(&whole), &reply).await;
    assert_eq!(fleet.router.ended().await.code(), Some(0));
    wait_until(async || assert_engines_are_idle(&fleet)).await;
    drop(idle);
}

#[tokio::test]
async fn a_router_that_is_asked_to_end_without_requests_ends_at_once() {
    let config = json!({"shutdown": {"grace": "1h"}});
    let mut fleet = Fleet::with([prefill("p0"), decode("d0")], config).await;
    let idle = connect(fleet.addr()).await.unwrap();
    fleet.router.terminate();
    assert_eq!(fleet.router.ended().await.code(), Some(0));
    drop(idle);
}

#[tokio::test]
async fn at_the_end_of_the_grace_period_what_still_runs_is_cut() {
    let specs = [prefill("p0"), decode("d0").faults(slow_tokens(100))];
    let mut fleet = Fleet::with(specs, json!({"shutdown": {"grace": "500ms"}})).await;
    let mut stream = Request::completion(&asked(1, 500, true)).open(fleet.addr()).await;
    stream.tokens(1).await;
    let mut whole = Request::completion(&asked(2, 500, false)).open(fleet.addr()).await;
    wait_for("both", async || (fleet.requests("d0").len() == 2).then_some(())).await;
    fleet.router.terminate();
    assert_eq!(whole.head().await.status, 503);
    assert!(whole.rest().await.error().contains("the router is shutting down"));
    let rest = stream.rest().await;
    assert!(!rest.cut && rest.text().contains("the router is shutting down"), "{rest:?}");
    assert!(!rest.text().contains("[DONE]"), "{rest:?}");
    assert_eq!(fleet.router.ended().await.code(), Some(0));
    assert!(fleet.router.log().contains("still running at the end of the grace period"));
    wait_until(async || assert_engines_are_idle(&fleet)).await;
}

#[tokio::test]
async fn a_listener_of_its_own_tells_of_the_drain_until_the_last_request_has_ended() {
    let specs = [prefill("p0"), decode("d0").faults(slow_tokens(40))];
    let own = json!({"admin": {"listen": {"address": "127.0.0.1", "port": 0}}});
    let mut fleet = Fleet::with(specs, own).await;
    let admin = fleet.router.admin_addr();
    let ready = async || Request::get("/ready").json(admin).await;
    assert_eq!(ready().await.0.status, 200);
    let streamed = asked(1, 40, true);
    let mut stream = Request::completion(&streamed).open(fleet.addr()).await;
    let mut body = stream.tokens(1).await;
    fleet.router.terminate();
    until_refused(&fleet).await;
    let (head, told) = ready().await;
    assert_eq!((head.status, &told["draining"]), (503, &json!(true)), "{told}");
    assert_eq!(Request::get("/metrics").send(admin).await.0.status, 200);
    body.bytes.extend(stream.rest().await.bytes);
    fleet.assert_streamed_as_alone("/v1/completions", &streamed, &body).await;
    assert_eq!(fleet.router.ended().await.code(), Some(0));
}
