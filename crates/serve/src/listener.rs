//! The listening socket: connections in, requests to `api`, and an orderly end.
//!
//! Invariants: heads are bounded in size and time; a connection's panic ends that connection alone;
//! after the drain begins no connection is accepted and none is kept for a further request.

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
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
    let mut http = auto::Builder::new(TokioExecutor::new());
    http.http1()
        .timer(TokioTimer::new())
        .header_read_timeout(router.settings.timeouts.header_read)
        .max_headers(MAX_HEADERS)
        .max_buf_size(router.settings.limits.max_header_bytes.get().max(MIN_BUFFER_BYTES));
    http.http2().timer(TokioTimer::new()).max_header_list_size(
        u32::try_from(router.settings.limits.max_header_bytes.get()).unwrap_or(u32::MAX),
    );
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
    http: &auto::Builder<TokioExecutor>,
    stream: TcpStream,
    connections: &GracefulShutdown,
) {
    if let Err(error) = stream.set_nodelay(true) {
        tracing::debug!(%error, "a connection was gone before it began");
        return;
    }
    let reply_write = router.settings.timeouts.reply_write;
    let first_head = router.settings.timeouts.header_read;
    let router = Arc::clone(router);
    let asked = Arc::new(AtomicBool::new(false));
    let asks = Arc::clone(&asked);
    let service = service_fn(move |request| {
        asks.store(true, Ordering::Relaxed);
        let router = Arc::clone(&router);
        async move { Ok::<_, Infallible>(api::answer(router, request).await) }
    });
    // A body that nobody reads is not polled, so that no timer inside it would ever fire.
    let mut stream = Box::pin(TimeoutStream::new(stream));
    stream.as_mut().set_write_timeout_pinned(Some(reply_write));
    let connection = http.serve_connection(TokioIo::new(stream), service).into_owned();
    let connection = connections.watch(connection);
    tokio::spawn(async move {
        let mut connection = pin!(connection);
        // hyper's own timer begins once it has seen enough to know the version of HTTP.
        let ended = match tokio::time::timeout(first_head, connection.as_mut()).await {
            Ok(ended) => ended,
            Err(_elapsed) if asked.load(Ordering::Relaxed) => connection.await,
            Err(_elapsed) => return tracing::debug!("a connection brought no request in time"),
        };
        if let Err(error) = ended {
            tracing::debug!(error = &*error, "a connection ended early");
        }
    });
}
