//! Where requests are that the brain told to wait, and whose turn it is to ask it again.
//!
//! Invariants: one waiter asks at a time, from the first on, until so many heads of the line have been
//! told to wait on; whatever is released meanwhile begins another round. Who leaves gives up place and
//! turn by its drop.

use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use pointsman_brain::{Claim, Joined, LINE_HEADS, Line, Place, Wait};
use tokio::sync::Notify;

/// A `Retry-After` promises no more than this.
const LONGEST_RETRY: Duration = Duration::from_secs(60);

/// The line of one group.
#[derive(Debug)]
pub(crate) struct Hold {
    /// As many as are in line, to be read without the lock.
    held: AtomicUsize,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    line: Line<Arc<Waiter>>,
    round: Option<Round>,
    /// Something was released while a round was under way.
    again: bool,
    closed: bool,
    drain: Drain,
}

/// Heads of the line being asked about, one by one.
#[derive(Clone, Copy, Debug)]
struct Round {
    /// Whose turn it is.
    at: Place,
    /// How many before it were told to wait on.
    waiting: usize,
}

/// How fast the line moves.
#[derive(Debug, Default)]
struct Drain {
    last: Option<Instant>,
    /// Smoothed time from one that was served to the next.
    every: Duration,
}

#[derive(Debug, Default)]
struct Waiter {
    told: AtomicU8,
    wake: Notify,
}

/// What a waiter may be told.
#[derive(Clone, Copy)]
#[repr(u8)]
enum Told {
    Nothing,
    Turn,
    Displaced,
    Closed,
}

/// Why a request does not wait any longer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Away {
    /// The line is full of those before it; when to try again.
    Full(Duration),
    /// The router is to end.
    Closed,
}

/// A place in the line; given up when it is dropped.
#[derive(Debug)]
pub(crate) struct Waiting<'a> {
    hold: &'a Hold,
    claim: Claim,
    place: Place,
    waiter: Arc<Waiter>,
}

impl Hold {
    /// A line of at most so many.
    pub(crate) fn new(most: usize) -> Hold {
        let (line, drain) = (Line::new(most), Drain::default());
        let state = State { line, round: None, again: false, closed: false, drain };
        Hold { held: AtomicUsize::new(0), state: Mutex::new(state) }
    }

    /// Joins the line. One of its first is asked about at once, for something may have been released
    /// since it was told to wait.
    pub(crate) fn join(&self, claim: Claim) -> Result<Waiting<'_>, Away> {
        let mut state = self.lock();
        if state.closed {
            return Err(Away::Closed);
        }
        let waiter = Arc::new(Waiter::default());
        let place = match state.line.join(claim, Arc::clone(&waiter)) {
            Joined::Full => return Err(Away::Full(state.drain.retry_after(state.line.len()))),
            Joined::In(place) => place,
            Joined::Displaced(place, last) => {
                last.tell(Told::Displaced);
                place
            }
        };
        self.held.store(state.line.len(), Ordering::Release);
        if state.is_head(place) {
            state.begin_round();
        }
        Ok(Waiting { hold: self, claim, place, waiter })
    }

    /// How many are in it.
    pub(crate) fn held(&self) -> usize {
        self.held.load(Ordering::Acquire)
    }

    /// Whom a request that comes finds waiting.
    pub(crate) fn ahead(&self) -> Wait {
        if self.held() == 0 {
            Wait::IfNeeded
        } else if self.lock().line.is_in_time() {
            Wait::Behind
        } else {
            Wait::BehindLate
        }
    }

    /// Something that was booked is free, and the brain knows.
    pub(crate) fn released(&self) {
        // Whoever joins after this look asks the brain after it, and so finds what is free.
        if self.held() > 0 {
            self.lock().begin_round();
        }
    }

    /// Sends everybody away.
    pub(crate) fn close(&self) {
        let mut state = self.lock();
        state.closed = true;
        // Nobody passes a turn on over what is said here.
        state.round = None;
        for (_, waiter) in state.line.heads(usize::MAX) {
            waiter.tell(Told::Closed);
        }
    }

    /// How long all that wait will take, at the pace of the line.
    pub(crate) fn retry_after(&self) -> Duration {
        let state = self.lock();
        state.drain.retry_after(state.line.len())
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn is_head(&self, place: Place) -> bool {
        self.line.heads(LINE_HEADS).any(|(head, _)| head == place)
    }

    fn begin_round(&mut self) {
        if self.closed {
            return;
        }
        if self.round.is_some() {
            self.again = true;
        } else if let Some((at, waiter)) = self.line.heads(1).next() {
            self.round = Some(Round { at, waiting: 0 });
            waiter.tell(Told::Turn);
        }
    }

    /// The turn passes on, if it was this one's; `waits` if it stays in line.
    fn pass_on(&mut self, place: Place, waits: bool) {
        let Some(round) = self.round.filter(|round| round.at == place) else { return };
        let waiting = round.waiting + usize::from(waits);
        match self.line.after(place).filter(|_| waiting < LINE_HEADS) {
            Some((at, waiter)) => {
                self.round = Some(Round { at, waiting });
                waiter.tell(Told::Turn);
            }
            None => {
                self.round = None;
                if std::mem::take(&mut self.again) {
                    self.begin_round();
                }
            }
        }
    }
}

impl Drain {
    fn served(&mut self, now: Instant, left: usize) {
        if let Some(last) = self.last {
            let since = now.saturating_duration_since(last);
            self.every = if self.every.is_zero() { since } else { (self.every * 7 + since) / 8 };
        }
        // The pause until somebody waits again says nothing of how fast the line moves.
        self.last = (left > 0).then_some(now);
    }

    /// How long all that wait will take.
    fn retry_after(&self, waiting: usize) -> Duration {
        let waiting = u32::try_from(waiting).unwrap_or(u32::MAX);
        self.every.saturating_mul(waiting).min(LONGEST_RETRY)
    }
}

impl Waiter {
    fn tell(&self, told: Told) {
        self.told.store(told as u8, Ordering::Release);
        self.wake.notify_one();
    }
}

impl Waiting<'_> {
    /// Waits for the turn to ask the brain; after `again_in` all heads of the line have one.
    pub(crate) async fn turn(&self, again_in: Duration) -> Result<(), Away> {
        let mut alarm = Some(again_in);
        loop {
            const TURN: u8 = Told::Turn as u8;
            const DISPLACED: u8 = Told::Displaced as u8;
            const CLOSED: u8 = Told::Closed as u8;
            match self.waiter.told.swap(Told::Nothing as u8, Ordering::AcqRel) {
                TURN => return Ok(()),
                DISPLACED => return Err(Away::Full(self.hold.retry_after())),
                CLOSED => return Err(Away::Closed),
                _ => {}
            }
            let woken = self.waiter.wake.notified();
            match alarm {
                None => woken.await,
                Some(wait) => {
                    if tokio::time::timeout(wait, woken).await.is_err() {
                        alarm = None;
                        let mut state = self.hold.lock();
                        if state.is_head(self.place) {
                            state.begin_round();
                        }
                    }
                }
            }
        }
    }

    /// The brain said to wait on: the turn is the next one's. Who has become late stands back.
    pub(crate) fn waits_on(&mut self, late: bool) {
        let mut state = self.hold.lock();
        let falls_back = late && !self.claim.late;
        state.pass_on(self.place, !falls_back);
        if falls_back {
            self.claim.late = true;
            state.line.left(self.place);
            match state.line.join(self.claim, Arc::clone(&self.waiter)) {
                Joined::In(place) | Joined::Displaced(place, _) => self.place = place,
                // It has just made room.
                Joined::Full => self.waiter.tell(Told::Displaced),
            }
        }
    }

    /// It has its plan.
    pub(crate) fn served(self) {
        let mut state = self.hold.lock();
        state.line.served(self.place);
        let left = state.line.len();
        state.drain.served(Instant::now(), left);
        // The rest is the drop's.
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        let mut state = self.hold.lock();
        let head = state.is_head(self.place);
        state.line.left(self.place);
        self.hold.held.store(state.line.len(), Ordering::Release);
        state.pass_on(self.place, false);
        if head && state.round.is_none() {
            // Another one is among the first.
            state.begin_round();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::Future;
    use std::pin::pin;
    use std::task::{Context, Poll, Waker};

    use super::*;

    fn claim(priority: i8) -> Claim {
        Claim { priority, tokens: 10, ..Claim::default() }
    }

    /// Whether it is this one's turn.
    fn has_turn(waiting: &Waiting<'_>) -> Option<Result<(), Away>> {
        let turn = pin!(waiting.turn(Duration::MAX));
        match turn.poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(answer) => Some(answer),
            Poll::Pending => None,
        }
    }

    #[tokio::test]
    async fn one_asks_at_a_time_and_the_next_one_after_it() {
        let hold = Hold::new(8);
        let mut a = hold.join(claim(0)).unwrap();
        let b = hold.join(claim(0)).unwrap();
        assert_eq!((has_turn(&a), has_turn(&b)), (Some(Ok(())), None));
        a.waits_on(false);
        assert_eq!((has_turn(&a), has_turn(&b)), (None, Some(Ok(()))));
        // What is released meanwhile begins another round.
        hold.released();
        assert_eq!(has_turn(&a), None);
        b.served();
        assert_eq!((has_turn(&a), hold.held()), (Some(Ok(())), 1));
    }

    #[tokio::test]
    async fn who_leaves_passes_the_turn_on() {
        let hold = Hold::new(8);
        let a = hold.join(claim(0)).unwrap();
        let b = hold.join(claim(0)).unwrap();
        drop(a);
        assert_eq!((has_turn(&b), hold.held()), (Some(Ok(())), 1));
        drop(b);
        hold.released();
        assert_eq!(hold.held(), 0);
    }

    #[tokio::test]
    async fn who_has_become_late_is_asked_after_those_that_have_not() {
        let hold = Hold::new(8);
        let mut a = hold.join(claim(0)).unwrap();
        let mut b = hold.join(claim(0)).unwrap();
        assert_eq!(hold.ahead(), Wait::Behind);
        assert_eq!(has_turn(&a), Some(Ok(())));
        a.waits_on(true);
        assert_eq!(has_turn(&b), Some(Ok(())));
        b.waits_on(true);
        assert_eq!(hold.ahead(), Wait::BehindLate);
        hold.released();
        assert_eq!((has_turn(&a), has_turn(&b)), (Some(Ok(())), None));
        a.waits_on(true);
        assert_eq!(has_turn(&b), Some(Ok(())));
    }

    #[tokio::test]
    async fn a_full_line_and_a_closed_one_take_nobody() {
        let hold = Hold::new(1);
        let a = hold.join(claim(0)).unwrap();
        assert!(matches!(hold.join(claim(0)), Err(Away::Full(_))));
        let b = hold.join(claim(1)).unwrap();
        assert!(matches!(has_turn(&a), Some(Err(Away::Full(_)))));
        drop(a);
        assert_eq!((has_turn(&b), hold.held()), (Some(Ok(())), 1));
        hold.close();
        assert_eq!(has_turn(&b), Some(Err(Away::Closed)));
        assert!(matches!(hold.join(claim(0)), Err(Away::Closed)));
    }

    #[tokio::test]
    async fn who_has_the_turn_when_the_line_is_closed_passes_it_to_nobody() {
        let hold = Hold::new(8);
        let mut a = hold.join(claim(0)).unwrap();
        let b = hold.join(claim(0)).unwrap();
        assert_eq!(has_turn(&a), Some(Ok(())));
        hold.close();
        a.waits_on(false);
        hold.released();
        assert_eq!(has_turn(&a), Some(Err(Away::Closed)));
        assert_eq!(has_turn(&b), Some(Err(Away::Closed)));
    }

    /// Ten threads that ask, wait on, are served or leave as it comes, and things that are released:
    /// whoever is left is asked in the end.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn no_turn_is_ever_lost() {
        let hold = Arc::new(Hold::new(64));
        let mut all = tokio::task::JoinSet::new();
        for number in 0..10_u32 {
            let hold = Arc::clone(&hold);
            all.spawn(async move {
                for step in 0..200_u32 {
                    let mut waiting = hold.join(claim(0)).unwrap();
                    for again in 0..=(number + step) % 3 {
                        waiting.turn(Duration::from_secs(3600)).await.unwrap();
                        if again < (number + step) % 3 {
                            waiting.waits_on(step % 5 == 0);
                            hold.released();
                        }
                    }
                    if step % 7 == 0 { drop(waiting) } else { waiting.served() }
                }
            });
        }
        let all = tokio::time::timeout(Duration::from_secs(60), all.join_all());
        all.await.expect("nobody is forgotten");
        assert_eq!(hold.held(), 0);
    }
}
