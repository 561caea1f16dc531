//! Real messages give exactly their blocks, in whatever windows; hostile ones give nothing.

use std::collections::{BTreeMap, BTreeSet};

use pointsman_kv::{Overlap, Reader, SpaceKey, index};
use pointsman_wire::kv_events::{Announce, Encoding, encode};
use serde_json::Value;

use super::*;

const SLOT: Slot = Slot(0);

fn window() -> Window {
    Window::new(SLOT, Hasher::new(7), Groups::default())
}

/// Applies a message, window by window; what was read, what became of it, and how many windows.
fn apply(window: &mut Window, writer: &mut Writer, payload: &[u8]) -> (Read, Applied, usize) {
    let mut message = Message::new(payload).unwrap();
    let (mut sum, mut windows) = (Applied::default(), 0);
    loop {
        let done = window.fill(&mut message);
        assert!(window.entries.len() <= WINDOW_CHANGES);
        assert!(window.names.len() <= WINDOW_BLOCKS && window.extras.len() <= WINDOW_BLOCKS);
        let applied = window.apply(writer);
        sum.stored.blocks += applied.stored.blocks;
        sum.stored.orphaned += applied.stored.orphaned;
        sum.stored.malformed += applied.stored.malformed;
        sum.removed.blocks += applied.removed.blocks;
        sum.removed.unknown += applied.removed.unknown;
        sum.clears += applied.clears;
        windows += 1;
        if done {
            return (message.read, sum, windows);
        }
    }
}

// --- Captured messages ---

/// A prefix, written out: salt and all tokens.
type Prefix = (Option<String>, Vec<u32>);

/// The literal list of what a worker holds: each name's prefix and copies.
#[derive(Default)]
struct Held(BTreeMap<u64, (Prefix, u32)>);

fn bits(value: &Value) -> Option<u64> {
    value.as_u64().or_else(|| value.as_i64().map(i64::cast_unsigned))
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map(Vec::as_slice).unwrap_or_default()
}

/// A field of a decoded event by its name, or by its place where events are lists.
fn field<'a>(event: &'a Value, name: &str, place: usize) -> &'a Value {
    if event.is_array() { event.get(place) } else { event.get(name) }.unwrap_or(&Value::Null)
}

impl Held {
    fn apply(&mut self, event: &Value) {
        let names = list(field(event, "block_hashes", 1)).iter().filter_map(bits);
        match field(event, "type", 0).as_str().unwrap() {
            "BlockStored" => {
                let size = field(event, "block_size", 4).as_u64().unwrap() as usize;
                let salt =
                    list(&list(field(event, "extra_keys", 8)).first().cloned().unwrap_or_default())
                        .first()
                        .map(|salt| salt.as_str().unwrap().to_owned());
                let tokens: Vec<u32> = list(field(event, "token_ids", 3))
                    .iter()
                    .map(|token| u32::try_from(token.as_u64().unwrap()).unwrap())
                    .collect();
                let mut prefix = match bits(field(event, "parent_block_hash", 2)) {
                    Some(parent) => match self.0.get(&parent) {
                        Some((prefix, _)) => prefix.clone(),
                        None => return,
                    },
                    None => (salt, Vec::new()),
                };
                for (name, tokens) in names.zip(tokens.chunks(size)) {
                    prefix.1.extend(tokens);
                    let held = self.0.entry(name).or_insert((prefix.clone(), 0));
                    assert_eq!(held.0, prefix, "no engine here gives a name twice");
                    held.1 += 1;
                }
            }
            "BlockRemoved" => {
                for name in names {
                    if let Some(held) = self.0.get_mut(&name) {
                        held.1 -= 1;
                        if held.1 == 0 {
                            self.0.remove(&name);
                        }
                    }
                }
            }
            "AllBlocksCleared" => self.0.clear(),
            other => panic!("{other} is unknown"),
        }
    }

    /// Every prefix ever seen is as deep in the index as all of its blocks are held.
    fn assert_known(&self, reader: &Reader, size: usize, seen: &BTreeSet<Prefix>) {
        let held: BTreeSet<&Prefix> = self.0.values().map(|(prefix, _)| prefix).collect();
        assert_eq!(reader.blocks(SLOT), held.len() as u64);
        let (mut chain, mut overlap) = (Vec::new(), Overlap::new());
        for (salt, tokens) in seen {
            let blocks = (1..=tokens.len() / size)
                .take_while(|blocks| {
                    held.contains(&(salt.clone(), tokens[..blocks * size].to_vec()))
                })
                .count();
            let plain = SpaceKey::plain(u32::try_from(size).unwrap());
            Hasher::new(7).space(&plain.with_salt(salt.as_deref())).chain(tokens, &mut chain);
            reader.overlap(&chain, &mut overlap);
            assert_eq!(overlap.get(SLOT).total() as usize, blocks, "{salt:?} {tokens:?}");
        }
    }
}

fn fixture(path: &str) -> Value {
    let root = env!("CARGO_MANIFEST_DIR");
    let text = std::fs::read_to_string(format!("{root}/../wire/tests/fixtures/{path}")).unwrap();
    serde_json::from_str(&text).unwrap()
}

fn hex(text: &str) -> Vec<u8> {
    (0..text.len())
        .step_by(2)
        .map(|at| u8::from_str_radix(&text[at..at + 2], 16).unwrap())
        .collect()
}

/// Applies the messages of a capture; after each one the index holds what their decoded form says.
fn check_capture(messages: &Value) -> usize {
    let (mut writer, reader) = index();
    let (mut window, mut held, mut seen) = (window(), Held::default(), BTreeSet::new());
    let mut size = 0;
    for message in list(messages) {
        let payload = hex(list(&message["frames_hex"]).last().unwrap().as_str().unwrap());
        let events = list(&message["decoded"][1]);
        let (read, applied, _) = apply(&mut window, &mut writer, &payload);
        for event in events {
            held.apply(event);
            seen.extend(held.0.values().map(|(prefix, _)| prefix.clone()));
            size = field(event, "block_size", 4).as_u64().map_or(size, |size| size as usize);
        }
        assert_eq!(read.stored + read.removed + read.cleared, events.len() as u64);
        assert_eq!((read.malformed, read.skipped, applied.stored.malformed), (0, 0, 0));
        held.assert_known(&reader, size, &seen);
    }
    seen.len()
}

#[test]
fn every_captured_message_gives_exactly_the_blocks_of_its_decoded_form() {
    let mut prefixes = 0;
    for path in [
        "vllm_kv_events/v0320_int_hashes_block32_topic.json",
        "vllm_kv_events/v0320_pd_prefill_worker.json",
        "vllm_kv_events/v0320_pd_decode_worker.json",
        "sglang_kv_events/v0523_agg_page16.json",
        "sglang_kv_events/v0523_prefill_page16.json",
    ] {
        prefixes += check_capture(&fixture(path)["messages"]);
    }
    assert!(prefixes > 50, "{prefixes}");
    let versions = fixture("vllm_kv_events/older_versions_encoded.json");
    for (version, file) in versions["versions"].as_object().unwrap() {
        assert!(check_capture(&file["messages"]) > 1, "{version}");
    }
}

// --- Windows ---

fn store(blocks: u64, parent: Option<u64>) -> Vec<u8> {
    let names: Vec<_> = (0..blocks).map(|at| BlockName::Int(1000 + at)).collect();
    let tokens: Vec<u32> = (0..u32::try_from(blocks * 2).unwrap()).collect();
    let stored = Announce::Stored {
        hashes: &names,
        parent: parent.map(BlockName::Int),
        tokens: &tokens,
        block_size: 2,
        lora_name: Some("sql"),
        medium: None,
        cache_salt: Some("tenant"),
    };
    encode(1.0, None, &[stored], Encoding::Map)
}

#[test]
fn an_event_larger_than_a_window_is_applied_in_pieces_as_if_it_were_whole() {
    let blocks = 3 * WINDOW_BLOCKS as u64 + 5;
    let (mut writer, reader) = index();
    let mut window = window();
    let (read, applied, windows) = apply(&mut window, &mut writer, &store(blocks, None));
    assert_eq!((read.stored, applied.stored.blocks, windows), (1, blocks, 4));
    let tokens: Vec<u32> = (0..u32::try_from(blocks * 2).unwrap()).collect();
    let key = SpaceKey::plain(2).with_lora(Some("sql")).with_salt(Some("tenant"));
    let (mut chain, mut overlap) = (Vec::new(), Overlap::new());
    Hasher::new(7).space(&key).chain(&tokens, &mut chain);
    reader.overlap(&chain, &mut overlap);
    assert_eq!(u64::from(overlap.get(SLOT).device), blocks);
    // Nor is a removal.
    let names: Vec<_> = (0..blocks).map(|at| BlockName::Int(1000 + at)).collect();
    let removed = Announce::Removed { hashes: &names, medium: None };
    let (read, applied, windows) =
        apply(&mut window, &mut writer, &encode(1.0, None, &[removed], Encoding::Array));
    assert_eq!((read.removed, applied.removed.blocks, windows), (1, blocks, 4));
    assert_eq!(reader.blocks(SLOT), 0);
}

#[test]
fn a_store_behind_an_unknown_block_changes_nothing_however_large() {
    let (mut writer, reader) = index();
    let blocks = 2 * WINDOW_BLOCKS as u64;
    let (_, applied, _) = apply(&mut window(), &mut writer, &store(blocks, Some(5)));
    assert_eq!((applied.stored.blocks, applied.stored.orphaned), (0, blocks));
    assert_eq!(reader.blocks(SLOT), 0);
}

#[test]
fn many_small_events_make_windows_of_bounded_length() {
    let (mut writer, _) = index();
    let events = vec![Announce::Cleared; 1000];
    let payload = encode(1.0, None, &events, Encoding::Array);
    let (read, applied, windows) = apply(&mut window(), &mut writer, &payload);
    assert_eq!((read.cleared, applied.clears), (1000, 1000));
    assert!((16..=17).contains(&windows), "{windows}");
}

// --- Hostile ---

#[test]
fn events_that_change_nothing_end_a_turn_too() {
    let (mut writer, _) = index();
    let count = 3 * WINDOW_EVENTS as u32 - 1;
    let mut payload = vec![0x92, 0xcb, 0, 0, 0, 0, 0, 0, 0, 0, 0xdd];
    payload.extend(count.to_be_bytes());
    payload.resize(payload.len() + count as usize, 0x90);
    let (read, applied, windows) = apply(&mut window(), &mut writer, &payload);
    assert_eq!((read.malformed, applied), (u64::from(count), Applied::default()));
    assert_eq!(windows, 3);
}

#[test]
fn blocks_that_do_not_fit_their_tokens_are_counted_and_change_nothing() {
    let (mut writer, reader) = index();
    let hashes = [BlockName::Int(1), BlockName::Int(2)];
    for (tokens, block_size) in
        [(&[1, 2, 3][..], 2), (&[1, 2, 3, 4], 3), (&[1], 0), (&[1], u32::MAX), (&[1, 2, 3, 4], 4)]
    {
        let (parent, lora_name, medium, cache_salt) = (None, None, None, None);
        let event = Announce::Stored {
            hashes: &hashes,
            parent,
            tokens,
            block_size,
            lora_name,
            medium,
            cache_salt,
        };
        let payload = encode(1.0, None, &[event, Announce::Cleared], Encoding::Map);
        let (read, applied, _) = apply(&mut window(), &mut writer, &payload);
        assert_eq!((read.malformed, read.unreadable, read.stored, read.cleared), (1, 0, 0, 1));
        assert_eq!((applied.stored, applied.clears), (Default::default(), 1));
    }
    assert_eq!(reader.blocks(SLOT), 0);
}

#[test]
fn a_block_of_absurd_size_is_taken_and_its_memory_given_back() {
    let (mut writer, reader) = index();
    let tokens = vec![1; 4 * WINDOW_TOKENS];
    let stored = Announce::Stored {
        hashes: &[BlockName::Int(1)],
        parent: None,
        tokens: &tokens,
        block_size: u32::try_from(tokens.len()).unwrap(),
        lora_name: None,
        medium: None,
        cache_salt: None,
    };
    let payload = encode(1.0, None, &[stored, stored], Encoding::Map);
    let mut window = window();
    let (read, applied, windows) = apply(&mut window, &mut writer, &payload);
    assert_eq!((read.stored, applied.stored.blocks), (2, 2));
    assert!(windows >= 2, "{windows}");
    assert_eq!(reader.blocks(SLOT), 1);
    assert!(window.tokens.capacity() <= 2 * WINDOW_TOKENS);
}
