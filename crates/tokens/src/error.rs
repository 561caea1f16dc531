//! What can go wrong, in words that name the file or the message.

use std::path::PathBuf;

/// Why a model could not be loaded or a request could not be turned into tokens.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file of the model directory could not be read.
    #[error("cannot read {}: {source}", file.display())]
    Read {
        /// The file.
        file: PathBuf,
        /// The operating system's reason.
        source: std::io::Error,
    },
    /// A file of the model directory was read but is not what it should be.
    #[error("{}: {what}", file.display())]
    File {
        /// The file.
        file: PathBuf,
        /// What is wrong with it.
        what: String,
    },
    /// The model has no chat template, so only plain prompts can be encoded.
    #[error("the model has no chat template")]
    NoTemplate,
    /// A member of the request is not what the chat API allows. `place` is a path such as
    /// `messages[2].content`.
    #[error("{place}: {what}")]
    Request {
        /// Path of the member.
        place: String,
        /// What is wrong with it.
        what: String,
    },
    /// The template refused the conversation, failed, or ran past its bounds.
    #[error("chat template {template}: {what}")]
    Template {
        /// The template's name or file.
        template: String,
        /// The template's own message or the renderer's.
        what: String,
    },
    /// The tokenizer failed.
    #[error("tokenizer: {0}")]
    Tokenizer(String),
}

impl Error {
    pub(crate) fn request(place: &str, what: impl Into<String>) -> Error {
        Error::Request { place: place.to_owned(), what: what.into() }
    }

    pub(crate) fn file(file: &std::path::Path, what: impl std::fmt::Display) -> Error {
        Error::File { file: file.to_owned(), what: what.to_string() }
    }

    /// Whether the request is at fault (the engine would answer 400 too), not the model directory.
    pub fn is_request(&self) -> bool {
        matches!(self, Error::Request { .. } | Error::Template { .. })
    }
}
