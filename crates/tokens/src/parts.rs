//! One part of a message's content: text, a reference to a tool, or something that is no text.

use minijinja::value::{Value, ValueKind};

use crate::Error;
use crate::conversation::MARK;
use crate::json::{is_object, member, members, object};

/// Kinds of parts that are no text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Media {
    Image,
    Audio,
    Video,
    Other,
}

/// Members of a part that have a meaning; all others reach the template as they are.
const KNOWN: [&str; 18] = [
    "audio_embeds",
    "audio_url",
    "closed",
    "data",
    "file",
    "image_embeds",
    "image_pil",
    "image_url",
    "input_audio",
    "name",
    "prompt_cache_breakpoint",
    "refusal",
    "text",
    "thinking",
    "type",
    "uuid",
    "video_embeds",
    "video_url",
];

/// Members that make a part without a type (or with a `uuid`) a part of that kind, in the order
/// they are looked for.
const MEMBERS: [(&str, Media); 9] = [
    ("image_url", Media::Image),
    ("image_pil", Media::Image),
    ("image_embeds", Media::Image),
    ("audio_embeds", Media::Audio),
    ("video_embeds", Media::Video),
    ("prompt_embeds", Media::Other),
    ("audio_url", Media::Audio),
    ("input_audio", Media::Audio),
    ("video_url", Media::Video),
];

/// One part.
#[derive(Clone, Debug)]
pub(crate) enum Part {
    /// Text with members that the template may look at.
    Text { text: String, extra: Vec<(String, Value)> },
    /// The name of a tool, expanded by the template.
    ToolReference(Value),
    /// No text; `value` is what the template sees.
    Media { kind: Media, value: Value },
}

impl Part {
    pub(crate) fn plain(text: &str) -> Part {
        Part::Text { text: text.to_owned(), extra: Vec::new() }
    }

    pub(crate) fn media(&self) -> Option<Media> {
        if let Part::Media { kind, .. } = self { Some(*kind) } else { None }
    }

    pub(crate) fn is_text(&self) -> bool {
        matches!(self, Part::Text { .. })
    }

    pub(crate) fn text(&self) -> Option<String> {
        match self {
            Part::Text { text, .. } => Some(text.clone()),
            Part::ToolReference(name) => name.as_str().map(str::to_owned),
            Part::Media { .. } => None,
        }
    }

    /// Appends to a text part and returns its text as it was.
    pub(crate) fn append(&mut self, tag: &str) -> Option<String> {
        let Part::Text { text, .. } = self else { return None };
        let before = text.clone();
        text.push_str(tag);
        Some(before)
    }

    /// The part without its first line if that starts with `start`; `None` when nothing is left.
    pub(crate) fn without_first_line(self, start: &str) -> Option<Part> {
        match self {
            Part::Text { text, extra } if text.starts_with(start) => {
                let (_, rest) = text.split_once('\n')?;
                (!rest.is_empty()).then(|| Part::Text { text: rest.to_owned(), extra })
            }
            other => Some(other),
        }
    }

    /// What the template sees. The first part that is no text while `mark` holds becomes the mark.
    pub(crate) fn to_value(&self, mark: &mut bool) -> Value {
        let text_part = |text: &str| {
            [("type".to_owned(), Value::from("text")), ("text".to_owned(), Value::from(text))]
        };
        match self {
            Part::Text { text, extra } => {
                object(text_part(text).into_iter().chain(extra.iter().cloned()))
            }
            Part::ToolReference(name) => {
                object([("type", Value::from("tool_reference")), ("name", name.clone())])
            }
            Part::Media { .. } if std::mem::take(mark) => object(text_part(MARK)),
            Part::Media { value, .. } => value.clone(),
        }
    }
}

/// Reads one part; `None` for a part that is skipped (text that is `null`).
pub(crate) fn read_part(part: &Value, place: &str) -> Result<Option<Part>, Error> {
    if let Some(text) = part.as_str() {
        return Ok(Some(Part::plain(text)));
    }
    if !is_object(part) {
        return Err(Error::request(place, "must be a string or an object"));
    }
    let kind = member(part, "type");
    let kind = match &kind {
        None => None,
        Some(k) => match k.as_str() {
            None => return Err(Error::request(place, "type must be a string")),
            kind => kind,
        },
    };
    let by_member = kind.is_none() || member(part, "uuid").is_some();
    if by_member {
        if let Some((_, media)) = MEMBERS.iter().find(|(key, _)| part_has(part, key)) {
            return Ok(Some(media_part(part, *media, kind)));
        }
        return Err(Error::request(place, "has no type"));
    }
    let key = match kind.unwrap_or_default() {
        "text" | "input_text" | "output_text" => "text",
        "refusal" => "refusal",
        "thinking" => "thinking",
        "tool_reference" => {
            let name = member(part, "name").unwrap_or_else(|| Value::from(()));
            return Ok(Some(Part::ToolReference(name)));
        }
        other => return Ok(Some(media_part(part, media_of(other), Some(other)))),
    };
    match member(part, key) {
        None => Ok(None),
        Some(text) if text.kind() == ValueKind::String => Ok(Some(Part::Text {
            text: text.as_str().unwrap_or_default().to_owned(),
            extra: extra_members(part),
        })),
        Some(_) => Err(Error::request(&format!("{place}.{key}"), "must be a string")),
    }
}

fn part_has(part: &Value, key: &str) -> bool {
    crate::json::raw_member(part, key).is_some()
}

fn media_of(kind: &str) -> Media {
    match kind {
        "image_url" | "input_image" | "image_pil" | "image_embeds" => Media::Image,
        "audio_url" | "input_audio" | "audio_embeds" => Media::Audio,
        "video_url" | "video_embeds" => Media::Video,
        _ => Media::Other,
    }
}

fn media_part(part: &Value, media: Media, kind: Option<&str>) -> Part {
    let kind = match media {
        Media::Image => "image",
        Media::Audio => "audio",
        Media::Video => "video",
        Media::Other => kind.unwrap_or("other"),
    };
    let head = [("type".to_owned(), Value::from(kind))];
    Part::Media { kind: media, value: object(head.into_iter().chain(extra_members(part))) }
}

fn extra_members(part: &Value) -> Vec<(String, Value)> {
    members(part).into_iter().filter(|(k, _)| !KNOWN.contains(&k.as_str())).collect()
}
