//! A request's turn: it is decided at once, or waits in line in the router until the brain has a plan
//! for it, its time is over, or its place is needed.

use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use http::HeaderMap;
use pointsman_brain::{Claim, Ladder, Wait};
use tokio::time::timeout_at;

use super::{Life, NoPlan, Plan};
use crate::auth::Client;
use crate::error::Refusal;
use crate::fleet::Group;
use crate::hold::Away;
use crate::{headers, report, sight};

/// The highest and, negated, the lowest priority.
const MOST: i8 = 100;

/// What a request brings to the line, and how long it would wait there at most.
pub(super) struct Turn {
    claim: Claim,
    /// The client's own bound.
    deadline: Option<Duration>,
}

impl Turn {
    pub(super) fn new(
        head: &HeaderMap,
        group: &Group,
        client: Option<&Client>,
        isl_tokens: u32,
    ) -> Result<Turn, Refusal> {
        let asked = priority(head)?;
        let priority = client.map_or(asked, |client| asked.min(client.max_priority()));
        let named = || head.get(group.settings.tenant.as_ref()?).map(http::HeaderValue::as_bytes);
        // Who has a key cannot make up tenants beside it.
        let tenant = client.map(|client| client.name().as_bytes()).or_else(named).map(hash);
        let claim = Claim { late: false, priority, tenant, tokens: isl_tokens };
        let deadline = headers::millis(head, &[headers::DEADLINE])?;
        Ok(Turn { claim, deadline: deadline.filter(|deadline| !deadline.is_zero()) })
    }
}

fn priority(head: &HeaderMap) -> Result<i8, Refusal> {
    let Some(value) = head.get(headers::PRIORITY) else { return Ok(0) };
    let number = value.to_str().ok().and_then(|text| text.trim().parse::<i8>().ok());
    number.filter(|number| (-MOST..=MOST).contains(number)).ok_or_else(|| {
        let name = headers::PRIORITY;
        Refusal::new(400, format!("{name} must be a whole number from -{MOST} to {MOST}"))
    })
}

/// Names that clients make up cannot be made to collide: the keys are drawn once a process.
fn hash(name: &[u8]) -> u64 {
    static KEYS: OnceLock<RandomState> = OnceLock::new();
    KEYS.get_or_init(RandomState::new).hash_one(name)
}

impl Life {
    /// Decides and reserves, after a wait where the brain says so.
    pub(super) async fn plan_in_turn(&mut self, ladder: &Ladder) -> Result<Plan, Refusal> {
        let group = Arc::clone(&self.group);
        let (again_in, late) = match self.plan(ladder, group.hold.ahead()) {
            Ok(plan) => return Ok(plan),
            Err(NoPlan::Refused(refusal)) => return Err(refusal),
            Err(NoPlan::Wait { again_in, late }) => (again_in, late),
        };
        self.turn.claim.late = late;
        let joined = Instant::now();
        let (until, limit) = self.waits_until();
        let planned = timeout_at(until.into(), self.stand_in_line(&group, ladder, again_in)).await;
        self.router.metrics.held(group.name(), joined.elapsed());
        planned.unwrap_or_else(|_elapsed| Err(report::held_too_long(self, limit)))
    }

    async fn stand_in_line(
        &mut self,
        group: &Group,
        ladder: &Ladder,
        mut again_in: Duration,
    ) -> Result<Plan, Refusal> {
        let mut place = match group.hold.join(self.turn.claim) {
            Ok(place) => place,
            Err(away) => return Err(self.sent_away(away, "line_full")),
        };
        loop {
            if let Err(away) = place.turn(again_in).await {
                return Err(self.sent_away(away, "displaced"));
            }
            // The caches have changed meanwhile.
            self.held = sight::look_up(group, &self.roster, &self.prompt, &self.scope);
            let late = match self.plan(ladder, Wait::InLine) {
                Err(NoPlan::Wait { again_in: at, late }) => {
                    again_in = at;
                    late
                }
                Ok(plan) => {
                    place.served();
                    return Ok(plan);
                }
                Err(NoPlan::Refused(refusal)) => return Err(refusal),
            };
            place.waits_on(late);
        }
    }

    /// Until when it may wait, and which of its limits that is.
    fn waits_until(&self) -> (Instant, Duration) {
        let limit = self.group.settings.routing.admission.max_wait;
        let limit = self.turn.deadline.map_or(limit, |own| own.min(limit));
        let (until, last) = (self.ready + limit, self.patience.deadline.into_std());
        if until < last { (until, limit) } else { (last, self.router.settings.timeouts.request) }
    }

    fn sent_away(&self, away: Away, why: &'static str) -> Refusal {
        match away {
            Away::Closed => report::sent_away(self),
            Away::Full(retry_after) => report::no_place(self, why, retry_after),
        }
    }
}
