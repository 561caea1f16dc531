//! What the engines truly have in their caches, next to what the router knows of it.
#![allow(dead_code, unreachable_pub, reason = "each test file uses a part of it")]
#![allow(clippy::expect_used, clippy::panic, reason = "it is all test")]

use std::collections::HashMap;

use serde_json::Value;

use super::support::fleet::Engine;
use super::support::{Fleet, Request, wait_until};

/// What `/v1/pointsman/explain` says of a request.
///
/// # Panics
/// When it says nothing.
pub async fn explain(fleet: &Fleet, body: &Value) -> Value {
    let (head, record) = Request::post("/v1/pointsman/explain", body).json(fleet.addr()).await;
    assert_eq!(head.status, 200, "{record}");
    record
}

/// What a record says of one worker, by the order of its ranks.
pub fn candidates<'a>(record: &'a Value, worker: &str) -> Vec<&'a Value> {
    let all = record["candidates"].as_array().expect("a list of candidates");
    all.iter().filter(|candidate| candidate["worker"] == worker).collect()
}

/// The caches of an idle fleet, by worker, each a list by rank; once the router knows of as many
/// blocks on every rank as the engine has, so that its events are all applied.
pub async fn caught_up(fleet: &Fleet) -> HashMap<String, Vec<Cache>> {
    let of = |engine: &Engine| (engine.name.clone(), Cache::of(engine));
    let caches: HashMap<String, Vec<Cache>> = fleet.engines.iter().map(of).collect();
    wait_until(async || {
        let (_, listed) = Request::get("/v1/pointsman/workers").json(fleet.addr()).await;
        for worker in listed["workers"].as_array().into_iter().flatten() {
            let (name, rank) = (&worker["name"], &worker["rank"]);
            let ranks = name.as_str().and_then(|name| caches.get(name)).expect("an engine");
            let at = rank.as_u64().and_then(|rank| usize::try_from(rank).ok()).expect("a rank");
            let (known, blocks) = (&worker["index_blocks"], ranks[at].blocks());
            if known != blocks {
                return Err(format!("{name} has {blocks} blocks, the router knows {known}"));
            }
        }
        Ok(())
    })
    .await;
    caches
}

/// One rank's cache: its blocks as a tree, for each adapter and salt one.
#[derive(Debug, Default)]
pub struct Cache {
    block_size: usize,
    /// The root of each adapter and salt.
    roots: HashMap<(String, String), usize>,
    /// Each block by the one before it and its own tokens.
    blocks: HashMap<(usize, Vec<u32>), usize>,
}

impl Cache {
    /// What the ranks of an engine have in their caches.
    pub fn of(engine: &Engine) -> Vec<Cache> {
        let cache = engine.mock.cache();
        cache["ranks"].as_array().expect("a list of ranks").iter().map(Cache::of_rank).collect()
    }

    fn of_rank(rank: &Value) -> Cache {
        let mut cache = Cache { block_size: number(&rank["block_size"]), ..Cache::default() };
        for chain in rank["chains"].as_array().expect("a list of chains") {
            let tokens = chain["tokens"].as_array().expect("the tokens of a chain");
            let tokens: Vec<u32> = tokens.iter().map(number).collect();
            assert_eq!(tokens.len() % cache.block_size, 0);
            let text = |key: &str| chain[key].as_str().unwrap_or_default().to_owned();
            cache.insert((text("lora"), text("salt")), &tokens);
        }
        cache
    }

    fn insert(&mut self, scope: (String, String), tokens: &[u32]) {
        let free = self.roots.len() + self.blocks.len();
        let mut at = *self.roots.entry(scope).or_insert(free);
        for block in tokens.chunks_exact(self.block_size) {
            let free = self.roots.len() + self.blocks.len();
            at = *self.blocks.entry((at, block.to_vec())).or_insert(free);
        }
    }

    /// Tokens of a prompt without adapter and salt that are in it: whole blocks from the beginning
    /// on, without a gap.
    pub fn overlap(&self, prompt: &[u32]) -> usize {
        let Some(mut at) = self.roots.get(&(String::new(), String::new())) else { return 0 };
        let mut held = 0;
        for block in prompt.chunks_exact(self.block_size) {
            let Some(next) = self.blocks.get(&(*at, block.to_vec())) else { break };
            at = next;
            held += self.block_size;
        }
        held
    }

    /// Blocks that differ.
    pub fn blocks(&self) -> usize {
        self.blocks.len()
    }
}

fn number<N: TryFrom<u64>>(value: &Value) -> N {
    value.as_u64().and_then(|number| N::try_from(number).ok()).expect("a number")
}
