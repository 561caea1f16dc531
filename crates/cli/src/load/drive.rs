//! Sends a trace's requests at their times and gathers what came of them. Memory is bounded by the
//! requests under way: a prompt is made when it is sent.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::sync::Arc;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use pointsman_sim::profile::Profile;
use pointsman_sim::replay::{ITL_SLO, Served, ttft_slo};
use pointsman_sim::trace::{Start, Trace, tokens};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until};

use super::client::{Ask, Reply, Target};

/// Token ids that prompts are made of: ordinary ones in the vocabularies of today's models.
const VOCABULARY: std::ops::Range<u32> = 100..1100;

/// Chunk of the SLO on TTFT.
const CHUNK: u32 = 8192;

/// Kinds of errors that are told apart.
const MAX_ERRORS: usize = 16;

/// What is to be sent.
pub(super) struct Plan {
    pub(super) trace: Trace,
    /// The first so many requests.
    pub(super) count: usize,
    /// How much faster than recorded.
    pub(super) pace: f64,
    /// How much faster than real engines those of the target are.
    pub(super) speed: f64,
    pub(super) profile: Profile,
    pub(super) concurrency: usize,
}

/// What was seen.
#[derive(Debug, Default)]
pub(super) struct Seen {
    /// In the order in which requests ended.
    pub(super) served: Vec<Served>,
    pub(super) errors: BTreeMap<String, usize>,
    pub(super) planned: usize,
    /// How long it took.
    pub(super) seconds: f64,
    pub(super) interrupted: bool,
}

/// A request that has ended.
struct Ended {
    request: usize,
    /// When it was to be sent.
    due: Instant,
    reply: Reply,
    at: Instant,
}

/// Sends everything, or until `asked` to stop.
pub(super) async fn run(
    plan: Plan,
    target: Target,
    asked: impl Future<Output = ()>,
) -> anyhow::Result<Seen> {
    let style = ProgressStyle::with_template("{bar:30} {pos}/{len} {elapsed_precise} {msg}")?;
    let bar = ProgressBar::new(plan.count as u64).with_style(style);
    let mut load = Load::new(plan, target);
    tokio::pin!(asked);
    loop {
        let due = load.due();
        if due.is_none() && load.under_way.is_empty() {
            break;
        }
        let room = load.under_way.len() < load.plan.concurrency;
        tokio::select! {
            () = &mut asked => {
                load.seen.interrupted = true;
                break;
            }
            Some(ended) = load.under_way.join_next() => {
                load.take(ended?);
                bar.inc(1);
            }
            () = sleep_until(due.unwrap_or(load.begun)), if room && due.is_some() => load.send(),
        }
        bar.set_message(format!(
            "{} under way, {} failed",
            load.under_way.len(),
            load.seen.errors.values().sum::<usize>()
        ));
    }
    load.under_way.shutdown().await;
    bar.finish_and_clear();
    load.seen.planned = load.plan.count;
    load.seen.seconds = load.begun.elapsed().as_secs_f64();
    Ok(load.seen)
}

struct Load {
    plan: Plan,
    target: Arc<Target>,
    vocabulary: Vec<u32>,
    begun: Instant,
    arrivals: BinaryHeap<Reverse<(Instant, usize)>>,
    /// The turn that waits for each request, and its pause.
    next: BTreeMap<usize, (usize, u64)>,
    under_way: JoinSet<Ended>,
    seen: Seen,
}

impl Load {
    fn new(plan: Plan, target: Target) -> Load {
        let begun = Instant::now();
        let (mut arrivals, mut next) = (BinaryHeap::new(), BTreeMap::new());
        for (at, request) in plan.trace.requests.iter().take(plan.count).enumerate() {
            match request.start {
                Start::At(time) => arrivals.push(Reverse((begun + shorter(time, plan.pace), at))),
                Start::After { request, delay } => {
                    next.insert(request, (at, delay));
                }
            }
        }
        Load {
            plan,
            target: Arc::new(target),
            vocabulary: VOCABULARY.collect(),
            begun,
            arrivals,
            next,
            under_way: JoinSet::new(),
            seen: Seen::default(),
        }
    }

    fn due(&self) -> Option<Instant> {
        self.arrivals.peek().map(|Reverse((at, _))| *at)
    }

    fn ttft_slo(&self, request: usize) -> f64 {
        ttft_slo(&self.plan.profile, self.plan.trace.requests[request].input_tokens, CHUNK)
    }

    fn send(&mut self) {
        let Some(Reverse((due, request))) = self.arrivals.pop() else { return };
        let told = &self.plan.trace.requests[request];
        let ask = Ask {
            prompt: tokens(&self.plan.trace.prompt(request), &self.vocabulary),
            output_tokens: told.output_tokens,
            ttft: Duration::from_secs_f64(self.ttft_slo(request) / self.plan.speed),
            itl: Duration::from_secs_f64(ITL_SLO / self.plan.speed),
            session: told.session,
        };
        let target = Arc::clone(&self.target);
        self.under_way.spawn(async move {
            let reply = target.send(&ask).await;
            Ended { request, due, reply, at: Instant::now() }
        });
    }

    fn take(&mut self, ended: Ended) {
        let Ended { request, due, reply, at } = ended;
        if let Some((turn, delay)) = self.next.remove(&request) {
            self.arrivals.push(Reverse((at + shorter(delay, self.plan.pace), turn)));
        }
        // As of engines at their real speed.
        let seconds = |from: Instant, to: Instant| {
            to.saturating_duration_since(from).as_secs_f64() * self.plan.speed
        };
        let gaps = f64::from(reply.tokens.saturating_sub(1));
        let times = reply.first.zip(reply.last).filter(|_| gaps > 0.0);
        self.seen.served.push(Served {
            arrived: seconds(self.begun, due),
            ttft: reply.first.map(|first| seconds(due, first)),
            itl: times.map(|(first, last)| seconds(first, last) / gaps),
            finished: reply.error.is_none(),
            path: reply.path,
            predicted_ttft: reply.predicted_ttft_ms.map(|ms| ms / 1e3 * self.plan.speed),
            ttft_slo: self.ttft_slo(request),
        });
        if let Some(error) = reply.error {
            let known =
                self.seen.errors.len() < MAX_ERRORS || self.seen.errors.contains_key(&error);
            let error = if known { error } else { "other errors".to_owned() };
            *self.seen.errors.entry(error).or_default() += 1;
        }
    }
}

fn shorter(nanos: u64, pace: f64) -> Duration {
    Duration::from_secs_f64(nanos as f64 / 1e9 / pace)
}
