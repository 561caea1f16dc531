//! A request body, scanned once: the spans of its top-level members, and typed readings of those
//! that matter to routing. The bytes themselves are never rewritten here (see `splice`).

use std::borrow::Cow;

use bytes::Bytes;
use bytestring::ByteString;

use crate::json::{self, JsonError, Member};

/// Bounds on what a client may send. (The body's size is bounded where it is read.)
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Deepest nesting of arrays and objects, the outermost object included; at most 256.
    pub max_depth: usize,
    /// Most top-level members.
    pub max_members: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Limits { max_depth: 128, max_members: 1024 }
    }
}

/// Why a body was refused. `Display` is the message for the client; `field` its `param`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct BodyError {
    /// What is wrong and where.
    pub message: String,
    /// The offending top-level field, if it is one.
    pub field: Option<&'static str>,
}

impl From<JsonError> for BodyError {
    fn from(error: JsonError) -> Self {
        BodyError {
            message: format!("The request body is not a valid JSON object: {error}."),
            field: None,
        }
    }
}

/// A JSON object as the client sent it, with the spans of its members.
#[derive(Clone, Debug)]
pub struct Body {
    text: ByteString,
    members: Vec<Member>,
}

/// The prompt of a completion request.
#[derive(Clone, Debug, PartialEq)]
pub enum Prompt<'a> {
    /// One string.
    Text(Cow<'a, str>),
    /// One list of token ids.
    Ids(Vec<u32>),
    /// Several strings.
    TextBatch(Vec<Cow<'a, str>>),
    /// Several lists of token ids.
    IdsBatch(Vec<Vec<u32>>),
    /// No `prompt` member, or null (the engine says what it thinks of that).
    Absent,
}

impl Prompt<'_> {
    /// How many prompts these are.
    pub fn count(&self) -> usize {
        match self {
            Prompt::Text(_) | Prompt::Ids(_) => 1,
            Prompt::TextBatch(texts) => texts.len(),
            Prompt::IdsBatch(lists) => lists.len(),
            Prompt::Absent => 0,
        }
    }
}

impl Body {
    /// Checks the whole body as strict JSON and notes where its members are.
    pub fn parse(bytes: Bytes, limits: &Limits) -> Result<Body, BodyError> {
        let text = ByteString::try_from(bytes).map_err(json::not_utf8)?;
        let members = json::object(&text, limits.max_depth, limits.max_members)?;
        Ok(Body { text, members })
    }

    /// The client's bytes.
    pub fn bytes(&self) -> &Bytes {
        self.text.as_bytes()
    }

    /// The JSON text of a top-level member; of several with one name the last, as engines read it.
    pub fn raw(&self, name: &str) -> Option<&str> {
        json::find(self.as_str(), &self.members, name)
    }

    /// A member that is present and not null.
    pub fn has(&self, name: &str) -> bool {
        self.raw(name).is_some_and(|raw| raw != "null")
    }

    /// A string member. None if absent, of another type, or holding a lone surrogate.
    pub fn text(&self, name: &str) -> Option<Cow<'_, str>> {
        json::string(self.raw(name)?)
    }

    /// An integer member, read as leniently as the engines do (`16`, `16.0`, `"16"`).
    pub fn integer(&self, name: &str) -> Option<i64> {
        integer(self.raw(name)?)
    }

    /// A boolean member, read as leniently as the engines do (`true`, `1`, `"true"`).
    pub fn flag(&self, name: &str) -> Option<bool> {
        flag(self.raw(name)?)
    }

    /// `model`.
    pub fn model(&self) -> Option<Cow<'_, str>> {
        self.text("model")
    }

    /// `stream`, false unless set.
    pub fn stream(&self) -> bool {
        self.flag("stream").unwrap_or(false)
    }

    /// `n`, 1 unless set.
    pub fn n(&self) -> u32 {
        self.integer("n").map_or(1, |n| u32::try_from(n.max(1)).unwrap_or(u32::MAX))
    }

    /// The most new tokens asked for: `max_completion_tokens`, else `max_tokens`.
    pub fn max_tokens(&self) -> Option<u32> {
        let limit = self.integer("max_completion_tokens").or_else(|| self.integer("max_tokens"))?;
        Some(u32::try_from(limit.max(0)).unwrap_or(u32::MAX))
    }

    /// `user`.
    pub fn user(&self) -> Option<Cow<'_, str>> {
        self.text("user")
    }

    /// `cache_salt`.
    pub fn cache_salt(&self) -> Option<Cow<'_, str>> {
        self.text("cache_salt")
    }

    /// `prompt` in its four forms.
    pub fn prompt(&self) -> Result<Prompt<'_>, BodyError> {
        self.prompt_at("prompt")
    }

    /// A prompt under another name.
    pub(crate) fn prompt_at(&self, name: &str) -> Result<Prompt<'_>, BodyError> {
        let Some(raw) = self.raw(name) else { return Ok(Prompt::Absent) };
        match raw.as_bytes().first() {
            Some(b'n') => Ok(Prompt::Absent),
            Some(b'"') => Ok(Prompt::Text(prompt_text(raw)?)),
            Some(b'[') => prompt_list(raw),
            _ => Err(bad_prompt("it is neither a string nor a list")),
        }
    }

    /// The JSON text of `messages`.
    pub fn messages_raw(&self) -> Option<&str> {
        self.raw("messages")
    }

    /// The JSON text of `tools`.
    pub fn tools_raw(&self) -> Option<&str> {
        self.raw("tools")
    }

    /// The whole text.
    pub(crate) fn as_str(&self) -> &str {
        &self.text
    }

    /// The members in the order they came.
    pub(crate) fn members(&self) -> &[Member] {
        &self.members
    }
}

fn bad_prompt(why: &str) -> BodyError {
    BodyError {
        message: format!(
            "`prompt` must be a string, a list of token ids, a list of strings or a list of lists \
             of token ids: {why}."
        ),
        field: Some("prompt"),
    }
}

fn prompt_text(raw: &str) -> Result<Cow<'_, str>, BodyError> {
    json::string(raw).ok_or_else(|| bad_prompt("a string holds a lone surrogate"))
}

fn prompt_list(raw: &str) -> Result<Prompt<'_>, BodyError> {
    let inside = raw.get(1..).unwrap_or_default().trim_start_matches([' ', '\t', '\n', '\r']);
    match inside.as_bytes().first() {
        Some(b'"') => {
            let texts = json::array(raw)?.map(|item| match item? {
                item if item.starts_with('"') => prompt_text(item),
                _ => Err(bad_prompt("a list of strings holds something else")),
            });
            Ok(Prompt::TextBatch(texts.collect::<Result<_, _>>()?))
        }
        Some(b'[') => {
            let lists = json::array(raw)?.map(|item| match item? {
                item if item.starts_with('[') => ids(item),
                _ => Err(bad_prompt("a list of lists holds something else")),
            });
            Ok(Prompt::IdsBatch(lists.collect::<Result<_, _>>()?))
        }
        _ => Ok(Prompt::Ids(ids(raw)?)),
    }
}

/// Reads an array of token ids. The text is a valid JSON array already, so only what is in it is
/// looked at.
fn ids(raw: &str) -> Result<Vec<u32>, BodyError> {
    let inside = raw.strip_prefix('[').and_then(|raw| raw.strip_suffix(']')).unwrap_or_default();
    let mut ids = Vec::with_capacity(inside.len() / 6);
    let (mut id, mut digits) = (0u64, false);
    // The comma at the end closes the last one.
    for byte in inside.bytes().chain([b',']) {
        match byte {
            b'0'..=b'9' => {
                (id, digits) = (id * 10 + u64::from(byte - b'0'), true);
                if id > u64::from(u32::MAX) {
                    return Err(bad_prompt("a token id is beyond 32 bits"));
                }
            }
            b',' =>
            {
                #[allow(clippy::cast_possible_truncation)]
                if std::mem::take(&mut digits) {
                    ids.push(std::mem::take(&mut id) as u32);
                }
            }
            b' ' | b'\n' | b'\r' | b'\t' => {}
            b'-' => return Err(bad_prompt("a token id is negative")),
            b'.' | b'e' | b'E' if digits => return Err(bad_prompt("a token id is not an integer")),
            _ => return Err(bad_prompt("a list of token ids holds something else")),
        }
    }
    Ok(ids)
}

fn integer(raw: &str) -> Option<i64> {
    let text = json::string(raw).unwrap_or(Cow::Borrowed(raw));
    let text = text.trim();
    text.parse().ok().or_else(|| {
        let float: f64 = text.parse().ok()?;
        #[allow(clippy::cast_possible_truncation)]
        (float.fract() == 0.0 && float.abs() < 9e15).then_some(float as i64)
    })
}

fn flag(raw: &str) -> Option<bool> {
    let text = json::string(raw).unwrap_or(Cow::Borrowed(raw)).to_ascii_lowercase();
    match text.as_str() {
        "true" | "1" | "1.0" | "t" | "yes" | "y" | "on" => Some(true),
        "false" | "0" | "0.0" | "f" | "no" | "n" | "off" => Some(false),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn body(text: &str) -> Body {
        Body::parse(Bytes::copy_from_slice(text.as_bytes()), &Limits::default()).unwrap()
    }

    #[test]
    fn fields_are_read_as_the_engines_read_them() {
        let body = body(
            r#"{"model":"m\u00e9","stream":"True","n":"2","max_tokens":16.0,"user":null,"seed":1e400,"x":[true]}"#,
        );
        assert_eq!(body.model().as_deref(), Some("mé"));
        assert!(body.stream());
        assert_eq!(body.n(), 2);
        assert_eq!(body.max_tokens(), Some(16));
        assert_eq!(body.user(), None);
        assert!(!body.has("user") && body.has("x") && !body.has("y"));
        assert_eq!(body.integer("seed"), None);
        assert_eq!(body.raw("x"), Some("[true]"));
        assert_eq!(body.flag("x"), None);
    }

    #[test]
    fn max_completion_tokens_comes_before_max_tokens() {
        assert_eq!(body(r#"{"max_tokens":5,"max_completion_tokens":7}"#).max_tokens(), Some(7));
        assert_eq!(body(r#"{"max_tokens":5,"max_completion_tokens":null}"#).max_tokens(), Some(5));
        assert_eq!(body(r#"{"max_tokens":-1}"#).max_tokens(), Some(0));
        assert_eq!(body(r#"{"max_tokens":99999999999}"#).max_tokens(), Some(u32::MAX));
        assert_eq!(body(r#"{"max_tokens":"many"}"#).max_tokens(), None);
    }

    #[test]
    fn of_duplicate_keys_the_last_counts() {
        let body = body(r#"{"model":"a","mod\u0065l":"b"}"#);
        assert_eq!(body.model().as_deref(), Some("b"));
    }

    #[test]
    fn all_four_forms_of_a_prompt_are_read() {
        let prompt = |text: &str| body(&format!("{{\"prompt\":{text}}}")).prompt().unwrap().count();
        assert_eq!(body(r#"{"prompt":"a\n"}"#).prompt(), Ok(Prompt::Text("a\n".into())));
        assert_eq!(
            body("{\"prompt\":[ 1 ,22,\n4294967295 ]}").prompt(),
            Ok(Prompt::Ids(vec![1, 22, u32::MAX]))
        );
        assert_eq!(
            body(r#"{"prompt":["a","b"]}"#).prompt(),
            Ok(Prompt::TextBatch(vec!["a".into(), "b".into()]))
        );
        assert_eq!(
            body(r#"{"prompt":[[1],[2,3], []]}"#).prompt(),
            Ok(Prompt::IdsBatch(vec![vec![1], vec![2, 3], vec![]]))
        );
        assert_eq!(body(r#"{"prompt":null}"#).prompt(), Ok(Prompt::Absent));
        assert_eq!(body("{}").prompt(), Ok(Prompt::Absent));
        assert_eq!((prompt("[]"), prompt("[[]]"), prompt("[\"a\"]")), (1, 1, 1));
    }

    #[test]
    fn a_bad_prompt_is_refused_with_the_field_and_the_reason() {
        for (text, why) in [
            ("5", "neither a string nor a list"),
            ("{}", "neither a string nor a list"),
            ("[-1]", "negative"),
            ("[1.0]", "not an integer"),
            ("[1e3]", "not an integer"),
            ("[4294967296]", "beyond 32 bits"),
            ("[1,\"a\"]", "something else"),
            ("[1,[2]]", "something else"),
            ("[true]", "something else"),
            ("[\"a\",1]", "something else"),
            ("[[1],2]", "something else"),
            ("[[1],[\"a\"]]", "something else"),
            ("\"\\ud800\"", "lone surrogate"),
        ] {
            let error = body(&format!("{{\"prompt\":{text}}}")).prompt().unwrap_err();
            assert_eq!(error.field, Some("prompt"));
            assert!(error.message.contains(why), "{text}: {error}");
        }
    }

    #[test]
    fn what_is_not_a_json_object_is_refused_with_the_place() {
        for (bytes, why) in [
            (&b"{not json"[..], "expected a string as key at byte 1"),
            (b"[]", "expected a JSON object at byte 0"),
            (b"", "expected a JSON object at byte 0"),
            (b"{\"a\":\"\xff\"}", "invalid UTF-8 at byte 6"),
        ] {
            let error =
                Body::parse(Bytes::from_static(bytes), &Limits::default()).unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        }
    }

    proptest! {
        #[test]
        fn token_ids_read_back(lists in prop::collection::vec(prop::collection::vec(any::<u32>(), 0..9), 1..4)) {
            let text = format!("{{\"prompt\":{lists:?}}}");
            let batch = body(&text);
            prop_assert_eq!(batch.prompt(), Ok(Prompt::IdsBatch(lists.clone())));
            let text = format!("{{\"prompt\":{:?}}}", lists[0]);
            let single = body(&text);
            prop_assert_eq!(single.prompt(), Ok(Prompt::Ids(lists[0].clone())));
        }

        #[test]
        fn any_json_as_prompt_is_read_or_refused(text in r#"[\[\]",0-9a \-.]{0,30}"#) {
            if let Ok(body) = Body::parse(format!("{{\"prompt\":{text}}}").into(), &Limits::default()) {
                let _ = body.prompt();
            }
        }
    }
}
