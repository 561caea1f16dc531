//! What the engines truly have in their caches, next to what the router knows of it.
#![allow(dead_code, unreachable_pub, reason = "each test file uses a part of it")]
#![allow(clippy::expect_used, clippy::panic, reason = "it is all test")]

use std::collections::HashSet;

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

/// Waits until the router knows of as many blocks on each rank as the engine has: its events are
/// all applied.
pub async fn caught_up(fleet: &Fleet) {
    wait_until(async || {
        let (_, listed) = Request::get("/v1/pointsman/workers").json(fleet.addr()).await;
        let listed = listed["workers"].as_array().cloned().unwrap_or_default();
        for engine in &fleet.engines {
            for rank in engine.mock.cache()["ranks"].as_array().into_iter().flatten() {
                let of = |known: &&Value| {
                    known["name"] == engine.name.as_str() && known["rank"] == rank["rank"]
                };
                let known = listed.iter().find(of).map(|known| &known["index_blocks"]);
                let cached = different_blocks(rank);
                if known.and_then(Value::as_u64) != Some(cached) {
                    let name = &engine.name;
                    return Err(format!("{name} has {cached} blocks, the router knows {known:?}"));
                }
            }
        }
        Ok(())
    })
    .await;
}

/// Blocks in a rank's cache, those of equal content counted once.
fn different_blocks(rank: &Value) -> u64 {
    let chains = rank["chains"].as_array().into_iter().flatten();
    let names = chains.flat_map(|chain| chain["hashes"].as_array().into_iter().flatten());
    names.filter_map(Value::as_u64).collect::<HashSet<_>>().len() as u64
}

/// The prefixes in one rank's cache, one block at a time.
#[derive(Debug, Default)]
pub struct Cache {
    block_size: usize,
    prefixes: HashSet<Vec<u32>>,
}

impl Cache {
    /// What is in the cache of a rank, for requests without adapter and salt.
    pub fn of(engine: &Engine, rank: usize) -> Cache {
        let cache = engine.mock.cache();
        let rank = &cache["ranks"][rank];
        let block_size = rank["block_size"].as_u64().and_then(|size| usize::try_from(size).ok());
        let block_size = block_size.expect("a block size");
        let mut prefixes = HashSet::new();
        for chain in rank["chains"].as_array().expect("a list of chains") {
            assert!(chain["lora"].is_null() && chain["salt"].is_null(), "{chain}");
            let tokens = chain["tokens"].as_array().expect("the tokens of a chain");
            let id = |id: &Value| id.as_u64().and_then(|id| u32::try_from(id).ok());
            let tokens: Vec<u32> = tokens.iter().map(|token| id(token).expect("an id")).collect();
            assert_eq!(tokens.len() % block_size, 0);
            for end in (block_size..=tokens.len()).step_by(block_size) {
                prefixes.insert(tokens[..end].to_vec());
            }
        }
        Cache { block_size, prefixes }
    }

    /// Tokens of a prompt that are in it: whole blocks from the beginning on, without a gap.
    pub fn overlap(&self, prompt: &[u32]) -> u64 {
        let ends = (self.block_size..=prompt.len()).step_by(self.block_size);
        let held = ends.take_while(|end| self.prefixes.contains(&prompt[..*end]));
        held.last().unwrap_or(0) as u64
    }

    /// Blocks that differ.
    pub fn blocks(&self) -> usize {
        self.prefixes.len()
    }
}
