//! The listening socket: connections in, requests to `api`, and an orderly end.
//!
//! Invariants: heads and TLS handshakes are bounded in size, number and time, and hold up nobody else;
//! a connection's panic ends that connection alone; after the drain begins no connection is accepted and none is kept for a further request.

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwapOption;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::{GracefulShutdown, Watcher};
use pointsman_config::{ListenTls, Settings};
use rustls::ServerConfig;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio_io_timeout::TimeoutStream;
use tokio_rustls::TlsAcceptor;

use crate::clock::Clock;
use crate::router::Router;
use crate::sparing::Sparing;
use crate::tls::{self, TlsError};
use crate::{api, report};

/// How long accepting rests when the process has no descriptors left.
const ACCEPT_REST: Duration = Duration::from_millis(50);

/// hyper's own lower bound on a connection's read buffer.
const MIN_BUFFER_BYTES: usize = 8192;

/// Connections that wait to be accepted.
const BACKLOG: u32 = 4096;

/// TLS handshakes under way at one listener; further connections are closed.
const MAX_HANDSHAKES: usize = 1024;

/// The longest that a TLS handshake may take, where `timeouts.header_read` allows for more.
const HANDSHAKE_TIME: Duration = Duration::from_secs(10);

/// How long streams have for a last word when the grace period is over.
const LAST_WORD: Duration = Duration::from_millis(500);

/// What is served at a listener.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Serves {
    /// The API, metrics, status and worker API.
    All,
    /// The API alone.
    Api,
    /// Metrics, status and worker API alone.
    Admin,
}

/// A listener's part of the API, and how it is entered.
pub(crate) struct Door {
    serves: Serves,
    section: &'static str,
    files: Option<ListenTls>,
    /// `None` = plain HTTP.
    tls: ArcSwapOption<ServerConfig>,
    handshakes: Arc<Semaphore>,
}

impl Door {
    fn new(
        serves: Serves,
        section: &'static str,
        files: Option<ListenTls>,
    ) -> Result<Arc<Door>, TlsError> {
        let tls = files.as_ref().map(|files| tls::server(section, files)).transpose()?;
        let handshakes = Arc::new(Semaphore::new(MAX_HANDSHAKES));
        Ok(Arc::new(Door { serves, section, files, tls: ArcSwapOption::new(tls), handshakes }))
    }

    /// Waits until no further connection is to be taken.
    async fn closes(&self, router: &Router) {
        let until = if self.serves == Serves::Admin { &router.served } else { &router.stop };
        until.cancelled().await;
    }

    /// Where its certificate is configured.
    pub(crate) fn section(&self) -> &'static str {
        self.section
    }

    /// Reads its files again, if it has any.
    pub(crate) fn reload(&self) -> Result<bool, TlsError> {
        let Some(files) = &self.files else { return Ok(false) };
        self.tls.store(Some(tls::server(self.section, files)?));
        Ok(true)
    }
}

/// The door of the API and, where it is apart, that of the administration.
pub(crate) fn doors(settings: &Settings) -> Result<Vec<Arc<Door>>, TlsError> {
    let serves = if settings.admin.is_some() { Serves::Api } else { Serves::All };
    let mut doors = vec![Door::new(serves, "listen.tls", settings.listen_tls.clone())?];
    if let Some(admin) = &settings.admin {
        doors.push(Door::new(Serves::Admin, "admin.listen.tls", admin.tls.clone())?);
    }
    Ok(doors)
}

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

/// Accepts until it is time, then lets running requests end within the grace period. The administration
/// is there until the last request of the API has ended.
pub(crate) async fn serve(router: Arc<Router>, door: Arc<Door>, listener: TcpListener) {
    // HTTP/1 alone: a client of HTTP/2 that gives no window would hold its requests for ever, because
    // hyper polls no body that it cannot send.
    let mut http = http1::Builder::new();
    let head_bytes = router.settings.limits.max_header_bytes.get();
    http.timer(TokioTimer::new())
        .header_read_timeout(router.settings.timeouts.header_read)
        // The buffer alone bounds what has not ended, not what came in one go.
        .max_header_size(head_bytes)
        .max_buf_size(head_bytes.max(MIN_BUFFER_BYTES));
    let connections = GracefulShutdown::new();
    let (clock, complaints) = (Clock::start(), Sparing::default());
    loop {
        let accepted = tokio::select! {
            () = door.closes(&router) => break,
            accepted = listener.accept() => accepted,
        };
        match accepted {
            Ok((stream, _peer)) => {
                spawn(&router, &door, &http, stream, connections.watcher());
            }
            Err(error) => {
                if let Some(unwritten) = complaints.turn(clock.now()) {
                    tracing::warn!(%error, unwritten, "a connection could not be accepted");
                }
                tokio::time::sleep(ACCEPT_REST).await;
            }
        }
    }
    drop(listener);
    let mut ended = std::pin::pin!(connections.shutdown());
    if door.serves == Serves::Admin {
        let _cut = tokio::time::timeout(LAST_WORD, ended).await;
        return;
    }
    let grace = router.settings.shutdown_grace;
    if tokio::time::timeout(grace, &mut ended).await.is_err() {
        tracing::warn!(
            requests = router.gate.inside(),
            "requests were still running at the end of the grace period of {grace:?}; they are cut"
        );
        router.cut();
        let _cut = tokio::time::timeout(LAST_WORD, ended).await;
    }
}

fn spawn(
    router: &Arc<Router>,
    door: &Arc<Door>,
    http: &http1::Builder,
    stream: TcpStream,
    watcher: Watcher,
) {
    if let Err(error) = stream.set_nodelay(true) {
        tracing::debug!(%error, "a connection was gone before it began");
        return;
    }
    let (router, door, http, serves) =
        (Arc::clone(router), Arc::clone(door), http.clone(), door.serves);
    let Some(tls) = door.tls.load_full() else {
        tokio::spawn(converse(router, serves, http, stream, watcher));
        return;
    };
    let Ok(handshake) = Arc::clone(&door.handshakes).try_acquire_owned() else {
        report::limit(&router, "tls_handshakes");
        return;
    };
    let time = router.settings.timeouts.header_read.min(HANDSHAKE_TIME);
    tokio::spawn(async move {
        let shaken = tokio::select! {
            () = door.closes(&router) => return,
            shaken = tokio::time::timeout(time, TlsAcceptor::from(tls).accept(stream)) => shaken,
        };
        drop(handshake);
        match shaken {
            Ok(Ok(stream)) => converse(router, serves, http, stream, watcher).await,
            Ok(Err(error)) => tracing::debug!(%error, "a TLS handshake failed"),
            Err(_elapsed) => tracing::debug!("a TLS handshake took longer than {time:?}"),
        }
    });
}

/// Answers the requests of one connection.
async fn converse<S: AsyncRead + AsyncWrite + Send + 'static>(
    router: Arc<Router>,
    serves: Serves,
    http: http1::Builder,
    stream: S,
    watcher: Watcher,
) {
    let reply_write = router.settings.timeouts.reply_write;
    let service = service_fn(move |request| {
        let router = Arc::clone(&router);
        async move { Ok::<_, Infallible>(api::answer(router, serves, request).await) }
    });
    // A body that nobody reads is not polled, so that no timer inside it would ever fire.
    let mut stream = Box::pin(TimeoutStream::new(stream));
    stream.as_mut().set_write_timeout_pinned(Some(reply_write));
    let connection = http.serve_connection(TokioIo::new(stream), service);
    if let Err(error) = watcher.watch(connection).await {
        tracing::debug!(%error, "a connection ended early");
    }
}
