//! From what was written to what it means. Finds everything that depends on more than one key.
//!
//! Invariant: either a complete `Settings` or at least one problem.

mod models;
mod routing;
mod secret;
mod security;
mod worker;

use std::net::SocketAddr;
use std::num::{NonZeroU32, NonZeroUsize};

use crate::environment::Environment;
use crate::problem::{Problem, Problems};
use crate::scalar::{Size, Span};
use crate::settings::{
    Approximate, CalibrationFile, Health, Kv, Limits, Log, LogFormat, Restore, Settings, Timeouts,
    Upstream,
};
use crate::tree::{Key, Node, quoted};
use crate::written::{self, Written};

/// Resolves the whole tree.
pub(crate) fn settings(
    written: &Written,
    tree: &Node,
    environment: &Environment,
) -> Result<Settings, Problems> {
    let mut resolver = Resolver { tree, environment, problems: Vec::new() };
    let models = resolver.models(written);
    let health = resolver.health(&written.health);
    let log = resolver.log(&written.log);
    let restore = resolver.restore(&written.kv);
    let security = resolver.security(written);
    let mut problems = resolver.problems;
    let (Some(health), true) = (health, problems.is_empty()) else {
        // Models that share the top-level `routing` all find the same problem in it.
        let mut seen = Vec::new();
        problems.retain(|problem| {
            !seen.contains(problem) && {
                seen.push(problem.clone());
                true
            }
        });
        return Err(Problems(problems));
    };
    Ok(Settings {
        listen: SocketAddr::new(written.listen.address, written.listen.port),
        listen_tls: written.listen.tls.as_ref().map(security::listen_tls),
        auth: security.auth,
        admin: security.admin,
        admin_key: security.admin_key,
        models,
        limits: limits(&written.limits),
        timeouts: timeouts(&written.timeouts),
        upstream: Upstream {
            idle: written.upstream.idle.0,
            max_idle_per_worker: count(written.upstream.max_idle_per_worker),
            tls: security.upstream,
        },
        health,
        scrape_interval: written.metrics.scrape_interval.on().map(|span| span.0),
        kv: Kv { approximate: approximate(&written.kv), restore },
        calibration: written.calibration.state_file.as_ref().map(|path| CalibrationFile {
            path: path.into(),
            every: written.calibration.save_interval.0,
        }),
        token_cache_bytes: bytes(written.tokens.cache_bytes),
        tokenised_body_bytes: bytes(written.tokens.max_body_bytes),
        response_headers: written.response_headers,
        log,
        worker_api: written.admin.worker_api,
        index_snapshot: written.admin.index_snapshot,
        shutdown_grace: written.shutdown.grace.0,
    })
}

/// Resolves one worker alone.
pub(crate) fn worker(
    written: &written::Worker,
    tree: &Node,
    environment: &Environment,
) -> Result<crate::settings::Worker, Problems> {
    let mut resolver = Resolver { tree, environment, problems: Vec::new() };
    let worker = resolver.worker(&Key::root(), written);
    worker.filter(|_| resolver.problems.is_empty()).ok_or(Problems(resolver.problems))
}

struct Resolver<'t> {
    tree: &'t Node,
    environment: &'t Environment,
    problems: Vec<Problem>,
}

impl Resolver<'_> {
    /// Notes a problem with the value at `key`.
    fn problem(&mut self, key: &Key, message: impl Into<String>) {
        self.problems.push(Problem::at(key, message, self.tree.origin_of(key)));
    }

    /// Notes that a text is not what it must be.
    fn refuse(&mut self, key: &Key, text: &str, must: &str) {
        self.problem(key, format!("{} is not allowed; must be {must}", quoted(text)));
    }

    fn health(&mut self, health: &written::Health) -> Option<Health> {
        let path = health.path.parse().ok().filter(|_| health.path.starts_with('/'));
        if path.is_none() {
            let key = Key::root().name("health").name("path");
            self.refuse(&key, &health.path, "a path that begins with /, such as /health");
        }
        Some(Health { interval: health.interval.0, timeout: health.timeout.0, path: path? })
    }

    fn restore(&mut self, kv: &written::Kv) -> Option<Restore> {
        let section = Key::root().name("kv");
        let api_key = self.secret(
            ("restore_api_key_env", &kv.restore_api_key_env),
            ("restore_api_key_file", &kv.restore_api_key_file),
            &section,
        );
        let text = kv.restore_from.as_ref()?;
        match worker::parse_url(text) {
            Ok(from) => Some(Restore { from, api_key: api_key?, timeout: kv.restore_timeout.0 }),
            Err(must) => {
                self.refuse(&section.name("restore_from"), text, must);
                None
            }
        }
    }

    fn log(&mut self, log: &written::Log) -> Log {
        if log.filter.trim().is_empty() {
            let key = Key::root().name("log").name("filter");
            self.refuse(&key, &log.filter, "a level such as info");
        }
        let format = match log.format {
            written::LogFormat::Text => LogFormat::Text,
            written::LogFormat::Json => LogFormat::Json,
        };
        Log { format, filter: log.filter.clone() }
    }
}

fn limits(limits: &written::Limits) -> Limits {
    Limits {
        max_body_bytes: at_least_one(bytes(limits.max_body_bytes)),
        max_header_bytes: at_least_one(bytes(limits.max_header_bytes)),
        max_prompt_tokens: limits.max_prompt_tokens.on().and_then(NonZeroU32::new),
        max_in_flight: at_least_one(count(limits.max_in_flight)),
        max_in_flight_bytes: at_least_one(bytes(limits.max_in_flight_bytes)),
        retry_after: limits.retry_after.0,
        max_reply_bytes: at_least_one(bytes(limits.max_reply_bytes)),
    }
}

fn timeouts(timeouts: &written::Timeouts) -> Timeouts {
    let written::Timeouts {
        request: Span(request),
        first_byte: Span(first_byte),
        prefill: Span(prefill),
        connect: Span(connect),
        stream_idle: Span(stream_idle),
        header_read: Span(header_read),
        body_read: Span(body_read),
        reply_write: Span(reply_write),
    } = *timeouts;
    Timeouts {
        request,
        first_byte,
        prefill,
        connect,
        stream_idle,
        header_read,
        body_read,
        reply_write,
    }
}

fn approximate(kv: &written::Kv) -> Approximate {
    let ttl = match kv.approximate {
        written::Approximate::Off => return Approximate::Off,
        written::Approximate::Capacity => None,
        written::Approximate::Ttl => Some(kv.approximate_ttl.0),
    };
    Approximate::Record { ttl, unknown_blocks: kv.approximate_blocks }
}

fn bytes(size: Size) -> usize {
    usize::try_from(size.0).unwrap_or(usize::MAX)
}

fn count(number: u32) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}

/// The check has refused 0 where it is not allowed.
fn at_least_one(number: usize) -> NonZeroUsize {
    NonZeroUsize::new(number).unwrap_or(NonZeroUsize::MIN)
}
