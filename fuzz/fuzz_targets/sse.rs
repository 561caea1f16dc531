//! Arbitrary bytes as an engine's stream of events.
//!
//! What is seen does not depend on where the stream is split, and it ends as a literal reader of the
//! format says. Up to where an event is whole another one can be put behind it.
#![no_main]

use libfuzzer_sys::fuzz_target;
use pointsman_wire::sse::{End, Hold, Usage, Watch};
use serde_json::{Map, Value};

/// Events that end a stream without `[DONE]`.
const LAST: &[&str] =
    &["response.completed", "response.incomplete", "response.failed", "message_stop"];

/// Deeper than serde reads, so that the reader below has no say.
const DEEP: usize = 100;

#[derive(Debug, PartialEq)]
struct Saw {
    events: u64,
    tokens: u64,
    usage: Option<Usage>,
    error: Option<String>,
    hold: Hold,
    whole: usize,
    end: End,
}

/// Feeds the stream in pieces of these lengths, over and over; 0 is all that is left.
fn watch(stream: &[u8], lengths: &[usize]) -> Saw {
    let mut watch = Watch::new();
    let (mut at, mut whole, mut events, mut firsts) = (0, 0, 0, 0);
    let mut lengths = lengths.iter().cycle();
    while at < stream.len() {
        let length = match lengths.next() {
            None | Some(0) => stream.len() - at,
            Some(length) => (*length).min(stream.len() - at),
        };
        let seen = watch.feed(&stream[at..at + length]);
        assert!(seen.whole <= length);
        if seen.whole > 0 {
            whole = at + seen.whole;
        }
        events += u64::from(seen.content_events);
        firsts += u64::from(seen.first);
        at += length;
    }
    assert_eq!((events, firsts), (watch.content_events(), u64::from(events > 0)));
    let (tokens, hold) = (watch.tokens(), watch.hold());
    let (usage, error) = (watch.usage(), watch.error().map(str::to_owned));
    Saw { events, tokens, usage, error, hold, whole, end: watch.finish() }
}

/// What a literal reader says: whether an event is begun at the end of the text, and how it ended.
struct Read {
    begun: bool,
    end: Option<End>,
}

fn read(stream: &[u8]) -> Read {
    let text = String::from_utf8_lossy(stream).replace("\r\n", "\n").replace('\r', "\n");
    let (mut data, mut name): (Option<String>, Option<String>) = (None, None);
    let (mut done, mut error, mut known) = (false, false, true);
    let whole_lines = text.matches('\n').count();
    let mut begun = false;
    for (number, line) in text.split('\n').chain([""]).enumerate() {
        if line.is_empty() {
            let name = name.take();
            if let Some(data) = data.take() {
                done |= name.as_deref().is_some_and(|name| LAST.contains(&name));
                if data == "[DONE]" {
                    done = true;
                } else if name.as_deref() == Some("error") {
                    error = true;
                } else {
                    let object = serde_json::from_str::<Map<String, Value>>(&data);
                    error |= object.is_ok_and(|object| {
                        object.get("error").is_some_and(|error| !error.is_null())
                            || object.get("object").is_some_and(|kind| kind == "error")
                    });
                    known &= !data.contains('\\') && data.matches(['[', '{']).count() < DEEP;
                    known &= !data.contains('\u{fffd}');
                }
            }
        } else {
            let (field, value) = line.split_once(':').unwrap_or((line, ""));
            let value = value.strip_prefix(' ').unwrap_or(value);
            match field {
                "data" => match &mut data {
                    Some(data) => *data = format!("{data}\n{value}"),
                    None => data = Some(value.to_owned()),
                },
                "event" => name = Some(value.to_owned()),
                _ => {}
            }
        }
        if number < whole_lines {
            begun = data.is_some() || name.is_some();
        }
    }
    let end = match (error, done) {
        (true, _) => End::Error,
        (false, true) => End::Clean,
        (false, false) => End::Cut,
    };
    Read { begun, end: known.then_some(end) }
}

fuzz_target!(|input: (u8, u8, u8, &[u8])| {
    let (one, two, three, stream) = input;
    let at_once = watch(stream, &[0]);
    assert_eq!(watch(stream, &[1]), at_once, "byte by byte");
    let lengths = [one, two, three].map(|length| usize::from(length).max(1));
    assert_eq!(watch(stream, &lengths), at_once, "{lengths:?}");
    assert_eq!(watch(stream, &[lengths[0], stream.len()]), at_once, "{} and the rest", lengths[0]);

    let read = self::read(stream);
    if let Some(end) = read.end {
        assert_eq!(at_once.end, end);
    }
    let whole = &stream[..at_once.whole];
    assert!(!self::read(whole).begun, "an event is begun at {}", at_once.whole);
    assert!(!whole.ends_with(b"\r") || stream.get(whole.len()) != Some(&b'\n'));
});
