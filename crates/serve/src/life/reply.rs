//! The client's reply, once a leg has been answered so far that it may begin.

use std::pin::pin;
use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Response, StatusCode, header};
use http_body_util::Either;
use hyper::body::Incoming;
use pointsman_brain::{Cause, End};
use pointsman_wire::dialect::{Answer, Api};
use pointsman_wire::sse::{self, Usage};

use super::{Life, Plan};
use crate::admission::Ticket;
use crate::error::{Reply, full};
use crate::relay::{self, Relay};
use crate::run::{self, Run};
use crate::upstream::read;
use crate::{headers, overdue, report};

/// The answer of the last leg, as far as it may still be made good: whole, or up to its first content.
pub(super) enum Answered {
    Stream(http::response::Parts, relay::Opened),
    Whole(http::response::Parts, Bytes, Option<Usage>),
    /// Of an endpoint that nothing is known of.
    Passing(http::response::Parts, Incoming),
}

/// An answer that is all there.
pub(super) struct Complete {
    pub(super) head: http::response::Parts,
    pub(super) answer: Bytes,
    /// The same as the client wants it.
    pub(super) body: Bytes,
}

impl Life {
    /// Reads an answer as far as it has to be there before anything goes to the client.
    pub(super) async fn answered(&self, response: Response<Incoming>) -> Result<Answered, Cause> {
        let (head, body) = response.into_parts();
        if is_event_stream(&head.headers) {
            let limit = self.router.settings.limits.max_reply_bytes.get();
            let opened = relay::open(body, self.patience, limit).await?;
            // The least that a generation says is why it ended.
            let generates = self.request.api() != Api::Other && !self.request.asks_for_none();
            if opened.is_empty() && generates {
                return Err(Cause::Protocol);
            }
            return Ok(Answered::Stream(head, opened));
        }
        if self.request.api() == Api::Other {
            return Ok(Answered::Passing(head, body));
        }
        // Whoever asked for events could not read anything else. What is written another way than this
        // one, engines may read another way than the router: it must not be theirs to blame.
        if self.request.body().raw("stream") == Some("true") {
            return Err(Cause::Protocol);
        }
        let bytes = self.read_whole(body).await?;
        let Answer { is_one, usage } = Answer::read(self.request.api(), &bytes);
        match is_one || self.request.asks_for_none() {
            true => Ok(Answered::Whole(head, bytes, usage)),
            false => Err(Cause::Protocol),
        }
    }

    /// The client's reply.
    pub(super) fn reply(
        &self,
        answered: Answered,
        plan: Plan,
        sent: Instant,
        ticket: &mut Option<Ticket>,
    ) -> Reply {
        let (Answered::Stream(head, _) | Answered::Whole(head, ..) | Answered::Passing(head, _)) =
            &answered;
        let (reply, mut run) = self.begin_reply(head, plan, sent, ticket);
        let patience = self.patience;
        let body = match answered {
            Answered::Stream(_, opened) => Either::Right(Relay::stream(opened, run, patience)),
            Answered::Passing(_, body) => Either::Right(Relay::plain(body, run, patience)),
            Answered::Whole(_, bytes, usage) => {
                if let Some(usage) = usage {
                    run.usage(usage);
                }
                run.end(End::Finished, None);
                full(bytes)
            }
        };
        reply.map(|()| body)
    }

    /// The reply where the prefill worker has given all of it.
    pub(super) fn complete(
        &self,
        complete: Complete,
        plan: Plan,
        ticket: &mut Option<Ticket>,
    ) -> Reply {
        let Complete { head, answer, body } = complete;
        let (mut reply, mut run) = self.begin_reply(&head, plan, Instant::now(), ticket);
        run.first_token(1);
        if let Some(usage) = sse::read_usage(&answer) {
            run.usage(usage);
        }
        run.end(End::Finished, None);
        if self.request.body().stream() {
            let kind = HeaderValue::from_static("text/event-stream; charset=utf-8");
            reply.headers_mut().insert(header::CONTENT_TYPE, kind);
        }
        reply.map(|()| full(body))
    }

    /// Reads a reply that is no stream, so that one that breaks off can still be made good.
    pub(super) async fn read_whole(&self, body: Incoming) -> Result<Bytes, Cause> {
        let limit = self.router.settings.limits.max_reply_bytes.get();
        overdue::within(self.patience.deadline, pin!(read(body, limit)))
            .await
            .unwrap_or(Err(Cause::Timeout))
    }

    /// The head of the client's reply, and the run that its end settles.
    fn begin_reply(
        &self,
        head: &http::response::Parts,
        plan: Plan,
        sent: Instant,
        ticket: &mut Option<Ticket>,
    ) -> (Response<()>, Run) {
        let mut reply = Response::new(());
        *reply.status_mut() = head.status;
        *reply.headers_mut() = headers::passed(&head.headers);
        if let Ok(id) = HeaderValue::from_str(&self.id) {
            reply.headers_mut().entry(headers::REQUEST_ID).or_insert(id);
        }
        if self.router.settings.response_headers {
            report::mark(reply.headers_mut(), &plan.decision, &plan.rank);
        }
        let Plan { decision, booking, rank, .. } = plan;
        let work = run::Work {
            router: Arc::clone(&self.router),
            group: Arc::clone(&self.group),
            prompt: self.prompt.clone(),
            scope: self.scope.clone(),
            id: if tracing::enabled!(tracing::Level::DEBUG) {
                self.id.clone()
            } else {
                String::new()
            },
        };
        (reply, Run::new(work, decision, booking, rank, ticket.take(), sent))
    }
}

pub(super) fn is_event_stream(headers: &HeaderMap) -> bool {
    headers
        .get(header::CONTENT_TYPE)
        .and_then(|value| value.to_str().ok())
        .and_then(|value| value.split(';').next())
        .is_some_and(|kind| kind.trim().eq_ignore_ascii_case("text/event-stream"))
}

/// An engine's refusal, as it stands.
pub(super) fn passed_on(from: &HeaderMap, status: u16, bytes: Bytes) -> Reply {
    let mut reply = Response::new(full(bytes));
    *reply.status_mut() = StatusCode::from_u16(status).unwrap_or(StatusCode::BAD_REQUEST);
    *reply.headers_mut() = headers::passed(from);
    reply
}
