//! Clocks and the resident size of this process.
//!
//! Rates are per second of a thread's CPU time, so that a busy machine does not show in them;
//! latencies of single calls are wall time, because the CPU clock costs as much as a query.

use std::time::Duration;

use nix::time::{ClockId, clock_gettime};
use nix::unistd::{Pid, gettid};

/// The CPU clock of one thread of this process.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CpuClock(ClockId);

impl CpuClock {
    /// Of the calling thread, readable from any other.
    pub(crate) fn of_this_thread() -> CpuClock {
        CpuClock::of(gettid())
    }

    /// Linux's encoding of a thread's scheduler clock: `~tid << 3`, per thread (4), sched (2).
    fn of(thread: Pid) -> CpuClock {
        CpuClock(ClockId::from_raw((!thread.as_raw() << 3) | 6))
    }

    /// CPU time so far.
    pub(crate) fn read(self) -> Duration {
        clock_gettime(self.0).map(Duration::from).unwrap_or_default()
    }
}

/// CPU time that `work` takes on the calling thread.
pub(crate) fn timed<T>(work: impl FnOnce() -> T) -> (Duration, T) {
    let clock = CpuClock::of_this_thread();
    let start = clock.read();
    let result = work();
    (clock.read().saturating_sub(start), result)
}

/// Bytes of this process that are in memory.
pub(crate) fn resident_bytes() -> anyhow::Result<u64> {
    let statm = std::fs::read_to_string("/proc/self/statm")?;
    let pages = statm.split_whitespace().nth(1).and_then(|pages| pages.parse::<u64>().ok());
    Ok(pages.unwrap_or_default() * 4096)
}
