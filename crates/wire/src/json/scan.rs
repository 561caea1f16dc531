//! The scanner itself: a position that moves over one token, member or value at a time.

use super::{DEPTH_CEILING, JsonError, Member, Span};

pub(super) struct Scanner<'a> {
    pub(super) text: &'a str,
    bytes: &'a [u8],
    pub(super) at: usize,
    max_depth: usize,
}

/// Which containers are open: one bit each, set for an object.
struct Stack {
    bits: [u64; DEPTH_CEILING / 64],
    depth: usize,
}

impl Stack {
    fn push(&mut self, object: bool) {
        if let Some(word) = self.bits.get_mut(self.depth / 64) {
            let bit = 1 << (self.depth % 64);
            *word = if object { *word | bit } else { *word & !bit };
        }
        self.depth += 1;
    }

    fn in_object(&self) -> bool {
        let top = self.depth.wrapping_sub(1);
        self.bits.get(top / 64).is_some_and(|word| word >> (top % 64) & 1 == 1)
    }
}

impl<'a> Scanner<'a> {
    pub(super) fn new(text: &'a str, max_depth: usize) -> Scanner<'a> {
        Scanner { text, bytes: text.as_bytes(), at: 0, max_depth: max_depth.min(DEPTH_CEILING) }
    }

    pub(super) fn error(&self, what: &'static str) -> JsonError {
        JsonError { at: self.at, what }
    }

    pub(super) fn error_before(&self, what: &'static str) -> JsonError {
        JsonError { at: self.at.saturating_sub(1), what }
    }

    pub(super) fn peek(&self) -> Option<u8> {
        self.bytes.get(self.at).copied()
    }

    pub(super) fn next(&mut self) -> Option<u8> {
        let byte = self.peek();
        self.at += 1;
        byte
    }

    pub(super) fn expect(&mut self, byte: u8, what: &'static str) -> Result<(), JsonError> {
        if self.peek() != Some(byte) {
            return Err(self.error(what));
        }
        self.at += 1;
        Ok(())
    }

    pub(super) fn whitespace(&mut self) {
        while let Some(b' ' | b'\n' | b'\r' | b'\t') = self.peek() {
            self.at += 1;
        }
    }

    /// `"key" : value` and the whitespace after it.
    pub(super) fn member(&mut self) -> Result<Member, JsonError> {
        self.expect(b'"', "expected a string as key")?;
        let start = self.at;
        let escaped = self.string()?;
        let key = Span { start, end: self.at - 1 };
        self.whitespace();
        self.expect(b':', "expected ':'")?;
        self.whitespace();
        let start = self.at;
        self.value()?;
        let value = Span { start, end: self.at };
        self.whitespace();
        Ok(Member { key, value, escaped })
    }

    /// One value of any kind, from its first byte to its last.
    pub(super) fn value(&mut self) -> Result<(), JsonError> {
        let mut stack = Stack { bits: [0; DEPTH_CEILING / 64], depth: 0 };
        loop {
            // A value starts here.
            match self.next() {
                Some(b'"') => {
                    self.string()?;
                }
                Some(open @ (b'{' | b'[')) => {
                    // The object around the whole is one level too.
                    if stack.depth + 1 >= self.max_depth {
                        return Err(self.error_before("nested too deep"));
                    }
                    let object = open == b'{';
                    self.whitespace();
                    if self.peek() == Some(if object { b'}' } else { b']' }) {
                        self.at += 1;
                    } else {
                        stack.push(object);
                        if object {
                            self.key()?;
                        }
                        continue;
                    }
                }
                Some(b'-' | b'0'..=b'9') => self.number()?,
                Some(b't') => self.literal(b"rue")?,
                Some(b'f') => self.literal(b"alse")?,
                Some(b'n') => self.literal(b"ull")?,
                _ => return Err(self.error_before("expected a value")),
            }
            // A value ended: close what ends with it.
            loop {
                if stack.depth == 0 {
                    return Ok(());
                }
                self.whitespace();
                match (self.next(), stack.in_object()) {
                    (Some(b','), true) => {
                        self.whitespace();
                        self.key()?;
                        break;
                    }
                    (Some(b','), false) => {
                        self.whitespace();
                        break;
                    }
                    (Some(b'}'), true) | (Some(b']'), false) => stack.depth -= 1,
                    (_, true) => return Err(self.error_before("expected ',' or '}'")),
                    (_, false) => return Err(self.error_before("expected ',' or ']'")),
                }
            }
        }
    }

    /// `"key" :` and the whitespace after it.
    fn key(&mut self) -> Result<(), JsonError> {
        self.expect(b'"', "expected a string as key")?;
        self.string()?;
        self.whitespace();
        self.expect(b':', "expected ':'")?;
        self.whitespace();
        Ok(())
    }

    fn literal(&mut self, rest: &[u8]) -> Result<(), JsonError> {
        let end = self.at + rest.len();
        if self.bytes.get(self.at..end) != Some(rest) {
            return Err(self.error_before("expected a value"));
        }
        self.at = end;
        Ok(())
    }

    /// The inside and the closing quote of a string; whether it holds an escape.
    fn string(&mut self) -> Result<bool, JsonError> {
        let mut escaped = false;
        loop {
            self.plain();
            match self.next() {
                Some(b'"') => return Ok(escaped),
                Some(b'\\') => {
                    escaped = true;
                    self.escape()?;
                }
                Some(byte) if byte < 0x20 => {
                    return Err(self.error_before("control character in a string"));
                }
                Some(_) => {}
                None => return Err(self.error_before("unterminated string")),
            }
        }
    }

    /// Skips bytes of a string that need no look. Names and such end within the first words; for what is
    /// longer the compiler makes something that looks at many bytes at once.
    fn plain(&mut self) {
        const ONES: u64 = 0x0101_0101_0101_0101;
        const HIGH: u64 = 0x8080_8080_8080_8080;
        let below = |word: u64, bound: u64| word.wrapping_sub(ONES * bound) & !word & HIGH;
        let is_special = |byte: &u8| (*byte < 0x20) | (*byte == b'"') | (*byte == b'\\');
        let mut words = 0;
        while let Some(chunk) = self.bytes.get(self.at..).and_then(<[u8]>::first_chunk::<8>) {
            let word = u64::from_le_bytes(*chunk);
            let special = below(word, 0x20)
                | below(word ^ (ONES * u64::from(b'"')), 1)
                | below(word ^ (ONES * u64::from(b'\\')), 1);
            if special != 0 {
                // The lowest mark is exact: a borrow can only have come from below it.
                self.at += special.trailing_zeros() as usize / 8;
                return;
            }
            self.at += 8;
            words += 1;
            if words == 4 {
                let rest = self.bytes.get(self.at..).unwrap_or_default();
                let clean = |chunk: &&[u8]| !chunk.iter().fold(false, |any, b| any | is_special(b));
                self.at += 32 * rest.chunks_exact(32).take_while(clean).count();
            }
        }
    }

    fn escape(&mut self) -> Result<(), JsonError> {
        match self.next() {
            Some(b'"' | b'\\' | b'/' | b'b' | b'f' | b'n' | b'r' | b't') => Ok(()),
            Some(b'u') => {
                let end = self.at + 4;
                let digits = self.bytes.get(self.at..end);
                if !digits.is_some_and(|digits| digits.iter().all(u8::is_ascii_hexdigit)) {
                    return Err(self.error("expected four hexadecimal digits"));
                }
                self.at = end;
                Ok(())
            }
            _ => Err(self.error_before("unknown escape")),
        }
    }

    /// The rest of a number whose first byte was read.
    fn number(&mut self) -> Result<(), JsonError> {
        self.at -= 1;
        if self.peek() == Some(b'-') {
            self.at += 1;
        }
        if self.peek() == Some(b'0') {
            self.at += 1;
        } else {
            self.digits()?;
        }
        if self.peek() == Some(b'.') {
            self.at += 1;
            self.digits()?;
        }
        if let Some(b'e' | b'E') = self.peek() {
            self.at += 1;
            if let Some(b'+' | b'-') = self.peek() {
                self.at += 1;
            }
            self.digits()?;
        }
        Ok(())
    }

    fn digits(&mut self) -> Result<(), JsonError> {
        let rest = self.bytes.get(self.at..).unwrap_or_default();
        let count = rest.iter().take_while(|byte| byte.is_ascii_digit()).count();
        self.at += count;
        if count == 0 { Err(self.error("expected a digit")) } else { Ok(()) }
    }
}
