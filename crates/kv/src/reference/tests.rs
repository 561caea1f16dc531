//! The reference index: its single behaviours, and equality with the literal model.

use super::*;
use crate::hash::{BlockExtra, Hasher, Space, SpaceKey};
use crate::index::Depth;
use crate::model::{Pair, Subject, cases, ops};
use proptest::prelude::*;

impl Subject for Index {
    fn store(&mut self, store: &Store<'_>) -> Stored {
        Self::store(self, store)
    }
    fn remove(&mut self, slot: Slot, tier: Tier, blocks: &[EngineHash]) -> Removed {
        Self::remove(self, slot, tier, blocks)
    }
    fn clear(&mut self, slot: Slot) {
        Self::clear(self, slot);
    }
    fn place(&mut self, slot: Slot, chain: &[BlockHash], now_ns: u64) {
        Self::place(self, slot, chain, now_ns);
    }
    fn set_approximate(&mut self, slot: Slot, mode: Option<Approximate>) {
        Self::set_approximate(self, slot, mode);
    }
    fn expire(&mut self, now_ns: u64) {
        Self::expire(self, now_ns);
    }
    fn overlap(&self, chain: &[BlockHash], out: &mut Overlap) {
        Self::overlap(self, chain, out);
    }
    fn blocks(&self, slot: Slot) -> u64 {
        Self::blocks(self, slot)
    }
}

proptest! {
    #![proptest_config(cases(400))]

    #[test]
    fn under_any_events_it_equals_the_literal_model(ops in ops(120)) {
        let mut pair = Pair::new(Index::new(crate::model::settings()));
        for op in &ops {
            pair.run(op);
        }
        pair.compare();
    }

    #[test]
    fn after_every_single_event_it_equals_the_literal_model(ops in ops(25)) {
        let mut pair = Pair::new(Index::new(crate::model::settings()));
        for op in &ops {
            pair.run(op);
            pair.compare();
        }
    }
}

const SLOT: Slot = Slot(2);

/// An index and a prompt of eight blocks whose names are 100, 101, ...
struct Probe {
    index: Index,
    space: Space,
    tokens: Vec<u32>,
}

impl Probe {
    fn new() -> Self {
        let space = Hasher::new(1).space(&SpaceKey::plain(4));
        Self { index: Index::new(crate::model::settings()), space, tokens: (0..32).collect() }
    }

    fn chain(&self) -> Vec<BlockHash> {
        let mut chain = Vec::new();
        self.space.chain(&self.tokens, &mut chain);
        chain
    }

    fn name(block: usize) -> EngineHash {
        EngineHash(100 + block as u64)
    }

    fn store(&mut self, tier: Tier, from: usize, to: usize) -> Stored {
        let names: Vec<_> = (from..to).map(Self::name).collect();
        self.index.store(&Store {
            slot: SLOT,
            tier,
            space: self.space,
            parent: from.checked_sub(1).map(Self::name),
            blocks: &names,
            tokens: &self.tokens[from * 4..to * 4],
            extra: &[],
        })
    }

    fn remove(&mut self, tier: Tier, block: usize) -> Removed {
        self.index.remove(SLOT, tier, &[Self::name(block)])
    }

    fn depth(&self) -> (u32, u32, u32) {
        let mut out = Overlap::new();
        self.index.overlap(&self.chain(), &mut out);
        let Depth { device, host, disk } = out.get(SLOT);
        (device, host, disk)
    }
}

#[test]
fn a_stored_prefix_counts_up_to_its_last_block() {
    let mut p = Probe::new();
    assert_eq!(p.store(Tier::Device, 0, 3).blocks, 3);
    assert_eq!(p.depth(), (3, 0, 0));
    p.store(Tier::Device, 3, 5);
    assert_eq!(p.depth(), (5, 0, 0));
    assert_eq!(p.index.blocks(SLOT), 5);
    assert_eq!(p.index.blocks(Slot(9)), 0);
}

#[test]
fn a_hole_ends_the_depth_until_it_is_filled_again() {
    let mut p = Probe::new();
    p.store(Tier::Device, 0, 6);
    p.remove(Tier::Device, 2);
    assert_eq!(p.depth(), (2, 0, 0));
    p.store(Tier::Device, 2, 3);
    assert_eq!(p.depth(), (6, 0, 0));
}

#[test]
fn a_block_counts_until_its_last_copy_is_removed() {
    let mut p = Probe::new();
    p.store(Tier::Device, 0, 2);
    p.store(Tier::Device, 0, 2);
    p.remove(Tier::Device, 0);
    assert_eq!(p.depth(), (2, 0, 0));
    p.remove(Tier::Device, 0);
    assert_eq!(p.depth(), (0, 0, 0));
    assert_eq!(p.remove(Tier::Device, 0), Removed { blocks: 0, unknown: 1 });
}

#[test]
fn tiers_add_up_from_fast_to_slow() {
    let mut p = Probe::new();
    p.store(Tier::Device, 0, 2);
    p.store(Tier::Host, 2, 4);
    p.store(Tier::Device, 4, 5);
    p.store(Tier::Disk, 5, 6);
    assert_eq!(p.depth(), (2, 3, 1));
    assert_eq!(p.remove(Tier::Host, 1), Removed { blocks: 0, unknown: 1 });
    p.remove(Tier::Device, 1);
    assert_eq!(p.depth(), (1, 0, 0));
}

#[test]
fn a_store_without_tokens_adds_a_copy_of_blocks_that_are_known() {
    let mut p = Probe::new();
    p.store(Tier::Device, 0, 2);
    let names = [Probe::name(0), Probe::name(1), EngineHash(1)];
    let zero = Hasher::new(1).space(&SpaceKey::plain(0));
    let copy = Store {
        slot: SLOT,
        tier: Tier::Host,
        space: zero,
        parent: None,
        blocks: &names,
        tokens: &[],
        extra: &[],
    };
    assert_eq!(p.index.store(&copy), Stored { blocks: 2, orphaned: 1, ..Stored::default() });
    p.remove(Tier::Device, 0);
    p.remove(Tier::Device, 1);
    assert_eq!(p.depth(), (0, 2, 0));
}

#[test]
fn blocks_after_an_unknown_parent_are_dropped_and_counted() {
    let mut p = Probe::new();
    assert_eq!(p.store(Tier::Device, 3, 5), Stored { orphaned: 2, ..Stored::default() });
    p.store(Tier::Device, 0, 3);
    assert_eq!(p.depth(), (3, 0, 0));
    assert_eq!(p.index.stats().slots[0].stored.orphaned, 2);
}

#[test]
fn a_name_that_changes_its_meaning_forgets_the_old_one() {
    let mut p = Probe::new();
    p.store(Tier::Device, 0, 1);
    let other = p.index.store(&Store {
        slot: SLOT,
        tier: Tier::Device,
        space: p.space,
        parent: None,
        blocks: &[Probe::name(0)],
        tokens: &[9; 4],
        extra: &[],
    });
    assert_eq!(other, Stored { blocks: 1, renamed: 1, ..Stored::default() });
    assert_eq!(p.depth(), (0, 0, 0));
    assert_eq!(p.index.blocks(SLOT), 1);
}

#[test]
fn a_block_that_is_its_own_parent_does_no_harm() {
    let mut p = Probe::new();
    let own = |p: &mut Probe| {
        p.index.store(&Store {
            slot: SLOT,
            tier: Tier::Device,
            space: p.space,
            parent: Some(Probe::name(0)),
            blocks: &[Probe::name(0)],
            tokens: &[0, 1, 2, 3],
            extra: &[],
        })
    };
    assert_eq!(own(&mut p).orphaned, 1);
    p.store(Tier::Device, 0, 1);
    assert_eq!(own(&mut p).renamed, 1);
    assert_eq!(p.depth(), (0, 0, 0));
}

#[test]
fn tokens_or_extras_that_do_not_fit_are_refused_whole() {
    let mut p = Probe::new();
    let names = [EngineHash(1), EngineHash(2)];
    let space = |size| Hasher::new(1).space(&SpaceKey::plain(size));
    let none = BlockExtra::NONE;
    let cases: [(u32, usize, &[BlockExtra]); 6] =
        [(4, 7, &[]), (4, 9, &[]), (0, 8, &[]), (u32::MAX, 8, &[]), (4, 8, &[none]), (8, 8, &[])];
    for (size, tokens, extra) in cases {
        let store = Store {
            slot: SLOT,
            tier: Tier::Device,
            space: space(size),
            parent: None,
            blocks: &names,
            tokens: &p.tokens[..tokens],
            extra,
        };
        assert_eq!(p.index.store(&store), Stored { malformed: 2, ..Stored::default() });
    }
    assert_eq!(p.index.blocks(SLOT), 0);
}

#[test]
fn a_worker_beyond_its_bound_is_refused_further_names() {
    let mut p = Probe::new();
    p.index = Index::new(IndexSettings { blocks_per_slot: 3, ..crate::model::settings() });
    assert_eq!(p.store(Tier::Device, 0, 5), Stored { blocks: 3, refused: 2, ..Stored::default() });
    assert_eq!(p.depth(), (3, 0, 0));
    assert_eq!(p.store(Tier::Host, 0, 3).blocks, 3);
}

#[test]
fn workers_may_name_the_same_prefix_differently() {
    let mut p = Probe::new();
    p.store(Tier::Device, 0, 4);
    let names: Vec<_> = (0..4).map(|i| EngineHash(7 * i)).collect();
    p.index.store(&Store {
        slot: Slot(5),
        tier: Tier::Device,
        space: p.space,
        parent: None,
        blocks: &names,
        tokens: &p.tokens[..16],
        extra: &[],
    });
    let mut out = Overlap::new();
    p.index.overlap(&p.chain(), &mut out);
    assert_eq!((out.get(SLOT).device, out.get(Slot(5)).device), (4, 4));
    assert_eq!(out.get(Slot(4)), Depth::default());
    assert_eq!(out.get(Slot(999)), Depth::default());
}

#[test]
fn a_prediction_ends_unless_an_event_confirms_it() {
    let mut p = Probe::new();
    let chain = p.chain();
    p.index.place(SLOT, &chain[..4], 100);
    assert_eq!(p.depth(), (4, 0, 0));
    p.store(Tier::Device, 0, 2);
    p.index.expire(109);
    assert_eq!(p.depth(), (4, 0, 0));
    p.index.expire(110);
    assert_eq!(p.depth(), (2, 0, 0));
    let stats = p.index.stats().slots[0];
    assert_eq!((stats.confirmed, stats.expired, stats.placed), (2, 2, 0));
    p.remove(Tier::Device, 1);
    assert_eq!(p.depth(), (1, 0, 0));
}

#[test]
fn an_approximate_worker_forgets_the_least_recent_ends_first() {
    let mut p = Probe::new();
    let chain = p.chain();
    let mode = Approximate { capacity_blocks: Some(5), ttl_ns: None };
    p.index.set_approximate(SLOT, Some(mode));
    p.index.place(SLOT, &chain[..5], 1);
    let other: Vec<_> = (0..2).map(BlockHash).collect();
    p.index.place(SLOT, &other, 2);
    assert_eq!(p.depth(), (3, 0, 0));
    assert_eq!(p.index.blocks(SLOT), 5);
    p.index.place(SLOT, &chain, 3);
    assert_eq!(p.depth(), (5, 0, 0));
    p.index.expire(u64::MAX);
    assert_eq!(p.depth(), (5, 0, 0));
    p.index.set_approximate(SLOT, None);
    assert_eq!(p.depth(), (0, 0, 0));
}

#[test]
fn time_that_goes_backwards_stands_still() {
    let mut p = Probe::new();
    let chain = p.chain();
    p.index.place(SLOT, &chain, 100);
    p.index.place(SLOT, &chain[..1], 5);
    p.index.expire(109);
    assert_eq!(p.depth(), (8, 0, 0));
    p.index.expire(110);
    assert_eq!(p.depth(), (0, 0, 0));
}
