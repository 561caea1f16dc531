//! Numbers that cannot be wrong: a `Share` is within 0 and 1, a `Factor` is finite and not negative.
//! Nothing in the brain that takes one of these has to think about NaN again.

use serde::{Serialize, Serializer};

/// A number from 0 to 1, both included.
#[derive(Clone, Copy, Debug, PartialEq, PartialOrd)]
pub struct Share(f64);

impl Share {
    /// Nothing.
    pub const ZERO: Share = Share(0.0);
    /// The whole.
    pub const ONE: Share = Share(1.0);

    /// The share `value`, if it is one.
    pub const fn new(value: f64) -> Option<Share> {
        if value >= 0.0 && value <= 1.0 { Some(Share(value)) } else { None }
    }

    /// The share nearest to `value`, for numbers read from an engine; `None` for NaN.
    pub const fn clamped(value: f64) -> Option<Share> {
        if value.is_nan() { None } else { Some(Share(value.clamp(0.0, 1.0))) }
    }

    /// For constants: a value out of range does not compile.
    pub(crate) const fn constant(value: f64) -> Share {
        assert!(value >= 0.0 && value <= 1.0);
        Share(value)
    }

    /// The number.
    pub const fn get(self) -> f64 {
        self.0
    }
}

/// A finite number that is not negative.
#[derive(Clone, Copy, Debug, PartialEq, PartialOrd)]
pub struct Factor(f64);

impl Factor {
    /// Nothing.
    pub const ZERO: Factor = Factor(0.0);
    /// One to one.
    pub const ONE: Factor = Factor(1.0);

    /// The factor `value`, if it is one.
    pub const fn new(value: f64) -> Option<Factor> {
        if value >= 0.0 && value.is_finite() { Some(Factor(value)) } else { None }
    }

    /// For constants: a value out of range does not compile.
    pub(crate) const fn constant(value: f64) -> Factor {
        assert!(value >= 0.0 && value.is_finite());
        Factor(value)
    }

    /// The number.
    pub const fn get(self) -> f64 {
        self.0
    }
}

impl Serialize for Share {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_f64(self.0)
    }
}

impl Serialize for Factor {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_f64(self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_share_is_none() {
        for value in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, -0.1, 1.000_000_1] {
            assert_eq!(Share::new(value), None, "{value}");
        }
        for value in [0.0, -0.0, 0.7, 1.0, f64::MIN_POSITIVE] {
            assert_eq!(Share::new(value).map(Share::get), Some(value));
        }
    }

    #[test]
    fn what_is_no_factor_is_none() {
        for value in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, -0.1] {
            assert_eq!(Factor::new(value), None, "{value}");
        }
        for value in [0.0, 0.7, 1.0, 4.0, f64::MAX] {
            assert_eq!(Factor::new(value).map(Factor::get), Some(value));
        }
    }

    #[test]
    fn a_reading_is_brought_into_range() {
        let cases =
            [(1.2, Some(1.0)), (-3.0, Some(0.0)), (f64::INFINITY, Some(1.0)), (f64::NAN, None)];
        for (value, share) in cases {
            assert_eq!(Share::clamped(value).map(Share::get), share, "{value}");
        }
    }
}
