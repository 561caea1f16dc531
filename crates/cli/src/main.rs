//! The `pointsman` command.
//!
//! Each subcommand is one file; what they do lives in the other crates.

mod check;
mod config;
mod descriptors;
mod engine;
mod explain;
mod key;
mod load;
mod logging;
mod output;
mod replay;
mod report;
mod serve;
mod shutdown;
mod sources;
mod up;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Router for disaggregated LLM serving: decides for each request whether its prompt is computed on
/// a prefill worker or on the worker that decodes.
#[derive(Debug, Parser)]
#[command(name = "pointsman", version, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Start a router in front of an embedded fleet of mock engines.
    Up(up::Args),
    /// Start a router in front of the workers of a configuration.
    Serve(serve::Args),
    /// Start one mock engine.
    Engine(engine::Args),
    /// Show what each policy would do to a recorded trace, in simulation.
    Replay(replay::Args),
    /// Send a recorded trace to a router over HTTP, and show what its clients saw.
    Load(load::Args),
    /// Check a configuration, and the workers that it names.
    Check(check::Args),
    /// Ask a running router what it would decide for a request, and why.
    Explain(explain::Args),
    /// Print the configuration's schema or reference page.
    Config(config::Args),
    /// Make an API key, for a client or the administration, and the hash that the configuration wants.
    Key(key::Args),
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Up(args) => up::run(&args),
        Command::Serve(args) => serve::run(&args),
        Command::Engine(args) => engine::run(&args),
        Command::Replay(args) => replay::run(&args),
        Command::Load(args) => load::run(&args),
        Command::Check(args) => check::run(&args),
        Command::Explain(args) => explain::run(&args),
        Command::Config(args) => config::run(&args),
        Command::Key(args) => key::run(&args),
    };
    match result {
        Ok(code) => code,
        Err(error) => {
            eprintln!("pointsman: {}", told(&error));
            ExitCode::FAILURE
        }
    }
}

/// An error and its causes, except those that it tells itself.
fn told(error: &anyhow::Error) -> String {
    let mut told = error.to_string();
    for cause in error.chain().skip(1).map(ToString::to_string) {
        if !told.contains(&cause) {
            told += ": ";
            told += &cause;
        }
    }
    told
}
