//! What is TensorRT-LLM's own of a mock engine: legs by `disaggregated_params`, shapes of replies. By
//! `tensorrt_llm/serve/openai_protocol.py`; no running server was at hand.

use bytes::{BufMut, Bytes, BytesMut};
use serde_json::{Value, json};

use super::app::{App, now};
use super::errors::Failure;
use super::faults::Leg;
use super::plan::{Plan, Sequence};
use super::reply::{cache_counts, finish_reason, reachable, stop_reason, token_counts};
use super::request::{Api, KvParams, Members, token_ids};
use super::run::{Run, Step};

const PARAMS: &str = "disaggregated_params";

/// The hand-off members of a request.
pub(super) fn params(members: &Members) -> Result<KvParams, Failure> {
    let ids = members.get("prompt_token_ids").as_ref().and_then(token_ids);
    let plain = KvParams { prompt_token_ids: ids, ..KvParams::default() };
    let Some(params) = members.get(PARAMS) else { return Ok(plain) };
    let bad = |why: &str| Err(Failure::bad(Some(PARAMS), format!("{PARAMS}: {why}")));
    match params["request_type"].as_str() {
        Some("context_and_generation") => Ok(plain),
        Some("context_only") => {
            let on = |key: &str| members.get(key) == Some(Value::Bool(true));
            if on("stream") || members.raw("stream_options").is_some() {
                return bad("a context_only request cannot be a stream");
            }
            if members.get("n").and_then(|n| n.as_u64()).is_some_and(|n| n > 1) {
                return bad("a context_only request has one choice");
            }
            Ok(KvParams { do_remote_decode: true, ..plain })
        }
        Some("generation_only") => {
            let opaque = params["encoded_opaque_state"].as_str().unwrap_or_default();
            let mut parts = opaque.split('|').map(str::to_owned);
            let (host, port) = (parts.next(), parts.next().and_then(|port| port.parse().ok()));
            let named = params["ctx_request_id"].is_u64();
            Ok(KvParams {
                do_remote_prefill: true,
                remote_host: host,
                remote_port: port,
                remote_engine_id: parts.next(),
                remote_request_id: parts.next().filter(|_| named),
                last_block: params["first_gen_tokens"].is_array().then_some(0),
                ..plain
            })
        }
        _ => bad("request_type must be context_only, generation_only or context_and_generation"),
    }
}

/// What a context leg leaves for the generation leg.
fn hand_off(app: &App, plan: &Plan, sequence: &Sequence) -> Value {
    let Some((name, _)) = &sequence.pinned else { return Value::Null };
    let host = reachable(app.config.host);
    let first = sequence.answer.pieces.first().map(|piece| piece.id);
    let sent = plan.request.members.get(PARAMS).unwrap_or_default();
    let number = sent["disagg_request_id"].as_u64().unwrap_or(1);
    json!({
        "request_type": "context_only", "first_gen_tokens": [first], "ctx_request_id": number,
        "encoded_opaque_state":
            format!("{host}|{}|{}|{name}", app.side_port, app.registry.engine_id),
        "draft_tokens": null, "disagg_request_id": number, "ctx_dp_rank": 0,
        "ctx_info_endpoint": null,
    })
}

fn finish(plan: &Plan, sequence: &Sequence) -> &'static str {
    if sequence.goes_on { "not_finished" } else { finish_reason(plan, sequence) }
}

fn usage(app: &App, plan: &Plan) -> Value {
    let (prompt, completion) = token_counts(plan);
    json!({
        "prompt_tokens": prompt, "total_tokens": prompt + completion,
        "completion_tokens": completion,
        "prompt_tokens_details": {"cached_tokens": cache_counts(app, plan).0},
    })
}

/// The JSON that answers a request without `stream`.
pub(super) fn body(app: &App, plan: &Plan) -> Bytes {
    let choice = |(index, sequence): (usize, &Sequence)| {
        let mut choice = json!({
            "index": index, "logprobs": null, "finish_reason": finish(plan, sequence),
            "stop_reason": stop_reason(sequence), PARAMS: hand_off(app, plan, sequence),
            "avg_decoded_tokens_per_iter": null,
        });
        match plan.request.api {
            Api::Chat => {
                choice["message"] = json!({
                    "role": "assistant", "content": sequence.answer.text(),
                    "reasoning_content": null, "reasoning": null, "tool_calls": [],
                });
            }
            _ => {
                choice["text"] = json!(sequence.answer.text());
                choice["token_ids"] = Value::Null;
                choice["context_logits"] = Value::Null;
            }
        }
        choice
    };
    let choices: Vec<Value> = plan.sequences.iter().enumerate().map(choice).collect();
    let chat = plan.request.api == Api::Chat;
    let mut reply = json!({
        "id": plan.id, "object": if chat { "chat.completion" } else { "text_completion" },
        "created": plan.created, "model": plan.model, "choices": choices, "usage": usage(app, plan),
        "prompt_token_ids": null,
    });
    if plan.leg == Leg::Prefill {
        reply["prompt_token_ids"] = json!(&*plan.prompts[0]);
    }
    reply.to_string().into()
}

fn event(run: &Run, choices: &Value, usage: &Value) -> Bytes {
    let plan = &run.plan;
    let chat = plan.request.api == Api::Chat;
    let chunk = json!({
        "id": plan.id, "object": if chat { "chat.completion.chunk" } else { "text_completion" },
        "created": plan.created, "model": plan.model, "choices": choices, "usage": usage,
    });
    format!("data: {chunk}\n\n").into()
}

/// The first event of each choice of a chat.
pub(super) fn roles(run: &Run, out: &mut BytesMut) {
    for index in 0..run.plan.sequences.len() {
        let choice = json!([{"index": index, "delta": {"role": "assistant", "content": ""},
            "logprobs": null, "finish_reason": null, "stop_reason": null}]);
        out.put(event(run, &choice, &Value::Null));
    }
}

/// One token.
pub(super) fn token(run: &Run, step: &Step, out: &mut BytesMut) {
    let plan = &run.plan;
    let sequence = &plan.sequences[step.sequence];
    let text = &sequence.answer.pieces[step.token].text;
    let last = step.token + 1 == sequence.answer.pieces.len();
    let mut choice = json!({
        "index": step.sequence, "logprobs": null,
        "finish_reason": last.then(|| finish(plan, sequence)),
        "stop_reason": last.then(|| stop_reason(sequence)).flatten(),
    });
    match plan.request.api {
        Api::Chat => choice["delta"] = json!({"role": null, "content": text}),
        _ => choice["text"] = json!(text),
    }
    out.put(event(run, &json!([choice]), &Value::Null));
}

/// The event that tells usage at a stream's end.
pub(super) fn usage_event(run: &Run) -> Bytes {
    event(run, &json!([]), &usage(&run.app, &run.plan))
}

/// `/metrics`: statistics of iterations.
pub(super) fn iterations(app: &App) -> Value {
    let of = |rank: &std::sync::Arc<super::rank::Rank>| {
        let load = rank.load();
        json!({
            "iter": rank.totals().steps, "timestamp": now().to_string(),
            "numActiveRequests": load.running, "numQueuedRequests": load.waiting,
            "kvCacheStats": {
                "maxNumBlocks": load.capacity_blocks, "usedNumBlocks": load.used_blocks,
                "freeNumBlocks": load.capacity_blocks - load.used_blocks,
                "tokensPerBlock": app.config.block_size, "cacheHitRate": 0.0,
            },
        })
    };
    app.ranks.iter().map(of).collect()
}

/// `/v1/models`
pub(super) fn models(app: &App) -> Value {
    let card = json!({"id": app.config.model, "object": "model", "created": now(),
        "owned_by": "tensorrt_llm"});
    json!({"object": "list", "data": [card]})
}
