//! Where requests are that the brain told to wait. One of them at a time is asked about again, the
//! one that has waited longest, whenever a booking is released and when its time has come.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::sync::{Mutex, MutexGuard, Notify};

/// The line of one group.
#[derive(Debug, Default)]
pub(crate) struct Hold {
    /// Held by the head of the line; the lock itself is the line, first come, first served.
    head: Mutex<()>,
    released: Notify,
    held: AtomicUsize,
}

/// A place in the line; given up when it is dropped.
#[derive(Debug)]
pub(crate) struct Place<'a>(&'a Hold);

/// The place at its head.
#[derive(Debug)]
pub(crate) struct Head<'a> {
    hold: &'a Hold,
    _alone: MutexGuard<'a, ()>,
}

impl Hold {
    /// Joins the line.
    pub(crate) fn join(&self) -> Place<'_> {
        self.held.fetch_add(1, Ordering::Relaxed);
        Place(self)
    }

    /// How many are in it.
    pub(crate) fn held(&self) -> usize {
        self.held.load(Ordering::Relaxed)
    }

    /// Something that was booked is free.
    pub(crate) fn released(&self) {
        self.released.notify_one();
    }
}

impl Place<'_> {
    /// Waits to be at the head of the line.
    pub(crate) async fn head(&self) -> Head<'_> {
        Head { hold: self.0, _alone: self.0.head.lock().await }
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.0.held.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Head<'_> {
    /// Waits for a release, and no longer than this.
    pub(crate) async fn wait(&self, longest: Duration) {
        let _elapsed = tokio::time::timeout(longest, self.hold.released.notified()).await;
    }
}
