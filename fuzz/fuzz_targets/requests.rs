//! Arbitrary bytes as a client's request, and every leg that is made of it.
//!
//! Reading never panics and agrees with serde on what is a JSON object. What only the router may say is
//! in no request. A leg is a JSON object in which every member that is not the hand-off's stands in its
//! place, byte for byte.
#![no_main]

use std::num::NonZeroU32;

use bytes::Bytes;
use libfuzzer_sys::fuzz_target;
use pointsman_wire::body::Limits;
use pointsman_wire::dialect::{
    Api, Connector, Dialect, Handoff, LegContext, LegRequest, Meeting, Prefill, Request, Sglang,
    Trtllm, Vllm, completed_stream,
};
use pointsman_wire::sse::{End, Watch};
use serde_json::value::RawValue;

/// Written down again, so that a name that is lost there is missed here.
const RESERVED: &[&str] = &[
    "kv_transfer_params",
    "ec_transfer_params",
    "data_parallel_rank",
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "bootstrap_pair_key",
    "decode_tp_size",
    "do_local_prefill",
    "routed_dp_rank",
    "disagg_prefill_dp_rank",
    "disaggregated_params",
];
const CONTAINERS: &[&str] = &["vllm_xargs", "extra_args", "sampling_params"];

/// What legs may set, and what they may take away.
const VLLM: &[&str] = &["kv_transfer_params", "prompt"];
const VLLM_PREFILL: &[&str] = &[
    "max_tokens",
    "max_completion_tokens",
    "ignore_eos",
    "n",
    "stream",
    "min_tokens",
    "stream_options",
    "best_of",
    "stop",
    "stop_token_ids",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "structural_tag",
    "logprobs",
    "top_logprobs",
    "logprob_token_ids",
    "prompt_logprobs",
    "echo",
    "return_token_ids",
    "return_prompt_text",
    "response_format",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
];
const SGLANG: &[&str] = &[
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "routed_dp_rank",
    "disagg_prefill_dp_rank",
    "do_local_prefill",
    "prompt",
    "text",
    "input_ids",
];
const TRTLLM: &[&str] = &["disaggregated_params", "prompt", "prompt_token_ids"];
const TRTLLM_PREFILL: &[&str] = &["stream", "stream_options"];

const VLLM_ANSWER: &[u8] = br#"{"kv_transfer_params":{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[1],"remote_engine_id":"e","remote_request_id":"r","remote_host":"h","remote_port":1,"tp_size":1}}"#;
const TRTLLM_ANSWER: &[u8] = br#"{"choices":[{"finish_reason":"length","disaggregated_params":{"request_type":"context_only","ctx_request_id":7,"first_gen_tokens":[5]}}],"prompt_token_ids":[1,2],"usage":{"prompt_tokens":2}}"#;

/// The members of an object in their order, as they stand.
type Members<'a> = Vec<(String, &'a str)>;

struct Object<'a>(Members<'a>);

impl<'de> serde::Deserialize<'de> for Object<'de> {
    fn deserialize<D: serde::Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Visitor;
        impl<'de> serde::de::Visitor<'de> for Visitor {
            type Value = Object<'de>;
            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("an object")
            }
            fn visit_map<A: serde::de::MapAccess<'de>>(
                self,
                mut map: A,
            ) -> Result<Object<'de>, A::Error> {
                let mut members = Vec::new();
                while let Some((name, value)) = map.next_entry::<String, &RawValue>()? {
                    members.push((name, value.get()));
                }
                Ok(Object(members))
            }
        }
        from.deserialize_map(Visitor)
    }
}

fn members(text: &[u8]) -> Option<Members<'_>> {
    Some(serde_json::from_slice::<Object<'_>>(text).ok()?.0)
}

fn is_reserved(name: &str) -> bool {
    RESERVED.contains(&name)
}

/// Nothing that only the router may say, where engines look for it.
fn assert_clean(members: &Members<'_>, depth: usize) {
    for (at, (name, value)) in members.iter().enumerate() {
        assert!(!is_reserved(name), "{name} passed");
        // Of several the last counts.
        let last = members.iter().rposition(|(other, _)| other == name) == Some(at);
        if CONTAINERS.contains(&name.as_str())
            && depth > 0
            && last
            && let Some(inside) = self::members(value.as_bytes())
        {
            assert_clean(&inside, depth - 1);
        }
    }
}

/// A leg is an object, with whatever is not in `ours` as it was sent, and the hand-off said once.
fn assert_leg(request: &Request, leg: &LegRequest, ours: &[&[&str]]) {
    let Some(sent) = members(request.body().bytes()) else { return };
    let said = members(&leg.body)
        .unwrap_or_else(|| panic!("no object: {}", String::from_utf8_lossy(&leg.body)));
    let other = |members: &Members<'_>| -> Vec<(String, String)> {
        let is_ours = |name: &str| ours.iter().any(|names| names.contains(&name));
        let kept = members.iter().filter(|(name, _)| !is_ours(name));
        kept.map(|(name, value)| (name.clone(), (*value).to_owned())).collect()
    };
    assert_eq!(other(&said), other(&sent));
    for name in RESERVED {
        let times = said.iter().filter(|(said, _)| said == name).count();
        assert!(times <= 1, "{name} stands {times} times");
    }
    for (name, value) in &leg.headers {
        assert!(!format!("{name}{value}").contains(['\r', '\n', '\0']), "{name}: {value}");
    }
}

fn handoff(dialect: &Dialect, answer: &[u8]) -> Handoff {
    match dialect.read_prefill(200, answer, None) {
        Prefill::Handoff(handoff) => handoff,
        other => panic!("{other:?}"),
    }
}

fn legs(flags: u8, request: &Request) {
    let has = |bit: u8| flags & (1 << bit) != 0;
    let leg = LegContext {
        request_id: "r",
        prompt_ids: has(2).then_some(&[1, 2, 3][..]),
        rank: has(3).then_some(1),
        number: 9,
    };
    let meeting = Meeting {
        host: "::1\"",
        port: 8998,
        number: u64::MAX,
        prefill_ranks: NonZeroU32::MIN.saturating_add(1),
        engine_id: Some("e\"\\"),
    };
    let vllm =
        |connector| Dialect::Vllm(Vllm { chat_takes_ids: has(4), connector, ..Vllm::default() });
    let (nixl, mooncake) = (vllm(Connector::Nixl), vllm(Connector::Mooncake));
    let sglang = Dialect::Sglang(Sglang { asks_for_local: has(5) });
    let trtllm = Dialect::Trtllm(Trtllm { takes_encoder_handles: has(6), ..Trtllm::default() });

    for (dialect, ours) in
        [(nixl, VLLM), (mooncake, VLLM), (sglang, SGLANG), (trtllm, TRTLLM), (Dialect::OpenAi, &[])]
    {
        assert_leg(request, &dialect.local_leg(request, &leg), &[ours]);
        let _ = (dialect.splits_batch(request), dialect.has(request.api()));
    }
    for (dialect, answer, ours, cut) in
        [(nixl, VLLM_ANSWER, VLLM, VLLM_PREFILL), (trtllm, TRTLLM_ANSWER, TRTLLM, TRTLLM_PREFILL)]
    {
        if let Some(prefill) = dialect.prefill_leg(request, &leg) {
            assert_leg(request, &prefill, &[ours, cut]);
        }
        let decode = dialect.decode_leg(request, &handoff(&dialect, answer), &leg);
        assert_leg(request, &decode, &[ours]);
    }
    for (dialect, ours, cut) in [(mooncake, VLLM, VLLM_PREFILL), (sglang, SGLANG, &[][..])] {
        if let Some((prefill, decode)) = dialect.together(request, &meeting, &leg, &leg) {
            assert_leg(request, &prefill, &[ours, cut]);
            assert_leg(request, &decode, &[ours]);
        }
    }
}

fuzz_target!(|input: (u8, &[u8])| {
    let (flags, body) = input;
    let api = [Api::Completions, Api::Chat, Api::Generate, Api::Other][usize::from(flags & 3)];
    let parsed = Request::parse(api, Bytes::copy_from_slice(body), &Limits::default());
    let request = match (parsed, members(body)) {
        (Ok(request), _) => request,
        (Err(error), Some(_)) => {
            let bounded = ["nested too deep", "too many members"];
            assert!(bounded.iter().any(|why| error.message.contains(why)), "{error}");
            return;
        }
        (Err(_), None) => return,
    };
    match members(request.body().bytes()) {
        Some(clean) => assert_clean(&clean, 3),
        // serde refuses lone surrogates in names, which the grammar allows.
        None => assert!(String::from_utf8_lossy(body).contains("\\u"), "not an object"),
    }
    let _ = (request.prompt(), request.prompts(), request.choices(), request.is_plain());
    let _ = (request.max_new_tokens(), request.disaggregable(), request.each_disaggregable());
    let _ = (request.body().model(), request.body().stream(), request.body().cache_salt());
    legs(flags, &request);
    if let Some(stream) = completed_stream(&request, body) {
        let mut watch = Watch::new();
        watch.feed(&stream);
        assert_ne!(watch.finish(), End::Cut);
    }
});
