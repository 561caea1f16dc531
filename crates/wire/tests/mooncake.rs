//! vLLM with MooncakeConnector against captured exchanges: both legs are those that a real pair took, and
//! its answers are read as they were meant.
#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use common::{json, response};
use pointsman_wire::body::Limits;
use pointsman_wire::dialect::{
    Api, Connector, Dialect, LegContext, LegRequest, Meeting, Order, Request, Vllm,
};
use proptest::prelude::*;
use serde_json::{Value, json};

const MOONCAKE: Dialect = dialect(false);
const LEG: LegContext<'_> =
    LegContext { request_id: "r-1", prompt_ids: None, rank: None, number: 0 };
const MEETING: Meeting<'_> = Meeting {
    host: "127.0.0.1",
    port: 22301,
    number: 0xf00d,
    prefill_ranks: std::num::NonZeroU32::MIN,
    engine_id: Some("ae66dff5-dba0-4c6d-af7a-2b00c0160872"),
};
const TRANSFER: &str = "xfer-000000000000f00d";

const fn dialect(chat_takes_ids: bool) -> Dialect {
    let connector = Connector::Mooncake;
    Dialect::Vllm(Vllm { chat_takes_ids, lease_ms: 30_000, connector })
}

fn request(api: Api, body: &Value) -> Request {
    Request::parse(api, body.to_string().into(), &Limits::default()).unwrap()
}

fn sent(leg: &LegRequest) -> Value {
    serde_json::from_slice(&leg.body).unwrap()
}

fn together(dialect: Dialect, request: &Request, leg: &LegContext<'_>) -> (Value, Value) {
    let (prefill, decode) = dialect.together(request, &MEETING, leg, leg).unwrap();
    (sent(&prefill), sent(&decode))
}

/// Takes a member out.
fn take(body: &mut Value, name: &str) -> Value {
    body.as_object_mut().unwrap().remove(name).unwrap()
}

#[test]
fn both_legs_are_those_that_a_real_pair_took() {
    let file = json("vllm_pd/21_mooncake_connector.json");
    for pair in ["concurrent", "sequential"] {
        let captured = |leg: &str| file[pair][leg]["request"]["body"].clone();
        let (mut to_prefill, mut to_decode) = (captured("p"), captured("d"));
        let mut client = to_decode.clone();
        take(&mut client, "kv_transfer_params");
        let request = request(Api::Completions, &client);
        assert_eq!(request.disaggregable(), Ok(()));
        let (mut prefill, decode) = together(MOONCAKE, &request, &LEG);
        // The capture's own names are another router's.
        for body in [&mut to_prefill, &mut to_decode] {
            body["kv_transfer_params"]["transfer_id"] = json!(TRANSFER);
        }
        assert_eq!(decode, to_decode, "{pair}");
        // A client that does not stream says nothing of it; the one token must not be the last one.
        assert_eq!(take(&mut to_prefill, "stream"), json!(false));
        assert_eq!(take(&mut prefill, "ignore_eos"), json!(true));
        assert_eq!(prefill, to_prefill, "{pair}");
    }
    assert_eq!(MOONCAKE.order(), Some(Order::Together));
    assert!(MOONCAKE.prefill_leg(&request(Api::Completions, &json!({})), &LEG).is_none());
}

#[test]
fn the_answers_of_a_real_prefill_worker_say_that_the_kv_is_there() {
    let file = json("vllm_pd/21_mooncake_connector.json");
    for pair in ["concurrent", "sequential"] {
        let (status, body) = response(&file[pair]["p"]);
        assert!(status == 200 && MOONCAKE.hands_over(body.as_bytes()), "{body}");
        let stopped = body.replace(r#""finish_reason":"length""#, r#""finish_reason":"stop""#);
        assert!(stopped != body && !MOONCAKE.hands_over(stopped.as_bytes()));
    }
    for body in ["", "{}", r#"{"choices":[]}"#, r#"{"choices":[{"finish_reason":null}]}"#] {
        assert!(!MOONCAKE.hands_over(body.as_bytes()), "{body}");
    }
}

#[test]
fn the_prefill_leg_is_edited_as_with_every_connector() {
    let body = json!({"messages": [], "max_completion_tokens": 9, "n": 1, "stream": true,
        "stream_options": {"include_usage": true}, "min_tokens": 4, "stop": ["."], "logprobs": true});
    let asked = request(Api::Chat, &body);
    let (prefill, decode) = together(MOONCAKE, &asked, &LEG);
    let nixl = Dialect::Vllm(Vllm::default());
    let mut expected = sent(&nixl.prefill_leg(&asked, &LEG).unwrap());
    expected["kv_transfer_params"] =
        json!({"do_remote_decode": true, "do_remote_prefill": false, "transfer_id": TRANSFER});
    assert_eq!(prefill, expected);
    let mut decode = decode;
    take(&mut decode, "kv_transfer_params");
    assert_eq!(decode, body);
}

#[test]
fn ids_and_ranks_go_to_both_legs() {
    let leg = LegContext { prompt_ids: Some(&[5, 6]), rank: Some(1), ..LEG };
    let chat = request(Api::Chat, &json!({"messages": [{"role": "user", "content": "a"}]}));
    let (prefill, decode) = together(dialect(true), &chat, &leg);
    for body in [&prefill, &decode] {
        assert_eq!(body["kv_transfer_params"]["prompt_token_ids"], json!([5, 6]));
        assert_eq!(body["kv_transfer_params"]["transfer_id"], json!(TRANSFER));
    }
    let text = request(Api::Completions, &json!({"prompt": "a"}));
    let (prefill, decode) = together(MOONCAKE, &text, &leg);
    assert_eq!((&prefill["prompt"], &decode["prompt"]), (&json!([5, 6]), &json!([5, 6])));
    let (prefill, decode) = MOONCAKE.together(&text, &MEETING, &leg, &LEG).unwrap();
    assert!(prefill.headers.contains(&("x-data-parallel-rank", "1".to_owned())));
    assert_eq!(decode.headers, [("x-request-id", "r-1".to_owned())]);
}

#[test]
fn without_an_engine_to_name_there_are_no_legs() {
    let meeting = Meeting { engine_id: None, ..MEETING };
    let asked = request(Api::Completions, &json!({"prompt": "a"}));
    assert!(MOONCAKE.together(&asked, &meeting, &LEG, &LEG).is_none());
    assert!(MOONCAKE.left_behind(&meeting).is_none());
}

#[test]
fn an_abandoned_transfer_is_released_by_a_decode_leg_that_is_refused() {
    let meeting = Meeting { host: "::1", ..MEETING };
    let handoff = MOONCAKE.left_behind(&meeting).unwrap();
    let (path, leg) = MOONCAKE.release("m", &handoff).unwrap();
    let mut body = sent(&leg);
    assert_eq!((path, &body["prompt"]), ("/v1/completions", &json!([1])));
    let params = take(&mut body, "kv_transfer_params");
    assert_eq!(
        params,
        json!({"do_remote_decode": false, "do_remote_prefill": true,
            "remote_bootstrap_addr": "http://[::1]:22301",
            "remote_engine_id": MEETING.engine_id, "transfer_id": TRANSFER})
    );
}

#[test]
fn workers_of_different_connectors_do_no_request_together() {
    assert!(MOONCAKE.is_like(&dialect(true)));
    assert!(!MOONCAKE.is_like(&Dialect::Vllm(Vllm::default())));
}

proptest! {
    #[test]
    fn no_answer_makes_the_reading_panic(
        bytes: Vec<u8>,
        choices in r#"\[?\{?("finish_reason":)?["length:\[\]{},0-9]{0,12}"#,
    ) {
        let _ = MOONCAKE.hands_over(&bytes);
        let _ = MOONCAKE.hands_over(format!("{{\"choices\":{choices}}}").as_bytes());
    }
}
