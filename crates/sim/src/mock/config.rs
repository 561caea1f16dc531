//! What a mock engine is told at its start. Every field has a default; `port: 0` takes a free port.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::time::Duration;

use pointsman_tokens::Model;
use serde::{Deserialize, Serialize};

use super::{Faults, StartError};
use crate::profile::Profile;

/// What the engine is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// Computes prompts for others and keeps their KV until it is pulled (`kv_producer`).
    Prefill,
    /// Pulls KV and decodes; prefills locally when asked without params (`kv_consumer`).
    Decode,
    /// An ordinary engine without a KV connector.
    Unified,
}

/// Whose wire an engine speaks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Dialect {
    /// vLLM with NixlConnector or MooncakeConnector.
    #[default]
    Vllm,
    /// SGLang.
    Sglang,
    /// TensorRT-LLM.
    Trtllm,
}

/// How a vLLM engine hands KV over.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Connector {
    /// NixlConnector.
    #[default]
    Nixl,
    /// MooncakeConnector.
    Mooncake,
}

/// What a decode engine does when the KV of its prefill cannot be loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LoadFailure {
    /// The request fails (vLLM's default).
    Fail,
    /// The engine computes the prompt itself.
    Recompute,
}

/// How hand-off parameters that do not belong to the prompt are answered. Always recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OnViolation {
    /// 200 with wrong text, and the blocks stay wrong in its cache.
    Corrupt,
    /// 400 that names the violation.
    Refuse,
    /// The engine dies: this request gets 500, later ones 503, until faults are set again.
    Die,
    /// As the real engine: it dies of incomplete params, batches and longer prompts, and answers
    /// wrong text to the rest.
    AsReal,
}

/// Encoding of KV events.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EventEncoding {
    /// Maps with a `type` key (vLLM 0.24 and later).
    Map,
    /// The same with signed block hashes (SGLang, which has nothing else).
    SignedMap,
    /// Arrays with the tag first (up to vLLM 0.23).
    Array,
}

/// Form of block hashes in KV events.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum HashForm {
    /// Unsigned 64-bit integers.
    Int,
    /// The whole 32-byte digest.
    Bytes,
}

/// Which end of the PUB socket listens.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KvSocket {
    /// The engine binds this port of its own host (0 = any free one); rank r takes `port + r`.
    Bind(u16),
    /// The engine connects to a subscriber that listens on `host:port`; rank r connects to `port + r`.
    Connect {
        /// Host of the subscriber.
        host: String,
        /// Its port for rank 0.
        port: u16,
    },
}

/// KV-event publishing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct KvEvents {
    /// The PUB socket.
    pub publish: KvSocket,
    /// Port of the replay ROUTER, always bound (0 = any free one); rank r takes `port + r`.
    pub replay_port: u16,
    /// First frame of every message.
    pub topic: String,
    /// Map (default) or array.
    pub encoding: EventEncoding,
    /// Integers (default) or byte strings.
    pub hashes: HashForm,
    /// Batches kept for replay.
    pub buffer_steps: usize,
    /// Messages queued per subscriber before further ones to it are dropped.
    pub high_water_mark: usize,
}

impl Default for KvEvents {
    fn default() -> Self {
        KvEvents {
            publish: KvSocket::Bind(0),
            replay_port: 0,
            topic: String::new(),
            encoding: EventEncoding::Map,
            hashes: HashForm::Int,
            buffer_steps: 10_000,
            high_water_mark: 100_000,
        }
    }
}

/// Settings of one mock engine.
#[derive(Clone, Debug)]
pub struct EngineConfig {
    /// What it is for.
    pub role: Role,
    /// Whose wire it speaks.
    pub dialect: Dialect,
    /// Address that all sockets bind.
    pub host: IpAddr,
    /// Port of the API, 0 for any free one.
    pub port: u16,
    /// vLLM: how it hands KV over.
    pub connector: Connector,
    /// SGLang, and vLLM with MooncakeConnector: where decode engines meet it, 0 for any free port.
    pub bootstrap_port: u16,
    /// SGLang: a decode engine computes prompts itself when asked to.
    pub conditional_agg: bool,
    /// Name under which the model is served.
    pub model: String,
    /// LoRA adapters served beside it.
    pub adapters: Vec<String>,
    /// The physics.
    pub profile: Profile,
    /// Divides all model times; `f64::INFINITY` makes every step instantaneous. Leases stay real time.
    pub speed: f64,
    /// Data-parallel ranks, each an engine of its own behind one API.
    pub ranks: u16,
    /// Tokens of one KV block.
    pub block_size: u32,
    /// KV blocks of one rank.
    pub capacity_blocks: u32,
    /// Tokens of one step, prefill and decode together.
    pub max_num_batched_tokens: u32,
    /// Sequences that run at once on one rank.
    pub max_num_seqs: u32,
    /// Longest prompt and output together.
    pub max_model_len: u32,
    /// How long a prefilled prompt stays pinned for its decode engine; of SGLang and
    /// MooncakeConnector how long either waits for the other.
    pub lease: Duration,
    /// What happens when pulled KV cannot be had.
    pub load_failure: LoadFailure,
    /// What happens on a wrong hand-off.
    pub on_violation: OnViolation,
    /// KV events, if published.
    pub kv_events: Option<KvEvents>,
    /// Report `prompt_tokens_details` in usage (`--enable-prompt-tokens-details`).
    pub prompt_tokens_details: bool,
    /// Send usage in every stream (`--enable-force-include-usage`).
    pub force_include_usage: bool,
    /// Echo or make `X-Request-Id` (`--enable-request-id-headers`).
    pub request_id_headers: bool,
    /// Serve prompts and answers as token ids (`--enable-scale-out`).
    pub scale_out: bool,
    /// Version that `/version` reports.
    pub version: String,
    /// Faults from the start on.
    pub faults: Faults,
    /// Seed of everything that is drawn.
    pub seed: u64,
    /// Seed of block names; engines with other seeds name the same blocks differently.
    pub hash_seed: u64,
    /// Tokenizer and chat template; the built-in model when absent.
    pub tokenizer: Option<Arc<Model>>,
    /// Requests (headers and body) kept for `GET /mock/stats`.
    pub keep_requests: usize,
}

impl Default for EngineConfig {
    fn default() -> Self {
        EngineConfig {
            role: Role::Unified,
            dialect: Dialect::Vllm,
            connector: Connector::Nixl,
            bootstrap_port: 0,
            conditional_agg: false,
            host: IpAddr::V4(Ipv4Addr::LOCALHOST),
            port: 0,
            model: "mock".to_owned(),
            adapters: Vec::new(),
            profile: Profile::default(),
            speed: 1.0,
            ranks: 1,
            block_size: 16,
            capacity_blocks: 40_000,
            max_num_batched_tokens: 8192,
            max_num_seqs: 256,
            max_model_len: 131_072,
            lease: Duration::from_secs(30),
            load_failure: LoadFailure::Fail,
            on_violation: OnViolation::Corrupt,
            kv_events: Some(KvEvents::default()),
            prompt_tokens_details: true,
            force_include_usage: false,
            request_id_headers: false,
            scale_out: false,
            version: "0.32.0".to_owned(),
            faults: Faults::default(),
            seed: 0,
            hash_seed: 0,
            tokenizer: None,
            keep_requests: 64,
        }
    }
}

impl EngineConfig {
    /// A default engine of one role.
    #[must_use]
    pub fn of(role: Role) -> Self {
        EngineConfig { role, ..EngineConfig::default() }
    }

    /// Rejects settings that make no sense, naming the field.
    ///
    /// # Errors
    /// The first such setting.
    pub fn validate(&self) -> Result<(), StartError> {
        let at_least_one = [
            ("ranks", u32::from(self.ranks)),
            ("block_size", self.block_size),
            ("capacity_blocks", self.capacity_blocks),
            ("max_num_batched_tokens", self.max_num_batched_tokens),
            ("max_num_seqs", self.max_num_seqs),
            ("max_model_len", self.max_model_len),
        ];
        for (key, value) in at_least_one {
            if value == 0 {
                return Err(StartError::Setting { key, reason: "is 0, must be at least 1".into() });
            }
        }
        if self.speed.is_nan() || self.speed <= 0.0 {
            let reason = format!("is {}, must be above 0 (`inf` allowed)", self.speed);
            return Err(StartError::Setting { key: "speed", reason });
        }
        Ok(())
    }
}
