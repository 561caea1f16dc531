//! Every setting of the router once: key, default, range and doc.
//!
//! The only crate that reads the environment, and it does so through `Sources::env`, so that
//! tests hand it a list. Layers: defaults < file < environment < flags.

mod aliases;
mod check;
mod environment;
mod joining;
mod load;
mod problem;
mod reference;
mod resolve;
mod scalar;
mod schema;
mod settings;
mod tree;
pub mod written;
mod yaml;

pub use joining::{Joining, joining};
pub use load::{File, Loaded, Override, Sources, load};
pub use problem::{Problem, Problems};
pub use reference::reference;
pub use scalar::{OffOr, OffWord, Size, Span};
pub use schema::schema;
pub use settings::*;
