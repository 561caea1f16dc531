//! The `tojson` filter: Python's `json.dumps` with `ensure_ascii=False`, no HTML escaping.

use std::fmt::Write;

use minijinja::value::{DynObject, Kwargs, Rest, Value, ValueKind, ValueOrKwargs, from_args};
use minijinja::{Error, ErrorKind, State};

use super::float;

/// Nesting that is refused, as Python's recursion limit refuses it.
const MAX_DEPTH: usize = 300;

/// Bytes written for one unit of the rendering's budget.
const BYTES_PER_FUEL: u64 = 16;

/// Takes what so many bytes cost from the budget.
type Pay<'p> = &'p dyn Fn(usize) -> Result<(), Error>;

struct Style {
    ascii: bool,
    indent: Option<String>,
    item: String,
    key: String,
    sort: bool,
}

pub(super) fn tojson(
    state: &State<'_, '_>,
    value: &Value,
    args: Rest<ValueOrKwargs>,
) -> Result<Value, Error> {
    let args = args.into_values();
    let (rest, kwargs) = from_args::<(&[Value], Kwargs)>(&args)?;
    let arg = |i: usize, name: &str| -> Result<Option<Value>, Error> {
        let given = match rest.get(i) {
            Some(v) => Some(v.clone()),
            None => kwargs.get::<Option<Value>>(name)?,
        };
        Ok(given.filter(|v| !v.is_none()))
    };
    let ascii = arg(0, "ensure_ascii")?.is_some_and(|v| v.is_true());
    let indent = match arg(1, "indent")? {
        None => None,
        Some(v) if v.kind() == ValueKind::String => v.as_str().map(str::to_owned),
        Some(v) => Some(" ".repeat(usize::try_from(i64::try_from(v)?.clamp(0, 64)).unwrap_or(0))),
    };
    let (item, key) = match arg(2, "separators")? {
        Some(v) => (v.get_item_by_index(0)?.to_string(), v.get_item_by_index(1)?.to_string()),
        None if indent.is_some() => (",".to_owned(), ": ".to_owned()),
        None => (", ".to_owned(), ": ".to_owned()),
    };
    let sort = arg(3, "sort_keys")?.is_some_and(|v| v.is_true());
    kwargs.assert_all_used()?;
    let mut out = String::new();
    let style = Style { ascii, indent, item, key, sort };
    let pay = |bytes: usize| state.consume_fuel(1 + bytes as u64 / BYTES_PER_FUEL);
    write_value(&mut out, value, &style, 0, &pay)?;
    Ok(Value::from(out))
}

fn write_value(
    out: &mut String,
    value: &Value,
    style: &Style,
    depth: usize,
    pay: Pay<'_>,
) -> Result<(), Error> {
    let before = out.len();
    if depth > MAX_DEPTH {
        return Err(refuse("is nested too deeply to be written as JSON"));
    }
    match value.kind() {
        ValueKind::None => out.push_str("null"),
        ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
        ValueKind::Number => out.push_str(&number(value)?),
        ValueKind::String => write_string(out, value.as_str().unwrap_or_default(), style.ascii),
        ValueKind::Seq => {
            let items = value.try_iter()?.collect::<Vec<_>>();
            container(out, '[', ']', items.len(), style, depth, |out, i| {
                write_value(out, &items[i], style, depth + 1, pay)
            })?;
        }
        ValueKind::Map => {
            let pairs = value.as_object().and_then(DynObject::try_iter_pairs);
            let mut pairs = pairs.map(Iterator::collect::<Vec<_>>).unwrap_or_default();
            if style.sort {
                pairs.sort_by(|a, b| a.0.cmp(&b.0));
            }
            container(out, '{', '}', pairs.len(), style, depth, |out, i| {
                write_key(out, &pairs[i].0, style)?;
                out.push_str(&style.key);
                write_value(out, &pairs[i].1, style, depth + 1, pay)
            })?;
        }
        ValueKind::Iterable => {
            // A slice or a sum of lists: a list in Python.
            let items = value.try_iter()?.collect::<Vec<_>>();
            return write_value(out, &Value::from(items), style, depth, pay);
        }
        other => return Err(refuse(&format!("of kind {other} cannot be written as JSON"))),
    }
    // What is in a container is paid again for each level around it: writing it takes as long.
    pay(out.len() - before)
}

fn refuse(what: &str) -> Error {
    Error::new(ErrorKind::BadSerialization, format!("a value {what}"))
}

fn container(
    out: &mut String,
    open: char,
    close: char,
    len: usize,
    style: &Style,
    depth: usize,
    mut item: impl FnMut(&mut String, usize) -> Result<(), Error>,
) -> Result<(), Error> {
    let line = |out: &mut String, depth: usize| {
        if let Some(indent) = &style.indent {
            out.push('\n');
            (0..depth).for_each(|_| out.push_str(indent));
        }
    };
    out.push(open);
    for i in 0..len {
        if i > 0 {
            out.push_str(&style.item);
        }
        line(out, depth + 1);
        item(out, i)?;
    }
    if len > 0 {
        line(out, depth);
    }
    out.push(close);
    Ok(())
}

fn number(value: &Value) -> Result<String, Error> {
    if value.is_integer() {
        return Ok(value.to_string());
    }
    let number = f64::try_from(value.clone())?;
    Ok(match number {
        n if n.is_nan() => "NaN".to_owned(),
        f64::INFINITY => "Infinity".to_owned(),
        f64::NEG_INFINITY => "-Infinity".to_owned(),
        n => float::repr(n),
    })
}

fn write_key(out: &mut String, key: &Value, style: &Style) -> Result<(), Error> {
    let text = match key.kind() {
        ValueKind::String => key.as_str().unwrap_or_default().to_owned(),
        ValueKind::None => "null".to_owned(),
        ValueKind::Bool => if key.is_true() { "true" } else { "false" }.to_owned(),
        ValueKind::Number => number(key)?,
        other => return Err(refuse(&format!("has a key of kind {other}"))),
    };
    write_string(out, &text, style.ascii);
    Ok(())
}

fn write_string(out: &mut String, text: &str, ascii: bool) {
    out.push('"');
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\u{8}' => out.push_str("\\b"),
            '\u{c}' => out.push_str("\\f"),
            c if (c as u32) < 0x20 => escape_unit(out, c as u16),
            c if ascii && !(' '..='~').contains(&c) => {
                let mut units = [0; 2];
                c.encode_utf16(&mut units).iter().for_each(|&u| escape_unit(out, u));
            }
            c => out.push(c),
        }
    }
    out.push('"');
}

fn escape_unit(out: &mut String, unit: u16) {
    // Writing to a string does not fail.
    let _ = write!(out, "\\u{unit:04x}");
}
