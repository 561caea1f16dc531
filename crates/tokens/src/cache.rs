//! Ids of pieces of text seen before, bounded in bytes, least recently used first out.
//!
//! A piece's ids depend on nothing but its text (see cuts), so the text is the key: kept and
//! compared, the hash only finds it. In shards, so that threads seldom meet; under a shard's lock
//! nothing is hashed, compared or encoded.

use std::hash::{BuildHasherDefault, Hasher};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use lru::LruCache;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::{CacheLimits, CacheStats};

const SHARDS: usize = 16;

/// What an entry takes beside its text and ids.
const ENTRY_BYTES: usize = 160;

#[derive(Debug)]
struct Entry {
    text: Box<str>,
    ids: Box<[u32]>,
}

impl Entry {
    fn bytes(&self) -> usize {
        self.text.len() + self.ids.len() * size_of::<u32>() + ENTRY_BYTES
    }
}

/// The key is a hash already.
#[derive(Default)]
struct Identity(u64);

impl Hasher for Identity {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        self.0 = bytes.iter().fold(self.0, |h, &b| h.rotate_left(8) ^ u64::from(b));
    }

    fn write_u64(&mut self, key: u64) {
        self.0 = key;
    }
}

type Map = LruCache<u64, Arc<Entry>, BuildHasherDefault<Identity>>;

struct Shard {
    map: Map,
    bytes: usize,
    evicted: u64,
}

/// The cache of one tokenizer.
pub(crate) struct Cache {
    shards: Vec<Mutex<Shard>>,
    shard_bytes: usize,
    seed: u64,
    hit_tokens: AtomicU64,
    computed_tokens: AtomicU64,
}

impl std::fmt::Debug for Cache {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Cache").field("stats", &self.stats()).finish_non_exhaustive()
    }
}

impl Cache {
    pub(crate) fn new(limits: CacheLimits) -> Cache {
        // A seed nobody outside knows: keys that collide cannot be prepared.
        let seed = std::hash::BuildHasher::hash_one(&std::hash::RandomState::new(), 0u8);
        let shard = || Shard {
            map: LruCache::unbounded_with_hasher(BuildHasherDefault::default()),
            bytes: 0,
            evicted: 0,
        };
        Cache {
            shards: (0..SHARDS).map(|_| Mutex::new(shard())).collect(),
            shard_bytes: limits.bytes / SHARDS,
            seed,
            hit_tokens: AtomicU64::new(0),
            computed_tokens: AtomicU64::new(0),
        }
    }

    /// Appends the ids of `text` to `out`; `encode` computes them when they are not held. Returns
    /// how many came from the cache.
    pub(crate) fn append<E>(
        &self,
        text: &str,
        out: &mut Vec<u32>,
        encode: impl FnOnce(&str) -> Result<Vec<u32>, E>,
    ) -> Result<usize, E> {
        let key = xxh3_64_with_seed(text.as_bytes(), self.seed);
        let shard = &self.shards[(key >> 60) as usize % SHARDS];
        let held = lock(shard).map.get(&key).cloned();
        if let Some(entry) = held.filter(|e| &*e.text == text) {
            out.extend_from_slice(&entry.ids);
            self.hit_tokens.fetch_add(entry.ids.len() as u64, Relaxed);
            return Ok(entry.ids.len());
        }
        let ids = encode(text)?;
        out.extend_from_slice(&ids);
        self.computed_tokens.fetch_add(ids.len() as u64, Relaxed);
        let entry = Entry { text: text.into(), ids: ids.into() };
        lock(shard).insert(key, entry, self.shard_bytes);
        Ok(0)
    }

    pub(crate) fn stats(&self) -> CacheStats {
        let mut stats = CacheStats {
            enabled: true,
            hit_tokens: self.hit_tokens.load(Relaxed),
            computed_tokens: self.computed_tokens.load(Relaxed),
            ..CacheStats::default()
        };
        for shard in &self.shards {
            let shard = lock(shard);
            stats.entries += shard.map.len() as u64;
            stats.bytes += shard.bytes as u64;
            stats.evicted += shard.evicted;
        }
        stats
    }
}

impl Shard {
    fn insert(&mut self, key: u64, entry: Entry, limit: usize) {
        if entry.bytes() > limit {
            return;
        }
        self.bytes += entry.bytes();
        if let Some(old) = self.map.put(key, Arc::new(entry)) {
            self.bytes -= old.bytes();
        }
        while self.bytes > limit
            && let Some((_, old)) = self.map.pop_lru()
        {
            self.bytes -= old.bytes();
            self.evicted += 1;
        }
    }
}

/// A panic while a shard was locked leaves it usable: every step under the lock is complete.
fn lock(shard: &Mutex<Shard>) -> MutexGuard<'_, Shard> {
    shard.lock().unwrap_or_else(PoisonError::into_inner)
}
