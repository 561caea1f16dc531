//! What the fleet does, the same for every subject: prompts, who holds them, and the events of
//! filling and churning, cut into windows.
//!
//! Invariant: everything follows from the seed, so every subject sees the same events in the same
//! order. Content and names are hashes that the driver knows; tokens follow from the content.

use std::collections::VecDeque;

use dynamo_kv_router::LocalBlockHash;
use dynamo_kv_router::protocols::compute_next_seq_hash;

/// Workers of the fleet.
pub(crate) const WORKERS: usize = 64;
/// Tokens per block.
pub(crate) const BLOCK: usize = 16;
/// Lengths of prompts, in blocks.
pub(crate) const LENGTHS: [usize; 3] = [64, 512, 4096];
/// How many workers hold a prompt.
pub(crate) const SHARES: [usize; 3] = [1, 8, 64];
/// Events of one engine message.
const MESSAGE: usize = 8;
/// Common beginnings and their length in blocks; every second prompt has one.
const SYSTEMS: usize = 64;
const SYSTEM_BLOCKS: usize = 32;

/// A random number generator (splitmix64).
#[derive(Clone, Debug)]
pub(crate) struct Rng(u64);

impl Rng {
    pub(crate) fn new(seed: u64) -> Rng {
        Rng(seed)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    pub(crate) fn below(&mut self, bound: usize) -> usize {
        ((u128::from(self.next()) * bound as u128) >> 64) as usize
    }

    pub(crate) fn one_in(&mut self, count: usize) -> bool {
        self.below(count) == 0
    }
}

pub(crate) fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// The tokens of a block, from its content hash: of a vocabulary of 2^17, whose second half is rare,
/// as it is in text; one token of eight is of it.
pub(crate) fn tokens_of(content: u64, out: &mut Vec<u32>) {
    let mut word = content;
    for _ in 0..BLOCK / 2 {
        word = mix(word.wrapping_add(0x9e37_79b9_7f4a_7c15));
        for half in [word as u32, (word >> 32) as u32] {
            let is_rare = half >> 29 == 0;
            out.push(half & 0xffff | u32::from(is_rare) << 16);
        }
    }
}

/// One prompt.
#[derive(Clone, Debug)]
pub(crate) struct Prompt {
    /// Its common beginning, if it has one.
    pub(crate) system: Option<usize>,
    /// Hash of each block's own tokens.
    pub(crate) content: Vec<u64>,
    /// Chained hash of each prefix as dynamo computes it: the engines' names of the blocks. (Its
    /// positional index understands no others.)
    pub(crate) names: Vec<u64>,
    /// Who is to hold it.
    pub(crate) holders: Vec<u16>,
}

impl Prompt {
    /// Blocks that belong to the common beginning.
    pub(crate) fn shared(&self) -> usize {
        if self.system.is_some() { SYSTEM_BLOCKS } else { 0 }
    }

    pub(crate) fn len(&self) -> usize {
        self.content.len()
    }
}

/// The names of a chain of contents.
pub(crate) fn names_of(content: &[u64]) -> Vec<u64> {
    let mut names: Vec<u64> = Vec::with_capacity(content.len());
    for hash in content {
        let last = names.last().map(|last| compute_next_seq_hash(*last, LocalBlockHash(*hash)));
        names.push(last.unwrap_or(*hash));
    }
    names
}

/// Prompts of about `pairs` (worker, block) pairs, the same part of each length and share.
pub(crate) fn prompts(pairs: usize, rng: &mut Rng) -> Vec<Prompt> {
    let systems: Vec<Vec<u64>> = (0..SYSTEMS as u64)
        .map(|s| (0..SYSTEM_BLOCKS as u64).map(|i| mix((s << 32) + i + 1)).collect())
        .collect();
    let mut prompts = Vec::new();
    for length in LENGTHS {
        for share in SHARES {
            let mut left = (pairs / (LENGTHS.len() * SHARES.len())) as isize;
            while left > 0 {
                let system = rng.one_in(2).then(|| rng.below(SYSTEMS));
                let mut content: Vec<u64> = Vec::with_capacity(length);
                content.extend(system.iter().flat_map(|s| &systems[*s]));
                content.extend((content.len()..length).map(|_| rng.next()));
                let first = rng.below(WORKERS);
                let step = WORKERS / share;
                let holders = (0..share).map(|i| ((first + i * step) % WORKERS) as u16).collect();
                let prompt = Prompt { system, names: names_of(&content), content, holders };
                left -= ((length - prompt.shared()) * share) as isize;
                prompts.push(prompt);
            }
        }
    }
    prompts
}

/// One event of a window; ranges are into the window's arrays.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Op {
    pub(crate) worker: u16,
    pub(crate) kind: Kind,
    pub(crate) start: usize,
    pub(crate) end: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Store { parent: Option<u64> },
    Remove,
    Clear,
}

/// Some events in order, with what any subject needs to apply them.
#[derive(Clone, Debug, Default)]
pub(crate) struct Window {
    pub(crate) ops: Vec<Op>,
    pub(crate) names: Vec<u64>,
    pub(crate) content: Vec<u64>,
    /// `BLOCK` per block; of removals and clears none are read.
    pub(crate) tokens: Vec<u32>,
}

impl Window {
    pub(crate) fn reset(&mut self) {
        self.ops.clear();
        self.names.clear();
        self.content.clear();
        self.tokens.clear();
    }

    pub(crate) fn blocks(&self) -> usize {
        self.names.len()
    }

    pub(crate) fn store(
        &mut self,
        worker: u16,
        parent: Option<u64>,
        names: &[u64],
        content: &[u64],
    ) {
        let start = self.names.len();
        self.names.extend(names);
        self.content.extend(content);
        for content in content {
            tokens_of(*content, &mut self.tokens);
        }
        let kind = Kind::Store { parent };
        self.ops.push(Op { worker, kind, start, end: self.names.len() });
    }

    pub(crate) fn remove(&mut self, worker: u16, names: &[u64]) {
        let start = self.names.len();
        self.names.extend(names);
        self.content.extend(names.iter().map(|_| 0));
        self.tokens.extend(names.iter().flat_map(|_| [0; BLOCK]));
        self.ops.push(Op { worker, kind: Kind::Remove, start, end: self.names.len() });
    }

    pub(crate) fn clear(&mut self, worker: u16) {
        let at = self.names.len();
        self.ops.push(Op { worker, kind: Kind::Clear, start: at, end: at });
    }
}

/// What the workers hold, and the events by which that changes.
#[derive(Debug)]
pub(crate) struct Fleet {
    pub(crate) prompts: Vec<Prompt>,
    rng: Rng,
    workers: Vec<Holding>,
    /// Workers that have something to store.
    busy: Vec<usize>,
}

#[derive(Debug)]
struct Holding {
    /// Prompts to store, and how far the first of them is stored.
    to_do: VecDeque<usize>,
    at: usize,
    systems: [bool; SYSTEMS],
    /// Prompts and how much of them is held, oldest first.
    held: VecDeque<(usize, usize)>,
}

impl Fleet {
    /// For how many blocks each worker has room: those of its prompts fill it.
    pub(crate) fn capacities(&self) -> Vec<usize> {
        let mut blocks = vec![SYSTEMS * SYSTEM_BLOCKS; WORKERS];
        for prompt in &self.prompts {
            let own = prompt.len() - prompt.shared();
            prompt.holders.iter().for_each(|worker| blocks[usize::from(*worker)] += own);
        }
        blocks
    }

    pub(crate) fn new(seed: u64) -> Fleet {
        let empty = || Holding {
            to_do: VecDeque::new(),
            at: 0,
            systems: [false; SYSTEMS],
            held: VecDeque::new(),
        };
        let workers = (0..WORKERS).map(|_| empty()).collect();
        Fleet { prompts: Vec::new(), rng: Rng::new(seed), workers, busy: Vec::new() }
    }

    /// More prompts for the workers to store, about so many pairs of them.
    pub(crate) fn add(&mut self, pairs: usize) {
        let first = self.prompts.len();
        self.prompts.extend(prompts(pairs, &mut self.rng));
        let mut new: Vec<usize> = (first..self.prompts.len()).collect();
        for i in (1..new.len()).rev() {
            new.swap(i, self.rng.below(i + 1));
        }
        for at in new {
            for holder in &self.prompts[at].holders {
                self.workers[usize::from(*holder)].to_do.push_back(at);
            }
        }
        let busy = |w: &usize| !self.workers[*w].to_do.is_empty();
        self.busy = (0..WORKERS).filter(busy).collect();
    }

    /// Up to `events` stores of `size` blocks each; messages of several events, worker by worker in
    /// random order. Says whether there were any.
    pub(crate) fn stores(&mut self, window: &mut Window, events: usize, size: usize) -> bool {
        window.reset();
        while window.ops.len() < events && !self.busy.is_empty() {
            let at = self.rng.below(self.busy.len());
            let worker = self.busy[at];
            for _ in 0..MESSAGE {
                if !self.store_next(window, worker, size) {
                    self.busy.swap_remove(at);
                    break;
                }
            }
        }
        !window.ops.is_empty()
    }

    fn store_next(&mut self, window: &mut Window, worker: usize, size: usize) -> bool {
        let holding = &mut self.workers[worker];
        let Some(prompt_at) = holding.to_do.front().copied() else { return false };
        let prompt = &self.prompts[prompt_at];
        // What another prompt brought in already is not stored again.
        if let Some(system) = prompt.system
            && holding.at == 0
            && holding.systems[system]
        {
            holding.at = prompt.shared();
        }
        let from = holding.at;
        let to = prompt.len().min(from + size);
        let parent = from.checked_sub(1).map(|last| prompt.names[last]);
        window.store(worker as u16, parent, &prompt.names[from..to], &prompt.content[from..to]);
        holding.at = to;
        if to == prompt.len() {
            if let Some(system) = prompt.system {
                holding.systems[system] = true;
            }
            holding.held.push_back((prompt_at, to));
            holding.to_do.pop_front();
            holding.at = 0;
        }
        true
    }

    /// Room for these stores, by removals of one block each: of the worker that stores the oldest
    /// prompts, leaf first. Common beginnings stay.
    pub(crate) fn evictions(&mut self, window: &mut Window, stores: &Window) {
        window.reset();
        for op in &stores.ops {
            let holding = &mut self.workers[usize::from(op.worker)];
            for _ in op.start..op.end {
                let Some((prompt, end)) = holding.held.front_mut() else { break };
                *end -= 1;
                let prompt = &self.prompts[*prompt];
                window.remove(op.worker, &prompt.names[*end..=*end]);
                if *end == prompt.shared() {
                    holding.held.pop_front();
                }
            }
        }
    }

    /// Prompts of a length that some worker holds wholly or in part.
    pub(crate) fn held(&self, length: usize) -> Vec<usize> {
        let all = self.workers.iter().flat_map(|worker| &worker.held);
        let mut held: Vec<usize> = all.map(|(prompt, _)| *prompt).collect();
        held.sort_unstable();
        held.dedup();
        held.retain(|prompt| self.prompts[*prompt].len() == length);
        held
    }

    /// The content of a query: a prompt, or one that leaves a prompt somewhere.
    pub(crate) fn query(&self, prompt: usize, leaves_at: Option<usize>, out: &mut Vec<u64>) {
        out.clear();
        out.extend(&self.prompts[prompt].content);
        if let Some(at) = leaves_at {
            out[at..].iter_mut().for_each(|content| *content = mix(*content ^ 0x5151));
        }
    }

    /// A random worker, a prompt of its, and how much of that it holds.
    pub(crate) fn any_held(&self, rng: &mut Rng) -> Option<(u16, usize, usize)> {
        let worker = rng.below(WORKERS);
        let held = &self.workers[worker].held;
        if held.is_empty() {
            return None;
        }
        let (prompt, end) = held[rng.below(held.len())];
        Some((worker as u16, prompt, end))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn events(seed: u64) -> (Fleet, Vec<Window>) {
        let mut fleet = Fleet::new(seed);
        fleet.add(300_000);
        let (mut window, mut all) = (Window::default(), Vec::new());
        while fleet.stores(&mut window, 512, 8) {
            all.push(window.clone());
        }
        (fleet, all)
    }

    #[test]
    fn the_same_seed_gives_the_same_events() {
        let names = |seed| events(seed).1.into_iter().flat_map(|w| w.names).collect::<Vec<_>>();
        assert_eq!(names(1), names(1));
        assert_ne!(names(1), names(2));
    }

    #[test]
    fn no_worker_stores_a_block_twice_and_every_parent_is_there() {
        let mut held = std::collections::HashSet::new();
        for window in events(3).1 {
            for op in &window.ops {
                if let Kind::Store { parent: Some(parent) } = op.kind {
                    assert!(held.contains(&(op.worker, parent)));
                }
                for name in &window.names[op.start..op.end] {
                    assert!(held.insert((op.worker, *name)));
                }
            }
        }
    }

    #[test]
    fn evictions_take_what_is_held_leaf_first() {
        let (mut fleet, windows) = events(4);
        let mut held: std::collections::HashSet<(u16, u64)> = std::collections::HashSet::new();
        for window in &windows {
            for op in &window.ops {
                held.extend(window.names[op.start..op.end].iter().map(|name| (op.worker, *name)));
            }
        }
        let mut window = Window::default();
        fleet.evictions(&mut window, &windows[0]);
        assert_eq!(window.blocks(), windows[0].blocks());
        for op in &window.ops {
            assert!(held.remove(&(op.worker, window.names[op.start])));
        }
    }
}
