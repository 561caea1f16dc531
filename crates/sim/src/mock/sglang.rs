//! What is SGLang's own of a mock engine: legs that meet in a room, `/generate`, shapes of replies.
//! Member for member as SGLang 0.5.23 answered, see `tests/fixtures/sglang`.

use bytes::{BufMut, Bytes, BytesMut};
use serde_json::{Map, Value, json};

use super::app::{App, now};
use super::config::{KvSocket, Role};
use super::errors::Failure;
use super::faults::Leg;
use super::plan::{Plan, Sequence};
use super::prompt::call_is_named;
use super::reply::{cache_counts, finish_reason, token_counts};
use super::request::{Api, Bootstrap, KvParams, Members, Request};
use super::run::{Run, Step};
use super::text::Ending;
use crate::engine::DecodeTotals;

/// A host that makes a real decode engine skip the transfer and decode garbage.
pub(super) const FAKE_HOST: &str = "2.2.2.2";

/// Where a prefill engine is met unless the request says otherwise.
const USUAL_PORT: u16 = 8998;

/// The hand-off members of a request.
pub(super) fn params(members: &Members) -> KvParams {
    // Each may be a list, with one for each prompt; all of a batch meet in one place here.
    let list = |key: &str| match members.get(key) {
        Some(Value::Array(list)) => list,
        one => one.into_iter().collect(),
    };
    let rooms: Option<Vec<u64>> = list("bootstrap_room").iter().map(Value::as_u64).collect();
    let bootstrap = rooms.filter(|rooms| !rooms.is_empty()).map(|rooms| Bootstrap {
        host: list("bootstrap_host")
            .first()
            .and_then(|host| host.as_str().map(str::to_owned))
            .unwrap_or_default(),
        port: list("bootstrap_port")
            .first()
            .and_then(|port| u16::try_from(port.as_u64()?).ok())
            .unwrap_or(USUAL_PORT),
        rooms,
    });
    let local = members.get("do_local_prefill") == Some(Value::Bool(true));
    KvParams { bootstrap, do_local_prefill: local, ..KvParams::default() }
}

pub(super) fn leg_of(app: &App, request: &Request) -> Leg {
    match (app.config.role, &request.kv.bootstrap) {
        (Role::Prefill, Some(_)) => Leg::Prefill,
        (Role::Decode, Some(_)) => Leg::Decode,
        _ => Leg::Local,
    }
}

/// Refuses what a prefill or a decode engine refuses.
pub(super) fn refuse(app: &App, request: &Request) -> Result<(), Failure> {
    let computes = app.config.role == Role::Decode
        && app.config.conditional_agg
        && request.kv.do_local_prefill;
    if app.config.role == Role::Unified || request.kv.bootstrap.is_some() || computes {
        return Ok(());
    }
    let message = format!(
        "Invalid request: Disaggregated request received without bootstrap room id. req.rid='{}'",
        app.fresh_hex()
    );
    Err(Failure::bad(None, message))
}

/// The rank that the body names, if any.
pub(super) fn rank_asked(request: &Request) -> Option<String> {
    request.members.raw("routed_dp_rank").map(str::to_owned)
}

fn usage(app: &App, plan: &Plan) -> Map<String, Value> {
    let (prompt, completion) = token_counts(plan);
    let usage = json!({
        "prompt_tokens": prompt, "total_tokens": prompt + completion,
        "completion_tokens": completion,
        "prompt_tokens_details": {"cached_tokens": cache_counts(app, plan).0},
        "reasoning_tokens": 0, "completion_tokens_details": null,
    });
    usage.as_object().cloned().unwrap_or_default()
}

fn matched(sequence: &Sequence) -> Value {
    match (&sequence.answer.ending, sequence.answer.pieces.last()) {
        (Ending::StopAt(what), _) => what.clone(),
        (Ending::Stop, Some(piece)) => json!(piece.id),
        _ => Value::Null,
    }
}

fn versions(plan: &Plan) -> Value {
    let end: usize = plan.sequences.iter().map(|sequence| sequence.done).sum();
    json!([{"version": "default", "start": 0, "end": end}])
}

/// The JSON that answers a request without `stream`.
pub(super) fn body(app: &App, plan: &Plan) -> Bytes {
    if plan.request.api == Api::Generate {
        let all: Vec<Value> =
            plan.sequences.iter().map(|one| native(app, plan, one, true)).collect();
        let one = |mut all: Vec<Value>| all.pop().unwrap_or_default();
        let reply = if all.len() == 1 { one(all) } else { json!(all) };
        return reply.to_string().into();
    }
    let choice = |(index, sequence): (usize, &Sequence)| {
        let mut choice = json!({
            "index": index, "logprobs": null, "finish_reason": finish_reason(plan, sequence),
            "matched_stop": matched(sequence),
        });
        let text = sequence.answer.text();
        match (plan.request.api, &sequence.answer.call) {
            (Api::Chat, None) => {
                choice["message"] =
                    json!({"role": "assistant", "content": text, "reasoning_content": null});
            }
            (Api::Chat, Some(call)) => {
                choice["message"] = json!({
                    "role": "assistant", "content": null, "reasoning_content": null,
                    "tool_calls": [{"id": call.id, "index": 0, "type": "function",
                        "function": {"name": call.name, "arguments": text}}],
                });
                if !call_is_named(&plan.request.members) {
                    choice["finish_reason"] = json!("tool_calls");
                }
            }
            _ => choice["text"] = json!(text),
        }
        choice
    };
    let choices: Vec<Value> = plan.sequences.iter().enumerate().map(choice).collect();
    let object = if plan.request.api == Api::Chat { "chat.completion" } else { "text_completion" };
    let reply = json!({
        "id": plan.id, "object": object, "created": plan.created, "model": plan.model,
        "choices": choices, "usage": usage(app, plan),
        "metadata": {"weight_version": "default", "weight_versions": versions(plan)},
    });
    reply.to_string().into()
}

/// A reply of `/generate`, as far as it has come; the text is all of it so far.
fn native(app: &App, plan: &Plan, sequence: &Sequence, over: bool) -> Value {
    let pieces = &sequence.answer.pieces[..sequence.done];
    let text: String = pieces.iter().map(|piece| piece.text.as_str()).collect();
    let ids: Vec<u32> = pieces.iter().map(|piece| piece.id).collect();
    let finish = match &sequence.answer.ending {
        _ if !over => Value::Null,
        Ending::Length if plan.leg == Leg::Prefill => json!({"type": "length", "length": 0}),
        Ending::Length => json!({"type": "length", "length": sequence.done}),
        Ending::Stop | Ending::StopAt(_) => json!({"type": "stop", "matched": matched(sequence)}),
    };
    let (at, cached) = (now() as f64 + 0.5, sequence.cached_tokens);
    let mut meta = json!({
        "id": plan.id, "finish_reason": finish,
        "prompt_tokens": plan.prompts[sequence.prompt].len(), "weight_version": "default",
        "num_retractions": 0, "forward_entry_time": at, "queue_time": 0.001, "reasoning_tokens": 0,
        "completion_tokens": sequence.done, "cached_tokens": cached,
        "cached_tokens_details": {"device": cached, "host": 0}, "dp_rank": null,
    });
    if plan.leg != Leg::Decode {
        meta["storage_prefetch_wait"] = json!(0.0);
        meta["storage_staging_wait"] = json!(0.0);
        meta["prefill_finished_time"] = json!(at);
    }
    if over {
        meta["weight_versions"] = versions(plan);
        for key in ["e2e_latency", "first_token_latency"] {
            meta[key] = json!(0.01);
        }
        for key in [
            "request_received_ts",
            "api_server_dispatch_finish_ts",
            "request_finished_ts",
            "response_sent_to_client_ts",
        ] {
            meta[key] = json!(at);
        }
        if app.config.role == Role::Unified {
            meta["decode_throughput"] = json!(300.5);
        }
    } else if sequence.done == 1 {
        meta["response_sent_to_client_ts"] = json!(at);
    }
    json!({"text": text, "output_ids": ids, "meta_info": meta})
}

fn event(value: &Value, out: &mut BytesMut) {
    out.put_slice(b"data: ");
    out.put_slice(value.to_string().as_bytes());
    out.put_slice(b"\n\n");
}

fn chunk(run: &Run, choices: &Value) -> Value {
    let plan = &run.plan;
    let (object, completions) = match plan.request.api {
        Api::Chat => ("chat.completion.chunk", false),
        _ => ("text_completion", true),
    };
    let mut chunk = json!({
        "id": plan.id, "object": object, "created": plan.created, "model": plan.model,
        "choices": choices,
    });
    if completions {
        chunk["usage"] = Value::Null;
    }
    chunk
}

/// The first event of each choice of a chat.
pub(super) fn roles(run: &Run, out: &mut BytesMut) {
    for index in 0..run.plan.sequences.len() {
        let delta = json!({"reasoning_content": null, "role": "assistant", "content": ""});
        let choice = json!([{"index": index, "delta": delta, "logprobs": null,
            "finish_reason": null, "matched_stop": null}]);
        event(&chunk(run, &choice), out);
    }
}

/// One token; of a chat the end is an event of its own.
pub(super) fn token(run: &Run, step: &Step, out: &mut BytesMut) {
    let plan = &run.plan;
    let sequence = &plan.sequences[step.sequence];
    let piece = &sequence.answer.pieces[step.token];
    let last = step.token + 1 == sequence.answer.pieces.len();
    let finish = if last { json!(finish_reason(plan, sequence)) } else { Value::Null };
    let stop = if last { matched(sequence) } else { Value::Null };
    match plan.request.api {
        Api::Generate | Api::Tokens => event(&native(&run.app, plan, sequence, last), out),
        Api::Completions => {
            let choice = json!([{"index": step.sequence, "text": piece.text, "logprobs": null,
                "finish_reason": finish, "matched_stop": stop}]);
            event(&chunk(run, &choice), out);
        }
        Api::Chat => {
            let said = |delta: Value, finish: Value, stop: Value| {
                json!([{"index": step.sequence, "delta": delta, "logprobs": null,
                    "finish_reason": finish, "matched_stop": stop}])
            };
            let delta = match &sequence.answer.call {
                None => json!({"reasoning_content": null, "content": piece.text}),
                Some(call) => {
                    let first = step.token == 0;
                    json!({"reasoning_content": null, "tool_calls": [{
                        "id": first.then_some(&call.id), "index": 0, "type": "function",
                        "function": {"name": first.then_some(&call.name), "arguments": piece.text},
                    }]})
                }
            };
            if !piece.text.is_empty() {
                event(&chunk(run, &said(delta, Value::Null, Value::Null)), out);
            }
            if last {
                let end = json!({"reasoning_content": null});
                event(&chunk(run, &said(end, finish, stop)), out);
            }
        }
    }
}

/// The event that tells usage at a stream's end.
pub(super) fn usage_event(run: &Run) -> Bytes {
    let mut usage = usage(&run.app, &run.plan);
    if run.plan.request.api == Api::Completions {
        usage.remove("completion_tokens_details");
    }
    let mut chunk = chunk(run, &json!([]));
    chunk["usage"] = Value::Object(usage);
    let mut out = BytesMut::new();
    event(&chunk, &mut out);
    out.freeze()
}

/// `/server_info`: what a router reads of it.
pub(super) fn server_info(app: &App) -> Value {
    let c = &app.config;
    let mode = mode(c.role);
    let tokens = u64::from(c.capacity_blocks) * u64::from(c.block_size);
    let events = c.kv_events.as_ref().zip(app.event_sources.first()).map(|(events, source)| {
        let buffer = events.buffer_steps;
        json!({"publisher": "zmq", "endpoint": source.0, "replay_endpoint": source.1,
            "topic": events.topic, "buffer_steps": buffer})
        .to_string()
    });
    let connects =
        c.kv_events.as_ref().is_some_and(|e| matches!(e.publish, KvSocket::Connect { .. }));
    json!({
        "served_model_name": c.model, "version": c.version, "disaggregation_mode": mode,
        "disaggregation_bootstrap_port": app.side_port, "dp_size": c.ranks,
        "page_size": c.block_size, "max_total_num_tokens": tokens,
        "chunked_prefill_size": c.max_num_batched_tokens, "disable_radix_cache": false,
        "disaggregation_decode_enable_radix_cache": true,
        "disaggregation_decode_enable_conditional_agg": c.conditional_agg,
        "kv_events_config": events, "kv_events_connects": connects,
        "internal_states": [{"max_total_num_tokens": tokens}],
    })
}

fn mode(role: Role) -> &'static str {
    match role {
        Role::Prefill => "prefill",
        Role::Decode => "decode",
        Role::Unified => "null",
    }
}

/// `/v1/loads`
pub(super) fn loads(app: &App) -> Value {
    let size = u64::from(app.config.block_size);
    let of = |(rank, own): (usize, &std::sync::Arc<super::rank::Rank>)| {
        let (load, totals) = (own.load(), own.totals());
        let capacity = u64::from(load.capacity_blocks) * size;
        let used = u64::from(load.used_blocks) * size;
        let waiting = load.waiting + load.pulling;
        let share = used as f64 / (capacity as f64).max(1.0);
        json!({
            "timestamp": now() as f64 + 0.5, "dp_rank": rank, "num_running_reqs": load.running,
            "num_waiting_reqs": waiting,
            "num_waiting_uncached_tokens": own.waiting_prefill_tokens(), "num_used_tokens": used,
            "num_total_tokens": used, "num_active_tokens": load.context_tokens,
            "num_prealloc_ready_tokens": 0, "max_total_num_tokens": capacity,
            "max_running_requests": app.config.max_num_seqs, "token_usage": share,
            "gen_throughput": 0.0, "cache_hit_rate": 0.0, "utilization": 0.0,
            "total_prefill_uncached_tokens": totals.prefilled,
            "total_prefill_busy_us": totals.prefill_time / 1000,
            "decode_moments": (app.config.role != Role::Prefill).then(|| moments(&totals.decode)),
            "memory": {"weight_gb": 0.01, "kv_cache_gb": 0.01, "graph_gb": 0.0,
                "token_capacity": capacity},
            "disaggregation": {
                "mode": mode(app.config.role), "prefill_bootstrap_queue_reqs": load.pins,
                "prefill_inflight_queue_reqs": 0, "decode_prealloc_queue_reqs": 0,
                "decode_transfer_queue_reqs": load.pulling, "decode_retracted_queue_reqs": 0,
                "kv_transfer_speed_gb_s": 0.0, "kv_transfer_latency_ms": 0.0,
            },
            "queues": {"waiting": load.waiting, "grammar": 0, "paused": 0, "retracted": 0,
                "prealloc_ready": 0},
        })
    };
    let loads: Vec<Value> = app.ranks.iter().enumerate().map(of).collect();
    json!({
        "timestamp": "2026-01-01T00:00:00.000000+00:00", "version": app.config.version,
        "accelerator": null, "num_accelerators": 1, "loads": loads,
    })
}

/// `decode_moments`: steps, and sums of their batches, times (in us), squared batches, batches times
/// times, and tokens.
fn moments(of: &DecodeTotals) -> [f64; 6] {
    let us = |nanos: u64| nanos as f64 / 1e3;
    let (batch, squared) = (of.batch as f64, of.batch_squared as f64);
    [of.steps as f64, batch, us(of.time), squared, us(of.batch_time), batch]
}

/// `/v1/models`
pub(super) fn models(app: &App) -> Value {
    json!({"object": "list", "data": [{
        "id": app.config.model, "object": "model", "created": now(), "owned_by": "sglang",
        "root": app.config.model, "parent": null, "max_model_len": app.config.max_model_len,
    }]})
}

/// `/model_info`, the members that say what the engine is.
pub(super) fn model_info(app: &App) -> Value {
    json!({
        "model_path": "/models/mock", "served_model_name": app.config.model,
        "tokenizer_path": "/models/mock", "is_generation": true,
        "disaggregation_mode": mode(app.config.role), "weight_version": "default",
    })
}
