//! What the messages say when the shape of a configuration is wrong.

mod common;

use common::{LEAST, least_and, problems, refused};
use pointsman_config::{File, Sources, load};

#[test]
fn an_unknown_key_names_the_nearest_known_one() {
    assert_eq!(
        problems(&least_and("limits:\n  max_inflight: 5\n")),
        "limits.max_inflight: unknown key; did you mean `max_in_flight`? (p.yaml:3:17)"
    );
}

#[test]
fn an_unknown_key_like_no_other_lists_the_known_ones() {
    assert_eq!(
        problems(&least_and("shutdown: {zzz: 5}\n")),
        "shutdown.zzz: unknown key; known here: `grace` (p.yaml:2:17)"
    );
}

#[test]
fn a_number_out_of_range_names_value_and_range() {
    assert_eq!(
        problems(&least_and("listen: {port: 70000}\n")),
        "listen.port: 70000 is not allowed; must be an integer from 0 to 65535 (p.yaml:2:16)"
    );
    assert_eq!(
        problems(&least_and("limits: {max_in_flight: -1}\n")),
        "limits.max_in_flight: -1 is not allowed; must be an integer of at least 1 (p.yaml:2:25)"
    );
    assert_eq!(
        problems(&least_and("limits: {max_in_flight: 99999999999}\n")),
        "limits.max_in_flight: 99999999999 is not allowed; must be an integer of at least 1 (p.yaml:2:25)"
    );
}

#[test]
fn nan_and_infinity_are_no_numbers() {
    let must = "is not allowed; must be a number from 0 to 1 (p.yaml:2:36)";
    for (written, shown) in
        [(".nan", ".nan"), (".inf", ".inf"), ("-.inf", "-.inf"), ("1e999", ".inf")]
    {
        assert_eq!(
            problems(&least_and(&format!("routing: {{eff_isl_ratio_threshold: {written}}}\n"))),
            format!("routing.eff_isl_ratio_threshold: {shown} {must}")
        );
    }
    assert_eq!(
        problems(&least_and("routing: {eff_isl_ratio_threshold: NaN}\n")),
        format!("routing.eff_isl_ratio_threshold: \"NaN\" {must}")
    );
}

#[test]
fn a_duration_needs_a_unit_and_a_known_one() {
    let must =
        "is not allowed; must be a duration from 10ms to 5m, such as 250ms or 30s (p.yaml:2:21)";
    for (written, shown) in [
        ("30", "30"),
        ("5 parsecs", "\"5 parsecs\""),
        ("-1s", "\"-1s\""),
        ("1ms", "\"1ms\""),
        ("6m", "\"6m\""),
    ] {
        assert_eq!(
            problems(&least_and(&format!("timeouts: {{connect: {written}}}\n"))),
            format!("timeouts.connect: {shown} {must}")
        );
    }
}

#[test]
fn a_size_is_a_number_of_bytes_with_or_without_a_unit() {
    let must = "is not allowed; must be a number of bytes from 1KiB to 4GiB, such as 65536 or 16MiB (p.yaml:2:26)";
    for (written, shown) in [("16MB", "\"16MB\""), ("1", "1"), ("5GiB", "\"5GiB\""), ("1.5", "1.5")]
    {
        assert_eq!(
            problems(&least_and(&format!("limits: {{max_body_bytes: {written}}}\n"))),
            format!("limits.max_body_bytes: {shown} {must}")
        );
    }
}

#[test]
fn a_word_that_is_nearly_right_gets_the_right_one() {
    assert_eq!(
        problems("models: [{name: m, workers: [{role: unifed, url: http://a:1}]}]"),
        "models[0].workers[0].role: \"unifed\" is not allowed; must be `prefill`, `decode` or \
         `unified`; did you mean `unified`? (p.yaml:1:37)"
    );
}

#[test]
fn a_value_that_may_be_off_says_so() {
    assert_eq!(
        problems(&least_and("routing: {decode_busy_threshold: 1.5}\n")),
        "routing.decode_busy_threshold: 1.5 is not allowed; must be `off` or a number from 0 to 1 \
         (p.yaml:2:34)"
    );
}

#[test]
fn a_mapping_with_a_wrong_tag_lists_the_forms() {
    assert_eq!(
        problems(&least_and("routing: {session_affinity: {cookie: x}}\n")),
        "routing.session_affinity: a mapping is not allowed; must be `off`, `user`, `header:` text \
         or `prefix_tokens:` integer (p.yaml:2:29)"
    );
    assert_eq!(
        problems(&least_and("routing: {session_affinity: {header: x, user: y}}\n")),
        "routing.session_affinity.user: unknown key; known here: `header` (p.yaml:2:47)"
    );
}

#[test]
fn a_mapping_where_a_scalar_belongs_and_the_reverse() {
    assert_eq!(
        problems(&least_and("limits: 5\n")),
        "limits: 5 is not allowed; must be a mapping (p.yaml:2:9)"
    );
    assert_eq!(
        problems(&least_and("response_headers: [1]\n")),
        "response_headers: a list is not allowed; must be `true` or `false` (p.yaml:2:19)"
    );
}

#[test]
fn text_that_yaml_reads_as_a_number_is_told_to_be_text() {
    assert_eq!(
        problems("models: [{name: 7, workers: [{role: unified, url: http://a:1}]}]"),
        "models[0].name: 7 is not allowed; must be a text (p.yaml:1:17)"
    );
}

#[test]
fn a_key_without_a_value_is_empty() {
    assert_eq!(
        problems(&least_and("limits:\n  max_in_flight:\n")),
        "limits.max_in_flight: empty; must be an integer of at least 1 (p.yaml:3:16)"
    );
}

#[test]
fn missing_keys_are_named_with_what_they_must_be() {
    assert_eq!(
        problems("models: [{workers: [{}]}]"),
        "models[0].workers[0].url: missing; must be a text (p.yaml:1:21)\n\
         models[0].workers[0].role: missing; must be `prefill`, `decode` or `unified` (p.yaml:1:21)\n\
         models[0].name: missing; must be a text (p.yaml:1:10)"
    );
}

#[test]
fn all_problems_come_in_one_go() {
    let text = least_and("listen: {address: localhost}\nkv: {approximate: on}\nfoo: 1\n");
    let found = refused(&text, &[("POINTSMAN__LIMITS__MAX_IN_FLIGHT", "0")], &["retries=1"]);
    assert_eq!(found.lines().count(), 5, "{found}");
}

#[test]
fn too_many_shadow_policies_are_refused() {
    let many = ["always_local"; 33].join(", ");
    assert_eq!(
        problems(&least_and(&format!("routing: {{shadow: [{many}]}}\n"))),
        "routing.shadow: has 33 entries; must be at most 32 (p.yaml:2:19)"
    );
}

#[test]
fn a_key_that_is_written_twice_is_refused() {
    assert_eq!(
        problems(&least_and("limits: {}\nlimits: {}\n")),
        "not valid YAML: the key `limits` is written twice (p.yaml:3:1)"
    );
    assert_eq!(
        problems(r#"{"models": [], "models": []}"#),
        "not valid YAML: the key `models` is written twice (p.yaml:1:16)"
    );
}

#[test]
fn what_is_not_yaml_names_the_place() {
    assert_eq!(problems("models: [\n"), "not valid YAML: unclosed bracket '[' (p.yaml:1:9)");
}

#[test]
fn an_empty_file_and_one_that_is_no_mapping() {
    assert_eq!(problems(""), "the file is empty; it must list the models (p.yaml)");
    assert_eq!(problems("# nothing\n"), "the file is empty; it must list the models (p.yaml)");
    assert_eq!(problems("5"), "the file holds 5; must be a mapping (p.yaml)");
    assert_eq!(problems("[]"), "the file holds a list; must be a mapping (p.yaml)");
}

#[test]
fn a_file_that_is_not_utf8_names_the_line() {
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("p.yaml");
    std::fs::write(&path, [LEAST.as_bytes(), b"log: {filter: \xff}\n"].concat()).expect("written");
    let found = load(&Sources { file: Some(File::Path(path.clone())), ..Sources::default() });
    let message = found.expect_err("a problem").to_string();
    assert_eq!(message, format!("not valid UTF-8 ({}:2)", path.display()));
}

#[test]
fn a_file_that_cannot_be_read_names_the_path() {
    let path = std::path::PathBuf::from("/nowhere/p.yaml");
    let found = load(&Sources { file: Some(File::Path(path)), ..Sources::default() });
    assert_eq!(
        found.expect_err("a problem").to_string(),
        "cannot be read: No such file or directory (os error 2) (/nowhere/p.yaml)"
    );
}

#[test]
fn an_unknown_profile_is_refused_with_those_there_are_and_a_constant_of_zero_too() {
    let model = |keys: &str| {
        format!("models:\n- {{name: m, workers: [{{role: unified, url: http://a:1}}], {keys}}}\n")
    };
    let said = refused(&model("model_profile: gpt-9"), &[], &[]);
    assert!(said.contains("models[0].model_profile"), "{said}");
    assert!(said.contains("`llama-3.1-70b-fp8-h100-tp4`"), "{said}");
    let said = refused(&model("constants: {a1_ms: 0}"), &[], &[]);
    assert!(said.contains("each constant must be above 0"), "{said}");
}
