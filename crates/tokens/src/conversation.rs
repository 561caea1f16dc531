//! `messages` and `tools` of a request, shaped as vLLM hands them to the chat template.
//!
//! The shape (key order, what is dropped, what is joined, `null` against absent) is vLLM's own:
//! templates print these values, so each difference would be a different prompt. Parts that are no
//! text are counted and the place of the first is kept. Not here: the template itself.

use minijinja::value::{Value, ValueKind};

use crate::json::{self, is_object, items, member, members, object, raw_member};
use crate::parts::{Media, Part, read_part};
use crate::{Error, Partial};

/// What a template iterates over in a message's content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ContentFormat {
    /// `content` is a string; text parts are joined by newlines.
    Text,
    /// `content` is a list of parts.
    Parts,
}

/// Stands where the first part that is no text would be. A noncharacter-like private code point:
/// should a prompt contain it, the exact prefix merely ends there.
pub(crate) const MARK: &str = "\u{10fffd}";

/// First line of system text that clients of one kind send and vLLM drops.
const BILLING_HEADER: &str = "x-anthropic-billing-header";

#[derive(Clone, Debug)]
enum Content {
    Text(String),
    Parts(Vec<Part>),
}

#[derive(Clone, Debug)]
struct Message {
    role: String,
    content: Content,
    /// Further members in the order vLLM adds them.
    rest: Vec<(&'static str, Value)>,
}

/// The messages of a request.
#[derive(Clone, Debug)]
pub(crate) struct Conversation {
    messages: Vec<Message>,
    /// Set when a part is no text; `text_tokens` is not filled in here.
    pub(crate) partial: Option<Partial>,
}

impl Conversation {
    /// Reads the `messages` array.
    pub(crate) fn parse(raw: &[u8], format: ContentFormat) -> Result<Conversation, Error> {
        let list = json::parse(raw, "messages")?;
        let Some(list) = items(&list) else {
            return Err(Error::request("messages", "must be an array"));
        };
        let mut messages = Vec::new();
        let mut partial = None;
        for (i, item) in list.enumerate() {
            let place = format!("messages[{i}]");
            messages.push(read_message(&item, &place, format, &mut partial)?);
        }
        if messages.is_empty() {
            return Err(Error::request("messages", "must not be empty"));
        }
        Ok(Conversation { messages, partial })
    }

    /// Turns the developer role into the system role and merges the system messages, which vLLM
    /// does for templates that do not know the developer role.
    pub(crate) fn without_developer_role(mut self) -> Conversation {
        if !self.messages.iter().any(|m| m.role == "developer") {
            return self;
        }
        for m in self.messages.iter_mut().filter(|m| m.role == "developer") {
            m.role = "system".to_owned();
            m.rest.retain(|(key, _)| *key != "tools");
        }
        let systems = self.messages.iter().filter(|m| m.role == "system").count();
        if systems == 1 && self.messages.first().is_some_and(|m| m.role == "system") {
            return self;
        }
        let (system, others): (Vec<_>, Vec<_>) =
            self.messages.into_iter().partition(|m| m.role == "system");
        let texts: Vec<String> =
            system.iter().map(|m| m.content.text()).filter(|t| !t.is_empty()).collect();
        let merged = Message {
            role: "system".to_owned(),
            content: Content::Text(texts.join("\n\n")),
            rest: Vec::new(),
        };
        self.messages = std::iter::once(merged).chain(others).collect();
        self
    }

    /// Appends to the last message's text. Returns that text as it was, or `None` when the message
    /// has no text.
    pub(crate) fn tag_last(&mut self, tag: &str) -> Option<String> {
        match &mut self.messages.last_mut()?.content {
            Content::Text(text) => {
                let before = text.clone();
                text.push_str(tag);
                Some(before)
            }
            Content::Parts(parts) => parts.iter_mut().rev().find_map(|p| p.append(tag)),
        }
    }

    /// The list that the template sees. With `mark` the first part that is no text is a text part
    /// that holds [`MARK`].
    pub(crate) fn to_value(&self, mark: bool) -> Value {
        let mut unmarked = mark;
        let messages = self.messages.iter().map(|m| m.to_value(&mut unmarked));
        Value::from(messages.collect::<Vec<_>>())
    }
}

impl Content {
    fn text(&self) -> String {
        match self {
            Content::Text(text) => text.clone(),
            Content::Parts(parts) => {
                let texts = parts.iter().filter(|p| p.is_text()).filter_map(Part::text);
                texts.collect::<Vec<_>>().join("\n")
            }
        }
    }
}

impl Message {
    fn to_value(&self, mark: &mut bool) -> Value {
        let content = match &self.content {
            Content::Text(text) => Value::from(text.as_str()),
            Content::Parts(parts) => {
                Value::from(parts.iter().map(|p| p.to_value(mark)).collect::<Vec<_>>())
            }
        };
        let head = [("role", Value::from(self.role.as_str())), ("content", content)];
        object(head.into_iter().chain(self.rest.iter().cloned()))
    }
}

fn read_message(
    message: &Value,
    place: &str,
    format: ContentFormat,
    partial: &mut Option<Partial>,
) -> Result<Message, Error> {
    if !is_object(message) {
        return Err(Error::request(place, "must be an object"));
    }
    let Some(role) = member(message, "role").and_then(|r| r.as_str().map(str::to_owned)) else {
        return Err(Error::request(place, "has no role"));
    };
    let mut parts = Vec::new();
    match member(message, "content") {
        None => {}
        Some(content) if content.kind() == ValueKind::String => {
            parts.push(Part::plain(content.as_str().unwrap_or_default()));
        }
        Some(content) => {
            let Some(list) = items(&content) else {
                let what = "must be a string or an array of parts";
                return Err(Error::request(&format!("{place}.content"), what));
            };
            for (j, part) in list.enumerate() {
                let place = format!("{place}.content[{j}]");
                parts.extend(read_part(&part, &place)?);
            }
        }
    }
    if role == "system" {
        parts = parts.into_iter().filter_map(|p| p.without_first_line(BILLING_HEADER)).collect();
    }
    let content = shape_content(parts, &role, format, partial);
    let rest = read_rest(message, &role, place)?;
    Ok(Message { role, content, rest })
}

fn shape_content(
    parts: Vec<Part>,
    role: &str,
    format: ContentFormat,
    partial: &mut Option<Partial>,
) -> Content {
    let mut media = false;
    for kind in parts.iter().filter_map(Part::media) {
        media = true;
        count(partial.get_or_insert_default(), kind);
    }
    // A tool's answer is a string for every template, unless it refers to tools or holds media.
    let tool_text = role == "tool" && parts.iter().all(Part::is_text);
    if format == ContentFormat::Parts && !tool_text {
        return Content::Parts(parts);
    }
    let keep_empty = format == ContentFormat::Parts;
    let mut texts: Vec<String> = parts.iter().filter_map(Part::text).collect();
    texts.retain(|t| keep_empty || !t.is_empty());
    if media {
        // vLLM puts the placeholders that the text does not have before the text.
        texts.insert(0, MARK.to_owned());
    }
    Content::Text(texts.join("\n"))
}

fn count(partial: &mut Partial, media: Media) {
    match media {
        Media::Image => partial.images += 1,
        Media::Audio => partial.audio += 1,
        Media::Video => partial.videos += 1,
        Media::Other => partial.others += 1,
    }
}

fn read_rest(
    message: &Value,
    role: &str,
    place: &str,
) -> Result<Vec<(&'static str, Value)>, Error> {
    let mut rest = Vec::new();
    if role == "assistant" {
        if let Some(calls) = member(message, "tool_calls") {
            let calls = read_tool_calls(&calls, &format!("{place}.tool_calls"))?;
            if !calls.is_empty() {
                rest.push(("tool_calls", Value::from(calls)));
            }
        }
        let reasoning = member(message, "reasoning");
        if let Some(r) = reasoning.or_else(|| member(message, "reasoning_content")) {
            rest.push(("reasoning", r.clone()));
            rest.push(("reasoning_content", r));
        }
    } else if role == "tool"
        && let Some(id) = raw_member(message, "tool_call_id")
    {
        rest.push(("tool_call_id", id));
    }
    for key in ["name", "task"] {
        if let Some(v) = member(message, key).filter(|v| v.kind() == ValueKind::String) {
            rest.push((key, v));
        }
    }
    if role == "developer" {
        let tools = raw_member(message, "tools").unwrap_or_else(|| Value::from(()));
        rest.push(("tools", tools));
    }
    Ok(rest)
}

fn read_tool_calls(calls: &Value, place: &str) -> Result<Vec<Value>, Error> {
    let Some(list) = items(calls) else {
        return Err(Error::request(place, "must be an array"));
    };
    list.enumerate()
        .map(|(i, call)| {
            let Some(function) = member(&call, "function").filter(is_object) else {
                let place = format!("{place}[{i}]");
                return Err(Error::request(&place, "must be an object with a function"));
            };
            let arguments = read_arguments(member(&function, "arguments"));
            let function = ordered(&function, &["arguments", "name"], ("arguments", &arguments));
            Ok(ordered(&call, &["id", "function", "type"], ("function", &function)))
        })
        .collect()
}

/// Templates want a mapping: the JSON in a string is parsed, anything else becomes an empty one.
fn read_arguments(arguments: Option<Value>) -> Value {
    let parsed = match arguments {
        Some(v) if v.kind() == ValueKind::String => {
            v.as_str().and_then(|s| json::parse(s.as_bytes(), "arguments").ok())
        }
        other => other,
    };
    parsed.filter(is_object).unwrap_or_else(|| object::<&str>([]))
}

/// The object with the `first` keys moved to the front (those it has, and `set`'s), `set` replaced.
fn ordered(value: &Value, first: &[&str], set: (&str, &Value)) -> Value {
    let mut rest = members(value);
    let mut out: Vec<(String, Value)> = Vec::with_capacity(rest.len() + 1);
    for &key in first {
        let at = rest.iter().position(|(k, _)| k == key);
        let had = at.map(|at| rest.remove(at).1);
        match had {
            _ if key == set.0 => out.push((key.to_owned(), set.1.clone())),
            Some(v) => out.push((key.to_owned(), v)),
            None => {}
        }
    }
    out.extend(rest);
    object(out)
}

/// Reads `tools` into what the template sees: only the fields that vLLM knows, in its order.
pub(crate) fn read_tools(raw: Option<&[u8]>) -> Result<Option<Value>, Error> {
    let Some(tools) = json::parse_opt(raw, "tools")? else { return Ok(None) };
    let Some(list) = items(&tools) else {
        return Err(Error::request("tools", "must be an array"));
    };
    let tools = list
        .enumerate()
        .map(|(i, tool)| {
            let Some(function) = member(&tool, "function").filter(is_object) else {
                let what = "must be an object with a function";
                return Err(Error::request(&format!("tools[{i}]"), what));
            };
            Ok(read_tool(&tool, &function))
        })
        .collect::<Result<Vec<_>, _>>()?;
    Ok(Some(Value::from(tools)))
}

fn read_tool(tool: &Value, function: &Value) -> Value {
    let null = || Value::from(());
    let of = |key| member(function, key);
    let deferred = member(tool, "defer_loading");
    let mut f = vec![
        ("name", of("name").unwrap_or_else(null)),
        ("description", of("description").unwrap_or_else(null)),
        ("parameters", of("parameters").unwrap_or_else(null)),
    ];
    f.extend(of("strict").map(|v| ("strict", v)));
    let inner = of("defer_loading").or_else(|| deferred.clone());
    f.extend(inner.map(|v| ("defer_loading", v)));
    let kind = member(tool, "type").unwrap_or_else(|| Value::from("function"));
    let mut out = vec![("type", kind), ("function", object(f))];
    out.extend(deferred.map(|v| ("defer_loading", v)));
    object(out)
}
