//! The measurements of one subject, in an order that is the same for all: fill, churn, ask, clear.

use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::agree::{self, Agreement};
use crate::cpu::{resident_bytes, timed};
use crate::ours::{self, Decoded, Ours};
use crate::subject::Subject;
use crate::workload::{Fleet, LENGTHS, Rng, WORKERS, Window};

/// Events of a window: they are prepared together, then applied together.
const EVENTS: usize = 512;
/// What is read to evict the caches before a query.
const EVICT_BYTES: usize = 64 << 20;
/// Prompts that hot queries go round.
const HOT: usize = 16;
/// No figure takes longer than this, however slow the subject.
const LONGEST: Duration = Duration::from_secs(10);
/// Events of a message of vLLM.
const MESSAGE: usize = 8;

/// How much to measure.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Size {
    /// (worker, block) pairs of the filled index.
    pub(crate) pairs: usize,
    /// Blocks of the worker that is cleared.
    pub(crate) cleared: usize,
    /// Random queries of each length; a twentieth as many with the caches evicted.
    pub(crate) queries: usize,
}

/// Microseconds of wall time of single queries.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Latency {
    pub(crate) p50: f64,
    pub(crate) p99: f64,
}

/// What one subject needs. Rates are million blocks or queries per second of CPU time.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Figures {
    /// Pairs of the filled index.
    pub(crate) pairs: u64,
    /// Distinct prefixes among them.
    pub(crate) distinct: u64,
    pub(crate) bytes_filled: f64,
    pub(crate) bytes_churned: f64,
    pub(crate) fill: f64,
    pub(crate) store_8: f64,
    pub(crate) store_1: f64,
    pub(crate) remove_1: f64,
    pub(crate) clear_ms: f64,
    pub(crate) cleared: u64,
    /// By length.
    pub(crate) random: [Latency; LENGTHS.len()],
    pub(crate) cold: [Latency; LENGTHS.len()],
    pub(crate) beside: [Latency; LENGTHS.len()],
    pub(crate) hot: f64,
    /// Depths of some queries of the big index, by which subjects are compared.
    pub(crate) depths: Vec<u64>,
    pub(crate) agreement: Vec<Agreement>,
    pub(crate) own: Option<OwnFigures>,
}

/// What only our side has.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(crate) struct OwnFigures {
    /// Million blocks per second from a message's bytes to the index.
    pub(crate) from_bytes: f64,
    /// Of that, nanoseconds per block for reading alone, for hashing alone, and bytes per block.
    pub(crate) decode_ns: f64,
    pub(crate) hash_ns: f64,
    pub(crate) message_bytes: f64,
}

/// Blocks and the time they took.
#[derive(Clone, Copy, Debug, Default)]
struct Rate {
    blocks: u64,
    time: Duration,
}

impl Rate {
    fn add(&mut self, blocks: usize, time: Duration) {
        self.blocks += blocks as u64;
        self.time += time;
    }

    fn millions(self) -> f64 {
        self.blocks as f64 / self.time.as_secs_f64().max(1e-9) / 1e6
    }
}

struct Run<S: Subject> {
    subject: S,
    fleet: Fleet,
    seed: u64,
    size: Size,
    figures: Figures,
    pairs: u64,
    empty_bytes: u64,
}

/// Measures one subject.
pub(crate) fn run<S: Subject>(size: Size, seed: u64) -> anyhow::Result<Figures> {
    let mut run = started::<S>(size, seed)?;
    run.churn()?;
    run.ask();
    run.clear();
    finish(run)
}

/// Measures our index, and the way from a message's bytes into it.
pub(crate) fn run_ours(size: Size, seed: u64) -> anyhow::Result<Figures> {
    let mut run = started::<Ours>(size, seed)?;
    run.churn()?;
    run.ask();
    run.clear();
    run.figures.own = Some(run.messages());
    finish(run)
}

fn started<S: Subject>(size: Size, seed: u64) -> anyhow::Result<Run<S>> {
    let mut fleet = Fleet::new(seed);
    fleet.add(size.pairs);
    let (subject, figures) = (S::new(&fleet.capacities()), Figures::default());
    let mut run = Run { subject, fleet, seed, size, figures, pairs: 0, empty_bytes: 0 };
    run.fill()?;
    Ok(run)
}

fn finish<S: Subject>(run: Run<S>) -> anyhow::Result<Figures> {
    let mut rng = run.rng(5);
    let Run { subject, mut figures, fleet, .. } = run;
    figures.beside = beside(subject, fleet, &mut rng);
    figures.agreement = agree::all::<S>();
    Ok(figures)
}

impl<S: Subject> Run<S> {
    /// Randomness of one part, the same for every subject however far it came in the others.
    fn rng(&self, part: u64) -> Rng {
        Rng::new(self.seed ^ (part << 32))
    }

    /// Stores everything that is to be stored.
    fn store_all(&mut self, window: &mut Window, size: usize, rate: &mut Rate) {
        while self.fleet.stores(window, EVENTS, size) {
            rate.add(window.blocks(), self.subject.apply(window));
            self.pairs += window.blocks() as u64;
        }
    }

    fn fill(&mut self) -> anyhow::Result<()> {
        let mut window = Window::default();
        // So that the window's own memory is there before.
        for _ in 0..EVENTS {
            window.store(0, None, &[0; 8], &[0; 8]);
        }
        let mut rate = Rate::default();
        self.empty_bytes = resident_bytes()?;
        self.store_all(&mut window, 8, &mut rate);
        self.figures.bytes_filled = self.bytes_per_pair()?;
        self.figures.fill = rate.millions();
        self.figures.pairs = self.pairs;
        let blocks = |p: &crate::workload::Prompt| (p.len() - p.shared()) as u64;
        self.figures.distinct = self.fleet.prompts.iter().map(blocks).sum();
        Ok(())
    }

    fn bytes_per_pair(&self) -> anyhow::Result<f64> {
        let bytes = resident_bytes()?.saturating_sub(self.empty_bytes);
        Ok(bytes as f64 / self.pairs.max(1) as f64)
    }

    /// As much goes as comes, window by window.
    fn churn(&mut self) -> anyhow::Result<()> {
        let (mut stores, mut evictions) = (Window::default(), Window::default());
        let mut removed = Rate::default();
        for (size, part) in [(8, 5), (1, 20)] {
            // The prompts are the driver's, not the index's.
            let before = resident_bytes()?;
            self.fleet.add(self.size.pairs / part);
            self.empty_bytes += resident_bytes()?.saturating_sub(before);
            let mut stored = Rate::default();
            while self.fleet.stores(&mut stores, EVENTS, size) {
                self.fleet.evictions(&mut evictions, &stores);
                for part in parts(&evictions, EVENTS) {
                    removed.add(part.blocks(), self.subject.apply(&part));
                }
                stored.add(stores.blocks(), self.subject.apply(&stores));
                self.pairs += stores.blocks() as u64;
                self.pairs -= evictions.blocks() as u64;
            }
            match size {
                8 => self.figures.store_8 = stored.millions(),
                _ => self.figures.store_1 = stored.millions(),
            }
        }
        self.figures.remove_1 = removed.millions();
        self.figures.bytes_churned = self.bytes_per_pair()?;
        Ok(())
    }

    fn ask(&mut self) {
        let lists: Vec<Vec<usize>> = LENGTHS.iter().map(|l| self.fleet.held(*l)).collect();
        let (mut content, mut chain) = (Vec::new(), S::Chain::default());
        let evict = vec![1_u64; EVICT_BYTES / 8];
        let mut rng = self.rng(1);
        for (at, list) in lists.iter().enumerate() {
            for cold in [false, true] {
                let count = if cold { self.size.queries / 20 } else { self.size.queries };
                let mut times = Vec::with_capacity(count);
                let begin = Instant::now();
                while times.len() < count && begin.elapsed() < LONGEST {
                    draw(&self.fleet, list, &mut rng, &mut content);
                    if cold {
                        black_box(evict.iter().step_by(8).sum::<u64>());
                    }
                    self.subject.chain(&content, &mut chain);
                    let start = Instant::now();
                    self.subject.ask(&chain);
                    times.push(start.elapsed());
                }
                let latency = latency(times);
                if cold {
                    self.figures.cold[at] = latency;
                } else {
                    self.figures.random[at] = latency;
                }
            }
        }
        self.hot(&lists);
        self.depths(&lists);
    }

    fn hot(&mut self, lists: &[Vec<usize>]) {
        let mut chains: Vec<S::Chain> = Vec::new();
        let (mut content, mut rng) = (Vec::new(), self.rng(2));
        for i in 0..HOT {
            draw(&self.fleet, &lists[i % lists.len()], &mut rng, &mut content);
            let mut chain = S::Chain::default();
            self.subject.chain(&content, &mut chain);
            chains.push(chain);
        }
        let (time, rounds) = timed(|| {
            let (begin, mut rounds) = (Instant::now(), 0);
            while rounds < self.size.queries && begin.elapsed() < LONGEST {
                chains.iter().for_each(|chain| self.subject.ask(chain));
                rounds += 1;
            }
            rounds
        });
        self.figures.hot = (rounds * HOT) as f64 / time.as_secs_f64() / 1e6;
    }

    /// Answers to compare, one number a query.
    fn depths(&mut self, lists: &[Vec<usize>]) {
        let (mut content, mut chain) = (Vec::new(), S::Chain::default());
        let (mut depths, mut rng) = ([0; WORKERS], self.rng(3));
        for list in lists {
            for _ in 0..500 {
                draw(&self.fleet, list, &mut rng, &mut content);
                self.subject.chain(&content, &mut chain);
                self.subject.ask(&chain);
                self.subject.depths(&mut depths);
                self.figures.depths.push(depths.iter().copied().map(u64::from).sum());
            }
        }
    }

    /// A worker beyond the others takes random prompts, and is cleared; the median of five times.
    fn clear(&mut self) {
        let worker = WORKERS as u16;
        let lists: Vec<Vec<usize>> = LENGTHS.iter().map(|l| self.fleet.held(*l)).collect();
        let mut window = Window::default();
        let (mut times, mut rng) = (Vec::new(), self.rng(4));
        for _ in 0..5 {
            let mut left = self.size.cleared as isize;
            let mut known = std::collections::HashSet::new();
            while left > 0 {
                let list = &lists[rng.below(lists.len())];
                let prompt = &self.fleet.prompts[list[rng.below(list.len())]];
                window.reset();
                let mut parent = None;
                for (names, content) in prompt.names.chunks(8).zip(prompt.content.chunks(8)) {
                    // Every second prompt shares its beginning with others.
                    if known.insert(names[0]) {
                        window.store(worker, parent, names, content);
                        left -= names.len() as isize;
                    }
                    parent = names.last().copied();
                }
                self.subject.apply(&window);
            }
            window.reset();
            window.clear(worker);
            times.push(self.subject.apply(&window));
            self.figures.cleared = (self.size.cleared as isize - left) as u64;
        }
        times.sort_unstable();
        self.figures.clear_ms = times[times.len() / 2].as_secs_f64() * 1e3;
    }
}

impl Run<Ours> {
    fn messages(&mut self) -> OwnFigures {
        self.fleet.add(self.size.pairs / 10);
        let (mut window, mut evictions) = (Window::default(), Window::default());
        let mut room = Decoded::default();
        let (mut whole, mut read, mut hashed) = <(Rate, Rate, Rate)>::default();
        let (mut bytes, mut chain) = (0, Vec::new());
        while self.fleet.stores(&mut window, EVENTS, 8) {
            self.fleet.evictions(&mut evictions, &window);
            self.subject.apply(&evictions);
            let messages = ours::messages(&window, MESSAGE);
            bytes += messages.iter().map(|(_, payload)| payload.len()).sum::<usize>();
            let apply = || self.subject.apply_messages(&messages, &mut room);
            whole.add(window.blocks(), timed(apply).0);
            let read_only = || {
                room.reset();
                messages.iter().for_each(|(worker, payload)| room.read(*worker, payload));
            };
            read.add(window.blocks(), timed(read_only).0);
            let space = self.subject.space();
            let hash = || space.chain(&window.tokens, &mut chain);
            hashed.add(window.blocks(), timed(hash).0);
        }
        OwnFigures {
            from_bytes: whole.millions(),
            decode_ns: 1e3 / read.millions(),
            hash_ns: 1e3 / hashed.millions(),
            message_bytes: bytes as f64 / whole.blocks as f64,
        }
    }
}

/// Queries while another thread writes as fast as it can: it stores prompts and takes them back.
fn beside<S: Subject>(mut subject: S, mut fleet: Fleet, rng: &mut Rng) -> [Latency; LENGTHS.len()] {
    let mut queries: Vec<Vec<S::Chain>> = Vec::new();
    let mut content = Vec::new();
    for length in LENGTHS {
        let list = fleet.held(length);
        let mut chains = vec![S::Chain::default(); 64];
        for chain in &mut chains {
            draw(&fleet, &list, rng, &mut content);
            subject.chain(&content, chain);
        }
        queries.push(chains);
    }
    fleet.add(50_000);
    let (mut stores, mut takes) = (Vec::new(), Vec::new());
    let mut window = Window::default();
    while fleet.stores(&mut window, EVENTS, 8) {
        let mut back = Window::default();
        for op in window.ops.iter().rev() {
            back.remove(op.worker, &window.names[op.start..op.end]);
        }
        stores.push(window.clone());
        takes.push(back);
    }
    takes.reverse();
    let (mut write, mut read) = subject.split();
    let stop = Arc::new(AtomicBool::new(false));
    let stopped = Arc::clone(&stop);
    let writer = std::thread::spawn(move || {
        while !stopped.load(Ordering::Relaxed) {
            for window in stores.iter().chain(&takes) {
                write(window);
                if stopped.load(Ordering::Relaxed) {
                    break;
                }
            }
        }
    });
    let mut result = [Latency::default(); LENGTHS.len()];
    for (chains, result) in queries.iter().zip(&mut result) {
        let (mut times, begin) = (Vec::new(), Instant::now());
        while times.len() < 300 * chains.len() && begin.elapsed() < LONGEST {
            for chain in chains {
                let start = Instant::now();
                read(chain);
                times.push(start.elapsed());
            }
        }
        *result = latency(times);
    }
    stop.store(true, Ordering::Relaxed);
    let _ = writer.join();
    result
}

/// A query: half of them a whole prompt, half of them one that leaves a prompt somewhere.
pub(crate) fn draw(fleet: &Fleet, list: &[usize], rng: &mut Rng, content: &mut Vec<u64>) {
    let prompt = list[rng.below(list.len())];
    let length = fleet.prompts[prompt].len();
    let leaves_at = rng.one_in(2).then(|| rng.below(length));
    fleet.query(prompt, leaves_at, content);
}

fn latency(mut times: Vec<Duration>) -> Latency {
    times.sort_unstable();
    let at = |part: f64| {
        let index = (times.len() as f64 * part) as usize;
        times.get(index.min(times.len().saturating_sub(1))).map_or(0.0, |t| t.as_secs_f64() * 1e6)
    };
    Latency { p50: at(0.5), p99: at(0.99) }
}

/// A window cut into windows of so many events.
fn parts(window: &Window, events: usize) -> Vec<Window> {
    let cut = |ops: &[crate::workload::Op]| {
        let mut part = Window::default();
        for op in ops {
            part.remove(op.worker, &window.names[op.start..op.end]);
        }
        part
    };
    window.ops.chunks(events).map(cut).collect()
}
