//! `pointsman replay` as people run it: figures, refusals, and the report in a browser.
#![allow(clippy::expect_used, clippy::panic, reason = "it is all test")]

mod command;

use std::path::Path;
use std::process::Command;

use command::{Ended, run};
use serde_json::Value;

fn trace(name: &str) -> String {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../sim/tests/fixtures/traces");
    dir.join(name).display().to_string()
}

fn replay(traces: &[&str], more: &[&str]) -> Ended {
    let traces: Vec<String> = traces.iter().map(|name| trace(name)).collect();
    let mut args = vec!["replay"];
    args.extend(traces.iter().map(String::as_str));
    args.extend(more);
    run(&args, &[], "")
}

fn rows(ended: &Ended) -> Vec<Value> {
    assert_eq!(ended.code, Some(0), "{ended:?}");
    let whole: Value = serde_json::from_str(&ended.out).expect("JSON");
    whole["results"].as_array().expect("results").clone()
}

const CONVERSATION: &str = "mooncake_first40.jsonl";
const CODE: &str = "azure_first11.csv";
const SESSIONS: &str = "session_first3x3.jsonl";

#[test]
fn each_row_of_the_json_has_exactly_these_keys() {
    let ended = replay(&[CODE], &["--policies", "always_remote", "--goodput", "--json"]);
    let rows = rows(&ended);
    assert_eq!(rows.len(), 1);
    let keys: Vec<&str> = rows[0].as_object().expect("a row").keys().map(String::as_str).collect();
    let mut expected = vec![
        "trace",
        "policy",
        "seed",
        "rate",
        "goodput_rate",
        "slo_attainment",
        "ttft_p50_ms",
        "ttft_p95_ms",
        "ttft_p99_ms",
        "itl_mean_ms",
        "itl_p99_ms",
        "local_share",
        "ttft_error_median",
    ];
    expected.sort_unstable();
    assert_eq!(keys, expected);
    assert_eq!(
        (&rows[0]["trace"], &rows[0]["policy"]),
        (&"azure_first11".into(), &"always_remote".into())
    );
    assert!(rows[0]["goodput_rate"].as_f64().expect("a rate") > 0.0);
}

#[test]
fn results_that_nobody_can_read_are_an_error() {
    let full = std::fs::File::options().write(true).open("/dev/full").expect("a full device");
    let mut command = Command::new(env!("CARGO_BIN_EXE_pointsman"));
    command.args(["replay", &trace(CODE), "--policies", "always_local"]).stdout(full);
    let ended = command.output().expect("the binary starts");
    let said = String::from_utf8_lossy(&ended.stderr);
    assert_eq!(ended.status.code(), Some(1), "{said}");
    assert!(said.contains("standard output cannot be written"), "{said}");
}

#[test]
fn equal_commands_give_equal_results_and_another_seed_others() {
    let more = ["--policies", "predicted,isl_or_load", "--seeds", "2", "--json", "--jobs"];
    let with = |jobs| replay(&[CONVERSATION, SESSIONS], &[&more[..], &[jobs]].concat());
    let one = with("1");
    let rows = rows(&one);
    assert_eq!(rows.len(), 8);
    assert_eq!(one.out, with("2").out);
    assert_eq!((&rows[0]["seed"], &rows[1]["seed"]), (&1.into(), &2.into()));
    assert_ne!(rows[0]["ttft_p50_ms"], rows[1]["ttft_p50_ms"]);
}

#[test]
fn the_policies_differ_as_their_names_say() {
    let policies = "always_remote,always_local,short_prompt:short_prefill_tokens=7000,predicted";
    let more = ["--set", "routing.local_prefill_budget=off", "--policies", policies, "--json"];
    let rows = rows(&replay(&[CONVERSATION], &more));
    let of = |key: &str| -> Vec<f64> {
        rows.iter().map(|row| row[key].as_f64().expect("a number")).collect()
    };
    let local = of("local_share");
    assert_eq!((local[0], local[1]), (0.0, 1.0));
    assert!(local[2] > 0.2 && local[2] < 0.9, "{local:?}");
    let attained = of("slo_attainment");
    assert!(attained[3] > 2.0 * attained[0], "{attained:?}");
}

#[test]
fn a_table_names_every_policy_of_the_fleet() {
    let ended = replay(&[CODE], &["--goodput"]);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    for policy in ["always_remote", "isl_bounding", "max_local_prefill", "predicted"] {
        assert!(ended.out.contains(policy), "{}", ended.out);
    }
    let unified = replay(&[CODE], &["--fleet", "4u"]);
    assert_eq!(unified.out.matches("azure_first11").count(), 2, "{}", unified.out);
}

#[test]
fn faults_make_it_worse_and_fail_nothing_that_can_be_served() {
    let with = |more: &[&str]| {
        let all = [&["--policies", "always_remote", "--json"], more].concat();
        rows(&replay(&[CONVERSATION], &all)).remove(0)
    };
    let p50 = |row: &Value| row["ttft_p50_ms"].as_f64().expect("a number");
    let plain = with(&[]);
    for faults in [["--slow-worker", "0:3"], ["--kill-worker", "1:0.5"]] {
        assert!(p50(&with(&faults)) > p50(&plain), "{faults:?}");
    }
    let lag = with(&["--metric-lag", "5", "--event-loss", "0.5", "--prior-scale", "3"]);
    assert!(p50(&lag) > 0.0);
}

#[test]
fn what_makes_no_sense_is_refused_in_words() {
    let wrong: [(&[&str], &str); 8] = [
        (&["--fleet", "2x"], "is not a fleet"),
        (&["--fleet", "2p"], "is not a fleet"),
        (&["--profile", "abacus"], "llama-3.1-70b-fp8-h100-tp4"),
        (&["--policies", "coin_toss"], "routing.policy"),
        (&["--policies", "isl_bounding:eff_isl_threshold"], "is not KEY=VALUE"),
        (&["--slow-worker", "9:1.5"], "has no worker 9"),
        (&["--event-loss", "1.5"], "--event-loss"),
        (&["--rate", "NaN"], "--rate"),
    ];
    for (args, words) in wrong {
        let ended = replay(&[CODE], args);
        assert_ne!(ended.code, Some(0), "{args:?}");
        assert!(ended.err.contains(words), "{args:?}: {}", ended.err);
    }
    let ended = run(&["replay", concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml")], &[], "");
    assert!(ended.err.contains("not a known trace format"), "{}", ended.err);
}

fn report(dir: &Path) -> String {
    let path = dir.join("report.html");
    let more = ["--goodput", "--report", path.to_str().expect("a path")];
    assert_eq!(replay(&[CONVERSATION, SESSIONS], &more).code, Some(0));
    std::fs::read_to_string(path).expect("the report")
}

#[test]
fn the_report_needs_nothing_else_and_says_what_to_do() {
    let dir = tempfile::tempdir().expect("a directory");
    let page = report(dir.path());
    for outside in ["http:", "https:", "src=", "href=", "@import", "<script"] {
        assert!(!page.contains(outside), "{outside}");
    }
    for words in [
        "Recommendation: predicted",
        "routing:\n  policy: predicted",
        "mooncake_first40",
        "session_first3x3",
        "Goodput, as a multiple",
        "TTFT, remote",
        "Share of requests that went local",
        "prefers-color-scheme: dark",
        "<pattern",
        "stroke-dasharray=\"8 4\"",
    ] {
        assert!(page.contains(words), "{words}");
    }
}

/// Runs the browser on a page; none where there is no browser.
fn browser(page: &Path, profile: &Path, more: &str) -> Option<Vec<u8>> {
    let fixed = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run \
                 --disable-background-networking --disable-component-update --disable-sync";
    let mut command = Command::new("/usr/bin/chromium");
    command.args(fixed.split_whitespace()).arg(format!("--user-data-dir={}", profile.display()));
    let output = command.arg(more).arg(format!("file://{}", page.display())).output().ok()?;
    assert!(output.status.success(), "{output:?}");
    Some(output.stdout)
}

#[test]
fn a_browser_shows_all_of_the_report() {
    let dir = tempfile::tempdir().expect("a directory");
    let page = report(dir.path());
    let path = dir.path().join("report.html");
    let Some(dom) = browser(&path, &dir.path().join("profile"), "--dump-dom") else { return };
    let dom = String::from_utf8(dom).expect("text");
    // A browser mends what is not well formed, and then there is more or less of it.
    for part in ["<svg", "<polyline", "<rect", "<figure", "<td>"] {
        assert!(page.matches(part).count() > 3, "{part}");
        assert_eq!(dom.matches(part).count(), page.matches(part).count(), "{part}");
    }
}
