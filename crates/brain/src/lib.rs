//! Decisions and nothing else: which workers serve a request, by which path, and why.
//! No IO, clock, environment, logging or randomness of its own: time and seed come in as arguments.
//! The live server and the simulator are two drivers of this same code.

mod ask;
mod brain;
mod bucket;
mod candidates;
mod cost;
mod decision;
mod demand;
mod field;
mod flags;
mod fleet;
mod gate;
mod guards;
mod health;
mod hold;
mod ladder;
mod ledger;
mod line;
mod never_fires;
mod plan;
mod policy;
mod predict;
mod profile;
mod random;
mod readiness;
mod record;
mod sessions;
mod settings;
mod signals;
mod slo;
mod time;
mod units;
mod why;

pub use ask::{Ask, Split, Wait};
pub use brain::Brain;
pub use bucket::Bucket;
pub use decision::{Decision, NoPath, Shadows};
pub use flags::{Flag, Set};
pub use fleet::{DecodeTotals, Held, Path, PrefillTotals, Reading, Role, Slot, WorkerSpec};
pub use guards::{Guard, Vetoes};
pub use health::{Condition, HealthChange, HealthEvent};
pub use ladder::{Cause, Ladder, Leg, Next, Try};
pub use ledger::{BookingId, End, Load, Settled};
pub use line::{Claim, Joined, LINE_HEADS, Line, Place, Tenant};
pub use policy::{
    Bounds, IslBounding, MaxLocalPrefill, Policy, Predicted, PrefillLoad, Rule, Score, Scores,
    ShortPrompt, UncachedTokens,
};
pub use predict::{
    Calibration, Constant, FirstToken, Learned, NotRestored, Outlook, PathError, WorkerCalibration,
};
pub use profile::Profile;
pub use readiness::Readiness;
pub use record::{CandidateRecord, LeftOut, Record, ShadowRecord, WorkerView};
pub use sessions::Turn;
pub use settings::{
    Admission, BreakerSettings, Budget, CostSettings, GuardSettings, IslGate, KvGuard, MAX_SHADOWS,
    Queue, Settings,
};
pub use signals::{Fallbacks, Signal};
pub use slo::Slo;
pub use time::Time;
pub use units::{Factor, Share};
pub use why::Why;
