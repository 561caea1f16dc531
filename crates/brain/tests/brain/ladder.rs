//! The failure ladder: what is tried after a leg failed, and when there is nothing left.

use pointsman_brain::{
    Ask, Brain, Budget, Cause, Decision, End, HealthEvent, IslGate, Ladder, Leg, Next, NoPath,
    Path, Rule, Settings, Signal, Slot, Time, WorkerSpec,
};

use crate::fleets::*;

struct Request {
    brain: Brain,
    tries: Ladder,
}

impl Request {
    fn new(settings: Settings, workers: &[WorkerSpec]) -> Request {
        Request { tries: Ladder::new(&settings), brain: brain(settings, workers) }
    }

    fn plan(&mut self) -> Result<Decision, NoPath> {
        let decision = self.brain.decide(&Ask::new(1000, &[], &self.tries), NOW);
        assert!(self.brain.audit().is_ok());
        decision
    }

    /// Fails a leg of a plan as the server does.
    fn fail(&mut self, decision: &Decision, leg: Leg, cause: Cause) -> Next {
        let slot = if leg == Leg::Prefill { decision.prefill.unwrap() } else { decision.decode };
        self.brain.settle(decision.booking, End::Failed, NOW);
        self.tries.failed(leg, slot, cause)
    }
}

fn remote(retries: u8) -> Settings {
    Settings { retries, ..with_rule(Rule::AlwaysRemote) }
}

#[test]
fn a_failed_prefill_is_tried_on_other_workers_then_locally() {
    for cause in
        [Cause::Connect, Cause::Timeout, Cause::Status(500), Cause::Overload(503), Cause::Cut]
    {
        let mut request =
            Request::new(remote(2), &[prefill(), prefill(), prefill(), prefill(), decode()]);
        let mut seen = Vec::new();
        for why in ["always_remote", "retry_prefill", "retry_prefill"] {
            let decision = request.plan().unwrap();
            assert_eq!((decision.path, decision.why.as_str()), (Path::Remote, why));
            assert!(!seen.contains(&decision.prefill), "never the same one");
            seen.push(decision.prefill);
            assert_eq!(request.fail(&decision, Leg::Prefill, cause), Next::Replan);
        }
        let decision = request.plan().unwrap();
        assert_eq!((decision.path, decision.why.as_str()), (Path::Local, "retry_local"));
        assert_eq!(request.tries.causes().len(), 3);
    }
}

#[test]
fn without_another_prefill_worker_the_local_path_is_next() {
    let mut request = Request::new(remote(2), &[prefill(), decode()]);
    let decision = request.plan().unwrap();
    assert_eq!(request.fail(&decision, Leg::Prefill, Cause::Connect), Next::Replan);
    assert_eq!(request.plan().unwrap().why.as_str(), "retry_local");
}

#[test]
fn without_retries_the_local_path_is_next() {
    let mut request = Request::new(remote(0), &[prefill(), prefill(), decode()]);
    let decision = request.plan().unwrap();
    request.fail(&decision, Leg::Prefill, Cause::Connect);
    assert_eq!(request.plan().unwrap().why.as_str(), "retry_local");
}

#[test]
fn the_guards_hold_for_the_last_resort() {
    let full = WorkerSpec { capacity_blocks: Some(1), ..decode() };
    let mut request = Request::new(remote(0), &[prefill(), full]);
    let decision = request.plan().unwrap();
    request.fail(&decision, Leg::Prefill, Cause::Status(502));
    let refused = request.plan().unwrap_err();
    assert!(matches!(refused, NoPath::Vetoed(_)) && !refused.is_request_fault());
    assert!(refused.to_string().ends_with("decode_kv"), "{refused}");
    assert_eq!(request.tries.causes()[0].to_string(), "prefill on worker 0: answered 502");
}

#[test]
fn the_last_resort_is_a_worker_that_the_guards_allow() {
    let full = WorkerSpec { capacity_blocks: Some(1), ..decode() };
    let mut request = Request::new(remote(0), &[prefill(), full, decode()]);
    let decision = request.plan().unwrap();
    assert_eq!(decision.decode, Slot(1));
    request.fail(&decision, Leg::Prefill, Cause::Connect);
    let decision = request.plan().unwrap();
    assert_eq!((decision.path, decision.decode), (Path::Local, Slot(2)));
}

#[test]
fn a_fleet_that_cannot_prefill_locally_has_no_last_resort() {
    let mut request = Request::new(remote(0), &[prefill(), decode_only()]);
    let decision = request.plan().unwrap();
    request.fail(&decision, Leg::Prefill, Cause::Connect);
    assert!(request.plan().unwrap_err().to_string().ends_with("capability"));
}

#[test]
fn a_required_remote_path_has_no_last_resort() {
    let settings = Settings { require_remote: true, ..remote(0) };
    let mut request = Request::new(settings, &[prefill(), prefill(), decode()]);
    let decision = request.plan().unwrap();
    request.fail(&decision, Leg::Prefill, Cause::Connect);
    assert_eq!(request.plan().unwrap_err(), NoPath::RemoteRequired);
}

#[test]
fn a_client_error_of_any_leg_is_the_clients_answer() {
    for leg in [Leg::Prefill, Leg::Decode, Leg::Local] {
        for status in [400, 401, 404, 413, 422] {
            let mut tries = Ladder::new(&Settings::default());
            assert_eq!(tries.failed(leg, Slot(0), Cause::of_status(status)), Next::Relay);
        }
        let mut tries = Ladder::new(&Settings::default());
        assert_eq!(tries.failed(leg, Slot(0), Cause::of_status(429)), Next::Replan, "load");
    }
}

#[test]
fn kv_that_was_computed_in_vain_is_computed_again_locally() {
    for (leg, cause) in [(Leg::Prefill, Cause::Expired), (Leg::Decode, Cause::KvLoad)] {
        for retries in [0, 2] {
            let mut request = Request::new(remote(retries), &[prefill(), prefill(), decode()]);
            let decision = request.plan().unwrap();
            assert_eq!(request.fail(&decision, leg, cause), Next::Replan);
            let second = request.plan().unwrap();
            // The decode worker can still do it all itself.
            assert_eq!((second.why.as_str(), second.decode), ("retry_local", decision.decode));
        }
    }
}

#[test]
fn where_nothing_goes_local_kv_that_could_not_be_fetched_is_computed_for_another_worker() {
    let fleet = [prefill(), decode_only(), decode_only(), decode_only()];
    let mut request = Request::new(remote(1), &fleet);
    let first = request.plan().unwrap();
    assert_eq!(request.fail(&first, Leg::Decode, Cause::KvLoad), Next::Replan);
    let second = request.plan().unwrap();
    assert_eq!((second.path, second.prefill), (Path::Remote, first.prefill));
    assert_ne!(second.decode, first.decode);
    // No more often than retries allow.
    assert_eq!(request.fail(&second, Leg::Decode, Cause::KvLoad), Next::Replan);
    assert!(request.plan().unwrap_err().to_string().ends_with("capability"));
}

#[test]
fn a_worker_that_fails_both_ways_leaves_the_local_path_to_another() {
    let mut request = Request::new(remote(2), &[prefill(), decode(), decode()]);
    let first = request.plan().unwrap();
    request.fail(&first, Leg::Decode, Cause::KvLoad);
    let second = request.plan().unwrap();
    assert_eq!((second.path, second.decode), (Path::Local, first.decode));
    assert_eq!(request.fail(&second, Leg::Local, Cause::Status(500)), Next::Replan);
    let third = request.plan().unwrap();
    assert_eq!((third.path, third.why.as_str()), (Path::Local, "retry_local"));
    assert_ne!(third.decode, first.decode);
}

#[test]
fn after_a_failed_decode_leg_the_prompt_is_computed_locally_without_that_worker() {
    let mut request = Request::new(remote(2), &[prefill(), decode(), decode(), decode()]);
    let first = request.plan().unwrap();
    assert_eq!(request.fail(&first, Leg::Decode, Cause::Cut), Next::Replan);
    let second = request.plan().unwrap();
    assert_eq!((second.path, second.why.as_str()), (Path::Local, "retry_local"));
    assert_ne!(second.decode, first.decode);
    assert_eq!(request.fail(&second, Leg::Local, Cause::Connect), Next::Replan);
    let third = request.plan().unwrap();
    assert_eq!(third.path, Path::Local);
    assert!(![first.decode, second.decode].contains(&third.decode));
    assert_eq!(request.fail(&third, Leg::Local, Cause::Connect), Next::GiveUp);
}

#[test]
fn where_nothing_goes_local_a_failed_decode_leg_is_planned_as_a_fresh_request() {
    let mut request = Request::new(remote(2), &[prefill(), decode_only(), decode_only()]);
    let first = request.plan().unwrap();
    assert_eq!(request.fail(&first, Leg::Decode, Cause::Cut), Next::Replan);
    let second = request.plan().unwrap();
    assert_eq!((second.path, second.why.as_str()), (Path::Remote, "always_remote"));
    assert_ne!(second.decode, first.decode);
    assert_eq!((second.prefill, second.prefilled), (first.prefill, false));
}

#[test]
fn a_failed_local_leg_is_planned_again_without_that_worker() {
    let settings = Settings { retries: 1, ..with_rule(Rule::AlwaysLocal) };
    let mut request = Request::new(settings, &[prefill(), decode(), decode()]);
    let first = request.plan().unwrap();
    assert_eq!(request.fail(&first, Leg::Local, Cause::Overload(429)), Next::Replan);
    let second = request.plan().unwrap();
    assert_eq!((second.path, second.decode), (Path::Local, Slot(2)));
    assert_eq!(request.fail(&second, Leg::Local, Cause::Connect), Next::GiveUp);
}

#[test]
fn without_another_decode_worker_there_is_no_path() {
    let mut request = Request::new(remote(2), &[prefill(), decode()]);
    let decision = request.plan().unwrap();
    assert_eq!(request.fail(&decision, Leg::Decode, Cause::Connect), Next::Replan);
    assert_eq!(request.plan().unwrap_err(), NoPath::NoDecode);
}

#[test]
fn computed_kv_that_can_still_be_used_goes_to_another_decode_worker() {
    let mut request = Request::new(remote(2), &[prefill(), prefill(), decode(), decode()]);
    let first = request.plan().unwrap();
    request.brain.prefill_done(first.booking, NOW);
    request.fail(&first, Leg::Decode, Cause::Connect);
    request.tries.keep_handoff(first.prefill.unwrap());
    let second = request.plan().unwrap();
    assert_eq!((second.path, second.why.as_str()), (Path::Remote, "retry_decode"));
    assert_eq!((second.prefill, second.prefilled, second.prefill_tokens), (first.prefill, true, 0));
    assert_ne!(second.decode, first.decode);
    // Nothing is booked on the prefill worker: it has done its part.
    let loads: Vec<_> = request.brain.workers().map(|worker| worker.load).collect();
    assert_eq!((loads[0].prefill_tokens, loads[0].active), (0, 0));
    request.brain.first_token(second.booking, NOW);
    request.brain.settle(second.booking, End::Finished, NOW);
    assert!(request.brain.workers().all(|worker| worker.load == Default::default()));
    assert!(request.brain.audit().is_ok());
}

#[test]
fn kept_kv_holds_for_one_failure() {
    let mut request = Request::new(remote(2), &[prefill(), decode(), decode(), decode()]);
    let first = request.plan().unwrap();
    request.fail(&first, Leg::Decode, Cause::Connect);
    request.tries.keep_handoff(first.prefill.unwrap());
    let second = request.plan().unwrap();
    assert!(second.prefilled);
    request.fail(&second, Leg::Decode, Cause::Connect);
    assert!(!request.plan().unwrap().prefilled);
}

#[test]
fn kept_kv_of_a_worker_that_is_gone_is_of_no_use() {
    let mut request = Request::new(remote(2), &[prefill(), prefill(), decode(), decode()]);
    let first = request.plan().unwrap();
    request.fail(&first, Leg::Decode, Cause::Connect);
    request.tries.keep_handoff(first.prefill.unwrap());
    request.brain.remove(first.prefill.unwrap());
    let second = request.plan().unwrap();
    assert_eq!((second.prefilled, second.path), (false, Path::Local));
}

fn trip(brain: &mut Brain, slot: Slot) {
    for _ in 0..3 {
        brain.observe(slot, HealthEvent::Failed(Cause::Connect), NOW);
    }
}

#[test]
fn kept_kv_of_a_worker_that_is_not_well_is_of_no_use() {
    let mut request = Request::new(remote(2), &[prefill(), prefill(), decode(), decode()]);
    let first = request.plan().unwrap();
    request.fail(&first, Leg::Decode, Cause::Connect);
    request.tries.keep_handoff(first.prefill.unwrap());
    trip(&mut request.brain, first.prefill.unwrap());
    let second = request.plan().unwrap();
    assert_eq!((second.prefilled, second.path), (false, Path::Local));
}

#[test]
fn kept_kv_is_no_probe_of_the_worker_that_computed_it() {
    let mut request = Request::new(remote(2), &[prefill(), decode(), decode()]);
    let first = request.plan().unwrap();
    request.fail(&first, Leg::Decode, Cause::Connect);
    request.tries.keep_handoff(first.prefill.unwrap());
    trip(&mut request.brain, first.prefill.unwrap());
    let later = Time::from_secs(1);
    let ask = Ask::new(1000, &[], &request.tries);
    assert!(request.brain.decide(&ask, later).unwrap().prefilled);
    let probe = request.brain.decide(&Ask::new(1000, &[], &fresh()), later).unwrap();
    assert_eq!(probe.prefill, first.prefill);
}

#[test]
fn the_last_resort_passes_the_gate_where_only_unified_workers_are_left() {
    let settings = Settings { isl_gate: IslGate::UnifiedUpTo(512), ..remote(0) };
    let mut request = Request::new(settings, &[prefill(), prefill(), decode_only(), unified()]);
    let first = request.plan().unwrap();
    assert_eq!((first.path, first.decode), (Path::Remote, Slot(2)));
    request.fail(&first, Leg::Prefill, Cause::Connect);
    let second = request.plan().unwrap();
    assert_eq!((second.why.as_str(), second.decode), ("retry_local", Slot(3)));
    assert!(second.fallbacks.contains(Signal::IslGate));
}

#[test]
fn after_prefill_recovered_a_decode_failure_leads_to_the_local_path() {
    let mut request = Request::new(remote(2), &[prefill(), prefill(), decode(), decode()]);
    let first = request.plan().unwrap();
    request.fail(&first, Leg::Prefill, Cause::Connect);
    let second = request.plan().unwrap();
    assert_eq!(second.why.as_str(), "retry_prefill");
    request.fail(&second, Leg::Decode, Cause::Connect);
    let third = request.plan().unwrap();
    assert_eq!((third.why.as_str(), third.path), ("retry_local", Path::Local));
    assert_ne!(third.decode, second.decode);
}

#[test]
fn a_failed_last_resort_may_be_tried_on_another_worker() {
    let mut request = Request::new(remote(1), &[prefill(), decode(), decode(), decode()]);
    let first = request.plan().unwrap();
    request.fail(&first, Leg::Prefill, Cause::Connect);
    let second = request.plan().unwrap();
    assert_eq!(request.fail(&second, Leg::Local, Cause::Connect), Next::Replan);
    let third = request.plan().unwrap();
    assert_eq!((third.path, third.why.as_str()), (Path::Local, "retry_local"));
    assert_ne!(third.decode, second.decode);
    assert_eq!(request.fail(&third, Leg::Local, Cause::Connect), Next::GiveUp);
}

#[test]
fn a_busy_policy_does_not_change_the_order_of_the_ladder() {
    // The policy would go local; after a failed prefill another prefill worker comes first.
    let mut request = Request::new(remote(1), &[prefill(), prefill(), decode()]);
    let first = request.plan().unwrap();
    request.fail(&first, Leg::Prefill, Cause::Connect);
    let mut tries = request.tries.clone();
    let settings = Settings { retries: 1, ..with_rule(Rule::AlwaysLocal) };
    let mut local = brain(settings, &[prefill(), prefill(), decode()]);
    let decision = local.decide(&Ask::new(1000, &[], &tries), NOW).unwrap();
    assert_eq!((decision.path, decision.why.as_str()), (Path::Remote, "retry_prefill"));
    assert_eq!(tries.failed(Leg::Prefill, Slot(1), Cause::Connect), Next::Replan);
    let decision = local.decide(&Ask::new(1000, &[], &tries), NOW).unwrap();
    assert_eq!(decision.why.as_str(), "retry_local");
}

#[test]
fn every_ladder_ends() {
    let guards = pointsman_brain::GuardSettings {
        local_prefill_budget: Budget::Off,
        ..Settings::default().guards
    };
    for retries in [0, 1, 2, 5, 255] {
        let settings = Settings { guards, ..remote(retries) };
        let workers: Vec<_> = [prefill(); 40].into_iter().chain([decode(); 40]).collect();
        for prefer_decode in [false, true] {
            let mut request = Request::new(settings.clone(), &workers);
            let mut failures = 0;
            let end = loop {
                let Ok(decision) = request.plan() else { break None };
                let leg = match decision.path {
                    Path::Local => Leg::Local,
                    Path::Remote if prefer_decode => Leg::Decode,
                    Path::Remote => Leg::Prefill,
                };
                failures += 1;
                if request.fail(&decision, leg, Cause::Connect) == Next::GiveUp {
                    break Some(Next::GiveUp);
                }
            };
            let limit = if prefer_decode { 1 } else { 2 } * (usize::from(retries) + 1);
            assert!(failures <= limit, "{failures} failures with {retries} retries");
            assert!(end.is_some() || failures >= 40);
            assert_eq!(request.brain.live_bookings(), 0);
        }
    }
}
