//! One sequence's state, and the slab that sequences live in.

use std::sync::Arc;

use super::types::{Content, Job, JobId, Kind, Nanos};

/// Where a sequence is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// In the slab's free list.
    Vacant,
    Waiting,
    Pulling(Nanos),
    Pulled,
    Running,
}

pub(super) struct Seq {
    pub(super) job: Job,
    pub(super) stage: Stage,
    /// Its blocks, first to last.
    pub(super) blocks: Vec<u32>,
    /// Tokens that have KV in those blocks.
    pub(super) computed: u32,
    pub(super) generated: u32,
    /// Blocks of its content that are named in the pool.
    pub(super) named: u32,
    /// Its prompt's KV was pulled.
    pub(super) pulled: bool,
    /// It has been scheduled before.
    pub(super) started: bool,
    /// Its blocks lost their names, so later ones cannot be found either.
    pub(super) unnameable: bool,
}

impl Seq {
    pub(super) fn new(job: Job) -> Seq {
        Seq {
            job,
            stage: Stage::Waiting,
            blocks: Vec::new(),
            computed: 0,
            generated: 0,
            named: 0,
            pulled: false,
            started: false,
            unnameable: false,
        }
    }

    /// Tokens known: the prompt and what was generated.
    pub(super) fn tokens(&self) -> u32 {
        self.job.prompt_tokens + self.generated
    }

    /// Whether its next step only decodes.
    pub(super) fn decodes(&self) -> bool {
        self.tokens() - self.computed == 1 && (self.generated > 0 || self.pulled)
    }
}

/// Sequences by small stable numbers.
#[derive(Default)]
pub(super) struct Slab {
    seqs: Vec<Seq>,
    vacant: Vec<u32>,
    nothing: Arc<Content>,
}

impl Slab {
    pub(super) fn insert(&mut self, seq: Seq) -> u32 {
        if let Some(slot) = self.vacant.pop() {
            self.seqs[slot as usize] = seq;
            return slot;
        }
        self.seqs.push(seq);
        (self.seqs.len() - 1) as u32
    }

    /// Takes a sequence out; its number may be given to another one.
    pub(super) fn remove(&mut self, slot: u32) -> Seq {
        self.vacant.push(slot);
        let content = self.nothing.clone();
        let (id, kind) = (JobId(u64::MAX), Kind::Local);
        let job = Job { id, prompt_tokens: 0, output_tokens: 0, kind, content };
        let vacant = Seq { stage: Stage::Vacant, ..Seq::new(job) };
        std::mem::replace(&mut self.seqs[slot as usize], vacant)
    }

    pub(super) fn get(&self, slot: u32) -> &Seq {
        &self.seqs[slot as usize]
    }

    pub(super) fn get_mut(&mut self, slot: u32) -> &mut Seq {
        &mut self.seqs[slot as usize]
    }

    /// The live ones.
    pub(super) fn iter(&self) -> impl Iterator<Item = &Seq> {
        self.seqs.iter().filter(|seq| seq.stage != Stage::Vacant)
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Seq> {
        self.seqs.iter_mut().filter(|seq| seq.stage != Stage::Vacant)
    }
}
