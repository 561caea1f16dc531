//! Publishers of KV events that flood, dawdle, or talk nonsense: they harm nobody but themselves.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

mod support;

use std::net::SocketAddr;

use pointsman_wire::kv_events::{Announce, BlockName, Encoding, encode};
use pointsman_wire::zmtp::{Connection, Event, Limits, SocketType};
use serde_json::{Value, json};
use support::fleet::{completion, prompt};
use support::{Fleet, Request, unified, wait_until};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

/// Tokens of a block of the mock engine.
const BLOCK: usize = 16;

/// A publisher that the test speaks for.
struct Publisher {
    listener: TcpListener,
}

impl Publisher {
    async fn new() -> Publisher {
        Publisher { listener: TcpListener::bind("127.0.0.1:0").await.expect("a free port") }
    }

    fn addr(&self) -> SocketAddr {
        self.listener.local_addr().expect("it is bound")
    }

    /// The router as a subscriber.
    async fn subscriber(&self) -> Subscriber {
        let (stream, _) = self.listener.accept().await.expect("the router connects");
        let codec = Connection::new(SocketType::Pub, Limits::default());
        let mut subscriber = Subscriber { stream, codec };
        loop {
            while let Some(event) = subscriber.codec.poll().expect("the router speaks ZMTP") {
                if matches!(event, Event::Subscribe(_)) {
                    return subscriber;
                }
            }
            // What was read may have to be answered before more comes.
            subscriber.flush().await.expect("the router reads");
            let mut buffer = [0; 4096];
            let read = subscriber.stream.read(&mut buffer).await.expect("the router speaks");
            assert!(read > 0, "the router hung up");
            subscriber.codec.feed(&buffer[..read]);
        }
    }
}

struct Subscriber {
    stream: TcpStream,
    codec: Connection,
}

impl Subscriber {
    fn queue(&mut self, seq: u64, payload: &[u8]) {
        self.codec.send(&[&b""[..], &seq.to_be_bytes(), payload]);
    }

    async fn flush(&mut self) -> std::io::Result<()> {
        let output = self.codec.take_output();
        self.stream.write_all(&output).await
    }

    async fn send(&mut self, seq: u64, payload: &[u8]) {
        self.queue(seq, payload);
        self.flush().await.expect("the router reads");
    }
}

/// A message of one event that stores these blocks.
fn stored(names: std::ops::Range<u64>) -> Vec<u8> {
    let tokens: Vec<u32> = (0..names.clone().count() * BLOCK).map(|at| at as u32).collect();
    let hashes: Vec<_> = names.map(BlockName::Int).collect();
    let event = Announce::Stored {
        hashes: &hashes,
        parent: None,
        tokens: &tokens,
        block_size: BLOCK as u32,
        lora_name: None,
        medium: Some("GPU"),
        cache_salt: None,
    };
    encode(1.0, None, &[event], Encoding::Map)
}

/// `honest`, an engine like any other, and `other`, whose events come from the test.
async fn fleet(publisher: &Publisher) -> Fleet {
    let endpoint = json!({"kv_events": {"endpoint": format!("tcp://{}", publisher.addr())}});
    Fleet::start([unified("honest"), unified("other").worker(endpoint)]).await
}

async fn worker(fleet: &Fleet, name: &str) -> Value {
    fleet.router.worker(name).await.unwrap()
}

/// What the honest engine does becomes known.
async fn assert_the_honest_one_is_heard(fleet: &Fleet, seed: u32) {
    let engine = fleet.get("honest").mock.addr();
    for seed in seed..seed + 3 {
        let request = Request::completion(&completion(&prompt(seed, 80), 4, false));
        assert_eq!(request.send(engine).await.0.status, 200);
    }
    wait_until(async || {
        let (known, held) =
            (worker(fleet, "honest").await, fleet.stats("honest")["cached_blocks"].clone());
        assert!(held.as_u64() >= Some(5), "{held}");
        match known["index_blocks"] == held {
            true => Ok(()),
            false => Err(format!("{} blocks are known, {held} are held", known["index_blocks"])),
        }
    })
    .await;
}

async fn count(fleet: &Fleet, kind: &str) -> u64 {
    let metrics = fleet.router.metrics().await;
    metrics.count("pointsman_kv_events_total", &[("worker", "other"), ("kind", kind)])
}

#[tokio::test]
async fn a_publisher_that_floods_keeps_nobody_from_being_heard() {
    let publisher = Publisher::new().await;
    let fleet = fleet(&publisher).await;
    let mut subscriber = publisher.subscriber().await;
    let flood = tokio::spawn(async move {
        let payload = stored(0..64);
        for seq in 0.. {
            subscriber.queue(seq, &payload);
            // As fast as the router reads, and always a good deal ahead of it.
            if seq % 64 == 0 && subscriber.flush().await.is_err() {
                return;
            }
        }
    });
    let mut before = 0;
    for seed in [0, 10, 20] {
        wait_until(async || match count(&fleet, "stored").await {
            stored if stored > before + 1000 => Ok(()),
            stored => Err(format!("{stored} events of the flood are applied")),
        })
        .await;
        assert_the_honest_one_is_heard(&fleet, seed).await;
        before = count(&fleet, "stored").await;
    }
    assert_eq!(worker(&fleet, "other").await["index_blocks"], 64);
    flood.abort();
}

#[tokio::test]
async fn a_publisher_that_stops_in_the_middle_of_a_message_costs_nothing() {
    let publisher = Publisher::new().await;
    let fleet = fleet(&publisher).await;
    let mut subscriber = publisher.subscriber().await;
    subscriber.send(0, &stored(0..4)).await;
    subscriber.queue(1, &stored(4..8));
    let output = subscriber.codec.take_output();
    let (now, later) = output.split_at(output.len() / 2);
    subscriber.stream.write_all(now).await.unwrap();
    assert_the_honest_one_is_heard(&fleet, 0).await;
    assert_eq!(count(&fleet, "stored").await, 1);
    subscriber.stream.write_all(later).await.unwrap();
    wait_until(async || match count(&fleet, "stored").await {
        2 => Ok(()),
        stored => Err(format!("{stored} messages are applied")),
    })
    .await;
}

#[tokio::test]
async fn messages_that_make_no_sense_are_counted_and_nothing_is_believed() {
    let publisher = Publisher::new().await;
    let fleet = fleet(&publisher).await;
    let mut subscriber = publisher.subscriber().await;
    let good = stored(0..4);
    let deep = [&b"\x92\xcb\x3f\xf0\0\0\0\0\0\0\x91"[..], &[0x91; 1 << 20]].concat();
    let hostile: [&[u8]; 8] = [
        b"",
        b"\xc1",
        b"\x93",
        b"\x92\xcb\x3f\xf0\0\0\0\0\0\0\xdd\xff\xff\xff\xff",
        b"\x92\xcb\x7f\xf8\0\0\0\0\0\0\x91\xdf\xff\xff\xff\xff",
        b"{\"type\": \"BlockStored\"}",
        &good[..good.len() - 1],
        &deep,
    ];
    for (seq, payload) in (0..).step_by(2).zip(hostile) {
        subscriber.send(seq, &good).await;
        subscriber.send(seq + 1, payload).await;
    }
    drop(subscriber);
    wait_until(async || match count(&fleet, "malformed").await {
        8 => Ok(()),
        malformed => Err(format!("{malformed} messages are counted as malformed")),
    })
    .await;
    assert_eq!(worker(&fleet, "other").await["index_blocks"], 0);
    assert_the_honest_one_is_heard(&fleet, 0).await;
}
