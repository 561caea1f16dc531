//! Clients' API keys: who asks, what it may use, and how much of it.
//!
//! Invariants: only hashes are kept and compared, so that the time of a look-up tells nothing of a key;
//! a client's key goes no further than here: not to an engine, a log or a metric.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use http::{HeaderMap, HeaderName, HeaderValue, header};
use pointsman_brain::{Bucket, Time};
use pointsman_config::{ClientKey, KeyHash};
use ring::digest::{SHA256, digest};

use crate::error::Refusal;
use crate::fleet::Group;
use crate::report;
use crate::router::Router;

/// Where some clients of `/v1/messages` put their key.
const API_KEY: HeaderName = HeaderName::from_static("x-api-key");

/// Every key that opens the API.
pub(crate) struct Keys {
    by_hash: HashMap<KeyHash, Arc<Key>>,
}

/// One key and what is left of what it may do.
struct Key {
    settings: ClientKey,
    in_flight: AtomicU32,
    requests: Option<Mutex<Bucket>>,
    tokens: Option<Mutex<Bucket>>,
    origin: Instant,
}

/// A client whose request is in the router; its place is given back when this is dropped.
pub(crate) struct Client(Arc<Key>);

impl std::fmt::Debug for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Client").field(&self.0.settings.name).finish()
    }
}

/// Which names of models somebody may use.
#[derive(Clone, Copy)]
pub(crate) struct Allowed<'k>(Option<&'k [String]>);

impl Allowed<'_> {
    /// Everything.
    pub(crate) const ALL: Allowed<'static> = Allowed(None);

    /// Whether a name may be used; `base` is the model that it is another name of.
    pub(crate) fn covers(self, name: &str, base: Option<&str>) -> bool {
        self.0.is_none_or(|names| names.iter().any(|known| known == name || base == Some(known)))
    }
}

impl Keys {
    pub(crate) fn new(keys: &[ClientKey]) -> Keys {
        let origin = Instant::now();
        let bucket = |rate| Mutex::new(Bucket::full(rate, Time::ZERO));
        let key = |settings: &ClientKey| Key {
            in_flight: AtomicU32::new(0),
            requests: settings.requests_per_minute.map(bucket),
            tokens: settings.tokens_per_minute.map(bucket),
            settings: settings.clone(),
            origin,
        };
        let by_hash = keys.iter().map(|settings| (settings.sha256, Arc::new(key(settings))));
        Keys { by_hash: by_hash.collect() }
    }

    /// Whose key a request bears. The key is taken out of its head.
    pub(crate) fn client(&self, head: &mut HeaderMap) -> Result<Known, Refusal> {
        let hash = take(head)
            .ok_or_else(|| unauthorized("no API key: send it as `Authorization: Bearer <key>`"))?;
        let key =
            self.by_hash.get(&hash).ok_or_else(|| unauthorized("the API key is not known"))?;
        Ok(Known(Arc::clone(key)))
    }
}

/// A client that is known and not counted yet.
pub(crate) struct Known(Arc<Key>);

impl Known {
    /// The name of its key.
    pub(crate) fn name(&self) -> &str {
        &self.0.settings.name
    }

    /// What it may use.
    pub(crate) fn allowed(&self) -> Allowed<'_> {
        Allowed(self.0.settings.models.as_deref())
    }

    /// A place for one request, or what limit it is past.
    pub(crate) fn enter(self) -> Result<Client, (&'static str, Refusal)> {
        let key = &self.0;
        let before = key.in_flight.fetch_add(1, Ordering::Relaxed);
        // From here on its drop gives the place back.
        let client = Client(Arc::clone(key));
        let most = key.settings.max_in_flight.map_or(u32::MAX, std::num::NonZeroU32::get);
        if before >= most {
            let message = format!("this API key has {most} requests in flight, its limit");
            let refusal = Refusal::new(429, message).retry_after(Duration::from_secs(1));
            return Err(("key_in_flight", refusal));
        }
        if let Err(wait) = key.take(key.requests.as_ref(), 1) {
            let most = key.settings.requests_per_minute.map_or(0, std::num::NonZeroU32::get);
            let message = format!("this API key is past {most} requests a minute, its limit");
            return Err(("key_requests", Refusal::new(429, message).retry_after(wait)));
        }
        Ok(client)
    }
}

impl Key {
    fn now(&self) -> Time {
        Time::ZERO.after(self.origin.elapsed())
    }

    fn take(&self, bucket: Option<&Mutex<Bucket>>, amount: u32) -> Result<(), Duration> {
        let Some(bucket) = bucket else { return Ok(()) };
        let mut bucket = bucket.lock().unwrap_or_else(PoisonError::into_inner);
        bucket.take(amount, self.now())
    }
}

impl Client {
    /// The name of its key.
    pub(crate) fn name(&self) -> &str {
        &self.0.settings.name
    }

    /// The highest priority that its requests may have.
    pub(crate) fn max_priority(&self) -> i8 {
        self.0.settings.max_priority
    }

    /// Whether it may use a model; what it may not use does not exist for it.
    fn may_use(&self, name: &str, base: Option<&str>) -> Result<(), Refusal> {
        let allowed = Allowed(self.0.settings.models.as_deref());
        if allowed.covers(name, base) { Ok(()) } else { Err(Refusal::no_model(name)) }
    }

    /// Takes a prompt's tokens from what it may use.
    fn take_tokens(&self, tokens: u32) -> Result<(), Refusal> {
        self.0.take(self.0.tokens.as_ref(), tokens).map_err(|wait| {
            let most = self.0.settings.tokens_per_minute.map_or(0, std::num::NonZeroU32::get);
            let message = format!("this API key is past {most} tokens a minute, its limit");
            Refusal::new(429, message).retry_after(wait)
        })
    }

    /// Takes a reply's tokens from what it may use.
    pub(crate) fn spend_tokens(&self, tokens: u64) {
        if let Some(bucket) = &self.0.tokens {
            let now = self.0.now();
            bucket.lock().unwrap_or_else(PoisonError::into_inner).spend(tokens, now);
        }
    }
}

/// Whether a client may use a model of a group by this name.
pub(crate) fn may_use(client: Option<&Client>, group: &Group, name: &str) -> Result<(), Refusal> {
    client.map_or(Ok(()), |client| client.may_use(name, group.base_of(name)))
}

/// Takes a prompt's tokens from what a client may use.
pub(crate) fn take_tokens(
    router: &Router,
    client: Option<&Client>,
    tokens: u32,
) -> Result<(), Refusal> {
    let Some(client) = client else { return Ok(()) };
    client.take_tokens(tokens).inspect_err(|_| report::limit(router, "key_tokens"))
}

impl Drop for Client {
    fn drop(&mut self) {
        self.0.in_flight.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Whether a request bears the key of a hash. The key is taken out of its head.
pub(crate) fn bears(head: &mut HeaderMap, wanted: &KeyHash) -> Result<(), Refusal> {
    match take(head) {
        Some(hash) if hash == *wanted => Ok(()),
        Some(_) => Err(unauthorized("the key is not that of `admin.key_sha256`")),
        None => Err(unauthorized("a key is wanted here: send it as `Authorization: Bearer <key>`")),
    }
}

pub(crate) fn unauthorized(message: &str) -> Refusal {
    Refusal::new(401, message)
}

/// The hash of the key in a head, which is taken out of it.
fn take(head: &mut HeaderMap) -> Option<KeyHash> {
    // Of a header that is given several times all values go; the first counts.
    let (bearer, plain) = (head.remove(header::AUTHORIZATION), head.remove(API_KEY));
    let bearer = bearer.as_ref().and_then(|value| bearer_of(value.as_bytes()));
    let key = bearer.or_else(|| plain.as_ref().map(HeaderValue::as_bytes))?;
    KeyHash::try_from(digest(&SHA256, key).as_ref()).ok()
}

fn bearer_of(value: &[u8]) -> Option<&[u8]> {
    let (scheme, key) = value.split_at_checked(7)?;
    scheme.eq_ignore_ascii_case(b"bearer ").then(|| key.trim_ascii())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn head(pairs: &[(&'static str, &'static str)]) -> HeaderMap {
        let pair = |(name, value): &(&'static str, &'static str)| {
            (HeaderName::from_static(name), HeaderValue::from_static(value))
        };
        pairs.iter().map(pair).collect()
    }

    #[test]
    fn a_key_is_read_from_either_header_and_taken_out_of_both() {
        let hash: Option<KeyHash> = digest(&SHA256, b"k").as_ref().try_into().ok();
        for pairs in [
            &[("authorization", "Bearer k"), ("x-api-key", "other")][..],
            &[("authorization", "bearer  k ")],
            &[("authorization", "Basic x"), ("x-api-key", "k")],
        ] {
            let mut head = head(pairs);
            assert_eq!(take(&mut head), hash, "{pairs:?}");
            assert!(head.is_empty());
        }
        assert_eq!(take(&mut head(&[("authorization", "k")])), None);
    }

    #[test]
    fn a_models_name_covers_its_other_names() {
        let names = ["llama".to_owned()];
        let allowed = Allowed(Some(&names));
        assert!(allowed.covers("llama", None) && allowed.covers("alias", Some("llama")));
        assert!(!allowed.covers("adapter", None) && !allowed.covers("qwen", Some("qwen")));
        assert!(Allowed::ALL.covers("anything", None));
    }
}
