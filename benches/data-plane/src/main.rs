//! What the whole router costs: requests and streamed tokens per CPU-second and added latency,
//! beside a direct connection and nginx, in one run on one machine.
//!
//! `engine` is the other side of the load; the bench starts it itself.
#![allow(clippy::print_stdout, reason = "a command speaks on standard output")]

mod bench;
mod child;
mod cpu;
mod engine;
mod load;
mod page;
mod peers;
mod proxies;
mod scale;
mod scaled;
mod table;
mod wire;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, ensure};
use clap::{Parser, Subcommand};
use tokio::signal::unix::{SignalKind, signal};

use crate::bench::Options;
use crate::load::Times;
use crate::wire::Api;

/// Measure what the whole router costs, beside a direct connection and nginx.
#[derive(Debug, Parser)]
#[command(name = "data-plane")]
struct Cli {
    #[command(subcommand)]
    command: Option<Command>,
    /// The router. Default: `pointsman` beside this program, or in target/release.
    #[arg(long)]
    router: Option<PathBuf>,
    /// nginx.
    #[arg(long, default_value = "/usr/sbin/nginx")]
    nginx: PathBuf,
    /// Where `peers.sh` has put other routers; none are measured without it.
    #[arg(long)]
    peers: Option<PathBuf>,
    /// API that the load uses.
    #[arg(long, value_enum, default_value = "completions")]
    api: Api,
    /// Only cases whose description holds this text, such as `streamed, 32 clients`.
    #[arg(long, default_value = "")]
    case: String,
    /// Only these targets, beside the direct connection: `nginx`, `local`, `remote`,
    /// `local-tokenised`, or a peer such as `smg-pd`.
    #[arg(long, value_delimiter = ',')]
    targets: Vec<String>,
    /// Rounds; the figures are their medians.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u8).range(1..))]
    rounds: u8,
    /// Measured seconds of each case on each target in each round, more where there are fewer
    /// replies than clients.
    #[arg(long, default_value_t = 1.5, value_parser = seconds)]
    seconds: f64,
    /// Core of the proxies.
    #[arg(long, default_value_t = 0)]
    proxy_core: usize,
    /// Core of load and engines.
    #[arg(long, default_value_t = 1)]
    load_core: usize,
    /// Measure what grows instead: cores, open streams, workers, models and prompts.
    #[arg(long, conflicts_with_all = ["case", "targets", "peers"])]
    scale: bool,
    /// A trial of some 20 seconds, whose figures mean little.
    #[arg(long)]
    quick: bool,
    /// Also write the figures onto a page, docs/benchmarks/data-plane.md if none is named.
    #[arg(long, num_args = 0..=1, default_missing_value = PAGE, value_name = "PAGE")]
    write: Option<PathBuf>,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Be an instant engine until standard input ends.
    Engine {
        /// Ports to answer on.
        #[arg(long, default_value_t = 1)]
        ports: usize,
    },
}

const PAGE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/benchmarks/data-plane.md");

const RELEASE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../target/release/pointsman");

/// What a trial measures of each case.
const QUICK: Duration = Duration::from_millis(150);

/// More clients take too long for a trial.
const QUICK_CLIENTS: usize = 32;

/// Warming up takes this part of the measured time.
const WARM_UP: f64 = 0.2;

fn main() -> ExitCode {
    match start(Cli::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("data-plane: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn start(cli: Cli) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        match cli.command {
            Some(Command::Engine { ports }) => engine::run(ports).await,
            None => compare(cli).await,
        }
    })
}

/// Runs the bench until it is done or interrupted; whatever it started ends with it.
async fn compare(cli: Cli) -> anyhow::Result<()> {
    let options = options(&cli)?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    let run = async {
        if cli.scale {
            return scale::run(&options).await;
        }
        Ok(table::markdown(&bench::run(&options).await?))
    };
    let tables = tokio::select! {
        tables = run => tables?,
        _ = interrupt.recv() => anyhow::bail!("interrupted"),
        _ = terminate.recv() => anyhow::bail!("terminated"),
    };
    println!("{tables}");
    match &cli.write {
        Some(page) if cli.scale => page::write_scale(page, &options, &tables),
        Some(page) => page::write(page, &options, &tables),
        None => Ok(()),
    }
}

fn options(cli: &Cli) -> anyhow::Result<Options> {
    ensure!(cli.proxy_core != cli.load_core, "proxies and load need a core each");
    let measured = if cli.quick { QUICK } else { Duration::from_secs_f64(cli.seconds) };
    Ok(Options {
        router: cli.router.clone().map_or_else(default_router, Ok)?,
        nginx: cli.nginx.clone(),
        peers: cli.peers.clone(),
        api: cli.api,
        case: cli.case.clone(),
        most_clients: if cli.quick { QUICK_CLIENTS } else { usize::MAX },
        targets: cli.targets.clone(),
        rounds: if cli.quick { 1 } else { cli.rounds.into() },
        times: Times { ramp: Duration::ZERO, warm_up: measured.mul_f64(WARM_UP), measured },
        proxy_core: cli.proxy_core,
        load_core: cli.load_core,
    })
}

fn default_router() -> anyhow::Result<PathBuf> {
    let here = std::env::current_exe().context("the path of this program")?;
    let beside = here.with_file_name("pointsman");
    Ok(if beside.exists() { beside } else { PathBuf::from(RELEASE) })
}

fn seconds(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(seconds) if (0.01..=60.0).contains(&seconds) => Ok(seconds),
        _ => Err("a number from 0.01 to 60".to_owned()),
    }
}
