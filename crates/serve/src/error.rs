//! What the router itself answers when it does not pass on an engine's reply.

use std::convert::Infallible;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderValue, Response, StatusCode, header};
use http_body_util::channel::Channel;
use http_body_util::{Either, Full};
use pointsman_wire::body::BodyError;
use pointsman_wire::openai::ApiError;

use crate::relay::Relay;

/// A body that is made while it is sent.
pub(crate) type Streamed = Channel<Bytes, Infallible>;

/// A body of the router's own: whole, or made while it is sent.
pub(crate) type Own = Either<Full<Bytes>, Streamed>;

/// The body of every reply: the router's own, or passed on as it comes.
pub(crate) type Reply = Response<Either<Own, Relay>>;

/// An answer that refuses a request, shaped as the OpenAI API does it.
#[derive(Debug)]
pub(crate) struct Refusal {
    pub(crate) error: ApiError,
    pub(crate) retry_after: Option<Duration>,
}

impl Refusal {
    pub(crate) fn new(status: u16, message: impl Into<String>) -> Refusal {
        Refusal { error: ApiError::new(status, message), retry_after: None }
    }

    /// Nobody serves a model of this name.
    pub(crate) fn no_model(name: &str) -> Refusal {
        Refusal::new(404, format!("The model `{name}` does not exist.")).param("model")
    }

    pub(crate) fn param(mut self, param: &str) -> Refusal {
        self.error = self.error.param(param);
        self
    }

    pub(crate) fn retry_after(mut self, pause: Duration) -> Refusal {
        self.retry_after = Some(pause);
        self
    }

    pub(crate) fn reply(&self) -> Reply {
        let mut reply = json(self.error.status, self.error.body());
        if let Some(pause) = self.retry_after {
            // Whole seconds, never zero: a client that reads 0 comes back at once.
            let seconds = pause.as_secs() + u64::from(pause.subsec_nanos() > 0);
            reply.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds.max(1)));
        }
        reply
    }
}

impl From<BodyError> for Refusal {
    fn from(error: BodyError) -> Refusal {
        let refusal = Refusal::new(400, error.message);
        match error.field {
            Some(field) => refusal.param(field),
            None => refusal,
        }
    }
}

/// A body at hand.
pub(crate) fn full(bytes: Bytes) -> Either<Own, Relay> {
    Either::Left(Either::Left(Full::new(bytes)))
}

/// A JSON reply.
pub(crate) fn json(status: u16, body: impl Into<Bytes>) -> Reply {
    whole(status, "application/json", body)
}

/// A reply with a body at hand.
pub(crate) fn whole(status: u16, content_type: &'static str, body: impl Into<Bytes>) -> Reply {
    let mut reply = Response::new(full(body.into()));
    *reply.status_mut() = StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    reply.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
    reply
}
