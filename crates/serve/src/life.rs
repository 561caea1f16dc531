//! The life of a request, in one file:
//! parse -> tokenise -> look up -> decide and reserve -> prefill leg (if remote) -> decode leg -> settle.
//!
//! Invariants: every plan's booking is settled by whoever drops it; until the first byte has gone to
//! the client a failed leg leads to the next plan; after it, to an error event. No policy is here:
//! the brain decides, its ladder says what a failure leads to.

mod reply;
mod together;
mod turn;

use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use http::request::Parts;
use http::{HeaderMap, Response};
use hyper::body::Incoming;
use pointsman_brain::{
    Ask, Cause, Decision, Held, Ladder, Leg, Next, NoPath, Path, Slo, Slot, Split, Wait,
};
use pointsman_config as config;
use pointsman_wire::body::Limits;
use pointsman_wire::dialect::{
    self, Api, Failure, LegContext, LegRequest, Order, Prefill, Request, Verdict,
};
use tokio::sync::OwnedSemaphorePermit;

use self::reply::{Answered, Complete, is_event_stream, passed_on};
use self::turn::Turn;
use crate::admission::Ticket;
use crate::booking::Booking;
use crate::error::{Refusal, Reply};
use crate::fleet::{Group, Rank, Roster};
use crate::handoff::Unused;
use crate::outgoing::{Begun, Outgoing};
use crate::prompt::{self, Prompt};
use crate::receive::Received;
use crate::relay::Patience;
use crate::router::Router;
use crate::run;
use crate::session;
use crate::sight::{self, Scope};
use crate::upstream::read;
use crate::{auth, handoff, headers, overdue, receive, report, slo};

/// A request on its way, as far as it does not change from try to try.
pub(crate) struct Life {
    pub(crate) router: Arc<Router>,
    pub(crate) group: Arc<Group>,
    /// The name that the client used for the model.
    pub(crate) model: String,
    pub(crate) id: String,
    path: String,
    headers: HeaderMap,
    pub(crate) request: Request,
    /// Held for as long as the body is.
    _room: OwnedSemaphorePermit,
    pub(crate) prompt: Prompt,
    pub(crate) scope: Scope,
    roster: Arc<Roster>,
    held: Vec<Held>,
    eligible: Vec<bool>,
    /// Whose legs have failed, in order.
    pub(crate) tried: Vec<Rank>,
    session: Option<u64>,
    slo: Slo,
    /// When it was ready to be decided.
    ready: Instant,
    wish: Option<Path>,
    turn: Turn,
    patience: Patience,
}

/// A decision with its booking and its workers.
struct Plan {
    decision: Decision,
    booking: Booking,
    prefill: Option<Rank>,
    rank: Rank,
}

/// Why there is no plan.
enum NoPlan {
    Refused(Refusal),
    /// The brain is to be asked again.
    Wait {
        /// After this long at the latest.
        again_in: Duration,
        /// Behind all that can be served in time.
        late: bool,
    },
}

impl From<Refusal> for NoPlan {
    fn from(refusal: Refusal) -> NoPlan {
        NoPlan::Refused(refusal)
    }
}

/// What a prefill leg led to.
enum Prefilled {
    Handoff(Box<Unused>),
    /// It is the client's answer already.
    Complete(Complete),
}

/// A leg that failed, and what it left behind.
struct Fault {
    leg: Leg,
    rank: Rank,
    cause: Cause,
    /// The engine's answer, where it is the client's to see.
    answer: Option<Reply>,
    /// A hand-off that another decode worker can still use.
    unused: Option<Unused>,
}

impl Fault {
    /// A failure of the last leg. Where it lies in the hand-off, the prefill was in vain, and the same
    /// decode worker can still compute the prompt itself.
    fn of_last_leg(leg: Leg, rank: &Rank, prefill: Option<&Rank>, cause: Cause) -> Fault {
        match (prefill, cause) {
            (Some(_), Cause::Status(500..)) => Fault::new(leg, rank, Cause::KvLoad),
            (Some(prefill), Cause::Expired) => Fault::new(Leg::Prefill, prefill, cause),
            _ => Fault::new(leg, rank, cause),
        }
    }

    fn new(leg: Leg, rank: &Rank, cause: Cause) -> Fault {
        Fault { leg, rank: rank.clone(), cause, answer: None, unused: None }
    }
}

/// Serves one request: whatever happens, there is a reply.
pub(crate) async fn serve(router: Arc<Router>, api: Api, mut head: Parts, body: Incoming) -> Reply {
    let endpoint = report::endpoint(&head.uri);
    let mut ticket = match admit(&router) {
        Ok(ticket) => ticket,
        Err(refusal) => return report::refused(&router, endpoint, None, &refusal),
    };
    ticket.client = head.extensions.remove();
    let body = match receive::body(body, &head.headers, &router).await {
        Ok(body) => body,
        Err(refusal) => return report::refused(&router, endpoint, None, &refusal),
    };
    let mut life = match begin(&router, api, head, body, &mut ticket).await {
        Ok(life) => life,
        Err(refusal) => return report::refused(&router, endpoint, None, &refusal),
    };
    match live(&mut life, ticket).await {
        Ok(reply) => report::answered(&life, endpoint, reply),
        Err(refusal) => report::refused(&router, endpoint, Some(&life.group), &refusal),
    }
}

/// A place in the router, if there is one.
pub(crate) fn admit(router: &Router) -> Result<Ticket, Refusal> {
    router.gate.enter().ok_or_else(|| {
        let limits = &router.settings.limits;
        report::limit(router, "max_in_flight");
        Refusal::new(
            429,
            format!(
                "the router has {} requests in flight, its limit; try again later",
                limits.max_in_flight
            ),
        )
        .retry_after(limits.retry_after)
    })
}

/// Parses, tokenises and looks up: everything that one request needs once.
pub(crate) async fn begin(
    router: &Arc<Router>,
    api: Api,
    head: Parts,
    body: Received,
    ticket: &mut Ticket,
) -> Result<Life, Refusal> {
    let started = ticket.started();
    // What only the router may say is taken out.
    let request = Request::parse(api, body.bytes, &Limits::default())?;
    let (group, model) = find_group(router, &request)?;
    auth::may_use(ticket.client.as_deref(), &group, &model)?;
    let (inside, stay_seconds) = router.metrics.stay(group.name());
    ticket.show(inside, stay_seconds);
    let roster = group.roster.load_full();
    let asker = receive::Asker { router, group: &group, roster: &roster };
    let bounds = prompt::Bounds {
        at_once: &router.tokenising,
        body_bytes: router.settings.tokenised_body_bytes,
    };
    let (tokenizer, estimates) = (&group.tokenizer, &group.settings.estimates);
    if api == Api::Generate && !roster.workers().any(|worker| worker.dialect().has(api)) {
        let message = format!("no worker of model `{}` has SGLang's own endpoint", group.name());
        return Err(Refusal::new(404, message));
    }
    let prompt = prompt::read(tokenizer, estimates, &request, &asker, bounds).await?;
    check_length(router, &prompt)?;
    auth::take_tokens(router, ticket.client.as_deref(), prompt.isl_tokens)?;
    let scope = Scope {
        lora: group.is_adapter(&model).then(|| model.clone()),
        salt: request.body().cache_salt().map(Into::into),
    };
    let held = sight::look_up(&group, &roster, &prompt, &scope);
    let timeouts = &router.settings.timeouts;
    Ok(Life {
        eligible: receive::eligible(&roster, &group, &model, api),
        session: session::key(&group.settings.session, &head.headers, &request, &prompt),
        slo: slo::of(&head.headers)?,
        ready: Instant::now(),
        wish: receive::wish(&head.headers)?,
        turn: Turn::new(&head.headers, &group, ticket.client.as_deref(), prompt.isl_tokens)?,
        id: receive::request_id(&head.headers),
        path: head.uri.path_and_query().map_or("/", |path| path.as_str()).to_owned(),
        headers: headers::passed(&head.headers),
        patience: Patience {
            idle: timeouts.stream_idle,
            deadline: (started + timeouts.request).into(),
        },
        router: Arc::clone(router),
        group,
        model,
        request,
        _room: body.room,
        prompt,
        scope,
        roster,
        held,
        tried: Vec::new(),
    })
}

fn find_group(router: &Router, request: &Request) -> Result<(Arc<Group>, String), Refusal> {
    if let Some(name) = request.body().model() {
        return match router.fleet.named(&name) {
            Some(group) => Ok((group, name.into_owned())),
            None => Err(Refusal::no_model(&name)),
        };
    }
    if request.body().has("model") {
        return Err(Refusal::new(400, "`model` must be a string").param("model"));
    }
    match router.fleet.only() {
        Some(group) => Ok((Arc::clone(group), group.name().to_owned())),
        None => {
            let message = "this router serves several models: say which in `model`";
            Err(Refusal::new(400, message).param("model"))
        }
    }
}

fn check_length(router: &Router, prompt: &Prompt) -> Result<(), Refusal> {
    let Some(limit) = router.settings.limits.max_prompt_tokens else { return Ok(()) };
    if prompt.isl_tokens <= limit.get() {
        return Ok(());
    }
    report::limit(router, "max_prompt_tokens");
    let about = if prompt.estimated || prompt.partial { "about " } else { "" };
    Err(Refusal::new(
        400,
        format!(
            "the prompt has {about}{} tokens, this router takes at most {limit}; shorten it",
            prompt.isl_tokens
        ),
    ))
}

/// Plans and carries out, until a reply begins or nothing is left to try.
async fn live(life: &mut Life, ticket: Ticket) -> Result<Reply, Refusal> {
    let mut ladder = life.ladder();
    let mut ticket = Some(ticket);
    let mut unused = None;
    loop {
        let plan = life.plan_in_turn(&ladder).await?;
        let fault = match life.carry_out(plan, unused.take(), &mut ticket).await {
            Ok(reply) => return Ok(reply),
            Err(fault) => fault,
        };
        run::failed(&life.router, &life.group, fault.leg, &fault.rank, fault.cause);
        let next = ladder.failed(fault.leg, fault.rank.slot, fault.cause);
        life.tried.push(fault.rank);
        if let Some(left) = &fault.unused {
            ladder.keep_handoff(left.prefill.slot);
        }
        unused = fault.unused;
        match (next, fault.answer) {
            (Next::Relay, Some(answer)) => return Ok(answer),
            // A further try would fail by the clock alone, and its worker be blamed for it.
            _ if life.is_late() => return Err(report::late(life, &ladder)),
            (Next::Replan, _) => {}
            (Next::Relay | Next::GiveUp, _) => return Err(report::gave_up(life, &ladder)),
        }
    }
}

impl Life {
    /// Whether the request's time is over.
    fn is_late(&self) -> bool {
        tokio::time::Instant::now() >= self.patience.deadline
    }

    /// A worker's name.
    pub(crate) fn worker(&self, slot: Option<Slot>) -> Option<&str> {
        self.roster.get(slot?).map(|rank| rank.worker.name())
    }

    pub(crate) fn ladder(&self) -> Ladder {
        Ladder::new(self.group.brain().settings())
    }

    /// What the brain is asked, given what has been tried.
    pub(crate) fn ask<'a>(&'a self, tries: &'a Ladder) -> Ask<'a> {
        let prompts = u32::try_from(self.prompt.ids.len().max(1)).unwrap_or(u32::MAX);
        let mut ask = Ask::new(self.prompt.isl_tokens, &self.held, tries);
        ask.estimated = self.prompt.estimated;
        ask.partial = self.prompt.partial;
        ask.max_new_tokens = self.request.max_new_tokens();
        ask.sequences = self.request.choices().saturating_mul(prompts);
        ask.split = self.split();
        ask.streams = self.request.body().stream();
        ask.session = self.session;
        ask.slo = self.slo;
        ask.waited = self.ready.elapsed();
        ask.wish = self.wish;
        ask.eligible = Some(&self.eligible);
        ask
    }

    /// Whether the request can be split over two of the workers that it looked at.
    fn split(&self) -> Split {
        if self.request.disaggregable().is_ok() {
            return Split::Yes;
        }
        let mut paired =
            self.roster.workers().filter(|worker| worker.settings.role != config::Role::Unified);
        match paired.all(|worker| worker.dialect().splits_batch(&self.request)) {
            true => Split::IfNeeded,
            false => Split::No,
        }
    }

    /// Looks at the workers again if they are not the ones that it looked at.
    fn look_again(&mut self) {
        let roster = self.group.roster.load_full();
        if !Arc::ptr_eq(&roster, &self.roster) {
            let api = self.request.api();
            self.eligible = receive::eligible(&roster, &self.group, &self.model, api);
            self.held = sight::look_up(&self.group, &roster, &self.prompt, &self.scope);
            self.roster = roster;
        }
    }

    /// Decides and reserves.
    fn plan(&mut self, ladder: &Ladder, wait: Wait) -> Result<Plan, NoPlan> {
        let group = Arc::clone(&self.group);
        let mut brain = group.brain();
        // While the brain is held, a slot is the same worker for it and for the roster; before, another
        // one may have taken a slot that was given up.
        self.look_again();
        let ask = Ask { wait, ..self.ask(ladder) };
        let decided = brain.decide(&ask, group.now());
        drop(brain);
        let decision = match decided {
            Ok(decision) => decision,
            Err(NoPath::Held { again_in, late }) => return Err(NoPlan::Wait { again_in, late }),
            Err(no_path) if ladder.causes().is_empty() => {
                return Err(report::no_path(self, &no_path).into());
            }
            Err(_) => return Err(report::gave_up(self, ladder).into()),
        };
        let booking = Booking::new(Arc::clone(&self.group), decision.booking);
        report::decision(self, &decision);
        let rank = |slot| self.roster.get(slot).cloned();
        let (prefill, decode) = (decision.prefill.and_then(rank), rank(decision.decode));
        match decode {
            Some(rank) => Ok(Plan { decision, booking, prefill, rank }),
            // Only slots of this request's roster are eligible, so this is a defect, not a path.
            None => Err(Refusal::new(500, "the worker that was chosen is not known").into()),
        }
    }

    /// Sends the legs of one plan.
    async fn carry_out(
        &self,
        plan: Plan,
        unused: Option<Unused>,
        ticket: &mut Option<Ticket>,
    ) -> Result<Reply, Fault> {
        let together = |rank: &&Rank| rank.worker.dialect().order() == Some(Order::Together);
        if let Some(prefill) = plan.prefill.as_ref().filter(together).cloned() {
            let sent = Instant::now();
            let answered = self.both_legs(&plan, &prefill).await?;
            return Ok(self.reply(answered, plan, sent, ticket));
        }
        let handoff = match (plan.prefill.clone(), unused) {
            (None, _) => None,
            (Some(_), Some(unused)) if plan.decision.prefilled => Some(unused),
            (Some(rank), _) => match self.prefill_leg(&rank).await? {
                Prefilled::Handoff(unused) => Some(*unused),
                Prefilled::Complete(complete) => {
                    plan.booking.prefill_done();
                    return Ok(self.complete(complete, Plan { rank, ..plan }, ticket));
                }
            },
        };
        plan.booking.prefill_done();
        let sent = Instant::now();
        let leg = if handoff.is_some() { Leg::Decode } else { Leg::Local };
        let fault = |cause| Fault::of_last_leg(leg, &plan.rank, plan.prefill.as_ref(), cause);
        let answered = match self.last_leg(leg, &plan.rank, handoff).await {
            Ok(response) => self.answered(response).await.map_err(fault),
            Err(fault) => Err(fault),
        };
        if let Some(prefill) = &plan.prefill {
            let cause = answered.as_ref().err().map(|fault| fault.cause);
            run::handed_over(&self.group, prefill, &plan.rank, cause);
        }
        Ok(self.reply(answered?, plan, sent, ticket))
    }

    /// Has a prompt computed on a prefill worker.
    async fn prefill_leg(&self, rank: &Rank) -> Result<Prefilled, Fault> {
        let fault = |cause| Fault::new(Leg::Prefill, rank, cause);
        let dialect = rank.worker.dialect();
        let Some(leg) = dialect.prefill_leg(&self.request, &self.context(rank)) else {
            return Err(fault(Cause::Protocol));
        };
        let sent = Instant::now();
        let timeouts = &self.router.settings.timeouts;
        let limit = self.router.settings.limits.max_reply_bytes.get();
        let exchange = pin!(async {
            let response = self.send(rank, leg, None, timeouts.prefill).await?;
            let (head, body) = response.into_parts();
            Ok((head, read(body, limit).await?))
        });
        let until = self.patience.deadline.min((sent + timeouts.prefill).into());
        let (answer, not_yet) = handoff::watched(overdue::within(until, exchange)).await;
        let (head, bytes) = match answer {
            Ok(exchanged) => exchanged.map_err(fault)?,
            Err(_elapsed) => return Err(fault(Cause::Timeout)),
        };
        self.router.metrics.leg_took(Leg::Prefill.as_str(), sent.elapsed());
        let exact = self.prompt.exact().map(|ids| ids.len());
        let exact = exact.and_then(|tokens| u32::try_from(tokens).ok());
        let unused = |handoff| {
            let (group, upstream) = (Arc::clone(&self.group), self.router.upstream.clone());
            Unused::new(handoff, not_yet, rank.clone(), group, upstream, self.model.clone())
        };
        match dialect.read_prefill(head.status.as_u16(), &bytes, exact) {
            Prefill::Handoff(handoff) => {
                run::answered(&self.group, rank);
                sight::place(&self.group, rank, &self.prompt, &self.scope);
                Ok(Prefilled::Handoff(Box::new(unused(handoff))))
            }
            Prefill::Complete(answer) => {
                run::answered(&self.group, rank);
                let body = if self.request.body().stream() {
                    let stream = dialect::completed_stream(&self.request, &answer);
                    stream.ok_or_else(|| fault(Cause::Protocol))?
                } else {
                    answer.clone()
                };
                Ok(Prefilled::Complete(Complete { head, answer, body }))
            }
            Prefill::ClientError(status) => Err(Fault {
                answer: Some(passed_on(&head.headers, status, bytes)),
                ..fault(Cause::Status(status))
            }),
            Prefill::Failed(failure, left) => {
                // Dropped, and so released: nobody will decode from it.
                drop(left.map(unused));
                Err(fault(cause_of(failure)))
            }
        }
    }

    /// Sends the leg whose answer is the client's, and reads the answer's head.
    async fn last_leg(
        &self,
        leg: Leg,
        rank: &Rank,
        handoff: Option<Unused>,
    ) -> Result<Response<Incoming>, Fault> {
        let prefill = handoff.as_ref().map(|unused| unused.prefill.clone());
        let fault = |cause| Fault::of_last_leg(leg, rank, prefill.as_ref(), cause);
        let dialect = rank.worker.dialect();
        let context = self.context(rank);
        let request = match &handoff {
            None => dialect.local_leg(&self.request, &context),
            Some(unused) => match unused.get() {
                Some(handoff) => dialect.decode_leg(&self.request, handoff, &context),
                None => return Err(fault(Cause::Expired)),
            },
        };
        let wait = self.head_wait();
        let begun = handoff.as_ref().map(Unused::begun);
        let sent = self.send(rank, request, begun.clone(), wait).await;
        let response = match sent {
            // Nothing went out, so the hand-off is as good as before.
            Err(cause @ (Cause::Connect | Cause::Descriptors))
                if !begun.as_ref().is_some_and(Begun::get) =>
            {
                return Err(Fault { unused: handoff, ..fault(cause) });
            }
            sent => sent.map_err(fault)?,
        };
        let status = response.status().as_u16();
        match dialect::verdict(status) {
            Verdict::Ok => Ok(response),
            Verdict::Failed(failure) => Err(fault(cause_of(failure))),
            Verdict::Client(status) => {
                // Refused by its shape alone, the engine has not looked at the hand-off; had it, a
                // second release does no harm.
                if let Some(unused) = handoff {
                    unused.not_taken();
                }
                let (head, body) = response.into_parts();
                let bytes = self.read_whole(body).await.map_err(fault)?;
                let answer = Some(passed_on(&head.headers, status, bytes));
                Err(Fault { answer, ..fault(Cause::Status(status)) })
            }
        }
    }

    /// How long the head of the last leg's answer may take: a reply that is no stream begins when
    /// all of it is done.
    fn head_wait(&self) -> std::time::Duration {
        let left = self.patience.deadline.saturating_duration_since(tokio::time::Instant::now());
        if self.request.body().stream() {
            left.min(self.router.settings.timeouts.first_byte)
        } else {
            left
        }
    }

    fn context(&self, rank: &Rank) -> LegContext<'_> {
        LegContext {
            request_id: &self.id,
            prompt_ids: self.ids().filter(|_| rank.worker.takes_ids()),
            rank: rank.rank,
            number: receive::random_number(),
        }
    }

    /// The prompt's tokens, if they may go out in its place: then to every worker that is known, so
    /// that whichever legs follow each other carry the same.
    fn ids(&self) -> Option<&[u32]> {
        let ids = self.prompt.exact().filter(|_| self.request.is_plain())?;
        let all = self.roster.workers().all(|worker| !worker.is_known() || worker.takes_ids());
        all.then_some(ids)
    }

    async fn send(
        &self,
        rank: &Rank,
        leg: LegRequest,
        begun: Option<Begun>,
        wait: std::time::Duration,
    ) -> Result<Response<Incoming>, Cause> {
        let uri = rank.worker.uri(&self.path).map_err(|_| Cause::Protocol)?;
        let mut headers = self.headers.clone();
        headers::add(&mut headers, &leg.headers);
        rank.worker.address(&mut headers);
        self.router.upstream.post(uri, headers, Outgoing::new(leg.body, begun), wait).await
    }
}

fn cause_of(failure: Failure) -> Cause {
    match failure {
        Failure::Overload(status) => Cause::Overload(status),
        Failure::Server(status) => Cause::Status(status),
        Failure::Protocol(_) => Cause::Protocol,
    }
}
