//! `pointsman serve`: a router in front of the workers of a configuration.

use std::process::ExitCode;

use crate::output::notice;
use crate::shutdown::Asked;
use crate::sources::{ConfigArgs, flag};
use crate::{descriptors, logging, shutdown};

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    sources: ConfigArgs,
    /// Port of the API; stands for `listen.port`.
    #[arg(long)]
    port: Option<u16>,
    /// Address of the API; stands for `listen.address`.
    #[arg(long)]
    address: Option<String>,
    /// URL of a running router whose index this one starts with; stands for `kv.restore_from`.
    #[arg(long, value_name = "URL")]
    restore_from: Option<String>,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let port = args.port.as_ref().map(|port| flag("--port", "listen.port", port));
    let address = args.address.as_ref().map(|addr| flag("--address", "listen.address", addr));
    let restore =
        args.restore_from.as_ref().map(|url| flag("--restore-from", "kv.restore_from", url));
    let loaded = args.sources.load(port.into_iter().chain(address).chain(restore).collect())?;
    logging::start(&loaded.settings.log, &loaded.notices)?;
    descriptors::take_all();
    shutdown::block_on(async {
        let (mut asked, hangups) = (Asked::listen()?, shutdown::hangups()?);
        let running = pointsman_serve::start(loaded.settings).await?;
        notice!("pointsman is ready on {}", running.url());
        if let Some(addr) = running.admin_addr() {
            notice!("metrics and administration are on {addr}");
        }
        tokio::select! {
            () = asked.next() => {}
            () = shutdown::at_each(hangups, || running.reload_certificates()) => {}
        }
        tracing::info!("asked to end: no further requests, running ones may finish");
        asked.end(running.stop()).await;
        Ok(ExitCode::SUCCESS)
    })
}
