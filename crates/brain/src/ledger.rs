//! The load ledger: what each live request has booked on which worker.

use serde::Serialize;

/// Names one booking; never given twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BookingId(pub(crate) u64);

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// All tokens were streamed.
    Finished,
    /// A leg failed.
    Failed,
    /// The client went away.
    Cancelled,
}

/// What is booked on one worker.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Load {
    /// Prompt tokens that it has to compute and has not yet; on decode and unified workers these
    /// are the local prefills in flight.
    pub prefill_tokens: u64,
    /// KV blocks.
    pub kv_blocks: u64,
    /// Requests that it works on.
    pub active: u32,
}
