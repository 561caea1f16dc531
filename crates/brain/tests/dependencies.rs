//! The brain and the KV index stay free of IO, clocks, randomness, logging and async: their
//! dependencies, direct or not, may hold none of the crates that bring these.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;

use serde_json::Value;

const PURE: [&str; 2] = ["pointsman-brain", "pointsman-kv"];

const FORBIDDEN: [&str; 24] = [
    "async-std",
    "axum",
    "chrono",
    "env_logger",
    "fastrand",
    "futures",
    "futures-util",
    "getrandom",
    "hyper",
    "libc",
    "log",
    "mio",
    "parking_lot",
    "rand",
    "rand_core",
    "reqwest",
    "rustix",
    "smol",
    "socket2",
    "time",
    "tokio",
    "tracing",
    "ureq",
    "windows-sys",
];

/// The names of everything that `package` is built from, itself not counted.
fn built_from(metadata: &Value, package: &str) -> BTreeSet<String> {
    let name_of: BTreeMap<&str, &str> = metadata["packages"]
        .as_array()
        .unwrap()
        .iter()
        .map(|package| (package["id"].as_str().unwrap(), package["name"].as_str().unwrap()))
        .collect();
    let nodes: BTreeMap<&str, &Value> = metadata["resolve"]["nodes"]
        .as_array()
        .unwrap()
        .iter()
        .map(|node| (node["id"].as_str().unwrap(), node))
        .collect();
    let (root, _) = name_of.iter().find(|(_, name)| **name == package).unwrap();
    let mut names = BTreeSet::new();
    let mut open = vec![*root];
    while let Some(id) = open.pop() {
        for dependency in nodes[id]["deps"].as_array().unwrap() {
            // A kind of null is an ordinary dependency; the others do not end in the library.
            let kinds = dependency["dep_kinds"].as_array().unwrap();
            let ordinary = kinds.iter().any(|kind| kind["kind"].is_null());
            let dependency = dependency["pkg"].as_str().unwrap();
            if ordinary && names.insert(name_of[dependency].to_owned()) {
                open.push(dependency);
            }
        }
    }
    names
}

/// The platform that this test was built on; what others need may not be at hand.
fn host() -> String {
    let output = Command::new("rustc").arg("-vV").output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    text.lines().find_map(|line| line.strip_prefix("host: ")).unwrap().to_owned()
}

#[test]
fn the_pure_crates_depend_on_nothing_that_acts() {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--format-version", "1", "--filter-platform", &host()])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let metadata: Value = serde_json::from_slice(&output.stdout).unwrap();
    for package in PURE {
        let names = built_from(&metadata, package);
        for forbidden in FORBIDDEN {
            assert!(!names.contains(forbidden), "{package} must not depend on {forbidden}");
        }
    }
}
