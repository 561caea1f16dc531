//! Captured streams, answers and errors are observed as they were meant, however they arrive.
#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use common::{json, response};
use pointsman_wire::openai::ApiError;
use pointsman_wire::sse::{End, Hold, Usage, Watch, read_usage};
use proptest::prelude::*;
use serde_json::Value;

const STREAMS: &[&str] = &[
    "vllm_http/chat_stream.json",
    "vllm_http/chat_stream_usage.json",
    "vllm_http/completion_stream.json",
    "vllm_http/completion_stream_usage.json",
    "vllm_http/completion_stream_usage_cached.json",
    "vllm_pd/05_prefill_leg_streaming.json",
];

fn stream(path: &str) -> String {
    response(&json(path)).1
}

/// All that a watch tells in the end.
#[derive(Debug, PartialEq)]
struct Observed {
    content: u64,
    tokens: u64,
    usage: Option<Usage>,
    error: Option<String>,
    hold: Hold,
    end: End,
}

fn observe<'a>(chunks: impl IntoIterator<Item = &'a [u8]>) -> Observed {
    let mut watch = Watch::new();
    for chunk in chunks {
        watch.feed(chunk);
    }
    let (hold, end) = (watch.hold(), watch.finish());
    Observed {
        content: watch.content_events(),
        tokens: watch.tokens(),
        usage: watch.usage(),
        error: watch.error().map(Into::into),
        hold,
        end,
    }
}

/// The events' data, read the slow way.
fn events(stream: &str) -> Vec<Value> {
    let data = stream.split("\n\n").filter_map(|event| event.strip_prefix("data: "));
    data.filter(|data| *data != "[DONE]").map(|data| serde_json::from_str(data).unwrap()).collect()
}

#[test]
fn captured_streams_end_clean_with_their_usage_and_tokens() {
    for path in STREAMS {
        let stream = stream(path);
        let observed = observe([stream.as_bytes()]);
        let events = events(&stream);
        let usage = events.iter().rev().find_map(|event| event.get("usage"));
        assert_eq!(observed.end, End::Clean, "{path}");
        assert_eq!(observed.hold, Hold::Release);
        let expected = usage.map(|usage| Usage {
            prompt_tokens: usage["prompt_tokens"].as_u64().unwrap(),
            completion_tokens: usage["completion_tokens"].as_u64().unwrap(),
            cached_tokens: usage["prompt_tokens_details"]["cached_tokens"].as_u64(),
        });
        assert_eq!(observed.usage, expected, "{path}");
        let content = events.iter().filter(|event| {
            let choice = &event["choices"][0];
            let said = |text: &Value| text.as_str().is_some_and(|text| !text.is_empty());
            said(&choice["text"])
                || said(&choice["delta"]["content"])
                || said(&choice["finish_reason"])
        });
        assert_eq!(observed.content, content.count() as u64, "{path}");
        if let Some(usage) = expected {
            assert_eq!(observed.tokens, usage.completion_tokens);
            assert_eq!(observed.content, usage.completion_tokens, "one event for each token");
        }
    }
}

#[test]
fn failed_kv_loads_are_held_back_also_behind_the_role_chunk() {
    let file = json("vllm_pd/12_failures_policy_fail_responses.json");
    let mut streams = 0;
    for (name, answer) in file.as_object().unwrap() {
        let Some(body) = answer["body_raw"].as_str().filter(|body| body.starts_with("data:"))
        else {
            continue;
        };
        streams += 1;
        let observed = observe([body.as_bytes()]);
        assert_eq!((observed.hold, observed.end), (Hold::Error, End::Error), "{name}");
        assert!(observed.error.unwrap().contains("Internal server error"));
        // Not released at any moment before.
        let mut watch = Watch::new();
        for byte in body.as_bytes().chunks(1) {
            watch.feed(byte);
            assert_ne!(watch.hold(), Hold::Release, "{name}");
        }
    }
    assert!(streams >= 4);
}

#[test]
fn a_stream_that_stops_short_of_done_is_cut() {
    for path in STREAMS {
        let stream = stream(path);
        let end = stream.len() - "data: [DONE]\n\n".len();
        for cut in [end, end - 1, end / 2, 1] {
            assert_eq!(observe([&stream.as_bytes()[..cut]]).end, End::Cut, "{path} at {cut}");
        }
    }
}

#[test]
fn usage_of_plain_answers_is_read() {
    for path in ["vllm_http/chat.json", "vllm_http/completion.json", "vllm_http/completion_n2.json"]
    {
        let body = response(&json(path)).1;
        let parsed: Value = serde_json::from_str(&body).unwrap();
        let usage = read_usage(body.as_bytes()).unwrap();
        assert_eq!(Some(usage.prompt_tokens), parsed["usage"]["prompt_tokens"].as_u64());
        assert_eq!(Some(usage.completion_tokens), parsed["usage"]["completion_tokens"].as_u64());
        assert_eq!(
            usage.cached_tokens,
            parsed["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64()
        );
    }
}

#[test]
fn our_errors_have_the_shape_of_the_engines() {
    for path in ["err_model_404", "err_max_tokens_0"] {
        let (status, body) = response(&json(&format!("vllm_http/{path}.json")));
        let theirs: Value = serde_json::from_str(&body).unwrap();
        let ours = ApiError::new(status, theirs["error"]["message"].as_str().unwrap())
            .param(theirs["error"]["param"].as_str().unwrap());
        assert_eq!(serde_json::from_slice::<Value>(&ours.body()).unwrap(), theirs);
        // And as an event it is seen as an error.
        assert_eq!(observe([&ours.event()[..]]).hold, Hold::Error);
    }
}

proptest! {
    #[test]
    fn captures_are_seen_alike_however_they_are_split(
        path in prop::sample::select(STREAMS),
        crlf: bool,
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..12),
    ) {
        let mut stream = stream(path);
        if crlf {
            stream = stream.replace('\n', "\r\n");
        }
        let bytes = stream.as_bytes();
        let mut at: Vec<usize> = cuts.iter().map(|cut| cut.index(bytes.len() + 1)).collect();
        at.extend([0, bytes.len()]);
        at.sort_unstable();
        let whole = observe([bytes]);
        prop_assert_eq!(observe(at.windows(2).map(|pair| &bytes[pair[0]..pair[1]])), whole);
    }
}
