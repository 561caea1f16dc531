//! The reference page, made from the schema: every key with type, range, default, doc and variable.

use std::fmt::Write as _;

use serde_json::{Map, Value as Json};

use crate::environment::PREFIX;
use crate::schema::{Form, either, follow, forms, root};

const HEAD: &str = "\
# Configuration reference

<!-- Made from crates/config/src/written. `UPDATE_DOCS=1 cargo test -p pointsman-config` rewrites it. -->

A setting comes from, each overriding the one before: its default, the file (`-c pointsman.yaml`, YAML or
JSON), the environment, flags (`--set key.path=value` and the named ones). Mappings are laid on one another
key by key, lists are replaced as a whole. In a variable or after `--set`, the value is YAML: `30s`, `off`,
`[a, b]`, `{chunks: 4}`. Elements of a list are counted from 0: `POINTSMAN__MODELS__0__NAME`,
`--set models[0].name=...`.

Durations are written as `250ms`, `30s`, `5m`, `1h` or `1m 30s`; sizes as a number of bytes or as `64KiB`,
`16MiB`, `1GiB`. An unknown key, a value out of range or a key that is written twice stops the start with a
message that names the key, the value, where it was written and what is allowed. The same tree as JSON
Schema, for editors: [pointsman.schema.json](pointsman.schema.json). An example:
[pointsman.yaml](../examples/pointsman.yaml).
";

const TAIL: &str = "
## Names from elsewhere

These variables of NVIDIA Dynamo and its forks are read as the keys they mean. They override the file and are
overridden by `POINTSMAN__` variables; each that is set makes one log line with the native name. Switches
take `true` or `false`, `1` or `0`, `yes` or `no`, `on` or `off`. A value that does not parse or is out of
range stops the start.

| Variable | Read as |
| --- | --- |
| `DYN_ROUTER_CONDITIONAL_DISAGG` | on: `routing.policy: isl_bounding`, unless the next one is set; off: `always_remote` |
| `DYN_ROUTER_CONDITIONAL_DISAGG_POLICY` | `routing.policy`: `isl_bounding`, `prefill_load` or `isl_or_load` |
| `DYN_ROUTER_CONDITIONAL_DISAGG_EFF_ISL_THRESHOLD` | `routing.eff_isl_threshold` |
| `DYN_ROUTER_CONDITIONAL_DISAGG_EFF_ISL_RATIO_THRESHOLD` | `routing.eff_isl_ratio_threshold` |
| `DYN_ROUTER_CONDITIONAL_DISAGG_PREFILL_BUSY_THRESHOLD` | `routing.prefill_busy_threshold` |
| `DYN_ROUTER_CONDITIONAL_DISAGG_DECODE_BUSY_THRESHOLD` | `routing.decode_busy_threshold` |
| `DYN_ROUTER_CONDITIONAL_DISAGG_CONFIG` | a JSON object of `policy`, `eff_isl_threshold`, `eff_isl_ratio_threshold`, `prefill_busy_threshold`, `decode_busy_threshold`; the variables above override it |
| `DYNAMO_USE_CONDITIONAL_DISAGGREGATION` | on: `routing.policy: short_prompt`; off: `always_remote` |
| `DYNAMO_SHORT_PREFILL_THRESHOLD_TOKENS` | `routing.short_prefill_tokens` |
| `KV_ROUTER_USE_ISL_THRESHOLD`, `KV_ROUTER_ISL_THRESHOLD` | `routing.isl_gate`: the threshold where the switch is on |
";

/// The configuration reference in Markdown.
pub fn reference() -> String {
    let mut out = HEAD.to_owned();
    section(&mut out, "", root());
    out.push_str(TAIL);
    out
}

/// A mapping's table, then the mappings below it.
fn section(out: &mut String, path: &str, schema: &Json) {
    let all = forms(schema);
    let Some(keys) = all.iter().find_map(Form::keys) else { return };
    let doc = follow(schema).get("description").and_then(Json::as_str).unwrap_or_default();
    if path.is_empty() {
        out.push_str("\n## Top level\n");
    } else {
        let _ = write!(out, "\n## `{path}`\n\n{}\n", one_line(doc));
    }
    out.push_str(
        "\n| Key | Type | Default | Meaning | Variable |\n| --- | --- | --- | --- | --- |\n",
    );
    let required: Vec<&str> = all.iter().flat_map(Form::required).collect();
    let mut words = String::new();
    let mut below = Vec::new();
    for name in ordered(schema, keys) {
        let schema = &keys[name];
        let key = if path.is_empty() { name.to_owned() } else { format!("{path}.{name}") };
        row(out, &key, name, schema, required.contains(&name));
        word_list(&mut words, name, schema);
        if let Some(place) = nested(&key, schema) {
            below.push(place);
        }
    }
    out.push_str(&words);
    for (key, schema) in below {
        section(out, &key, schema);
    }
}

fn row(out: &mut String, key: &str, name: &str, schema: &Json, required: bool) {
    let text = |field: &str| schema.get(field).and_then(Json::as_str).unwrap_or_default();
    let default = match schema.get("default") {
        _ if required => "required".to_owned(),
        Some(value) if value.is_object() && nested(key, schema).is_some() => String::new(),
        Some(value) => format!("`{}`", yaml(value)),
        None => String::new(),
    };
    let (kind, doc) = (kind(schema), one_line(text("description")));
    let _ = writeln!(out, "| `{name}` | {kind} | {default} | {doc} | `{}` |", variable(key));
}

fn kind(schema: &Json) -> String {
    if let Some(overridden) = schema.get("x-overrides").and_then(Json::as_str) {
        return format!("mapping, keys as in [`{overridden}`](#{overridden})");
    }
    let parts = forms(schema).into_iter().filter(|form| !form.is_null()).map(|form| {
        let of = form.items().or_else(|| form.values());
        let of = of.map(|of| format!(" of {}", kinds_of(of))).unwrap_or_default();
        let range = form.range();
        let range = if range.is_empty() { range } else { format!(" {range}") };
        format!("{}{of}{range}", form.kind())
    });
    either(&parts.collect::<Vec<_>>())
}

fn kinds_of(schema: &Json) -> String {
    let mut kinds: Vec<String> = forms(schema)
        .iter()
        .map(|form| if form.word().is_some() { "name".to_owned() } else { form.kind() })
        .collect();
    kinds.dedup();
    either(&kinds.iter().map(|kind| format!("{kind}s")).collect::<Vec<_>>())
}

/// The keys as they were declared. Those of a flattened part stand where that part was declared.
fn ordered<'s>(schema: &'s Json, keys: &'s Map<String, Json>) -> Vec<&'s str> {
    let declared: Vec<&str> = order(schema).collect();
    let mut rest: Vec<&str> =
        keys.keys().map(String::as_str).filter(|key| !declared.contains(key)).collect();
    let parts = root().get("$defs").and_then(Json::as_object);
    for part in parts.into_iter().flat_map(Map::values) {
        let inner: Vec<&str> = order(part).collect();
        if rest.iter().all(|key| inner.contains(key)) {
            rest.sort_by_key(|key| inner.iter().position(|other| other == key));
            break;
        }
    }
    // A mapping that is one of several forms declares its keys in that form.
    if declared.is_empty() {
        return rest;
    }
    let place = |name: &'s str| if keys.contains_key(name) { vec![name] } else { rest.clone() };
    declared.into_iter().flat_map(place).collect()
}

fn order(schema: &Json) -> impl Iterator<Item = &str> {
    let names = follow(schema).get("x-order").and_then(Json::as_array);
    names.into_iter().flatten().filter_map(Json::as_str)
}

/// What each word of a key means, where the key takes words that have docs.
fn word_list(out: &mut String, name: &str, schema: &Json) {
    let documented: Vec<(String, &str)> = forms(schema)
        .iter()
        .filter_map(|form| Some((form.kind(), form.doc()?)))
        .filter(|(kind, _)| kind.starts_with('`'))
        .collect();
    if documented.len() < 2 {
        return;
    }
    let _ = write!(out, "\n`{name}`:\n\n");
    for (kind, doc) in documented {
        let _ = writeln!(out, "- {kind}: {}", one_line(doc));
    }
}

/// The mapping with fixed keys that is found below a key, and its path.
fn nested<'s>(key: &str, schema: &'s Json) -> Option<(String, &'s Json)> {
    if schema.get("x-overrides").is_some() {
        return None;
    }
    let forms = forms(schema);
    if let Some(items) = forms.iter().find_map(Form::items) {
        return nested(&format!("{key}[]"), items);
    }
    let fixed = forms.iter().any(|form| form.kind() == "mapping" && form.keys().is_some());
    fixed.then(|| (key.to_owned(), schema))
}

fn variable(key: &str) -> String {
    format!("{PREFIX}{}", key.replace("[]", "__0").replace('.', "__").to_uppercase())
}

/// A default as YAML in one line.
fn yaml(value: &Json) -> String {
    match value {
        Json::String(text) if text.is_empty() => "\"\"".to_owned(),
        Json::String(text) => text.clone(),
        Json::Object(entries) => {
            let parts = entries.iter().map(|(key, value)| format!("{key}: {}", yaml(value)));
            format!("{{{}}}", parts.collect::<Vec<_>>().join(", "))
        }
        other => other.to_string().trim_end_matches(".0").to_owned(),
    }
}

fn one_line(doc: &str) -> String {
    doc.split_whitespace().collect::<Vec<_>>().join(" ").replace('|', "\\|")
}

#[cfg(test)]
mod tests {
    #[test]
    fn no_table_of_the_reference_page_is_empty() {
        let page = super::reference();
        assert!(!page.contains("| --- |\n\n"), "{page}");
    }
}
