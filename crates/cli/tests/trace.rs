//! The first part of a conversation trace through the real binary: nothing fails, nothing stays
//! behind, and what the router takes for cached is what is truly in the engines' caches.
//!
//! Prompts and answers are a 32nd as long as in the trace, and so are the thresholds in
//! tokens. A hash id still stands for a whole block (instead of 32), so prefixes repeat exactly
//! where the trace says so. Arrival times are left out: a fixed number of requests runs at any time.
#![allow(clippy::expect_used, clippy::panic, reason = "it is all test")]

mod cache;
mod support;

use std::fmt::Write as _;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use cache::{candidates, caught_up, explain};
use pointsman_sim::trace::{PIECE_TOKENS, Piece, tokens};
use serde_json::{Value, json};
use support::fleet::MODEL;
use support::{Fleet, Request, Spec, decode, prefill};
use tokio::task::JoinSet;

const TRACE: &str = include_str!("fixtures/mooncake_conversation_2000.txt");

/// What lengths are divided by.
const DIVISOR: u32 = 32;

/// Requests that run at any time.
const CONCURRENCY: usize = 32;

/// One request of the trace.
struct Row {
    prompt: Vec<u32>,
    output_tokens: u32,
}

impl Row {
    fn parse(line: &str) -> Row {
        let mut fields = line.split(' ');
        let mut field = || fields.next().expect("three fields");
        let input_length: u32 = field().parse().expect("a length");
        let output_length: u32 = field().parse().expect("a length");
        let ids = field().split(',').flat_map(|run| {
            let (first, last) = run.split_once('-').unwrap_or((run, run));
            let id = |text: &str| text.parse::<u64>().expect("a hash id");
            id(first)..=id(last)
        });
        let piece = |(before, hash_id): (u32, u64)| Piece {
            hash_id,
            tokens: (input_length - before).min(PIECE_TOKENS).div_ceil(DIVISOR),
        };
        let pieces: Vec<Piece> = (0..).step_by(PIECE_TOKENS as usize).zip(ids).map(piece).collect();
        let vocabulary: Vec<u32> = (100..1100).collect();
        Row { prompt: tokens(&pieces, &vocabulary), output_tokens: output_length.div_ceil(DIVISOR) }
    }

    fn first(count: usize) -> Vec<Row> {
        TRACE.lines().take(count).map(Row::parse).collect()
    }

    /// The request's body, written by hand because there are so many ids in it.
    fn body(&self, stream: bool) -> String {
        let mut body = format!(r#"{{"model":"{MODEL}","prompt":["#);
        for (at, id) in self.prompt.iter().enumerate() {
            let comma = if at == 0 { "" } else { "," };
            let _ = write!(body, "{comma}{id}");
        }
        let max_tokens = self.output_tokens;
        let _ =
            write!(body, r#"],"max_tokens":{max_tokens},"ignore_eos":true,"stream":{stream}}}"#);
        body
    }

    fn probe(&self) -> Value {
        json!({"model": MODEL, "prompt": self.prompt, "max_tokens": self.output_tokens})
    }
}

/// Sends one request and looks at its reply; the path that it took.
async fn send(to: SocketAddr, row: &Row, stream: bool) -> String {
    let request = Request::raw("/v1/completions", row.body(stream));
    let (head, reply) = request.send(to).await;
    assert_eq!(head.status, 200, "{reply:?}");
    let tokens = if stream {
        assert!(reply.is_done(), "{reply:?}");
        reply.chunks().len() as u64
    } else {
        reply.json()["usage"]["completion_tokens"].as_u64().expect("usage")
    };
    assert_eq!(tokens, u64::from(row.output_tokens));
    head.path().to_owned()
}

/// Sends all of them, every other one as a stream; how many went local.
async fn send_all(to: SocketAddr, rows: &Arc<Vec<Row>>) -> usize {
    let next = Arc::new(AtomicUsize::new(0));
    let mut senders = JoinSet::new();
    for _ in 0..CONCURRENCY {
        let (rows, next) = (Arc::clone(rows), Arc::clone(&next));
        senders.spawn(async move {
            let mut local = 0;
            loop {
                let at = next.fetch_add(1, Ordering::Relaxed);
                let Some(row) = rows.get(at) else { return local };
                local += usize::from(send(to, row, at % 2 == 0).await == "local");
            }
        });
    }
    senders.join_all().await.into_iter().sum()
}

async fn fleet(capacity_blocks: u32) -> Fleet {
    let sized = |spec: Spec| {
        spec.engine(|engine| {
            engine.capacity_blocks = capacity_blocks;
            engine.keep_requests = 0;
        })
    };
    let specs = [prefill("p0"), prefill("p1"), decode("d0"), decode("d1")].map(sized);
    let config = json!({
        "routing": {"eff_isl_threshold": 2048 / DIVISOR},
        "log": {"filter": "info"},
    });
    Fleet::with(specs, config).await
}

/// Holds the router's view of every worker against the engines' caches, for every `step`th prompt.
async fn assert_overlaps_are_true(fleet: &Fleet, rows: &[Row], step: usize) {
    let caches = caught_up(fleet).await;
    let (mut little, mut much) = (0, 0);
    for row in rows.iter().step_by(step) {
        let record = explain(fleet, &row.probe()).await;
        let isl = row.prompt.len();
        assert_eq!(record["isl_tokens"], isl);
        for (name, ranks) in &caches {
            let truth = ranks[0].overlap(&row.prompt);
            let candidate = candidates(&record, name)[0];
            assert_eq!(candidate["overlap_tokens"], truth, "on {name}");
            assert_eq!(candidate["effective_isl_tokens"], isl - truth, "on {name}");
            *(if truth < isl / 2 { &mut little } else { &mut much }) += 1;
        }
    }
    assert!(little > 10 && much > 10, "{little} hold little, {much} much: nothing is tested");
}

async fn assert_it_went_well(fleet: &Fleet, requests: usize, local: usize) {
    assert!(
        local > requests / 20 && local < requests * 19 / 20,
        "{local} of {requests} went local"
    );
    fleet.assert_nothing_leaks().await;
    let metrics = fleet.router.metrics().await;
    assert_eq!(metrics.count("pointsman_decisions_total", &[]), requests as u64);
    let went = |path| metrics.count("pointsman_decisions_total", &[("path", path)]);
    assert_eq!((went("local"), went("remote")), (local as u64, (requests - local) as u64));
    assert_eq!(metrics.not_zero("pointsman_leg_failures_total"), [""; 0]);
    for kind in ["lost", "malformed"] {
        assert_eq!(metrics.count("pointsman_kv_events_total", &[("kind", kind)]), 0, "{kind}");
    }
    for kind in ["orphaned", "unknown", "refused", "renamed", "malformed"] {
        let blocks = metrics.count("pointsman_kv_event_blocks_total", &[("kind", kind)]);
        assert_eq!(blocks, 0, "{kind}");
    }
    assert_eq!(metrics.not_zero("pointsman_index_stale"), [""; 0]);
    let status = fleet.router.status().await;
    assert_eq!(status["models"][0]["ledger"], "sound");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_thousand_requests_of_a_trace_leave_nothing_and_the_index_is_true() {
    let rows = Arc::new(Row::first(2000));
    assert_eq!(rows.len(), 2000);
    let fleet = fleet(100_000).await;
    let local = send_all(fleet.addr(), &rows).await;
    assert_it_went_well(&fleet, rows.len(), local).await;
    assert_overlaps_are_true(&fleet, &rows, 37).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn under_eviction_the_index_stays_true() {
    let rows = Arc::new(Row::first(600));
    // A few times what the requests that run need, a fraction of what all of them leave.
    let fleet = fleet(3000).await;
    let local = send_all(fleet.addr(), &rows).await;
    assert_it_went_well(&fleet, rows.len(), local).await;
    let metrics = fleet.router.metrics().await;
    let removed = metrics.count("pointsman_kv_events_total", &[("kind", "removed")]);
    assert!(removed > 0, "nothing was evicted");
    assert_overlaps_are_true(&fleet, &rows, 7).await;
}
