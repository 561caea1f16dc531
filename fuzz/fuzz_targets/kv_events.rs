//! Arbitrary bytes as a message of KV events.
//!
//! Reading never panics, takes nothing from the heap, and yields no more names, tokens and keys than
//! the message has bytes. What can be written again and is read again says the same.
#![no_main]

use std::alloc::System;

use libfuzzer_sys::fuzz_target;
use pointsman_wire::kv_events::{
    Announce, Batch, BlockName, BlockRemoved, BlockStored, Encoding, Event, encode,
};
use stats_alloc::{INSTRUMENTED_SYSTEM, Region, StatsAlloc};

#[global_allocator]
static ALLOCATIONS: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

/// What collecting an event's names and tokens, as the router does, may take per byte of the message: a
/// name is a byte at least and is kept in 24 (a slice or an integer), a token in 4.
const BYTES_PER_BYTE: usize = 24;

/// An event in owned parts, for writing it again and for comparing.
#[derive(Debug, PartialEq)]
struct Parts<'a> {
    kind: &'static str,
    hashes: Vec<BlockName<'a>>,
    parent: Option<BlockName<'a>>,
    tokens: Vec<u32>,
    block_size: u32,
    medium: Option<&'a str>,
    lora_name: Option<&'a str>,
}

fuzz_target!(|payload: &[u8]| {
    let before = Region::new(ALLOCATIONS);
    let items = walk(payload);
    let taken = before.change();
    assert_eq!(taken.allocations + taken.reallocations, 0, "reading took memory: {taken:?}");
    assert!(items <= payload.len(), "{items} items of {} bytes", payload.len());

    let Ok(batch) = Batch::decode(payload) else { return };
    let before = Region::new(ALLOCATIONS);
    for event in batch.events().flatten() {
        drop(parts(&event));
    }
    let bytes = before.change().bytes_allocated;
    assert!(bytes <= BYTES_PER_BYTE * payload.len(), "{bytes} for {}", payload.len());
    written_and_read_again(&batch);
    // The router's own way, which looks at nothing twice, reads the same.
    let events = Batch::events_of(payload).unwrap_or_else(|error| panic!("{error}"));
    let once: Vec<_> = events.map(|event| event.map(|event| parts(&event))).collect();
    let twice: Vec<_> = batch.events().map(|event| event.map(|event| parts(&event))).collect();
    assert_eq!(once[..twice.len()], twice);
});

/// Reads everything there is and keeps nothing; how many items that were.
fn walk(payload: &[u8]) -> usize {
    if let Ok(events) = Batch::events_of(payload) {
        assert!(events.count() <= payload.len());
    }
    let Ok(batch) = Batch::decode(payload) else { return 0 };
    let _ = Batch::timestamp_of(payload);
    let mut items = 0;
    let mut events = 0;
    for event in batch.events() {
        events += 1;
        match event {
            Ok(Event::Stored(stored)) => {
                assert_eq!(stored.hashes.len(), stored.hashes.count());
                assert_eq!(stored.tokens.len(), stored.tokens.count());
                items += stored.hashes.map(|name| name.id()).count() + stored.tokens.count();
                items += stored.extra_keys.map(|keys| keys.count()).sum::<usize>();
            }
            Ok(Event::Removed(removed)) => {
                assert_eq!(removed.hashes.len(), removed.hashes.count());
                items += removed.hashes.count();
            }
            Ok(Event::Cleared | Event::Unknown(_)) | Err(_) => {}
        }
    }
    assert_eq!(events, batch.len());
    items
}

fn parts<'a>(event: &Event<'a>) -> Option<Parts<'a>> {
    Some(match *event {
        Event::Stored(BlockStored {
            hashes,
            parent,
            tokens,
            block_size,
            medium,
            lora_name,
            ..
        }) => Parts {
            kind: "stored",
            hashes: hashes.collect(),
            parent,
            tokens: tokens.collect(),
            block_size,
            medium,
            lora_name,
        },
        Event::Removed(BlockRemoved { hashes, medium, .. }) => Parts {
            kind: "removed",
            hashes: hashes.collect(),
            parent: None,
            tokens: Vec::new(),
            block_size: 0,
            medium,
            lora_name: None,
        },
        Event::Cleared => Parts {
            kind: "cleared",
            hashes: Vec::new(),
            parent: None,
            tokens: Vec::new(),
            block_size: 0,
            medium: None,
            lora_name: None,
        },
        Event::Unknown(_) => return None,
    })
}

fn announce<'p>(parts: &'p Parts<'p>) -> Announce<'p> {
    match parts.kind {
        "stored" => Announce::Stored {
            hashes: &parts.hashes,
            parent: parts.parent,
            tokens: &parts.tokens,
            block_size: parts.block_size,
            lora_name: parts.lora_name,
            medium: parts.medium,
            cache_salt: Some("salt"),
        },
        "removed" => Announce::Removed { hashes: &parts.hashes, medium: parts.medium },
        _ => Announce::Cleared,
    }
}

/// Both encodings of what was read say the same.
fn written_and_read_again(batch: &Batch<'_>) {
    let all: Vec<Parts<'_>> = batch.events().flatten().filter_map(|event| parts(&event)).collect();
    let announces: Vec<Announce<'_>> = all.iter().map(announce).collect();
    for encoding in [Encoding::Array, Encoding::Map] {
        let bytes = encode(batch.timestamp, batch.rank, &announces, encoding);
        let again = Batch::decode(&bytes).unwrap_or_else(|error| panic!("{error}: {bytes:02x?}"));
        assert_eq!(again.timestamp.to_bits(), batch.timestamp.to_bits());
        assert_eq!(again.rank, batch.rank);
        let read: Vec<Parts<'_>> = again
            .events()
            .map(|event| event.unwrap_or_else(|error| panic!("{error}: {bytes:02x?}")))
            .filter_map(|event| parts(&event))
            .collect();
        assert_eq!(read, all, "{encoding:?}");
    }
}
