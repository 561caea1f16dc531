//! Processes that the bench starts, and only those: each is ended when its handle is dropped.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::cpu::{self, Tree};

/// How long a process may take to say that it is ready.
const READY_WAIT: Duration = Duration::from_secs(20);

/// Pause between two looks at whether it is.
const LOOK_PAUSE: Duration = Duration::from_micros(200);

/// How long a process may take to end after SIGTERM.
const END_WAIT: Duration = Duration::from_secs(5);

/// How much of a log goes into a message.
const LOG_LINES: usize = 12;

/// A process that runs.
#[derive(Debug)]
pub(crate) struct Running {
    name: &'static str,
    child: Child,
    started: Instant,
    out: PathBuf,
    log: PathBuf,
}

impl Running {
    /// Starts a command on some cores, its output in files of `dir`.
    pub(crate) fn start(
        name: &'static str,
        command: &mut Command,
        cores: &[usize],
        dir: &Path,
    ) -> anyhow::Result<Running> {
        let (out, log) = (dir.join(format!("{name}.out")), dir.join(format!("{name}.log")));
        command.stdin(Stdio::piped()).stdout(File::create(&out)?).stderr(File::create(&log)?);
        let started = Instant::now();
        let program = command.get_program().to_owned();
        let child = cpu::on_cores(cores, || {
            command.spawn().with_context(|| format!("{} cannot be started", program.display()))
        })?;
        Ok(Running { name, child, started, out, log })
    }

    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn tree(&self) -> anyhow::Result<Tree> {
        Tree::of(self.id())
    }

    /// Waits for a line of its output that begins with `word`; returns the line's rest and how long
    /// it took from the start.
    pub(crate) fn line(&mut self, word: &str) -> anyhow::Result<(String, Duration)> {
        let out = self.out.clone();
        self.wait_for(|| {
            let text = fs::read_to_string(&out).ok()?;
            let (whole, _rest) = text.rsplit_once('\n')?;
            Some(whole.lines().find_map(|line| line.strip_prefix(word))?.to_owned())
        })
    }

    /// Waits until `ready` gives something.
    pub(crate) fn wait_for<T>(
        &mut self,
        ready: impl Fn() -> Option<T>,
    ) -> anyhow::Result<(T, Duration)> {
        loop {
            if let Some(value) = ready() {
                return Ok((value, self.started.elapsed()));
            }
            if let Some(status) = self.child.try_wait()? {
                bail!("{} ended ({status}):\n{}", self.name, self.last_words());
            }
            if self.started.elapsed() > READY_WAIT {
                bail!("{} is not ready after {READY_WAIT:?}:\n{}", self.name, self.last_words());
            }
            std::thread::sleep(LOOK_PAUSE);
        }
    }

    /// The end of its log.
    pub(crate) fn last_words(&self) -> String {
        let text = fs::read_to_string(&self.log).unwrap_or_default();
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(LOG_LINES)..].join("\n")
    }

    fn end(&mut self) -> anyhow::Result<()> {
        let tree = self.tree()?;
        let root = Pid::from_raw(i32::try_from(self.id())?);
        kill(root, Signal::SIGTERM)?;
        let asked = Instant::now();
        while self.child.try_wait()?.is_none() {
            if asked.elapsed() > END_WAIT {
                // Its children would outlive it.
                for pid in tree.pids() {
                    let _gone = kill(*pid, Signal::SIGKILL);
                }
                self.child.wait()?;
                break;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        Ok(())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(Some(_))) {
            return;
        }
        if let Err(error) = self.end() {
            eprintln!("{} may still run: {error:#}", self.name);
        }
    }
}
