//! Reads and validates the body of an inference request as vLLM does: types first, then values.
//!
//! Unknown fields are ignored. Tokenising and what depends on the prompt's length is in `prompt`.

use std::collections::HashMap;

use serde_json::Value;
use serde_json::value::RawValue;

use super::config::Dialect;
use super::errors::Failure;
use super::{sglang, trtllm};

/// Which of the two APIs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Api {
    Chat,
    Completions,
    /// SGLang's own `/generate`.
    Generate,
    /// vLLM's `/inference/v1/generate`: token ids in and out.
    Tokens,
}

/// The hand-off parameters of a request.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct KvParams {
    pub(super) do_remote_decode: bool,
    pub(super) do_remote_prefill: bool,
    pub(super) remote_request_id: Option<String>,
    pub(super) remote_engine_id: Option<String>,
    pub(super) remote_host: Option<String>,
    pub(super) remote_port: Option<u16>,
    /// The highest of the blocks where the prompt's KV is; none if the params name no blocks.
    pub(super) last_block: Option<u32>,
    pub(super) prompt_token_ids: Option<Vec<u32>>,
    /// What of the prompt the prefill engine had cached.
    pub(super) remote_prefill_cached_tokens: Option<u32>,
    /// MooncakeConnector: the name under which both legs meet, and of a decode leg where.
    pub(super) transfer_id: Option<String>,
    pub(super) bootstrap_addr: Option<(String, u16)>,
    /// SGLang: where both legs meet.
    pub(super) bootstrap: Option<Bootstrap>,
    /// SGLang: a decode engine is to compute the prompt itself.
    pub(super) do_local_prefill: bool,
}

/// Where both legs of a request meet.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Bootstrap {
    pub(super) host: String,
    pub(super) port: u16,
    /// Of each prompt, or of the first.
    pub(super) rooms: Vec<u64>,
}

impl Bootstrap {
    /// The room of a prompt. Where only the first has one, the others have those that follow.
    pub(super) fn room(&self, prompt: usize) -> String {
        let room = self.rooms.get(prompt).copied();
        let first = self.rooms.first().copied().unwrap_or_default();
        room.unwrap_or(first.wrapping_add(prompt as u64)).to_string()
    }

    /// Whether these are the rooms of so many prompts.
    pub(super) fn fits(&self, prompts: usize) -> bool {
        self.rooms.len() == 1 || self.rooms.len() == prompts
    }
}

/// A request after validation, apart from its prompt.
#[derive(Clone, Debug)]
pub(super) struct Request {
    pub(super) api: Api,
    pub(super) model: Option<String>,
    pub(super) n: u32,
    pub(super) max_tokens: Option<u32>,
    pub(super) min_tokens: u32,
    pub(super) ignore_eos: bool,
    pub(super) seed: Option<i64>,
    pub(super) stream: bool,
    pub(super) include_usage: bool,
    pub(super) continuous_usage: bool,
    /// Alternatives to tell per token; none without log probabilities.
    pub(super) logprobs: Option<usize>,
    pub(super) prompt_logprobs: bool,
    pub(super) echo: bool,
    pub(super) return_token_ids: bool,
    pub(super) stop: Vec<String>,
    pub(super) stop_token_ids: Vec<u32>,
    pub(super) include_stop: bool,
    pub(super) cache_salt: Option<String>,
    pub(super) kv: KvParams,
    pub(super) members: Members,
}

/// The body's members as they came; of a repeated one the last, as in Python.
#[derive(Clone, Debug, Default)]
pub(super) struct Members(HashMap<String, Box<RawValue>>);

impl Members {
    /// The member's JSON text; none if it is absent or null.
    pub(super) fn raw(&self, key: &str) -> Option<&str> {
        self.0.get(key).map(|raw| raw.get()).filter(|raw| *raw != "null")
    }

    /// The member, parsed; none if it is absent or null.
    pub(super) fn get(&self, key: &str) -> Option<Value> {
        serde_json::from_str(self.raw(key)?).ok()
    }

    fn has(&self, key: &str) -> bool {
        self.0.contains_key(key)
    }

    fn len(&self) -> usize {
        self.0.len()
    }
}

/// Choices of one request at most, as in vLLM's protocol.
const MAX_N: i64 = 16_384;
/// Stop strings of one request at most.
const MAX_STOPS: usize = 4;

pub(super) fn parse_json(bytes: &[u8]) -> Result<Members, Failure> {
    let first = bytes.iter().find(|byte| !byte.is_ascii_whitespace());
    match serde_json::from_slice(bytes) {
        Ok(members) => Ok(Members(members)),
        Err(error) if first == Some(&b'{') => Err(Failure::not_json(error.column())),
        Err(error) if serde_json::from_slice::<Value>(bytes).is_err() => {
            Err(Failure::not_json(error.column()))
        }
        Err(_) => Err(Failure::schema(
            "model_attributes_type",
            "body",
            "Input should be a valid dictionary or object to extract fields from",
            "'<not a dict>'",
        )),
    }
}

pub(super) fn parse(dialect: Dialect, api: Api, bytes: &[u8]) -> Result<Request, Failure> {
    let sent = parse_json(bytes)?;
    let members = match api {
        Api::Generate | Api::Tokens => native(&sent),
        Api::Chat | Api::Completions => sent,
    };
    let fields = Fields(&members);
    if api == Api::Chat && !members.has("messages") {
        let input = format!("'<dict of {} items>'", members.len());
        return Err(Failure::schema("missing", "body.messages", "Field required", &input));
    }
    let limit = match api {
        Api::Chat => fields.int("max_completion_tokens")?.or(fields.int("max_tokens")?),
        Api::Completions | Api::Tokens => {
            fields.int("max_tokens")?.or(Some(DEFAULT_COMPLETION_TOKENS))
        }
        Api::Generate => fields.int("max_new_tokens")?.or(Some(DEFAULT_GENERATE_TOKENS)),
    };
    let options = members.get("stream_options").unwrap_or_default();
    let option = |key: &str| options[key].as_bool().unwrap_or(false);
    let request = Request {
        api,
        model: fields.string("model")?,
        n: count("n", fields.int("n")?.unwrap_or(1))?,
        max_tokens: limit.map(|limit| at_least_one("max_tokens", limit)).transpose()?,
        min_tokens: fields.int("min_tokens")?.unwrap_or(0).clamp(0, i64::from(u32::MAX)) as u32,
        ignore_eos: fields.bool("ignore_eos")?,
        seed: fields.int("seed")?,
        stream: fields.bool("stream")?,
        include_usage: option("include_usage"),
        continuous_usage: option("continuous_usage_stats"),
        logprobs: fields.logprobs(api)?,
        prompt_logprobs: members.raw("prompt_logprobs").is_some(),
        echo: fields.bool("echo")?,
        return_token_ids: fields.bool("return_token_ids")?,
        stop: fields.stops()?,
        stop_token_ids: fields.ids("stop_token_ids"),
        include_stop: fields.bool("include_stop_str_in_output")?,
        cache_salt: fields.string("cache_salt")?,
        kv: match dialect {
            Dialect::Vllm => fields.kv_params()?,
            Dialect::Sglang => sglang::params(&members),
            Dialect::Trtllm => trtllm::params(&members)?,
        },
        members: Members::default(),
    };
    fields.sampling()?;
    Ok(Request { members, ..request })
}

/// What an engine's own endpoint is told, its sampling parameters beside the rest.
fn native(sent: &Members) -> Members {
    let mut members = sent.0.clone();
    let sampling = sent.raw("sampling_params").and_then(|raw| serde_json::from_str(raw).ok());
    let sampling: HashMap<String, Box<RawValue>> = sampling.unwrap_or_default();
    members.extend(sampling);
    Members(members)
}

/// `max_new_tokens` of SGLang's own endpoint where it is not said.
const DEFAULT_GENERATE_TOKENS: i64 = 128;

/// `max_tokens` of a completion that does not say.
const DEFAULT_COMPLETION_TOKENS: i64 = 16;

fn at_least_one(key: &str, value: i64) -> Result<u32, Failure> {
    if value < 1 {
        return Err(Failure::value(key, value, &format!("{key} must be at least 1, got {value}.")));
    }
    Ok(value.min(i64::from(u32::MAX)) as u32)
}

fn count(key: &str, value: i64) -> Result<u32, Failure> {
    if !(1..=MAX_N).contains(&value) {
        return Err(Failure::bad(None, format!("{key} must be at least 1, got {value}.")));
    }
    Ok(value as u32)
}

struct Fields<'a>(&'a Members);

impl Fields<'_> {
    fn get(&self, key: &str) -> Option<Value> {
        self.0.get(key)
    }

    fn int(&self, key: &str) -> Result<Option<i64>, Failure> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let whole = |f: f64| (f.fract() == 0.0).then_some(f as i64);
        if let Some(int) = value.as_i64().or_else(|| value.as_f64().and_then(whole)) {
            return Ok(Some(int));
        }
        let (kind, msg) = match &value {
            Value::String(_) => (
                "int_parsing",
                "Input should be a valid integer, unable to parse string as an integer",
            ),
            _ => ("int_type", "Input should be a valid integer"),
        };
        Err(Failure::schema(kind, &format!("body.{key}"), msg, &python(&value)))
    }

    fn bool(&self, key: &str) -> Result<bool, Failure> {
        match self.get(key) {
            None => Ok(false),
            Some(Value::Bool(value)) => Ok(value),
            Some(other) => {
                let msg = "Input should be a valid boolean";
                Err(Failure::schema("bool_type", &format!("body.{key}"), msg, &python(&other)))
            }
        }
    }

    fn string(&self, key: &str) -> Result<Option<String>, Failure> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::String(value)) => Ok(Some(value)),
            Some(other) => {
                let msg = "Input should be a valid string";
                Err(Failure::schema("string_type", &format!("body.{key}"), msg, &python(&other)))
            }
        }
    }

    fn ids(&self, key: &str) -> Vec<u32> {
        self.get(key).as_ref().and_then(token_ids).unwrap_or_default()
    }

    fn logprobs(&self, api: Api) -> Result<Option<usize>, Failure> {
        let asked = match api {
            Api::Completions => self.int("logprobs")?,
            Api::Chat if self.bool("logprobs")? => Some(self.int("top_logprobs")?.unwrap_or(0)),
            Api::Chat | Api::Generate | Api::Tokens => None,
        };
        Ok(asked.map(|count| count.clamp(0, 20) as usize))
    }

    fn stops(&self) -> Result<Vec<String>, Failure> {
        let stops: Vec<String> = match self.get("stop") {
            Some(Value::String(one)) => vec![one],
            Some(Value::Array(many)) => {
                many.iter().filter_map(|stop| stop.as_str().map(str::to_owned)).collect()
            }
            _ => Vec::new(),
        };
        if stops.len() > MAX_STOPS {
            return Err(Failure::too_many("body.stop", MAX_STOPS, stops.len()));
        }
        Ok(stops)
    }

    fn sampling(&self) -> Result<(), Failure> {
        if let Some(temperature) = self.get("temperature").as_ref().and_then(Value::as_f64)
            && temperature < 0.0
        {
            let value = format!("{temperature:?}");
            let message = format!("temperature must be non-negative, got {value}.");
            return Err(Failure::value("temperature", value, &message));
        }
        Ok(())
    }

    fn kv_params(&self) -> Result<KvParams, Failure> {
        let Some(value) = self.get("kv_transfer_params") else { return Ok(KvParams::default()) };
        let Some(params) = value.as_object() else {
            let msg = "Input should be a valid dictionary";
            let loc = "body.kv_transfer_params";
            return Err(Failure::schema("dict_type", loc, msg, &python(&value)));
        };
        let flag = |key: &str| params.get(key).and_then(Value::as_bool).unwrap_or(false);
        let text = |key: &str| params.get(key).and_then(Value::as_str).map(str::to_owned);
        Ok(KvParams {
            do_remote_decode: flag("do_remote_decode"),
            do_remote_prefill: flag("do_remote_prefill"),
            remote_request_id: text("remote_request_id"),
            remote_engine_id: text("remote_engine_id"),
            remote_host: text("remote_host"),
            remote_port: params
                .get("remote_port")
                .and_then(Value::as_u64)
                .and_then(|port| u16::try_from(port).ok()),
            last_block: params.get("remote_block_ids").and_then(last_block),
            prompt_token_ids: params.get("prompt_token_ids").and_then(token_ids),
            transfer_id: text("transfer_id"),
            bootstrap_addr: text("remote_bootstrap_addr")
                .and_then(|url| host_and_port(&url, "http://")),
            remote_prefill_cached_tokens: params
                .get("remote_prefill_cached_tokens")
                .and_then(Value::as_u64)
                .and_then(|tokens| u32::try_from(tokens).ok()),
            ..KvParams::default()
        })
    }
}

/// Of `scheme` with `host:port` after it.
pub(super) fn host_and_port(url: &str, scheme: &str) -> Option<(String, u16)> {
    let (host, port) = url.strip_prefix(scheme)?.trim_end_matches('/').rsplit_once(':')?;
    Some((host.to_owned(), port.parse().ok()?))
}

/// The highest number in `remote_block_ids`, a list of lists.
fn last_block(value: &Value) -> Option<u32> {
    let groups = value.as_array()?.iter().filter_map(Value::as_array);
    let ids = groups.flatten().filter_map(Value::as_u64);
    Some(ids.max().unwrap_or(0).try_into().unwrap_or(u32::MAX))
}

/// A JSON array of token ids; none if it is anything else.
pub(super) fn token_ids(value: &Value) -> Option<Vec<u32>> {
    let ids = value.as_array()?.iter().map(|id| id.as_u64().and_then(|id| u32::try_from(id).ok()));
    ids.collect()
}

/// A value as it looks in a Python error message.
fn python(value: &Value) -> String {
    match value {
        Value::String(text) => format!("'{text}'"),
        Value::Array(items) => format!("'<list of {} items>'", items.len()),
        Value::Object(members) => format!("'<dict of {} items>'", members.len()),
        Value::Bool(true) => "True".to_owned(),
        Value::Bool(false) => "False".to_owned(),
        Value::Null => "None".to_owned(),
        Value::Number(number) => number.to_string(),
    }
}
