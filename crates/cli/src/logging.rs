//! The log on standard error, as the settings want it.

use std::io::IsTerminal;

use anyhow::Context;
use pointsman_config::{Log, LogFormat};
use tracing_subscriber::EnvFilter;

/// Starts logging, and says what the configuration had to say.
pub(crate) fn start(log: &Log, notices: &[String]) -> anyhow::Result<()> {
    let filter = EnvFilter::try_new(&log.filter)
        .with_context(|| format!("log.filter: `{}` is no log filter", log.filter))?;
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal());
    match log.format {
        LogFormat::Text => builder.init(),
        LogFormat::Json => builder.json().flatten_event(true).init(),
    }
    for notice in notices {
        tracing::info!("{notice}");
    }
    Ok(())
}
