//! Every setting of the router once: key, default, range and doc.
//!
//! The only crate that reads the environment, and it does so through `Sources::env`, so that
//! tests hand it a list. Layers: defaults < file < environment < flags.

mod settings;

use std::fmt;
use std::path::PathBuf;

pub use settings::*;

/// Where settings are read from.
#[derive(Clone, Debug, Default)]
pub struct Sources {
    /// The configuration file, YAML or JSON.
    pub file: Option<PathBuf>,
    /// The environment, as from `std::env::vars_os`.
    pub env: Vec<(std::ffi::OsString, std::ffi::OsString)>,
    /// What flags said, in order.
    pub overrides: Vec<Override>,
}

/// One setting given by a flag.
#[derive(Clone, Debug, PartialEq)]
pub struct Override {
    /// The flag as people wrote it, for messages: `--port`.
    pub flag: String,
    /// The key's path: `limits.max_in_flight`, `models[0].name`.
    pub key: String,
    /// The value, as one YAML scalar or flow collection.
    pub value: String,
}

/// What `load` hands out.
#[derive(Clone, Debug)]
pub struct Loaded {
    /// The settings.
    pub settings: Settings,
    /// Lines worth one log line each, such as the native key of an alias that was used.
    pub notices: Vec<String>,
}

/// Everything that is wrong with a configuration, in the order of the tree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problems(pub Vec<Problem>);

/// One thing that is wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// Path of the key: `models[0].workers[2].url`; empty = the whole.
    pub key: String,
    /// What is wrong, where it came from and what is allowed.
    pub message: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.key.is_empty() {
            return f.write_str(&self.message);
        }
        write!(f, "{}: {}", self.key, self.message)
    }
}

impl fmt::Display for Problems {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, problem) in self.0.iter().enumerate() {
            if i > 0 {
                f.write_str("\n")?;
            }
            write!(f, "{problem}")?;
        }
        Ok(())
    }
}

impl std::error::Error for Problems {}

/// Reads, merges, checks and resolves all sources.
pub fn load(_sources: &Sources) -> Result<Loaded, Problems> {
    Err(Problems(Vec::new()))
}
