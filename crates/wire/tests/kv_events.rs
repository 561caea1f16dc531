//! Every captured KV-event message is read as its publisher meant it, and written back the same.
#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use common::{hex, json};
use pointsman_wire::kv_events::{Announce, Batch, BlockName, Encoding, Event, ExtraKey, encode};
use serde_json::{Value, json};

/// The messages of a file: payload and what a Python client made of it.
fn messages(file: &Value) -> Vec<(Vec<u8>, Value)> {
    let pair = |message: &Value| {
        let payload = message["frames_hex"].as_array().unwrap().last().unwrap();
        (hex(payload), message["decoded"].clone())
    };
    file["messages"].as_array().unwrap().iter().map(pair).collect()
}

/// A field of an event by its name, or by its place where events are lists.
fn field<'a>(event: &'a Value, name: &str, place: usize) -> &'a Value {
    if event.is_array() { event.get(place) } else { event.get(name) }.unwrap_or(&Value::Null)
}

fn kind(event: &Value) -> &str {
    field(event, "type", 0).as_str().unwrap()
}

/// Integers of either sign as 64 bits.
fn bits(value: &Value) -> u64 {
    value.as_u64().unwrap_or_else(|| value.as_i64().unwrap().cast_unsigned())
}

fn ids(value: &Value) -> Vec<u64> {
    value.as_array().unwrap().iter().map(bits).collect()
}

fn text(value: &Value) -> Option<&str> {
    value.as_str()
}

fn check_batch(payload: &[u8], decoded: &Value) -> usize {
    let batch = Batch::decode(payload).unwrap();
    assert!((batch.timestamp - decoded[0].as_f64().unwrap()).abs() < 1e-6);
    assert_eq!(batch.rank.map(u64::from), decoded[2].as_u64());
    let expected = decoded[1].as_array().unwrap();
    assert_eq!(batch.len(), expected.len());
    for (event, expected) in batch.events().zip(expected) {
        check_event(event.unwrap(), expected);
    }
    batch.len()
}

fn check_event(event: Event<'_>, expected: &Value) {
    match event {
        Event::Stored(stored) => {
            assert_eq!(kind(expected), "BlockStored");
            let hashes: Vec<u64> = stored.hashes.map(|name| name.id()).collect();
            assert_eq!(hashes, ids(field(expected, "block_hashes", 1)));
            let parent = field(expected, "parent_block_hash", 2);
            assert_eq!(
                stored.parent.map(|name| name.id()),
                (!parent.is_null()).then(|| bits(parent))
            );
            let tokens: Vec<u64> = stored.tokens.map(u64::from).collect();
            assert_eq!(tokens, ids(field(expected, "token_ids", 3)));
            assert_eq!(json!(stored.block_size), *field(expected, "block_size", 4));
            assert_eq!(tokens.len(), hashes.len() * stored.block_size as usize);
            assert_eq!(stored.medium, text(field(expected, "medium", 6)));
            assert_eq!(stored.lora_name, text(field(expected, "lora_name", 7)));
            let keys: Vec<Value> = stored
                .extra_keys
                .map(|block| {
                    let keys: Vec<&str> = block
                        .map(|key| match key {
                            ExtraKey::Text(text) => text,
                            other => panic!("{other:?}"),
                        })
                        .collect();
                    if keys.is_empty() { Value::Null } else { json!(keys) }
                })
                .collect();
            let expected_keys = field(expected, "extra_keys", 8);
            assert_eq!(keys, expected_keys.as_array().cloned().unwrap_or_default());
            assert_eq!(stored.group_idx.map(u64::from), field(expected, "group_idx", 9).as_u64());
            assert_eq!(stored.spec_kind, text(field(expected, "kv_cache_spec_kind", 10)));
        }
        Event::Removed(removed) => {
            assert_eq!(kind(expected), "BlockRemoved");
            let hashes: Vec<u64> = removed.hashes.map(|name| name.id()).collect();
            assert_eq!(hashes, ids(field(expected, "block_hashes", 1)));
            assert_eq!(removed.medium, text(field(expected, "medium", 2)));
        }
        Event::Cleared => assert_eq!(kind(expected), "AllBlocksCleared"),
        Event::Unknown(kind) => panic!("{kind} is unknown"),
    }
}

#[test]
fn all_captured_messages_are_read() {
    let mut events = 0;
    for path in [
        "vllm_kv_events/v0320_int_hashes_block32_topic.json",
        "vllm_kv_events/v0320_pd_prefill_worker.json",
        "vllm_kv_events/v0320_pd_decode_worker.json",
        "sglang_kv_events/v0523_agg_page16.json",
        "sglang_kv_events/v0523_prefill_page16.json",
    ] {
        for (payload, decoded) in messages(&json(path)) {
            events += check_batch(&payload, &decoded);
        }
    }
    assert!(events > 40, "{events}");
}

#[test]
fn the_encoding_of_every_version_is_read() {
    let file = json("vllm_kv_events/older_versions_encoded.json");
    for version in file["versions"].as_object().unwrap().values() {
        for (payload, decoded) in messages(version) {
            check_batch(&payload, &decoded);
        }
    }
}

#[test]
fn replayed_messages_are_read() {
    let file = json("vllm_kv_events/v0320_replay_dealer_from_seq9.json");
    let replies = file["received"].as_array().unwrap();
    let (end, batches) = replies.split_last().unwrap();
    assert_eq!(hex(&end[2]), [0xff; 8]);
    for frames in batches {
        let payload = hex(frames.as_array().unwrap().last().unwrap());
        assert!(Batch::decode(&payload).unwrap().events().all(|event| event.is_ok()));
    }
}

#[test]
fn a_decode_worker_announces_pulled_blocks_under_the_names_of_the_prefill_worker() {
    let hashes = |path: &str| {
        let mut all = Vec::new();
        for (payload, _) in messages(&json(path)) {
            for event in Batch::decode(&payload).unwrap().events() {
                if let Ok(Event::Stored(stored)) = event {
                    all.extend(stored.hashes.map(|name| name.id()));
                }
            }
        }
        all
    };
    let pulled = hashes("vllm_kv_events/v0320_pd_decode_worker.json");
    for hash in hashes("vllm_kv_events/v0320_pd_prefill_worker.json") {
        assert!(pulled.contains(&hash));
    }
}

/// Reads a batch and writes it again.
fn rewrite(payload: &[u8], encoding: Encoding) -> Vec<u8> {
    let batch = Batch::decode(payload).unwrap();
    let events: Vec<Event<'_>> = batch.events().map(Result::unwrap).collect();
    let parts: Vec<(Vec<BlockName<'_>>, Vec<u32>)> = events
        .iter()
        .map(|event| match event {
            Event::Stored(stored) => (stored.hashes.collect(), stored.tokens.collect()),
            Event::Removed(removed) => (removed.hashes.collect(), vec![]),
            _ => (vec![], vec![]),
        })
        .collect();
    let announces: Vec<Announce<'_>> = events
        .iter()
        .zip(&parts)
        .map(|(event, (hashes, tokens))| match event {
            Event::Stored(stored) => Announce::Stored {
                hashes,
                parent: stored.parent,
                tokens,
                block_size: stored.block_size,
                lora_name: stored.lora_name,
                medium: stored.medium,
                cache_salt: stored.extra_keys.flatten().find_map(|key| match key {
                    ExtraKey::Text(salt) => Some(salt),
                    _ => None,
                }),
            },
            Event::Removed(removed) => Announce::Removed { hashes, medium: removed.medium },
            _ => Announce::Cleared,
        })
        .collect();
    encode(batch.timestamp, batch.rank, &announces, encoding)
}

#[test]
fn what_is_written_equals_what_vllm_writes_byte_for_byte() {
    for (payload, _) in messages(&json("vllm_kv_events/v0320_int_hashes_block32_topic.json")) {
        assert_eq!(rewrite(&payload, Encoding::Map), payload);
    }
    let older = json("vllm_kv_events/older_versions_encoded.json");
    for (payload, _) in messages(&older["versions"]["0.23.0"]) {
        assert_eq!(rewrite(&payload, Encoding::Array), payload);
    }
}
