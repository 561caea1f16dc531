//! Figures of scale as Markdown.

use std::fmt::Write as _;
use std::time::Duration;

use crate::scale::Way;

/// Throughput on so many cores, with a worker thread each.
#[derive(Debug)]
pub(crate) struct Cores {
    pub(crate) way: Way,
    pub(crate) cores: usize,
    pub(crate) requests_per_cpu_second: f64,
}

/// Many open streams.
#[derive(Debug)]
pub(crate) struct Streams {
    pub(crate) way: Way,
    pub(crate) open: usize,
    pub(crate) events_per_second: f64,
    pub(crate) events_per_cpu_second: f64,
    pub(crate) kib_each: f64,
}

/// Many workers or models.
#[derive(Debug)]
pub(crate) struct Crowd {
    pub(crate) way: Way,
    pub(crate) models: usize,
    /// Of each model.
    pub(crate) workers: usize,
    pub(crate) ready: Duration,
    pub(crate) idle_kib: u64,
    /// Share of a core.
    pub(crate) idle_cpu: f64,
    pub(crate) request_us: f64,
}

/// A large prompt.
#[derive(Debug)]
pub(crate) struct Prompt {
    pub(crate) way: Way,
    pub(crate) bytes: usize,
    /// Median latency beyond the direct connection's, one client.
    pub(crate) added_us: f64,
    pub(crate) cpu_us: f64,
    /// Memory of each request in flight, at the highest.
    pub(crate) kib_each: f64,
}

/// All of it.
#[derive(Debug, Default)]
pub(crate) struct Scaled {
    pub(crate) cores: Vec<Cores>,
    pub(crate) streams: Vec<Streams>,
    pub(crate) crowds: Vec<Crowd>,
    pub(crate) prompts: Vec<Prompt>,
}

impl Scaled {
    pub(crate) fn markdown(&self) -> String {
        [self.cores(), self.streams(), self.crowds(), self.prompts()].join("\n")
    }

    fn cores(&self) -> String {
        let mut out = head(
            "Requests per CPU-second of the router, by its cores (load and engines are on both)",
            &["path", "cores", "requests per CPU-second"],
        );
        for line in &self.cores {
            let (path, rate) = (line.way.name(), line.requests_per_cpu_second / 1e3);
            let _ = writeln!(out, "| {path} | {} | {rate:.1} k |", line.cores);
        }
        out
    }

    fn streams(&self) -> String {
        let columns = ["path", "open", "events per second", "per CPU-second", "memory per stream"];
        let mut out = head("Open streams, an event every 500 ms on each", &columns);
        for line in &self.streams {
            let _ = writeln!(
                out,
                "| {} | {} | {:.1} k | {:.0} k | {:.1} KiB |",
                line.way.name(),
                line.open,
                line.events_per_second / 1e3,
                line.events_per_cpu_second / 1e3,
                line.kib_each
            );
        }
        out
    }

    fn crowds(&self) -> String {
        let columns = [
            "path",
            "models",
            "workers of each",
            "ready after",
            "RSS, idle",
            "CPU, idle",
            "CPU per request",
        ];
        let mut out = head(
            "Workers and models (each worker is checked every 5 s and its metrics read every second)",
            &columns,
        );
        for line in &self.crowds {
            let _ = writeln!(
                out,
                "| {} | {} | {} | {:.0} ms | {:.1} MiB | {:.1} % | {:.0} us |",
                line.way.name(),
                line.models,
                line.workers,
                line.ready.as_secs_f64() * 1e3,
                line.idle_kib as f64 / 1024.0,
                line.idle_cpu * 100.0,
                line.request_us
            );
        }
        out
    }

    fn prompts(&self) -> String {
        let columns = ["path", "prompt", "added p50", "CPU per request", "memory per request"];
        let mut out = head("Large prompts (memory: eight in flight)", &columns);
        for line in &self.prompts {
            let _ = writeln!(
                out,
                "| {} | {} KiB | {:.0} us | {:.0} us | {:.0} KiB |",
                line.way.name(),
                line.bytes / 1024,
                line.added_us,
                line.cpu_us,
                line.kib_each
            );
        }
        out
    }
}

fn head(title: &str, columns: &[&str]) -> String {
    format!("### {title}\n\n| {} |\n|{}\n", columns.join(" | "), " --- |".repeat(columns.len()))
}
