//! KV-cache events as vLLM (arrays up to 0.23, maps from 0.24) and SGLang (maps, signed hashes)
//! publish them: read without allocation, written for the mock engine.
//!
//! Invariants: everything read borrows from the message; a malformed event is an error of its own
//! and costs only itself; hostile bytes cost no more steps than there are of them.

mod decode;
mod encode;
mod msgpack;
mod polled;

pub use encode::{Announce, Encoding, encode};
pub use polled::{Block, Change, Name, PolledEvent, as_message, drained};

use decode::{event, name, small};
use msgpack::{Head, Reader};

/// A message that is not what it should be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EventError {
    /// The message ends in the middle of a value.
    #[error("the message ends early")]
    Truncated,
    /// A value is not of the type it should be.
    #[error("{0}")]
    Shape(&'static str),
}

/// A block's name, as its engine sent it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BlockName<'a> {
    /// An integer; negative ones are reinterpreted as unsigned.
    Int(u64),
    /// A digest.
    Digest(&'a [u8]),
}

impl BlockName<'_> {
    /// A 64-bit name: the integer; of a 32-byte digest its last 8 bytes (vLLM's own integer form);
    /// of any other its xxh3.
    pub fn id(&self) -> u64 {
        match *self {
            BlockName::Int(id) => id,
            BlockName::Digest(digest) => match digest.last_chunk() {
                Some(tail) if digest.len() == 32 => u64::from_be_bytes(*tail),
                _ => xxhash_rust::xxh3::xxh3_64(digest),
            },
        }
    }
}

/// `BlockStored`.
#[derive(Clone, Copy, Debug)]
pub struct BlockStored<'a> {
    /// The blocks' names, first to last.
    pub hashes: Names<'a>,
    /// The block before the first; None at the start of a sequence.
    pub parent: Option<BlockName<'a>>,
    /// The tokens of all blocks.
    pub tokens: Tokens<'a>,
    /// Tokens in a block.
    pub block_size: u32,
    /// LoRA adapter's number (all that engines before 0.14 send).
    pub lora_id: Option<u32>,
    /// LoRA adapter's name.
    pub lora_name: Option<&'a str>,
    /// `GPU`, `CPU`, ...
    pub medium: Option<&'a str>,
    /// What else went into each block's hash.
    pub extra_keys: ExtraKeys<'a>,
    /// KV-cache group, of models with several kinds of attention.
    pub group_idx: Option<u32>,
    /// `full_attention`, `sliding_window`, ...
    pub spec_kind: Option<&'a str>,
    /// The window, of sliding-window attention.
    pub sliding_window: Option<u32>,
}

/// `BlockRemoved`.
#[derive(Clone, Copy, Debug)]
pub struct BlockRemoved<'a> {
    /// The blocks' names.
    pub hashes: Names<'a>,
    /// The tier they went from.
    pub medium: Option<&'a str>,
    /// KV-cache group.
    pub group_idx: Option<u32>,
}

/// One event.
#[derive(Clone, Copy, Debug)]
pub enum Event<'a> {
    /// Blocks became reusable.
    Stored(BlockStored<'a>),
    /// Blocks went.
    Removed(BlockRemoved<'a>),
    /// Everything went.
    Cleared,
    /// A kind that is not known here.
    Unknown(&'a str),
}

/// Iterator over block names.
#[derive(Clone, Copy, Debug, Default)]
pub struct Names<'a> {
    reader: Reader<'a>,
    left: usize,
}

impl<'a> Iterator for Names<'a> {
    type Item = BlockName<'a>;

    fn next(&mut self) -> Option<BlockName<'a>> {
        self.left = self.left.checked_sub(1)?;
        name(self.reader.head().ok()?).ok()
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.left, Some(self.left))
    }
}

impl ExactSizeIterator for Names<'_> {}

/// Iterator over token ids.
#[derive(Clone, Copy, Debug, Default)]
pub struct Tokens<'a> {
    reader: Reader<'a>,
    left: usize,
}

impl Iterator for Tokens<'_> {
    type Item = u32;

    fn next(&mut self) -> Option<u32> {
        self.left = self.left.checked_sub(1)?;
        self.reader.small()
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.left, Some(self.left))
    }
}

impl ExactSizeIterator for Tokens<'_> {}

/// The extra keys of an event: one entry for each block, or none at all.
#[derive(Clone, Copy, Debug, Default)]
pub struct ExtraKeys<'a> {
    reader: Reader<'a>,
    left: usize,
}

impl<'a> Iterator for ExtraKeys<'a> {
    type Item = BlockKeys<'a>;

    fn next(&mut self) -> Option<BlockKeys<'a>> {
        self.left = self.left.checked_sub(1)?;
        let entry = Reader::new(self.reader.raw().ok()?);
        let mut inside = entry;
        Some(match inside.head().ok()? {
            Head::Nil => BlockKeys::default(),
            Head::Array(items) => BlockKeys { reader: inside, left: items as usize },
            // A key that is not in a list.
            _ => BlockKeys { reader: entry, left: 1 },
        })
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.left, Some(self.left))
    }
}

impl ExactSizeIterator for ExtraKeys<'_> {}

/// The extra keys of one block.
#[derive(Clone, Copy, Debug, Default)]
pub struct BlockKeys<'a> {
    reader: Reader<'a>,
    left: usize,
}

/// Something besides its tokens that went into a block's hash.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExtraKey<'a> {
    /// A LoRA name, a cache salt (on the first block of a sequence), or an item's identifier.
    Text(&'a str),
    /// An item of another modality and where it begins.
    Multimodal {
        /// Its identifier (a hash of it).
        id: &'a str,
        /// Its first token, counted from the block's start.
        offset: i64,
    },
    /// A digest (of prompt embeddings); of a key that is none of these its msgpack bytes.
    Bytes(&'a [u8]),
}

impl<'a> Iterator for BlockKeys<'a> {
    type Item = ExtraKey<'a>;

    fn next(&mut self) -> Option<ExtraKey<'a>> {
        self.left = self.left.checked_sub(1)?;
        let raw = self.reader.raw().ok()?;
        let mut inside = Reader::new(raw);
        let key = match inside.head() {
            Ok(Head::Str(text)) => std::str::from_utf8(text).ok().map(ExtraKey::Text),
            Ok(Head::Bin(digest)) => Some(ExtraKey::Bytes(digest)),
            Ok(Head::Array(2)) => match (inside.head(), inside.head()) {
                (Ok(Head::Str(id)), Ok(Head::Int(offset, _))) => std::str::from_utf8(id)
                    .ok()
                    .map(|id| ExtraKey::Multimodal { id, offset: offset.cast_signed() }),
                _ => None,
            },
            _ => None,
        };
        Some(key.unwrap_or(ExtraKey::Bytes(raw)))
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.left, Some(self.left))
    }
}

impl ExactSizeIterator for BlockKeys<'_> {}

/// A batch: the last frame of one message.
#[derive(Clone, Copy, Debug)]
pub struct Batch<'a> {
    /// Unix seconds.
    pub timestamp: f64,
    /// Data-parallel rank, if told.
    pub rank: Option<u32>,
    reader: Reader<'a>,
    count: usize,
}

impl<'a> Batch<'a> {
    /// Reads the frame of a batch; its events are read as they are iterated.
    pub fn decode(payload: &'a [u8]) -> Result<Batch<'a>, EventError> {
        let (fields, timestamp, mut reader) = Batch::head(payload)?;
        let Head::Array(count) = reader.head()? else {
            return Err(EventError::Shape("a batch has no list of events"));
        };
        let events = reader;
        for _ in 0..count {
            reader.skip()?;
        }
        let rank = match (fields, reader) {
            (2, _) => None,
            (_, mut reader) => match reader.head()? {
                Head::Nil => None,
                head => Some(small(head, "a rank")?),
            },
        };
        Ok(Batch { timestamp, rank, reader: events, count: count as usize })
    }

    /// When a batch was published, in Unix seconds, without a look at its events; None if it does
    /// not say.
    pub fn timestamp_of(payload: &[u8]) -> Option<f64> {
        Batch::head(payload).ok().map(|(_, timestamp, _)| timestamp)
    }

    /// How many fields a batch has, its timestamp, and what follows.
    fn head(payload: &'a [u8]) -> Result<(u32, f64, Reader<'a>), EventError> {
        let mut reader = Reader::new(payload);
        let Head::Array(fields @ 2..) = reader.head()? else {
            return Err(EventError::Shape("a batch is not an array of at least two"));
        };
        let timestamp = match reader.head()? {
            Head::Float(seconds) => seconds,
            #[allow(clippy::cast_precision_loss)]
            Head::Int(seconds, false) => seconds as f64,
            _ => return Err(EventError::Shape("a batch has no timestamp")),
        };
        Ok((fields, timestamp, reader))
    }

    /// Events in the batch.
    pub fn len(&self) -> usize {
        self.count
    }

    /// None at all.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// The events in order. A malformed one is an error in its place, and the rest follows.
    pub fn events(&self) -> Events<'a> {
        Events { reader: self.reader, left: self.count, behind: 0 }
    }

    /// The events of a batch, without a look at what is behind the first of them: a batch that ends
    /// early shows it by an error in the place where it ends, its last one.
    pub fn events_of(payload: &'a [u8]) -> Result<Events<'a>, EventError> {
        let (fields, _, mut reader) = Batch::head(payload)?;
        let Head::Array(count) = reader.head()? else {
            return Err(EventError::Shape("a batch has no list of events"));
        };
        // Each event takes a byte at least.
        let left = usize::try_from(count).ok().filter(|count| *count <= reader.rest().len());
        Ok(Events { reader, left: left.ok_or(EventError::Truncated)?, behind: fields - 2 })
    }
}

/// Iterator over the events of a batch.
#[derive(Clone, Copy, Debug, Default)]
pub struct Events<'a> {
    reader: Reader<'a>,
    left: usize,
    /// Values behind the events, to be seen that the batch is whole.
    behind: u32,
}

impl Events<'_> {
    /// Events that are left, at most.
    pub fn left(&self) -> usize {
        self.left
    }
}

impl<'a> Iterator for Events<'a> {
    type Item = Result<Event<'a>, EventError>;

    fn next(&mut self) -> Option<Self::Item> {
        if let Some(left) = self.left.checked_sub(1) {
            self.left = left;
            let read = event(&mut self.reader);
            if let Err(EventError::Truncated) = read {
                (self.left, self.behind) = (0, 0);
            }
            return Some(read);
        }
        for _ in 0..std::mem::take(&mut self.behind) {
            if let Err(error) = self.reader.skip() {
                return Some(Err(error));
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn read_all(payload: &[u8]) {
        let Ok(batch) = Batch::decode(payload) else { return };
        for event in batch.events() {
            match event {
                Ok(Event::Stored(stored)) => {
                    assert_eq!(stored.hashes.len(), stored.hashes.count());
                    assert_eq!(stored.tokens.len(), stored.tokens.count());
                    let _ = stored.extra_keys.map(Iterator::count).sum::<usize>();
                }
                Ok(Event::Removed(removed)) => {
                    assert_eq!(removed.hashes.len(), removed.hashes.count());
                }
                _ => {}
            }
        }
    }

    fn sample(encoding: Encoding) -> Vec<u8> {
        let digest = [7u8; 32];
        let stored = Announce::Stored {
            hashes: &[BlockName::Int(u64::MAX), BlockName::Digest(&digest)],
            parent: None,
            tokens: &[1, 200, 70_000, 4],
            block_size: 2,
            lora_name: Some("sql"),
            medium: Some("GPU"),
            cache_salt: Some("tenant"),
        };
        let removed = Announce::Removed { hashes: &[BlockName::Int(3)], medium: None };
        encode(1.5, Some(2), &[stored, removed, Announce::Cleared], encoding)
    }

    #[test]
    fn what_is_written_reads_back_in_both_encodings() {
        for encoding in [Encoding::Array, Encoding::Map] {
            let bytes = sample(encoding);
            let batch = Batch::decode(&bytes).unwrap();
            assert_eq!((batch.timestamp, batch.rank, batch.len()), (1.5, Some(2), 3));
            let events: Vec<_> = batch.events().collect::<Result<_, _>>().unwrap();
            let Event::Stored(stored) = events[0] else { panic!("{events:?}") };
            assert_eq!(
                stored.hashes.collect::<Vec<_>>(),
                [BlockName::Int(u64::MAX), BlockName::Digest(&[7; 32])]
            );
            assert_eq!(stored.parent, None);
            assert_eq!(stored.tokens.collect::<Vec<_>>(), [1, 200, 70_000, 4]);
            assert_eq!((stored.block_size, stored.medium), (2, Some("GPU")));
            assert_eq!((stored.lora_name, stored.lora_id), (Some("sql"), None));
            assert_eq!((stored.group_idx, stored.spec_kind), (Some(0), Some("full_attention")));
            let keys: Vec<Vec<_>> = stored.extra_keys.map(Iterator::collect).collect();
            assert_eq!(keys[0], [ExtraKey::Text("sql"), ExtraKey::Text("tenant")]);
            assert_eq!(keys[1], [ExtraKey::Text("sql")]);
            let Event::Removed(removed) = events[1] else { panic!("{events:?}") };
            assert_eq!(removed.hashes.collect::<Vec<_>>(), [BlockName::Int(3)]);
            assert!(matches!(events[2], Event::Cleared));
        }
    }

    #[test]
    fn a_digest_of_32_bytes_has_the_id_that_vllm_gives_it() {
        let mut digest = [0u8; 32];
        digest[24..].copy_from_slice(&77u64.to_be_bytes());
        assert_eq!(BlockName::Digest(&digest).id(), 77);
        assert_ne!(BlockName::Digest(&digest[..16]).id(), BlockName::Digest(&digest[..15]).id());
        assert_eq!(BlockName::Int(5).id(), 5);
    }

    #[test]
    fn signed_hashes_are_reinterpreted() {
        // [0.0, [{"type": "BlockRemoved", "block_hashes": [-2]}]]
        let mut bytes = vec![0x92, 0xca, 0, 0, 0, 0, 0x91, 0x82, 0xa4];
        bytes.extend(b"type\xacBlockRemoved\xacblock_hashes\x91\xfe");
        let batch = Batch::decode(&bytes).unwrap();
        assert_eq!(batch.rank, None);
        let Some(Ok(Event::Removed(removed))) = batch.events().next() else { panic!() };
        assert_eq!(removed.hashes.collect::<Vec<_>>(), [BlockName::Int(u64::MAX - 1)]);
    }

    #[test]
    fn unknown_kinds_and_malformed_events_cost_only_themselves() {
        // A future kind, an event without hashes, one that is no event, and a good one.
        let mut bytes = vec![0x92, 0xca, 0, 0, 0, 0, 0x94];
        bytes.extend(b"\x82\xa4type\xa3New\xacblock_hashes\x80");
        bytes.extend(b"\x91\xacBlockRemoved");
        bytes.push(0x05);
        bytes.extend(b"\x91\xb0AllBlocksCleared");
        let batch = Batch::decode(&bytes).unwrap();
        let events: Vec<_> = batch.events().collect();
        assert!(matches!(events[0], Ok(Event::Unknown("New"))));
        assert!(events[1].is_err() && events[2].is_err());
        assert!(matches!(events[3], Ok(Event::Cleared)));
    }

    #[test]
    fn a_length_beyond_the_message_is_refused_at_once() {
        for bytes in [&b"\x92\xca\0\0\0\0\xdd\xff\xff\xff\xff"[..], b"\xdd\xff\xff\xff\xff", b""] {
            assert!(Batch::decode(bytes).is_err());
        }
    }

    proptest! {
        #[test]
        fn random_bytes_never_panic(bytes: Vec<u8>) {
            read_all(&bytes);
        }

        #[test]
        fn damaged_messages_never_panic(map: bool, damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4), cut: prop::sample::Index) {
            let mut bytes = sample(if map { Encoding::Map } else { Encoding::Array });
            for (at, byte) in damage {
                let at = at.index(bytes.len());
                bytes[at] = byte;
            }
            read_all(&bytes);
            read_all(&bytes[..cut.index(bytes.len())]);
        }
    }
}
