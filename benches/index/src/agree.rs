//! Whether answers are right: small fleets against a literal model, one difficulty at a time.
//!
//! The model is what `pointsman-kv` promises: a worker holds a block while its copies outnumber its
//! removals, names mean something on one worker only, and the answer is the longest contiguous prefix.

use rustc_hash::FxHashMap;

use serde::{Deserialize, Serialize};

use crate::measure::draw;
use crate::subject::Subject;
use crate::workload::{Fleet, Kind, LENGTHS, Rng, WORKERS, Window, mix};

/// Pairs of the fleets; the longest prompts make it some more.
const PAIRS: usize = 300_000;
const EVENTS: usize = 512;
const QUERIES: usize = 300;

/// How a subject does under one difficulty. Sums are over all queries and workers.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Agreement {
    pub(crate) scenario: Scenario,
    /// Depth that there is.
    pub(crate) expected: u64,
    /// Of that, how much the answers lack.
    pub(crate) lost: u64,
    /// Depth that the answers say and that there is not.
    pub(crate) overstated: u64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Scenario {
    /// Every worker names a block alike, nothing is stored twice, leaves go first.
    #[default]
    Plain,
    /// Every worker has its own names.
    OwnNames,
    /// Some blocks are held twice, and one of the two copies goes.
    Copies,
    /// Some blocks go that others follow on; half of them come back.
    Holes,
}

impl Scenario {
    pub(crate) const ALL: [Scenario; 4] =
        [Scenario::Plain, Scenario::OwnNames, Scenario::Copies, Scenario::Holes];

    pub(crate) fn describe(self) -> &'static str {
        match self {
            Scenario::Plain => "fill and churn, names alike on all workers",
            Scenario::OwnNames => "the same, each worker with names of its own",
            Scenario::Copies => "copies: every 20th event twice, every 2nd of those removed once",
            Scenario::Holes => "holes: 1 block of 200 removed inside, every 2nd stored again",
        }
    }
}

/// What a literal reader of the events knows.
#[derive(Default)]
struct Model {
    workers: FxHashMap<u16, Worker>,
}

#[derive(Default)]
struct Worker {
    names: FxHashMap<u64, (u64, u32)>,
    held: FxHashMap<u64, u32>,
}

/// The prefix that ends with this content.
fn prefix(parent: u64, content: u64) -> u64 {
    mix(parent ^ mix(content))
}

impl Worker {
    fn store(&mut self, parent: Option<u64>, names: &[u64], content: &[u64]) {
        let parent = match parent {
            None => Some(0),
            Some(name) => self.names.get(&name).map(|(prefix, _)| *prefix),
        };
        let Some(mut last) = parent else { return };
        for (name, content) in names.iter().zip(content) {
            last = prefix(last, *content);
            let entry = self.names.entry(*name).or_insert((last, 0));
            if entry.0 != last {
                let (old, copies) = std::mem::replace(entry, (last, 0));
                release(&mut self.held, old, copies);
            }
            self.names.entry(*name).or_insert((last, 0)).1 += 1;
            *self.held.entry(last).or_default() += 1;
        }
    }

    fn remove(&mut self, names: &[u64]) {
        for name in names {
            let Some((prefix, copies)) = self.names.get_mut(name) else { continue };
            let prefix = *prefix;
            *copies -= 1;
            if *copies == 0 {
                self.names.remove(name);
            }
            release(&mut self.held, prefix, 1);
        }
    }
}

fn release(held: &mut FxHashMap<u64, u32>, prefix: u64, copies: u32) {
    if let Some(count) = held.get_mut(&prefix) {
        *count = count.saturating_sub(copies);
        if *count == 0 {
            held.remove(&prefix);
        }
    }
}

impl Model {
    fn apply(&mut self, window: &Window) {
        for op in &window.ops {
            let worker = self.workers.entry(op.worker).or_default();
            let names = &window.names[op.start..op.end];
            match op.kind {
                Kind::Store { parent } => {
                    worker.store(parent, names, &window.content[op.start..op.end]);
                }
                Kind::Remove => worker.remove(names),
                Kind::Clear => *worker = Worker::default(),
            }
        }
    }

    fn depths(&self, content: &[u64], out: &mut [u32]) {
        for (number, out) in (0..).zip(out) {
            let held = |worker: &Worker| {
                let mut last = 0;
                let step = |content: &&u64| {
                    last = prefix(last, **content);
                    worker.held.contains_key(&last)
                };
                content.iter().take_while(step).count() as u32
            };
            *out = self.workers.get(&number).map_or(0, held);
        }
    }
}

/// Every scenario.
pub(crate) fn all<S: Subject>() -> Vec<Agreement> {
    Scenario::ALL.into_iter().map(one::<S>).collect()
}

struct Pair<S> {
    subject: S,
    model: Model,
    scenario: Scenario,
}

impl<S: Subject> Pair<S> {
    fn apply(&mut self, window: &mut Window) {
        if self.scenario == Scenario::OwnNames {
            let own = |worker: u16, name: u64| name ^ mix(u64::from(worker) + 1);
            for op in &mut window.ops {
                for name in &mut window.names[op.start..op.end] {
                    *name = own(op.worker, *name);
                }
                if let Kind::Store { parent: Some(parent) } = &mut op.kind {
                    *parent = own(op.worker, *parent);
                }
            }
        }
        self.model.apply(window);
        self.subject.apply(window);
    }
}

fn one<S: Subject>(scenario: Scenario) -> Agreement {
    let mut rng = Rng::new(7);
    let mut fleet = Fleet::new(11);
    let mut pair = Pair { subject: S::new(&[]), model: Model::default(), scenario };
    let (mut window, mut more) = (Window::default(), Window::default());
    fleet.add(PAIRS);
    while fleet.stores(&mut window, EVENTS, 8) {
        if scenario == Scenario::Copies {
            twice(&window, &mut more, &mut rng);
            pair.apply(&mut window);
            pair.apply(&mut more);
        } else {
            pair.apply(&mut window);
        }
    }
    fleet.add(PAIRS / 4);
    while fleet.stores(&mut window, EVENTS, 8) {
        fleet.evictions(&mut more, &window);
        pair.apply(&mut more);
        pair.apply(&mut window);
    }
    if scenario == Scenario::Holes {
        for _ in 0..PAIRS / 200 / 64 {
            holes(&fleet, &mut window, &mut rng);
            pair.apply(&mut window);
        }
    }
    compare(&mut pair, &fleet, &mut rng)
}

/// Every 20th event again, and a removal for every second of these.
fn twice(window: &Window, more: &mut Window, rng: &mut Rng) {
    more.reset();
    for op in window.ops.iter().filter(|_| rng.one_in(20)) {
        let Kind::Store { parent } = op.kind else { continue };
        let names = &window.names[op.start..op.end];
        more.store(op.worker, parent, names, &window.content[op.start..op.end]);
        if op.start % 16 == 0 {
            more.remove(op.worker, names);
        }
    }
}

/// Removes random blocks that others follow on, and stores every second of them again.
fn holes(fleet: &Fleet, window: &mut Window, rng: &mut Rng) {
    window.reset();
    for number in 0..64 {
        let Some((worker, prompt, held)) = fleet.any_held(rng) else { continue };
        let prompt = &fleet.prompts[prompt];
        let room = held.saturating_sub(prompt.shared() + 1);
        if room == 0 {
            continue;
        }
        let at = prompt.shared() + rng.below(room);
        window.remove(worker, &prompt.names[at..=at]);
        if number % 2 == 0 {
            let parent = at.checked_sub(1).map(|last| prompt.names[last]);
            window.store(worker, parent, &prompt.names[at..=at], &prompt.content[at..=at]);
        }
    }
}

fn compare<S: Subject>(pair: &mut Pair<S>, fleet: &Fleet, rng: &mut Rng) -> Agreement {
    let mut sum = Agreement { scenario: pair.scenario, ..Agreement::default() };
    let (mut content, mut chain) = (Vec::new(), S::Chain::default());
    let (mut expected, mut found) = ([0; WORKERS], [0; WORKERS]);
    for length in LENGTHS {
        let list = fleet.held(length);
        for _ in 0..QUERIES {
            draw(fleet, &list, rng, &mut content);
            pair.model.depths(&content, &mut expected);
            pair.subject.chain(&content, &mut chain);
            pair.subject.ask(&chain);
            pair.subject.depths(&mut found);
            for (expected, found) in expected.into_iter().zip(found) {
                sum.expected += u64::from(expected);
                sum.lost += u64::from(expected.saturating_sub(found));
                sum.overstated += u64::from(found.saturating_sub(expected));
            }
        }
    }
    sum
}
