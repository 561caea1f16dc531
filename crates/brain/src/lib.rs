//! Decisions and nothing else: which workers serve a request, by which path, and why.
//! No IO, clock, environment, logging or randomness of its own: time and seed come in as arguments.
//! The live server and the simulator are two drivers of this same code.

mod ask;
mod brain;
mod decision;
mod flags;
mod fleet;
mod guards;
mod health;
mod ladder;
mod ledger;
mod policy;
mod record;
mod settings;
mod signals;
mod time;
mod units;
mod why;

pub use ask::Ask;
pub use brain::Brain;
pub use decision::{Decision, NoPath, Shadows};
pub use flags::{Flag, Set};
pub use fleet::{Held, Path, Reading, Role, Slot, WorkerSpec};
pub use guards::{Guard, Vetoes};
pub use health::{Condition, Health, HealthChange, HealthEvent};
pub use ladder::{Cause, Ladder, Leg, Next, Try};
pub use ledger::{BookingId, End, Load};
pub use policy::{
    Bounds, IslBounding, MaxLocalPrefill, Policy, PrefillLoad, Rule, ShortPrompt, UncachedTokens,
};
pub use record::{CandidateRecord, LeftOut, Readiness, Record, Settled, ShadowRecord, WorkerView};
pub use settings::{
    BreakerSettings, Budget, CostSettings, GuardSettings, IslGate, KvGuard, MAX_SHADOWS, Settings,
};
pub use signals::{Fallbacks, Signal};
pub use time::Time;
pub use units::{Factor, Share};
pub use why::Why;
