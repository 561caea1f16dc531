//! Who is let in: a bound on requests in the router, and the ticket that each of them holds.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;

use crate::auth::Client;

/// Counts requests in the router.
#[derive(Debug)]
pub(crate) struct Gate {
    limit: usize,
    inside: Arc<AtomicUsize>,
}

/// One request's place in the router; given back when it is dropped.
#[derive(Debug)]
pub(crate) struct Ticket {
    inside: Arc<AtomicUsize>,
    started: Instant,
    shown: Option<(Gauge, Histogram)>,
    /// Whose request it is, where clients have keys; its place goes with this one.
    pub(crate) client: Option<Arc<Client>>,
}

impl Gate {
    pub(crate) fn new(limit: usize) -> Gate {
        Gate { limit, inside: Arc::default() }
    }

    /// A place, if there is one.
    pub(crate) fn enter(&self) -> Option<Ticket> {
        let ticket = Ticket {
            inside: Arc::clone(&self.inside),
            started: Instant::now(),
            shown: None,
            client: None,
        };
        // Taken first and given back by the ticket's drop, so that two cannot share the last place.
        let before = self.inside.fetch_add(1, Ordering::Relaxed);
        (before < self.limit).then_some(ticket)
    }

    /// Requests inside.
    pub(crate) fn inside(&self) -> usize {
        self.inside.load(Ordering::Relaxed)
    }
}

impl Ticket {
    /// When the request came in.
    pub(crate) fn started(&self) -> Instant {
        self.started
    }

    /// Counts the request on a gauge for as long as it is inside, and its stay at the end.
    pub(crate) fn show(&mut self, inside: Gauge, stay_seconds: Histogram) {
        inside.inc();
        self.shown = Some((inside, stay_seconds));
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.inside.fetch_sub(1, Ordering::Relaxed);
        if let Some((inside, stay_seconds)) = &self.shown {
            inside.dec();
            stay_seconds.observe(self.started.elapsed().as_secs_f64());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Gate;

    #[test]
    fn no_more_than_the_limit_are_inside() {
        let gate = Gate::new(2);
        let (a, b) = (gate.enter(), gate.enter());
        assert!(a.is_some() && b.is_some());
        assert!(gate.enter().is_none());
        assert_eq!(gate.inside(), 2);
        drop(a);
        assert!(gate.enter().is_some());
        drop(b);
        assert_eq!(gate.inside(), 0);
    }
}
