//! `pointsman explain`: what a running router would decide for a request, and why.

use std::io::Read;
use std::process::ExitCode;

use anyhow::Context;

use crate::{output, shutdown};

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The router.
    #[arg(long, default_value = "http://127.0.0.1:8000")]
    url: String,
    /// File with the body of a chat or completion request; `-` reads standard input.
    request: String,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let body = if args.request == "-" {
        let mut body = Vec::new();
        std::io::stdin().read_to_end(&mut body).context("standard input cannot be read")?;
        body
    } else {
        std::fs::read(&args.request).with_context(|| format!("{} cannot be read", args.request))?
    };
    let (status, answer) =
        shutdown::block_on(async { Ok(pointsman_serve::client::explain(&args.url, body).await?) })?;
    let told = match serde_json::from_slice::<serde_json::Value>(&answer) {
        Ok(value) => serde_json::to_string_pretty(&value)?,
        Err(_) => String::from_utf8_lossy(&answer).into_owned(),
    };
    output::result(told + "\n")?;
    Ok(if status == 200 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
