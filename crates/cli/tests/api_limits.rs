//! Every limit on what a client may send or take: its status, its words, and that it is counted.
#![allow(clippy::expect_used, clippy::panic, reason = "it is all test")]

mod support;

use std::net::SocketAddr;
use std::time::Duration;

use pointsman_sim::mock::{Action, Leg};
use serde_json::{Value, json};
use support::client::{connect, error_message};
use support::fleet::{MODEL, completion, prompt, rule, times};
use support::{Fleet, Request, SOON, Spec, decode, prefill};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::timeout;

fn pair() -> [Spec; 2] {
    [prefill("p0"), decode("d0")]
}

/// Sends bytes as they are; status and all that comes until the connection ends.
async fn raw(to: SocketAddr, bytes: &[u8]) -> (Option<u16>, String) {
    let mut stream = connect(to).await.expect("the router takes connections");
    // What is not wanted may not be read.
    let _ = stream.write_all(bytes).await;
    let mut read = Vec::new();
    let _ = timeout(SOON, stream.read_to_end(&mut read)).await.expect("the connection ends");
    let text = String::from_utf8_lossy(&read).into_owned();
    let status = text.split(' ').nth(1).and_then(|status| status.parse().ok());
    (status, text)
}

fn head_of(path: &str, headers: &str) -> String {
    format!(
        "POST {path} HTTP/1.1\r\nhost: router\r\ncontent-type: application/json\r\nconnection: close\r\n{headers}\r\n"
    )
}

async fn refused(fleet: &Fleet, limit: &str) -> u64 {
    let metrics = fleet.router.metrics().await;
    metrics.count("pointsman_requests_refused_total", &[("signal", limit)])
}

#[tokio::test]
async fn a_body_beyond_the_limit_is_413_before_it_is_read() {
    let over = json!({"limits": {"max_body_bytes": "1KiB"}, "routing": {"policy": "always_local"}});
    let fleet = Fleet::with(pair(), over).await;
    let fits = format!("{{\"model\":\"{MODEL}\",\"prompt\":[69],\"pad\":\"");
    let fits = format!("{fits}{}\"}}", "x".repeat(1024 - fits.len() - 2));
    assert_eq!(fits.len(), 1024);
    for (body, status) in [(fits.clone(), 200), (format!("{fits} "), 413)] {
        let (head, reply) = Request::raw("/v1/completions", body).json(fleet.addr()).await;
        assert_eq!(head.status, status, "{reply}");
        if status == 413 {
            assert!(error_message(&reply).contains("1024 bytes"), "{reply}");
        }
    }
    // Announced and never sent.
    let head = head_of("/v1/completions", "content-length: 1000000000\r\n");
    let (status, _) = raw(fleet.addr(), head.as_bytes()).await;
    assert_eq!(status, Some(413));
    // In pieces without an announcement.
    let mut chunked = head_of("/v1/completions", "transfer-encoding: chunked\r\n");
    for _ in 0..3 {
        chunked += &format!("1f4\r\n{}\r\n", "x".repeat(500));
    }
    let (status, _) = raw(fleet.addr(), (chunked + "0\r\n\r\n").as_bytes()).await;
    assert_eq!(status, Some(413));
    // In pieces that fit.
    let chunked = head_of("/v1/completions", "transfer-encoding: chunked\r\n");
    let pieces: String = [&fits[..7], &fits[7..300], &fits[300..]]
        .iter()
        .map(|piece| format!("{:x}\r\n{piece}\r\n", piece.len()))
        .collect();
    let (status, text) = raw(fleet.addr(), (chunked + &pieces + "0\r\n\r\n").as_bytes()).await;
    assert_eq!(status, Some(200), "{text}");
    let last = fleet.requests("d0").pop().map(|request| request["body"].clone());
    assert_eq!(last, Some(Value::String(fits)), "put together as it was");
}

#[tokio::test]
async fn compressed_bodies_are_415_and_another_content_type_is_the_engines_to_refuse() {
    let fleet = Fleet::start(pair()).await;
    let body = completion(&prompt(1, 20), 2, false);
    for (encoding, status) in [("gzip", 415), ("br", 415), ("identity", 200)] {
        let request = Request::completion(&body).header("content-encoding", encoding);
        let (head, reply) = request.json(fleet.addr()).await;
        assert_eq!(head.status, status, "{encoding}: {reply}");
        if status == 415 {
            assert!(error_message(&reply).contains("uncompressed"), "{reply}");
        }
    }
    let text = Request::new("POST", "/v1/completions", body.to_string().into_bytes());
    let (head, reply) = text.header("content-type", "text/plain").json(fleet.addr()).await;
    assert_eq!(head.status, 400);
    assert!(error_message(&reply).contains("Unsupported Media Type"), "{reply}");
    fleet.assert_nothing_leaks().await;
}

#[tokio::test]
async fn a_head_beyond_the_limit_is_431() {
    let fleet = Fleet::with(pair(), json!({"limits": {"max_header_bytes": "8KiB"}})).await;
    let long = head_of("/v1/completions", &format!("x-long: {}\r\n", "x".repeat(9000)));
    assert_eq!(raw(fleet.addr(), long.as_bytes()).await.0, Some(431));
    let many: String = (0..200).map(|at| format!("x-{at}: 1\r\n")).collect();
    assert_eq!(raw(fleet.addr(), head_of("/health", &many).as_bytes()).await.0, Some(431));
    // Room is left for what people send.
    let fits = format!(
        "GET /health HTTP/1.1\r\nhost: r\r\nconnection: close\r\nx-long: {}\r\n\r\n",
        "x".repeat(7000)
    );
    assert_eq!(raw(fleet.addr(), fits.as_bytes()).await.0, Some(200));
}

#[tokio::test]
async fn a_client_that_sends_too_slowly_is_let_go() {
    let over = json!({"timeouts": {"body_read": "200ms", "header_read": "300ms"}});
    let fleet = Fleet::with(pair(), over).await;
    // The body stops coming.
    let request = Request::completion(&completion(&prompt(1, 20), 2, false));
    let mut exchange = request.begin(fleet.addr()).await;
    exchange.send(b"{\"model\"").await;
    let head = exchange.head().await;
    assert_eq!(head.status, 408);
    assert!(exchange.rest().await.error().contains("did not come in time"));
    // The head stops coming; nothing comes at all.
    for begin in ["POST /v1/completions HTTP/1.1\r\nhost:", "PRI", ""] {
        let (status, text) = raw(fleet.addr(), begin.as_bytes()).await;
        assert!(matches!(status, None | Some(408)), "{begin:?}: {text}");
    }
    // The next head on a connection that is kept.
    let kept = "GET /health HTTP/1.1\r\nhost: r\r\n\r\n";
    assert_eq!(raw(fleet.addr(), kept.as_bytes()).await.0, Some(200));
    fleet.assert_nothing_leaks().await;
}

#[tokio::test]
async fn a_full_router_says_429_and_when_to_come_back() {
    let over = json!({"limits": {"max_in_flight": 2, "retry_after": "1500ms"}});
    let fleet = Fleet::with(pair(), over).await;
    fleet.set_faults("d0", rule(Leg::Any, Action::SlowTokens { delay_ms: 20 }));
    let mut body = completion(&prompt(1, 200), 10_000, true);
    body["ignore_eos"] = json!(true);
    let endless = Request::completion(&body);
    let (mut first, mut second) =
        (endless.open(fleet.addr()).await, endless.open(fleet.addr()).await);
    first.tokens(1).await;
    second.tokens(1).await;
    for request in [
        Request::completion(&completion(&prompt(2, 20), 2, false)),
        Request::post("/v1/pointsman/explain", &completion(&prompt(2, 20), 2, false)),
        Request::post("/v1/embeddings", &json!({"model": MODEL, "input": "x"})),
    ] {
        let (head, error) = request.json(fleet.addr()).await;
        assert_eq!((head.status, head.header("retry-after")), (429, Some("2")), "{error}");
        assert_eq!(error["error"]["type"], "RateLimitError");
        error_message(&error);
    }
    assert_eq!(refused(&fleet, "max_in_flight").await, 3);
    assert_eq!(fleet.router.status().await["requests_in_flight"], 2);
    // Whoever only looks is not counted.
    assert!(fleet.router.ready().await.0);
    // One leaves, another comes in.
    drop(first);
    support::wait_until(async || match fleet.router.status().await["requests_in_flight"].clone() {
        inside if inside == 1 => Ok(()),
        inside => Err(format!("{inside} requests in flight")),
    })
    .await;
    let (head, _) = fleet.router.complete(&completion(&prompt(2, 20), 2, false)).await;
    assert_eq!(head.status, 200);
    drop(second);
    fleet.assert_nothing_leaks().await;
}

/// A body is held until its reply begins.
#[tokio::test]
async fn a_body_that_does_not_fit_beside_those_inside_is_429() {
    let fleet = Fleet::with(pair(), json!({"limits": {"max_in_flight_bytes": "64KiB"}})).await;
    fleet.set_faults("p0", times(1, Leg::Prefill, Action::HangBeforeHeaders));
    let mut body = completion(&prompt(1, 40), 2, false);
    body["pad"] = json!("x".repeat(40 * 1024));
    let large = Request::completion(&body);
    let inside = large.open(fleet.addr()).await;
    support::wait_until(async || match fleet.requests("p0").len() {
        0 => Err("no prefill leg".to_owned()),
        _ => Ok(()),
    })
    .await;
    let (head, error) = large.json(fleet.addr()).await;
    assert_eq!((head.status, head.header("retry-after")), (429, Some("1")), "{error}");
    error_message(&error);
    assert_eq!(refused(&fleet, "max_in_flight_bytes").await, 1);
    let (head, _) = fleet.router.complete(&completion(&prompt(2, 20), 2, false)).await;
    assert_eq!(head.status, 200, "a small one fits");
    drop(inside);
    fleet.assert_nothing_leaks().await;
    let (head, reply) = large.send(fleet.addr()).await;
    assert_eq!(head.status, 200, "{reply:?}");
}

#[tokio::test]
async fn a_prompt_beyond_the_limit_is_400_and_the_limit_itself_is_not() {
    let fleet = Fleet::with(pair(), json!({"limits": {"max_prompt_tokens": 100}})).await;
    for (tokens, status) in [(100, 200), (101, 400)] {
        let (head, body) = fleet.router.complete(&completion(&prompt(1, tokens), 2, false)).await;
        assert_eq!(head.status, status, "{body:?}");
        if status == 400 {
            let error = body.error();
            assert!(error.contains("101 tokens") && error.contains("100"), "{error}");
        }
    }
    // A batch counts as a whole.
    let batch = json!({"model": MODEL, "prompt": [prompt(1, 60), prompt(2, 60)]});
    let (head, _) = Request::completion(&batch).send(fleet.addr()).await;
    assert_eq!(head.status, 400);
    assert_eq!(refused(&fleet, "max_prompt_tokens").await, 2);
}

#[tokio::test]
async fn a_reply_beyond_the_limit_is_not_held_in_memory() {
    let fleet = Fleet::with(pair(), json!({"limits": {"max_reply_bytes": "64KiB"}})).await;
    let mut body = completion(&prompt(1, 40), 600, false);
    body["logprobs"] = json!(20);
    body["ignore_eos"] = json!(true);
    let (head, reply) = fleet.router.complete(&body).await;
    assert_eq!(head.status, 503, "{}", reply.bytes.len());
    assert!(reply.error().contains("d0"), "{reply:?}");
    // A stream is not held, and so not limited.
    body["stream"] = json!(true);
    let (head, reply) = fleet.router.complete(&body).await;
    assert_eq!(head.status, 200);
    assert!(reply.is_done() && reply.bytes.len() > 64 * 1024);
    fleet.assert_nothing_leaks().await;
}

#[tokio::test]
async fn a_request_that_takes_too_long_is_ended() {
    let fleet = Fleet::with(pair(), json!({"timeouts": {"request": "700ms"}})).await;
    fleet.set_faults("d0", rule(Leg::Any, Action::SlowTokens { delay_ms: 50 }));
    let mut body = completion(&prompt(1, 200), 1000, true);
    body["ignore_eos"] = json!(true);
    let (head, reply) = fleet.router.complete(&body).await;
    assert_eq!(head.status, 200);
    let chunks = reply.chunks();
    let (last, before) = chunks.split_last().expect("events");
    assert_eq!(last["error"]["code"], 504, "{last}");
    assert!(!before.is_empty() && !reply.is_done());
    // A reply that is no stream has not begun, so its status can say so.
    body["stream"] = json!(false);
    let (head, reply) = fleet.router.complete(&body).await;
    assert!(matches!(head.status, 503 | 504), "{reply:?}");
    reply.error();
    fleet.assert_nothing_leaks().await;
}

/// A connection is used again, also after a refusal.
#[tokio::test]
async fn a_connection_outlives_a_refusal() {
    let fleet = Fleet::start(pair()).await;
    let mut stream = connect(fleet.addr()).await.expect("the router takes connections");
    let body = completion(&prompt(1, 20), 2, false).to_string();
    for (model, status) in [("nobody", 404), (MODEL, 200), ("nobody", 404)] {
        let body = body.replace(MODEL, model);
        let head = head_of("/v1/completions", &format!("content-length: {}\r\n", body.len()));
        let head = head.replace("connection: close\r\n", "");
        stream.write_all((head + &body).as_bytes()).await.expect("it is open");
        let mut read = Vec::new();
        while !read.ends_with(b"}") {
            let more = timeout(Duration::from_secs(10), stream.read_buf(&mut read)).await;
            assert!(more.is_ok_and(|more| more.is_ok_and(|count| count > 0)));
        }
        let text = String::from_utf8_lossy(&read).into_owned();
        assert!(text.starts_with(&format!("HTTP/1.1 {status}")), "{text}");
    }
}
