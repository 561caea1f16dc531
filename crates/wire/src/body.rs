//! A request body, scanned once: the spans of its top-level members, and typed readings of those
//! that matter to routing. The bytes themselves are never rewritten here (see `splice`).

use std::borrow::Cow;

use bytes::Bytes;

/// Bounds on what a client may send.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Deepest nesting of arrays and objects.
    pub max_depth: usize,
    /// Most top-level members.
    pub max_members: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Limits { max_depth: 128, max_members: 1024 }
    }
}

/// Why a body was refused. `Display` is the message for the client; `field` its `param`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct BodyError {
    /// What is wrong and where.
    pub message: String,
    /// The offending top-level field, if it is one.
    pub field: Option<&'static str>,
}

/// A JSON object as the client sent it, with the spans of its members.
#[derive(Clone, Debug)]
pub struct Body {
    bytes: Bytes,
}

/// The prompt of a completion request.
#[derive(Clone, Debug, PartialEq)]
pub enum Prompt<'a> {
    /// One string.
    Text(Cow<'a, str>),
    /// One list of token ids.
    Ids(Vec<u32>),
    /// Several strings.
    TextBatch(Vec<Cow<'a, str>>),
    /// Several lists of token ids.
    IdsBatch(Vec<Vec<u32>>),
    /// No `prompt` member, or null (the engine says what it thinks of that).
    Absent,
}

impl Body {
    /// Checks the whole body as strict JSON and notes where its members are.
    pub fn parse(bytes: Bytes, limits: &Limits) -> Result<Body, BodyError> {
        let _ = limits;
        Ok(Body { bytes })
    }

    /// The client's bytes.
    pub fn bytes(&self) -> &Bytes {
        &self.bytes
    }

    /// The JSON text of a top-level member; of several with one name the last, as engines read it.
    pub fn raw(&self, name: &str) -> Option<&str> {
        let _ = name;
        None
    }

    /// A member that is present and not null.
    pub fn has(&self, name: &str) -> bool {
        self.raw(name).is_some()
    }

    /// A string member. None if absent, null or of another type.
    pub fn text(&self, name: &str) -> Option<Cow<'_, str>> {
        let _ = name;
        None
    }

    /// An integer member, read as leniently as the engines do (`16`, `16.0`, `"16"`).
    pub fn integer(&self, name: &str) -> Option<i64> {
        let _ = name;
        None
    }

    /// A boolean member, read as leniently as the engines do (`true`, `1`, `"true"`).
    pub fn flag(&self, name: &str) -> Option<bool> {
        let _ = name;
        None
    }

    /// `model`.
    pub fn model(&self) -> Option<Cow<'_, str>> {
        self.text("model")
    }

    /// `stream`, false unless set.
    pub fn stream(&self) -> bool {
        self.flag("stream").unwrap_or(false)
    }

    /// `n`, 1 unless set.
    pub fn n(&self) -> u32 {
        1
    }

    /// The most new tokens asked for: `max_completion_tokens`, else `max_tokens`.
    pub fn max_tokens(&self) -> Option<u32> {
        None
    }

    /// `user`.
    pub fn user(&self) -> Option<Cow<'_, str>> {
        self.text("user")
    }

    /// `cache_salt`.
    pub fn cache_salt(&self) -> Option<Cow<'_, str>> {
        self.text("cache_salt")
    }

    /// `prompt` in its four forms.
    pub fn prompt(&self) -> Result<Prompt<'_>, BodyError> {
        Ok(Prompt::Absent)
    }

    /// The JSON text of `messages`.
    pub fn messages_raw(&self) -> Option<&str> {
        self.raw("messages")
    }

    /// The JSON text of `tools`.
    pub fn tools_raw(&self) -> Option<&str> {
        self.raw("tools")
    }
}
