//! Signals that may be missing, and the fallback that stands in for each.
//! A decision carries the set of those it used, so that every use can be counted by name.

use crate::flags::{Flag, Set};

/// A signal that was missing, or a rule that was waived, when a decision was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Signal {
    /// The prefill worker's token budget is unknown: it was taken to be calm.
    PrefillCapacity,
    /// The decode worker's KV capacity is unknown: `decode_kv` was skipped.
    KvCapacity,
    /// The worker's chunk is unknown: the local prefill budget was taken from a default chunk.
    Chunk,
    /// The worker publishes no KV events: its overlap is what the router itself placed there.
    KvEvents,
    /// No tokenizer: the ISL was estimated from bytes.
    Tokenizer,
    /// Not all of the prompt is text: what follows the first other part counts as uncached.
    Multimodal,
    /// The kind of worker that the length gate wants has no healthy worker: the gate was waived.
    IslGate,
    /// There is no remote path: guards that vetoed the local one were waived.
    Guards,
}

/// The fallbacks that a decision used.
pub type Fallbacks = Set<Signal>;

impl Flag for Signal {
    const ALL: &'static [Signal] = &[
        Signal::PrefillCapacity,
        Signal::KvCapacity,
        Signal::Chunk,
        Signal::KvEvents,
        Signal::Tokenizer,
        Signal::Multimodal,
        Signal::IslGate,
        Signal::Guards,
    ];

    fn place(self) -> u8 {
        self as u8
    }

    fn as_str(self) -> &'static str {
        match self {
            Signal::PrefillCapacity => "prefill_capacity",
            Signal::KvCapacity => "kv_capacity",
            Signal::Chunk => "chunk",
            Signal::KvEvents => "kv_events",
            Signal::Tokenizer => "tokenizer",
            Signal::Multimodal => "multimodal",
            Signal::IslGate => "isl_gate",
            Signal::Guards => "guards",
        }
    }
}
