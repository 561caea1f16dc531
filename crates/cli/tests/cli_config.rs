//! Where settings come from and what is said of wrong ones: file, environment, names from elsewhere,
//! flags; and `check`, against a live fleet and a broken one.
#![allow(clippy::expect_used, clippy::panic, reason = "it is all test")]

mod command;
mod support;

use std::path::{Path, PathBuf};

use command::{Ended, Running, run};
use pointsman_sim::mock::{EngineConfig, Faults, MockEngine, Role};
use serde_json::{Value, json};
use support::Request;
use tempfile::TempDir;

/// A file of its own directory.
struct Written {
    _dir: TempDir,
    path: PathBuf,
}

impl Written {
    fn new(text: &str) -> Written {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("pointsman.yaml");
        std::fs::write(&path, text).expect("a file");
        Written { _dir: dir, path }
    }

    fn path(&self) -> &str {
        self.path.to_str().expect("a path of text")
    }
}

const SOUND: &str = "
listen: {port: 0}
models:
  - name: m
    tokenizer: builtin
    workers:
      - {name: p0, role: prefill, url: 'http://127.0.0.1:9'}
      - {name: d0, role: decode, url: 'http://127.0.0.1:9/d'}
";

fn offline(config: &str, env: &[(&str, &str)], more: &[&str]) -> Ended {
    let file = Written::new(config);
    run(&[&["check", "--offline", "-c", file.path()], more].concat(), env, "")
}

#[test]
fn schema_and_reference_are_those_of_the_pages() {
    let page = |name: &str| {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/reference").join(name);
        std::fs::read_to_string(path).expect("a page")
    };
    for (what, name) in [("schema", "pointsman.schema.json"), ("reference", "configuration.md")] {
        let ended = run(&["config", what], &[], "");
        assert_eq!((ended.code, ended.err.as_str()), (Some(0), ""));
        // Not `assert_eq`: the pages are long.
        assert!(ended.out.trim() == page(name).trim(), "docs/reference/{name} is another one");
    }
    assert_eq!(run(&["config", "nonsense"], &[], "").code, Some(2));
}

#[test]
fn the_command_says_what_it_can_do() {
    let bare = run(&[], &[], "");
    assert_eq!(bare.code, Some(2));
    for command in ["up", "serve", "engine", "check", "explain", "config"] {
        assert!(bare.err.contains(&format!("\n  {command} ")), "{bare:?}");
        let help = run(&[command, "--help"], &[], "");
        assert_eq!(help.code, Some(0));
        assert!(help.out.contains("Usage: pointsman"), "{help:?}");
    }
    let version = run(&["--version"], &[], "");
    assert_eq!(version.out, format!("pointsman {}\n", env!("CARGO_PKG_VERSION")));
}

#[test]
fn a_wrong_configuration_stops_the_start_with_the_key_and_the_place() {
    let workers =
        "workers: [{role: prefill, url: 'http://a:1'}, {role: decode, url: 'http://b:1'}]";
    let model = format!("models: [{{name: m, {workers}}}]\n");
    let with = |more: &str| format!("{model}{more}\n");
    let wrong = [
        ("models: [".to_owned(), "pointsman.yaml:"),
        ("[1, 2]".to_owned(), "mapping"),
        (String::new(), "the file is empty; it must list the models"),
        (
            with("routing: {polcy: always_local}"),
            "routing.polcy: unknown key; did you mean `policy`?",
        ),
        (
            with("listen: {port: 70000}"),
            "listen.port: 70000 is not allowed; must be an integer from 0 to 65535",
        ),
        (with("routing: {eff_isl_ratio_threshold: .nan}"), "routing.eff_isl_ratio_threshold: .nan"),
        (with("routing: {eff_isl_ratio_threshold: 1.1}"), "routing.eff_isl_ratio_threshold: 1.1"),
        (with("routing: {cost: {temperature: .inf}}"), "routing.cost.temperature: .inf"),
        (with("routing: {policy: prefill_load}"), "prefill_busy_threshold"),
        (with("routing: {policy: fastest}"), "routing.policy: \"fastest\""),
        (with("timeouts: {connect: 2}"), "timeouts.connect: 2"),
        (with("limits: {max_in_flight: 0}"), "limits.max_in_flight: 0"),
        (with("upstream: {idle: 1s, idle: 2s}"), "the key `idle` is written twice"),
        (with("log: {filter: 'nonsense=loud'}"), "log.filter"),
        (model.replace("http://b:1", "http://a:1"), "models[0].workers[1]"),
        (model.replace("decode", "prefill"), "models[0].workers"),
        (format!("models: [{{name: m, {workers}}}, {{name: m, {workers}}}]"), "models[1].name"),
        (
            "models: [{name: m, tokenizer: {dir: /nowhere}, WORKERS}]".replace("WORKERS", workers),
            "/nowhere",
        ),
    ];
    for (config, words) in wrong {
        let file = Written::new(&config);
        let ended = run(&["serve", "-c", file.path()], &[], "");
        assert_eq!(ended.code, Some(1), "{config}: {ended:?}");
        assert!(ended.err.starts_with("pointsman: "), "{config}: {ended:?}");
        assert!(ended.err.contains(words), "{config}: {words:?} is not in {}", ended.err);
        assert_eq!(ended.out, "");
        // Each cause once.
        let causes = ended.err.matches("No such file or directory").count();
        assert!(causes < 2, "{ended:?}");
    }
}

#[test]
fn all_problems_are_told_at_once() {
    let ended =
        offline(&format!("{SOUND}routing: {{polcy: x, seed: -1}}\nlimitz: {{}}\n"), &[], &[]);
    assert_eq!(ended.code, Some(1));
    for words in ["routing.polcy", "routing.seed", "limitz", "pointsman.yaml:9"] {
        assert!(ended.err.contains(words), "{words}: {}", ended.err);
    }
}

#[test]
fn what_cannot_be_read_or_listened_on_is_said() {
    let ended = run(&["serve", "-c", "/nowhere/pointsman.yaml"], &[], "");
    assert_eq!(ended.code, Some(1));
    assert!(ended.err.contains("/nowhere/pointsman.yaml"), "{ended:?}");
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
    let port = taken.local_addr().expect("an address").port().to_string();
    let file = Written::new(SOUND);
    let ended = run(&["serve", "-c", file.path(), "--port", &port], &[], "");
    assert_eq!(ended.code, Some(1));
    assert!(ended.err.contains(&format!("127.0.0.1:{port}")), "{ended:?}");
    assert!(ended.err.contains("listen"), "{ended:?}");
}

#[test]
fn variables_override_the_file_and_flags_override_both() {
    let file = format!("{SOUND}routing: {{policy: always_local}}\n");
    let wrong = |env: &[(&str, &str)], flags: &[&str], words: &str| {
        let ended = offline(&file, env, flags);
        assert_eq!(ended.code, Some(1), "{ended:?}");
        assert!(ended.err.contains(words), "{words:?} is not in {}", ended.err);
    };
    let variable = "POINTSMAN__ROUTING__POLICY";
    wrong(&[(variable, "fastest")], &[], "environment variable POINTSMAN__ROUTING__POLICY");
    wrong(&[("POINTSMAN__ROUTING__POLCY", "x")], &[], "POINTSMAN__ROUTING__POLCY");
    wrong(&[("POINTSMAN__MODELS__0__WORKERS__1__RANKS", "0")], &[], "models[0].workers[1].ranks");
    wrong(&[], &["--set", "routing.policy=fastest"], "--set");
    wrong(&[], &["--set", "routing.policy"], "--set");
    // A wrong value that is overridden is none.
    let ended = offline(&file, &[(variable, "always_remote")], &[]);
    assert_eq!((ended.code, ended.err.as_str()), (Some(0), ""));
    let ended =
        offline(&file, &[(variable, "always_remote")], &["--set", "routing.floor_tokens=7"]);
    assert_eq!(ended.code, Some(0), "{ended:?}");
}

/// The policy of a router that was started so.
async fn policy(config: &str, env: &[(&str, &str)], flags: &[&str]) -> (Value, String) {
    let file = Written::new(config);
    let args = [&["serve", "-c", file.path(), "--port", "0"], flags].concat();
    let router = Running::start(&args, env, "pointsman is ready on");
    let (_, status) =
        Request::get("/v1/pointsman/status").json(router.addr("pointsman is ready on")).await;
    let (ended, _, log) = router.end("TERM");
    assert!(ended.success(), "{log}");
    (status["models"][0]["policy"].clone(), log)
}

#[tokio::test]
async fn the_setting_that_counts_is_the_last_of_file_alias_variable_and_flag() {
    let file = format!("{SOUND}routing: {{policy: always_local}}\n");
    let alias = ("DYNAMO_USE_CONDITIONAL_DISAGGREGATION", "true");
    let variable = ("POINTSMAN__ROUTING__POLICY", "always_remote");
    let flag = ["--set", "routing.policy=uncached_tokens"];
    assert_eq!(policy(&file, &[], &[]).await.0, "always_local");
    assert_eq!(policy(&file, &[alias], &[]).await.0, "short_prompt");
    assert_eq!(policy(&file, &[alias, variable], &[]).await.0, "always_remote");
    assert_eq!(policy(&file, &[alias, variable], &flag).await.0, "uncached_tokens");
}

#[tokio::test]
async fn each_name_from_elsewhere_is_noted_with_its_native_key() {
    // What is said of each: the native key, or the other name that decides it.
    let said = [
        ("DYN_ROUTER_CONDITIONAL_DISAGG", "true", "DYN_ROUTER_CONDITIONAL_DISAGG_POLICY"),
        ("DYN_ROUTER_CONDITIONAL_DISAGG_POLICY", "isl_or_load", "routing.policy: isl_or_load"),
        ("DYN_ROUTER_CONDITIONAL_DISAGG_EFF_ISL_THRESHOLD", "1000", "routing.eff_isl_threshold"),
        (
            "DYN_ROUTER_CONDITIONAL_DISAGG_EFF_ISL_RATIO_THRESHOLD",
            "0.5",
            "routing.eff_isl_ratio_threshold",
        ),
        (
            "DYN_ROUTER_CONDITIONAL_DISAGG_PREFILL_BUSY_THRESHOLD",
            "2",
            "routing.prefill_busy_threshold",
        ),
        (
            "DYN_ROUTER_CONDITIONAL_DISAGG_DECODE_BUSY_THRESHOLD",
            "0.8",
            "routing.decode_busy_threshold",
        ),
        ("KV_ROUTER_USE_ISL_THRESHOLD", "1", "KV_ROUTER_ISL_THRESHOLD"),
        ("KV_ROUTER_ISL_THRESHOLD", "512", "routing.isl_gate: 512"),
    ];
    let env = said.map(|(name, value, _)| (name, value));
    let noted = |text: &str| {
        for (name, _, words) in said {
            let line = text.lines().find(|line| line.contains(&format!(" {name} ")));
            assert!(line.is_some_and(|line| line.contains(words)), "{name}: {words} in {text}");
        }
    };
    let checked = offline(SOUND, &env, &[]);
    assert_eq!(checked.code, Some(0), "{checked:?}");
    noted(&checked.out);
    let (policy, log) = policy(SOUND, &env, &[]).await;
    assert_eq!(policy, "isl_or_load");
    noted(&log);
}

#[test]
fn a_name_from_elsewhere_with_a_wrong_value_stops_the_start() {
    for (name, value) in [
        ("DYN_ROUTER_CONDITIONAL_DISAGG_EFF_ISL_RATIO_THRESHOLD", "nan"),
        ("DYN_ROUTER_CONDITIONAL_DISAGG_EFF_ISL_RATIO_THRESHOLD", "1.5"),
        ("DYN_ROUTER_CONDITIONAL_DISAGG_PREFILL_BUSY_THRESHOLD", "inf"),
        ("DYN_ROUTER_CONDITIONAL_DISAGG_EFF_ISL_THRESHOLD", "-3"),
        ("DYN_ROUTER_CONDITIONAL_DISAGG_EFF_ISL_THRESHOLD", "many"),
        ("DYN_ROUTER_CONDITIONAL_DISAGG", "perhaps"),
        ("DYN_ROUTER_CONDITIONAL_DISAGG_POLICY", "fastest"),
        ("DYN_ROUTER_CONDITIONAL_DISAGG_CONFIG", "{\"eff_isl_threshold\": \"x\"}"),
        ("DYNAMO_SHORT_PREFILL_THRESHOLD_TOKENS", "1.5"),
    ] {
        let ended = offline(SOUND, &[(name, value)], &[]);
        assert_eq!(ended.code, Some(1), "{name}={value}: {ended:?}");
        assert!(
            ended.err.contains(name) && ended.err.contains("must"),
            "{name}={value}: {ended:?}"
        );
    }
}

#[tokio::test]
async fn the_log_can_be_json_and_as_loud_as_wanted() {
    let flags = ["--set", "log.format=json", "--set", "log.filter=debug"];
    let (_, log) = policy(SOUND, &[("DYN_ROUTER_CONDITIONAL_DISAGG", "true")], &flags).await;
    let lines: Vec<Value> =
        log.lines().map(|line| serde_json::from_str(line).expect("a line of JSON")).collect();
    assert!(lines.iter().all(|line| line["level"].is_string() && line["timestamp"].is_string()));
    assert!(lines.iter().any(|line| line["level"] == "DEBUG"), "{log}");
    let (_, log) = policy(SOUND, &[], &["--set", "log.filter=error"]).await;
    assert_eq!(log, "");
}

async fn engine(role: Role, change: impl FnOnce(&mut EngineConfig)) -> MockEngine {
    let mut config = EngineConfig { model: "m".into(), ..EngineConfig::of(role) };
    change(&mut config);
    MockEngine::start(config).await.expect("the engine starts")
}

/// What `check` says of a fleet with these settings over it.
async fn check(engines: &[(&str, &MockEngine)], over: Value) -> Ended {
    let worker = |(role, engine): &(&str, &MockEngine)| {
        json!({"name": format!("{role}-0"), "role": role, "url": engine.url(),
               "max_num_batched_tokens": 8192})
    };
    let workers: Vec<Value> = engines.iter().map(worker).collect();
    let mut config = json!({"models": [{"name": "m", "tokenizer": "builtin", "workers": workers}]});
    support::merge(&mut config, over);
    let file = Written::new(&config.to_string());
    tokio::task::spawn_blocking(move || run(&["check", "-c", file.path()], &[], ""))
        .await
        .expect("it runs")
}

fn says(ended: &Ended, words: &[&str]) {
    for words in words {
        assert!(ended.out.contains(words), "{words:?} is not in {}{}", ended.out, ended.err);
    }
}

#[tokio::test]
async fn a_live_fleet_that_keeps_its_promises_passes_the_check() {
    let p = engine(Role::Prefill, |_| {}).await;
    let d = engine(Role::Decode, |config| config.version = "0.31.2".into()).await;
    let ended = check(&[("prefill", &p), ("decode", &d)], json!({"routing": {"retries": 0}})).await;
    assert_eq!(ended.code, Some(0), "{ended:?}");
    says(
        &ended,
        &[
            "model m  (policy predicted)",
            "prefill-0",
            "decode-0",
            "0.31.2",
            "0 problems, 0 warnings",
        ],
    );
    assert_eq!(ended.err, "");
    assert!(p.stats()["requests"].as_array().is_some_and(Vec::is_empty), "nothing was generated");
}

#[tokio::test]
async fn a_worker_that_does_not_answer_is_a_problem_and_so_is_a_model_that_it_does_not_have() {
    let p = engine(Role::Prefill, |config| config.model = "another".into()).await;
    let d = engine(Role::Decode, |_| {}).await;
    d.set_faults(Faults { unhealthy: true, ..Faults::default() });
    let ended = check(&[("prefill", &p), ("decode", &d)], json!({})).await;
    assert_eq!(ended.code, Some(1), "{ended:?}");
    says(
        &ended,
        &[
            "PROBLEM  does not answer its health check",
            "PROBLEM  serves [\"another\"] and not `m`",
            "PROBLEM  no request can be served",
            "3 problems",
        ],
    );
    // Nobody is there at all.
    let url = d.url();
    d.stop().await;
    let gone = json!({"models": [{"name": "m", "workers": [{"role": "unified", "url": url}]}]});
    let ended = check(&[], gone).await;
    assert_eq!(ended.code, Some(1), "{ended:?}");
    says(&ended, &["does not answer its health check", "2 problems"]);
}

#[tokio::test]
async fn the_check_says_what_can_never_fire_and_is_content() {
    let p = engine(Role::Prefill, |_| {}).await;
    let d = engine(Role::Decode, |config| config.kv_events = None).await;
    d.set_faults(Faults {
        metrics: pointsman_sim::mock::Lies { fail: true, ..Default::default() },
        ..Faults::default()
    });
    let over = json!({"routing": {"policy": "isl_bounding", "isl_gate": 10, "shadow": ["max_local_prefill"]}});
    let ended = check(&[("prefill", &p), ("decode", &d)], over).await;
    assert_eq!(ended.code, Some(0), "{ended:?}");
    says(
        &ended,
        &[
            "warning  tells no KV event endpoint",
            "warning  tells no KV capacity: the decode_kv guard is skipped on it",
            "warning  policy isl_bounding can never go local: no worker that can prefill locally publishes KV events",
            "warning  shadow policy max_local_prefill can never go local",
            "warning  guard decode_kv can never veto",
            "warning  isl_gate is always waived",
            "warning  there is one prefill worker",
            "0 problems, 7 warnings",
        ],
    );
}
