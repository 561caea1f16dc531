//! Waiting for an engine until a moment, in a process that may itself have been stopped for a while.
//!
//! After a pause (of the machine, or of a starved process) all timers are due at once, before what came
//! meanwhile has been read from any socket. A timer that fires late says nothing of the engine.

use std::pin::Pin;
use std::time::Duration;

use tokio::time::Instant;
use tokio::time::error::Elapsed;

/// How late a timer fires only where the process did not run.
const STOPPED: Duration = Duration::from_millis(100);

/// How long what has come meanwhile may take to be read.
const CATCH_UP: Duration = Duration::from_millis(300);

/// Until when to go on waiting, if a timer that was due at `until` came too late to count.
pub(crate) fn further(until: Instant) -> Option<Instant> {
    let now = Instant::now();
    (now.saturating_duration_since(until) > STOPPED).then(|| now + CATCH_UP)
}

/// Waits for a future until a moment. It is lent: each hand that a future passes through would make whatever
/// holds it larger by it.
pub(crate) async fn within<T>(
    until: Instant,
    mut future: Pin<&mut impl Future<Output = T>>,
) -> Result<T, Elapsed> {
    let started = Instant::now();
    match (tokio::time::timeout_at(until, future.as_mut()).await, further(until)) {
        // One whose time was over before is late by itself.
        (Err(_elapsed), Some(further)) if started < until => {
            tokio::time::timeout_at(further, future).await
        }
        (ended, _) => ended,
    }
}
