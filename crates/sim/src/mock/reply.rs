//! The one JSON object that answers a request without `stream`.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use bytes::Bytes;
use serde_json::{Value, json};

use super::app::App;
use super::config::Dialect;
use super::plan::{Plan, Sequence};
use super::prompt::call_is_named;
use super::request::Api;
use super::shape::{
    ChatChoice, ChatLogprobs, ChatPrompt, CompletionChoice, CompletionLogprobs, FunctionCall,
    HandOff, Message, PromptDetails, PromptLogprob, PromptLogprobs, Reply, TokenLogprob, ToolCall,
    TopLogprob, Usage,
};
use super::text::{Ending, Piece, log_probability};
use super::{scale_out, sglang, trtllm};

/// The whole body.
pub(super) fn body(app: &App, plan: &Plan) -> Bytes {
    match app.config.dialect {
        Dialect::Vllm => {}
        Dialect::Sglang => return sglang::body(app, plan),
        Dialect::Trtllm => return trtllm::body(app, plan),
    }
    let bytes = match plan.request.api {
        Api::Tokens => return scale_out::generated(app, plan).into(),
        Api::Completions | Api::Generate => {
            let choices = each(plan, |at, sequence| completion_choice(app, plan, at, sequence));
            serde_json::to_vec(&reply(app, plan, "text_completion", choices, None))
        }
        Api::Chat => {
            let choices = each(plan, |at, sequence| chat_choice(app, plan, at, sequence));
            let prompt = ChatPrompt {
                prompt_logprobs: prompt_logprobs(app, plan, 0),
                prompt_token_ids: plan.request.return_token_ids.then(|| plan.prompts[0].to_vec()),
                prompt_text: None,
            };
            serde_json::to_vec(&reply(app, plan, "chat.completion", choices, Some(prompt)))
        }
    };
    bytes.unwrap_or_default().into()
}

fn each<C>(plan: &Plan, choice: impl Fn(u32, &Sequence) -> C) -> Vec<C> {
    plan.sequences.iter().enumerate().map(|(at, sequence)| choice(at as u32, sequence)).collect()
}

fn reply<'a, C>(
    app: &'a App,
    plan: &'a Plan,
    object: &'a str,
    choices: Vec<C>,
    prompt: Option<ChatPrompt>,
) -> Reply<'a, C> {
    Reply {
        id: &plan.id,
        object,
        created: plan.created,
        model: &plan.model,
        choices,
        service_tier: None,
        system_fingerprint: Some(&app.fingerprint),
        usage: usage(app, plan),
        prompt,
        kv_transfer_params: hand_off(app, plan),
        ec_transfer_params: None,
        metrics: None,
    }
}

/// Prompt and completion tokens of all choices; a prompt counts once whatever `n` is.
pub(super) fn token_counts(plan: &Plan) -> (u32, u32) {
    let prompt = plan.prompts.iter().map(|ids| ids.len() as u32).sum();
    let completion = plan.sequences.iter().map(|sequence| sequence.done as u32).sum();
    (prompt, completion)
}

/// Prompt tokens that were cached: those of each prompt's last choice, which finds what the choices
/// before it have computed. For chats also the prompt tokens that were put into the cache.
pub(super) fn cache_counts(app: &App, plan: &Plan) -> (u32, Option<u32>) {
    let n = plan.request.n as usize;
    let lasts = plan.sequences.iter().skip(n - 1).step_by(n);
    let cached: u32 = lasts.map(|sequence| sequence.cached_tokens).sum();
    let size = app.config.block_size;
    let whole: u32 = plan.prompts.iter().map(|ids| ids.len() as u32 / size * size).sum();
    (cached, (plan.request.api == Api::Chat).then(|| whole.saturating_sub(cached)))
}

pub(super) fn usage(app: &App, plan: &Plan) -> Usage {
    let (prompt_tokens, completion_tokens) = token_counts(plan);
    let (cached_tokens, created_cache_tokens) = cache_counts(app, plan);
    let details = PromptDetails { cached_tokens, created_cache_tokens, multimodal_tokens: None };
    Usage {
        prompt_tokens,
        total_tokens: prompt_tokens + completion_tokens,
        completion_tokens,
        prompt_tokens_details: app.config.prompt_tokens_details.then_some(details),
        completion_tokens_details: None,
    }
}

/// The params for a decode leg: of a batch those of its first prompt, of several choices those of
/// the last one, as vLLM answers.
pub(super) fn hand_off(app: &App, plan: &Plan) -> Option<HandOff> {
    if plan.request.kv.transfer_id.is_some() {
        // With MooncakeConnector the decode leg has been told already.
        return None;
    }
    let last_choice = plan.request.n as usize - 1;
    let sequence = plan.sequences.get(last_choice)?;
    let (name, blocks) = sequence.pinned.as_ref()?;
    Some(HandOff {
        do_remote_prefill: true,
        do_remote_decode: false,
        // Block 0 is vLLM's null block.
        remote_block_ids: vec![blocks.iter().map(|block| block + 1).collect()],
        remote_engine_id: app.registry.engine_id.clone(),
        remote_request_id: name.clone(),
        remote_host: reachable(app.config.host).to_string(),
        remote_port: app.side_port,
        tp_size: 1,
        dcp_size: 1,
        pp_size: 1,
        remote_num_tokens: plan.prompts[sequence.prompt].len() as u32,
        remote_blocks_expiry_time: None,
        transfer_mode: "pull",
        remote_prefill_cached_tokens: sequence.cached_tokens,
    })
}

/// The address under which others find a socket that is bound to `host`.
pub(super) fn reachable(host: IpAddr) -> IpAddr {
    match host {
        IpAddr::V4(v4) if v4.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(v6) if v6.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
        one => one,
    }
}

pub(super) fn finish_reason(plan: &Plan, sequence: &Sequence) -> &'static str {
    match (&sequence.answer.ending, &sequence.answer.call) {
        (Ending::Length, _) => "length",
        (Ending::Stop, Some(_)) if !call_is_named(&plan.request.members) => "tool_calls",
        (Ending::Stop | Ending::StopAt(_), _) => "stop",
    }
}

pub(super) fn stop_reason(sequence: &Sequence) -> Option<Value> {
    match &sequence.answer.ending {
        Ending::StopAt(what) => Some(what.clone()),
        Ending::Length | Ending::Stop => None,
    }
}

fn completion_choice(app: &App, plan: &Plan, index: u32, sequence: &Sequence) -> CompletionChoice {
    let prompt = &plan.prompts[sequence.prompt];
    let echoed = if plan.request.echo { app.model.decode(prompt, true) } else { String::new() };
    let all = 0..sequence.answer.pieces.len();
    CompletionChoice {
        index,
        text: echoed.clone() + &sequence.answer.text(),
        logprobs: completion_logprobs(app, plan, sequence, all, echoed.len()),
        finish_reason: finish_reason(plan, sequence),
        stop_reason: stop_reason(sequence),
        token_ids: plan.request.return_token_ids.then(|| sequence.answer.ids()),
        prompt_logprobs: prompt_logprobs(app, plan, sequence.prompt),
        prompt_token_ids: plan.request.return_token_ids.then(|| prompt.to_vec()),
        routed_experts: None,
    }
}

fn chat_choice(app: &App, plan: &Plan, index: u32, sequence: &Sequence) -> ChatChoice {
    let text = sequence.answer.text();
    let (content, tool_calls) = match &sequence.answer.call {
        None => (Some(text), Vec::new()),
        Some(call) => {
            let function = FunctionCall { name: call.name.clone(), arguments: text };
            (None, vec![ToolCall { id: call.id.clone(), kind: "function", function }])
        }
    };
    let message = Message {
        role: "assistant",
        content,
        refusal: None,
        annotations: None,
        audio: None,
        function_call: None,
        tool_calls,
        reasoning: None,
    };
    let all = 0..sequence.answer.pieces.len();
    ChatChoice {
        index,
        message,
        logprobs: chat_logprobs(app, plan, sequence, all),
        finish_reason: finish_reason(plan, sequence),
        stop_reason: stop_reason(sequence),
        token_ids: plan.request.return_token_ids.then(|| sequence.answer.ids()),
        routed_experts: None,
    }
}

/// Log probabilities of some of a completion's tokens; `offset` is where its text begins.
pub(super) fn completion_logprobs(
    app: &App,
    plan: &Plan,
    sequence: &Sequence,
    tokens: std::ops::Range<usize>,
    offset: usize,
) -> Option<CompletionLogprobs> {
    let count = plan.request.logprobs?;
    let before: usize = sequence.answer.pieces[..tokens.start].iter().map(|p| p.token.len()).sum();
    let mut at_byte = offset + before;
    let mut all = CompletionLogprobs::default();
    for at in tokens {
        let piece = &sequence.answer.pieces[at];
        let own = log_probability(sequence.answer.seed, at);
        let rivals = app.words.rivals(sequence.answer.seed, at, count.saturating_sub(1));
        let top = [(piece.clone(), own)].into_iter().chain(rivals);
        all.text_offset.push(at_byte);
        all.token_logprobs.push(Some(own));
        all.tokens.push(piece.token.clone());
        all.top_logprobs.push(Some(top.map(|(piece, p)| (piece.token, json!(p))).collect()));
        at_byte += piece.token.len();
    }
    Some(all)
}

/// Log probabilities of some of a chat's tokens.
pub(super) fn chat_logprobs(
    app: &App,
    plan: &Plan,
    sequence: &Sequence,
    tokens: std::ops::Range<usize>,
) -> Option<ChatLogprobs> {
    let count = plan.request.logprobs?;
    let seed = sequence.answer.seed;
    let one = |at: usize| {
        let piece = &sequence.answer.pieces[at];
        let own = log_probability(seed, at);
        let rivals = app.words.rivals(seed, at, count.saturating_sub(1));
        let top = [(piece.clone(), own)].into_iter().chain(rivals).take(count);
        TokenLogprob {
            token: piece.token.clone(),
            logprob: own,
            bytes: piece.token.clone().into_bytes(),
            top_logprobs: top.map(top_logprob).collect(),
        }
    };
    Some(ChatLogprobs { content: tokens.map(one).collect() })
}

fn top_logprob((piece, logprob): (Piece, f64)) -> TopLogprob {
    TopLogprob { bytes: piece.token.clone().into_bytes(), token: piece.token, logprob }
}

fn prompt_logprobs(app: &App, plan: &Plan, prompt: usize) -> Option<PromptLogprobs> {
    let one = |(at, &id): (usize, &u32)| {
        let logprob = PromptLogprob {
            logprob: log_probability(u64::from(id), at),
            rank: at,
            decoded_token: app.model.decode(&[id], false),
        };
        (at > 0).then(|| BTreeMap::from([(id, logprob)]))
    };
    let asked = plan.request.prompt_logprobs;
    asked.then(|| plan.prompts[prompt].iter().enumerate().map(one).collect())
}
