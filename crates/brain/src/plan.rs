//! From the slate to one plan: wishes, the gate, the failure ladder, the policy and the guards, in
//! that order. Pure: nothing is booked and nothing changes here.

use crate::ask::{Ask, Split};
use crate::candidates::{Candidate, is_eligible, kv_demand, measure};
use crate::decision::{NoPath, Shadows};
use crate::field::{Draws, Field};
use crate::fleet::{Fleet, Path, Role, WorkerSpec};
use crate::gate::{Gated, Pool, gate};
use crate::guards::{self, Checked, Guard, Vetoes};
use crate::ladder::Rung;
use crate::ledger::Load;
use crate::policy::predicted::{self, COLD_MARGIN, Scored};
use crate::policy::{Board, Policy, Rule, Scores, Verdict};
use crate::predict::Predictor;
use crate::sessions::Turn;
use crate::settings::{IslGate, MAX_SHADOWS, Settings};
use crate::signals::{Fallbacks, Signal};
use crate::slo::Slo;
use crate::time::Time;
use crate::why::Why;

/// Everything that a plan depends on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scene<'a> {
    pub(crate) settings: &'a Settings,
    pub(crate) fleet: &'a Fleet,
    pub(crate) predictor: &'a Predictor,
    pub(crate) ask: &'a Ask<'a>,
    pub(crate) candidates: &'a [Candidate],
    pub(crate) session: Option<Turn>,
    pub(crate) draws: Draws,
    pub(crate) now: Time,
}

/// What to do with a request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Plan {
    pub(crate) prefill: Option<Candidate>,
    pub(crate) decode: Candidate,
    pub(crate) prefilled: bool,
    pub(crate) why: Why,
    /// What the worker that the policy looked at would have to compute.
    pub(crate) u: u32,
    pub(crate) vetoes: Vetoes,
    pub(crate) fallbacks: Fallbacks,
    pub(crate) shadows: Shadows,
    pub(crate) scores: Scores,
}

impl Plan {
    pub(crate) fn path(&self) -> Path {
        if self.prefill.is_some() { Path::Remote } else { Path::Local }
    }

    /// What the computing worker has to compute.
    pub(crate) fn prefill_tokens(&self) -> u32 {
        if self.prefilled { 0 } else { self.prefill.unwrap_or(self.decode).u }
    }
}

/// The plan for the scene's request.
pub(crate) fn plan(scene: &Scene<'_>) -> Result<Plan, NoPath> {
    let wish = scene.wish();
    scene.refuse_impossible(wish)?;
    let gated = scene.gate();
    let planner = Planner::new(scene, gated);

    if let Some(plan) = planner.with_kept_handoff() {
        return Ok(plan);
    }
    if scene.ask.split == Split::No {
        return planner.only_local(Why::Batch);
    }
    if let (Pool::Unified, IslGate::UnifiedUpTo(bound)) = (gated.pool, scene.settings.isl_gate) {
        return planner.only_local(Why::GateShort { isl: scene.ask.isl_tokens, bound });
    }
    let rung = scene.ask.tries.rung();
    if rung == Rung::LocalFirst
        && let Ok(plan) = planner.retry_local()
    {
        return Ok(plan);
    }
    let Some(board) = planner.board().filter(|_| rung != Rung::Local) else {
        return match rung {
            Rung::Policy => planner.without_remote(),
            Rung::Remote | Rung::Local | Rung::LocalFirst => planner.retry_local(),
        };
    };
    Ok(match (rung, wish) {
        (Rung::Remote, _) => planner.remote(&board, Why::RetryPrefill),
        (_, Some(Path::Remote)) => planner.remote(&board, Why::Override),
        (_, Some(Path::Local)) => {
            planner.guarded(planner.field.local, Why::Override, &board, scene.settings.policy.rule)
        }
        (_, None) if scene.ask.split == Split::IfNeeded => {
            planner.guarded(planner.field.local, Why::Batch, &board, scene.settings.policy.rule)
        }
        (_, None) => planner.by_policy(&board),
    })
}

impl Scene<'_> {
    /// Refuses a wish that the fleet could not take even if all of its workers were healthy.
    fn refuse_impossible(&self, wish: Option<Path>) -> Result<(), NoPath> {
        match wish {
            Some(Path::Remote)
                if !(self.ask.split != Split::No
                    && self.fleet_has(|spec| spec.role == Role::Prefill)
                    && self.fleet_has(|spec| spec.role == Role::Decode)) =>
            {
                Err(NoPath::WishRemote)
            }
            Some(Path::Local) if !self.fleet_has(WorkerSpec::can_prefill_locally) => {
                Err(NoPath::WishLocal)
            }
            _ => Ok(()),
        }
    }

    /// Whether any worker that may serve the request is so, healthy or not.
    fn fleet_has(&self, is: impl Fn(&WorkerSpec) -> bool) -> bool {
        let mut workers = self.fleet.iter();
        workers.any(|(slot, worker)| is(&worker.spec) && is_eligible(slot, self.ask))
    }

    fn wish(&self) -> Option<Path> {
        self.ask.wish.filter(|_| self.settings.allow_path_override)
    }

    /// What the gate says; a wish for a path is stronger.
    pub(crate) fn gate(&self) -> Gated {
        let setting = if self.wish().is_some() { IslGate::Off } else { self.settings.isl_gate };
        gate(setting, self.ask, self.candidates)
    }

    /// The field with the session's worker in the place of the cheapest, while it is within its guards.
    fn with_session_kept<'f>(&self, mut field: Field<'f>) -> Field<'f> {
        let kept = self.session.and_then(|turn| field.find(turn.decode));
        let Some(kept) = kept else { return field };
        let vetoes = self.check(kept, self.settings.policy.rule).vetoes;
        if kept.fetches && !vetoes.contains(Guard::DecodeKv) {
            field.decode = Some(*kept);
        }
        if vetoes.is_empty() {
            field.local = Some(*kept);
        }
        field
    }

    /// What the request is to be served within.
    pub(crate) fn slo(&self) -> Slo {
        self.ask.slo.or(self.settings.slo)
    }

    /// Whether the request's KV has room on a candidate.
    pub(crate) fn fits(&self, candidate: &Candidate) -> bool {
        let Some(worker) = self.fleet.get(candidate.slot) else { return false };
        let demand = kv_demand(candidate.slot, candidate.block_size, self.settings, self.ask);
        guards::fits(worker, &candidate.load, &demand, self.now)
    }

    /// What the guards say of the local path on a candidate that a policy chose.
    pub(crate) fn check(&self, candidate: &Candidate, rule: Rule) -> Checked {
        let Some(worker) = self.fleet.get(candidate.slot) else { return Checked::default() };
        let demand = kv_demand(candidate.slot, candidate.block_size, self.settings, self.ask);
        let guards = &self.settings.guards;
        guards::check(guards, rule, worker, &candidate.load, candidate.u, &demand, self.now)
    }

    /// Fallbacks that lie in the request itself.
    fn fallbacks(&self, gated: Gated) -> Fallbacks {
        let used = [
            (self.ask.estimated, Signal::Tokenizer),
            (self.ask.partial, Signal::Multimodal),
            (gated.waived, Signal::IslGate),
        ];
        used.into_iter().filter(|(is, _)| *is).map(|(_, signal)| signal).collect()
    }
}

/// The field, and the ways to make a plan of it.
struct Planner<'a> {
    scene: &'a Scene<'a>,
    /// The best of each kind as the policy in force sees it.
    field: Field<'a>,
    /// The best of each kind by ordinary cost.
    ordinary: Field<'a>,
    /// The best of each kind by predicted cost, where a policy asks for it.
    scored: Option<Scored>,
    fallbacks: Fallbacks,
}

impl<'a> Planner<'a> {
    fn new(scene: &'a Scene<'a>, gated: Gated) -> Planner<'a> {
        let field = Field::new(scene.candidates, gated.pool, scene.settings, scene.draws);
        let ordinary = scene.with_session_kept(field);
        let scored = scene.settings.predicts().then(|| {
            let splits = scene.ask.split != Split::No && scene.ask.tries.rung() != Rung::Local;
            let remote = splits && ordinary.prefill.is_some() && ordinary.decode.is_some();
            predicted::score(scene, &ordinary, remote)
        });
        let fallbacks = scene.fallbacks(gated);
        let planner = Planner { scene, field: ordinary, ordinary, scored, fallbacks };
        Planner { field: planner.field_of(scene.settings.policy.rule), ..planner }
    }

    /// The best of each kind as a policy sees it; the cheapest where it finds none.
    fn field_of(&self, rule: Rule) -> Field<'a> {
        let Some(scored) = self.scored.filter(|_| rule == Rule::Predicted) else {
            return self.ordinary;
        };
        let (prefill, decode) = scored.remote.unzip();
        let mut field = self.ordinary;
        field.local = scored.local.or(field.local);
        field.prefill = prefill.or(field.prefill);
        field.decode = decode.or(field.decode);
        field
    }

    /// What a policy decides on, if there is a remote path.
    fn board(&self) -> Option<Board<'a>> {
        self.board_of(self.field)
    }

    fn board_of(&self, field: Field<'a>) -> Option<Board<'a>> {
        let isl = self.scene.ask.isl_tokens;
        Some(Board { isl, field, prefill: field.prefill?, decode: field.decode? })
    }

    /// Another decode worker for KV that an earlier try computed.
    fn with_kept_handoff(&self) -> Option<Plan> {
        let slot = self.scene.ask.tries.handoff()?;
        let worker = self.scene.fleet.get(slot)?;
        if worker.spec.role != Role::Prefill || !worker.health.admits(self.scene.now) {
            return None;
        }
        let prefill = measure(slot, worker, Load::default(), self.scene.settings, self.scene.ask);
        let plan = self.plan(Some(prefill), self.field.decode?, Why::RetryDecode);
        Some(Plan { prefilled: true, ..plan })
    }

    fn by_policy(&self, board: &Board<'_>) -> Plan {
        let settings = self.scene.settings;
        let mut plan = self.chosen(&settings.policy, board);
        for (bit, shadow) in settings.shadow.iter().take(MAX_SHADOWS).enumerate() {
            let seen = self.board_of(self.field_of(shadow.rule));
            let chosen = self.chosen(shadow, seen.as_ref().unwrap_or(board));
            let local = chosen.path() == Path::Local;
            plan.shadows.local |= u32::from(local) << bit;
            plan.shadows.count += 1;
        }
        plan
    }

    /// What a policy and the guards make of the board.
    fn chosen(&self, policy: &Policy, board: &Board<'_>) -> Plan {
        let measured = board.measured();
        let mut used = Fallbacks::EMPTY;
        let worker = self.scene.fleet.get(measured.slot);
        if policy.reads_overlap() && worker.is_some_and(|worker| !worker.spec.publishes_events) {
            used.insert(Signal::KvEvents);
        }
        let verdict = match self.scored.as_ref().filter(|_| policy.rule == Rule::Predicted) {
            Some(scored) => self.by_score(policy, scored, board, &mut used),
            None => policy.verdict(&board.facts(), &mut used),
        };
        let plan = match verdict {
            Verdict::Local(why) => self.guarded(board.field.local, why, board, policy.rule),
            Verdict::Remote(why) => self.remote(board, why),
        };
        let vetoes = match (&self.scored, plan.path()) {
            (Some(scored), Path::Remote) if policy.rule == Rule::Predicted => {
                plan.vetoes.union(scored.vetoes)
            }
            _ => plan.vetoes,
        };
        Plan { u: measured.u, vetoes, fallbacks: plan.fallbacks.union(used), ..plan }
    }

    /// The bounds' verdict, or else that of the lower score. While too little was measured, the cold
    /// policy decides close cases, by what it looks at itself.
    fn by_score(
        &self,
        policy: &Policy,
        scored: &Scored,
        board: &Board<'_>,
        used: &mut Fallbacks,
    ) -> Verdict {
        if let Some(verdict) = policy.bounds.verdict(&board.facts()) {
            return verdict;
        }
        *used = used.union(scored.fallbacks);
        let Scores { local, remote, cold } = scored.scores;
        let (Some(local), Some(remote)) = (local.map(|s| s.j), remote.map(|s| s.j)) else {
            return match (local, remote) {
                (Some(local), None) => {
                    Verdict::Local(Why::PredictedLocal { local: local.j, remote: None })
                }
                (local, remote) => Verdict::Remote(Why::PredictedRemote {
                    local: local.map(|score| score.j),
                    remote: remote.map(|score| score.j),
                }),
            };
        };
        let settings = &self.scene.settings.predicted;
        let stays = |path| self.scene.session.is_some_and(|turn| turn.path == path);
        let off = |path| if stays(path) { settings.stickiness.get() } else { 0.0 };
        let (as_local, as_remote) = (local - off(Path::Local), remote - off(Path::Remote));
        let close = (as_local - as_remote).abs() < COLD_MARGIN;
        if cold
            && close
            && settings.cold != Rule::Predicted
            && let Some(ordinary) = self.board_of(self.ordinary)
        {
            return Policy { rule: settings.cold, ..Policy::default() }
                .verdict(&ordinary.facts(), used);
        }
        if predicted::local_is_better(as_local, as_remote, self.scene.draws.path_tie()) {
            Verdict::Local(Why::PredictedLocal { local, remote: Some(remote) })
        } else {
            Verdict::Remote(Why::PredictedRemote { local: Some(local), remote: Some(remote) })
        }
    }

    /// The local path if the guards allow, else the remote one with the guard as its reason.
    fn guarded(&self, local: Option<Candidate>, why: Why, board: &Board<'_>, rule: Rule) -> Plan {
        let checked = match &local {
            Some(local) => self.scene.check(local, rule),
            None => Checked { vetoes: Vetoes::of(Guard::Capability), ..Checked::default() },
        };
        let plan = match (local, checked.vetoes.first()) {
            (_, Some(guard)) => self.remote(board, Why::Guard(guard)),
            (Some(local), None) => self.plan(None, local, why),
            (None, None) => self.remote(board, why),
        };
        self.with(plan, checked)
    }

    fn remote(&self, board: &Board<'_>, why: Why) -> Plan {
        self.plan(Some(board.prefill), board.decode, why)
    }

    /// The local path because the remote one does not exist: serving beats refusing.
    fn without_remote(&self) -> Result<Plan, NoPath> {
        if self.field.local.is_none() && self.field.decode.is_none() {
            return Err(NoPath::NoDecode);
        }
        if self.scene.settings.require_remote {
            return Err(NoPath::RemoteRequired);
        }
        let mut workers = self.scene.fleet.iter();
        self.only_local(if self.field.prefill.is_some() {
            Why::NoDecode
        } else if workers.all(|(_, worker)| worker.spec.role == Role::Unified) {
            Why::Unified
        } else {
            Why::NoPrefill
        })
    }

    /// The local path whatever the guards say, though on a worker that they allow if there is one.
    fn only_local(&self, why: Why) -> Result<Plan, NoPath> {
        let (local, mut checked) = self.best_local().ok_or_else(|| self.no_local())?;
        if !checked.vetoes.is_empty() {
            checked.fallbacks.insert(Signal::Guards);
        }
        Ok(self.with(self.plan(None, local, why), checked))
    }

    fn no_local(&self) -> NoPath {
        let has = |is: fn(&WorkerSpec) -> bool| self.scene.fleet_has(is);
        if self.scene.ask.split != Split::No && self.field.decode.is_some() {
            NoPath::NoPrefill
        } else if has(|spec| spec.role == Role::Decode) && !has(WorkerSpec::can_prefill_locally) {
            NoPath::NotDisaggregable
        } else {
            NoPath::NoDecode
        }
    }

    /// The last rung of the ladder: prefill workers failed, and the guards hold.
    fn retry_local(&self) -> Result<Plan, NoPath> {
        if self.scene.settings.require_remote {
            return Err(NoPath::RemoteRequired);
        }
        let Some((local, checked)) = self.best_local() else {
            let none = self.field.decode.is_none();
            let vetoed = NoPath::Vetoed(Vetoes::of(Guard::Capability));
            return Err(if none { NoPath::NoDecode } else { vetoed });
        };
        if !checked.vetoes.is_empty() {
            return Err(NoPath::Vetoed(checked.vetoes));
        }
        Ok(self.with(self.plan(None, local, Why::RetryLocal), checked))
    }

    /// The cheapest local candidate that no guard vetoes; if they veto all, the cheapest.
    fn best_local(&self) -> Option<(Candidate, Checked)> {
        let first = self.field.local?;
        let checked = self.check(&first);
        if checked.vetoes.is_empty() {
            return Some((first, checked));
        }
        let candidates = self.field.candidates();
        let allowed = candidates.filter(|candidate| self.check(candidate).vetoes.is_empty());
        let cheapest = allowed.reduce(|a, b| if b.cost < a.cost { b } else { a }).copied();
        Some(cheapest.map_or((first, checked), |local| (local, self.check(&local))))
    }

    fn check(&self, candidate: &Candidate) -> Checked {
        self.scene.check(candidate, self.scene.settings.policy.rule)
    }

    fn plan(&self, prefill: Option<Candidate>, decode: Candidate, why: Why) -> Plan {
        Plan {
            prefill,
            decode,
            prefilled: false,
            why,
            u: decode.u,
            vetoes: Vetoes::EMPTY,
            fallbacks: self.fallbacks,
            shadows: Shadows::default(),
            scores: self.scored.map(|scored| scored.scores).unwrap_or_default(),
        }
    }

    fn with(&self, plan: Plan, checked: Checked) -> Plan {
        Plan { vetoes: checked.vetoes, fallbacks: plan.fallbacks.union(checked.fallbacks), ..plan }
    }
}
