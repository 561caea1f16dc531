//! Writes events as vLLM does, byte for byte: arrays as 0.23, maps as 0.24 and later.

use super::BlockName;

/// How events are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Encoding {
    /// Arrays, vLLM 0.23 and older.
    Array,
    /// Maps with `type`, vLLM 0.24 and later.
    Map,
    /// The same with names as signed numbers, SGLang.
    SignedMap,
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
        /// LoRA adapter; written as an extra key of every block too.
        lora_name: Option<&'a str>,
        /// Tier.
        medium: Option<&'a str>,
        /// Written as the first block's extra key when the sequence starts here.
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

/// Writes a batch: the payload of one message.
pub fn encode(
    timestamp: f64,
    rank: Option<u32>,
    events: &[Announce<'_>],
    encoding: Encoding,
) -> Vec<u8> {
    let mut out = Writer { out: Vec::new(), signed: encoding == Encoding::SignedMap };
    out.array(if rank.is_some() { 3 } else { 2 });
    out.out.push(0xcb);
    out.out.extend(timestamp.to_be_bytes());
    out.array(events.len());
    for event in events {
        out.event(event, encoding);
    }
    if let Some(rank) = rank {
        out.uint(u64::from(rank));
    }
    out.out
}

struct Writer {
    out: Vec<u8>,
    /// Names beyond the positive 64-bit numbers are negative ones.
    signed: bool,
}

/// The only attention kind that the mock engine has, as vLLM names it.
const SPEC_KIND: &str = "full_attention";

impl Writer {
    fn event(&mut self, event: &Announce<'_>, encoding: Encoding) {
        let map = encoding != Encoding::Array;
        // Fields of the event besides its type; an array also ends with the sliding window, which a
        // map leaves out as it has its default.
        let (tag, fields) = match event {
            Announce::Stored { .. } => ("BlockStored", if map { 10 } else { 11 }),
            Announce::Removed { .. } => ("BlockRemoved", 3),
            Announce::Cleared => ("AllBlocksCleared", 0),
        };
        if map {
            self.map(fields + 1);
        } else {
            self.array(fields + 1);
        }
        self.key("type", map).str(tag);
        match *event {
            Announce::Stored { .. } => self.stored(event, map),
            Announce::Removed { hashes, medium } => {
                self.key("block_hashes", map).names(hashes);
                self.key("medium", map).optional(medium);
                self.key("group_idx", map).uint(0);
            }
            Announce::Cleared => {}
        }
    }

    fn stored(&mut self, event: &Announce<'_>, map: bool) {
        let Announce::Stored { hashes, parent, tokens, block_size, lora_name, medium, cache_salt } =
            *event
        else {
            return;
        };
        self.key("block_hashes", map).names(hashes);
        match (self.key("parent_block_hash", map), parent) {
            (out, Some(parent)) => out.name(&parent),
            (out, None) => out.nil(),
        }
        self.key("token_ids", map).array(tokens.len());
        for token in tokens {
            self.uint(u64::from(*token));
        }
        self.key("block_size", map).uint(u64::from(block_size));
        self.key("lora_id", map).nil();
        self.key("medium", map).optional(medium);
        self.key("lora_name", map).optional(lora_name);
        self.key("extra_keys", map).array(hashes.len());
        for index in 0..hashes.len() {
            let salt = cache_salt.filter(|_| index == 0 && parent.is_none());
            self.extra_keys(lora_name, salt);
        }
        self.key("group_idx", map).uint(0);
        self.key("kv_cache_spec_kind", map).str(SPEC_KIND);
        if !map {
            self.nil();
        }
    }

    /// A field's name, where fields have names.
    fn key(&mut self, name: &str, map: bool) -> &mut Self {
        if map {
            self.str(name);
        }
        self
    }

    fn extra_keys(&mut self, lora: Option<&str>, salt: Option<&str>) {
        let keys = usize::from(lora.is_some()) + usize::from(salt.is_some());
        if keys == 0 {
            return self.nil();
        }
        self.array(keys);
        for key in lora.iter().chain(&salt) {
            self.str(key);
        }
    }

    fn names(&mut self, names: &[BlockName<'_>]) {
        self.array(names.len());
        for name in names {
            self.name(name);
        }
    }

    fn name(&mut self, name: &BlockName<'_>) {
        match *name {
            BlockName::Int(id) if self.signed && id > i64::MAX as u64 => {
                self.out.push(0xd3);
                self.out.extend(id.to_be_bytes());
            }
            BlockName::Int(id) => self.uint(id),
            BlockName::Digest(digest) => {
                self.sized(None, [0xc4, 0xc5, 0xc6], digest.len());
                self.out.extend(digest);
            }
        }
    }

    fn nil(&mut self) {
        self.out.push(0xc0);
    }

    fn optional(&mut self, text: Option<&str>) {
        match text {
            Some(text) => self.str(text),
            None => self.nil(),
        }
    }

    fn str(&mut self, text: &str) {
        self.sized(Some((0xa0, 32)), [0xd9, 0xda, 0xdb], text.len());
        self.out.extend(text.as_bytes());
    }

    fn array(&mut self, len: usize) {
        // There is no array with a length of one byte.
        self.sized(Some((0x90, 16)), [0xdc, 0xdc, 0xdd], len);
    }

    fn map(&mut self, len: usize) {
        self.sized(Some((0x80, 16)), [0xde, 0xde, 0xdf], len);
    }

    /// A marker with a length: in the marker itself below a bound, else in 1, 2 or 4 bytes.
    #[allow(clippy::cast_possible_truncation)]
    fn sized(&mut self, inline: Option<(u8, usize)>, markers: [u8; 3], len: usize) {
        let [one, two, four] = markers;
        match (inline, len) {
            (Some((marker, below)), _) if len < below => self.out.push(marker | len as u8),
            (_, 0..=0xff) if one != two => self.out.extend([one, len as u8]),
            (_, 0..=0xffff) => {
                self.out.push(two);
                self.out.extend((len as u16).to_be_bytes());
            }
            _ => {
                self.out.push(four);
                self.out.extend((len as u32).to_be_bytes());
            }
        }
    }

    #[allow(clippy::cast_possible_truncation)]
    fn uint(&mut self, value: u64) {
        match value {
            0..=0x7f => self.out.push(value as u8),
            0x80..=0xff => self.out.extend([0xcc, value as u8]),
            0x100..=0xffff => {
                self.out.push(0xcd);
                self.out.extend((value as u16).to_be_bytes());
            }
            0x1_0000..=0xffff_ffff => {
                self.out.push(0xce);
                self.out.extend((value as u32).to_be_bytes());
            }
            _ => {
                self.out.push(0xcf);
                self.out.extend(value.to_be_bytes());
            }
        }
    }
}
