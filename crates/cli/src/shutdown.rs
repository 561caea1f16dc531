//! Ctrl-C and SIGTERM.

use anyhow::Context;
use tokio::signal::unix::{Signal, SignalKind, signal};

/// The signals that ask the process to end.
pub(crate) struct Asked {
    interrupt: Signal,
    terminate: Signal,
}

impl Asked {
    /// Signals count from this call on, so that one that comes while the program starts is not lost.
    pub(crate) fn listen() -> anyhow::Result<Asked> {
        let interrupt = signal(SignalKind::interrupt()).context("SIGINT cannot be handled")?;
        let terminate = signal(SignalKind::terminate()).context("SIGTERM cannot be handled")?;
        Ok(Asked { interrupt, terminate })
    }

    /// The next one.
    pub(crate) async fn next(&mut self) {
        tokio::select! {
            _ = self.interrupt.recv() => {}
            _ = self.terminate.recv() => {}
        }
    }

    /// Waits for an orderly end, unless a further signal says that there is no time for it.
    pub(crate) async fn end(mut self, orderly: impl Future<Output = ()>) {
        tokio::select! {
            () = orderly => {}
            () = self.next() => tracing::warn!("asked again: what still runs is cut"),
        }
    }
}

/// SIGHUPs from this call on.
pub(crate) fn hangups() -> anyhow::Result<Signal> {
    signal(SignalKind::hangup()).context("SIGHUP cannot be handled")
}

/// Calls `each` at each signal, for ever.
pub(crate) async fn at_each(mut signals: Signal, each: impl Fn()) {
    while signals.recv().await.is_some() {
        each();
    }
    std::future::pending::<()>().await;
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
