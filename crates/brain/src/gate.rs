//! The length gate of mixed fleets: a request with `ISL <= threshold` may only use unified workers,
//! a longer one only prefill/decode workers. Waived where the wanted kind cannot serve the request.

use crate::ask::{Ask, Split};
use crate::candidates::Candidate;
use crate::fleet::Role;
use crate::ladder::Rung;
use crate::settings::IslGate;

/// The workers that a request may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pool {
    Any,
    Unified,
    Disaggregated,
}

impl Pool {
    pub(crate) fn has(self, role: Role) -> bool {
        match self {
            Pool::Any => true,
            Pool::Unified => role == Role::Unified,
            Pool::Disaggregated => role != Role::Unified,
        }
    }

    /// Whether one of `candidates` within this pool, or a pair of them, can serve the request.
    fn serves(self, ask: &Ask<'_>, candidates: &[Candidate]) -> bool {
        let (mut local, mut prefill, mut decode) = (false, false, false);
        for candidate in candidates.iter().filter(|candidate| self.has(candidate.role)) {
            local |= candidate.local;
            prefill |= candidate.role == Role::Prefill;
            decode |= candidate.role == Role::Decode;
        }
        let splits = ask.split != Split::No && ask.tries.rung() != Rung::Local;
        local || (splits && prefill && decode)
    }
}

/// What the gate says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Gated {
    pub(crate) pool: Pool,
    pub(crate) waived: bool,
}

pub(crate) fn gate(gate: IslGate, ask: &Ask<'_>, candidates: &[Candidate]) -> Gated {
    let pool = match gate {
        IslGate::Off => Pool::Any,
        IslGate::UnifiedUpTo(bound) if ask.isl_tokens <= bound => Pool::Unified,
        IslGate::UnifiedUpTo(_) => Pool::Disaggregated,
    };
    if pool == Pool::Any || pool.serves(ask, candidates) {
        Gated { pool, waived: false }
    } else {
        Gated { pool: Pool::Any, waived: true }
    }
}
