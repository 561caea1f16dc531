//! Reads what a worker says of itself: `/v1/models`, `/kv_event_sources`, `/version`.

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

/// Reads `/v1/models`.
pub fn models(body: &[u8]) -> Result<Vec<ServedModel>, DiscoveryError> {
    let _ = body;
    Ok(Vec::new())
}

/// Reads `/kv_event_sources`; empty if events are off.
pub fn event_sources(body: &[u8]) -> Result<Vec<EventSource>, DiscoveryError> {
    let _ = body;
    Ok(Vec::new())
}

/// An engine's version, as far as it is numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version(pub u32, pub u32, pub u32);

/// Reads `/version`.
pub fn version(body: &[u8]) -> Result<Version, DiscoveryError> {
    let _ = body;
    Ok(Version(0, 0, 0))
}
