//! A client's request, cleaned of what only the router may say.
//!
//! Invariant: a `Request` holds no hand-off member, at the top level or where engines pass members
//! on from; so no leg can carry a client's own.

use bytes::Bytes;

use crate::body::{Body, BodyError, Limits, Prompt};
use crate::json::{self, Member, Object};
use crate::splice::Edit;

/// Which endpoint a request came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Api {
    /// `/v1/completions`
    Completions,
    /// `/v1/chat/completions`
    Chat,
    /// `/generate`, SGLang's own.
    Generate,
    /// Any other body with a `model`: passed through.
    Other,
}

/// Members by which engines are told of a hand-off or a rank. A client that could set them could
/// kill a decode engine, read another's KV, or pick its worker.
const RESERVED_MEMBERS: &[&str] = &[
    // vLLM
    "kv_transfer_params",
    "ec_transfer_params",
    "data_parallel_rank",
    // SGLang
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "bootstrap_pair_key",
    "decode_tp_size",
    "do_local_prefill",
    "routed_dp_rank",
    "disagg_prefill_dp_rank",
    // TensorRT-LLM
    "disaggregated_params",
];

/// Objects whose members vLLM merges into the arguments where it keeps its own hand-off
/// (`vllm_xargs`), or takes those arguments from as they are (`sampling_params.extra_args`).
const CONTAINERS: &[&str] = &["vllm_xargs", "extra_args", "sampling_params"];

/// Containers lie in each other at most this deep.
const CONTAINER_DEPTH: usize = 3;

/// What a chat template may be given besides the messages, and what changes the template or the messages.
const RENDERED: &[&str] = &[
    "tools",
    "documents",
    "chat_template",
    "chat_template_kwargs",
    "reasoning_effort",
    "response_format",
    "mm_processor_kwargs",
    "media_io_kwargs",
    "truncate_prompt_tokens",
];

/// Headers that steer an engine, or a sidecar in front of one, past the router's decision.
const RESERVED_HEADERS: &[&str] = &[
    "x-data-parallel-rank",
    "x-prefiller-url",
    "x-prefiller-host-port",
    "x-encoder-hosts-ports",
    "x-data-parallel-host-port",
];

/// Prefix of the router's own headers.
const OWN_HEADER_PREFIX: &str = "x-pointsman-";

/// Whether a header (name in lower case) is the router's to set and must not pass from a client to
/// an engine.
pub fn is_reserved_header(name: &str) -> bool {
    name.starts_with(OWN_HEADER_PREFIX) || RESERVED_HEADERS.contains(&name)
}

/// Members of a client's `disaggregated_params` that an encoder made, not the router.
const ENCODER_HANDLES: &[&str] = &["multimodal_embedding_handles", "multimodal_hashes"];

/// A client's request.
#[derive(Clone, Debug)]
pub struct Request {
    api: Api,
    body: Body,
    stripped: bool,
    encoder: Vec<(&'static str, String)>,
}

impl Request {
    /// Scans a body and takes out what a client may not say.
    pub fn parse(api: Api, bytes: Bytes, limits: &Limits) -> Result<Request, BodyError> {
        let sent = Body::parse(bytes, limits)?;
        match strip(&sent, limits, CONTAINER_DEPTH) {
            None => Ok(Request { api, body: sent, stripped: false, encoder: Vec::new() }),
            Some(clean) => {
                let (body, encoder) = (Body::parse(clean, limits)?, encoder_handles(&sent));
                Ok(Request { api, body, stripped: true, encoder })
            }
        }
    }

    /// The endpoint.
    pub fn api(&self) -> Api {
        self.api
    }

    /// What was sent to it, less what was taken out.
    pub fn body(&self) -> &Body {
        &self.body
    }

    /// Whether the client had sent members that are not a client's to send.
    pub fn stripped(&self) -> bool {
        self.stripped
    }

    /// What an encoder left for the prompt's images and the like, as members in JSON. It came from the
    /// client and is not part of the body.
    pub fn encoder_handles(&self) -> impl Iterator<Item = (&'static str, &str)> {
        self.encoder.iter().map(|(name, json)| (*name, json.as_str()))
    }

    /// The prompt, wherever the endpoint has it; absent for chats.
    pub fn prompt(&self) -> Result<Prompt<'_>, BodyError> {
        match self.api {
            Api::Generate if self.body.has("text") => self.body.prompt_at("text"),
            Api::Generate => self.body.prompt_at("input_ids"),
            _ => self.body.prompt(),
        }
    }

    /// How many prompts it has.
    pub fn prompts(&self) -> usize {
        let at: &[&str] = match self.api {
            Api::Completions => &["prompt"],
            Api::Generate => &["text", "input_ids"],
            Api::Chat | Api::Other => &[],
        };
        at.iter().map(|name| prompts_at(&self.body, name)).fold(1, usize::max)
    }

    /// How many answers each prompt gets, 1 unless set.
    pub fn choices(&self) -> u32 {
        match self.api {
            Api::Generate => {
                self.sampling().filter_map(|sampling| sampling.number("n")).fold(1, u32::max)
            }
            _ => self.body.n(),
        }
    }

    /// Whether it asks for no answer at all, which some engines may grant: that nothing comes then
    /// is nobody's fault.
    pub fn asks_for_none(&self) -> bool {
        match self.api {
            Api::Generate => {
                self.sampling().filter_map(|sampling| sampling.number::<i64>("n")).any(|n| n < 1)
            }
            _ => self.body.integer("n").is_some_and(|n| n < 1),
        }
    }

    /// `sampling_params` of SGLang's own endpoint: one object, or one for each prompt.
    fn sampling(&self) -> impl Iterator<Item = Object<'_>> {
        let raw = self.body.raw("sampling_params").filter(|_| self.api == Api::Generate);
        let one = raw.and_then(Object::parse);
        let each = raw.and_then(|raw| json::array(raw).ok()).into_iter().flatten();
        one.into_iter().chain(each.filter_map(|raw| Object::parse(raw.ok()?)))
    }

    /// Whether the prompt's tokens can stand for it: a completion's text, or a chat of messages alone.
    /// What else enters a rendered prompt, each engine has its own way to write.
    pub fn is_plain(&self) -> bool {
        match self.api {
            Api::Completions => true,
            Api::Chat => !RENDERED.iter().any(|name| self.body.has(name)),
            Api::Generate | Api::Other => false,
        }
    }

    /// The most tokens that each sequence may get; None: as many as fit.
    pub fn max_new_tokens(&self) -> Option<u32> {
        /// OpenAI's default for completions, which the engines keep.
        const COMPLETION_DEFAULT: u32 = 16;
        /// SGLang's own.
        const GENERATE_DEFAULT: u32 = 128;
        match self.api {
            Api::Generate => {
                let set = self.sampling().filter_map(|sampling| sampling.number("max_new_tokens"));
                Some(set.max().unwrap_or(GENERATE_DEFAULT))
            }
            Api::Completions => Some(self.body.max_tokens().unwrap_or(COMPLETION_DEFAULT)),
            Api::Chat => self.body.max_tokens(),
            Api::Other => None,
        }
    }

    /// Whether prefill and decode may run on different workers; if not, why (a short label). One
    /// hand-off is of one prompt: with a batch it kills vLLM.
    pub fn disaggregable(&self) -> Result<(), &'static str> {
        if self.prompts() > 1 { Err("batch") } else { self.each_disaggregable() }
    }

    /// The same of each prompt by itself, where every one has a hand-off of its own.
    ///
    /// Several choices may not: one hand-off is for one sequence. vLLM has each of them pull for itself
    /// and frees the prefill worker's copy after the first pull, so that one that starts later, for want
    /// of blocks on the decode worker, pulls the last, partial block from memory that may hold something
    /// else by then (read in its sources, not seen). SGLang lets all of them wait in one room, where they
    /// hang (its issues 24223, 26486, 30723); TensorRT-LLM refuses them.
    pub fn each_disaggregable(&self) -> Result<(), &'static str> {
        let body = &self.body;
        let on = |name| body.flag(name).unwrap_or(false);
        if self.api == Api::Other {
            return Err("not_generation");
        }
        if self.choices() > 1 {
            return Err("choices");
        }
        if self.api == Api::Generate {
            return native_disaggregable(body);
        }
        // Pulled tokens have no log-probabilities on the worker that answers. Both APIs turn `echo`
        // into them: completions if `logprobs` is set, chat always.
        if body.has("prompt_logprobs")
            || on("echo") && (self.api == Api::Chat || body.has("logprobs"))
        {
            return Err("prompt_logprobs");
        }
        // Each step of a beam search is a request of its own.
        if on("use_beam_search") || body.integer("best_of").is_some_and(|best| best > 1) {
            return Err("beam_search");
        }
        // What is cut depends on `max_tokens`, which differs between the legs.
        if body.has("truncate_prompt_tokens") {
            return Err("truncated_prompt");
        }
        // No token ids to count, hash or pull by.
        if body.has("prompt_embeds") {
            return Err("prompt_embeds");
        }
        Ok(())
    }
}

/// What of SGLang's own endpoint needs the whole prompt in one place.
fn native_disaggregable(body: &Body) -> Result<(), &'static str> {
    // The decode worker has no log-probabilities of a prompt that it did not compute.
    let lists = |name| body.raw(name).is_some_and(|raw| raw.starts_with('['));
    let from = body.integer("logprob_start_len").unwrap_or(-1);
    let asked = body.flag("return_logprob").unwrap_or(false) || lists("return_logprob");
    if asked && (from >= 0 || lists("logprob_start_len")) {
        return Err("prompt_logprobs");
    }
    if body.has("input_embeds") {
        return Err("prompt_embeds");
    }
    Ok(())
}

/// What of `disaggregated_params` is not for the router to set.
fn encoder_handles(sent: &Body) -> Vec<(&'static str, String)> {
    let Some(params) = sent.raw("disaggregated_params").and_then(Object::parse) else {
        return Vec::new();
    };
    let handle = |name: &&'static str| {
        let json = params.get(name).filter(|json| *json != "null")?;
        Some((*name, json.to_owned()))
    };
    ENCODER_HANDLES.iter().filter_map(handle).collect()
}

fn prompts_at(body: &Body, name: &str) -> usize {
    let Some(list) = body.raw(name).filter(|raw| raw.starts_with('[')) else { return 1 };
    let Ok(mut items) = json::array(list) else { return 1 };
    match items.next() {
        Some(Ok(first)) if first.starts_with(['[', '"']) => 1 + items.count(),
        _ => 1,
    }
}

/// The body without reserved members; None if it has none.
fn strip(body: &Body, limits: &Limits, depth: usize) -> Option<Bytes> {
    let text = body.as_str();
    let mut edit = Edit::new();
    let mut found = false;
    for member in body.members() {
        let name = member.name(text);
        if let Some(reserved) = RESERVED_MEMBERS.iter().find(|reserved| **reserved == name) {
            edit.remove(reserved);
            found = true;
        }
    }
    for container in CONTAINERS {
        let mut named = body.members().iter().filter(|member| member.name(text) == *container);
        let inside = |member: &Member| strip_inside(member.value(text), limits, depth);
        if named.clone().any(|member| inside(member).is_some())
            && let Some(last) = named.next_back()
        {
            // Of several the last counts, whichever of them was not clean.
            edit.set(container, inside(last).unwrap_or_else(|| last.value(text).to_owned()));
            found = true;
        }
    }
    found.then(|| edit.apply(body))
}

/// A container without reserved members; None if it has none (or is no object).
fn strip_inside(raw: &str, limits: &Limits, depth: usize) -> Option<String> {
    let depth = depth.checked_sub(1)?;
    let inner = Body::parse(Bytes::copy_from_slice(raw.as_bytes()), limits).ok()?;
    let clean = strip(&inner, limits, depth)?;
    String::from_utf8(clean.into()).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn parse(api: Api, text: &str) -> Request {
        Request::parse(api, text.to_owned().into(), &Limits::default()).unwrap()
    }

    fn clean(text: &str) -> String {
        String::from_utf8(parse(Api::Chat, text).body().bytes().to_vec()).unwrap()
    }

    #[test]
    fn hand_off_members_of_a_client_never_pass() {
        for name in RESERVED_MEMBERS {
            assert_eq!(clean(&format!("{{\"a\":1.0,\"{name}\":{{\"x\":1}}}}")), "{\"a\":1.0}");
        }
        assert_eq!(
            clean(r#"{"kv_transfer_p\u0061rams":{"do_remote_prefill":true},"a":1}"#),
            r#"{"a":1}"#
        );
        assert_eq!(clean(r#"{"bootstrap_host":1,"bootstrap_host":2}"#), "{}");
    }

    #[test]
    fn hand_off_members_inside_what_engines_merge_never_pass() {
        assert_eq!(
            clean(r#"{"vllm_xargs":{"a":1, "kv_transfer_params":["x"]},"b":2}"#),
            r#"{"vllm_xargs":{"a":1},"b":2}"#
        );
        assert_eq!(
            clean(r#"{"sampling_params":{"extra_args":{"kv_transfer_params":{},"q":0.50}}}"#),
            r#"{"sampling_params":{"extra_args":{"q":0.50}}}"#
        );
        assert_eq!(
            clean(r#"{"vllm_xargs":{"kv_transfer_params":1},"vllm_xargs":{"a":1}}"#),
            r#"{"vllm_xargs":{"a":1}}"#
        );
    }

    #[test]
    fn a_clean_body_is_passed_on_uncopied_and_unmarked() {
        let bytes =
            Bytes::from_static(br#"{"vllm_xargs":{"a":1},"messages":[{"kv_transfer_params":1}]}"#);
        let request = Request::parse(Api::Chat, bytes.clone(), &Limits::default()).unwrap();
        assert!(!request.stripped());
        assert_eq!(request.body().bytes().as_ptr(), bytes.as_ptr());
        assert!(parse(Api::Chat, r#"{"bootstrap_room":1}"#).stripped());
    }

    #[test]
    fn no_answers_can_be_asked_for() {
        let none = |api, text: &str| parse(api, text).asks_for_none();
        assert!(none(Api::Chat, r#"{"n":0}"#) && none(Api::Completions, r#"{"n":"-1"}"#));
        assert!(!none(Api::Chat, "{}") && !none(Api::Chat, r#"{"n":1}"#));
        assert!(none(Api::Generate, r#"{"sampling_params":[{"n":1},{"n":0}]}"#));
        assert!(!none(Api::Generate, r#"{"n":0,"sampling_params":{"n":2}}"#));
    }

    #[test]
    fn only_single_prompts_are_disaggregated() {
        let completions = |text: &str| parse(Api::Completions, text).disaggregable();
        assert_eq!(completions(r#"{"prompt":"a"}"#), Ok(()));
        assert_eq!(completions(r#"{"prompt":[1,2,3],"n":1}"#), Ok(()));
        assert_eq!(completions(r#"{"prompt":[1,2,3],"n":2}"#), Err("choices"));
        assert_eq!(completions(r#"{"prompt":["a"]}"#), Ok(()));
        assert_eq!(completions(r#"{"prompt":[[1,2]]}"#), Ok(()));
        assert_eq!(completions(r#"{"prompt":["a","b"]}"#), Err("batch"));
        assert_eq!(completions(r#"{"prompt":[[1],[2]]}"#), Err("batch"));
        assert_eq!(parse(Api::Other, r#"{"input":"a"}"#).disaggregable(), Err("not_generation"));
    }

    #[test]
    fn the_native_endpoint_is_read_by_its_own_names() {
        let generate = |text: &str| parse(Api::Generate, text);
        let two = generate(r#"{"text":"a","sampling_params":{"n":2}}"#);
        assert_eq!((two.choices(), two.disaggregable()), (2, Err("choices")));
        let one = generate(r#"{"text":"a","sampling_params":{"max_new_tokens":4}}"#);
        assert_eq!(one.prompt().unwrap(), Prompt::Text("a".into()));
        assert_eq!(
            (one.max_new_tokens(), one.choices(), one.disaggregable()),
            (Some(4), 1, Ok(()))
        );
        let ids = generate(r#"{"input_ids":[1,2],"stream":true}"#);
        assert_eq!(ids.prompt().unwrap(), Prompt::Ids(vec![1, 2]));
        assert_eq!((ids.max_new_tokens(), ids.choices()), (Some(128), 1));
        assert_eq!(generate(r#"{"text":["a","b"]}"#).disaggregable(), Err("batch"));
        assert_eq!(generate(r#"{"input_ids":[[1],[2]]}"#).disaggregable(), Err("batch"));
        let batch = generate(
            r#"{"text":["a","b","c"],"sampling_params":[{"n":1,"max_new_tokens":4},{"max_new_tokens":9},{}]}"#,
        );
        assert_eq!((batch.prompts(), batch.choices(), batch.max_new_tokens()), (3, 1, Some(9)));
        assert_eq!(batch.each_disaggregable(), Ok(()));
        let two = generate(r#"{"text":["a","b"],"sampling_params":[{},{"n":2}]}"#);
        assert_eq!((two.choices(), two.each_disaggregable()), (2, Err("choices")));
        let listed =
            r#"{"text":["a","b"],"return_logprob":[true,false],"logprob_start_len":[0,-1]}"#;
        assert_eq!(generate(listed).each_disaggregable(), Err("prompt_logprobs"));
        assert_eq!(generate(r#"{"input_embeds":[[0.5]]}"#).disaggregable(), Err("prompt_embeds"));
        let logprobs = r#"{"text":"a","return_logprob":true,"logprob_start_len":0}"#;
        assert_eq!(generate(logprobs).disaggregable(), Err("prompt_logprobs"));
        assert_eq!(generate(r#"{"text":"a","return_logprob":true}"#).disaggregable(), Ok(()));
        // Its sampling parameters are searched for a hand-off like any container.
        let forged = generate(r#"{"text":"a","bootstrap_host":"2.2.2.2","bootstrap_room":7}"#);
        assert!(forged.stripped() && forged.body().bytes() == br#"{"text":"a"}"#.as_slice());
    }

    #[test]
    fn of_a_clients_disaggregated_params_only_encoder_handles_are_kept_and_apart() {
        let request = parse(
            Api::Chat,
            r#"{"a":1,"disaggregated_params":{"request_type":"generation_only","multimodal_embedding_handles":[{"x":1.0}],"multimodal_hashes":null}}"#,
        );
        assert_eq!(request.body().bytes(), br#"{"a":1}"#.as_slice());
        let kept: Vec<_> = request.encoder_handles().collect();
        assert_eq!(kept, [("multimodal_embedding_handles", r#"[{"x":1.0}]"#)]);
    }

    #[test]
    fn what_needs_the_whole_prompt_in_one_place_is_not_disaggregated() {
        let completions = |text: &str| parse(Api::Completions, text).disaggregable();
        let chat = |text: &str| parse(Api::Chat, text).disaggregable();
        assert_eq!(completions(r#"{"prompt_logprobs":0}"#), Err("prompt_logprobs"));
        assert_eq!(completions(r#"{"prompt_logprobs":null}"#), Ok(()));
        assert_eq!(completions(r#"{"echo":true}"#), Ok(()));
        assert_eq!(completions(r#"{"echo":true,"logprobs":1}"#), Err("prompt_logprobs"));
        assert_eq!(chat(r#"{"echo":true}"#), Err("prompt_logprobs"));
        assert_eq!(chat(r#"{"use_beam_search":true}"#), Err("beam_search"));
        assert_eq!(completions(r#"{"best_of":3}"#), Err("beam_search"));
        assert_eq!(chat(r#"{"truncate_prompt_tokens":-1}"#), Err("truncated_prompt"));
        assert_eq!(completions(r#"{"prompt_embeds":"AAAA"}"#), Err("prompt_embeds"));
    }

    #[test]
    fn the_default_limit_of_completions_is_that_of_the_engines() {
        assert_eq!(parse(Api::Completions, "{}").max_new_tokens(), Some(16));
        assert_eq!(parse(Api::Chat, "{}").max_new_tokens(), None);
        assert_eq!(parse(Api::Chat, r#"{"max_completion_tokens":3}"#).max_new_tokens(), Some(3));
    }

    #[test]
    fn headers_that_steer_engines_are_reserved() {
        assert!(is_reserved_header("x-pointsman-path"));
        assert!(is_reserved_header("x-data-parallel-rank"));
        assert!(!is_reserved_header("authorization"));
    }

    proptest! {
        #[test]
        fn no_random_bytes_panic(bytes: Vec<u8>, text in r#"\{"(prompt|echo|vllm_xargs)":[\[\]{}",:0-9a]{0,20}\}"#) {
            for bytes in [bytes, text.into_bytes()] {
                if let Ok(request) = Request::parse(Api::Completions, bytes.into(), &Limits::default()) {
                    let _ = request.disaggregable();
                }
            }
        }
    }
}
