//! `pointsman replay`: what each policy would do to a recorded trace, in simulation.

pub(crate) mod policies;
mod work;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, bail, ensure};
use pointsman_sim::profile::Profile;
use pointsman_sim::replay::{Faults, FleetShape, Kill, Scenario, Slow, Workload};
use pointsman_sim::trace;

use crate::{output, report};
use policies::{Named, RoutingArgs};

/// Seeds of one command at most.
const MAX_SEEDS: u64 = 64;

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Traces: mooncake or session JSON lines, or Azure CSV.
    #[arg(required = true, value_name = "TRACE")]
    traces: Vec<PathBuf>,
    /// The fleet: 2p2d is two prefill and two decode workers, 4u four unified ones.
    #[arg(long, default_value = "2p2d")]
    fleet: FleetShape,
    /// Model and GPUs, by name.
    #[arg(long, default_value = "llama-3.1-70b-fp8-h100-tp4")]
    profile: String,
    /// Policies, by name, separated by commas; parameters follow a colon each, as in
    /// `isl_bounding:eff_isl_threshold=8192:eff_isl_ratio_threshold=1`.
    #[arg(long, default_value = "all", value_name = "LIST")]
    policies: String,
    /// Speed at which the trace is replayed; 1 as recorded.
    #[arg(long, default_value_t = 1.0)]
    rate: f64,
    /// Also find the highest rate at which 95 % of the requests meet both SLOs.
    #[arg(long)]
    goodput: bool,
    /// How often each replay is done, with seeds from 1 on.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=MAX_SEEDS))]
    seeds: u64,
    /// Print JSON instead of a table.
    #[arg(long)]
    json: bool,
    /// Write a report, one HTML page that needs nothing else.
    #[arg(long, value_name = "FILE")]
    report: Option<PathBuf>,
    /// Only the first so many requests of each trace.
    #[arg(long, value_name = "REQUESTS")]
    limit: Option<usize>,
    /// Replays at the same time; by default one per core.
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..))]
    jobs: Option<u16>,
    #[command(flatten)]
    routing: RoutingArgs,
    #[command(flatten)]
    hardware: Hardware,
    #[command(flatten)]
    faults: FaultArgs,
}

#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Hardware")]
struct Hardware {
    /// KV tokens of one worker.
    #[arg(long, default_value_t = 640_000)]
    kv_tokens: u32,
    /// Tokens of one KV block; those of traces have 512.
    #[arg(long, default_value_t = trace::PIECE_TOKENS, value_parser = clap::value_parser!(u32).range(1..=4096))]
    block_size: u32,
    /// Token budget of one step of a prefill worker.
    #[arg(long, default_value_t = 8192, value_parser = clap::value_parser!(u32).range(1..))]
    prefill_chunk: u32,
    /// Token budget of one step of a decode worker.
    #[arg(long, default_value_t = 2048, value_parser = clap::value_parser!(u32).range(1..))]
    decode_chunk: u32,
    /// Token budget of one step of a unified worker.
    #[arg(long, default_value_t = 2048, value_parser = clap::value_parser!(u32).range(1..))]
    unified_chunk: u32,
    /// Relative standard deviation of the time of a step.
    #[arg(long, default_value_t = 0.05)]
    noise: f64,
}

#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Faults")]
struct FaultArgs {
    /// A worker that takes longer: number (prefill workers first, from 0) and factor, as in `2:1.5`.
    #[arg(long, value_name = "WORKER:FACTOR")]
    slow_worker: Option<String>,
    /// A worker that dies, when that share of the trace's time has passed, as in `0:0.5`.
    #[arg(long, value_name = "WORKER:SHARE")]
    kill_worker: Option<String>,
    /// Chance that a batch of KV events is lost.
    #[arg(long, default_value_t = 0.0)]
    event_loss: f64,
    /// How late KV events and readings of the engines' load are, in seconds.
    #[arg(long, default_value_t = 0.0, value_name = "SECONDS")]
    metric_lag: f64,
    /// What the cost model starts from, as a multiple of the truth: 3 takes workers for slow.
    #[arg(long, default_value_t = 1.0, value_name = "FACTOR")]
    prior_scale: f64,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let scenario = scenario(args)?;
    let policies = policies::read(&args.policies, args.fleet, &args.routing)?;
    let traces = args.traces.iter().map(|path| read(path, args)).collect::<anyhow::Result<_>>()?;
    let plan = work::Plan {
        traces,
        policies,
        scenario,
        seeds: args.seeds,
        goodput: args.goodput,
        jobs: args.jobs.map_or_else(cores, usize::from),
    };
    let results = work::run(&plan)?;
    if args.json {
        output::result(format_args!("{}\n", report::json(&results)))?;
    } else {
        output::result(report::table(&results))?;
    }
    if let Some(path) = &args.report {
        let about = about(args, &plan.policies);
        let page = report::page(&about, &results);
        std::fs::write(path, page)
            .with_context(|| format!("{} cannot be written", path.display()))?;
        eprintln!("report: {}", path.display());
    }
    Ok(ExitCode::SUCCESS)
}

fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

fn read(path: &Path, args: &Args) -> anyhow::Result<(String, Workload)> {
    let trace = trace::open(path).with_context(|| path.display().to_string())?;
    let name = path.file_stem().map(|name| name.to_string_lossy().into_owned());
    let limit = args.limit.unwrap_or(usize::MAX);
    let workload = Workload::new(&trace, args.hardware.block_size, limit);
    ensure!(!workload.is_empty(), "{}: no request is left of it", path.display());
    Ok((name.unwrap_or_default(), workload))
}

fn scenario(args: &Args) -> anyhow::Result<Scenario> {
    let Some(profile) = Profile::named(&args.profile) else {
        let known: Vec<&str> = Profile::names().collect();
        bail!("--profile {:?} is not known; known are {}", args.profile, known.join(", "));
    };
    positive("--rate", args.rate)?;
    positive("--prior-scale", args.faults.prior_scale)?;
    share("--event-loss", args.faults.event_loss)?;
    ensure!((0.0..=1.0).contains(&args.hardware.noise), "--noise must be from 0 to 1");
    ensure!(
        (0.0..=3600.0).contains(&args.faults.metric_lag),
        "--metric-lag must be from 0 to 3600 seconds"
    );
    let Hardware { kv_tokens, block_size, prefill_chunk, decode_chunk, unified_chunk, noise } =
        args.hardware;
    ensure!(kv_tokens >= block_size, "--kv-tokens must hold a block of {block_size} tokens");
    Ok(Scenario {
        shape: args.fleet,
        profile,
        rate: args.rate,
        kv_tokens,
        prefill_chunk,
        decode_chunk,
        unified_chunk,
        noise,
        faults: faults(args)?,
        ..Scenario::default()
    })
}

fn faults(args: &Args) -> anyhow::Result<Faults> {
    let FaultArgs { slow_worker, kill_worker, event_loss, metric_lag, prior_scale } = &args.faults;
    let slow = slow_worker.as_ref().map(|text| worker("--slow-worker", text, args.fleet));
    let slow = slow.transpose()?.map(|(worker, factor)| Slow { worker, factor });
    if let Some(slow) = slow {
        positive("--slow-worker's factor", slow.factor)?;
    }
    let kill = kill_worker.as_ref().map(|text| worker("--kill-worker", text, args.fleet));
    let kill = kill.transpose()?.map(|(worker, at)| Kill { worker, at });
    if let Some(kill) = kill {
        share("--kill-worker's share", kill.at)?;
    }
    Ok(Faults {
        slow,
        kill,
        event_loss: *event_loss,
        lag: (metric_lag * 1e9) as u64,
        prior_scale: *prior_scale,
    })
}

fn worker(flag: &str, text: &str, shape: FleetShape) -> anyhow::Result<(usize, f64)> {
    let read = || {
        let (worker, number) = text.split_once(':')?;
        Some((worker.parse().ok()?, number.parse().ok()?))
    };
    let (worker, number): (usize, f64) =
        read().with_context(|| format!("{flag} {text:?} is not a worker and a number: 0:1.5"))?;
    ensure!(
        worker < shape.len(),
        "{flag}: the fleet {shape} has no worker {worker}, they count from 0"
    );
    Ok((worker, number))
}

fn positive(flag: &str, value: f64) -> anyhow::Result<()> {
    ensure!((1e-3..=1e3).contains(&value), "{flag} must be from 0.001 to 1000, not {value}");
    Ok(())
}

fn share(flag: &str, value: f64) -> anyhow::Result<()> {
    ensure!((0.0..=1.0).contains(&value), "{flag} must be from 0 to 1, not {value}");
    Ok(())
}

/// What the report says of where its figures come from.
fn about(args: &Args, policies: &[Named]) -> report::About {
    let keys = policies.iter().map(|named| (named.name.clone(), named.keys.clone())).collect();
    report::About {
        title: format!("Replay on {}, {}", args.fleet, args.profile),
        rate: args.rate,
        keys,
    }
}
