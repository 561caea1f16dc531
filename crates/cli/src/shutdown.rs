//! Ctrl-C and SIGTERM.

use anyhow::Context;
use tokio::signal::unix::{SignalKind, signal};

/// The first signal that asks the process to end. Signals count from this call on, so that one that
/// comes while the program starts is not lost.
pub(crate) fn asked() -> impl Future<Output = anyhow::Result<()>> {
    let interrupt = signal(SignalKind::interrupt()).context("SIGINT cannot be handled");
    let terminate = signal(SignalKind::terminate()).context("SIGTERM cannot be handled");
    async move {
        let (mut interrupt, mut terminate) = (interrupt?, terminate?);
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
        }
        Ok(())
    }
}

/// Runs a future on a runtime of its own.
pub(crate) fn block_on<T>(future: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
    tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .context("the async runtime cannot start")?
        .block_on(future)
}
