//! TensorRT-LLM's KV events: a JSON list that a `POST /kv_cache_events` drains, so that each event is
//! told once, to whoever asks first. From its sources (`KVCacheEventSerializer`).
//!
//! Events are written anew in the form that publishers use, so that one reader does for both.
//! Not here: whether events are missing (by their numbers), which is for the caller.

use serde_json::Value;

use super::{Announce, BlockName, Encoding, EventError, encode};

/// One event.
#[derive(Clone, Debug, PartialEq)]
pub struct PolledEvent {
    /// Counts up by one from event to event, from 0 when the engine starts.
    pub id: u64,
    /// The attention window, in tokens, whose blocks it is of; an engine with several caches has
    /// several.
    pub window: Option<u64>,
    /// The rank whose cache it is of.
    pub rank: Option<u32>,
    /// What happened.
    pub change: Change,
}

/// A change of an engine's cache.
#[derive(Clone, Debug, PartialEq)]
pub enum Change {
    /// The cache was made: it is empty, with so many blocks of each level.
    Created {
        /// Blocks on the device, the host, ...
        blocks: Vec<u64>,
    },
    /// Blocks can be found from here on.
    Stored {
        /// The block before.
        parent: Option<Name>,
        /// In the order of the prompt.
        blocks: Vec<Block>,
    },
    /// Blocks are gone.
    Removed {
        /// Which.
        blocks: Vec<Name>,
    },
    /// A block went from one level to another.
    Moved {
        /// Which.
        block: Name,
        /// Level before.
        from: u64,
        /// Level after.
        to: u64,
    },
    /// Nothing that matters here.
    Other,
}

/// A block's name.
#[derive(Clone, Debug, PartialEq)]
pub enum Name {
    /// A number; negative ones are reinterpreted as unsigned.
    Number(u64),
    /// A digest in hexadecimal.
    Text(String),
}

/// A block that was stored.
#[derive(Clone, Debug, PartialEq)]
pub struct Block {
    /// Its name.
    pub name: Name,
    /// Its tokens; None if it holds anything else, so that it is of no use to a prompt of text.
    pub tokens: Option<Vec<u32>>,
    /// Level: 0 is the device, 1 the host.
    pub level: u64,
    /// What keeps equal tokens of different clients apart.
    pub salt: Option<String>,
}

impl Name {
    fn of(value: &Value) -> Option<Name> {
        match value {
            Value::Number(number) => {
                let unsigned = number.as_u64().or_else(|| number.as_i64().map(i64::cast_unsigned));
                unsigned.map(Name::Number)
            }
            Value::String(text) => Some(Name::Text(text.clone())),
            _ => None,
        }
    }

    fn borrow(&self) -> BlockName<'_> {
        match self {
            Name::Number(number) => BlockName::Int(*number),
            Name::Text(text) => BlockName::Digest(text.as_bytes()),
        }
    }
}

/// Reads what was drained, in order.
///
/// # Errors
/// If it is no list of events: whatever was in it is lost then.
pub fn drained(body: &[u8]) -> Result<Vec<PolledEvent>, EventError> {
    let list: Vec<Value> = serde_json::from_slice(body)
        .map_err(|_| EventError::Shape("the drained events are no JSON list"))?;
    list.iter().map(event).collect()
}

fn event(value: &Value) -> Result<PolledEvent, EventError> {
    let number = |key: &str| value.get(key).and_then(Value::as_u64);
    let data = value.get("data").unwrap_or(&Value::Null);
    Ok(PolledEvent {
        id: number("event_id").ok_or(EventError::Shape("an event has no event_id"))?,
        window: number("window_size"),
        rank: number("attention_dp_rank").and_then(|rank| u32::try_from(rank).ok()),
        change: change(data)?,
    })
}

fn change(data: &Value) -> Result<Change, EventError> {
    let list = |key: &str| data.get(key).and_then(Value::as_array);
    let names = |list: &Vec<Value>| list.iter().map(Name::of).collect::<Option<Vec<_>>>();
    Ok(match data.get("type").and_then(Value::as_str) {
        Some("created") => {
            let blocks = list("num_blocks_per_cache_level").into_iter().flatten();
            Change::Created { blocks: blocks.filter_map(Value::as_u64).collect() }
        }
        Some("stored") => {
            let blocks = list("blocks").ok_or(EventError::Shape("`stored` has no blocks"))?;
            Change::Stored {
                parent: data.get("parent_hash").and_then(Name::of),
                blocks: blocks.iter().map(block).collect::<Result<_, _>>()?,
            }
        }
        Some("removed") => {
            let removed = list("block_hashes").and_then(names);
            let blocks = removed.ok_or(EventError::Shape("`removed` has no block_hashes"))?;
            Change::Removed { blocks }
        }
        Some("updated") => {
            let level = |which: &str| data.get("cache_level")?.get(which)?.as_u64();
            match (
                data.get("block_hash").and_then(Name::of),
                level("old_value"),
                level("new_value"),
            ) {
                (Some(block), Some(from), Some(to)) => Change::Moved { block, from, to },
                // Its priority changed.
                _ => Change::Other,
            }
        }
        _ => Change::Other,
    })
}

fn block(value: &Value) -> Result<Block, EventError> {
    let name = value.get("block_hash").and_then(Name::of);
    let plain = |token: &Value| {
        // An extra id marks a token of an image or an adapter.
        let extra = token.get("token_extra_id").and_then(Value::as_u64).unwrap_or(0);
        let id = token.get("token_id").and_then(Value::as_u64).filter(|_| extra == 0)?;
        u32::try_from(id).ok()
    };
    let tokens = value.get("tokens").and_then(Value::as_array);
    Ok(Block {
        name: name.ok_or(EventError::Shape("a stored block has no block_hash"))?,
        tokens: tokens.and_then(|tokens| tokens.iter().map(plain).collect()),
        level: value.get("cache_level").and_then(Value::as_u64).unwrap_or(0),
        salt: value.get("cache_salt").and_then(Value::as_str).map(str::to_owned),
    })
}

/// The events of one rank as a publisher's message. A chain of blocks ends at the first that is not
/// whole or not of text: what follows it cannot be found by a prompt's tokens.
pub fn as_message<'e>(
    events: impl IntoIterator<Item = &'e PolledEvent>,
    block_size: u32,
) -> Vec<u8> {
    let mut written: Vec<Written<'_>> = Vec::new();
    for event in events {
        match &event.change {
            Change::Created { .. } => written.push(Written::Cleared),
            Change::Stored { parent, blocks } => {
                store(parent.as_ref(), blocks, block_size, &mut written);
            }
            Change::Removed { blocks } => {
                // Which level they were in is not told; of those that a level lacks nothing goes.
                let names: Vec<_> = blocks.iter().map(Name::borrow).collect();
                written.extend(MEDIA.map(|medium| Written::Removed(names.clone(), medium)));
            }
            Change::Moved { block, from, to } if medium(*from) != medium(*to) => {
                let name = vec![block.borrow()];
                written.push(Written::Stored {
                    names: name.clone(),
                    parent: None,
                    tokens: Vec::new(),
                    medium: medium(*to),
                    salt: None,
                });
                written.push(Written::Removed(name, medium(*from)));
            }
            Change::Moved { .. } | Change::Other => {}
        }
    }
    let announced: Vec<_> = written.iter().map(|one| one.announce(block_size)).collect();
    encode(0.0, None, &announced, Encoding::Map)
}

/// What publishers call the levels.
const MEDIA: [&str; 3] = ["GPU", "CPU", "DISK"];

fn medium(level: u64) -> &'static str {
    let [device, host, disk] = MEDIA;
    match level {
        0 => device,
        1 => host,
        _ => disk,
    }
}

/// An event with what it is made of.
enum Written<'e> {
    Stored {
        names: Vec<BlockName<'e>>,
        parent: Option<BlockName<'e>>,
        tokens: Vec<u32>,
        medium: &'static str,
        salt: Option<&'e str>,
    },
    Removed(Vec<BlockName<'e>>, &'static str),
    Cleared,
}

impl Written<'_> {
    fn announce(&self, block_size: u32) -> Announce<'_> {
        match self {
            Written::Stored { names, parent, tokens, medium, salt } => Announce::Stored {
                hashes: names,
                parent: *parent,
                tokens,
                block_size,
                lora_name: None,
                medium: Some(medium),
                cache_salt: *salt,
            },
            Written::Removed(names, medium) => {
                Announce::Removed { hashes: names, medium: Some(medium) }
            }
            Written::Cleared => Announce::Cleared,
        }
    }
}

fn store<'e>(
    parent: Option<&'e Name>,
    blocks: &'e [Block],
    block_size: u32,
    out: &mut Vec<Written<'e>>,
) {
    let mut parent = parent.map(Name::borrow);
    // A run of blocks on one level is one event.
    let mut rest = blocks;
    while let Some(first) = rest.first() {
        let whole = |block: &&Block| {
            let tokens = block.tokens.as_ref();
            tokens.is_some_and(|tokens| tokens.len() == block_size as usize)
        };
        let alike = |block: &&Block| whole(block) && block.level == first.level;
        let run: Vec<&Block> = rest.iter().take_while(alike).collect();
        if run.is_empty() {
            return;
        }
        rest = rest.get(run.len()..).unwrap_or_default();
        let names: Vec<_> = run.iter().map(|block| block.name.borrow()).collect();
        let last = names.last().copied();
        let tokens = run.iter().filter_map(|block| block.tokens.as_ref()).flatten();
        out.push(Written::Stored {
            parent,
            tokens: tokens.copied().collect(),
            medium: medium(first.level),
            salt: first.salt.as_deref(),
            names,
        });
        parent = last;
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Batch, Event};
    use super::*;
    use proptest::prelude::*;

    fn stored(id: u64, parent: &str, blocks: &[(i64, std::ops::Range<u32>, u64)]) -> String {
        let block = |(hash, tokens, level): &(i64, std::ops::Range<u32>, u64)| {
            let tokens: Vec<String> = tokens
                .clone()
                .map(|id| {
                    format!(r#"{{"type":"unique_token","token_id":{id},"token_extra_id":0}}"#)
                })
                .collect();
            let tokens = tokens.join(",");
            format!(
                r#"{{"type":"stored_block","block_hash":{hash},"tokens":[{tokens}],"cache_level":{level},"priority":35,"mm_keys":[]}}"#
            )
        };
        let blocks: Vec<String> = blocks.iter().map(block).collect();
        format!(
            r#"{{"event_id":{id},"window_size":4096,"data":{{"type":"stored","parent_hash":{parent},"blocks":[{}]}}}}"#,
            blocks.join(",")
        )
    }

    fn read(list: &str) -> Vec<PolledEvent> {
        drained(list.as_bytes()).unwrap()
    }

    #[test]
    fn what_is_drained_reads_like_a_publishers_message() {
        let list = format!(
            r#"[{{"event_id":0,"window_size":4096,"data":{{"type":"created","num_blocks_per_cache_level":[8,2]}}}},{},{{"event_id":2,"data":{{"type":"removed","block_hashes":[-2]}}}}]"#,
            stored(1, "null", &[(7, 0..4, 0), (-2, 4..8, 0), (9, 8..10, 0)])
        );
        let events = read(&list);
        assert_eq!(events[0].change, Change::Created { blocks: vec![8, 2] });
        assert_eq!(events.iter().map(|event| event.id).collect::<Vec<_>>(), [0, 1, 2]);
        let message = as_message(&events, 4);
        let batch = Batch::decode(&message).unwrap();
        let all: Vec<_> = batch.events().map(Result::unwrap).collect();
        assert!(matches!(all[0], Event::Cleared));
        let Event::Stored(stored) = all[1] else { panic!("{:?}", all[1]) };
        // The block that is not whole is not among them.
        let names: Vec<u64> = stored.hashes.map(|name| name.id()).collect();
        assert_eq!(names, [7, (-2_i64).cast_unsigned()]);
        assert_eq!(stored.tokens.collect::<Vec<_>>(), (0..8).collect::<Vec<_>>());
        assert_eq!((stored.parent, stored.medium, stored.block_size), (None, Some("GPU"), 4));
        let Event::Removed(removed) = all[2] else { panic!("{:?}", all[2]) };
        let names: Vec<u64> = removed.hashes.map(|name| name.id()).collect();
        assert_eq!(names, [(-2_i64).cast_unsigned()]);
    }

    #[test]
    fn a_block_that_goes_to_the_host_is_stored_there_before_it_leaves_the_device() {
        let list = r#"[{"event_id":5,"data":{"type":"updated","block_hash":7,"cache_level":{"type":"event_diff","new_value":1,"old_value":0},"priority":null}},
            {"event_id":6,"data":{"type":"updated","block_hash":7,"cache_level":null,"priority":{"type":"event_diff","new_value":1,"old_value":35}}}]"#;
        let events = read(list);
        assert_eq!(events[1].change, Change::Other);
        let message = as_message(&events, 4);
        let all: Vec<_> = Batch::decode(&message).unwrap().events().map(Result::unwrap).collect();
        let (Event::Stored(stored), Event::Removed(removed)) = (all[0], all[1]) else {
            panic!("{all:?}")
        };
        assert_eq!((stored.medium, stored.tokens.len()), (Some("CPU"), 0));
        assert_eq!(removed.medium, Some("GPU"));
    }

    #[test]
    fn blocks_of_images_are_left_out_and_those_behind_them() {
        let image = stored(1, "3", &[(7, 0..4, 0)]).replacen(
            "\"token_extra_id\":0",
            "\"token_extra_id\":9",
            1,
        );
        let message = as_message(&read(&format!("[{image}]")), 4);
        assert_eq!(Batch::decode(&message).unwrap().len(), 0);
    }

    #[test]
    fn blocks_of_several_levels_stay_one_chain() {
        let message =
            as_message(&read(&format!("[{}]", stored(1, "3", &[(7, 0..4, 0), (8, 4..8, 1)]))), 4);
        let all: Vec<_> = Batch::decode(&message).unwrap().events().map(Result::unwrap).collect();
        let (Event::Stored(first), Event::Stored(second)) = (all[0], all[1]) else {
            panic!("{all:?}")
        };
        let parent = |event: &super::super::BlockStored<'_>| event.parent.map(|name| name.id());
        assert_eq!((parent(&first), parent(&second)), (Some(3), Some(7)));
        assert_eq!((first.medium, second.medium), (Some("GPU"), Some("CPU")));
    }

    #[test]
    fn what_is_no_list_of_events_is_an_error() {
        for bad in
            ["{}", "[1]", r#"[{"data":{}}]"#, r#"[{"event_id":1,"data":{"type":"stored"}}]"#, "["]
        {
            assert!(drained(bad.as_bytes()).is_err(), "{bad}");
        }
        assert_eq!(read("[]"), []);
        let unknown = read(r#"[{"event_id":1,"data":{"type":"x"}}]"#);
        assert_eq!(unknown[0].change, Change::Other);
    }

    proptest! {
        #[test]
        fn random_bytes_never_panic(bytes: Vec<u8>, text in r#"\[\{"(event_id|data|type|blocks)":[\[\]{}":,a-z0-9]{0,30}\}\]"#) {
            for bytes in [&bytes[..], text.as_bytes()] {
                if let Ok(events) = drained(bytes) {
                    let _ = as_message(&events, 4);
                }
            }
        }
    }
}
