//! `pointsman load` as people run it: against a fleet, against nobody, and told to stop.
#![allow(clippy::expect_used, clippy::panic, reason = "it is all test")]

mod command;

use std::io::Read;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use command::{Running, run};
use serde_json::{Value, json};

/// Two sessions of two turns and a third of one: the prompts of second turns repeat first ones.
fn sessions(dir: &Path) -> PathBuf {
    let turn = |session: &str, ids: &[u64], start: (&str, f64)| {
        json!({"session_id": session, "input_length": ids.len() * 512 - 100, "output_length": 8,
               "hash_ids": ids, start.0: start.1})
    };
    let turns = [
        turn("a", &[1, 2, 3], ("timestamp", 0.0)),
        turn("a", &[4], ("delay", 5.0)),
        turn("b", &[1, 5], ("timestamp", 10.0)),
        turn("b", &[6, 7], ("delay", 5.0)),
        turn("c", &[8], ("timestamp", 20.0)),
    ];
    let lines: Vec<String> = turns.iter().map(Value::to_string).collect();
    let path = dir.join("sessions.jsonl");
    std::fs::write(&path, lines.join("\n")).expect("the trace");
    path
}

fn results(out: &str) -> Value {
    let whole: Value = serde_json::from_str(out).expect("JSON");
    whole["results"][0].clone()
}

#[test]
fn a_trace_of_sessions_is_served_by_a_fleet_and_reported() {
    let dir = tempfile::tempdir().expect("a directory");
    let (trace, page) = (sessions(dir.path()), dir.path().join("page.html"));
    let (trace, page) = (trace.to_str().expect("a path"), page.to_str().expect("a path"));
    let up = ["up", "--port", "0", "--speed", "inf", "--policy", "always_local"];
    let fleet = Running::start(&up, &[], "Ctrl-C");
    let url = format!("http://{}", fleet.addr("pointsman is ready on"));
    let args = ["load", "--trace", trace, "--target", &url, "--label", "here", "--json"];
    let ended = run(&[&args[..], &["--report", page]].concat(), &[], "");
    assert_eq!(ended.code, Some(0), "{ended:?}");
    let row = results(&ended.out);
    assert_eq!(row.as_object().expect("a row").len(), 13);
    assert_eq!((&row["trace"], &row["policy"]), (&json!("sessions"), &json!("here")));
    assert_eq!(row["local_share"], 1.0);
    assert!(row["ttft_p50_ms"].as_f64().expect("a time") > 0.0);
    // Whatever the policy, the router says what it predicts.
    assert!(row["ttft_error_median"].as_f64().is_some_and(|error| error > 0.0), "{row}");
    assert!(ended.err.contains("half of the predicted TTFTs were within"), "{}", ended.err);
    assert!(ended.err.contains("5 of 5 requests ended"), "{}", ended.err);
    assert!(ended.err.contains("0 failed"), "{}", ended.err);
    let page = std::fs::read_to_string(page).expect("the report");
    assert!(page.contains("TTFT") && page.contains("here"));
}

#[test]
fn a_target_that_is_not_there_is_told_and_fails_the_command() {
    let dir = tempfile::tempdir().expect("a directory");
    let trace = sessions(dir.path());
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let url = format!("http://{}", listener.local_addr().expect("an address"));
    drop(listener);
    let trace = trace.to_str().expect("a path");
    let ended = run(&["load", "--trace", trace, "--target", &url], &[], "");
    assert_eq!(ended.code, Some(1), "{ended:?}");
    assert!(ended.err.contains("5 failed"), "{}", ended.err);
    for (target, words) in [("ftp://x", "is not a URL"), ("127.0.0.1:1", "is not a URL")] {
        let ended = run(&["load", "--trace", trace, "--target", target], &[], "");
        assert_eq!(ended.code, Some(1), "{ended:?}");
        assert!(ended.err.contains(words), "{}", ended.err);
    }
}

fn spawn(args: &[&str]) -> Child {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pointsman"));
    command.args(args).env_clear().stdout(Stdio::piped()).stderr(Stdio::piped());
    command.spawn().expect("the binary starts")
}

#[test]
fn an_interrupt_ends_it_with_what_was_seen_so_far() {
    let dir = tempfile::tempdir().expect("a directory");
    let trace = sessions(dir.path());
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let url = format!("http://{}", listener.local_addr().expect("an address"));
    let trace = trace.to_str().expect("a path");
    let child = spawn(&["load", "--trace", trace, "--target", &url, "--json"]);
    // It has sent a request, which nobody answers.
    let (mut stream, _) = listener.accept().expect("a connection");
    stream.read_exact(&mut [0; 16]).expect("a request");
    let kill = format!("kill -INT {}", child.id());
    assert!(Command::new("sh").args(["-c", &kill]).status().expect("sh").success());
    let output = child.wait_with_output().expect("it ends");
    assert_eq!(output.status.code(), Some(130), "{output:?}");
    let row = results(&String::from_utf8(output.stdout).expect("text"));
    assert_eq!(row["slo_attainment"], 0.0);
    let told = String::from_utf8(output.stderr).expect("text");
    assert!(told.contains("0 of 5 requests ended"), "{told}");
}
