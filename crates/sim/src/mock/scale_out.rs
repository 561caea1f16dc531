//! vLLM's endpoints of `--enable-scale-out`: prompts to token ids, token ids to token ids, and back to
//! text, in the shapes and order of vLLM 0.32.

use bytes::{BufMut, Bytes, BytesMut};
use serde::Serialize;
use serde_json::Value;

use super::app::{App, now};
use super::body::{self, Reply as Response};
use super::errors::Failure;
use super::plan::{Plan, Sequence};
use super::prompt;
use super::reply::{finish_reason, hand_off, stop_reason, usage};
use super::request::{Api, Request, parse, parse_json, token_ids};
use super::shape::{Absent, AnyUsage, CompletionChoice, HandOff, PromptDetails, Reply, Usage};

/// Its paths apart from `/inference/v1/generate`, which is answered like other inference.
pub(super) fn small(app: &App, path: &str, bytes: &Bytes) -> Response {
    let answer = match path {
        "/v1/completions/render" => rendered(app, Api::Completions, bytes),
        "/v1/chat/completions/render" => rendered(app, Api::Chat, bytes),
        "/v1/completions/derender" => derendered(app, bytes),
        // Ids that are not known are no error.
        _ => {
            let mut reply = body::whole(200, "text/plain", "");
            reply.headers_mut().remove(http::header::CONTENT_TYPE);
            return reply;
        }
    };
    match answer {
        Ok(answer) => body::json(200, answer),
        Err(failure) => body::failure(app.config.dialect, &failure),
    }
}

/// What a request looks like when its prompt is token ids.
#[derive(Serialize)]
struct Rendered {
    request_id: String,
    token_ids: Vec<u32>,
    token_offsets: Absent,
    features: Absent,
    content_parts: Absent,
    sampling_params: Sampling,
    model: String,
    reasoning_ended: Absent,
    reasoning_parser_kwargs: Absent,
    return_token_ids: Option<bool>,
    output_mode: &'static str,
    stream: bool,
    stream_options: Option<Value>,
    cache_salt: Option<String>,
    priority: i64,
    kv_transfer_params: Option<Value>,
    ec_transfer_params: Absent,
}

#[derive(Serialize)]
struct Sampling {
    presence_penalty: f64,
    frequency_penalty: f64,
    repetition_penalty: f64,
    temperature: f64,
    /// Left out where the temperature makes it mean nothing.
    #[serde(skip_serializing_if = "Option::is_none")]
    top_p: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    min_p: Option<f64>,
    stop: Vec<String>,
    stop_token_ids: Vec<u32>,
    max_tokens: u32,
    output_kind: u8,
    skip_clone: bool,
    bad_words: [&'static str; 0],
    skip_reading_prefix_cache: bool,
}

impl Sampling {
    fn of(request: &Request, max_tokens: u32) -> Sampling {
        let number = |key: &str, usual: f64| {
            request.members.get(key).as_ref().and_then(Value::as_f64).unwrap_or(usual)
        };
        let temperature = number("temperature", 1.0);
        let samples = temperature > 0.0;
        Sampling {
            presence_penalty: number("presence_penalty", 0.0),
            frequency_penalty: number("frequency_penalty", 0.0),
            repetition_penalty: number("repetition_penalty", 1.0),
            temperature,
            top_p: samples.then(|| number("top_p", 1.0)),
            min_p: samples.then(|| number("min_p", 0.0)),
            stop: request.stop.clone(),
            stop_token_ids: request.stop_token_ids.clone(),
            max_tokens,
            output_kind: 2,
            skip_clone: true,
            bad_words: [],
            skip_reading_prefix_cache: false,
        }
    }
}

fn rendered(app: &App, api: Api, bytes: &[u8]) -> Result<Vec<u8>, Failure> {
    let request = parse(app.config.dialect, api, bytes)?;
    let limit = app.config.max_model_len;
    let prompts = prompt::prompts(&request, &app.model, limit)?;
    let kind = if api == Api::Chat { "chatcmpl" } else { "cmpl" };
    let one = |token_ids: Vec<u32>| {
        let room = limit - token_ids.len() as u32;
        Rendered {
            request_id: format!("{kind}-{}", app.fresh_hex()),
            token_offsets: None,
            features: None,
            content_parts: None,
            sampling_params: Sampling::of(&request, request.max_tokens.unwrap_or(room)),
            model: request.model.clone().unwrap_or_else(|| app.config.model.clone()),
            reasoning_ended: None,
            reasoning_parser_kwargs: None,
            return_token_ids: request.return_token_ids.then_some(true),
            output_mode: "tokens",
            stream: request.stream,
            stream_options: request.members.get("stream_options"),
            cache_salt: request.cache_salt.clone(),
            priority: request.members.get("priority").and_then(|p| p.as_i64()).unwrap_or(0),
            kv_transfer_params: request.members.get("kv_transfer_params"),
            ec_transfer_params: None,
            token_ids,
        }
    };
    let mut all: Vec<Rendered> = prompts.into_iter().map(one).collect();
    // A completion may have several prompts; a chat is one.
    let json = match api {
        Api::Chat => serde_json::to_vec(&all.pop()),
        _ => serde_json::to_vec(&all),
    };
    Ok(json.unwrap_or_default())
}

fn derendered(app: &App, bytes: &[u8]) -> Result<Vec<u8>, Failure> {
    let members = parse_json(bytes)?;
    let replies = members.get("generate_responses").unwrap_or_default();
    let missing =
        || Failure::schema("missing", "body.generate_responses", "Field required", "'<dict>'");
    let first = replies.get(0).ok_or_else(missing)?;
    let text = |key: &str| first[key].as_str().unwrap_or_default();
    let all = replies.as_array().into_iter().flatten();
    let choices = all.filter_map(|reply| reply["choices"].as_array()).flatten();
    let mut completion_tokens = 0;
    let choice = |(index, choice): (usize, &Value)| {
        let ids = token_ids(&choice["token_ids"]).unwrap_or_default();
        completion_tokens += ids.len() as u32;
        CompletionChoice {
            index: index as u32,
            text: app.model.decode(&ids, true),
            logprobs: None,
            finish_reason: if choice["finish_reason"] == "stop" { "stop" } else { "length" },
            stop_reason: Some(choice["stop_reason"].clone()).filter(|reason| !reason.is_null()),
            token_ids: None,
            prompt_logprobs: None,
            prompt_token_ids: None,
            routed_experts: None,
        }
    };
    let choices: Vec<CompletionChoice> = choices.enumerate().map(choice).collect();
    let reply = Reply {
        id: text("request_id"),
        object: "text_completion",
        created: now(),
        model: text("model"),
        choices,
        service_tier: None,
        system_fingerprint: None,
        // The prompts are not told.
        usage: Usage {
            prompt_tokens: 0,
            total_tokens: completion_tokens,
            completion_tokens,
            prompt_tokens_details: None::<PromptDetails>,
            completion_tokens_details: None,
        },
        prompt: None,
        kv_transfer_params: None,
        ec_transfer_params: None,
        metrics: None,
    };
    Ok(serde_json::to_vec(&reply).unwrap_or_default())
}

#[derive(Serialize)]
struct Generated<'a> {
    request_id: &'a str,
    model: &'a str,
    created: u64,
    usage: Usage,
    prompt_logprobs: Absent,
    prompt_token_id_logprobs: Absent,
    prompt_token_ids: Absent,
    mm_placeholders: Absent,
    metrics: Absent,
    kv_transfer_params: Option<HandOff>,
    ec_transfer_params: Absent,
    output_mode: &'static str,
    choices: Vec<Choice>,
}

#[derive(Serialize)]
struct Choice {
    index: u32,
    finish_reason: Option<&'static str>,
    stop_reason: Option<Value>,
    token_ids: Vec<u32>,
    routed_experts: Absent,
    sampling_mask: Absent,
    weight_versions: Option<[WeightVersion; 1]>,
    logprobs: Absent,
}

/// Which of the answer's tokens came of which weights.
#[derive(Serialize)]
struct WeightVersion {
    version: &'static str,
    start: usize,
    end: usize,
}

impl Choice {
    /// Some of a sequence's tokens; the last of them tells how it ended.
    fn of(
        plan: &Plan,
        index: usize,
        sequence: &Sequence,
        tokens: std::ops::Range<usize>,
    ) -> Choice {
        let pieces = &sequence.answer.pieces;
        let ended = tokens.end == pieces.len();
        Choice {
            index: index as u32,
            finish_reason: ended.then(|| finish_reason(plan, sequence)),
            stop_reason: ended.then(|| stop_reason(sequence)).flatten(),
            token_ids: pieces[tokens].iter().map(|piece| piece.id).collect(),
            routed_experts: None,
            sampling_mask: None,
            weight_versions: ended.then_some([WeightVersion {
                version: "default",
                start: 0,
                end: pieces.len(),
            }]),
            logprobs: None,
        }
    }
}

/// The reply of `/inference/v1/generate` without `stream`.
pub(super) fn generated(app: &App, plan: &Plan) -> Vec<u8> {
    let choice = |(index, sequence): (usize, &Sequence)| {
        Choice::of(plan, index, sequence, 0..sequence.answer.pieces.len())
    };
    let reply = Generated {
        request_id: &plan.id,
        model: &plan.model,
        created: plan.created,
        usage: usage(app, plan),
        prompt_logprobs: None,
        prompt_token_id_logprobs: None,
        prompt_token_ids: None,
        mm_placeholders: None,
        metrics: None,
        kv_transfer_params: hand_off(app, plan),
        ec_transfer_params: None,
        output_mode: "tokens",
        choices: plan.sequences.iter().enumerate().map(choice).collect(),
    };
    serde_json::to_vec(&reply).unwrap_or_default()
}

#[derive(Serialize)]
struct Event<'a> {
    request_id: &'a str,
    usage: Option<AnyUsage>,
    output_mode: &'static str,
    choices: &'a [Choice],
}

fn event(plan: &Plan, usage: Option<AnyUsage>, choices: &[Choice], out: &mut BytesMut) {
    let event = Event { request_id: &plan.id, usage, output_mode: "tokens", choices };
    out.put_slice(b"data: ");
    // Writing JSON to memory cannot fail.
    let _ = serde_json::to_writer(out.writer(), &event);
    out.put_slice(b"\n\n");
}

/// One token of its stream.
pub(super) fn token(
    plan: &Plan,
    at: usize,
    token: usize,
    usage: Option<AnyUsage>,
    out: &mut BytesMut,
) {
    let choice = Choice::of(plan, at, &plan.sequences[at], token..token + 1);
    event(plan, usage, &[choice], out);
}

/// The event that tells usage at its end.
pub(super) fn usage_event(plan: &Plan, usage: AnyUsage) -> Bytes {
    let mut out = BytesMut::new();
    event(plan, Some(usage), &[], &mut out);
    out.freeze()
}
