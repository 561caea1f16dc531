//! Both legs of a request at once, for engines whose workers find each other by themselves.
//!
//! Invariants: neither leg is left alone, because whoever waits for a partner that is gone waits for
//! minutes: until the client's reply begins, a leg that fails ends the other one. From then on the KV
//! has been handed over, and the prefill worker's answer is only drained.

use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use http_body_util::BodyExt;
use hyper::body::Incoming;
use pointsman_brain::{BookingId, Cause, Leg};
use pointsman_wire::dialect::{self, Dialect, Handoff, LegRequest, Verdict};
use pointsman_wire::sse::{End, Watch};
use tokio::task::JoinHandle;

use super::{Answered, Fault, Life, Plan, cause_of, is_event_stream, passed_on};
use crate::bootstrap::Place;
use crate::error::Reply;
use crate::fleet::{Group, Rank};
use crate::handoff::Unused;
use crate::prompt::Prompt;
use crate::router::Router;
use crate::sight::{self, Scope};
use crate::upstream::read;
use crate::{headers, overdue, run};

/// How long a prefill leg may still take whose decode leg failed. One that is broken off when its KV is
/// there, but its answer not yet here, would keep the KV for minutes, and nobody would know.
const LAST_MOMENT: Duration = Duration::from_millis(250);

/// What came of a prefill leg that failed.
struct Failed {
    cause: Cause,
    /// The engine's answer, where it is the client's to see.
    answer: Option<Reply>,
}

impl From<Cause> for Failed {
    fn from(cause: Cause) -> Failed {
        Failed { cause, answer: None }
    }
}

/// The prefill leg, which runs by itself. Dropped, it is ended.
struct Partner {
    leg: JoinHandle<Result<(), Failed>>,
    /// How it ended, once that has been seen: a task may be asked only once.
    went_well: Option<bool>,
}

impl Partner {
    /// Waits until the leg fails; for ever, if it does not.
    async fn failed(&mut self) -> Failed {
        if self.went_well.is_none() {
            let ended = (&mut self.leg).await;
            self.went_well = Some(matches!(ended, Ok(Ok(()))));
            match ended {
                Ok(Err(failed)) => return failed,
                Ok(Ok(())) => {}
                // It was ended, or broke in a way that its log tells.
                Err(_) => return Cause::Cut.into(),
            }
        }
        std::future::pending().await
    }

    /// Waits until the leg ends; whether it went well.
    async fn ended(&mut self) -> bool {
        match self.went_well {
            Some(went_well) => went_well,
            None => matches!((&mut self.leg).await, Ok(Ok(()))),
        }
    }
}

impl Drop for Partner {
    fn drop(&mut self) {
        self.leg.abort();
    }
}

impl Life {
    /// Carries out a remote plan whose legs start together; the decode worker's answer.
    pub(super) async fn both_legs(&self, plan: &Plan, prefill: &Rank) -> Result<Answered, Fault> {
        let to_prefill = self.context(prefill);
        let to_decode = self.context(&plan.rank);
        let dialect = prefill.worker.dialect();
        let place = Place::of(&prefill.worker, prefill.rank);
        let meeting = place.meeting();
        let legs = Some(&dialect).filter(|dialect| dialect.is_like(&plan.rank.worker.dialect()));
        let legs = legs
            .and_then(|dialect| dialect.together(&self.request, &meeting, &to_prefill, &to_decode));
        let Some((to_prefill, to_decode)) = legs else {
            return Err(Fault::new(Leg::Prefill, prefill, Cause::Protocol));
        };
        let Some(mut partner) = self.partner(prefill, to_prefill, plan.decision.booking) else {
            return Err(Fault::new(Leg::Prefill, prefill, Cause::Protocol));
        };
        let answered = tokio::select! {
            // Of two that failed the prefill worker is the cause.
            biased;
            Failed { cause, answer } = partner.failed() => {
                return Err(Fault { answer, ..Fault::new(Leg::Prefill, prefill, cause) });
            }
            answered = self.decoded(plan, prefill, to_decode) => answered,
        };
        let cause = answered.as_ref().err().map(|fault| fault.cause);
        run::handed_over(&self.group, prefill, &plan.rank, cause);
        if answered.is_err() {
            self.abandon(prefill, partner, dialect.left_behind(&meeting));
            return answered;
        }
        self.router.tasks.spawn(async move {
            let mut partner = partner;
            // Only to drain it: what it says concerns nobody any more.
            let _ended = partner.ended().await;
        });
        answered
    }

    /// Sends the decode leg; its answer.
    async fn decoded(
        &self,
        plan: &Plan,
        prefill: &Rank,
        leg: LegRequest,
    ) -> Result<Answered, Fault> {
        let fault = |cause| Fault::of_last_leg(Leg::Decode, &plan.rank, Some(prefill), cause);
        let sent = self.send(&plan.rank, leg, None, self.head_wait()).await;
        let response = sent.map_err(fault)?;
        match dialect::verdict(response.status().as_u16()) {
            Verdict::Ok => self.answered(response).await.map_err(fault),
            Verdict::Failed(failure) => Err(fault(cause_of(failure))),
            Verdict::Client(status) => {
                let (head, body) = response.into_parts();
                let bytes = self.read_whole(body).await.map_err(fault)?;
                let answer = Some(passed_on(&head.headers, status, bytes));
                Err(Fault { answer, ..fault(Cause::Status(status)) })
            }
        }
    }

    /// Ends a prefill leg whose decode leg failed, and frees what it would keep for that one.
    fn abandon(&self, prefill: &Rank, mut partner: Partner, left: Option<Handoff>) {
        let Some(handoff) = left else { return };
        let (group, upstream) = (Arc::clone(&self.group), self.router.upstream.clone());
        let (prefill, model) = (prefill.clone(), self.model.clone());
        self.router.tasks.spawn(async move {
            let ended = tokio::time::timeout(LAST_MOMENT, partner.ended()).await;
            if matches!(ended, Ok(true)) {
                drop(Unused::new(handoff, Instant::now(), prefill, group, upstream, model));
            }
        });
    }

    /// Starts the prefill leg.
    fn partner(&self, rank: &Rank, leg: LegRequest, booking: BookingId) -> Option<Partner> {
        let uri = rank.worker.uri(&self.path).ok()?;
        let mut headers = self.headers.clone();
        headers::add(&mut headers, &leg.headers);
        rank.worker.address(&mut headers);
        let wait = self.router.settings.timeouts.prefill;
        let prefilling = Prefilling {
            router: Arc::clone(&self.router),
            group: Arc::clone(&self.group),
            rank: rank.clone(),
            dialect: rank.worker.dialect(),
            booking,
            prompt: self.prompt.clone(),
            scope: self.scope.clone(),
        };
        let until = self.patience.deadline.min((Instant::now() + wait).into());
        let leg = tokio::spawn(async move {
            let leg = pin!(prefilling.run(uri, headers, leg.body, wait));
            overdue::within(until, leg).await.unwrap_or(Err(Cause::Timeout.into()))
        });
        Some(Partner { leg, went_well: None })
    }
}

/// What a prefill leg that runs by itself takes with it.
struct Prefilling {
    router: Arc<Router>,
    group: Arc<Group>,
    rank: Rank,
    dialect: Dialect,
    booking: BookingId,
    prompt: Prompt,
    scope: Scope,
}

impl Prefilling {
    async fn run(
        self,
        uri: http::Uri,
        headers: http::HeaderMap,
        body: bytes::Bytes,
        wait: Duration,
    ) -> Result<(), Failed> {
        let sent = Instant::now();
        let limit = self.router.settings.limits.max_reply_bytes.get();
        let (head, body) = self.router.upstream.post(uri, headers, body, wait).await?.into_parts();
        match dialect::verdict(head.status.as_u16()) {
            Verdict::Ok if is_event_stream(&head.headers) => drain_events(body).await?,
            Verdict::Ok => {
                if !self.dialect.hands_over(&read(body, limit).await?) {
                    return Err(Cause::Protocol.into());
                }
            }
            Verdict::Failed(failure) => return Err(cause_of(failure).into()),
            Verdict::Client(status) => {
                let bytes = read(body, limit).await?;
                let answer = Some(passed_on(&head.headers, status, bytes));
                return Err(Failed { cause: Cause::Status(status), answer });
            }
        }
        let Prefilling { router, group, rank, .. } = &self;
        router.metrics.leg_took(Leg::Prefill.as_str(), sent.elapsed());
        group.brain().prefill_done(self.booking, group.now());
        run::answered(group, rank);
        sight::place(group, rank, &self.prompt, &self.scope);
        Ok(())
    }
}

/// Reads a stream to its end and keeps nothing of it.
async fn drain_events(mut body: Incoming) -> Result<(), Cause> {
    let mut watch = Watch::new();
    while let Some(frame) = body.frame().await {
        if let Ok(data) = frame.map_err(|_| Cause::Cut)?.into_data() {
            watch.feed(&data);
        }
    }
    match watch.finish() {
        End::Clean => Ok(()),
        End::Error => Err(Cause::Status(500)),
        End::Cut => Err(Cause::Cut),
    }
}
