//! The generated documents are those of the code, and the example loads.

#![allow(clippy::expect_used, reason = "a test that cannot go on fails")]

use std::path::PathBuf;

use pointsman_config::{File, Sources, load, reference, schema};

fn repo(path: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..").join(path)
}

/// Fails where the file differs; with `UPDATE_DOCS=1` writes it instead.
fn is_fresh(path: &str, content: &str) {
    let file = repo(path);
    if std::env::var_os("UPDATE_DOCS").is_some_and(|value| value == "1") {
        std::fs::create_dir_all(file.parent().expect("a parent")).expect("a folder");
        std::fs::write(&file, content).expect("written");
        return;
    }
    let found = std::fs::read_to_string(&file).unwrap_or_default();
    assert!(
        found == content,
        "{path} is stale: run `UPDATE_DOCS=1 cargo test -p pointsman-config --test docs`"
    );
}

#[test]
fn the_reference_page_is_that_of_the_code() {
    is_fresh("docs/reference/configuration.md", &reference());
}

#[test]
fn the_json_schema_is_that_of_the_code() {
    let text = serde_json::to_string_pretty(&schema()).expect("JSON") + "\n";
    is_fresh("docs/reference/pointsman.schema.json", &text);
}

#[test]
fn the_example_file_loads() {
    let file = repo("docs/examples/pointsman.yaml");
    let loaded = load(&Sources { file: Some(File::Path(file)), ..Sources::default() });
    let settings = loaded.unwrap_or_else(|problems| panic!("{problems}")).settings;
    let roles: Vec<_> =
        settings.models[0].workers.iter().map(|worker| worker.role.as_str()).collect();
    assert_eq!(roles, ["prefill", "prefill", "decode", "decode", "unified"]);
}
