//! What a group can serve at this moment.

use serde::Serialize;

use crate::fleet::{Fleet, Role};
use crate::health::Health;
use crate::settings::Settings;
use crate::time::Time;

/// What a group can serve.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Readiness {
    /// A single prompt can be served.
    pub ready: bool,
    /// By the remote path.
    pub remote: bool,
    /// By the local path.
    pub local: bool,
    /// Prefill workers that take requests.
    pub prefill_up: u16,
    /// Decode workers that take requests.
    pub decode_up: u16,
    /// Unified workers that take requests.
    pub unified_up: u16,
}

pub(crate) fn readiness(fleet: &Fleet, settings: &Settings, now: Time) -> Readiness {
    let usual = counted(fleet, settings, |health| health.admits(now));
    let in_need = |health: Health| health.admits_in_need(&settings.breaker, now);
    Readiness { ready: usual.ready || counted(fleet, settings, in_need).ready, ..usual }
}

fn counted(fleet: &Fleet, settings: &Settings, admits: impl Fn(Health) -> bool) -> Readiness {
    let mut readiness = Readiness::default();
    let workers = fleet.iter().map(|(_, worker)| worker);
    for worker in workers.filter(|worker| !worker.draining && admits(worker.health)) {
        readiness.local |= worker.spec.can_prefill_locally();
        match worker.spec.role {
            Role::Prefill => readiness.prefill_up += 1,
            Role::Decode => readiness.decode_up += 1,
            Role::Unified => readiness.unified_up += 1,
        }
    }
    readiness.remote = readiness.prefill_up > 0 && readiness.decode_up > 0;
    readiness.ready = readiness.remote || (readiness.local && !settings.require_remote);
    readiness
}
