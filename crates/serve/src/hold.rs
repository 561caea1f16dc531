//! Where requests are that the brain told to wait. The first few of the line are asked about again
//! whenever a booking is released and when their time has come.

use std::sync::atomic::{AtomicUsize, Ordering};

use pointsman_brain::LINE_HEADS;
use tokio::sync::futures::Notified;
use tokio::sync::{Notify, Semaphore, SemaphorePermit};

/// The line of one group.
#[derive(Debug)]
pub(crate) struct Hold {
    /// One for each place at the head of the line; waiting for one is the line, first come, first served.
    heads: Semaphore,
    released: Notify,
    held: AtomicUsize,
}

/// A place in the line; given up when it is dropped.
#[derive(Debug)]
pub(crate) struct Place<'a>(&'a Hold);

impl Hold {
    pub(crate) fn new() -> Hold {
        Hold {
            heads: Semaphore::new(LINE_HEADS),
            released: Notify::new(),
            held: AtomicUsize::new(0),
        }
    }

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
        self.released.notify_waiters();
    }

    /// The next release after this call.
    pub(crate) fn next_release(&self) -> Notified<'_> {
        self.released.notified()
    }

    /// Sends everybody away.
    pub(crate) fn close(&self) {
        self.heads.close();
        self.released.notify_waiters();
    }

    /// Whether everybody was sent away.
    pub(crate) fn is_closed(&self) -> bool {
        self.heads.is_closed()
    }
}

impl Place<'_> {
    /// Waits to be one of the first; none when the line is closed.
    pub(crate) async fn head(&self) -> Option<SemaphorePermit<'_>> {
        self.0.heads.acquire().await.ok()
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.0.held.fetch_sub(1, Ordering::Relaxed);
    }
}
