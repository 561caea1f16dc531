//! Watches a reply pass by: first content, tokens, usage, errors, a clean end or a cut.
//!
//! Invariants: bytes are observed, never changed, and copied only where an event is split between
//! two chunks; the observation does not depend on where the stream was split; memory is bounded.

/// Token counts of a reply.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt_tokens: u64,
    /// Tokens generated.
    pub completion_tokens: u64,
    /// Prompt tokens that were not computed for this request, if told.
    pub cached_tokens: Option<u64>,
}

/// What may be done with the bytes held back so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hold {
    /// Nothing was said yet that a repeated request would not say again.
    Hold,
    /// Content (or the end) came: everything may go out.
    Release,
    /// An error event came before any content: the request can be repeated elsewhere.
    Error,
}

/// How a stream ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// With `[DONE]`.
    Clean,
    /// With an error event.
    Error,
    /// Without either: the connection broke or the engine died.
    Cut,
}

/// What one chunk brought.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    /// Events with content in this chunk.
    pub content_events: u32,
    /// The first content of the stream is among them.
    pub first: bool,
}

/// Observer of one SSE reply.
#[derive(Debug, Default)]
pub struct Watch {
    content_events: u64,
    usage: Option<Usage>,
}

impl Watch {
    /// At the start of a stream.
    pub fn new() -> Watch {
        Watch::default()
    }

    /// Looks at the next bytes.
    pub fn feed(&mut self, chunk: &[u8]) -> Seen {
        let _ = chunk;
        Seen::default()
    }

    /// What may be done with what was held back.
    pub fn hold(&self) -> Hold {
        Hold::Hold
    }

    /// Events with content so far.
    pub fn content_events(&self) -> u64 {
        self.content_events
    }

    /// Tokens generated so far: what the engine's usage says, else one for each content event.
    pub fn tokens(&self) -> u64 {
        self.content_events
    }

    /// The last usage seen.
    pub fn usage(&self) -> Option<Usage> {
        self.usage
    }

    /// The data of the error event, cut to a bound.
    pub fn error(&self) -> Option<&str> {
        None
    }

    /// The end of the bytes.
    pub fn finish(&mut self) -> End {
        End::Cut
    }
}

/// `usage` of a reply that is not a stream.
pub fn read_usage(body: &[u8]) -> Option<Usage> {
    let _ = body;
    None
}
