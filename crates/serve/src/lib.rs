//! The live router: listener, upstreams, event subscribers, health, metrics, shutdown.
//!
//! The only crate with sockets and tasks. It decides nothing: `life` drives the brain through a
//! request, `watch` and `events` keep it informed.

mod admin;
mod admission;
mod api;
mod apply;
mod auth;
mod booking;
mod bootstrap;
mod calibration;
mod capabilities;
mod check;
pub mod client;
mod clock;
mod error;
mod events;
mod fleet;
mod handoff;
mod headers;
mod hold;
mod kv_metrics;
mod life;
mod listener;
mod mark;
mod metrics;
mod outgoing;
mod overdue;
mod polled;
mod probe;
mod prompt;
mod reading;
mod receive;
mod relay;
mod report;
mod restore;
mod reuse;
mod router;
mod run;
mod session;
mod sglang;
mod sight;
mod slo;
mod snapshot;
mod sparing;
mod start;
mod tls;
mod upstream;
mod watch;
mod zmq;

pub use check::{Findings, check};
pub use fleet::AddError;
pub use start::{Running, StartError, start};
pub use tls::TlsError;
