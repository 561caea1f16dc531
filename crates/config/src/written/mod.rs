//! What may be written: every key with its doc, default and range, once.
//!
//! Invariant: the check, the JSON Schema and the reference page are all made from this tree. A key
//! that is not given has the default beside it. What the values mean is in `settings`.

mod auth;
mod model;
mod routing;

use std::net::{IpAddr, Ipv4Addr};
use std::num::NonZeroU64;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

pub use self::auth::{Auth, ClientKey};
pub use self::model::{
    Constants, Engine, Estimates, KvConnector, KvEvents, KvEventsWord, KvStream, Model, Role, Slo,
    SocketMode, Tokenizer, Worker,
};
pub use self::routing::{
    Admission, Breaker, Cost, LocalPrefillBudget, Policy, PolicyName, Predicted, PrefillQueue,
    Routing, SessionAffinity, Shadow,
};
use crate::scalar::{OffOr, Size, Span};

/// Declares a mapping: its keys with doc, type, default and, where there is one, range.
macro_rules! section {
    (
        $(#[$meta:meta])* $name:ident {
            $(
                $(#[$key_meta:meta])*
                $key:ident: $type:ty = $default:expr $(, min $min:literal)? $(, max $max:literal)?;
            )*
        }
    ) => {
        #[derive(Clone, Debug, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
        $(#[$meta])*
        #[serde(default)]
        #[schemars(deny_unknown_fields, extend("x-order" = [$(stringify!($key)),*]))]
        pub struct $name {
            $(
                $(#[$key_meta])*
                $(#[schemars(extend("x-minimum" = $min))])?
                $(#[schemars(extend("x-maximum" = $max))])?
                pub $key: $type,
            )*
        }

        impl Default for $name {
            fn default() -> Self {
                $name { $($key: $default,)* }
            }
        }
    };
}
pub(crate) use section;

section! {
    /// The configuration of Pointsman.
    Written {
        /// Where the API is served.
        listen: Listen = Listen::default();
        /// The models and the workers that serve them.
        models: Vec<Model> = Vec::new();
        /// How requests find their path, for every model; a model's own `routing` overrides single keys.
        routing: Routing = Routing::default();
        /// Bounds on size and number.
        limits: Limits = Limits::default();
        /// Bounds on time.
        timeouts: Timeouts = Timeouts::default();
        /// Connections to the workers.
        upstream: Upstream = Upstream::default();
        /// Active health checks of the workers.
        health: Health = Health::default();
        /// Readings of the workers' load.
        metrics: Metrics = Metrics::default();
        /// What is known of the workers' KV caches.
        kv: Kv = Kv::default();
        /// What is measured of the engines, for the policy `predicted`.
        calibration: Calibration = Calibration::default();
        /// Tokenising.
        tokens: Tokens = Tokens::default();
        /// Whether replies say which way they went, `x-pointsman-path`, `x-pointsman-reason` and
        /// `x-pointsman-worker`, and what TTFT was predicted, `x-pointsman-predicted-ttft-ms`.
        response_headers: bool = true;
        /// Who may use the API. Left out, everybody who reaches the port.
        auth: Option<Auth> = None;
        /// Changes at run time.
        admin: Admin = Admin::default();
        /// The log, on standard error.
        log: Log = Log::default();
        /// How the router stops.
        shutdown: Shutdown = Shutdown::default();
    }
}

section! {
    /// What is measured of the engines, for the policy `predicted`.
    Calibration {
        /// File that keeps what was measured over a restart. One that cannot be read or does not fit is
        /// said so in the log and not used.
        state_file: Option<String> = None;
        /// Pause between two writes of it; it is also written at shutdown.
        save_interval: Span = Span::secs(60), min "1s", max "1d";
    }
}

section! {
    /// Where the API is served.
    Listen {
        /// Address to listen on; `0.0.0.0` or `::` for all.
        address: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
        /// Port to listen on; 0 takes a free one.
        port: u16 = 8000;
        /// Certificate and key to serve HTTPS with. Left out, plain HTTP is served.
        tls: Option<ListenTls> = None;
    }
}

section! {
    /// Certificate and key of a listener. The files are read again on SIGHUP.
    #[schemars(extend("required" = ["certificate", "key"]))]
    ListenTls {
        /// PEM file of the certificate and those between it and its root.
        certificate: String = String::new();
        /// PEM file of its private key.
        key: String = String::new();
        /// PEM file of the authorities that clients' certificates must come from. Left out, clients need none.
        client_ca: Option<String> = None;
    }
}

section! {
    /// Bounds on size and number.
    Limits {
        /// Largest body of a request; a larger one gets 413.
        max_body_bytes: Size = Size::mib(64), min "1KiB", max "4GiB";
        /// Largest head of a request; a larger one gets 431.
        max_header_bytes: Size = Size(64 << 10), min "8KiB", max "1MiB";
        /// Longest prompt; a longer one gets 400. `off` leaves it to the engine.
        max_prompt_tokens: OffOr<u32> = OffOr::OFF, min 1;
        /// Most requests in the router at once; further ones get 429.
        max_in_flight: u32 = 16_384, min 1;
        /// Most bytes of request bodies in the router at once; a request that does not fit gets 429.
        max_in_flight_bytes: Size = Size::mib(1024), min "64KiB", max "1024GiB";
        /// What the 429 says in `Retry-After`, rounded up to whole seconds.
        retry_after: Span = Span::secs(1), min "1s", max "1h";
        /// Most bytes of one reply of a worker that are held in memory: a prefill answer, a
        /// reading of metrics, the first events of a stream. A longer one counts as failed.
        max_reply_bytes: Size = Size::mib(64), min "64KiB", max "4GiB";
    }
}

section! {
    /// Bounds on time.
    Timeouts {
        /// From a request's arrival to the end of its reply.
        request: Span = Span::secs(3600), min "100ms", max "7d";
        /// From sending a leg that streams to the head of its reply. A reply that is not streamed has its
        /// head only when all of it is generated: `request` bounds it.
        first_byte: Span = Span::secs(120), min "10ms", max "7d";
        /// The prefill leg as a whole.
        prefill: Span = Span::secs(120), min "10ms", max "1d";
        /// Opening a connection to a worker.
        connect: Span = Span::secs(2), min "10ms", max "5m";
        /// Silence within a stream of a worker.
        stream_idle: Span = Span::secs(120), min "10ms", max "1d";
        /// Reading the head of a request, the wait for it on an open connection included.
        header_read: Span = Span::secs(75), min "10ms", max "1h";
        /// Silence while the body of a request is read; the whole of it may take ten times as long.
        body_read: Span = Span::secs(30), min "10ms", max "1h";
        /// How long a client may leave its reply unread; then the connection is closed and the request
        /// cancelled.
        reply_write: Span = Span::secs(60), min "10ms", max "24h";
    }
}

section! {
    /// Connections to the workers.
    Upstream {
        /// How long an unused connection is kept. Engines close theirs after 5 s, so it stays below.
        idle: Span = Span::secs(4), min "0s", max "4900ms";
        /// Most unused connections kept for one worker.
        max_idle_per_worker: u32 = 1024, max 65536;
        /// Trust in workers whose URL is `https://`.
        tls: UpstreamTls = UpstreamTls::default();
    }
}

section! {
    /// Trust in workers whose URL is `https://`.
    UpstreamTls {
        /// PEM file of the authorities that workers' certificates must come from. Left out, those that
        /// browsers trust.
        ca: Option<String> = None;
        /// PEM file of a certificate to show to workers that ask for one. Needs `key`.
        certificate: Option<String> = None;
        /// PEM file of its private key.
        key: Option<String> = None;
    }
}

section! {
    /// Active health checks of the workers.
    Health {
        /// Pause between two checks of one worker.
        interval: Span = Span::secs(5), min "100ms", max "1h";
        /// How long a check may take.
        timeout: Span = Span::secs(2), min "10ms", max "1m";
        /// Path that is asked for, below the worker's URL; 2xx is healthy.
        path: String = "/health".to_owned();
    }
}

section! {
    /// Readings of the workers' load.
    Metrics {
        /// Pause between two readings of a worker's `/metrics`. After five that failed, what was last
        /// read of its load does not count.
        scrape_interval: OffOr<Span> = OffOr::On(Span::secs(1)), min "100ms", max "1h";
    }
}

section! {
    /// What is known of the workers' KV caches.
    Kv {
        /// What stands in for the events of a worker that publishes none: the router's own record of
        /// what it sent there.
        approximate: Approximate = Approximate::Capacity;
        /// How long a record counts under `approximate: ttl`.
        approximate_ttl: Span = Span::secs(120), min "1s", max "7d";
        /// Most KV blocks recorded for a worker whose capacity is not known.
        approximate_blocks: NonZeroU64 = NonZeroU64::new(32_768).unwrap_or(NonZeroU64::MIN), max 16777216;
        /// URL of another router whose index this one starts with (`--restore-from`); that one must have
        /// `admin.index_snapshot: true`. Where it cannot be had, the router starts empty.
        restore_from: Option<String> = None;
        /// Environment variable that holds the key of that router's administration, if it asks for one.
        restore_api_key_env: Option<String> = None;
        /// File that holds that key; blanks around it do not count.
        restore_api_key_file: Option<String> = None;
        /// How much later than without it the router may be ready because of `restore_from`.
        restore_timeout: Span = Span::secs(10), min "100ms", max "10m";
    }
}

/// What stands in for KV events.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
#[schemars(inline)]
pub enum Approximate {
    /// Nothing: such a worker counts as empty.
    Off,
    /// The record, up to the worker's KV capacity.
    Capacity,
    /// The record, up to the worker's KV capacity and no older than `approximate_ttl`.
    Ttl,
}

section! {
    /// Tokenising.
    Tokens {
        /// Memory per model for the tokens of prefixes seen before; 0 keeps none.
        cache_bytes: Size = Size::mib(64), max "64GiB";
        /// Largest body whose text is tokenised; the prompt of a larger one is estimated. Tokenising takes
        /// some 100 bytes of memory for each byte of text.
        max_body_bytes: Size = Size::mib(2), min "1KiB", max "4GiB";
    }
}

section! {
    /// Changes at run time.
    Admin {
        /// Whether workers may be added, drained and removed through `/v1/pointsman/workers`. Whoever
        /// reaches the port may then do so.
        worker_api: bool = false;
        /// Whether other routers may start with this one's index (`/v1/pointsman/index/snapshot`). It holds
        /// the seeds of the index: whoever knows them can make prompts that are taken for each other.
        index_snapshot: bool = false;
        /// Where `/metrics` and `/v1/pointsman/*` are served, and there alone. Left out, beside the API.
        listen: Option<AdminListen> = None;
        /// SHA-256, in hex, of the key that `/v1/pointsman/*` wants; `pointsman key` makes one. Where `auth`
        /// is set and `listen` is not, `/v1/pointsman/*` is closed without it.
        key_sha256: Option<String> = None;
    }
}

section! {
    /// Where metrics, status and worker API are served apart.
    AdminListen {
        /// Address to listen on.
        address: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
        /// Port to listen on; 0 takes a free one.
        port: u16 = 8001;
        /// Certificate and key to serve HTTPS with. Left out, plain HTTP is served.
        tls: Option<ListenTls> = None;
    }
}

section! {
    /// The log, on standard error.
    Log {
        /// How a line looks.
        format: LogFormat = LogFormat::Text;
        /// Least level, or one per part: `info`, `warn,pointsman_serve=debug`.
        filter: String = "info".to_owned();
    }
}

/// How a log line looks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
#[schemars(inline)]
pub enum LogFormat {
    /// For people.
    Text,
    /// One JSON object a line.
    Json,
}

section! {
    /// How the router stops.
    Shutdown {
        /// How long running requests may take to end after SIGTERM or Ctrl-C.
        grace: Span = Span::secs(30), min "0s", max "1d";
    }
}
