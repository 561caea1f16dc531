//! A worker: its URL, its event sockets, its key.

use std::num::{NonZeroU16, NonZeroU32, NonZeroU64};
use std::path::PathBuf;

use http::Uri;

use super::Resolver;
use super::models::{default_events, role};
use crate::settings::{
    Detect, Endpoint, Engine, KvConnector, KvEvents, KvStream, SocketMode, Worker,
};
use crate::tree::Key;
use crate::written;

const URL: &str = "an http:// or https:// URL, such as http://10.0.0.5:8100";

impl Resolver<'_> {
    /// A worker; `None` after a problem.
    pub(super) fn worker(&mut self, key: &Key, written: &written::Worker) -> Option<Worker> {
        let url = parse_url(&written.url);
        if let Err(must) = url {
            self.refuse(&key.name("url"), &written.url, must);
        }
        if written.name.as_ref().is_some_and(|name| name.trim().is_empty()) {
            self.problem(&key.name("name"), "empty; must be a name or left out");
        }
        let local_prefill = self.local_prefill(key, written);
        self.check_engine(key, written);
        let kv_events = self.kv_events(&key.name("kv_events"), written);
        let api_key = self.secret(
            ("api_key_env", &written.api_key_env),
            ("api_key_file", &written.api_key_file),
            key,
        );
        let url = url.ok()?;
        Some(Worker {
            name: written.name.clone().unwrap_or_else(|| place(&url)),
            url,
            role: role(written.role),
            engine: match written.engine {
                written::Engine::Vllm => Engine::Vllm,
                written::Engine::Sglang => Engine::Sglang,
                written::Engine::Trtllm => Engine::Trtllm,
                written::Engine::Openai => Engine::OpenAi,
            },
            local_prefill,
            ranks: NonZeroU16::new(written.ranks)?,
            kv_events: kv_events?,
            labels: written.labels.clone(),
            block_size: written.block_size.and_then(NonZeroU32::new),
            capacity_blocks: written.capacity_blocks.and_then(NonZeroU64::new),
            max_num_batched_tokens: written.max_num_batched_tokens.and_then(NonZeroU32::new),
            takes_prompt_ids: detect(written.takes_prompt_ids),
            kv_lease: written.kv_lease.0,
            kv_connector: match written.kv_connector {
                written::KvConnector::Nixl => KvConnector::Nixl,
                written::KvConnector::Mooncake => KvConnector::Mooncake,
            },
            bootstrap_host: written.bootstrap_host.clone(),
            bootstrap_port: written.bootstrap_port.and_then(NonZeroU16::new),
            skips_cached_blocks: detect(written.skips_cached_blocks),
            takes_encoder_handles: written.takes_encoder_handles,
            api_key: api_key?,
        })
    }

    fn local_prefill(&mut self, key: &Key, written: &written::Worker) -> Detect {
        let decode = written.role == written::Role::Decode;
        if written.local_prefill.is_some() && !decode {
            let message = "is for `role: decode` only; must be left out";
            self.problem(&key.name("local_prefill"), message);
        }
        match (written.role, written.engine, written.local_prefill) {
            (written::Role::Prefill, ..) => Detect::No,
            (written::Role::Unified, ..) => Detect::Yes,
            (written::Role::Decode, written::Engine::Sglang, set) => detect(set),
            (written::Role::Decode, _, set) => detect(set.or(Some(true))),
        }
    }

    fn check_engine(&mut self, key: &Key, written: &written::Worker) {
        let (engine, role) = (written.engine, written.role);
        if engine == written::Engine::Openai && role != written::Role::Unified {
            let message = "`engine: openai` hands no KV over; must be `unified`";
            self.problem(&key.name("role"), message);
        }
        let ranked = matches!(engine, written::Engine::Vllm | written::Engine::Sglang);
        if written.ranks > 1 && !ranked {
            let name = if engine == written::Engine::Openai { "openai" } else { "trtllm" };
            let message = format!("`engine: {name}` has no ranks to address; must be 1");
            self.problem(&key.name("ranks"), message);
        }
        let mooncake = written.kv_connector == written::KvConnector::Mooncake;
        if mooncake && (engine != written::Engine::Vllm || role == written::Role::Unified) {
            let message = "is for `engine: vllm` that hands KV over only; must be left out";
            self.problem(&key.name("kv_connector"), message);
        }
        let meets = role == written::Role::Prefill
            && (engine == written::Engine::Sglang || engine == written::Engine::Vllm && mooncake);
        for (name, given) in [
            ("bootstrap_host", written.bootstrap_host.is_some()),
            ("bootstrap_port", written.bootstrap_port.is_some()),
        ] {
            if given && !meets {
                let message = "is for `role: prefill` with `engine: sglang` or `kv_connector: mooncake` \
                               only; must be left out";
                self.problem(&key.name(name), message);
            }
        }
        if written.takes_encoder_handles && engine != written::Engine::Trtllm {
            let message = "is for `engine: trtllm` only; must be left out";
            self.problem(&key.name("takes_encoder_handles"), message);
        }
        if engine == written::Engine::Trtllm
            && matches!(written.kv_events, Some(written::KvEvents::At(_)))
        {
            let message = "`engine: trtllm` has no event sockets; must be `auto` or `off`";
            self.problem(&key.name("kv_events"), message);
        }
    }

    fn kv_events(&mut self, key: &Key, written: &written::Worker) -> Option<KvEvents> {
        let at = match &written.kv_events {
            None => return Some(default_events(written.engine)),
            Some(written::KvEvents::Word(written::KvEventsWord::Off)) => {
                return Some(KvEvents::Off);
            }
            Some(written::KvEvents::Word(written::KvEventsWord::Auto)) => {
                return Some(KvEvents::Auto);
            }
            Some(written::KvEvents::At(at)) => at,
        };
        let mode = match at.mode {
            written::SocketMode::Connect => SocketMode::Connect,
            written::SocketMode::Bind => SocketMode::Bind,
        };
        let endpoint = self.endpoint(&key.name("endpoint"), &at.endpoint, mode, written.ranks);
        let replay = at.replay_endpoint.as_ref().map(|text| {
            self.endpoint(&key.name("replay_endpoint"), text, SocketMode::Connect, written.ranks)
        });
        let replay = match replay {
            Some(replay) => Some(replay?),
            None => None,
        };
        Some(KvEvents::At(KvStream { endpoint: endpoint?, replay, topic: at.topic.clone(), mode }))
    }

    fn endpoint(
        &mut self,
        key: &Key,
        text: &str,
        mode: SocketMode,
        ranks: u16,
    ) -> Option<Endpoint> {
        let endpoint = parse_endpoint(text);
        match &endpoint {
            None => {
                self.refuse(key, text, "a ZMQ endpoint, tcp://host:port or ipc:///path");
                return None;
            }
            Some(Endpoint::Tcp { host, .. }) if host == "*" && mode == SocketMode::Connect => {
                let must = "the engine's host where the router connects; `*` is for binding";
                self.refuse(key, text, must);
                return None;
            }
            Some(Endpoint::Tcp { port, .. }) if port.checked_add(ranks - 1).is_none() => {
                self.refuse(key, text, "an endpoint whose port leaves room for every rank");
                return None;
            }
            Some(Endpoint::Ipc(_)) if ranks > 1 => {
                self.refuse(key, text, "a tcp:// endpoint for a worker with several ranks");
                return None;
            }
            Some(_) => {}
        }
        endpoint
    }
}

fn detect(written: Option<bool>) -> Detect {
    match written {
        None => Detect::Auto,
        Some(true) => Detect::Yes,
        Some(false) => Detect::No,
    }
}

/// A worker's URL without trailing slashes, or what it must be instead.
pub(super) fn parse_url(text: &str) -> Result<Uri, &'static str> {
    let trimmed = text.trim_end_matches('/');
    if trimmed.ends_with("/v1") {
        return Err("the URL without /v1, such as http://10.0.0.5:8100");
    }
    let uri: Uri = trimmed.parse().map_err(|_| URL)?;
    let authority = uri.authority().ok_or(URL)?;
    let plain = matches!(uri.scheme_str(), Some("http" | "https"))
        && uri.query().is_none()
        && !trimmed.contains(['#', '@'])
        && !authority.host().is_empty()
        // A port out of range is none to the library.
        && uri.port_u16().map_or(authority.as_str() == authority.host(), |port| port != 0);
    if plain { Ok(uri) } else { Err(URL) }
}

/// Host, port and base path: what makes two URLs one place, and the name of a worker without one.
pub(super) fn place(url: &Uri) -> String {
    let host = url.host().unwrap_or_default().to_lowercase();
    let base = url.path().trim_end_matches('/');
    let usual = if url.scheme_str() == Some("https") { 443 } else { 80 };
    format!("{host}:{}{base}", url.port_u16().unwrap_or(usual))
}

/// Reads `tcp://host:port` and `ipc:///path`.
fn parse_endpoint(text: &str) -> Option<Endpoint> {
    if let Some(path) = text.strip_prefix("ipc://") {
        return (!path.is_empty()).then(|| Endpoint::Ipc(PathBuf::from(path)));
    }
    let (host, port) = text.strip_prefix("tcp://")?.rsplit_once(':')?;
    let port = port.parse().ok().filter(|port| *port != 0)?;
    let host = match host.strip_prefix('[') {
        Some(rest) => rest.strip_suffix(']')?,
        None if host.contains(':') => return None,
        None => host,
    };
    let known = |c: char| c.is_ascii_alphanumeric() || "-._*:%".contains(c);
    let right = !host.is_empty() && host.chars().all(known);
    right.then(|| Endpoint::Tcp { host: host.to_owned(), port })
}
