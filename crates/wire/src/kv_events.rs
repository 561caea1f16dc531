//! KV-cache events as vLLM and SGLang publish them (msgpack): reading without allocation, writing
//! for the mock engine.

/// A message that is not what it should be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EventError {
    /// The message ends in the middle of a value.
    #[error("the message ends early")]
    Truncated,
    /// A value is not of the type it should be.
    #[error("{0}")]
    Shape(&'static str),
    /// Nested too deep.
    #[error("nested too deep")]
    Depth,
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
            BlockName::Digest(_) => 0,
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
    /// LoRA adapter's name.
    pub lora_name: Option<&'a str>,
    /// LoRA adapter's number (older engines send only this).
    pub lora_id: Option<i64>,
    /// `GPU`, `CPU`, ...
    pub medium: Option<&'a str>,
    /// What else went into each block's hash.
    pub extra_keys: ExtraKeys<'a>,
    /// KV-cache group, of models with several kinds of attention.
    pub group_idx: Option<u32>,
    /// `full_attention`, `sliding_window`, ...
    pub spec_kind: Option<&'a str>,
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
    raw: &'a [u8],
    left: usize,
}

impl<'a> Names<'a> {
    /// How many.
    pub fn len(&self) -> usize {
        self.left
    }
    /// None at all.
    pub fn is_empty(&self) -> bool {
        self.left == 0
    }
}

impl<'a> Iterator for Names<'a> {
    type Item = BlockName<'a>;
    fn next(&mut self) -> Option<BlockName<'a>> {
        let _ = self.raw;
        None
    }
}

/// Iterator over token ids.
#[derive(Clone, Copy, Debug, Default)]
pub struct Tokens<'a> {
    raw: &'a [u8],
    left: usize,
}

impl Tokens<'_> {
    /// How many.
    pub fn len(&self) -> usize {
        self.left
    }
    /// None at all.
    pub fn is_empty(&self) -> bool {
        self.left == 0
    }
}

impl Iterator for Tokens<'_> {
    type Item = u32;
    fn next(&mut self) -> Option<u32> {
        let _ = self.raw;
        None
    }
}

/// One block's extra keys: strings, and hashed objects with their offset.
#[derive(Clone, Copy, Debug, Default)]
pub struct ExtraKeys<'a> {
    raw: &'a [u8],
    blocks: usize,
}

impl<'a> ExtraKeys<'a> {
    /// Blocks described; 0 if the event has none.
    pub fn len(&self) -> usize {
        self.blocks
    }
    /// The event has none.
    pub fn is_empty(&self) -> bool {
        self.blocks == 0
    }
    /// The msgpack bytes of each block's entry; None where it is nil.
    pub fn entries(&self) -> impl Iterator<Item = Option<&'a [u8]>> + 'a {
        let _ = self.raw;
        std::iter::empty()
    }
}

/// A batch: one message's third frame.
#[derive(Clone, Copy, Debug)]
pub struct Batch<'a> {
    /// Unix seconds.
    pub timestamp: f64,
    /// Data-parallel rank, if told.
    pub rank: Option<u32>,
    events: &'a [u8],
    count: usize,
}

impl<'a> Batch<'a> {
    /// Reads the frame of a batch; events are read as they are iterated.
    pub fn decode(payload: &'a [u8]) -> Result<Batch<'a>, EventError> {
        let _ = payload;
        Err(EventError::Truncated)
    }
    /// Events in the batch.
    pub fn len(&self) -> usize {
        self.count
    }
    /// None at all.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }
    /// The events in order. A malformed one is an error and the rest still follows.
    pub fn events(&self) -> impl Iterator<Item = Result<Event<'a>, EventError>> + 'a {
        let _ = self.events;
        std::iter::empty()
    }
}

/// How events are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Encoding {
    /// Arrays, vLLM 0.23 and older.
    Array,
    /// Maps with `type`, vLLM 0.24 and later, SGLang.
    Map,
}

/// An event to write.
#[derive(Clone, Copy, Debug)]
pub enum Announce<'a> {
    /// `BlockStored`
    Stored {
        /// Names of the blocks.
        hashes: &'a [BlockName<'a>],
        /// Name of the block before.
        parent: Option<BlockName<'a>>,
        /// Tokens of all blocks.
        tokens: &'a [u32],
        /// Tokens in a block.
        block_size: u32,
        /// LoRA adapter.
        lora_name: Option<&'a str>,
        /// Tier.
        medium: Option<&'a str>,
        /// `cache_salt`, written as the first block's extra key when the sequence starts here.
        cache_salt: Option<&'a str>,
    },
    /// `BlockRemoved`
    Removed {
        /// Names of the blocks.
        hashes: &'a [BlockName<'a>],
        /// Tier.
        medium: Option<&'a str>,
    },
    /// `AllBlocksCleared`
    Cleared,
}

/// Writes a batch.
pub fn encode(
    timestamp: f64,
    rank: Option<u32>,
    events: &[Announce<'_>],
    encoding: Encoding,
) -> Vec<u8> {
    let _ = (timestamp, rank, events, encoding);
    Vec::new()
}
