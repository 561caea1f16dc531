//! Defaults < file < aliases < environment < flags, and what each may say.

mod common;

use std::num::NonZeroU64;
use std::path::PathBuf;
use std::time::Duration;

use common::{LEAST, least_and, refused, settings, sources, with, workers};
use pointsman_brain as brain;
use pointsman_config::{
    Approximate, Detect, Endpoint, Engine, KvEvents, LogFormat, Override, Role, Session,
    SocketMode, Sources, Tokenizer, load,
};

const IN_FLIGHT: &str = "POINTSMAN__LIMITS__MAX_IN_FLIGHT";

#[test]
fn each_layer_overrides_the_one_before() {
    let in_flight = |text: &str, variables: &[(&str, &str)], flags: &[&str]| {
        with(text, variables, flags).settings.limits.max_in_flight.get()
    };
    let file = least_and("limits: {max_in_flight: 1}\n");
    assert_eq!(in_flight(LEAST, &[], &[]), 16_384);
    assert_eq!(in_flight(&file, &[], &[]), 1);
    assert_eq!(in_flight(&file, &[(IN_FLIGHT, "2")], &[]), 2);
    assert_eq!(in_flight(&file, &[(IN_FLIGHT, "2")], &["limits.max_in_flight=3"]), 3);
}

#[test]
fn the_later_of_two_flags_counts() {
    let flags = ["limits.max_in_flight=3", "limits.max_in_flight=4"];
    assert_eq!(with(LEAST, &[], &flags).settings.limits.max_in_flight.get(), 4);
}

#[test]
fn everything_can_come_from_the_environment() {
    let variables = [
        ("POINTSMAN__MODELS", "[{name: m, workers: [{role: unified, url: 'http://a:1'}]}]"),
        ("POINTSMAN__MODELS__0__WORKERS__1", "{role: unified, url: 'http://b:1'}"),
        ("POINTSMAN__MODELS__0__WORKERS__1__LABELS", "{zone: b}"),
        ("POINTSMAN__LISTEN__PORT", "0"),
    ]
    .map(|(name, value)| (name.into(), value.into()));
    let sources = Sources { env: variables.to_vec(), ..Sources::default() };
    let settings = load(&sources).unwrap_or_else(|problems| panic!("{problems}")).settings;
    assert_eq!(settings.models[0].workers[1].name, "b:1");
    assert_eq!(settings.models[0].workers[1].labels["zone"], "b");
    assert_eq!(settings.listen.port(), 0);
}

#[test]
fn everything_can_come_from_flags() {
    let flags = ["models[0].name=m", "models.0.workers.0={role: unified, url: 'http://a:1'}"];
    let overrides = flags.map(|flag| Override::parse("--set", flag).expect("key=value")).to_vec();
    let loaded = load(&Sources { overrides, ..Sources::default() });
    let settings = loaded.unwrap_or_else(|problems| panic!("{problems}")).settings;
    assert_eq!(settings.models[0].workers[0].url, "http://a:1/");
}

#[test]
fn a_variable_can_hold_a_mapping_that_is_laid_over_the_file() {
    let file = least_and("limits: {max_in_flight: 1, retry_after: 5s}\n");
    let loaded = with(&file, &[("POINTSMAN__LIMITS", "{max_in_flight: 2}")], &[]);
    assert_eq!(loaded.settings.limits.max_in_flight.get(), 2);
    assert_eq!(loaded.settings.limits.retry_after, Duration::from_secs(5));
}

#[test]
fn a_wrong_variable_is_named_with_key_value_and_range() {
    assert_eq!(
        refused(LEAST, &[(IN_FLIGHT, "-5")], &[]),
        "limits.max_in_flight: -5 is not allowed; must be an integer of at least 1 (environment \
         variable POINTSMAN__LIMITS__MAX_IN_FLIGHT)"
    );
    assert_eq!(
        refused(LEAST, &[("POINTSMAN__LIMITS__MAX_INFLIGHT", "5")], &[]),
        "limits.max_inflight: unknown key; did you mean `max_in_flight`? (environment variable \
         POINTSMAN__LIMITS__MAX_INFLIGHT)"
    );
    assert_eq!(
        refused(LEAST, &[("POINTSMAN__LISTEN__PORT", " ")], &[]),
        "POINTSMAN__LISTEN__PORT is empty; give it a value or unset it"
    );
    assert_eq!(
        refused(LEAST, &[("POINTSMAN__LOG__FILTER", "[")], &[]),
        "log.filter: \"[\" cannot be read: unclosed bracket '[' (environment variable \
         POINTSMAN__LOG__FILTER)"
    );
    assert_eq!(
        refused(LEAST, &[("POINTSMAN__", "x")], &[]),
        "POINTSMAN__ names no key; must be like POINTSMAN__LIMITS__MAX_IN_FLIGHT"
    );
    assert_eq!(
        refused(LEAST, &[("POINTSMAN__MODELS__5__NAME", "x")], &[]),
        "models[5].name: no such place; elements before it: 1 (environment variable \
         POINTSMAN__MODELS__5__NAME)"
    );
}

#[cfg(unix)]
#[test]
fn a_variable_that_is_not_utf8_is_named() {
    use std::os::unix::ffi::OsStringExt;
    let mut sources = sources(LEAST, &[]);
    let bad = std::ffi::OsString::from_vec(vec![0xff]);
    sources.env = vec![("POINTSMAN__LOG__FILTER".into(), bad.clone()), ("OTHER".into(), bad)];
    let found = load(&sources).expect_err("a problem").to_string();
    assert_eq!(found, "POINTSMAN__LOG__FILTER is not valid UTF-8");
}

#[test]
fn a_wrong_flag_is_named() {
    let mut sources = sources(LEAST, &[]);
    let flag = |flag: &str, key: &str, value: &str| Override {
        flag: flag.to_owned(),
        key: key.to_owned(),
        value: value.to_owned(),
    };
    sources.overrides = vec![flag("--port", "listen.port", "x"), flag("--set", "a..b", "1")];
    assert_eq!(
        load(&sources).expect_err("a problem").to_string(),
        "\"a..b\" names no key; must be like limits.max_in_flight (flag --set)\n\
         listen.port: \"x\" is not allowed; must be an integer from 0 to 65535 (flag --port)"
    );
    let found = Override::parse("--set", "limits").expect_err("a problem").to_string();
    assert_eq!(found, "\"limits\" is not allowed; must be key=value (flag --set)");
}

#[test]
fn other_peoples_variables_are_left_alone() {
    let variables = [("POINTSMAN_PORT", "tcp://10.0.0.1:8000"), ("PATH", "/bin"), ("RUST_LOG", "")];
    assert!(with(LEAST, &variables, &[]).notices.is_empty());
}

#[test]
fn json_is_yaml() {
    let text =
        r#"{"models": [{"name": "m", "workers": [{"role": "unified", "url": "http://a:1"}]}]}"#;
    assert_eq!(settings(text).models[0].name, "m");
}

#[test]
fn anchors_and_merge_keys_save_repetition() {
    let text = "models:\n- name: m\n  workers:\n  - &w {role: unified, url: http://a:1, ranks: 2}\n  \
                - {<<: *w, url: http://b:1}\n";
    assert_eq!(settings(text).models[0].workers[1].ranks.get(), 2);
}

#[test]
fn a_models_routing_overrides_single_keys_of_the_common_one() {
    let text = "routing: {policy: isl_or_load, eff_isl_threshold: 100, prefill_busy_threshold: 1, retries: 5}\n\
                models:\n\
                - {name: a, workers: [{role: unified, url: http://a:1}]}\n\
                - {name: b, workers: [{role: unified, url: http://b:1}], routing: {eff_isl_threshold: 7}}\n";
    let settings = settings(text);
    let threshold = |i: usize| match settings.models[i].routing.policy.rule {
        brain::Rule::IslOrLoad(isl, _) => isl.eff_isl_threshold,
        other => panic!("{other:?}"),
    };
    assert_eq!((threshold(0), threshold(1)), (100, 7));
    assert_eq!(settings.models[1].routing.retries, 5);
}

#[test]
fn shadow_policies_have_the_parameters_around_them_unless_they_have_their_own() {
    let text = least_and(
        "routing: {short_prefill_tokens: 9, floor_tokens: 3, shadow: [short_prompt, \
         {policy: short_prompt, short_prefill_tokens: 4}, {policy: isl_bounding, eff_isl_threshold: 8}]}\n",
    );
    let routing = &settings(&text).models[0].routing;
    let rules: Vec<brain::Rule> = routing.shadow.iter().map(|policy| policy.rule).collect();
    let short = |short_prefill_tokens| {
        brain::Rule::ShortPrompt(brain::ShortPrompt { short_prefill_tokens })
    };
    let isl = brain::IslBounding { eff_isl_threshold: 8, ..brain::IslBounding::default() };
    assert_eq!(rules, [short(9), short(4), brain::Rule::IslBounding(isl)]);
    assert!(routing.shadow.iter().all(|policy| policy.bounds.floor_tokens == 3));
}

#[test]
fn what_is_not_written_is_what_the_brain_defaults_to() {
    let mut resolved = settings(LEAST).models[0].routing.clone();
    let defaults = brain::Settings::default();
    resolved.seed = defaults.seed;
    resolved.session_affinity = defaults.session_affinity;
    assert_eq!(format!("{resolved:?}"), format!("{defaults:?}"));
}

#[test]
fn a_seed_that_is_not_written_differs_from_start_to_start() {
    let seed = |text: &str| settings(text).models[0].routing.seed;
    assert_ne!(seed(LEAST), seed(LEAST));
    assert_eq!(seed(&least_and("routing: {seed: 18446744073709551615}\n")), u64::MAX);
}

#[test]
fn every_word_of_routing_reaches_the_brain() {
    let text = least_and(
        "routing:\n  policy: uncached_tokens\n  non_cached_tokens: 1\n  prompt_tokens: 2\n  \
         ceiling_tokens: 3\n  decode_busy_threshold: off\n  local_prefill_budget: {tokens: 4}\n  \
         isl_gate: 0\n  cost: {overlap_weight: 0, active_requests_weight: 5, temperature: 0.5}\n  \
         session_affinity: user\n  max_sessions: 6\n  breaker: {failures: 7, open: 2s, open_max: 9s, \
         failed_checks: 8}\n  require_remote: true\n  allow_path_override: true\n  \
         output_allowance_tokens: 10\n",
    );
    let model = &settings(&text).models[0];
    let routing = &model.routing;
    let uncached = brain::UncachedTokens { non_cached_tokens: 1, prompt_tokens: 2 };
    assert_eq!(routing.policy.rule, brain::Rule::UncachedTokens(uncached));
    assert_eq!(routing.policy.bounds.ceiling_tokens, Some(3));
    assert_eq!(routing.guards.decode_kv, brain::KvGuard::Off);
    assert_eq!(routing.guards.local_prefill_budget, brain::Budget::Tokens(4));
    assert_eq!(routing.isl_gate, brain::IslGate::UnifiedUpTo(0));
    assert_eq!(routing.cost.overlap_weight.get(), 0.0);
    assert_eq!(routing.cost.active_requests_weight.get(), 5.0);
    assert_eq!(routing.cost.temperature.get(), 0.5);
    assert!(routing.session_affinity && model.session == Session::User);
    assert_eq!(routing.max_sessions, 6);
    assert_eq!((routing.breaker.failures, routing.breaker.failed_checks), (7, 8));
    assert_eq!(routing.breaker.open, Duration::from_secs(2));
    assert_eq!(routing.breaker.open_max, Duration::from_secs(9));
    assert!(routing.require_remote && routing.allow_path_override);
    assert_eq!(routing.output_allowance_tokens, 10);
}

#[test]
fn every_policy_can_be_written_by_its_name_in_the_brain() {
    for name in [
        "always_remote",
        "always_local",
        "short_prompt",
        "isl_bounding",
        "prefill_load",
        "isl_or_load",
        "isl_and_load",
        "uncached_tokens",
        "max_local_prefill",
        "predicted",
    ] {
        let text = format!("routing: {{policy: {name}, prefill_busy_threshold: 0.5}}\n");
        let rule = settings(&least_and(&text)).models[0].routing.policy.rule;
        assert_eq!(rule.as_str(), name);
    }
}

#[test]
fn a_worker_is_what_was_written() {
    let settings = settings(&workers(&[
        "name: p, role: prefill, url: 'http://[::1]:8100/base/', ranks: 1, block_size: 16, \
         capacity_blocks: 1000, max_num_batched_tokens: 8192, takes_prompt_ids: false, kv_lease: 8m, \
         kv_events: {endpoint: 'tcp://h:5557', replay_endpoint: 'ipc:///r', mode: connect, topic: t}",
        "role: decode, url: http://D:8200, local_prefill: false, kv_events: off",
    ]));
    let [p, d] = settings.models[0].workers.as_slice() else { panic!("two workers") };
    assert_eq!((p.name.as_str(), p.role, p.engine), ("p", Role::Prefill, Engine::Vllm));
    assert_eq!(
        (p.url.host(), p.url.port_u16(), p.url.path()),
        (Some("[::1]"), Some(8100), "/base")
    );
    assert_eq!(p.block_size.map(std::num::NonZeroU32::get), Some(16));
    assert_eq!(p.capacity_blocks, NonZeroU64::new(1000));
    assert_eq!(p.takes_prompt_ids, Detect::No);
    assert_eq!(p.kv_lease, Duration::from_secs(480));
    let KvEvents::At(stream) = &p.kv_events else { panic!("sockets") };
    assert_eq!(stream.endpoint, Endpoint::Tcp { host: "h".to_owned(), port: 5557 });
    assert_eq!(stream.replay, Some(Endpoint::Ipc(PathBuf::from("/r"))));
    assert_eq!((stream.topic.as_str(), stream.mode), ("t", SocketMode::Connect));
    assert_eq!([p.local_prefill, d.local_prefill], [Detect::No, Detect::No]);
    assert_eq!((d.name.as_str(), &d.kv_events), ("d:8200", &KvEvents::Off));
}

#[test]
fn workers_have_the_defaults_of_their_role_and_engine() {
    let settings = settings(&workers(&[
        "role: prefill, url: http://p",
        "role: decode, url: http://d",
        "role: unified, engine: openai, url: http://u",
    ]));
    let [p, d, u] = settings.models[0].workers.as_slice() else { panic!("three workers") };
    assert_eq!(p.name, "p:80");
    assert_eq!(
        [p.local_prefill, d.local_prefill, u.local_prefill],
        [Detect::No, Detect::Yes, Detect::Yes]
    );
    assert_eq!([&d.kv_events, &u.kv_events], [&KvEvents::Auto, &KvEvents::Off]);
    assert_eq!(u.engine, Engine::OpenAi);
}

#[test]
fn the_rest_is_what_was_written() {
    let settings = settings(
        "listen: {address: '::', port: 1}\n\
         models:\n\
         - {name: m, tokenizer: {dir: /m}, workers: [{role: unified, url: http://a:1}]}\n\
         - {name: n, tokenizer: {bytes_per_token: 3}, workers: [{role: unified, url: http://b:1}]}\n\
         - {name: o, tokenizer: builtin, workers: [{role: unified, url: http://c:1}],\n\
         \x20  routing: {session_affinity: {prefix_tokens: 64}}, estimates: {image_tokens: 5}}\n\
         kv: {approximate: ttl, approximate_ttl: 1m 30s, approximate_blocks: 7}\n\
         limits: {max_body_bytes: 2MiB, max_header_bytes: 16384, max_prompt_tokens: 99}\n\
         metrics: {scrape_interval: off}\n\
         tokens: {cache_bytes: 0}\n\
         response_headers: false\n\
         log: {format: json, filter: debug}\n\
         shutdown: {grace: 0s}\n",
    );
    assert_eq!(settings.listen.to_string(), "[::]:1");
    assert_eq!(settings.models[0].tokenizer, Tokenizer::Dir(PathBuf::from("/m")));
    assert_eq!(settings.models[1].tokenizer, Tokenizer::Estimate { bytes_per_token: 3.0 });
    assert_eq!(settings.models[2].tokenizer, Tokenizer::Builtin);
    assert!(matches!(settings.models[2].session, Session::Prefix { tokens } if tokens.get() == 64));
    assert_eq!(settings.models[2].estimates.image_tokens, 5);
    let ttl = Some(Duration::from_secs(90));
    let unknown_blocks = NonZeroU64::new(7).expect("not 0");
    assert_eq!(settings.kv.approximate, Approximate::Record { ttl, unknown_blocks });
    assert_eq!(settings.limits.max_body_bytes.get(), 2 << 20);
    assert_eq!(settings.limits.max_header_bytes.get(), 16_384);
    assert_eq!(settings.limits.max_prompt_tokens.map(std::num::NonZeroU32::get), Some(99));
    assert_eq!((settings.scrape_interval, settings.token_cache_bytes), (None, 0));
    assert!(!settings.response_headers);
    assert_eq!(settings.log.format, LogFormat::Json);
    assert_eq!(settings.shutdown_grace, Duration::ZERO);
}

#[test]
fn what_predictions_start_from_is_a_profile_by_name_with_single_constants_over_it() {
    let model = |keys: &str| {
        format!("models:\n- {{name: m, workers: [{{role: unified, url: http://a:1}}], {keys}}}\n")
    };
    let profile = |keys: &str| settings(&model(keys)).models[0].routing.profile;
    let known = brain::Profile::named("qwen3-32b-bf16-h100-tp2").unwrap();
    assert_eq!(profile("model_profile: qwen3-32b-bf16-h100-tp2"), known);
    assert_eq!(profile("aliases: []"), brain::Profile::default());
    let own = profile("model_profile: qwen3-32b, constants: {k0_ms: 7, bandwidth_gb_s: 25}");
    assert_eq!(own, brain::Profile { k0: 7.0 * 1e-3, bandwidth: 25e9, ..known });
}

#[test]
fn slos_are_milliseconds_and_none_unless_written() {
    let text = "models:\n- {name: m, workers: [{role: unified, url: http://a:1}], \
                slo: {ttft_ms: 1500, itl_ms: 37.5}}\n";
    let slo = settings(text).models[0].routing.slo;
    let micros = |micros| Some(std::time::Duration::from_micros(micros));
    assert_eq!((slo.ttft, slo.itl), (micros(1_500_000), micros(37_500)));
    assert_eq!(settings(LEAST).models[0].routing.slo, brain::Slo::default());
}

#[test]
fn the_cold_policy_reads_the_parameters_of_routing_and_lacks_none() {
    let cold = |text: &str| settings(&least_and(text)).models[0].routing.predicted.cold;
    let isl = brain::IslBounding { eff_isl_threshold: 99, ..brain::IslBounding::default() };
    let load = brain::PrefillLoad { prefill_busy_threshold: brain::Factor::ONE };
    assert_eq!(cold("routing: {eff_isl_threshold: 99}\n"), brain::Rule::IslOrLoad(isl, load));
    let short = brain::ShortPrompt { short_prefill_tokens: 8 };
    assert_eq!(
        cold("routing: {short_prefill_tokens: 8, predicted: {cold_policy: short_prompt}}\n"),
        brain::Rule::ShortPrompt(short)
    );
}

#[test]
fn what_was_measured_is_kept_where_a_file_is_named() {
    assert_eq!(settings(LEAST).calibration, None);
    let kept = settings(&least_and("calibration: {state_file: /var/lib/p.json}\n")).calibration;
    let kept = kept.unwrap();
    assert_eq!(kept.path.to_str(), Some("/var/lib/p.json"));
    assert_eq!(kept.every, std::time::Duration::from_secs(60));
}
