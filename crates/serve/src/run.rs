//! One plan being carried out: its booking, its clocks, and what is counted at each of its turns.

use std::sync::Arc;
use std::time::Instant;

use pointsman_brain::{Cause, Decision, End, HealthEvent, Leg, Path};
use pointsman_wire::sse::Usage;
use prometheus_client::metrics::histogram::Histogram;

use crate::admission::Ticket;
use crate::booking::Booking;
use crate::fleet::{Group, Rank};
use crate::metrics::{ByPath, LegFailure};
use crate::prompt::Prompt;
use crate::report;
use crate::router::Router;
use crate::sight::{self, Scope};

/// What a plan is carried out for.
pub(crate) struct Work {
    pub(crate) router: Arc<Router>,
    pub(crate) group: Arc<Group>,
    pub(crate) prompt: Prompt,
    pub(crate) scope: Scope,
    /// The request's name in logs; empty where none would be written.
    pub(crate) id: String,
}

/// A plan whose reply has begun.
pub(crate) struct Run {
    work: Work,
    decision: Decision,
    booking: Booking,
    rank: Rank,
    ticket: Option<Ticket>,
    leg_started: Instant,
    itl: Histogram,
    last_token: Option<Instant>,
    tokens: u64,
}

impl Run {
    pub(crate) fn new(
        work: Work,
        decision: Decision,
        booking: Booking,
        rank: Rank,
        ticket: Option<Ticket>,
        leg_started: Instant,
    ) -> Run {
        let path = ByPath { path: decision.path.as_str() };
        let itl = work.router.metrics.itl_seconds.get_or_create(&path).clone();
        let (last_token, tokens) = (None, 0);
        Run { work, decision, booking, rank, ticket, leg_started, itl, last_token, tokens }
    }

    /// The worker that streams.
    pub(crate) fn worker(&self) -> &str {
        self.rank.worker.name()
    }

    /// Whether the router ends, and this with it.
    pub(crate) fn is_cut(&self) -> bool {
        self.work.router.is_cutting()
    }

    /// Tokens so far.
    pub(crate) fn tokens(&self) -> u64 {
        self.tokens
    }

    /// The first content came: the prompt is computed.
    pub(crate) fn first_token(&mut self, tokens: u64) {
        let now = Instant::now();
        if let Some(first) = self.booking.first_token() {
            report::first_token(&self.work, &self.decision, self.worker(), &first);
        }
        health(&self.work.group, &self.rank, HealthEvent::Began);
        self.last_token = Some(now);
        self.tokens = tokens;
        let path = ByPath { path: self.decision.path.as_str() };
        let Some(ticket) = &self.ticket else { return };
        let ttft = now.duration_since(ticket.started()).as_secs_f64();
        self.work.router.metrics.ttft_seconds.get_or_create(&path).observe(ttft);
    }

    /// More content came: `events` of them, `tokens` altogether.
    pub(crate) fn streamed(&mut self, events: u32, tokens: u64) {
        self.tokens = tokens;
        if events == 0 {
            return;
        }
        let now = Instant::now();
        if let Some(last) = self.last_token.replace(now) {
            // Events that arrive together share the wait for them.
            let gap = now.duration_since(last).as_secs_f64() / f64::from(events);
            for _ in 0..events {
                self.itl.observe(gap);
            }
        }
        self.booking.progress(tokens);
    }

    /// The engine's own count.
    pub(crate) fn usage(&mut self, usage: Usage) {
        self.tokens = usage.completion_tokens;
    }

    /// The last leg has ended; `cause` if its worker is to blame.
    pub(crate) fn end(self, end: End, cause: Option<Cause>) {
        let Work { router, group, prompt, scope, .. } = &self.work;
        let leg = if self.decision.path == Path::Remote { Leg::Decode } else { Leg::Local };
        router.metrics.leg_took(leg.as_str(), self.leg_started.elapsed());
        if let Some(cause) = cause {
            failed(router, group, leg, &self.rank, cause);
        } else if end == End::Finished {
            answered(group, &self.rank);
            sight::place(group, &self.rank, prompt, scope);
        }
        if let Some(client) = self.ticket.as_ref().and_then(|ticket| ticket.client.as_ref()) {
            client.spend_tokens(self.tokens);
        }
        self.booking.end(end, self.tokens);
    }
}

/// A leg was answered as it should be.
pub(crate) fn answered(group: &Group, rank: &Rank) {
    health(group, rank, HealthEvent::Answered);
}

/// A leg failed: counted, held against the worker, and logged.
pub(crate) fn failed(router: &Router, group: &Group, leg: Leg, rank: &Rank, cause: Cause) {
    let labels = LegFailure { leg: leg.as_str(), cause: cause.as_str() };
    router.metrics.leg_failures.get_or_create(&labels).inc();
    report::leg_failed(group, leg, rank, cause);
    health(group, rank, HealthEvent::Failed(cause));
}

/// What became of a hand-off, for both its workers; `failed` has told the decode worker's already.
pub(crate) fn handed_over(group: &Group, prefill: &Rank, decode: &Rank, cause: Option<Cause>) {
    match cause {
        None => {
            for rank in [prefill, decode] {
                health(group, rank, HealthEvent::HandedOver);
            }
        }
        Some(Cause::KvLoad) => health(group, prefill, HealthEvent::Failed(Cause::KvLoad)),
        Some(_) => {}
    }
}

/// Tells the brain what was seen of a worker's health.
pub(crate) fn health(group: &Group, rank: &Rank, event: HealthEvent) {
    if rank.worker.gone.is_cancelled() {
        // Another worker may have its slot by now.
        return;
    }
    let change = group.brain().observe(rank.slot, event, group.now());
    if let Some(change) = change {
        tracing::warn!(
            model = group.name(),
            worker = rank.worker.name(),
            rank = rank.rank.unwrap_or(0),
            from = ?change.from,
            to = ?change.to,
            "a worker's health changed"
        );
        // Those that wait may wait for this one.
        group.hold.released();
    }
}
