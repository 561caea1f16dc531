//! The TensorRT-LLM dialect: what is sent and how answers are read, by the shapes of
//! `tensorrt_llm/serve/openai_protocol.py` (read; the engine cannot run where these tests were made).
#![allow(clippy::unwrap_used, clippy::panic)]

use pointsman_wire::body::Limits;
use pointsman_wire::dialect::{
    Api, Dialect, Failure, Handoff, LegContext, LegRequest, Order, Prefill, Request, Takes, Trtllm,
    completed_stream,
};
use pointsman_wire::sse::{End, Watch};
use proptest::prelude::*;
use serde_json::{Value, json};

const TRTLLM: Dialect = Dialect::Trtllm(Trtllm { takes_encoder_handles: false, lease_ms: 30_000 });
const LEG: LegContext<'_> =
    LegContext { request_id: "r-1", prompt_ids: None, rank: None, number: 5 };
const NUMBER: u64 = (1 << 62) + 5;

fn request(api: Api, body: &str) -> Request {
    Request::parse(api, body.to_owned().into(), &Limits::default()).unwrap()
}

fn sent(leg: &LegRequest) -> Value {
    serde_json::from_slice(&leg.body).unwrap()
}

fn params() -> Value {
    json!({
        "request_type": "context_only", "first_gen_tokens": [42], "ctx_request_id": NUMBER,
        "encoded_opaque_state": "AAEC+/=", "draft_tokens": null, "disagg_request_id": NUMBER,
        "ctx_dp_rank": 1, "ctx_info_endpoint": "tcp://10.0.0.1:7000", "of_a_later_version": {"x": 1.50},
    })
}

/// The answer to a completion's context leg.
fn answer(reason: &str) -> Value {
    json!({
        "id": "cmpl-1", "object": "text_completion", "created": 1, "model": "m",
        "choices": [{
            "index": 0, "text": " one", "token_ids": null, "logprobs": null, "context_logits": null,
            "finish_reason": reason, "stop_reason": null, "disaggregated_params": params(),
        }],
        "usage": {"prompt_tokens": 3, "total_tokens": 4, "completion_tokens": 1},
        "prompt_token_ids": [7, 8, 9],
    })
}

fn handoff(answer: &Value) -> Handoff {
    match TRTLLM.read_prefill(200, answer.to_string().as_bytes(), None) {
        Prefill::Handoff(handoff) => handoff,
        other => panic!("{other:?}"),
    }
}

fn complete(answer: &Value) -> Value {
    match TRTLLM.read_prefill(200, answer.to_string().as_bytes(), None) {
        Prefill::Complete(body) => serde_json::from_slice(&body).unwrap(),
        other => panic!("{other:?}"),
    }
}

fn failure(answer: &Value) -> Failure {
    match TRTLLM.read_prefill(200, answer.to_string().as_bytes(), Some(3)) {
        Prefill::Failed(failure, None) => failure,
        other => panic!("{other:?}"),
    }
}

#[test]
fn the_context_leg_is_the_clients_body_without_a_stream() {
    let client = r#"{"model":"m", "prompt":"é\u00e9","max_tokens":9,"stream":true,"stream_options":{"include_usage":true},"temperature":0.70}"#;
    let leg = TRTLLM.prefill_leg(&request(Api::Completions, client), &LEG).unwrap();
    let expected = format!(
        r#"{{"model":"m", "prompt":"é\u00e9","max_tokens":9,"stream":false,"temperature":0.70,"disaggregated_params":{{"request_type":"context_only","disagg_request_id":{NUMBER}}}}}"#
    );
    assert_eq!(leg.body, expected);
    assert_eq!(leg.headers, [("x-request-id", "r-1".to_owned())]);
    assert_eq!(TRTLLM.order(), Some(Order::PrefillFirst));
    assert_eq!(TRTLLM.takes_ids(), Takes::CompletionsAndChat);
}

#[test]
fn numbers_of_hand_offs_are_positive_and_above_those_of_the_engines() {
    let number = |number| {
        let leg = LegContext { number, ..LEG };
        let leg = TRTLLM.prefill_leg(&request(Api::Chat, "{}"), &leg).unwrap();
        sent(&leg)["disaggregated_params"]["disagg_request_id"].as_u64().unwrap()
    };
    for given in [0, 1, 1 << 61, 1 << 63, u64::MAX] {
        assert!((1 << 62..1 << 63).contains(&number(given)), "{given}");
    }
    assert_ne!(number(1), number(2));
}

#[test]
fn the_generation_leg_carries_every_field_over_and_the_prompt_as_ids() {
    for reason in ["length", "not_finished"] {
        let handoff = handoff(&answer(reason));
        assert_eq!((handoff.prompt_tokens(), handoff.lease_ms()), (Some(3), 30_000));
        let client =
            request(Api::Completions, r#"{"prompt":"a b c","max_tokens":9,"stream":true}"#);
        let leg = sent(&TRTLLM.decode_leg(&client, &handoff, &LEG));
        let mut expected = params();
        expected["request_type"] = json!("generation_only");
        assert_eq!(
            leg,
            json!({"prompt": [7, 8, 9], "max_tokens": 9, "stream": true, "disaggregated_params": expected})
        );
    }
}

#[test]
fn usage_of_the_context_goes_on_where_the_engine_has_a_place_for_it() {
    let client = request(Api::Completions, r#"{"prompt":"a b c"}"#);
    let mut told = answer("length");
    told["choices"][0]["disaggregated_params"]["ctx_usage"] = Value::Null;
    told["usage"]["prompt_tokens_details"] = json!({"cached_tokens": 2});
    let leg = sent(&TRTLLM.decode_leg(&client, &handoff(&told), &LEG));
    assert_eq!(leg["disaggregated_params"]["ctx_usage"], told["usage"]);
    // An older protocol forbids what it does not know.
    let leg = sent(&TRTLLM.decode_leg(&client, &handoff(&answer("length")), &LEG));
    assert!(leg["disaggregated_params"].get("ctx_usage").is_none());
}

#[test]
fn a_chat_keeps_its_messages_beside_the_ids() {
    let client = request(Api::Chat, r#"{"messages":[{"role":"user","content":"a"}]}"#);
    let mut nested = answer("length");
    nested["prompt_token_ids"] = json!([[7, 8]]);
    let leg = sent(&TRTLLM.decode_leg(&client, &handoff(&nested), &LEG));
    assert_eq!(leg["prompt_token_ids"], json!([7, 8]));
    assert_eq!(leg["messages"][0]["content"], json!("a"));
    // They may stand in the choice.
    let mut inner = answer("length");
    inner["choices"][0]["prompt_token_ids"] =
        inner.as_object_mut().unwrap().remove("prompt_token_ids").unwrap();
    let leg = sent(&TRTLLM.decode_leg(&client, &handoff(&inner), &LEG));
    assert_eq!(leg["prompt_token_ids"], json!([7, 8, 9]));
    // Without them the router's own, else the prompt as it is.
    inner["choices"][0].as_object_mut().unwrap().remove("prompt_token_ids");
    let own = LegContext { prompt_ids: Some(&[1, 2]), ..LEG };
    let leg = sent(&TRTLLM.decode_leg(&client, &handoff(&inner), &own));
    assert_eq!(leg["prompt_token_ids"], json!([1, 2]));
    let leg = sent(&TRTLLM.decode_leg(&client, &handoff(&inner), &LEG));
    assert!(leg.get("prompt_token_ids").is_none());
}

#[test]
fn a_context_that_stopped_by_itself_is_the_answer() {
    for reason in ["stop", "tool_calls", "content_filter"] {
        let whole = complete(&answer(reason));
        let mut expected = answer(reason);
        expected["choices"][0].as_object_mut().unwrap().remove("disaggregated_params");
        expected.as_object_mut().unwrap().remove("prompt_token_ids");
        assert_eq!(whole, expected);
    }
    // Nothing need be handed off then.
    let mut bare = answer("stop");
    bare["choices"][0]["disaggregated_params"] = Value::Null;
    assert_eq!(complete(&bare)["choices"][0]["finish_reason"], json!("stop"));
}

#[test]
fn such_an_answer_becomes_the_stream_that_was_asked_for() {
    let Prefill::Complete(body) =
        TRTLLM.read_prefill(200, answer("stop").to_string().as_bytes(), None)
    else {
        panic!("it is complete")
    };
    let client = request(
        Api::Completions,
        r#"{"prompt":"a","stream":true,"stream_options":{"include_usage":true}}"#,
    );
    let stream = completed_stream(&client, &body).unwrap();
    let mut watch = Watch::new();
    watch.feed(&stream);
    assert_eq!(watch.usage().unwrap().completion_tokens, 1);
    assert_eq!((watch.content_events(), watch.finish()), (1, End::Clean));
    let events: Vec<Value> = String::from_utf8_lossy(&stream)
        .split("\n\n")
        .filter_map(|event| serde_json::from_str(event.strip_prefix("data: ")?).ok())
        .collect();
    assert_eq!(events[0]["choices"][0]["text"], json!(" one"));
    assert!(events[0].get("usage").is_none());
    assert_eq!(
        (&events[1]["choices"], events[1]["usage"]["prompt_tokens"].as_u64()),
        (&json!([]), Some(3))
    );

    let chat = json!({
        "id": "c", "object": "chat.completion", "created": 1, "model": "m",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "x\n\ny"}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 3, "total_tokens": 4, "completion_tokens": 1},
    });
    let stream =
        completed_stream(&request(Api::Chat, r#"{"stream":true}"#), chat.to_string().as_bytes());
    let stream = String::from_utf8(stream.unwrap().to_vec()).unwrap();
    let events: Vec<&str> = stream.split_terminator("\n\n").collect();
    assert_eq!((events.len(), events[1]), (2, "data: [DONE]"));
    let event: Value = serde_json::from_str(events[0].strip_prefix("data: ").unwrap()).unwrap();
    assert_eq!(event["object"], json!("chat.completion.chunk"));
    assert_eq!(event["choices"][0]["delta"], json!({"role": "assistant", "content": "x\n\ny"}));
    assert!(event["choices"][0].get("message").is_none() && event.get("usage").is_none());
}

#[test]
fn an_answer_that_cannot_be_handed_on_is_a_failure_of_protocol() {
    let mut two = answer("length");
    two["choices"] = json!([two["choices"][0], two["choices"][0]]);
    let mut none = answer("length");
    none["choices"] = json!([]);
    let mut bare = answer("length");
    bare["choices"][0]["disaggregated_params"] = Value::Null;
    let mut nameless = answer("length");
    nameless["choices"][0]["disaggregated_params"]["ctx_request_id"] = Value::Null;
    for (answer, why) in [
        (two, "exactly one choice"),
        (none, "exactly one choice"),
        (bare, "no disaggregated_params"),
        (nameless, "name no context request"),
        (json!([]), "not a JSON object"),
    ] {
        match failure(&answer) {
            Failure::Protocol(what) => assert!(what.contains(why), "{what}"),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn errors_are_read_by_their_status() {
    let body =
        br#"{"object":"error","message":"m","type":"BadRequestError","param":null,"code":400}"#;
    let read = |status| TRTLLM.read_prefill(status, body, None);
    assert!(matches!(read(400), Prefill::ClientError(400)));
    assert!(matches!(read(500), Prefill::Failed(Failure::Server(500), None)));
    assert!(matches!(read(503), Prefill::Failed(Failure::Overload(503), None)));
}

#[test]
fn the_local_leg_is_the_clients_body() {
    let client = r#"{"messages":[], "stream":true,"stream_options":{"include_usage":true}}"#;
    assert_eq!(TRTLLM.local_leg(&request(Api::Chat, client), &LEG).body, client);
}

#[test]
fn encoder_handles_are_kept_where_the_operator_says_so_and_nothing_else_is() {
    let client = r#"{"messages":[],"disaggregated_params":{"request_type":"generation_only","ctx_request_id":1,"multimodal_embedding_handles":[{"h":1.50}],"multimodal_hashes":[[1]]}}"#;
    let request = request(Api::Chat, client);
    assert_eq!(TRTLLM.local_leg(&request, &LEG).body, r#"{"messages":[]}"#);
    let open = Dialect::Trtllm(Trtllm { takes_encoder_handles: true, lease_ms: 1 });
    assert_eq!(
        open.local_leg(&request, &LEG).body,
        r#"{"messages":[],"disaggregated_params":{"request_type":"context_and_generation","multimodal_embedding_handles":[{"h":1.50}],"multimodal_hashes":[[1]]}}"#
    );
    let leg = sent(&open.prefill_leg(&request, &LEG).unwrap());
    assert_eq!(
        leg["disaggregated_params"],
        json!({"request_type": "context_only", "disagg_request_id": NUMBER,
               "multimodal_embedding_handles": [{"h": 1.5}], "multimodal_hashes": [[1]]})
    );
}

#[test]
fn an_unwanted_context_is_pulled_for_a_single_token() {
    let (path, leg) = TRTLLM.release("m", &handoff(&answer("length"))).unwrap();
    let body = sent(&leg);
    assert_eq!(
        (path, &body["max_tokens"], &body["prompt"]),
        ("/v1/completions", &json!(1), &json!([7, 8, 9]))
    );
    assert_eq!(body["disaggregated_params"]["request_type"], json!("generation_only"));
    assert_eq!(body["disaggregated_params"]["ctx_request_id"], json!(NUMBER));
}

proptest! {
    #[test]
    fn random_answers_never_panic(bytes: Vec<u8>, text in r#"\{"(choices|usage)":\[?\{?"?(finish_reason|disaggregated_params)?[\[\]{}":,a-z0-9]{0,30}\}"#) {
        for body in [&bytes[..], text.as_bytes()] {
            let _ = TRTLLM.read_prefill(200, body, None);
            let _ = completed_stream(&request(Api::Chat, "{}"), body);
        }
    }
}
