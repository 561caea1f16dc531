//! Events of real engines: after every message the index holds exactly what the decoded events say.

// Helpers outside of a test function count as production code for these lints.
#![allow(clippy::unwrap_used, clippy::panic)]

use pointsman_kv::{
    BlockExtra, BlockHash, EngineHash, EventKey, EventScope, Groups, GroupsVerdict, Hasher,
    Overlap, Reader, Removed, Slot, SpaceKey, Store, Stored, Tier, Writer, index,
};
use serde_json::Value;
use std::collections::BTreeMap;

const FIXTURES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/");

fn fixture(name: &str) -> Value {
    let text = std::fs::read_to_string(format!("{FIXTURES}{name}")).unwrap();
    serde_json::from_str(&text).unwrap()
}

/// The event's field, in either encoding: maps by name, arrays by position after the tag.
fn field<'a>(event: &'a Value, name: &str) -> &'a Value {
    const STORED: [&str; 10] = [
        "type",
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "medium",
        "lora_name",
        "extra_keys",
        "group_idx",
    ];
    const REMOVED: [&str; 4] = ["type", "block_hashes", "medium", "group_idx"];
    let Some(values) = event.as_array() else { return &event[name] };
    let fields: &[&str] = if values[0] == "BlockStored" { &STORED } else { &REMOVED };
    let at = fields.iter().position(|field| *field == name);
    at.and_then(|at| values.get(at)).unwrap_or(&Value::Null)
}

fn engine_hash(value: &Value) -> Option<EngineHash> {
    value.as_u64().map(EngineHash).or_else(|| value.as_i64().map(EngineHash::from_i64))
}

fn engine_hashes(event: &Value) -> Vec<EngineHash> {
    field(event, "block_hashes").as_array().unwrap().iter().filter_map(engine_hash).collect()
}

fn event_key(key: &Value) -> EventKey<'_> {
    match key {
        Value::String(text) => EventKey::Text(text),
        Value::Array(pair) => {
            let (id, offset) = (pair[0].as_str().unwrap(), pair[1].as_i64().unwrap());
            EventKey::Multimodal { id, offset }
        }
        other => panic!("no such key: {other}"),
    }
}

fn event_keys(value: Option<&Value>) -> Vec<EventKey<'_>> {
    value.and_then(Value::as_array).into_iter().flatten().map(event_key).collect()
}

/// A prefix, written out: salt and all tokens.
type Prefix = (Option<String>, Vec<u32>);

/// One worker's index entry beside the literal list of what it holds.
struct Worker {
    slot: Slot,
    hasher: Hasher,
    groups: Groups,
    names: BTreeMap<EngineHash, (Prefix, u32)>,
    seen: Vec<(u32, Prefix)>,
}

impl Worker {
    fn new(slot: u16, hasher: Hasher) -> Self {
        let (groups, names, seen) = (Groups::default(), BTreeMap::new(), Vec::new());
        Self { slot: Slot(slot), hasher, groups, names, seen }
    }

    fn apply(&mut self, writer: &mut Writer, event: &Value) {
        let kind = event.get("type").unwrap_or_else(|| &event[0]).as_str().unwrap();
        match kind {
            "BlockStored" => self.store(writer, event),
            "BlockRemoved" => {
                let names = engine_hashes(event);
                let tier = Tier::of_medium(field(event, "medium").as_str());
                let removed = writer.remove(self.slot, tier, &names);
                let mut unknown = 0;
                for name in &names {
                    match self.names.get_mut(name) {
                        Some((_, copies)) if *copies > 1 => *copies -= 1,
                        Some(_) => drop(self.names.remove(name)),
                        None => unknown += 1,
                    }
                }
                let blocks = names.len() as u64 - unknown;
                assert_eq!(removed, Removed { blocks, unknown });
            }
            "AllBlocksCleared" => {
                writer.clear(self.slot);
                self.names.clear();
            }
            other => panic!("no such event: {other}"),
        }
    }

    fn store(&mut self, writer: &mut Writer, event: &Value) {
        let group = field(event, "group_idx").as_u64().map(|g| u32::try_from(g).unwrap());
        let kind = field(event, "kv_cache_spec_kind").as_str();
        assert_eq!(self.groups.stored(group, kind), GroupsVerdict::Index);
        let parent = engine_hash(field(event, "parent_block_hash"));
        let scope = EventScope {
            block_size: u32::try_from(field(event, "block_size").as_u64().unwrap()).unwrap(),
            lora_name: field(event, "lora_name").as_str(),
            lora_id: field(event, "lora_id").as_i64(),
            has_parent: parent.is_some(),
        };
        let names = engine_hashes(event);
        let tokens = field(event, "token_ids").as_array().unwrap();
        let tokens: Vec<u32> =
            tokens.iter().map(|t| u32::try_from(t.as_u64().unwrap()).unwrap()).collect();
        let keys = field(event, "extra_keys").as_array();
        let keys_of = |block: usize| event_keys(keys.and_then(|keys| keys.get(block)));
        let extra: Vec<BlockExtra> = (0..names.len())
            .map(|block| scope.extra(&self.hasher, block == 0, &keys_of(block)))
            .collect();
        let stored = writer.store(&Store {
            slot: self.slot,
            tier: Tier::of_medium(field(event, "medium").as_str()),
            space: scope.space(&self.hasher, &keys_of(0)),
            parent,
            blocks: &names,
            tokens: &tokens,
            extra: &extra,
        });
        let salt = match keys_of(0).as_slice() {
            [EventKey::Text(salt)] => Some((*salt).to_owned()),
            _ => None,
        };
        let mut prefix = match parent {
            None => (salt, Vec::new()),
            Some(parent) => match self.names.get(&parent) {
                Some((prefix, _)) => prefix.clone(),
                None => {
                    let orphaned = names.len() as u64;
                    assert_eq!(stored, Stored { orphaned, ..Stored::default() });
                    return;
                }
            },
        };
        for (name, tokens) in names.iter().zip(tokens.chunks(scope.block_size as usize)) {
            prefix.1.extend_from_slice(tokens);
            self.names.entry(*name).or_insert((prefix.clone(), 0)).1 += 1;
            self.seen.push((scope.block_size, prefix.clone()));
        }
        assert_eq!(stored, Stored { blocks: names.len() as u64, ..Stored::default() });
    }

    fn chain(&self, block_size: u32, prefix: &Prefix) -> Vec<BlockHash> {
        let key = SpaceKey::plain(block_size).with_salt(prefix.0.as_deref());
        let mut chain = Vec::new();
        self.hasher.space(&key).chain(&prefix.1, &mut chain);
        chain
    }

    fn holds(&self, prefix: &Prefix) -> bool {
        self.names.values().any(|(held, _)| held == prefix)
    }

    /// Every prefix that was ever announced has the depth that the list says.
    fn compare(&self, reader: &Reader) {
        let mut out = Overlap::new();
        for (block_size, prefix) in &self.seen {
            reader.overlap(&self.chain(*block_size, prefix), &mut out);
            let held = |blocks: &usize| {
                let tokens = prefix.1[..(blocks + 1) * *block_size as usize].to_vec();
                self.holds(&(prefix.0.clone(), tokens))
            };
            let blocks = prefix.1.len() / *block_size as usize;
            let depth = (0..blocks).take_while(held).count();
            assert_eq!(out.get(self.slot).device as usize, depth);
        }
        let mut held: Vec<_> = self.names.values().map(|(prefix, _)| prefix).collect();
        held.sort();
        held.dedup();
        assert_eq!(reader.blocks(self.slot), held.len() as u64);
    }
}

fn events(message: &Value) -> impl Iterator<Item = &Value> {
    message["decoded"][1].as_array().unwrap().iter()
}

fn replay(messages: &Value, worker: &mut Worker, writer: &mut Writer, reader: &Reader) {
    for message in messages.as_array().unwrap() {
        for event in events(message) {
            worker.apply(writer, event);
        }
        worker.compare(reader);
    }
}

#[test]
fn one_vllm_worker_with_salt_evictions_and_a_reset() {
    let (mut writer, reader) = index();
    let mut worker = Worker::new(0, Hasher::new(1));
    replay(&fixture("vllm_0320_block32.json")["messages"], &mut worker, &mut writer, &reader);
    assert_eq!(reader.blocks(Slot(0)), 9);
}

#[test]
fn a_salted_prompt_is_found_with_its_salt_and_no_other() {
    let (mut writer, reader) = index();
    let mut worker = Worker::new(0, Hasher::new(1));
    let fixture = fixture("vllm_0320_block32.json");
    let messages = fixture["messages"].as_array().unwrap();
    for event in messages[..4].iter().flat_map(events) {
        worker.apply(&mut writer, event);
    }
    let (size, salted) = worker.seen.last().unwrap().clone();
    assert_eq!((size, salted.0.as_deref(), salted.1.len()), (32, Some("tenant-a"), 96));
    let depth = |salt: Option<&str>| {
        let mut out = Overlap::new();
        let prefix = (salt.map(str::to_owned), salted.1.clone());
        reader.overlap(&worker.chain(size, &prefix), &mut out);
        out.get(Slot(0)).device
    };
    assert_eq!(depth(Some("tenant-a")), 3);
    assert_eq!(depth(Some("tenant-b")), 0);
    assert_eq!(depth(None), 3, "the same tokens were served without a salt before");
    writer.clear(Slot(0));
    for event in messages[3..4].iter().flat_map(events) {
        worker.apply(&mut writer, event);
    }
    let mut out = Overlap::new();
    reader.overlap(&worker.chain(size, &(None, salted.1.clone())), &mut out);
    assert_eq!(out.get(Slot(0)).device, 0);
}

#[test]
fn a_prefill_and_a_decode_worker_hold_what_was_transferred() {
    let (mut writer, reader) = index();
    let hasher = Hasher::new(1);
    let mut workers = [Worker::new(3, hasher), Worker::new(8, hasher)];
    for (name, worker) in
        ["vllm_0320_pd_prefill.json", "vllm_0320_pd_decode.json"].iter().zip(&mut workers)
    {
        replay(&fixture(name)["messages"], worker, &mut writer, &reader);
    }
    let [prefill, decode] = &workers;
    prefill.compare(&reader);
    let mut out = Overlap::new();
    let (size, prefix) = &prefill.seen[2];
    reader.overlap(&decode.chain(*size, prefix), &mut out);
    assert_eq!((out.get(Slot(3)).device, out.get(Slot(8)).device), (3, 3));
}

#[test]
fn every_older_encoding_says_the_same() {
    let fixture = fixture("vllm_older_versions.json");
    for (version, data) in fixture["versions"].as_object().unwrap() {
        let (mut writer, reader) = index();
        let mut worker = Worker::new(0, Hasher::new(1));
        replay(&data["messages"], &mut worker, &mut writer, &reader);
        assert_eq!(reader.blocks(Slot(0)), 3, "{version}");
    }
}

#[test]
fn sglang_joined_late_holds_what_was_announced_since() {
    let (mut writer, reader) = index();
    let mut worker = Worker::new(0, Hasher::new(1));
    replay(&fixture("sglang_0523_page16.json")["messages"], &mut worker, &mut writer, &reader);
    assert!(reader.blocks(Slot(0)) > 0);
}
