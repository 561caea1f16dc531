//! Written forms of values that are more than a number: durations, sizes, and things that may be off.
//!
//! Their schemas carry `x-kind`, by which the check and the reference page know them.

use std::borrow::Cow;
use std::time::Duration;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error as _};

/// A duration, written as `250ms`, `30s` or `5m`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span(pub Duration);

impl Span {
    pub(crate) const fn secs(secs: u64) -> Self {
        Span(Duration::from_secs(secs))
    }

    /// Reads `250ms`, `1m 30s`.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        humantime::parse_duration(text).ok().map(Span)
    }
}

impl Serialize for Span {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&humantime::format_duration(self.0))
    }
}

impl<'de> Deserialize<'de> for Span {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        Span::parse(&text).ok_or_else(|| D::Error::custom("not a duration"))
    }
}

impl JsonSchema for Span {
    fn schema_name() -> Cow<'static, str> {
        "Span".into()
    }

    fn inline_schema() -> bool {
        true
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({ "type": "string", "x-kind": "duration" })
    }
}

/// A number of bytes, written as a number or as `64KiB`, `16MiB`, `1GiB`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Size(pub u64);

const UNITS: [(&str, u32); 3] = [("GiB", 30), ("MiB", 20), ("KiB", 10)];

impl Size {
    pub(crate) const fn mib(mib: u64) -> Self {
        Size(mib << 20)
    }

    /// Reads `64KiB` and the like, and a plain number.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        for (unit, shift) in UNITS {
            if let Some(number) = text.strip_suffix(unit) {
                let number: u64 = number.trim().parse().ok()?;
                return number.checked_mul(1 << shift).map(Size);
            }
        }
        text.parse().ok().map(Size)
    }
}

impl std::fmt::Display for Size {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let whole = |&(_, shift): &(&str, u32)| self.0 > 0 && self.0.is_multiple_of(1 << shift);
        match UNITS.iter().find(|unit| whole(unit)) {
            Some((unit, shift)) => write!(f, "{}{unit}", self.0 >> shift),
            None => write!(f, "{}", self.0),
        }
    }
}

impl Serialize for Size {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Size {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Form {
            Number(u64),
            Text(String),
        }
        match Form::deserialize(deserializer)? {
            Form::Number(bytes) => Ok(Size(bytes)),
            Form::Text(text) => {
                Size::parse(&text).ok_or_else(|| D::Error::custom("not a size in bytes"))
            }
        }
    }
}

impl JsonSchema for Size {
    fn schema_name() -> Cow<'static, str> {
        "Size".into()
    }

    fn inline_schema() -> bool {
        true
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({ "type": ["integer", "string"], "x-kind": "size" })
    }
}

/// The word `off`, or a value.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
#[schemars(inline)]
pub enum OffOr<T> {
    /// `off`
    Off(OffWord),
    /// A value.
    On(T),
}

/// The word `off`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
#[schemars(inline)]
pub enum OffWord {
    /// `off`
    Off,
}

impl<T> OffOr<T> {
    pub(crate) const OFF: Self = OffOr::Off(OffWord::Off);

    /// The value, where it is not off.
    pub(crate) fn on(self) -> Option<T> {
        match self {
            OffOr::Off(_) => None,
            OffOr::On(value) => Some(value),
        }
    }
}
