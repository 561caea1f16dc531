//! Starting and stopping a router.

use std::hash::{BuildHasher, Hasher as _, RandomState};
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use pointsman_brain::Brain;
use pointsman_config::{Model, Settings, UpstreamTls};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

use crate::clock::Clock;
use crate::fleet::{AddError, Fleet, Group};
use crate::listener::Door;
use crate::prompt::Tokenizer;
use crate::restore::{self, Snapshot};
use crate::router::Router;
use crate::snapshot::Seeds;
use crate::tls::{self, TlsError};
use crate::{calibration, listener, watch};

/// Why a router cannot start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The address cannot be listened on.
    #[error("cannot listen on {addr}: {source}; choose another with `{key}`")]
    Listen {
        /// The address.
        addr: SocketAddr,
        /// Where it is written.
        key: &'static str,
        /// What the system said.
        source: io::Error,
    },
    /// A model's tokenizer cannot be used.
    #[error("model `{model}`: {source}")]
    Tokenizer {
        /// The model.
        model: String,
        /// What is wrong.
        source: pointsman_tokens::Error,
    },
    /// A certificate, key or list of authorities cannot be used.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// A worker cannot be added.
    #[error(transparent)]
    Worker(#[from] AddError),
}

/// A router that serves.
pub struct Running {
    router: Arc<Router>,
    addr: SocketAddr,
    admin_addr: Option<SocketAddr>,
    doors: Vec<Arc<Door>>,
    /// The API's first.
    servers: Vec<JoinHandle<()>>,
}

/// Starts a router: every worker has been asked for its health once when this returns.
pub async fn start(settings: Settings) -> Result<Running, StartError> {
    let doors = listener::doors(&settings)?;
    let (listening, addr) = bind(settings.listen, "listen")?;
    let mut listeners = vec![listening];
    let mut admin_addr = None;
    if let Some(admin) = &settings.admin {
        let (listening, addr) = bind(admin.addr, "admin.listen")?;
        listeners.push(listening);
        admin_addr = Some(addr);
    }
    let snapshot = match &settings.kv.restore {
        Some(restore) => restore::open(restore, tls::client(&settings.upstream.tls)?).await,
        None => None,
    };
    let router = Arc::new(assemble(settings, snapshot.as_ref())?);
    router.add_configured_workers(snapshot).await?;
    calibration::restore(&router);
    router.tasks.spawn(calibration::keep(Arc::clone(&router)));
    watch::first_look(&router).await;
    for group in &router.fleet.groups {
        for line in group.brain().never_fires() {
            tracing::warn!(model = group.name(), "{line}");
        }
    }
    let serve = |(door, listening)| {
        tokio::spawn(listener::serve(Arc::clone(&router), Arc::clone(door), listening))
    };
    let servers = doors.iter().zip(listeners).map(serve).collect();
    Ok(Running { router, addr, admin_addr, doors, servers })
}

/// Listens on an address that is written under `key`.
fn bind(addr: SocketAddr, key: &'static str) -> Result<(TcpListener, SocketAddr), StartError> {
    let listening = listener::bind(addr).and_then(|listener| {
        let addr = listener.local_addr()?;
        Ok((listener, addr))
    });
    listening.map_err(|source| StartError::Listen { addr, key, source })
}

/// A router without workers and without a listener.
pub(crate) fn assemble(
    settings: Settings,
    snapshot: Option<&Snapshot>,
) -> Result<Router, StartError> {
    let clock = Clock::start();
    let groups = settings.models.iter().map(|model| {
        let seeds = snapshot.and_then(|snapshot| snapshot.seeds(&model.name));
        group(&settings, model, seeds.unwrap_or_else(random_seeds), clock)
    });
    let fleet = Fleet::new(groups.collect::<Result<_, _>>()?);
    Ok(Router::new(settings, fleet)?)
}

/// Random per process, so that nobody can craft prompts whose blocks collide.
fn random_seeds() -> Seeds {
    let random = || RandomState::new().build_hasher().finish();
    Seeds { hasher: random(), names: random() }
}

fn group(
    settings: &Settings,
    model: &Model,
    seeds: Seeds,
    clock: Clock,
) -> Result<Arc<Group>, StartError> {
    let tokenizer = Tokenizer::new(&model.tokenizer, settings.token_cache_bytes)
        .map_err(|source| StartError::Tokenizer { model: model.name.clone(), source })?;
    let brain = Brain::new(model.routing.clone());
    let approximate = settings.kv.approximate;
    Ok(Arc::new(Group::new(model.clone(), tokenizer, brain, seeds, approximate, clock)))
}

impl Running {
    /// Where it listens.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// The URL of the API.
    pub fn url(&self) -> String {
        let scheme = if self.router.settings.listen_tls.is_some() { "https" } else { "http" };
        format!("{scheme}://{}", self.addr)
    }

    /// Where metrics, status and worker API are served, if that is apart.
    pub fn admin_addr(&self) -> Option<SocketAddr> {
        self.admin_addr
    }

    /// Reads the certificates and keys of the listeners, and those of `upstream.tls`, again. Where one cannot
    /// be used, what it is for keeps what it has, and the log says why.
    pub fn reload_certificates(&self) {
        for door in &self.doors {
            match door.reload() {
                Ok(true) => {
                    tracing::info!(
                        listener = door.section(),
                        "certificate and key were read again"
                    );
                }
                Ok(false) => {}
                Err(error) => {
                    tracing::error!(%error, "certificate and key stay as they were");
                }
            }
        }
        let upstream = &self.router.settings.upstream.tls;
        if *upstream == UpstreamTls::default() {
            return;
        }
        match tls::client(upstream) {
            Ok(tls) => {
                self.router.upstream.trust(tls);
                tracing::info!("the files of `upstream.tls` were read again");
            }
            Err(error) => tracing::error!(%error, "trust in workers stays as it was"),
        }
    }

    /// Takes no further requests, lets running ones end within the grace period, and stops.
    pub async fn stop(self) {
        self.router.drain();
        self.router.stop.cancel();
        // A panic of the accept loop has been reported by its task already.
        let mut servers = self.servers.into_iter();
        if let Some(api) = servers.next() {
            let _ended = api.await;
        }
        self.router.served.cancel();
        for server in servers {
            let _ended = server.await;
        }
        self.router.end().await;
        calibration::save(&self.router);
    }
}
