//! What passes through passes as it is: bodies and headers on their way to the engines, streams and
//! replies on their way back.
#![allow(clippy::expect_used, clippy::panic, reason = "it is all test")]

mod support;

use std::net::SocketAddr;

use serde_json::{Value, json};
use support::fleet::MODEL;
use support::{Fleet, Head, Request, Spec, decode, prefill};

/// Numbers, texts, keys and blanks that a JSON library would write another way.
const ODD: &str = r#""unknown": [1.0, 1e-7, 0.10, -0.0, 1E+2, 123456789012345678901234567890],
  "escaped":"\u0041\u00e9\/\ud83d\ude00 é😀", "twice":1, "twice" : 2.50,
	"nested": { "b":1 ,"a":[ ], "a":null }, "temperature":1e-7,"top_p":1.0,"seed":12345678901234567"#;

/// Workers that are sent each prompt as it came.
fn pair() -> [Spec; 2] {
    [prefill("p0"), decode("d0")].map(|spec| spec.worker(json!({"takes_prompt_ids": false})))
}

async fn fleet() -> Fleet {
    Fleet::with(pair(), json!({"routing": {"allow_path_override": true}})).await
}

fn completion_body(members: &str) -> String {
    format!(
        "\n{{ \"model\" :\"{MODEL}\",{ODD},\r\n \"prompt\":\"Caf\\u00e9 \\\"au lait\\\" for {{all}}\" {members}\t}} \n"
    )
}

fn chat_body(members: &str) -> String {
    format!(
        "{{\"messages\":[ {{\"role\":\"user\" , \"content\":\"Say \\u0041, é and \\n\"}}],{ODD}{members},\"model\":\"{MODEL}\"}}"
    )
}

/// The bodies of the requests that an engine got, in their order.
fn bodies(fleet: &Fleet, engine: &str) -> Vec<String> {
    let body = |request: &Value| request["body"].as_str().expect("a body").to_owned();
    fleet.requests(engine).iter().map(body).collect()
}

async fn send(fleet: &Fleet, path: &str, body: &str, wish: &str) -> Head {
    let request = Request::raw(path, body).header("x-pointsman-path", wish);
    let (head, reply) = request.send(fleet.addr()).await;
    assert_eq!((head.status, head.path()), (200, wish), "{reply:?}");
    head
}

#[tokio::test]
async fn on_the_local_path_a_body_arrives_byte_for_byte() {
    let fleet = fleet().await;
    let sent = [
        ("/v1/completions", completion_body(",\"max_tokens\": 4")),
        ("/v1/completions", completion_body(",\"max_tokens\":4,\"stream\":true")),
        ("/v1/chat/completions", chat_body(",\"max_completion_tokens\":4")),
        ("/v1/chat/completions", chat_body(",\"n\" :2,\"max_tokens\":4,\"stream\": true")),
    ];
    for (path, body) in &sent {
        send(&fleet, path, body, "local").await;
    }
    assert_eq!(bodies(&fleet, "d0"), sent.map(|(_, body)| body));
    assert!(bodies(&fleet, "p0").is_empty());
}

#[tokio::test]
async fn on_the_remote_path_only_the_hand_off_is_spliced_in() {
    let fleet = fleet().await;
    let sent = [
        ("/v1/completions", completion_body(",\"max_tokens\": 4")),
        ("/v1/chat/completions", chat_body(",\"max_completion_tokens\":4,\"stream\":true")),
    ];
    for (path, body) in &sent {
        send(&fleet, path, body, "remote").await;
    }
    for ((_, body), arrived) in sent.iter().zip(bodies(&fleet, "d0")) {
        // Behind the last member; the end of the object stays as it is.
        let at = body.trim_end().trim_end_matches('}').trim_end().len();
        let (before, after) = body.split_at(at);
        let spliced = arrived.strip_prefix(before).and_then(|rest| rest.strip_suffix(after));
        let spliced = spliced.unwrap_or_else(|| panic!("{arrived}\nis not\n{body}"));
        let params = spliced.strip_prefix(",\"kv_transfer_params\":").expect("the hand-off alone");
        // As the prefill engine writes it, member for member.
        assert!(params.starts_with(r#"{"do_remote_prefill":true,"do_remote_decode":false,"#));
        let params: Value = serde_json::from_str(params).expect("an object");
        assert!(params["remote_request_id"].is_string(), "{params}");
    }
    fleet.assert_nothing_leaks().await;
}

#[tokio::test]
async fn the_prefill_leg_is_the_same_body_capped_to_one_token() {
    let fleet = fleet().await;
    let members = ",\"max_tokens\" : 4,\"stream\": true,\"stream_options\":{\"include_usage\":true},\
                   \"min_tokens\":2,\"n\":1,\"stop\":[\"x\"],\"logprobs\":3";
    send(&fleet, "/v1/completions", &completion_body(members), "remote").await;
    let capped = ",\"max_tokens\" : 1,\"stream\": false,\"n\":1";
    let mut expected = completion_body(capped);
    let at = expected.find("\"n\":1").expect("the last member") + "\"n\":1".len();
    let added = ",\"ignore_eos\":true,\"kv_transfer_params\":{\"do_remote_decode\":true}";
    expected.insert_str(at, added);
    assert_eq!(bodies(&fleet, "p0"), [expected]);

    let members = ",\"max_tokens\":9,\"max_completion_tokens\":4,\"tools\":[],\"logprobs\":true,\
                   \"top_logprobs\":2";
    send(&fleet, "/v1/chat/completions", &chat_body(members), "remote").await;
    let mut expected = chat_body(",\"max_tokens\":1,\"max_completion_tokens\":1,\"tools\":[]");
    expected.insert_str(expected.len() - 1, added);
    assert_eq!(bodies(&fleet, "p0")[1..], [expected]);
}

#[tokio::test]
async fn what_only_the_router_may_say_is_taken_out_and_nothing_else_changes() {
    let fleet = fleet().await;
    let forged =
        ",\"max_tokens\":4 , \"kv_transfer_params\": {\"do_remote_prefill\":true, \"x\":1.0}";
    send(&fleet, "/v1/completions", &completion_body(forged), "local").await;
    assert_eq!(bodies(&fleet, "d0"), [completion_body(",\"max_tokens\":4")]);
}

/// Replies to two requests of one name differ in the second in which they were made, if at all.
fn without_time(bytes: &[u8]) -> String {
    let text = String::from_utf8(bytes.to_vec()).expect("a reply of text");
    let mut parts = text.split("\"created\":");
    let mut out = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let rest = part.trim_start_matches(|c: char| c.is_ascii_digit());
        assert!(part.len() - rest.len() >= 10, "a time in {part}");
        out += "\"created\":0";
        out += rest;
    }
    out
}

/// What each of a kind of replies is asked for with.
fn requests() -> Vec<(&'static str, String)> {
    let tool = r#","tools":[{"type":"function","function":{"name":"f","parameters":{"type":"object","properties":{"a":{"type":"string"}}}}}],"tool_choice":"required""#;
    let mut requests = Vec::new();
    for stream in
        ["", ",\"stream\":true", ",\"stream\":true,\"stream_options\":{\"include_usage\":true}"]
    {
        let members = format!(",\"max_tokens\":9,\"logprobs\":2{stream}");
        requests.push(("/v1/completions", completion_body(&members)));
        let members = format!(",\"max_tokens\":9,\"logprobs\":true,\"top_logprobs\":2{stream}");
        requests.push(("/v1/chat/completions", chat_body(&members)));
        requests.push(("/v1/chat/completions", chat_body(&format!("{tool}{stream}"))));
    }
    requests
}

#[tokio::test]
async fn replies_and_streams_are_the_engines_own_byte_for_byte() {
    let fleet = fleet().await;
    let engine = fleet.get("d0").mock.addr();
    for (at, (path, body)) in requests().iter().enumerate() {
        // The engine names its reply after the request.
        let id = format!("bytes-{at}");
        let ask = async |to: SocketAddr, wish: &str| {
            let request = Request::raw(path, body.as_str())
                .header("x-request-id", &id)
                .header("x-pointsman-path", wish);
            let (head, reply) = request.send(to).await;
            assert_eq!(head.status, 200, "{reply:?}");
            assert!(!reply.cut);
            (head, without_time(&reply.bytes))
        };
        // Fills the caches of both engines, so that the counts of cached tokens are the same.
        ask(fleet.addr(), "remote").await;
        let (alone_head, alone) = ask(engine, "").await;
        for wish in ["local", "remote"] {
            let (head, through) = ask(fleet.addr(), wish).await;
            assert_eq!(head.path(), wish);
            assert_eq!(through, alone, "{wish}: {body}");
            for name in ["content-type", "server", "vary"] {
                assert_eq!(head.header(name), alone_head.header(name), "{name}");
            }
            let streamed = body.contains("\"stream\"");
            assert_eq!(head.header("content-length").is_none(), streamed);
        }
    }
    fleet.assert_nothing_leaks().await;
}

#[tokio::test]
async fn headers_of_a_client_reach_the_engines_except_those_that_steer() {
    let fleet = fleet().await;
    let request = Request::raw("/v1/completions", completion_body(",\"max_tokens\":4"))
        .header("x-pointsman-path", "remote")
        .header("x-pointsman-anything", "1")
        .header("x-data-parallel-rank", "7")
        .header("x-prefiller-url", "http://elsewhere")
        .header("accept-encoding", "gzip")
        .header("connection", "x-hop")
        .header("x-hop", "1")
        .header("authorization", "Bearer client")
        .header("x-own", "Kept: as \"it\" is; ü")
        .header("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
        .header("x-request-id", "named-by-the-client");
    let (head, reply) = request.send(fleet.addr()).await;
    assert_eq!((head.status, head.path()), (200, "remote"), "{reply:?}");
    for engine in ["p0", "d0"] {
        let requests = fleet.requests(engine);
        let headers = &requests[0]["headers"];
        for (name, value) in [
            ("authorization", "Bearer client"),
            ("x-own", "Kept: as \"it\" is; ü"),
            ("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),
            ("x-request-id", "named-by-the-client"),
            ("content-type", "application/json"),
        ] {
            assert_eq!(headers[name], value, "{name} at {engine}: {headers}");
        }
        for name in headers.as_object().expect("headers").keys() {
            assert!(!name.starts_with("x-pointsman-"), "{name} at {engine}");
        }
        for name in
            ["x-data-parallel-rank", "x-prefiller-url", "accept-encoding", "x-hop", "connection"]
        {
            assert!(headers.get(name).is_none(), "{name} at {engine}: {headers}");
        }
        let body = requests[0]["body"].as_str().map(|body| body.len().to_string());
        assert_eq!(headers["content-length"].as_str(), body.as_deref());
    }
}

#[tokio::test]
async fn both_legs_of_a_request_have_one_name_also_if_the_client_gave_none() {
    let fleet = fleet().await;
    let body = completion_body(",\"max_tokens\":4");
    let too_long = "x".repeat(129);
    for given in ["", too_long.as_str()] {
        let mut request =
            Request::raw("/v1/completions", body.as_str()).header("x-pointsman-path", "remote");
        if !given.is_empty() {
            request = request.header("x-request-id", given);
        }
        let (head, _) = request.send(fleet.addr()).await;
        assert_eq!(head.status, 200);
    }
    let names = |engine: &str| -> Vec<Value> {
        let requests = fleet.requests(engine);
        requests.iter().map(|request| request["headers"]["x-request-id"].clone()).collect()
    };
    let (prefills, decodes) = (names("p0"), names("d0"));
    assert_eq!(prefills, decodes);
    assert_ne!(prefills[0], prefills[1]);
    for name in prefills {
        let name = name.as_str().expect("a name");
        assert!(name.len() == 32 && name.bytes().all(|byte| byte.is_ascii_hexdigit()), "{name}");
    }
}

#[tokio::test]
async fn an_engines_own_headers_reach_the_client_and_the_routers_can_be_switched_off() {
    let named = |spec: Spec| spec.engine(|engine| engine.request_id_headers = true);
    let fleet = Fleet::with(pair().map(named), json!({"response_headers": false})).await;
    let request = Request::raw("/v1/completions", completion_body(",\"max_tokens\":4"))
        .header("x-request-id", "named");
    let (head, _) = request.send(fleet.addr()).await;
    assert_eq!(head.status, 200);
    assert_eq!(head.header("x-request-id"), Some("named"));
    assert_eq!((head.path(), head.reason(), head.worker()), ("", "", ""));
}

/// A worker's key goes to the worker instead of the client's.
#[tokio::test]
async fn a_workers_own_key_takes_the_place_of_the_clients() {
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("key");
    std::fs::write(&file, "engine-key\n").expect("a file");
    let key = json!({"api_key_file": file});
    let [p0, d0] = pair();
    let fleet = Fleet::start([p0.worker(key), d0]).await;
    let request = Request::raw("/v1/completions", completion_body(",\"max_tokens\":4"))
        .header("authorization", "Bearer client");
    let (head, _) = request.send(fleet.addr()).await;
    assert_eq!((head.status, head.path()), (200, "remote"));
    let key = |engine: &str| fleet.requests(engine)[0]["headers"]["authorization"].clone();
    assert_eq!((key("p0"), key("d0")), (json!("Bearer engine-key"), json!("Bearer client")));
    assert!(!fleet.router.log().contains("engine-key"));
}
