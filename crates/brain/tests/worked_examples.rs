//! The worked examples of docs/policies, read off the pages and put to the brain: one prefill worker p,
//! one decode worker d. Settings are the page's YAML block, each row below it is one request.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use std::collections::BTreeMap;
use std::fs;
use std::num::NonZeroU32;
use std::path::{Path as File, PathBuf};
use std::time::Duration;

use pointsman_brain::{
    Ask, Brain, Budget, Factor, Flag, Guard, Held, IslBounding, KvGuard, Ladder, MaxLocalPrefill,
    Path, PrefillLoad, Reading, Role, Rule, Settings, Share, ShortPrompt, Signal, Slo, Slot, Time,
    UncachedTokens, WorkerSpec,
};

const P: Slot = Slot(0);
const D: Slot = Slot(1);
const NOW: Time = Time(0);

fn pages() -> PathBuf {
    File::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/policies")
}

/// The settings of an example; keys must be used up, so that a page cannot say what is not done.
struct Example(BTreeMap<String, String>);

impl Example {
    fn take(&mut self, key: &str) -> Option<f64> {
        let text = self.0.remove(key)?;
        let number = text.trim_start_matches("{chunks: ").trim_end_matches('}');
        Some(number.parse().unwrap_or_else(|_| panic!("{key}: {text}")))
    }

    fn tokens(&mut self, key: &str) -> Option<u32> {
        self.take(key).map(|number| number as u32)
    }

    fn rule(&mut self) -> Rule {
        let share = |number| Share::new(number).unwrap();
        let mut isl = IslBounding::default();
        isl.eff_isl_threshold = self.tokens("eff_isl_threshold").unwrap_or(isl.eff_isl_threshold);
        if let Some(ratio) = self.take("eff_isl_ratio_threshold") {
            isl.eff_isl_ratio_threshold = share(ratio);
        }
        let busy = self.take("prefill_busy_threshold").and_then(Factor::new);
        let load = || PrefillLoad { prefill_busy_threshold: busy.unwrap() };
        match self.0.remove("policy").unwrap().as_str() {
            "always_remote" => Rule::AlwaysRemote,
            "always_local" => Rule::AlwaysLocal,
            "short_prompt" => Rule::ShortPrompt(ShortPrompt {
                short_prefill_tokens: self.tokens("short_prefill_tokens").unwrap(),
            }),
            "isl_bounding" => Rule::IslBounding(isl),
            "prefill_load" => Rule::PrefillLoad(load()),
            "isl_or_load" => Rule::IslOrLoad(isl, load()),
            "isl_and_load" => Rule::IslAndLoad(isl, load()),
            "uncached_tokens" => Rule::UncachedTokens(UncachedTokens {
                non_cached_tokens: self.tokens("non_cached_tokens").unwrap_or_default(),
                prompt_tokens: self.tokens("prompt_tokens").unwrap_or_default(),
            }),
            "max_local_prefill" => Rule::MaxLocalPrefill(MaxLocalPrefill {
                max_local_prefill_length: self.tokens("max_local_prefill_length").unwrap(),
            }),
            "predicted" => Rule::Predicted,
            other => panic!("there is no policy {other}"),
        }
    }

    fn settings(&mut self) -> Settings {
        // Loads of earlier requests are put on the workers by wish.
        let mut settings = Settings { allow_path_override: true, ..Settings::default() };
        settings.policy.rule = self.rule();
        settings.policy.bounds.floor_tokens = self.tokens("floor_tokens").unwrap_or_default();
        settings.policy.bounds.ceiling_tokens = self.tokens("ceiling_tokens");
        if let Some(text) = self.0.remove("slo") {
            let ms = |key: &str| {
                let (_, value) = text.split_once(&format!("{key}: ")).unwrap();
                let end = value.find([',', '}']).unwrap();
                Some(Duration::from_millis(value[..end].parse().unwrap()))
            };
            settings.slo = Slo { ttft: ms("ttft_ms"), itl: ms("itl_ms") };
        }
        if let Some(text) = self.0.remove("predicted") {
            assert_eq!(text, "{cold_policy: predicted}");
            settings.predicted.cold = Rule::Predicted;
        }
        if let Some(threshold) = self.take("decode_busy_threshold") {
            settings.guards.decode_kv = KvGuard::Above(Share::new(threshold).unwrap());
        }
        if let Some(chunks) = self.take("local_prefill_budget") {
            settings.guards.local_prefill_budget = Budget::Chunks(Factor::new(chunks).unwrap());
        }
        settings
    }
}

/// One row: column to cell.
type Row = BTreeMap<String, String>;

fn number(row: &Row, column: &str) -> Option<u32> {
    row.get(column).filter(|cell| *cell != "unknown").map(|cell| cell.parse().unwrap())
}

fn check(page: &str, yaml: &BTreeMap<String, String>, row: &Row) {
    let case = format!("{page}: {yaml:?} {row:?}");
    let mut example = Example(yaml.clone());
    let mut brain = Brain::new(example.settings());
    let block_size = NonZeroU32::new(example.tokens("block_size").unwrap_or(1)).unwrap();
    let spec = |role, chunk, capacity_blocks| WorkerSpec {
        role,
        local_prefill: role == Role::Decode,
        block_size,
        capacity_blocks,
        max_num_batched_tokens: chunk,
        publishes_events: true,
        skips_cached_blocks: true,
        answers_when_fetched: false,
    };
    let capacity = example.tokens("capacity_blocks").map(u64::from);
    let chunk = example.tokens("max_num_batched_tokens");
    let max_new_tokens = example.tokens("max_tokens");
    assert!(example.0.is_empty(), "{case}: unknown settings {:?}", example.0);
    brain.add(P, spec(Role::Prefill, number(row, "budget"), None), NOW);
    brain.add(D, spec(Role::Decode, chunk, capacity), NOW);

    let ladder = Ladder::new(brain.settings());
    for (column, path) in [("active", Path::Remote), ("in flight", Path::Local)] {
        if let Some(tokens) = number(row, column).filter(|tokens| *tokens > 0) {
            let mut earlier = Ask::new(tokens, &[], &ladder);
            earlier.wish = Some(path);
            assert_eq!(brain.decide(&earlier, NOW).unwrap().path, path, "{case}: {column}");
        }
    }
    for _ in 0..number(row, "streaming").unwrap_or_default() {
        let mut earlier = Ask::new(4_000, &[], &ladder);
        earlier.wish = Some(Path::Remote);
        let streaming = brain.decide(&earlier, NOW).unwrap();
        brain.prefill_done(streaming.booking, NOW);
        brain.first_token(streaming.booking, NOW);
    }
    if let Some(usage) = row.get("usage") {
        let kv_usage = Share::new(usage.parse().unwrap());
        brain.reading(D, Reading { kv_usage, ..Reading::default() }, NOW);
    }

    let overlap = number(row, "overlap").unwrap();
    assert_eq!(overlap % block_size, 0, "{case}: not whole blocks");
    let held = [Held::default(), Held { device: overlap / block_size, host: 0, disk: 0 }];
    let mut ask = Ask::new(number(row, "ISL").unwrap(), &held, &ladder);
    ask.max_new_tokens = max_new_tokens;
    let decision = brain.decide(&ask, NOW).unwrap();
    assert_eq!(decision.effective_isl_tokens, number(row, "u").unwrap(), "{case}");
    for (kind, score) in [("local", decision.scores.local), ("remote", decision.scores.remote)] {
        let shown = |column: &str, value: f64, digits: usize| {
            if let Some(cell) = row.get(column) {
                assert_eq!(*cell, format!("{value:.digits$}"), "{case}: {column}");
            }
        };
        if let Some(score) = score {
            shown(&format!("{kind} TTFT"), score.ttft_seconds * 1e3, 0);
            shown(&format!("{kind} ITL"), score.itl_seconds * 1e3, 1);
            shown(&format!("{kind} J"), score.j, 2);
        }
    }
    let said = (decision.path.as_str(), decision.why.as_str());
    assert_eq!(said, (row["path"].as_str(), row["reason"].as_str()), "{case}");
}

/// Checks every example of a page; how many there were.
fn check_page(page: &str, text: &str) -> usize {
    let (mut yaml, mut columns, mut rows) = (BTreeMap::new(), Vec::new(), 0);
    let (_, examples) = text.split_once("## Worked example").unwrap_or_else(|| panic!("{page}"));
    let mut in_yaml = false;
    for line in examples.lines() {
        if let Some(kind) = line.strip_prefix("```") {
            in_yaml = kind == "yaml";
            if in_yaml {
                yaml.clear();
                columns.clear();
            }
        } else if in_yaml {
            let (key, value) = line.split_once(": ").unwrap();
            yaml.insert(key.to_owned(), value.to_owned());
        } else if let Some(inner) = line.strip_prefix("| ") {
            let cells = inner.trim_end_matches('|').split('|').map(|cell| cell.trim().to_owned());
            if columns.is_empty() {
                columns = cells.collect();
            } else if !inner.starts_with("---") {
                check(page, &yaml, &columns.iter().cloned().zip(cells).collect());
                rows += 1;
            }
        }
    }
    rows
}

#[test]
fn the_brain_does_what_the_pages_say() {
    let mut checked = 0;
    for entry in fs::read_dir(pages()).unwrap() {
        let path = entry.unwrap().path();
        let page = path.file_name().unwrap().to_str().unwrap().to_owned();
        if page != "README.md" {
            let rows = check_page(&page, &fs::read_to_string(&path).unwrap());
            assert!(rows > 0, "{page} has no example");
            checked += rows;
        }
    }
    assert!(checked >= 30, "only {checked} examples were found");
}

#[test]
fn the_index_explains_every_reason_guard_and_fallback() {
    let index = fs::read_to_string(pages().join("README.md")).unwrap();
    let why = include_str!("../src/why.rs");
    let labels =
        why.lines().filter_map(|line| line.trim().strip_prefix("Why::")?.split_once("=> \""));
    let mut labels: Vec<&str> = labels.filter_map(|(_, label)| label.strip_suffix("\",")).collect();
    assert!(labels.len() > 25, "why.rs is written another way: {labels:?}");
    labels.extend(Signal::ALL.iter().map(|signal| signal.as_str()));
    let guards = fs::read_to_string(pages().join("guards.md")).unwrap();
    for label in labels {
        assert!(index.contains(&format!("`{label}`")), "{label} is not in docs/policies/README.md");
    }
    for guard in Guard::ALL {
        assert!(guards.contains(&format!("| `{}` |", guard.as_str())), "{guard:?}");
    }
}
