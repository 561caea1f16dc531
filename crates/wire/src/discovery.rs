//! Reads what a worker says of itself: `/v1/models`, `/kv_event_sources`, `/version`, `/server_info`, `/query`.

use std::collections::BTreeMap;

use serde_json::Value;

/// A reply that does not have the shape it should.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what}: {why}")]
pub struct DiscoveryError {
    /// The endpoint.
    pub what: &'static str,
    /// What is wrong with its reply.
    pub why: String,
}

/// One model of `/v1/models`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServedModel {
    /// Its name.
    pub id: String,
    /// The base model if it is a LoRA adapter.
    pub parent: Option<String>,
    /// Context length.
    pub max_model_len: Option<u32>,
}

/// Where one rank publishes its KV events (`/kv_event_sources`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EventSource {
    /// Data-parallel rank.
    pub rank: u32,
    /// PUB endpoint, as the engine was given it (may hold `*`).
    pub endpoint: String,
    /// Replay ROUTER endpoint.
    pub replay_endpoint: Option<String>,
    /// Topic prefix.
    pub topic: String,
    /// Batches that replay can go back.
    pub buffer_steps: Option<u64>,
}

/// What an SGLang server says of itself (`/server_info`).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ServerInfo {
    /// Its version.
    pub version: Option<Version>,
    /// `null`, `prefill` or `decode`.
    pub disaggregation_mode: Option<String>,
    /// Where decode servers meet a prefill server.
    pub bootstrap_port: Option<u16>,
    /// Data-parallel ranks.
    pub dp_size: Option<u32>,
    /// Tokens of a KV block (a page).
    pub page_size: Option<u32>,
    /// Tokens of all KV blocks of a rank.
    pub max_total_tokens: Option<u64>,
    /// Prompt tokens of one step.
    pub chunked_prefill_size: Option<u32>,
    /// Whether it keeps blocks for later prompts: always, but of decode servers only if told to.
    pub keeps_prefixes: Option<bool>,
    /// Whether a decode server computes prompts itself, if it says so.
    pub local_prefill: Option<bool>,
    /// Where rank 0 publishes KV events.
    pub events: Option<EventSource>,
}

/// An engine's version, as far as it is numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version(pub u32, pub u32, pub u32);

const MODELS: &str = "/v1/models";
const SOURCES: &str = "/kv_event_sources";
const VERSION: &str = "/version";
const SERVER_INFO: &str = "/server_info";
const QUERY: &str = "/query";

/// Reads `/v1/models`. Entries without a name are skipped.
pub fn models(body: &[u8]) -> Result<Vec<ServedModel>, DiscoveryError> {
    let reply = parse(MODELS, body)?;
    let Some(list) = reply.get("data").and_then(Value::as_array) else {
        return Err(error(MODELS, "the reply has no list `data`"));
    };
    let model = |entry: &Value| {
        Some(ServedModel {
            id: text(entry, "id")?,
            parent: text(entry, "parent"),
            max_model_len: number(entry, "max_model_len"),
        })
    };
    Ok(list.iter().filter_map(model).collect())
}

/// Reads `/kv_event_sources`: an object by rank, or a list whose entries name their rank. Empty if
/// events are off.
pub fn event_sources(body: &[u8]) -> Result<Vec<EventSource>, DiscoveryError> {
    let mut sources = match parse(SOURCES, body)? {
        Value::Object(ranks) => {
            let source = |(rank, entry): (&String, &Value)| source(rank.parse().ok(), entry);
            ranks.iter().map(source).collect::<Result<Vec<_>, _>>()?
        }
        Value::Array(list) => {
            let ranked = |entry: &Value| source(number(entry, "data_parallel_rank"), entry);
            list.iter().map(ranked).collect::<Result<Vec<_>, _>>()?
        }
        _ => return Err(error(SOURCES, "the reply is neither an object nor a list")),
    };
    sources.sort_by_key(|source| source.rank);
    Ok(sources)
}

fn source(rank: Option<u32>, entry: &Value) -> Result<EventSource, DiscoveryError> {
    Ok(EventSource {
        rank: rank.ok_or_else(|| error(SOURCES, "an entry has no rank"))?,
        endpoint: text(entry, "endpoint")
            .ok_or_else(|| error(SOURCES, "an entry has no `endpoint`"))?,
        replay_endpoint: text(entry, "replay_endpoint"),
        topic: text(entry, "topic").unwrap_or_default(),
        buffer_steps: entry.get("buffer_steps").and_then(Value::as_u64),
    })
}

/// Reads `/server_info`. Whatever is missing in it is not known.
pub fn server_info(body: &[u8]) -> Result<ServerInfo, DiscoveryError> {
    let info = parse(SERVER_INFO, body)?;
    if !info.is_object() {
        return Err(error(SERVER_INFO, "the reply is not an object"));
    }
    let flag = |name: &str| info.get(name).and_then(Value::as_bool);
    let mode = text(&info, "disaggregation_mode");
    let keeps = flag("disable_radix_cache").map(|disabled| {
        let decode = mode.as_deref() == Some("decode");
        !disabled && (!decode || flag("disaggregation_decode_enable_radix_cache") == Some(true))
    });
    let state = info.get("internal_states").and_then(|states| states.get(0));
    let tokens = |of: &Value| of.get("max_total_num_tokens").and_then(Value::as_u64);
    Ok(ServerInfo {
        version: text(&info, "version").and_then(|written| numbers(&written)),
        bootstrap_port: number(&info, "disaggregation_bootstrap_port")
            .and_then(|port| u16::try_from(port).ok()),
        dp_size: number(&info, "dp_size"),
        page_size: number(&info, "page_size"),
        max_total_tokens: tokens(&info).or_else(|| state.and_then(tokens)),
        chunked_prefill_size: number(&info, "chunked_prefill_size"),
        keeps_prefixes: keeps,
        local_prefill: flag("disaggregation_decode_enable_conditional_agg"),
        // A text that is JSON itself, as it was given on the command line.
        events: text(&info, "kv_events_config").and_then(|config| {
            let config: Value = serde_json::from_str(&config).ok()?;
            source(Some(0), &config).ok()
        }),
        disaggregation_mode: mode,
    })
}

/// Reads `/query` of the bootstrap server of a vLLM prefill worker with MooncakeConnector: the name of each
/// data-parallel rank's engine instance. Empty while none has registered.
pub fn mooncake_engines(body: &[u8]) -> Result<BTreeMap<u32, String>, DiscoveryError> {
    let Value::Object(ranks) = parse(QUERY, body)? else {
        return Err(error(QUERY, "the reply is not an object"));
    };
    let engine = |(rank, entry): (&String, &Value)| {
        let rank = rank.parse().map_err(|_| error(QUERY, format!("`{rank}` is no rank")))?;
        let id = text(entry, "engine_id").filter(|id| !id.is_empty());
        Ok((rank, id.ok_or_else(|| error(QUERY, "an entry has no `engine_id`"))?))
    };
    ranks.iter().map(engine).collect()
}

/// Reads `/version`: `1.2.3`, `1.2`, `1.2.3rc1+g0abc` ...
pub fn version(body: &[u8]) -> Result<Version, DiscoveryError> {
    let written = text(&parse(VERSION, body)?, "version")
        .ok_or_else(|| error(VERSION, "the reply has no text `version`"))?;
    numbers(&written)
        .ok_or_else(|| error(VERSION, format!("`{}` is no version", written.escape_debug())))
}

fn numbers(written: &str) -> Option<Version> {
    let mut numbers = written.split('.').map(|part| {
        let digits = part.find(|c: char| !c.is_ascii_digit()).unwrap_or(part.len());
        part.get(..digits).and_then(|digits| digits.parse().ok())
    });
    let (major, minor) = (numbers.next().flatten()?, numbers.next().flatten()?);
    Some(Version(major, minor, numbers.next().flatten().unwrap_or(0)))
}

fn parse(what: &'static str, body: &[u8]) -> Result<Value, DiscoveryError> {
    serde_json::from_slice(body)
        .map_err(|cause| error(what, format!("the reply is not JSON: {cause}")))
}

fn error(what: &'static str, why: impl Into<String>) -> DiscoveryError {
    DiscoveryError { what, why: why.into() }
}

fn text(entry: &Value, name: &str) -> Option<String> {
    entry.get(name).and_then(Value::as_str).map(Into::into)
}

fn number(entry: &Value, name: &str) -> Option<u32> {
    entry.get(name).and_then(Value::as_u64).and_then(|number| u32::try_from(number).ok())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn adapters_name_their_base_model() {
        let body = br#"{"data":[{"id":"base","max_model_len":1024,"parent":null},{"id":"sql","parent":"base"},{"x":1}]}"#;
        let expected = [
            ServedModel { id: "base".into(), parent: None, max_model_len: Some(1024) },
            ServedModel { id: "sql".into(), parent: Some("base".into()), max_model_len: None },
        ];
        assert_eq!(models(body).unwrap(), expected);
        assert_eq!(
            models(b"[]").unwrap_err().to_string(),
            "/v1/models: the reply has no list `data`"
        );
    }

    #[test]
    fn event_sources_are_read_by_rank_in_either_form() {
        let by_rank = br#"{"1":{"endpoint":"tcp://*:5558","replay_endpoint":"tcp://*:5568","topic":"kv","buffer_steps":10000},"0":{"endpoint":"tcp://*:5557","replay_endpoint":null}}"#;
        let sources = event_sources(by_rank).unwrap();
        assert_eq!((sources[0].rank, sources[1].rank), (0, 1));
        assert_eq!((sources[0].topic.as_str(), &sources[0].replay_endpoint), ("", &None));
        assert_eq!(sources[1].buffer_steps, Some(10_000));
        let list = br#"[{"data_parallel_rank":0,"endpoint":"tcp://10.0.0.1:5557","topic":""}]"#;
        assert_eq!(event_sources(list).unwrap()[0].endpoint, "tcp://10.0.0.1:5557");
        assert_eq!(event_sources(b"{}").unwrap(), []);
        assert!(event_sources(br#"{"0":{}}"#).is_err() && event_sources(br#"[{}]"#).is_err());
    }

    #[test]
    fn a_bootstrap_server_names_the_engine_of_each_rank() {
        // As vLLM 0.32.0 writes it (`dict[int, EngineEntry]`).
        let body = br#"{"0":{"engine_id":"ae66dff5_dp0","worker_addr":{"0":{"0":"tcp://10.0.0.1:41021"}}},"1":{"engine_id":"ae66dff5_dp1","worker_addr":{}}}"#;
        let expected = [(0, "ae66dff5_dp0".to_owned()), (1, "ae66dff5_dp1".to_owned())];
        assert_eq!(mooncake_engines(body).unwrap(), BTreeMap::from(expected));
        assert_eq!(mooncake_engines(b"{}").unwrap(), BTreeMap::new());
        for other in [&b"[]"[..], br#"{"x":{"engine_id":"a"}}"#, br#"{"0":{"engine_id":""}}"#] {
            assert!(mooncake_engines(other).is_err());
        }
    }

    #[test]
    fn versions_compare_by_their_numbers() {
        let read = |text: &str| version(format!("{{\"version\":\"{text}\"}}").as_bytes());
        assert_eq!(read("0.32.0").unwrap(), Version(0, 32, 0));
        assert_eq!(read("0.9.2rc1+cpu").unwrap(), Version(0, 9, 2));
        assert_eq!(read("1.0").unwrap(), Version(1, 0, 0));
        assert!(read("0.9.2").unwrap() < read("0.28.0").unwrap());
        assert!(read("dev").is_err() && version(b"{}").is_err());
    }

    proptest! {
        #[test]
        fn random_bytes_never_panic(bytes: Vec<u8>, text in r#"\{"(data|0|version)":[\[\]{}":,a-z0-9.]{0,20}\}"#) {
            for bytes in [&bytes[..], text.as_bytes()] {
                let _ = (models(bytes), event_sources(bytes), version(bytes), server_info(bytes));
                let _ = mooncake_engines(bytes);
            }
        }
    }
}
