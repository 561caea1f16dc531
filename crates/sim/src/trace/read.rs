//! Readers of the trace formats, with detection by the first line.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::path::Path;

use serde::Deserialize;

use super::{Format, PIECE_TOKENS, Piece, Request, Start, Trace};
use crate::rng::mix;

/// Requests of one trace at most.
const MAX_REQUESTS: usize = 20_000_000;
/// Some three hundred years; twice that is beyond what the clock of a replay can count.
const LATEST_MS: f64 = 1e13;

/// Length of a bucket of equal timestamps when no later one follows.
const LAST_BUCKET: u64 = 3_000_000_000;
/// Tokens of one prompt at most.
const MAX_TOKENS: u32 = 100_000_000;

const NANOS_OF_MS: f64 = 1e6;

/// Why a trace could not be read.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// The file could not be read.
    #[error("{what}: {source}")]
    Io {
        /// File, or `line N`.
        what: String,
        /// The system's reason.
        source: io::Error,
    },
    /// The first line is of no known format.
    #[error(
        "not a known trace format: expected JSON lines with `hash_ids` (mooncake) or `session_id` \
         (sessions), or CSV with the header `TIMESTAMP,ContextTokens,GeneratedTokens` (azure)"
    )]
    Unknown,
    /// A line does not fit its format.
    #[error("line {line}: {reason}")]
    Line {
        /// From 1.
        line: usize,
        /// What is wrong.
        reason: String,
    },
    /// There is nothing in it.
    #[error("the trace has no requests")]
    Empty,
}

/// Reads a trace file.
///
/// # Errors
/// When it cannot be read or a line makes no sense.
pub fn open(path: &Path) -> Result<Trace, TraceError> {
    let name = |source| TraceError::Io { what: path.display().to_string(), source };
    read(BufReader::new(File::open(path).map_err(name)?))
}

/// Reads a trace in whichever format it is.
///
/// # Errors
/// When it cannot be read or a line makes no sense.
pub fn read(from: impl BufRead) -> Result<Trace, TraceError> {
    let mut reader: Option<Reader> = None;
    for (at, text) in from.lines().enumerate() {
        let line = at + 1;
        let io = |source| TraceError::Io { what: format!("line {line}"), source };
        let text = text.map_err(io)?;
        let text = text.trim();
        if text.is_empty() {
            continue;
        }
        let read = match &mut reader {
            Some(reader) => reader.line(text),
            None => {
                let format = detect(text).ok_or(TraceError::Unknown)?;
                let first = reader.insert(Reader::new(format));
                // The header of a CSV holds no request.
                if format == Format::Azure { Ok(()) } else { first.line(text) }
            }
        };
        read.map_err(|reason| TraceError::Line { line, reason })?;
    }
    let Some(Reader { format, mut requests, .. }) = reader else { return Err(TraceError::Empty) };
    if requests.is_empty() {
        return Err(TraceError::Empty);
    }
    if format == Format::Mooncake {
        spread_buckets(&mut requests);
    }
    Ok(Trace { format, requests })
}

fn detect(line: &str) -> Option<Format> {
    if line.eq_ignore_ascii_case("TIMESTAMP,ContextTokens,GeneratedTokens") {
        return Some(Format::Azure);
    }
    let members: serde_json::Map<String, serde_json::Value> = serde_json::from_str(line).ok()?;
    match (members.contains_key("session_id"), members.contains_key("hash_ids")) {
        (true, _) => Some(Format::Session),
        (false, true) => Some(Format::Mooncake),
        (false, false) => None,
    }
}

#[derive(Deserialize)]
struct Row {
    #[serde(default)]
    timestamp: Option<f64>,
    #[serde(default)]
    delay: Option<f64>,
    #[serde(default)]
    session_id: Option<String>,
    input_length: u32,
    output_length: u32,
    hash_ids: Vec<u64>,
}

struct Reader {
    format: Format,
    requests: Vec<Request>,
    /// Number and last turn of each session.
    sessions: HashMap<String, (u32, usize)>,
    /// First timestamp of a CSV, in nanoseconds of its calendar.
    origin: Option<u128>,
}

impl Reader {
    fn new(format: Format) -> Reader {
        Reader { format, requests: Vec::new(), sessions: HashMap::new(), origin: None }
    }

    fn line(&mut self, text: &str) -> Result<(), String> {
        if self.requests.len() >= MAX_REQUESTS {
            return Err(format!("more than {MAX_REQUESTS} requests"));
        }
        let request = match self.format {
            Format::Azure => self.azure(text)?,
            Format::Mooncake => self.mooncake(&row(text)?)?,
            Format::Session => self.turn(row(text)?)?,
        };
        if request.input_tokens == 0 || request.input_tokens > MAX_TOKENS {
            return Err(format!("a prompt of {} tokens", request.input_tokens));
        }
        self.requests.push(request);
        Ok(())
    }

    fn mooncake(&self, row: &Row) -> Result<Request, String> {
        let at = nanos(row.timestamp.ok_or("`timestamp` is missing")?)?;
        let before = self.requests.last().map_or(0, start_of);
        if at < before {
            return Err("timestamps go backwards".to_owned());
        }
        Ok(Request {
            start: Start::At(at),
            pieces: pieces(row.input_length, &row.hash_ids)?,
            input_tokens: row.input_length,
            output_tokens: row.output_length.max(1),
            session: None,
        })
    }

    fn turn(&mut self, row: Row) -> Result<Request, String> {
        let index = self.requests.len();
        let name = row.session_id.ok_or("`session_id` is missing")?;
        let count = self.sessions.len() as u32;
        let (start, earlier, session) = match self.sessions.get(&name) {
            None => (Start::At(nanos(row.timestamp.unwrap_or(0.0))?), 0, count),
            Some(&(session, request)) => {
                let delay = nanos(row.delay.ok_or("`delay` is missing")?)?;
                let earlier = self.requests[request].input_tokens;
                (Start::After { request, delay }, earlier, session)
            }
        };
        self.sessions.insert(name, (session, index));
        Ok(Request {
            start,
            pieces: pieces(row.input_length, &row.hash_ids)?,
            input_tokens: earlier.saturating_add(row.input_length),
            output_tokens: row.output_length.max(1),
            session: Some(session),
        })
    }

    fn azure(&mut self, text: &str) -> Result<Request, String> {
        let mut fields = text.split(',');
        let mut field = |name: &str| fields.next().ok_or_else(|| format!("`{name}` is missing"));
        let at = calendar(field("TIMESTAMP")?)?;
        let number = |name: &str, text: &str| {
            text.trim().parse::<u32>().map_err(|error| format!("`{name}`: {error}"))
        };
        let input_tokens = number("ContextTokens", field("ContextTokens")?)?;
        let output_tokens = number("GeneratedTokens", field("GeneratedTokens")?)?.max(1);
        let origin = *self.origin.get_or_insert(at);
        let at = at.checked_sub(origin).ok_or("timestamps go backwards")?;
        let at = u64::try_from(at).map_err(|_| "centuries after the first line")?;
        // Nothing is known of the content, so nothing repeats.
        let own = (self.requests.len() as u64) << 32;
        let count = u64::from(input_tokens.div_ceil(PIECE_TOKENS));
        let ids: Vec<u64> = (0..count).map(|piece| mix(own | piece)).collect();
        Ok(Request {
            start: Start::At(at),
            pieces: pieces(input_tokens, &ids)?,
            input_tokens,
            output_tokens,
            session: None,
        })
    }
}

fn row(text: &str) -> Result<Row, String> {
    serde_json::from_str(text).map_err(|error| error.to_string())
}

fn nanos(ms: f64) -> Result<u64, String> {
    if !(0.0..=LATEST_MS).contains(&ms) {
        return Err(format!("a time of {ms:e} ms; it may be from 0 to {LATEST_MS:e}"));
    }
    Ok((ms * NANOS_OF_MS).round() as u64)
}

fn start_of(request: &Request) -> u64 {
    match request.start {
        Start::At(at) => at,
        Start::After { .. } => 0,
    }
}

/// Whole pieces and a last one cut to the length.
fn pieces(input_tokens: u32, hash_ids: &[u64]) -> Result<Box<[Piece]>, String> {
    let count = input_tokens.div_ceil(PIECE_TOKENS) as usize;
    if hash_ids.len() != count {
        return Err(format!("{} hash ids for {input_tokens} tokens", hash_ids.len()));
    }
    let piece = |(at, &hash_id): (usize, &u64)| Piece {
        hash_id,
        tokens: PIECE_TOKENS.min(input_tokens - at as u32 * PIECE_TOKENS),
    };
    Ok(hash_ids.iter().enumerate().map(piece).collect())
}

/// Requests with one timestamp are spread evenly up to the next timestamp.
fn spread_buckets(requests: &mut [Request]) {
    let mut first = 0;
    while first < requests.len() {
        let at = start_of(&requests[first]);
        let same = requests[first..].iter().take_while(|r| start_of(r) == at).count() as u64;
        let next = requests.get(first + same as usize).map(start_of);
        let length = next.map_or(LAST_BUCKET, |next| (next - at).min(LAST_BUCKET));
        for place in 0..same {
            let offset = (u128::from(length) * u128::from(place) / u128::from(same)) as u64;
            requests[first + place as usize].start = Start::At(at + offset);
        }
        first += same as usize;
    }
}

/// Nanoseconds of `YYYY-MM-DD hh:mm:ss[.fraction]` since the year 0, in the proleptic calendar.
fn calendar(text: &str) -> Result<u128, String> {
    let wrong = || format!("`TIMESTAMP`: {text:?} is not `YYYY-MM-DD hh:mm:ss.fraction`");
    let (date, time) = text.trim().split_once([' ', 'T']).ok_or_else(wrong)?;
    let part = |text: &str| text.parse::<u64>().map_err(|_| wrong());
    let date: Vec<u64> = date.split('-').map(part).collect::<Result<_, _>>()?;
    let (clock, fraction) = time.split_once('.').unwrap_or((time, "0"));
    let clock: Vec<u64> = clock.split(':').map(part).collect::<Result<_, _>>()?;
    let ([year, month @ 1..=12, day @ 1..=31], [hour, minute, second]) = (&date[..], &clock[..])
    else {
        return Err(wrong());
    };
    if fraction.len() > 9 || !fraction.bytes().all(|byte| byte.is_ascii_digit()) || *year > 9999 {
        return Err(wrong());
    }
    let fraction = part(&format!("{fraction:0<9}"))?;
    // Days before a month in a year that begins in March.
    let (year, month) = if *month > 2 { (*year, month - 3) } else { (year.max(&1) - 1, month + 9) };
    let days = year * 365 + year / 4 - year / 100 + year / 400 + (month * 153 + 2) / 5 + day;
    let seconds = ((days * 24 + hour) * 60 + minute) * 60 + second;
    Ok(u128::from(seconds) * 1_000_000_000 + u128::from(fraction))
}
