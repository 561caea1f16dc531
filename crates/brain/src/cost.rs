//! The ordinary cost of a worker, and the choice among workers by it:
//! `overlap_weight x u_w / block_size + decode_blocks(w) + active_requests_weight x active(w)`.
//! For a decode leg, `u_w / block_size` is what would have to be transferred to it. A prefill
//! worker's blocks are those of the prompts that it has yet to compute.
//! Lower wins, then the lower slot; above temperature 0 the softmax of the normalised negative cost.

use crate::candidates::Candidate;
use crate::fleet::{Role, WorkerSpec};
use crate::ledger::Load;
use crate::settings::CostSettings;

/// Of `tokens` that the worker would compute, or that would be moved to it.
pub(crate) fn cost(settings: &CostSettings, spec: &WorkerSpec, load: &Load, tokens: u32) -> f64 {
    let block_size = f64::from(spec.block_size.get());
    let blocks = match spec.role {
        Role::Prefill => load.prefill_tokens as f64 / block_size,
        Role::Decode | Role::Unified => load.kv_blocks as f64,
    };
    settings.overlap_weight.get() * f64::from(tokens) / block_size
        + blocks
        + settings.active_requests_weight.get() * f64::from(load.active)
}

/// Picks among those candidates that `among` lets through, by the `cost` of each; above temperature 0,
/// `draw` (from 0 to 1) decides. Equal candidates and draws give equal picks.
pub(crate) fn pick(
    candidates: &[Candidate],
    temperature: f64,
    draw: f64,
    cost: impl Fn(&Candidate) -> f64,
    among: impl Fn(&Candidate) -> bool,
) -> Option<Candidate> {
    let list = || candidates.iter().filter(|candidate| among(candidate));
    let cheapest = list().reduce(|a, b| if cost(b) < cost(a) { b } else { a })?;
    if temperature == 0.0 {
        return Some(*cheapest);
    }
    let lowest = cost(cheapest);
    let highest = list().fold(lowest, |highest, candidate| highest.max(cost(candidate)));
    let spread = if highest > lowest { highest - lowest } else { 1.0 };
    let weight = |candidate: &Candidate| (-(cost(candidate) - lowest) / spread / temperature).exp();
    let mut left = draw * list().map(weight).sum::<f64>();
    let drawn = list().find(|candidate| {
        left -= weight(candidate);
        left < 0.0
    });
    // Rounding may leave a rest after the last one.
    drawn.or(list().last()).copied()
}
