//! Request traces: read from the formats that people have, and turned into prompts.
//!
//! A prompt is a list of pieces, each a stretch of tokens that follows from a hash id alone, so that
//! prefixes repeat exactly where the trace says so. Replaying and judging are not here.

mod read;
mod synth;

use std::fmt;

pub use read::{TraceError, open, read};
pub use synth::{block_names, tokens};

/// Tokens of a whole piece in the formats that have hash ids.
pub const PIECE_TOKENS: u32 = 512;

/// Where a trace comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// JSON lines with `timestamp` (ms), `input_length`, `output_length`, `hash_ids`.
    Mooncake,
    /// CSV with `TIMESTAMP`, `ContextTokens`, `GeneratedTokens`; no prefix repeats.
    Azure,
    /// JSON lines with `session_id`, the new part of each turn, and the `delay` (ms) before it.
    Session,
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Format::Mooncake => "mooncake",
            Format::Azure => "azure",
            Format::Session => "session",
        })
    }
}

/// A stretch of tokens: the first `tokens` of those that follow from `hash_id`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// What it consists of.
    pub hash_id: u64,
    /// How long it is.
    pub tokens: u32,
}

/// When a request starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Start {
    /// Nanoseconds after the trace's start.
    At(u64),
    /// Nanoseconds after the end of the request with this index, a turn of the same session.
    After {
        /// Index of the earlier turn.
        request: usize,
        /// Pause before this one.
        delay: u64,
    },
}

/// One request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// When it starts.
    pub start: Start,
    /// What it adds to the prompt of the turn before it, or its whole prompt.
    pub pieces: Box<[Piece]>,
    /// Tokens of the whole prompt, earlier turns included.
    pub input_tokens: u32,
    /// Tokens to generate.
    pub output_tokens: u32,
    /// Number of its session, equal for the turns of one; none where the format has no sessions.
    pub session: Option<u32>,
}

/// A whole trace, in order of arrival within a session and of time between independent requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trace {
    /// How it was written.
    pub format: Format,
    /// Its requests.
    pub requests: Vec<Request>,
}

impl Trace {
    /// The pieces of a request's whole prompt, those of earlier turns first.
    #[must_use]
    pub fn prompt(&self, request: usize) -> Vec<Piece> {
        let mut turns = Vec::new();
        let mut at = Some(request);
        while let Some(request) = at.and_then(|at| self.requests.get(at)) {
            turns.push(&request.pieces);
            at = match request.start {
                Start::After { request, .. } => Some(request),
                Start::At(_) => None,
            };
        }
        turns.into_iter().rev().flat_map(|pieces| pieces.iter().copied()).collect()
    }
}
