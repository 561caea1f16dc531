//! Hosts that move to another address, vanish without a word, or are far away behind a network that
//! loses packets. Namespaces of Linux stand for them; where none can be had, a test says that it is skipped.

#![allow(clippy::unwrap_used, clippy::panic, reason = "it is all test")]

mod support;

use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use support::fleet::{MODEL, completion, configuration, prompt, unwatched};
use support::raw::whole;
use support::{Act, Fleet, Raw, Request, Router, Then, skipped, unified, wait_until};
use tokio::net::TcpListener;

fn runs(command: &[&str]) -> bool {
    let status = Command::new(command[0])
        .args(&command[1..])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
    status.is_ok_and(|status| status.success())
}

// ---- a name whose address changes ------------------------------------------------------------

fn write_hosts(file: &std::path::Path, address: &str) {
    std::fs::write(file, format!("127.0.0.1 localhost\n{address} engine.test\n")).unwrap();
}

/// Two engines on one port of two addresses.
async fn at_two_addresses() -> (Raw, Raw) {
    loop {
        let first = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let other = SocketAddr::from(([127, 0, 0, 2], first.local_addr().unwrap().port()));
        if let Ok(second) = TcpListener::bind(other).await {
            let reply = |text| [Act::Send(whole(text), Then::Keep)];
            return (Raw::on(first, reply("here")), Raw::on(second, reply("there")));
        }
    }
}

#[tokio::test]
async fn a_host_name_is_followed_to_another_address_though_the_former_still_answers() {
    let dir = tempfile::tempdir().unwrap();
    let hosts = dir.path().join("hosts");
    write_hosts(&hosts, "127.0.0.1");
    let mount = format!("mount --bind {} /etc/hosts && exec \"$@\"", hosts.display());
    if !runs(&["unshare", "-m", "sh", "-c", &mount, "sh", "true"]) {
        return skipped("a host name that moves; no mount namespace can be had here");
    }
    let (here, there) = at_two_addresses().await;
    let mut worker = here.worker("u0", "unified");
    worker["url"] = json!(format!("http://engine.test:{}", here.addr().port()));
    let config = json!({"health": {"interval": "100ms"}});
    let tree = configuration(&json!([worker]), config);
    let router = Router::start_under(&["unshare", "-m", "sh", "-c", &mount, "sh"], &tree).await;
    let answer = async || {
        let asked = completion(&prompt(1, 40), 4, false);
        let (head, body) = Request::completion(&asked).send(router.addr()).await;
        assert_eq!(head.status, 200, "{body:?}");
        body.json()["choices"][0]["text"].clone()
    };
    assert_eq!(answer().await, "here");
    write_hosts(&hosts, "127.0.0.2");
    // Asked all the time, so that its connections never rest.
    wait_until(async || match answer().await {
        text if text == "there" => Ok(()),
        text => Err(format!("it is still asked {text}")),
    })
    .await;
    for _ in 0..10 {
        assert_eq!(answer().await, "there");
    }
    assert!(!there.seen().is_empty());
}

// ---- a network of its own --------------------------------------------------------------------

/// Carries frames between two devices, later than they came and not all of them. The header before each
/// (`PACKET_VNET_HDR`) keeps what the kernel has left to do for a checksum.
const WIRE: &str = r#"
import heapq, random, select, socket, sys, time
sides = [socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3)) for _ in range(2)]
for side, device in zip(sides, sys.argv[1:3]):
    side.setsockopt(263, 15, 1)
    side.bind((device, 0))
delay, loss = float(sys.argv[3]), float(sys.argv[4])
chance, due, count = random.Random(7), [], 0
print("ready", flush=True)
while True:
    wait = max(0, due[0][0] - time.monotonic()) if due else None
    for side in select.select(sides, [], [], wait)[0]:
        frame, source = side.recvfrom(1 << 17)
        if source[2] != socket.PACKET_OUTGOING and chance.random() >= loss:
            count += 1
            heapq.heappush(due, (time.monotonic() + delay, count, frame, sides[side is sides[0]]))
    while due and due[0][0] <= time.monotonic():
        _, _, frame, to = heapq.heappop(due)
        to.send(frame)
"#;

/// A host in a network namespace, at the far end of a wire in another one. Deleted when it is dropped.
struct Net {
    name: String,
    /// Of this side, of that side.
    addresses: (String, String),
    wire: Option<Child>,
}

impl Net {
    /// `number`: which one of this file's. Each packet takes `delay` seconds one way; `loss` is a share.
    fn new(number: u8, delay: f64, loss: f64) -> Option<Net> {
        let pid = std::process::id();
        // 198.18.0.0/15 is set aside for tests of networks.
        let at = |last: u8| format!("198.18.{}.{}", pid % 251, number * 4 + last);
        let mut net =
            Net { name: format!("pm{pid}n{number}"), addresses: (at(1), at(2)), wire: None };
        if !net.lay() {
            return None;
        }
        let mut wire = Command::new("ip")
            .args(["netns", "exec", &net.device("w"), "python3", "-c", WIRE])
            .args([net.device("b"), net.device("c"), delay.to_string(), loss.to_string()])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .ok()?;
        let mut line = String::new();
        let out = wire.stdout.take();
        net.wire = Some(wire);
        let _ = BufReader::new(out?).read_line(&mut line);
        (line == "ready\n").then_some(net)
    }

    fn device(&self, end: &str) -> String {
        format!("{}{end}", self.name)
    }

    /// Makes both namespaces and what connects them: here, a - b, c - d, there.
    fn lay(&self) -> bool {
        let [a, b, c, d, w] = ["a", "b", "c", "d", "w"].map(|end| self.device(end));
        let there = &self.name;
        let (at_a, at_d) = (format!("{}/30", self.addresses.0), format!("{}/30", self.addresses.1));
        let ip = |command: &str| {
            let words: Vec<&str> = std::iter::once("ip").chain(command.split(' ')).collect();
            runs(&words)
        };
        ip(&format!("netns add {w}"))
            && ip(&format!("netns add {there}"))
            && ip(&format!("link add {a} type veth peer name {b} netns {w}"))
            && ip(&format!("-n {w} link add {c} type veth peer name {d} netns {there}"))
            && ip(&format!("-n {w} link set {b} up"))
            && ip(&format!("-n {w} link set {c} up"))
            && ip(&format!("-n {there} addr add {at_d} dev {d}"))
            && ip(&format!("-n {there} link set {d} up"))
            && ip(&format!("addr add {at_a} dev {a}"))
            && ip(&format!("link set {a} up"))
    }

    /// Cuts the wire: whatever is sent is lost, and nobody is told.
    fn cut(&mut self) {
        if let Some(mut wire) = self.wire.take() {
            let _ = wire.kill();
            let _ = wire.wait();
        }
    }

    /// A mock engine inside, until it is dropped.
    fn engine(&self, more: &[&str]) -> Inside {
        let mut child = Command::new("ip")
            .args(["netns", "exec", &self.name, env!("CARGO_BIN_EXE_pointsman"), "engine"])
            .args(["--role", "unified", "--host", &self.addresses.1])
            .args(more)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let at = line.find("http://").unwrap_or_else(|| panic!("no address: {line}"));
        let url = line[at..].split_whitespace().next().unwrap().trim_end_matches([',', ';', '/']);
        Inside { child, url: url.to_owned() }
    }
}

impl Drop for Net {
    fn drop(&mut self) {
        self.cut();
        // Devices go with their namespaces, and with their peers.
        let _ = runs(&["ip", "netns", "delete", &self.name]);
        let _ = runs(&["ip", "netns", "delete", &self.device("w")]);
    }
}

struct Inside {
    child: Child,
    url: String,
}

impl Inside {
    fn worker(&self, name: &str) -> Value {
        json!({"name": name, "role": "unified", "url": self.url, "kv_events": "off"})
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Streams of so many tokens at once; none of them differs from what an engine alone says.
async fn all_are_whole(fleet: &Fleet, router: &Router, streams: u32, tokens: u32) {
    let mut exchanges = Vec::new();
    for seed in 0..streams {
        let asked = completion(&prompt(seed, 100), tokens, true);
        exchanges.push((Request::completion(&asked).open(router.addr()).await, asked));
    }
    for (mut exchange, asked) in exchanges {
        assert_eq!(exchange.head_within(Duration::from_secs(30)).await.status, 200);
        let body = exchange.rest().await;
        fleet.assert_streamed_as_alone("/v1/completions", &asked, &body).await;
    }
}

#[tokio::test]
async fn one_percent_of_loss_and_200_ms_of_delay_cost_time_and_no_reply() {
    let Some(net) = Net::new(0, 0.1, 0.01) else {
        return skipped("loss and delay; network namespaces and python3 cannot be had here");
    };
    let engines = [net.engine(&["--speed", "inf"]), net.engine(&["--speed", "inf"])];
    let workers = json!([engines[0].worker("u0"), engines[1].worker("u1")]);
    let router = Router::start(&configuration(&workers, json!({}))).await;
    let asker = Fleet::start([unified("alone")]).await;
    wait_until(async || match router.ready().await.1["models"][MODEL].clone() {
        model if model["unified_up"] == 2 => Ok(()),
        model => Err(format!("not both are up: {model}")),
    })
    .await;
    let began = Instant::now();
    all_are_whole(&asker, &router, 40, 60).await;
    assert!(began.elapsed() >= Duration::from_millis(200), "the wire delays nothing");
    let metrics = router.metrics().await;
    assert_eq!(metrics.not_zero("pointsman_leg_failures_total"), Vec::<String>::new());
    for name in ["u0", "u1"] {
        assert_eq!(router.worker(name).await.unwrap()["condition"], "up");
    }
}

/// A host that loses its power says nothing: no end, no reset. Connections to it look open.
#[tokio::test]
async fn a_host_that_vanishes_without_a_word_is_noticed_and_its_requests_are_served_elsewhere() {
    let Some(mut net) = Net::new(1, 0.0, 0.0) else {
        return skipped("a host that vanishes; network namespaces and python3 cannot be had here");
    };
    // Slow enough to be at it when the host goes.
    let engine = net.engine(&["--speed", "0.01"]);
    let mut worker = engine.worker("u0");
    support::merge(&mut worker, json!({"model": MODEL}));
    let fleet = Fleet::with([unified("u1")], unwatched(json!({}))).await;
    fleet.remove("u1").await;
    Request::post("/v1/pointsman/workers", &worker).send(fleet.addr()).await;
    let asked = completion(&prompt(1, 200), 100, false);
    let mut running = Request::completion(&asked).open(fleet.addr()).await;
    wait_until(async || match fleet.router.worker("u0").await.unwrap() {
        worker if worker["active_requests"] == 1 || worker["load"]["active"] == 1 => Ok(()),
        worker => Err(format!("it has nothing to do: {worker}")),
    })
    .await;
    fleet.add("u1").await;
    net.cut();
    let began = Instant::now();
    let head = running.head_within(Duration::from_secs(60)).await;
    assert_eq!((head.status, head.worker()), (200, "u1"));
    assert!(began.elapsed() < Duration::from_secs(40), "{:?}", began.elapsed());
    fleet.assert_as_alone(&Request::completion(&asked), &running.rest().await.json()).await;
    assert_eq!(fleet.failures("local", "cut").await, 1);
}
