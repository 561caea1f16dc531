//! What the router costs where there is much of something: cores, open streams, workers, models, or
//! bytes in a prompt.
//!
//! Each line has a router of its own, so that its memory is that line's alone.

use std::net::SocketAddr;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::Context;
use nix::sys::resource::{Resource, getrlimit, setrlimit};

use crate::bench::Options;
use crate::child::Running;
use crate::cpu::{self, Tree};
use crate::load::{self, Case, Outcome, Times};
use crate::proxies::{self, Target};
use crate::scaled::{Cores, Crowd, Prompt, Scaled, Streams};
use crate::wire::{MODEL, Stream};

/// Descriptors for two ends of every stream, and for what else is open: a router keeps up to 1024 unused
/// connections to each worker.
const DESCRIPTORS: u64 = 32 * 1024;
const OTHER_DESCRIPTORS: u64 = 4096;

/// Streams that are open at once, how many for a trial, and how each goes.
const STREAMS: usize = 10_000;
const QUICK_STREAMS: usize = 200;
const SLOW_STREAM: Stream = Stream { tokens: 40, per_write: 1, pause_ms: 500 };

/// Requests at a time where throughput is measured.
const CLIENTS: usize = 64;

const PROMPT_BYTES: usize = 1024;

/// Large prompts, in bytes, and how many of them are in flight while memory is measured.
const LARGE: [usize; 3] = [100 << 10, 1 << 20, 4 << 20];
const LARGE_CLIENTS: usize = 8;

/// Models and workers of each: what is beside the plain one of each.
const CROWDS: [(usize, usize); 3] = [(1, 1), (1, 1000), (100, 2)];

/// How long CPU use is watched while nothing happens, after a pause for what starts late.
const SETTLE: Duration = Duration::from_secs(6);
const IDLE: Duration = Duration::from_secs(5);

/// How a request goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    Local,
    Remote,
}

impl Way {
    pub(crate) const ALL: [Way; 2] = [Way::Local, Way::Remote];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Way::Local => "local",
            Way::Remote => "remote",
        }
    }
}

/// A router's configuration: the first model is the one that the load asks for.
fn config(way: Way, models: &[&[SocketAddr]]) -> String {
    use std::fmt::Write as _;

    let mut text = format!(
        "listen: {{port: 0}}\nrouting: {{policy: always_{}}}\nshutdown: {{grace: 1s}}\nmodels:\n",
        way.name()
    );
    for (number, workers) in models.iter().enumerate() {
        let name = if number == 0 { MODEL.to_owned() } else { format!("{MODEL}-{number}") };
        let _ =
            write!(text, "  - name: {name}\n    tokenizer: {{bytes_per_token: 4}}\n    workers:\n");
        for (at, addr) in workers.iter().enumerate() {
            let role = match (way, at % 2) {
                (Way::Local, _) => "unified",
                (Way::Remote, 0) => "prefill",
                (Way::Remote, _) => "decode",
            };
            let _ = writeln!(text, "      - {{role: {role}, url: \"http://{addr}\"}}");
        }
    }
    text
}

/// What all parts of the run have in common.
struct Bench<'a> {
    options: &'a Options,
    dir: &'a Path,
    /// Held for their end.
    _engines: Running,
    addrs: Vec<SocketAddr>,
}

/// Measures everything; the result is Markdown.
pub(crate) async fn run(options: &Options) -> anyhow::Result<String> {
    let dir = tempfile::tempdir()?;
    let most_streams = raise_descriptors()?;
    let most = CROWDS.iter().map(|(models, workers)| models * workers).max().unwrap_or(1);
    let cores = [options.load_core];
    let (engines, addrs) = proxies::many_engines(most, &cores, dir.path())?;
    let bench = Bench { options, dir: dir.path(), _engines: engines, addrs };
    cpu::pin(&cores)?;
    let mut scaled = Scaled::default();
    for way in Way::ALL {
        eprintln!("{}: prompts", way.name());
        for bytes in LARGE {
            scaled.prompts.push(bench.prompt(way, bytes).await?);
        }
        eprintln!("{}: workers and models", way.name());
        for (models, workers) in CROWDS {
            scaled.crowds.push(bench.crowd(way, models, workers).await?);
        }
        eprintln!("{}: open streams", way.name());
        scaled.streams.push(bench.streams(way, most_streams).await?);
    }
    // The last, as load and engines have both cores from here on.
    let both = [options.proxy_core, options.load_core];
    cpu::pin(&both)?;
    for way in Way::ALL {
        eprintln!("{}: cores", way.name());
        for count in 1..=both.len() {
            scaled.cores.push(bench.cores(way, both.get(..count).unwrap_or_default()).await?);
        }
    }
    Ok(scaled.markdown())
}

/// Raises the limit of descriptors as far as it may be, for the processes that are started here too;
/// returns how many streams it allows a router.
fn raise_descriptors() -> anyhow::Result<usize> {
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    let limit = DESCRIPTORS.min(hard).max(soft);
    setrlimit(Resource::RLIMIT_NOFILE, limit, hard).context("the limit of descriptors")?;
    Ok(usize::try_from(limit.saturating_sub(OTHER_DESCRIPTORS) / 2)?)
}

impl Bench<'_> {
    fn router(
        &self,
        way: Way,
        models: &[&[SocketAddr]],
        cores: &[usize],
    ) -> anyhow::Result<Target> {
        let mut command = Command::new(&self.options.router);
        command.env("TOKIO_WORKER_THREADS", cores.len().to_string());
        proxies::router(way.name(), &mut command, &config(way, models), cores, self.dir)
    }

    /// A router for one model on the proxies' core.
    fn plain(&self, way: Way) -> anyhow::Result<(Target, Tree)> {
        let pair = self.addrs.get(..2).context("two engines")?;
        with_tree(self.router(way, &[pair], &[self.options.proxy_core])?)
    }

    async fn load(
        &self,
        target: SocketAddr,
        tree: Option<&Tree>,
        case: Case,
    ) -> anyhow::Result<Outcome> {
        load::run(target, tree, self.options.api, case, self.options.times).await
    }

    async fn prompt(&self, way: Way, prompt_bytes: usize) -> anyhow::Result<Prompt> {
        let one = Case { clients: 1, prompt_bytes, stream: None };
        let direct = *self.addrs.get(1).context("two engines")?;
        let (target, tree) = self.plain(way)?;
        let (idle_kib, _) = tree.memory_kib()?;
        let mut added = Vec::new();
        for _ in 0..self.options.rounds {
            let bare = self.load(direct, None, one).await?;
            let through = self.load(target.addr, Some(&tree), one).await?;
            added.push(through.whole.p50 - bare.whole.p50);
        }
        let many = Case { clients: LARGE_CLIENTS, ..one };
        let outcome = self.load(target.addr, Some(&tree), many).await?;
        let (_, peak_kib) = tree.memory_kib()?;
        Ok(Prompt {
            way,
            bytes: prompt_bytes,
            added_us: crate::table::median(added).unwrap_or_default(),
            cpu_us: per_request_us(&outcome, 0.0),
            kib_each: peak_kib.saturating_sub(idle_kib) as f64 / LARGE_CLIENTS as f64,
        })
    }

    async fn crowd(&self, way: Way, models: usize, workers: usize) -> anyhow::Result<Crowd> {
        // A pair needs two.
        let workers = workers.max(2);
        let all: Vec<&[SocketAddr]> = self.addrs.chunks(workers).take(models).collect();
        let (target, tree) = with_tree(self.router(way, &all, &[self.options.proxy_core])?)?;
        tokio::time::sleep(SETTLE.min(self.options.times.measured * 10)).await;
        let before = tree.cpu_time()?;
        let watched = IDLE.min(self.options.times.measured * 10);
        tokio::time::sleep(watched).await;
        let idle_cpu = (tree.cpu_time()? - before).as_secs_f64() / watched.as_secs_f64();
        let (idle_kib, _) = tree.memory_kib()?;
        let case = Case { clients: CLIENTS, prompt_bytes: PROMPT_BYTES, stream: None };
        let outcome = self.load(target.addr, Some(&tree), case).await?;
        Ok(Crowd {
            way,
            models,
            workers,
            ready: target.ready.unwrap_or_default(),
            idle_kib,
            idle_cpu,
            request_us: per_request_us(&outcome, idle_cpu),
        })
    }

    async fn streams(&self, way: Way, most: usize) -> anyhow::Result<Streams> {
        let (target, tree) = self.plain(way)?;
        let (idle_kib, _) = tree.memory_kib()?;
        let trial = self.options.most_clients < STREAMS;
        let clients = most.min(if trial { QUICK_STREAMS } else { STREAMS });
        let case = Case { clients, prompt_bytes: PROMPT_BYTES, stream: Some(SLOW_STREAM) };
        // As long as a stream takes, so that the events of all of its course are counted.
        let whole = Duration::from_millis(SLOW_STREAM.pause_ms) * SLOW_STREAM.tokens as u32;
        let times = Times { ramp: whole, warm_up: whole / 2, measured: whole };
        let outcome = load::run(target.addr, Some(&tree), self.options.api, case, times).await?;
        let (_, peak_kib) = tree.memory_kib()?;
        Ok(Streams {
            way,
            open: clients,
            events_per_second: outcome.tokens as f64 / outcome.seconds,
            events_per_cpu_second: outcome.tokens as f64 / outcome.cpu,
            kib_each: peak_kib.saturating_sub(idle_kib) as f64 / clients as f64,
        })
    }

    async fn cores(&self, way: Way, cores: &[usize]) -> anyhow::Result<Cores> {
        let pair = self.addrs.get(..2).context("two engines")?;
        let (target, tree) = with_tree(self.router(way, &[pair], cores)?)?;
        let case = Case { clients: CLIENTS, prompt_bytes: PROMPT_BYTES, stream: None };
        let mut rates = Vec::new();
        for _ in 0..self.options.rounds {
            let outcome = self.load(target.addr, Some(&tree), case).await?;
            rates.push(outcome.requests as f64 / outcome.cpu);
        }
        let rate = crate::table::median(rates).unwrap_or_default();
        Ok(Cores { way, cores: cores.len(), requests_per_cpu_second: rate })
    }
}

fn with_tree(target: Target) -> anyhow::Result<(Target, Tree)> {
    let tree = target.tree.clone().context("the router's process")?;
    Ok((target, tree))
}

/// CPU microseconds of a request, without what the router does when idle.
fn per_request_us(outcome: &Outcome, idle_cpu: f64) -> f64 {
    let cpu = outcome.cpu - idle_cpu * outcome.seconds;
    1e6 * cpu.max(0.0) / outcome.requests.max(1) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_second_worker_of_a_remote_setup_is_for_prefill() {
        let addrs: Vec<SocketAddr> =
            (1..=4).map(|port| SocketAddr::from(([127, 0, 0, 1], port))).collect();
        let text = config(Way::Remote, &[&addrs[..2], &addrs[2..]]);
        assert_eq!(text.matches("role: prefill").count(), 2);
        assert_eq!(text.matches("role: decode").count(), 2);
        assert!(text.contains("name: bench\n") && text.contains("name: bench-1\n"), "{text}");
        assert_eq!(config(Way::Local, &[&addrs]).matches("role: unified").count(), 4);
    }

    #[test]
    fn what_is_done_when_idle_is_not_a_requests() {
        let outcome = Outcome { requests: 100, cpu: 0.3, seconds: 2.0, ..Outcome::default() };
        assert!((per_request_us(&outcome, 0.1) - 1000.0).abs() < 1e-6);
    }
}
