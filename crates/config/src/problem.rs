//! What is wrong with a configuration, worded for the person who wrote it.

use std::fmt;

use crate::tree::{Key, Origin};

/// Everything that is wrong with a configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problems(pub Vec<Problem>);

/// One thing that is wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// Path of the key: `models[0].workers[2].url`; empty = the whole.
    pub key: String,
    /// What is wrong and what is allowed.
    pub message: String,
    /// Where it was written: a file's line, a variable, a flag; empty = nowhere.
    pub source: String,
}

impl Problem {
    pub(crate) fn at(key: &Key, message: impl Into<String>, origin: &Origin) -> Self {
        Problem { key: key.to_string(), message: message.into(), source: origin.to_string() }
    }

    /// One that concerns no single key.
    pub(crate) fn whole(message: impl Into<String>, source: impl Into<String>) -> Self {
        Problem { key: String::new(), message: message.into(), source: source.into() }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.key.is_empty() {
            write!(f, "{}: ", self.key)?;
        }
        f.write_str(&self.message)?;
        if !self.source.is_empty() {
            write!(f, " ({})", self.source)?;
        }
        Ok(())
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

/// Least likeness of a name that is offered instead of an unknown one.
const LIKE: f64 = 0.75;

/// The known name that `name` was most likely meant to be.
pub(crate) fn nearest<'k>(name: &str, known: impl Iterator<Item = &'k str>) -> Option<&'k str> {
    known
        .map(|known| (strsim::jaro_winkler(name, known), known))
        .filter(|(likeness, _)| *likeness >= LIKE)
        .max_by(|a, b| a.0.total_cmp(&b.0))
        .map(|(_, known)| known)
}
