//! What a failure means for the next request: partners that are let go, breakers and what does not
//! count against them, readiness that can be believed, workers that flap or all go and come back.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod support;

use std::time::{Duration, Instant};

use pointsman_sim::mock::{Action, Connector, Cut, Faults, Leg};
use serde_json::{Value, json};
use support::fleet::{MODEL, completion, prompt, rule, unwatched};
use support::{
    Act, Fleet, Head, Raw, Request, SOON, Spec, Then, decode, prefill, raw, unified, wait_for,
    wait_until, wait_until_within,
};

/// Failed legs in a row that open a breaker.
const FAILURES: u32 = 3;

/// What a partner may take to be let go.
const AT_ONCE: Duration = Duration::from_millis(100);

fn asked(seed: u32) -> Value {
    completion(&prompt(seed, 200), 4, false)
}

async fn send(fleet: &Fleet, seed: u32) -> Head {
    Request::completion(&asked(seed)).send(fleet.addr()).await.0
}

fn status(status: u16) -> Action {
    Action::Status { status, body: None }
}

fn remote(more: Value) -> Value {
    let breaker = json!({"failures": FAILURES, "open": "1h", "open_max": "1h"});
    let mut config = unwatched(json!({
        "routing": {"policy": "always_remote", "breaker": breaker},
        "timeouts": {"prefill": "300ms"},
    }));
    support::merge(&mut config, more);
    config
}

async fn condition(fleet: &Fleet, worker: &str) -> Value {
    fleet.router.worker(worker).await.unwrap()["condition"].clone()
}

// ---- partners --------------------------------------------------------------------------------

fn mooncake(spec: Spec) -> Spec {
    spec.engine(|engine| engine.connector = Connector::Mooncake)
}

/// A decode worker that waits for ever for what is handed over, and computes a prompt that is not.
fn waits_or_computes(request: &str) -> (Vec<u8>, Then) {
    match request.contains("transfer_id") {
        true => (Vec::new(), Then::Hang),
        false => (raw::whole("alone"), Then::Keep),
    }
}

/// A prefill worker that fails: the decode leg is let go, then the decode worker computes the prompt
/// itself. How long after `fails_after` the leg was gone; none where it failed before the leg went out.
async fn lets_go_in(faults: Faults, fails_after: Duration) -> Option<Duration> {
    let joining = json!({"model": {"expect_workers": true}});
    let fleet = Fleet::with([mooncake(prefill("p0"))], remote(joining)).await;
    let raw = Raw::start([Act::Reply(waits_or_computes)]).await;
    let mut worker = raw.worker("d0", "decode");
    support::merge(&mut worker, json!({"kv_connector": "mooncake", "model": MODEL}));
    let (head, body) = Request::post("/v1/pointsman/workers", &worker).send(fleet.addr()).await;
    assert_eq!(head.status, 201, "{body:?}");
    fleet.set_faults("p0", faults);
    let (head, body) = Request::completion(&asked(1)).send(fleet.addr()).await;
    assert_eq!((head.status, head.path(), head.worker()), (200, "local", "d0"), "{body:?}");
    assert_eq!(body.json()["choices"][0]["text"], "alone");
    assert!(fleet.requests("p0").len() <= 1, "a prompt was prefilled again");
    let at = raw.seen().iter().position(|leg| leg.text.contains("transfer_id"))?;
    let left = wait_for("the leg's end", async || raw.seen()[at].left).await;
    Some((left - raw.seen()[at].came).saturating_sub(fails_after))
}

/// A busy machine may be late once, but not each time.
async fn lets_its_partner_go(faults: Faults, fails_after: Duration) {
    let mut took = Vec::new();
    wait_until_within(SOON * 2, async || {
        took.extend(lets_go_in(faults.clone(), fails_after).await);
        match took.iter().min() {
            Some(best) if *best <= AT_ONCE => Ok(()),
            _ => Err(format!("a partner that is not let go within {AT_ONCE:?}: {took:?}")),
        }
    })
    .await;
}

#[tokio::test]
async fn the_partner_of_a_prefill_that_is_refused_is_let_go_at_once() {
    let specs = [mooncake(prefill("p0")), mooncake(decode("d0"))];
    let fleet = Fleet::with(specs, remote(json!({"routing": {"breaker": {"failures": 99}}}))).await;
    fleet.set_faults("p0", Faults { down: true, ..Faults::default() });
    let mut best = Duration::MAX;
    // A busy machine may be late, but not each time.
    for seed in 0..10 {
        let began = Instant::now();
        let head = send(&fleet, seed).await;
        // It is asked to compute the prompt only when it has been let go.
        best = best.min(began.elapsed());
        assert_eq!((head.status, head.reason(), head.worker()), (200, "retry_local", "d0"));
    }
    assert!(best <= AT_ONCE, "at best {best:?}");
    assert_eq!(fleet.requests("p0").len(), 0);
    fleet.assert_nothing_leaks().await;
}

#[tokio::test]
async fn the_partner_of_a_prefill_that_answers_500_is_let_go_at_once() {
    lets_its_partner_go(rule(Leg::Prefill, status(500)), Duration::ZERO).await;
}

#[tokio::test]
async fn the_partner_of_a_prefill_that_is_cut_is_let_go_at_once() {
    let cut = rule(Leg::Prefill, Action::CutBeforeHeaders { cut: Cut::Rst });
    lets_its_partner_go(cut, Duration::ZERO).await;
}

#[tokio::test]
async fn the_partner_of_a_prefill_that_hangs_is_let_go_when_its_time_is_over() {
    let hung = rule(Leg::Prefill, Action::HangBeforeHeaders);
    lets_its_partner_go(hung, Duration::from_millis(300)).await;
}

// ---- what counts against a worker ------------------------------------------------------------

#[tokio::test]
async fn a_4xx_never_counts_against_a_worker() {
    let fleet = Fleet::with([prefill("p0"), decode("d0"), unified("u0")], remote(json!({}))).await;
    for code in [400, 401, 403, 404, 413, 422] {
        fleet.set_faults("p0", rule(Leg::Any, status(code)));
        for seed in 0..FAILURES {
            assert_eq!(send(&fleet, seed).await.status, code);
        }
        assert_eq!(condition(&fleet, "p0").await, "up", "after {code}");
    }
    let log = fleet.router.log();
    let warns = |words: &str| log.lines().any(|it| it.contains("WARN") && it.contains(words));
    assert!(warns("answered 401"), "that may be the router's own key");
    assert!(!warns("answered 400") && !warns("answered 422"), "a client's mistakes are its own");
    fleet.set_faults("p0", Faults::default());
    assert_eq!(send(&fleet, 100).await.path(), "remote");
    fleet.assert_nothing_leaks().await;
}

#[tokio::test]
async fn a_429_and_a_503_mean_load_and_never_count_against_a_worker() {
    let fleet = Fleet::with([prefill("p0"), decode("d0")], remote(json!({}))).await;
    for (at, code) in [429, 503].into_iter().enumerate() {
        fleet.set_faults("p0", rule(Leg::Prefill, status(code)));
        for seed in 0..FAILURES + 2 {
            let head = send(&fleet, 10 * at as u32 + seed).await;
            assert_eq!((head.status, head.path(), head.reason()), (200, "local", "retry_local"));
        }
        assert_eq!(condition(&fleet, "p0").await, "up", "after {code}");
    }
    let told = 2 * u64::from(FAILURES + 2);
    assert_eq!(fleet.failures("prefill", "overload").await, told);
    fleet.set_faults("p0", Faults::default());
    assert_eq!(send(&fleet, 100).await.path(), "remote");
    fleet.assert_nothing_leaks().await;
}

#[tokio::test]
async fn where_the_breaker_of_the_only_prefill_worker_is_open_prompts_go_local_untried() {
    let fleet = Fleet::with([prefill("p0"), decode("d0")], remote(json!({}))).await;
    fleet.set_faults("p0", rule(Leg::Prefill, status(500)));
    for seed in 0..FAILURES {
        assert_eq!(send(&fleet, seed).await.reason(), "retry_local");
    }
    assert_eq!(condition(&fleet, "p0").await, "tripped");
    for seed in 10..16 {
        let head = send(&fleet, seed).await;
        assert_eq!((head.status, head.path(), head.reason()), (200, "local", "no_prefill"));
    }
    assert_eq!(fleet.requests("p0").len(), FAILURES as usize, "it is left alone");
    fleet.assert_nothing_leaks().await;
}

// ---- readiness -------------------------------------------------------------------------------

async fn is_ready(fleet: &Fleet) -> bool {
    fleet.router.ready().await.0
}

/// `/ready` says what becomes of a request that comes then.
async fn assert_it_is_true(fleet: &Fleet, seed: u32, ready: bool) {
    assert_eq!(is_ready(fleet).await, ready);
    assert_eq!(send(fleet, seed).await.status == 200, ready);
}

#[tokio::test]
async fn ready_means_that_a_request_is_served_whatever_is_left_of_a_fleet() {
    let config = remote(json!({"routing": {"policy": "isl_bounding"}}));
    let pair = || [prefill("p0").sglang(), decode("d0").sglang()];
    let (pairs, locals) = tokio::join!(
        Fleet::with(pair(), config.clone()),
        Fleet::with([prefill("p0"), decode("d0"), unified("u0")], config)
    );
    // A pair of engines of which neither can do without the other.
    assert_it_is_true(&pairs, 1, true).await;
    pairs.drain("p0", true).await;
    assert_it_is_true(&pairs, 2, false).await;
    pairs.drain("p0", false).await;
    assert_it_is_true(&pairs, 3, true).await;
    pairs.remove("d0").await;
    assert_it_is_true(&pairs, 4, false).await;
    // Engines that can.
    for (seed, gone) in [(11, "p0"), (12, "d0")] {
        locals.remove(gone).await;
        assert_it_is_true(&locals, seed, true).await;
    }
    locals.drain("u0", true).await;
    assert_it_is_true(&locals, 13, false).await;
    locals.add("p0").await;
    assert_it_is_true(&locals, 14, false).await;
}

#[tokio::test]
async fn a_pair_whose_prefill_breaker_is_open_is_not_ready() {
    let config = remote(json!({}));
    let fleet = Fleet::with([prefill("p0").sglang(), decode("d0").sglang()], config).await;
    fleet.set_faults("p0", rule(Leg::Prefill, status(500)));
    for seed in 0..FAILURES {
        assert_eq!(send(&fleet, seed).await.status, 503);
    }
    assert_it_is_true(&fleet, 10, false).await;
    assert_eq!(fleet.requests("p0").len(), FAILURES as usize);
}

// ---- workers that come and go ----------------------------------------------------------------

fn watched() -> Value {
    json!({
        "health": {"interval": "100ms", "timeout": "2s"},
        "routing": {"breaker": {"failures": FAILURES, "open": "100ms", "open_max": "200ms"}},
    })
}

#[tokio::test]
async fn while_a_worker_flaps_every_request_is_served() {
    let fleet = Fleet::with([unified("u0"), unified("u1")], watched()).await;
    for turn in 0..12 {
        let down = turn % 2 == 0;
        fleet.set_faults("u0", Faults { down, ..Faults::default() });
        for seed in 0..10 {
            let (head, body) =
                Request::completion(&asked(100 * turn + seed)).send(fleet.addr()).await;
            assert_eq!(head.status, 200, "turn {turn}: {body:?}");
        }
    }
    fleet.set_faults("u0", Faults::default());
    let mut seed = 5000;
    wait_until(async || {
        seed += 1;
        match send(&fleet, seed).await.worker() {
            "u0" => Ok(()),
            other => Err(format!("{other} does it all")),
        }
    })
    .await;
    fleet.assert_nothing_leaks().await;
}

#[tokio::test]
async fn when_all_workers_are_gone_requests_are_refused_at_once_and_served_when_they_are_back() {
    let mut fleet = Fleet::with([prefill("p0"), decode("d0"), unified("u0")], watched()).await;
    assert_eq!(send(&fleet, 1).await.status, 200);
    let mut killed = Vec::new();
    for name in ["p0", "d0", "u0"] {
        killed.push(fleet.kill(name).await);
    }
    wait_until(async || if is_ready(&fleet).await { Err("it is ready".into()) } else { Ok(()) })
        .await;
    let began = Instant::now();
    for seed in 10..20 {
        let head = send(&fleet, seed).await;
        assert_eq!((head.status, head.header("retry-after")), (503, Some("1")));
    }
    assert!(began.elapsed() < Duration::from_secs(5), "they were made to wait");
    // Each comes back to where it was.
    while let Some(engine) = killed.pop() {
        fleet.revive(engine, true).await;
    }
    wait_until(async || match fleet.router.ready().await.1["models"]["mock"].clone() {
        model if model["remote"] == true && model["unified_up"] == 1 => Ok(()),
        model => Err(format!("not all are back: {model}")),
    })
    .await;
    for seed in 30..36 {
        assert_eq!(send(&fleet, seed).await.status, 200);
    }
    fleet.assert_nothing_leaks().await;
}

/// One worker, and a breaker that soon opens for long.
async fn one(open_ms: u64) -> Fleet {
    let open = format!("{open_ms}ms");
    let breaker = json!({"failures": 1, "open": open, "open_max": "1h"});
    let config = json!({"health": {"interval": "100ms"}, "routing": {"breaker": breaker}});
    Fleet::with([unified("u0")], config).await
}

#[tokio::test]
async fn after_an_outage_the_only_worker_is_asked_soon_and_the_log_stays_small() {
    const OPEN_MS: u64 = 150;
    const PROBES: usize = 7;
    let fleet = one(OPEN_MS).await;
    let began = Instant::now();
    fleet.set_faults("u0", rule(Leg::Any, status(500)));
    let mut seed = 0;
    let mut next = async || {
        seed += 1;
        send(&fleet, seed).await.status
    };
    while fleet.requests("u0").len() < PROBES {
        assert_eq!(next().await, 503);
    }
    fleet.set_faults("u0", Faults::default());
    let healed = Instant::now();
    while next().await != 200 {}
    // Where others can serve, that many failures keep a worker away for longer.
    let left_alone = Duration::from_millis(OPEN_MS << (PROBES - 1));
    assert!(healed.elapsed() < left_alone / 2, "after {:?}", healed.elapsed());
    let seconds = began.elapsed().as_secs() as usize + 1;
    let log = fleet.router.log();
    for line in ["the worker answered 500", "can take the request at present"] {
        let lines = log.lines().filter(|it| it.contains("WARN") && it.contains(line)).count();
        assert!((1..=seconds + 1).contains(&lines), "{lines} lines in {seconds} s: {line}");
    }
    fleet.assert_nothing_leaks().await;
}

#[tokio::test]
async fn those_that_come_while_the_only_worker_is_probed_wait_until_its_answer_begins() {
    const PAUSE_MS: u64 = 200;
    const TOKENS: u32 = 60;
    let fleet = one(200).await;
    fleet.set_faults("u0", rule(Leg::Any, status(500)));
    assert_eq!(send(&fleet, 1).await.status, 503);
    fleet.set_faults("u0", rule(Leg::Any, Action::SlowTokens { delay_ms: PAUSE_MS }));
    wait_until(async || if is_ready(&fleet).await { Ok(()) } else { Err("not yet".into()) }).await;
    let (asked, began) = (completion(&prompt(2, 200), TOKENS, true), Instant::now());
    let mut probe = Request::completion(&asked).open(fleet.addr()).await;
    wait_for("the probe", async || (fleet.requests("u0").len() == 2).then_some(())).await;
    let mut others = tokio::task::JoinSet::new();
    for seed in 10..30 {
        let (addr, body) = (fleet.addr(), completion(&prompt(seed, 200), 2, false));
        others.spawn(async move { Request::completion(&body).send(addr).await.0.status });
    }
    assert_eq!(others.join_all().await, [200; 20]);
    let lasts = Duration::from_millis(PAUSE_MS * u64::from(TOKENS));
    assert!(began.elapsed() < lasts, "they waited for the probe's end");
    assert_eq!(probe.head().await.status, 200);
    fleet.assert_streamed_as_alone("/v1/completions", &asked, &probe.rest().await).await;
    fleet.assert_nothing_leaks().await;
}
