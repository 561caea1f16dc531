//! A leg's body, which tells whether any of it may have gone out.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};

/// A body in one piece.
#[derive(Clone, Debug, Default)]
pub(crate) struct Outgoing {
    bytes: Option<Bytes>,
    /// Who wants to know that it goes out; such a body goes out once.
    begun: Option<Begun>,
}

/// Whether a leg's body was asked for by a connection: until then nothing of the leg has gone out.
#[derive(Clone, Debug, Default)]
pub(crate) struct Begun(Arc<AtomicBool>);

impl Begun {
    pub(crate) fn get(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}

impl Outgoing {
    /// A body that reports on `begun`, if anybody wants to know.
    pub(crate) fn new(bytes: Bytes, begun: Option<Begun>) -> Outgoing {
        Outgoing { bytes: Some(bytes).filter(|bytes| !bytes.is_empty()), begun }
    }

    /// Whether it may be sent again where nobody read it. What holds a hand-off may not: it would be
    /// used twice if it was read after all.
    pub(crate) fn may_go_again(&self) -> bool {
        self.begun.is_none()
    }
}

impl From<Bytes> for Outgoing {
    fn from(bytes: Bytes) -> Outgoing {
        Outgoing::new(bytes, None)
    }
}

impl Body for Outgoing {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        if let Some(begun) = &self.begun {
            begun.0.store(true, Ordering::Release);
        }
        Poll::Ready(self.bytes.take().map(|bytes| Ok(Frame::data(bytes))))
    }

    fn is_end_stream(&self) -> bool {
        self.bytes.is_none()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.bytes.as_ref().map_or(0, |bytes| bytes.len() as u64))
    }
}
