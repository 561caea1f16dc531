//! From tokens to the chained block names that the engine model caches by.
//!
//! Equal prefixes under the same adapter and salt get equal names in every process with the same
//! seed, as with vLLM since 0.29.

use xxhash_rust::xxh3::{Xxh3, xxh3_64_with_seed};

use crate::engine::Content;
use crate::rng::mix;

/// Names the full blocks of a sequence.
#[must_use]
pub fn content(
    tokens: Vec<u32>,
    block_size: u32,
    seed: u64,
    lora: Option<&str>,
    salt: Option<&str>,
) -> Content {
    let mut name = root(seed, lora, salt);
    let names = tokens.chunks_exact(block_size.max(1) as usize).map(|block| {
        name = name_after(name, block);
        name
    });
    Content {
        names: names.collect(),
        lora: lora.map(Into::into),
        salt: salt.map(Into::into),
        tokens: tokens.into(),
    }
}

fn root(seed: u64, lora: Option<&str>, salt: Option<&str>) -> u64 {
    let mut hash = xxh3_64_with_seed(b"root", seed);
    for (kind, key) in [("lora", lora), ("salt", salt)] {
        if let Some(key) = key {
            hash = xxh3_64_with_seed(key.as_bytes(), hash ^ xxh3_64_with_seed(kind.as_bytes(), 0));
        }
    }
    hash
}

fn name_after(parent: u64, block: &[u32]) -> u64 {
    let mut hasher = Xxh3::with_seed(parent);
    for token in block {
        hasher.update(&token.to_le_bytes());
    }
    hasher.digest()
}

/// A hash of a token list, to tell prompts apart.
#[must_use]
pub fn digest(tokens: &[u32]) -> u64 {
    name_after(0, tokens)
}

/// The 32-byte digest whose last 8 bytes are this name, for engines that publish whole digests.
#[must_use]
pub fn long_name(name: u64) -> [u8; 32] {
    let mut bytes = [0; 32];
    for (at, part) in [mix(name), mix(!name), mix(name ^ 0x5555), name].into_iter().enumerate() {
        bytes[at * 8..at * 8 + 8].copy_from_slice(&part.to_be_bytes());
    }
    bytes
}
