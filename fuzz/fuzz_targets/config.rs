//! Arbitrary text as configuration: a file, flags and variables, and a worker that joins over HTTP.
//!
//! Reading never panics, and what is refused is refused with a reason.
#![no_main]

use libfuzzer_sys::fuzz_target;
use pointsman_config::{File, Override, Sources, joining, load};

/// Stands between the file, the flags and the variables.
const SEPARATOR: char = '\u{1e}';

fuzz_target!(|text: &str| {
    // A key's file would be read, whatever it is.
    if text.contains("_file") || text.contains("_FILE") {
        return;
    }
    let mut parts = text.splitn(3, SEPARATOR);
    let file = parts.next().unwrap_or_default();
    let flags = parts.next().unwrap_or_default().lines();
    let variables = parts.next().unwrap_or_default().lines();
    let sources = Sources {
        file: Some(File::Text { name: "fuzz.yaml".into(), text: file.into() }),
        overrides: flags.filter_map(|flag| Override::parse("--set", flag).ok()).collect(),
        env: variables
            .filter_map(|line| line.split_once('='))
            .map(|(name, value)| (name.into(), value.into()))
            .collect(),
    };
    if let Err(problems) = load(&sources) {
        assert!(!problems.to_string().is_empty());
    }
    if let Err(problems) = joining(file) {
        assert!(!problems.to_string().is_empty());
    }
});
