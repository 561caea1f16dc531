//! `pointsman explain`: what a running router would decide for a request, and why.

use std::io::Read;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, anyhow};
use pointsman_config::Secret;
use pointsman_serve::client::{self, Target};

use crate::{output, shutdown};

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The router.
    #[arg(long, default_value = "http://127.0.0.1:8000")]
    url: String,
    /// File that holds a key, where the router asks for one.
    #[arg(long, value_name = "FILE")]
    key_file: Option<PathBuf>,
    /// File with the authorities of the router's certificate, PEM. Default: the public ones.
    #[arg(long, value_name = "FILE")]
    ca: Option<PathBuf>,
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
    let to = Target { url: &args.url, key: key(args)?, ca: args.ca.clone() };
    let (status, answer) = shutdown::block_on(async { Ok(client::explain(to, body).await?) })?;
    let told = match serde_json::from_slice::<serde_json::Value>(&answer) {
        Ok(value) => serde_json::to_string_pretty(&value)?,
        Err(_) => String::from_utf8_lossy(&answer).into_owned(),
    };
    output::result(told + "\n")?;
    Ok(if status == 200 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn key(args: &Args) -> anyhow::Result<Option<Secret>> {
    let Some(path) = &args.key_file else { return Ok(None) };
    let text = std::fs::read_to_string(path);
    let text = text.with_context(|| format!("{path:?} cannot be read"))?;
    Ok(Some(Secret::read(&text).map_err(|problem| anyhow!("{path:?} {problem}"))?))
}
