//! A booking in the brain's ledger that cannot leak: whoever drops it has settled it.

use std::sync::Arc;

use pointsman_brain::{BookingId, End, FirstToken};

use crate::fleet::Group;

/// How many tokens stream between two reports of a request's growth.
const PROGRESS_TOKENS: u64 = 16;

/// One live booking. Dropped without [`Booking::end`], the client has gone away.
pub(crate) struct Booking {
    group: Arc<Group>,
    id: BookingId,
    end: End,
    reported: u64,
}

impl Booking {
    pub(crate) fn new(group: Arc<Group>, id: BookingId) -> Booking {
        Booking { group, id, end: End::Cancelled, reported: 0 }
    }

    /// The prefill leg was answered.
    pub(crate) fn prefill_done(&self) {
        self.group.brain().prefill_done(self.id, self.group.now());
        self.group.hold.released();
    }

    /// The first token came: what was predicted of it, and what it was.
    pub(crate) fn first_token(&self) -> Option<FirstToken> {
        let first = self.group.brain().first_token(self.id, self.group.now());
        self.group.hold.released();
        first
    }

    /// So many tokens have come; told to the brain now and then.
    pub(crate) fn progress(&mut self, tokens: u64) {
        if tokens >= self.reported + PROGRESS_TOKENS {
            self.report(tokens);
        }
    }

    fn report(&mut self, tokens: u64) {
        self.reported = tokens;
        let tokens = u32::try_from(tokens).unwrap_or(u32::MAX);
        self.group.brain().progress(self.id, tokens, self.group.now());
    }

    /// Settles the booking as finished or failed, after so many tokens.
    pub(crate) fn end(mut self, end: End, tokens: u64) {
        if tokens > self.reported {
            self.report(tokens);
        }
        self.end = end;
    }
}

impl Drop for Booking {
    fn drop(&mut self) {
        self.group.brain().settle(self.id, self.end, self.group.now());
        self.group.hold.released();
    }
}
