//! The prefix index beside its peers: one workload, one run, one table.
//!
//! Each subject is measured in a process of its own, so that its resident memory is its own.
#![allow(clippy::print_stdout, reason = "a command speaks on standard output")]

mod agree;
mod cpu;
mod dynamo;
mod floor;
mod measure;
mod ours;
mod page;
mod smg;
mod subject;
mod table;
mod workload;

use std::path::PathBuf;
use std::process::{Command, ExitCode, Stdio};

use anyhow::{Context, ensure};
use clap::{Parser, ValueEnum};
use serde::{Deserialize, Serialize};

use crate::floor::Floor;
use crate::measure::{Figures, Size};

/// Measure the prefix index beside dynamo-kv-router and smg-radix-tree.
#[derive(Debug, Parser)]
#[command(name = "index-bench")]
struct Cli {
    /// About how many (worker, block) pairs.
    #[arg(long, default_value_t = 10_000_000, value_parser = clap::value_parser!(u32).range(100_000..=50_000_000))]
    pairs: u32,
    /// Whom to measure.
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = Name::ALL)]
    subjects: Vec<Name>,
    /// A trial with a tenth of the pairs, whose figures mean little.
    #[arg(long)]
    quick: bool,
    /// Of everything random.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Also write the figures onto a page, docs/benchmarks/index.md if none is named.
    #[arg(long, num_args = 0..=1, default_missing_value = PAGE, value_name = "PAGE")]
    write: Option<PathBuf>,
    /// Measure one subject in this process and print its figures as JSON.
    #[arg(long, value_enum, hide = true)]
    only: Option<Name>,
}

const PAGE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/benchmarks/index.md");

/// The indexes under test.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
enum Name {
    Pointsman,
    Smg,
    Crtc,
    Positional,
}

impl Name {
    const ALL: [Name; 4] = [Name::Pointsman, Name::Smg, Name::Crtc, Name::Positional];

    fn title(self) -> &'static str {
        match self {
            Name::Pointsman => "pointsman-kv",
            Name::Smg => "smg-radix-tree 0.1.0",
            Name::Crtc => "dynamo CRTC 1.6.1",
            Name::Positional => "dynamo Positional 1.6.1",
        }
    }
}

fn main() -> ExitCode {
    match start(&Cli::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("index-bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn start(cli: &Cli) -> anyhow::Result<()> {
    if let Some(name) = cli.only {
        println!("{}", serde_json::to_string(&measure(name, cli)?)?);
        return Ok(());
    }
    ensure!(cli.subjects.contains(&Name::Pointsman), "pointsman is what the others are beside");
    eprintln!("memory");
    let floor: Floor = floor::measure();
    let mut all = Vec::new();
    for name in Name::ALL.into_iter().filter(|name| cli.subjects.contains(name)) {
        eprintln!("{}", name.title());
        all.push((name, in_a_process_of_its_own(name, cli)?));
    }
    let tables = table::markdown(&all, &floor);
    println!("{tables}");
    match &cli.write {
        Some(page) => page::write(page, &tables, cli.quick),
        None => Ok(()),
    }
}

fn measure(name: Name, cli: &Cli) -> anyhow::Result<Figures> {
    let pairs = cli.pairs as usize / if cli.quick { 10 } else { 1 };
    let (cleared, queries) = if cli.quick { (20_000, 1_000) } else { (200_000, 10_000) };
    let size = Size { pairs, cleared, queries };
    match name {
        Name::Pointsman => measure::run_ours(size, cli.seed),
        Name::Smg => measure::run::<smg::Smg>(size, cli.seed),
        Name::Crtc => measure::run::<dynamo::Crtc>(size, cli.seed),
        Name::Positional => measure::run::<dynamo::Positional>(size, cli.seed),
    }
}

fn in_a_process_of_its_own(name: Name, cli: &Cli) -> anyhow::Result<Figures> {
    let mut command = Command::new(std::env::current_exe().context("the path of this program")?);
    let only = name.to_possible_value().context("every subject has a name")?;
    command.args(["--only", only.get_name(), "--pairs", &cli.pairs.to_string()]);
    command.args(["--seed", &cli.seed.to_string()]);
    if cli.quick {
        command.arg("--quick");
    }
    let output = command.stderr(Stdio::inherit()).output()?;
    ensure!(output.status.success(), "{} ended with {}", name.title(), output.status);
    serde_json::from_slice(&output.stdout).with_context(|| format!("figures of {}", name.title()))
}
