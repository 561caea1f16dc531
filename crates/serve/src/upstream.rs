//! HTTP to the engines: one pooled client for all of them, and what went wrong in the ladder's words.
//!
//! Invariants: every wait has a bound; dropping a future or a body closes its connection, which is
//! how an engine learns that nobody listens any more. Not here: which worker is asked, and retries, but
//! for the one where an engine closed an idle connection just as a request went out.

use std::collections::BTreeMap;
use std::error::Error as StdError;
use std::pin::pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method, Request, Response, Uri, header};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use hyper::body::Incoming;
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::client::legacy::{Client, Error};
use hyper_util::rt::{TokioExecutor, TokioTimer};
use pointsman_brain::Cause;
use rustls::ClientConfig;

use crate::outgoing::Outgoing;
use crate::reuse::{self, Watching};
use crate::{overdue, tls};

/// The client of all engines.
#[derive(Clone)]
pub(crate) struct Upstream {
    shared: Arc<Shared>,
}

struct Shared {
    pool: ArcSwap<Pool>,
    making: Making,
    tls: ArcSwap<ClientConfig>,
    troubles: Troubles,
}

type Pool = Client<Watching<HttpsConnector<HttpConnector>>, Outgoing>;

/// How connections are made and kept.
#[derive(Clone, Copy)]
struct Making {
    idle_connections: usize,
    idle: Duration,
    connect: Duration,
}

/// Places that cannot be spoken to by TLS, and why. They are workers', so that there are few.
#[derive(Default)]
struct Troubles {
    /// How many there are, so that requests need not look.
    count: AtomicUsize,
    by_place: Mutex<BTreeMap<String, String>>,
}

impl Troubles {
    fn change(&self, change: impl FnOnce(&mut BTreeMap<String, String>)) {
        let mut by_place = self.by_place.lock().unwrap_or_else(PoisonError::into_inner);
        change(&mut by_place);
        self.count.store(by_place.len(), Ordering::Relaxed);
    }

    fn failed(&self, place: &str, error: &(dyn StdError + 'static)) {
        if let Some(error) = tls::within(error) {
            self.change(|by_place| _ = by_place.insert(place.to_owned(), tls::told(error)));
        }
    }

    fn went_well(&self, place: &str) {
        if self.count.load(Ordering::Relaxed) > 0 {
            self.change(|by_place| _ = by_place.remove(place));
        }
    }
}

/// Where a URI by TLS leads to.
fn secure_place(uri: &Uri) -> Option<&str> {
    let secure = uri.scheme() == Some(&http::uri::Scheme::HTTPS);
    uri.authority().filter(|_| secure).map(http::uri::Authority::as_str)
}

/// Silence after which an open connection is probed, and again at each pause.
const PROBE_AFTER: Duration = Duration::from_secs(10);
const PROBE_PAUSE: Duration = Duration::from_secs(5);

/// How long an engine's host may leave what was sent unacknowledged, probes too: then it is gone, and with
/// it every connection to it.
const ACKNOWLEDGED_WITHIN: Duration = Duration::from_secs(20);

/// How soon a used connection has to end for it to have been closed before the request came.
const CLOSED_BEFORE: Duration = Duration::from_secs(1);

impl Making {
    fn pool(self, tls: &ClientConfig) -> Arc<Pool> {
        let mut connector = HttpConnector::new();
        connector.enforce_http(false);
        connector.set_nodelay(true);
        connector.set_connect_timeout(Some(self.connect));
        connector.set_keepalive(Some(PROBE_AFTER));
        connector.set_keepalive_interval(Some(PROBE_PAUSE));
        #[cfg(target_os = "linux")]
        connector.set_tcp_user_timeout(Some(ACKNOWLEDGED_WITHIN));
        let connector = HttpsConnectorBuilder::new()
            .with_tls_config(tls.clone())
            .https_or_http()
            .enable_http1()
            .wrap_connector(connector);
        let client = Client::builder(TokioExecutor::new())
            .pool_timer(TokioTimer::new())
            .pool_idle_timeout(self.idle)
            .pool_max_idle_per_host(self.idle_connections)
            .build(Watching(connector));
        Arc::new(client)
    }
}

impl Upstream {
    /// A client that keeps `idle_connections` per engine, each unused at most for `idle`.
    pub(crate) fn new(
        idle_connections: usize,
        idle: Duration,
        connect: Duration,
        tls: ClientConfig,
    ) -> Self {
        let making = Making { idle_connections, idle, connect };
        let pool = ArcSwap::new(making.pool(&tls));
        let (tls, troubles) = (ArcSwap::from_pointee(tls), Troubles::default());
        Upstream { shared: Arc::new(Shared { pool, making, tls, troubles }) }
    }

    /// Uses no connection of before for further requests, because another host may be meant by then;
    /// what runs goes on.
    pub(crate) fn connect_anew(&self) {
        let Shared { pool, making, tls, .. } = &*self.shared;
        pool.store(making.pool(&tls.load()));
    }

    /// The same, with other certificates.
    pub(crate) fn trust(&self, tls: ClientConfig) {
        self.shared.tls.store(Arc::new(tls));
        self.connect_anew();
    }

    /// Why the last try to speak to the place of a URI by TLS failed, and what to do.
    pub(crate) fn trouble(&self, uri: &Uri) -> Option<String> {
        let place = secure_place(uri)?;
        let by_place = self.shared.troubles.by_place.lock().unwrap_or_else(PoisonError::into_inner);
        by_place.get(place).cloned()
    }

    /// Sends a JSON body and waits for the head of the reply, at most `wait`.
    pub(crate) async fn post(
        &self,
        uri: Uri,
        mut headers: HeaderMap,
        body: impl Into<Outgoing>,
        wait: Duration,
    ) -> Result<Response<Incoming>, Cause> {
        headers.entry(header::CONTENT_TYPE).or_insert(HeaderValue::from_static("application/json"));
        let mut request = Request::new(body.into());
        *request.method_mut() = Method::POST;
        *request.uri_mut() = uri;
        *request.headers_mut() = headers;
        self.send(request, wait).await
    }

    /// Asks for a small document, such as `/health` or `/metrics`, and reads it whole.
    pub(crate) async fn get(
        &self,
        uri: Uri,
        headers: HeaderMap,
        wait: Duration,
        limit: usize,
    ) -> Result<(u16, Bytes), Cause> {
        let exchange = async {
            let response = self.open(uri, headers, wait).await?;
            let status = response.status().as_u16();
            Ok((status, read(response.into_body(), limit).await?))
        };
        tokio::time::timeout(wait, exchange).await.unwrap_or(Err(Cause::Timeout))
    }

    /// Asks for a document that is read as it comes; the head must be there within `wait`.
    pub(crate) async fn open(
        &self,
        uri: Uri,
        headers: HeaderMap,
        wait: Duration,
    ) -> Result<Response<Incoming>, Cause> {
        let mut request = Request::new(Outgoing::default());
        *request.uri_mut() = uri;
        *request.headers_mut() = headers;
        self.send(request, wait).await
    }

    /// Sends a request, and once more where its connection was closed before it came.
    async fn exchange(&self, request: Request<Outgoing>) -> Result<Response<Incoming>, Error> {
        let pool = self.shared.pool.load_full();
        let again = request.body().may_go_again().then(|| request.clone());
        let sent = Instant::now();
        match (pool.request(request).await, again) {
            (Err(error), Some(again))
                if reuse::ended_unanswered(&error) && sent.elapsed() < CLOSED_BEFORE =>
            {
                pool.request(again).await
            }
            (answer, _) => answer,
        }
    }

    async fn send(
        &self,
        request: Request<Outgoing>,
        wait: Duration,
    ) -> Result<Response<Incoming>, Cause> {
        let place = secure_place(request.uri()).map(str::to_owned);
        let until = tokio::time::Instant::now() + wait;
        match overdue::within(until, pin!(self.exchange(request))).await {
            Err(_elapsed) => Err(Cause::Timeout),
            Ok(Ok(response)) => {
                if let Some(place) = place {
                    self.shared.troubles.went_well(&place);
                }
                Ok(response)
            }
            Ok(Err(error)) => {
                if let Some(place) = place {
                    self.shared.troubles.failed(&place, &error);
                }
                Err(match error.is_connect() {
                    true if without_descriptors(&error) => Cause::Descriptors,
                    true => Cause::Connect,
                    false => Cause::Cut,
                })
            }
        }
    }
}

/// Whether a connection failed because this process, or the machine, has no file descriptors left.
fn without_descriptors(error: &(dyn StdError + 'static)) -> bool {
    const ENFILE: i32 = 23;
    const EMFILE: i32 = 24;
    std::iter::successors(Some(error), |error| (*error).source())
        .filter_map(|error| error.downcast_ref::<std::io::Error>()?.raw_os_error())
        .any(|code| matches!(code, ENFILE | EMFILE))
}

/// Reads a body whole, at most `limit` bytes of it.
pub(crate) async fn read(body: Incoming, limit: usize) -> Result<Bytes, Cause> {
    match Limited::new(body, limit).collect().await {
        Ok(collected) => Ok(collected.to_bytes()),
        Err(error) if error.is::<LengthLimitError>() => Err(Cause::Protocol),
        Err(_) => Err(Cause::Cut),
    }
}
