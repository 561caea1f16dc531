//! A model and its workers as written.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{Routing, section};
use crate::scalar::{OffOr, Span};

section! {
    /// A base model.
    #[schemars(extend("required" = ["name"]))]
    Model {
        /// The name that clients send.
        name: String = String::new();
        /// Further names of the same weights.
        aliases: Vec<String> = Vec::new();
        /// Names of LoRA adapters of this model.
        adapters: Vec<String> = Vec::new();
        /// How a prompt becomes tokens.
        tokenizer: Tokenizer = Tokenizer::Engine;
        /// Assumed length of what a prompt holds besides text.
        estimates: Estimates = Estimates::default();
        /// Overrides of the top-level `routing` for this model, key by key.
        #[schemars(extend("x-overrides" = "routing"))]
        routing: Option<Routing> = None;
        /// What its requests are to be served within, unless they say otherwise.
        slo: Slo = Slo::default();
        /// Model and GPUs whose measured constants predictions start from. Default: the first of the
        /// table; what is measured while serving corrects any of them.
        model_profile: Option<String> = None;
        /// Single constants that predictions start from, instead of those of the profile.
        constants: Constants = Constants::default();
        /// The engines that serve it.
        workers: Vec<Worker> = Vec::new();
        /// Whether workers join at run time, so that there may be none of a kind at the start. Needs
        /// `admin.worker_api`.
        expect_workers: bool = false;
    }
}

/// How a prompt becomes tokens.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
#[schemars(inline)]
pub enum Tokenizer {
    /// By the engine's own `/tokenize`: a call per request.
    Engine,
    /// With the tiny model of the mock engines.
    Builtin,
    /// In the router, with `tokenizer.json` and the chat template of this model directory.
    Dir(String),
    /// Not at all: the length is this many bytes a token, and no prefix is known.
    BytesPerToken(#[schemars(extend("x-minimum" = 0.25, "x-maximum" = 64))] f64),
}

section! {
    /// Assumed length of what a prompt holds besides text.
    Estimates {
        /// Tokens of one image.
        image_tokens: u32 = 1024;
        /// Tokens of one piece of audio.
        audio_tokens: u32 = 1024;
        /// Tokens of one video.
        video_tokens: u32 = 8192;
        /// Tokens of one file, embedding or other part that is no text.
        other_tokens: u32 = 1024;
    }
}

section! {
    /// Service level objectives: what the policy `predicted` aims at. A request overrides them with the
    /// headers `x-slo-ttft-ms` and `x-slo-itl-ms`.
    Slo {
        /// Time to first token, in milliseconds.
        ttft_ms: OffOr<f64> = OffOr::OFF, min 1, max 86400000;
        /// Mean time between tokens, in milliseconds.
        itl_ms: OffOr<f64> = OffOr::OFF, min 0.01, max 3600000;
    }
}

section! {
    /// Constants of one worker and one link.
    Constants {
        /// Fixed time of a step that computes prompt tokens, in ms.
        k0_ms: Option<f64> = None, min 0;
        /// Time per prompt token, in ms.
        a1_ms: Option<f64> = None, min 0;
        /// Time per prompt token and token of its context, in ms.
        a2_ms: Option<f64> = None, min 0;
        /// Least time of a decode step, in ms.
        c0_ms: Option<f64> = None, min 0;
        /// Time of a decode step per running sequence, in ms.
        c1_ms: Option<f64> = None, min 0;
        /// Time of a decode step per token of the running sequences' context, in ms.
        c2_ms: Option<f64> = None, min 0;
        /// KV bytes of one token.
        kv_bytes_per_token: Option<f64> = None, min 0;
        /// Fixed time of moving a prompt's KV, in ms.
        x0_ms: Option<f64> = None, min 0;
        /// Bandwidth of a link, in GB/s.
        bandwidth_gb_s: Option<f64> = None, min 0;
    }
}

section! {
    /// An engine endpoint.
    #[schemars(extend("required" = ["url", "role"]))]
    Worker {
        /// Its name in logs, metrics and the worker API. Default: host and port of `url`.
        name: Option<String> = None;
        /// Where it answers, without the `/v1`: `http://10.0.0.5:8100`.
        url: String = String::new();
        /// What it is for.
        role: Role = Role::Unified;
        /// What it speaks.
        engine: Engine = Engine::Vllm;
        /// Whether a decode worker may run the prefill of a request itself. Default: true for `vllm` and
        /// `trtllm`; for `sglang` what the engine says, which as a rule is no.
        local_prefill: Option<bool> = None;
        /// Data-parallel ranks behind the URL; each is scheduled on its own.
        ranks: u16 = 1, min 1, max 1024;
        /// Where it publishes KV events. Default: `off` for `openai`, `auto` for others.
        kv_events: Option<KvEvents> = None;
        /// Free labels, shown where workers are listed.
        labels: BTreeMap<String, String> = BTreeMap::new();
        /// Tokens per KV block. Default: what the engine says.
        block_size: Option<u32> = None, min 1, max 65536;
        /// KV blocks of one rank. Default: what the engine says.
        capacity_blocks: Option<u64> = None, min 1;
        /// Token budget of one engine step, `--max-num-batched-tokens`. Default: what the engine says.
        max_num_batched_tokens: Option<u32> = None, min 1;
        /// Whether prompts may be sent as token ids. Default: from vLLM 0.28, if it counts them as the router does.
        takes_prompt_ids: Option<bool> = None;
        /// How long it keeps a prefilled KV that nobody fetches, `kv_lease_duration`; vLLM up to 0.21
        /// keeps it `8m`.
        kv_lease: Span = Span::secs(30), min "1s", max "1h";
        /// How a `vllm` worker hands KV over; the same for all prefill and decode workers of a model.
        kv_connector: KvConnector = KvConnector::Nixl;
        /// Where decode workers meet a prefill worker of `sglang`, or of `vllm` with `mooncake`. Default: the
        /// host of `url`.
        bootstrap_host: Option<String> = None;
        /// Its port there, `--disaggregation-bootstrap-port` or `VLLM_MOONCAKE_BOOTSTRAP_PORT`. Default: what
        /// the engine says, else 8998.
        bootstrap_port: Option<u16> = None, min 1;
        /// Whether a decode worker fetches only the KV that it lacks. Default: what the engine says.
        skips_cached_blocks: Option<bool> = None;
        /// Whether handles of a multimodal encoder that a client sends reach a `trtllm` worker. It reads
        /// them on trust, so only where every client is your own.
        takes_encoder_handles: bool = false;
        /// Environment variable that holds the engine's API key.
        api_key_env: Option<String> = None;
        /// File that holds the engine's API key; blanks around it do not count.
        api_key_file: Option<String> = None;
    }
}

/// What a worker is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
#[schemars(inline)]
pub enum Role {
    /// Computes prompts and hands their KV over.
    Prefill,
    /// Takes KV over and generates.
    Decode,
    /// An ordinary engine: does both on its own.
    Unified,
}

/// What a worker speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
#[schemars(inline)]
pub enum Engine {
    /// vLLM.
    Vllm,
    /// SGLang.
    Sglang,
    /// TensorRT-LLM, `trtllm-serve`.
    Trtllm,
    /// Any OpenAI-compatible server; `role: unified` only.
    Openai,
}

/// How a vLLM worker hands KV over: `kv_connector` in its `--kv-transfer-config`, which it does not tell.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
#[schemars(inline)]
pub enum KvConnector {
    /// NixlConnector.
    Nixl,
    /// MooncakeConnector.
    Mooncake,
}

/// Where a worker publishes KV events.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
#[schemars(inline)]
pub enum KvEvents {
    /// A word.
    Word(KvEventsWord),
    /// Sockets.
    At(KvStream),
}

/// A word instead of sockets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
#[schemars(inline)]
pub enum KvEventsWord {
    /// It says so itself: `vllm` on `/kv_event_sources`, `sglang` on `/server_info`; `trtllm` is asked
    /// for them on `/kv_cache_events`, which one router alone may do.
    Auto,
    /// Nowhere.
    Off,
}

section! {
    /// The sockets of a worker's KV events.
    #[schemars(extend("required" = ["endpoint"]))]
    KvStream {
        /// ZMQ endpoint of rank 0, `tcp://host:port` or `ipc:///path`; rank n is at port + n.
        endpoint: String = String::new();
        /// ZMQ endpoint of rank 0 where missed events are asked for, counted likewise.
        replay_endpoint: Option<String> = None;
        /// Topic that is subscribed to; empty takes all.
        topic: String = String::new();
        /// Who binds `endpoint`.
        mode: SocketMode = SocketMode::Connect;
    }
}

/// Who binds the event socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
#[schemars(inline)]
pub enum SocketMode {
    /// The engine binds, the router connects.
    Connect,
    /// The router binds, the engine connects.
    Bind,
}
