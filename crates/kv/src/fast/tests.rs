//! The fast index against the model and the reference, and readers beside its writer.

use super::*;
use crate::hash::{Hasher, Space, SpaceKey};
use crate::model::{Pair, Subject, cases, ops};
use crate::reference;
use proptest::prelude::*;
use std::sync::atomic::Ordering;

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
        self.reader().overlap(chain, out);
    }
    fn blocks(&self, slot: Slot) -> u64 {
        self.reader().blocks(slot)
    }
    fn check(&self) {
        self.common.runs.check();
    }
}

proptest! {
    #![proptest_config(cases(200))]

    #[test]
    fn under_any_events_it_equals_the_literal_model(ops in ops(120)) {
        let mut pair = Pair::new(Index::new(crate::model::settings()));
        for op in &ops {
            pair.run(op);
        }
        pair.compare();
        for slot in (0..8).map(Slot) {
            pair.subject.clear(slot);
        }
        pair.subject.check();
        prop_assert_eq!(pair.subject.common.runs.count(), 0);
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

/// A long prompt: a shared beginning of `shared` tokens, then tokens of its own.
fn long_prompt(shared: u32, own: u32, total: u32) -> Vec<u32> {
    (0..total).map(|i| if i < shared { i } else { i * 1000 + own }).collect()
}

/// Engine names of a chain for one slot.
fn names(slot: Slot, chain: &[BlockHash]) -> Vec<EngineHash> {
    chain.iter().map(|block| EngineHash(block.0 ^ u64::from(slot.0))).collect()
}

#[derive(Clone, Debug)]
enum Long {
    Store { slot: u16, tier: Tier, prompt: (u32, u32, u32), event: usize },
    Evict { slot: u16, tier: Tier, prompt: (u32, u32, u32), from: usize, step: usize },
    Place { slot: u16, prompt: (u32, u32, u32) },
    Clear { slot: u16 },
}

fn long_ops() -> impl Strategy<Value = Vec<Long>> {
    let slot = || prop_oneof![Just(0_u16), 0..70_u16];
    let tier = || prop_oneof![9 => Just(Tier::Device), 1 => Just(Tier::Host)];
    let prompt = || (prop_oneof![Just(0), Just(64), Just(500), Just(700)], 0..3_u32, 1..900_u32);
    let op = prop_oneof![
        10 => (slot(), tier(), prompt(), 1..40_usize).prop_map(
            |(slot, tier, prompt, event)| Long::Store { slot, tier, prompt, event }
        ),
        8 => (slot(), tier(), prompt(), 0..900_usize, 1..90_usize).prop_map(
            |(slot, tier, prompt, from, step)| Long::Evict { slot, tier, prompt, from, step }
        ),
        1 => (slot(), prompt()).prop_map(|(slot, prompt)| Long::Place { slot, prompt }),
        1 => slot().prop_map(|slot| Long::Clear { slot }),
    ];
    prop::collection::vec(op, 0..60)
}

/// Lets any index do an operation; notes the prompts that were stored.
fn run(
    index: &mut impl Subject,
    op: &Long,
    space: Space,
    prompts: &mut Vec<(u32, u32, u32)>,
) -> (Stored, Removed) {
    let (mut stored, mut removed, mut chain) = (Stored::default(), Removed::default(), Vec::new());
    match op {
        Long::Store { slot, tier, prompt, event } => {
            let (slot, tokens) = (Slot(*slot), long_prompt(prompt.0, prompt.1, prompt.2));
            space.chain(&tokens, &mut chain);
            let names = names(slot, &chain);
            for (i, tokens) in tokens.chunks(*event).enumerate() {
                let from = i * event;
                stored.add(index.store(&Store {
                    slot,
                    tier: *tier,
                    space,
                    parent: from.checked_sub(1).map(|at| names[at]),
                    blocks: &names[from..from + tokens.len()],
                    tokens,
                    extra: &[],
                }));
            }
            prompts.push(*prompt);
        }
        Long::Evict { slot, tier, prompt, from, step } => {
            space.chain(&long_prompt(prompt.0, prompt.1, prompt.2), &mut chain);
            let names = names(Slot(*slot), &chain);
            let some: Vec<_> = names.iter().skip(*from).step_by(*step).copied().collect();
            removed = index.remove(Slot(*slot), *tier, &some);
        }
        Long::Place { slot, prompt } => {
            space.chain(&long_prompt(prompt.0, prompt.1, prompt.2), &mut chain);
            index.place(Slot(*slot), &chain, 0);
        }
        Long::Clear { slot } => index.clear(Slot(*slot)),
    }
    (stored, removed)
}

proptest! {
    #![proptest_config(cases(20))]

    #[test]
    fn with_long_prompts_and_many_workers_it_equals_the_reference(ops in long_ops()) {
        let settings = IndexSettings::default();
        let (mut fast, mut exact) = (Index::new(settings), reference::Index::new(settings));
        let space = Hasher::new(1).space(&SpaceKey::plain(1));
        let mut prompts = Vec::new();
        for op in &ops {
            let done = run(&mut fast, op, space, &mut prompts);
            prop_assert_eq!(done, run(&mut exact, op, space, &mut Vec::new()));
        }
        fast.check();
        let stats = |stats: Stats| stats.slots.into_iter().filter(|slot| slot.stored.blocks > 0);
        prop_assert!(stats(fast.stats()).eq(stats(exact.stats())));
        let (reader, mut found, mut expected) = (fast.reader(), Overlap::new(), Overlap::new());
        let mut chain = Vec::new();
        for prompt in prompts {
            space.chain(&long_prompt(prompt.0, prompt.1, prompt.2), &mut chain);
            reader.overlap(&chain, &mut found);
            exact.overlap(&chain, &mut expected);
            for slot in (0..70).map(Slot) {
                prop_assert_eq!(found.get(slot), expected.get(slot));
                prop_assert_eq!(reader.blocks(slot), exact.blocks(slot));
            }
        }
    }
}

#[test]
fn a_chain_longer_than_a_run_goes_on_in_the_next() {
    let mut fast = Index::new(IndexSettings::default());
    let space = Hasher::new(1).space(&SpaceKey::plain(1));
    let tokens = long_prompt(0, 1, 150_000);
    let mut chain = Vec::new();
    space.chain(&tokens, &mut chain);
    let (slot, names) = (Slot(3), names(Slot(3), &chain));
    let store = Store {
        slot,
        tier: Tier::Device,
        space,
        parent: None,
        blocks: &names,
        tokens: &tokens,
        extra: &[],
    };
    assert_eq!(fast.store(&store).blocks, 150_000);
    assert_eq!(fast.common.runs.count(), 5);
    let mut out = Overlap::new();
    fast.reader().overlap(&chain, &mut out);
    assert_eq!(out.get(slot).device, 150_000);
    fast.remove(slot, Tier::Device, &names[140_000..]);
    fast.remove(slot, Tier::Device, &names[70_000..=70_000]);
    fast.reader().overlap(&chain, &mut out);
    assert_eq!(out.get(slot).device, 70_000);
    fast.check();
    fast.clear(slot);
    assert_eq!(fast.common.runs.count(), 0);
}

/// What an index says about these prompts, and its counters of what is held.
fn answers(index: &Index, prompts: &[(u32, u32, u32)], space: Space) -> Vec<[u32; 3]> {
    let (mut chain, mut out, mut all) = (Vec::new(), Overlap::new(), Vec::new());
    for prompt in prompts {
        space.chain(&long_prompt(prompt.0, prompt.1, prompt.2), &mut chain);
        index.reader().overlap(&chain, &mut out);
        let of = |slot| {
            let depth = out.get(Slot(slot));
            [depth.device, depth.host, depth.disk]
        };
        all.extend((0..70).map(of));
    }
    all
}

proptest! {
    #![proptest_config(cases(20))]

    #[test]
    fn a_restored_index_answers_as_the_one_it_comes_from_and_goes_on_as_it(
        before in long_ops(),
        other in long_ops(),
        after in long_ops(),
        cut: usize,
        flip: (usize, u8),
    ) {
        let settings = IndexSettings::default();
        let space = Hasher::new(1).space(&SpaceKey::plain(1));
        let (mut first, mut second) = (Index::new(settings), Index::new(settings));
        let mut prompts = Vec::new();
        for op in &before {
            run(&mut first, op, space, &mut prompts);
        }
        // The restoring index may know some of it already, and other things.
        for op in &other {
            run(&mut second, op, space, &mut prompts);
        }
        let (mut bytes, mut again) = (Vec::new(), Vec::new());
        for slot in (0..70).map(Slot) {
            bytes.clear();
            first.snapshot(slot, &mut bytes);
            let restored = second.restore(slot, &bytes);
            prop_assert_eq!(restored, Ok(Restored { blocks: first.reader().blocks(slot) }));
            again.clear();
            second.snapshot(slot, &mut again);
            let mut third = Index::new(settings);
            third.restore(slot, &again).unwrap();
            prop_assert_eq!(third.reader().blocks(slot), first.reader().blocks(slot));
        }
        second.common.runs.check();
        prop_assert_eq!(answers(&first, &prompts, space), answers(&second, &prompts, space));
        for op in &after {
            run(&mut first, op, space, &mut prompts);
            run(&mut second, op, space, &mut prompts);
        }
        prop_assert_eq!(answers(&first, &prompts, space), answers(&second, &prompts, space));
        let held = |index: &Index| -> Vec<_> {
            let slots = index.stats().slots.into_iter().filter(|slot| slot.blocks > 0);
            slots.map(|slot| (slot.slot, slot.blocks, slot.tiers, slot.names)).collect()
        };
        prop_assert_eq!(held(&first), held(&second));
        // Bytes that are cut are an error, changed ones at most something else; neither harms.
        bytes.clear();
        first.snapshot(Slot(0), &mut bytes);
        let cut = cut % bytes.len();
        prop_assert!(second.restore(Slot(1), &bytes[..cut]).is_err());
        prop_assert_eq!(second.reader().blocks(Slot(1)), 0);
        let at = flip.0 % bytes.len();
        bytes[at] ^= flip.1;
        let _ = second.restore(Slot(1), &bytes);
        (0..70).for_each(|slot| second.clear(Slot(slot)));
        prop_assert_eq!(second.common.runs.count(), 0);
    }
}

/// Lets readers stop, also when their writer panics.
struct Done<'a>(&'a std::sync::atomic::AtomicBool);

impl Drop for Done<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Slot 0 never holds more than 200 blocks of the prompt and slot 1 never more than 90;
/// nobody ever holds the other prompt beyond the shared beginning. Memory is reused all the time.
#[test]
fn readers_beside_the_writer_never_see_more_than_was_ever_held() {
    let mut fast = Index::new(IndexSettings::default());
    let space = Hasher::new(1).space(&SpaceKey::plain(1));
    let (mut chain, mut other, mut churn) = (Vec::new(), Vec::new(), Vec::new());
    space.chain(&long_prompt(30, 1, 200), &mut chain);
    space.chain(&long_prompt(30, 2, 200), &mut other);
    let rounds = if cfg!(miri) { 3 } else { 100 };
    let reader = fast.reader();
    let done = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        let check = || {
            let (reader, mut out) = (reader.clone(), Overlap::new());
            while !done.load(Ordering::Relaxed) {
                reader.overlap(&chain, &mut out);
                assert!(out.get(Slot(0)).total() <= 200);
                assert!(out.get(Slot(1)).total() <= 90);
                reader.overlap(&other, &mut out);
                assert!(out.get(Slot(0)).total() <= 30);
                assert!(out.get(Slot(1)).total() <= 30);
                assert_eq!(out.get(Slot(2)).total(), 0);
            }
        };
        scope.spawn(check);
        scope.spawn(check);
        let _done = Done(&done);
        for round in 0..rounds {
            fast.set_approximate(Slot(1), Some(Approximate::default()));
            fast.place(Slot(0), &chain, u64::from(round));
            fast.place(Slot(1), &chain[..90], u64::from(round));
            for own in 0..4 {
                space.chain(&long_prompt(0, 10 + own + round * 4, 130), &mut churn);
                fast.place(Slot(2), &churn, u64::from(round));
            }
            fast.clear(Slot(2));
            fast.clear(Slot(1));
            fast.clear(Slot(0));
        }
    });
    fast.check();
    assert_eq!(fast.common.runs.count(), 0);
}

#[test]
fn an_index_that_is_emptied_again_and_again_does_not_grow() {
    let mut fast = Index::new(IndexSettings::default());
    let space = Hasher::new(1).space(&SpaceKey::plain(1));
    let mut chain = Vec::new();
    let mut sizes = Vec::new();
    for own in 0..400 {
        for branch in 0..40 {
            space.chain(&long_prompt(5, own * 40 + branch, 20), &mut chain);
            fast.place(Slot(0), &chain, 0);
        }
        fast.clear(Slot(0));
        sizes.push(fast.common.runs.words());
    }
    // Every small table has been made by then.
    assert_eq!(sizes[200], sizes[399]);
    assert!(sizes[399] < 8192, "{}", sizes[399]);
}
