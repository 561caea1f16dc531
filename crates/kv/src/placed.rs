//! What the router placed on a worker, least recently placed first.
//!
//! Invariant: `order` and `blocks` hold the same blocks, and times grow with the order.
//! Memory: 50 to 90 bytes per placed block.

use crate::names::BlockHash;
use std::collections::{BTreeMap, HashMap};

/// Placed blocks in the order of their last placement.
#[derive(Debug, Default)]
pub(crate) struct Placed {
    order: BTreeMap<u64, (BlockHash, u64)>,
    blocks: HashMap<BlockHash, u64>,
    turn: u64,
}

impl Placed {
    pub(crate) fn len(&self) -> u64 {
        self.blocks.len() as u64
    }

    #[cfg(test)]
    pub(crate) fn contains(&self, block: BlockHash) -> bool {
        self.blocks.contains_key(&block)
    }

    #[cfg(test)]
    pub(crate) fn blocks(&self) -> impl Iterator<Item = &BlockHash> {
        self.blocks.keys()
    }

    /// All blocks, least recently placed first.
    pub(crate) fn in_order(&self) -> impl Iterator<Item = &BlockHash> {
        self.order.values().map(|(block, _)| block)
    }

    /// Makes `block` the most recently placed one.
    pub(crate) fn touch(&mut self, block: BlockHash, now_ns: u64) {
        self.turn += 1;
        if let Some(old) = self.blocks.insert(block, self.turn) {
            self.order.remove(&old);
        }
        self.order.insert(self.turn, (block, now_ns));
    }

    pub(crate) fn remove(&mut self, block: BlockHash) -> bool {
        let turn = self.blocks.remove(&block);
        turn.is_some_and(|turn| self.order.remove(&turn).is_some())
    }

    /// When the least recently placed block was placed.
    pub(crate) fn oldest_ns(&self) -> Option<u64> {
        self.order.first_key_value().map(|(_, (_, at))| *at)
    }

    pub(crate) fn pop_oldest(&mut self) -> Option<BlockHash> {
        let (_, (block, _)) = self.order.pop_first()?;
        self.blocks.remove(&block);
        Some(block)
    }
}
