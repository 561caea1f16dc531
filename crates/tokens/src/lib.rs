//! Chat template and tokenizer: from a request's raw JSON to the token ids the engine will compute.
//!
//! Pure: no async, no clock, no IO but reading a model directory once. A `Model` is `Send + Sync`
//! and shared behind an `Arc`. Not here: HTTP bodies (wire), what is done with the ids (kv, brain).

mod builtin;
mod cache;
mod chat;
mod conversation;
mod cuts;
mod error;
mod estimate;
mod fast;
mod files;
mod json;
mod model;
mod parts;
mod template;
mod templates;
mod tokenizer;
mod words;

pub use builtin::builtin_dir_files;
pub use chat::{Chat, Encoded, Partial};
pub use error::Error;
pub use estimate::{BYTES_PER_TOKEN, bytes_estimate};
pub use model::{CacheLimits, CacheStats, Model};
