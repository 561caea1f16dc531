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

/// How much earlier than its lease ends a hand-off counts as expired, because it still has to travel: at
/// most this, and of a short lease a quarter.
const LEASE_MARGIN: Duration = Duration::from_secs(2);

/// How often it is noted that a prefill worker has not answered yet.
const LOOK_PAUSE: Duration = Duration::from_millis(250);

/// How long a release may take.
const RELEASE_WAIT: Duration = Duration::from_secs(5);

/// Bytes of the answer to a release that are read, so that its connection can be used again.
const RELEASE_REPLY_BYTES: usize = 64 * 1024;

/// A hand-off that is not used yet.
pub(crate) struct Unused {
    handoff: Option<Handoff>,
    begun: Begun,
    /// When the lease began at the earliest.
    held_since: Instant,
    /// The worker that holds the KV.
    pub(crate) prefill: Rank,
    group: Arc<Group>,
    upstream: Upstream,
    model: String,
}

impl Unused {
    /// `held_since`: when the prefill worker had not answered yet.
    pub(crate) fn new(
        handoff: Handoff,
        held_since: Instant,
        prefill: Rank,
        group: Arc<Group>,
        upstream: Upstream,
        model: String,
    ) -> Unused {
        let handoff = Some(handoff);
        Unused { handoff, begun: Begun::default(), held_since, prefill, group, upstream, model }
    }

    /// The hand-off, while it can be sent.
    pub(crate) fn get(&self) -> Option<&Handoff> {
        let handoff = self.handoff.as_ref()?;
        let usable = usable(Duration::from_millis(handoff.lease_ms()));
        (self.held_since.elapsed() < usable).then_some(handoff)
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

/// For how long of its lease a hand-off may still be sent.
fn usable(lease: Duration) -> Duration {
    lease - LEASE_MARGIN.min(lease / 4)
}

/// Waits for a prefill worker's answer, and says when it was not there yet. A router that was stopped
/// for a while (a paused machine, a starved one) finds an old answer on its socket, and must not take its
/// lease for a fresh one.
pub(crate) async fn watched<T>(answer: impl Future<Output = T>) -> (T, Instant) {
    let mut answer = std::pin::pin!(answer);
    let mut not_yet = Instant::now();
    loop {
        let asked = Instant::now();
        match tokio::time::timeout(LOOK_PAUSE, &mut answer).await {
            Ok(answer) => return (answer, not_yet),
            Err(_elapsed) if asked.elapsed() < LOOK_PAUSE * 2 => not_yet = asked,
            // A look that comes late says nothing: the connection may not have been read since.
            Err(_elapsed) => {}
        }
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
        worker.address(&mut headers);
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_short_lease_is_used_too() {
        let seconds = Duration::from_secs;
        assert_eq!(usable(seconds(30)), seconds(28));
        assert_eq!(usable(seconds(8)), seconds(6));
        assert_eq!(usable(seconds(1)), Duration::from_millis(750));
    }

    #[tokio::test]
    async fn an_answer_that_lay_unread_is_as_old_as_the_last_look() {
        let began = Instant::now();
        let stopped = LOOK_PAUSE * 3;
        let (deliver, answer) = tokio::sync::oneshot::channel();
        tokio::spawn(async move {
            // As if the process had been stopped: nothing else runs meanwhile, and then all at once.
            std::thread::sleep(stopped);
            for _ in 0..8 {
                tokio::task::yield_now().await;
            }
            let _ = deliver.send(());
        });
        let (delivered, not_yet) = watched(answer).await;
        assert!(delivered.is_ok());
        assert!(not_yet.duration_since(began) < LOOK_PAUSE && not_yet.elapsed() >= stopped);
    }

    #[tokio::test]
    async fn a_lease_begins_with_the_answer_however_long_the_prompt_took() {
        let took = LOOK_PAUSE * 3;
        let (answered, not_yet) = watched(async {
            tokio::time::sleep(took).await;
            Instant::now()
        })
        .await;
        assert!(answered.saturating_duration_since(not_yet) <= LOOK_PAUSE * 3);
    }
}
