//! One worker as the cost model sees it: the prompts that it was given and has not finished (FCFS),
//! the sequences that stream from it, and what of both can be used as a measurement.
//! Invariants: time never runs backwards here; a measurement spans no cancelled prompt; decode
//! windows do not overlap and hold no local prefill. Which constants hold is not known here.

use std::collections::VecDeque;

use super::filter::Average;
use super::physics::{Batch, Constants, Prefill};
use super::running::Running;
use super::told::{Seen, Told};
use crate::fleet::{Reading, Role};
use crate::time::Time;

/// Chunks after which a measurement of a worker that is never idle is closed. The longer, the less
/// it matters that prompts share steps at its ends.
const WINDOW_CHUNKS: f64 = 4.0;

/// Tokens that a decode measurement spans at least, so that engines that hand over several at once
/// do not look as if they were fast and slow by turns.
const WINDOW_TOKENS: u32 = 8;

/// Prompts that a worker's queue has room for from the start.
const QUEUE_ROOM: usize = 64;

/// A worker.
#[derive(Clone, Debug)]
pub(crate) struct Desk {
    pub(crate) role: Role,
    pub(crate) chunk: u32,
    /// Prompts given to it and not yet computed, in order.
    queue: VecDeque<Queued>,
    /// Their sum.
    pub(crate) waiting: Prefill,
    /// Since when it is at the first of them.
    head_since: Time,
    window: Window,
    /// Counts prompts that were ever queued.
    prompts: u64,
    /// Sum of all prompts it has computed.
    done: Prefill,
    pub(crate) running: Running,
    /// What streams.
    pub(crate) batch: Batch,
    /// What is booked and does not stream yet.
    pub(crate) coming: Batch,
    past: Past,
    /// End of the last decode measurement.
    measured_until: Time,
    reported: Reported,
    pub(crate) prefill_bias: Average,
    pub(crate) decode_bias: Average,
    /// How many measurements of both the engine itself made.
    pub(crate) own_prefills: u64,
    pub(crate) own_decodes: u64,
    /// Relative error of predicted TTFT, remote and local.
    pub(crate) errors: [Average; 2],
}

/// A prompt that was given to a worker.
#[derive(Clone, Copy, Debug)]
struct Queued {
    /// The booking, by its place.
    place: u32,
    since: Time,
    work: Prefill,
    /// When it is taken to be computed, where its end will not be seen.
    silent_until: Option<Time>,
}

/// Sums over time of what streamed, in sequence seconds and token seconds.
#[derive(Clone, Copy, Debug, Default)]
struct Past {
    until: Time,
    sums: Batch,
}

/// A stretch of time in which the worker computed prompts without a pause.
#[derive(Clone, Copy, Debug)]
struct Window {
    since: Time,
    work: Prefill,
    past: Batch,
    /// It began while a decode step was under way.
    mid_step: bool,
    sound: bool,
}

/// When the engine was last read, and where this router was then.
#[derive(Clone, Copy, Debug, Default)]
struct Reported {
    at: Time,
    mark: Mark,
    /// Prompt tokens waiting beyond those that this router sent.
    beyond: f64,
    counters: Told,
}

/// Prompts that were computed, and how long that took.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct PrefillSample {
    pub(crate) seconds: f64,
    pub(crate) work: Prefill,
    /// What streamed beside, on average.
    pub(crate) beside: Batch,
    pub(crate) mid_step: bool,
}

/// Tokens that streamed, and how long one took.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct DecodeSample {
    pub(crate) seconds: f64,
    pub(crate) batch: Batch,
}

/// Where a stretch without prefill may begin.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Mark {
    at: Time,
    tokens: u32,
    past: Batch,
    /// Prompts that were ever queued by then; none if one was being computed.
    prompts: Option<u64>,
}

/// What became of a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Left {
    Computed,
    Dropped,
}

impl Desk {
    pub(crate) fn new(role: Role, chunk: u32) -> Desk {
        let nothing = Window {
            since: Time::ZERO,
            work: Prefill::default(),
            past: Batch::default(),
            mid_step: false,
            sound: false,
        };
        Desk {
            role,
            chunk,
            queue: VecDeque::with_capacity(QUEUE_ROOM),
            waiting: Prefill::default(),
            head_since: Time::ZERO,
            window: nothing,
            prompts: 0,
            done: Prefill::default(),
            running: Running::with_room(),
            batch: Batch::default(),
            coming: Batch::default(),
            past: Past::default(),
            measured_until: Time::ZERO,
            reported: Reported::default(),
            prefill_bias: Average::starting_at(1.0),
            decode_bias: Average::starting_at(1.0),
            own_prefills: 0,
            own_decodes: 0,
            errors: [Average::starting_at(0.0); 2],
        }
    }

    /// Adds up what streamed until `now`.
    fn pass(&mut self, now: Time) {
        let seconds = now.since(self.past.until).as_secs_f64();
        self.past.until = self.past.until.max(now);
        self.past.sums.sequences += seconds * self.batch.sequences;
        self.past.sums.context += seconds * self.batch.context;
        self.pass_silent();
    }

    /// Takes out what must be computed by now, though nobody said so.
    fn pass_silent(&mut self) {
        while let Some(&Queued { work, silent_until: Some(until), .. }) = self.queue.front()
            && until <= self.past.until
        {
            self.queue.pop_front();
            self.left_queue(work);
            self.head_since = self.head_since.max(until);
            self.window.sound = false;
        }
    }

    fn left_queue(&mut self, work: Prefill) {
        self.waiting.take(work);
        if self.queue.is_empty() {
            self.waiting = Prefill::default();
        }
    }

    /// What streamed on average since then.
    fn average_since(&self, at: Time, past: Batch) -> Batch {
        let seconds = self.past.until.since(at).as_secs_f64();
        if seconds <= 0.0 {
            return self.batch;
        }
        let sums = self.past.sums.minus(past);
        Batch { sequences: sums.sequences / seconds, context: sums.context / seconds }
    }

    /// A prompt is given to the worker.
    pub(crate) fn enqueue(
        &mut self,
        place: u32,
        work: Prefill,
        silent_until: Option<Time>,
        now: Time,
    ) {
        self.pass(now);
        if self.queue.is_empty() {
            self.head_since = self.past.until;
            self.open_window(self.past.until);
            self.window.mid_step = self.batch.sequences > 0.0;
        }
        self.queue.push_back(Queued { place, since: self.past.until, work, silent_until });
        self.window.sound &= silent_until.is_none();
        self.waiting.add(work);
        self.prompts += 1;
        self.reported.counters.shared |= self.queue.len() > 1;
    }

    fn open_window(&mut self, since: Time) {
        self.window = Window {
            since,
            work: Prefill::default(),
            past: self.past.sums,
            mid_step: false,
            sound: true,
        };
    }

    /// A prompt leaves the queue. If it is computed, it has been so since `computed`.
    pub(crate) fn dequeue(
        &mut self,
        place: u32,
        left: Left,
        computed: Time,
        now: Time,
    ) -> Option<PrefillSample> {
        self.pass(now);
        let at = self.queue.iter().position(|queued| queued.place == place)?;
        let Queued { work, .. } = self.queue.remove(at)?;
        self.left_queue(work);
        if left == Left::Dropped {
            self.window.sound = false;
        } else {
            self.done.add(work);
            self.window.work.add(work);
        }
        // Whoever is next was begun then, if it was there.
        let next = self.queue.front().map(|next| next.since.max(computed));
        let next = next.unwrap_or(self.past.until).min(self.past.until);
        if at == 0 {
            self.head_since = next;
        }
        let long = WINDOW_CHUNKS * f64::from(self.chunk);
        if !self.queue.is_empty() && self.window.sound && self.window.work.tokens < long {
            return None;
        }
        let closed = self.window;
        self.open_window(next);
        self.window.sound = self.queue.iter().all(|queued| queued.silent_until.is_none());
        (closed.sound && closed.work.tokens > 0.0).then(|| PrefillSample {
            seconds: computed.min(self.past.until).since(closed.since).as_secs_f64(),
            work: closed.work,
            beside: self.average_since(closed.since, closed.past),
            mid_step: closed.mid_step,
        })
    }

    /// `W`: seconds until the prompts in the queue are computed, as seen at `now`.
    pub(crate) fn wait(&self, by: &Constants, now: Time) -> f64 {
        let (mut passed, mut head_since) = (0.0, self.head_since);
        let mut queue = self.queue.iter();
        let head = loop {
            match queue.next() {
                Some(&Queued { work, silent_until: Some(until), .. }) if until <= now => {
                    passed += work.seconds(by);
                    head_since = head_since.max(until);
                }
                other => break other.map_or(0.0, |queued| queued.work.seconds(by)),
            }
        };
        let had = passed + now.since(head_since).as_secs_f64().min(head);
        let since = now.since(self.reported.at).as_secs_f64();
        let beyond = (self.reported.beyond * by.a1 - since).max(0.0);
        (self.waiting.seconds(by) - had).max(0.0) + beyond
    }

    /// A sequence streams from here on; its row.
    pub(crate) fn join(
        &mut self,
        place: u32,
        batch: Batch,
        strict: f32,
        osl: f64,
        now: Time,
    ) -> u32 {
        self.pass(now);
        self.batch = self.batch.plus(batch);
        self.running.join(place, now.0 as f64 * 1e-9, strict, osl)
    }

    /// A sequence grew by this much context in all.
    pub(crate) fn grow(&mut self, context: f64, now: Time) {
        self.pass(now);
        self.batch.context += context;
    }

    /// A sequence is over; the place of the one that has its row from here on, if another has.
    pub(crate) fn leave(&mut self, row: u32, batch: Batch, now: Time) -> Option<u32> {
        self.pass(now);
        self.batch = self.batch.minus(batch);
        let moved = self.running.leave(row);
        if self.running.len() == 0 {
            self.batch = Batch::default();
        }
        moved
    }

    /// Marks where a sequence has `tokens` tokens.
    pub(crate) fn mark(&self, tokens: u32) -> Mark {
        Mark {
            at: self.past.until,
            tokens,
            past: self.past.sums,
            prompts: self.queue.is_empty().then_some(self.prompts),
        }
    }

    /// Whether no prompt was computed here since a mark.
    pub(crate) fn is_calm_since(&self, mark: &Mark) -> bool {
        mark.prompts == Some(self.prompts)
    }

    /// A sequence has `tokens` tokens: moves its mark, and measures what lies between if it can be used.
    pub(crate) fn measure(&mut self, mark: &mut Mark, tokens: u32) -> Option<DecodeSample> {
        let streamed = tokens.saturating_sub(mark.tokens);
        if streamed < WINDOW_TOKENS {
            return None;
        }
        let begun = std::mem::replace(mark, self.mark(tokens));
        if !self.is_calm_since(&begun) || begun.at < self.measured_until {
            return None;
        }
        self.measured_until = mark.at;
        Some(DecodeSample {
            seconds: mark.at.since(begun.at).as_secs_f64() / f64::from(streamed),
            batch: self.average_since(begun.at, begun.past),
        })
    }

    /// The engine's own counters: what they say of the time since they were last read.
    pub(crate) fn read(
        &mut self,
        reading: &Reading,
        now: Time,
    ) -> (Option<PrefillSample>, Option<DecodeSample>) {
        self.pass(now);
        let Reported { at, mark, .. } = self.reported;
        let seen = Seen {
            elapsed: self.past.until.since(at),
            done: self.done,
            streamed: self.average_since(mark.at, mark.past),
            calm: self.is_calm_since(&mark),
            queued: self.queue.len(),
        };
        let beyond = |tokens: u64| (tokens as f64 - self.waiting.tokens).max(0.0);
        self.reported.beyond = reading.waiting_prefill_tokens.map_or(0.0, beyond);
        (self.reported.at, self.reported.mark) = (self.past.until, self.mark(0));
        self.reported.counters.next(reading, &seen)
    }

    /// Prompts in the queue.
    pub(crate) fn queued(&self) -> usize {
        self.queue.len()
    }
}
