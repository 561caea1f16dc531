//! Where decode workers meet a prefill worker, and what its bootstrap server says of its engines.
//!
//! Invariant: an engine's name is forgotten when its worker goes down or may be another one; until then a
//! server that is silent for once changes nothing: decode workers ask it only for engines that are new to
//! them.

use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::time::Duration;

use http::{HeaderMap, Uri};
use pointsman_config::{Engine, KvConnector, Role};
use pointsman_wire::dialect::Meeting;
use pointsman_wire::discovery::{self, DiscoveryError};

use crate::fleet::Worker;
use crate::receive::random_number;
use crate::upstream::Upstream;

/// Where prefill workers are met unless somebody says otherwise, SGLang's as vLLM's.
const USUAL_PORT: u16 = 8998;

/// Bytes of an answer that are read: a rank has as many addresses as it has GPUs.
const REPLY_BYTES: usize = 1024 * 1024;

/// Where decode workers meet a prefill worker.
pub(crate) struct Place {
    host: String,
    port: u16,
    ranks: NonZeroU32,
    engine_id: Option<String>,
}

impl Place {
    /// The place of one rank of a worker.
    pub(crate) fn of(worker: &Worker, rank: Option<u32>) -> Place {
        let s = &worker.settings;
        let learned = worker.learned.load();
        let host = || s.url.host().unwrap_or_default().trim_matches(['[', ']']).to_owned();
        let port = s.bootstrap_port.map(u16::from).or(learned.bootstrap_port);
        Place {
            host: s.bootstrap_host.clone().unwrap_or_else(host),
            port: port.unwrap_or(USUAL_PORT),
            ranks: s.ranks.into(),
            engine_id: learned.engine_ids.get(&rank.unwrap_or(0)).cloned(),
        }
    }

    /// A meeting of its own there.
    pub(crate) fn meeting(&self) -> Meeting<'_> {
        let Place { host, port, ranks, engine_id } = self;
        let (number, engine_id) = (random_number(), engine_id.as_deref());
        Meeting { host, port: *port, number, prefill_ranks: *ranks, engine_id }
    }

    /// Where its bootstrap server tells the names of its engines.
    fn query(&self) -> String {
        let Place { host, port, .. } = self;
        match host.contains(':') {
            true => format!("http://[{host}]:{port}/query"),
            false => format!("http://{host}:{port}/query"),
        }
    }
}

/// Whether decode workers have to be told the names of its engines, which its bootstrap server knows.
pub(crate) fn has_server(worker: &Worker) -> bool {
    let s = &worker.settings;
    s.engine == Engine::Vllm && s.kv_connector == KvConnector::Mooncake && s.role == Role::Prefill
}

/// The name of each rank's engine, if the bootstrap server answers.
pub(crate) async fn engine_ids(
    upstream: &Upstream,
    worker: &Worker,
    wait: Duration,
) -> Option<Result<BTreeMap<u32, String>, DiscoveryError>> {
    let uri: Uri = Place::of(worker, None).query().parse().ok()?;
    // Without the engine's key: it is another server.
    match upstream.get(uri, HeaderMap::new(), wait, REPLY_BYTES).await {
        Ok((200, body)) => Some(discovery::mooncake_engines(&body)),
        _ => None,
    }
}

/// Whether decode workers can fetch what this rank computed.
pub(crate) fn can_be_met(worker: &Worker, rank: Option<u32>) -> bool {
    !has_server(worker) || worker.learned.load().engine_ids.contains_key(&rank.unwrap_or(0))
}

/// Why they cannot, and what to do.
pub(crate) fn problem(worker: &Worker, rank: Option<u32>) -> Option<String> {
    if can_be_met(worker, rank) {
        return None;
    }
    let (name, query) = (worker.name(), Place::of(worker, rank).query());
    Some(if worker.learned.load().engine_ids.is_empty() {
        format!(
            "`{name}` can hand no prompts over, because no Mooncake engine is known at {query}: start it \
             with MooncakeConnector as `kv_producer`, and set bootstrap_host and bootstrap_port to where \
             VLLM_MOONCAKE_BOOTSTRAP_PORT is"
        )
    } else {
        format!(
            "`{name}` can hand no prompts of rank {} over, because {query} does not name its engine: set \
             `ranks` to how many there are",
            rank.unwrap_or(0)
        )
    })
}
