//! Arbitrary bytes as what engines answer: prefill answers of each dialect, what they say of
//! themselves, their load, events that are polled.
//!
//! Reading never panics. A hand-off that is read makes a decode leg and a release that are JSON and
//! carry it; a figure is finite and not negative; events that are written again are read again.
#![no_main]

use bytes::Bytes;
use libfuzzer_sys::fuzz_target;
use pointsman_wire::body::Limits;
use pointsman_wire::dialect::{
    Api, Connector, Dialect, LegContext, Prefill, Request, Sglang, Trtllm, Vllm, completed_stream,
};
use pointsman_wire::kv_events::{Batch, as_message, drained};
use pointsman_wire::load::EngineLoad;
use pointsman_wire::sse::{End, Watch, read_usage};
use pointsman_wire::{discovery, load};
use serde::de::IgnoredAny;

/// What a client may have asked for.
const ASKED: [(Api, &str); 2] = [
    (Api::Completions, r#"{"model":"m","prompt":"a","stream":true}"#),
    (Api::Chat, r#"{"messages":[],"stream":true,"stream_options":{"include_usage":true}}"#),
];

fn assert_json(text: &[u8]) {
    let read = serde_json::from_slice::<IgnoredAny>(text);
    assert!(read.is_ok(), "{read:?}: {}", String::from_utf8_lossy(text));
}

fn prefill_answers(answer: &[u8]) {
    let vllm =
        |connector| Dialect::Vllm(Vllm { chat_takes_ids: true, connector, ..Vllm::default() });
    let (nixl, mooncake) = (vllm(Connector::Nixl), vllm(Connector::Mooncake));
    let trtllm = Dialect::Trtllm(Trtllm::default());
    let _ = mooncake.hands_over(answer);
    let _ = Dialect::Sglang(Sglang::default()).hands_over(answer);
    for dialect in [nixl, trtllm] {
        for (api, asked) in ASKED {
            let asked =
                Request::parse(api, Bytes::from_static(asked.as_bytes()), &Limits::default());
            let Ok(request) = asked else { panic!("it is no request") };
            match dialect.read_prefill(200, answer, None) {
                Prefill::Handoff(handoff) => {
                    let leg = LegContext { prompt_ids: Some(&[1, 2]), ..LegContext::default() };
                    for leg in [leg, LegContext::default()] {
                        assert_json(&dialect.decode_leg(&request, &handoff, &leg).body);
                    }
                    if let Some((_, release)) = dialect.release("m\"", &handoff) {
                        assert_json(&release.body);
                    }
                    let _ = (handoff.remote_engine_id(), handoff.prompt_tokens());
                }
                Prefill::Complete(whole) => {
                    assert_json(&whole);
                    if let Some(stream) = completed_stream(&request, &whole) {
                        let mut watch = Watch::new();
                        watch.feed(&stream);
                        assert_ne!(watch.finish(), End::Cut);
                    }
                }
                Prefill::Failed(..) => {}
                Prefill::ClientError(status) => panic!("200 is no {status}"),
            }
        }
    }
}

fn assert_sound(load: &EngineLoad) {
    let figures = [
        load.running,
        load.waiting,
        load.kv_usage,
        load.prompt_local_compute,
        load.prompt_local_cache_hit,
        load.prompt_external,
        load.capacity_tokens,
        load.used_tokens,
        load.waiting_prefill_tokens,
        load.prefill_tokens,
        load.prefill_seconds,
        load.steps,
        load.decode_tokens,
        load.decode_seconds,
    ];
    for figure in figures.into_iter().flatten() {
        assert!(figure.is_finite() && figure >= 0.0, "{load:?}");
    }
    assert!(load.kv_usage.is_none_or(|share| share <= 1.0), "{load:?}");
}

fn loads(answer: &[u8]) {
    for rank in [0, 1] {
        assert_sound(&load::read_vllm(&String::from_utf8_lossy(answer), rank));
        load::read_sglang(answer, rank).iter().for_each(assert_sound);
    }
    load::read_trtllm(answer).iter().for_each(assert_sound);
}

fn polled_events(answer: &[u8]) {
    let Ok(events) = drained(answer) else { return };
    for block_size in [0, 1, 2, 32] {
        let message = as_message(&events, block_size);
        let batch = Batch::decode(&message).unwrap_or_else(|error| panic!("{error}"));
        for event in batch.events() {
            if let Err(error) = event {
                panic!("{error}: {events:?}");
            }
        }
    }
}

fuzz_target!(|answer: &[u8]| {
    prefill_answers(answer);
    loads(answer);
    polled_events(answer);
    let _ = (discovery::models(answer), discovery::event_sources(answer));
    let _ = (discovery::server_info(answer), discovery::mooncake_engines(answer));
    let _ = (discovery::version(answer), read_usage(answer));
});
