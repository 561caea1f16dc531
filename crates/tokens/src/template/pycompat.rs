//! Methods of Python's strings where minijinja-contrib has none or differs; the rest is theirs.

use std::borrow::Cow;

use minijinja::value::{Kwargs, Tuple, Value, ValueKind, from_args};
use minijinja::{Error, ErrorKind, State};

/// Whitespace as `str.strip` and `str.split` know it: Unicode's and the four separators.
fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)
}

/// `str.strip()`.
pub(crate) fn trim(text: &str) -> &str {
    text.trim_matches(is_space)
}

/// `str.rstrip()`.
pub(crate) fn trim_end(text: &str) -> &str {
    text.trim_end_matches(is_space)
}

/// The `trim` filter.
pub(super) fn trim_filter(value: &Value, chars: Option<Cow<'_, str>>) -> Result<Value, Error> {
    let text = match value.as_str() {
        Some(text) => Cow::Borrowed(text),
        None if value.as_object().is_none() => Cow::Owned(value.to_string()),
        None => return Err(Error::new(ErrorKind::InvalidOperation, "only strings can be trimmed")),
    };
    Ok(Value::from(match chars {
        None => trim(&text),
        Some(chars) => text.trim_matches(|c| chars.contains(c)),
    }))
}

pub(super) fn method(
    state: &mut State<'_, '_>,
    value: &Value,
    name: &str,
    args: &[Value],
) -> Result<Value, Error> {
    if let Some(text) = value.as_str()
        && let Some(result) = string_method(text, name, args)
    {
        return result;
    }
    if value.kind() == ValueKind::Iterable && name == "count" {
        // Slices and sums of lists are lists in Python.
        let list = value.try_iter()?.collect::<Value>();
        return minijinja_contrib::pycompat::unknown_method_callback(state, &list, name, args);
    }
    minijinja_contrib::pycompat::unknown_method_callback(state, value, name, args)
}

fn string_method(text: &str, name: &str, args: &[Value]) -> Option<Result<Value, Error>> {
    Some(match name {
        "strip" | "lstrip" | "rstrip" => strip(text, name, args),
        "split" => split(text, args, false),
        "rsplit" => split(text, args, true),
        "splitlines" => splitlines(text, args),
        "removeprefix" => one(args).map(|a| text.strip_prefix(a).unwrap_or(text).into()),
        "removesuffix" => one(args).map(|a| text.strip_suffix(a).unwrap_or(text).into()),
        "partition" => one(args).map(|sep| match text.split_once(sep) {
            Some((a, b)) => triple(a, sep, b),
            None => triple(text, "", ""),
        }),
        "rpartition" => one(args).map(|sep| match text.rsplit_once(sep) {
            Some((a, b)) => triple(a, sep, b),
            None => triple("", "", text),
        }),
        "index" => one(args).and_then(|what| match text.find(what) {
            Some(at) => Ok(Value::from(text[..at].chars().count())),
            None => Err(Error::new(ErrorKind::InvalidOperation, "substring not found")),
        }),
        "isspace" => Ok(Value::from(!text.is_empty() && text.chars().all(is_space))),
        "casefold" => Ok(Value::from(text.to_lowercase())),
        _ => return None,
    })
}

fn one(args: &[Value]) -> Result<&str, Error> {
    let (arg,): (&str,) = from_args(args)?;
    if arg.is_empty() {
        Err(Error::new(ErrorKind::InvalidOperation, "empty separator"))
    } else {
        Ok(arg)
    }
}

fn triple(a: &str, b: &str, c: &str) -> Value {
    Value::from(Tuple::from([Value::from(a), Value::from(b), Value::from(c)]))
}

fn strip(text: &str, name: &str, args: &[Value]) -> Result<Value, Error> {
    let (chars,): (Option<&str>,) = from_args(args)?;
    let inside = |c: char| chars.map_or_else(|| is_space(c), |chars| chars.contains(c));
    Ok(Value::from(match name {
        "lstrip" => text.trim_start_matches(inside),
        "rstrip" => text.trim_end_matches(inside),
        _ => text.trim_matches(inside),
    }))
}

fn split(text: &str, args: &[Value], from_right: bool) -> Result<Value, Error> {
    let (sep, max, kwargs): (Option<&str>, Option<i64>, Kwargs) = from_args(args)?;
    let sep = match kwargs.get::<Option<&str>>("sep")? {
        Some(named) => Some(named),
        None => sep,
    };
    let max = kwargs.get::<Option<i64>>("maxsplit")?.or(max).unwrap_or(-1);
    kwargs.assert_all_used()?;
    let limit = usize::try_from(max).unwrap_or(usize::MAX);
    if sep == Some("") {
        return Err(Error::new(ErrorKind::InvalidOperation, "empty separator"));
    }
    let pieces: Vec<&str> = match (sep, from_right) {
        (Some(sep), false) => text.splitn(limit.saturating_add(1), sep).collect(),
        (Some(sep), true) => {
            let mut pieces: Vec<&str> = text.rsplitn(limit.saturating_add(1), sep).collect();
            pieces.reverse();
            pieces
        }
        (None, false) => split_spaces(text, limit),
        (None, true) => rsplit_spaces(text, limit),
    };
    Ok(pieces.into_iter().collect::<Value>())
}

fn split_spaces(text: &str, limit: usize) -> Vec<&str> {
    let mut pieces = Vec::new();
    let mut rest = text.trim_start_matches(is_space);
    while !rest.is_empty() {
        if pieces.len() == limit {
            pieces.push(rest);
            break;
        }
        let end = rest.find(is_space).unwrap_or(rest.len());
        pieces.push(&rest[..end]);
        rest = rest[end..].trim_start_matches(is_space);
    }
    pieces
}

fn rsplit_spaces(text: &str, limit: usize) -> Vec<&str> {
    let mut pieces = Vec::new();
    let mut rest = trim_end(text);
    while !rest.is_empty() {
        if pieces.len() == limit {
            pieces.push(rest);
            break;
        }
        let start = rest.char_indices().rev().find(|(_, c)| is_space(*c));
        let start = start.map_or(0, |(at, c)| at + c.len_utf8());
        pieces.push(&rest[start..]);
        rest = trim_end(&rest[..start]);
    }
    pieces.reverse();
    pieces
}

fn splitlines(text: &str, args: &[Value]) -> Result<Value, Error> {
    let (keep, kwargs): (Option<bool>, Kwargs) = from_args(args)?;
    let keep = kwargs.get::<Option<bool>>("keepends")?.or(keep).unwrap_or(false);
    kwargs.assert_all_used()?;
    let ends = |c| {
        matches!(
            c,
            '\n' | '\r' | '\u{b}' | '\u{c}' | '\u{1c}'
                ..='\u{1e}' | '\u{85}' | '\u{2028}' | '\u{2029}'
        )
    };
    let mut lines = Vec::new();
    let mut rest = text;
    while let Some(at) = rest.find(ends) {
        let mut next = at + rest[at..].chars().next().map_or(1, char::len_utf8);
        if rest[at..].starts_with("\r\n") {
            next += 1;
        }
        lines.push(Value::from(&rest[..if keep { next } else { at }]));
        rest = &rest[next..];
    }
    if !rest.is_empty() {
        lines.push(Value::from(rest));
    }
    Ok(Value::from(lines))
}
