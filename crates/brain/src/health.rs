//! Whether a worker may be asked: a breaker over the outcome of legs and of health checks.
//! 4xx never counts against a worker; 429 and 503 mean load, not failure.
//! An open breaker lets one request through as a probe when its time has come; where nobody else can
//! serve, that is sooner, and those that come meanwhile wait for what the probe tells.

use std::time::Duration;

use serde::Serialize;

use crate::ladder::Cause;
use crate::ledger::BookingId;
use crate::settings::BreakerSettings;
use crate::time::Time;

/// How long others wait for what a probe tells. One that hangs tells nothing for minutes.
const PROBE_TELLS_WITHIN: Duration = Duration::from_secs(5);

/// Something that was seen of a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HealthEvent {
    /// A leg was answered well.
    Answered,
    /// A leg's answer has begun as it should: enough for a probe, whose end may be minutes away.
    Began,
    /// A leg failed. [`Cause::KvLoad`] is told of both workers of a hand-off.
    Failed(Cause),
    /// A hand-off served, told of both its workers.
    HandedOver,
    /// A health check passed.
    CheckPassed,
    /// A health check failed.
    CheckFailed,
}

/// A worker's health.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Health {
    /// Takes requests. Counts consecutive failed legs and consecutive failed checks.
    Closed { failures: u32, failed_checks: u32 },
    /// Left alone until a time, then asked once. `trips`: how often opened without being closed.
    Open { until: Time, trips: u32 },
    /// A request is on its way as the probe.
    Probing { by: BookingId, since: Time, trips: u32 },
    /// Health checks fail. `trips` as in `Open`, 0 if the breaker was closed.
    Down { trips: u32 },
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

/// What the end of a leg means for the breaker.
#[derive(Clone, Copy)]
enum Meaning {
    Well,
    Broken,
    /// The worker answers, which says nothing of whether it works.
    Alive,
    Nothing,
}

impl Cause {
    fn meaning(self) -> Meaning {
        match self {
            Cause::Status(400..=499) | Cause::Overload(_) => Meaning::Alive,
            Cause::Descriptors | Cause::Expired | Cause::KvLoad => Meaning::Nothing,
            Cause::Connect | Cause::Timeout | Cause::Cut | Cause::Protocol | Cause::Status(_) => {
                Meaning::Broken
            }
        }
    }
}

impl Default for Health {
    fn default() -> Self {
        Health::Closed { failures: 0, failed_checks: 0 }
    }
}

impl Health {
    /// Whether a request may be sent.
    pub(crate) fn admits(self, now: Time) -> bool {
        match self {
            Health::Closed { .. } => true,
            Health::Open { until, .. } => until <= now,
            Health::Probing { .. } | Health::Down { .. } => false,
        }
    }

    /// Whether a request may be sent though it is not time yet, because nobody else can take it: no
    /// sooner than after the first time that a breaker is open.
    pub(crate) fn admits_in_need(self, settings: &BreakerSettings, now: Time) -> bool {
        match self {
            Health::Open { until, trips } => {
                let first = settings.open.min(settings.open_max);
                until <= now.after(Health::open_for(trips, settings).saturating_sub(first))
            }
            other => other.admits(now),
        }
    }

    /// Whether a probe is under way that may soon be answered.
    pub(crate) fn is_being_probed(self, now: Time) -> bool {
        matches!(self, Health::Probing { since, .. } if now.since(since) < PROBE_TELLS_WITHIN)
    }

    pub(crate) fn condition(self) -> Condition {
        match self {
            Health::Closed { .. } => Condition::Up,
            Health::Open { .. } | Health::Probing { .. } => Condition::Tripped,
            Health::Down { .. } => Condition::Down,
        }
    }

    /// The health after `event`.
    #[must_use]
    pub(crate) fn step(self, event: HealthEvent, settings: &BreakerSettings, now: Time) -> Health {
        match event {
            HealthEvent::CheckPassed => self.check_passed(now),
            HealthEvent::CheckFailed => self.check_failed(settings),
            HealthEvent::Answered => self.leg_ended(Meaning::Well, settings, now),
            HealthEvent::Began => self.began(settings),
            HealthEvent::Failed(cause) => self.leg_ended(cause.meaning(), settings, now),
            HealthEvent::HandedOver => self,
        }
    }

    /// The health of a worker's hand-offs after `event`, apart from its own: a worker that cannot hand
    /// over, or take over, can do everything else.
    #[must_use]
    pub(crate) fn step_handoffs(
        self,
        event: HealthEvent,
        settings: &BreakerSettings,
        now: Time,
    ) -> Health {
        match event {
            HealthEvent::HandedOver => self.leg_ended(Meaning::Well, settings, now),
            HealthEvent::Failed(Cause::KvLoad) => self.leg_ended(Meaning::Broken, settings, now),
            _ => self,
        }
    }

    /// The health once a request is sent.
    #[must_use]
    pub(crate) fn sent(self, by: BookingId, now: Time) -> Health {
        match self {
            Health::Open { trips, .. } => Health::Probing { by, since: now, trips },
            Health::Closed { .. } | Health::Probing { .. } | Health::Down { .. } => self,
        }
    }

    /// The health once a request is over: a probe that nothing was heard of leaves its place to the next.
    #[must_use]
    pub(crate) fn over(self, booking: BookingId, now: Time) -> Health {
        match self {
            Health::Probing { by, trips, .. } if by == booking => {
                Health::Open { until: now, trips }
            }
            _ => self,
        }
    }

    /// A probe has shown that the worker is there. That it also finishes what it begins it has yet to show,
    /// or the next failure opens the breaker again.
    fn began(self, settings: &BreakerSettings) -> Health {
        match self {
            Health::Probing { .. } => {
                Health::Closed { failures: settings.failures.saturating_sub(1), failed_checks: 0 }
            }
            other => other,
        }
    }

    fn leg_ended(self, meaning: Meaning, settings: &BreakerSettings, now: Time) -> Health {
        match (self, meaning) {
            (Health::Closed { failed_checks, .. }, Meaning::Well) => {
                Health::Closed { failures: 0, failed_checks }
            }
            (Health::Closed { failures, failed_checks }, Meaning::Broken) => {
                let failures = failures.saturating_add(1);
                if failures >= settings.failures {
                    Health::open(1, settings, now)
                } else {
                    Health::Closed { failures, failed_checks }
                }
            }
            (Health::Probing { .. }, Meaning::Well | Meaning::Alive) => Health::default(),
            (Health::Probing { trips, .. }, Meaning::Broken) => {
                Health::open(trips.saturating_add(1), settings, now)
            }
            // The probe's booking may have been settled before its failure was reported.
            (Health::Open { until, trips }, Meaning::Broken) if until <= now => {
                Health::open(trips.saturating_add(1), settings, now)
            }
            // Legs sent before the breaker opened say nothing that the probe will not say better.
            (Health::Open { .. } | Health::Down { .. }, _)
            | (_, Meaning::Alive | Meaning::Nothing) => self,
        }
    }

    fn check_passed(self, now: Time) -> Health {
        match self {
            Health::Closed { failures, .. } => Health::Closed { failures, failed_checks: 0 },
            Health::Down { trips: 0 } => Health::default(),
            Health::Down { trips } => Health::Open { until: now, trips },
            // A health check is not a request: only a probe closes the breaker.
            Health::Open { .. } | Health::Probing { .. } => self,
        }
    }

    fn check_failed(self, settings: &BreakerSettings) -> Health {
        match self {
            Health::Closed { failures, failed_checks } => {
                let failed_checks = failed_checks.saturating_add(1);
                if failed_checks >= settings.failed_checks {
                    Health::Down { trips: 0 }
                } else {
                    Health::Closed { failures, failed_checks }
                }
            }
            Health::Open { trips, .. } | Health::Probing { trips, .. } => Health::Down { trips },
            Health::Down { .. } => self,
        }
    }

    fn open_for(trips: u32, settings: &BreakerSettings) -> Duration {
        let doublings = 2_u32.saturating_pow(trips.saturating_sub(1));
        settings.open.saturating_mul(doublings).min(settings.open_max)
    }

    fn open(trips: u32, settings: &BreakerSettings, now: Time) -> Health {
        Health::Open { until: now.after(Health::open_for(trips, settings)), trips }
    }
}
