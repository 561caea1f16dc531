//! The slate: every worker that can take part in serving one request, measured in one pass.
//! What a worker holds is asked for once, on both pools; what it would have to compute follows.

use std::num::NonZeroU32;

use crate::ask::Ask;
use crate::cost;
use crate::demand::KvDemand;
use crate::fleet::{Fleet, Held, Role, Slot, Worker};
use crate::health::Health;
use crate::ledger::{Ledger, Load};
use crate::predict::{Outlook, Predictor};
use crate::record::LeftOut;
use crate::settings::Settings;
use crate::time::Time;

/// A worker that can take part in serving the request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Candidate {
    pub(crate) slot: Slot,
    pub(crate) role: Role,
    /// Whether it can take the local path.
    pub(crate) local: bool,
    /// Whether it can take KV that another worker computed.
    pub(crate) fetches: bool,
    /// Prompt tokens whose KV it holds.
    pub(crate) overlap: u32,
    /// Prompt tokens that it would have to compute.
    pub(crate) u: u32,
    /// Prompt tokens whose KV would have to be moved to it.
    pub(crate) moved: u32,
    /// Ordinary cost of computing here.
    pub(crate) cost: f64,
    /// Ordinary cost of decoding here what was computed elsewhere.
    pub(crate) fetch_cost: f64,
    pub(crate) load: Load,
    pub(crate) block_size: NonZeroU32,
    pub(crate) max_num_batched_tokens: Option<u32>,
    /// What its part would take, where a policy asks for it.
    pub(crate) outlook: Outlook,
}

/// What there is to know of the workers.
pub(crate) struct Seen<'a> {
    pub(crate) fleet: &'a Fleet,
    pub(crate) ledger: &'a Ledger,
    pub(crate) predictor: &'a Predictor,
}

/// The candidates of one request, by slot. Reused from request to request.
#[derive(Debug, Default)]
pub(crate) struct Slate {
    candidates: Vec<Candidate>,
}

impl Slate {
    /// Measures all workers for `ask`; with `in_need` also those that are to be left alone, if it is for
    /// no other reason than that others can serve.
    pub(crate) fn fill(
        &mut self,
        seen: &Seen<'_>,
        settings: &Settings,
        ask: &Ask<'_>,
        now: Time,
        in_need: bool,
    ) {
        let admits = |health: Health| match in_need {
            true => health.admits_in_need(&settings.breaker, now),
            false => health.admits(now),
        };
        self.candidates.clear();
        let predicts = settings.predicts();
        for (slot, worker) in seen.fleet.iter() {
            if left_out(slot, worker, ask, admits).is_some() {
                continue;
            }
            let mut candidate = measure(slot, worker, seen.ledger.load(slot), settings, ask);
            candidate.fetches &= admits(worker.handoffs);
            if predicts {
                candidate.outlook = seen.predictor.outlook_for(&candidate, ask, now);
            }
            self.candidates.push(candidate);
        }
    }

    pub(crate) fn all(&self) -> &[Candidate] {
        &self.candidates
    }
}

/// Why a worker is not on the slate, if it is not.
pub(crate) fn left_out(
    slot: Slot,
    worker: &Worker,
    ask: &Ask<'_>,
    admits: impl Fn(Health) -> bool,
) -> Option<LeftOut> {
    if !is_eligible(slot, ask) {
        Some(LeftOut::NotEligible)
    } else if ask.tries.has_failed(slot) {
        Some(LeftOut::Failed)
    } else if worker.draining {
        Some(LeftOut::Draining)
    } else if !admits(worker.health)
        || worker.spec.role == Role::Prefill && !admits(worker.handoffs)
    {
        Some(LeftOut::Unhealthy)
    } else {
        None
    }
}

pub(crate) fn is_eligible(slot: Slot, ask: &Ask<'_>) -> bool {
    ask.eligible.is_none_or(|slots| slots.get(slot.index()).copied().unwrap_or(false))
}

pub(crate) fn measure(
    slot: Slot,
    worker: &Worker,
    load: Load,
    settings: &Settings,
    ask: &Ask<'_>,
) -> Candidate {
    let spec = &worker.spec;
    let overlap = overlap_tokens(held(slot, ask), spec.block_size.get(), ask.isl_tokens);
    let u = ask.isl_tokens - overlap;
    let moved = if spec.skips_cached_blocks { u } else { ask.isl_tokens };
    let cost = |tokens| cost::cost(&settings.cost, spec, &load, tokens);
    Candidate {
        slot,
        role: spec.role,
        local: spec.can_prefill_locally(),
        fetches: spec.role == Role::Decode && !ask.tries.could_not_fetch(slot),
        overlap,
        u,
        moved,
        cost: cost(u),
        fetch_cost: cost(moved),
        load,
        block_size: spec.block_size,
        max_num_batched_tokens: spec.max_num_batched_tokens,
        outlook: Outlook::default(),
    }
}

/// KV blocks that the request would need on a worker that decodes it.
pub(crate) fn kv_demand(
    slot: Slot,
    block_size: NonZeroU32,
    settings: &Settings,
    ask: &Ask<'_>,
) -> KvDemand {
    let asked = ask.max_new_tokens.unwrap_or(u32::MAX);
    KvDemand::new(
        ask.isl_tokens,
        held(slot, ask),
        block_size,
        ask.sequences,
        asked.min(settings.output_allowance_tokens),
    )
}

fn held(slot: Slot, ask: &Ask<'_>) -> Held {
    ask.held.get(slot.index()).copied().unwrap_or_default()
}

/// `block_size x (device + 0.75 host + 0.25 disk)`, rounded in tokens (a half goes up), at most the ISL.
fn overlap_tokens(held: Held, block_size: u32, isl_tokens: u32) -> u32 {
    let quarter_blocks =
        4 * u64::from(held.device) + 3 * u64::from(held.host) + u64::from(held.disk);
    let tokens = (quarter_blocks.saturating_mul(u64::from(block_size)).saturating_add(2)) / 4;
    u32::try_from(tokens).unwrap_or(u32::MAX).min(isl_tokens)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overlap_is_weighted_by_tier_and_rounded_in_tokens() {
        let held = |device, host, disk| Held { device, host, disk };
        // (held, block size, ISL, overlap)
        let cases = [
            (held(0, 0, 0), 16, 100, 0),
            (held(3, 0, 0), 16, 100, 48),
            (held(0, 3, 0), 16, 100, 36),
            (held(0, 0, 3), 16, 100, 12),
            (held(1, 1, 1), 16, 100, 32),
            // Rounded once, in tokens: 5 x (0.75 + 0.25) is 5, not 4 + 1.
            (held(0, 1, 1), 5, 100, 5),
            // 0.75, 0.25, 0.5 of a token.
            (held(0, 1, 0), 1, 100, 1),
            (held(0, 0, 1), 1, 100, 0),
            (held(0, 0, 2), 1, 100, 1),
            (held(0, 0, 1), 3, 100, 1),
            // At most the ISL.
            (held(6, 0, 0), 16, 96, 96),
            (held(7, 0, 0), 16, 100, 100),
            (held(99, 99, 99), 16, 0, 0),
            (held(u32::MAX, u32::MAX, u32::MAX), u32::MAX, u32::MAX, u32::MAX),
            (held(u32::MAX, u32::MAX, u32::MAX), u32::MAX, 7, 7),
        ];
        for (held, block_size, isl, overlap) in cases {
            assert_eq!(overlap_tokens(held, block_size, isl), overlap, "{held:?} {block_size}");
        }
    }
}
