//! `dynamo-kv-router`'s two indexers: the concurrent compressed radix tree, which takes events over a
//! channel on a thread of its own, and the positional map.

use std::collections::HashMap;
use std::hint::black_box;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use dynamo_kv_router::indexer::WorkerTask;
use dynamo_kv_router::protocols::{
    ExternalSequenceBlockHash, KvCacheEvent, KvCacheEventData, KvCacheRemoveData, KvCacheStoreData,
    KvCacheStoredBlockData, OverlapScores, RouterEvent, WorkerWithDpRank,
};
use dynamo_kv_router::{
    ConcurrentRadixTreeCompressed, LocalBlockHash, PositionalIndexer, SyncIndexer,
};
use tokio::sync::oneshot;

use crate::cpu::{CpuClock, timed};
use crate::subject::{Read, Subject, Write};
use crate::workload::{Kind, Op, Window};

/// The stride that its documentation names.
const JUMP: usize = 32;

fn event(window: &Window, op: &Op) -> RouterEvent {
    let data = match op.kind {
        Kind::Store { parent } => KvCacheEventData::Stored(KvCacheStoreData {
            parent_hash: parent.map(ExternalSequenceBlockHash),
            start_position: None,
            blocks: (op.start..op.end)
                .map(|at| KvCacheStoredBlockData {
                    block_hash: ExternalSequenceBlockHash(window.names[at]),
                    tokens_hash: LocalBlockHash(window.content[at]),
                    mm_extra_info: None,
                })
                .collect(),
        }),
        Kind::Remove => KvCacheEventData::Removed(KvCacheRemoveData {
            block_hashes: window.names[op.start..op.end]
                .iter()
                .copied()
                .map(ExternalSequenceBlockHash)
                .collect(),
        }),
        Kind::Clear => KvCacheEventData::Cleared,
    };
    RouterEvent::new(u64::from(op.worker), KvCacheEvent { event_id: 0, data, dp_rank: 0 })
}

fn local(content: &[u64], out: &mut Vec<LocalBlockHash>) {
    out.clear();
    out.extend(content.iter().copied().map(LocalBlockHash));
}

fn depths_of(scores: &OverlapScores, out: &mut [u32]) {
    out.fill(0);
    for (worker, depth) in &scores.scores {
        if let Some(out) = out.get_mut(worker.worker_id as usize) {
            *out = *depth;
        }
    }
}

/// The radix tree and the thread that its events go to.
pub(crate) struct Crtc {
    tree: Arc<ConcurrentRadixTreeCompressed>,
    events: flume::Sender<WorkerTask>,
    clock: CpuClock,
    answer: OverlapScores,
}

impl Crtc {
    fn send(&self, tasks: impl Iterator<Item = WorkerTask>) {
        let (done, is_done) = oneshot::channel();
        for task in tasks.chain([WorkerTask::Flush(done)]) {
            let _ = self.events.send(task);
        }
        let _ = is_done.blocking_recv();
    }
}

impl Subject for Crtc {
    type Chain = Vec<LocalBlockHash>;

    fn new(_: &[usize]) -> Crtc {
        let tree = Arc::new(ConcurrentRadixTreeCompressed::new());
        let (events, received) = flume::unbounded();
        let (clock, its_clock) = mpsc::channel();
        let shared = Arc::clone(&tree);
        // Ends when its channel does.
        std::thread::spawn(move || {
            let _ = clock.send(CpuClock::of_this_thread());
            shared.worker(received, None)
        });
        let clock = its_clock.recv().unwrap_or_else(|_| CpuClock::of_this_thread());
        Crtc { tree, events, clock, answer: OverlapScores::new() }
    }

    fn apply(&mut self, window: &Window) -> Duration {
        let tasks: Vec<WorkerTask> =
            window.ops.iter().map(|op| WorkerTask::Event(event(window, op))).collect();
        let start = self.clock.read();
        self.send(tasks.into_iter());
        self.clock.read().saturating_sub(start)
    }

    fn chain(&mut self, content: &[u64], out: &mut Vec<LocalBlockHash>) {
        local(content, out);
    }

    fn ask(&mut self, chain: &Vec<LocalBlockHash>) {
        self.answer = self.tree.find_matches(chain, false);
    }

    fn depths(&self, out: &mut [u32]) {
        depths_of(&self.answer, out);
    }

    fn split(self) -> (Write, Read<Vec<LocalBlockHash>>) {
        let tree = Arc::clone(&self.tree);
        let write = move |window: &Window| {
            self.send(window.ops.iter().map(|op| WorkerTask::Event(event(window, op))));
        };
        let read = move |chain: &Vec<LocalBlockHash>| {
            black_box(tree.find_matches(chain, false));
        };
        (Box::new(write), Box::new(read))
    }
}

type Lookup = HashMap<
    WorkerWithDpRank,
    dynamo_kv_router::indexer::positional::LevelIndex,
    rustc_hash::FxBuildHasher,
>;

/// The positional map.
pub(crate) struct Positional {
    map: Arc<PositionalIndexer>,
    lookup: Lookup,
    answer: OverlapScores,
}

impl Subject for Positional {
    type Chain = Vec<LocalBlockHash>;

    fn new(_: &[usize]) -> Positional {
        let map = Arc::new(PositionalIndexer::new(JUMP));
        Positional { map, lookup: Lookup::default(), answer: OverlapScores::new() }
    }

    fn apply(&mut self, window: &Window) -> Duration {
        let events: Vec<RouterEvent> = window.ops.iter().map(|op| event(window, op)).collect();
        let apply = || {
            for event in events {
                let _ = black_box(self.map.apply_event(&mut self.lookup, event, None));
            }
        };
        timed(apply).0
    }

    fn chain(&mut self, content: &[u64], out: &mut Vec<LocalBlockHash>) {
        local(content, out);
    }

    fn ask(&mut self, chain: &Vec<LocalBlockHash>) {
        self.answer = self.map.find_matches(chain, false);
    }

    fn depths(&self, out: &mut [u32]) {
        depths_of(&self.answer, out);
    }

    fn split(self) -> (Write, Read<Vec<LocalBlockHash>>) {
        let Positional { map, mut lookup, .. } = self;
        let shared = Arc::clone(&map);
        let write = move |window: &Window| {
            for op in &window.ops {
                let _ = black_box(shared.apply_event(&mut lookup, event(window, op), None));
            }
        };
        let read = move |chain: &Vec<LocalBlockHash>| {
            black_box(map.find_matches(chain, false));
        };
        (Box::new(write), Box::new(read))
    }
}
