//! What a prefill leg left for a decode leg: used once, within its lease, or released.
//!
//! Invariant: a hand-off that is dropped unused is released on a decode worker, because the prefill
//! worker would keep its KV pinned until the lease ends.

use std::sync::Arc;
use std::time::{Duration, Instant};

use pointsman_wire::dialect::Handoff;

use crate::fleet::{Group, Rank};
use crate::outgoing::Begun;
use crate::upstream::{Upstream, read};

/// How much earlier than its lease ends a hand-off counts as expired: it still has to travel.
const LEASE_MARGIN: Duration = Duration::from_secs(2);

/// How long a release may take.
const RELEASE_WAIT: Duration = Duration::from_secs(5);

/// Bytes of the answer to a release that are read, so that its connection can be used again.
const RELEASE_REPLY_BYTES: usize = 64 * 1024;

/// A hand-off that is not used yet.
pub(crate) struct Unused {
    handoff: Option<Handoff>,
    begun: Begun,
    received: Instant,
    /// The worker that holds the KV.
    pub(crate) prefill: Rank,
    group: Arc<Group>,
    upstream: Upstream,
    model: String,
}

impl Unused {
    pub(crate) fn new(
        handoff: Handoff,
        prefill: Rank,
        group: Arc<Group>,
        upstream: Upstream,
        model: String,
    ) -> Unused {
        let handoff = Some(handoff);
        Unused {
            handoff,
            begun: Begun::default(),
            received: Instant::now(),
            prefill,
            group,
            upstream,
            model,
        }
    }

    /// The hand-off, while it can be sent.
    pub(crate) fn get(&self) -> Option<&Handoff> {
        let handoff = self.handoff.as_ref()?;
        let lease = Duration::from_millis(handoff.lease_ms()).saturating_sub(LEASE_MARGIN);
        (self.received.elapsed() < lease).then_some(handoff)
    }

    /// What the leg that carries it reports on: once that has begun, the decode worker may have the
    /// hand-off, and nobody may use or release it again.
    pub(crate) fn begun(&self) -> Begun {
        self.begun.clone()
    }

    /// The worker refused the leg without looking at the hand-off: it can be released.
    pub(crate) fn not_taken(mut self) {
        self.begun = Begun::default();
    }
}

impl Drop for Unused {
    fn drop(&mut self) {
        let Some(handoff) = self.handoff.take().filter(|_| !self.begun.get()) else { return };
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
        let group = Arc::clone(&self.group);
        let (upstream, model) = (self.upstream.clone(), std::mem::take(&mut self.model));
        runtime.spawn(async move { release(&group, &upstream, &model, &handoff).await });
    }
}

/// Asks decode workers in turn until one has taken the release.
async fn release(group: &Group, upstream: &Upstream, model: &str, handoff: &Handoff) {
    let roster = group.roster.load_full();
    let decoders = roster
        .workers()
        .filter(|worker| worker.settings.role == pointsman_config::Role::Decode)
        .filter(|worker| worker.serves(model));
    for worker in decoders {
        let Some((path, leg)) = worker.dialect().release(model, handoff) else { continue };
        let Ok(uri) = worker.uri(path) else { continue };
        let mut headers = crate::headers::added(&leg.headers);
        worker.authorize(&mut headers);
        match upstream.post(uri, headers, leg.body, RELEASE_WAIT).await {
            Ok(response) => {
                let _ = read(response.into_body(), RELEASE_REPLY_BYTES).await;
                return;
            }
            Err(cause) => tracing::warn!(
                worker = worker.name(),
                %cause,
                "a prefilled prompt could not be released; its KV stays pinned until the lease ends"
            ),
        }
    }
}
