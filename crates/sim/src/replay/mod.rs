//! A trace served by a fleet on the virtual clock: what each request got, under one policy.
//!
//! Equal scenarios give equal results. Prompts are the block hash ids of the trace: no tokens are
//! made. Sessions are closed loops: a turn starts when the one before has ended and its delay passed.

mod goodput;
mod scenario;
mod summary;

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::Arc;
use std::time::Duration;

use pointsman_brain::{Profile, Slo};

use crate::engine::{Content, Nanos};
use crate::fleet::{Ending, Fleet, FleetRequest, Outcome, RequestId};
use crate::trace::{Start, Trace, block_names};

pub use pointsman_brain::{Path, Settings};

pub use goodput::{Goodput, goodput};
pub use scenario::{Faults, FleetShape, Kill, NotAFleet, Scenario, Slow};
pub use summary::{Misses, Summary, percentile};

/// SLO of the study: this long, and twice the unloaded prefill of the whole prompt.
pub const TTFT_SLO_FIXED: f64 = 0.5;
/// See [`TTFT_SLO_FIXED`].
pub const TTFT_SLO_PREFILLS: f64 = 2.0;
/// SLO of the study: mean time between tokens, in seconds.
pub const ITL_SLO: f64 = 0.05;
/// Share of requests that are to meet both SLOs.
pub const ATTAINMENT: f64 = 0.95;

const NANOS: f64 = 1e9;

/// One request, ready to be sent.
#[derive(Clone, Debug)]
struct Prepared {
    input_tokens: u32,
    output_tokens: u32,
    content: Arc<Content>,
    session: Option<u64>,
    start: Start,
    /// Turns that wait for this one, with their delays.
    next: Option<(usize, Nanos)>,
}

/// A trace, ready to be replayed any number of times.
#[derive(Clone, Debug)]
pub struct Workload {
    requests: Vec<Prepared>,
    block_size: u32,
}

/// What a request got.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Served {
    /// When it came, in seconds of the fleet's clock.
    pub arrived: f64,
    /// Time to first token in seconds; none if none came.
    pub ttft: Option<f64>,
    /// Mean time between its tokens in seconds; none for fewer than two.
    pub itl: Option<f64>,
    /// Whether it got its last token.
    pub finished: bool,
    /// The path that it took, if any.
    pub path: Option<Path>,
    /// TTFT as predicted when it was decided, in seconds.
    pub predicted_ttft: Option<f64>,
    /// What TTFT is to be, in seconds.
    pub ttft_slo: f64,
}

impl Served {
    /// Whether TTFT met its SLO.
    #[must_use]
    pub fn meets_ttft(&self) -> bool {
        self.finished && self.ttft.is_some_and(|ttft| ttft <= self.ttft_slo)
    }

    /// Whether ITL met its SLO.
    #[must_use]
    pub fn meets_itl(&self) -> bool {
        self.finished && self.itl.is_none_or(|itl| itl <= ITL_SLO)
    }

    /// Whether both did.
    #[must_use]
    pub fn meets_both(&self) -> bool {
        self.meets_ttft() && self.meets_itl()
    }
}

impl Workload {
    /// Names the blocks of every prompt; at most the first `limit` requests are taken.
    #[must_use]
    pub fn new(trace: &Trace, block_size: u32, limit: usize) -> Workload {
        let count = trace.requests.len().min(limit);
        let prepare = |(at, request): (usize, &crate::trace::Request)| Prepared {
            input_tokens: request.input_tokens,
            output_tokens: request.output_tokens,
            content: Arc::new(Content {
                names: block_names(&trace.prompt(at), block_size),
                ..Content::default()
            }),
            session: request.session.map(u64::from),
            start: request.start,
            next: None,
        };
        let mut requests: Vec<Prepared> =
            trace.requests.iter().take(count).enumerate().map(prepare).collect();
        for at in 0..count {
            if let Start::After { request, delay } = requests[at].start {
                requests[request].next = Some((at, delay));
            }
        }
        Workload { requests, block_size }
    }

    /// How many requests there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.requests.len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }

    /// Tokens of one block.
    #[must_use]
    pub fn block_size(&self) -> u32 {
        self.block_size
    }

    /// Serves every request; in the order of the trace.
    #[must_use]
    pub fn serve(&self, scenario: &Scenario) -> Vec<Served> {
        self.serve_while(scenario, |_| true).unwrap_or_default()
    }

    /// The same, as long as `go_on` says so of each that has ended; none when it did not.
    pub(crate) fn serve_while(
        &self,
        scenario: &Scenario,
        mut go_on: impl FnMut(&Served) -> bool,
    ) -> Option<Vec<Served>> {
        let mut run = Run::new(self, scenario);
        while run.step() {
            if !run.collect(&mut go_on) {
                return None;
            }
        }
        run.served.into_iter().collect()
    }

    /// Time from the first arrival to the last one that the trace gives, at this rate.
    #[must_use]
    pub fn span(&self, rate: f64) -> Nanos {
        let start = |request: &Prepared| match request.start {
            Start::At(at) => at,
            Start::After { .. } => 0,
        };
        scaled(self.requests.iter().map(start).max().unwrap_or(0), rate)
    }
}

fn scaled(at: Nanos, rate: f64) -> Nanos {
    (at as f64 / rate) as Nanos
}

/// TTFT that a prompt is to get, in seconds.
#[must_use]
pub fn ttft_slo(profile: &Profile, input_tokens: u32, chunk: u32) -> f64 {
    let tokens = f64::from(input_tokens);
    let steps = f64::from(input_tokens.div_ceil(chunk.max(1)));
    let prefill = profile.k0 * steps + profile.a1 * tokens + profile.a2 * tokens * tokens / 2.0;
    TTFT_SLO_FIXED + TTFT_SLO_PREFILLS * prefill
}

/// A workload on its way through a fleet.
struct Run<'a> {
    workload: &'a Workload,
    scenario: &'a Scenario,
    fleet: Fleet,
    /// When each request that can start does so.
    arrivals: BinaryHeap<Reverse<(Nanos, usize)>>,
    kill: Option<(Nanos, usize)>,
    served: Vec<Option<Served>>,
}

impl<'a> Run<'a> {
    fn new(workload: &'a Workload, scenario: &'a Scenario) -> Run<'a> {
        let first = |(at, request): (usize, &Prepared)| match request.start {
            Start::At(time) => Some(Reverse((scaled(time, scenario.rate), at))),
            Start::After { .. } => None,
        };
        let kill = scenario.faults.kill.map(|kill| {
            let at = workload.span(scenario.rate) as f64 * kill.at;
            (at as Nanos, kill.worker)
        });
        Run {
            workload,
            scenario,
            fleet: Fleet::new(scenario.plan(workload.block_size)),
            arrivals: workload.requests.iter().enumerate().filter_map(first).collect(),
            kill,
            served: vec![None; workload.requests.len()],
        }
    }

    /// Lets the next thing happen; false when nothing is left to.
    fn step(&mut self) -> bool {
        let arrival = self.arrivals.peek().map(|&Reverse(next)| next);
        let wakeup = self.fleet.wakeup();
        let next = arrival.map(|(at, _)| at).into_iter().chain(wakeup).min();
        let Some(next) = next else { return false };
        if let Some((at, worker)) = self.kill.take_if(|(at, _)| *at <= next) {
            self.fleet.advance(at);
            self.fleet.kill(worker);
        } else if let Some((at, request)) = arrival.filter(|&(at, _)| at == next) {
            self.arrivals.pop();
            self.fleet.advance(at);
            self.send(request);
        } else {
            self.fleet.turn();
        }
        true
    }

    fn slo_of(&self, request: &Prepared) -> f64 {
        ttft_slo(&self.scenario.profile, request.input_tokens, self.scenario.prefill_chunk)
    }

    fn send(&mut self, at: usize) {
        let request = &self.workload.requests[at];
        let ttft = Duration::from_secs_f64(self.slo_of(request));
        self.fleet.submit(FleetRequest {
            id: RequestId(at as u64),
            prompt_tokens: request.input_tokens,
            output_tokens: request.output_tokens,
            content: request.content.clone(),
            session: request.session,
            slo: Slo { ttft: Some(ttft), itl: Some(Duration::from_secs_f64(ITL_SLO)) },
            priority: 0,
            tenant: None,
        });
    }

    /// Takes note of what has ended; false when that is enough.
    fn collect(&mut self, go_on: &mut impl FnMut(&Served) -> bool) -> bool {
        for outcome in self.fleet.take_outcomes() {
            let at = outcome.id.0 as usize;
            let request = &self.workload.requests[at];
            let served = served(&outcome, self.slo_of(request));
            self.served[at] = Some(served);
            if let Some((next, delay)) = request.next {
                let start = outcome.ended + scaled(delay, self.scenario.rate);
                self.arrivals.push(Reverse((start, next)));
            }
            if !go_on(&served) {
                return false;
            }
        }
        true
    }
}

fn served(outcome: &Outcome, ttft_slo: f64) -> Served {
    let seconds = |from: Nanos, to: Nanos| to.saturating_sub(from) as f64 / NANOS;
    let itl = outcome.first_token.filter(|_| outcome.tokens > 1);
    Served {
        arrived: outcome.arrived as f64 / NANOS,
        ttft: outcome.first_token.map(|at| seconds(outcome.arrived, at)),
        itl: itl.map(|at| seconds(at, outcome.ended) / f64::from(outcome.tokens - 1)),
        finished: outcome.ending == Ending::Finished,
        path: outcome.decision.map(|decision| decision.path),
        predicted_ttft: outcome.decision.map(|decision| decision.ttft_in_all_seconds()),
        ttft_slo,
    }
}
