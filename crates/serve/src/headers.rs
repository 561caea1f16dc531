//! Which headers pass between clients and engines.
//!
//! Invariants: hop-by-hop headers never pass; what the router alone may say (`x-pointsman-*`, the
//! data-parallel rank) is never taken from a client; engines are never asked for compressed replies,
//! because a compressed stream cannot be watched.

use http::{HeaderMap, HeaderName, HeaderValue, header};
use pointsman_wire::dialect::is_reserved_header;

/// The client's wish for a path.
pub(crate) const PATH_WISH: HeaderName = HeaderName::from_static("x-pointsman-path");
/// The path taken, in replies.
pub(crate) const PATH: HeaderName = PATH_WISH;
/// The reason for it.
pub(crate) const REASON: HeaderName = HeaderName::from_static("x-pointsman-reason");
/// The worker that streams.
pub(crate) const WORKER: HeaderName = HeaderName::from_static("x-pointsman-worker");
/// TTFT as predicted when it was decided, in milliseconds.
pub(crate) const TTFT: HeaderName = HeaderName::from_static("x-pointsman-predicted-ttft-ms");
/// The request's name in every log.
pub(crate) const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

const NEVER: [&str; 12] = [
    "accept-encoding",
    "connection",
    "content-length",
    "expect",
    "host",
    "keep-alive",
    "proxy-authenticate",
    "proxy-authorization",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
];

fn passes(name: &HeaderName, headers: &HeaderMap) -> bool {
    let name = name.as_str();
    !NEVER.contains(&name) && !is_reserved_header(name) && !named_by_connection(name, headers)
}

/// `Connection: close, x-foo` makes `x-foo` hop-by-hop too.
fn named_by_connection(name: &str, headers: &HeaderMap) -> bool {
    headers
        .get_all(header::CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .any(|token| token.trim().eq_ignore_ascii_case(name))
}

/// What of one side's headers the other side gets.
pub(crate) fn passed(from: &HeaderMap) -> HeaderMap {
    let mut to = HeaderMap::with_capacity(from.len());
    for (name, value) in from {
        if passes(name, from) {
            to.append(name.clone(), value.clone());
        }
    }
    to
}

/// Headers that a dialect wants.
pub(crate) fn added(from: &[(&'static str, String)]) -> HeaderMap {
    let mut to = HeaderMap::with_capacity(from.len());
    add(&mut to, from);
    to
}

/// Puts headers that a dialect wants in place of others of the same name.
pub(crate) fn add(to: &mut HeaderMap, from: &[(&'static str, String)]) {
    for (name, value) in from {
        if let Ok(value) = HeaderValue::from_str(value) {
            to.insert(HeaderName::from_static(name), value);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(pairs: &[(&str, &str)]) -> HeaderMap {
        pairs
            .iter()
            .map(|(name, value)| {
                (name.parse::<HeaderName>().unwrap(), HeaderValue::from_str(value).unwrap())
            })
            .collect()
    }

    #[test]
    fn hop_by_hop_headers_do_not_pass() {
        let from = map(&[
            ("connection", "close, X-Hop"),
            ("x-hop", "1"),
            ("transfer-encoding", "chunked"),
            ("x-stays", "1"),
        ]);
        assert_eq!(passed(&from), map(&[("x-stays", "1")]));
    }

    #[test]
    fn what_the_router_alone_may_say_does_not_pass() {
        let from = map(&[
            ("x-pointsman-path", "local"),
            ("x-pointsman-anything", "1"),
            ("x-data-parallel-rank", "3"),
            ("accept-encoding", "br"),
            ("authorization", "Bearer k"),
        ]);
        assert_eq!(passed(&from), map(&[("authorization", "Bearer k")]));
    }

    #[test]
    fn repeated_headers_pass_in_order() {
        let from = map(&[("x-a", "1"), ("x-a", "2")]);
        assert_eq!(passed(&from), from);
    }
}
