//! Listeners and connections of a mock engine, with the power to cut a connection by reset or end.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::task::{Context, Poll};

use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, watch};

use super::app::{App, Closed};
use super::faults::Cut;
use super::routes;
use super::side;
use super::sockets::accept;

/// Cuts one connection.
#[derive(Default)]
pub(super) struct Hangup {
    reset: AtomicU8,
    asked: Notify,
}

impl Hangup {
    /// Cuts as soon as what has been written so far is on its way.
    pub(super) fn cut(&self, how: Cut) {
        self.reset.store(u8::from(how == Cut::Rst), Ordering::Relaxed);
        self.asked.notify_one();
    }
}

/// Which routes a listener serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Face {
    /// Everything.
    Api,
    /// Only `/mock/...`.
    Control,
    /// Mooncake's bootstrap server.
    Bootstrap,
}

impl Face {
    /// Whether a fault closes its listener.
    fn is_closed(self, closed: &Closed) -> bool {
        match self {
            Face::Api => closed.api,
            Face::Control => false,
            Face::Bootstrap => closed.bootstrap,
        }
    }
}

/// Serves HTTP until stopped; while the fault closes it, nobody listens.
pub(super) async fn serve_http(app: Arc<App>, listener: TcpListener, face: Face) {
    let is_closed = move |closed: &Closed| face.is_closed(closed);
    let peer = app.clone();
    listen(&app, listener, is_closed, move |stream| {
        let app = peer.clone();
        peer.tasks.spawn(async move {
            let stop = app.stop.clone();
            stop.run_until_cancelled(connection(app, stream, face)).await;
        });
    })
    .await;
}

/// Serves the KV side channel likewise.
pub(super) async fn serve_side_channel(app: Arc<App>, listener: TcpListener) {
    let peer = app.clone();
    let is_closed = |closed: &Closed| closed.side_channel;
    listen(&app, listener, is_closed, move |stream| {
        let app = peer.clone();
        peer.tasks.spawn(async move {
            let mut closed = app.closed.subscribe();
            tokio::select! {
                () = side::serve(app.registry.clone(), stream) => {}
                () = until(&mut closed, is_closed) => {}
                () = app.stop.cancelled() => {}
            }
        });
    })
    .await;
}

async fn listen(
    app: &App,
    listener: TcpListener,
    is_closed: impl Fn(&Closed) -> bool + Copy,
    mut each: impl FnMut(TcpStream),
) {
    let addr = listener.local_addr();
    let mut listener = Some(listener);
    let mut closed = app.closed.subscribe();
    loop {
        if is_closed(&closed.borrow_and_update()) {
            listener = None;
            until(&mut closed, |closed| !is_closed(closed)).await;
            continue;
        }
        match (&listener, &addr) {
            (Some(open), _) => tokio::select! {
                stream = accept(open) => each(stream),
                _ = closed.changed() => {}
            },
            (None, Ok(addr)) => match TcpListener::bind(addr).await {
                Ok(again) => listener = Some(again),
                Err(error) => {
                    tracing::warn!(%error, %addr, "mock engine: cannot listen again");
                    tokio::time::sleep(std::time::Duration::from_millis(50)).await;
                }
            },
            (None, Err(_)) => return,
        }
    }
}

async fn until(closed: &mut watch::Receiver<Closed>, what: impl Fn(&Closed) -> bool) {
    if closed.wait_for(what).await.is_err() {
        std::future::pending::<()>().await;
    }
}

async fn connection(app: Arc<App>, stream: TcpStream, face: Face) {
    let _ = stream.set_nodelay(true);
    let hangup = Arc::new(Hangup::default());
    let socket = Socket { stream, hangup: hangup.clone() };
    let mut closed = app.closed.subscribe();
    let (shared, own) = (hangup.clone(), app.clone());
    let service =
        service_fn(move |request| routes::answer(own.clone(), face, shared.clone(), request));
    let serving = http1::Builder::new().serve_connection(TokioIo::new(socket), service);
    // It lives until the end of this function, so that the socket closes as the branch says.
    let mut serving = std::pin::pin!(serving);
    tokio::select! {
        biased;
        // Polled first: what a handler wrote before it asked for the cut is on the wire by then.
        _ = &mut serving => {}
        () = hangup.asked.notified() => {}
        () = until(&mut closed, |closed| face.is_closed(closed)) => {
            hangup.cut(Cut::Rst);
        }
    }
}

/// A TCP stream that ends as its [`Hangup`] says.
struct Socket {
    stream: TcpStream,
    hangup: Arc<Hangup>,
}

impl Drop for Socket {
    fn drop(&mut self) {
        if self.hangup.reset.load(Ordering::Relaxed) == 1 {
            // Closing now sends a reset in place of the ordinary end.
            let _ = self.stream.set_zero_linger();
        }
    }
}

impl AsyncRead for Socket {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl AsyncWrite for Socket {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }
    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }
    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, bufs)
    }
    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}
