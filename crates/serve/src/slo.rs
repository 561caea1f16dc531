//! What a client wants its request to be served within: `x-slo-ttft-ms` and `x-slo-itl-ms`, also as
//! `x-slo-tpot-ms`, each also with the prefix `x-llm-d-`. A value that is no time gets a 400: a client
//! that sets one relies on it. 0 is no objective, whatever is configured.

use http::{HeaderMap, HeaderName};
use pointsman_brain::Slo;

use crate::error::Refusal;
use crate::headers::millis;

/// Names of one objective; the first that is there counts.
static TTFT: [HeaderName; 2] =
    [HeaderName::from_static("x-slo-ttft-ms"), HeaderName::from_static("x-llm-d-slo-ttft-ms")];
static ITL: [HeaderName; 4] = [
    HeaderName::from_static("x-slo-itl-ms"),
    HeaderName::from_static("x-llm-d-slo-itl-ms"),
    HeaderName::from_static("x-slo-tpot-ms"),
    HeaderName::from_static("x-llm-d-slo-tpot-ms"),
];

/// What a request is to be served within, where it says so.
pub(crate) fn of(head: &HeaderMap) -> Result<Slo, Refusal> {
    Ok(Slo { ttft: millis(head, &TTFT)?, itl: millis(head, &ITL)? })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn slo(pairs: &[(&'static str, &'static str)]) -> Result<(Option<u64>, Option<u64>), String> {
        let head = pairs.iter().map(|(name, value)| {
            (http::HeaderName::from_static(name), http::HeaderValue::from_static(value))
        });
        let micros = |span: Option<Duration>| span.map(|span| span.as_micros() as u64);
        let slo = of(&head.collect()).map_err(|refusal| refusal.error.message)?;
        Ok((micros(slo.ttft), micros(slo.itl)))
    }

    #[test]
    fn objectives_are_read_in_milliseconds_by_each_of_their_names() {
        assert_eq!(slo(&[]), Ok((None, None)));
        assert_eq!(slo(&[("x-slo-ttft-ms", "250")]), Ok((Some(250_000), None)));
        assert_eq!(slo(&[("x-llm-d-slo-ttft-ms", " 1.5 ")]), Ok((Some(1_500), None)));
        for name in ["x-slo-itl-ms", "x-llm-d-slo-itl-ms", "x-slo-tpot-ms", "x-llm-d-slo-tpot-ms"] {
            assert_eq!(slo(&[(name, "40")]), Ok((None, Some(40_000))), "{name}");
        }
        let both = [("x-llm-d-slo-ttft-ms", "9"), ("x-slo-ttft-ms", "8"), ("x-slo-itl-ms", "0")];
        assert_eq!(slo(&both), Ok((Some(8_000), Some(0))));
    }

    #[test]
    fn what_is_no_time_is_refused_by_its_name() {
        for value in ["", "fast", "-1", "NaN", "inf", "1e300", "86400001", "10ms"] {
            let said = slo(&[("x-slo-itl-ms", value)]).unwrap_err();
            assert_eq!(said, "x-slo-itl-ms must be milliseconds from 0 (none) to 86400000");
        }
    }
}
