//! vLLM. With NixlConnector prefill goes first, and its answer's `kv_transfer_params` go onto the decode
//! leg, unchanged: from 0.31 they carry `remote_prefill_cached_tokens`, which the decode worker reports in
//! place of its own `cached_tokens`, in which pulled tokens look cached (as they do up to 0.30; a stream may
//! not be rewritten). With MooncakeConnector both legs go at once and name the same transfer.

use std::fmt::Write as _;

use bytes::Bytes;

use super::{
    Api, Failure, Handoff, LegContext, LegRequest, Meeting, Order, Prefill, Request, Verdict,
};
use super::{headers, ids_json, verdict};
use crate::body::{Body, Limits};
use crate::json::{self, Object};
use crate::splice::Edit;

/// What a vLLM worker was found to be able to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Vllm {
    /// Chat takes token ids in `kv_transfer_params.prompt_token_ids` (0.28 and later).
    pub chat_takes_ids: bool,
    /// How long a prefill worker holds KV for nobody (`kv_lease_duration`).
    pub lease_ms: u64,
    /// How it hands KV over.
    pub connector: Connector,
}

/// How KV gets from one vLLM worker to another.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Connector {
    /// NixlConnector: the prefill worker's answer says where it is.
    #[default]
    Nixl,
    /// MooncakeConnector: both legs name a transfer, and the decode leg the prefill worker's engine and
    /// bootstrap server.
    Mooncake,
}

impl Default for Vllm {
    fn default() -> Self {
        Vllm { chat_takes_ids: false, lease_ms: 30_000, connector: Connector::Nixl }
    }
}

const PARAMS: &str = "kv_transfer_params";

/// Taken off the prefill leg because they only concern tokens that are generated or how these are
/// reported, and would cost the prefill worker time, end it without a hand-off, or clash with one
/// token. What may enter the rendered prompt stays (see `UNRENDERED`).
const GENERATION_ONLY: &[&str] = &[
    // Clash with one token, or with an answer that is not a stream.
    "min_tokens",
    "stream_options",
    "best_of",
    // A stop at the first token would leave no hand-off: vLLM gives one only to a request that
    // ended by length (up to 0.31). `ignore_eos` does the rest.
    "stop",
    "stop_token_ids",
    // Compiling a grammar delays the prefill; the one token it would shape is thrown away.
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "structural_tag",
    // Computed and sent for nobody. `prompt_logprobs` and `echo` would also keep the prefix cache
    // from being read.
    "logprobs",
    "top_logprobs",
    "logprob_token_ids",
    "prompt_logprobs",
    "echo",
    "return_token_ids",
    "return_prompt_text",
];

/// Constrain generation (a grammar, again), but chat templates may render them into the prompt, so
/// they go only if the prompt is not rendered by the engine. `tool_choice` cannot go alone: `tools`
/// without it mean `auto`, which servers refuse unless told to allow it.
const UNRENDERED: &[&str] = &["response_format", "tools", "tool_choice", "parallel_tool_calls"];

/// More than any context length, so that the releasing request is always refused.
const REFUSED_MAX_TOKENS: u32 = 1_000_000_000;

impl Vllm {
    /// The order of the legs.
    pub(super) fn order(&self) -> Order {
        match self.connector {
            Connector::Nixl => Order::PrefillFirst,
            Connector::Mooncake => Order::Together,
        }
    }

    /// The client's request, capped to one token, its KV to be held for a decode worker.
    pub(super) fn prefill_leg(&self, request: &Request, leg: &LegContext<'_>) -> LegRequest {
        self.one_token(request, leg, "{\"do_remote_decode\":true}")
    }

    /// The client's request to both workers, the prefill worker's capped to one token.
    pub(super) fn together(
        &self,
        request: &Request,
        meeting: &Meeting<'_>,
        prefill: &LegContext<'_>,
        decode: &LegContext<'_>,
    ) -> Option<(LegRequest, LegRequest)> {
        let to_decode = self.fetch_params(meeting)?;
        let to_prefill = format!(
            "{{\"do_remote_decode\":true,\"do_remote_prefill\":false,\"transfer_id\":\"{}\"}}",
            transfer_id(meeting)
        );
        let mut edit = Edit::new();
        self.put_params(&mut edit, &to_decode, request, decode);
        let to_decode = LegRequest { body: edit.apply(request.body()), headers: headers(decode) };
        Some((self.one_token(request, prefill, &to_prefill), to_decode))
    }

    /// What a decode worker needs to fetch from where the legs meet; None without an engine to name.
    fn fetch_params(&self, meeting: &Meeting<'_>) -> Option<String> {
        let engine_id = meeting.engine_id.filter(|_| self.connector == Connector::Mooncake)?;
        let Meeting { host, port, .. } = meeting;
        let host = if host.contains(':') { format!("[{host}]") } else { (*host).to_owned() };
        Some(format!(
            "{{\"do_remote_decode\":false,\"do_remote_prefill\":true,\"remote_bootstrap_addr\":{},\
             \"remote_engine_id\":{},\"transfer_id\":\"{}\"}}",
            json::quote(&format!("http://{host}:{port}")),
            json::quote(engine_id),
            transfer_id(meeting),
        ))
    }

    /// Whether a prefill leg ended by its length: vLLM hands nothing over after any other end.
    pub(super) fn hands_over(&self, body: &[u8]) -> bool {
        let reason = || {
            let answer = json::text(body).ok().and_then(Object::parse)?;
            let mut choices = json::array(answer.get("choices")?).ok()?;
            let only = choices.next()?.ok()?;
            choices.next().is_none().then(|| Object::parse(only)?.get("finish_reason"))?
        };
        reason() == Some("\"length\"")
    }

    /// What keeps the KV of a finished prefill leg from being held for nobody.
    pub(super) fn left_behind(&self, meeting: &Meeting<'_>) -> Option<Handoff> {
        let params = self.fetch_params(meeting)?;
        Some(Handoff {
            params: Body::parse(params.into(), &Limits::default()).ok()?,
            remote_engine_id: meeting.engine_id.map(Into::into),
            prompt_tokens: None,
            lease_ms: self.lease_ms,
            prompt_ids: None,
        })
    }

    /// The client's request with these parameters, capped to one token.
    fn one_token(&self, request: &Request, leg: &LegContext<'_>, params: &str) -> LegRequest {
        let body = request.body();
        let mut edit = Edit::new();
        edit.set("max_tokens", "1").set("ignore_eos", "true");
        for (name, json) in [("max_completion_tokens", "1"), ("n", "1"), ("stream", "false")] {
            if body.raw(name).is_some() {
                edit.set(name, json);
            }
        }
        for name in GENERATION_ONLY {
            edit.remove(name);
        }
        if self.ids(request, leg).is_some() || request.api() == Api::Completions {
            for name in UNRENDERED {
                edit.remove(name);
            }
        }
        self.put_params(&mut edit, params, request, leg);
        LegRequest { body: edit.apply(body), headers: headers(leg) }
    }

    /// Puts parameters (an object with members) on a leg, and the prompt's tokens where they go.
    fn put_params(
        &self,
        edit: &mut Edit<'_>,
        params: &str,
        request: &Request,
        leg: &LegContext<'_>,
    ) {
        let mut params = params.to_owned();
        match (self.ids(request, leg), request.api()) {
            (Some(ids), Api::Chat) => {
                params.pop();
                let _ = write!(params, ",\"prompt_token_ids\":{}}}", ids_json(ids));
            }
            (Some(ids), _) => {
                edit.set("prompt", ids_json(ids));
            }
            (None, _) => {}
        }
        edit.set(PARAMS, params);
    }

    /// The client's request and exactly the object that the prefill leg gave.
    pub(super) fn decode_leg(
        &self,
        request: &Request,
        handoff: &Handoff,
        leg: &LegContext<'_>,
    ) -> LegRequest {
        let held = &handoff.params;
        let mut edit = Edit::new();
        let mut params = held.bytes().clone();
        match (self.ids(request, leg), request.api()) {
            (Some(ids), Api::Chat) => {
                params = Edit::new().set("prompt_token_ids", ids_json(ids)).apply(held);
            }
            (Some(ids), _) => {
                edit.set("prompt", ids_json(ids));
            }
            (None, _) => {}
        }
        edit.set(PARAMS, String::from_utf8_lossy(&params));
        LegRequest { body: edit.apply(request.body()), headers: headers(leg) }
    }

    /// The client's request.
    pub(super) fn local_leg(&self, request: &Request, leg: &LegContext<'_>) -> LegRequest {
        let mut edit = Edit::new();
        if let Some(ids) = self.ids(request, leg) {
            match request.api() {
                Api::Chat => {
                    edit.set(PARAMS, format!("{{\"prompt_token_ids\":{}}}", ids_json(ids)))
                }
                _ => edit.set("prompt", ids_json(ids)),
            };
        }
        LegRequest { body: edit.apply(request.body()), headers: headers(leg) }
    }

    /// Reads the prefill worker's answer.
    pub(super) fn read_prefill(&self, status: u16, body: &[u8], exact: Option<u32>) -> Prefill {
        match verdict(status) {
            Verdict::Client(status) => return Prefill::ClientError(status),
            Verdict::Failed(failure) => return Prefill::Failed(failure, None),
            Verdict::Ok => {}
        }
        let Some(answer) = json::text(body).ok().and_then(Object::parse) else {
            return protocol("the prefill answer is not a JSON object", None);
        };
        let params = match answer.get(PARAMS) {
            Some(params) if params != "null" => params,
            _ => return protocol("the prefill answer has no kv_transfer_params", None),
        };
        let Ok(params) = Body::parse(Bytes::copy_from_slice(params.as_bytes()), &Limits::default())
        else {
            return protocol("kv_transfer_params is not an object", None);
        };
        // The decode engine takes these on trust and dies without them.
        let held = |name: &str| params.text(name).is_some_and(|text| !text.is_empty());
        if params.flag("do_remote_prefill") != Some(true) {
            return protocol("kv_transfer_params do not ask for a remote prefill", None);
        }
        if !held("remote_engine_id")
            || !held("remote_request_id")
            || !held("remote_host")
            || params.integer("remote_port").is_none()
        {
            return protocol("kv_transfer_params do not name the prefill worker's request", None);
        }
        if !params.raw("remote_block_ids").is_some_and(lists_blocks) {
            return protocol("kv_transfer_params name no blocks", None);
        }
        let as_tokens = |number: i64| u32::try_from(number).ok();
        let kept = params.integer("remote_num_tokens").and_then(as_tokens);
        let seen = answer
            .get("usage")
            .and_then(Object::parse)
            .and_then(|usage| usage.number("prompt_tokens"));
        let handoff = Handoff {
            remote_engine_id: params.text("remote_engine_id").map(Into::into),
            prompt_tokens: kept.or(seen),
            lease_ms: self.lease_ms,
            prompt_ids: None,
            params,
        };
        if counts_agree(exact, seen, kept) {
            Prefill::Handoff(handoff)
        } else {
            protocol("the prefill worker's prompt has another length", Some(handoff))
        }
    }

    /// A request with the hand-off that is refused in validation: the decode worker then tells the
    /// prefill worker to free it.
    pub(super) fn release(&self, model: &str, handoff: &Handoff) -> (&'static str, LegRequest) {
        let body = format!(
            "{{\"model\":{},\"prompt\":[1],\"max_tokens\":{REFUSED_MAX_TOKENS},\"{PARAMS}\":{}}}",
            json::quote(model),
            handoff.params.as_str(),
        );
        ("/v1/completions", LegRequest { body: body.into(), headers: vec![] })
    }

    /// The ids to send in place of the client's prompt, if the worker takes them here.
    fn ids<'a>(&self, request: &Request, leg: &LegContext<'a>) -> Option<&'a [u32]> {
        let body = request.body();
        let takes = match request.api() {
            // A prompt of ids stays as it is.
            Api::Completions => body.raw("prompt").is_some_and(|raw| raw.starts_with('"')),
            Api::Chat => self.chat_takes_ids,
            Api::Generate | Api::Other => false,
        };
        // `echo` gives back the text, which ids no longer hold.
        leg.prompt_ids.filter(|_| takes && !body.flag("echo").unwrap_or(false))
    }
}

/// The name under which both legs know their transfer.
fn transfer_id(meeting: &Meeting<'_>) -> String {
    format!("xfer-{:016x}", meeting.number)
}

fn protocol(what: &'static str, handoff: Option<Handoff>) -> Prefill {
    Prefill::Failed(Failure::Protocol(what), handoff)
}

/// `remote_block_ids`: a list of lists (one per KV-cache group; older engines: one flat list), not
/// all of them empty.
fn lists_blocks(raw: &str) -> bool {
    raw.starts_with('[') && raw.bytes().any(|byte| byte.is_ascii_digit())
}

/// Whether the three counts of the prompt agree: the router's own if exact, the engine's usage, and
/// what is held. State-space models hold one token less, as the last is computed by the decode
/// worker.
fn counts_agree(exact: Option<u32>, seen: Option<u32>, kept: Option<u32>) -> bool {
    let seen_agrees = exact.is_none() || seen.is_none() || exact == seen;
    let kept_agrees = match (exact.or(seen), kept) {
        (Some(tokens), Some(kept)) => {
            kept == tokens || seen == Some(tokens) && kept.checked_add(1) == Some(tokens)
        }
        _ => true,
    };
    seen_agrees && kept_agrees
}
