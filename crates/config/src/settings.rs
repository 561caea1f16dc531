//! What the configuration means: values parsed once into types that cannot be wrong.
//!
//! Invariant: a `Settings` that `load` handed out is complete and consistent; nothing here is
//! optional because somebody forgot it. How keys are spelt and defaulted is in `written`.

use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;
use std::num::{NonZeroU16, NonZeroU32, NonZeroU64, NonZeroUsize};
use std::path::PathBuf;
use std::time::Duration;

pub use pointsman_brain::Role;

/// Everything that the router was told.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Where the API is served.
    pub listen: SocketAddr,
    /// What it is served with; `None` = plain HTTP.
    pub listen_tls: Option<ListenTls>,
    /// Who may use it; `None` = everybody.
    pub auth: Option<Vec<ClientKey>>,
    /// Where metrics, status and worker API are served apart; `None` = beside the API.
    pub admin: Option<AdminListen>,
    /// The key that status and worker API want; `None` = none.
    pub admin_key: Option<KeyHash>,
    /// The models in the order written. Names, aliases and adapters are unique over all of them.
    pub models: Vec<Model>,
    /// Bounds on size and number.
    pub limits: Limits,
    /// Bounds on time.
    pub timeouts: Timeouts,
    /// Connections to the engines.
    pub upstream: Upstream,
    /// Active health checks.
    pub health: Health,
    /// Pause between two readings of an engine's `/metrics`; `None` = never read.
    pub scrape_interval: Option<Duration>,
    /// What the router keeps of the workers' KV caches.
    pub kv: Kv,
    /// Where what was measured is kept over a restart; `None` = nowhere.
    pub calibration: Option<CalibrationFile>,
    /// Memory for tokens of prefixes seen before, per model.
    pub token_cache_bytes: usize,
    /// Bytes of a body whose text is tokenised; the prompt of a larger one is estimated.
    pub tokenised_body_bytes: usize,
    /// Whether replies carry `x-pointsman-path`, `-reason` and `-worker`.
    pub response_headers: bool,
    /// Logging.
    pub log: Log,
    /// Whether workers may be added, drained and removed over HTTP.
    pub worker_api: bool,
    /// Whether the index may be had over HTTP.
    pub index_snapshot: bool,
    /// How long running requests may take to end after SIGTERM.
    pub shutdown_grace: Duration,
}

/// SHA-256 of an API key.
pub type KeyHash = [u8; 32];

/// Certificate and key of a listener, as PEM files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListenTls {
    /// The certificate and those between it and its root.
    pub certificate: PathBuf,
    /// Its private key.
    pub key: PathBuf,
    /// The authorities of clients' certificates; `None` = clients need none.
    pub client_ca: Option<PathBuf>,
}

/// A listener of its own for metrics, status and worker API.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AdminListen {
    /// Where.
    pub addr: SocketAddr,
    /// With what; `None` = plain HTTP.
    pub tls: Option<ListenTls>,
}

/// Trust between the router and workers with `https://` URLs, as PEM files.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UpstreamTls {
    /// The authorities of workers' certificates; `None` = the public ones.
    pub ca: Option<PathBuf>,
    /// Certificate and private key to show to workers.
    pub identity: Option<(PathBuf, PathBuf)>,
}

/// One client's key and what it may do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClientKey {
    /// Unique, as is the hash.
    pub name: String,
    /// What the key is known by.
    pub sha256: KeyHash,
    /// Names of models; `None` = all.
    pub models: Option<Vec<String>>,
    /// Requests a minute.
    pub requests_per_minute: Option<NonZeroU32>,
    /// Tokens a minute, of prompts and replies.
    pub tokens_per_minute: Option<NonZeroU32>,
    /// Requests at once.
    pub max_in_flight: Option<NonZeroU32>,
    /// What its requests may ask for in `x-pointsman-priority`.
    pub max_priority: i8,
}

/// One base model and everything that serves it.
#[derive(Clone, Debug)]
pub struct Model {
    /// The name clients send.
    pub name: String,
    /// Further names of the same weights.
    pub aliases: Vec<String>,
    /// Names of LoRA adapters on top of this model.
    pub adapters: Vec<String>,
    /// How a prompt becomes tokens.
    pub tokenizer: Tokenizer,
    /// Assumed length of what a prompt holds besides text.
    pub estimates: Estimates,
    /// How its requests find their path, as the brain takes it.
    pub routing: pointsman_brain::Settings,
    /// What names a session; `Off` where `routing.session_affinity` is false.
    pub session: Session,
    /// The header that names a request's tenant where it has no API key.
    pub tenant: Option<http::HeaderName>,
    /// The workers in the order written.
    pub workers: Vec<Worker>,
}

/// How a prompt becomes tokens.
#[derive(Clone, Debug, PartialEq)]
pub enum Tokenizer {
    /// `tokenizer.json` and chat template in this directory.
    Dir(PathBuf),
    /// The tiny model that the embedded engines use.
    Builtin,
    /// The engine's own `/tokenize`.
    Engine,
    /// The prompt's bytes divided by this; above 0.
    Estimate {
        /// Bytes that one token is taken to cover.
        bytes_per_token: f64,
    },
}

/// Assumed length in tokens of one item of each kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Estimates {
    /// One image.
    pub image_tokens: u32,
    /// One piece of audio.
    pub audio_tokens: u32,
    /// One video.
    pub video_tokens: u32,
    /// One embedding or anything else that is not text.
    pub other_tokens: u32,
}

/// What names a session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Session {
    /// Nothing: no session affinity.
    Off,
    /// The value of this request header.
    Header(http::HeaderName),
    /// The body's `user` field.
    User,
    /// The first tokens of the prompt.
    Prefix {
        /// How many tokens of the prompt count.
        tokens: NonZeroU32,
    },
}

/// One engine endpoint.
#[derive(Clone, Debug, PartialEq)]
pub struct Worker {
    /// Unique over all models; host, port and base path where none was written.
    pub name: String,
    /// `http[s]://host[:port][/base]`, without a trailing slash after the base, query or user.
    pub url: http::Uri,
    /// What it is for.
    pub role: Role,
    /// What it speaks.
    pub engine: Engine,
    /// Whether a decode worker may run a whole request on its own. Always `Yes` for `Unified`, never
    /// for `Prefill`.
    pub local_prefill: Detect,
    /// Data-parallel ranks behind the URL, addressed 0 to n-1.
    pub ranks: NonZeroU16,
    /// Where its KV events come from.
    pub kv_events: KvEvents,
    /// Free labels.
    pub labels: BTreeMap<String, String>,
    /// Tokens per KV block, where known beforehand.
    pub block_size: Option<NonZeroU32>,
    /// KV blocks per rank, where known beforehand.
    pub capacity_blocks: Option<NonZeroU64>,
    /// Token budget of one engine step, where known beforehand.
    pub max_num_batched_tokens: Option<NonZeroU32>,
    /// Whether prompts may be sent as token ids.
    pub takes_prompt_ids: Detect,
    /// How long a prefilled KV waits to be fetched.
    pub kv_lease: Duration,
    /// How vLLM hands KV over.
    pub kv_connector: KvConnector,
    /// Host where decode workers meet it; `None` = that of `url`.
    pub bootstrap_host: Option<String>,
    /// Port where they do; `None` = what it says itself.
    pub bootstrap_port: Option<NonZeroU16>,
    /// Whether it fetches only the KV that it lacks.
    pub skips_cached_blocks: Detect,
    /// Whether a client's encoder handles reach it.
    pub takes_encoder_handles: bool,
    /// Sent as `Authorization: Bearer ...`.
    pub api_key: Option<Secret>,
}

/// What a worker speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Engine {
    /// vLLM with a KV connector.
    Vllm,
    /// SGLang.
    Sglang,
    /// TensorRT-LLM.
    Trtllm,
    /// Any OpenAI-compatible server; `Unified` only.
    OpenAi,
}

impl Engine {
    /// As it is written in a file.
    pub const fn as_str(self) -> &'static str {
        match self {
            Engine::Vllm => "vllm",
            Engine::Sglang => "sglang",
            Engine::Trtllm => "trtllm",
            Engine::OpenAi => "openai",
        }
    }
}

/// How a vLLM worker hands KV over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvConnector {
    /// NixlConnector: the prefill worker's answer says where the KV is.
    Nixl,
    /// MooncakeConnector: both legs name a transfer.
    Mooncake,
}

/// A capability that the engine may tell by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Detect {
    /// Ask the engine.
    Auto,
    /// It is there.
    Yes,
    /// It is not.
    No,
}

impl Detect {
    /// What was written, else what the engine says, if anything.
    #[must_use]
    pub fn or(self, learned: Option<bool>) -> Option<bool> {
        match self {
            Detect::Auto => learned,
            Detect::Yes => Some(true),
            Detect::No => Some(false),
        }
    }
}

/// Where a worker's KV events come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KvEvents {
    /// It publishes none.
    Off,
    /// The engine tells its endpoints.
    Auto,
    /// These sockets.
    At(KvStream),
}

/// The sockets of one KV event publisher.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvStream {
    /// The publisher of rank 0, `tcp://host:port` or `ipc:///path`.
    pub endpoint: Endpoint,
    /// Where missed batches can be asked for.
    pub replay: Option<Endpoint>,
    /// Topic to subscribe to; empty = all.
    pub topic: String,
    /// Who binds the event socket.
    pub mode: SocketMode,
}

/// Who binds the event socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SocketMode {
    /// The engine binds, the router connects.
    Connect,
    /// The router binds, the engine connects.
    Bind,
}

/// A ZMQ endpoint.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Endpoint {
    /// `tcp://host:port`
    Tcp {
        /// Host name or address, IPv6 without brackets; `*` where the router binds.
        host: String,
        /// Port.
        port: u16,
    },
    /// `ipc:///path`
    Ipc(PathBuf),
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Endpoint::Tcp { host, port } if host.contains(':') => {
                write!(f, "tcp://[{host}]:{port}")
            }
            Endpoint::Tcp { host, port } => write!(f, "tcp://{host}:{port}"),
            Endpoint::Ipc(path) => write!(f, "ipc://{}", path.display()),
        }
    }
}

/// Bounds on size and number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of a request's body.
    pub max_body_bytes: NonZeroUsize,
    /// Bytes of a request's head.
    pub max_header_bytes: NonZeroUsize,
    /// Tokens of one prompt; `None` leaves it to the engine.
    pub max_prompt_tokens: Option<NonZeroU32>,
    /// Requests in the router at once; more get 429.
    pub max_in_flight: NonZeroUsize,
    /// Bytes of request bodies in the router at once; more get 429.
    pub max_in_flight_bytes: NonZeroUsize,
    /// What the 429 says in `Retry-After`.
    pub retry_after: Duration,
    /// Bytes of an engine's reply that are ever held back or read as a whole.
    pub max_reply_bytes: NonZeroUsize,
}

/// Bounds on time; none is zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timeouts {
    /// A request from its first byte to the end of its reply.
    pub request: Duration,
    /// From sending a leg to the first byte of the engine's reply.
    pub first_byte: Duration,
    /// The whole prefill leg.
    pub prefill: Duration,
    /// Opening a connection to an engine.
    pub connect: Duration,
    /// Silence within a stream of the engine.
    pub stream_idle: Duration,
    /// Reading a request's head.
    pub header_read: Duration,
    /// Silence while a request's body is read.
    pub body_read: Duration,
    /// A client that does not read its reply.
    pub reply_write: Duration,
}

/// Connections to the engines.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Upstream {
    /// How long an unused connection is kept; below the engines' own 5 s.
    pub idle: Duration,
    /// Unused connections kept per worker.
    pub max_idle_per_worker: usize,
    /// Trust in workers with `https://` URLs.
    pub tls: UpstreamTls,
}

/// Active health checks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Health {
    /// Pause between two checks of one worker.
    pub interval: Duration,
    /// How long one check may take.
    pub timeout: Duration,
    /// Path asked for, below the worker's URL.
    pub path: http::uri::PathAndQuery,
}

/// What the router keeps of the workers' KV caches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kv {
    /// What stands in for a worker without events.
    pub approximate: Approximate,
    /// Whose index the router starts with; `None` = it starts empty.
    pub restore: Option<Restore>,
}

/// The file that keeps what was measured of the engines.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CalibrationFile {
    /// Where it is.
    pub path: PathBuf,
    /// Pause between two writes.
    pub every: Duration,
}

/// The router whose index another one starts with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Restore {
    /// Its URL.
    pub from: http::Uri,
    /// What it asks of those that administer it.
    pub api_key: Option<Secret>,
    /// How long all of it may take.
    pub timeout: Duration,
}

/// How placements stand in for the events of a worker that publishes none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Approximate {
    /// Not at all: such a worker counts as empty.
    Off,
    /// Its placements are kept, up to its KV capacity.
    Record {
        /// How long each is kept; `None` = until capacity pushes it out.
        ttl: Option<Duration>,
        /// Blocks kept where the worker's capacity is unknown.
        unknown_blocks: NonZeroU64,
    },
}

/// Logging.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Log {
    /// How a line looks.
    pub format: LogFormat,
    /// Level or `tracing` filter, such as `info` or `warn,pointsman_serve=debug`.
    pub filter: String,
}

/// How a log line looks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogFormat {
    /// For people.
    Text,
    /// One JSON object a line.
    Json,
}

/// A value that never shows in logs.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    /// What a variable or file holds; blanks around it do not count.
    ///
    /// # Errors
    /// Where that is no key, in words that follow the name of the place.
    pub fn read(text: &str) -> Result<Self, &'static str> {
        let text = text.trim();
        if text.is_empty() || !text.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err("holds no key; must hold visible ASCII characters without blanks");
        }
        Ok(Secret(text.to_owned()))
    }

    /// The value itself, for the one place that sends it.
    pub fn reveal(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(***)")
    }
}
