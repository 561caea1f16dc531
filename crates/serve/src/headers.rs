//! Which headers pass between clients and engines.
//!
//! Invariants: hop-by-hop headers never pass, nor do those by which proxies tell of each other; what
//! the router alone may say (`x-pointsman-*`, the data-parallel rank) is never taken from a client or an
//! engine; engines are never asked for compressed replies, because a compressed stream cannot be watched.

use std::time::Duration;

use http::uri::Scheme;
use http::{HeaderMap, HeaderName, HeaderValue, Uri, header};
use pointsman_config::Secret;
use pointsman_wire::dialect::is_reserved_header;

use crate::error::Refusal;

/// The client's wish for a path.
pub(crate) const PATH_WISH: HeaderName = HeaderName::from_static("x-pointsman-path");
/// How early its turn comes among those that wait.
pub(crate) const PRIORITY: HeaderName = HeaderName::from_static("x-pointsman-priority");
/// How long the client lets its request wait in the router, in milliseconds.
pub(crate) const DEADLINE: HeaderName = HeaderName::from_static("x-pointsman-deadline-ms");
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

/// A key as whoever asks for one wants it.
pub(crate) fn bearer(key: &Secret) -> Option<HeaderValue> {
    let mut value = HeaderValue::from_str(&format!("Bearer {}", key.reveal())).ok()?;
    value.set_sensitive(true);
    Some(value)
}

/// The head of a request that shows a key, if there is one.
pub(crate) fn bearing(key: Option<&Secret>) -> HeaderMap {
    let value = key.and_then(bearer);
    value.map(|value| (header::AUTHORIZATION, value)).into_iter().collect()
}

/// The host of a URL as a client that is there names it.
pub(crate) fn host(url: &Uri) -> Option<HeaderValue> {
    let host = url.host()?;
    let usual = if url.scheme() == Some(&Scheme::HTTPS) { 443 } else { 80 };
    match url.port_u16().filter(|port| *port != usual) {
        Some(port) => HeaderValue::from_str(&format!("{host}:{port}")).ok(),
        None => HeaderValue::from_str(host).ok(),
    }
}

/// The longest that may be asked for: a day.
const LONGEST_MS: f64 = 86_400_000.0;

const NEVER: [&str; 16] = [
    "accept-encoding",
    "connection",
    "content-length",
    "expect",
    "forwarded",
    "host",
    "keep-alive",
    "proxy-authenticate",
    "proxy-authorization",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
    "via",
    "x-real-ip",
];

/// `x-forwarded-for` and its like: who a client is, and by what name it knows the router.
const FORWARDED_PREFIX: &str = "x-forwarded-";

fn passes(name: &HeaderName, headers: &HeaderMap) -> bool {
    let name = name.as_str();
    !NEVER.contains(&name)
        && !name.starts_with(FORWARDED_PREFIX)
        && !is_reserved_header(name)
        && !named_by_connection(name, headers)
}

/// `Connection: close, x-foo` makes `x-foo` hop-by-hop too.
fn named_by_connection(name: &str, headers: &HeaderMap) -> bool {
    headers
        .get_all(header::CONNECTION)
        .iter()
        .flat_map(|value| value.as_bytes().split(|byte| *byte == b','))
        .any(|token| token.trim_ascii().eq_ignore_ascii_case(name.as_bytes()))
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

/// A time in milliseconds, by the first of its names that is there. 0 is none where none can be meant.
pub(crate) fn millis(head: &HeaderMap, names: &[HeaderName]) -> Result<Option<Duration>, Refusal> {
    let found = names.iter().find_map(|name| Some((name, head.get(name)?)));
    let Some((name, value)) = found else { return Ok(None) };
    let ms = value.to_str().ok().and_then(|text| text.trim().parse::<f64>().ok());
    let span = ms
        .filter(|ms| (0.0..=LONGEST_MS).contains(ms))
        .and_then(|ms| Duration::try_from_secs_f64(ms / 1e3).ok());
    span.map(Some).ok_or_else(|| {
        Refusal::new(400, format!("{name} must be milliseconds from 0 (none) to {LONGEST_MS}"))
    })
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
    fn what_proxies_tell_of_each_other_does_not_pass() {
        let from = map(&[
            ("forwarded", "for=10.0.0.1"),
            ("via", "1.1 a"),
            ("x-forwarded-for", "10.0.0.1"),
            ("x-forwarded-anything", "1"),
            ("x-real-ip", "10.0.0.1"),
            ("x-forward", "1"),
        ]);
        assert_eq!(passed(&from), map(&[("x-forward", "1")]));
    }

    #[test]
    fn a_connection_header_that_is_no_text_names_headers_all_the_same() {
        let mut from = map(&[("x-hop", "1")]);
        from.append(header::CONNECTION, HeaderValue::from_bytes(b"\xff, x-hop").unwrap());
        assert_eq!(passed(&from), HeaderMap::new());
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
