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

/// How long work that cannot be cancelled may go on at the end.
const LAST_WORK: std::time::Duration = std::time::Duration::from_millis(500);

/// Runs a future on a runtime of its own.
pub(crate) fn block_on<T>(future: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .context("the async runtime cannot start")?;
    let result = runtime.block_on(future);
    // A long prompt that is being tokenised for nobody must not hold up the end.
    runtime.shutdown_timeout(LAST_WORK);
    result
}
