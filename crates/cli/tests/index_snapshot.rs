//! A router that starts with another one's index knows the fleet at once, and goes on from there; where
//! the index cannot be had it starts empty.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

mod cache;
mod command;
mod support;

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

use pointsman_sim::mock::Faults;
use serde_json::{Value, json};
use support::fleet::{completion, configuration, prompt};
use support::{Fleet, Request, Router, decode, prefill, wait_until};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

const SNAPSHOT: &str = "/v1/pointsman/index/snapshot";

/// Two pairs, whose router hands its index out.
async fn fleet() -> Fleet {
    let specs = [prefill("p0"), prefill("p1"), decode("d0"), decode("d1")];
    Fleet::with(specs, json!({"admin": {"index_snapshot": true}})).await
}

/// Prompts of many lengths; every third one continues the one before it.
fn prompts(from: u32, count: u32) -> Vec<Vec<u32>> {
    let one = |seed: u32| match seed % 3 {
        2 => [prompt(seed - 1, 176), prompt(seed + 100, 300)].concat(),
        _ => prompt(seed, 80 + 96 * (seed % 3)),
    };
    (from..from + count).map(one).collect()
}

/// Sends each prompt through the router, and to one of the engines, so that all of them hold some.
async fn send_all(fleet: &Fleet, prompts: &[Vec<u32>]) {
    for (prompt, engine) in prompts.iter().zip(fleet.engines.iter().cycle()) {
        let request = Request::completion(&completion(prompt, 4, false));
        for to in [fleet.addr(), engine.mock.addr()] {
            assert_eq!(request.send(to).await.0.status, 200);
        }
    }
}

/// A further router for the same workers, as they were told to the first one.
async fn router(fleet: &Fleet, over: Value) -> Router {
    let workers: Vec<&Value> = fleet.engines.iter().map(|engine| &engine.worker).collect();
    Router::start(&configuration(&json!(workers), over)).await
}

/// The same, but deaf: it connects to nobody's events.
async fn deaf_router(fleet: &Fleet, over: Value) -> Router {
    let workers = fleet.engines.iter().map(|engine| {
        let mut worker = engine.worker.clone();
        worker["kv_events"] = json!({"endpoint": "tcp://127.0.0.1:1"});
        worker
    });
    Router::start(&configuration(&workers.collect(), over)).await
}

fn from(addr: SocketAddr) -> Value {
    json!({"kv": {"restore_from": format!("http://{addr}")}})
}

/// What a router would decide, and what it goes by.
async fn decided(to: SocketAddr, prompt: &[u32]) -> Value {
    let body = completion(prompt, 4, false);
    let (head, record) = Request::post("/v1/pointsman/explain", &body).json(to).await;
    assert_eq!(head.status, 200, "{record}");
    let candidate = |candidate: &Value| {
        json!([candidate["worker"], candidate["overlap_tokens"], candidate["effective_isl_tokens"]])
    };
    let candidates: Vec<Value> =
        record["candidates"].as_array().unwrap().iter().map(candidate).collect();
    json!([record["path"], record["prefill_worker"], record["decode_worker"], candidates])
}

async fn assert_decides_alike(one: &Router, other: &Router, prompts: &[Vec<u32>]) {
    let mut overlaps = 0;
    for prompt in prompts {
        let decision = decided(one.addr(), prompt).await;
        assert_eq!(decided(other.addr(), prompt).await, decision);
        overlaps += decision[3].as_array().unwrap().iter().filter(|c| c[1] != 0).count();
    }
    assert!(overlaps > prompts.len(), "next to nothing is cached: {overlaps}");
}

/// Blocks that a router knows of, over all workers.
async fn known(router: &Router) -> u64 {
    let (_, json) = Request::get("/v1/pointsman/workers").json(router.addr()).await;
    json["workers"].as_array().unwrap().iter().filter_map(|w| w["index_blocks"].as_u64()).sum()
}

/// Blocks that a router was told to be stored.
async fn stored(router: &Router) -> u64 {
    let metrics = router.metrics().await;
    metrics.count("pointsman_kv_event_blocks_total", &[("kind", "stored")])
}

/// Waits until a router knows of every engine's blocks what there are, and says so.
async fn until_current(fleet: &Fleet, router: &Router) {
    wait_until(async || {
        for engine in &fleet.engines {
            let known = router.worker(&engine.name).await.unwrap();
            let held = cache::Cache::of(engine)[0].blocks();
            if known["index_blocks"] != held || known["index_stale"] != false {
                let stale = &known["index_stale"];
                return Err(format!("{held} held, {} known, stale {stale}", known["index_blocks"]));
            }
        }
        Ok(())
    })
    .await;
}

async fn snapshot(router: &Router) -> Vec<u8> {
    let (head, body) = Request::get(SNAPSHOT).send(router.addr()).await;
    assert_eq!(head.status, 200);
    assert!(!body.cut);
    body.bytes
}

/// What a server does with a request.
#[derive(Clone, Debug)]
enum Answer {
    /// It promises these bytes and sends so many of them.
    Bytes(Vec<u8>, usize),
    /// That another reader is at it, so many times, and then these bytes.
    Busy(Arc<AtomicUsize>, Vec<u8>),
    /// Nothing.
    Silence,
}

/// A server of the test in place of another router.
async fn serve(answer: Answer) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let answer = answer.clone();
            tokio::spawn(async move {
                let mut buffer = [0; 4096];
                let _head = stream.read(&mut buffer).await;
                match answer {
                    Answer::Silence => std::future::pending().await,
                    Answer::Busy(times, _) if take_one(&times) => {
                        let busy = b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: 0\r\n\r\n";
                        let _ = stream.write_all(busy).await;
                        let _ = stream.shutdown().await;
                    }
                    Answer::Busy(_, bytes) => send(stream, &bytes, bytes.len()).await,
                    Answer::Bytes(bytes, sent) => send(stream, &bytes, sent).await,
                }
            });
        }
    });
    addr
}

fn take_one(times: &AtomicUsize) -> bool {
    times.fetch_update(SeqCst, SeqCst, |left| left.checked_sub(1)).is_ok()
}

async fn send(mut stream: TcpStream, bytes: &[u8], sent: usize) {
    let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n", bytes.len());
    let _ = stream.write_all(head.as_bytes()).await;
    let _ = stream.write_all(&bytes[..sent]).await;
    let _ = stream.shutdown().await;
}

async fn serve_whole(bytes: Vec<u8>) -> SocketAddr {
    let sent = bytes.len();
    serve(Answer::Bytes(bytes, sent)).await
}

#[tokio::test]
async fn a_router_that_starts_with_anothers_index_decides_alike_without_an_event() {
    let fleet = fleet().await;
    let prompts = prompts(0, 24);
    send_all(&fleet, &prompts).await;
    until_current(&fleet, &fleet.router).await;
    let second = deaf_router(&fleet, from(fleet.addr())).await;
    assert_eq!(known(&second).await, known(&fleet.router).await);
    assert_decides_alike(&fleet.router, &second, &prompts).await;
    assert!(second.log().contains("taken over from another router"), "{}", second.log());
    // Nobody has vouched for it yet.
    let metrics = second.metrics().await;
    assert_eq!(metrics.count("pointsman_index_stale", &[]), 4);
    assert_eq!(metrics.not_zero("pointsman_kv_events_total"), [""; 0]);
}

#[tokio::test]
async fn events_go_on_where_the_snapshot_left_off() {
    let fleet = fleet().await;
    let all = prompts(0, 30);
    send_all(&fleet, &all[..15]).await;
    until_current(&fleet, &fleet.router).await;
    let old = serve_whole(snapshot(&fleet.router).await).await;
    let before = stored(&fleet.router).await;
    // What the snapshot does not know is replayed.
    send_all(&fleet, &all[15..24]).await;
    let second = router(&fleet, from(old)).await;
    until_current(&fleet, &second).await;
    assert_decides_alike(&fleet.router, &second, &all[..24]).await;
    // And what comes then is heard.
    send_all(&fleet, &all[24..]).await;
    until_current(&fleet, &fleet.router).await;
    until_current(&fleet, &second).await;
    assert_decides_alike(&fleet.router, &second, &all).await;
    let since = stored(&fleet.router).await - before;
    assert_eq!(stored(&second).await, since, "what was known is not read again");
    let metrics = second.metrics().await;
    for kind in ["restart", "lost", "resync", "malformed"] {
        assert_eq!(metrics.count("pointsman_kv_events_total", &[("kind", kind)]), 0, "{kind}");
    }
}

#[tokio::test]
async fn routers_that_start_together_take_turns_at_the_other_ones_index() {
    let fleet = fleet().await;
    let prompts = prompts(0, 12);
    send_all(&fleet, &prompts).await;
    until_current(&fleet, &fleet.router).await;
    let busy = Arc::new(AtomicUsize::new(2));
    let source = serve(Answer::Busy(Arc::clone(&busy), snapshot(&fleet.router).await)).await;
    let second = deaf_router(&fleet, from(source)).await;
    assert_eq!(busy.load(SeqCst), 0);
    assert_eq!(known(&second).await, known(&fleet.router).await);
}

#[tokio::test]
async fn a_worker_that_was_restarted_since_the_snapshot_is_read_anew() {
    let fleet = fleet().await;
    let prompts = prompts(0, 24);
    send_all(&fleet, &prompts[..12]).await;
    until_current(&fleet, &fleet.router).await;
    let old = serve_whole(snapshot(&fleet.router).await).await;
    for name in ["d0", "p1"] {
        fleet.set_faults(name, Faults { restart_publisher: true, ..Faults::default() });
        assert_eq!(fleet.stats(name)["cached_blocks"], 0);
    }
    until_current(&fleet, &fleet.router).await;
    // As many messages as before, or more.
    send_all(&fleet, &prompts).await;
    let second = router(&fleet, from(old)).await;
    until_current(&fleet, &second).await;
    assert_decides_alike(&fleet.router, &second, &prompts).await;
    let metrics = second.metrics().await;
    let restarts = |worker| {
        metrics.count("pointsman_kv_events_total", &[("worker", worker), ("kind", "restart")])
    };
    assert_eq!(["p0", "p1", "d0", "d1"].map(restarts), [0, 1, 1, 0]);
}

#[tokio::test]
async fn without_a_replay_nobody_vouches_for_the_snapshot_and_it_is_dropped() {
    let specs = [prefill("p0"), decode("d0")].map(support::Spec::without_replay);
    let fleet = Fleet::with(specs, json!({"admin": {"index_snapshot": true}})).await;
    wait_until(async || match &fleet.stats("d0")["ranks"][0]["events"]["subscribers"] {
        some if *some == 1 => Ok(()),
        other => Err(format!("the publisher has {other} subscribers")),
    })
    .await;
    send_all(&fleet, &prompts(0, 6)).await;
    until_current(&fleet, &fleet.router).await;
    let second = router(&fleet, from(fleet.addr())).await;
    wait_until(async || match known(&second).await {
        0 => Ok(()),
        blocks => Err(format!("{blocks} blocks are still believed")),
    })
    .await;
    assert!(second.log().contains("taken over from another router"));
}

#[tokio::test]
async fn workers_of_one_router_alone_are_skipped_or_start_empty() {
    let mut fleet = fleet().await;
    let prompts = prompts(0, 12);
    send_all(&fleet, &prompts).await;
    until_current(&fleet, &fleet.router).await;
    let blocks = known(&fleet.router).await;
    let left = blocks - fleet.router.worker("p1").await.unwrap()["index_blocks"].as_u64().unwrap();
    let gone = fleet.kill("p1").await;
    fleet.join(decode("d2")).await;
    let second = deaf_router(&fleet, from(fleet.addr())).await;
    assert_eq!(known(&second).await, left);
    assert_eq!(second.worker("d2").await.unwrap()["index_blocks"], 0);
    assert!(second.log().contains("skipped=1"), "{}", second.log());
    drop(gone);
}

#[tokio::test]
async fn an_index_that_cannot_be_had_is_a_warning_and_the_router_starts_empty() {
    let fleet = fleet().await;
    send_all(&fleet, &prompts(0, 12)).await;
    until_current(&fleet, &fleet.router).await;
    let whole = snapshot(&fleet.router).await;
    let closed = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
    let unwilling = router(&fleet, json!({})).await;
    let cut = |sent: usize| serve(Answer::Bytes(whole.clone(), sent));
    let changed = |at: usize| {
        let mut bytes = whole.clone();
        bytes[at] ^= 1;
        serve_whole(bytes)
    };
    let head = whole.iter().position(|byte| *byte == b'\n').unwrap();
    let next = String::from_utf8(whole[..head].to_vec()).unwrap();
    let next = next.replace("\"version\":1", "\"version\":2").into_bytes();
    let endless = vec![b' '; 4 << 20];
    let cases = [
        (closed, "could not be reached"),
        (unwilling.addr(), "admin.index_snapshot"),
        (cut(0).await, "ended early"),
        (cut(head / 2).await, "ended early"),
        (cut(head + 1).await, "ended early"),
        (cut(whole.len() / 2).await, "ended early"),
        (cut(whole.len() - 1).await, "ended early"),
        (serve_whole(whole[..whole.len() - 1].to_vec()).await, "ended early"),
        (serve_whole([&next, &whole[head..]].concat()).await, "version 2"),
        (serve_whole(b"<html>\n".to_vec()).await, "not a snapshot"),
        (serve_whole(endless).await, "too long"),
        (serve(Answer::Silence).await, "kv.restore_timeout"),
        (changed(whole.len() - 10).await, ""),
        (changed(whole.len() / 2).await, ""),
    ];
    for (url, cause) in cases {
        let mut over = from(url);
        over["kv"]["restore_timeout"] = json!("500ms");
        let begun = Instant::now();
        let second = deaf_router(&fleet, over).await;
        assert!(begun.elapsed() < Duration::from_secs(5), "{:?} for {cause}", begun.elapsed());
        let log = second.log();
        let warning = log.lines().find(|line| line.contains("starts empty"));
        let warning = warning.unwrap_or_else(|| panic!("no warning for {cause}: {log}"));
        assert!(warning.contains(&format!("http://{url}/")), "{warning}");
        assert!(warning.contains(cause), "{warning}");
        assert_eq!(known(&second).await, 0, "{cause}");
        assert_eq!(second.metrics().await.not_zero("pointsman_index_stale"), [""; 0]);
    }
}

#[tokio::test]
async fn the_index_is_handed_out_only_where_that_is_wanted() {
    let fleet = fleet().await;
    let (head, _) = Request::new("POST", SNAPSHOT, Vec::new()).send(fleet.addr()).await;
    assert_eq!(head.status, 405);
    let unwilling = router(&fleet, json!({})).await;
    let (head, body) = Request::get(SNAPSHOT).send(unwilling.addr()).await;
    assert_eq!(head.status, 403);
    assert!(body.error().contains("admin.index_snapshot"));
}

#[test]
fn the_url_may_come_from_a_flag_or_the_environment() {
    let flag = ["serve", "--restore-from", "ftp://elsewhere"];
    let ended = command::run(&flag, &[], "");
    assert!(ended.err.contains("kv.restore_from") && ended.err.contains("--restore-from"));
    assert_eq!(ended.code, Some(1));
    let environment = [("POINTSMAN__KV__RESTORE_FROM", "10.0.0.3")];
    let ended = command::run(&["serve"], &environment, "");
    assert!(ended.err.contains("POINTSMAN__KV__RESTORE_FROM"), "{ended:?}");
    assert_eq!(ended.code, Some(1));
}

#[tokio::test]
async fn a_snapshot_taken_under_traffic_is_as_good_as_one_taken_in_peace() {
    let fleet = fleet().await;
    let all = prompts(0, 90);
    let restored = async {
        while known(&fleet.router).await < 20 {
            tokio::task::yield_now().await;
        }
        [router(&fleet, from(fleet.addr())).await, router(&fleet, from(fleet.addr())).await]
    };
    let (seconds, ()) = tokio::join!(restored, send_all(&fleet, &all));
    cache::caught_up(&fleet).await;
    for second in &seconds {
        until_current(&fleet, second).await;
        assert_decides_alike(&fleet.router, second, &all).await;
        assert!(second.log().contains("taken over from another router"));
    }
}
