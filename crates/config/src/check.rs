//! Whether a tree has the shape that the schema asks for. All problems are found, not only the first.
//!
//! Invariant: a tree without problems can be deserialised into `Written`. What depends on more than
//! one key is checked where the tree is resolved.

use serde_json::Value as Json;

use crate::problem::{Problem, nearest};
use crate::schema::{Form, forms, wording};
use crate::tree::{Key, Node, Value};

/// Finds what is wrong with `node` under `schema`.
pub(crate) fn check(key: &Key, node: &Node, schema: &Json, problems: &mut Vec<Problem>) {
    let forms = forms(schema);
    match &node.value {
        Value::Null if forms.iter().any(|form| form.is("null")) => {}
        Value::Null => {
            let message = format!("empty; must be {}", wording(&forms));
            problems.push(Problem::at(key, message, &node.origin));
        }
        Value::Map(entries) if forms.iter().any(|form| form.is("object")) => {
            let form = mapping_form(&forms, entries);
            check_mapping(key, node, entries, form, &forms, problems);
        }
        Value::List(items) if forms.iter().any(|form| form.is("array")) => {
            forms.iter().for_each(|form| check_list(key, node, items, form, problems));
        }
        value if forms.iter().any(|form| form.accepts(value)) => {}
        value => problems.push(refused(key, node, value, &forms)),
    }
}

/// The form that a mapping is meant to have: among several, the one that knows its first key.
fn mapping_form<'f, 's>(forms: &'f [Form<'s>], entries: &[(String, Node)]) -> Option<&'f Form<'s>> {
    let mut mappings = forms.iter().filter(|form| form.is("object"));
    let first = mappings.clone().next()?;
    let known = |form: &&Form<'_>| {
        form.keys().is_some_and(|keys| entries.first().is_some_and(|(k, _)| keys.contains_key(k)))
    };
    if mappings.clone().count() == 1 { Some(first) } else { mappings.find(known) }
}

fn check_mapping(
    key: &Key,
    node: &Node,
    entries: &[(String, Node)],
    form: Option<&Form<'_>>,
    forms: &[Form<'_>],
    problems: &mut Vec<Problem>,
) {
    let Some(form) = form else {
        problems.push(refused(key, node, &node.value, forms));
        return;
    };
    let keys = form.keys();
    for (name, child) in entries {
        match keys.and_then(|keys| keys.get(name)).or_else(|| form.values()) {
            Some(schema) => check(&key.name(name), child, schema, problems),
            None => {
                let known = keys.into_iter().flat_map(|keys| keys.keys()).map(String::as_str);
                problems.push(unknown(&key.name(name), name, child, known));
            }
        }
    }
    for name in form.required().filter(|name| node.get(name).is_none()) {
        let schema = keys.and_then(|keys| keys.get(name));
        let must = schema.map(|schema| wording(&self::forms(schema))).unwrap_or_default();
        let message = format!("missing; must be {must}");
        problems.push(Problem::at(&key.name(name), message, &node.origin));
    }
}

fn check_list(
    key: &Key,
    node: &Node,
    items: &[Node],
    form: &Form<'_>,
    problems: &mut Vec<Problem>,
) {
    let Some(schema) = form.items() else { return };
    for (index, item) in items.iter().enumerate() {
        check(&key.index(index), item, schema, problems);
    }
    if let Some(max) = form.max_items().filter(|max| items.len() as u64 > *max) {
        let message = format!("has {} entries; must be at most {max}", items.len());
        problems.push(Problem::at(key, message, &node.origin));
    }
}

fn refused(key: &Key, node: &Node, value: &Value, forms: &[Form<'_>]) -> Problem {
    let mut message = format!("{value} is not allowed; must be {}", wording(forms));
    if let Value::Text(text) = value
        && let Some(word) = nearest(text, forms.iter().filter_map(Form::word))
    {
        message.push_str(&format!("; did you mean `{word}`?"));
    }
    Problem::at(key, message, &node.origin)
}

fn unknown<'k>(
    key: &Key,
    name: &str,
    node: &Node,
    known: impl Iterator<Item = &'k str> + Clone,
) -> Problem {
    let message = match nearest(name, known.clone()) {
        Some(near) => format!("unknown key; did you mean `{near}`?"),
        None => {
            let known: Vec<String> = known.map(|name| format!("`{name}`")).collect();
            format!("unknown key; known here: {}", known.join(", "))
        }
    };
    Problem::at(key, message, &node.origin)
}
