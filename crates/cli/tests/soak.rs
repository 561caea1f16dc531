//! Hours in minutes: load, slow clients and such as leave, workers killed, removed, failing, hanging and
//! started again, events lost, repeated, swapped and not replayed. Every reply is what an engine alone
//! would have said, or says that it is not; then the index is what the engines hold, nothing is booked,
//! and memory and descriptors have stayed flat.
//!
//! `bash tests/soak/run [seconds]` runs it; it prints a line of figures every few seconds.
#![allow(clippy::expect_used, clippy::panic, clippy::print_stdout, reason = "it is all test")]

mod cache;
mod support;

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use cache::{Cache, candidates};
use pointsman_sim::mock::{Action, Cut, EngineConfig, EventFaults, Faults, KvEvents, Leg};
use serde_json::{Value, json};
use support::fleet::{completion, configuration, rule};
use support::{Body, Fleet, Request, Router, Spec, decode, prefill, wait_until_within};
use tokio::task::JoinSet;
use tokio::time::{Instant, interval, sleep, timeout};

/// How long it runs where nobody says.
const USUAL_SECONDS: &str = "30";

/// Tokens of a reply.
const TOKENS: u32 = 8;

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

/// Memory and descriptors may grow by so much after the first third.
const GROWTH_KIB: u64 = 12 * 1024;
const GROWTH_DESCRIPTORS: u64 = 40;

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
struct Seen {
    stop: AtomicBool,
    /// Whole, and what an engine alone would have said.
    answered: AtomicU64,
    /// Refused or broken off, in the words of an error.
    told: AtomicU64,
    /// Left by the client.
    left: AtomicU64,
    /// Anything else, in words.
    wrong: Mutex<Vec<String>>,
    /// An engine by itself, and what it has said.
    alone: SocketAddr,
    texts: Mutex<HashMap<(u64, u64), String>>,
}

impl Seen {
    fn new(alone: SocketAddr) -> Seen {
        Seen {
            stop: AtomicBool::default(),
            answered: AtomicU64::default(),
            told: AtomicU64::default(),
            left: AtomicU64::default(),
            wrong: Mutex::default(),
            alone,
            texts: Mutex::default(),
        }
    }

    fn wrong(&self) -> MutexGuard<'_, Vec<String>> {
        self.wrong.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn texts(&self) -> MutexGuard<'_, HashMap<(u64, u64), String>> {
        self.texts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn expected(&self, conversation: u64, turn: u64) -> String {
        if let Some(text) = self.texts().get(&(conversation, turn)) {
            return text.clone();
        }
        let whole = Request::completion(&completion(&prompt(conversation, turn), TOKENS, false));
        let (_, json) = whole.json(self.alone).await;
        let text = json["choices"][0]["text"].as_str().expect("a reply with text").to_owned();
        self.texts().insert((conversation, turn), text.clone());
        text
    }

    /// Looks at a reply, whatever became of the request.
    fn judge(&self, status: u16, stream: bool, body: &Body, expected: &str) {
        let count = |of: &AtomicU64| {
            of.fetch_add(1, Ordering::Relaxed);
        };
        let wrong = match (status, stream) {
            _ if body.cut => Some("cut without a word"),
            (200, true) if body.is_done() => (body.content() != expected).then_some("another text"),
            (200, true) => {
                count(&self.told);
                let chunks = body.chunks();
                let told = chunks.last().is_some_and(|last| !last["error"].is_null());
                let begun = expected.starts_with(&body.content());
                return match (told, begun) {
                    (true, true) => {}
                    _ => self.wrong().push(format!("an end that is none, or other text: {body:?}")),
                };
            }
            (200, false) => {
                (body.json()["choices"][0]["text"] != expected).then_some("another text")
            }
            (429 | 500.., _) if !body.error().is_empty() => return count(&self.told),
            _ => Some("a status that fits nothing"),
        };
        match wrong {
            None => count(&self.answered),
            Some(what) => self.wrong().push(format!("{what}: {status} {body:?}, not {expected:?}")),
        }
    }
}

async fn client(to: SocketAddr, number: u64, seen: Arc<Seen>) {
    let mut numbers = Numbers(1000 + number);
    while !seen.stop.load(Ordering::Relaxed) {
        let (conversation, turn) = (numbers.below(CONVERSATIONS), numbers.below(TURNS));
        let expected = seen.expected(conversation, turn).await;
        let stream = numbers.below(2) == 0;
        let body = completion(&prompt(conversation, turn), TOKENS, stream);
        let request = Request::completion(&body);
        let narrow = numbers.below(8) == 0;
        let mut exchange =
            if narrow { request.open_narrow(to).await } else { request.open(to).await };
        if numbers.below(16) == 0 {
            sleep(Duration::from_millis(numbers.below(60))).await;
            seen.left.fetch_add(1, Ordering::Relaxed);
            continue;
        }
        let head = exchange.head_within(Duration::from_secs(60)).await;
        if narrow {
            sleep(CLIENT_PAUSE).await;
        }
        seen.judge(head.status, stream, &exchange.rest().await, &expected);
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
        // What hangs and is no stream is known to hang by this alone.
        "timeouts": {"prefill": "2s", "first_byte": "2s", "stream_idle": "2s", "request": "20s"},
    });
    Fleet::with(specs, config).await
}

/// Does something bad to a worker for a while; what it was.
async fn mishap(fleet: &mut Fleet, numbers: &mut Numbers) -> String {
    let name = WORKERS[usize::try_from(numbers.below(4)).expect("it is small")];
    let events = |events| Faults { events, ..Faults::default() };
    let usual = EventFaults::default();
    let cut = |after_tokens| Action::CutMidStream { after_tokens, cut: Cut::default() };
    let legs = if name.starts_with('p') { Leg::Prefill } else { Leg::Any };
    let (what, faults) = match numbers.below(14) {
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
        6 => ("answers 500", rule(legs, Action::Status { status: 500, body: None })),
        7 => ("is overloaded", rule(legs, Action::Status { status: 429, body: None })),
        8 => ("resets", rule(legs, Action::Refuse)),
        9 => ("hangs", rule(legs, Action::HangBeforeHeaders)),
        10 => ("cuts streams", rule(legs, cut(3))),
        11 => {
            fleet.router.signal("HUP");
            return "the router reads its certificates again".to_owned();
        }
        12 => {
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

/// Open descriptors of a process.
fn descriptors(router: &Router) -> u64 {
    let open = std::fs::read_dir(format!("/proc/{}/fd", router.pid()));
    open.expect("the router runs").count() as u64
}

/// Memory of a process, in KiB.
fn resident_kib(router: &Router) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", router.pid()));
    let status = status.expect("the router runs");
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).expect("its memory");
    line.split_whitespace().nth(1).and_then(|kib| kib.parse().ok()).expect("a number")
}

async fn print_figures(fleet: &Fleet, seen: &Seen, since: Instant, what: &str) -> [u64; 2] {
    let (resident, metrics) = (resident_kib(&fleet.router), fleet.router.metrics().await);
    let open = descriptors(&fleet.router);
    let events = |kind| metrics.count("pointsman_kv_events_total", &[("kind", kind)]);
    println!(
        "{:>4} s  rss {resident} KiB  open {open}  index {} blocks  answered {}  told {}  left {}  \
         wrong {}  booked {}  \
         replays {}  restarts {}  losses {}  gaps {}  dropped {}  repeated {}  | {what}",
        since.elapsed().as_secs(),
        metrics.count("pointsman_index_blocks", &[]),
        seen.answered.load(Ordering::Relaxed),
        seen.told.load(Ordering::Relaxed),
        seen.left.load(Ordering::Relaxed),
        seen.wrong().len(),
        metrics.count("pointsman_live_bookings", &[]),
        events("replay"),
        events("restart"),
        events("lost"),
        events("gap"),
        events("dropped"),
        events("repeated"),
    );
    for engine in &fleet.engines {
        let violations = &engine.mock.stats()["violations"];
        if *violations != json!([]) {
            println!("       {} saw what it never should: {violations}", engine.name);
        }
    }
    if let Some(wrong) = seen.wrong().last() {
        println!("       the latest wrong reply: {wrong}");
    }
    [resident, open]
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
    let alone = fleet.alone().await;
    let (seen, since) = (Arc::new(Seen::new(alone.mock.addr())), Instant::now());
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
    assert!(!fleet.router.log().contains("panicked"), "a task panicked");
    assert_eq!(*seen.wrong(), Vec::<String>::new(), "wrong replies");
    let (answered, told) =
        (seen.answered.load(Ordering::Relaxed), seen.told.load(Ordering::Relaxed));
    assert!(told * 20 <= answered, "{told} were not served, {answered} were");
    assert_flat(&readings, "KiB of memory", 0, GROWTH_KIB);
    assert_flat(&readings, "descriptors", 1, GROWTH_DESCRIPTORS);
}

/// What was read grew by no more than so much after the first third.
fn assert_flat(readings: &[[u64; 2]], what: &str, which: usize, growth: u64) {
    let (early, late) = readings.split_at((readings.len() / 3).max(1));
    let most = |of: &[[u64; 2]]| of.iter().map(|reading| reading[which]).max();
    let (early, late) = (most(early), most(late));
    println!("{what}: at most {early:?} in the first third, {late:?} after it");
    if let (Some(early), Some(late)) = (early, late) {
        assert!(late <= early + growth, "from {early} to {late} {what}");
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
