//! Reads single events in either encoding: an array by the places of its fields, a map by their names.

use super::msgpack::{Head, Reader};
use super::{BlockName, BlockRemoved, BlockStored, Event, EventError, ExtraKeys, Names, Tokens};

/// Reads one event and leaves the reader behind it, well-formed or not.
pub(super) fn event<'a>(reader: &mut Reader<'a>) -> Result<Event<'a>, EventError> {
    let mut inside = *reader;
    let read = match inside.head()? {
        Head::Map(pairs) => map_event(&mut inside, pairs),
        Head::Array(items @ 1..) => array_event(&mut inside, items),
        _ => Err(EventError::Shape("an event is neither a map nor a list")),
    };
    match read {
        // Its end is where reading came to.
        Ok(_) => *reader = inside,
        Err(_) => reader.skip()?,
    }
    read
}

/// Known fields of any event, as they are found.
#[derive(Clone, Copy, Default)]
struct Fields<'a> {
    hashes: Option<Names<'a>>,
    parent: Option<BlockName<'a>>,
    tokens: Option<Tokens<'a>>,
    block_size: Option<u32>,
    lora_id: Option<u32>,
    lora_name: Option<&'a str>,
    medium: Option<&'a str>,
    extra_keys: ExtraKeys<'a>,
    group_idx: Option<u32>,
    spec_kind: Option<&'a str>,
    sliding_window: Option<u32>,
}

/// Field names in the order of the array encoding.
const STORED: &[&str] = &[
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window",
];
const REMOVED: &[&str] = &["block_hashes", "medium", "group_idx"];

fn array_event<'a>(reader: &mut Reader<'a>, items: u32) -> Result<Event<'a>, EventError> {
    let tag = text(reader.head()?, "an event's type")?;
    let mut names = field_names(tag).iter();
    let mut fields = Fields::default();
    for _ in 1..items {
        match names.next() {
            Some(name) => fields.read(name, reader)?,
            None => reader.skip()?,
        }
    }
    fields.event(tag)
}

fn map_event<'a>(reader: &mut Reader<'a>, pairs: u32) -> Result<Event<'a>, EventError> {
    // The type stands first in practice; a kind that is not known is not looked into.
    let tag = tag(*reader, pairs)?;
    let known = field_names(tag);
    let mut fields = Fields::default();
    for _ in 0..pairs {
        let key = text(reader.head()?, "a field's name")?;
        if known.contains(&key) { fields.read(key, reader)? } else { reader.skip()? }
    }
    fields.event(tag)
}

fn tag<'a>(mut reader: Reader<'a>, pairs: u32) -> Result<&'a str, EventError> {
    for _ in 0..pairs {
        if text(reader.head()?, "a field's name")? == "type" {
            return text(reader.head()?, "an event's type");
        }
        reader.skip()?;
    }
    Err(EventError::Shape("an event has no type"))
}

fn field_names(tag: &str) -> &'static [&'static str] {
    match tag {
        "BlockStored" => STORED,
        "BlockRemoved" => REMOVED,
        _ => &[],
    }
}

impl<'a> Fields<'a> {
    /// Reads the value of a field.
    fn read(&mut self, field: &str, reader: &mut Reader<'a>) -> Result<(), EventError> {
        match field {
            "block_hashes" => {
                let left = array(reader, "block_hashes")?;
                self.hashes = Some(Names { reader: *reader, left });
                for _ in 0..left {
                    name(reader.head()?)?;
                }
            }
            "token_ids" => {
                let left = array(reader, "token_ids")?;
                self.tokens = Some(Tokens { reader: *reader, left });
                for _ in 0..left {
                    reader.small().ok_or(EventError::Shape("a token id is not one of 32 bits"))?;
                }
            }
            "extra_keys" => {
                let mut entries = *reader;
                self.extra_keys = match entries.head()? {
                    Head::Array(left) => ExtraKeys { reader: entries, left: left as usize },
                    Head::Nil => ExtraKeys::default(),
                    _ => return Err(EventError::Shape("extra_keys is not a list")),
                };
                reader.skip()?;
            }
            _ => {
                let head = reader.head()?;
                if head != Head::Nil {
                    self.scalar(field, head)?;
                }
            }
        }
        Ok(())
    }

    fn scalar(&mut self, field: &str, head: Head<'a>) -> Result<(), EventError> {
        match field {
            "parent_block_hash" => self.parent = Some(name(head)?),
            "block_size" => self.block_size = Some(small(head, "block_size")?),
            "lora_id" => self.lora_id = Some(small(head, "lora_id")?),
            "medium" => self.medium = Some(text(head, "medium")?),
            "lora_name" => self.lora_name = Some(text(head, "lora_name")?),
            "group_idx" => self.group_idx = Some(small(head, "group_idx")?),
            "kv_cache_spec_kind" => self.spec_kind = Some(text(head, "kv_cache_spec_kind")?),
            _ => self.sliding_window = Some(small(head, "kv_cache_spec_sliding_window")?),
        }
        Ok(())
    }

    fn event(self, tag: &'a str) -> Result<Event<'a>, EventError> {
        let hashes = self.hashes.ok_or(EventError::Shape("an event has no block_hashes"));
        Ok(match tag {
            "BlockStored" => Event::Stored(BlockStored {
                hashes: hashes?,
                parent: self.parent,
                tokens: self.tokens.ok_or(EventError::Shape("an event has no token_ids"))?,
                block_size: self
                    .block_size
                    .ok_or(EventError::Shape("an event has no block_size"))?,
                lora_id: self.lora_id,
                lora_name: self.lora_name,
                medium: self.medium,
                extra_keys: self.extra_keys,
                group_idx: self.group_idx,
                spec_kind: self.spec_kind,
                sliding_window: self.sliding_window,
            }),
            "BlockRemoved" => Event::Removed(BlockRemoved {
                hashes: hashes?,
                medium: self.medium,
                group_idx: self.group_idx,
            }),
            "AllBlocksCleared" => Event::Cleared,
            other => Event::Unknown(other),
        })
    }
}

fn array(reader: &mut Reader<'_>, what: &'static str) -> Result<usize, EventError> {
    match reader.head()? {
        // Each item takes a byte at least.
        Head::Array(items) if items as usize <= reader.rest().len() => Ok(items as usize),
        Head::Array(_) => Err(EventError::Truncated),
        _ => Err(EventError::Shape(what)),
    }
}

pub(super) fn name(head: Head<'_>) -> Result<BlockName<'_>, EventError> {
    match head {
        Head::Int(id, _) => Ok(BlockName::Int(id)),
        Head::Bin(digest) => Ok(BlockName::Digest(digest)),
        _ => Err(EventError::Shape("a block hash is neither an integer nor bytes")),
    }
}

pub(super) fn small(head: Head<'_>, what: &'static str) -> Result<u32, EventError> {
    match head {
        Head::Int(value, false) => u32::try_from(value).map_err(|_| EventError::Shape(what)),
        _ => Err(EventError::Shape(what)),
    }
}

fn text<'a>(head: Head<'a>, what: &'static str) -> Result<&'a str, EventError> {
    match head {
        Head::Str(text) => std::str::from_utf8(text).map_err(|_| EventError::Shape(what)),
        _ => Err(EventError::Shape(what)),
    }
}
