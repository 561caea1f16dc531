//! The schema made from the written tree, and how the check and the reference page read it.
//!
//! Invariant: what a key allows is worded here once, for messages and documents alike.

use std::sync::LazyLock;

use schemars::Schema;
use schemars::generate::SchemaSettings;
use schemars::transform::RecursiveTransform;
use serde_json::{Map, Value as Json};

use crate::scalar::{Size, Span};
use crate::tree::Value;
use crate::written::Written;

static SCHEMA: LazyLock<Json> = LazyLock::new(|| {
    let settings = SchemaSettings::draft2020_12().with_transform(RecursiveTransform(tidy));
    let mut schema = settings.into_generator().into_root_schema_for::<Written>();
    schema.insert("title".to_owned(), "Pointsman".into());
    schema.to_value()
});

/// The schema as the check reads it.
pub(crate) fn root() -> &'static Json {
    &SCHEMA
}

/// The schema of one worker.
pub(crate) fn worker() -> &'static Json {
    SCHEMA.pointer("/$defs/Worker").unwrap_or(&Json::Null)
}

/// The JSON Schema of the configuration file.
pub fn schema() -> Json {
    let mut schema = SCHEMA.clone();
    strip_order(&mut schema);
    schema
}

/// The order of keys is for the reference page alone.
fn strip_order(schema: &mut Json) {
    match schema {
        Json::Object(object) => {
            object.remove("x-order");
            object.values_mut().for_each(strip_order);
        }
        Json::Array(items) => items.iter_mut().for_each(strip_order),
        _ => {}
    }
}

/// Ranges of plain numbers become what JSON Schema calls them; a default of null says nothing.
fn tidy(schema: &mut Schema) {
    let Some(object) = schema.as_object_mut() else { return };
    if object.get("default").is_some_and(Json::is_null) {
        object.remove("default");
    }
    for (ours, standard) in [("x-minimum", "minimum"), ("x-maximum", "maximum")] {
        if let Some(bound @ Json::Number(_)) = object.get(ours).cloned() {
            object.remove(ours);
            object.insert(standard.to_owned(), bound);
        }
    }
}

/// One way in which a key may be given.
#[derive(Clone, Debug)]
pub(crate) struct Form<'s> {
    schema: &'s Map<String, Json>,
    bounds: [Option<&'s Json>; 2],
}

/// Every way in which a key of this schema may be given.
pub(crate) fn forms(schema: &Json) -> Vec<Form<'_>> {
    let mut out = Vec::new();
    collect(schema, [None, None], &mut out);
    out
}

fn collect<'s>(schema: &'s Json, outer: [Option<&'s Json>; 2], out: &mut Vec<Form<'s>>) {
    let Some(object) = follow(schema).as_object() else { return };
    let bound = |names: [&str; 2]| names.iter().find_map(|name| object.get(*name));
    let bounds = [
        outer[0].or_else(|| bound(["x-minimum", "minimum"])),
        outer[1].or_else(|| bound(["x-maximum", "maximum"])),
    ];
    let choice = object.get("anyOf").or_else(|| object.get("oneOf")).and_then(Json::as_array);
    match choice {
        Some(parts) => parts.iter().for_each(|part| collect(part, bounds, out)),
        None => out.push(Form { schema: object, bounds }),
    }
}

/// The schema itself, or the one it refers to.
pub(crate) fn follow(schema: &Json) -> &Json {
    schema
        .get("$ref")
        .and_then(Json::as_str)
        .and_then(|path| path.strip_prefix('#'))
        .and_then(|path| SCHEMA.pointer(path))
        .unwrap_or(schema)
}

impl<'s> Form<'s> {
    fn text(&self, name: &str) -> Option<&'s str> {
        self.schema.get(name).and_then(Json::as_str)
    }

    pub(crate) fn is(&self, kind: &str) -> bool {
        match self.schema.get("type") {
            Some(Json::String(one)) => one == kind,
            Some(Json::Array(many)) => many.iter().any(|one| one == kind),
            _ => false,
        }
    }

    /// The one word that this form is.
    pub(crate) fn word(&self) -> Option<&'s str> {
        self.text("const")
    }

    pub(crate) fn doc(&self) -> Option<&'s str> {
        self.text("description")
    }

    /// Whether nothing but null may stand here.
    pub(crate) fn is_null(&self) -> bool {
        self.text("type") == Some("null")
    }

    /// The keys of a mapping with fixed keys.
    pub(crate) fn keys(&self) -> Option<&'s Map<String, Json>> {
        self.schema.get("properties").and_then(Json::as_object)
    }

    /// The schema of the values of a mapping with free keys.
    pub(crate) fn values(&self) -> Option<&'s Json> {
        self.schema.get("additionalProperties").filter(|schema| schema.is_object())
    }

    pub(crate) fn items(&self) -> Option<&'s Json> {
        self.schema.get("items")
    }

    pub(crate) fn max_items(&self) -> Option<u64> {
        self.schema.get("x-max-items").and_then(Json::as_u64)
    }

    pub(crate) fn required(&self) -> impl Iterator<Item = &'s str> {
        let names = self.schema.get("required").and_then(Json::as_array);
        names.into_iter().flatten().filter_map(Json::as_str)
    }

    /// Whether this scalar may stand here.
    pub(crate) fn accepts(&self, value: &Value) -> bool {
        if let Some(word) = self.word() {
            return matches!(value, Value::Text(text) if text == word);
        }
        match (self.text("x-kind"), value) {
            (Some("duration"), Value::Text(text)) => {
                Span::parse(text).is_some_and(|span| self.in_range(span.0.as_secs_f64()))
            }
            (Some("size"), Value::Text(text)) => {
                Size::parse(text).is_some_and(|size| self.in_range(size.0 as f64))
            }
            (_, Value::Bool(_)) => self.is("boolean"),
            (_, Value::Int(int)) if self.is("integer") => {
                self.fits(*int) && self.in_range(*int as f64)
            }
            (_, Value::Int(int)) => self.is("number") && self.in_range(*int as f64),
            (_, Value::Float(x)) => self.is("number") && x.is_finite() && self.in_range(*x),
            (_, Value::Text(text)) => match self.text("format") {
                Some("ip") => text.parse::<std::net::IpAddr>().is_ok(),
                _ => self.is("string"),
            },
            _ => false,
        }
    }

    fn fits(&self, int: i128) -> bool {
        match self.text("format") {
            Some("uint8") => u8::try_from(int).is_ok(),
            Some("uint16") => u16::try_from(int).is_ok(),
            Some("uint32") => u32::try_from(int).is_ok(),
            _ => u64::try_from(int).is_ok(),
        }
    }

    fn in_range(&self, measure: f64) -> bool {
        let [min, max] = self.bounds.map(|bound| bound.and_then(|bound| self.measure(bound)));
        min.is_none_or(|min| measure >= min) && max.is_none_or(|max| measure <= max)
    }

    fn measure(&self, bound: &Json) -> Option<f64> {
        match (self.text("x-kind"), bound) {
            (Some("duration"), Json::String(text)) => {
                Span::parse(text).map(|span| span.0.as_secs_f64())
            }
            (Some("size"), Json::String(text)) => Size::parse(text).map(|size| size.0 as f64),
            _ => bound.as_f64(),
        }
    }

    /// What this form is called: `integer`, `duration`, `off`.
    pub(crate) fn kind(&self) -> String {
        if let Some(word) = self.word() {
            return format!("`{word}`");
        }
        if let Some(keys) = self.keys() {
            let names: Vec<&str> = keys.keys().map(String::as_str).collect();
            let required: Vec<&str> = self.required().collect();
            return match names.as_slice() {
                [tag] if required == [*tag] => {
                    let inner = keys.values().flat_map(forms).map(|form| form.kind());
                    format!("`{tag}:` {}", inner.collect::<Vec<_>>().join(" or "))
                }
                _ => "mapping".to_owned(),
            };
        }
        let kind = match self.text("x-kind") {
            Some(kind) => kind,
            None if self.text("format") == Some("ip") => "IP address",
            None if self.is("boolean") => "`true` or `false`",
            None if self.is("integer") => "integer",
            None if self.is("number") => "number",
            None if self.is("array") => "list",
            None if self.is("object") => "mapping",
            None => "text",
        };
        kind.to_owned()
    }

    /// The range in words, empty where there is none.
    pub(crate) fn range(&self) -> String {
        let measured = ["integer", "number"].iter().any(|kind| self.is(kind));
        if self.word().is_some() || !(measured || self.text("x-kind").is_some()) {
            return String::new();
        }
        let [min, max] = self.bounds.map(|bound| {
            bound.map(|bound| bound.as_str().map_or_else(|| bound.to_string(), str::to_owned))
        });
        match (min, max) {
            (Some(min), Some(max)) => format!("from {min} to {max}"),
            (Some(min), None) => format!("of at least {min}"),
            (None, Some(max)) => format!("of at most {max}"),
            (None, None) => String::new(),
        }
    }

    /// What is allowed, for a message: `an integer from 1 to 16`.
    fn wording(&self) -> String {
        let range = self.range();
        let range = if range.is_empty() { range } else { format!(" {range}") };
        match self.kind().as_str() {
            "duration" => format!("a duration{range}, such as 250ms or 30s"),
            "size" => format!("a number of bytes{range}, such as 65536 or 16MiB"),
            kind @ ("integer" | "IP address") => format!("an {kind}{range}"),
            kind if kind.starts_with('`') => kind.to_owned(),
            kind => format!("a {kind}{range}"),
        }
    }
}

/// What a key with these forms allows, for a message.
pub(crate) fn wording(forms: &[Form<'_>]) -> String {
    let parts: Vec<String> =
        forms.iter().filter(|form| !form.is_null()).map(Form::wording).collect();
    either(&parts)
}

/// `a`, `a or b`, `a, b or c`.
pub(crate) fn either(parts: &[String]) -> String {
    match parts {
        [] => String::new(),
        [one] => one.clone(),
        [head @ .., last] => format!("{} or {last}", head.join(", ")),
    }
}
