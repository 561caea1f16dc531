//! The vLLM dialect against captured exchanges: what is sent equals what a real pair was sent, and
//! what it answered is read as it was meant.
#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use common::{json, response};
use pointsman_wire::body::Limits;
use pointsman_wire::dialect::{
    Api, Connector, Dialect, Failure, Handoff, LegContext, LegRequest, Order, Prefill, Request,
    Vllm,
};
use pointsman_wire::sse::read_usage;
use proptest::prelude::*;
use serde_json::{Value, json};

const VLLM: Dialect =
    Dialect::Vllm(Vllm { chat_takes_ids: false, lease_ms: 30_000, connector: Connector::Nixl });
const VLLM_IDS: Dialect =
    Dialect::Vllm(Vllm { chat_takes_ids: true, lease_ms: 30_000, connector: Connector::Nixl });
const LEG: LegContext<'_> =
    LegContext { request_id: "r-1", prompt_ids: None, rank: None, number: 0 };

fn request(api: Api, body: &str) -> Request {
    Request::parse(api, body.to_owned().into(), &Limits::default()).unwrap()
}

fn api_of(exchange: &Value) -> Api {
    match exchange["request"]["path"].as_str().unwrap() {
        "/v1/completions" => Api::Completions,
        "/v1/chat/completions" => Api::Chat,
        other => panic!("{other}"),
    }
}

fn sent(leg: &LegRequest) -> Value {
    serde_json::from_slice(&leg.body).unwrap()
}

fn text(leg: &LegRequest) -> &str {
    std::str::from_utf8(&leg.body).unwrap()
}

fn handoff(status: u16, body: &str, tokens: Option<u32>) -> Handoff {
    match VLLM.read_prefill(status, body.as_bytes(), tokens) {
        Prefill::Handoff(handoff) => handoff,
        other => panic!("{other:?}"),
    }
}

fn params() -> Value {
    json!({
        "do_remote_prefill": true, "do_remote_decode": false, "remote_block_ids": [[47, 48]],
        "remote_engine_id": "e", "remote_request_id": "r", "remote_host": "127.0.0.1",
        "remote_port": 22111, "remote_num_tokens": 5,
    })
}

/// A prefill answer with these params.
fn answer(params: &Value) -> String {
    json!({"id": "c", "choices": [{"text": "x"}], "usage": {"prompt_tokens": 5}, "kv_transfer_params": params})
        .to_string()
}

fn failure(answer: &str, tokens: Option<u32>) -> (Failure, bool) {
    match VLLM.read_prefill(200, answer.as_bytes(), tokens) {
        Prefill::Failed(failure, handoff) => (failure, handoff.is_some()),
        other => panic!("{other:?}"),
    }
}

#[test]
fn both_legs_are_those_that_a_real_pair_took() {
    for path in ["vllm_pd/01_completions_pd.json", "vllm_pd/03_chat_pd_stream.json"] {
        let file = json(path);
        let (prefill, decode) = (&file["steps"][0], &file["steps"][1]);
        let captured = decode["request"]["body"].clone();
        let mut client = captured.clone();
        client.as_object_mut().unwrap().remove("kv_transfer_params").unwrap();
        let request = request(api_of(decode), &client.to_string());
        assert_eq!(request.disaggregable(), Ok(()));

        let leg = sent(&VLLM.prefill_leg(&request, &LEG).unwrap());
        let reference = &prefill["request"]["body"];
        for member in ["model", "prompt", "messages", "temperature", "max_tokens"] {
            assert_eq!(leg.get(member), reference.get(member), "{member}");
        }
        assert_eq!(leg["kv_transfer_params"], json!({"do_remote_decode": true}));
        assert!(leg.get("stream").is_none_or(|stream| stream == &json!(false)));
        assert!(leg.get("stream_options").is_none());

        let (status, body) = response(prefill);
        let handoff = handoff(status, &body, None);
        assert!(handoff.remote_engine_id().is_some());
        assert_eq!(handoff.lease_ms(), 30_000);
        assert_eq!(
            handoff.prompt_tokens().map(u64::from),
            read_usage(body.as_bytes()).map(|usage| usage.prompt_tokens)
        );
        // Exactly the object that came back, byte for byte.
        let leg = VLLM.decode_leg(&request, &handoff, &LEG);
        assert_eq!(sent(&leg), captured);
        let raw = body.split_once("\"kv_transfer_params\":").unwrap().1;
        let raw = raw.split_once(",\"ec_transfer_params\"").unwrap().0;
        assert!(text(&leg).ends_with(&format!(",\"kv_transfer_params\":{raw}}}")));
        assert_eq!(leg.headers, [("x-request-id", "r-1".to_owned())]);
    }
}

#[test]
fn the_cached_tokens_of_the_decode_leg_are_the_prefill_workers_if_the_object_goes_unchanged() {
    let file = json("vllm_pd/07_partial_and_full_local_hit_on_decode.json");
    for step in file["steps"].as_array().unwrap() {
        let params = &step["request"]["body"]["kv_transfer_params"];
        if let Some(cached) = params["remote_prefill_cached_tokens"].as_u64() {
            let usage = read_usage(response(step).1.as_bytes()).unwrap();
            assert_eq!(usage.cached_tokens, Some(cached));
        }
    }
}

#[test]
fn the_prefill_leg_is_one_token_in_every_spelling() {
    let client = r#"{"model":"m", "messages":[{"role":"user","content":"é\u00e9 1.0"}],"max_tokens":500,"max_completion_tokens":400,"min_tokens":9,"n":3,"stream":true,"stream_options":{"include_usage":true},"stop":["a"],"stop_token_ids":[1],"logprobs":true,"top_logprobs":3,"logprob_token_ids":[1],"structured_outputs":{"regex":"a"},"guided_json":{},"temperature":0.70,"seed":1e2,"unknown":{"x":[1.50]}}"#;
    let leg = VLLM.prefill_leg(&request(Api::Chat, client), &LEG).unwrap();
    assert_eq!(
        text(&leg),
        r#"{"model":"m", "messages":[{"role":"user","content":"é\u00e9 1.0"}],"max_tokens":1,"max_completion_tokens":1,"n":1,"stream":false,"temperature":0.70,"seed":1e2,"unknown":{"x":[1.50]},"ignore_eos":true,"kv_transfer_params":{"do_remote_decode":true}}"#
    );
}

#[test]
fn what_a_template_may_render_stays_on_the_prefill_leg_unless_ids_are_sent() {
    let client = r#"{"messages":[],"tools":[{"type":"function"}],"tool_choice":"required","response_format":{"type":"json_object"},"reasoning_effort":"low"}"#;
    let request_ = request(Api::Chat, client);
    let leg = sent(&VLLM.prefill_leg(&request_, &LEG).unwrap());
    for member in ["tools", "tool_choice", "response_format", "reasoning_effort"] {
        assert!(leg.get(member).is_some(), "{member}");
    }
    let ids = LegContext { prompt_ids: Some(&[7, 8]), ..LEG };
    let leg = sent(&VLLM_IDS.prefill_leg(&request_, &ids).unwrap());
    for member in ["tools", "tool_choice", "response_format"] {
        assert!(leg.get(member).is_none(), "{member}");
    }
    let completion = request(Api::Completions, r#"{"prompt":"a","response_format":{}}"#);
    assert!(sent(&VLLM.prefill_leg(&completion, &LEG).unwrap()).get("response_format").is_none());
}

#[test]
fn the_local_leg_is_the_clients_own_bytes() {
    let body = bytes::Bytes::from_static(br#"{ "prompt":"a", "kv":1.0 }"#);
    let request = Request::parse(Api::Completions, body.clone(), &Limits::default()).unwrap();
    for dialect in [VLLM, Dialect::OpenAi] {
        let leg = dialect.local_leg(&request, &LegContext { rank: Some(2), ..LEG });
        assert_eq!(leg.body.as_ptr(), body.as_ptr());
        assert_eq!(leg.headers[1], ("x-data-parallel-rank", "2".to_owned()));
    }
}

#[test]
fn ids_go_where_the_captures_have_them() {
    let ids = LegContext { prompt_ids: Some(&[5, 6, 7]), ..LEG };
    let completion = request(Api::Completions, r#"{"prompt":"abc","x":1}"#);
    let leg = |leg: &LegRequest| text(leg).to_owned();
    assert_eq!(leg(&VLLM.local_leg(&completion, &ids)), r#"{"prompt":[5,6,7],"x":1}"#);
    assert_eq!(sent(&VLLM.prefill_leg(&completion, &ids).unwrap())["prompt"], json!([5, 6, 7]));
    let handed = handoff(200, &answer(&params()), None);
    assert_eq!(sent(&VLLM.decode_leg(&completion, &handed, &ids))["prompt"], json!([5, 6, 7]));

    let chat = request(Api::Chat, r#"{"messages":[]}"#);
    let bypass = json("vllm_http/chat_bypass_with_prompt_token_ids_only.json");
    let local = sent(&VLLM_IDS.local_leg(&chat, &ids));
    let keys = |value: &Value| value.as_object().unwrap().keys().cloned().collect::<Vec<_>>();
    let captured = &bypass["request"]["body"]["kv_transfer_params"];
    assert_eq!(keys(&local["kv_transfer_params"]), keys(captured));
    let handed = handoff(200, &answer(&params()), None);
    let decode = sent(&VLLM_IDS.decode_leg(&chat, &handed, &ids));
    assert_eq!(decode["kv_transfer_params"]["prompt_token_ids"], json!([5, 6, 7]));
    assert_eq!(decode["kv_transfer_params"]["remote_request_id"], json!("r"));

    // Not where they would not be understood, or where the text is wanted back.
    assert_eq!(leg(&VLLM.local_leg(&chat, &ids)), r#"{"messages":[]}"#);
    let echo = r#"{"prompt":"abc","echo":true}"#;
    assert_eq!(leg(&VLLM.local_leg(&request(Api::Completions, echo), &ids)), echo);
    let own = r#"{"prompt":[1, 2]}"#;
    assert_eq!(leg(&VLLM.local_leg(&request(Api::Completions, own), &ids)), own);
}

#[test]
fn a_4xx_is_the_clients_answer_and_the_rest_is_the_engines_failure() {
    let read = |status| VLLM.read_prefill(status, b"{}", None);
    for status in [400, 401, 404, 422] {
        assert!(matches!(read(status), Prefill::ClientError(same) if same == status));
    }
    for (status, expected) in [
        (429, Failure::Overload(429)),
        (503, Failure::Overload(503)),
        (500, Failure::Server(500)),
        (502, Failure::Server(502)),
    ] {
        assert!(matches!(read(status), Prefill::Failed(failure, None) if failure == expected));
    }
    assert!(matches!(read(302), Prefill::Failed(Failure::Protocol(_), None)));
}

#[test]
fn an_answer_that_would_kill_a_decode_engine_is_a_failure_of_the_prefill_leg() {
    assert!(matches!(failure("nonsense", None), (Failure::Protocol(_), false)));
    assert!(matches!(failure("{}", None), (Failure::Protocol(_), false)));
    assert!(matches!(failure(&answer(&Value::Null), None), (Failure::Protocol(_), false)));
    assert!(matches!(failure(&answer(&json!([1])), None), (Failure::Protocol(_), false)));
    for (member, value) in [
        ("do_remote_prefill", json!(false)),
        ("remote_request_id", json!(null)),
        ("remote_request_id", json!("")),
        ("remote_engine_id", json!(7)),
        ("remote_host", json!(null)),
        ("remote_port", json!(null)),
        ("remote_block_ids", json!([])),
        ("remote_block_ids", json!([[]])),
        ("remote_block_ids", json!(null)),
    ] {
        let mut params = params();
        params[member] = value.clone();
        let failure = failure(&answer(&params), None);
        assert!(matches!(failure, (Failure::Protocol(_), false)), "{member} {value}");
    }
    // A streamed prefill leg gives no hand-off at all.
    let streamed = response(&json("vllm_pd/05_prefill_leg_streaming.json")).1;
    assert!(matches!(failure(&streamed, None), (Failure::Protocol(_), false)));
}

#[test]
fn the_prompt_that_was_prefilled_must_be_the_one_that_was_counted() {
    assert_eq!(handoff(200, &answer(&params()), Some(5)).prompt_tokens(), Some(5));
    // The hand-off comes along, so that it can be released.
    assert!(matches!(failure(&answer(&params()), Some(6)), (Failure::Protocol(_), true)));
    let with = |kept: u32| {
        let mut params = params();
        params["remote_num_tokens"] = json!(kept);
        answer(&params)
    };
    assert!(matches!(failure(&with(3), Some(5)), (Failure::Protocol(_), true)));
    assert!(matches!(failure(&with(6), None), (Failure::Protocol(_), true)));
    // State-space models leave the last token to the decode worker.
    handoff(200, &with(4), Some(5));
}

#[test]
fn an_abandoned_prefill_is_released_as_the_capture_has_it() {
    let captured = json("vllm_pd/14_release_one_token_prompt.json")["request"]["body"].clone();
    let given = answer(&captured["kv_transfer_params"]).replace("\"prompt_tokens\":5", "\"x\":0");
    let (path, leg) = VLLM.release("tiny", &handoff(200, &given, None)).unwrap();
    assert_eq!(path, "/v1/completions");
    let mut sent = sent(&leg);
    assert!(sent["max_tokens"].as_u64() > captured["max_tokens"].as_u64());
    sent["max_tokens"] = captured["max_tokens"].clone();
    assert_eq!(sent, captured);
}

#[test]
fn only_vllm_splits_a_request() {
    assert_eq!(VLLM.order(), Some(Order::PrefillFirst));
    assert_eq!(Dialect::OpenAi.order(), None);
    assert!(Dialect::OpenAi.prefill_leg(&request(Api::Chat, "{}"), &LEG).is_none());
}

proptest! {
    #[test]
    fn no_answer_makes_the_reading_panic(
        bytes: Vec<u8>,
        status: u16,
        params in r#"\{("(do_remote_prefill|remote_block_ids|remote_num_tokens)":[\[\]{}",0-9tru.]{0,9},?)*\}"#,
    ) {
        let _ = VLLM.read_prefill(status, &bytes, Some(5));
        let answer = format!("{{\"kv_transfer_params\":{params}}}");
        let _ = VLLM.read_prefill(200, answer.as_bytes(), None);
    }

    #[test]
    fn a_leg_changes_no_member_that_it_does_not_set(
        extra in prop::collection::btree_map("[a-z]{3,6}_x", r#"-?[1-9][0-9]{0,30}\.[0-9]{1,20}"#, 0..5),
        chat: bool,
    ) {
        let members: String = extra.iter().map(|(name, number)| format!(", \"{name}\" : {number}")).collect();
        let body = format!("{{\"prompt\":\"a\",\"stream\":true{members}}}");
        let request = request(if chat { Api::Chat } else { Api::Completions }, &body);
        let handed = handoff(200, &answer(&params()), None);
        for leg in [VLLM.prefill_leg(&request, &LEG).unwrap(), VLLM.decode_leg(&request, &handed, &LEG)] {
            prop_assert!(text(&leg).contains(&members), "{}", text(&leg));
        }
        prop_assert_eq!(&VLLM.local_leg(&request, &LEG).body, request.body().bytes());
    }
}
