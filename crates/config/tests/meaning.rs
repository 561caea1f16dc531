//! What is wrong with configurations whose every key is right by itself.

mod common;

use pointsman_config::{Detect, KvConnector, KvEvents};

use common::{least_and, problems, refused, settings, try_load, workers};

#[test]
fn no_models_is_a_problem() {
    let found = try_load("log: {filter: warn}", &[], &[]).expect_err("a problem").to_string();
    assert_eq!(found, "models: missing or empty; must list at least one model (p.yaml:1:1)");
}

#[test]
fn prefill_workers_need_decode_workers() {
    assert_eq!(
        problems(&workers(&["role: prefill, url: http://a:1"])),
        "models[0].workers: some have `role: prefill`, but none has `role: decode`; if workers \
         join at run time, set `expect_workers: true` (p.yaml:4:5)"
    );
}

#[test]
fn decode_workers_need_prefill_workers() {
    assert_eq!(
        problems(&workers(&["role: decode, url: http://a:1", "role: unified, url: http://b:1"])),
        "models[0].workers: some have `role: decode`, but none has `role: prefill`; ordinary \
         engines have `role: unified`; if workers join at run time, set `expect_workers: true` \
         (p.yaml:4:5)"
    );
}

#[test]
fn a_model_needs_workers_unless_they_join_at_run_time() {
    assert_eq!(
        problems("models: [{name: m}]"),
        "models[0].workers: missing or empty; if workers join at run time, set \
         `expect_workers: true` (p.yaml:1:10)"
    );
    assert_eq!(
        problems("models: [{name: m, expect_workers: true}]"),
        "models[0].expect_workers: true, but no worker can join; must be false, or \
         `admin.worker_api` true (p.yaml:1:36)"
    );
    let later = "models: [{name: m, expect_workers: true}]\nadmin: {worker_api: true}\n";
    assert!(settings(later).models[0].workers.is_empty());
}

#[test]
fn two_workers_at_one_url_are_one_too_many() {
    let two = ["role: unified, url: http://a:80/x", "role: unified, name: y, url: 'http://A/x/'"];
    assert_eq!(
        problems(&workers(&two)),
        "models[0].workers[1].url: \"http://A/x/\" is taken; models[0].workers[0] has that URL \
         (p.yaml:5:35)"
    );
}

#[test]
fn one_engine_may_serve_two_models_under_two_names() {
    let model = |name: &str, worker: &str| {
        format!("- {{name: {name}, workers: [{{role: unified, url: http://a:1{worker}}}]}}\n")
    };
    let same = format!("models:\n{}{}", model("m", ""), model("n", ""));
    assert_eq!(
        problems(&same),
        "models[1].workers[0].name: \"a:1\" is taken; models[0].workers[0] has that name, give \
         one of them another `name` (p.yaml:3:23)"
    );
    let named = format!("models:\n{}{}", model("m", ""), model("n", ", name: second"));
    assert_eq!(settings(&named).models[1].workers[0].name, "second");
}

#[test]
fn two_workers_with_one_name_are_refused() {
    let two =
        ["name: x, role: unified, url: http://a:1", "name: x, role: unified, url: http://b:1"];
    assert_eq!(
        problems(&workers(&two)),
        "models[0].workers[1].name: \"x\" is taken; models[0].workers[0] has that name, give one \
         of them another `name` (p.yaml:5:12)"
    );
}

#[test]
fn no_two_models_answer_to_one_name() {
    let workers = "workers: [{role: unified, url: http://a:1}]";
    let text = format!("models: [{{name: m, aliases: [n, ' '], adapters: [m], {workers}}}]");
    assert_eq!(
        problems(&text),
        "models[0].aliases[1]: empty; must be the name that clients send (p.yaml:1:33)\n\
         models[0].adapters[0]: \"m\" is taken; models[0].name has that name (p.yaml:1:50)"
    );
}

#[test]
fn policies_that_look_at_load_need_their_threshold() {
    for policy in ["prefill_load", "isl_or_load", "isl_and_load"] {
        assert_eq!(
            problems(&least_and(&format!("routing: {{policy: {policy}}}\n"))),
            format!(
                "routing.prefill_busy_threshold: missing; policy `{policy}` needs it, a number of \
                 at least 0 (p.yaml:2:10)"
            )
        );
    }
}

#[test]
fn a_shared_problem_in_routing_is_told_once_and_a_models_own_with_its_path() {
    let model = |name: &str, routing: &str| {
        format!("- {{name: {name}, workers: [{{role: unified, url: http://{name}:1}}]{routing}}}\n")
    };
    let models: String = [
        model("a", ""),
        model("b", ""),
        model("c", ", routing: {shadow: [{policy: isl_or_load}]}"),
    ]
    .concat();
    assert_eq!(
        problems(&format!("routing: {{policy: prefill_load}}\nmodels:\n{models}")),
        "routing.prefill_busy_threshold: missing; policy `prefill_load` needs it, a number of at \
         least 0 (p.yaml:1:10)\n\
         models[2].routing.prefill_busy_threshold: missing; policy `prefill_load` needs it, a \
         number of at least 0 (p.yaml:5:67)\n\
         models[2].routing.shadow[0].prefill_busy_threshold: missing; policy `isl_or_load` needs \
         it, a number of at least 0 (p.yaml:5:77)"
    );
}

#[test]
fn a_url_must_be_of_http_and_no_more_than_a_place() {
    let must = "is not allowed; must be an http:// or https:// URL, such as http://10.0.0.5:8100 \
                (p.yaml:4:26)";
    for url in [
        "https://a:0",
        "a:1",
        "http://",
        "http://a:0",
        "http://a:99999",
        "http://a:1?x=1",
        "http://a:1#x",
        "ftp://a",
        "http:/a",
        "http://a b",
        "",
    ] {
        let text = workers(&[&format!("role: unified, url: '{url}'")]);
        assert_eq!(problems(&text), format!("models[0].workers[0].url: {url:?} {must}"));
    }
}

#[test]
fn the_port_of_https_is_443() {
    let two = ["role: unified, url: https://a/x", "role: unified, url: 'https://A:443/x/'"];
    let told = problems(&workers(&two));
    assert!(told.contains("models[0].workers[0] has that URL"), "{told}");
}

#[test]
fn keys_of_clients_are_told_what_is_wrong_and_never_shown() {
    let hash = "0123456789abcdefABCDEF".repeat(3)[..64].to_owned();
    for (keys, told) in [
        ("auth: {keys: []}".to_owned(), "auth.keys: empty; must hold a key"),
        (
            "auth: {keys: [{name: a, sha256: my-secret}]}".to_owned(),
            "is no hash of a key; must be 64",
        ),
        ("admin: {key_sha256: my-secret}".to_owned(), "admin.key_sha256: is no hash"),
        (
            format!("auth: {{keys: [{{name: a, sha256: {hash}}}, {{name: b, sha256: {hash}}}]}}"),
            "auth.keys[1].sha256: is that of key `a` too",
        ),
        ("upstream: {tls: {certificate: a.pem}}".to_owned(), "upstream.tls.key: missing"),
        ("upstream: {tls: {key: a.pem}}".to_owned(), "upstream.tls.certificate: missing"),
        ("admin: {listen: {port: 8000}}".to_owned(), "admin.listen.port: is that of `listen` too"),
        ("listen: {tls: {certificate: a.pem}}".to_owned(), "listen.tls.key: missing"),
    ] {
        let text = format!("{}\n{keys}\n", workers(&["role: unified, url: http://a:1"]));
        let found = problems(&text);
        assert!(found.contains(told), "{keys}: {found}");
        assert!(!found.contains("my-secret"), "{found}");
    }
}

#[test]
fn a_url_with_v1_is_told_to_leave_it_out() {
    assert_eq!(
        problems(&workers(&["role: unified, url: http://a:1/v1/"])),
        "models[0].workers[0].url: \"http://a:1/v1/\" is not allowed; must be the URL without \
         /v1, such as http://10.0.0.5:8100 (p.yaml:4:26)"
    );
}

#[test]
fn a_password_in_a_url_is_not_repeated() {
    let found = problems(&workers(&["role: unified, url: 'http://joe:hunter2@a:1'"]));
    assert!(found.contains("\"http://***@a:1\" is not allowed"), "{found}");
    assert!(!found.contains("hunter2"), "{found}");
}

#[test]
fn event_endpoints_are_checked_for_the_way_they_are_used() {
    let at = |rest: &str| workers(&[&format!("role: unified, url: http://a:1, {rest}")]);
    let key = "models[0].workers[0].kv_events.endpoint:";
    for (endpoint, must) in [
        ("http://a:5", "a ZMQ endpoint, tcp://host:port or ipc:///path"),
        ("tcp://a", "a ZMQ endpoint, tcp://host:port or ipc:///path"),
        ("tcp://a:0", "a ZMQ endpoint, tcp://host:port or ipc:///path"),
        ("tcp://::1:5", "a ZMQ endpoint, tcp://host:port or ipc:///path"),
        ("tcp://*:5", "the engine's host where the router connects; `*` is for binding"),
    ] {
        let found = problems(&at(&format!("kv_events: {{endpoint: '{endpoint}'}}")));
        let expected = format!("{key} \"{endpoint}\" is not allowed; must be {must} (");
        assert!(found.starts_with(&expected), "{found}");
    }
    let found = problems(&at("ranks: 8, kv_events: {endpoint: 'tcp://b:65530'}"));
    assert!(found.contains("must be an endpoint whose port leaves room for every rank"), "{found}");
    let found = problems(&at("ranks: 2, kv_events: {endpoint: 'ipc:///run/kv'}"));
    assert!(found.contains("must be a tcp:// endpoint for a worker with several ranks"), "{found}");
    settings(&at("kv_events: {endpoint: 'tcp://*:5557', mode: bind}"));
    settings(&at("kv_events: {endpoint: 'tcp://[::1]:5557'}"));
}

#[test]
fn an_openai_engine_is_unified_and_has_no_ranks() {
    let found = problems(&workers(&[
        "role: decode, engine: openai, ranks: 2, url: http://a:1",
        "role: prefill, url: http://b:1",
    ]));
    assert_eq!(
        found,
        "models[0].workers[0].role: `engine: openai` hands no KV over; must be `unified` \
         (p.yaml:4:12)\n\
         models[0].workers[0].ranks: `engine: openai` has no ranks to address; must be 1 \
         (p.yaml:4:43)"
    );
}

#[test]
fn prefill_and_decode_workers_are_of_one_engine() {
    let mixed = ["role: prefill, engine: sglang, url: http://a:1", "role: decode, url: http://b:1"];
    let found = problems(&workers(&mixed));
    assert!(found.starts_with("models[0].workers: prefill and decode workers"), "{found}");
    settings(&workers(&[
        "role: prefill, engine: sglang, url: http://a:1",
        "role: decode, engine: sglang, url: http://b:1",
        "role: unified, engine: openai, url: http://c:1",
    ]));
}

#[test]
fn prefill_and_decode_workers_have_one_connector() {
    let prefill = "role: prefill, kv_connector: mooncake, bootstrap_port: 8998, url: http://a:1";
    let found = problems(&workers(&[prefill, "role: decode, url: http://b:1"]));
    assert!(found.contains("must all have the same `engine` and `kv_connector`"), "{found}");
    let decode = "role: decode, kv_connector: mooncake, url: http://b:1";
    let settings = settings(&workers(&[prefill, decode]));
    let workers = &settings.models[0].workers;
    assert!(workers.iter().all(|worker| worker.kv_connector == KvConnector::Mooncake));
    assert_eq!(workers[0].bootstrap_port.map(u16::from), Some(8998));
}

#[test]
fn keys_of_one_engine_are_refused_on_another() {
    for (worker, message) in [
        (
            "engine: sglang, role: unified, bootstrap_port: 1",
            "bootstrap_port: is for `role: prefill` with `engine: sglang` or `kv_connector: mooncake`",
        ),
        (
            "role: unified, bootstrap_host: h",
            "bootstrap_host: is for `role: prefill` with `engine: sglang` or `kv_connector: mooncake`",
        ),
        (
            "engine: sglang, role: unified, kv_connector: mooncake",
            "kv_connector: is for `engine: vllm` that hands KV over only",
        ),
        (
            "role: unified, kv_connector: mooncake",
            "kv_connector: is for `engine: vllm` that hands KV over only",
        ),
        (
            "engine: sglang, role: unified, takes_encoder_handles: true",
            "takes_encoder_handles: is for `engine: trtllm` only",
        ),
        (
            "engine: trtllm, role: unified, ranks: 2",
            "ranks: `engine: trtllm` has no ranks to address",
        ),
        (
            "engine: trtllm, role: unified, kv_events: {endpoint: 'tcp://a:1'}",
            "kv_events: `engine: trtllm` has no event sockets",
        ),
    ] {
        let found = problems(&workers(&[&format!("url: http://a:1, {worker}")]));
        assert!(found.contains(message), "{found}");
    }
}

#[test]
fn what_an_engine_can_do_is_asked_of_it_unless_it_is_written() {
    let of = |worker: &str| {
        let prefill = format!("role: prefill, url: http://p:1, engine: {}", &worker[..6]);
        let decode = format!("role: decode, url: http://d:1, engine: {worker}");
        let workers = settings(&workers(&[&prefill, &decode])).models[0].workers.clone();
        (workers[1].local_prefill, workers[1].skips_cached_blocks, workers[1].kv_events.clone())
    };
    assert_eq!(of("sglang"), (Detect::Auto, Detect::Auto, KvEvents::Auto));
    assert_eq!(of("trtllm"), (Detect::Yes, Detect::Auto, KvEvents::Auto));
    let written = "sglang, local_prefill: true, skips_cached_blocks: false, kv_events: off";
    assert_eq!(of(written), (Detect::Yes, Detect::No, KvEvents::Off));
    assert_eq!(Detect::Auto.or(Some(true)), Some(true));
    assert_eq!(Detect::No.or(Some(true)), Some(false));
}

#[test]
fn local_prefill_is_a_decode_workers_word() {
    assert_eq!(
        problems(&workers(&["role: unified, url: http://a:1, local_prefill: false"])),
        "models[0].workers[0].local_prefill: is for `role: decode` only; must be left out \
         (p.yaml:4:53)"
    );
}

#[test]
fn all_ranks_of_a_model_fit_a_slot_number() {
    let lines: Vec<String> =
        (0..64).map(|i| format!("role: unified, url: http://a{i}:1, ranks: 1024")).collect();
    let lines: Vec<&str> = lines.iter().map(String::as_str).collect();
    assert_eq!(
        problems(&workers(&lines)),
        "models[0].workers: 65536 ranks together; must be at most 65535 (p.yaml:4:5)"
    );
}

#[test]
fn other_texts_are_checked_for_what_they_are() {
    assert_eq!(
        problems(&least_and("routing: {session_affinity: {header: 'a b'}}\n")),
        "routing.session_affinity.header: \"a b\" is not allowed; must be the name of a request \
         header, such as x-session-id (p.yaml:2:38)"
    );
    assert_eq!(
        problems(&least_and("health: {path: healthz}\n")),
        "health.path: \"healthz\" is not allowed; must be a path that begins with /, such as \
         /health (p.yaml:2:16)"
    );
    assert_eq!(
        problems(&least_and("log: {filter: ''}\n")),
        "log.filter: \"\" is not allowed; must be a level such as info (p.yaml:2:15)"
    );
    assert_eq!(
        problems(&least_and("routing: {breaker: {open: 5m}}\n")),
        "routing.breaker.open_max: 1m is below `open`; must be at least 5m (p.yaml:2:20)"
    );
}

#[test]
fn an_api_key_comes_from_a_variable_or_a_file_and_never_shows() {
    let text = workers(&["role: unified, url: http://a:1, api_key_env: KEY"]);
    let loaded = common::with(&text, &[("KEY", "sk-secret")], &[]);
    let key = loaded.settings.models[0].workers[0].api_key.clone().expect("a key");
    assert_eq!(key.reveal(), "sk-secret");
    assert!(!format!("{loaded:?}").contains("sk-secret"));

    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("key");
    std::fs::write(&path, "sk-file\n").expect("written");
    let line = format!("role: unified, url: http://a:1, api_key_file: '{}'", path.display());
    let settings = settings(&workers(&[&line]));
    assert_eq!(settings.models[0].workers[0].api_key.as_ref().expect("a key").reveal(), "sk-file");
}

#[test]
fn an_api_key_that_is_not_there_stops_the_start_and_is_not_shown() {
    let text = workers(&["role: unified, url: http://a:1, api_key_env: KEY"]);
    assert_eq!(
        problems(&text),
        "models[0].workers[0].api_key_env: names the variable KEY, which is not set (p.yaml:4:51)"
    );
    assert_eq!(
        refused(&text, &[("KEY", "a secret\twith blanks")], &[]),
        "models[0].workers[0].api_key_env: holds no key; must hold visible ASCII characters \
         without blanks (p.yaml:4:51)"
    );
    assert_eq!(
        problems(&workers(&["role: unified, url: http://a:1, api_key_file: /nowhere/key"])),
        "models[0].workers[0].api_key_file: \"/nowhere/key\" cannot be read: No such file or \
         directory (os error 2) (p.yaml:4:52)"
    );
    assert_eq!(
        problems(&workers(&["role: unified, url: http://a:1, api_key_file: x, api_key_env: y"])),
        "models[0].workers[0].api_key_file: `api_key_env` is given too; only one may be \
         (p.yaml:4:52)"
    );
}
