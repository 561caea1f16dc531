//! The functions, filters and tests that transformers gives a chat template.

use std::sync::Arc;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Rest, Value, ValueKind};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, UndefinedBehavior};
use minijinja_contrib::globals;

use super::{float, pycompat, strftime, tojson};

/// Work a rendering may do: one unit is about one instruction or 64 bytes of text. A conversation
/// of 1000 messages takes some 100 thousand; the bound is reached after about a second.
const RENDER_FUEL: u64 = 10_000_000;

/// Depth of macro calls.
const RECURSION_LIMIT: usize = 100;

pub(super) fn new() -> Environment<'static> {
    let mut env = Environment::new();
    let mut syntax = SyntaxConfig::builder();
    syntax.trim_blocks(true).lstrip_blocks(true);
    if let Ok(syntax) = syntax.build() {
        env.set_syntax(syntax);
    }
    env.set_undefined_behavior(UndefinedBehavior::Lenient);
    env.set_auto_escape_callback(|_| AutoEscape::None);
    env.set_fuel(Some(RENDER_FUEL));
    env.set_recursion_limit(RECURSION_LIMIT);
    env.set_unknown_method_callback(pycompat::method);
    env.set_formatter(|out, state, value| {
        if value.kind() == ValueKind::Number && !value.is_integer() {
            let number = f64::try_from(value.clone())?;
            return out.write_str(&float::repr(number)).map_err(Error::from);
        }
        minijinja::escape_formatter(out, state, value)
    });
    env.add_filter("tojson", tojson::tojson);
    env.add_filter("trim", pycompat::trim_filter);
    env.add_test("sequence", is_sequence);
    env.add_test("iterable", |v: &Value| !v.is_none() && v.try_iter().is_ok());
    env.add_function("raise_exception", raise_exception);
    env.add_filter("int", int);
    env.add_filter("float", float_filter);
    env.add_function("cycler", |items: Rest<Value>| globals::cycler(items.0));
    env.add_function("joiner", globals::joiner);
    env
}

/// In Python strings and mappings are sequences too.
fn is_sequence(value: &Value) -> bool {
    value.is_undefined()
        || matches!(value.kind(), ValueKind::Seq | ValueKind::String | ValueKind::Map)
}

/// Never fails: what is no number gives the default.
fn int(value: &Value, default: Option<Value>) -> Value {
    let text = value.as_str().map(|s| s.trim().replace('_', ""));
    let parsed = match &text {
        Some(text) => match text.parse::<i64>() {
            Ok(number) => Some(number),
            Err(_) => text.parse::<f64>().ok().and_then(truncated),
        },
        None if value.is_integer() => return value.clone(),
        None => match value.kind() {
            ValueKind::Bool => Some(i64::from(value.is_true())),
            _ => f64::try_from(value.clone()).ok().and_then(truncated),
        },
    };
    parsed.map(Value::from).or(default).unwrap_or_else(|| Value::from(0))
}

fn truncated(number: f64) -> Option<i64> {
    // Beyond 63 bits a cast would give another number.
    (number.abs() < 9e18).then_some(number.trunc() as i64)
}

fn float_filter(value: &Value, default: Option<Value>) -> Value {
    let parsed = match value.as_str() {
        Some(text) => text.trim().parse::<f64>().ok(),
        None if value.kind() == ValueKind::Bool => Some(if value.is_true() { 1.0 } else { 0.0 }),
        None => f64::try_from(value.clone()).ok(),
    };
    parsed.map(Value::from).or(default).unwrap_or_else(|| Value::from(0.0))
}

fn raise_exception(message: &Value) -> Result<Value, Error> {
    let text = match message.as_object() {
        None => message.to_string(),
        Some(_) => "raised an exception".to_owned(),
    };
    Err(Error::new(ErrorKind::InvalidOperation, text))
}

pub(super) fn strftime_now(now: i64) -> Value {
    Value::from_function(move |format: Arc<str>| strftime::format(now, &format))
}

/// `{% generation %}` marks what the assistant says for training; it prints its body.
pub(super) fn without_generation_tags(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let Some(len) = rest[start..].find("%}") else { break };
        let tag = &rest[start..start + len + 2];
        out.push_str(&rest[..start]);
        let inner = &tag[2..tag.len() - 2];
        let name = inner.trim_matches(['-', '+']).trim();
        let replacement = match name {
            "generation" => "with",
            "endgeneration" => "endwith",
            other => other,
        };
        match replacement == name {
            true => out.push_str(tag),
            false => out.push_str(&tag.replace(name, replacement)),
        }
        rest = &rest[start + len + 2..];
    }
    out.push_str(rest);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn generation_tags_keep_their_whitespace_control() {
        let got = without_generation_tags("a{%- generation -%}b{% endgeneration %}{% if x %}c");
        assert_eq!(got, "a{%- with -%}b{% endwith %}{% if x %}c");
        assert_eq!(without_generation_tags("{% open"), "{% open");
    }
}
