//! The client goes away, or does not read: whatever it was at, everything is freed.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod support;

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use pointsman_sim::mock::{Action, Leg};
use serde_json::json;
use support::fleet::{completion, configuration, prompt, rule, unwatched};
use support::{
    Body, Exchange, Fleet, Request, Router, Spec, decode, prefill, unified, wait_for, wait_until,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::timeout;

fn asked(seed: u32, stream: bool) -> Request {
    Request::completion(&completion(&prompt(seed, 400), 64, stream))
}

/// So slow that whatever it is at can be interrupted.
fn slow(spec: Spec, speed: f64) -> Spec {
    spec.engine(|engine| engine.speed = speed)
}

/// Waits until an engine's statistics have this value.
async fn until(fleet: &Fleet, name: &str, key: &str, value: u64) {
    wait_until(async || match fleet.stats(name)[key].as_u64() {
        Some(now) if now == value => Ok(()),
        now => Err(format!("{key} of {name} is {now:?}, not {value}")),
    })
    .await;
}

async fn requests_in_flight(fleet: &Fleet) -> u64 {
    fleet.router.status().await["requests_in_flight"].as_u64().unwrap()
}

/// Leaving is no failure of any worker.
async fn assert_nobody_is_blamed(fleet: &Fleet) {
    let metrics = fleet.router.metrics().await;
    assert_eq!(metrics.not_zero("pointsman_leg_failures_total"), Vec::<String>::new());
}

/// The two ways to go: an ordinary end, and a reset.
fn leave(exchange: Exchange, reset: bool) {
    if reset {
        exchange.reset();
    }
}

#[tokio::test]
async fn a_client_that_leaves_while_it_sends_its_body_costs_nothing() {
    let fleet = Fleet::start([prefill("p0"), decode("d0")]).await;
    let body = completion(&prompt(1, 400), 8, true).to_string();
    for reset in [false, true] {
        let mut exchange = Request::raw("/v1/completions", body.clone()).begin(fleet.addr()).await;
        exchange.send(&body.as_bytes()[..body.len() / 2]).await;
        wait_for("the request", async || (requests_in_flight(&fleet).await == 1).then_some(()))
            .await;
        leave(exchange, reset);
        fleet.assert_nothing_leaks().await;
    }
    assert_eq!((fleet.requests("p0").len(), fleet.requests("d0").len()), (0, 0));
}

#[tokio::test]
async fn a_body_that_does_not_come_is_refused_in_time() {
    let config = json!({"timeouts": {"body_read": "300ms"}});
    let fleet = Fleet::with([unified("u0")], config).await;
    let body = completion(&prompt(1, 400), 8, true).to_string();
    let mut exchange = Request::raw("/v1/completions", body.clone()).begin(fleet.addr()).await;
    exchange.send(&body.as_bytes()[..100]).await;
    let head = exchange.head().await;
    assert_eq!(head.status, 408, "{:?}", exchange.rest().await);
    fleet.assert_nothing_leaks().await;
}

#[tokio::test]
async fn a_client_that_leaves_during_the_prefill_stops_it() {
    for (stream, reset) in [(true, false), (false, true)] {
        let fleet = Fleet::start([slow(prefill("p0"), 0.002), decode("d0")]).await;
        let exchange = asked(1, stream).open(fleet.addr()).await;
        until(&fleet, "p0", "live", 1).await;
        leave(exchange, reset);
        until(&fleet, "p0", "aborted", 1).await;
        fleet.assert_nothing_leaks().await;
        assert_eq!(fleet.requests("d0").len(), 0, "nothing was handed on");
        assert_nobody_is_blamed(&fleet).await;
    }
}

#[tokio::test]
async fn a_client_that_leaves_between_the_legs_has_its_hand_off_released() {
    let specs = [prefill("p0"), decode("d0").behind_a_valve(), decode("d1")];
    let config = unwatched(json!({"timeouts": {"connect": "1s"}}));
    let mut fleet = Fleet::with(specs, config).await;
    // The decode leg hangs in its connection attempt: it has not been sent.
    fleet.valve("d0").deafen().await;
    let exchange = asked(1, true).open(fleet.addr()).await;
    until(&fleet, "p0", "pins", 1).await;
    wait_for("the decode leg's turn", async || {
        let reserved = [("worker", "p0")];
        let metrics = fleet.router.metrics().await;
        (metrics.count("pointsman_worker_active_requests", &reserved) == 0).then_some(())
    })
    .await;
    drop(exchange);
    // The engine's lease is 30 s: only a release, through the other decode worker, frees it before.
    fleet.assert_nothing_leaks().await;
    assert_eq!(fleet.legs("d1", "decode_remote"), 0);
    let released = fleet.requests("d1");
    assert_eq!(released.len(), 1, "{released:?}");
    assert_eq!(released[0]["json"]["kv_transfer_params"]["do_remote_prefill"], true);
}

#[tokio::test]
async fn a_client_that_leaves_before_the_first_token_stops_the_decode_leg() {
    for (stream, reset) in [(true, false), (false, true)] {
        let fleet = Fleet::start([prefill("p0"), slow(decode("d0"), 0.01)]).await;
        let exchange = asked(1, stream).open(fleet.addr()).await;
        until(&fleet, "d0", "live", 1).await;
        leave(exchange, reset);
        until(&fleet, "d0", "aborted", 1).await;
        fleet.assert_nothing_leaks().await;
        assert_nobody_is_blamed(&fleet).await;
    }
}

async fn leaves_in_mid_stream(specs: Vec<Spec>, worker: &str, reset: bool) {
    let fleet = Fleet::with(specs, json!({})).await;
    let mut exchange = asked(1, true).open(fleet.addr()).await;
    exchange.tokens(2).await;
    let booked = fleet.router.status().await["models"][0]["live_bookings"].clone();
    assert_eq!(booked, 1);
    leave(exchange, reset);
    until(&fleet, worker, "aborted", 1).await;
    fleet.assert_nothing_leaks().await;
    let generated = fleet.stats(worker)["generated_tokens"].as_u64().unwrap();
    assert!(generated < 60, "it was stopped early, not run to its end: {generated}");
    assert_nobody_is_blamed(&fleet).await;
}

#[tokio::test]
async fn a_client_that_leaves_in_mid_stream_stops_the_decode_leg() {
    for reset in [false, true] {
        let specs = vec![prefill("p0"), slow(decode("d0"), 0.1)];
        leaves_in_mid_stream(specs, "d0", reset).await;
    }
}

#[tokio::test]
async fn a_client_that_leaves_in_mid_stream_stops_the_local_leg() {
    for reset in [false, true] {
        leaves_in_mid_stream(vec![slow(unified("u0"), 0.1)], "u0", reset).await;
    }
}

#[tokio::test]
async fn a_client_that_leaves_while_the_ladder_is_climbed_ends_it() {
    let hang = || rule(Leg::Prefill, Action::HangBeforeHeaders);
    let specs = [prefill("p0").faults(hang()), prefill("p1").faults(hang()), decode("d0")];
    let config = unwatched(json!({"timeouts": {"prefill": "300ms"}}));
    let fleet = Fleet::with(specs, config).await;
    let exchange = asked(1, true).open(fleet.addr()).await;
    wait_for("the second try", async || (fleet.requests("p1").len() == 1).then_some(())).await;
    drop(exchange);
    fleet.assert_nothing_leaks().await;
    assert_eq!(fleet.requests("d0").len(), 0);
}

/// Where a prefill ends just as its client leaves, its answer is lost on the way and nobody can name
/// what it left pinned: the lease frees it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whenever_clients_leave_nothing_is_left_behind() {
    let specs = [
        slow(prefill("p0").short_lease(), 0.4),
        slow(prefill("p1").short_lease(), 0.4),
        slow(decode("d0"), 0.4),
        slow(decode("d1"), 0.4),
    ];
    let fleet = Fleet::start(specs).await;
    let mut leaving = Vec::new();
    for seed in 0..48_u64 {
        let (addr, request) = (fleet.addr(), asked(seed as u32, seed % 3 != 0));
        leaving.push(tokio::spawn(async move {
            let mut exchange = request.open(addr).await;
            // From before the prefill to the middle of the stream.
            let patience = Duration::from_millis(seed * 37 % 900);
            let _left = timeout(patience, exchange.rest()).await;
            leave(exchange, seed % 2 == 0);
        }));
    }
    for client in leaving {
        client.await.unwrap();
    }
    fleet.assert_nothing_leaks().await;
    assert_nobody_is_blamed(&fleet).await;
    let (head, _) = asked(99, false).send(fleet.addr()).await;
    assert_eq!(head.status, 200);
    fleet.assert_nothing_leaks().await;
}

/// Memory of the router in MiB.
fn resident_mib(fleet: &Fleet) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", fleet.router.pid())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() / 1024
}

/// An engine whose stream has no end and no pauses.
struct Hose {
    addr: SocketAddr,
    sent: Arc<AtomicUsize>,
    /// Streams that the router has closed.
    closed: Arc<AtomicUsize>,
}

const ANSWER: &[u8] = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n";

impl Hose {
    async fn start() -> Hose {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        let addr = listener.local_addr().unwrap();
        let (sent, closed) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let hose = Hose { addr, sent: Arc::clone(&sent), closed: Arc::clone(&closed) };
        tokio::spawn(async move {
            while let Ok((stream, _peer)) = listener.accept().await {
                tokio::spawn(pour(stream, Arc::clone(&sent), Arc::clone(&closed)));
            }
        });
        hose
    }
}

async fn pour(mut stream: TcpStream, sent: Arc<AtomicUsize>, closed: Arc<AtomicUsize>) {
    let mut head = [0; 4096];
    let Ok(count @ 1..) = stream.read(&mut head).await else { return };
    if !head[..count].starts_with(b"POST") {
        let healthy = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n";
        let _ = stream.write_all(healthy).await;
        return;
    }
    let event = json!({"choices": [{"index": 0, "text": "x".repeat(16 * 1024)}]});
    let event = format!("data: {event}\n\n");
    let _ = stream.write_all(ANSWER).await;
    while stream.write_all(event.as_bytes()).await.is_ok() {
        sent.fetch_add(event.len(), Ordering::Relaxed);
    }
    closed.fetch_add(1, Ordering::Relaxed);
}

/// More than what the buffers of the sockets between engine and client take.
const BUFFERS: usize = 64 * 1024 * 1024;

#[tokio::test]
async fn a_client_that_stops_reading_holds_the_engine_back_and_is_let_go() {
    let hose = Hose::start().await;
    let worker = json!({"name": "hose", "url": format!("http://{}", hose.addr),
        "role": "unified", "engine": "openai"});
    let config = json!({"timeouts": {"reply_write": "1s"}});
    let router = Router::start(&configuration(&json!([worker]), config)).await;
    let fleet = Fleet { engines: Vec::new(), router };
    let before = resident_mib(&fleet);
    let asked = Request::completion(&completion(&prompt(1, 64), 8, true));
    let mut exchange = asked.open_narrow(fleet.addr()).await;
    exchange.tokens(1).await;
    // It reads no more.
    let mut most = 0;
    wait_until(async || {
        most = most.max(resident_mib(&fleet));
        match requests_in_flight(&fleet).await {
            0 => Ok(()),
            some => Err(format!("{some} requests of a client that does not read")),
        }
    })
    .await;
    assert!(most < before + 24, "{before} MiB before, {most} MiB while nobody reads");
    wait_until(async || match hose.closed.load(Ordering::Relaxed) {
        1 => Ok(()),
        closed => Err(format!("{closed} streams of the engine are closed")),
    })
    .await;
    let sent = hose.sent.load(Ordering::Relaxed);
    assert!(sent < BUFFERS, "the engine was not held back: {sent} bytes went out");
    fleet.assert_nothing_leaks().await;
    let rest = exchange.rest().await;
    assert!(rest.cut, "never a silent end");
    assert_nobody_is_blamed(&fleet).await;
}

#[tokio::test]
async fn a_client_that_reads_slowly_gets_everything() {
    let config = json!({"timeouts": {"reply_write": "1s", "stream_idle": "1s"}});
    let fleet = Fleet::with([unified("u0")], config).await;
    let mut asked = completion(&prompt(1, 64), 2000, true);
    asked["ignore_eos"] = json!(true);
    let mut exchange = Request::completion(&asked).open_narrow(fleet.addr()).await;
    let mut body = Body::default();
    while let Ok(Some(piece)) = exchange.piece().await {
        body.bytes.extend(piece);
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    fleet.assert_streamed_as_alone("/v1/completions", &asked, &body).await;
    fleet.assert_nothing_leaks().await;
}
