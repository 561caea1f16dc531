//! Whether a worker may be asked: a breaker over the outcome of legs and of health checks.
//! 4xx never counts against a worker; 429 and 503 mean load, not failure.
//! An open breaker lets one request through as a probe when its time has come.

use serde::Serialize;

use crate::ladder::Cause;
use crate::ledger::BookingId;
use crate::time::Time;

/// Something that was seen of a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HealthEvent {
    /// A leg was answered well.
    Answered,
    /// A leg failed.
    Failed(Cause),
    /// A health check passed.
    CheckPassed,
    /// A health check failed.
    CheckFailed,
}

/// A worker's health.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Health {
    /// Takes requests.
    Closed {
        /// Consecutive failed legs.
        failures: u32,
        /// Consecutive failed health checks.
        failed_checks: u32,
    },
    /// Left alone until a time, then asked once.
    Open {
        /// When a probe may go.
        until: Time,
        /// How often it was opened without being closed in between.
        trips: u32,
    },
    /// A probe is on its way.
    Probing {
        /// The request that is the probe.
        by: BookingId,
        /// As in `Open`.
        trips: u32,
    },
    /// Health checks fail.
    Down {
        /// As in `Open`; 0 if the breaker was closed.
        trips: u32,
    },
}

/// A worker's health without its particulars.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Condition {
    /// Takes requests.
    Up,
    /// Its breaker is open: left alone, or being probed.
    Tripped,
    /// Health checks fail.
    Down,
}

/// A change of a worker's condition.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct HealthChange {
    /// Before.
    pub from: Condition,
    /// After.
    pub to: Condition,
}
