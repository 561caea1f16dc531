//! Faults that a mock engine can be told to have, at its start or by `POST /mock/faults`.
//!
//! Rules hit requests, by leg and for a count; the other fields hit the whole engine. A POST
//! replaces everything, so `{}` heals the engine:
//! `{"rules": [{"fault": "status", "status": 500, "leg": "prefill", "count": 2}], "unhealthy": true}`

use serde::{Deserialize, Serialize};

/// Which requests a rule hits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Leg {
    /// Every inference request.
    #[default]
    Any,
    /// Those whose KV is for another engine: with `do_remote_decode`, or the like.
    Prefill,
    /// Those whose KV comes from another engine: with `do_remote_prefill`, or the like.
    Decode,
    /// Those with neither.
    Local,
}

/// How a connection is cut.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Cut {
    /// TCP reset.
    #[default]
    Rst,
    /// TCP end of stream, without the last chunk of the body.
    Fin,
}

/// What happens to a request that a rule hits.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "fault", rename_all = "snake_case", deny_unknown_fields)]
pub enum Action {
    /// The connection is reset as soon as the request is read.
    Refuse,
    /// This status with this body.
    Status {
        /// HTTP status.
        status: u16,
        /// Body; an OpenAI-shaped error when absent.
        #[serde(default)]
        body: Option<String>,
    },
    /// The request is read, nothing is ever answered.
    HangBeforeHeaders,
    /// Status and headers are sent, then nothing.
    HangAfterHeaders,
    /// The connection is cut before any header.
    CutBeforeHeaders {
        /// Reset or end.
        #[serde(default)]
        cut: Cut,
    },
    /// The stream is cut after this many content chunks (0: right after the headers).
    CutMidStream {
        /// Content chunks that still pass.
        after_tokens: u32,
        /// Reset or end.
        #[serde(default)]
        cut: Cut,
    },
    /// Every token comes this much later than the one before it.
    SlowTokens {
        /// Added gap in milliseconds of real time.
        delay_ms: u64,
    },
    /// The reply to a prefill leg carries no `kv_transfer_params`.
    NoParams,
    /// The KV of this prefill leg is dropped at once, as if its lease had passed.
    ExpiredKv,
    /// The connection is closed right after the reply although it promised keep-alive.
    CloseAfterReply,
    /// SGLang: the engine waits in another room than the request says; MooncakeConnector: it keeps the KV
    /// under another name.
    OtherRoom,
    /// The first token ends the answer.
    EosAtOnce,
}

/// One rule.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Fault {
    /// Requests that it hits.
    #[serde(default)]
    pub leg: Leg,
    /// How many requests it hits before it is used up; none means until cleared.
    #[serde(default)]
    pub count: Option<u32>,
    /// What happens to them.
    #[serde(flatten)]
    pub action: Action,
}

/// Faults of the KV-event stream.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct EventFaults {
    /// Chance that a published batch is lost (it stays in the replay buffer).
    pub drop_probability: f64,
    /// The next batches to lose, whatever the chance.
    pub drop_next: u32,
    /// The next batches to send twice.
    pub duplicate_next: u32,
    /// The next pairs of batches to send in the wrong order.
    pub reorder_next: u32,
    /// The replay socket does not answer.
    pub replay_silent: bool,
    /// A replay sends at most this many batches, the latest ones.
    pub replay_limit: Option<u32>,
}

/// What `/metrics` claims in place of the truth.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Lies {
    /// `vllm:kv_cache_usage_perc`.
    pub kv_usage: Option<f64>,
    /// `vllm:num_requests_running`.
    pub running: Option<u64>,
    /// `vllm:num_requests_waiting`.
    pub waiting: Option<u64>,
    /// `num_gpu_blocks` of `vllm:cache_config_info`.
    pub num_gpu_blocks: Option<u64>,
    /// `/metrics` answers 500.
    pub fail: bool,
}

/// All faults of one mock engine.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Faults {
    /// Rules, the first that hits a request wins.
    pub rules: Vec<Fault>,
    /// The API's listener is closed and its connections are reset; `/mock/...` stays on the control port.
    pub down: bool,
    /// `/health` answers 503.
    pub unhealthy: bool,
    /// Nobody answers on the KV side channel, so decode engines cannot pull from here.
    pub side_channel_down: bool,
    /// Nobody answers at the bootstrap server (MooncakeConnector).
    pub bootstrap_down: bool,
    /// The KV-event stream.
    pub events: EventFaults,
    /// `/metrics`.
    pub metrics: Lies,
    /// Done once when the faults are set: the publisher restarts (cache empty, sequence from 0).
    pub restart_publisher: bool,
}
