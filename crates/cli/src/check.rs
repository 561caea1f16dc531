//! `pointsman check`: is a configuration right, and does the fleet keep what it promises?

use std::process::ExitCode;

use crate::sources::ConfigArgs;
use crate::{output, shutdown};

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    sources: ConfigArgs,
    /// Only read the configuration; ask no worker.
    #[arg(long)]
    offline: bool,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let loaded = args.sources.load(Vec::new())?;
    for notice in &loaded.notices {
        output::result(format_args!("note: {notice}\n"))?;
    }
    if args.offline {
        output::result("the configuration is valid; no worker was asked\n")?;
        return Ok(ExitCode::SUCCESS);
    }
    let findings =
        shutdown::block_on(async { Ok(pointsman_serve::check(loaded.settings).await?) })?;
    output::result(findings.to_string())?;
    Ok(if findings.is_sound() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
