//! Connections to engines that end at the wrong moment: as a request goes out, in the middle of it, at
//! any byte of the reply; and engines that take a connection and say nothing.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod support;

use std::time::Duration;

use serde_json::{Value, json};
use support::fleet::{MODEL, completion, configuration, prompt, unwatched};
use support::raw::{stream, whole};
use support::{
    Act, Body, Fleet, Head, Metrics, Raw, Request, Router, Then, decode, prefill, unified,
    wait_until,
};
use tokio::net::TcpListener;

/// A router that asks engines nothing but what its requests need, and keeps its connections.
fn settings(more: Value) -> Value {
    let mut config = json!({
        "health": {"interval": "1h"},
        "metrics": {"scrape_interval": "1h"},
        "routing": {"breaker": {"failures": 100}},
    });
    support::merge(&mut config, more);
    config
}

/// A router in front of one engine of bare sockets.
async fn alone(acts: impl IntoIterator<Item = Act>) -> (Raw, Router) {
    let raw = Raw::start(acts).await;
    let workers = json!([raw.worker("u0", "unified")]);
    let router = Router::start(&configuration(&workers, settings(json!({})))).await;
    (raw, router)
}

async fn ask(router: &Router, stream: bool) -> (Head, Body) {
    Request::completion(&completion(&prompt(1, 40), 4, stream)).send(router.addr()).await
}

async fn cut(router: &Router) -> u64 {
    let metrics: Metrics = router.metrics().await;
    metrics.count("pointsman_leg_failures_total", &[("cause", "cut")])
}

fn connections(raw: &Raw) -> Vec<usize> {
    raw.seen().iter().map(|seen| seen.connection).collect()
}

fn reply(text: &str) -> Act {
    Act::Send(whole(text), Then::Keep)
}

/// Adds a worker before one that the fleet has, so that it is asked first.
async fn go_first(fleet: &Fleet, mut worker: Value, before: &str) {
    fleet.remove(before).await;
    support::merge(&mut worker, json!({"model": MODEL}));
    let (head, body) = Request::post("/v1/pointsman/workers", &worker).send(fleet.addr()).await;
    assert_eq!(head.status, 201, "{body:?}");
    let name = worker["name"].as_str().unwrap();
    until_up(fleet, name).await;
    fleet.add(before).await;
    until_up(fleet, before).await;
}

async fn until_up(fleet: &Fleet, name: &str) {
    wait_until(async || match fleet.router.worker(name).await {
        Some(worker) if worker["condition"] == "up" => Ok(()),
        other => Err(format!("{name} is not up: {other:?}")),
    })
    .await;
}

// ---- a connection that ends just as a request goes out ---------------------------------------

#[tokio::test]
async fn a_used_connection_that_ends_as_a_request_goes_out_costs_one_silent_try() {
    let nothing = || Vec::new();
    let ends = [
        Act::Read(1, Then::Rst),
        Act::Read(1, Then::Fin),
        Act::Send(nothing(), Then::Rst),
        Act::Send(nothing(), Then::Fin),
    ];
    for end in ends {
        let (raw, router) = alone([reply("first"), end.clone(), reply("second")]).await;
        for text in ["first", "second"] {
            let (head, body) = ask(&router, false).await;
            assert_eq!(head.status, 200, "{end:?}: {body:?}");
            assert_eq!(body.json()["choices"][0]["text"], text, "{end:?}");
        }
        assert_eq!(connections(&raw), [0, 0, 1], "{end:?}");
        assert_eq!(cut(&router).await, 0, "nobody is to blame");
    }
}

#[tokio::test]
async fn there_is_one_silent_try_and_no_second() {
    let (raw, router) = alone([reply("first"), Act::Read(1, Then::Rst)]).await;
    assert_eq!(ask(&router, false).await.0.status, 200);
    let (head, body) = ask(&router, false).await;
    assert_eq!(head.status, 503, "{body:?}");
    assert!(body.error().contains("`u0` cut its answer off"), "{body:?}");
    assert_eq!((connections(&raw), cut(&router).await), (vec![0, 0, 1], 1));
}

#[tokio::test]
async fn a_connection_that_ends_after_a_byte_of_the_reply_is_not_tried_again() {
    for bytes in
        [&b"H"[..], b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{"]
    {
        let (raw, router) = alone([reply("first"), Act::Send(bytes.to_vec(), Then::Rst)]).await;
        assert_eq!(ask(&router, false).await.0.status, 200);
        let (head, body) = ask(&router, false).await;
        assert_eq!(head.status, 503, "{body:?}");
        assert_eq!((connections(&raw), cut(&router).await), (vec![0, 0], 1));
    }
}

#[tokio::test]
async fn a_connection_that_was_never_used_is_not_tried_again() {
    let raw = Raw::start([Act::Send(Vec::new(), Then::Rst)]).await;
    let workers = json!([raw.worker("u0", "unified")]);
    let router = Router::start(&configuration(&workers, unwatched(json!({})))).await;
    assert_eq!(ask(&router, false).await.0.status, 503);
    assert_eq!((raw.seen().len(), cut(&router).await), (1, 1));
}

/// It would be used twice, if the engine read it after all.
#[tokio::test]
async fn a_hand_off_never_goes_out_twice() {
    let config = settings(json!({"routing": {"policy": "always_remote"}}));
    let fleet = Fleet::with([prefill("p0"), decode("d1")], config).await;
    let raw = Raw::start([reply("first"), Act::Send(Vec::new(), Then::Rst)]).await;
    go_first(&fleet, raw.worker("d0", "decode"), "d1").await;
    let (head, _) = ask(&fleet.router, false).await;
    assert_eq!((head.status, head.path(), head.worker()), (200, "remote", "d0"));
    let asked = completion(&prompt(2, 40), 4, false);
    let (head, body) = Request::completion(&asked).send(fleet.addr()).await;
    assert_eq!((head.status, head.worker()), (200, "d1"), "{body:?}");
    fleet.assert_completed_as_alone(&asked, &body).await;
    assert!(raw.seen().iter().all(|seen| seen.text.contains("remote_engine_id")));
    assert_eq!((raw.seen().len(), cut(&fleet.router).await), (2, 1));
}

#[tokio::test]
async fn a_connection_is_not_used_again_when_engines_may_be_about_to_close_it() {
    let (raw, router) = alone([reply("text")]).await;
    assert_eq!(ask(&router, false).await.0.status, 200);
    assert_eq!(ask(&router, false).await.0.status, 200);
    // By default it is kept for 4 s; engines keep theirs for 5 s.
    tokio::time::sleep(Duration::from_millis(4300)).await;
    assert_eq!(ask(&router, false).await.0.status, 200);
    let [first, second, third] = connections(&raw)[..] else { panic!("{:?}", raw.seen()) };
    assert!(first == second && second != third, "{:?}", raw.seen());
}

// ---- resets at each stage --------------------------------------------------------------------

/// An engine that resets connections somewhere, and a sound one beside it.
async fn another_serves_it(act: Act, asked: &Value, padding: usize) {
    let padded =
        asked.to_string().replacen('{', &format!("{{\"user\":\"{}\",", "x".repeat(padding)), 1);
    let request = Request::raw("/v1/completions", padded);
    let raw = Raw::start([act.clone()]).await;
    let fleet = Fleet::with([unified("u1")], unwatched(json!({}))).await;
    go_first(&fleet, raw.worker("u0", "unified"), "u1").await;
    let (head, body) = request.send(fleet.addr()).await;
    assert_eq!((head.status, head.worker()), (200, "u1"), "{act:?}: {body:?}");
    fleet.assert_completed_as_alone(asked, &body).await;
    assert_eq!((raw.seen().len(), cut(&fleet.router).await), (1, 1), "{act:?}");
}

#[tokio::test]
async fn a_reset_while_the_request_goes_out_leaves_it_to_another_worker() {
    // So long that it does not fit into what the system takes of it.
    let asked = completion(&prompt(2, 40), 4, false);
    another_serves_it(Act::Read(64 * 1024, Then::Rst), &asked, 16 * 1024 * 1024).await;
}

#[tokio::test]
async fn a_reset_at_any_stage_of_the_reply_leaves_it_to_another_worker() {
    let asked = |stream| completion(&prompt(2, 40), 4, stream);
    let (reply, events) = (whole("never seen"), stream(0));
    let head = reply.windows(4).position(|at| at == b"\r\n\r\n").unwrap();
    for bytes in [0, 1, head, head + 4, head + 20, reply.len() - 1] {
        another_serves_it(Act::Send(reply[..bytes].to_vec(), Then::Rst), &asked(false), 0).await;
    }
    for bytes in [0, 20, events.len()] {
        another_serves_it(Act::Send(events[..bytes].to_vec(), Then::Rst), &asked(true), 0).await;
    }
}

#[tokio::test]
async fn a_reset_in_a_stream_ends_it_with_an_error_and_never_with_done() {
    let whole_events = stream(3);
    for bytes in [whole_events.len(), whole_events.len() - 2, whole_events.len() - 30] {
        for then in [Then::Rst, Then::Fin] {
            let (raw, router) = alone([Act::Send(whole_events[..bytes].to_vec(), then)]).await;
            let (head, body) = ask(&router, true).await;
            assert_eq!((head.status, body.cut), (200, false), "{body:?}");
            let last = body.events().pop().unwrap();
            assert!(last.contains("the reply broke off"), "{bytes} {then:?}: {body:?}");
            assert!(!body.text().contains("[DONE]"), "{body:?}");
            // Whole events alone, each as the engine sent it.
            let tokens = if bytes < whole_events.len() - 2 { " t0 t1" } else { " t0 t1 t2" };
            assert_eq!(body.content(), tokens, "{bytes} {then:?}");
            assert_eq!(raw.seen().len(), 1, "nothing is tried again once the client has something");
        }
    }
}

#[tokio::test]
async fn a_reply_of_another_kind_is_a_head_and_a_cut_body_though_the_cut_comes_with_the_head() {
    let embeddings = whole("of another kind");
    let head = embeddings.windows(4).position(|at| at == b"\r\n\r\n").unwrap() + 4;
    for bytes in [head, head + 10, embeddings.len() - 1] {
        let act = Act::Send(embeddings[..bytes].to_vec(), Then::Fin);
        let (_raw, router) = alone([act]).await;
        for _ in 0..20 {
            let asked = json!({"model": MODEL, "input": "a text to embed"});
            let mut exchange = Request::post("/v1/embeddings", &asked).open(router.addr()).await;
            assert_eq!(exchange.head().await.status, 200);
            let body = exchange.rest().await;
            assert!(body.cut, "{body:?}");
            assert_eq!(body.bytes, embeddings[head..bytes], "what came is passed on");
        }
    }
}

/// One that says nothing gets no last word, and no clean end either.
#[tokio::test]
async fn a_silent_stream_is_cut_at_the_end_of_the_grace_period() {
    let raw = Raw::start([Act::Send(stream(1), Then::Hang)]).await;
    let config = settings(json!({"shutdown": {"grace": "300ms"}}));
    let workers = json!([raw.worker("u0", "unified")]);
    let mut router = Router::start(&configuration(&workers, config)).await;
    let asked = completion(&prompt(1, 40), 4, true);
    let mut exchange = Request::completion(&asked).open(router.addr()).await;
    exchange.tokens(1).await;
    router.terminate();
    let rest = exchange.rest().await;
    assert!(rest.cut && rest.bytes.is_empty(), "{rest:?}");
    assert_eq!(router.ended().await.code(), Some(0));
}

// ---- engines that take a connection and say nothing ------------------------------------------

#[tokio::test]
async fn an_engine_that_accepts_and_never_answers_holds_nothing_up_and_is_used_once_it_does() {
    // The system takes connections for it; nobody reads them.
    let mute = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", mute.local_addr().unwrap());
    let mute_worker = json!({"name": "u0", "role": "unified", "url": url, "kv_events": "off"});
    let config = json!({"health": {"interval": "100ms", "timeout": "300ms"}});
    let mut fleet = Fleet::with([unified("u1")], config).await;
    let mut worker = mute_worker.clone();
    support::merge(&mut worker, json!({"model": MODEL}));
    Request::post("/v1/pointsman/workers", &worker).send(fleet.addr()).await;
    for seed in 0..6 {
        let asked = completion(&prompt(seed, 40), 4, false);
        let (head, body) = Request::completion(&asked).send(fleet.addr()).await;
        assert_eq!((head.status, head.worker()), (200, "u1"), "{body:?}");
    }
    fleet.kill("u1").await;
    let raw = Raw::on(mute, [reply("it speaks")]);
    wait_until(async || match ask(&fleet.router, false).await {
        (head, _) if head.worker() == "u0" => Ok(()),
        (_, body) => Err(format!("not by u0: {body:?}")),
    })
    .await;
    assert!(!raw.seen().is_empty());
}
