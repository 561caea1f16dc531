//! The ledger against a literal reference: after every step of a random life, what is reserved on
//! each worker is the sum over the bookings that the reference holds, and in the end it is nothing.

use std::collections::BTreeMap;
use std::time::Duration;

use pointsman_brain::{
    Ask, BookingId, Brain, Cause, Decision, End, Factor, Guard, HealthEvent, Held, IslBounding,
    IslGate, Ladder, Leg, Load, Path, Policy, PrefillLoad, Reading, Role, Rule, Settings, Share,
    Signal, Slot, Split, Time, Try, WorkerSpec,
};
use proptest::collection::vec;
use proptest::prelude::*;

use crate::fleets::*;

const SLOTS: u16 = 7;

#[derive(Clone, Debug)]
enum Step {
    Add { slot: u16, role: Role, local: bool, known: bool },
    Remove(u16),
    Drain(u16, bool),
    Observe(u16, HealthEvent),
    Report(u16, f64),
    Pass(u64),
    Arrive { isl: u32, held: u32, sequences: u32, max_new: Option<u32>, session: u64, single: bool },
    PrefillDone(usize),
    FirstToken(usize),
    Progress(usize, u32),
    Settle(usize, End),
    Fail { which: usize, decode: bool, cause: Cause, keep: bool },
}

fn cause() -> impl Strategy<Value = Cause> {
    prop_oneof![
        Just(Cause::Connect),
        Just(Cause::Timeout),
        Just(Cause::Status(500)),
        Just(Cause::Status(400)),
        Just(Cause::Overload(429)),
        Just(Cause::Expired),
        Just(Cause::KvLoad),
    ]
}

fn event() -> impl Strategy<Value = HealthEvent> {
    prop_oneof![
        Just(HealthEvent::Answered),
        cause().prop_map(HealthEvent::Failed),
        Just(HealthEvent::CheckPassed),
        Just(HealthEvent::CheckFailed),
    ]
}

fn step() -> impl Strategy<Value = Step> {
    let role = prop_oneof![Just(Role::Prefill), Just(Role::Decode), Just(Role::Unified)];
    let end = prop_oneof![Just(End::Finished), Just(End::Failed), Just(End::Cancelled)];
    let isl = prop_oneof![0..50_u32, 0..5_000_u32, 0..200_000_u32];
    prop_oneof![
        3 => (0..SLOTS, role, any::<bool>(), any::<bool>())
            .prop_map(|(slot, role, local, known)| Step::Add { slot, role, local, known }),
        1 => (0..SLOTS).prop_map(Step::Remove),
        1 => (0..SLOTS, any::<bool>()).prop_map(|(slot, draining)| Step::Drain(slot, draining)),
        3 => (0..SLOTS, event()).prop_map(|(slot, event)| Step::Observe(slot, event)),
        1 => (0..SLOTS, 0.0..1.2).prop_map(|(slot, usage)| Step::Report(slot, usage)),
        1 => (0..3_000_u64).prop_map(Step::Pass),
        12 => (isl, 0..400_u32, 0..4_u32, proptest::option::of(0..2_000_u32), 0..9_u64, any::<bool>())
            .prop_map(|(isl, held, sequences, max_new, session, single)| Step::Arrive {
                isl, held, sequences, max_new, session, single,
            }),
        3 => (0..64_usize).prop_map(Step::PrefillDone),
        3 => (0..64_usize).prop_map(Step::FirstToken),
        2 => (0..64_usize, 0..4_000_u32).prop_map(|(which, tokens)| Step::Progress(which, tokens)),
        5 => (0..64_usize, end).prop_map(|(which, end)| Step::Settle(which, end)),
        4 => (0..64_usize, any::<bool>(), cause(), any::<bool>())
            .prop_map(|(which, decode, cause, keep)| Step::Fail { which, decode, cause, keep }),
    ]
}

fn settings(seed: u64) -> Settings {
    let load = PrefillLoad { prefill_busy_threshold: Factor::ONE };
    let shadow = vec![Policy { rule: Rule::AlwaysLocal, ..Policy::default() }];
    let mut settings =
        Settings { shadow, seed, max_sessions: 4, retries: 1, ..Settings::default() };
    settings.policy.rule = Rule::IslOrLoad(IslBounding::default(), load);
    match seed % 4 {
        0 => settings.cost.temperature = Factor::ONE,
        1 => settings.isl_gate = IslGate::UnifiedUpTo(512),
        2 => settings.policy.rule = Rule::AlwaysLocal,
        _ => {}
    }
    settings
}

/// One booking as the reference holds it: every number is written out.
struct Booked {
    id: BookingId,
    decision: Decision,
    /// The workers' generations when it was booked.
    prefill_life: u64,
    decode_life: u64,
    prefill_pending: bool,
    sequences: u64,
    prompt_blocks: u64,
    output_tokens: u64,
    ask: (u32, u32, u32, Option<u32>),
    tries: Ladder,
}

struct World {
    brain: Brain,
    now: Time,
    lives: BTreeMap<u16, (u64, WorkerSpec)>,
    next_life: u64,
    booked: Vec<Booked>,
    settled: Vec<BookingId>,
}

impl World {
    fn new(seed: u64) -> World {
        let brain = Brain::new(settings(seed));
        World {
            brain,
            now: NOW,
            lives: BTreeMap::new(),
            next_life: 0,
            booked: Vec::new(),
            settled: Vec::new(),
        }
    }

    fn apply(&mut self, step: &Step) {
        match *step {
            Step::Add { slot, role, local, known } => self.add(slot, role, local, known),
            Step::Remove(slot) => {
                self.brain.remove(Slot(slot));
                self.lives.remove(&slot);
            }
            Step::Drain(slot, draining) => self.brain.drain(Slot(slot), draining),
            Step::Observe(slot, event) => {
                self.brain.observe(Slot(slot), event, self.now);
            }
            Step::Report(slot, usage) => {
                let kv_usage = Share::clamped(usage);
                self.brain.reading(
                    Slot(slot),
                    Reading { kv_usage, ..Reading::default() },
                    self.now,
                );
            }
            Step::Pass(millis) => self.now = self.now.after(Duration::from_millis(millis)),
            Step::Arrive { isl, held, sequences, max_new, session, single } => {
                let tries = Ladder::new(self.brain.settings());
                self.arrive((isl, held, sequences, max_new), Some(session), single, tries);
            }
            Step::PrefillDone(which) => self.prefill_over(which, true),
            Step::FirstToken(which) => self.prefill_over(which, false),
            Step::Progress(which, tokens) => self.progress(which, tokens),
            Step::Settle(which, end) => {
                self.settle(which, end);
            }
            Step::Fail { which, decode, cause, keep } => self.fail(which, decode, cause, keep),
        }
    }

    fn add(&mut self, slot: u16, role: Role, local_prefill: bool, known: bool) {
        let spec = WorkerSpec {
            local_prefill,
            capacity_blocks: known.then_some(3_000),
            max_num_batched_tokens: known.then_some(2_048),
            ..worker(role)
        };
        self.brain.add(Slot(slot), spec, self.now);
        self.next_life += 1;
        self.lives.insert(slot, (self.next_life, spec));
    }

    fn held(held: u32) -> Vec<Held> {
        (0..u32::from(SLOTS) - 1)
            .map(|slot| Held { device: held * slot / 3, host: held / 7, disk: held / 9 })
            .collect()
    }

    fn arrive(
        &mut self,
        numbers: (u32, u32, u32, Option<u32>),
        session: Option<u64>,
        single: bool,
        tries: Ladder,
    ) {
        let (isl, held, sequences, max_new_tokens) = numbers;
        let held = World::held(held);
        let ask = Ask {
            sequences,
            max_new_tokens,
            session,
            split: if single { Split::Yes } else { Split::No },
            ..Ask::new(isl, &held, &tries)
        };
        let before: BTreeMap<u16, Load> =
            self.brain.workers().map(|worker| (worker.slot.0, worker.load)).collect();
        let explained = self.brain.explain(&ask, self.now);
        let decision = match self.brain.decide(&ask, self.now) {
            Ok(decision) => decision,
            Err(no_path) => {
                assert_eq!(explained.unwrap_err(), no_path);
                return;
            }
        };
        let explained = explained.unwrap();
        assert_eq!(explained.decode, decision.decode);
        assert_eq!(explained.prefill, decision.prefill);
        self.check(&decision, &tries, single, &before);
        let device = held.get(usize::from(decision.decode.0)).map_or(0, |held| held.device);
        let booked = Booked {
            id: decision.booking,
            decision,
            prefill_life: decision.prefill.map_or(0, |slot| self.lives[&slot.0].0),
            decode_life: self.lives[&decision.decode.0].0,
            prefill_pending: !decision.prefilled,
            sequences: u64::from(sequences.max(1)),
            prompt_blocks: u64::from(isl.div_ceil(BLOCK).saturating_sub(device)),
            output_tokens: u64::from(max_new_tokens.unwrap_or(u32::MAX).min(256)),
            ask: numbers,
            tries,
        };
        self.booked.push(booked);
    }

    /// What must be true of any decision.
    fn check(&self, d: &Decision, tries: &Ladder, single: bool, before: &BTreeMap<u16, Load>) {
        let spec = self.lives[&d.decode.0].1;
        // A worker that could not fetch KV is not given any again, but may do all else.
        let failed = |slot: Slot, fetches: bool| {
            let handoff = |tried: &Try| (tried.leg, tried.cause) == (Leg::Decode, Cause::KvLoad);
            tries.causes().iter().any(|tried| tried.slot == slot && (fetches || !handoff(tried)))
        };
        assert!(!failed(d.decode, d.path == Path::Remote));
        match d.path {
            Path::Local => assert!(spec.can_prefill_locally()),
            Path::Remote => {
                let prefill = d.prefill.unwrap();
                assert!(single && !failed(prefill, false));
                assert_eq!(self.lives[&prefill.0].1.role, Role::Prefill);
                assert_eq!(spec.role, Role::Decode);
            }
        }
        if d.path == Path::Local && !d.fallbacks.contains(Signal::Guards) {
            assert!(d.vetoes.is_empty());
            let chunk = spec.max_num_batched_tokens.unwrap_or(2048);
            let in_flight = before[&d.decode.0].prefill_tokens + u64::from(d.prefill_tokens);
            assert!(in_flight <= 4 * u64::from(chunk), "the budget guard was passed");
            let blocks = self.brain.workers().find(|worker| worker.slot == d.decode).unwrap();
            if let Some(capacity) = spec.capacity_blocks {
                let share = blocks.load.kv_blocks as f64 / capacity as f64;
                assert!(share <= 0.9 + 1e-9, "the KV guard was passed");
            }
        } else if d.path == Path::Local {
            assert!(!d.vetoes.is_empty() && !d.vetoes.contains(Guard::Capability));
        }
    }

    /// The id of a live booking, of a settled one, or nothing.
    fn pick(&self, which: usize) -> Option<BookingId> {
        let ids: Vec<_> = self
            .booked
            .iter()
            .map(|booked| booked.id)
            .chain(self.settled.iter().copied())
            .collect();
        (!ids.is_empty()).then(|| ids[which % ids.len()])
    }

    fn live(&mut self, id: BookingId) -> Option<&mut Booked> {
        self.booked.iter_mut().find(|booked| booked.id == id)
    }

    fn prefill_over(&mut self, which: usize, by_prefill_leg: bool) {
        let Some(id) = self.pick(which) else { return };
        if by_prefill_leg {
            self.brain.prefill_done(id, self.now);
        } else {
            self.brain.first_token(id, self.now);
        }
        if let Some(booked) = self.live(id)
            && (booked.decision.path == Path::Remote || !by_prefill_leg)
        {
            booked.prefill_pending = false;
        }
    }

    fn progress(&mut self, which: usize, tokens: u32) {
        let Some(id) = self.pick(which) else { return };
        self.brain.progress(id, tokens, self.now);
        if let Some(booked) = self.live(id) {
            booked.output_tokens = booked.output_tokens.max(u64::from(tokens));
        }
    }

    fn settle(&mut self, which: usize, end: End) -> Option<Booked> {
        let id = self.pick(which)?;
        let place = self.booked.iter().position(|booked| booked.id == id);
        let settled = self.brain.settle(id, end, self.now);
        assert_eq!(settled.is_some(), place.is_some(), "settling counts once");
        let booked = self.booked.remove(place?);
        let settled = settled?;
        assert_eq!(settled.decode, booked.decision.decode);
        assert_eq!(settled.path, booked.decision.path);
        assert_eq!(settled.end, end);
        self.settled.push(id);
        Some(booked)
    }

    /// A leg fails before the first byte: settle, climb the ladder, ask again.
    fn fail(&mut self, which: usize, decode: bool, cause: Cause, keep: bool) {
        let Some(mut booked) = self.settle(which, End::Failed) else { return };
        let (leg, slot) = match booked.decision.prefill {
            Some(slot) if !decode => (Leg::Prefill, slot),
            Some(_) => (Leg::Decode, booked.decision.decode),
            None => (Leg::Local, booked.decision.decode),
        };
        self.brain.observe(slot, HealthEvent::Failed(cause), self.now);
        let next = booked.tries.failed(leg, slot, cause);
        if next != pointsman_brain::Next::Replan {
            return;
        }
        if let (true, Leg::Decode, Some(prefill)) = (keep, leg, booked.decision.prefill) {
            booked.tries.keep_handoff(prefill);
        }
        self.arrive(booked.ask, None, true, booked.tries);
    }

    /// The sums, from nothing.
    fn expected(&self) -> BTreeMap<u16, Load> {
        let mut loads: BTreeMap<u16, Load> =
            self.lives.keys().map(|slot| (*slot, Load::default())).collect();
        let alive = |slot: Slot, life| self.lives.get(&slot.0).is_some_and(|(now, _)| *now == life);
        for booked in &self.booked {
            let decision = &booked.decision;
            let tokens =
                if booked.prefill_pending { u64::from(decision.prefill_tokens) } else { 0 };
            if let Some(prefill) = decision.prefill
                && alive(prefill, booked.prefill_life)
            {
                let load = loads.get_mut(&prefill.0).unwrap();
                load.prefill_tokens += tokens;
                load.active += u32::from(booked.prefill_pending);
            }
            if alive(decision.decode, booked.decode_life) {
                let load = loads.get_mut(&decision.decode.0).unwrap();
                load.active += 1;
                let output = booked.output_tokens.div_ceil(u64::from(BLOCK));
                load.kv_blocks += booked.prompt_blocks + booked.sequences * output;
                if decision.prefill.is_none() {
                    load.prefill_tokens += tokens;
                }
            }
        }
        loads
    }

    fn verify(&self) {
        self.brain.audit().unwrap();
        assert_eq!(self.brain.live_bookings(), self.booked.len());
        let loads: BTreeMap<u16, Load> =
            self.brain.workers().map(|worker| (worker.slot.0, worker.load)).collect();
        assert_eq!(loads, self.expected());
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    #[test]
    fn what_is_reserved_is_the_sum_over_live_bookings(
        seed in any::<u64>(),
        roles in vec((any::<bool>(), any::<bool>()), 7),
        steps in vec(step(), 1..80),
    ) {
        let mut world = World::new(seed);
        for (slot, (local, known)) in (0..SLOTS).zip(roles) {
            let role = [Role::Prefill, Role::Decode, Role::Unified][usize::from(slot) * 4 % 10 % 3];
            world.add(slot, role, local, known);
        }
        for step in steps {
            world.apply(&step);
            world.verify();
        }
        while !world.booked.is_empty() {
            world.settle(0, End::Cancelled);
            world.verify();
        }
        for worker in world.brain.workers() {
            prop_assert_eq!(worker.load, Load::default());
        }
    }
}

#[test]
fn a_removed_worker_takes_its_part_of_a_booking_with_it() {
    let mut brain = brain(with_rule(Rule::AlwaysRemote), &[prefill(), decode()]);
    let decision = decided(&mut brain, 1000, &[]);
    brain.remove(Slot(0));
    assert!(brain.audit().is_ok());
    brain.add(Slot(0), prefill(), NOW);
    // What was booked on the worker before is not on this one, and does not come off it.
    let again = decided(&mut brain, 500, &[]);
    brain.prefill_done(decision.booking, NOW);
    assert_eq!(brain.workers().next().unwrap().load.prefill_tokens, 500);
    assert!(brain.settle(decision.booking, End::Finished, NOW).is_some());
    assert_eq!(brain.workers().next().unwrap().load.prefill_tokens, 500);
    brain.settle(again.booking, End::Finished, NOW);
    assert!(brain.workers().all(|worker| worker.load == Load::default()));
    assert!(brain.audit().is_ok());
}

#[test]
fn each_part_of_a_booking_is_released_once() {
    let mut brain = brain(with_rule(Rule::AlwaysRemote), &[prefill(), decode()]);
    let kept = decided(&mut brain, 100, &[]);
    let decision = decided(&mut brain, 1000, &[]);
    for _ in 0..2 {
        brain.prefill_done(decision.booking, NOW);
        brain.first_token(decision.booking, NOW);
        let [p, d] = loads(&brain);
        assert_eq!((p.prefill_tokens, p.active), (100, 1));
        assert_eq!(d.active, 2);
    }
    assert!(brain.settle(decision.booking, End::Finished, NOW).is_some());
    assert!(brain.settle(decision.booking, End::Failed, NOW).is_none());
    brain.first_token(decision.booking, NOW);
    brain.progress(decision.booking, 100_000, NOW);
    let [p, d] = loads(&brain);
    assert_eq!((p.prefill_tokens, p.active, d.kv_blocks, d.active), (100, 1, 7 + 16, 1));
    brain.settle(kept.booking, End::Finished, NOW);
    assert_eq!(loads(&brain), [Load::default(); 2]);
    assert!(brain.audit().is_ok());
}

#[test]
fn the_prefill_leg_of_a_local_path_is_over_with_the_first_token_only() {
    let mut brain = brain(with_rule(Rule::AlwaysLocal), &[prefill(), decode()]);
    let decision = decided(&mut brain, 1000, &[]);
    brain.prefill_done(decision.booking, NOW);
    assert_eq!(loads(&brain)[1].prefill_tokens, 1000);
    brain.first_token(decision.booking, NOW);
    assert_eq!(loads(&brain)[1].prefill_tokens, 0);
}

#[test]
fn an_id_is_never_given_twice() {
    let mut brain = brain(with_rule(Rule::AlwaysLocal), &[unified()]);
    let first = decided(&mut brain, 1000, &[]);
    brain.settle(first.booking, End::Finished, NOW);
    let second = decided(&mut brain, 1000, &[]);
    assert_ne!(first.booking, second.booking);
    assert!(brain.settle(first.booking, End::Finished, NOW).is_none());
    assert_eq!(brain.live_bookings(), 1);
}

#[test]
fn an_id_of_another_brain_does_no_harm() {
    let mut busy = brain(with_rule(Rule::AlwaysLocal), &[unified()]);
    let foreign = (0..5).map(|_| decided(&mut busy, 10, &[]).booking).last().unwrap();
    let mut brain = brain(with_rule(Rule::AlwaysLocal), &[unified()]);
    decided(&mut brain, 1000, &[]);
    brain.first_token(foreign, NOW);
    brain.prefill_done(foreign, NOW);
    brain.progress(foreign, 5, NOW);
    assert!(brain.settle(foreign, End::Finished, NOW).is_none());
    assert!(brain.audit().is_ok());
    assert_eq!(brain.live_bookings(), 1);
}

#[test]
fn settling_tells_how_long_the_booking_was_held() {
    let mut brain = brain(with_rule(Rule::AlwaysRemote), &[prefill(), decode()]);
    let decision = decided(&mut brain, 10, &[]);
    let settled = brain.settle(decision.booking, End::Finished, Time::from_secs(3)).unwrap();
    assert_eq!(settled.held_for, Duration::from_secs(3));
    assert_eq!((settled.prefill, settled.decode), (Some(Slot(0)), Slot(1)));
}

fn loads(brain: &Brain) -> [Load; 2] {
    let loads: Vec<Load> = brain.workers().map(|worker| worker.load).collect();
    loads.try_into().unwrap()
}
