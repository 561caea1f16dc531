//! Chained block hashes: `S0 = root(space)`, `Si = mix(S(i-1) ^ content_i)`.
//!
//! Block size, LoRA adapter and cache salt choose the [`Space`], that is the root `S0`, so chains
//! of different spaces are disjoint in one index; what else an engine hashes into a block
//! (multimodal items, embedding digests) is that block's [`BlockExtra`]. Every value depends on
//! the seed given to [`Hasher::new`]; hashes are never exchanged between processes.

use crate::names::BlockHash;
use xxhash_rust::xxh3::{Xxh3, xxh3_64_with_seed};

/// Tokens of a block as most engines cut it.
const USUAL_TOKENS: usize = 16;

/// Tokens of a block that are hashed from a stack buffer; larger blocks are streamed.
const STACK_TOKENS: usize = 64;

/// What makes two equal token sequences different prefixes.
///
/// One index serves one model, so the model is not part of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SpaceKey<'a> {
    /// Tokens per block on the worker.
    pub block_size: u32,
    /// LoRA adapter name; an empty one counts as none.
    pub lora: Option<&'a str>,
    /// The request's `cache_salt`; an empty one counts as none, as in vLLM.
    pub salt: Option<&'a str>,
}

impl<'a> SpaceKey<'a> {
    /// The space of the base model without a salt.
    #[must_use]
    pub fn plain(block_size: u32) -> Self {
        Self { block_size, lora: None, salt: None }
    }

    /// The same space with this LoRA adapter.
    #[must_use]
    pub fn with_lora(self, lora: Option<&'a str>) -> Self {
        Self { lora, ..self }
    }

    /// The same space with this cache salt.
    #[must_use]
    pub fn with_salt(self, salt: Option<&'a str>) -> Self {
        Self { salt, ..self }
    }
}

/// Makes spaces and extras under one seed.
#[derive(Clone, Copy, Debug)]
pub struct Hasher {
    seed: u64,
}

impl Hasher {
    /// A hasher with this seed: random per process in service, fixed where runs must repeat.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self { seed }
    }

    /// The space that `key` names.
    #[must_use]
    pub fn space(&self, key: &SpaceKey<'_>) -> Space {
        let mut h = Xxh3::with_seed(mix(self.seed ^ ROOT_DOMAIN));
        h.update(&key.block_size.to_le_bytes());
        for part in [key.lora, key.salt] {
            let part = part.unwrap_or_default();
            h.update(&(part.len() as u64).to_le_bytes());
            h.update(part.as_bytes());
        }
        let content_seed = mix(self.seed ^ CONTENT_DOMAIN);
        Space { root: BlockHash(mix(h.digest())), content_seed, block_size: key.block_size }
    }

    /// Starts a block's extra keys; without any key it builds [`BlockExtra::NONE`].
    #[must_use]
    pub fn extra(&self) -> ExtraBuilder {
        ExtraBuilder { seed: mix(self.seed ^ EXTRA_DOMAIN), state: 0 }
    }
}

const ROOT_DOMAIN: u64 = 0x7370_6163_6520_3031;
const CONTENT_DOMAIN: u64 = 0x626c_6f63_6b20_3031;
const EXTRA_DOMAIN: u64 = 0x6578_7472_6120_3031;

/// A disjoint key space: all chains of one block size, LoRA adapter and cache salt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Space {
    root: BlockHash,
    content_seed: u64,
    block_size: u32,
}

impl Space {
    /// Tokens per block.
    #[must_use]
    pub fn block_size(&self) -> u32 {
        self.block_size
    }

    /// `S0`, what the first block is chained to.
    #[must_use]
    pub fn root(&self) -> BlockHash {
        self.root
    }

    /// The hash of the block with these tokens after `parent`.
    #[must_use]
    pub fn extend(&self, parent: BlockHash, tokens: &[u32], extra: BlockExtra) -> BlockHash {
        let mut content = self.content(tokens);
        if extra != BlockExtra::NONE {
            content = mix(content ^ extra.0);
        }
        BlockHash(mix(parent.0 ^ content))
    }

    /// Fills `out` with the chain of a prompt without extra keys: one hash per whole block.
    pub fn chain(&self, tokens: &[u32], out: &mut Vec<BlockHash>) {
        out.clear();
        let size = self.block_size as usize;
        if size == 0 {
            return;
        }
        out.reserve(tokens.len() / size);
        let mut last = self.root;
        for block in tokens.chunks_exact(size) {
            last = self.extend(last, block, BlockExtra::NONE);
            out.push(last);
        }
    }

    fn content(&self, tokens: &[u32]) -> u64 {
        if let Some(tokens) = tokens.as_array::<USUAL_TOKENS>() {
            let mut bytes = [0_u8; USUAL_TOKENS * 4];
            write(tokens, &mut bytes);
            return xxh3_64_with_seed(&bytes, self.content_seed);
        }
        if tokens.len() <= STACK_TOKENS {
            let mut bytes = [0_u8; STACK_TOKENS * 4];
            write(tokens, &mut bytes);
            return xxh3_64_with_seed(&bytes[..tokens.len() * 4], self.content_seed);
        }
        let mut h = Xxh3::with_seed(self.content_seed);
        let mut bytes = [0_u8; STACK_TOKENS * 4];
        for part in tokens.chunks(STACK_TOKENS) {
            write(part, &mut bytes);
            h.update(&bytes[..part.len() * 4]);
        }
        h.digest()
    }
}

/// Tokens as bytes, little endian.
fn write(tokens: &[u32], bytes: &mut [u8]) {
    for (to, token) in bytes.chunks_exact_mut(4).zip(tokens) {
        to.copy_from_slice(&token.to_le_bytes());
    }
}

/// What an engine hashes into one block besides tokens, LoRA adapter and cache salt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct BlockExtra(u64);

impl BlockExtra {
    /// A block of plain tokens.
    pub const NONE: Self = Self(0);
}

/// Folds a block's extra keys, in the engine's order, into a [`BlockExtra`].
#[derive(Clone, Copy, Debug)]
pub struct ExtraBuilder {
    seed: u64,
    state: u64,
}

impl ExtraBuilder {
    /// A multimodal item that reaches into the block: its identifier and its first token's
    /// offset from the block's start (negative if it began in an earlier block).
    #[must_use]
    pub fn multimodal(self, id: &str, offset: i64) -> Self {
        self.fold(1, id.as_bytes(), offset.cast_unsigned())
    }

    /// A binary key, such as the digest of prompt embeddings.
    #[must_use]
    pub fn digest(self, bytes: &[u8]) -> Self {
        self.fold(2, bytes, 0)
    }

    /// A textual key of a kind that is not known here.
    #[must_use]
    pub fn text(self, text: &str) -> Self {
        self.fold(3, text.as_bytes(), 0)
    }

    /// The block's extra.
    #[must_use]
    pub fn build(self) -> BlockExtra {
        BlockExtra(self.state)
    }

    fn fold(mut self, kind: u64, bytes: &[u8], number: u64) -> Self {
        let item = xxh3_64_with_seed(bytes, self.seed ^ kind);
        let folded = mix(mix(self.state ^ item) ^ number);
        // Zero means "no keys"; a fold that lands on it moves off.
        self.state = if folded == 0 { 1 } else { folded };
        self
    }
}

/// A bijection that spreads every input bit over the whole word (the finaliser of splitmix64).
pub(crate) fn mix(mut x: u64) -> u64 {
    x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chain(space: &Space, tokens: &[u32]) -> Vec<BlockHash> {
        let mut out = vec![BlockHash(9)];
        space.chain(tokens, &mut out);
        out
    }

    #[test]
    fn equal_prefixes_share_hashes_and_the_first_difference_changes_all_after_it() {
        let space = Hasher::new(1).space(&SpaceKey::plain(4));
        let a: Vec<u32> = (0..40).collect();
        let mut b = a.clone();
        b[17] = 999;
        let (a, b) = (chain(&space, &a), chain(&space, &b));
        assert_eq!(a.len(), 10);
        assert_eq!(a[..4], b[..4]);
        assert!(a[4..].iter().all(|h| !b.contains(h)));
    }

    #[test]
    fn only_whole_blocks_are_hashed() {
        let space = Hasher::new(1).space(&SpaceKey::plain(16));
        assert_eq!(chain(&space, &[7; 15]).len(), 0);
        assert_eq!(chain(&space, &[7; 31]).len(), 1);
        assert_eq!(chain(&space, &[7; 32]).len(), 2);
    }

    #[test]
    fn repeated_content_gets_a_new_hash_at_every_depth() {
        let space = Hasher::new(1).space(&SpaceKey::plain(2));
        let mut hashes = chain(&space, &[5; 2000]);
        hashes.push(space.root());
        hashes.sort_unstable();
        hashes.dedup();
        assert_eq!(hashes.len(), 1001);
    }

    #[test]
    fn block_size_lora_salt_and_seed_are_disjoint_spaces() {
        let tokens: Vec<u32> = (0..64).collect();
        let plain = SpaceKey::plain(16);
        let keys = [
            plain,
            SpaceKey::plain(8),
            plain.with_lora(Some("a")),
            plain.with_salt(Some("a")),
            plain.with_lora(Some("b")),
            plain.with_salt(Some("b")),
            plain.with_lora(Some("ab")),
            plain.with_lora(Some("a")).with_salt(Some("b")),
            plain.with_lora(Some("b")).with_salt(Some("a")),
        ];
        let mut all = Vec::new();
        for seed in [1, 2] {
            for key in &keys {
                all.extend(chain(&Hasher::new(seed).space(key), &tokens));
            }
        }
        let n = all.len();
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), n);
    }

    #[test]
    fn an_empty_lora_or_salt_is_none() {
        let h = Hasher::new(3);
        let plain = SpaceKey::plain(16);
        assert_eq!(h.space(&plain), h.space(&plain.with_lora(Some("")).with_salt(Some(""))));
    }

    #[test]
    fn a_block_size_of_zero_has_no_blocks() {
        assert!(chain(&Hasher::new(1).space(&SpaceKey::plain(0)), &[1, 2, 3]).is_empty());
    }

    #[test]
    fn chain_and_extend_agree_at_every_block_size() {
        let tokens: Vec<u32> = (0..1000).map(|t| t * 7919).collect();
        for size in [1, 3, 16, 63, 64, 65, 128, 300, 1000] {
            let space = Hasher::new(5).space(&SpaceKey::plain(size));
            let mut last = space.root();
            let mut expected = Vec::new();
            for block in tokens.chunks_exact(size as usize) {
                last = space.extend(last, block, BlockExtra::NONE);
                expected.push(last);
            }
            assert_eq!(chain(&space, &tokens), expected);
        }
    }

    #[test]
    fn streamed_and_buffered_content_are_the_same_function() {
        let space = Hasher::new(5).space(&SpaceKey::plain(65));
        let tokens: Vec<u32> = (0..65).collect();
        let bytes: Vec<u8> = tokens.iter().flat_map(|t| t.to_le_bytes()).collect();
        assert_eq!(space.content(&tokens), xxh3_64_with_seed(&bytes, space.content_seed));
    }

    #[test]
    fn extras_differ_by_kind_content_offset_and_order() {
        let h = Hasher::new(1);
        let extras = [
            BlockExtra::NONE,
            h.extra().multimodal("a", 0).build(),
            h.extra().multimodal("a", 1).build(),
            h.extra().multimodal("b", 0).build(),
            h.extra().multimodal("a", 0).multimodal("b", 0).build(),
            h.extra().multimodal("b", 0).multimodal("a", 0).build(),
            h.extra().text("a").build(),
            h.extra().digest(b"a").build(),
            h.extra().digest(b"").build(),
        ];
        for (i, a) in extras.iter().enumerate() {
            assert!(!extras[..i].contains(a), "{i}");
        }
        assert_eq!(h.extra().build(), BlockExtra::NONE);
        assert_ne!(
            Hasher::new(2).extra().multimodal("a", 0).build(),
            h.extra().multimodal("a", 0).build()
        );
    }
}
