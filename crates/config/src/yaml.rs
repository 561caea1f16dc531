//! YAML (and so JSON) into a tree. Scalars are read as YAML 1.2 reads them: `off` and `yes` are text.

use std::fmt;
use std::sync::Arc;

use serde::Deserialize;
use serde::de::{Deserializer, MapAccess, SeqAccess, Visitor};
use serde_saphyr::options::NonFiniteFloatPolicy;
use serde_saphyr::{Error, Location, Spanned};

use crate::tree::{Node, Origin, Value};

/// Why a text is not YAML, in one line, and where.
#[derive(Debug)]
pub(crate) struct Refused {
    pub(crate) message: String,
    pub(crate) line: u64,
    pub(crate) column: u64,
}

/// Reads the text of a file; every node knows its line.
pub(crate) fn parse_file(text: &str, name: &Arc<str>) -> Result<Node, Refused> {
    parse(text, &|location| Origin::File {
        name: name.clone(),
        line: location.line(),
        column: location.column(),
    })
}

/// Reads one value of a variable or flag; every node has that origin.
pub(crate) fn parse_value(text: &str, origin: &Origin) -> Result<Node, Refused> {
    parse(text, &|_| origin.clone())
}

fn parse(text: &str, origin: &dyn Fn(Location) -> Origin) -> Result<Node, Refused> {
    let options = serde_saphyr::options! {
        with_snippet: false,
        strict_booleans: true,
        leading_zero_numbers_as_strings: true,
        underscored_numbers_as_strings: true,
        non_finite_float_policy: NonFiniteFloatPolicy::PassThrough,
    };
    let raw: Spanned<Raw> =
        serde_saphyr::from_str_with_options(text, options).map_err(|error| refused(&error))?;
    Ok(raw.value.into_node(raw.referenced, origin))
}

fn refused(error: &Error) -> Refused {
    let location = error.location().unwrap_or(Location::UNKNOWN);
    let message = match error {
        Error::DuplicateMappingKey { key, .. } => {
            format!("the key `{}` is written twice", key.as_deref().unwrap_or_default())
        }
        other => {
            let text = other.to_string();
            let end = text.rfind(" at line ").unwrap_or(text.len());
            text[..end].to_owned()
        }
    };
    Refused { message, line: location.line(), column: location.column() }
}

/// What serde sees; becomes a `Node` as soon as the origin is known.
enum Raw {
    Scalar(Value),
    List(Vec<Spanned<Raw>>),
    Map(Vec<(String, Spanned<Raw>)>),
}

impl Raw {
    fn into_node(self, location: Location, origin: &dyn Fn(Location) -> Origin) -> Node {
        let node = |part: Spanned<Raw>| part.value.into_node(part.referenced, origin);
        let value = match self {
            Raw::Scalar(value) => value,
            Raw::List(items) => Value::List(items.into_iter().map(node).collect()),
            Raw::Map(entries) => {
                Value::Map(entries.into_iter().map(|(key, part)| (key, node(part))).collect())
            }
        };
        Node { value, origin: origin(location) }
    }
}

impl<'de> Deserialize<'de> for Raw {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(AnyValue)
    }
}

struct AnyValue;

impl<'de> Visitor<'de> for AnyValue {
    type Value = Raw;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a YAML value")
    }

    fn visit_unit<E>(self) -> Result<Raw, E> {
        Ok(Raw::Scalar(Value::Null))
    }

    fn visit_bool<E>(self, value: bool) -> Result<Raw, E> {
        Ok(Raw::Scalar(Value::Bool(value)))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Raw, E> {
        Ok(Raw::Scalar(Value::Int(value.into())))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Raw, E> {
        Ok(Raw::Scalar(Value::Int(value.into())))
    }

    fn visit_f64<E>(self, value: f64) -> Result<Raw, E> {
        Ok(Raw::Scalar(Value::Float(value)))
    }

    fn visit_str<E>(self, value: &str) -> Result<Raw, E> {
        Ok(Raw::Scalar(Value::Text(value.to_owned())))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut access: A) -> Result<Raw, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = access.next_element()? {
            items.push(item);
        }
        Ok(Raw::List(items))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<Raw, A::Error> {
        let mut entries = Vec::new();
        while let Some(entry) = access.next_entry()? {
            entries.push(entry);
        }
        Ok(Raw::Map(entries))
    }
}
