//! `pointsman load`: a recorded trace sent over HTTP, and what its clients saw.

mod client;
mod drive;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use pointsman_sim::profile::Profile;
use pointsman_sim::replay::Summary;
use pointsman_sim::trace;

use crate::output;
use crate::report::{self, Row};
use crate::shutdown::{self, Asked};
use client::Target;

/// Exit code after SIGINT, as shells give it.
const INTERRUPTED: u8 = 130;

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The trace: mooncake or session JSON lines, or Azure CSV.
    #[arg(long, value_name = "TRACE")]
    trace: PathBuf,
    /// Whom it is sent to: a router, or an engine.
    #[arg(long, value_name = "URL")]
    target: String,
    /// Name of the model.
    #[arg(long, default_value = "mock")]
    model: String,
    /// What the results are called, such as the policy in force there.
    #[arg(long, default_value = "live")]
    label: String,
    /// Speed at which the trace is sent; 1 as recorded.
    #[arg(long, default_value_t = 1.0)]
    rate: f64,
    /// How much faster than real engines those of the target are (`up --speed`): the trace is sent so
    /// much faster, SLOs are so much tighter, and times are told as of engines at their real speed.
    #[arg(long, default_value_t = 1.0)]
    speed: f64,
    /// Model and GPUs that the SLO on TTFT is made from, by name.
    #[arg(long, default_value = "llama-3.1-70b-fp8-h100-tp4")]
    profile: String,
    /// Only the first so many requests.
    #[arg(long, value_name = "REQUESTS")]
    limit: Option<usize>,
    /// Requests under way at most; further ones wait, and their waiting counts.
    #[arg(long, default_value_t = 1024, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    concurrency: u32,
    /// Seconds after which a request counts as failed.
    #[arg(long, default_value_t = 600.0)]
    timeout: f64,
    /// Print JSON instead of a table.
    #[arg(long)]
    json: bool,
    /// Write a report, one HTML page that needs nothing else.
    #[arg(long, value_name = "FILE")]
    report: Option<PathBuf>,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    for (flag, value) in [("--rate", args.rate), ("--speed", args.speed)] {
        ensure!((1e-3..=1e6).contains(&value), "{flag} must be from 0.001 to 1000000, not {value}");
    }
    ensure!(
        (1e-3..=86_400.0).contains(&args.timeout),
        "--timeout must be from 0.001 to 86400 seconds"
    );
    let Some(profile) = Profile::named(&args.profile) else {
        let known: Vec<&str> = Profile::names().collect();
        bail!("--profile {:?} is not known; known are {}", args.profile, known.join(", "));
    };
    let target = Target::new(&args.target, &args.model, Duration::from_secs_f64(args.timeout))?;
    let trace = trace::open(&args.trace).with_context(|| args.trace.display().to_string())?;
    let count = trace.requests.len().min(args.limit.unwrap_or(usize::MAX));
    ensure!(count > 0, "--limit leaves no request of the trace");
    let plan = drive::Plan {
        trace,
        count,
        pace: args.rate * args.speed,
        speed: args.speed,
        profile,
        concurrency: args.concurrency as usize,
    };
    let seen = shutdown::block_on(async {
        let mut asked = Asked::listen()?;
        drive::run(plan, target, asked.next()).await
    })?;
    tell(args, &seen)?;
    let any = seen.served.iter().any(|served| served.finished);
    Ok(match (seen.interrupted, any) {
        (true, _) => ExitCode::from(INTERRUPTED),
        (false, true) => ExitCode::SUCCESS,
        (false, false) => ExitCode::FAILURE,
    })
}

fn tell(args: &Args, seen: &drive::Seen) -> anyhow::Result<()> {
    let name = args.trace.file_stem().map(|name| name.to_string_lossy().into_owned());
    let rows = [Row {
        trace: name.unwrap_or_default(),
        policy: args.label.clone(),
        seed: 0,
        rate: args.rate,
        goodput_rate: None,
        summary: Summary::of(&seen.served),
        served: seen.served.clone(),
    }];
    if args.json {
        output::result(format_args!("{}\n", report::json(&rows)))?;
    } else {
        output::result(report::table(&rows))?;
    }
    if let Some(error) = rows[0].summary.ttft_error_median {
        eprintln!("half of the predicted TTFTs were within {:.1} % of what came", error * 100.0);
    }
    let good = seen.served.iter().filter(|served| served.meets_both()).count();
    eprintln!(
        "{} of {} requests ended, {} within both SLOs ({:.2} a second), {} failed",
        seen.served.len(),
        seen.planned,
        good,
        good as f64 / seen.seconds.max(1e-9),
        seen.served.iter().filter(|served| !served.finished).count()
    );
    for (error, count) in &seen.errors {
        eprintln!("  {count} x {error}");
    }
    if let Some(path) = &args.report {
        let about = report::About {
            title: format!("Load on {}", args.target),
            rate: args.rate,
            keys: Vec::new(),
        };
        std::fs::write(path, report::page(&about, &rows))
            .with_context(|| format!("{} cannot be written", path.display()))?;
        eprintln!("report: {}", path.display());
    }
    Ok(())
}
