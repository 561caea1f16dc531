//! Arbitrary bytes, or a snapshot with some of its bytes changed, as the state of a worker that another
//! router hands over.
//!
//! Restoring never panics. What cannot be used leaves the worker empty; what can be is as good as what an
//! index wrote itself: written again and restored elsewhere, it is the same.
#![no_main]

use libfuzzer_sys::fuzz_target;
use pointsman_kv::{
    BlockHash, EngineHash, Hasher, IndexSettings, Slot, SpaceKey, Store, Tier, Writer, index_with,
};

/// Small enough to be reached.
const SETTINGS: IndexSettings =
    IndexSettings { blocks_per_slot: 64, placed_per_slot: 16, prediction_ttl_ns: 10, seed: 3 };

const SLOT: Slot = Slot(1);

/// Tokens of a block.
const SIZE: u32 = 4;

fuzz_target!(|bytes: &[u8]| {
    let (mut writer, reader) = index_with(SETTINGS);
    match bytes.split_first() {
        Some((0, raw)) => restore(&mut writer, raw),
        Some((chains, changes)) => restore(&mut writer, &changed(*chains, changes)),
        None => return,
    };
    let held = reader.blocks(SLOT);
    let (first, second) = (written(&writer), again(&writer));
    assert_eq!(first.len(), second.len(), "{held} blocks");
    writer.clear(SLOT);
    assert_eq!(reader.blocks(SLOT), 0);
});

fn restore(writer: &mut Writer, bytes: &[u8]) {
    let restored = writer.restore(SLOT, bytes);
    let held = writer.reader().blocks(SLOT);
    match restored {
        Ok(restored) => assert_eq!(restored.blocks, held),
        Err(_) => assert_eq!(held, 0),
    }
}

/// The snapshot of an index with so many chains of blocks, with changes: three bytes each, two for where
/// and one for what.
fn changed(chains: u8, changes: &[u8]) -> Vec<u8> {
    let (mut writer, _) = index_with(SETTINGS);
    for chain in 0..u32::from(chains % 8) {
        // Two chains each begin with the same blocks.
        let tokens: Vec<u32> = (0..4 * SIZE).map(|at| at + chain / 2 * 100).collect();
        let blocks: Vec<EngineHash> =
            (0..4).map(|at| EngineHash(u64::from(chain * 1000 + at))).collect();
        let space = Hasher::new(SETTINGS.seed).space(&SpaceKey::plain(SIZE));
        let (parent, extra) = (None, &[][..]);
        writer.store(&Store {
            slot: SLOT,
            tier: Tier::Device,
            space,
            parent,
            blocks: &blocks,
            tokens: &tokens,
            extra,
        });
        let placed: Vec<BlockHash> =
            (0..3).map(|at| BlockHash(u64::from(chain * 10 + at))).collect();
        writer.place(SLOT, &placed, 1);
    }
    let mut snapshot = written(&writer);
    for change in changes.chunks_exact(3) {
        let at = usize::from(u16::from_le_bytes([change[0], change[1]])) % snapshot.len();
        snapshot[at] = change[2];
    }
    snapshot
}

fn written(writer: &Writer) -> Vec<u8> {
    let mut out = Vec::new();
    writer.snapshot(SLOT, &mut out);
    out
}

/// What another index writes that was restored from what this one wrote.
fn again(writer: &Writer) -> Vec<u8> {
    let (mut other, reader) = index_with(SETTINGS);
    let restored = other.restore(SLOT, &written(writer));
    let restored = restored.unwrap_or_else(|error| panic!("its own snapshot: {error}"));
    assert_eq!(restored.blocks, writer.reader().blocks(SLOT));
    assert_eq!(reader.blocks(SLOT), restored.blocks);
    written(&other)
}
