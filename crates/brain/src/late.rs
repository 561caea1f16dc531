//! Who waits in the router: a request that is late for its TTFT SLO whatever is done. In the queue of
//! an engine it would make those behind it late as well, though its own SLO is lost. So it stands
//! back for those that can still be served in time, until a worker is about to run dry.

use std::time::Duration;

use crate::ask::Wait;
use crate::plan::{Plan, Scene};

/// A TTFT predicted beyond this share of its SLO is late: predictions are some percent off.
const LATE_FROM: f64 = 0.9;

/// A worker with less than this many steps of prompts to compute is about to run dry.
const DRY_STEPS: f64 = 0.5;

/// So many of those that wait, the first in line, are asked about at a time: what the first of them
/// needs may be what is busy.
pub const LINE_HEADS: usize = 8;

/// Asking again sooner would tell nothing.
const SOONEST: Duration = Duration::from_millis(1);

/// How long a request waits that is late under its plan; none if it is not, or if the worker that would
/// compute it has next to nothing before it. Without a TTFT SLO nothing is late, but where others wait
/// it does not pass them.
pub(crate) fn wait(scene: &Scene<'_>, plan: &Plan) -> Option<Duration> {
    if !scene.settings.holds_late() || plan.prefilled || !scene.ask.tries.causes().is_empty() {
        return None;
    }
    let computes = plan.prefill.unwrap_or(plan.decode);
    let dry = DRY_STEPS * scene.predictor.full_step(computes.slot);
    let beyond = Duration::try_from_secs_f64(computes.outlook.wait - dry).ok()?;
    let late = match scene.slo().ttft_seconds() {
        Some(slo) => {
            let (ttft, _) = scene.predictor.forecast(plan, scene.ask, scene.now);
            scene.ask.waited.as_secs_f64() + ttft > LATE_FROM * slo
        }
        None => scene.ask.wait == Wait::InLine,
    };
    (late && !beyond.is_zero()).then(|| beyond.max(SOONEST))
}
