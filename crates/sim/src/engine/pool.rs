//! KV blocks: reference counts, the prefix cache over them, and the order of eviction.
//!
//! A block with a reference is in use; one without is on the free list, and keeps its name until
//! it is handed out again. Sequences give blocks back tail first, so leaves go before their parents.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

const NIL: u32 = u32::MAX;

/// Names are hashes already.
#[derive(Default)]
struct NameHasher(u64);

impl Hasher for NameHasher {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.0 = self.0.rotate_left(8) ^ u64::from(byte);
        }
    }
    fn write_u64(&mut self, name: u64) {
        // The table uses the top bits too, and names of a simulation may be small numbers.
        self.0 = name.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
}

#[derive(Clone, Copy)]
struct Block {
    refs: u32,
    name: Option<u64>,
    parent: Option<u64>,
    /// Next block of the same name.
    twin: u32,
    prev: u32,
    next: u32,
}

/// The blocks of one engine.
pub(super) struct Pool {
    blocks: Vec<Block>,
    /// First block of each name.
    named: HashMap<u64, u32, BuildHasherDefault<NameHasher>>,
    named_count: u32,
    head: u32,
    tail: u32,
    free: u32,
}

impl Pool {
    pub(super) fn new(capacity: u32) -> Pool {
        let empty = Block { refs: 0, name: None, parent: None, twin: NIL, prev: NIL, next: NIL };
        let mut pool = Pool {
            blocks: vec![empty; capacity as usize],
            named: HashMap::default(),
            named_count: 0,
            head: NIL,
            tail: NIL,
            free: 0,
        };
        for id in 0..capacity {
            pool.push_back(id);
        }
        pool
    }

    pub(super) fn capacity(&self) -> u32 {
        self.blocks.len() as u32
    }

    pub(super) fn free(&self) -> u32 {
        self.free
    }

    pub(super) fn used(&self) -> u32 {
        self.capacity() - self.free
    }

    pub(super) fn named_count(&self) -> u32 {
        self.named_count
    }

    /// Takes `count` blocks, oldest first, and tells the names that are lost by it.
    /// The caller has made sure that as many are free.
    pub(super) fn take(&mut self, count: u32, into: &mut Vec<u32>, mut lost: impl FnMut(u64)) {
        for _ in 0..count {
            let id = self.head;
            if id == NIL {
                return;
            }
            self.unlink(id);
            if let Some(name) = self.unname(id) {
                lost(name);
            }
            self.blocks[id as usize].refs = 1;
            into.push(id);
        }
    }

    /// The blocks of the longest prefix of `names` that is cached.
    pub(super) fn find(&self, names: &[u64], into: &mut Vec<u32>) {
        for name in names {
            let Some(&id) = self.named.get(name) else { return };
            into.push(id);
        }
    }

    /// How many of these blocks nobody uses.
    pub(super) fn idle_among(&self, ids: &[u32]) -> u32 {
        ids.iter().filter(|&&id| self.blocks[id as usize].refs == 0).count() as u32
    }

    /// One more user for each of these blocks.
    pub(super) fn hold(&mut self, ids: &[u32]) {
        for &id in ids {
            if self.blocks[id as usize].refs == 0 {
                self.unlink(id);
            }
            self.blocks[id as usize].refs += 1;
        }
    }

    /// One user less for each of these blocks, which are in sequence order.
    pub(super) fn release(&mut self, ids: &[u32]) {
        for &id in ids.iter().rev() {
            let block = &mut self.blocks[id as usize];
            block.refs -= 1;
            if block.refs == 0 {
                if block.name.is_some() {
                    self.push_back(id);
                } else {
                    self.push_front(id);
                }
            }
        }
    }

    /// Makes a block in use findable.
    pub(super) fn name(&mut self, id: u32, name: u64, parent: Option<u64>) {
        // The oldest copy stays the one that is found.
        let first = *self.named.entry(name).or_insert(id);
        let twin = match first == id {
            true => NIL,
            false => std::mem::replace(&mut self.blocks[first as usize].twin, id),
        };
        let block = &mut self.blocks[id as usize];
        (block.name, block.parent, block.twin) = (Some(name), parent, twin);
        self.named_count += 1;
    }

    /// Forgets all names, whoever uses the blocks.
    pub(super) fn forget(&mut self) {
        self.named.clear();
        self.named_count = 0;
        for block in &mut self.blocks {
            block.name = None;
            block.parent = None;
            block.twin = NIL;
        }
    }

    /// The names of cached chains that no cached block continues, each with its parents up to the
    /// root, root first.
    pub(super) fn chains(&self) -> Vec<Vec<u64>> {
        let parent_of: HashMap<u64, Option<u64>> =
            self.blocks.iter().filter_map(|b| b.name.map(|name| (name, b.parent))).collect();
        let inner: std::collections::HashSet<u64> = parent_of.values().flatten().copied().collect();
        let mut chains: Vec<Vec<u64>> = parent_of
            .keys()
            .filter(|name| !inner.contains(name))
            .map(|&leaf| {
                let mut chain = vec![leaf];
                let mut at = leaf;
                while let Some(Some(parent)) = parent_of.get(&at) {
                    chain.push(*parent);
                    at = *parent;
                }
                chain.reverse();
                chain
            })
            .collect();
        chains.sort_unstable();
        chains
    }

    fn unname(&mut self, id: u32) -> Option<u64> {
        let name = self.blocks[id as usize].name.take()?;
        let twin = std::mem::replace(&mut self.blocks[id as usize].twin, NIL);
        self.blocks[id as usize].parent = None;
        self.named_count -= 1;
        let Some(&first) = self.named.get(&name) else { return Some(name) };
        if first != id {
            let mut at = first;
            while self.blocks[at as usize].twin != id {
                at = self.blocks[at as usize].twin;
            }
            self.blocks[at as usize].twin = twin;
        } else if twin == NIL {
            self.named.remove(&name);
        } else {
            self.named.insert(name, twin);
        }
        Some(name)
    }

    fn unlink(&mut self, id: u32) {
        let Block { prev, next, .. } = self.blocks[id as usize];
        match prev {
            NIL => self.head = next,
            prev => self.blocks[prev as usize].next = next,
        }
        match next {
            NIL => self.tail = prev,
            next => self.blocks[next as usize].prev = prev,
        }
        self.free -= 1;
    }

    fn push_back(&mut self, id: u32) {
        let tail = std::mem::replace(&mut self.tail, id);
        self.blocks[id as usize].prev = tail;
        self.blocks[id as usize].next = NIL;
        match tail {
            NIL => self.head = id,
            tail => self.blocks[tail as usize].next = id,
        }
        self.free += 1;
    }

    fn push_front(&mut self, id: u32) {
        let head = std::mem::replace(&mut self.head, id);
        self.blocks[id as usize].next = head;
        self.blocks[id as usize].prev = NIL;
        match head {
            NIL => self.tail = id,
            head => self.blocks[head as usize].prev = id,
        }
        self.free += 1;
    }

    /// Checks the pool against the users of each block, counted by the caller.
    pub(super) fn check(&self, users: &[u32]) -> Result<(), String> {
        let mut listed = 0;
        let (mut at, mut before) = (self.head, NIL);
        while at != NIL {
            let block = &self.blocks[at as usize];
            if block.refs != 0 || block.prev != before {
                return Err(format!("block {at} is on the free list with {} users", block.refs));
            }
            listed += 1;
            if listed > self.blocks.len() {
                return Err("the free list has a cycle".to_owned());
            }
            (before, at) = (at, block.next);
        }
        if before != self.tail || listed != self.free as usize {
            return Err(format!("{} blocks are free, {listed} are listed", self.free));
        }
        let mut named = 0;
        for (id, block) in self.blocks.iter().enumerate() {
            if block.refs != users[id] {
                return Err(format!("block {id} has {} users, counted {}", block.refs, users[id]));
            }
            let Some(name) = block.name else { continue };
            named += 1;
            let parent_lost = block.parent.is_some_and(|name| !self.named.contains_key(&name));
            if parent_lost {
                return Err(format!("block {id} ({name:x}) outlived its parent"));
            }
            let mut copy = self.named.get(&name).copied().unwrap_or(NIL);
            while copy != NIL && copy as usize != id {
                copy = self.blocks[copy as usize].twin;
            }
            if copy == NIL {
                return Err(format!("block {id} ({name:x}) cannot be found by its name"));
            }
        }
        let in_use = users.iter().filter(|&&users| users > 0).count();
        if named != self.named_count || in_use + listed != self.blocks.len() {
            return Err(format!(
                "{named} blocks are named, {} counted; {in_use} used + {listed} free of {}",
                self.named_count,
                self.blocks.len()
            ));
        }
        Ok(())
    }
}
