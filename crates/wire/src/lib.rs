//! Bytes to types and back, without IO: the OpenAI API's JSON (lossless), SSE, KV events, ZMTP, and
//! one dialect per engine.
//!
//! Invariants: no sockets, clocks or tasks; hostile input gives an error, never a panic or an
//! allocation beyond a named bound. Not here: decisions (`brain`), the prefix index (`kv`),
//! connections (`serve`, `sim`).

pub mod body;
pub mod dialect;
pub mod discovery;
mod json;
pub mod kv_events;
pub mod load;
pub mod openai;
pub mod splice;
pub mod sse;
pub mod zmtp;
