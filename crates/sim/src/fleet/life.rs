//! The life of one request in a fleet: decide, prefill, pull, decode, settle, as the server does it.

use std::time::Duration;

use pointsman_brain::{
    Ask, BookingId, Cause, Claim, Decision, End, HealthEvent, Held, Joined, LINE_HEADS, Ladder,
    Leg, Next, NoPath, Path, Place, Slot, Time, Wait,
};

use super::worker::{NotTaken, Worker};
use super::{Ending, Fleet, FleetRequest, Outcome, Part, RequestId, slot};
use crate::engine::{Job, JobId, Kind, LinkId, Nanos, Output};

/// A request under way.
pub(super) struct Live {
    request: FleetRequest,
    ladder: Ladder,
    arrived: Nanos,
    booking: Option<BookingId>,
    decision: Option<Decision>,
    /// Its place among those that wait, and whether that is one of those that are late.
    place: Option<Place>,
    late: bool,
    /// Worker and job of the prefill leg, from its start until its KV is pulled.
    prefill: Option<(usize, JobId)>,
    /// Worker and job of the leg that streams.
    decode: Option<(usize, JobId)>,
    first_token: Option<Nanos>,
    tokens: u32,
}

impl Live {
    pub(super) fn runs(&self, worker: usize, job: JobId) -> bool {
        let this = Some((worker, job));
        self.prefill == this || self.decode == this
    }
}

impl Fleet {
    /// A request arrives now. Its outcome comes with [`Fleet::take_outcomes`].
    pub fn submit(&mut self, request: FleetRequest) {
        let id = request.id;
        let live = Live {
            ladder: Ladder::new(self.brain.settings()),
            request,
            arrived: self.now,
            booking: None,
            decision: None,
            place: None,
            late: false,
            prefill: None,
            decode: None,
            first_token: None,
            tokens: 0,
        };
        self.live.insert(id, live);
        self.plan(id);
    }

    /// The client of a request leaves; nothing happens if it has ended.
    pub fn cancel(&mut self, id: RequestId) {
        if let Some((worker, _)) = self.live.get(&id).and_then(|live| live.decode) {
            self.note_progress(worker);
        }
        self.end(id, Ending::Cancelled);
    }

    /// The last decision taken for a live request.
    #[must_use]
    pub fn decision(&self, id: RequestId) -> Option<Decision> {
        self.live.get(&id)?.decision
    }

    fn plan(&mut self, id: RequestId) {
        for worker in 0..self.workers.len() {
            self.note_progress(worker);
        }
        let Some(live) = self.live.get(&id) else { return };
        let content = live.request.content.clone();
        let blocks = self.block_size().map_or(0, |size| live.request.prompt_tokens / size) as usize;
        let names = &content.names[..blocks.min(content.names.len())];
        let held: Vec<Held> = self
            .sight
            .overlap(names, self.workers.len())
            .into_iter()
            .map(|device| Held { device, ..Held::default() })
            .collect();
        let Some(live) = self.live.get_mut(&id) else { return };
        let ask = Ask {
            session: live.request.session,
            slo: live.request.slo,
            waited: Duration::from_nanos(self.now - live.arrived),
            wait: match live.place {
                Some(_) => Wait::InLine,
                None if self.held.is_in_time() => Wait::Behind,
                None if self.held.is_empty() => Wait::IfNeeded,
                None => Wait::BehindLate,
            },
            ..Ask::new(live.request.prompt_tokens, &held, &live.ladder)
        };
        match self.brain.decide(&ask, Time(self.now)) {
            Ok(decision) => {
                live.booking = Some(decision.booking);
                live.decision = Some(decision);
                self.dispatch(id, &decision);
            }
            Err(NoPath::Held { again_in, late }) => {
                let again = self.now + again_in.as_nanos() as Nanos;
                self.ask_again = Some(self.ask_again.map_or(again, |at| at.min(again)));
                self.hold(id, late);
            }
            Err(_) => self.end(id, Ending::Failed),
        }
    }

    /// Gives it a place in line, another one when it has become late there.
    fn hold(&mut self, id: RequestId, late: bool) {
        let Some(live) = self.live.get_mut(&id) else { return };
        match live.place {
            Some(place) if late && !live.late => {
                self.held.left(place);
            }
            Some(_) => return,
            None => {
                let longest = self.brain.settings().admission.max_wait.as_nanos() as Nanos;
                self.expiring.push_back((self.now + longest, id));
            }
        }
        live.late = late;
        let FleetRequest { priority, tenant, prompt_tokens: tokens, .. } = live.request;
        let refused = match self.held.join(Claim { late, priority, tenant, tokens }, id) {
            Joined::In(place) => {
                live.place = Some(place);
                None
            }
            Joined::Displaced(place, last) => {
                live.place = Some(place);
                Some(last)
            }
            Joined::Full => Some(id),
        };
        if let Some(refused) = refused {
            self.end(refused, Ending::Refused);
        }
    }

    /// Refuses those that have waited as long as they may.
    pub(super) fn refuse_expired(&mut self) {
        let now = self.now;
        while let Some((_, id)) = self.expiring.pop_front_if(|(due, _)| *due <= now) {
            if self.live.get(&id).is_some_and(|live| live.place.is_some()) {
                self.end(id, Ending::Refused);
            }
        }
    }

    /// Asks again about the first of those that wait.
    pub(super) fn release_held(&mut self) {
        self.ask_again = None;
        let mut waiting = 0;
        let mut next = self.held.heads(1).next().map(|(place, id)| (place, *id));
        while let Some((place, id)) = next.filter(|_| waiting < LINE_HEADS) {
            self.plan(id);
            if let Some(live) = self.live.get(&id).filter(|live| live.booking.is_none()) {
                // Who was found late stands further back: another one is among the first.
                waiting += usize::from(live.place == Some(place));
            } else {
                self.held.served(place);
                if let Some(live) = self.live.get_mut(&id) {
                    live.place = None;
                }
            }
            next = self.held.after(place).map(|(place, id)| (place, *id));
        }
    }

    fn dispatch(&mut self, id: RequestId, decision: &Decision) {
        match (decision.path, decision.prefill) {
            (Path::Remote, Some(_)) if decision.prefilled => self.start_decode(id),
            (Path::Remote, Some(prefill)) => self.start(id, prefill, Part::Prefill, Kind::HandOff),
            _ => self.start(id, decision.decode, Part::Decode, Kind::Local),
        }
    }

    fn start_decode(&mut self, id: RequestId) {
        let Some(live) = self.live.get(&id) else { return };
        let (Some(decision), Some((from, pin))) = (live.decision, live.prefill) else { return };
        self.workers[from].hold(pin);
        let link = Kind::Pull(LinkId(from as u64));
        self.start(id, decision.decode, Part::Decode, link);
    }

    /// Sends one leg to a worker.
    fn start(&mut self, id: RequestId, to: Slot, part: Part, kind: Kind) {
        let Some(live) = self.live.get_mut(&id) else { return };
        let (worker, job) = (usize::from(to.0), JobId(self.next_job));
        self.next_job += 1;
        let output_tokens = if part == Part::Prefill { 1 } else { live.request.output_tokens };
        let whole = Job {
            id: job,
            prompt_tokens: live.request.prompt_tokens,
            output_tokens,
            kind,
            content: live.request.content.clone(),
        };
        let sent = self.workers[worker].submit(whole, self.now);
        match sent {
            Ok(()) => {
                match part {
                    Part::Prefill => live.prefill = Some((worker, job)),
                    Part::Decode => live.decode = Some((worker, job)),
                }
                self.jobs.insert((worker, job), (id, part));
                self.pump(worker);
            }
            Err(why) => {
                let cause = match why {
                    NotTaken::Dead => Cause::Connect,
                    NotTaken::Refused => Cause::Status(400),
                };
                self.leg_failed(id, leg_of(part, kind), to, cause);
            }
        }
    }

    /// Something came out of an engine.
    pub(super) fn follow(&mut self, worker: usize, output: &Output) {
        let (job, at) = match *output {
            Output::Pulled { job, .. } => return self.pulled(worker, job),
            Output::Finished { job, at, .. } => return self.finished(worker, job, at),
            Output::Token { job, at } => (job, at),
            // A pin is held from the moment it is made, so none expires.
            Output::Started { .. } | Output::Expired { .. } => return,
        };
        let Some(&(id, Part::Decode)) = self.jobs.get(&(worker, job)) else { return };
        let Some(live) = self.live.get_mut(&id) else { return };
        let (Some(booking), None) = (live.booking, live.first_token) else { return };
        self.freed = true;
        live.tokens = 1;
        live.first_token = Some(at);
        self.brain.first_token(booking, Time(at));
        self.brain.observe(slot(worker), HealthEvent::Answered, Time(at));
        self.brain.progress(booking, 1, Time(at));
    }

    /// Tells the brain how far the sequences that stream from a worker have come.
    pub(super) fn note_progress(&mut self, worker: usize) {
        let Fleet { workers, jobs, live, brain, now, .. } = self;
        workers[worker].progress(*now, |job, tokens, at| {
            let Some((id, _)) = jobs.get(&(worker, job)) else { return };
            let Some(live) = live.get_mut(id) else { return };
            live.tokens = tokens;
            if let Some(booking) = live.booking {
                brain.progress(booking, tokens, Time(at));
            }
        });
    }

    fn pulled(&mut self, worker: usize, job: JobId) {
        let Some(&(id, _)) = self.jobs.get(&(worker, job)) else { return };
        let pin = self.live.get_mut(&id).and_then(|live| live.prefill.take());
        if let Some((from, pin)) = pin {
            self.drop_job(from, pin);
        }
    }

    fn finished(&mut self, worker: usize, job: JobId, at: Nanos) {
        let Some(&(id, part)) = self.jobs.get(&(worker, job)) else { return };
        let Some(live) = self.live.get_mut(&id) else { return };
        match (part, live.booking) {
            (Part::Prefill, Some(booking)) => {
                self.freed = true;
                self.brain.prefill_done(booking, Time(at));
                self.brain.observe(slot(worker), HealthEvent::Answered, Time(at));
                self.start_decode(id);
            }
            (_, booking) => {
                live.tokens = live.request.output_tokens;
                if let Some(booking) = booking {
                    self.brain.progress(booking, live.tokens, Time(at));
                }
                self.end(id, Ending::Finished);
            }
        }
    }

    /// The worker that held this part of a request died.
    pub(super) fn lost(&mut self, id: RequestId, part: Part) {
        let Some(live) = self.live.get_mut(&id) else { return };
        let place = match part {
            Part::Prefill => live.prefill.take(),
            Part::Decode => live.decode.take(),
        };
        let (Some((worker, _)), Some(decision)) = (place, live.decision) else { return };
        let (leg, cause) = match part {
            // Its KV was on its way to a decode worker, which notices.
            Part::Prefill if live.decode.is_some() => (Leg::Prefill, Cause::KvLoad),
            Part::Prefill => (Leg::Prefill, Cause::Cut),
            Part::Decode if decision.path == Path::Remote => (Leg::Decode, Cause::Cut),
            Part::Decode => (Leg::Local, Cause::Cut),
        };
        self.leg_failed(id, leg, slot(worker), cause);
    }

    fn leg_failed(&mut self, id: RequestId, leg: Leg, worker: Slot, cause: Cause) {
        self.brain.observe(worker, HealthEvent::Failed(cause), Time(self.now));
        let Some(live) = self.live.get_mut(&id) else { return };
        let next = live.ladder.failed(leg, worker, cause);
        let kept = match (leg, cause, live.prefill) {
            // The decode leg never reached its engine, so the hand-off is unused.
            (Leg::Decode, Cause::Connect, Some((from, _))) => Some(from),
            _ => None,
        };
        if let Some(from) = kept {
            live.ladder.keep_handoff(slot(from));
        }
        if let Some(booking) = live.booking.take() {
            self.brain.settle(booking, End::Failed, Time(self.now));
        }
        let streams = live.first_token.is_some();
        let decode = live.decode.take();
        let prefill = if kept.is_some() { None } else { live.prefill.take() };
        for (worker, job) in decode.into_iter().chain(prefill) {
            self.drop_job(worker, job);
        }
        match next {
            Next::Replan if !streams => self.replan(id),
            _ => self.end(id, Ending::Failed),
        }
    }

    /// Plans again, and lets go of a hand-off that the new plan does not use.
    fn replan(&mut self, id: RequestId) {
        let kept = self.live.get(&id).and_then(|live| live.prefill);
        self.plan(id);
        let Some((worker, job)) = kept else { return };
        let live = self.live.get_mut(&id);
        let live = live.filter(|live| live.prefill == kept);
        if let Some(live) = live.filter(|live| !live.decision.is_some_and(|d| d.prefilled)) {
            live.prefill = None;
        } else if self.live.get(&id).is_some_and(|live| live.prefill == kept) {
            return;
        }
        self.drop_job(worker, job);
    }

    fn end(&mut self, id: RequestId, ending: Ending) {
        let Some(live) = self.live.remove(&id) else { return };
        if let Some(place) = live.place {
            self.held.left(place);
        }
        self.freed = true;
        if let Some(booking) = live.booking {
            let end = match ending {
                Ending::Finished => End::Finished,
                Ending::Failed | Ending::Refused => End::Failed,
                Ending::Cancelled => End::Cancelled,
            };
            self.brain.settle(booking, end, Time(self.now));
        }
        for (worker, job) in live.prefill.into_iter().chain(live.decode) {
            self.drop_job(worker, job);
        }
        self.outcomes.push(Outcome {
            id,
            arrived: live.arrived,
            first_token: live.first_token,
            ended: self.now,
            tokens: live.tokens,
            decision: live.decision,
            ending,
        });
    }

    fn drop_job(&mut self, worker: usize, job: JobId) {
        self.jobs.remove(&(worker, job));
        self.workers[worker].abort(job, self.now);
    }

    fn block_size(&self) -> Option<u32> {
        self.workers.first().map(Worker::block_size)
    }
}

fn leg_of(part: Part, kind: Kind) -> Leg {
    match (part, kind) {
        (Part::Prefill, _) => Leg::Prefill,
        (Part::Decode, Kind::Pull(_)) => Leg::Decode,
        (Part::Decode, _) => Leg::Local,
    }
}
