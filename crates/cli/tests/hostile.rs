//! Clients and engines that mean harm, or send what nobody should: requests of two framings, odd heads
//! and targets, bodies that drip or mean two things, and answers that are none.
#![allow(clippy::expect_used, clippy::panic, reason = "it is all test")]

mod command;
mod support;

use std::net::SocketAddr;
use std::time::Duration;

use pointsman_sim::mock::{Action, Faults, Leg};
use serde_json::{Value, json};
use support::client::{connect, error_message};
use support::fleet::{MODEL, completion, configuration, prompt, rule, times, unwatched};
use support::{Act, Fleet, Raw, Request, Router, SOON, Spec, Then, decode, prefill, raw, unified};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::{Instant, timeout};

/// Sent as it is, so that what an engine gets can be compared.
fn plain(spec: Spec) -> Spec {
    spec.worker(json!({"takes_prompt_ids": false}))
}

async fn one() -> Fleet {
    Fleet::start([plain(unified("u0"))]).await
}

/// Sends bytes as they are; all that comes until the connection ends.
async fn talk(to: SocketAddr, bytes: &[u8]) -> String {
    let mut stream = connect(to).await.expect("the router takes connections");
    // What is not wanted may not be read.
    let _ = stream.write_all(bytes).await;
    let mut read = Vec::new();
    let _ = timeout(SOON, stream.read_to_end(&mut read)).await.expect("the connection ends");
    String::from_utf8_lossy(&read).into_owned()
}

/// The status of each reply.
fn statuses(replies: &str) -> Vec<u16> {
    let heads = replies.split("HTTP/1.1 ").skip(1);
    heads.map(|head| head[..3].parse().expect("a status")).collect()
}

/// What ends a conversation that has gone on up to here: whoever reads it as a request of its own has
/// found the end of the one before.
const LAST: &str = "GET /health HTTP/1.1\r\nhost: r\r\nconnection: close\r\n\r\n";

/// A completion that nobody may be made to ask for.
const SMUGGLED: &str = r#"{"model":"mock","prompt":"smuggled"}"#;

fn body() -> String {
    format!("{{\"model\":\"{MODEL}\",\"prompt\":\"sent\",\"max_tokens\":2}}")
}

/// The bodies that an engine got, as they came.
fn bodies(fleet: &Fleet, engine: &str) -> Vec<String> {
    let body = |request: &Value| request["body"].as_str().expect("a body").to_owned();
    fleet.requests(engine).iter().map(body).collect()
}

fn chunked(body: &str) -> String {
    format!("{:x}\r\n{body}\r\n0\r\n\r\n", body.len())
}

/// Sends a completion with these headers and this body, and then another request.
async fn framed(fleet: &Fleet, headers: &str, body: &str) -> Vec<u16> {
    let head = format!("POST /v1/completions HTTP/1.1\r\nhost: r\r\n{headers}\r\n\r\n");
    let replies = talk(fleet.addr(), format!("{head}{body}{LAST}").as_bytes()).await;
    statuses(&replies)
}

// ---- framing ---------------------------------------------------------------------------------

#[tokio::test]
async fn a_request_of_odd_framing_is_one_request_with_one_body() {
    let fleet = one().await;
    let (body, length) = (body(), body().len());
    let in_chunks = chunked(&body);
    let pieces = format!("1;a=b\r\n{{\r\n{:X} ;q=\"x\"\r\n{}\r\n0\r\n", length - 1, &body[1..]);
    for (headers, sent) in [
        ("Transfer-Encoding: CHUNKED".to_owned(), in_chunks.clone()),
        ("transfer-encoding: \t chunked \t".to_owned(), in_chunks.clone()),
        ("transfer-encoding: chunked".to_owned(), format!("{pieces}\r\n")),
        // Trailers are not headers.
        ("transfer-encoding: chunked".to_owned(), format!("{pieces}x-trailer: 1\r\n\r\n")),
        (format!("content-length: {length}\r\ncontent-length: {length}"), body.clone()),
        // A line feed alone ends a line, so that what follows is a header of its own.
        (format!("x-a: b\ncontent-length: {length}"), body.clone()),
    ] {
        let before = bodies(&fleet, "u0").len();
        assert_eq!(framed(&fleet, &headers, &sent).await, [200, 200], "{headers:?} {sent:?}");
        assert_eq!(bodies(&fleet, "u0").split_off(before), vec![body.clone()], "{headers:?}");
    }
    for request in fleet.requests("u0") {
        let headers = &request["headers"];
        assert_eq!(headers["content-length"], length.to_string(), "{headers}");
        for name in ["transfer-encoding", "x-trailer", "trailer"] {
            assert!(headers.get(name).is_none(), "{headers}");
        }
    }
    fleet.assert_nothing_leaks().await;
}

#[tokio::test]
async fn of_chunks_and_a_length_the_chunks_count_and_nothing_after_them_is_read() {
    let fleet = one().await;
    let length = SMUGGLED.len();
    let smuggled = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: r\r\ncontent-length: {length}\r\n\r\n{SMUGGLED}"
    );
    let sent = chunked(&body()) + &smuggled;
    for headers in [
        "content-length: 3\r\ntransfer-encoding: chunked".to_owned(),
        format!("content-length: {}\r\ntransfer-encoding: chunked", sent.len()),
        "transfer-encoding: chunked\r\ncontent-length: 3".to_owned(),
        format!("transfer-encoding: chunked\r\ncontent-length: {}", sent.len()),
    ] {
        assert_eq!(framed(&fleet, &headers, &sent).await, [200], "{headers:?}");
    }
    assert_eq!(bodies(&fleet, "u0"), vec![body(); 4]);
    fleet.assert_nothing_leaks().await;
}

#[tokio::test]
async fn a_request_that_can_be_read_two_ways_is_refused_and_nothing_after_it_is_read() {
    let fleet = one().await;
    let (body, length) = (body(), body().len());
    let in_chunks = chunked(&body);
    for headers in [
        format!("content-length: {length}\r\ncontent-length: {}", length + 1),
        format!("content-length: {length}, {length}"),
        format!("content-length: +{length}"),
        format!("content-length: 0x{length:x}"),
        "content-length: -1".to_owned(),
        "content-length:".to_owned(),
        "content-length: 99999999999999999999999".to_owned(),
        format!("content-length : {length}"),
        format!("content-length:\r\n {length}"),
        format!("x-a: b\rcontent-length: {length}"),
        format!("x-a: \0\r\ncontent-length: {length}"),
        format!("x\0a: b\r\ncontent-length: {length}"),
        format!("x a: b\r\ncontent-length: {length}"),
        format!("no colon\r\ncontent-length: {length}"),
    ] {
        assert_eq!(framed(&fleet, &headers, &body).await, [400], "{headers:?}");
    }
    for headers in [
        "transfer-encoding: chunked, identity",
        "transfer-encoding: identity",
        "transfer-encoding: xchunked",
        "transfer-encoding: \"chunked\"",
        "transfer-encoding: chunked\r\ntransfer-encoding: identity",
        "transfer-encoding : chunked",
        "transfer-encoding:\r\n chunked",
        "x-a: b\r\n transfer-encoding: chunked",
    ] {
        assert_eq!(framed(&fleet, headers, &in_chunks).await, [400], "{headers:?}");
    }
    for broken in [
        format!("0x{length:x}\r\n{body}\r\n0\r\n\r\n"),
        format!("-{length:x}\r\n{body}\r\n0\r\n\r\n"),
        format!("ffffffffffffffff1\r\n{body}\r\n0\r\n\r\n"),
        format!("\r\n{body}\r\n0\r\n\r\n"),
        format!("{length:x}\r\n{body}0\r\n\r\n"),
        format!("{length:x}\r{body}\r\n0\r\n\r\n"),
        format!("{length:x};{}\r\n{body}\r\n0\r\n\r\n", "x".repeat(1 << 17)),
    ] {
        let sent = framed(&fleet, "transfer-encoding: chunked", &broken).await;
        assert_eq!(sent, [400], "{:?}", &broken[..broken.len().min(80)]);
    }
    // Before chunks there were none.
    let old =
        format!("POST /v1/completions HTTP/1.0\r\ntransfer-encoding: chunked\r\n\r\n{in_chunks}");
    assert_eq!(statuses(&talk(fleet.addr(), old.as_bytes()).await), [400]);
    assert_eq!(bodies(&fleet, "u0"), Vec::<String>::new(), "an engine was asked");
    fleet.assert_nothing_leaks().await;
}

#[tokio::test]
async fn requests_that_come_together_are_answered_in_order_each_by_its_own_key() {
    let key = "pk-first";
    let ended = command::run(&["key", "--hash"], &[], key);
    let auth = json!({"auth": {"keys": [{"name": "one", "sha256": ended.out.trim()}]}});
    let fleet = Fleet::with([plain(unified("u0"))], auth).await;
    let ask = |key: &str, body: &str| {
        let length = body.len();
        format!(
            "POST /v1/completions HTTP/1.1\r\nhost: r\r\n{key}content-length: {length}\r\n\r\n{body}"
        )
    };
    let bearing = format!("authorization: Bearer {key}\r\n");
    let together = [ask(&bearing, &body()), ask("", SMUGGLED), ask(&bearing, &body())].concat();
    let replies = talk(fleet.addr(), format!("{together}{LAST}").as_bytes()).await;
    assert_eq!(statuses(&replies), [200, 401, 200, 200], "{replies}");
    assert_eq!(bodies(&fleet, "u0"), [body(), body()]);
}

// ---- targets and heads -----------------------------------------------------------------------

#[tokio::test]
async fn a_target_in_another_form_leads_nowhere_else() {
    let fleet = one().await;
    let ask = async |line: &str| {
        let (body, length) = (body(), body().len());
        let head = format!("{line} HTTP/1.1\r\nhost: r\r\nconnection: close\r\n");
        talk(fleet.addr(), format!("{head}content-length: {length}\r\n\r\n{body}").as_bytes()).await
    };
    for line in [
        "POST /v1/../v1/completions",
        "POST //v1/completions",
        "POST /v1/completions/",
        "POST /V1/completions",
        "POST /v1%2fcompletions",
        "POST /v1/completions%00",
        "POST /v1/completions;x=1",
        "POST /health/../v1/load_lora_adapter",
        "POST http://127.0.0.1:1/sleep",
        "OPTIONS *",
        "CONNECT 127.0.0.1:1",
        "TRACE /v1/completions",
    ] {
        let status = statuses(&ask(line).await);
        assert!(matches!(status[..], [404 | 405]), "{line}: {status:?}");
    }
    for line in ["POST v1/completions", "POST /v1/com\0pletions", "POST", "P\0ST /v1/completions"] {
        assert_eq!(statuses(&ask(line).await), [400], "{line:?}");
    }
    assert_eq!(bodies(&fleet, "u0"), Vec::<String>::new(), "an engine was asked");
    // Whom the client takes the router for is nothing to the router.
    assert_eq!(statuses(&ask("POST http://elsewhere:1/v1/completions").await), [200]);
    let request = fleet.requests("u0").remove(0);
    assert_eq!((&request["path"], &request["body"]), (&json!("/v1/completions"), &json!(body())));
    fleet.assert_nothing_leaks().await;
}

#[tokio::test]
async fn a_request_with_two_hosts_is_refused_and_engines_see_their_own() {
    let fleet = one().await;
    let ask = Request::raw("/v1/completions", body());
    let (head, error) = ask.clone().header("host", "other").json(fleet.addr()).await;
    assert_eq!(head.status, 400);
    assert!(error_message(&error).contains("Host"), "{error}");
    assert_eq!(fleet.requests("u0").len(), 0);
    assert_eq!(ask.send(fleet.addr()).await.0.status, 200);
    let own = fleet.get("u0").mock.addr().to_string();
    assert_eq!(fleet.requests("u0")[0]["headers"]["host"], own);
}

/// What is of one connection, of other proxies, or the router's alone to say.
const NOT_TO_PASS: [(&str, &str); 22] = [
    ("connection", "x-hop, X-Other"),
    ("Connection", "x-third"),
    ("x-hop", "1"),
    ("x-other", "1"),
    ("x-third", "1"),
    ("keep-alive", "timeout=1000"),
    ("proxy-connection", "keep-alive"),
    ("proxy-authenticate", "Basic"),
    ("proxy-authorization", "Basic eDp5"),
    ("te", "trailers"),
    ("trailer", "x-trailer"),
    ("upgrade", "websocket"),
    ("forwarded", "for=10.0.0.1;host=inside"),
    ("via", "1.1 inside"),
    ("x-forwarded-for", "10.0.0.1"),
    ("X-Forwarded-Host", "inside"),
    ("x-forwarded-proto", "https"),
    ("x-real-ip", "10.0.0.1"),
    ("X-Data-Parallel-Rank", "1"),
    ("x-prefiller-host-port", "10.0.0.1:1"),
    ("X-Pointsman-Anything", "1"),
    ("x-pointsman-worker", "forged"),
];

#[tokio::test]
async fn headers_of_one_hop_of_proxies_and_of_the_router_reach_no_engine() {
    let fleet = Fleet::start([plain(prefill("p0")), plain(decode("d0"))]).await;
    let asked = completion(&prompt(1, 200), 4, false);
    let mut request = Request::completion(&asked).header("x-kept", "1");
    for (name, value) in NOT_TO_PASS {
        request = request.header(name, value);
    }
    let (head, body) = request.send(fleet.addr()).await;
    assert_eq!((head.status, head.path()), (200, "remote"), "{body:?}");
    for engine in ["p0", "d0"] {
        let headers = fleet.requests(engine).remove(0)["headers"].clone();
        assert_eq!(headers["x-kept"], "1");
        for (name, _) in NOT_TO_PASS {
            assert!(headers.get(name.to_lowercase()).is_none(), "{name} at {engine}: {headers}");
        }
    }
    fleet.assert_nothing_leaks().await;
}

/// An engine's reply with further headers.
fn with_headers(reply: &[u8], status: &str) -> Vec<u8> {
    let text = String::from_utf8_lossy(reply);
    let mut headers = "x-kept: 1\r\n".to_owned();
    // A connection that is to be upgraded is another protocol.
    for (name, value) in NOT_TO_PASS.iter().filter(|(name, _)| *name != "upgrade") {
        headers += &format!("{name}: {value}\r\n");
    }
    text.replacen("200 OK\r\n", &format!("{status}\r\n{headers}"), 1).into_bytes()
}

#[tokio::test]
async fn headers_of_one_hop_of_proxies_and_of_the_router_reach_no_client_from_an_engine() {
    let mut stream = raw::stream(1);
    stream.extend_from_slice(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n");
    for (reply, status, streams) in [
        (raw::whole("a"), "200 OK", false),
        (stream, "200 OK", true),
        (raw::whole("no"), "400 Bad Request", false),
    ] {
        let engine = Raw::start([Act::Send(with_headers(&reply, status), Then::Keep)]).await;
        let workers = json!([engine.worker("u0", "unified")]);
        let router = Router::start(&configuration(&workers, unwatched(json!({})))).await;
        let asked = completion(&prompt(1, 20), 4, streams);
        let (head, body) = Request::completion(&asked).send(router.addr()).await;
        assert_eq!(head.status.to_string(), status[..3], "{body:?}");
        assert_eq!(head.header("x-kept"), Some("1"), "{head:?}");
        for (name, value) in NOT_TO_PASS {
            assert_ne!(head.header(name), Some(value), "{name} of {status}");
        }
        let worker = if status.starts_with('2') { "u0" } else { "" };
        assert_eq!(head.worker(), worker);
    }
}

#[tokio::test]
async fn heads_of_90_headers_and_64_kib_are_taken_and_larger_ones_are_not() {
    const MOST: usize = 64 << 10;
    let fleet = one().await;
    let head = |target: &str, headers: &str| {
        format!("GET {target} HTTP/1.1\r\nhost: r\r\nconnection: close\r\n{headers}\r\n")
    };
    let many = |count: usize| (0..count).map(|at| format!("x-{at}: 1\r\n")).collect::<String>();
    let value = |bytes: usize| format!("x-long: {}\r\n", "x".repeat(bytes));
    let name = |bytes: usize| format!("{}: 1\r\n", "x".repeat(bytes));
    let rest = MOST - head("/health", &value(0)).len();
    for (sent, status) in [
        (head("/health", &many(88)), 200),
        (head("/health", &many(89)), 431),
        (head("/health", &many(5000)), 431),
        (head("/health", &value(rest)), 200),
        (head("/health", &value(rest + 1)), 431),
        (head("/health", &value(100 * MOST)), 431),
        (head("/health", &name(MOST)), 431),
        (head(&format!("/health?{}", "x".repeat(MOST - 100)), ""), 200),
        (head(&format!("/health?{}", "x".repeat(MOST)), ""), 431),
    ] {
        let replies = talk(fleet.addr(), sent.as_bytes()).await;
        assert_eq!(statuses(&replies), [status], "{} bytes: {replies}", sent.len());
    }
}

// ---- time ------------------------------------------------------------------------------------

/// Sends `bytes` one by one; how long until the router has ended the connection.
async fn drip(to: SocketAddr, head: String, bytes: &'static [u8]) -> Duration {
    let mut stream = connect(to).await.expect("the router takes connections");
    let began = Instant::now();
    let _ = stream.write_all(head.as_bytes()).await;
    let (mut reading, mut writing) = stream.split();
    let mut read = Vec::new();
    let writes = async {
        for byte in bytes.iter().cycle() {
            if writing.write_all(&[*byte]).await.is_err() {
                break;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let ended = async {
        let _ = reading.read_to_end(&mut read).await;
    };
    timeout(SOON, async {
        tokio::select! {
            () = ended => {}
            () = writes => {}
        }
    })
    .await
    .expect("the connection ends");
    began.elapsed()
}

#[tokio::test]
async fn clients_that_send_byte_by_byte_are_let_go_and_hold_nobody_up() {
    let over = json!({"timeouts": {"body_read": "200ms", "header_read": "500ms"}});
    let fleet = Fleet::with([plain(unified("u0"))], over).await;
    let mut slow = tokio::task::JoinSet::new();
    for at in 0..100 {
        let whole = "POST /v1/completions HTTP/1.1\r\nhost: r\r\n".to_owned();
        match at % 3 {
            0 => slow.spawn(drip(fleet.addr(), whole, b"x-a: 1\r\n")),
            1 => slow.spawn(drip(fleet.addr(), whole + "content-length: 9999\r\n\r\n", b" ")),
            _ => {
                let head = whole + "transfer-encoding: chunked\r\n\r\n";
                slow.spawn(drip(fleet.addr(), head, b"1\r\n \r\n"))
            }
        };
    }
    while !slow.is_empty() {
        let began = Instant::now();
        let (head, body) = Request::raw("/v1/completions", body()).send(fleet.addr()).await;
        assert_eq!(head.status, 200, "{body:?}");
        assert!(began.elapsed() < Duration::from_secs(2), "held up for {:?}", began.elapsed());
        while let Some(ended) = slow.try_join_next() {
            // Ten times the longest silence is what a body may take.
            let took = ended.expect("it went well");
            assert!(took < Duration::from_secs(6), "let go after {took:?}");
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    fleet.assert_nothing_leaks().await;
}

// ---- bodies ----------------------------------------------------------------------------------

#[tokio::test]
async fn nothing_is_unpacked_whoever_says_that_it_is_packed() {
    let fleet = one().await;
    // The head of a gzip file; nobody looks further.
    let packed = [&b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03"[..], &[0; 64]].concat();
    let ask = || Request::raw("/v1/completions", packed.clone());
    for request in [
        ask().header("content-encoding", "gzip"),
        ask().header("content-encoding", "identity").header("content-encoding", "gzip"),
        ask().header("content-encoding", "identity, gzip"),
        ask().header("content-encoding", "deflate"),
        ask().header("content-encoding", "zstd"),
        ask().header("content-encoding", "x-unknown"),
    ] {
        let (head, error) = request.json(fleet.addr()).await;
        assert_eq!(head.status, 415, "{error}");
        error_message(&error);
    }
    let (head, error) = ask().json(fleet.addr()).await;
    assert_eq!(head.status, 400, "{error}");
    let in_chunks = chunked("\u{1f}\u{8b}");
    assert_eq!(framed(&fleet, "transfer-encoding: gzip, chunked", &in_chunks).await, [400, 200]);
    assert_eq!(fleet.requests("u0").len(), 0, "an engine was asked");
    let identity = Request::raw("/v1/completions", body()).header("content-encoding", "Identity");
    assert_eq!(identity.send(fleet.addr()).await.0.status, 200);
}

#[tokio::test]
async fn bodies_that_are_no_json_in_utf_8_are_refused() {
    let fleet = one().await;
    let text = body();
    let utf_16: Vec<u8> = text.encode_utf16().flat_map(u16::to_le_bytes).collect();
    let with = |bytes: &[u8]| [b"{\"prompt\":\"", bytes, b"\"}"].concat();
    for wrong in [
        // A byte order mark is no part of JSON (RFC 8259).
        [b"\xef\xbb\xbf", text.as_bytes()].concat(),
        utf_16,
        with(b"\xff"),
        with(b"\xc0\xaf"),
        with(b"\xed\xa0\x80"),
        with(b"\xf4\x90\x80\x80"),
        with(b"\xe2\x82"),
        with(b"\0"),
        with(b"\n"),
        b"{\"prompt\":\"a\",}".to_vec(),
        b"{\"prompt\":NaN}".to_vec(),
        b"{\"prompt\":\"a\"}{}".to_vec(),
        b"{'prompt':'a'}".to_vec(),
        b"{\"prompt\":\"a\"/**/}".to_vec(),
        format!("{{\"prompt\":{}", "[".repeat(1 << 20)).into_bytes(),
        format!("{{\"prompt\":{}", "{\"a\":".repeat(1 << 18)).into_bytes(),
        format!("{{\"a\":{}1{}}}", "[".repeat(128), "]".repeat(128)).into_bytes(),
        format!("{{{}\"b\":1}}", "\"a\":1,".repeat(1024)).into_bytes(),
    ] {
        let (head, error) = Request::raw("/v1/completions", wrong.clone()).json(fleet.addr()).await;
        let shown = String::from_utf8_lossy(&wrong[..wrong.len().min(60)]).into_owned();
        assert_eq!(head.status, 400, "{shown}: {error}");
        error_message(&error);
    }
    assert_eq!(fleet.requests("u0").len(), 0, "an engine was asked");
    fleet.assert_nothing_leaks().await;
}

#[tokio::test]
async fn numbers_names_and_halves_of_characters_reach_the_engine_as_they_were_sent() {
    let fleet = Fleet::with(
        [plain(prefill("p0")), plain(decode("d0"))],
        json!({"routing": {"allow_path_override": true}}),
    )
    .await;
    let nested = format!("{}1{}", "[".repeat(126), "]".repeat(126));
    for odd in [
        "\"x\":1e400",
        "\"x\":-0.0",
        "\"x\":123456789012345678901234567890.000",
        "\"seed\":18446744073709551616",
        "\"x\":0.1000000000000000055511151231257827",
        "\"x\":\"\\ud800 \\udc00\\ud83d\\ude00\"",
        "\"x\\u0000\":\"\\u0000\"",
        "\"x\":1,\"x\":2,\"\\u0078\":3",
        "\"\":\"\"",
        "\"constructor\":{\"__proto__\":1}",
        &format!("\"x\":{nested}"),
    ] {
        let text = format!("{{\"model\":\"{MODEL}\",{odd},\"prompt\":\"sent\",\"max_tokens\":2}}");
        for (path, engine) in [("local", "d0"), ("remote", "p0")] {
            let asked = Request::raw("/v1/completions", text.clone());
            let asked = asked.header("x-pointsman-path", path);
            let (head, reply) = asked.send(fleet.addr()).await;
            assert_eq!((head.status, head.path()), (200, path), "{odd}: {reply:?}");
            let got = bodies(&fleet, engine).pop().expect("a request");
            assert!(got.contains(odd), "{odd} became {got}");
        }
        let got = bodies(&fleet, "d0").pop().expect("a request");
        assert!(got.contains(odd), "{odd} became {got} with the hand-off");
    }
    // In a prompt they are no text that could be counted.
    let half = format!("{{\"model\":\"{MODEL}\",\"prompt\":\"a\\ud800\"}}");
    let (head, error) = Request::raw("/v1/completions", half).json(fleet.addr()).await;
    assert_eq!((head.status, &error["error"]["param"]), (400, &json!("prompt")), "{error}");
    let half = format!(
        "{{\"model\":\"{MODEL}\",\"messages\":[{{\"role\":\"user\",\"content\":\"a\\ud800\"}}],\"max_tokens\":2}}"
    );
    let (head, _) = Request::raw("/v1/chat/completions", half).send(fleet.addr()).await;
    assert!(matches!(head.status, 200 | 400), "{}", head.status);
    fleet.assert_nothing_leaks().await;
}

#[tokio::test]
async fn of_members_that_come_twice_the_last_counts_as_it_does_for_engines() {
    let fleet = one().await;
    for (members, status) in [
        (r#""model":"nobody","model":"mock""#, 200),
        (r#""model":"nobody","mod\u0065l":"mock""#, 200),
        (r#""model":"mock","model":"nobody""#, 404),
        (r#""model":"mock","mod\u0065l":"nobody""#, 404),
        (r#""model":"mock","model":7"#, 400),
        (r#""prompt":"a","prompt":{},"model":"mock""#, 400),
    ] {
        let prompt = if members.contains("prompt") { "" } else { ",\"prompt\":\"a\"" };
        let text = format!("{{{members}{prompt},\"max_tokens\":2}}");
        let (head, reply) = Request::raw("/v1/completions", text.clone()).send(fleet.addr()).await;
        assert_eq!(head.status, status, "{text}: {reply:?}");
    }
    for (members, streams) in [
        ("\"stream\":true,\"stream\":false", false),
        ("\"stream\":false,\"str\\u0065am\":true", true),
    ] {
        let text = format!("{{\"model\":\"{MODEL}\",\"prompt\":\"a\",\"max_tokens\":2,{members}}}");
        let (head, reply) = Request::raw("/v1/completions", text).send(fleet.addr()).await;
        let kind = head.header("content-type").unwrap_or_default();
        assert_eq!(
            (head.status, kind.starts_with("text/event-stream")),
            (200, streams),
            "{reply:?}"
        );
    }
    fleet.assert_nothing_leaks().await;
}

#[tokio::test]
async fn what_clients_and_engines_say_is_not_in_the_log_at_any_level() {
    const SECRET: &str = "heliotrope";
    let fleet = Fleet::with([plain(unified("u0"))], json!({"log": {"filter": "trace"}})).await;
    let ask = |body: String| Request::raw("/v1/completions", body);
    let good = format!("{{\"model\":\"{MODEL}\",\"prompt\":\"{SECRET}\",\"max_tokens\":2}}");
    assert_eq!(ask(good.clone()).send(fleet.addr()).await.0.status, 200);
    let chat = json!({"model": MODEL, "messages": [{"role": "user", "content": SECRET}],
        "max_tokens": 2, "stream": true});
    assert_eq!(Request::chat(&chat).send(fleet.addr()).await.0.status, 200);
    // Nor where they are refused, or fail.
    assert_eq!(ask(format!("{{\"prompt\":{SECRET}}}")).send(fleet.addr()).await.0.status, 400);
    for (status, count) in [(400, 1), (500, 4), (200, 4)] {
        let said = Action::Status { status, body: Some(format!("the engine says {SECRET}")) };
        fleet.set_faults("u0", times(count, Leg::Any, said));
        let (head, _) = ask(good.clone()).send(fleet.addr()).await;
        assert_ne!(head.status, 200);
        fleet.set_faults("u0", Faults::default());
    }
    let key = ask(good).header("authorization", &format!("Bearer {SECRET}"));
    assert_eq!(key.send(fleet.addr()).await.0.status, 200);
    let log = fleet.router.log();
    assert!(log.contains("TRACE") && log.contains("the worker answered 500"), "it says all else");
    let line = log.lines().find(|line| line.contains(SECRET));
    assert_eq!(line, None);
}

// ---- engines that answer with nonsense -------------------------------------------------------

/// What no engine says to a completion.
const GARBAGE: [&str; 6] = [
    "",
    "it works!",
    "{}",
    "[]",
    "{\"choices\":[]}",
    "{\"error\":{\"message\":\"no\",\"code\":500}}",
];

fn says(body: &str) -> Action {
    Action::Status { status: 200, body: Some(body.to_owned()) }
}

#[tokio::test]
async fn a_decode_worker_that_answers_200_with_nonsense_is_replaced() {
    let whole = raw::whole("a reply that is no stream");
    let whole =
        String::from_utf8_lossy(&whole).split_once("\r\n\r\n").map(|(_, body)| body.to_owned());
    let whole = whole.expect("a body");
    let cases = GARBAGE.map(|body| (body, false)).into_iter();
    for (body, stream) in cases.chain([("", true), ("it works!", true), (&whole, true)]) {
        let specs = [prefill("p0"), decode("d0"), decode("d1")];
        let fleet = Fleet::with(specs, unwatched(json!({}))).await;
        fleet.set_faults("d0", rule(Leg::Decode, says(body)));
        let asked = completion(&prompt(1, 200), 8, stream);
        let (head, reply) = Request::completion(&asked).send(fleet.addr()).await;
        let went = (head.status, head.path(), head.reason(), head.worker());
        assert_eq!(went, (200, "local", "retry_local", "d1"), "{body}: {reply:?}");
        fleet.assert_completed_as_alone(&asked, &reply).await;
        assert_eq!(fleet.failures("decode", "protocol").await, 1);
        assert_eq!(fleet.legs("p0", "prefill"), 1);
        fleet.assert_nothing_leaks_but_pins(1).await;
    }
}

#[tokio::test]
async fn a_local_worker_that_answers_200_with_nonsense_is_replaced_and_left_alone_in_the_end() {
    let breaker = json!({"routing": {"breaker": {"failures": 2, "open": "1h", "open_max": "1h"}}});
    let fleet = Fleet::with([unified("u0"), unified("u1")], unwatched(breaker)).await;
    fleet.set_faults("u0", rule(Leg::Any, says("it works!")));
    let mut seed = 0;
    support::wait_until(async || {
        seed += 1;
        let asked = completion(&prompt(seed, 64), 4, seed % 2 == 0);
        let (head, reply) = Request::completion(&asked).send(fleet.addr()).await;
        assert_eq!((head.status, head.worker()), (200, "u1"), "{reply:?}");
        fleet.assert_completed_as_alone(&asked, &reply).await;
        match fleet.router.worker("u0").await.expect("it is listed")["condition"].clone() {
            condition if condition == "tripped" => Ok(()),
            condition => Err(format!("u0 is {condition}")),
        }
    })
    .await;
    assert_eq!(fleet.failures("local", "protocol").await, 2);
    fleet.assert_nothing_leaks().await;
}

#[tokio::test]
async fn where_nobody_else_is_a_client_is_told_of_the_worker_that_makes_no_sense() {
    for stream in [false, true] {
        let fleet = Fleet::with([unified("u0")], unwatched(json!({}))).await;
        fleet.set_faults("u0", rule(Leg::Any, says("it works!")));
        let asked = completion(&prompt(1, 64), 4, stream);
        let (head, error) = Request::completion(&asked).json(fleet.addr()).await;
        assert_eq!(head.status, 503, "{error}");
        let words = "worker `u0` sent an answer that makes no sense";
        assert!(error_message(&error).contains(words), "{error}");
        fleet.assert_nothing_leaks().await;
    }
}

#[tokio::test]
async fn a_stream_that_says_nothing_and_ends_is_no_answer() {
    let event = |data: &str| format!("{:x}\r\n{data}\r\n", data.len());
    let (done, end) = (event("data: [DONE]\n\n"), "0\r\n\r\n".to_owned());
    for (events, cause) in [
        (done.clone() + &end, "sent an answer that makes no sense"),
        (event("data: it works!\n\n") + &done + &end, "sent an answer that makes no sense"),
        (event("it works!\n\n") + &end, "cut its answer off"),
        (end.clone(), "cut its answer off"),
    ] {
        let reply = [raw::stream(0), events.into_bytes()].concat();
        let engine = Raw::start([Act::Send(reply, Then::Keep)]).await;
        let workers = json!([engine.worker("u0", "unified")]);
        let router = Router::start(&configuration(&workers, unwatched(json!({})))).await;
        let asked = completion(&prompt(1, 20), 4, true);
        let (head, error) = Request::completion(&asked).json(router.addr()).await;
        assert_eq!(head.status, 503, "{error}");
        assert!(error_message(&error).contains(&format!("worker `u0` {cause}")), "{error}");
    }
}

#[tokio::test]
async fn a_client_that_asks_oddly_cannot_have_a_worker_blamed() {
    let nothing = br#"{"choices":[]}"#;
    let head = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 14\r\n\r\n";
    let nothing = [head.as_bytes(), nothing].concat();
    for (members, reply) in [
        // Read as true by some engines and as false by others.
        ("\"stream\":\"true\"", raw::whole("a")),
        ("\"stream\":1", raw::whole("a")),
        ("\"n\":0", nothing.clone()),
        ("\"n\":-1", nothing),
    ] {
        let engine = Raw::start([Act::Send(reply, Then::Keep)]).await;
        let workers = json!([engine.worker("u0", "unified")]);
        let breaker = json!({"routing": {"breaker": {"failures": 1}}});
        let router = Router::start(&configuration(&workers, unwatched(breaker))).await;
        let asked = format!("{{\"model\":\"{MODEL}\",\"prompt\":\"a\",{members}}}");
        let (head, reply) = Request::raw("/v1/completions", asked).json(router.addr()).await;
        assert_eq!(head.status, 200, "{members}: {reply}");
        let worker = router.worker("u0").await.expect("it is listed");
        assert_eq!(worker["condition"], "up", "{members}");
    }
}

#[tokio::test]
async fn what_failed_with_a_hand_off_is_told_as_far_as_it_is_known() {
    let fleet = Fleet::with([prefill("p0"), decode("d0")], unwatched(json!({}))).await;
    fleet.set_faults("d0", rule(Leg::Any, Action::Status { status: 500, body: None }));
    let asked = completion(&prompt(1, 200), 4, false);
    let (head, error) = Request::completion(&asked).json(fleet.addr()).await;
    assert_eq!(head.status, 503, "{error}");
    let message = error_message(&error);
    let words = "decode worker `d0` failed with KV that was computed elsewhere";
    assert!(
        message.contains(words) && message.contains("local worker `d0` answered 500"),
        "{message}"
    );
    assert!(!message.contains("could not fetch"), "nobody said so: {message}");
}
