//! From a request's prompt to token ids, with the checks that need them.

use std::time::{SystemTime, UNIX_EPOCH};

use pointsman_tokens::{Chat, Model};
use serde_json::Value;
use xxhash_rust::xxh3::xxh3_64;

use super::errors::Failure;
use super::request::{Api, Members, Request, token_ids};
use crate::rng::mix;

/// The prompts of a request, one for each set of choices.
pub(super) fn prompts(
    request: &Request,
    model: &Model,
    max_model_len: u32,
) -> Result<Vec<Vec<u32>>, Failure> {
    let prompts = match (request.api, &request.kv.prompt_token_ids) {
        (Api::Chat, Some(ids)) => vec![ids.clone()],
        (Api::Chat, None) => vec![chat(&request.members, model)?],
        (Api::Completions, _) => completion_prompts(&request.members, "prompt", model)?,
        (Api::Tokens, _) => completion_prompts(&request.members, "token_ids", model)?,
        (Api::Generate, _) => {
            let ids = request.members.raw("input_ids").is_some();
            let name = if ids { "input_ids" } else { "text" };
            completion_prompts(&request.members, name, model)?
        }
    };
    if let Some(limit) = request.max_tokens.filter(|&limit| limit > max_model_len) {
        let message = format!(
            "max_tokens={limit} cannot be greater than max_model_len={max_model_len}. Please \
             request fewer output tokens."
        );
        return Err(Failure::value("max_tokens", limit, &message));
    }
    for prompt in &prompts {
        check(prompt, model, max_model_len)?;
    }
    Ok(prompts)
}

fn check(prompt: &[u32], model: &Model, max_model_len: u32) -> Result<(), Failure> {
    if prompt.is_empty() {
        return Err(empty_prompt());
    }
    if let Some(id) = prompt.iter().find(|&&id| id >= model.vocab_size()) {
        return Err(Failure::bad(None, format!("Token id {id} is out of vocabulary")));
    }
    if prompt.len() >= max_model_len as usize {
        let message = format!(
            "This model's maximum context length is {max_model_len} tokens. However, your prompt \
             contains {} input tokens, which exceeds this limit even without any output tokens. \
             Please reduce the length of the input prompt.",
            prompt.len()
        );
        return Err(Failure::value("input_tokens", prompt.len(), &message));
    }
    Ok(())
}

fn empty_prompt() -> Failure {
    let message =
        "Either prompt or prompt_embeds must be provided and non-empty. (parameter=prompt)";
    Failure::bad(Some("prompt"), message)
}

fn completion_prompts(
    members: &Members,
    name: &str,
    model: &Model,
) -> Result<Vec<Vec<u32>>, Failure> {
    let add_special = members.get("add_special_tokens").as_ref().and_then(Value::as_bool);
    let encode = |text: &str| -> Result<Vec<u32>, Failure> {
        if text.is_empty() {
            return Err(empty_prompt());
        }
        let encoded = model.encode_prompt(text, add_special);
        encoded.map(|encoded| encoded.ids.to_vec()).map_err(|e| Failure::bad(None, e.to_string()))
    };
    match members.get(name) {
        Some(Value::String(text)) => Ok(vec![encode(&text)?]),
        Some(Value::Array(items)) if !items.is_empty() => {
            if let Some(ids) = token_ids(&Value::Array(items.clone())) {
                return Ok(vec![ids]);
            }
            items
                .iter()
                .map(|item| match item {
                    Value::String(text) => encode(text),
                    other => token_ids(other).ok_or_else(bad_prompt),
                })
                .collect()
        }
        Some(Value::Array(_)) | None => Err(empty_prompt()),
        Some(_) => Err(bad_prompt()),
    }
}

fn bad_prompt() -> Failure {
    let msg = "Input should be a string, a list of strings, of token ids, or of such lists";
    Failure::schema("string_type", "body.prompt", msg, "'<prompt>'")
}

/// The tokens of a chat, as the engine's template renders it.
pub(super) fn chat(members: &Members, model: &Model) -> Result<Vec<u32>, Failure> {
    let flag = |key: &str| members.get(key).as_ref().and_then(Value::as_bool);
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs() as i64);
    let raw = |key: &str| members.raw(key).map(str::as_bytes);
    let chat = Chat {
        tools: raw("tools"),
        documents: raw("documents"),
        chat_template_kwargs: raw("chat_template_kwargs"),
        reasoning_effort: raw("reasoning_effort"),
        add_generation_prompt: flag("add_generation_prompt").unwrap_or(true),
        continue_final_message: flag("continue_final_message").unwrap_or(false),
        add_special_tokens: flag("add_special_tokens").unwrap_or(false),
        ..Chat::new(raw("messages").unwrap_or(b"[]"), now)
    };
    let encoded = model.encode_chat(&chat).map_err(|e| Failure::bad(None, e.to_string()))?;
    let mut ids = encoded.ids.to_vec();
    if let Some(partial) = encoded.partial {
        // An encoder would put its own tokens here; they differ with what was sent.
        let parts = partial.images + partial.audio + partial.videos + partial.others;
        let seed = xxh3_64(raw("messages").unwrap_or_default());
        let words = model.plain_words();
        let count = u64::from(parts * TOKENS_OF_A_PART + partial.text_tokens);
        let word = |at| words[(mix(seed.wrapping_add(at)) % words.len() as u64) as usize];
        ids.extend((0..count).map(word));
    }
    Ok(ids)
}

/// Tokens that an image or another part that is no text takes.
const TOKENS_OF_A_PART: u32 = 64;

/// The function that the answer must call: what `tool_choice` asks for, or a tool that the last
/// message names.
pub(super) fn wanted_call(members: &Members) -> Option<Value> {
    let tools = members.get("tools")?;
    let tools = tools.as_array()?;
    let name_of = |tool: &Value| tool["function"]["name"].as_str().map(str::to_owned);
    let choice = members.get("tool_choice").unwrap_or(Value::Null);
    match choice.as_str() {
        Some("none") => return None,
        Some("required") => return tools.first().cloned(),
        _ => {}
    }
    if let Some(wanted) = choice["function"]["name"].as_str() {
        return tools.iter().find(|tool| name_of(tool).as_deref() == Some(wanted)).cloned();
    }
    let messages = members.get("messages")?;
    let last = messages.as_array()?.last()?;
    let asks = last["role"] == "user";
    let text = last["content"].to_string();
    tools
        .iter()
        .find(|tool| asks && name_of(tool).is_some_and(|name| text.contains(&name)))
        .cloned()
}

/// Whether `tool_choice` names one function: such a call ends with `stop`.
pub(super) fn call_is_named(members: &Members) -> bool {
    members.get("tool_choice").is_some_and(|choice| choice.is_object())
}
