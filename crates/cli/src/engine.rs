//! `pointsman engine`: one mock engine, with faults on request.

use std::net::IpAddr;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use pointsman_sim::mock::{
    Connector, Dialect, EngineConfig, Faults, KvEvents, KvSocket, MockEngine, Role,
};

use crate::output::notice;
use crate::shutdown::{self, Asked};

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// What it is for.
    #[arg(long, value_enum)]
    role: RoleArg,
    /// Whose wire it speaks.
    #[arg(long, value_enum, default_value_t = DialectArg::Vllm)]
    dialect: DialectArg,
    /// vLLM: how it hands KV over.
    #[arg(long, value_enum, default_value_t = ConnectorArg::Nixl)]
    kv_connector: ConnectorArg,
    /// Where decode engines meet it, of a prefill engine of SGLang or with Mooncake; 0 takes a free port.
    #[arg(long, default_value_t = 0)]
    bootstrap_port: u16,
    /// SGLang: a decode engine computes prompts itself when asked to.
    #[arg(long)]
    conditional_agg: bool,
    /// Address that its sockets bind.
    #[arg(long, default_value = "127.0.0.1")]
    host: IpAddr,
    /// Port of its API; 0 takes a free one.
    #[arg(long, default_value_t = 0)]
    port: u16,
    /// Name of the model.
    #[arg(long, default_value = "mock")]
    model: String,
    /// Names of LoRA adapters.
    #[arg(long)]
    adapter: Vec<String>,
    /// How much faster than the modelled hardware it is; `inf` answers at once.
    #[arg(long, default_value_t = 1.0)]
    speed: f64,
    /// Data-parallel ranks.
    #[arg(long, default_value_t = 1)]
    ranks: u16,
    /// Tokens of one KV block.
    #[arg(long, default_value_t = 16)]
    block_size: u32,
    /// KV blocks of one rank.
    #[arg(long, default_value_t = 40_000)]
    capacity_blocks: u32,
    /// Token budget of one step.
    #[arg(long, default_value_t = 8192)]
    max_num_batched_tokens: u32,
    /// Longest prompt and output together.
    #[arg(long, default_value_t = 131_072)]
    max_model_len: u32,
    /// How long a prefilled prompt waits to be fetched, in milliseconds.
    #[arg(long, default_value_t = 30_000)]
    lease_ms: u64,
    /// Port of the KV event publisher; 0 takes a free one.
    #[arg(long, default_value_t = 0)]
    kv_port: u16,
    /// Port of the replay socket; 0 takes a free one.
    #[arg(long, default_value_t = 0)]
    replay_port: u16,
    /// Publish no KV events.
    #[arg(long)]
    no_kv_events: bool,
    /// Faults from the start on, as the JSON that `POST /mock/faults` takes.
    #[arg(long, value_name = "JSON")]
    faults: Option<String>,
    /// Seed of everything that is drawn.
    #[arg(long, default_value_t = 0)]
    seed: u64,
}

#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum RoleArg {
    Prefill,
    Decode,
    Unified,
}

#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum DialectArg {
    Vllm,
    Sglang,
    Trtllm,
}

#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum ConnectorArg {
    Nixl,
    Mooncake,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let config = config(args)?;
    shutdown::block_on(async {
        let mut asked = Asked::listen()?;
        let engine = MockEngine::start(config).await?;
        notice!("mock engine is ready on {}", engine.url());
        if let (Some(events), Some(replay)) = (engine.kv_endpoint(), engine.replay_endpoint()) {
            notice!("  KV events  {events}");
            notice!("  replay     {replay}");
        }
        if matches!((args.kv_connector, args.role), (ConnectorArg::Mooncake, RoleArg::Prefill)) {
            notice!("  bootstrap  http://{}:{}/query", args.host, engine.bootstrap_port());
        }
        notice!("  faults     POST {}/mock/faults", engine.control_url());
        notice!("  state      GET {}/mock/stats", engine.control_url());
        asked.next().await;
        asked.end(engine.stop()).await;
        Ok(ExitCode::SUCCESS)
    })
}

fn config(args: &Args) -> anyhow::Result<EngineConfig> {
    let faults = match &args.faults {
        None => Faults::default(),
        Some(json) => serde_json::from_str(json).context("--faults")?,
    };
    let kv_events = KvEvents {
        publish: KvSocket::Bind(args.kv_port),
        replay_port: args.replay_port,
        ..KvEvents::default()
    };
    Ok(EngineConfig {
        role: match args.role {
            RoleArg::Prefill => Role::Prefill,
            RoleArg::Decode => Role::Decode,
            RoleArg::Unified => Role::Unified,
        },
        dialect: match args.dialect {
            DialectArg::Vllm => Dialect::Vllm,
            DialectArg::Sglang => Dialect::Sglang,
            DialectArg::Trtllm => Dialect::Trtllm,
        },
        connector: match args.kv_connector {
            ConnectorArg::Nixl => Connector::Nixl,
            ConnectorArg::Mooncake => Connector::Mooncake,
        },
        bootstrap_port: args.bootstrap_port,
        conditional_agg: args.conditional_agg,
        host: args.host,
        port: args.port,
        model: args.model.clone(),
        adapters: args.adapter.clone(),
        speed: args.speed,
        ranks: args.ranks,
        block_size: args.block_size,
        capacity_blocks: args.capacity_blocks,
        max_num_batched_tokens: args.max_num_batched_tokens,
        max_model_len: args.max_model_len,
        lease: Duration::from_millis(args.lease_ms),
        kv_events: (!args.no_kv_events).then_some(kv_events),
        faults,
        seed: args.seed,
        ..EngineConfig::default()
    })
}
