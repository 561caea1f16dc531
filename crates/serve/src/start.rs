//! Starting and stopping a router.

use std::hash::{BuildHasher, Hasher as _, RandomState};
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use pointsman_brain::Brain;
use pointsman_config::{Model, Settings};
use tokio::task::JoinHandle;

use crate::fleet::{AddError, Clock, Fleet, Group};
use crate::prompt::Tokenizer;
use crate::restore::{self, Snapshot};
use crate::router::Router;
use crate::snapshot::Seeds;
use crate::{calibration, listener, watch};

/// Why a router cannot start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The address cannot be listened on.
    #[error("cannot listen on {addr}: {source}; choose another with `listen`")]
    Listen {
        /// The address.
        addr: SocketAddr,
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
    /// A worker cannot be added.
    #[error(transparent)]
    Worker(#[from] AddError),
}

/// A router that serves.
pub struct Running {
    router: Arc<Router>,
    addr: SocketAddr,
    server: JoinHandle<()>,
}

/// Starts a router: every worker has been asked for its health once when this returns.
pub async fn start(settings: Settings) -> Result<Running, StartError> {
    let addr = settings.listen;
    let listening = listener::bind(addr).and_then(|listener| {
        let addr = listener.local_addr()?;
        Ok((listener, addr))
    });
    let (listening, addr) = listening.map_err(|source| StartError::Listen { addr, source })?;
    let snapshot = match &settings.kv.restore {
        Some(restore) => restore::open(restore).await,
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
    let server = tokio::spawn(listener::serve(Arc::clone(&router), listening));
    Ok(Running { router, addr, server })
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
    Ok(Router::new(settings, fleet))
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

    /// Takes no further requests, lets running ones end within the grace period, and stops.
    pub async fn stop(self) {
        self.router.drain();
        self.router.stop.cancel();
        // A panic of the accept loop has been reported by its task already.
        let _ended = self.server.await;
        self.router.end().await;
        calibration::save(&self.router);
    }
}
