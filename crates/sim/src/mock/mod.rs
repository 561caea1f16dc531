//! A mock engine: an HTTP server of one engine's dialect, with its KV events, over the engine model.
//!
//! As strict as the real engine where the real one is silently wrong: what a router may not do is
//! recorded as a violation (`GET /mock/stats`). It runs on the caller's tokio runtime.

mod app;
mod body;
mod config;
mod connection;
mod control;
mod embeddings;
mod errors;
mod faults;
mod handoff;
mod histogram;
mod inference;
mod ledger;
mod metrics;
mod mooncake;
mod plan;
mod polled;
mod prompt;
mod publisher;
mod rank;
mod reply;
mod request;
mod routes;
mod run;
mod scale_out;
mod sglang;
mod shape;
mod side;
mod sockets;
mod start;
mod stream;
mod text;
mod trtllm;

pub use config::{
    Connector, Dialect, EngineConfig, EventEncoding, HashForm, KvEvents, KvSocket, LoadFailure,
    OnViolation, Role,
};
pub use faults::{Action, Cut, EventFaults, Fault, Faults, Leg, Lies};

use std::net::SocketAddr;
use std::sync::Arc;

use app::App;

/// Why a mock engine could not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// A socket could not be bound.
    #[error("cannot bind the {what} socket of the mock engine to {addr}: {source}")]
    Bind {
        /// Which socket.
        what: &'static str,
        /// Where.
        addr: String,
        /// The system's reason.
        source: std::io::Error,
    },
    /// A setting makes no sense.
    #[error("mock engine setting `{key}`: {reason}")]
    Setting {
        /// The field of [`EngineConfig`].
        key: &'static str,
        /// What is wrong and what is allowed.
        reason: String,
    },
}

/// A running mock engine. Dropping it without [`MockEngine::stop`] ends it without waiting.
pub struct MockEngine {
    app: Arc<App>,
    addr: SocketAddr,
    control: SocketAddr,
    events: Vec<EventEndpoints>,
}

/// Where a rank's events are, as a subscriber writes it.
struct EventEndpoints {
    publish: String,
    replay: String,
}

impl MockEngine {
    /// Binds every socket and serves until [`MockEngine::stop`].
    ///
    /// # Errors
    /// When a socket cannot be bound or a setting makes no sense.
    pub async fn start(config: EngineConfig) -> Result<MockEngine, StartError> {
        start::start(config).await
    }

    /// Base URL of the OpenAI API, without a trailing slash.
    #[must_use]
    pub fn url(&self) -> String {
        format!("http://{}", self.addr)
    }

    /// Address of the OpenAI API.
    #[must_use]
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Base URL of the `/mock/...` routes that stays up while the `down` fault closes the API.
    #[must_use]
    pub fn control_url(&self) -> String {
        format!("http://{}", self.control)
    }

    /// ZMQ endpoint of the KV events of rank 0, as a subscriber writes it; none without events.
    #[must_use]
    pub fn kv_endpoint(&self) -> Option<&str> {
        self.kv_endpoint_of(0)
    }

    /// The same for one data-parallel rank.
    #[must_use]
    pub fn kv_endpoint_of(&self, rank: usize) -> Option<&str> {
        self.events.get(rank).map(|sockets| sockets.publish.as_str())
    }

    /// ZMQ endpoint of the replay socket of rank 0; none without events.
    #[must_use]
    pub fn replay_endpoint(&self) -> Option<&str> {
        self.replay_endpoint_of(0)
    }

    /// The same for one data-parallel rank.
    #[must_use]
    pub fn replay_endpoint_of(&self, rank: usize) -> Option<&str> {
        self.events.get(rank).map(|sockets| sockets.replay.as_str())
    }

    /// Replaces all faults, as `POST /mock/faults` does.
    pub fn set_faults(&self, faults: Faults) {
        self.app.set_faults(faults);
    }

    /// Port where decode engines meet it (SGLang, or Mooncake's bootstrap server), or of its KV side
    /// channel.
    #[must_use]
    pub fn bootstrap_port(&self) -> u16 {
        self.app.bootstrap_port.unwrap_or(self.app.side_port)
    }

    /// What `GET /mock/stats` answers.
    #[must_use]
    pub fn stats(&self) -> serde_json::Value {
        control::stats(&self.app)
    }

    /// What `GET /mock/cache` answers.
    #[must_use]
    pub fn cache(&self) -> serde_json::Value {
        control::cache(&self.app)
    }

    /// Closes every socket and connection and waits until all tasks have ended.
    pub async fn stop(self) {
        self.app.stop.cancel();
        self.app.tasks.close();
        self.app.tasks.wait().await;
    }
}

impl Drop for MockEngine {
    fn drop(&mut self) {
        self.app.stop.cancel();
    }
}
