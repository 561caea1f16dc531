//! Watches a reply pass by: first content, tokens, usage, errors, a clean end or a cut.
//!
//! Invariants: bytes are observed, never changed, and copied only where an event is split between
//! two chunks; the observation does not depend on where the stream was split; memory is bounded.
//! Events are searched for keys, not parsed: inside a JSON string a quote stands behind a backslash,
//! so no text that a model writes can look like `"key"`.

use std::sync::LazyLock;

use memchr::memmem::Finder;

use crate::json::{self, Object};

/// The longest line that is looked into; a longer one counts as content.
pub const MAX_LINE_BYTES: usize = 1 << 20;

/// How much of an error event is kept.
pub const MAX_ERROR_BYTES: usize = 4096;

/// Token counts of a reply.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt_tokens: u64,
    /// Tokens generated.
    pub completion_tokens: u64,
    /// Prompt tokens that were not computed for this request, if told.
    pub cached_tokens: Option<u64>,
}

/// What may be done with the bytes held back so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hold {
    /// Nothing was said yet that a repeated request would not say again.
    Hold,
    /// Content (or the end) came: everything may go out.
    Release,
    /// An error event came before any content: the request can be repeated elsewhere.
    Error,
}

/// How a stream ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// With `[DONE]`, or the event that ends a stream in APIs without it.
    Clean,
    /// With an error event (`[DONE]` may have followed).
    Error,
    /// Without either: the connection broke or the engine died.
    Cut,
}

/// What one chunk brought.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    /// Events with content that ended in this chunk.
    pub content_events: u32,
    /// The first content of the stream is among them.
    pub first: bool,
    /// Bytes of the chunk up to the end of its last whole event; what follows is the beginning of
    /// another.
    pub whole: usize,
}

/// What the `event` field says, as far as it matters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Name {
    #[default]
    Plain,
    Error,
    Last,
    /// Another one, which says nothing here.
    Other,
}

/// Names of the event that ends a stream of the Responses and Messages APIs, which pass through.
const LAST_EVENTS: &[&[u8]] =
    &[b"response.completed", b"response.incomplete", b"response.failed", b"message_stop"];

/// Observer of one SSE reply.
#[derive(Debug, Default)]
pub struct Watch {
    /// The beginning of a line whose end has not come yet.
    line: Vec<u8>,
    /// The line is too long to be looked into; its rest is skipped.
    overlong: bool,
    /// Data of an event whose end has not come yet.
    data: Vec<u8>,
    has_data: bool,
    name: Name,
    /// The last chunk ended with a carriage return, of which a line feed may be part.
    after_cr: bool,
    content_events: u64,
    usage: Option<Usage>,
    error: Option<String>,
    error_came_first: bool,
    done: bool,
}

impl Watch {
    /// At the start of a stream.
    pub fn new() -> Watch {
        Watch::default()
    }

    /// Looks at the next bytes.
    pub fn feed(&mut self, chunk: &[u8]) -> Seen {
        let before = self.content_events;
        let mut whole = 0;
        let mut at = 0;
        if std::mem::take(&mut self.after_cr) && chunk.first() == Some(&b'\n') {
            at = 1;
            whole = usize::from(self.between_events());
        }
        // The data of the current event while it lies in this chunk as one line.
        let mut data: Option<&[u8]> = None;
        while let Some(rest) = chunk.get(at..) {
            let Some(end) = memchr::memchr2(b'\n', b'\r', rest) else {
                self.keep(rest);
                break;
            };
            let (line, ending) = rest.split_at_checked(end).unwrap_or_default();
            at += end + if ending.starts_with(b"\r\n") { 2 } else { 1 };
            self.after_cr = ending == b"\r";
            if self.line.is_empty() && !self.overlong && line.len() <= MAX_LINE_BYTES {
                self.line_in_chunk(line, &mut data);
            } else {
                self.keep(line);
                let line = std::mem::take(&mut self.line);
                if std::mem::take(&mut self.overlong) {
                    self.content_events += 1;
                    // Its event goes on.
                    self.has_data = true;
                } else {
                    self.line_from_before(&line, &mut data);
                }
            }
            if self.between_events() && data.is_none() {
                whole = at;
            }
        }
        if let Some(data) = data {
            self.add_data(data);
        }
        Seen {
            content_events: u32::try_from(self.content_events - before).unwrap_or(u32::MAX),
            first: before == 0 && self.content_events > 0,
            whole,
        }
    }

    /// What may be done with what was held back.
    pub fn hold(&self) -> Hold {
        if self.error_came_first {
            Hold::Error
        } else if self.content_events > 0 || self.done {
            Hold::Release
        } else {
            Hold::Hold
        }
    }

    /// Events with content so far.
    pub fn content_events(&self) -> u64 {
        self.content_events
    }

    /// Tokens generated so far: what the engine's usage says, else one for each content event.
    pub fn tokens(&self) -> u64 {
        self.usage.map_or(self.content_events, |usage| usage.completion_tokens)
    }

    /// The last usage seen.
    pub fn usage(&self) -> Option<Usage> {
        self.usage
    }

    /// The data of the first error event, cut to `MAX_ERROR_BYTES`.
    pub fn error(&self) -> Option<&str> {
        self.error.as_deref()
    }

    /// The end of the bytes.
    pub fn finish(&mut self) -> End {
        // A last line without its end still counts, as clients read it.
        self.feed(b"\n\n");
        match (&self.error, self.done) {
            (Some(_), _) => End::Error,
            (None, true) => End::Clean,
            (None, false) => End::Cut,
        }
    }

    fn between_events(&self) -> bool {
        !self.has_data && self.name == Name::Plain && self.line.is_empty() && !self.overlong
    }

    fn keep(&mut self, part: &[u8]) {
        if self.overlong || self.line.len() + part.len() > MAX_LINE_BYTES {
            self.overlong = true;
            self.line = Vec::new();
        } else {
            self.line.extend_from_slice(part);
        }
    }

    /// A line that lies in the chunk.
    fn line_in_chunk<'a>(&mut self, line: &'a [u8], data: &mut Option<&'a [u8]>) {
        match Line::of(line) {
            Line::Data(value) if data.is_none() && !self.has_data => *data = Some(value),
            Line::Data(value) => {
                self.add_all(data);
                self.add_data(value);
            }
            Line::Blank => match data.take() {
                Some(data) => self.event(data),
                None => self.kept_event(),
            },
            Line::Name(name) => self.name = name,
            Line::Other => {}
        }
    }

    /// A line of which a part was kept from an earlier chunk.
    fn line_from_before(&mut self, line: &[u8], data: &mut Option<&[u8]>) {
        match Line::of(line) {
            Line::Data(value) => {
                self.add_all(data);
                self.add_data(value);
            }
            Line::Name(name) => self.name = name,
            Line::Blank | Line::Other => {}
        }
    }

    fn add_all(&mut self, data: &mut Option<&[u8]>) {
        if let Some(data) = data.take() {
            self.add_data(data);
        }
    }

    fn add_data(&mut self, value: &[u8]) {
        // An event beyond the bound is looked into as far as it was kept.
        if self.data.len() + value.len() < MAX_LINE_BYTES {
            if self.has_data {
                self.data.push(b'\n');
            }
            self.data.extend_from_slice(value);
        }
        self.has_data = true;
    }

    fn kept_event(&mut self) {
        if self.has_data {
            let data = std::mem::take(&mut self.data);
            self.has_data = false;
            self.event(&data);
        } else {
            self.name = Name::Plain;
        }
    }

    /// A whole event.
    fn event(&mut self, data: &[u8]) {
        let name = std::mem::take(&mut self.name);
        self.done |= name == Name::Last;
        if data == b"[DONE]" {
            self.done = true;
        } else if name == Name::Error || is_error(data) {
            self.error_came_first |= self.content_events == 0 && !self.done;
            self.error.get_or_insert_with(|| {
                String::from_utf8_lossy(data.get(..MAX_ERROR_BYTES).unwrap_or(data)).into_owned()
            });
        } else {
            self.content_events += u64::from(has_content(data));
            if let Some(usage) = find_usage(data) {
                self.usage = Some(usage);
            }
        }
    }
}

/// `usage` of a reply that is not a stream; of SGLang's own endpoint its `meta_info`.
pub fn read_usage(body: &[u8]) -> Option<Usage> {
    usage_of(&Object::parse(json::text(body).ok()?)?)
}

pub(crate) fn usage_of(reply: &Object<'_>) -> Option<Usage> {
    reply.get("usage").or_else(|| reply.get("meta_info")).and_then(usage)
}

enum Line<'a> {
    Blank,
    Data(&'a [u8]),
    Name(Name),
    /// Comments and fields that do not matter here.
    Other,
}

impl<'a> Line<'a> {
    fn of(line: &'a [u8]) -> Line<'a> {
        if let Some(value) = field(line, b"data") {
            Line::Data(value)
        } else if line.is_empty() {
            Line::Blank
        } else {
            match field(line, b"event") {
                Some(b"error") => Line::Name(Name::Error),
                Some(name) if LAST_EVENTS.contains(&name) => Line::Name(Name::Last),
                Some(_) => Line::Name(Name::Other),
                None => Line::Other,
            }
        }
    }
}

/// The value of a field: what follows the colon, less one space.
fn field<'a>(line: &'a [u8], name: &[u8]) -> Option<&'a [u8]> {
    let rest = line.strip_prefix(name)?;
    if rest.is_empty() {
        return Some(rest);
    }
    let value = rest.strip_prefix(b":")?;
    Some(value.strip_prefix(b" ").unwrap_or(value))
}

/// A key to search for, with its quotes.
struct Key(Finder<'static>);

impl Key {
    fn new(quoted: &'static str) -> Key {
        Key(Finder::new(quoted))
    }

    /// The places where the values of this key start, wherever it stands in the event.
    fn values<'a>(&'a self, data: &'a [u8]) -> impl Iterator<Item = usize> + 'a {
        let blank = |byte: &u8| matches!(byte, b' ' | b'\t' | b'\n' | b'\r');
        let skip = move |at: usize| {
            let rest = data.get(at..).unwrap_or_default();
            at + rest.iter().take_while(|byte| blank(byte)).count()
        };
        self.0.find_iter(data).filter_map(move |at| {
            let colon = skip(at + self.0.needle().len());
            (data.get(colon) == Some(&b':')).then(|| skip(colon + 1))
        })
    }
}

struct Keys {
    error: Finder<'static>,
    usage: Key,
    meta_info: Key,
    /// Keys whose value is a token or more unless it is empty or null; the likely ones first.
    content: [Key; 10],
}

static KEYS: LazyLock<Keys> = LazyLock::new(|| Keys {
    error: Finder::new("\"error\""),
    usage: Key::new("\"usage\""),
    meta_info: Key::new("\"meta_info\""),
    content: [
        "\"content\"",
        "\"text\"",
        "\"finish_reason\"",
        "\"reasoning\"",
        "\"reasoning_content\"",
        "\"tool_calls\"",
        "\"function_call\"",
        "\"refusal\"",
        "\"token_ids\"",
        "\"audio\"",
    ]
    .map(Key::new),
});

/// Whether an event says more than that the stream has begun.
fn has_content(data: &[u8]) -> bool {
    KEYS.content.iter().any(|key| {
        key.values(data).any(|at| {
            let (open, next) = (data.get(at), data.get(at + 1));
            match open {
                Some(b'"') => next.is_some_and(|next| *next != b'"'),
                Some(b'[') => next.is_some_and(|next| *next != b']'),
                Some(b'{') => next.is_some_and(|next| *next != b'}'),
                _ => false,
            }
        })
    })
}

/// `{"error": ...}`, or `{"object": "error", ...}` as some engines have it.
fn is_error(data: &[u8]) -> bool {
    if KEYS.error.find(data).is_none() {
        return false;
    }
    let Some(event) = json::text(data).ok().and_then(Object::parse) else { return false };
    event.get("error").is_some_and(|error| error != "null")
        || event.get("object") == Some("\"error\"")
}

fn find_usage(data: &[u8]) -> Option<Usage> {
    let at = KEYS.usage.values(data).last().or_else(|| KEYS.meta_info.values(data).last())?;
    usage(json::value_at(json::text(data).ok()?, at)?)
}

fn usage(text: &str) -> Option<Usage> {
    let usage = Object::parse(text)?;
    let details = usage.get("prompt_tokens_details").and_then(Object::parse);
    Some(Usage {
        prompt_tokens: usage.number("prompt_tokens")?,
        completion_tokens: usage.number("completion_tokens").unwrap_or(0),
        cached_tokens: details
            .and_then(|details| details.number("cached_tokens"))
            .or_else(|| usage.number("cached_tokens")),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn watch(text: &str) -> Watch {
        let mut watch = Watch::new();
        watch.feed(text.as_bytes());
        watch
    }

    const ROLE: &str = "data: {\"choices\":[{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"},\"finish_reason\":null}]}\n\n";
    const ERROR: &str = "data: {\"error\": {\"message\": \"m\", \"code\": 500}}\n\n";

    #[test]
    fn the_role_chunk_is_held_until_content_comes() {
        for content in [
            r#"{"choices":[{"delta":{"content":"a"}}]}"#,
            r#"{"choices":[{"delta":{"content": "\""}}]}"#,
            r#"{"choices":[{"delta":{"reasoning":"a"}}]}"#,
            r#"{"choices":[{"delta":{"reasoning_content":"a"}}]}"#,
            r#"{"choices":[{"delta":{"tool_calls":[{"index":0}]}}]}"#,
            r#"{"choices":[{"delta":{},"finish_reason":"stop"}]}"#,
            r#"{"choices":[{"text":"a"}]}"#,
            r#"{"choices":[{"text":"","token_ids":[5]}]}"#,
        ] {
            let mut watch = watch(ROLE);
            assert_eq!(watch.hold(), Hold::Hold);
            let seen = watch.feed(format!("data: {content}\n\n").as_bytes());
            assert!(seen.first && seen.content_events == 1, "{content}");
            assert_eq!((watch.hold(), watch.tokens()), (Hold::Release, 1));
        }
        for nothing in [
            r#"{"choices":[{"text":"","finish_reason":null,"tool_calls":[],"audio":null}]}"#,
            r#"{"choices":[],"usage":null}"#,
            r#"{"note":"\"content\":\"a\""}"#,
        ] {
            assert_eq!(watch(&format!("data: {nothing}\n\n")).hold(), Hold::Hold, "{nothing}");
        }
    }

    #[test]
    fn an_event_of_which_only_the_name_has_come_is_not_whole() {
        let mut watch = watch("data: {}\n\n");
        assert_eq!(watch.feed(b"event: response.created\n").whole, 0);
        assert_eq!(watch.feed(b"data: {}\n\n").whole, 10);
        // The last name counts.
        watch.feed(b"event: error\nevent: other\ndata: {}\n\n");
        assert_eq!(watch.error(), None);
    }

    #[test]
    fn a_line_that_is_too_long_is_content_wherever_it_is_split() {
        let long = format!("data: {{\"x\":\"{}\"}}\n", "y".repeat(MAX_LINE_BYTES));
        for length in [long.len(), long.len() - 1, 1 << 16] {
            let mut watch = Watch::new();
            for chunk in long.as_bytes().chunks(length) {
                assert_eq!(watch.feed(chunk).whole, 0, "its event goes on");
            }
            assert_eq!(watch.feed(b"\n").whole, 1);
            assert_eq!((watch.content_events(), watch.error()), (1, None));
        }
    }

    #[test]
    fn an_error_before_content_can_be_made_good_and_one_after_cannot() {
        let mut first = watch(&[ROLE, ERROR, "data: [DONE]\n\n"].concat());
        assert_eq!(first.hold(), Hold::Error);
        assert!(first.error().unwrap().contains("\"m\""));
        assert_eq!(first.finish(), End::Error);
        let mut later = watch(&["data: {\"text\":\"a\"}\n\n", ERROR].concat());
        assert_eq!(later.hold(), Hold::Release);
        assert_eq!(later.finish(), End::Error);
        assert_eq!(watch("event: error\ndata: oops\n\n").hold(), Hold::Error);
        assert_eq!(watch("data: {\"object\":\"error\",\"message\":\"m\"}\n\n").hold(), Hold::Error);
        assert_eq!(watch("data: {\"error\":null,\"text\":\"error\"}\n\n").hold(), Hold::Release);
    }

    #[test]
    fn only_done_is_a_clean_end() {
        assert_eq!(watch("data: {\"text\":\"a\"}\n\n").finish(), End::Cut);
        assert_eq!(watch("").finish(), End::Cut);
        assert_eq!(watch("data: [DONE]\n\n").finish(), End::Clean);
        assert_eq!(watch("data: [DONE]").finish(), End::Clean);
        assert_eq!(watch("data: [DO").finish(), End::Cut);
        assert_eq!(watch("event: message_stop\ndata: {}\n\n").finish(), End::Clean);
        assert_eq!(watch("event: response.created\ndata: {}\n\n").finish(), End::Cut);
        assert_eq!(watch("data: [DONE]\n\n").hold(), Hold::Release);
    }

    #[test]
    fn line_ends_comments_and_several_data_lines_are_read() {
        let mut watch = watch(
            ": ping\r\n\r\nid: 7\r\ndata:{\"choices\":[],\r\ndata: \"usage\":\r\ndata: {\"prompt_tokens\":5,\"completion_tokens\":2,\r\ndata: \"prompt_tokens_details\":{\"cached_tokens\":4}}}\r\n\r\ndata: {\"text\":\"a\"}\r\rdata: [DONE]\n\n",
        );
        let usage = Usage { prompt_tokens: 5, completion_tokens: 2, cached_tokens: Some(4) };
        assert_eq!(watch.usage(), Some(usage));
        assert_eq!((watch.content_events(), watch.tokens()), (1, 2));
        assert_eq!(watch.finish(), End::Clean);
    }

    #[test]
    fn the_end_of_the_last_whole_event_is_told() {
        let mut watch = Watch::new();
        assert_eq!(watch.feed(b"data: 1\n\ndata: 2\n").whole, 9);
        assert_eq!(watch.feed(b"\nda").whole, 1);
        assert_eq!(watch.feed(b"ta: 3\r\n\r").whole, 8);
        assert_eq!(watch.feed(b"\n: ping\n\n").whole, 9);
        assert_eq!(watch.feed(b"data: 4").whole, 0);
    }

    #[test]
    fn a_line_too_long_to_be_kept_counts_as_content() {
        let mut watch = watch("data: {\"text\":\"");
        for _ in 0..(MAX_LINE_BYTES / 1024) {
            watch.feed(&[b'a'; 1024]);
        }
        assert!(watch.line.capacity() <= 2 * MAX_LINE_BYTES);
        assert_eq!(watch.hold(), Hold::Hold);
        let seen = watch.feed(b"\"}\n\ndata: [DONE]\n\n");
        assert!(seen.first);
        assert_eq!(watch.finish(), End::Clean);
    }

    #[test]
    fn usage_of_a_plain_reply_is_read() {
        assert_eq!(
            read_usage(br#"{"usage":{"prompt_tokens":3,"total_tokens":4,"completion_tokens":1,"prompt_tokens_details":null}}"#),
            Some(Usage { prompt_tokens: 3, completion_tokens: 1, cached_tokens: None })
        );
        assert_eq!(read_usage(b"{\"usage\":null}"), None);
        assert_eq!(read_usage(b"\xff"), None);
    }

    fn observe(chunks: &[&[u8]]) -> (u64, u64, Option<Usage>, Option<String>, Hold, End) {
        let mut watch = Watch::new();
        for chunk in chunks {
            watch.feed(chunk);
        }
        let hold = watch.hold();
        let end = watch.finish();
        let error = watch.error().map(Into::into);
        (watch.content_events(), watch.tokens(), watch.usage(), error, hold, end)
    }

    proptest! {
        #[test]
        fn any_bytes_split_anywhere_are_seen_alike(
            parts in prop::collection::vec(prop_oneof![
                prop::sample::select(vec![
                    "data: ", "data:", "\n", "\r\n", "\r", "\n\n", ":", "event: error", "event: message_stop", "[DONE]",
                    "{\"text\":\"a\"}", "{\"error\":{}}", "{\"choices\":[],", "\"usage\":{\"prompt_tokens\":1}}",
                ]).prop_map(|text| text.as_bytes().to_vec()),
                any::<[u8; 2]>().prop_map(|bytes| bytes.to_vec()),
            ], 0..20),
            cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..8),
        ) {
            let bytes = parts.concat();
            let mut at: Vec<usize> = cuts.iter().map(|cut| cut.index(bytes.len() + 1)).collect();
            at.extend([0, bytes.len()]);
            at.sort_unstable();
            let chunks: Vec<&[u8]> = at.windows(2).map(|pair| &bytes[pair[0]..pair[1]]).collect();
            prop_assert_eq!(observe(&chunks), observe(&[&bytes]));
            let single: Vec<&[u8]> = bytes.chunks(1).collect();
            prop_assert_eq!(observe(&single), observe(&[&bytes]));
        }
    }
}
