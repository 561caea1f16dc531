//! House rules that a machine can check, over the whole repository. CONTRIBUTING.md explains them.
//!
//! Plain text search on purpose: a rule is a few lines that say what they look for. A rule that
//! needs the compiler is a lint in the root Cargo.toml, not here.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// Lines of a source file, and of a function, above which a reason is due.
const LONG_FILE: usize = 600;
const LONG_FUNCTION: usize = 70;
const REASON: &str = "// tidy: long because ";

/// Our crates that each crate may use. The arrows point one way: see ARCHITECTURE.md.
const MAY_USE: &[(&str, &[&str])] = &[
    ("brain", &[]),
    ("kv", &[]),
    ("wire", &[]),
    ("tokens", &[]),
    ("config", &["brain"]),
    ("sim", &["brain", "kv", "tokens", "wire"]),
    ("serve", &["brain", "config", "kv", "tokens", "wire"]),
    ("cli", &["config", "serve", "sim"]),
];

/// Crates with tasks and sockets, or that start them.
const ASYNC: &[&str] = &["serve", "sim", "cli"];

/// Crates that speak on standard output.
const SPEAKING: &[&str] = &["cli"];

/// The seams through which the environment comes in.
const ENVIRONMENT_SEAMS: &[&str] = &["crates/cli/src/sources.rs", "crates/cli/src/up.rs"];

/// Words that tell the code's past or future instead of what it is.
const HISTORY: &[&str] = &[
    "for now",
    "previously",
    "formerly",
    "used to be",
    "legacy",
    "v2",
    "phase 1",
    "phase 2",
    "phase 3",
];
const REMINDERS: &[&str] = &["TODO", "FIXME", "XXX", "HACK"];

/// Further ones on pages. In code they mostly tell of a run: of a worker that is no longer cheaper.
const HISTORY_ON_PAGES: &[&str] = &["no longer", "not any more", "new in"];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// A file of the repository: its path from the root, and its text.
struct File {
    path: String,
    text: String,
}

impl File {
    fn read(path: &Path) -> File {
        let text = fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let path = path.strip_prefix(root()).unwrap().to_str().unwrap().to_owned();
        File { path, text }
    }

    /// The crate that it belongs to.
    fn package(&self) -> &str {
        self.path.split('/').nth(1).unwrap_or_default()
    }

    /// Whether all of it is tests, of what lies beside it.
    fn is_test(&self) -> bool {
        self.path.ends_with("/tests.rs") || self.path.contains("/tests/")
    }

    /// Its lines, counted from 1, each split into code and comment.
    fn lines(&self) -> impl Iterator<Item = (usize, &str, &str)> {
        (1..).zip(self.text.lines()).map(|(number, line)| {
            let at = line.find("// ").or_else(|| line.find("///")).or_else(|| line.find("//!"));
            let (code, comment) = line.split_at(at.unwrap_or(line.len()));
            (number, code, comment)
        })
    }

    /// Places where `wrong` finds something in the code (comments left out).
    fn code_where(&self, wrong: impl Fn(&str) -> bool) -> Vec<String> {
        let found = self.lines().filter(|(_, code, _)| wrong(code));
        found.map(|(number, code, _)| format!("{}:{number}: {}", self.path, code.trim())).collect()
    }
}

/// Every file below `dir` that ends in `.ext`; fixtures and build outputs left out.
fn files(dir: &str, ext: &str) -> Vec<File> {
    let mut found = Vec::new();
    let mut open = vec![root().join(dir)];
    while let Some(dir) = open.pop() {
        for entry in fs::read_dir(&dir).unwrap_or_else(|e| panic!("{}: {e}", dir.display())) {
            let path = entry.unwrap().path();
            if path.is_dir() && !path.ends_with("fixtures") && !path.ends_with("target") {
                open.push(path);
            } else if path.extension().is_some_and(|found| found == ext) {
                found.push(File::read(&path));
            }
        }
    }
    found.sort_by(|a, b| a.path.cmp(&b.path));
    found
}

fn sources() -> Vec<File> {
    let of_crates = files("crates", "rs").into_iter();
    of_crates.filter(|file| file.path.split('/').nth(2) == Some("src")).collect()
}

/// The pages that people read: those at the root, and all of docs.
fn pages() -> Vec<File> {
    let mut pages = files("docs", "md");
    for entry in fs::read_dir(root()).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|ext| ext == "md") {
            pages.push(File::read(&path));
        }
    }
    pages
}

fn none(found: &[String], rule: &str) {
    assert!(found.is_empty(), "{rule}:\n  {}", found.join("\n  "));
}

/// Whether `word` stands in `text` and not within another word or a path.
fn says(text: &str, word: &str) -> bool {
    let joins = |c: char| c.is_alphanumeric() || "_/.-".contains(c);
    text.match_indices(word).any(|(at, _)| {
        let before = text[..at].chars().next_back();
        let after = text[at + word.len()..].chars().next();
        !before.is_some_and(joins) && !after.is_some_and(|c| c.is_alphanumeric() || c == '_')
    })
}

#[test]
fn every_source_file_begins_by_saying_what_it_is_for() {
    let bare = sources().into_iter().filter(|file| !file.text.starts_with("//!"));
    none(&bare.map(|file| file.path).collect::<Vec<_>>(), "these files do not begin with `//!`");
}

#[test]
fn a_long_file_has_a_reason() {
    let mut long = Vec::new();
    for file in sources() {
        let lines = file.text.lines().count();
        if lines > LONG_FILE && !file.text.contains(REASON) {
            long.push(format!("{}: {lines} lines", file.path));
        }
    }
    none(&long, "split these files, or say why not with `// tidy: long because ...`");
}

#[test]
fn a_long_function_has_a_reason() {
    let mut long = Vec::new();
    for file in sources().iter().filter(|file| !file.is_test()) {
        let lines: Vec<&str> = file.text.lines().collect();
        for (at, line) in lines.iter().enumerate() {
            let indent = line.len() - line.trim_start().len();
            if !says(line, "fn") || line.trim_start().starts_with("//") || line.ends_with(';') {
                continue;
            }
            // The code is formatted, so the function ends at the brace under its first letter.
            let end = format!("{}}}", &line[..indent]);
            let body = lines[at..].iter().take_while(|line| !line.starts_with(&end));
            let body: Vec<_> = body.collect();
            if body.len() > LONG_FUNCTION && !body.iter().any(|line| line.contains(REASON)) {
                long.push(format!("{}:{}: {} lines", file.path, at + 1, body.len() + 1));
            }
        }
    }
    none(&long, "split these functions, or say why not with `// tidy: long because ...`");
}

#[test]
fn nothing_is_left_half_done() {
    let wrong =
        |code: &str| ["todo!", "unimplemented!", "dbg!"].iter().any(|mark| says(code, mark));
    let found: Vec<_> = sources().iter().flat_map(|file| file.code_where(wrong)).collect();
    none(&found, "finish these");
}

#[test]
fn comments_and_pages_say_what_is_and_not_what_was() {
    let mut found = Vec::new();
    let mut look = |path: &str, number: usize, text: &str, words: &[&str]| {
        let lower = text.to_lowercase();
        if words.iter().any(|word| says(&lower, word))
            || REMINDERS.iter().any(|word| says(text, word))
        {
            found.push(format!("{path}:{number}: {}", text.trim()));
        }
    };
    // This file names the words.
    let ours = files("crates", "rs").into_iter().filter(|file| !file.path.ends_with("tidy.rs"));
    for file in ours {
        file.lines().for_each(|(number, _, comment)| look(&file.path, number, comment, HISTORY));
    }
    // A change log tells of changes.
    for page in pages().iter().filter(|page| page.path != "CHANGELOG.md") {
        for (number, line) in (1..).zip(page.text.lines()) {
            look(&page.path, number, line, &[HISTORY, HISTORY_ON_PAGES].concat());
        }
    }
    none(&found, "say what is, not what was or will be");
}

#[test]
fn the_environment_comes_in_at_one_seam() {
    let reads = |code: &str| code.contains("std::env") || code.contains("env::var");
    let mut found = Vec::new();
    for file in &sources() {
        if !ENVIRONMENT_SEAMS.contains(&file.path.as_str()) {
            found.extend(file.code_where(reads));
        }
    }
    none(&found, "hand the environment over as `Sources::env` of the config crate");
}

#[test]
fn libraries_do_not_print() {
    let prints = ["println!", "eprintln!", "print!", "eprint!"];
    let mut found = Vec::new();
    let silent = |file: &&File| !SPEAKING.contains(&file.package()) && !file.is_test();
    for file in sources().iter().filter(silent) {
        found.extend(file.code_where(|code| prints.iter().any(|name| says(code, name))));
    }
    none(&found, "return it, or log it with `tracing`");
}

/// What a crate's manifest names under `[dependencies]`.
fn dependencies(package: &str) -> Vec<String> {
    let manifest = File::read(&root().join("crates").join(package).join("Cargo.toml"));
    let mut section = "";
    let mut names = Vec::new();
    for line in manifest.text.lines() {
        if line.starts_with('[') {
            section = line;
        } else if section == "[dependencies]" && !line.starts_with('#') {
            let name = line.split(['.', ' ', '=']).next().unwrap_or_default();
            names.extend((!name.is_empty()).then(|| name.to_owned()));
        }
    }
    names
}

#[test]
fn crates_depend_in_one_direction() {
    let mut found = Vec::new();
    for entry in fs::read_dir(root().join("crates")).unwrap() {
        let package = entry.unwrap().file_name().into_string().unwrap();
        let Some((_, may_use)) = MAY_USE.iter().find(|(name, _)| *name == package) else {
            found.push(format!("{package} has no line in MAY_USE"));
            continue;
        };
        for name in dependencies(&package) {
            match name.strip_prefix("pointsman-") {
                Some(ours) if !may_use.contains(&ours) => {
                    found.push(format!("{package} must not use {ours}"));
                }
                None if name.starts_with("tokio") && !ASYNC.contains(&package.as_str()) => {
                    found.push(format!("{package} must not use {name}: it has no tasks"));
                }
                _ => {}
            }
        }
    }
    none(&found, "see ARCHITECTURE.md for the directions");
}

/// The names of all metrics, as `/metrics` shows them.
fn metrics() -> BTreeSet<String> {
    let files = ["metrics.rs", "kv_metrics.rs"].map(|name| format!("crates/serve/src/{name}"));
    let text = files.map(|file| File::read(&root().join(file)).text).concat();
    let dense: String = text.split_whitespace().collect();
    let mut names = BTreeSet::new();
    for (call, suffix) in [
        ("counter(r,\"", "_total"),
        ("gauge(r,\"", ""),
        ("float(r,\"", ""),
        ("histogram(r,\"", ""),
        ("r.register(\"", ""),
    ] {
        for (at, _) in dense.match_indices(call) {
            let rest = &dense[at + call.len()..];
            names.extend(rest.split('"').next().map(|name| format!("pointsman_{name}{suffix}")));
        }
    }
    assert!(names.len() > 20, "metrics.rs registers its metrics another way: {names:?}");
    names
}

/// The metrics that a text names.
fn named_metrics(text: &str) -> BTreeSet<String> {
    let words = text.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_'));
    let histogram = |word: &str| {
        let ends = ["_bucket", "_sum", "_count"];
        ends.iter().find_map(|end| word.strip_suffix(end)).unwrap_or(word).to_owned()
    };
    let is_crate = |word: &str| MAY_USE.iter().any(|(name, _)| word == format!("pointsman_{name}"));
    words.filter(|word| word.starts_with("pointsman_") && !is_crate(word)).map(histogram).collect()
}

#[test]
fn the_pages_name_every_metric_and_no_other() {
    let known = metrics();
    let operations = File::read(&root().join("docs/operations.md"));
    let told = named_metrics(&operations.text);
    let missing: Vec<_> = known.difference(&told).cloned().collect();
    none(&missing, "docs/operations.md does not explain these metrics");
    for page in pages() {
        let made_up: Vec<_> = named_metrics(&page.text).difference(&known).cloned().collect();
        none(&made_up, &format!("{} names metrics that do not exist", page.path));
    }
}

/// Every key of the configuration with its default, off the generated reference.
fn defaults() -> BTreeMap<String, String> {
    let page = File::read(&root().join("docs/reference/configuration.md"));
    let (mut section, mut defaults) = (String::new(), BTreeMap::new());
    for line in page.text.lines() {
        if let Some(title) = line.strip_prefix("## ") {
            section = title.trim_matches('`').to_owned();
        } else if line.starts_with("| `") {
            let cells: Vec<&str> = line.trim_start_matches("| ").split(" | ").collect();
            if let [key, _, default, ..] = cells[..] {
                defaults.insert(format!("{section}.{}", key.trim_matches('`')), default.to_owned());
            }
        }
    }
    assert!(defaults.len() > 50, "the reference is written another way: {defaults:?}");
    defaults
}

#[test]
fn tables_of_keys_give_the_defaults_that_hold() {
    let known = defaults();
    let mut wrong = Vec::new();
    for page in pages().iter().filter(|page| !page.path.starts_with("docs/reference/")) {
        let mut tells_defaults = false;
        for line in page.text.lines() {
            let mut cells = line.split('|').skip(1).map(str::trim);
            let (key, told) = (cells.next().unwrap_or_default(), cells.next().unwrap_or_default());
            // In force for the table that it heads, so any line of another kind ends it.
            tells_defaults =
                (key == "key" && told == "default") || (tells_defaults && !key.is_empty());
            let name = key.strip_prefix('`').and_then(|key| key.strip_suffix('`'));
            let Some(name) = name.filter(|name| tells_defaults && !name.contains('`')) else {
                continue;
            };
            match known.get(name) {
                Some(default) if told.starts_with(default.as_str()) => {}
                Some(default) => wrong.push(format!("{}: {name} is {default}", page.path)),
                None => wrong.push(format!("{}: there is no {name}", page.path)),
            }
        }
    }
    none(&wrong, "these defaults are not those of docs/reference/configuration.md");
}

/// Targets of a page's links and pictures, code blocks left out.
fn links(page: &File) -> Vec<String> {
    let mut targets = Vec::new();
    for (at, block) in page.text.split("```").enumerate() {
        if at % 2 == 1 {
            continue;
        }
        for (start, end) in [("](", [')', ' ']), ("src=\"", ['"', ' ']), ("srcset=\"", ['"', ' '])]
        {
            for (at, _) in block.match_indices(start) {
                let target = block[at + start.len()..].split(end).next().unwrap_or_default();
                targets.push(target.trim().to_owned());
            }
        }
    }
    targets.retain(|target| !target.contains("://") && !target.starts_with("mailto:"));
    targets
}

/// The anchors that a page's headings make.
fn anchors(text: &str) -> BTreeSet<String> {
    let headings = text.lines().filter(|line| line.starts_with('#'));
    let anchor = |line: &str| {
        let title = line.trim_start_matches('#').trim().to_lowercase();
        let kept = title.chars().filter(|c| c.is_alphanumeric() || " -_".contains(*c));
        kept.map(|c| if c == ' ' { '-' } else { c }).collect()
    };
    headings.map(anchor).collect()
}

#[test]
fn links_lead_somewhere_and_to_every_page() {
    let mut broken = Vec::new();
    let mut linked = BTreeSet::new();
    for page in pages() {
        let dir = root().join(&page.path).parent().unwrap().to_owned();
        for link in links(&page) {
            let (target, anchor) = link.split_once('#').unwrap_or((&link, ""));
            let target = if target.is_empty() { root().join(&page.path) } else { dir.join(target) };
            let Ok(target) = target.canonicalize() else {
                broken.push(format!("{}: {link}", page.path));
                continue;
            };
            let is_page = target.extension().is_some_and(|ext| ext == "md");
            if is_page
                && !anchor.is_empty()
                && !anchors(&fs::read_to_string(&target).unwrap()).contains(anchor)
            {
                broken.push(format!("{}: {link}", page.path));
            }
            if target != root().join(&page.path).canonicalize().unwrap() {
                linked.insert(target);
            }
        }
    }
    none(&broken, "these links lead nowhere");
    let all = pages();
    let found = |page: &File| {
        let named = |other: &File| other.path != page.path && other.text.contains(&page.path);
        linked.contains(&root().join(&page.path).canonicalize().unwrap()) || all.iter().any(named)
    };
    let lost = all.iter().filter(|page| page.path.starts_with("docs/") && !found(page));
    let lost: Vec<_> = lost.map(|page| page.path.clone()).collect();
    none(&lost, "no page leads to these");
}
