//! `smg-radix-tree`: keys and content hashes per block, one writer, no concurrency of its own.

use std::hint::black_box;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use radix_tree::{Config, HolderId, Overlap, OverlapScratch, RadixTree};

use crate::cpu::timed;
use crate::ours::BATCH;
use crate::subject::{Read, Subject, Write};
use crate::workload::{Kind, Op, WORKERS, Window};

pub(crate) struct Smg {
    tree: RadixTree,
    holders: Vec<HolderId>,
    scratch: OverlapScratch,
    answer: Vec<Overlap>,
}

type Blocks = Vec<(u64, u64)>;

fn blocks(window: &Window) -> Blocks {
    window.names.iter().copied().zip(window.content.iter().copied()).collect()
}

fn apply_one(
    tree: &mut RadixTree,
    holders: &[HolderId],
    window: &Window,
    blocks: &Blocks,
    op: &Op,
) {
    let holder = holders[usize::from(op.worker)];
    match op.kind {
        Kind::Store { parent } => {
            let _ = black_box(tree.store(holder, parent, &blocks[op.start..op.end]));
        }
        Kind::Remove => {
            black_box(tree.remove(holder, &window.names[op.start..op.end]));
        }
        Kind::Clear => tree.clear(holder),
    }
}

impl Subject for Smg {
    type Chain = Vec<u64>;

    fn new(_: &[usize]) -> Smg {
        let mut tree = RadixTree::new(Config::default());
        let holders = (0..=WORKERS).map(|w| tree.create_holder(&format!("worker-{w}"))).collect();
        Smg { tree, holders, scratch: OverlapScratch::default(), answer: Vec::new() }
    }

    fn apply(&mut self, window: &Window) -> Duration {
        let blocks = blocks(window);
        let (tree, holders) = (&mut self.tree, &self.holders);
        let apply = || {
            for op in &window.ops {
                apply_one(tree, holders, window, &blocks, op);
            }
        };
        timed(apply).0
    }

    fn chain(&mut self, content: &[u64], out: &mut Vec<u64>) {
        out.clear();
        out.extend(content);
    }

    fn ask(&mut self, chain: &Vec<u64>) {
        self.tree.overlap(chain, &mut self.scratch, &mut self.answer);
    }

    fn depths(&self, out: &mut [u32]) {
        out.fill(0);
        for row in &self.answer {
            let slot = self.holders.iter().position(|holder| *holder == row.holder);
            if let Some(depth) = slot.and_then(|slot| out.get_mut(slot)) {
                *depth = row.depth;
            }
        }
    }

    /// Behind a lock, which the writer takes per batch: readers need one.
    fn split(self) -> (Write, Read<Vec<u64>>) {
        let Smg { tree, holders, mut scratch, mut answer } = self;
        let tree = Arc::new(RwLock::new(tree));
        let shared = Arc::clone(&tree);
        let write = move |window: &Window| {
            let blocks = blocks(window);
            for batch in window.ops.chunks(BATCH) {
                let mut tree = shared.write().unwrap_or_else(PoisonError::into_inner);
                for op in batch {
                    apply_one(&mut tree, &holders, window, &blocks, op);
                }
            }
        };
        let read = move |chain: &Vec<u64>| {
            let tree = tree.read().unwrap_or_else(PoisonError::into_inner);
            tree.overlap(chain, &mut scratch, &mut answer);
            black_box(&answer);
        };
        (Box::new(write), Box::new(read))
    }
}
