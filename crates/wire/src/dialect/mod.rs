//! How a plan becomes requests in an engine's own words, and how its replies are read.
//!
//! Invariants: a leg is the client's bytes with only the needed members spliced in or out; hand-off
//! members that the client sent never pass; a hand-off cannot be copied, so that whoever holds it can
//! see to it that it is sent once.

mod request;
mod sglang;
mod trtllm;
mod vllm;

use std::fmt::Write as _;
use std::num::NonZeroU32;

use bytes::Bytes;

use crate::body::Body;
use crate::json::{self, Object};
use crate::sse::{self, Usage};

pub use request::{Api, Request, is_reserved_header};
pub use sglang::{ROOM_BITS, Sglang};
pub use trtllm::Trtllm;
pub use vllm::{Connector, Vllm};

/// What the router adds to a leg.
#[derive(Clone, Copy, Debug, Default)]
pub struct LegContext<'a> {
    /// Sent as `X-Request-Id`.
    pub request_id: &'a str,
    /// The prompt's tokens, to be sent instead of text where the worker takes them. Only if they are
    /// exact, the prompt is text alone, and every worker of the path takes them, so that all legs
    /// carry the same prompt; None keeps the client's own.
    pub prompt_ids: Option<&'a [u32]>,
    /// The data-parallel rank the leg is for.
    pub rank: Option<u32>,
    /// Names the hand-off where the router has to; no other hand-off may have it.
    pub number: u64,
}

/// Where two legs that start together find each other.
#[derive(Clone, Copy, Debug)]
pub struct Meeting<'a> {
    /// The prefill worker, as decode workers reach it.
    pub host: &'a str,
    /// Its bootstrap port.
    pub port: u16,
    /// Names the hand-off; no other one may have it.
    pub number: u64,
    /// Data-parallel ranks of the prefill worker.
    pub prefill_ranks: NonZeroU32,
    /// The engine instance of the prefill leg's rank, where its name has to be told.
    pub engine_id: Option<&'a str>,
}

/// A request to an engine. The path is the client's own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LegRequest {
    /// JSON.
    pub body: Bytes,
    /// Headers to add (names in lower case).
    pub headers: Vec<(&'static str, String)>,
}

/// What the prefill leg left for the decode leg. It must reach one decode worker once: a second pull
/// finds blocks that may hold another prompt by then, and the reply is wrong without an error. It is
/// lent to a leg, not given, because a leg that could not be sent leaves it good for another worker
/// or for release; after any byte went out, drop it.
#[derive(Debug)]
pub struct Handoff {
    params: Body,
    remote_engine_id: Option<String>,
    prompt_tokens: Option<u32>,
    lease_ms: u64,
    /// The prompt's token ids (a JSON list), where the prefill worker tells them for the decode leg.
    prompt_ids: Option<String>,
}

impl Handoff {
    /// The engine instance that holds the KV.
    pub fn remote_engine_id(&self) -> Option<&str> {
        self.remote_engine_id.as_deref()
    }

    /// Prompt tokens whose KV is held, as the engine counted them.
    pub fn prompt_tokens(&self) -> Option<u32> {
        self.prompt_tokens
    }

    /// How long after the prefill answer the KV is held at least.
    pub fn lease_ms(&self) -> u64 {
        self.lease_ms
    }
}

/// Why an engine did not do its part, for the ladder and the breaker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// 429 or 503: it has too much to do.
    Overload(u16),
    /// Another 5xx.
    Server(u16),
    /// A reply that the dialect does not know.
    Protocol(&'static str),
}

/// A prefill leg's reply.
#[derive(Debug)]
pub enum Prefill {
    /// Go on with the decode leg.
    Handoff(Handoff),
    /// It is the client's answer already (not a stream): the reply ended with its first token.
    Complete(Bytes),
    /// 4xx: the client's answer, as it stands.
    ClientError(u16),
    /// Not done. A hand-off that came but must not be used is given along, to be released.
    Failed(Failure, Option<Handoff>),
}

/// What a status means, before the body is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// 2xx
    Ok,
    /// 4xx other than 429: the client's own doing.
    Client(u16),
    /// The engine's doing.
    Failed(Failure),
}

/// Classifies an engine's status.
pub fn verdict(status: u16) -> Verdict {
    match status {
        200..=299 => Verdict::Ok,
        429 | 503 => Verdict::Failed(Failure::Overload(status)),
        400..=499 => Verdict::Client(status),
        500..=599 => Verdict::Failed(Failure::Server(status)),
        _ => Verdict::Failed(Failure::Protocol("unexpected status")),
    }
}

/// The order in which the legs of a remote path start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// The decode leg needs the prefill leg's answer.
    PrefillFirst,
    /// Both at once.
    Together,
}

/// An engine's way to speak.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dialect {
    /// vLLM with NixlConnector or MooncakeConnector.
    Vllm(Vllm),
    /// SGLang.
    Sglang(Sglang),
    /// TensorRT-LLM (`trtllm-serve`).
    Trtllm(Trtllm),
    /// Any OpenAI-compatible server, unified only.
    OpenAi,
}

impl Dialect {
    /// The order of the legs; None if the engine cannot split a request.
    pub fn order(&self) -> Option<Order> {
        match self {
            Dialect::Vllm(vllm) => Some(vllm.order()),
            Dialect::Trtllm(_) => Some(Order::PrefillFirst),
            Dialect::Sglang(_) => Some(Order::Together),
            Dialect::OpenAi => None,
        }
    }

    /// Whether both are of one engine and connector, so that they can do a request together.
    pub fn is_like(&self, other: &Dialect) -> bool {
        match (self, other) {
            (Dialect::Vllm(one), Dialect::Vllm(other)) => one.connector == other.connector,
            _ => std::mem::discriminant(self) == std::mem::discriminant(other),
        }
    }

    /// Whether it has this endpoint.
    pub fn has(&self, api: Api) -> bool {
        api != Api::Generate || matches!(self, Dialect::Sglang(_))
    }

    /// Whether it can split this request of several prompts, each of which has a hand-off of its own.
    pub fn splits_batch(&self, request: &Request) -> bool {
        matches!(self, Dialect::Sglang(_))
            && request.prompts() <= sglang::MOST_PROMPTS
            && request.each_disaggregable().is_ok()
    }

    /// Whether it asks for the tokens of a prompt rather than its text on some endpoint.
    pub fn takes_ids(&self) -> Takes {
        match self {
            Dialect::Vllm(vllm) if vllm.chat_takes_ids => Takes::CompletionsAndChat,
            Dialect::Vllm(_) | Dialect::Sglang(_) => Takes::Completions,
            Dialect::Trtllm(_) => Takes::CompletionsAndChat,
            Dialect::OpenAi => Takes::Nothing,
        }
    }

    /// The request to the prefill worker whose answer the decode leg needs; None if the engine cannot
    /// split this request so.
    pub fn prefill_leg(&self, request: &Request, leg: &LegContext<'_>) -> Option<LegRequest> {
        match self {
            Dialect::Vllm(vllm) if vllm.order() == Order::PrefillFirst => {
                Some(vllm.prefill_leg(request, leg))
            }
            Dialect::Trtllm(trtllm) => Some(trtllm.prefill_leg(request, leg)),
            Dialect::Vllm(_) | Dialect::Sglang(_) | Dialect::OpenAi => None,
        }
    }

    /// The requests to the prefill and the decode worker that are sent at the same time; None if the
    /// engine does not split requests so, or the meeting lacks the engine that it has to name.
    pub fn together(
        &self,
        request: &Request,
        meeting: &Meeting<'_>,
        prefill: &LegContext<'_>,
        decode: &LegContext<'_>,
    ) -> Option<(LegRequest, LegRequest)> {
        match self {
            Dialect::Sglang(sglang) => Some(sglang.together(request, meeting, prefill, decode)),
            Dialect::Vllm(vllm) => vllm.together(request, meeting, prefill, decode),
            Dialect::Trtllm(_) | Dialect::OpenAi => None,
        }
    }

    /// Whether the answer (2xx) to a prefill leg that was sent together with its decode leg says that
    /// the KV is there to be fetched; if it is not, the decode worker waits in vain.
    pub fn hands_over(&self, body: &[u8]) -> bool {
        match self {
            Dialect::Vllm(vllm) => vllm.hands_over(body),
            Dialect::Sglang(sglang) => sglang.hands_over(body),
            Dialect::Trtllm(_) | Dialect::OpenAi => false,
        }
    }

    /// What such a prefill leg leaves behind if nobody fetches it, to be released.
    pub fn left_behind(&self, meeting: &Meeting<'_>) -> Option<Handoff> {
        match self {
            Dialect::Vllm(vllm) => vllm.left_behind(meeting),
            Dialect::Sglang(_) | Dialect::Trtllm(_) | Dialect::OpenAi => None,
        }
    }

    /// Reads the prefill worker's reply. `exact_tokens` is the router's own exact count of the
    /// prompt, which the engine's must equal.
    pub fn read_prefill(&self, status: u16, body: &[u8], exact_tokens: Option<u32>) -> Prefill {
        match self {
            Dialect::Vllm(vllm) => vllm.read_prefill(status, body, exact_tokens),
            Dialect::Trtllm(trtllm) => trtllm.read_prefill(status, body),
            Dialect::Sglang(_) | Dialect::OpenAi => {
                Prefill::Failed(Failure::Protocol("this engine has no prefill leg"), None)
            }
        }
    }

    /// The request to the decode worker.
    pub fn decode_leg(
        &self,
        request: &Request,
        handoff: &Handoff,
        leg: &LegContext<'_>,
    ) -> LegRequest {
        match self {
            Dialect::Vllm(vllm) => vllm.decode_leg(request, handoff, leg),
            Dialect::Trtllm(trtllm) => trtllm.decode_leg(request, handoff, leg),
            Dialect::Sglang(_) | Dialect::OpenAi => self.local_leg(request, leg),
        }
    }

    /// The request to a worker that does both.
    pub fn local_leg(&self, request: &Request, leg: &LegContext<'_>) -> LegRequest {
        match self {
            Dialect::Vllm(vllm) => vllm.local_leg(request, leg),
            Dialect::Sglang(sglang) => sglang.local_leg(request, leg),
            Dialect::Trtllm(trtllm) => trtllm.local_leg(request, leg),
            Dialect::OpenAi => {
                LegRequest { body: request.body().bytes().clone(), headers: headers(leg) }
            }
        }
    }

    /// The path and request that free a hand-off's KV on the prefill worker when nobody will pull
    /// it. Sent to a decode worker, which refuses it (4xx) and tells the prefill worker, or fetches the
    /// KV for a single token.
    pub fn release(&self, model: &str, handoff: &Handoff) -> Option<(&'static str, LegRequest)> {
        match self {
            Dialect::Vllm(vllm) => Some(vllm.release(model, handoff)),
            Dialect::Trtllm(trtllm) => trtllm.release(model, handoff),
            Dialect::Sglang(_) | Dialect::OpenAi => None,
        }
    }
}

/// The endpoints on which a prompt may be token ids.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Takes {
    /// None that is known.
    Nothing,
    /// Completions (and `/generate`), not chat.
    Completions,
    /// Completions and chat.
    CompletionsAndChat,
}

/// What the whole body of a 2xx reply says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answer {
    /// Whether it is an answer of the endpoint: one with choices, or of `/generate`, with a text or one a
    /// prompt. Of endpoints that pass through anything is.
    pub is_one: bool,
    /// Its tokens, where it counts them.
    pub usage: Option<Usage>,
}

impl Answer {
    /// Reads a body, whatever it is.
    pub fn read(api: Api, body: &[u8]) -> Answer {
        let text = json::text(body).unwrap_or_default();
        let answer = Object::parse(text);
        let has = |name: &str| answer.as_ref().is_some_and(|answer| answer.get(name).is_some());
        let choices = answer.as_ref().and_then(|answer| answer.get("choices"));
        let is_one = match api {
            Api::Other => true,
            Api::Completions | Api::Chat => choices.is_some_and(json::is_filled_array),
            Api::Generate if answer.is_some() => {
                has("text") || has("output_ids") || has("meta_info")
            }
            Api::Generate => is_filled_list(text.trim_start()),
        };
        Answer { is_one, usage: answer.as_ref().and_then(sse::usage_of) }
    }
}

/// A list with something in it, and nothing wrong.
fn is_filled_list(raw: &str) -> bool {
    json::array(raw).is_ok_and(|list| list.reduce(Result::and).is_some_and(|all| all.is_ok()))
}

/// What [`Prefill::Complete`] holds as a stream of events, for a client that asked for one; None if it
/// cannot be.
pub fn completed_stream(request: &Request, body: &[u8]) -> Option<Bytes> {
    let options = request.body().raw("stream_options").and_then(Object::parse);
    let with_usage = options.is_some_and(|options| options.get("include_usage") == Some("true"));
    trtllm::as_stream(request.api(), body, with_usage)
}

fn ids_json(ids: &[u32]) -> String {
    let mut out = String::with_capacity(ids.len() * 6 + 2);
    out.push('[');
    for (index, id) in ids.iter().enumerate() {
        let _ = if index == 0 { write!(out, "{id}") } else { write!(out, ",{id}") };
    }
    out.push(']');
    out
}

/// The headers of every leg.
fn headers(leg: &LegContext<'_>) -> Vec<(&'static str, String)> {
    let mut headers = Vec::with_capacity(2);
    if !leg.request_id.is_empty() {
        headers.push(("x-request-id", leg.request_id.to_owned()));
    }
    if let Some(rank) = leg.rank {
        headers.push(("x-data-parallel-rank", rank.to_string()));
    }
    headers
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_what_its_endpoint_gives() {
        let is_answer = |api, body: &[u8]| Answer::read(api, body).is_one;
        let (choices, text) = (r#" {"choices":[{"index":0}]} "#, r#"{"text":"","meta_info":{}}"#);
        for api in [Api::Completions, Api::Chat] {
            assert!(is_answer(api, choices.as_bytes()));
            for other in [
                text,
                "",
                "{}",
                "null",
                "hello",
                r#"{"choices":[]}"#,
                r#"{"choices":[1}"#,
                r#"{"choices":[ \n]}"#,
                r#"{"choices":{"a":1}}"#,
                r#"{"choices":"[1]"}"#,
            ] {
                assert!(!is_answer(api, other.as_bytes()), "{other}");
            }
            assert!(!is_answer(api, b"{\"choices\":[\"\xff\"]}"));
        }
        assert!(is_answer(Api::Generate, text.as_bytes()));
        assert!(is_answer(Api::Generate, br#"[{"text":""}]"#));
        for other in [choices, "", "[]", "{}", "hello"] {
            assert!(!is_answer(Api::Generate, other.as_bytes()), "{other}");
        }
        assert!(is_answer(Api::Other, b"anything"));
    }
}
