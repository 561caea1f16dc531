//! Cores, CPU time and memory of processes.

use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::Context;
use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::time::{clock_getcpuclockid, clock_gettime};
use nix::unistd::Pid;

/// The process itself, for the affinity calls.
const SELF: Pid = Pid::from_raw(0);

/// Moves this thread, and whatever it starts from here on, to these cores.
pub(crate) fn pin(cores: &[usize]) -> anyhow::Result<()> {
    let mut set = CpuSet::new();
    for core in cores {
        set.set(*core).with_context(|| format!("core {core}"))?;
    }
    sched_setaffinity(SELF, &set)
        .with_context(|| format!("this process may not run on cores {cores:?}; choose others"))
}

/// Runs `start` on some cores, so that the process that it starts stays there, and comes back.
pub(crate) fn on_cores<T>(
    cores: &[usize],
    start: impl FnOnce() -> anyhow::Result<T>,
) -> anyhow::Result<T> {
    let before = sched_getaffinity(SELF).context("the cores of this process")?;
    pin(cores)?;
    let started = start();
    sched_setaffinity(SELF, &before).context("the cores of this process")?;
    started
}

/// A process and its descendants.
#[derive(Clone, Debug)]
pub(crate) struct Tree {
    pids: Vec<Pid>,
}

impl Tree {
    /// A process and the descendants that it has at this moment.
    pub(crate) fn of(root: u32) -> anyhow::Result<Tree> {
        let parents = parents()?;
        let mut pids = vec![i32::try_from(root)?];
        let mut at = 0;
        while let Some(parent) = pids.get(at).copied() {
            pids.extend(parents.iter().filter(|(_, ppid)| *ppid == parent).map(|(pid, _)| *pid));
            at += 1;
        }
        Ok(Tree { pids: pids.into_iter().map(Pid::from_raw).collect() })
    }

    /// Every process of it, the root first.
    pub(crate) fn pids(&self) -> &[Pid] {
        &self.pids
    }

    /// CPU time of all threads, ended ones included: what `/proc/PID/stat` says in ticks, in
    /// nanoseconds.
    pub(crate) fn cpu_time(&self) -> anyhow::Result<Duration> {
        self.pids.iter().try_fold(Duration::ZERO, |sum, pid| {
            let clock = clock_getcpuclockid(*pid).context("a proxy ended early")?;
            Ok(sum + Duration::from(clock_gettime(clock)?))
        })
    }

    /// Resident memory in KiB: at the moment, and at most so far.
    pub(crate) fn memory_kib(&self) -> anyhow::Result<(u64, u64)> {
        self.pids.iter().try_fold((0, 0), |(rss, peak), pid| {
            let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
            let field = |name: &str| {
                let value = status.lines().find_map(|line| line.strip_prefix(name));
                value.and_then(|v| v.split_ascii_whitespace().next()?.parse::<u64>().ok())
            };
            let both = field("VmRSS:").zip(field("VmHWM:")).context("no memory figures")?;
            Ok((rss + both.0, peak + both.1))
        })
    }
}

/// Every process with its parent.
fn parents() -> anyhow::Result<Vec<(i32, i32)>> {
    let mut parents = Vec::new();
    for entry in fs::read_dir("/proc").context("/proc")? {
        let Ok(entry) = entry else { continue };
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else {
            continue;
        };
        // A process may be gone by the time that it is looked at.
        if let Some(parent) = parent(&entry.path()) {
            parents.push((pid, parent));
        }
    }
    Ok(parents)
}

fn parent(dir: &Path) -> Option<i32> {
    let stat = fs::read_to_string(dir.join("stat")).ok()?;
    // The name stands in parentheses and may hold anything.
    let (_, rest) = stat.rsplit_once(") ")?;
    rest.split(' ').nth(1)?.parse().ok()
}
