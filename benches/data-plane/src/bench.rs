//! The run: which cases, in which order, and what was measured of each target.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, ensure};

use crate::load::{self, Case, Outcome, Times};
use crate::peers::PEERS;
use crate::proxies::{self, DIRECT, Engines, NGINX, Target};
use crate::wire::{Api, Stream};

/// Tokens of a streamed reply.
pub(crate) const TOKENS: usize = 64;

const CLIENTS: [usize; 3] = [1, 32, 256];

const PROMPT_BYTES: [usize; 2] = [1024, 32 * 1024];

/// How long a proxy stands idle before its memory is read.
const IDLE: Duration = Duration::from_secs(1);

/// What to run, on what.
#[derive(Debug)]
pub(crate) struct Options {
    pub(crate) router: PathBuf,
    pub(crate) nginx: PathBuf,
    /// The venvs of other routers.
    pub(crate) peers: Option<PathBuf>,
    pub(crate) api: Api,
    /// Part of the description of each case that is run.
    pub(crate) case: String,
    /// Cases with more clients are left out.
    pub(crate) most_clients: usize,
    /// The targets that are measured; all if there are none.
    pub(crate) targets: Vec<String>,
    pub(crate) rounds: usize,
    pub(crate) times: Times,
    pub(crate) proxy_core: usize,
    pub(crate) load_core: usize,
}

impl Options {
    fn wants(&self, target: &str) -> bool {
        self.targets.is_empty() || self.targets.iter().any(|wanted| wanted == target)
    }
}

/// What one proxy is besides its speed.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Footprint {
    pub(crate) ready: Duration,
    pub(crate) idle_kib: u64,
    pub(crate) peak_kib: u64,
}

/// Everything that was measured.
#[derive(Debug)]
pub(crate) struct Results {
    pub(crate) targets: Vec<&'static str>,
    pub(crate) cases: Vec<Case>,
    /// By case, target and round.
    pub(crate) outcomes: Vec<Vec<Vec<Outcome>>>,
    /// By target; none for a direct connection.
    pub(crate) footprints: Vec<Option<Footprint>>,
}

/// The cases, plain ones first.
pub(crate) fn cases() -> Vec<Case> {
    let each = Stream { tokens: TOKENS, per_write: 1, pause_ms: 0 };
    let together = Stream { per_write: 8, ..each };
    let paced = Stream { pause_ms: 5, ..each };
    let mut cases = Vec::new();
    for stream in [None, Some(each)] {
        for prompt_bytes in PROMPT_BYTES {
            cases.extend(CLIENTS.map(|clients| Case { clients, prompt_bytes, stream }));
        }
    }
    let further = [(32, together), (256, paced)];
    cases.extend(further.map(|(clients, stream)| Case {
        clients,
        prompt_bytes: PROMPT_BYTES[0],
        stream: Some(stream),
    }));
    cases
}

/// Starts everything, measures every case on every target in turn, round after round.
pub(crate) async fn run(options: &Options) -> anyhow::Result<Results> {
    let dir = tempfile::tempdir()?;
    let (_engines, engines) = proxies::engines(options.load_core, dir.path())?;
    let targets = start(options, engines, dir.path())?;
    crate::cpu::pin(&[options.load_core])?;
    tokio::time::sleep(IDLE).await;
    let mut footprints = targets.iter().map(footprint).collect::<anyhow::Result<Vec<_>>>()?;
    let mut cases = cases();
    cases.retain(|case| described(*case).contains(&options.case));
    cases.retain(|case| case.clients <= options.most_clients);
    ensure!(!cases.is_empty(), "no case is described by `{}`", options.case);
    for target in &targets {
        check(target, options.api).await.with_context(|| said(target))?;
    }
    let mut outcomes = vec![vec![Vec::new(); targets.len()]; cases.len()];
    for round in 1..=options.rounds {
        for (case, outcomes) in cases.iter().zip(&mut outcomes) {
            eprintln!("round {round} of {}: {}", options.rounds, described(*case));
            for (target, outcomes) in targets.iter().zip(outcomes) {
                let (tree, times) = (target.tree.as_ref(), options.times);
                let run = load::run(target.addr, tree, options.api, *case, times).await;
                outcomes.push(run.with_context(|| said(target))?);
            }
        }
    }
    for (footprint, target) in footprints.iter_mut().zip(&targets) {
        if let (Some(footprint), Some(tree)) = (footprint, &target.tree) {
            (_, footprint.peak_kib) = tree.memory_kib()?;
        }
    }
    let targets = targets.iter().map(|target| target.name).collect();
    Ok(Results { targets, cases, outcomes, footprints })
}

fn start(options: &Options, engines: Engines, dir: &Path) -> anyhow::Result<Vec<Target>> {
    let core = options.proxy_core;
    let mut targets = vec![proxies::direct(engines)];
    if !options.wants(NGINX) {
        eprintln!("{NGINX} is left out, as asked");
    } else if options.nginx.exists() {
        targets.push(proxies::nginx(&options.nginx, engines, core, dir)?);
    } else {
        eprintln!(
            "{NGINX} is left out, and with it every ratio: there is no {}; install it with \
             `apt-get install nginx-light` or name another with --nginx",
            options.nginx.display()
        );
    }
    let router = &options.router;
    ensure!(
        router.exists(),
        "there is no {}; build it with `cargo build --release -p pointsman`",
        router.display()
    );
    for setup in proxies::SETUPS {
        if options.wants(setup.name) {
            targets.push(setup.start(router, engines, core, dir)?);
        }
    }
    if let Some(venvs) = &options.peers {
        for peer in PEERS.iter().filter(|peer| options.wants(peer.name)) {
            targets.extend(peer.start(venvs, engines, core, dir)?);
        }
    }
    Ok(targets)
}

fn footprint(target: &Target) -> anyhow::Result<Option<Footprint>> {
    let Some(tree) = &target.tree else { return Ok(None) };
    let (idle_kib, peak_kib) = tree.memory_kib()?;
    Ok(Some(Footprint { ready: target.ready.unwrap_or_default(), idle_kib, peak_kib }))
}

/// One reply of each kind is right, and took the path that the target stands for.
async fn check(target: &Target, api: Api) -> anyhow::Result<()> {
    for case in cases() {
        let head = load::probe(target.addr, api, case).await?;
        let path = target.path.map(|path| format!("x-pointsman-path: {path}\r\n"));
        ensure!(path.is_none_or(|path| head.contains(&path)), "a reply by another path: {head}");
    }
    Ok(())
}

/// The target in question, with the last lines of its log.
fn said(target: &Target) -> String {
    let log = target.process.as_ref().map(crate::child::Running::last_words);
    let log = log.filter(|log| !log.is_empty()).map(|log| format!(" (its log: {log})"));
    let name = if target.name == DIRECT { "the engines" } else { target.name };
    format!("through {name}{}", log.unwrap_or_default())
}

/// A case in a few words.
fn described(case: Case) -> String {
    let kind = crate::table::kind(case);
    format!("{kind}, {} clients, {} KiB", case.clients, case.prompt_bytes / 1024)
}
