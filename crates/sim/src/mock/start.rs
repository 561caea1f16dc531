//! Binds a mock engine's sockets and starts its tasks.

use std::net::SocketAddr;
use std::sync::{Arc, OnceLock};
use std::time::{SystemTime, UNIX_EPOCH};

use pointsman_tokens::{CacheLimits, Model};
use tokio::net::TcpListener;

use super::app::{App, Parts};
use super::config::{Dialect, EngineConfig, EventEncoding, KvEvents, KvSocket};
use super::connection::{Face, serve_http, serve_side_channel};
use super::handoff::Registry;
use super::mooncake;
use super::publisher::Publisher;
use super::rank::Rank;
use super::sockets::{self, Publishing};
use super::text::Words;
use super::{EventEndpoints, MockEngine, StartError};
use crate::engine::Spec;
use crate::rng::mix;

/// One rank's event sockets, bound.
struct RankSockets {
    publishing: Publishing,
    replay: TcpListener,
    endpoints: EventEndpoints,
    /// What `/kv_event_sources` says of them.
    source: (String, String),
}

pub(super) async fn start(config: EngineConfig) -> Result<MockEngine, StartError> {
    config.validate()?;
    let (model, words) = match &config.tokenizer {
        Some(model) => (model.clone(), Arc::new(Words::of(model))),
        None => builtin()?,
    };
    if words.is_empty() {
        let reason = "the model has no plain words to answer with".to_owned();
        return Err(StartError::Setting { key: "tokenizer", reason });
    }
    let api = bind("API", &config, config.port).await?;
    let control = bind("control", &config, 0).await?;
    let bootstrap = match mooncake::has_server(&config) {
        true => Some(bind("bootstrap", &config, config.bootstrap_port).await?),
        false => None,
    };
    let side_port = if bootstrap.is_some() { 0 } else { config.bootstrap_port };
    let side = bind("KV side channel", &config, side_port).await?;
    let mut event_sockets = Vec::new();
    let publishes = config.dialect != Dialect::Trtllm;
    if let Some(events) = config.kv_events.as_ref().filter(|_| publishes) {
        for rank in 0..config.ranks {
            event_sockets.push(bind_events(&config, events, rank).await?);
        }
    }
    let (addr, control_addr) = (local("API", &api)?, local("control", &control)?);
    let side_port = local("KV side channel", &side)?.port();
    let bootstrap_addr = bootstrap.as_ref().map(|it| local("bootstrap", it)).transpose()?;
    let registry = Arc::new(Registry::new(engine_id(&config, addr.port())));
    let publishers = publishers(&config);
    let ranks = ranks(&config, &publishers, &registry);
    registry.set_ranks(&ranks);
    let sources = event_sockets.iter().map(|sockets| sockets.source.clone());
    let event_sources = sources.collect();
    let app = Arc::new(App::new(Parts {
        config,
        model,
        words,
        ranks,
        publishers,
        registry,
        event_sources,
        side_port,
        bootstrap_port: bootstrap_addr.map(|addr| addr.port()),
    }));
    for rank in &app.ranks {
        app.tasks.spawn(rank.clone().drive(app.stop.clone()));
    }
    let mut events = Vec::new();
    for (sockets, publisher) in event_sockets.into_iter().zip(&app.publishers) {
        let RankSockets { publishing, replay, endpoints, .. } = sockets;
        sockets::serve(publisher, publishing, replay, &app.tasks, &app.stop);
        events.push(endpoints);
    }
    let bootstrap = bootstrap.map(|listener| (listener, Face::Bootstrap));
    let faces = [(api, Face::Api), (control, Face::Control)].into_iter().chain(bootstrap);
    for (listener, face) in faces {
        let serve = serve_http(app.clone(), listener, face);
        app.tasks.spawn(app.stop.clone().run_until_cancelled_owned(serve));
    }
    let serve = serve_side_channel(app.clone(), side);
    app.tasks.spawn(app.stop.clone().run_until_cancelled_owned(serve));
    Ok(MockEngine { app, addr, control: control_addr, events })
}

/// A model and the words to answer with.
type Spoken = (Arc<Model>, Arc<Words>);

/// The built-in model, read once for all engines of the process.
fn builtin() -> Result<Spoken, StartError> {
    static BUILTIN: OnceLock<Result<Spoken, String>> = OnceLock::new();
    let read = || {
        let model = Model::builtin(CacheLimits::default()).map_err(|error| error.to_string())?;
        let words = Arc::new(Words::of(&model));
        Ok((Arc::new(model), words))
    };
    let setting = |reason| StartError::Setting { key: "tokenizer", reason };
    BUILTIN.get_or_init(read).clone().map_err(setting)
}

/// An id in the form of vLLM's, other for each engine and each start.
fn engine_id(config: &EngineConfig, port: u16) -> String {
    let born = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_nanos() as u64);
    let a = mix(config.seed ^ u64::from(port) << 32 ^ born);
    let b = mix(!a ^ u64::from(port));
    format!(
        "{:08x}-{:04x}-4{:03x}-8{:03x}-{:012x}",
        a >> 32,
        a & 0xffff,
        b >> 52,
        b >> 40 & 0xfff,
        (a ^ b) & 0xffff_ffff_ffff
    )
}

fn publishers(config: &EngineConfig) -> Vec<Arc<Publisher>> {
    let events = config.kv_events.iter();
    events
        .flat_map(|events| (0..config.ranks).map(move |rank| (events, rank)))
        .map(|(events, rank)| {
            let seed = mix(config.seed ^ u64::from(rank));
            let mut events = events.clone();
            if config.dialect == Dialect::Sglang {
                events.encoding = EventEncoding::SignedMap;
            }
            let publisher = Publisher::new(events, config.block_size, seed);
            Arc::new(match config.dialect {
                Dialect::Trtllm => publisher
                    .polled(config.capacity_blocks, (config.ranks > 1).then_some(u32::from(rank))),
                Dialect::Vllm | Dialect::Sglang => publisher,
            })
        })
        .collect()
}

fn ranks(
    config: &EngineConfig,
    publishers: &[Arc<Publisher>],
    registry: &Arc<Registry>,
) -> Vec<Arc<Rank>> {
    let spec = Spec {
        profile: config.profile.faster(config.speed),
        block_size: config.block_size,
        capacity_blocks: config.capacity_blocks,
        max_num_batched_tokens: config.max_num_batched_tokens,
        max_num_seqs: config.max_num_seqs,
        lease: config.lease.as_nanos().try_into().unwrap_or(u64::MAX / 2),
        noise: 0.0,
        seed: config.seed,
        every_token: true,
    };
    let of = |rank: u16| {
        let publisher = publishers.get(usize::from(rank)).cloned();
        Arc::new(Rank::new(rank, spec, publisher, registry.clone()))
    };
    (0..config.ranks).map(of).collect()
}

async fn bind_events(
    config: &EngineConfig,
    events: &KvEvents,
    rank: u16,
) -> Result<RankSockets, StartError> {
    // With free ports each rank takes any; else they follow each other, as vLLM's do.
    let shifted = |port: u16| if port == 0 { 0 } else { port.saturating_add(rank) };
    let replay = bind("KV-event replay", config, shifted(events.replay_port)).await?;
    let replay_addr = local("KV-event replay", &replay)?;
    let (publishing, publish, told) = match &events.publish {
        KvSocket::Bind(port) => {
            let listener = bind("KV-event", config, shifted(*port)).await?;
            let addr = local("KV-event", &listener)?;
            let told = format!("tcp://*:{}", addr.port());
            (Publishing::Listen(listener), format!("tcp://{addr}"), told)
        }
        KvSocket::Connect { host, port } => {
            let addr = format!("{host}:{}", port.saturating_add(rank));
            let told = format!("tcp://{addr}");
            (Publishing::Connect(addr), told.clone(), told)
        }
    };
    Ok(RankSockets {
        publishing,
        replay,
        endpoints: EventEndpoints { publish, replay: format!("tcp://{replay_addr}") },
        source: (told, format!("tcp://*:{}", replay_addr.port())),
    })
}

async fn bind(
    what: &'static str,
    config: &EngineConfig,
    port: u16,
) -> Result<TcpListener, StartError> {
    let addr = SocketAddr::new(config.host, port);
    let bound = TcpListener::bind(addr).await;
    bound.map_err(|source| StartError::Bind { what, addr: addr.to_string(), source })
}

fn local(what: &'static str, listener: &TcpListener) -> Result<SocketAddr, StartError> {
    let addr = listener.local_addr();
    addr.map_err(|source| StartError::Bind { what, addr: "?".to_owned(), source })
}
