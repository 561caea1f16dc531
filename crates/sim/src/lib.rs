//! Engines that are not there: a model of one continuous-batching engine on a virtual clock, mock
//! vLLM servers over that model with real sockets, and readers of request traces.
//!
//! The model (`engine`) has no IO and no clock of its own; `mock` drives it in real time over HTTP
//! and ZMQ. Routing decisions are not here.

pub mod content;
pub mod engine;
pub mod fleet;
pub mod mock;
pub mod profile;
pub mod replay;
pub mod rng;
pub mod trace;
