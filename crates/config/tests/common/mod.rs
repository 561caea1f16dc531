//! Short ways to load a text.
#![allow(dead_code, reason = "each test file uses its own part")]
#![allow(clippy::expect_used, clippy::panic, reason = "a test that cannot go on fails")]

use pointsman_config::{File, Loaded, Override, Problems, Settings, Sources, load};

/// One model with one ordinary engine: the least that loads.
pub(crate) const LEAST: &str = "models: [{name: m, workers: [{role: unified, url: http://a:1}]}]\n";

/// Sources of a text named `p.yaml` and of variables.
pub(crate) fn sources(text: &str, variables: &[(&str, &str)]) -> Sources {
    Sources {
        file: Some(File::Text { name: "p.yaml".to_owned(), text: text.to_owned() }),
        env: variables.iter().map(|(name, value)| (name.into(), value.into())).collect(),
        overrides: Vec::new(),
    }
}

pub(crate) fn try_load(
    text: &str,
    variables: &[(&str, &str)],
    flags: &[&str],
) -> Result<Loaded, Problems> {
    let mut sources = sources(text, variables);
    sources.overrides =
        flags.iter().map(|flag| Override::parse("--set", flag).expect("key=value")).collect();
    load(&sources)
}

/// The settings of a text without problems.
pub(crate) fn settings(text: &str) -> Settings {
    with(text, &[], &[]).settings
}

/// What the layers give, without problems.
pub(crate) fn with(text: &str, variables: &[(&str, &str)], flags: &[&str]) -> Loaded {
    try_load(text, variables, flags).unwrap_or_else(|problems| panic!("{problems}"))
}

/// The message for a text with problems.
pub(crate) fn problems(text: &str) -> String {
    refused(text, &[], &[])
}

/// The message for layers with problems.
pub(crate) fn refused(text: &str, variables: &[(&str, &str)], flags: &[&str]) -> String {
    match try_load(text, variables, flags) {
        Ok(loaded) => panic!("loaded: {loaded:?}"),
        Err(problems) => problems.to_string(),
    }
}

/// The least that loads, with further lines.
pub(crate) fn least_and(lines: &str) -> String {
    format!("{LEAST}{lines}")
}

/// One model `m` with these workers, one a line.
pub(crate) fn workers(lines: &[&str]) -> String {
    let mut text = "models:\n- name: m\n  workers:\n".to_owned();
    for line in lines {
        text.push_str("  - {");
        text.push_str(line);
        text.push_str("}\n");
    }
    text
}
