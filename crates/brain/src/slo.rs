//! What a request is to be served within: time to first token, and mean time between tokens.

use std::time::Duration;

use serde::ser::{Serialize, SerializeStruct, Serializer};

/// Service level objectives of a request; `None` (and zero) is none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Slo {
    /// Time to first token.
    pub ttft: Option<Duration>,
    /// Mean time between tokens.
    pub itl: Option<Duration>,
}

impl Slo {
    /// These, and where there is none, those of `other`.
    #[must_use]
    pub fn or(self, other: Slo) -> Slo {
        Slo { ttft: self.ttft.or(other.ttft), itl: self.itl.or(other.itl) }
    }

    pub(crate) fn ttft_seconds(&self) -> Option<f64> {
        seconds(self.ttft)
    }

    pub(crate) fn itl_seconds(&self) -> Option<f64> {
        seconds(self.itl)
    }
}

/// As in settings: `ttft_ms` and `itl_ms`.
impl Serialize for Slo {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let ms = |bound: Option<Duration>| bound.map(|bound| bound.as_secs_f64() * 1e3);
        let mut out = serializer.serialize_struct("Slo", 2)?;
        out.serialize_field("ttft_ms", &ms(self.ttft))?;
        out.serialize_field("itl_ms", &ms(self.itl))?;
        out.end()
    }
}

fn seconds(bound: Option<Duration>) -> Option<f64> {
    bound.filter(|bound| !bound.is_zero()).map(|bound| bound.as_secs_f64())
}
