//! The page of promises, docs/promises.md, and the tests that keep them match one to one.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// Where a test's file is that is named without a path.
const HERE: &str = "crates/cli/tests";

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// A promise of the page: where it stands, its sentence, and its tests by file and name.
struct Promise {
    line: usize,
    sentence: String,
    tests: Vec<(String, String)>,
}

/// The promises on a page. A line that begins as a list does is one.
fn promises(page: &str) -> Vec<Promise> {
    let lines = (1..).zip(page.lines());
    let bullets = lines.filter_map(|(line, text)| Some((line, text.strip_prefix("- ")?)));
    bullets
        .map(|(line, text)| {
            let quoted = text.split('`').skip(1).step_by(2);
            let tests = quoted.filter_map(|word| {
                let (file, name) = word.split_once("::")?;
                let path =
                    if file.contains('/') { file.to_owned() } else { format!("{HERE}/{file}") };
                Some((path, name.to_owned()))
            });
            let tests: Vec<_> = tests.collect();
            let sentence = text.find(".rs::").map_or(text, |at| &text[..at]);
            let sentence = sentence.rsplit_once('`').map_or(sentence, |(words, _)| words);
            Promise { line, sentence: sentence.trim().to_owned(), tests }
        })
        .collect()
}

fn page() -> Vec<Promise> {
    let promises = promises(&fs::read_to_string(root().join("docs/promises.md")).unwrap());
    assert!(promises.len() > 50, "the page is written another way: {} promises", promises.len());
    promises
}

/// The names of the tests in a file: functions under an attribute that makes one.
fn tests_in(text: &str) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    let mut is_test = false;
    for line in text.lines().map(str::trim) {
        if ["#[test]", "#[tokio::test"].iter().any(|mark| line.starts_with(mark)) {
            is_test = true;
        } else if let Some((_, after)) = line.split_once("fn ") {
            let name = after.split('(').next().unwrap_or_default();
            if std::mem::take(&mut is_test) {
                names.insert(name.to_owned());
            }
        }
    }
    names
}

/// Whether every test of this file keeps a promise.
fn is_of_promises(file: &str) -> bool {
    file == "overload.rs"
        || file == "hostile.rs"
        || file.starts_with("faults_")
        || file.starts_with("security")
}

fn none(found: &[String], rule: &str) {
    assert!(found.is_empty(), "{rule}:\n  {}", found.join("\n  "));
}

#[test]
fn every_promise_is_a_sentence_with_its_tests() {
    let bare = page().into_iter().filter(|promise| {
        promise.tests.is_empty() || !promise.sentence.ends_with('.') || promise.sentence.len() < 10
    });
    let bare = bare.map(|promise| format!("docs/promises.md:{}", promise.line));
    none(&bare.collect::<Vec<_>>(), "write `- A sentence. `file.rs::test_name``");
}

#[test]
fn every_test_that_is_named_exists() {
    let mut known = BTreeMap::new();
    let mut missing = Vec::new();
    for promise in page() {
        for (file, name) in promise.tests {
            let tests = known.entry(file.clone()).or_insert_with(|| {
                tests_in(&fs::read_to_string(root().join(&file)).unwrap_or_default())
            });
            if !tests.contains(&name) {
                missing.push(format!("docs/promises.md:{}: {file}::{name}", promise.line));
            }
        }
    }
    none(&missing, "these tests do not exist");
}

#[test]
fn no_test_keeps_two_promises() {
    let mut seen = BTreeMap::new();
    let mut twice = Vec::new();
    for promise in page() {
        for test in promise.tests {
            if let Some(line) = seen.insert(test.clone(), promise.line) {
                twice.push(format!("{}::{} on lines {line} and {}", test.0, test.1, promise.line));
            }
        }
    }
    none(&twice, "name each test once");
}

#[test]
fn every_test_of_faults_overload_security_and_hostile_input_keeps_a_promise() {
    let named: BTreeSet<_> = page().into_iter().flat_map(|promise| promise.tests).collect();
    let mut left_out = Vec::new();
    let mut files = 0;
    for entry in fs::read_dir(root().join(HERE)).unwrap() {
        let file = entry.unwrap().file_name().into_string().unwrap();
        if !file.ends_with(".rs") || !is_of_promises(&file) {
            continue;
        }
        files += 1;
        let path = format!("{HERE}/{file}");
        let tests = tests_in(&fs::read_to_string(root().join(&path)).unwrap());
        assert!(!tests.is_empty(), "{path} has no tests, or they are written another way");
        let missing =
            tests.into_iter().filter(|name| !named.contains(&(path.clone(), name.clone())));
        left_out.extend(missing.map(|name| format!("{file}::{name}")));
    }
    assert!(files > 5, "the tests of promises are in other files");
    none(&left_out, "say in docs/promises.md what these keep");
}
