//! What is known of a prompt on every worker: hashed once per block size, the index asked once each.

use std::cell::RefCell;

use pointsman_brain::Held;
use pointsman_kv::{BlockHash, Overlap, Slot, SpaceKey};

use crate::fleet::{Group, Rank, Roster};
use crate::prompt::Prompt;

/// What separates prompts of equal tokens from each other.
#[derive(Clone, Debug, Default)]
pub(crate) struct Scope {
    /// The LoRA adapter asked for.
    pub(crate) lora: Option<String>,
    /// The request's `cache_salt`.
    pub(crate) salt: Option<String>,
}

impl Scope {
    fn key(&self, block_size: u32) -> SpaceKey<'_> {
        SpaceKey { block_size, lora: self.lora.as_deref(), salt: self.salt.as_deref() }
    }
}

/// Blocks of the prompt on each worker, by slot; of a batch, those of all its prompts.
pub(crate) fn look_up(group: &Group, roster: &Roster, prompt: &Prompt, scope: &Scope) -> Vec<Held> {
    thread_local! {
        static SCRATCH: RefCell<(Vec<BlockHash>, Overlap)> = RefCell::default();
    }
    group.forget_expired();
    let mut held = vec![Held::default(); roster.ranks.len()];
    SCRATCH.with_borrow_mut(|(chain, overlap)| {
        for block_size in roster.distinct_block_sizes() {
            let space = group.hasher.space(&scope.key(block_size));
            for ids in &prompt.ids {
                space.chain(ids, chain);
                group.reader.overlap(chain, overlap);
                add(&mut held, overlap, roster, block_size);
            }
        }
    });
    held
}

fn add(held: &mut [Held], overlap: &Overlap, roster: &Roster, block_size: u32) {
    for (slot, (held, size)) in (0..).zip(held.iter_mut().zip(&roster.block_sizes)) {
        if *size == block_size {
            let depth = overlap.get(Slot(slot));
            held.device = held.device.saturating_add(depth.device);
            held.host = held.host.saturating_add(depth.host);
            held.disk = held.disk.saturating_add(depth.disk);
        }
    }
}

/// Notes that a worker has computed or received a prompt, where its events do not say so.
pub(crate) fn place(group: &Group, rank: &Rank, prompt: &Prompt, scope: &Scope) {
    if !group.records(&rank.worker) || rank.worker.gone.is_cancelled() {
        return;
    }
    let space = group.hasher.space(&scope.key(rank.worker.spec().block_size.get()));
    let mut chain = Vec::new();
    for ids in &prompt.ids {
        space.chain(ids, &mut chain);
        group.writer().place(Slot(rank.slot.0), &chain, group.now().0);
    }
}
