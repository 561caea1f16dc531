//! What happens to the router's own process, under load: signals, a lack of descriptors, pauses and
//! clocks; and a restart of every worker, one after the other.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod support;

use std::cell::{Cell, RefCell};
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::rc::Rc;
use std::time::{Duration, Instant};

use pointsman_sim::mock::{Action, Faults, Leg};
use serde_json::{Value, json};
use support::client::connect;
use support::fleet::{MODEL, completion, configuration, prompt, rule};
use support::{Fleet, Request, Router, decode, prefill, unified, wait_for, wait_until};
use tokio::task::{JoinHandle, LocalSet};

fn slow_tokens(delay_ms: u64) -> Faults {
    rule(Leg::Any, Action::SlowTokens { delay_ms })
}

// ---- load ------------------------------------------------------------------------------------

/// How a request ended.
#[derive(Clone, Debug)]
struct Ended {
    began: Instant,
    asked: Value,
    /// None where the connection was not taken, or ended before the head of a reply.
    status: Option<u16>,
    body: support::Body,
}

/// Clients that ask all the time, streams and others in turn.
struct Load {
    stop: Rc<Cell<bool>>,
    ended: Rc<RefCell<Vec<Ended>>>,
    clients: Vec<JoinHandle<()>>,
}

impl Load {
    /// For use within a `LocalSet`.
    fn start(to: std::net::SocketAddr, clients: u32, tokens: u32) -> Load {
        let (stop, ended) = (Rc::new(Cell::new(false)), Rc::new(RefCell::new(Vec::new())));
        let client = |number: u32| {
            let (stop, ended) = (Rc::clone(&stop), Rc::clone(&ended));
            tokio::task::spawn_local(async move {
                let mut turn = 0;
                while !stop.get() {
                    turn += 1;
                    let ids = prompt(1000 * number + turn, 120);
                    let asked = completion(&ids, tokens, turn % 2 == 0);
                    let end = one(to, asked).await;
                    ended.borrow_mut().push(end);
                }
            })
        };
        let clients = (0..clients).map(client).collect();
        Load { stop, ended, clients }
    }

    fn count(&self) -> usize {
        self.ended.borrow().len()
    }

    /// Waits until so many more have ended.
    async fn go_on_for(&self, requests: usize) {
        let wanted = self.count() + requests;
        wait_for("requests to end", async || (self.count() >= wanted).then_some(())).await;
    }

    /// Ends it, and how each request ended.
    async fn end(self) -> Vec<Ended> {
        self.stop.set(true);
        for client in self.clients {
            client.await.unwrap();
        }
        self.ended.take()
    }
}

async fn one(to: std::net::SocketAddr, asked: Value) -> Ended {
    let began = Instant::now();
    let mut ended = Ended { began, asked, status: None, body: support::Body::default() };
    let Ok(mut exchange) = Request::completion(&ended.asked).try_open(to).await else {
        tokio::time::sleep(Duration::from_millis(10)).await;
        return ended;
    };
    if let Some(head) = exchange.try_head().await {
        ended.status = Some(head.status);
        ended.body = exchange.rest().await;
    }
    ended
}

/// Asserts that a reply is all there; of a few also that it is what an engine alone says.
async fn assert_whole(fleet: &Fleet, ended: &[Ended]) {
    for (at, end) in ended.iter().enumerate() {
        assert_eq!((end.status, end.body.cut), (Some(200), false), "{end:?}");
        if at % 40 == 0 {
            fleet.assert_completed_as_alone(&end.asked, &end.body).await;
        } else if end.asked["stream"] == true {
            assert!(end.body.is_done(), "{end:?}");
        } else {
            assert!(end.body.json()["choices"][0]["text"].is_string(), "{end:?}");
        }
    }
}

// ---- workers ---------------------------------------------------------------------------------

#[tokio::test]
async fn a_rolling_restart_of_every_worker_under_load_loses_no_request_that_had_not_begun() {
    LocalSet::new().run_until(rolling_restart()).await;
}

async fn rolling_restart() {
    let names = ["p0", "p1", "d0", "d1"];
    let specs = [prefill("p0"), prefill("p1"), decode("d0"), decode("d1")];
    // Streams last for a while, so that some are cut in their middle.
    let specs = specs.map(|spec| spec.short_lease().faults(slow_tokens(5)));
    let config = json!({
        "health": {"interval": "100ms"},
        "routing": {"breaker": {"open": "100ms", "open_max": "100ms"}},
    });
    let mut fleet = Fleet::with(specs, config).await;
    let load = Load::start(fleet.addr(), 8, 12);
    load.go_on_for(16).await;
    for name in names {
        let killed = fleet.kill(name).await;
        load.go_on_for(16).await;
        fleet.revive(killed, true).await;
        let all =
            wait_until(async || match fleet.router.ready().await.1["models"][MODEL].clone() {
                model if model["prefill_up"] == 2 && model["decode_up"] == 2 => Ok(()),
                model => Err(format!("not all are up: {model}")),
            });
        all.await;
        load.go_on_for(16).await;
    }
    let ended = load.end().await;
    let told = |end: &&Ended| end.body.text().contains("the reply broke off");
    let (cut, whole): (Vec<_>, Vec<_>) = ended.iter().cloned().partition(|end| told(&end));
    assert_whole(&fleet, &whole).await;
    for end in &cut {
        // Its client has seen its beginning, and was told.
        assert_eq!((end.status, end.asked["stream"] == true), (Some(200), true), "{end:?}");
        assert!(!end.body.text().contains("[DONE]") && end.body.events().len() > 1, "{end:?}");
    }
    assert!(cut.len() < whole.len(), "{} of {} were cut", cut.len(), ended.len());
}

// ---- signals ---------------------------------------------------------------------------------

#[tokio::test]
async fn sighup_under_load_loses_nothing() {
    let run = async {
        let fleet = Fleet::start([prefill("p0"), decode("d0"), unified("u0")]).await;
        let load = Load::start(fleet.addr(), 8, 4);
        for _ in 0..10 {
            load.go_on_for(8).await;
            fleet.router.signal("HUP");
        }
        load.go_on_for(8).await;
        assert_whole(&fleet, &load.end().await).await;
        fleet.assert_nothing_leaks().await;
    };
    LocalSet::new().run_until(run).await;
}

/// `pointsman up`, until it is dropped.
struct Up(std::process::Child);

impl Up {
    fn signal(&self, name: &str) {
        let kill = format!("kill -{name} {}", self.0.id());
        assert!(Command::new("sh").args(["-c", &kill]).status().unwrap().success());
    }
}

impl Drop for Up {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[tokio::test]
async fn a_fleet_of_up_outlives_sighup_and_ends_at_sigterm() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pointsman"));
    command.args(["up", "--port", "0"]).env_clear().stdin(Stdio::null());
    let mut up = Up(command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap());
    let mut line = String::new();
    let mut out = BufReader::new(up.0.stdout.take().unwrap());
    out.read_line(&mut line).unwrap();
    let addr = line.trim().strip_prefix("pointsman is ready on http://").unwrap();
    let addr: std::net::SocketAddr = addr.parse().unwrap();
    for _ in 0..2 {
        up.signal("HUP");
        let (head, _) = Request::get("/ready").send(addr).await;
        assert_eq!(head.status, 200);
    }
    up.signal("TERM");
    let ended = wait_for("the end", async || up.0.try_wait().unwrap()).await;
    assert_eq!(ended.code(), Some(0));
}

#[tokio::test]
async fn sigterm_under_load_cuts_no_request_that_was_taken() {
    let run = async {
        let specs = [prefill("p0"), decode("d0"), unified("u0")];
        let specs = specs.map(|spec| spec.faults(slow_tokens(20)));
        let mut fleet = Fleet::start(specs).await;
        let load = Load::start(fleet.addr(), 12, 12);
        load.go_on_for(24).await;
        fleet.router.terminate();
        let asked = Instant::now();
        assert_eq!(fleet.router.ended().await.code(), Some(0));
        load.go_on_for(24).await;
        let ended = load.end().await;
        // One that came in the very moment may have been waiting to be accepted.
        let safe = Duration::from_millis(100);
        let before = |end: &&Ended| end.began + safe < asked;
        let (taken, others): (Vec<_>, Vec<_>) = ended.into_iter().partition(|end| before(&end));
        assert_whole(&fleet, &taken).await;
        assert!(others.iter().any(|end| end.status.is_none()), "further ones are refused");
        for end in others.iter().filter(|end| end.status.is_some()) {
            assert!(matches!(end.status, Some(200 | 503)) && !end.body.cut, "{end:?}");
        }
        assert!(!fleet.router.log().contains("still running at the end of the grace period"));
    };
    LocalSet::new().run_until(run).await;
}

/// A process that is stopped, or whose machine is, finds on its sockets what came meanwhile, and all its
/// timers due.
#[tokio::test]
async fn a_router_that_was_stopped_for_longer_than_its_timeouts_goes_on_where_it_was() {
    let short = "700ms";
    let config = json!({
        "timeouts": {"stream_idle": short, "first_byte": short, "prefill": short},
        "health": {"interval": "100ms", "timeout": short},
    });
    let specs = [prefill("p0"), decode("d0").faults(slow_tokens(50)), unified("u0")];
    let fleet = Fleet::with(specs, config).await;
    let [streamed, next] = [1, 2].map(|seed| completion(&prompt(seed, 200), 40, true));
    let mut stream = Request::completion(&streamed).open(fleet.addr()).await;
    let mut body = stream.tokens(2).await;
    let mut waiting = Request::completion(&next).open(fleet.addr()).await;
    fleet.router.signal("STOP");
    tokio::time::sleep(Duration::from_millis(1500)).await;
    fleet.router.signal("CONT");
    body.bytes.extend(stream.rest().await.bytes);
    fleet.assert_streamed_as_alone("/v1/completions", &streamed, &body).await;
    assert_eq!(waiting.head().await.status, 200);
    fleet.assert_streamed_as_alone("/v1/completions", &next, &waiting.rest().await).await;
    let failures = fleet.router.metrics().await.not_zero("pointsman_leg_failures_total");
    assert_eq!(failures, Vec::<String>::new());
    fleet.assert_nothing_leaks().await;
}

// ---- clocks ----------------------------------------------------------------------------------

/// A wall clock that can be set for one process: `LD_PRELOAD`ed, it adds the seconds that a file holds.
const CLOCK: &str = r#"
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

int clock_gettime(clockid_t which, struct timespec *at) {
  int done = syscall(SYS_clock_gettime, which, at);
  if (done != 0 || which != CLOCK_REALTIME) return done;
  char text[32] = {0};
  int file = open(getenv("CLOCK_FILE"), O_RDONLY);
  if (file >= 0 && read(file, text, sizeof text - 1) > 0) at->tv_sec += atoll(text);
  if (file >= 0) close(file);
  return done;
}
"#;

/// The year of the last line of the router's log.
fn logged_year(router: &Router) -> i64 {
    let log = router.log();
    log.lines().last().and_then(|line| line.get(..4)).and_then(|year| year.parse().ok()).unwrap()
}

#[tokio::test]
async fn a_wall_clock_that_jumps_changes_nothing() {
    const YEAR: i64 = 365 * 86_400;
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let (source, library, file) = (at("clock.c"), at("clock.so"), at("seconds"));
    std::fs::write(&source, CLOCK).unwrap();
    let set = |seconds: i64| std::fs::write(&file, seconds.to_string()).unwrap();
    set(0);
    // What links a Rust program compiles C too.
    let built = Command::new("cc").args(["-shared", "-fPIC", "-o", &library, &source]).status();
    assert!(built.unwrap().success());
    let specs = [prefill("p0"), decode("d0").faults(slow_tokens(30)), unified("u0")];
    let fleet = Fleet::start(specs).await;
    let workers: Vec<_> = fleet.engines.iter().map(|engine| engine.worker.clone()).collect();
    let breaker = json!({"failures": 1, "failed_checks": 1, "open": "1h", "open_max": "1h"});
    let config = json!({
        "health": {"interval": "100ms"},
        "timeouts": {"stream_idle": "5s", "request": "30s"},
        "routing": {"breaker": breaker},
        "log": {"filter": "info,pointsman_serve=debug"},
    });
    let clock = [format!("LD_PRELOAD={library}"), format!("CLOCK_FILE={file}")];
    let command = ["env", &clock[0], &clock[1]];
    let router = Router::start_under(&command, &configuration(&json!(workers), config)).await;
    let mut seed = 0;
    for jump in [10 * YEAR, -20 * YEAR, 0] {
        seed += 2;
        let asked = completion(&prompt(seed, 200), 20, true);
        let mut stream = Request::completion(&asked).open(router.addr()).await;
        let mut body = stream.tokens(2).await;
        let before = logged_year(&router);
        set(jump);
        // Whoever comes then is served as ever.
        let next = completion(&prompt(seed + 1, 200), 4, false);
        let (head, whole) = Request::completion(&next).send(router.addr()).await;
        assert_eq!((head.status, head.path()), (200, "remote"), "{whole:?}");
        fleet.assert_completed_as_alone(&next, &whole).await;
        body.bytes.extend(stream.rest().await.bytes);
        fleet.assert_streamed_as_alone("/v1/completions", &asked, &body).await;
        let years = (logged_year(&router) - before).abs();
        assert!(years >= 9, "the clock has not jumped: {years} years");
    }
    let failures = router.metrics().await.not_zero("pointsman_leg_failures_total");
    assert_eq!(failures, Vec::<String>::new());
}

/// What reckons back from the present meets the beginning of time on such a machine.
#[tokio::test]
async fn a_router_on_a_machine_that_has_just_started_serves() {
    let uptime = std::fs::read_to_string("/proc/uptime").unwrap();
    let seconds: f64 = uptime.split(' ').next().unwrap().parse().unwrap();
    let offset = format!("-{}", seconds as u64 - 1);
    let command =
        ["unshare", "-T", "--monotonic", &offset, "--boottime", &offset, "--fork", "--kill-child"];
    let works = Command::new(command[0]).args(&command[1..]).arg("true").status();
    if !works.is_ok_and(|status| status.success()) {
        return support::skipped(
            "a clock that has just started; no time namespace can be had here",
        );
    }
    let fleet = Fleet::start([prefill("p0"), decode("d0")]).await;
    let workers: Vec<_> = fleet.engines.iter().map(|engine| engine.worker.clone()).collect();
    let tree = configuration(&json!(workers), json!({}));
    let router = Router::start_under(&command, &tree).await;
    for (seed, stream) in [(1, false), (2, true)] {
        let asked = completion(&prompt(seed, 200), 8, stream);
        let (head, body) = Request::completion(&asked).send(router.addr()).await;
        assert_eq!((head.status, head.path()), (200, "remote"), "{body:?}");
        fleet.assert_completed_as_alone(&asked, &body).await;
    }
}

// ---- descriptors -----------------------------------------------------------------------------

/// Ticks of the processor that a process has used, 100 to a second.
fn ticks(pid: u32) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap().split_whitespace().collect();
    fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
}

#[tokio::test]
async fn a_router_without_descriptors_rests_answers_what_it_can_blames_nobody_and_recovers() {
    let fleet = Fleet::start([unified("u0")]).await;
    let workers: Vec<_> = fleet.engines.iter().map(|engine| engine.worker.clone()).collect();
    // A worker that is blamed once is gone for the rest of the test.
    let breaker = json!({"failures": 1, "failed_checks": 1, "open": "1h", "open_max": "1h"});
    let health = json!({"interval": "100ms", "timeout": "1s"});
    let upstream = json!({"max_idle_per_worker": 0});
    let config = json!({"health": health, "routing": {"breaker": breaker}, "upstream": upstream});
    let tree = configuration(&json!(workers), config);
    let router = Router::start_under(&["prlimit", "--nofile=60:60"], &tree).await;
    let served = async |seed| {
        let asked = completion(&prompt(seed, 40), 2, false);
        let mut exchange = Request::completion(&asked).open(router.addr()).await;
        exchange.head().await.status
    };
    assert_eq!(served(1).await, 200);
    // Each is accepted for as long as there is a descriptor for it; the others wait.
    let mut early = Request::get("/health").begin(router.addr()).await;
    let asked = completion(&prompt(2, 40), 2, false);
    let mut refused = Request::completion(&asked).begin(router.addr()).await;
    let mut crowd = Vec::new();
    for _ in 0..100 {
        crowd.push(connect(router.addr()).await.unwrap());
    }
    let told = "a connection could not be accepted";
    wait_until(async || match router.log().contains(told) {
        true => Ok(()),
        false => Err("it has descriptors left".to_owned()),
    })
    .await;
    assert_eq!(early.head().await.status, 200);
    refused.send(asked.to_string().as_bytes()).await;
    assert_eq!(refused.head().await.status, 503);
    let body = refused.rest().await;
    let why = "worker `u0` could not be asked: the router has no file descriptors left";
    assert!(body.text().contains(why), "{body:?}");
    let (before, since) = (ticks(router.pid()), Instant::now());
    tokio::time::sleep(Duration::from_secs(1)).await;
    let (used, seconds) = (ticks(router.pid()) - before, since.elapsed().as_secs_f64());
    assert!((used as f64) < 30.0 * seconds, "it spins: {used} ticks in {seconds} s");
    drop(crowd);
    let mut seed = 10;
    wait_until(async || {
        seed += 1;
        match served(seed).await {
            200 => Ok(()),
            status => Err(format!("it has not recovered: {status}")),
        }
    })
    .await;
    for _ in 0..5 {
        seed += 1;
        assert_eq!(served(seed).await, 200);
    }
}
