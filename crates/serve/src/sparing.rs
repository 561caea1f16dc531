//! Lines of the log that a flood of requests must not make a flood of.

use std::sync::atomic::{AtomicU64, Ordering};

use pointsman_brain::Time;

/// The least time between two of them.
const PAUSE_NANOS: u64 = 1_000_000_000;

/// A kind of line that is written at most once a second.
#[derive(Debug, Default)]
pub(crate) struct Sparing {
    /// When the next one may be written.
    next: AtomicU64,
    unwritten: AtomicU64,
}

impl Sparing {
    /// Whether one may be written at `now`, and how many were not since the last one.
    pub(crate) fn turn(&self, now: Time) -> Option<u64> {
        let next = self.next.load(Ordering::Relaxed);
        let later = now.0.saturating_add(PAUSE_NANOS);
        let taken =
            || self.next.compare_exchange(next, later, Ordering::Relaxed, Ordering::Relaxed);
        if now.0 < next || taken().is_err() {
            self.unwritten.fetch_add(1, Ordering::Relaxed);
            return None;
        }
        Some(self.unwritten.swap(0, Ordering::Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_line_a_second_tells_of_those_that_were_not_written() {
        let sparing = Sparing::default();
        let turns: Vec<_> = [0, 1, 999_999_999, 1_000_000_000, 1_000_000_001, 5_000_000_000]
            .map(|nanos| sparing.turn(Time(nanos)))
            .into();
        assert_eq!(turns, [Some(0), None, None, Some(2), None, Some(1)]);
    }
}
