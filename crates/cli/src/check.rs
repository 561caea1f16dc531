//! `pointsman check`: is a configuration right, and does the fleet keep what it promises?

use std::process::ExitCode;

use crate::shutdown;
use crate::sources::ConfigArgs;

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
        println!("note: {notice}");
    }
    if args.offline {
        println!("the configuration is valid; no worker was asked");
        return Ok(ExitCode::SUCCESS);
    }
    let findings =
        shutdown::block_on(async { Ok(pointsman_serve::check(loaded.settings).await?) })?;
    print!("{findings}");
    Ok(if findings.is_sound() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
