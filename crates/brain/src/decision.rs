//! What the brain answers: a plan with its reason, or why there is none.

use std::fmt;
use std::time::Duration;

use crate::fleet::{Path, Slot};
use crate::guards::Vetoes;
use crate::ledger::BookingId;
use crate::policy::Scores;
use crate::signals::Fallbacks;
use crate::why::Why;

/// A plan whose load is booked. Must end in `Brain::settle` of its booking.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Decision {
    /// The booking that holds the plan's load.
    pub booking: BookingId,
    /// The path.
    pub path: Path,
    /// The prefill worker of a remote path.
    pub prefill: Option<Slot>,
    /// The worker that streams tokens (and computes the prompt, on the local path).
    pub decode: Slot,
    /// Whether the prefill worker has computed the prompt in an earlier try already, so that only
    /// the decode leg is to be sent.
    pub prefilled: bool,
    /// The reason.
    pub why: Why,
    /// The policy in force.
    pub policy: &'static str,
    /// Prompt tokens.
    pub isl_tokens: u32,
    /// What the worker that the policy looked at would have to compute (`u_d`).
    pub effective_isl_tokens: u32,
    /// What the computing worker has to compute under this plan.
    pub prefill_tokens: u32,
    /// Guards that vetoed the local path, or would have if they had not been waived.
    pub vetoes: Vetoes,
    /// Fallbacks that were used.
    pub fallbacks: Fallbacks,
    /// What the shadow policies would have done.
    pub shadows: Shadows,
    /// How long it had waited before.
    pub waited: Duration,
    /// Predicted time to first token, in seconds from the decision.
    pub ttft_seconds: f64,
    /// Predicted mean time between tokens, in seconds.
    pub itl_seconds: f64,
    /// What the best of each kind is predicted to be like; empty unless a policy asks for it.
    pub scores: Scores,
}

impl Decision {
    /// Predicted time to first token, in seconds from when it was first asked about.
    pub fn ttft_in_all_seconds(&self) -> f64 {
        self.waited.as_secs_f64() + self.ttft_seconds
    }
}

/// What the shadow policies would have done, in the order of `Settings::shadow`; empty where no
/// policy was asked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Shadows {
    pub(crate) count: u8,
    pub(crate) local: u32,
}

impl Shadows {
    /// The path of each shadow policy.
    pub fn iter(self) -> impl Iterator<Item = Path> {
        (0..self.count)
            .map(move |i| if self.local & (1 << i) == 0 { Path::Remote } else { Path::Local })
    }
}

/// Why a request has no plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoPath {
    /// It waits in the router, for a worker that is free or for those before it.
    Held {
        /// When to ask again, if nothing ends before.
        again_in: Duration,
        /// Its TTFT objective is lost: all that are in time go before it.
        late: bool,
    },
    /// No decode or unified worker can take it.
    NoDecode,
    /// The remote path cannot be taken, and the settings require it.
    RemoteRequired,
    /// No prefill worker can take it, and no worker can prefill locally.
    NoPrefill,
    /// The remote path was tried in vain, and guards veto the local one.
    Vetoed(Vetoes),
    /// The request cannot be split over two workers, and no worker of the fleet can prefill locally.
    NotDisaggregable,
    /// The client asked for the remote path, which this request or this fleet does not have.
    WishRemote,
    /// The client asked for the local path, which this fleet does not have.
    WishLocal,
}

impl NoPath {
    /// Short `snake_case` label.
    pub const fn as_str(&self) -> &'static str {
        match self {
            NoPath::Held { .. } => "held",
            NoPath::NoDecode => "no_decode",
            NoPath::RemoteRequired => "remote_required",
            NoPath::NoPrefill => "no_prefill",
            NoPath::Vetoed(_) => "vetoed",
            NoPath::NotDisaggregable => "not_disaggregable",
            NoPath::WishRemote => "wish_remote",
            NoPath::WishLocal => "wish_local",
        }
    }

    /// Whether nobody can take it at present, and it does not wait for anybody.
    pub(crate) const fn is_for_now(&self) -> bool {
        !self.is_request_fault() && !matches!(self, NoPath::Held { .. })
    }

    /// Whether the request itself is at fault (400); otherwise the fleet is (503) and another try may help.
    pub const fn is_request_fault(&self) -> bool {
        matches!(self, NoPath::NotDisaggregable | NoPath::WishRemote | NoPath::WishLocal)
    }
}

impl fmt::Display for NoPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            NoPath::Held { .. } => "it waits for a free worker",
            NoPath::NoDecode => "no decode or unified worker can take the request at present",
            NoPath::RemoteRequired => {
                "the remote path cannot be taken at present, and require_remote is set"
            }
            NoPath::NoPrefill => {
                "no prefill worker can take the request at present, and no worker can prefill locally"
            }
            NoPath::Vetoed(vetoes) => {
                f.write_str(
                    "prefill workers failed, and the local path is vetoed by these guards:",
                )?;
                for guard in vetoes.iter() {
                    write!(f, " {}", crate::flags::Flag::as_str(guard))?;
                }
                return Ok(());
            }
            NoPath::NotDisaggregable => {
                "a batch of prompts needs a worker that can prefill locally, and this fleet has none; \
                 send the prompts one by one"
            }
            NoPath::WishRemote => {
                "the remote path was asked for, but this request cannot be split or this fleet has no \
                 prefill and decode workers"
            }
            NoPath::WishLocal => {
                "the local path was asked for, but no worker of this fleet can prefill locally"
            }
        })
    }
}

impl std::error::Error for NoPath {}
