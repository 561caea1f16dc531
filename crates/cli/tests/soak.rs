//! Hours in minutes: load, workers killed and started again, events lost, repeated, swapped and not
//! replayed; then the index is what the engines hold, nothing is booked, and memory has stayed flat.
//!
//! `bash tests/soak/run [seconds]` runs it; it prints a line of figures every few seconds.
#![allow(clippy::expect_used, clippy::panic, clippy::print_stdout, reason = "it is all test")]

mod cache;
mod support;

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use cache::{Cache, candidates};
use pointsman_sim::mock::{EngineConfig, EventFaults, Faults, KvEvents};
use serde_json::{Value, json};
use support::fleet::{completion, configuration};
use support::{Fleet, Request, Router, Spec, decode, prefill, wait_until_within};
use tokio::task::JoinSet;
use tokio::time::{Instant, interval, sleep, timeout};

/// How long it runs where nobody says.
const USUAL_SECONDS: &str = "30";

/// Requests under way at any time.
const CLIENTS: u64 = 12;

/// A client's pause between two requests; thirty thousand requests in ten minutes.
const CLIENT_PAUSE: Duration = Duration::from_millis(200);

/// Pause between two mishaps, and how long one lasts.
const MISHAP_PAUSE: Duration = Duration::from_secs(3);

/// Pause between two lines of figures, and between two readings of memory.
const FIGURES_PAUSE: Duration = Duration::from_secs(10);

/// Conversations, and turns of each; far more than fits into the engines' caches.
const CONVERSATIONS: u64 = 400;
const TURNS: u64 = 8;

/// Blocks of an engine: it evicts all the time.
const CAPACITY_BLOCKS: u32 = 3000;

/// Messages that an engine can replay. All there will be, so that what is lost can be had again.
const BUFFER_STEPS: usize = 10_000_000;

/// How long the index may take to be that of the engines once nothing fails any more.
const SETTLING: Duration = Duration::from_secs(180);

/// Memory may grow by so much after the first third.
const GROWTH_KIB: u64 = 12 * 1024;

const WORKERS: [&str; 4] = ["p0", "p1", "d0", "d1"];

/// A small generator of numbers, the same in every run.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % bound
    }
}

/// A conversation's prompt at one of its turns; each turn continues the one before it.
fn prompt(conversation: u64, turn: u64) -> Vec<u32> {
    let mut numbers = Numbers(conversation + 1);
    let tokens = 150 + 90 * turn;
    (0..tokens).map(|_| 100 + u32::try_from(numbers.below(1000)).expect("it is small")).collect()
}

/// What clients see.
#[derive(Default)]
struct Seen {
    stop: AtomicBool,
    answered: AtomicU64,
    failed: AtomicU64,
}

async fn client(to: SocketAddr, number: u64, seen: Arc<Seen>) {
    let mut numbers = Numbers(1000 + number);
    while !seen.stop.load(Ordering::Relaxed) {
        let prompt = prompt(numbers.below(CONVERSATIONS), numbers.below(TURNS));
        let request = Request::completion(&completion(&prompt, 8, numbers.below(2) == 0));
        let mut exchange = request.open(to).await;
        let head = exchange.head_within(Duration::from_secs(60)).await;
        let whole = head.status == 200 && !exchange.rest().await.cut;
        let count = if whole { &seen.answered } else { &seen.failed };
        count.fetch_add(1, Ordering::Relaxed);
        sleep(CLIENT_PAUSE).await;
    }
}

async fn fleet() -> Fleet {
    let sized = |spec: Spec| {
        spec.short_lease().engine(|engine: &mut EngineConfig| {
            engine.capacity_blocks = CAPACITY_BLOCKS;
            engine.keep_requests = 0;
            engine.kv_events = Some(KvEvents { buffer_steps: BUFFER_STEPS, ..KvEvents::default() });
        })
    };
    let specs = [prefill("p0"), prefill("p1"), decode("d0"), decode("d1")].map(sized);
    let config = json!({
        "routing": {"eff_isl_threshold": 256},
        "admin": {"index_snapshot": true},
        "log": {"filter": "warn"},
    });
    Fleet::with(specs, config).await
}

/// Does something bad to a worker for a while; what it was.
async fn mishap(fleet: &mut Fleet, numbers: &mut Numbers) -> String {
    let name = WORKERS[usize::try_from(numbers.below(4)).expect("it is small")];
    let events = |events| Faults { events, ..Faults::default() };
    let usual = EventFaults::default();
    let (what, faults) = match numbers.below(8) {
        0 => ("restarts its publisher", Faults { restart_publisher: true, ..Faults::default() }),
        1 => ("loses a third", events(EventFaults { drop_probability: 0.33, ..usual })),
        2 => ("repeats", events(EventFaults { duplicate_next: 20, ..usual })),
        3 => ("swaps", events(EventFaults { reorder_next: 20, ..usual })),
        4 => (
            "loses, and is silent",
            events(EventFaults { drop_next: 5, replay_silent: true, ..usual }),
        ),
        5 => (
            "loses, and replays little",
            events(EventFaults { drop_next: 5, replay_limit: Some(2), ..usual }),
        ),
        6 => {
            fleet.remove(name).await;
            sleep(MISHAP_PAUSE / 3).await;
            fleet.add(name).await;
            return format!("{name} is removed and added");
        }
        _ => {
            let killed = fleet.kill(name).await;
            sleep(MISHAP_PAUSE / 3).await;
            let same_ports = numbers.below(2) == 0;
            fleet.revive(killed, same_ports).await;
            return format!("{name} is killed and started again");
        }
    };
    fleet.set_faults(name, faults);
    sleep(MISHAP_PAUSE).await;
    fleet.set_faults(name, Faults::default());
    format!("{name} {what}")
}

/// Memory of a process, in KiB.
fn resident_kib(router: &Router) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", router.pid()));
    let status = status.expect("the router runs");
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).expect("its memory");
    line.split_whitespace().nth(1).and_then(|kib| kib.parse().ok()).expect("a number")
}

async fn print_figures(fleet: &Fleet, seen: &Seen, since: Instant, what: &str) -> u64 {
    let (resident, metrics) = (resident_kib(&fleet.router), fleet.router.metrics().await);
    let events = |kind| metrics.count("pointsman_kv_events_total", &[("kind", kind)]);
    println!(
        "{:>4} s  rss {resident} KiB  index {} blocks  answered {}  failed {}  booked {}  \
         replays {}  restarts {}  losses {}  gaps {}  dropped {}  repeated {}  | {what}",
        since.elapsed().as_secs(),
        metrics.count("pointsman_index_blocks", &[]),
        seen.answered.load(Ordering::Relaxed),
        seen.failed.load(Ordering::Relaxed),
        metrics.count("pointsman_live_bookings", &[]),
        events("replay"),
        events("restart"),
        events("lost"),
        events("gap"),
        events("dropped"),
        events("repeated"),
    );
    resident
}

/// What a router believes of these prompts is what the engines hold; how many tokens that are.
async fn compare(fleet: &Fleet, router: &Router) -> Result<usize, String> {
    let mut overlap = 0;
    for engine in &fleet.engines {
        let Some(worker) = router.worker(&engine.name).await else {
            return Err(format!("{} is not there", engine.name));
        };
        let held = Cache::of(engine)[0].blocks();
        if worker["index_blocks"] != held || worker["index_stale"] != false {
            let (known, stale) = (&worker["index_blocks"], &worker["index_stale"]);
            return Err(format!(
                "{} holds {held} blocks, {known} known, stale: {stale}",
                engine.name
            ));
        }
    }
    for conversation in (0..CONVERSATIONS).step_by(3) {
        let prompt = prompt(conversation, TURNS - 1);
        let body = completion(&prompt, 8, false);
        let record = Request::post("/v1/pointsman/explain", &body).json(router.addr()).await.1;
        for engine in &fleet.engines {
            let (held, known) = (
                Cache::of(engine)[0].overlap(&prompt),
                &candidates(&record, &engine.name)[0]["overlap_tokens"],
            );
            if *known != held {
                return Err(format!(
                    "{} holds {held} tokens of {conversation}, {known} known",
                    engine.name
                ));
            }
            overlap += held;
        }
    }
    Ok(overlap)
}

async fn assert_equal(fleet: &Fleet, router: &Router) {
    let mut overlap = 0;
    wait_until_within(SETTLING, async || {
        overlap = compare(fleet, router).await?;
        Ok(())
    })
    .await;
    assert!(overlap > 10_000, "the caches hold next to nothing: {overlap} tokens");
    println!("the index is what the engines hold: {overlap} tokens of the prompts compared");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "it takes as long as one lets it: bash tests/soak/run"]
async fn under_load_and_mishaps_the_index_stays_true_and_memory_flat() {
    let seconds = option_env!("SOAK_SECONDS").unwrap_or(USUAL_SECONDS);
    let end = Duration::from_secs(seconds.parse().expect("SOAK_SECONDS is a number"));
    let mut fleet = fleet().await;
    let (seen, since) = (Arc::new(Seen::default()), Instant::now());
    let mut clients = JoinSet::new();
    for number in 0..CLIENTS {
        clients.spawn(client(fleet.addr(), number, Arc::clone(&seen)));
    }
    let (mut numbers, mut figures) = (Numbers(7), interval(FIGURES_PAUSE));
    let (mut readings, mut mishaps) = (Vec::new(), Vec::new());
    while since.elapsed() < end {
        mishaps.push(mishap(&mut fleet, &mut numbers).await);
        sleep(MISHAP_PAUSE / 3).await;
        if timeout(Duration::ZERO, figures.tick()).await.is_ok() {
            let what = mishaps.join(", ");
            readings.push(print_figures(&fleet, &seen, since, &what).await);
            mishaps.clear();
        }
    }
    seen.stop.store(true, Ordering::Relaxed);
    clients.join_all().await;
    // A message after the last one that was lost, so that its loss can be seen.
    for (engine, number) in fleet.engines.iter().zip(CONVERSATIONS..) {
        let request = Request::completion(&completion(&prompt(number, 0), 8, false));
        assert_eq!(request.send(engine.mock.addr()).await.0.status, 200);
    }
    assert_equal(&fleet, &fleet.router).await;
    fleet.assert_nothing_leaks().await;
    print_figures(&fleet, &seen, since, "at the end").await;
    assert_a_second_router_takes_it_over(&fleet).await;
    let (answered, failed) =
        (seen.answered.load(Ordering::Relaxed), seen.failed.load(Ordering::Relaxed));
    assert!(failed * 100 <= answered, "{failed} failed, {answered} were answered");
    let third = readings.len() / 3;
    let (early, late) = readings.split_at(third.max(1));
    let (early, late) = (early.iter().max(), late.iter().max());
    println!("rss: at most {early:?} KiB in the first third, {late:?} KiB after it");
    if let (Some(early), Some(late)) = (early, late) {
        assert!(*late <= early + GROWTH_KIB, "memory grew from {early} to {late} KiB");
    }
}

async fn assert_a_second_router_takes_it_over(fleet: &Fleet) {
    let workers: Vec<&Value> = fleet.engines.iter().map(|engine| &engine.worker).collect();
    let over = json!({"kv": {"restore_from": format!("http://{}", fleet.addr())}});
    let second = Router::start(&configuration(&json!(workers), over)).await;
    assert_equal(fleet, &second).await;
    let log = second.log();
    let taken = log.lines().find(|line| line.contains("taken over")).expect("it was taken over");
    println!("{taken}");
}
