//! What a replay is about: the fleet, its hardware, how it decides, and what goes wrong.

use std::fmt;
use std::str::FromStr;

use pointsman_brain::{Profile, Role, Settings};

use crate::engine::{Nanos, Spec};
use crate::fleet::{FleetPlan, WorkerPlan};
use crate::rng::mix;

/// Workers of a fleet at most.
const MAX_WORKERS: usize = 1024;

/// How many workers of each role.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FleetShape {
    /// Prefill workers.
    pub prefill: u16,
    /// Decode workers.
    pub decode: u16,
    /// Ordinary workers.
    pub unified: u16,
}

/// What is wrong with the words for a fleet.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is not a fleet: write 2p2d for two prefill and two decode workers, 4u for four unified \
     ones, or both as in 1p2d1u; it needs p and d, or u, and at most {MAX_WORKERS} workers"
)]
pub struct NotAFleet(String);

impl FromStr for FleetShape {
    type Err = NotAFleet;

    fn from_str(text: &str) -> Result<FleetShape, NotAFleet> {
        let wrong = || NotAFleet(text.to_owned());
        let mut counts = [None; 3];
        let mut rest = text;
        while !rest.is_empty() {
            let digits = rest.bytes().take_while(u8::is_ascii_digit).count();
            let (count, tail) = rest.split_at(digits);
            let at = tail.chars().next().and_then(|role| "pdu".find(role)).ok_or_else(wrong)?;
            let count: u16 = count.parse().map_err(|_| wrong())?;
            if counts[at].replace(count).is_some() {
                return Err(wrong());
            }
            rest = &tail[1..];
        }
        let [prefill, decode, unified] = counts.map(Option::unwrap_or_default);
        let shape = FleetShape { prefill, decode, unified };
        let serves = unified > 0 || (prefill > 0 && decode > 0);
        if serves && shape.len() <= MAX_WORKERS { Ok(shape) } else { Err(wrong()) }
    }
}

impl fmt::Display for FleetShape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (count, role) in [(self.prefill, 'p'), (self.decode, 'd'), (self.unified, 'u')] {
            if count > 0 {
                write!(f, "{count}{role}")?;
            }
        }
        Ok(())
    }
}

impl FleetShape {
    /// Role of each worker, by slot: prefill workers first, then decode, then unified ones.
    pub fn roles(&self) -> impl Iterator<Item = Role> {
        let of = |role, count: u16| std::iter::repeat_n(role, usize::from(count));
        of(Role::Prefill, self.prefill)
            .chain(of(Role::Decode, self.decode))
            .chain(of(Role::Unified, self.unified))
    }

    /// How many workers there are.
    #[must_use]
    #[allow(clippy::len_without_is_empty, reason = "a fleet is never empty")]
    pub fn len(&self) -> usize {
        usize::from(self.prefill) + usize::from(self.decode) + usize::from(self.unified)
    }
}

/// A worker that takes longer than the others for everything.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Slow {
    /// Its slot.
    pub worker: usize,
    /// How many times as long.
    pub factor: f64,
}

/// A worker that dies and does not come back.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Kill {
    /// Its slot.
    pub worker: usize,
    /// When, as a share of the time over which requests arrive.
    pub at: f64,
}

/// What goes wrong.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Faults {
    /// A slow worker.
    pub slow: Option<Slow>,
    /// A worker that dies.
    pub kill: Option<Kill>,
    /// Chance that a batch of KV events is lost.
    pub event_loss: f64,
    /// How late KV events and readings of the engines' load are.
    pub lag: Nanos,
    /// What the cost model's priors are multiplied with: 3 takes the workers for three times as slow.
    pub prior_scale: f64,
}

impl Default for Faults {
    fn default() -> Self {
        Faults { slow: None, kill: None, event_loss: 0.0, lag: 0, prior_scale: 1.0 }
    }
}

/// A fleet and the way it is run.
#[derive(Clone, Debug)]
pub struct Scenario {
    /// Its workers.
    pub shape: FleetShape,
    /// What the hardware is really like.
    pub profile: Profile,
    /// How it decides; the priors of the cost model are set from `profile`.
    pub settings: Settings,
    /// Speed at which the trace is replayed; 1 as recorded.
    pub rate: f64,
    /// Seed of all that is drawn.
    pub seed: u64,
    /// KV tokens of one worker.
    pub kv_tokens: u32,
    /// Token budget of a step of prefill workers.
    pub prefill_chunk: u32,
    /// The same of decode workers.
    pub decode_chunk: u32,
    /// The same of unified workers.
    pub unified_chunk: u32,
    /// Relative standard deviation of step times.
    pub noise: f64,
    /// What goes wrong.
    pub faults: Faults,
}

impl Default for Scenario {
    fn default() -> Self {
        Scenario {
            shape: FleetShape { prefill: 2, decode: 2, unified: 0 },
            profile: Profile::default(),
            settings: Settings::default(),
            rate: 1.0,
            seed: 1,
            kv_tokens: 640_000,
            prefill_chunk: 8192,
            decode_chunk: 2048,
            unified_chunk: 2048,
            noise: 0.05,
            faults: Faults::default(),
        }
    }
}

/// Time between readings of the engines' load.
const READING_EVERY: Nanos = 1_000_000_000;

/// Tokens of the block that the weights of the ordinary cost are meant for.
const USUAL_BLOCK: f64 = 16.0;

impl Scenario {
    pub(super) fn plan(&self, block_size: u32) -> FleetPlan {
        let mut settings = self.settings.clone();
        settings.seed = mix(self.seed);
        settings.profile = self.profile.faster(1.0 / self.faults.prior_scale);
        // A request weighs as many tokens as with the blocks of an engine.
        let weight = settings.cost.active_requests_weight.get() * USUAL_BLOCK;
        if let Some(weight) = pointsman_brain::Factor::new(weight / f64::from(block_size)) {
            settings.cost.active_requests_weight = weight;
        }
        FleetPlan {
            workers: self.shape.roles().enumerate().map(|w| self.worker(w, block_size)).collect(),
            settings,
            event_lag: self.faults.lag,
            event_loss: self.faults.event_loss,
            reading_every: READING_EVERY,
            reading_lag: self.faults.lag,
            seed: self.seed,
        }
    }

    fn worker(&self, (slot, role): (usize, Role), block_size: u32) -> WorkerPlan {
        let slow = self.faults.slow.filter(|slow| slow.worker == slot);
        let chunk = match role {
            Role::Prefill => self.prefill_chunk,
            Role::Decode => self.decode_chunk,
            Role::Unified => self.unified_chunk,
        };
        let engine = Spec {
            profile: self.profile.faster(slow.map_or(1.0, |slow| 1.0 / slow.factor)),
            block_size,
            capacity_blocks: self.kv_tokens / block_size,
            max_num_batched_tokens: chunk,
            noise: self.noise,
            seed: mix(self.seed ^ mix(slot as u64 + 1)),
            ..Spec::default()
        };
        WorkerPlan { role, local_prefill: role != Role::Prefill, engine }
    }
}
