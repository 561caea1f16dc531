//! TensorRT-LLM: context first; what its one choice says of the hand-off goes onto the generation leg
//! with the prompt as token ids. From its sources (`tensorrt_llm/serve`), as it cannot run here.
//!
//! A context that stopped by itself (end of sequence or a stop at its first token) is the whole
//! answer. One that nobody wants keeps its KV until somebody pulls it: release is to pull it.

use std::borrow::Cow;
use std::fmt::Write as _;

use bytes::Bytes;

use super::{Api, Failure, Handoff, LegContext, LegRequest, Prefill, Request, Verdict};
use super::{headers, ids_json, verdict};
use crate::body::{Body, Limits};
use crate::json::{self, Object};
use crate::splice::Edit;

/// What a TensorRT-LLM worker was told to be able to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Trtllm {
    /// Handles of a multimodal encoder that came with the request are passed on. They are read on
    /// trust, so only where no stranger can send any.
    pub takes_encoder_handles: bool,
    /// How long a prefilled prompt may wait for its generation leg.
    pub lease_ms: u64,
}

impl Default for Trtllm {
    fn default() -> Self {
        Trtllm { takes_encoder_handles: false, lease_ms: 30_000 }
    }
}

const PARAMS: &str = "disaggregated_params";

/// Hand-offs are numbered from here up; below are the engines' own numbers (2^40, before 2^42).
const LOWEST_NUMBER: u64 = 1 << 62;

/// Numbers are signed 64-bit ones there.
fn global(number: u64) -> u64 {
    LOWEST_NUMBER | number & (LOWEST_NUMBER - 1)
}

impl Trtllm {
    /// The client's request, of which the prompt alone is computed.
    pub(super) fn prefill_leg(self, request: &Request, leg: &LegContext<'_>) -> LegRequest {
        let body = request.body();
        let mut edit = Edit::new();
        if body.raw("stream").is_some() {
            edit.set("stream", "false");
        }
        edit.remove("stream_options");
        let number = global(leg.number);
        let params = format!(
            "{{\"request_type\":\"context_only\",\"disagg_request_id\":{number}{}}}",
            self.encoder(request)
        );
        edit.set(PARAMS, params);
        with_ids(&mut edit, request, leg.prompt_ids.map(ids_json).map(Cow::Owned));
        LegRequest { body: edit.apply(body), headers: headers(leg) }
    }

    /// The client's request with what the context leg left.
    pub(super) fn decode_leg(
        self,
        request: &Request,
        handoff: &Handoff,
        leg: &LegContext<'_>,
    ) -> LegRequest {
        let mut edit = Edit::new();
        edit.set(PARAMS, handoff.params.as_str());
        let own = || leg.prompt_ids.map(ids_json).map(Cow::Owned);
        with_ids(&mut edit, request, handoff.prompt_ids.as_deref().map(Cow::Borrowed).or_else(own));
        LegRequest { body: edit.apply(request.body()), headers: headers(leg) }
    }

    /// The client's request.
    pub(super) fn local_leg(self, request: &Request, leg: &LegContext<'_>) -> LegRequest {
        let mut edit = Edit::new();
        let encoder = self.encoder(request);
        if !encoder.is_empty() {
            edit.set(PARAMS, format!("{{\"request_type\":\"context_and_generation\"{encoder}}}"));
        }
        with_ids(&mut edit, request, leg.prompt_ids.map(ids_json).map(Cow::Owned));
        LegRequest { body: edit.apply(request.body()), headers: headers(leg) }
    }

    /// Reads the context worker's answer.
    pub(super) fn read_prefill(self, status: u16, body: &[u8]) -> Prefill {
        match verdict(status) {
            Verdict::Client(status) => return Prefill::ClientError(status),
            Verdict::Failed(failure) => return Prefill::Failed(failure, None),
            Verdict::Ok => {}
        }
        let protocol = |what| Prefill::Failed(Failure::Protocol(what), None);
        let Ok(answer) = Body::parse(Bytes::copy_from_slice(body), &Limits::default()) else {
            return protocol("the context answer is not a JSON object");
        };
        let Some(choice) = only_choice(&answer) else {
            return protocol("the context answer has not exactly one choice");
        };
        let reason = choice.text("finish_reason");
        if reason.is_some_and(|reason| reason != "length" && reason != "not_finished") {
            return Prefill::Complete(without_params(&answer, &choice));
        }
        let params = choice.raw(PARAMS).filter(|raw| *raw != "null").map(own_body);
        let Some(Ok(params)) = params else {
            return protocol("the context answer has no disaggregated_params");
        };
        if params.integer("ctx_request_id").is_none() {
            return protocol("disaggregated_params name no context request");
        }
        let usage = answer.raw("usage");
        let mut edit = Edit::new();
        edit.set("request_type", "\"generation_only\"");
        // Where the engine knows it: what was cached of the prompt, for the usage that the client sees.
        if let (Some(_), Some(usage)) = (params.raw("ctx_usage"), usage) {
            edit.set("ctx_usage", usage);
        }
        let edited = edit.apply(&params);
        let Ok(params) = Body::parse(edited, &Limits::default()) else {
            return protocol("disaggregated_params cannot be carried over");
        };
        let ids = answer.raw("prompt_token_ids").and_then(one_list);
        let ids = ids.or_else(|| choice.raw("prompt_token_ids").and_then(one_list));
        let usage = usage.and_then(Object::parse);
        Prefill::Handoff(Handoff {
            remote_engine_id: None,
            prompt_tokens: usage.and_then(|usage| usage.number("prompt_tokens")),
            lease_ms: self.lease_ms,
            prompt_ids: ids.map(str::to_owned),
            params,
        })
    }

    /// A generation that ends with the token that the context leg made: it pulls the KV, and so frees
    /// it. None where the prompt's ids are unknown.
    pub(super) fn release(
        self,
        model: &str,
        handoff: &Handoff,
    ) -> Option<(&'static str, LegRequest)> {
        let body = format!(
            "{{\"model\":{},\"prompt\":{},\"max_tokens\":1,\"{PARAMS}\":{}}}",
            json::quote(model),
            handoff.prompt_ids.as_deref()?,
            handoff.params.as_str(),
        );
        Some(("/v1/completions", LegRequest { body: body.into(), headers: vec![] }))
    }

    /// The members that keep an encoder's handles, with a comma before each; empty without any.
    fn encoder(self, request: &Request) -> String {
        let mut members = String::new();
        if self.takes_encoder_handles {
            for (name, json) in request.encoder_handles() {
                let _infallible = write!(members, ",\"{name}\":{json}");
            }
        }
        members
    }
}

/// The answer of a leg that was asked for no stream, as the stream that the client asked for.
pub(super) fn as_stream(api: Api, body: &[u8], with_usage: bool) -> Option<Bytes> {
    let answer = Body::parse(Bytes::copy_from_slice(body), &Limits::default()).ok()?;
    let choice = only_choice(&answer)?;
    let mut edit = Edit::new();
    edit.remove("usage").remove("prompt_token_ids");
    let choice = match (api, choice.raw("message")) {
        (Api::Chat, Some(message)) => {
            edit.set("object", "\"chat.completion.chunk\"");
            // What stands in a message may stand in a delta.
            let mut choice_edit = Edit::new();
            choice_edit.remove("message").set("delta", message);
            text_of(&choice_edit.apply(&choice))
        }
        _ => choice.as_str().to_owned(),
    };
    edit.set("choices", format!("[{choice}]"));
    let mut stream = format!("data: {}\n\n", text_of(&edit.apply(&answer)));
    if let Some(usage) = answer.raw("usage").filter(|_| with_usage) {
        edit.set("choices", "[]").set("usage", usage);
        let _infallible = write!(stream, "data: {}\n\n", text_of(&edit.apply(&answer)));
    }
    stream.push_str("data: [DONE]\n\n");
    // An event is one line.
    (!stream.replace("\n\n", "").contains('\n')).then(|| stream.into())
}

fn text_of(bytes: &Bytes) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn own_body(raw: &str) -> Result<Body, crate::body::BodyError> {
    Body::parse(Bytes::copy_from_slice(raw.as_bytes()), &Limits::default())
}

fn only_choice(answer: &Body) -> Option<Body> {
    let mut choices = json::array(answer.raw("choices")?).ok()?;
    let first = choices.next()?.ok()?;
    choices.next().is_none().then(|| own_body(first).ok())?
}

/// The answer as an engine gives it that was asked for everything.
fn without_params(answer: &Body, choice: &Body) -> Bytes {
    let choice = text_of(&Edit::new().remove(PARAMS).apply(choice));
    Edit::new().set("choices", format!("[{choice}]")).remove("prompt_token_ids").apply(answer)
}

/// A list of token ids, also where it is the only one in a list of lists.
fn one_list(raw: &str) -> Option<&str> {
    let mut items = json::array(raw).ok()?;
    let first = items.next()?.ok()?;
    if !first.starts_with('[') {
        return Some(raw);
    }
    items.next().is_none().then_some(first)
}

/// Puts the prompt's ids where the endpoint has a place for them.
fn with_ids<'e>(edit: &mut Edit<'e>, request: &Request, ids: Option<Cow<'e, str>>) {
    let Some(ids) = ids else { return };
    match request.api() {
        // `echo` gives back the text, which ids no longer hold.
        Api::Completions if request.body().flag("echo").unwrap_or(false) => {}
        Api::Completions => {
            edit.set("prompt", ids);
        }
        Api::Chat => {
            edit.set("prompt_token_ids", ids);
        }
        Api::Generate | Api::Other => {}
    }
}
