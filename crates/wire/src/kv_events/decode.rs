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

/// What a field says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Field {
    Hashes,
    Parent,
    Tokens,
    BlockSize,
    LoraId,
    Medium,
    LoraName,
    ExtraKeys,
    Group,
    SpecKind,
    SlidingWindow,
}

/// Fields and their names, in the order of the array encoding.
const STORED: &[(Field, &str)] = &[
    (Field::Hashes, "block_hashes"),
    (Field::Parent, "parent_block_hash"),
    (Field::Tokens, "token_ids"),
    (Field::BlockSize, "block_size"),
    (Field::LoraId, "lora_id"),
    (Field::Medium, "medium"),
    (Field::LoraName, "lora_name"),
    (Field::ExtraKeys, "extra_keys"),
    (Field::Group, "group_idx"),
    (Field::SpecKind, "kv_cache_spec_kind"),
    (Field::SlidingWindow, "kv_cache_spec_sliding_window"),
];
const REMOVED: &[(Field, &str)] =
    &[(Field::Hashes, "block_hashes"), (Field::Medium, "medium"), (Field::Group, "group_idx")];

fn array_event<'a>(reader: &mut Reader<'a>, items: u32) -> Result<Event<'a>, EventError> {
    let tag = text(reader.head()?, "an event's type")?;
    let mut known = fields_of(tag).iter();
    let mut fields = Fields::default();
    for _ in 1..items {
        match known.next() {
            Some((field, _)) => fields.read(*field, reader)?,
            None => reader.skip()?,
        }
    }
    fields.event(tag)
}

fn map_event<'a>(reader: &mut Reader<'a>, pairs: u32) -> Result<Event<'a>, EventError> {
    // The type stands first in practice; a kind that is not known is not looked into.
    let tag = tag(*reader, pairs)?;
    let known = fields_of(tag);
    // Fields come in their order, some left out: the next is looked for behind the last.
    let mut next = 0;
    let mut fields = Fields::default();
    for _ in 0..pairs {
        let Head::Str(key) = reader.head()? else {
            return Err(EventError::Shape("a field's name"));
        };
        let is = |(_, name): &(Field, &str)| name.as_bytes() == key;
        let (before, after) = known.split_at(next);
        let behind = after.iter().position(is).map(|at| next + at);
        match behind.or_else(|| before.iter().position(is)) {
            Some(at) => {
                next = at + 1;
                fields.read(known[at].0, reader)?;
            }
            None => reader.skip()?,
        }
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

fn fields_of(tag: &str) -> &'static [(Field, &'static str)] {
    match tag {
        "BlockStored" => STORED,
        "BlockRemoved" => REMOVED,
        _ => &[],
    }
}

impl<'a> Fields<'a> {
    /// Reads the value of a field.
    fn read(&mut self, field: Field, reader: &mut Reader<'a>) -> Result<(), EventError> {
        match field {
            Field::Hashes => {
                let left = array(reader, "block_hashes")?;
                self.hashes = Some(Names { reader: *reader, left });
                for _ in 0..left {
                    name(reader.head()?)?;
                }
            }
            Field::Tokens => {
                let left = array(reader, "token_ids")?;
                self.tokens = Some(Tokens { reader: *reader, left });
                for _ in 0..left {
                    reader.small().ok_or(EventError::Shape("a token id is not one of 32 bits"))?;
                }
            }
            Field::ExtraKeys => {
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

    fn scalar(&mut self, field: Field, head: Head<'a>) -> Result<(), EventError> {
        match field {
            Field::Parent => self.parent = Some(name(head)?),
            Field::BlockSize => self.block_size = Some(small(head, "block_size")?),
            Field::LoraId => self.lora_id = Some(small(head, "lora_id")?),
            Field::Medium => self.medium = Some(text(head, "medium")?),
            Field::LoraName => self.lora_name = Some(text(head, "lora_name")?),
            Field::Group => self.group_idx = Some(small(head, "group_idx")?),
            Field::SpecKind => self.spec_kind = Some(text(head, "kv_cache_spec_kind")?),
            Field::SlidingWindow => {
                self.sliding_window = Some(small(head, "kv_cache_spec_sliding_window")?);
            }
            Field::Hashes | Field::Tokens | Field::ExtraKeys => {}
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
