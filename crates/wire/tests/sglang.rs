//! The SGLang dialect against captured exchanges: what is sent equals what a real pair was sent, and
//! what it answered is read as it was meant.
#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use common::{json, response};
use pointsman_wire::body::Limits;
use pointsman_wire::dialect::{
    Api, Dialect, Failure, LegContext, LegRequest, Meeting, Order, Request, Sglang, Verdict, Vllm,
    verdict,
};
use pointsman_wire::discovery::{self, Version};
use pointsman_wire::sse::{End, Hold, Watch, read_usage};
use serde_json::{Value, json};

const SGLANG: Dialect = Dialect::Sglang(Sglang { asks_for_local: false });
const LEG: LegContext<'_> =
    LegContext { request_id: "r-1", prompt_ids: None, rank: None, number: 0 };

fn request(api: Api, body: &Value) -> Request {
    Request::parse(api, body.to_string().into(), &Limits::default()).unwrap()
}

fn api_of(exchange: &Value) -> Api {
    match exchange["request"]["path"].as_str().unwrap() {
        "/v1/completions" => Api::Completions,
        "/v1/chat/completions" => Api::Chat,
        "/generate" => Api::Generate,
        other => panic!("{other}"),
    }
}

fn sent(leg: &LegRequest) -> Value {
    serde_json::from_slice(&leg.body).unwrap()
}

fn meeting(number: u64, ranks: u32) -> Meeting<'static> {
    Meeting {
        host: "127.0.0.1",
        port: 22601,
        number,
        prefill_ranks: ranks.try_into().unwrap(),
        engine_id: None,
    }
}

fn together(
    request: &Request,
    meeting: &Meeting<'_>,
    prefill: &LegContext<'_>,
    decode: &LegContext<'_>,
) -> (Value, Value) {
    let (prefill, decode) = SGLANG.together(request, meeting, prefill, decode).unwrap();
    (sent(&prefill), sent(&decode))
}

#[test]
fn both_legs_are_those_that_a_real_pair_took() {
    for name in ["chat_stream", "completion_again", "generate", "pd_ok"] {
        let file = json(&format!("sglang_pd/{name}.json"));
        let (to_prefill, to_decode) =
            (&file["p"]["request"]["body"], &file["d"]["request"]["body"]);
        let mut client = to_decode.clone();
        for member in ["bootstrap_host", "bootstrap_port", "bootstrap_room"] {
            client.as_object_mut().unwrap().remove(member).unwrap();
        }
        let request = request(api_of(&file["d"]), &client);
        assert_eq!(request.disaggregable(), Ok(()), "{name}");
        let room = to_decode["bootstrap_room"].as_u64().unwrap();
        let (prefill, decode) = together(&request, &meeting(room, 1), &LEG, &LEG);
        assert_eq!((&prefill, &decode), (to_prefill, to_decode), "{name}");
    }
    assert_eq!(SGLANG.order(), Some(Order::Together));
}

#[test]
fn the_clients_bytes_stay_as_they_are_in_both_legs() {
    let body =
        r#"{"model":"m", "messages":[{"content":"é\u00e9 1.0"}],"temperature":0.70,"seed":1e2}"#;
    let request = Request::parse(Api::Chat, body.into(), &Limits::default()).unwrap();
    let (prefill, decode) = SGLANG.together(&request, &meeting(7, 1), &LEG, &LEG).unwrap();
    let expected = format!(
        "{},\"bootstrap_host\":\"127.0.0.1\",\"bootstrap_port\":22601,\"bootstrap_room\":7}}",
        body.strip_suffix('}').unwrap()
    );
    assert_eq!(prefill.body, expected);
    assert_eq!(decode, prefill);
    assert_eq!(prefill.headers, [("x-request-id", "r-1".to_owned())]);
}

#[test]
fn ranks_stand_in_the_bodies_and_in_the_room() {
    let request = request(Api::Completions, &json!({"prompt": "a"}));
    let (p, d) = (LegContext { rank: Some(3), ..LEG }, LegContext { rank: Some(1), ..LEG });
    let (prefill, decode) = together(&request, &meeting(u64::MAX, 8), &p, &d);
    assert_eq!(prefill["bootstrap_room"].as_u64().unwrap() % 8, 3);
    assert_eq!(prefill["bootstrap_room"], decode["bootstrap_room"]);
    assert_eq!((&prefill["routed_dp_rank"], &decode["routed_dp_rank"]), (&json!(3), &json!(1)));
    assert_eq!(decode["disagg_prefill_dp_rank"], json!(3));
    assert!(prefill.get("disagg_prefill_dp_rank").is_none());
    // A decode worker of one rank is still told where the prompt is.
    let (_, decode) = together(&request, &meeting(5, 8), &p, &LEG);
    assert_eq!(decode["disagg_prefill_dp_rank"], json!(3));
    assert!(decode.get("routed_dp_rank").is_none());
}

#[test]
fn each_prompt_of_a_batch_has_a_room_of_its_own_and_both_legs_the_same() {
    for (api, body) in [
        (Api::Completions, json!({"prompt": ["a", "b", "c"], "max_tokens": 4})),
        (Api::Completions, json!({"prompt": [[1, 2], [3], [4]], "stream": true})),
        (Api::Generate, json!({"text": ["a", "b", "c"], "sampling_params": [{}, {}, {}]})),
        (Api::Generate, json!({"input_ids": [[1], [2], [3]]})),
    ] {
        let request = request(api, &body);
        assert!(SGLANG.splits_batch(&request), "{body}");
        let (p, d) = (LegContext { rank: Some(1), ..LEG }, LegContext { rank: Some(0), ..LEG });
        let (prefill, decode) = together(&request, &meeting(1000, 2), &p, &d);
        let mut expected = body.clone();
        expected["bootstrap_host"] = json!("127.0.0.1");
        expected["bootstrap_port"] = json!(22601);
        expected["bootstrap_room"] = json!([1001, 1003, 1005]);
        expected["routed_dp_rank"] = json!(1);
        assert_eq!(prefill, expected);
        expected["routed_dp_rank"] = json!(0);
        expected["disagg_prefill_dp_rank"] = json!(1);
        assert_eq!(decode, expected);
    }
    // One in a list is as one alone: the engine takes a room as that of the first.
    let one = request(Api::Completions, &json!({"prompt": ["a"]}));
    assert_eq!(together(&one, &meeting(9, 1), &LEG, &LEG).0["bootstrap_room"], json!(9));
}

#[test]
fn batches_that_cannot_meet_prompt_by_prompt_are_not_split() {
    let many = vec!["a"; 5000];
    for body in [
        json!({"prompt": ["a", "b"], "n": 2}),
        json!({"prompt": ["a", "b"], "echo": true, "logprobs": 1}),
        json!({"prompt": many}),
    ] {
        assert!(!SGLANG.splits_batch(&request(Api::Completions, &body)));
    }
    let batch = request(Api::Completions, &json!({"prompt": ["a", "b"]}));
    let vllm = Dialect::Vllm(Vllm::default());
    assert!(!vllm.splits_batch(&batch) && !Dialect::OpenAi.splits_batch(&batch));
}

#[test]
fn a_client_cannot_send_a_bootstrap_of_its_own() {
    let file = json("sglang_pd/fake_bootstrap_host_2.2.2.2.json");
    let forged = &file["request"]["body"];
    let request = request(Api::Completions, forged);
    assert!(request.stripped());
    let (prefill, decode) = together(&request, &meeting(9, 1), &LEG, &LEG);
    for leg in [prefill, decode] {
        assert_eq!(leg["bootstrap_host"], json!("127.0.0.1"));
        assert_eq!(leg["bootstrap_room"], json!(9));
    }
    let local = sent(&SGLANG.local_leg(&request, &LEG));
    assert!(local.as_object().unwrap().keys().all(|name| !name.starts_with("bootstrap")));
}

#[test]
fn the_local_leg_is_the_clients_body_and_says_so_to_a_decode_worker() {
    let request = request(Api::Chat, &json!({"messages": [], "do_local_prefill": true}));
    assert_eq!(SGLANG.local_leg(&request, &LEG).body, r#"{"messages":[]}"#);
    let decode = Dialect::Sglang(Sglang { asks_for_local: true });
    assert_eq!(decode.local_leg(&request, &LEG).body, r#"{"messages":[],"do_local_prefill":true}"#);
    let ranked = SGLANG.local_leg(&request, &LegContext { rank: Some(2), ..LEG });
    assert_eq!(ranked.body, r#"{"messages":[],"routed_dp_rank":2}"#);
}

#[test]
fn ids_take_the_place_of_text_where_there_is_one() {
    let ids = LegContext { prompt_ids: Some(&[7, 8]), ..LEG };
    let leg = |api, body: Value| sent(&SGLANG.local_leg(&request(api, &body), &ids));
    assert_eq!(leg(Api::Completions, json!({"prompt": "a"})), json!({"prompt": [7, 8]}));
    assert_eq!(leg(Api::Generate, json!({"text": "a"})), json!({"input_ids": [7, 8]}));
    let chat = json!({"messages": []});
    assert_eq!(leg(Api::Chat, chat.clone()), chat);
    let echo = json!({"prompt": "a", "echo": true});
    assert_eq!(leg(Api::Completions, echo.clone()), echo);
}

#[test]
fn only_what_one_hand_off_can_carry_is_for_two_workers() {
    assert!(SGLANG.has(Api::Generate) && SGLANG.has(Api::Other));
    assert!(!Dialect::OpenAi.has(Api::Generate));
    assert!(SGLANG.prefill_leg(&request(Api::Chat, &json!({})), &LEG).is_none());
}

#[test]
fn errors_are_told_by_their_status_and_have_no_outer_key() {
    for (name, expected) in [
        ("sglang/err_bad_json", Verdict::Client(400)),
        ("sglang/err_context", Verdict::Client(400)),
        ("sglang/err_missing_messages", Verdict::Client(400)),
        ("sglang_pd/plain_request_on_prefill", Verdict::Client(400)),
        ("sglang_pd/bypass_on_decode_without_bootstrap", Verdict::Client(400)),
        ("sglang/err_model", Verdict::Ok),
    ] {
        let (status, body) = response(&json(&format!("{name}.json")));
        assert_eq!(verdict(status), expected, "{name}");
        let body: Value = serde_json::from_str(&body).unwrap();
        assert!(body.get("error").is_none());
        assert_eq!(body["object"] == "error", expected != Verdict::Ok);
    }
    let dead = json("sglang_pd/prefill_dead_new_decode_request.json");
    let (status, _) = response(&dead["d"]);
    assert_eq!(verdict(status), Verdict::Failed(Failure::Server(500)));
}

#[test]
fn a_decode_stream_whose_prefill_died_is_an_error_before_any_content() {
    let file = json("sglang_pd/prefill_killed_decode_waiting_stream.json");
    let (status, body) = response(&file["d"]);
    let mut watch = Watch::new();
    watch.feed(body.as_bytes());
    assert_eq!((status, watch.hold(), watch.finish()), (200, Hold::Error, End::Error));
}

#[test]
fn a_chat_stream_is_held_until_content_and_its_usage_is_read() {
    for (file, tokens) in [
        (json("sglang/chat_stream_usage.json"), 3),
        (json("sglang/completion_stream_usage.json"), 3),
        (json("sglang_pd/chat_stream.json")["d"].clone(), 4),
    ] {
        let (_, body) = response(&file);
        let mut watch = Watch::new();
        if body.contains("chat.completion") {
            let role = body.split_inclusive("\n\n").next().unwrap();
            watch.feed(role.as_bytes());
            assert_eq!(watch.hold(), Hold::Hold);
            watch.feed(&body.as_bytes()[role.len()..]);
        } else {
            watch.feed(body.as_bytes());
        }
        assert_eq!((watch.hold(), watch.tokens()), (Hold::Release, tokens));
        assert_eq!(watch.finish(), End::Clean);
    }
}

#[test]
fn usage_of_every_endpoint_is_read() {
    let usage = |name: &str| read_usage(response(&json(name)).1.as_bytes()).unwrap();
    let cached = usage("sglang/completion_cached.json");
    assert_eq!((cached.prompt_tokens, cached.cached_tokens), (100, Some(96)));
    let native = usage("sglang/generate.json");
    assert_eq!(
        (native.prompt_tokens, native.completion_tokens, native.cached_tokens),
        (100, 3, Some(96))
    );
}

#[test]
fn the_native_stream_counts_its_tokens_though_its_text_is_cumulative() {
    let (_, body) = response(&json("sglang/generate_stream.json"));
    let mut watch = Watch::new();
    let events: Vec<&str> = body.split_inclusive("\n\n").collect();
    for (at, event) in (1..).zip(&events[..events.len() - 1]) {
        watch.feed(event.as_bytes());
        assert_eq!((watch.hold(), watch.tokens()), (Hold::Release, at));
    }
    watch.feed(events.last().unwrap().as_bytes());
    assert_eq!(watch.finish(), End::Clean);
    assert_eq!(watch.usage().unwrap().cached_tokens, Some(96));
}

#[test]
fn a_server_tells_what_it_can_do() {
    let (_, body) = response(&json("sglang/server_info.json"));
    let info = discovery::server_info(body.as_bytes()).unwrap();
    assert_eq!(info.version, Some(Version(0, 5, 23)));
    assert_eq!(info.disaggregation_mode.as_deref(), Some("null"));
    assert_eq!((info.bootstrap_port, info.dp_size), (Some(8998), Some(1)));
    assert_eq!((info.page_size, info.max_total_tokens), (Some(16), Some(20_000)));
    assert_eq!((info.chunked_prefill_size, info.keeps_prefixes), (Some(4096), Some(true)));
    assert_eq!(info.local_prefill, None);
    let events = info.events.unwrap();
    assert_eq!(events.endpoint, "tcp://127.0.0.1:22511");
    assert_eq!(events.replay_endpoint.as_deref(), Some("tcp://127.0.0.1:22512"));
    // A decode server forgets what it received unless it is told to keep it.
    let decode =
        body.replace(r#""disaggregation_mode":"null""#, r#""disaggregation_mode":"decode""#);
    let info = discovery::server_info(decode.as_bytes()).unwrap();
    assert_eq!(info.keeps_prefixes, Some(false));
    let told = decode.replace(
        r#""disaggregation_decode_enable_radix_cache":false"#,
        r#""disaggregation_decode_enable_radix_cache":true"#,
    );
    assert_eq!(discovery::server_info(told.as_bytes()).unwrap().keeps_prefixes, Some(true));
    assert!(discovery::server_info(b"[]").is_err());
}
