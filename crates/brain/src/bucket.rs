//! A rate as a bucket: it fills steadily up to a minute's worth, and what is taken leaves it.
//!
//! Invariant: who only takes gets, over any span, at most a minute's worth and what has come in
//! meanwhile, plus the excess of single amounts larger than the bucket. Time comes in as an argument.

use std::num::NonZeroU32;
use std::time::Duration;

use crate::time::Time;

const MINUTE_SECONDS: f64 = 60.0;

/// A bucket that is full at first.
#[derive(Clone, Copy, Debug)]
pub struct Bucket {
    /// What it holds at most, and what comes in within a minute.
    per_minute: f64,
    /// Below zero while it is overdrawn.
    level: f64,
    at: Time,
}

impl Bucket {
    /// A full bucket.
    pub fn full(per_minute: NonZeroU32, now: Time) -> Bucket {
        let per_minute = f64::from(per_minute.get());
        Bucket { per_minute, level: per_minute, at: now }
    }

    /// Takes an amount, or tells how long to wait until it is there. More than the bucket holds is given
    /// by a full one, which is then overdrawn: otherwise it would be given never.
    pub fn take(&mut self, amount: u32, now: Time) -> Result<(), Duration> {
        self.fill(now);
        let amount = f64::from(amount);
        let missing = amount.min(self.per_minute) - self.level;
        if missing > 0.0 {
            let wait = missing * MINUTE_SECONDS / self.per_minute;
            // A nanosecond more, so that rounding never makes the wait too short.
            return Err(Duration::try_from_secs_f64(wait)
                .unwrap_or(Duration::MAX)
                .saturating_add(Duration::from_nanos(1)));
        }
        self.level -= amount;
        Ok(())
    }

    /// Takes what has been used already, down to one minute's worth of overdraft.
    pub fn spend(&mut self, amount: u64, now: Time) {
        self.fill(now);
        #[allow(clippy::cast_precision_loss, reason = "no reply is that long")]
        let left = self.level - amount as f64;
        self.level = left.max(self.level.min(-self.per_minute));
    }

    fn fill(&mut self, now: Time) {
        let came = now.since(self.at).as_secs_f64() * self.per_minute / MINUTE_SECONDS;
        self.level = (self.level + came).min(self.per_minute);
        self.at = self.at.max(now);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn bucket(per_minute: u32) -> Bucket {
        Bucket::full(NonZeroU32::new(per_minute).unwrap_or(NonZeroU32::MIN), Time::ZERO)
    }

    #[test]
    fn a_minutes_worth_comes_at_once_and_then_at_its_rate() {
        let mut bucket = bucket(6);
        assert!((0..6).all(|_| bucket.take(1, Time::ZERO).is_ok()));
        let wait = bucket.take(1, Time::ZERO).expect_err("it is empty");
        assert_eq!(wait.as_secs(), 10);
        assert!(bucket.take(1, Time::from_secs(9)).is_err());
        assert!(bucket.take(1, Time::from_secs(10)).is_ok());
    }

    #[test]
    fn more_than_the_bucket_holds_is_given_once_it_is_full_and_paid_back() {
        let mut bucket = bucket(60);
        assert!(bucket.take(180, Time::ZERO).is_ok());
        let wait = bucket.take(1, Time::ZERO).expect_err("it is overdrawn");
        assert_eq!(wait.as_secs(), 121);
    }

    #[test]
    fn what_was_used_already_overdraws_by_a_minute_at_most() {
        let mut bucket = bucket(60);
        bucket.spend(1_000_000, Time::ZERO);
        bucket.spend(1_000_000, Time::ZERO);
        assert!(bucket.take(1, Time::from_secs(60)).is_err());
        assert!(bucket.take(1, Time::from_secs(61)).is_ok());
    }

    proptest! {
        #[test]
        fn no_more_is_given_than_the_rate_and_the_wait_told_is_enough(
            per_minute in 1u32..10_000,
            steps in prop::collection::vec((0u64..20_000, 1u32..3_000), 1..200),
        ) {
            let (mut bucket, mut now, mut given) = (bucket(per_minute), Time::ZERO, 0.0);
            for (millis, amount) in steps {
                now = now.after(Duration::from_millis(millis));
                let amount = amount.min(per_minute);
                match bucket.take(amount, now) {
                    Ok(()) => given += f64::from(amount),
                    Err(wait) => {
                        let mut later = bucket;
                        prop_assert!(later.take(amount, now.after(wait)).is_ok());
                    }
                }
                let came = now.since(Time::ZERO).as_secs_f64() / 60.0;
                prop_assert!(given <= f64::from(per_minute) * (1.0 + came) + 1e-3);
            }
        }
    }
}
