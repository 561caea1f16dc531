//! KV-event messages that nobody honest sends: each is an error in its place, costs no more than
//! its bytes, and takes nothing from the heap.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use common::{hex, json};
use pointsman_wire::kv_events::{Announce, Batch, BlockName, Encoding, Event, EventError, encode};

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

struct Counting;

#[allow(unsafe_code, reason = "a global allocator can be written in no other way")]
// SAFETY: every call is handed on to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.with(|count| count.set(count.get() + 1));
        // SAFETY: as the caller promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: as the caller promises.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// What reading all of a message told.
#[derive(Debug, Default, PartialEq, Eq)]
struct Read {
    stored: u64,
    removed: u64,
    cleared: u64,
    unknown: u64,
    errors: u64,
    blocks: u64,
    tokens: u64,
    keys: u64,
}

/// Reads everything that is in a message, without a single allocation.
fn read(payload: &[u8]) -> Result<Read, EventError> {
    let before = ALLOCATIONS.with(Cell::get);
    let read = read_all(payload);
    assert_eq!(ALLOCATIONS.with(Cell::get) - before, 0, "reading took from the heap");
    read
}

fn read_all(payload: &[u8]) -> Result<Read, EventError> {
    let mut read = Read::default();
    for event in Batch::decode(payload)?.events() {
        match event {
            Ok(Event::Stored(stored)) => {
                read.stored += 1;
                // What they claim is what they give, so that room made for it is room used.
                let (blocks, tokens) = (stored.hashes.len(), stored.tokens.len());
                assert!(blocks <= payload.len() && tokens <= payload.len());
                assert_eq!((stored.hashes.count(), stored.tokens.count()), (blocks, tokens));
                read.blocks += blocks as u64;
                read.tokens += tokens as u64;
                assert!(stored.extra_keys.len() <= payload.len());
                read.keys += stored.extra_keys.map(|keys| keys.count() as u64).sum::<u64>();
            }
            Ok(Event::Removed(removed)) => {
                read.removed += 1;
                assert!(removed.hashes.len() <= payload.len());
                read.blocks += removed.hashes.count() as u64;
            }
            Ok(Event::Cleared) => read.cleared += 1,
            Ok(Event::Unknown(_)) => read.unknown += 1,
            Err(_) => read.errors += 1,
        }
    }
    Ok(read)
}

/// `[1.0, [event, AllBlocksCleared]]`: the second shows that reading goes on behind the first.
fn followed(event: &[u8]) -> Vec<u8> {
    let mut bytes = b"\x92\xcb\x3f\xf0\0\0\0\0\0\0\x92".to_vec();
    bytes.extend(event);
    bytes.extend(b"\x91\xb0AllBlocksCleared");
    bytes
}

/// A `BlockStored` as a map, of fields that are msgpack already.
fn stored(hashes: &[u8], tokens: &[u8], more: &[(&str, &[u8])]) -> Vec<u8> {
    let mut event = vec![0x83 + u8::try_from(more.len()).unwrap()];
    event.extend(b"\xa4type\xabBlockStored\xacblock_hashes");
    event.extend(hashes);
    event.extend(b"\xa9token_ids");
    event.extend(tokens);
    for (name, value) in more {
        event.push(0xa0 | u8::try_from(name.len()).unwrap());
        event.extend(name.as_bytes());
        event.extend(*value);
    }
    event
}

const SIZE: (&str, &[u8]) = ("block_size", b"\x02");

#[test]
fn captured_messages_are_read_without_an_allocation() {
    let mut events = 0;
    for path in [
        "vllm_kv_events/v0320_int_hashes_block32_topic.json",
        "vllm_kv_events/v0320_pd_prefill_worker.json",
        "vllm_kv_events/v0320_pd_decode_worker.json",
        "sglang_kv_events/v0523_agg_page16.json",
        "sglang_kv_events/v0523_prefill_page16.json",
    ] {
        for message in json(path)["messages"].as_array().unwrap() {
            let read = read(&hex(message["frames_hex"].as_array().unwrap().last().unwrap()));
            let read = read.unwrap();
            assert_eq!((read.errors, read.unknown), (0, 0));
            events += read.stored + read.removed + read.cleared;
        }
    }
    assert!(events > 40, "{events}");
}

#[test]
fn a_captured_message_cut_anywhere_is_an_error() {
    let file = json("vllm_kv_events/v0320_pd_prefill_worker.json");
    let payload = hex(&file["messages"][0]["frames_hex"][2]);
    let whole = |payload: &[u8]| {
        Batch::events_of(payload).is_ok_and(|mut events| events.all(|event| event.is_ok()))
    };
    assert!(read(&payload).is_ok() && whole(&payload));
    for cut in 0..payload.len() {
        assert!(read(&payload[..cut]).is_err(), "{cut} bytes of {}", payload.len());
        assert!(!whole(&payload[..cut]), "{cut} bytes of {}", payload.len());
    }
}

#[test]
fn values_of_the_wrong_type_cost_their_event_alone() {
    let good = stored(b"\x91\x07", b"\x92\x01\x02", &[SIZE]);
    let one = Read { stored: 1, cleared: 1, blocks: 1, tokens: 2, ..Read::default() };
    assert_eq!(read(&followed(&good)), Ok(one));
    let wrong: [(&str, Vec<u8>); 16] = [
        ("no list of hashes", stored(b"\x07", b"\x92\x01\x02", &[SIZE])),
        ("a hash of text", stored(b"\x91\xa1a", b"\x92\x01\x02", &[SIZE])),
        ("a hash that is nil", stored(b"\x91\xc0", b"\x92\x01\x02", &[SIZE])),
        ("a hash that is a float", stored(b"\x91\xca\0\0\0\0", b"\x92\x01\x02", &[SIZE])),
        ("a negative token", stored(b"\x91\x07", b"\x92\x01\xff", &[SIZE])),
        ("a token of 64 bits", stored(b"\x91\x07", b"\x91\xcf\0\0\0\x01\0\0\0\0", &[SIZE])),
        ("a token that is true", stored(b"\x91\x07", b"\x92\x01\xc3", &[SIZE])),
        ("tokens that are bytes", stored(b"\x91\x07", b"\xc4\x02\x01\x02", &[SIZE])),
        (
            "a list for a block size",
            stored(b"\x91\x07", b"\x92\x01\x02", &[("block_size", b"\x90")]),
        ),
        ("a negative size", stored(b"\x91\x07", b"\x92\x01\x02", &[("block_size", b"\xff")])),
        ("no block size", stored(b"\x91\x07", b"\x92\x01\x02", &[])),
        (
            "a number for a medium",
            stored(b"\x91\x07", b"\x92\x01\x02", &[SIZE, ("medium", b"\x01")]),
        ),
        ("a negative group", stored(b"\x91\x07", b"\x92\x01\x02", &[SIZE, ("group_idx", b"\xe0")])),
        (
            "text that is no UTF-8",
            stored(b"\x91\x07", b"\x92\x01\x02", &[SIZE, ("medium", b"\xa1\xff")]),
        ),
        (
            "keys that are a map",
            stored(b"\x91\x07", b"\x92\x01\x02", &[SIZE, ("extra_keys", b"\x80")]),
        ),
        ("a name that is a number", b"\x82\xa4type\xabBlockStored\x01\x90".to_vec()),
    ];
    for (what, event) in wrong {
        let read = read(&followed(&event));
        assert_eq!(read, Ok(Read { errors: 1, cleared: 1, ..Read::default() }), "{what}");
    }
}

#[test]
fn a_length_that_claims_more_than_the_message_has_is_refused() {
    let claims: [&[u8]; 4] = [
        b"\xdd\xff\xff\xff\xff",
        b"\xdc\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
    ];
    for claim in claims {
        for event in [
            stored(claim, b"\x90", &[SIZE]),
            stored(b"\x90", claim, &[SIZE]),
            stored(b"\x90", b"\x90", &[SIZE, ("extra_keys", claim)]),
            [&b"\x91\x91"[..], claim].concat(),
            claim.to_vec(),
        ] {
            assert!(read(&followed(&event)).is_err(), "{event:x?}");
        }
        // The list of events itself.
        assert!(read(&[&b"\x92\xcb\x3f\xf0\0\0\0\0\0\0"[..], claim].concat()).is_err());
    }
}

#[test]
fn a_batch_that_ends_early_ends_with_one_error() {
    // 32 events are claimed; there are one and a half.
    let claimed =
        b"\x92\xcb\x3f\xf0\0\0\0\0\0\0\xdc\x00\x20\x91\xb0AllBlocksCleared\x91\xb0AllBlocksCle";
    let read: Vec<_> = Batch::events_of(claimed).unwrap().map(|event| event.is_ok()).collect();
    assert_eq!(read, [true, false]);
    let absurd = b"\x92\xcb\x3f\xf0\0\0\0\0\0\0\xdd\xff\xff\xff\xff\x91\xb0AllBlocksCleared";
    assert!(Batch::events_of(absurd).is_err());
}

#[test]
fn token_ids_of_every_width_are_read_as_they_are_up_to_the_last_byte() {
    let ids = [0, 1, 0x7f, 0x80, 0xff, 0x100, 0xffff, 0x1_0000, 0x7fff_ffff, u32::MAX];
    for first in 0..ids.len() {
        // Rotated, so that each one comes last and nothing follows it.
        let tokens: Vec<u32> = ids.iter().cycle().skip(first).take(ids.len()).copied().collect();
        let stored = Announce::Stored {
            hashes: &[BlockName::Int(1)],
            parent: None,
            tokens: &tokens,
            block_size: 10,
            lora_name: None,
            medium: None,
            cache_salt: None,
        };
        let payload = encode(1.0, None, &[stored], Encoding::Array);
        let Some(Ok(Event::Stored(stored))) = Batch::events_of(&payload).unwrap().next() else {
            panic!("it is whole")
        };
        assert_eq!(stored.tokens.collect::<Vec<_>>(), tokens);
    }
    // As the last value of all there is, and in wider forms than need be.
    for (bytes, id) in [
        (&b"\x07"[..], 7),
        (b"\xcc\xff", 255),
        (b"\xcd\x01\x00", 256),
        (b"\xce\0\0\0\x09", 9),
        (b"\xcf\0\0\0\0\0\0\0\x05", 5),
        (b"\xd3\0\0\0\0\0\0\0\x06", 6),
    ] {
        let event = [&b"\x95\xabBlockStored\x91\x01\xc0\x91"[..], bytes, b"\x01"].concat();
        let payload = followed(&event);
        let first = Batch::decode(&payload).unwrap().events().next();
        let Some(Ok(Event::Stored(stored))) = first else { panic!("{bytes:x?}") };
        assert_eq!(stored.tokens.collect::<Vec<_>>(), [id]);
    }
}

#[test]
fn deep_nesting_is_skipped_without_a_stack() {
    let depth = 1 << 20;
    let mut deep = vec![0x91; depth];
    deep.push(0xc0);
    // Where nothing known is, where a key may be, and where it is out of place.
    let unknown = [&b"\x82\xa4type\xa3New\xa1x"[..], &deep].concat();
    assert_eq!(read(&followed(&unknown)).unwrap().unknown, 1);
    let keys = [&b"\x91"[..], &deep].concat();
    let event = stored(b"\x91\x07", b"\x92\x01\x02", &[SIZE, ("extra_keys", &keys)]);
    assert_eq!(
        read(&followed(&event)).unwrap(),
        Read { stored: 1, cleared: 1, blocks: 1, tokens: 2, keys: 1, ..Read::default() }
    );
    let wrong = stored(&deep, b"\x90", &[SIZE]);
    assert_eq!(read(&followed(&wrong)), Ok(Read { errors: 1, cleared: 1, ..Read::default() }));
    deep.pop();
    assert!(read(&followed(&deep)).is_err());
}

#[test]
fn fields_beyond_the_known_ones_are_skipped() {
    let array = b"\x96\xacBlockRemoved\x91\x05\xc0\x00\x92\x01\x91\xc0\xa1z";
    assert_eq!(
        read(&followed(array)).unwrap(),
        Read { removed: 1, cleared: 1, blocks: 1, ..Read::default() }
    );
    let map = stored(b"\x91\x07", b"\x92\x01\x02", &[SIZE, ("ownership", b"\x81\x01\x92\xc0\xc3")]);
    assert_eq!(read(&followed(&map)).unwrap().stored, 1);
}

#[test]
fn the_time_of_a_message_is_read_without_its_events() {
    let payload = followed(b"\xc0");
    assert_eq!(Batch::timestamp_of(&payload), Some(1.0));
    assert_eq!(Batch::timestamp_of(&payload[..10]), Some(1.0));
    assert_eq!(Batch::timestamp_of(&payload[..9]), None);
    for no_time in [&b""[..], b"\x92", b"\x92\xff\x90", b"\x91\xca\0\0\0\0", b"\x92\xa1a\x90"] {
        assert_eq!(Batch::timestamp_of(no_time), None, "{no_time:x?}");
    }
}

#[test]
fn times_that_are_no_times_are_read_as_they_stand() {
    for seconds in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, -1.0, f64::MAX] {
        let mut payload = followed(b"\x91\xb0AllBlocksCleared");
        payload[2..10].copy_from_slice(&seconds.to_be_bytes());
        let read = Batch::timestamp_of(&payload).unwrap();
        assert_eq!(read.to_bits(), seconds.to_bits());
    }
}
