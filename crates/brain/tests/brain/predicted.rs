//! `predicted` from outside: what it chooses, what it learns, and what it survives.

use std::time::Duration;

use pointsman_brain::{
    Ask, Bounds, Brain, Decision, DecodeTotals, End, Path, Policy, Predicted, PrefillTotals,
    Profile, Reading, Role, Rule, Score, Settings, Share, ShortPrompt, Slo, Slot, Time, WorkerSpec,
};

use crate::fleets::*;

pub(crate) fn predicted() -> Settings {
    // Without a cold policy, J alone decides from the start.
    let settings = with_rule(Rule::Predicted);
    Settings { predicted: Predicted { cold: Rule::Predicted, ..Predicted::default() }, ..settings }
}

fn with_slo(ttft_ms: u64, itl_ms: u64) -> Settings {
    let slo = Slo {
        ttft: Some(Duration::from_millis(ttft_ms)),
        itl: Some(Duration::from_millis(itl_ms)),
    };
    Settings { slo, ..predicted() }
}

pub(crate) fn at(seconds: f64) -> Time {
    Time((seconds * 1e9) as u64)
}

fn ask_at(brain: &mut Brain, isl: u32, now: Time) -> Decision {
    let tries = fresh();
    brain.decide(&Ask::new(isl, &[], &tries), now).unwrap()
}

/// Puts this many sequences on a decode worker that has `wish` of its own.
fn run_on(brain: &mut Brain, path: Path, sequences: usize, isl: u32) {
    for _ in 0..sequences {
        let tries = fresh();
        let ask = Ask { wish: Some(path), ..Ask::new(isl, &[], &tries) };
        let decision = brain.decide(&ask, NOW).unwrap();
        brain.prefill_done(decision.booking, NOW);
        brain.first_token(decision.booking, NOW);
    }
}

#[test]
fn an_idle_worker_computes_locally_what_would_have_to_be_moved() {
    let mut brain = brain(predicted(), &[prefill(), decode()]);
    let decision = ask_at(&mut brain, 4_000, NOW);
    assert_eq!((decision.path, decision.why.as_str()), (Path::Local, "predicted_local"));
    let (local, remote) = (decision.scores.local.unwrap(), decision.scores.remote.unwrap());
    // Without SLOs J is TTFT, and nobody runs that could be harmed.
    assert_eq!((local.j, remote.j), (local.ttft_seconds, remote.ttft_seconds));
    assert_eq!(decision.ttft_seconds, local.ttft_seconds);
}

#[test]
fn a_worker_that_streams_to_many_is_spared_a_long_prompt() {
    let mut brain = brain(
        Settings { allow_path_override: true, ..with_slo(4_000, 40) },
        &[prefill(), decode()],
    );
    run_on(&mut brain, Path::Remote, 40, 3_000);
    let long = ask_at(&mut brain, 6_000, at(1.0));
    assert_eq!((long.path, long.why.as_str()), (Path::Remote, "predicted_remote"));
    let (local, remote) = (long.scores.local.unwrap(), long.scores.remote.unwrap());
    assert!(local.ttft_seconds < remote.ttft_seconds + 0.5, "not for its own sake");
    assert!(local.j > remote.j);
}

#[test]
fn a_queue_on_the_prefill_worker_sends_prompts_to_the_decode_worker() {
    let mut brain = brain(
        Settings { allow_path_override: true, ..with_slo(2_000, 50) },
        &[prefill(), decode()],
    );
    for _ in 0..4 {
        let tries = fresh();
        let ask = Ask { wish: Some(Path::Remote), ..Ask::new(20_000, &[], &tries) };
        assert_eq!(brain.decide(&ask, NOW).unwrap().path, Path::Remote);
    }
    let decision = ask_at(&mut brain, 2_000, NOW);
    assert_eq!(decision.path, Path::Local);
    assert!(decision.scores.remote.unwrap().ttft_seconds > 4.0, "{:?}", decision.scores);
}

#[test]
fn a_queue_is_worked_off_as_time_passes() {
    let brain = {
        let mut brain = brain(with_rule(Rule::AlwaysRemote), &[prefill(), decode()]);
        ask_at(&mut brain, 20_000, NOW);
        brain
    };
    let wait = |now| brain.calibration(now).workers[0].queue_seconds;
    let whole = wait(NOW);
    assert!((wait(at(0.5)) - (whole - 0.5)).abs() < 1e-9);
    assert_eq!(wait(at(1_000.0)), 0.0);
}

#[test]
fn a_burst_spreads_over_workers_that_are_alike() {
    let workers = [prefill(), prefill(), prefill(), decode(), decode(), decode(), decode()];
    let settings = Settings { policy: policy_with_ceiling(1), ..predicted() };
    let mut brain = brain(settings, &workers);
    let mut uses = [0; 7];
    for _ in 0..120 {
        let decision = ask_at(&mut brain, 1_000, NOW);
        uses[usize::from(decision.decode.0)] += 1;
        uses[usize::from(decision.prefill.unwrap().0)] += 1;
    }
    for (slot, uses) in uses.iter().enumerate() {
        let even = if slot < 3 { 40 } else { 30 };
        assert!((even - 8..=even + 8).contains(uses), "worker {slot}: {uses} of {even}");
    }
}

fn policy_with_ceiling(tokens: u32) -> Policy {
    let bounds = Bounds { floor_tokens: 0, ceiling_tokens: Some(tokens) };
    Policy { rule: Rule::Predicted, bounds }
}

#[test]
fn floor_and_ceiling_hold_whatever_is_predicted() {
    let bounds = Bounds { floor_tokens: 100, ceiling_tokens: Some(3_000) };
    let policy = Policy { rule: Rule::Predicted, bounds };
    let mut brain = brain(Settings { policy, ..predicted() }, &[prefill(), decode()]);
    assert_eq!(ask_at(&mut brain, 100, NOW).why.as_str(), "floor");
    assert_eq!(ask_at(&mut brain, 3_000, NOW).why.as_str(), "ceiling");
    assert_eq!(ask_at(&mut brain, 2_000, NOW).why.as_str(), "predicted_local");
}

#[test]
fn a_worker_without_room_for_the_kv_is_out() {
    let full = WorkerSpec { capacity_blocks: Some(100), ..decode() };
    let mut brain = brain(predicted(), &[prefill(), full, decode(), full]);
    for _ in 0..10 {
        // 125 blocks of 16.
        let decision = ask_at(&mut brain, 2_000, NOW);
        assert_eq!(decision.decode, Slot(2));
        brain.settle(decision.booking, End::Finished, NOW);
    }
    brain.reading(Slot(2), Reading { kv_usage: Share::new(1.0), ..Reading::default() }, NOW);
    assert!(brain.decide(&Ask::new(2_000, &[], &fresh()), NOW).is_ok(), "serving beats refusing");
}

#[test]
fn a_guard_takes_a_local_candidate_out_and_says_so() {
    let full = WorkerSpec { capacity_blocks: Some(150), ..decode() };
    let mut brain = brain(predicted(), &[prefill(), full]);
    let decision = ask_at(&mut brain, 2_000, NOW);
    assert_eq!((decision.path, decision.why.as_str()), (Path::Remote, "predicted_remote"));
    assert_eq!(format!("{:?}", decision.vetoes), r#"{"decode_kv"}"#);
    assert_eq!(decision.scores.local, None);
}

#[test]
fn among_unified_workers_the_one_that_answers_first_is_taken() {
    let settings = Settings { allow_path_override: true, ..predicted() };
    let mut brain = brain(settings, &[unified(), unified()]);
    let first = ask_at(&mut brain, 30_000, NOW);
    for _ in 0..3 {
        let decision = ask_at(&mut brain, 100, NOW);
        assert_ne!(decision.decode, first.decode, "it would wait for the long prompt");
        assert_eq!(decision.why.as_str(), "unified");
        brain.settle(decision.booking, End::Cancelled, NOW);
    }
}

#[test]
fn equal_workers_are_drawn_and_the_draws_repeat_with_the_seed() {
    let draws = |seed| -> Vec<u16> {
        let workers = [prefill(), decode(), decode(), decode(), decode()];
        let mut brain = brain(Settings { seed, ..predicted() }, &workers);
        let mut one = || {
            let decision = ask_at(&mut brain, 1_000, NOW);
            brain.settle(decision.booking, End::Cancelled, NOW);
            decision.decode.0
        };
        (0..40).map(|_| one()).collect()
    };
    assert_eq!(draws(1), draws(1));
    assert_ne!(draws(1), draws(2));
    for slot in 1..5 {
        assert!(draws(3).contains(&slot), "worker {slot} is never drawn");
    }
}

#[test]
fn a_session_keeps_its_path_where_the_other_is_hardly_better() {
    let path_of_second = |stickiness: f64, first: Path| {
        let mut settings = Settings { allow_path_override: true, ..predicted() };
        settings.predicted.stickiness = pointsman_brain::Factor::new(stickiness).unwrap();
        let mut brain = brain(settings, &[prefill(), decode()]);
        let tries = fresh();
        let ask = Ask { session: Some(7), ..Ask::new(100, &[], &tries) };
        let turn = brain.decide(&Ask { wish: Some(first), ..ask }, NOW).unwrap();
        brain.settle(turn.booking, End::Finished, NOW);
        brain.decide(&ask, NOW).unwrap().path
    };
    assert_eq!(path_of_second(0.0, Path::Remote), Path::Local);
    assert_eq!(path_of_second(0.03, Path::Remote), Path::Remote);
    assert_eq!(path_of_second(0.03, Path::Local), Path::Local);
}

#[test]
fn close_cases_are_for_the_cold_policy_until_enough_was_measured() {
    let mut settings = predicted();
    settings.predicted.cold = Rule::ShortPrompt(ShortPrompt { short_prefill_tokens: 50 });
    let mut brain = brain(settings, &[prefill(), decode()]);
    assert_eq!(ask_at(&mut brain, 50, NOW).why.as_str(), "short_prompt");
    let close = ask_at(&mut brain, 100, NOW);
    assert_eq!((close.path, close.why.as_str()), (Path::Remote, "long_prompt"));
    assert!(close.scores.cold);
    assert_eq!(ask_at(&mut brain, 4_000, NOW).why.as_str(), "predicted_local", "not close");
}

#[test]
fn a_prompt_that_is_late_either_way_harms_others_less_for_its_own_sake_than_one_that_is_not() {
    // Eight sequences stream from d, and p has much to do: locally the first token comes sooner.
    let path = |ttft_ms: u64| {
        let settings = Settings { allow_path_override: true, ..with_slo(ttft_ms, 40) };
        let mut brain = brain(settings, &[prefill(), decode()]);
        run_on(&mut brain, Path::Remote, 8, 3_000);
        for _ in 0..2 {
            let tries = fresh();
            let ask = Ask { wish: Some(Path::Remote), ..Ask::new(20_000, &[], &tries) };
            brain.decide(&ask, NOW).unwrap();
        }
        let decision = ask_at(&mut brain, 20_000, NOW);
        let (local, remote) = (decision.scores.local.unwrap(), decision.scores.remote.unwrap());
        assert!(local.ttft_seconds < remote.ttft_seconds);
        (local.ttft_seconds, remote.ttft_seconds, decision.path)
    };
    let (local, remote, in_time) = path(2_000);
    assert!(local < 2.0 && remote > 2.0, "{local} {remote}");
    let (_, _, late) = path(500);
    assert_eq!((in_time, late), (Path::Local, Path::Remote));
}

/// J by the page, without anybody running.
fn j(ttft: f64, itl: f64, slo: &Slo, width: f64) -> f64 {
    let s = |x: f64| 1.0 / (1.0 + (-x / width).exp());
    let (t, i) = (slo.ttft.unwrap().as_secs_f64(), slo.itl.unwrap().as_secs_f64());
    let x = ttft / t;
    s(x - 1.0) + 0.3 * (x.min(1.0) + 0.1 * (x - 1.0).max(0.0)) + s(itl / i - 1.0)
}

#[test]
fn the_best_pair_is_the_best_of_all_pairs() {
    let slo = Slo { ttft: Some(Duration::from_millis(900)), itl: Some(Duration::from_millis(25)) };
    for seed in 0..200_u64 {
        let draw =
            |at: u64, below: u64| seed.wrapping_mul(0x9E37_79B9).wrapping_add(at * 7_919) % below;
        let mut workers = vec![prefill(); 4];
        workers.extend([decode(); 4]);
        let policy = policy_with_ceiling(1);
        let mut brain = brain(Settings { policy, slo, ..predicted() }, &workers);
        for load in 0..30 {
            ask_at(&mut brain, 200 + draw(load, 9_000) as u32, NOW);
        }
        let tries = fresh();
        let held: Vec<_> = (0..8).map(|slot| held(16 * draw(100 + slot, 250) as u32)).collect();
        let ask = Ask::new(4_000, &held, &tries);
        let record = brain.explain(&ask, NOW).unwrap();
        let outlooks = |role| record.candidates.iter().filter(move |c| c.role == role);
        let osl = brain.calibration(NOW).expected_osl_tokens;
        let mut best = f64::INFINITY;
        for p in outlooks(Role::Prefill) {
            for d in outlooks(Role::Decode) {
                let ttft = p.outlook.wait + p.outlook.compute + d.outlook.transfer + d.outlook.step;
                best = best.min(j(ttft, d.outlook.step + d.outlook.wait / osl, &slo, 0.3));
            }
        }
        let chosen = record.scores.remote.unwrap();
        assert!(chosen.j <= best * 1.021 && chosen.j >= best * 0.999, "{chosen:?}, best {best}");
    }
}

/// An engine that obeys constants `times` those of the brain's profile, and its clock.
pub(crate) struct Engine {
    pub(crate) truth: Profile,
    pub(crate) chunk: f64,
    pub(crate) now: f64,
    pub(crate) noise: u64,
}

impl Engine {
    pub(crate) fn noisy(&mut self, seconds: f64) -> f64 {
        self.noise = self.noise.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let unit = (self.noise >> 11) as f64 / (1_u64 << 53) as f64;
        seconds * (1.0 + 0.05 * 3.46 * (unit - 0.5))
    }

    pub(crate) fn prefill(&mut self, u: f64) -> f64 {
        let Profile { k0, a1, a2, .. } = self.truth;
        let seconds = (u / self.chunk).ceil() * k0 + a1 * u + a2 * u * u / 2.0;
        self.noisy(seconds)
    }

    pub(crate) fn step(&mut self, sequences: f64, context: f64) -> f64 {
        let Profile { c0, c1, c2, .. } = self.truth;
        self.noisy(c0 + c1 * sequences + c2 * context)
    }

    /// Serves one request by the path wished for; its decision, and the ratio of TTFTs.
    fn serve(&mut self, brain: &mut Brain, isl: u32, path: Path) -> f64 {
        let tries = fresh();
        let ask = Ask { wish: Some(path), ..Ask::new(isl, &[], &tries) };
        let decision = brain.decide(&ask, at(self.now)).unwrap();
        self.now += self.prefill(f64::from(isl));
        if path == Path::Remote {
            brain.prefill_done(decision.booking, at(self.now));
            let (hop, busy) = self.truth.transfer_time(isl);
            self.now += self.noisy(hop + busy) + self.step(1.0, f64::from(isl));
        }
        let first = brain.first_token(decision.booking, at(self.now)).unwrap();
        for tokens in 1..60 {
            self.now += self.step(1.0, f64::from(isl + tokens));
            brain.progress(decision.booking, tokens, at(self.now));
        }
        brain.settle(decision.booking, End::Finished, at(self.now));
        self.now += 0.01;
        first.ratio()
    }
}

#[test]
fn priors_three_times_off_lead_to_predictions_within_ten_percent() {
    for off in [3.0, 1.0, 1.0 / 3.0] {
        let spec = |spec: WorkerSpec| WorkerSpec { max_num_batched_tokens: Some(8192), ..spec };
        let settings = Settings { allow_path_override: true, ..predicted() };
        let mut brain = brain(settings, &[spec(prefill()), spec(decode())]);
        let truth = Profile::default().faster(off);
        let mut engine = Engine { truth, chunk: 8192.0, now: 0.0, noise: 3 };
        assert!(brain.calibration(NOW).cold);
        let mut worst = 0.0_f64;
        for turn in 0..160_u32 {
            let path = if turn % 2 == 0 { Path::Remote } else { Path::Local };
            let ratio = engine.serve(&mut brain, 200 + turn * 7_919 % 12_000, path);
            if turn >= 100 {
                worst = worst.max((ratio - 1.0).abs());
            }
        }
        assert!(worst < 0.25, "{off}: {worst}, noise reaches 9 % in each part");
        let calibration = brain.calibration(at(engine.now));
        assert!(!calibration.cold);
        assert_eq!(calibration.expected_osl_tokens.round(), 59.0);
        for worker in &calibration.workers {
            for error in worker.ttft_errors.iter().filter(|error| error.samples > 0) {
                assert!(error.relative_error < 0.1, "{off}: {error:?}");
            }
        }
    }
}

#[test]
fn a_slow_worker_is_told_from_its_pool() {
    let settings = Settings { allow_path_override: true, ..predicted() };
    let mut brain = brain(settings, &[prefill(), prefill(), decode()]);
    let mut now = 0.0;
    for turn in 0..600 {
        let tries = fresh();
        let ask = Ask { wish: Some(Path::Remote), ..Ask::new(2_000, &[], &tries) };
        let decision = brain.decide(&ask, at(now)).unwrap();
        let slow = if decision.prefill == Some(Slot(1)) { 1.5 } else { 1.0 };
        now += 0.1 * slow + 0.001 * f64::from(turn % 7);
        brain.prefill_done(decision.booking, at(now));
        brain.settle(decision.booking, End::Finished, at(now));
        now += 0.01;
    }
    let workers = brain.calibration(at(now)).workers;
    let ratio = workers[1].prefill_bias / workers[0].prefill_bias;
    if workers[1].prefill_samples < 20 {
        // Being slow it is rarely chosen; that is how it shows.
        assert!(workers[0].prefill_samples > 300, "{workers:?}");
    } else {
        assert!((1.3..1.7).contains(&ratio), "{ratio}");
    }
}

#[test]
fn an_engines_own_counters_correct_a_worker_and_nonsense_does_not() {
    let counters = |seconds: f64, tokens| Reading {
        decode: Some(DecodeTotals { steps: tokens, tokens, seconds, prompt_tokens: None }),
        prefill: Some(PrefillTotals { tokens, seconds, per_prompt: false }),
        waiting_prefill_tokens: Some(tokens),
        ..Reading::default()
    };
    let mut brain = brain(predicted(), &[prefill(), decode()]);
    for (seconds, tokens) in
        [(1.0, 10), (f64::NAN, 20), (f64::INFINITY, 30), (-5.0, 40), (1.0, 3), (2.0, u64::MAX)]
    {
        for slot in 0..2 {
            brain.reading(Slot(slot), counters(seconds, tokens), at(1.0));
        }
    }
    let calibration = brain.calibration(at(2.0));
    assert!(calibration.workers.iter().all(|worker| worker.prefill_bias == 1.0));
    assert!(calibration.workers.iter().all(|worker| worker.queue_seconds.is_finite()));
    // Another router's prompts wait there too.
    brain.reading(
        Slot(0),
        Reading { waiting_prefill_tokens: Some(10_000), ..Reading::default() },
        at(3.0),
    );
    let queue = brain.calibration(at(3.0)).workers[0].queue_seconds;
    assert!((queue - 0.445).abs() < 1e-9, "{queue}");
    assert_eq!(brain.calibration(at(4.0)).workers[0].queue_seconds, 0.0, "worked off meanwhile");
}

#[test]
fn a_worker_is_corrected_by_its_engines_counters_until_they_are_those_of_another_engine() {
    let mut brain = brain(predicted(), &[prefill(), decode(), decode()]);
    let profile = Profile::default();
    // Ten sequences of 1000 tokens, on one worker half as fast as its pool.
    let step = 1.5 * (profile.c0 + profile.c1 * 10.0 + profile.c2 * 10_000.0);
    let told = |second: u64| {
        let steps = second * (0.9 / step) as u64;
        let seconds = steps as f64 * 10.0 * step;
        let prompt_tokens = Some(77);
        Reading {
            decode: Some(DecodeTotals { steps, tokens: steps * 10, seconds, prompt_tokens }),
            context_tokens: Some(10_000),
            ..Reading::default()
        }
    };
    for second in 1..=60 {
        brain.reading(Slot(1), told(second), Time::from_secs(second));
    }
    let workers = brain.calibration(at(60.0)).workers;
    let [slow, other] = [&workers[1], &workers[2]];
    assert!((slow.decode_bias - 1.5).abs() < 0.05, "{slow:?}");
    assert_eq!((slow.decode_samples, slow.decode_samples_of_engine), (59, 59));
    assert_eq!((other.decode_bias, other.decode_samples_of_engine), (1.0, 0));
    // The engine begins anew, and then its counters jump.
    for (second, of) in [(61, 1), (62, 3000)] {
        brain.reading(Slot(1), told(of), Time::from_secs(second));
    }
    assert_eq!(brain.calibration(at(62.0)).workers[1], *slow);
}

#[test]
fn what_was_learned_outlives_the_brain_and_foreign_state_changes_nothing() {
    let fleet = [prefill(), decode()];
    let settings = || Settings { allow_path_override: true, ..predicted() };
    let mut first = brain(settings(), &fleet);
    let truth = Profile::default().faster(0.5);
    let mut engine = Engine { truth, chunk: 2048.0, now: 0.0, noise: 5 };
    for turn in 0..80_u32 {
        let path = if turn % 2 == 0 { Path::Remote } else { Path::Local };
        engine.serve(&mut first, 500 + turn * 613 % 3_000, path);
    }
    let kept = serde_json::to_string(&first.learned()).unwrap();

    let mut second = brain(settings(), &fleet);
    second.restore(&serde_json::from_str(&kept).unwrap()).unwrap();
    let constants = |brain: &Brain| brain.calibration(NOW).constants;
    for (restored, learned) in constants(&second).iter().zip(constants(&first)) {
        assert!((restored.value / learned.value - 1.0).abs() < 1e-9, "{restored:?}");
        assert_eq!(restored.samples, learned.samples);
    }
    assert!(!second.calibration(NOW).cold);

    let other = Settings { profile: Profile::named("qwen3-32b").unwrap(), ..settings() };
    let mut third = brain(other, &fleet);
    let before = constants(&third);
    let refused = third.restore(&serde_json::from_str(&kept).unwrap()).unwrap_err();
    assert_eq!(refused.to_string(), "it was learned from other constants than those configured");
    let broken = kept.replacen("\"sigma\":", "\"sigma\":-", 1);
    assert!(second.restore(&serde_json::from_str(&broken).unwrap()).is_err());
    assert_eq!(constants(&third), before);
}

fn finite(score: Option<Score>) -> bool {
    score.is_none_or(|s| s.j.is_finite() && s.ttft_seconds.is_finite() && s.itl_seconds.is_finite())
}

#[test]
fn events_that_are_missing_late_twice_or_before_their_time_do_no_harm() {
    let settings = Settings {
        policy: Policy { rule: Rule::Predicted, ..Policy::default() },
        ..with_slo(500, 30)
    };
    let mut brain = brain(settings, &[prefill(), prefill(), decode(), decode(), unified()]);
    let mut live = Vec::new();
    let mut state = 1_u64;
    let mut draw = |below: u64| {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % below
    };
    for step in 0..30_000_u64 {
        // The clock jumps, stands and runs backwards.
        let now = Time(step * 1_000_000 + draw(5) * 3_000_000_000);
        match draw(12) {
            0..3 => {
                let isl = [0, 1, 300, 5_000, u32::MAX][draw(5) as usize];
                let tries = fresh();
                let ask = Ask {
                    streams: draw(3) > 0,
                    sequences: draw(3) as u32,
                    session: Some(draw(9)),
                    ..Ask::new(isl, &[], &tries)
                };
                if let Ok(decision) = brain.decide(&ask, now) {
                    assert!(finite(decision.scores.local) && finite(decision.scores.remote));
                    assert!(decision.ttft_seconds.is_finite() && decision.ttft_seconds >= 0.0);
                    live.push(decision.booking);
                }
            }
            event if !live.is_empty() => {
                let at = draw(live.len() as u64) as usize;
                let booking = live[at];
                match event {
                    3 | 4 => brain.prefill_done(booking, now),
                    5 | 6 => {
                        brain.first_token(booking, now);
                    }
                    7 | 8 => brain.progress(booking, [0, 5, 40, u32::MAX][draw(4) as usize], now),
                    9 => brain.remove(Slot(draw(5) as u16)),
                    _ => {
                        let end = [End::Finished, End::Failed, End::Cancelled][draw(3) as usize];
                        brain.settle(booking, end, now);
                        if draw(2) == 0 {
                            live.swap_remove(at);
                        }
                    }
                }
            }
            _ => {}
        }
        if step % 50 == 0 {
            let specs = [prefill(), prefill(), decode(), decode(), unified()];
            let there: Vec<u16> = brain.workers().map(|worker| worker.slot.0).collect();
            for (slot, spec) in (0..).zip(specs).filter(|(slot, _)| !there.contains(slot)) {
                brain.add(Slot(slot), spec, now);
            }
        }
    }
    let over = Time(u64::MAX);
    for booking in live {
        brain.settle(booking, End::Cancelled, over);
    }
    brain.audit().unwrap();
    let calibration = brain.calibration(over);
    for constant in &calibration.constants {
        assert!(constant.value.is_finite() && constant.value > 0.0, "{constant:?}");
        assert!(constant.deviation.is_finite(), "{constant:?}");
        assert!((0.0099..=100.1).contains(&(constant.value / constant.prior)), "{constant:?}");
    }
    for worker in &calibration.workers {
        assert_eq!((worker.queued_prompts, worker.running), (0, 0), "{worker:?}");
        assert!(worker.prefill_bias.is_finite() && worker.decode_bias.is_finite());
        assert_eq!(worker.queue_seconds, 0.0);
    }
}

#[test]
fn a_request_may_bring_slos_of_its_own() {
    let settings = Settings { allow_path_override: true, ..with_slo(2_000, 30) };
    let mut brain = brain(settings, &[prefill(), decode()]);
    run_on(&mut brain, Path::Remote, 30, 2_000);
    let tries = fresh();
    let scores = |slo| {
        let ask = Ask { slo, ..Ask::new(3_000, &[], &tries) };
        let record = brain.explain(&ask, at(0.5)).unwrap();
        (record.slo, record.scores.remote.unwrap().j)
    };
    let (slo, usual) = scores(Slo::default());
    assert_eq!(slo.ttft, Some(Duration::from_secs(2)));
    let strict = Slo { ttft: Some(Duration::from_millis(100)), itl: None };
    let (slo, harder) = scores(strict);
    assert_eq!((slo.ttft, slo.itl), (strict.ttft, Some(Duration::from_millis(30))));
    assert!(harder > usual);
}

#[test]
fn a_prompt_whose_end_is_not_seen_does_not_block_the_queue_for_ever() {
    let mut brain = brain(with_rule(Rule::AlwaysLocal), &[prefill(), decode()]);
    let tries = fresh();
    for _ in 0..10 {
        let ask = Ask { streams: false, ..Ask::new(4_000, &[], &tries) };
        brain.decide(&ask, NOW).unwrap();
    }
    let wait = |brain: &Brain, now| brain.calibration(now).workers[1].queue_seconds;
    let whole = wait(&brain, NOW);
    assert!(whole > 1.5, "ten prompts of 4000 tokens: {whole}");
    assert_eq!(wait(&brain, at(whole + 0.1)), 0.0);
    assert!((wait(&brain, at(whole / 2.0)) - whole / 2.0).abs() < 0.3);
    // Nor does it where other requests come in between.
    let streaming = ask_at(&mut brain, 100, at(whole / 2.0));
    assert!((wait(&brain, at(whole / 2.0)) - whole / 2.0).abs() < 0.3);
    brain.first_token(streaming.booking, at(whole + 0.1));
    assert_eq!(wait(&brain, at(whole + 0.1)), 0.0);
    let samples: u64 = brain.calibration(at(9.0)).workers.iter().map(|w| w.prefill_samples).sum();
    assert_eq!(samples, 0, "nothing was measured by it");
}
