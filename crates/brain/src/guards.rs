//! The guards: each can veto the local path after a policy said yes, by a name that shows.

use crate::flags::{Flag, Set};

/// A reason for which the local path is vetoed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Guard {
    /// The worker cannot prefill locally.
    Capability,
    /// Its KV blocks would not fit.
    DecodeKv,
    /// Too many prompt tokens are being computed on it already.
    LocalPrefillBudget,
}

/// The guards that vetoed.
pub type Vetoes = Set<Guard>;

impl Flag for Guard {
    const ALL: &'static [Guard] = &[Guard::Capability, Guard::DecodeKv, Guard::LocalPrefillBudget];

    fn place(self) -> u8 {
        self as u8
    }

    fn as_str(self) -> &'static str {
        match self {
            Guard::Capability => "capability",
            Guard::DecodeKv => "decode_kv",
            Guard::LocalPrefillBudget => "local_prefill_budget",
        }
    }
}
