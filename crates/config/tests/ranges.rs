//! Every range in the schema holds, and no tree breaks the loader.

mod common;

use std::sync::LazyLock;

use common::LEAST;
use pointsman_config::{File, Override, Sources, load, schema};
use proptest::prelude::*;
use serde_json::Value;

/// Every key outside of lists with its schema.
static KEYS: LazyLock<Vec<(String, Value)>> = LazyLock::new(|| {
    fn walk(root: &Value, path: &str, schema: &Value, out: &mut Vec<(String, Value)>) {
        let target = schema["$ref"].as_str().and_then(|path| root.pointer(&path[1..]));
        let schema = target.unwrap_or(schema);
        for (name, part) in schema["properties"].as_object().into_iter().flatten() {
            let key = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
            out.push((key.clone(), part.clone()));
            walk(root, &key, part, out);
        }
    }
    let root = schema();
    let mut out = Vec::new();
    walk(&root, "", &root, &mut out);
    out
});

/// Loads the least file with one key set.
fn set(key: &str, value: &str) -> Result<(), String> {
    let sources = Sources {
        file: Some(File::Text { name: "p.yaml".to_owned(), text: LEAST.to_owned() }),
        overrides: vec![Override {
            flag: "--set".to_owned(),
            key: key.to_owned(),
            value: value.to_owned(),
        }],
        ..Sources::default()
    };
    load(&sources).map(|_| ()).map_err(|problems| problems.to_string())
}

#[test]
fn a_number_beyond_its_range_is_refused_and_one_within_is_not() {
    let mut bounds = 0;
    for (key, schema) in &*KEYS {
        for (name, beyond) in [("minimum", -1.0), ("maximum", 1.0)] {
            let Some(bound) = schema[name].as_f64() else { continue };
            bounds += 1;
            let within = set(key, &bound.to_string());
            let about_the_range =
                within.as_ref().is_err_and(|found| found.starts_with(&format!("{key}: {bound}")));
            assert!(!about_the_range, "{within:?}");
            let found = set(key, &(bound + beyond).to_string()).expect_err(key);
            assert!(found.starts_with(&format!("{key}: ")), "{found}");
        }
    }
    assert!(bounds >= 25, "only {bounds} bounds were found");
}

#[test]
fn a_duration_beyond_its_range_is_refused() {
    let mut spans = 0;
    for (key, schema) in KEYS.iter().filter(|(_, schema)| schema["x-kind"] == "duration") {
        for value in ["1000d", "-1s", "5", ""] {
            let found = set(key, value).expect_err(key);
            assert!(found.starts_with(&format!("{key}: ")), "{found}");
        }
        assert!(schema["x-minimum"].is_string() && schema["x-maximum"].is_string(), "{key}");
        spans += 1;
    }
    assert!(spans >= 15, "only {spans} durations were found");
}

#[test]
fn every_default_is_allowed_where_it_stands() {
    for (key, schema) in &*KEYS {
        let Some(default) = schema.get("default") else { continue };
        if key != "models" {
            assert_eq!(set(key, &default.to_string()), Ok(()), "{key}");
        }
    }
}

#[test]
fn every_key_has_a_doc() {
    for (key, schema) in &*KEYS {
        assert!(schema["description"].is_string(), "{key}");
    }
}

/// Any value as YAML flow text.
fn value() -> impl Strategy<Value = String> {
    let scalar = prop_oneof![
        Just("off".to_owned()),
        Just("null".to_owned()),
        Just("true".to_owned()),
        Just(".nan".to_owned()),
        Just("30s".to_owned()),
        Just("1MiB".to_owned()),
        Just("isl_or_load".to_owned()),
        any::<i64>().prop_map(|number| number.to_string()),
        any::<u64>().prop_map(|number| number.to_string()),
        any::<f64>().prop_map(|number| number.to_string()),
        "[ -~]{0,12}",
    ];
    scalar.prop_recursive(3, 12, 4, |inner| {
        let key = prop_oneof!["[a-z_]{1,8}", Just("policy".to_owned()), Just("header".to_owned())];
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(|v| format!("[{}]", v.join(", "))),
            prop::collection::vec((key, inner), 0..4).prop_map(|entries| {
                let entries: Vec<String> =
                    entries.into_iter().map(|(key, value)| format!("{key}: {value}")).collect();
                format!("{{{}}}", entries.join(", "))
            }),
        ]
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, failure_persistence: None, ..ProptestConfig::default() })]

    /// What passes the check can be deserialised: the two are made from one tree.
    #[test]
    fn the_check_and_the_types_agree(index in any::<prop::sample::Index>(), value in value()) {
        let (key, _) = index.get(&KEYS);
        if let Err(found) = set(key, &value) {
            prop_assert!(!found.contains("contradict"), "{key}={value}: {found}");
        }
    }

    #[test]
    fn no_text_breaks_the_loader(text in "[ -~\n]{0,200}") {
        let sources = Sources {
            file: Some(File::Text { name: "p.yaml".to_owned(), text }),
            ..Sources::default()
        };
        prop_assert!(load(&sources).is_err());
    }

    #[test]
    fn no_variable_breaks_the_loader(name in "[A-Z0-9_]{0,30}", value in value()) {
        let sources = Sources {
            file: Some(File::Text { name: "p.yaml".to_owned(), text: LEAST.to_owned() }),
            env: vec![(format!("POINTSMAN__{name}").into(), value.into())],
            ..Sources::default()
        };
        let _ = load(&sources);
    }
}
