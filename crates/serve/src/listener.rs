//! The listening socket: connections in, requests to `api`, and an orderly end.
//!
//! Invariants: heads are bounded in size and time; a connection's panic ends that connection alone;
//! after the drain begins no connection is accepted and none is kept for a further request.

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use tokio::net::{TcpListener, TcpStream};
use tokio_io_timeout::TimeoutStream;

use crate::api;
use crate::router::Router;

/// How long accepting rests when the process has no descriptors left.
const ACCEPT_REST: Duration = Duration::from_millis(50);

/// Most headers of one request.
const MAX_HEADERS: usize = 128;

/// hyper's own lower bound on a connection's read buffer.
const MIN_BUFFER_BYTES: usize = 8192;

/// Connections that wait to be accepted.
const BACKLOG: u32 = 4096;

/// Opens the listening socket.
pub(crate) fn bind(addr: SocketAddr) -> io::Result<TcpListener> {
    let socket = match addr {
        SocketAddr::V4(_) => tokio::net::TcpSocket::new_v4()?,
        SocketAddr::V6(_) => tokio::net::TcpSocket::new_v6()?,
    };
    socket.set_reuseaddr(true)?;
    socket.bind(addr)?;
    socket.listen(BACKLOG)
}

/// Accepts until the router stops, then lets running requests end within the grace period.
pub(crate) async fn serve(router: Arc<Router>, listener: TcpListener) {
    // HTTP/1 alone: a client of HTTP/2 that gives no window would hold its requests for ever, because
    // hyper polls no body that it cannot send.
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new())
        .header_read_timeout(router.settings.timeouts.header_read)
        .max_headers(MAX_HEADERS)
        .max_buf_size(router.settings.limits.max_header_bytes.get().max(MIN_BUFFER_BYTES));
    let connections = GracefulShutdown::new();
    loop {
        let accepted = tokio::select! {
            () = router.stop.cancelled() => break,
            accepted = listener.accept() => accepted,
        };
        match accepted {
            Ok((stream, _peer)) => spawn(&router, &http, stream, &connections),
            Err(error) => {
                tracing::warn!(%error, "a connection could not be accepted");
                tokio::time::sleep(ACCEPT_REST).await;
            }
        }
    }
    drop(listener);
    let grace = router.settings.shutdown_grace;
    if tokio::time::timeout(grace, connections.shutdown()).await.is_err() {
        tracing::warn!(
            requests = router.gate.inside(),
            "requests were still running at the end of the grace period of {grace:?}; they are cut"
        );
    }
}

fn spawn(
    router: &Arc<Router>,
    http: &http1::Builder,
    stream: TcpStream,
    connections: &GracefulShutdown,
) {
    if let Err(error) = stream.set_nodelay(true) {
        tracing::debug!(%error, "a connection was gone before it began");
        return;
    }
    let reply_write = router.settings.timeouts.reply_write;
    let router = Arc::clone(router);
    let service = service_fn(move |request| {
        let router = Arc::clone(&router);
        async move { Ok::<_, Infallible>(api::answer(router, request).await) }
    });
    // A body that nobody reads is not polled, so that no timer inside it would ever fire.
    let mut stream = Box::pin(TimeoutStream::new(stream));
    stream.as_mut().set_write_timeout_pinned(Some(reply_write));
    let connection = http.serve_connection(TokioIo::new(stream), service);
    let connection = connections.watch(connection);
    tokio::spawn(async move {
        if let Err(error) = connection.await {
            tracing::debug!(%error, "a connection ended early");
        }
    });
}
