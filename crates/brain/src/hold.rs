//! Who waits in the router instead of in the queue of an engine, where it can still be decided anew and
//! passed by others.
//!
//! Late: a request that is late for its TTFT SLO whatever is done would make those behind it late as
//! well, though its own SLO is lost. It stands back for those that can still be served in time, until a
//! worker is about to run dry. Busy: what the plan's workers have before it is as much as they may.

use std::time::Duration;

use crate::ask::{Ask, Wait};
use crate::candidates::is_eligible;
use crate::decision::NoPath;
use crate::fleet::{Fleet, Slot, Worker};
use crate::guards;
use crate::plan::{Plan, Scene};
use crate::settings::Admission;
use crate::time::Time;

/// A TTFT predicted beyond this share of its SLO is late: predictions are some percent off.
const LATE_FROM: f64 = 0.9;

/// A worker with less than this many steps of prompts to compute is about to run dry.
const DRY_STEPS: f64 = 0.5;

/// What is in time waits for one that has more than this many: a longer queue of its makes it no faster,
/// and decides too early.
const FULL_STEPS: f64 = 2.0;

/// Asking again sooner would tell nothing.
const SOONEST: Duration = Duration::from_millis(1);

/// When to ask again about a busy worker if nothing of the router's own ends: others may use it.
const BUSY_AGAIN: Duration = Duration::from_millis(200);

/// How long a request is to wait, if nothing ends before.
pub(crate) struct Held {
    pub(crate) again_in: Duration,
    pub(crate) late: bool,
}

/// Whether a request that has a plan is to wait nevertheless.
pub(crate) fn wait(scene: &Scene<'_>, plan: &Plan) -> Option<Held> {
    if plan.prefilled || !scene.ask.tries.causes().is_empty() {
        return None;
    }
    let Admission { hold_busy, .. } = scene.settings.admission;
    let slo = scene.slo().ttft_seconds();
    let late = match slo {
        Some(slo) => scene.settings.holds_late() && is_late(scene, plan, slo),
        // It does not pass late ones.
        None => scene.settings.holds_late() && scene.ask.wait >= Wait::BehindLate,
    };
    if late {
        let again_in = queue_beyond(scene, plan, DRY_STEPS)?;
        return Some(Held { again_in, late });
    }
    let again_in = match slo.filter(|_| scene.settings.holds_late()) {
        Some(_) => queue_beyond(scene, plan, FULL_STEPS),
        None => is_busy(scene, plan).then_some(BUSY_AGAIN),
    };
    let behind = (scene.ask.wait == Wait::Behind).then_some(BUSY_AGAIN);
    let again_in = again_in.or(behind).filter(|_| hold_busy)?;
    Some(Held { again_in, late })
}

/// Whether a request that nobody can take is to wait for the answer to a probe: what a worker that works
/// again is asked first tells that all others can come.
pub(crate) fn for_a_probe(fleet: &Fleet, ask: &Ask<'_>, now: Time) -> Option<NoPath> {
    if ask.wait == Wait::Never || !ask.tries.causes().is_empty() {
        return None;
    }
    let probed = |(slot, worker): (Slot, &Worker)| {
        let being_probed =
            worker.health.is_being_probed(now) || worker.handoffs.is_being_probed(now);
        being_probed && !worker.draining && is_eligible(slot, ask)
    };
    let held = NoPath::Held { again_in: BUSY_AGAIN, late: false };
    fleet.iter().any(probed).then_some(held)
}

fn is_late(scene: &Scene<'_>, plan: &Plan, slo: f64) -> bool {
    let (ttft, _) = scene.predictor.forecast(plan, scene.ask, scene.now);
    scene.ask.waited.as_secs_f64() + ttft > LATE_FROM * slo
}

/// How long the worker that would compute it has more than so many steps of others' prompts before it.
fn queue_beyond(scene: &Scene<'_>, plan: &Plan, steps: f64) -> Option<Duration> {
    let computes = plan.prefill.unwrap_or(plan.decode);
    let allowed = steps * scene.predictor.full_step(computes.slot);
    let beyond = Duration::try_from_secs_f64(computes.outlook.wait - allowed).ok()?;
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
