//! Bodies of replies.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use futures_util::stream;
use http::{HeaderValue, Response, StatusCode, header};
use http_body::{Body, Frame, SizeHint};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, StreamBody};

use super::config::Dialect;
use super::connection::Hangup;
use super::errors::Failure;
use super::faults::Cut;
use super::stream::Events;

pub(super) type Reply = Response<ReplyBody>;

/// A body that may end its connection when it is through.
pub(super) struct ReplyBody {
    inner: UnsyncBoxBody<Bytes, Infallible>,
    then_close: Option<Arc<Hangup>>,
}

impl Body for ReplyBody {
    type Data = Bytes;
    type Error = Infallible;
    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        Pin::new(&mut self.inner).poll_frame(cx)
    }
    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }
    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

impl Drop for ReplyBody {
    fn drop(&mut self) {
        if let Some(hangup) = &self.then_close {
            hangup.cut(Cut::Fin);
        }
    }
}

impl ReplyBody {
    fn of(inner: UnsyncBoxBody<Bytes, Infallible>) -> ReplyBody {
        ReplyBody { inner, then_close: None }
    }

    /// Closes the connection after the body, although the reply did not say so.
    pub(super) fn then_close(mut self, hangup: &Arc<Hangup>) -> ReplyBody {
        self.then_close = Some(hangup.clone());
        self
    }
}

pub(super) fn whole(status: u16, content_type: &'static str, body: impl Into<Bytes>) -> Reply {
    reply(status, content_type, ReplyBody::of(Full::new(body.into()).boxed_unsync()))
}

pub(super) fn json(status: u16, body: impl Into<Bytes>) -> Reply {
    whole(status, "application/json", body)
}

pub(super) fn failure(dialect: Dialect, failure: &Failure) -> Reply {
    json(failure.status, failure.body(dialect))
}

/// A stream of server-sent events.
pub(super) fn events(events: Events) -> Reply {
    let frames = stream::unfold(events, |mut events| async move {
        let bytes = events.next().await?;
        Some((Ok(Frame::data(bytes)), events))
    });
    let body = ReplyBody::of(BodyExt::boxed_unsync(StreamBody::new(frames)));
    reply(200, "text/event-stream; charset=utf-8", body)
}

/// Headers, then `first`, then nothing; the connection is cut after it if `cut` says so.
pub(super) fn unfinished(
    content_type: &'static str,
    first: Bytes,
    cut: Option<(Arc<Hangup>, Cut)>,
) -> Reply {
    let frames = stream::unfold(Some((first, cut)), |state| async move {
        match state {
            Some((first, cut)) if !first.is_empty() => {
                Some((Ok(Frame::data(first)), Some((Bytes::new(), cut))))
            }
            Some((_, Some((hangup, how)))) => {
                hangup.cut(how);
                std::future::pending().await
            }
            _ => std::future::pending().await,
        }
    });
    reply(200, content_type, ReplyBody::of(BodyExt::boxed_unsync(StreamBody::new(frames))))
}

fn reply(status: u16, content_type: &'static str, body: ReplyBody) -> Reply {
    let mut response = Response::new(body);
    *response.status_mut() = StatusCode::from_u16(status).unwrap_or(StatusCode::OK);
    let headers = response.headers_mut();
    headers.insert(header::SERVER, HeaderValue::from_static("uvicorn"));
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
    headers.insert(header::VARY, HeaderValue::from_static("Origin"));
    response
}
