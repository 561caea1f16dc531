//! A strict JSON scanner that finds where values are and builds nothing.
//!
//! Invariants: one pass, no recursion, depth bounded; what it accepts is RFC 8259 (UTF-8 is checked
//! apart, by `text`). Not here: numbers and strings as values, except the few that `Value` reads.

mod scan;

use std::borrow::Cow;

use scan::Scanner;

/// Nesting can be allowed up to here; a caller's own limit is usually lower.
pub(crate) const DEPTH_CEILING: usize = 256;

/// Where and why a text is not JSON.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what} at byte {at}")]
pub(crate) struct JsonError {
    pub(crate) at: usize,
    pub(crate) what: &'static str,
}

/// A part of the scanned text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Span {
    pub(crate) start: usize,
    pub(crate) end: usize,
}

/// One member of an object. The key's span is without its quotes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Member {
    pub(crate) key: Span,
    pub(crate) value: Span,
    /// The key holds an escape sequence.
    pub(crate) escaped: bool,
}

impl Member {
    /// Its name, however it was spelt. (One with a lone surrogate is the empty one to us: no member
    /// that is looked for has such a name.)
    pub(crate) fn name<'a>(&self, text: &'a str) -> Cow<'a, str> {
        let key = text.get(self.key.start..self.key.end).unwrap_or_default();
        if self.escaped { unescape(key).unwrap_or_default().into() } else { key.into() }
    }

    /// Its value.
    pub(crate) fn value<'a>(&self, text: &'a str) -> &'a str {
        text.get(self.value.start..self.value.end).unwrap_or_default()
    }
}

/// The members of an object, to be looked up by name.
pub(crate) struct Object<'a> {
    text: &'a str,
    members: Vec<Member>,
}

impl<'a> Object<'a> {
    /// None if the text is not a JSON object.
    pub(crate) fn parse(text: &'a str) -> Option<Object<'a>> {
        Some(Object { text, members: object(text, DEPTH_CEILING, usize::MAX).ok()? })
    }

    /// The value of the last member of that name.
    pub(crate) fn get(&self, name: &str) -> Option<&'a str> {
        find(self.text, &self.members, name)
    }

    /// A member that is a plain number.
    pub(crate) fn number<T: std::str::FromStr>(&self, name: &str) -> Option<T> {
        self.get(name)?.parse().ok()
    }
}

/// The value of the last member of that name.
pub(crate) fn find<'a>(text: &'a str, members: &[Member], name: &str) -> Option<&'a str> {
    members.iter().rev().find(|member| member.name(text) == name).map(|member| member.value(text))
}

/// Checks that bytes are UTF-8.
pub(crate) fn text(bytes: &[u8]) -> Result<&str, JsonError> {
    std::str::from_utf8(bytes).map_err(not_utf8)
}

/// Says where bytes stop being UTF-8.
pub(crate) fn not_utf8(error: std::str::Utf8Error) -> JsonError {
    JsonError { at: error.valid_up_to(), what: "invalid UTF-8" }
}

/// The members of the object that the whole text is.
pub(crate) fn object(
    text: &str,
    max_depth: usize,
    max_members: usize,
) -> Result<Vec<Member>, JsonError> {
    let mut scanner = Scanner::new(text, max_depth);
    let mut members = Vec::with_capacity(16);
    scanner.whitespace();
    scanner.expect(b'{', "expected a JSON object")?;
    scanner.whitespace();
    if scanner.peek() == Some(b'}') {
        scanner.at += 1;
    } else {
        loop {
            if members.len() == max_members {
                return Err(scanner.error("too many members"));
            }
            members.push(scanner.member()?);
            match scanner.next() {
                Some(b',') => scanner.whitespace(),
                Some(b'}') => break,
                _ => return Err(scanner.error_before("expected ',' or '}'")),
            }
        }
    }
    scanner.whitespace();
    if scanner.at != text.len() {
        return Err(scanner.error("unexpected data after the object"));
    }
    Ok(members)
}

/// The value that starts at a byte of the text.
pub(crate) fn value_at(text: &str, at: usize) -> Option<&str> {
    let mut scanner = Scanner::new(text, DEPTH_CEILING);
    scanner.at = at;
    scanner.value().ok()?;
    text.get(at..scanner.at)
}

/// The values of the array that the text is, one by one; a malformed rest is an error and the end.
pub(crate) fn array(text: &str) -> Result<Elements<'_>, JsonError> {
    let mut scanner = Scanner::new(text, DEPTH_CEILING);
    scanner.whitespace();
    scanner.expect(b'[', "expected an array")?;
    scanner.whitespace();
    let done = scanner.peek() == Some(b']');
    Ok(Elements { scanner, done })
}

/// Whether a value that was scanned before is an array with something in it.
pub(crate) fn is_filled_array(value: &str) -> bool {
    value.strip_prefix('[').is_some_and(|rest| !rest.trim_ascii_start().starts_with(']'))
}

/// Iterator over the values of an array.
pub(crate) struct Elements<'a> {
    scanner: Scanner<'a>,
    done: bool,
}

impl<'a> Iterator for Elements<'a> {
    type Item = Result<&'a str, JsonError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.done {
            return None;
        }
        let start = self.scanner.at;
        let item = self.scanner.value().and_then(|()| {
            let item = self.scanner.text.get(start..self.scanner.at).unwrap_or_default();
            self.scanner.whitespace();
            match self.scanner.next() {
                Some(b',') => self.scanner.whitespace(),
                Some(b']') => self.done = true,
                _ => return Err(self.scanner.error_before("expected ',' or ']'")),
            }
            Ok(item)
        });
        self.done |= item.is_err();
        Some(item)
    }
}

/// A string's value; None if the text is not a JSON string or holds a lone surrogate.
pub(crate) fn string(text: &str) -> Option<Cow<'_, str>> {
    let inner = text.strip_prefix('"')?.strip_suffix('"')?;
    if inner.contains('\\') { unescape(inner).map(Cow::Owned) } else { Some(Cow::Borrowed(inner)) }
}

/// Resolves the escapes of a string's inside.
pub(crate) fn unescape(inner: &str) -> Option<String> {
    let mut out = String::with_capacity(inner.len());
    let mut rest = inner;
    while let Some(at) = memchr::memchr(b'\\', rest.as_bytes()) {
        out.push_str(rest.get(..at)?);
        let escape = *rest.as_bytes().get(at + 1)?;
        rest = rest.get(at + 2..)?;
        out.push(match escape {
            b'"' => '"',
            b'\\' => '\\',
            b'/' => '/',
            b'b' => '\u{8}',
            b'f' => '\u{c}',
            b'n' => '\n',
            b'r' => '\r',
            b't' => '\t',
            b'u' => {
                let unit = u32::from_str_radix(rest.get(..4)?, 16).ok()?;
                rest = rest.get(4..)?;
                if (0xd800..0xdc00).contains(&unit) {
                    let low = rest.strip_prefix("\\u")?;
                    let low_unit = u32::from_str_radix(low.get(..4)?, 16).ok()?;
                    rest = low.get(4..)?;
                    let low_unit = low_unit.checked_sub(0xdc00).filter(|unit| *unit < 0x400)?;
                    char::from_u32(0x10000 + ((unit - 0xd800) << 10) + low_unit)?
                } else {
                    char::from_u32(unit)?
                }
            }
            _ => return None,
        });
    }
    out.push_str(rest);
    Some(out)
}

/// Writes a string as JSON.
pub(crate) fn quote(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn accepts(text: &str) -> bool {
        object(&format!("{{\"a\":{text}}}"), 64, 64).is_ok()
    }

    #[test]
    fn the_grammar_is_that_of_rfc_8259() {
        for good in [
            "0",
            "-0",
            "1.5e-7",
            "1E+2",
            "\"\\ud83d\\ude00\"",
            "\"\\ud83d\"",
            "[]",
            "[ 1 , [] ]",
            "{ }",
            "{\"x\":{\"y\":[null,true,false]}}",
            "123456789012345678901234567890",
            "\"é\"",
        ] {
            assert!(accepts(good), "{good}");
        }
        for bad in [
            "",
            "01",
            "1.",
            ".5",
            "+1",
            "1e",
            "NaN",
            "Infinity",
            "tru",
            "nul",
            "'a'",
            "[1,]",
            "[,]",
            "[1 2]",
            "{\"a\"}",
            "{\"a\":}",
            "{a:1}",
            "{\"a\":1,}",
            "\"\\x\"",
            "\"\\u12g4\"",
            "\"\n\"",
            "\"a",
            "[",
            "{",
            "[}",
            "{\"a\":1]",
            "1,",
            "//",
            "\u{feff}1",
        ] {
            assert!(!accepts(bad), "{bad}");
        }
        for bad in ["", "[]", "1", "{} x", "{}{}", "null"] {
            assert!(object(bad, 64, 64).is_err(), "{bad}");
        }
    }

    #[test]
    fn nesting_is_bounded_without_recursion() {
        let nested = |depth: usize| format!("{}1{}", "[".repeat(depth), "]".repeat(depth));
        assert!(accepts(&nested(63)));
        assert_eq!(
            object(&format!("{{\"a\":{}}}", nested(64)), 64, 64).unwrap_err().what,
            "nested too deep"
        );
        assert!(!accepts(&"[".repeat(1_000_000)));
        assert!(!accepts(&"{\"a\":".repeat(1_000_000)));
    }

    #[test]
    fn the_number_of_members_is_bounded() {
        assert!(object("{\"a\":1,\"b\":2}", 8, 2).is_ok());
        assert_eq!(object("{\"a\":1,\"b\":2}", 8, 1).unwrap_err().what, "too many members");
    }

    #[test]
    fn escaped_keys_are_recognised_and_the_last_of_several_wins() {
        let text = r#"{"a":1,"\u0061":2,"a\ud800":3}"#;
        assert_eq!(Object::parse(text).unwrap().get("a"), Some("2"));
        assert_eq!(unescape(r"\ud83d\ude00\n\/"), Some("😀\n/".into()));
        assert_eq!(unescape(r"\ud83d"), None);
        assert_eq!(unescape(r"\ude00"), None);
    }

    #[test]
    fn array_elements_are_given_as_they_stand() {
        let all = |text| array(text).unwrap().collect::<Result<Vec<_>, _>>();
        assert_eq!(all("[]").unwrap(), Vec::<&str>::new());
        assert_eq!(all("[1, \"a,b\" ,[2]]").unwrap(), ["1", "\"a,b\"", "[2]"]);
        assert!(all("[1 2]").is_err());
    }

    fn json() -> impl Strategy<Value = serde_json::Value> {
        let leaf = prop_oneof![
            Just(serde_json::Value::Null),
            any::<bool>().prop_map(Into::into),
            any::<i64>().prop_map(Into::into),
            any::<f64>().prop_map(Into::into),
            any::<String>().prop_map(Into::into),
        ];
        leaf.prop_recursive(5, 40, 6, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..6).prop_map(Into::into),
                prop::collection::vec((any::<String>(), inner), 0..6)
                    .prop_map(|members| members.into_iter().collect()),
            ]
        })
    }

    proptest! {
        #[test]
        fn whatever_serde_writes_is_accepted_and_cut_right(value in json(), pretty: bool) {
            let whole = serde_json::json!({"k\"é\n": value});
            let text = if pretty { serde_json::to_string_pretty(&whole) } else { serde_json::to_string(&whole) }.unwrap();
            let found = Object::parse(&text).unwrap().get("k\"é\n").unwrap();
            let parsed: serde_json::Value = serde_json::from_str(&text).unwrap();
            prop_assert_eq!(&serde_json::from_str::<serde_json::Value>(found).unwrap(), &parsed["k\"é\n"]);
        }

        #[test]
        fn it_agrees_with_serde_on_damaged_texts(value in json(), at: prop::sample::Index, byte: u8) {
            let mut bytes = serde_json::json!({"k": value}).to_string().into_bytes();
            let at = at.index(bytes.len());
            bytes[at] = byte;
            if let Ok(text) = text(&bytes) {
                let ours = object(text, DEPTH_CEILING, usize::MAX).is_ok();
                let theirs = serde_json::from_str::<std::collections::HashMap<String, serde::de::IgnoredAny>>(text);
                // serde refuses lone surrogates in keys, which the grammar allows.
                prop_assert!(ours == theirs.is_ok() || text.contains("\\u"), "{text} {theirs:?}");
            }
        }

        #[test]
        fn random_bytes_never_panic(bytes: Vec<u8>, text: String) {
            let _ = super::text(&bytes).map(|text| object(text, 16, 16));
            let _ = object(&text, 16, 16);
            let _ = unescape(&text);
            let _ = string(&text);
            if let Ok(elements) = array(&text) { let _ = elements.count(); }
        }

        #[test]
        fn random_json_like_bytes_never_panic(text in r#"[\{\}\[\],:"\\u0-9a-f\- .eE\x00-\x20tn]{0,60}"#) {
            let _ = object(&text, 16, 16);
            if let Ok(elements) = array(&text) { let _ = elements.count(); }
        }
    }
}
