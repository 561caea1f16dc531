//! Who waits in the router instead of in the queue of an engine, where it can still be decided anew and
//! passed by others.
//!
//! Late: a request that is late for its TTFT SLO whatever is done would make those behind it late as
//! well, though its own SLO is lost. It stands back for those that can still be served in time, until a
//! worker is about to run dry. Busy: what the plan's workers have before it is as much as they may.

use std::time::Duration;

use crate::ask::Wait;
use crate::guards;
use crate::plan::{Plan, Scene};

/// A TTFT predicted beyond this share of its SLO is late: predictions are some percent off.
const LATE_FROM: f64 = 0.9;

/// A worker with less than this many steps of prompts to compute is about to run dry.
const DRY_STEPS: f64 = 0.5;

/// Asking again sooner would tell nothing.
const SOONEST: Duration = Duration::from_millis(1);

/// When to ask again about a busy worker if nothing of the router's own ends: others may use it.
const BUSY_AGAIN: Duration = Duration::from_millis(200);

/// How long a request that has a plan is to wait nevertheless, if nothing ends before.
pub(crate) fn wait(scene: &Scene<'_>, plan: &Plan) -> Option<Duration> {
    if plan.prefilled || !scene.ask.tries.causes().is_empty() {
        return None;
    }
    let holds_late = scene.settings.holds_late();
    let slo = scene.slo().ttft_seconds();
    let late = match slo {
        Some(slo) => holds_late && is_late(scene, plan, slo),
        // Where late ones wait, it does not pass them.
        None => holds_late && scene.ask.wait >= Wait::Behind,
    };
    if late {
        return until_dry(scene, plan);
    }
    // With an objective it is in time: where late ones wait it passes them, and the cost model sees
    // the queue. Elsewhere the line alone says whose turn it is.
    let judged = holds_late && slo.is_some();
    let waits = scene.settings.admission.hold_busy
        && !judged
        && (scene.ask.wait == Wait::Behind || is_busy(scene, plan));
    waits.then_some(BUSY_AGAIN)
}

fn is_late(scene: &Scene<'_>, plan: &Plan, slo: f64) -> bool {
    let (ttft, _) = scene.predictor.forecast(plan, scene.ask, scene.now);
    scene.ask.waited.as_secs_f64() + ttft > LATE_FROM * slo
}

/// How long the worker that would compute it has others' prompts to compute; none if next to nothing.
fn until_dry(scene: &Scene<'_>, plan: &Plan) -> Option<Duration> {
    let computes = plan.prefill.unwrap_or(plan.decode);
    let dry = DRY_STEPS * scene.predictor.full_step(computes.slot);
    let beyond = Duration::try_from_secs_f64(computes.outlook.wait - dry).ok()?;
    (!beyond.is_zero()).then(|| beyond.max(SOONEST))
}

/// Whether the worker that would compute has as many prompt tokens before this request as it may, or
/// the one that would decode has no KV block left. Its own size does not count, so that a long one is
/// not passed by short ones for ever.
fn is_busy(scene: &Scene<'_>, plan: &Plan) -> bool {
    let computes = plan.prefill.unwrap_or(plan.decode);
    let worker = |slot| scene.fleet.get(slot);
    worker(computes.slot).is_some_and(|worker| {
        guards::queue_is_full(scene.settings.admission.prefill_queue, worker, &computes.load)
    }) || worker(plan.decode.slot)
        .is_some_and(|worker| guards::is_full(worker, &plan.decode.load, scene.now))
}
