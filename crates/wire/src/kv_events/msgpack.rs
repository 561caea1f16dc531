//! A reader of msgpack that borrows everything and trusts nothing: no allocation, no recursion, and
//! no more steps than the message has bytes.

use super::EventError;

/// The rest of a message.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Reader<'a> {
    rest: &'a [u8],
}

/// The head of a value; what follows it is not read yet.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Head<'a> {
    Nil,
    /// An integer's 64 bits, and whether it is negative.
    Int(u64, bool),
    Float(f64),
    Str(&'a [u8]),
    Bin(&'a [u8]),
    Array(u32),
    Map(u32),
    /// Booleans and extension types, which no event uses.
    Other,
}

impl<'a> Reader<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Reader<'a> {
        Reader { rest: bytes }
    }

    pub(super) fn rest(&self) -> &'a [u8] {
        self.rest
    }

    fn take(&mut self, count: usize) -> Result<&'a [u8], EventError> {
        let (taken, rest) = self.rest.split_at_checked(count).ok_or(EventError::Truncated)?;
        self.rest = rest;
        Ok(taken)
    }

    fn bytes<const N: usize>(&mut self) -> Result<[u8; N], EventError> {
        let (taken, rest) = self.rest.split_first_chunk().ok_or(EventError::Truncated)?;
        self.rest = rest;
        Ok(*taken)
    }

    /// A length of 1, 2 or 4 bytes.
    fn length(&mut self, bytes: u8) -> Result<u32, EventError> {
        Ok(match bytes {
            1 => u32::from(u8::from_be_bytes(self.bytes()?)),
            2 => u32::from(u16::from_be_bytes(self.bytes()?)),
            _ => u32::from_be_bytes(self.bytes()?),
        })
    }

    /// Reads the head of the next value, and all of it unless it is an array or a map.
    pub(super) fn head(&mut self) -> Result<Head<'a>, EventError> {
        let signed = |value: i64| Head::Int(value.cast_unsigned(), value < 0);
        let [marker] = self.bytes()?;
        Ok(match marker {
            0x00..=0x7f => Head::Int(u64::from(marker), false),
            0x80..=0x8f => Head::Map(u32::from(marker & 0x0f)),
            0x90..=0x9f => Head::Array(u32::from(marker & 0x0f)),
            0xa0..=0xbf => Head::Str(self.take(usize::from(marker & 0x1f))?),
            0xc0 => Head::Nil,
            0xc4..=0xc6 => {
                let length = self.length(1 << (marker - 0xc4))?;
                Head::Bin(self.take(length as usize)?)
            }
            0xc7..=0xc9 => {
                let length = self.length(1 << (marker - 0xc7))?;
                self.take(1)?;
                self.take(length as usize)?;
                Head::Other
            }
            0xca => Head::Float(f64::from(f32::from_be_bytes(self.bytes()?))),
            0xcb => Head::Float(f64::from_be_bytes(self.bytes()?)),
            0xcc => Head::Int(u64::from(u8::from_be_bytes(self.bytes()?)), false),
            0xcd => Head::Int(u64::from(u16::from_be_bytes(self.bytes()?)), false),
            0xce => Head::Int(u64::from(u32::from_be_bytes(self.bytes()?)), false),
            0xcf => Head::Int(u64::from_be_bytes(self.bytes()?), false),
            0xd0 => signed(i64::from(i8::from_be_bytes(self.bytes()?))),
            0xd1 => signed(i64::from(i16::from_be_bytes(self.bytes()?))),
            0xd2 => signed(i64::from(i32::from_be_bytes(self.bytes()?))),
            0xd3 => signed(i64::from_be_bytes(self.bytes()?)),
            0xd4..=0xd8 => {
                self.take(1 + (1 << (marker - 0xd4)))?;
                Head::Other
            }
            0xd9..=0xdb => {
                let length = self.length(1 << (marker - 0xd9))?;
                Head::Str(self.take(length as usize)?)
            }
            0xdc => Head::Array(self.length(2)?),
            0xdd => Head::Array(self.length(4)?),
            0xde => Head::Map(self.length(2)?),
            0xdf => Head::Map(self.length(4)?),
            0xc1 => return Err(EventError::Shape("a byte that msgpack does not use")),
            0xc2 | 0xc3 => Head::Other,
            0xe0..=0xff => signed(i64::from(marker.cast_signed())),
        })
    }

    /// Reads a number of 32 bits; None if the next value is none. Most of every message are token
    /// ids, and most of these have 16 bits, so these come first and need no look at what follows.
    #[inline]
    pub(super) fn small(&mut self) -> Option<u32> {
        match *self.rest {
            [0xcd, a, b, ref rest @ ..] => {
                self.rest = rest;
                Some(u32::from(u16::from_be_bytes([a, b])))
            }
            [value @ 0..0x80, ref rest @ ..] => {
                self.rest = rest;
                Some(u32::from(value))
            }
            [0xce, a, b, c, d, ref rest @ ..] => {
                self.rest = rest;
                Some(u32::from_be_bytes([a, b, c, d]))
            }
            _ => match self.head() {
                Ok(Head::Int(value, false)) => u32::try_from(value).ok(),
                _ => None,
            },
        }
    }

    /// Skips the next value, whatever is in it.
    pub(super) fn skip(&mut self) -> Result<(), EventError> {
        let mut left: u64 = 1;
        while left > 0 {
            left -= 1;
            // Integers and nil at one look; anything else by its head.
            let size = match self.rest.first() {
                Some(0x00..=0x7f | 0xc0 | 0xe0..=0xff) => 1,
                Some(0xcd) => 3,
                Some(0xce) => 5,
                Some(0xcf | 0xd3) => 9,
                _ => 0,
            };
            if size > 0 {
                self.take(size)?;
                continue;
            }
            left += match self.head()? {
                Head::Array(items) => u64::from(items),
                Head::Map(pairs) => 2 * u64::from(pairs),
                _ => 0,
            };
        }
        Ok(())
    }

    /// The bytes of the next value.
    pub(super) fn raw(&mut self) -> Result<&'a [u8], EventError> {
        let start = self.rest;
        self.skip()?;
        Ok(start.get(..start.len() - self.rest.len()).unwrap_or_default())
    }
}
