//! Raw JSON of a request to template values: key order kept, the last of equal keys wins.
//!
//! As Python reads it, with two limits that end in an error or a difference nobody should meet:
//! nesting deeper than 128 is refused, and integers beyond 64 bits become floats.

use minijinja::value::{Value, ValueKind};

use crate::Error;

/// Parses one member of the request; `place` is its name in errors.
pub(crate) fn parse(raw: &[u8], place: &str) -> Result<Value, Error> {
    serde_json::from_slice(raw).map_err(|e| Error::request(place, e.to_string()))
}

/// Parses an optional member where `null` is the same as absent.
pub(crate) fn parse_opt(raw: Option<&[u8]>, place: &str) -> Result<Option<Value>, Error> {
    let Some(raw) = raw else { return Ok(None) };
    let value = parse(raw, place)?;
    Ok((!value.is_none()).then_some(value))
}

/// The items of a JSON array, or `None`.
pub(crate) fn items(value: &Value) -> Option<impl Iterator<Item = Value> + use<>> {
    if value.kind() == ValueKind::Seq { value.try_iter().ok() } else { None }
}

/// The member `key` of a JSON object; `None` when absent, not an object, or `null`.
pub(crate) fn member(value: &Value, key: &str) -> Option<Value> {
    raw_member(value, key).filter(|v| !v.is_none())
}

/// The member `key` of a JSON object, `null` included.
pub(crate) fn raw_member(value: &Value, key: &str) -> Option<Value> {
    if !is_object(value) {
        return None;
    }
    value.get_attr(key).ok().filter(|v| !v.is_undefined())
}

/// Whether the value is a JSON object.
pub(crate) fn is_object(value: &Value) -> bool {
    value.kind() == ValueKind::Map
}

/// The members of a JSON object in order; nothing for any other value.
pub(crate) fn members(value: &Value) -> Vec<(String, Value)> {
    if !is_object(value) {
        return Vec::new();
    }
    let Ok(keys) = value.try_iter() else { return Vec::new() };
    keys.filter_map(|key| {
        let v = value.get_item(&key).ok()?;
        Some((key.as_str()?.to_owned(), v))
    })
    .collect()
}

/// An object with these members in this order.
pub(crate) fn object<K: Into<Value>>(members: impl IntoIterator<Item = (K, Value)>) -> Value {
    Value::from_pairs(members)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn order_is_kept_and_the_last_of_equal_keys_wins_in_the_first_ones_place() {
        let v = parse(br#"{"b":1,"a":2,"b":3}"#, "x").unwrap();
        let got: Vec<_> = members(&v).into_iter().map(|(k, v)| (k, v.to_string())).collect();
        assert_eq!(got, [("b".into(), "3".into()), ("a".into(), "2".into())]);
    }

    #[test]
    fn lone_surrogates_and_deep_nesting_are_errors_that_name_the_member() {
        let e = parse(br#"["\ud800"]"#, "messages").unwrap_err().to_string();
        assert!(e.starts_with("messages: "), "{e}");
        let deep = "[".repeat(100_000);
        assert!(parse(deep.as_bytes(), "tools").is_err());
        assert!(parse(b"\"\xff\"", "messages").is_err());
    }
}
