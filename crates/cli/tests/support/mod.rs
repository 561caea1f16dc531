//! What the black-box tests stand on: the real binary in front of mock engines of this process.
//!
//! Every test has a fleet of its own on free ports, so that tests run side by side. Waiting is
//! always for a condition, with a deadline. A test that fails shows its router's log.
#![allow(dead_code, unreachable_pub, unused_imports, reason = "each test file uses a part of it")]
#![allow(clippy::expect_used, clippy::panic, clippy::print_stderr, reason = "it is all test")]

pub mod client;
pub mod fleet;
pub mod metrics;
pub mod raw;
pub mod router;
pub mod valve;

use std::io::Write;
use std::time::Duration;

pub use client::{Body, Exchange, Head, Request};
pub use fleet::{Fleet, Spec, decode, prefill, unified};
pub use metrics::Metrics;
pub use raw::{Act, Raw, Then};
pub use router::Router;
use serde_json::Value;
use tokio::time::Instant;

/// How long anything may take that is to happen soon.
pub const SOON: Duration = Duration::from_secs(10);

/// Pause between two looks at a condition.
const LOOK_PAUSE: Duration = Duration::from_millis(10);

/// Says that something is not tested, where everybody sees it: what a test prints is shown only when it
/// fails.
pub fn skipped(why: &str) {
    let _ = writeln!(std::io::stderr(), "SKIPPED, NOT TESTED: {why}");
}

/// Looks until `what` is there and hands it out.
///
/// # Panics
/// After `SOON`.
pub async fn wait_for<T>(what: &str, mut look: impl AsyncFnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + SOON;
    loop {
        if let Some(found) = look().await {
            return found;
        }
        assert!(Instant::now() < deadline, "waited {SOON:?} in vain for: {what}");
        tokio::time::sleep(LOOK_PAUSE).await;
    }
}

/// Looks until there is nothing to complain of.
///
/// # Panics
/// With the complaint, after `SOON`.
pub async fn wait_until(complaint: impl AsyncFnMut() -> Result<(), String>) {
    wait_until_within(SOON, complaint).await;
}

/// The same with a time of its own, for what takes long by design.
pub async fn wait_until_within(
    time: Duration,
    mut complaint: impl AsyncFnMut() -> Result<(), String>,
) {
    let deadline = Instant::now() + time;
    loop {
        let Err(what) = complaint().await else { return };
        assert!(Instant::now() < deadline, "after {time:?} there is still: {what}");
        tokio::time::sleep(LOOK_PAUSE).await;
    }
}

/// Puts `over` into `base`: mappings key by key, everything else in place of what was there.
pub fn merge(base: &mut Value, over: Value) {
    match (base, over) {
        (Value::Object(base), Value::Object(over)) => {
            for (key, value) in over {
                merge(base.entry(key).or_insert(Value::Null), value);
            }
        }
        (base, over) => *base = over,
    }
}
