//! What a mock engine says: a deterministic function of the prompt's tokens, the choice and the
//! seed, so that every engine gives the same answer to the same request.
//!
//! Text is made of plain words, so that it re-tokenises to the same ids in the next turn.

use pointsman_tokens::Model;
use serde_json::{Map, Value, json};

use crate::content::digest;
use crate::rng::{Rng, mix};

/// Fewest and most tokens of an answer that is not cut, its end-of-sequence token included.
const NATURAL_TOKENS: std::ops::Range<u64> = 16..96;

/// Why generation ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Ending {
    /// The token limit.
    Length,
    /// The end-of-sequence token.
    Stop,
    /// This stop string, or the number of a stop token.
    StopAt(Value),
}

/// One generated token.
#[derive(Clone, Debug)]
pub(super) struct Piece {
    pub(super) id: u32,
    /// What a client sees of it.
    pub(super) text: String,
    /// Its own text.
    pub(super) token: String,
}

/// A call of a function that an answer consists of.
#[derive(Clone, Debug)]
pub(super) struct Call {
    pub(super) id: String,
    pub(super) name: String,
}

/// One choice's whole answer.
#[derive(Clone, Debug)]
pub(super) struct Answer {
    pub(super) pieces: Vec<Piece>,
    pub(super) ending: Ending,
    /// The pieces are the arguments of this call.
    pub(super) call: Option<Call>,
    /// Seed of its log probabilities.
    pub(super) seed: u64,
}

/// What an answer depends on.
pub(super) struct Ask<'a> {
    pub(super) prompt: &'a [u32],
    pub(super) choice: u32,
    pub(super) seed: Option<i64>,
    pub(super) max_tokens: u32,
    pub(super) min_tokens: u32,
    pub(super) ignore_eos: bool,
    pub(super) stop: &'a [String],
    pub(super) stop_token_ids: &'a [u32],
    pub(super) keep_stop: bool,
    /// The function to call, as it stands in the request's `tools`.
    pub(super) call: Option<&'a Value>,
}

impl Answer {
    /// Makes another answer of the same length, as an engine does that read someone else's KV.
    pub(super) fn garble(&mut self, words: &Words) {
        let mut rng = Rng::new(mix(self.seed ^ 0x00c0_ffee));
        for piece in self.pieces.iter_mut().filter(|piece| !piece.text.is_empty()) {
            *piece = words.piece(rng.bits());
        }
    }

    /// Ends with the first token.
    pub(super) fn end_at_once(&mut self, words: &Words) {
        self.call = None;
        self.ending = Ending::Stop;
        let id = words.eos.unwrap_or_default();
        self.pieces = vec![Piece { id, text: String::new(), token: String::new() }];
    }

    pub(super) fn text(&self) -> String {
        self.pieces.iter().map(|piece| piece.text.as_str()).collect()
    }

    pub(super) fn ids(&self) -> Vec<u32> {
        self.pieces.iter().map(|piece| piece.id).collect()
    }
}

/// The words that answers are made of.
pub(super) struct Words {
    ids: Vec<u32>,
    texts: Vec<String>,
    eos: Option<u32>,
}

impl Words {
    pub(super) fn of(model: &Model) -> Words {
        let ids = model.plain_words().to_vec();
        let first: Vec<u32> = ids.first().copied().into_iter().collect();
        let before = model.decode(&first, true);
        let text = |&id: &u32| {
            let both: Vec<u32> = first.iter().copied().chain([id]).collect();
            model.decode(&both, true).split_off(before.len())
        };
        Words { texts: ids.iter().map(text).collect(), ids, eos: model.eos_id() }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.ids.is_empty()
    }

    fn piece(&self, draw: u64) -> Piece {
        let at = (draw % self.ids.len() as u64) as usize;
        let text = self.texts[at].clone();
        Piece { id: self.ids[at], token: text.clone(), text }
    }

    /// Other candidates for a token: texts with falling log probabilities.
    pub(super) fn rivals(&self, seed: u64, at: usize, count: usize) -> Vec<(Piece, f64)> {
        let own = log_probability(seed, at);
        let rival = |k: usize| {
            let draw = mix(seed ^ mix((at * 64 + k) as u64 + 1));
            (self.piece(draw), own - 0.0625 * (k + 1) as f64)
        };
        (0..count).map(rival).collect()
    }
}

/// The log probability of the token at this place.
pub(super) fn log_probability(seed: u64, at: usize) -> f64 {
    let draw = mix(seed.wrapping_add(at as u64)) % 4096;
    -0.125 - draw as f64 / 1024.0
}

pub(super) fn answer(words: &Words, model: &Model, ask: &Ask<'_>) -> Answer {
    let seed = digest(ask.prompt)
        ^ mix(u64::from(ask.choice) + 1)
        ^ mix(ask.seed.unwrap_or(0).unsigned_abs() << 8);
    let mut answer = match ask.call {
        Some(tool) => call(model, tool, seed),
        None => prose(words, ask, seed),
    };
    // The end-of-sequence token of a call is not among its pieces.
    let tokens = answer.pieces.len() as u64 + u64::from(answer.call.is_some());
    if tokens > u64::from(ask.max_tokens) {
        answer.pieces.truncate(ask.max_tokens as usize);
        answer.ending = Ending::Length;
    }
    if answer.call.is_none() {
        apply_stops(&mut answer, ask);
    }
    answer
}

fn prose(words: &Words, ask: &Ask<'_>, seed: u64) -> Answer {
    let mut rng = Rng::new(seed);
    let natural = NATURAL_TOKENS.start + rng.below(NATURAL_TOKENS.end - NATURAL_TOKENS.start);
    let length = match ask.ignore_eos {
        true => ask.max_tokens,
        false => ask.max_tokens.min((natural as u32).max(ask.min_tokens + 1)),
    };
    let mut pieces: Vec<Piece> = (0..length).map(|_| words.piece(rng.bits())).collect();
    let mut ending = Ending::Length;
    if !ask.ignore_eos && length < ask.max_tokens {
        ending = Ending::Stop;
        if let (Some(last), Some(eos)) = (pieces.last_mut(), words.eos) {
            *last = Piece { id: eos, text: String::new(), token: String::new() };
        }
    }
    Answer { pieces, ending, call: None, seed }
}

/// Cuts an answer at the first stop string or stop token.
fn apply_stops(answer: &mut Answer, ask: &Ask<'_>) {
    let mut text = String::new();
    for at in 0..answer.pieces.len() {
        let id = answer.pieces[at].id;
        let before = text.len();
        text.push_str(&answer.pieces[at].text);
        let enough = at as u32 + 1 > ask.min_tokens;
        let found = ask
            .stop
            .iter()
            .filter(|stop| !stop.is_empty())
            .find_map(|stop| text.find(stop.as_str()).map(|start| (start, stop.as_str())));
        let (keep, reason) = match found {
            _ if !enough => continue,
            Some((start, stop)) if ask.keep_stop => (start + stop.len(), json!(stop)),
            Some((start, stop)) => (start, json!(stop)),
            None if ask.stop_token_ids.contains(&id) => (before, json!(id)),
            None => continue,
        };
        answer.pieces.truncate(at + 1);
        show_only(&mut answer.pieces, keep);
        answer.ending = Ending::StopAt(reason);
        return;
    }
}

/// Hides the text after the first `keep` bytes.
fn show_only(pieces: &mut [Piece], mut keep: usize) {
    for piece in pieces {
        piece.text.truncate(keep.min(piece.text.len()));
        keep -= piece.text.len();
    }
}

fn call(model: &Model, tool: &Value, seed: u64) -> Answer {
    let function = &tool["function"];
    let name = function["name"].as_str().unwrap_or_default().to_owned();
    let mut rng = Rng::new(seed);
    let arguments = instance(&function["parameters"], &mut rng).to_string();
    let ids = model.encode_prompt(&arguments, Some(false)).map(|e| e.ids.to_vec());
    let ids = ids.unwrap_or_default();
    let mut pieces = Vec::with_capacity(ids.len());
    let mut shown = 0;
    for (at, &id) in ids.iter().enumerate() {
        let upto = model.decode(&ids[..=at], true);
        let text = upto.get(shown..).unwrap_or_default().to_owned();
        shown = upto.len();
        pieces.push(Piece { id, token: text.clone(), text });
    }
    let id = format!("chatcmpl-tool-{:016x}{:016x}", rng.bits(), rng.bits());
    Answer { pieces, ending: Ending::Stop, call: Some(Call { id, name }), seed }
}

/// A value of a JSON schema, as plain as can be.
fn instance(schema: &Value, rng: &mut Rng) -> Value {
    if let Some(first) = schema["enum"].get(0) {
        return first.clone();
    }
    match schema["type"].as_str() {
        Some("string") => json!(format!("value {}", rng.below(100))),
        Some("integer" | "number") => json!(rng.below(100)),
        Some("boolean") => json!(rng.below(2) == 1),
        Some("array") => json!([instance(&schema["items"], rng)]),
        Some("object") | None if schema.is_object() => {
            let properties = schema["properties"].as_object();
            let members = properties.into_iter().flatten();
            Value::Object(members.map(|(key, of)| (key.clone(), instance(of, rng))).collect())
        }
        Some("null") => Value::Null,
        _ => Value::Object(Map::new()),
    }
}
