//! Every captured exchange with a real SGLang 0.5.23, sent to a mock: same status, same members of the
//! same types, and what matters of the values.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use std::collections::BTreeMap;

use common::{Reply, call, quick, start, until};
use pointsman_sim::mock::{Dialect, EngineConfig, MockEngine, Role};
use serde_json::{Value, json};

/// A JSON value without its values.
#[derive(Clone, Debug, PartialEq)]
enum Shape {
    Null,
    Bool,
    Number,
    Text,
    /// Lists of numbers are alike whatever their length.
    Numbers,
    List(Vec<Shape>),
    Object(BTreeMap<String, Shape>),
}

fn shape(value: &Value) -> Shape {
    match value {
        Value::Null => Shape::Null,
        Value::Bool(_) => Shape::Bool,
        Value::Number(_) => Shape::Number,
        Value::String(_) => Shape::Text,
        Value::Array(items) if !items.is_empty() && items.iter().all(Value::is_number) => {
            Shape::Numbers
        }
        Value::Array(items) => Shape::List(items.iter().map(shape).collect()),
        Value::Object(members) => {
            Shape::Object(members.iter().map(|(key, value)| (key.clone(), shape(value))).collect())
        }
    }
}

/// The shapes of a body: of its events if it is a stream, where events of one shape that follow each
/// other count once.
fn shapes(body: &str) -> Vec<Shape> {
    if !body.starts_with("data: ") {
        return vec![serde_json::from_str(body).map_or(Shape::Text, |value| shape(&value))];
    }
    let events = body.split_terminator("\n\n").map(|event| event.strip_prefix("data: ").unwrap());
    let of = |event: &str| match event {
        "[DONE]" => Shape::Bool,
        event => shape(&serde_json::from_str(event).unwrap()),
    };
    let mut shapes: Vec<Shape> = events.map(of).collect();
    shapes.dedup();
    shapes
}

fn capture(path: &str) -> Value {
    let file = format!("{}/../wire/tests/fixtures/{path}.json", env!("CARGO_MANIFEST_DIR"));
    let text = std::fs::read_to_string(&file).unwrap_or_else(|error| panic!("{file}: {error}"));
    serde_json::from_str(&text).unwrap()
}

/// The request's body, with token ids that the mock's small model has.
fn body_of(exchange: &Value) -> String {
    fn fit(value: &mut Value) {
        if let Some(ids) = value.as_array_mut() {
            ids.iter_mut().for_each(|id| *id = json!(100 + id.as_u64().unwrap() % 1000 % 200));
        } else if let Some(times) = value["times"].as_u64() {
            *value = json!(vec![100; usize::try_from(times).unwrap()]);
        }
    }
    let mut body = exchange["request"]["body"].clone();
    for key in ["prompt", "input_ids"] {
        if let Some(ids) = body.get_mut(key).filter(|ids| !ids.is_string()) {
            fit(ids);
        }
    }
    match body {
        Value::Null => String::new(),
        Value::String(text) => text,
        body => body.to_string(),
    }
}

async fn replay(engine: &MockEngine, exchange: &Value) -> Reply {
    let request = &exchange["request"];
    let text = |key: &str| request[key].as_str().unwrap().to_owned();
    call(&engine.url(), &text("method"), &text("path"), &[], &body_of(exchange)).await
}

fn assert_alike(name: &str, reply: &Reply, exchange: &Value) {
    let response = &exchange["response"];
    assert_eq!(u64::from(reply.status), response["status"].as_u64().unwrap(), "{name}");
    let kind = |of: Option<&str>| of.and_then(|kind| kind.split(';').next()).map(str::to_owned);
    let headers = response["headers"].as_object().into_iter().flatten();
    let mut captured = headers.filter(|(key, _)| key.eq_ignore_ascii_case("content-type"));
    if let Some((_, captured)) = captured.next_back() {
        assert_eq!(kind(reply.header("content-type")), kind(captured.as_str()), "{name}");
    }
    let captured = response["body_raw"].as_str().unwrap();
    assert_eq!(shapes(reply.text()), shapes(captured), "{name}: {}", reply.text());
}

fn sglang(role: Role) -> EngineConfig {
    EngineConfig {
        dialect: Dialect::Sglang,
        version: "0.5.23".into(),
        max_model_len: 32_768,
        capacity_blocks: 1250,
        ..quick(role)
    }
}

/// Of one server, in this order.
const ONE_SERVER: &[&str] = &[
    "health",
    "models",
    "completion",
    "completion_cached",
    "completion_prefix",
    "completion_stream_usage",
    "chat",
    "chat_stream_usage",
    "generate",
    "generate_stream",
    "err_model",
    "err_bad_json",
    "err_bad_type",
    "err_missing_messages",
    "err_context",
    "err_too_long_for_pool",
    "get_load",
    "tokenize",
    "v1_tokenize",
    "v1_loads",
    "flush_cache",
    "completion_after_flush",
];

/// Of one server, of which a part is told here.
const OF_ITSELF: &[&str] = &["server_info", "model_info"];

/// Both legs of a pair, at once.
const BOTH_LEGS: &[&str] = &["completion_again", "chat_stream", "generate", "pd_ok"];

/// Of a pair, each in a test of its own.
const ALONE: &[&str] = &[
    "bypass_on_decode_without_bootstrap",
    "completion",
    "fake_bootstrap_host_2.2.2.2",
    "loads_decode",
    "loads_prefill",
    "plain_request_on_prefill",
    "prefill_dead_new_decode_request",
    "prefill_killed_decode_waiting_stream",
    "prefill_without_decode",
];

#[test]
fn every_capture_is_replayed() {
    for (folder, lists) in [("sglang", [ONE_SERVER, OF_ITSELF]), ("sglang_pd", [BOTH_LEGS, ALONE])]
    {
        let dir = format!("{}/../wire/tests/fixtures/{folder}", env!("CARGO_MANIFEST_DIR"));
        let files = std::fs::read_dir(dir).unwrap().map(|file| file.unwrap().file_name());
        let names = files.map(|name| name.into_string().unwrap());
        let mut files: Vec<String> =
            names.filter_map(|name| name.strip_suffix(".json").map(str::to_owned)).collect();
        let mut replayed = lists.concat();
        files.sort();
        replayed.sort_unstable();
        assert_eq!(files, replayed, "{folder}");
    }
}

#[tokio::test]
async fn one_server_answers_as_the_real_one() {
    let engine = start(sglang(Role::Unified)).await;
    for name in ONE_SERVER {
        let exchange = capture(&format!("sglang/{name}"));
        let reply = replay(&engine, &exchange).await;
        assert_alike(name, &reply, &exchange);
        let captured = exchange["response"]["body_raw"].as_str().unwrap();
        let Ok(captured) = serde_json::from_str::<Value>(captured) else { continue };
        let (ours, theirs) = (reply.json(), captured);
        for at in
            ["/usage/completion_tokens", "/choices/0/finish_reason", "/meta_info/finish_reason"]
        {
            assert_eq!(ours.pointer(at), theirs.pointer(at), "{name} {at}");
        }
        if name.starts_with("completion") {
            for at in ["/usage/prompt_tokens", "/usage/prompt_tokens_details"] {
                assert_eq!(ours.pointer(at), theirs.pointer(at), "{name} {at}");
            }
        }
        if *name == "err_model" {
            assert_eq!(ours["model"], theirs["model"]);
        }
    }
    engine.stop().await;
}

#[tokio::test]
async fn what_a_server_says_of_itself_is_a_part_of_what_a_real_one_says() {
    /// Ours alone, for the router to learn or for tests.
    const OWN: [&str; 2] = ["disaggregation_decode_enable_conditional_agg", "kv_events_connects"];
    let engine = start(sglang(Role::Unified)).await;
    for name in OF_ITSELF {
        let exchange = capture(&format!("sglang/{name}"));
        let reply = replay(&engine, &exchange).await;
        let theirs: Value =
            serde_json::from_str(exchange["response"]["body_raw"].as_str().unwrap()).unwrap();
        for (key, value) in reply.json().as_object().unwrap() {
            if OWN.contains(&key.as_str()) || key == "internal_states" {
                continue;
            }
            assert_eq!(shape(value), shape(&theirs[key]), "{name}: {key}");
        }
    }
    engine.stop().await;
}

/// A prefill and a decode engine that were never used.
async fn pair() -> (MockEngine, MockEngine) {
    let lease = std::time::Duration::from_millis(400);
    let prefill = start(EngineConfig { lease, ..sglang(Role::Prefill) }).await;
    let decode = start(EngineConfig { lease, ..sglang(Role::Decode) }).await;
    (prefill, decode)
}

/// A captured leg, to meet where this prefill engine is.
fn leg(captured: &Value, prefill: &MockEngine) -> Value {
    let mut leg = captured.clone();
    leg["request"]["body"]["bootstrap_host"] = json!("127.0.0.1");
    leg["request"]["body"]["bootstrap_port"] = json!(prefill.bootstrap_port());
    leg
}

#[tokio::test]
async fn a_pair_answers_as_the_real_one() {
    let (prefill, decode) = pair().await;
    for name in BOTH_LEGS {
        let exchange = capture(&format!("sglang_pd/{name}"));
        let (to_prefill, to_decode) =
            (leg(&exchange["p"], &prefill), leg(&exchange["d"], &prefill));
        // Whichever comes first waits for the other.
        let (of_prefill, of_decode) =
            tokio::join!(replay(&prefill, &to_prefill), replay(&decode, &to_decode));
        assert_alike(name, &of_prefill, &exchange["p"]);
        assert_alike(name, &of_decode, &exchange["d"]);
    }
    let stats = decode.stats();
    assert_eq!((&stats["legs"]["decode_remote"], &stats["violations"]), (&json!(4), &json!([])));
    assert_eq!(prefill.stats()["legs"]["prefill"], 4);
    until(&prefill, |stats| stats["pins"] == 0).await;
    for name in ["loads_decode", "loads_prefill"] {
        let exchange = capture(&format!("sglang_pd/{name}"));
        let engine = if name == "loads_decode" { &decode } else { &prefill };
        assert_alike(name, &replay(engine, &exchange).await, &exchange);
    }
    prefill.stop().await;
    decode.stop().await;
}

#[tokio::test]
async fn the_prompts_of_a_batch_meet_room_by_room() {
    let (prefill, decode) = pair().await;
    let port = prefill.bootstrap_port();
    let leg = |room: Value| {
        json!({"model": "tiny", "prompt": [common::ids(0, 40), common::ids(50, 70)], "max_tokens": 4,
            "bootstrap_host": ["127.0.0.1", "127.0.0.1"], "bootstrap_port": [port, port],
            "bootstrap_room": room})
    };
    // A list has a room for each; what is no list is the room of the first (read).
    for room in [json!([70, 90]), json!(100)] {
        let (leg, urls) = (leg(room), [prefill.url(), decode.url()]);
        let (of_prefill, of_decode) =
            tokio::join!(common::complete(&urls[0], &leg), common::complete(&urls[1], &leg));
        assert_eq!((of_prefill.status, of_decode.status), (200, 200), "{}", of_decode.text());
        assert_eq!(of_decode.json()["choices"].as_array().unwrap().len(), 2);
    }
    assert_eq!(decode.stats()["violations"], json!([]));
    until(&prefill, |stats| stats["pins"] == 0).await;
    let refused = common::complete(&decode.url(), &leg(json!([1, 2, 3]))).await;
    assert_eq!(refused.status, 400, "{}", refused.text());
    prefill.stop().await;
    decode.stop().await;
}

#[tokio::test]
async fn a_request_without_a_room_is_refused_by_either() {
    let (prefill, decode) = pair().await;
    let exchange = capture("sglang_pd/bypass_on_decode_without_bootstrap");
    assert_alike("decode", &replay(&decode, &exchange).await, &exchange);
    let exchange = capture("sglang_pd/plain_request_on_prefill");
    assert_alike("prefill", &replay(&prefill, &exchange).await, &exchange);
}

#[tokio::test]
async fn a_fake_bootstrap_is_answered_with_another_text_and_noted() {
    let (_, decode) = pair().await;
    let exchange = capture("sglang_pd/fake_bootstrap_host_2.2.2.2");
    assert_alike("fake", &replay(&decode, &exchange).await, &exchange);
    assert_eq!(decode.stats()["violation_count"], 1);
}

/// A leg of which only the body was captured.
fn bare(captured: &Value) -> Value {
    json!({"request": {"method": "POST", "path": "/v1/completions", "body": captured["request"]}})
}

#[tokio::test]
async fn a_leg_whose_partner_never_comes_fails_after_a_while() {
    let (prefill, decode) = pair().await;
    // Nobody listens where the prefill engine was.
    let exchange = capture("sglang_pd/prefill_dead_new_decode_request");
    let alone = leg(&exchange["d"], &prefill);
    let given_up = capture("sglang_pd/completion");
    let alone_again = leg(&bare(&given_up["d"]), &prefill);
    let dead_url = prefill.url();
    prefill.stop().await;
    assert_alike("decode", &replay(&decode, &alone).await, &exchange["d"]);
    // There the client gave up after a minute.
    let response = &given_up["d"]["response"];
    assert_eq!(response["body_raw"], "TimeoutError('timed out')");
    assert_eq!(replay(&decode, &alone_again).await.status, 500);
    let response = &given_up["p"]["response"];
    assert!(response["body_raw"].as_str().unwrap().contains("Connection refused"), "{response}");
    assert!(common::Client::connect(&dead_url).await.is_err());
    let (prefill, _) = pair().await;
    let exchange = capture("sglang_pd/prefill_without_decode");
    let alone = leg(&bare(&exchange["p"]), &prefill);
    let reply = replay(&prefill, &alone).await;
    // The real one had not answered when the client's 25 s were over.
    assert_eq!(reply.status, 500);
    until(&prefill, |stats| stats["pins"] == 0 && stats["in_flight"] == 0).await;
}

#[tokio::test]
async fn a_decode_stream_whose_prefill_dies_ends_with_an_error_event() {
    let (prefill, decode) = pair().await;
    let exchange = capture("sglang_pd/prefill_killed_decode_waiting_stream");
    let waiting = leg(&exchange["d"], &prefill);
    let (reply, ()) = tokio::join!(replay(&decode, &waiting), async {
        until(&decode, |stats| stats["in_flight"] == 1).await;
        prefill.stop().await;
    });
    assert_alike("stream", &reply, &exchange["d"]);
}

#[tokio::test]
async fn the_load_of_a_server_is_what_its_steps_did() {
    let engine = start(EngineConfig { speed: 50.0, ..sglang(Role::Unified) }).await;
    let prompt = common::ids(0, 400);
    let load = async || common::get(&engine.url(), "/v1/loads").await.json()["loads"][0].clone();
    let prefilled = async || {
        let load = load().await;
        (load["total_prefill_uncached_tokens"].as_u64(), load["total_prefill_busy_us"].as_u64())
    };
    assert_eq!(prefilled().await, (Some(0), Some(0)));
    common::complete(&engine.url(), &json!({"prompt": prompt, "max_tokens": 8})).await;
    let (tokens, cold) = prefilled().await;
    assert_eq!(tokens, Some(400));
    let moments: [f64; 6] = serde_json::from_value(load().await["decode_moments"].clone()).unwrap();
    let [steps, batch, time, squared, batch_time, generated] = moments;
    assert_eq!([steps, batch, squared, generated], [7.0; 4]);
    assert!(time > 0.0 && batch_time == time, "{moments:?}");
    // Of the same prompt once more all blocks but the last are cached.
    common::complete(&engine.url(), &json!({"prompt": prompt, "max_tokens": 1})).await;
    let (tokens, both) = prefilled().await;
    assert_eq!(tokens, Some(416));
    assert!(cold > Some(0) && both > cold && both < cold.map(|us| 2 * us), "{cold:?} {both:?}");
    engine.stop().await;
}
