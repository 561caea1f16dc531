//! Connections to engines that know whether what was last sent on them has been answered.
//!
//! An engine may close a connection that was idle in the very moment in which a request goes out on it.
//! Such a request was read by nobody and can be sent again; one that any byte came back for can not.

use std::error::Error as StdError;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};

use http::{Extensions, Uri};
use hyper_util::client::legacy::Error;
use hyper_util::client::legacy::connect::{Connected, Connection};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tower_service::Service;

/// What is known of a connection.
#[derive(Clone, Debug, Default)]
struct Traffic(Arc<State>);

#[derive(Debug, Default)]
struct State {
    /// Something came back since the last bytes went out.
    answered: AtomicBool,
    /// Something came back before the last bytes went out: it was used before.
    used: AtomicBool,
}

impl Traffic {
    fn sending(&self) {
        if self.0.answered.swap(false, Ordering::AcqRel) {
            self.0.used.store(true, Ordering::Release);
        }
    }

    fn received(&self) {
        self.0.answered.store(true, Ordering::Release);
    }
}

/// Whether a request failed because its connection, used before, ended without a byte for it.
pub(crate) fn ended_unanswered(error: &Error) -> bool {
    let Some(connected) = error.connect_info() else { return false };
    let mut extras = Extensions::new();
    connected.get_extras(&mut extras);
    extras.get::<Traffic>().is_some_and(|traffic| {
        traffic.0.used.load(Ordering::Acquire) && !traffic.0.answered.load(Ordering::Acquire)
    })
}

/// Makes connections of another connector to such ones.
#[derive(Clone, Debug)]
pub(crate) struct Watching<C>(pub(crate) C);

impl<C> Service<Uri> for Watching<C>
where
    C: Service<Uri>,
    C::Future: Send + 'static,
    C::Error: Into<Box<dyn StdError + Send + Sync>>,
{
    type Response = TokioIo<Watched<TokioIo<C::Response>>>;
    type Error = C::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, C::Error>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), C::Error>> {
        self.0.poll_ready(cx)
    }

    fn call(&mut self, to: Uri) -> Self::Future {
        let connecting = self.0.call(to);
        Box::pin(async move {
            let stream = TokioIo::new(connecting.await?);
            Ok(TokioIo::new(Watched { stream, traffic: Traffic::default() }))
        })
    }
}

/// A connection and what is known of it.
#[derive(Debug)]
pub(crate) struct Watched<S> {
    stream: S,
    traffic: Traffic,
}

impl<S: Connection> Connection for Watched<S> {
    fn connected(&self) -> Connected {
        self.stream.connected().extra(self.traffic.clone())
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Watched<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let read = Pin::new(&mut self.stream).poll_read(cx, buffer);
        if buffer.filled().len() > before {
            self.traffic.received();
        }
        read
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Watched<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.traffic.sending();
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.traffic.sending();
        Pin::new(&mut self.stream).poll_write_vectored(cx, bytes)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
