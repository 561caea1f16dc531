//! The load ledger: what each live request has booked on which worker.
//! Invariant: the load of a worker is the sum over live bookings that touch it (see `audit`).
//! Every part of a booking is released exactly once; late, repeated and unknown calls do nothing.
//! An account belongs to one incarnation of a worker: what was booked on an earlier one is void.

use std::time::Duration;

use serde::Serialize;

use crate::demand::KvDemand;
use crate::fleet::{Path, Slot};
use crate::time::Time;

/// Names one booking; never given twice by one brain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BookingId {
    serial: u64,
    place: u32,
}

impl BookingId {
    pub(crate) fn serial(self) -> u64 {
        self.serial
    }

    /// Small, and given again once the booking is over.
    pub(crate) fn place(self) -> u32 {
        self.place
    }
}

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// All tokens were streamed.
    Finished,
    /// A leg failed.
    Failed,
    /// The client went away.
    Cancelled,
}

/// What is booked on one worker.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Load {
    /// Prompt tokens that it has to compute and has not yet; on decode and unified workers these
    /// are the local prefills in flight.
    pub prefill_tokens: u64,
    /// KV blocks.
    pub kv_blocks: u64,
    /// Requests that it works on.
    pub active: u32,
}

/// What settling a booking released.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settled {
    /// The path that the request took.
    pub path: Path,
    /// The prefill worker of a remote path.
    pub prefill: Option<Slot>,
    /// The worker that streamed.
    pub decode: Slot,
    /// How it ended.
    pub end: End,
    /// How long it was booked.
    pub held_for: Duration,
}

/// What a plan books.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Entry {
    /// The prefill worker of a remote path.
    pub(crate) prefill: Option<Slot>,
    /// The worker that decodes.
    pub(crate) decode: Slot,
    /// Whether the prefill worker has done its work already, in an earlier try.
    pub(crate) prefilled: bool,
    /// Tokens that the computing worker (`prefill`, or else `decode`) has to compute.
    pub(crate) prefill_tokens: u32,
    /// KV on the worker that decodes.
    pub(crate) kv: KvDemand,
}

/// One account per slot, one booking per live request.
#[derive(Debug, Default)]
pub(crate) struct Ledger {
    accounts: Vec<Account>,
    places: Vec<Option<Booking>>,
    free: Vec<u32>,
    next_serial: u64,
}

#[derive(Clone, Copy, Debug, Default)]
struct Account {
    incarnation: u64,
    load: Load,
}

/// A worker as it was when something was booked on it.
#[derive(Clone, Copy, Debug)]
struct Post {
    slot: Slot,
    incarnation: u64,
}

#[derive(Clone, Copy, Debug)]
struct Booking {
    serial: u64,
    since: Time,
    prefill: Option<Post>,
    decode: Post,
    /// Still booked on the computing worker.
    prefill_tokens: u32,
    /// Whether the prefill worker still works on it.
    prefilling: bool,
    kv: KvDemand,
    kv_blocks: u64,
}

impl Ledger {
    /// Starts an account with nothing on it; what is booked on the slot so far is void.
    pub(crate) fn reset(&mut self, slot: Slot) {
        if self.accounts.len() <= slot.index() {
            self.accounts.resize(slot.index() + 1, Account::default());
        }
        if let Some(account) = self.accounts.get_mut(slot.index()) {
            *account = Account { incarnation: account.incarnation + 1, load: Load::default() };
        }
    }

    pub(crate) fn load(&self, slot: Slot) -> Load {
        self.accounts.get(slot.index()).map_or(Load::default(), |account| account.load)
    }

    pub(crate) fn live(&self) -> usize {
        self.places.len() - self.free.len()
    }

    /// Books a plan.
    pub(crate) fn book(&mut self, entry: &Entry, now: Time) -> BookingId {
        let serial = self.next_serial;
        self.next_serial += 1;
        let booking = Booking {
            serial,
            since: now,
            prefill: entry.prefill.map(|slot| self.post(slot)),
            decode: self.post(entry.decode),
            prefill_tokens: entry.prefill_tokens,
            prefilling: entry.prefill.is_some() && !entry.prefilled,
            kv: entry.kv,
            kv_blocks: entry.kv.at_start(),
        };
        for (post, part) in booking.parts() {
            self.change(post, |load| load.add(part));
        }
        BookingId { serial, place: self.put(booking) }
    }

    /// Releases the prefill part of a remote path; that of a local path ends with the first token.
    pub(crate) fn prefill_done(&mut self, id: BookingId) {
        if self.get_mut(id).is_some_and(|booking| booking.prefill.is_some()) {
            self.first_token(id);
        }
    }

    /// Releases the prefill part on whichever worker computed.
    pub(crate) fn first_token(&mut self, id: BookingId) {
        let Some(booking) = self.get_mut(id) else { return };
        let [(post, part), _] = booking.parts();
        booking.prefill_tokens = 0;
        booking.prefilling = false;
        self.change(post, |load| load.sub(part));
    }

    /// Books more KV where `generated` tokens per sequence need more than what is booked.
    pub(crate) fn progress(&mut self, id: BookingId, generated: u32) {
        let Some(booking) = self.get_mut(id) else { return };
        let more = booking.kv.after(generated).saturating_sub(booking.kv_blocks);
        booking.kv_blocks += more;
        let post = booking.decode;
        self.change(post, |load| load.kv_blocks += more);
    }

    /// Releases everything that is left; `None` if there is no such booking any more.
    pub(crate) fn settle(&mut self, id: BookingId, end: End, now: Time) -> Option<Settled> {
        let booking = *self.get_mut(id)?;
        *self.places.get_mut(id.place as usize)? = None;
        self.free.push(id.place);
        for (post, part) in booking.parts() {
            self.change(post, |load| load.sub(part));
        }
        Some(Settled {
            path: if booking.prefill.is_some() { Path::Remote } else { Path::Local },
            prefill: booking.prefill.map(|post| post.slot),
            decode: booking.decode.slot,
            end,
            held_for: now.since(booking.since),
        })
    }

    /// Checks the invariant; the message names the worker and both sums.
    pub(crate) fn audit(&self) -> Result<(), String> {
        let mut sums = vec![Load::default(); self.accounts.len()];
        for (post, part) in self.places.iter().flatten().flat_map(Booking::parts) {
            let current = |account: &Account| account.incarnation == post.incarnation;
            if self.accounts.get(post.slot.index()).is_some_and(current)
                && let Some(sum) = sums.get_mut(post.slot.index())
            {
                sum.add(part);
            }
        }
        for (slot, (Account { load, .. }, sum)) in self.accounts.iter().zip(&sums).enumerate() {
            if load != sum {
                return Err(format!("worker {slot}: {load:?} reserved, {sum:?} in live bookings"));
            }
        }
        Ok(())
    }

    fn post(&self, slot: Slot) -> Post {
        let incarnation = self.accounts.get(slot.index()).map_or(0, |account| account.incarnation);
        Post { slot, incarnation }
    }

    fn change(&mut self, post: Post, change: impl FnOnce(&mut Load)) {
        if let Some(account) = self.accounts.get_mut(post.slot.index())
            && account.incarnation == post.incarnation
        {
            change(&mut account.load);
        }
    }

    fn put(&mut self, booking: Booking) -> u32 {
        if let Some(place) = self.free.pop()
            && let Some(empty) = self.places.get_mut(place as usize)
        {
            *empty = Some(booking);
            return place;
        }
        self.places.push(Some(booking));
        (self.places.len() - 1) as u32
    }

    fn get_mut(&mut self, id: BookingId) -> Option<&mut Booking> {
        let booking = self.places.get_mut(id.place as usize)?.as_mut()?;
        (booking.serial == id.serial).then_some(booking)
    }
}

impl Booking {
    /// What is still booked: on the computing worker, then on the one that decodes.
    fn parts(&self) -> [(Post, Load); 2] {
        let prefill = Load {
            prefill_tokens: u64::from(self.prefill_tokens),
            kv_blocks: 0,
            active: u32::from(self.prefilling),
        };
        let decode = Load { prefill_tokens: 0, kv_blocks: self.kv_blocks, active: 1 };
        [(self.prefill.unwrap_or(self.decode), prefill), (self.decode, decode)]
    }
}

impl Load {
    fn add(&mut self, part: Load) {
        self.prefill_tokens += part.prefill_tokens;
        self.kv_blocks += part.kv_blocks;
        self.active += part.active;
    }

    /// Never below zero: `audit` reports what does not add up, arithmetic must not stop the router.
    fn sub(&mut self, part: Load) {
        self.prefill_tokens = self.prefill_tokens.saturating_sub(part.prefill_tokens);
        self.kv_blocks = self.kv_blocks.saturating_sub(part.kv_blocks);
        self.active = self.active.saturating_sub(part.active);
    }
}
