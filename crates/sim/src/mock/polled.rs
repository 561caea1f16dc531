//! KV events that are asked for: TensorRT-LLM's `/kv_cache_events`, which hands each out once.
//! Blocks that came from another engine are not among them.

use std::collections::{HashSet, VecDeque};

use serde_json::{Value, json};

use crate::engine::Event;

/// Events not yet asked for.
pub(super) struct Polled {
    queue: VecDeque<Value>,
    next: u64,
    /// Blocks that came from elsewhere.
    received: HashSet<u64>,
    capacity_blocks: u32,
    keep: usize,
    /// Where attention runs data-parallel. Each rank numbers its events by itself.
    rank: Option<u32>,
}

impl Polled {
    pub(super) fn new(capacity_blocks: u32, keep: usize, rank: Option<u32>) -> Polled {
        let (queue, received) = Default::default();
        let mut polled = Polled { queue, next: 0, received, capacity_blocks, keep, rank };
        polled.restart();
        polled
    }

    /// As if the process had restarted.
    pub(super) fn restart(&mut self) {
        self.queue.clear();
        self.received.clear();
        self.next = 0;
        let blocks = [self.capacity_blocks, 0];
        self.push(&json!({"type": "created", "num_blocks_per_cache_level": blocks}));
    }

    pub(super) fn received(&mut self, names: &[u64]) {
        self.received.extend(names);
    }

    /// Notes events; `lost` ones only take up numbers.
    pub(super) fn note(&mut self, events: &[Event], block_size: u32, lost: bool) {
        for event in events {
            let Some(data) = self.data(event, block_size) else { continue };
            if lost {
                self.next += 1;
            } else {
                self.push(&data);
            }
        }
    }

    /// Everything so far, once.
    pub(super) fn drain(&mut self) -> Vec<Value> {
        self.queue.drain(..).collect()
    }

    fn push(&mut self, data: &Value) {
        if self.queue.len() >= self.keep {
            self.queue.pop_front();
        }
        let mut event = json!({"event_id": self.next, "data": data, "window_size": 4096});
        if let Some(rank) = self.rank {
            event["attention_dp_rank"] = json!(rank);
        }
        self.queue.push_back(event);
        self.next += 1;
    }

    fn data(&mut self, event: &Event, block_size: u32) -> Option<Value> {
        match event {
            Event::Stored { content, first, count } => {
                let size = block_size as usize;
                let own = (*first as usize..(first + count) as usize)
                    .filter(|at| !self.received.contains(&content.names[*at]));
                let block = |at: usize| {
                    let token = |id: &u32| json!({"type": "unique_token", "token_id": id, "token_extra_id": 0});
                    let tokens = &content.tokens[at * size..(at + 1) * size];
                    json!({
                        "type": "stored_block", "block_hash": content.names[at],
                        "tokens": tokens.iter().map(token).collect::<Vec<_>>(), "cache_level": 0,
                        "priority": 35, "mm_keys": [],
                    })
                };
                let own: Vec<usize> = own.collect();
                let parent = own.first()?.checked_sub(1).map(|at| content.names[at]);
                let blocks: Vec<Value> = own.into_iter().map(block).collect();
                Some(json!({"type": "stored", "parent_hash": parent, "blocks": blocks}))
            }
            Event::Removed { name } => {
                let foreign = self.received.remove(name);
                (!foreign).then(|| json!({"type": "removed", "block_hashes": [name]}))
            }
            // A cleared cache says so block by block; here it is made anew.
            Event::Cleared => {
                let blocks = [self.capacity_blocks, 0];
                Some(json!({"type": "created", "num_blocks_per_cache_level": blocks}))
            }
        }
    }
}
