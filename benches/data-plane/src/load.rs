//! The load: clients that each keep one connection and send the next request when a reply is whole.
//!
//! Invariants: one thread; every byte of every reply is compared; a run ends at a fixed time, and a
//! wrong reply or silence ends it at once with an error.

use std::io::Write as _;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinSet;

use crate::cpu::Tree;
use crate::wire::{Api, MODEL, Reply, Stream, head_end};

/// How long a run may wait for the replies that it needs, and for the last ones.
const PATIENCE: Duration = Duration::from_secs(60);

/// Most latencies that one client keeps; later ones are not counted.
const MAX_SAMPLES: usize = 1 << 22;

const READ_BYTES: usize = 64 * 1024;

/// Digits at the start of a prompt that make it unlike all others.
const SERIAL_DIGITS: usize = 12;

/// One kind of load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Case {
    pub(crate) clients: usize,
    pub(crate) prompt_bytes: usize,
    pub(crate) stream: Option<Stream>,
}

/// How long a run takes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Times {
    /// The clients begin one after the other over this time: no listener has room for thousands of
    /// connections at once.
    pub(crate) ramp: Duration,
    pub(crate) warm_up: Duration,
    pub(crate) measured: Duration,
}

/// Percentiles of one latency, in microseconds.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Latency {
    pub(crate) p50: f64,
    pub(crate) p99: f64,
}

/// What one run gave.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Outcome {
    pub(crate) requests: u64,
    pub(crate) tokens: u64,
    /// Reads that brought them: how far events came together.
    pub(crate) reads: u64,
    /// CPU seconds of the proxy; 0 where there is none.
    pub(crate) cpu: f64,
    /// Measured seconds.
    pub(crate) seconds: f64,
    /// To the first byte of the body.
    pub(crate) first: Latency,
    /// To the end of the reply.
    pub(crate) whole: Latency,
}

const WARMING: u8 = 0;
const MEASURING: u8 = 1;
const OVER: u8 = 2;

/// What all clients of a run share.
#[derive(Debug)]
struct Plan {
    addr: SocketAddr,
    expected: Vec<u8>,
    event_bytes: Option<usize>,
    phase: AtomicU8,
    /// Whole replies so far.
    replies: AtomicUsize,
}

impl Plan {
    fn is(&self, phase: u8) -> bool {
        self.phase.load(Ordering::Relaxed) == phase
    }
}

#[derive(Debug, Default)]
struct Samples {
    first: Vec<u64>,
    whole: Vec<u64>,
    tokens: u64,
    reads: u64,
}

/// Runs one case against one address.
pub(crate) async fn run(
    addr: SocketAddr,
    tree: Option<&Tree>,
    api: Api,
    case: Case,
    times: Times,
) -> anyhow::Result<Outcome> {
    let plan = Arc::new(Plan {
        addr,
        expected: expected(api, case).into_bytes(),
        event_bytes: case.stream.map(|_| api.event().len()),
        phase: AtomicU8::new(WARMING),
        replies: AtomicUsize::new(0),
    });
    let mut clients = JoinSet::new();
    let each = times.ramp / u32::try_from(case.clients).unwrap_or(u32::MAX).max(1);
    for _ in 0..case.clients {
        clients.spawn(client(Arc::clone(&plan), Outgoing::new(api, case)));
        if !each.is_zero() {
            tokio::time::sleep(each).await;
        }
    }
    let cpu = || tree.map_or(Ok(Duration::ZERO), Tree::cpu_time);
    run_on(&plan, &mut clients, case.clients, times.warm_up).await?;
    let (began, before) = (Instant::now(), cpu()?);
    plan.phase.store(MEASURING, Ordering::Relaxed);
    run_on(&plan, &mut clients, case.clients, times.measured).await?;
    plan.phase.store(OVER, Ordering::Relaxed);
    let (cpu, seconds) = (cpu()? - before, began.elapsed().as_secs_f64());
    let ended = tokio::time::timeout(PATIENCE, collect(clients)).await;
    let samples = ended.context("replies did not come to an end")??;
    Ok(Outcome {
        requests: samples.whole.len() as u64,
        tokens: samples.tokens,
        reads: samples.reads,
        cpu: cpu.as_secs_f64(),
        seconds,
        first: latency(samples.first),
        whole: latency(samples.whole),
    })
}

/// The body that every reply of a case must have.
fn expected(api: Api, case: Case) -> String {
    case.stream.map_or_else(|| api.whole(), |stream| stream.body(api))
}

/// Lets the clients run for a time, or several times that until they have had `wanted` replies. None
/// of them ends by itself but with an error.
async fn run_on(
    plan: &Plan,
    clients: &mut JoinSet<anyhow::Result<Samples>>,
    wanted: usize,
    time: Duration,
) -> anyhow::Result<()> {
    let replies = || plan.replies.load(Ordering::Relaxed);
    let (began, before) = (Instant::now(), replies());
    loop {
        match tokio::time::timeout(time, clients.join_next()).await {
            Err(_elapsed) => {}
            Ok(Some(Ok(Err(error)))) => return Err(error),
            Ok(_) => bail!("a client ended early"),
        }
        if replies() - before >= wanted {
            return Ok(());
        }
        ensure!(began.elapsed() < PATIENCE, "fewer than {wanted} replies within {PATIENCE:?}");
    }
}

async fn collect(mut clients: JoinSet<anyhow::Result<Samples>>) -> anyhow::Result<Samples> {
    let mut all = Samples::default();
    while let Some(ended) = clients.join_next().await {
        let samples = ended??;
        all.first.extend(samples.first);
        all.whole.extend(samples.whole);
        all.tokens += samples.tokens;
        all.reads += samples.reads;
    }
    Ok(all)
}

async fn client(plan: Arc<Plan>, mut outgoing: Outgoing) -> anyhow::Result<Samples> {
    let mut stream = TcpStream::connect(plan.addr).await.context("connecting")?;
    stream.set_nodelay(true)?;
    let mut buffer = Vec::with_capacity(READ_BYTES);
    let mut samples = Samples::default();
    while !plan.is(OVER) {
        let request = outgoing.next()?;
        let (begin, mut first) = (Instant::now(), None);
        stream.write_all(request).await.context("sending")?;
        let mut reply = Reply::new(&plan.expected);
        while !reply.is_complete() {
            let read = stream.read_buf(&mut buffer).await.context("receiving")?;
            ensure!(read > 0, "the connection was closed after {} bytes", reply.received());
            let had = reply.received();
            let taken = reply.feed(&buffer)?;
            buffer.drain(..taken);
            if had == 0 && reply.received() > 0 {
                first = Some(begin.elapsed());
            }
            if plan.is(MEASURING) {
                let tokens = |bytes| plan.event_bytes.map_or(0, |event| bytes / event);
                samples.tokens += (tokens(reply.received()) - tokens(had)) as u64;
                samples.reads += 1;
            }
        }
        plan.replies.fetch_add(1, Ordering::Relaxed);
        if plan.is(MEASURING) && samples.whole.len() < MAX_SAMPLES {
            samples.whole.push(nanos(begin.elapsed()));
            samples.first.push(nanos(first.unwrap_or_default()));
        }
    }
    Ok(samples)
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

fn latency(mut nanos: Vec<u64>) -> Latency {
    nanos.sort_unstable();
    let at = |share: f64| {
        let index = (nanos.len() as f64 * share) as usize;
        nanos.get(index.min(nanos.len().saturating_sub(1))).map_or(0.0, |ns| *ns as f64 / 1e3)
    };
    Latency { p50: at(0.5), p99: at(0.99) }
}

/// The requests of one client: the same bytes but for a serial number at the start of the prompt,
/// so that no prompt was seen before.
#[derive(Debug)]
struct Outgoing {
    bytes: Vec<u8>,
    serial_at: usize,
}

/// Serial number of the next request, whoever sends it.
static SERIAL: AtomicU64 = AtomicU64::new(0);

impl Outgoing {
    fn new(api: Api, case: Case) -> Outgoing {
        let mut body = format!("{{\"model\":\"{MODEL}\",\"max_tokens\":64,\"temperature\":0.7,");
        if let Some(stream) = case.stream {
            body += &format!("\"stream\":true,\"user\":\"{}\",", stream.written());
        }
        body += match api {
            Api::Completions => "\"prompt\":\"",
            Api::Chat => "\"messages\":[{\"role\":\"user\",\"content\":\"",
        };
        let serial_in_body = body.len();
        body += &prompt(case.prompt_bytes);
        body += match api {
            Api::Completions => "\"}",
            Api::Chat => "\"}]}",
        };
        let head = format!(
            "POST {} HTTP/1.1\r\nhost: 127.0.0.1\r\naccept-encoding: gzip, deflate\r\n\
             connection: keep-alive\r\naccept: application/json\r\n\
             content-type: application/json\r\nuser-agent: OpenAI/Python 2.0.0\r\n\
             authorization: Bearer sk-0123456789abcdef\r\nx-stainless-lang: python\r\n\
             content-length: {}\r\n\r\n",
            api.path(),
            body.len()
        );
        let serial_at = head.len() + serial_in_body;
        Outgoing { bytes: (head + &body).into_bytes(), serial_at }
    }

    fn next(&mut self) -> anyhow::Result<&[u8]> {
        let serial = SERIAL.fetch_add(1, Ordering::Relaxed);
        let place = self.bytes.get_mut(self.serial_at..self.serial_at + SERIAL_DIGITS);
        let mut place = place.context("no place for the serial number")?;
        write!(place, "{serial:0SERIAL_DIGITS$}")?;
        Ok(&self.bytes)
    }
}

/// English-like text with some line ends, of exactly so many bytes.
fn prompt(bytes: usize) -> String {
    let text = " Disaggregated serving puts the computation of the prompt and the generation of \
                tokens on workers of their own.\\nEach request is looked at once.";
    let mut prompt = "0".repeat(SERIAL_DIGITS);
    while prompt.len() < bytes {
        prompt += text;
    }
    prompt.truncate(bytes);
    // An escape that was cut in two.
    if prompt.ends_with('\\') {
        prompt.pop();
        prompt.push('.');
    }
    prompt
}

/// Sends one request and returns the head of its reply, once all of the reply is as it should be.
pub(crate) async fn probe(addr: SocketAddr, api: Api, case: Case) -> anyhow::Result<String> {
    let expected = expected(api, case);
    let mut outgoing = Outgoing::new(api, case);
    let exchange = async {
        let mut stream = TcpStream::connect(addr).await?;
        stream.write_all(outgoing.next()?).await?;
        let (mut reply, mut all, mut at) = (Reply::new(expected.as_bytes()), Vec::new(), 0);
        while !reply.is_complete() {
            ensure!(stream.read_buf(&mut all).await? > 0, "the connection was closed");
            at += reply.feed(all.get(at..).unwrap_or_default())?;
        }
        let head = all.get(..head_end(&all)?.unwrap_or(0)).unwrap_or_default();
        Ok(String::from_utf8_lossy(head).to_ascii_lowercase())
    };
    tokio::time::timeout(PATIENCE, exchange).await.context("no reply")?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_of_one_client_differ_in_their_serial_number_alone() {
        let stream = Some(Stream { tokens: 2, per_write: 1, pause_ms: 0 });
        for api in Api::ALL {
            let case = Case { clients: 1, prompt_bytes: 1024, stream };
            let mut outgoing = Outgoing::new(api, case);
            let first = outgoing.next().unwrap().to_vec();
            let second = outgoing.next().unwrap().to_vec();
            let head = head_end(&first).unwrap().unwrap();
            let (_, path, length) = crate::wire::request_head(&first).unwrap();
            assert_eq!((path.as_str(), length), (api.path(), first.len() - head));
            let digits = outgoing.serial_at..outgoing.serial_at + SERIAL_DIGITS;
            assert_ne!(first[digits.clone()], second[digits.clone()]);
            assert_eq!(first[..digits.start], second[..digits.start]);
            assert_eq!(first[digits.end..], second[digits.end..]);
            assert_eq!(Stream::read(&first), stream);
        }
    }

    #[test]
    fn percentiles_are_those_of_the_sorted_values() {
        let latency = latency((1..=100).rev().map(|n| n * 1000).collect());
        assert_eq!((latency.p50, latency.p99), (51.0, 100.0));
    }
}
