//! Variables that people have from elsewhere.

mod common;

use common::{LEAST, least_and, refused, with};
use pointsman_brain::{Budget, IslBounding, IslGate, KvGuard, PrefillLoad, Rule, ShortPrompt};

const SWITCH: &str = "DYN_ROUTER_CONDITIONAL_DISAGG";
const POLICY: &str = "DYN_ROUTER_CONDITIONAL_DISAGG_POLICY";
const CONFIG: &str = "DYN_ROUTER_CONDITIONAL_DISAGG_CONFIG";
const THRESHOLD: &str = "DYN_ROUTER_CONDITIONAL_DISAGG_EFF_ISL_THRESHOLD";
const RATIO: &str = "DYN_ROUTER_CONDITIONAL_DISAGG_EFF_ISL_RATIO_THRESHOLD";
const PREFILL_BUSY: &str = "DYN_ROUTER_CONDITIONAL_DISAGG_PREFILL_BUSY_THRESHOLD";
const DECODE_BUSY: &str = "DYN_ROUTER_CONDITIONAL_DISAGG_DECODE_BUSY_THRESHOLD";
const SHORT_SWITCH: &str = "DYNAMO_USE_CONDITIONAL_DISAGGREGATION";
const SHORT: &str = "DYNAMO_SHORT_PREFILL_THRESHOLD_TOKENS";
const GATE_SWITCH: &str = "KV_ROUTER_USE_ISL_THRESHOLD";
const GATE: &str = "KV_ROUTER_ISL_THRESHOLD";

fn rule(variables: &[(&str, &str)]) -> Rule {
    with(LEAST, variables, &[]).settings.models[0].routing.policy.rule
}

#[test]
fn the_switch_alone_is_isl_bounding_with_its_defaults() {
    for on in ["1", "true", "True", "yes", "ON"] {
        assert_eq!(rule(&[(SWITCH, on)]), Rule::IslBounding(IslBounding::default()));
    }
}

#[test]
fn the_switch_off_is_always_remote() {
    for off in ["0", "false", "no", "Off"] {
        assert_eq!(rule(&[(SWITCH, off)]), Rule::AlwaysRemote);
    }
    let loaded = with(LEAST, &[(SWITCH, "0"), (POLICY, "isl_bounding")], &[]);
    assert_eq!(loaded.settings.models[0].routing.policy.rule, Rule::AlwaysRemote);
    assert_eq!(
        loaded.notices,
        [
            format!("{POLICY} changes nothing: {SWITCH} is off"),
            format!(
                "{SWITCH} is read as `routing.policy: always_remote`; the native variable is \
                 POINTSMAN__ROUTING__POLICY"
            ),
        ]
    );
}

#[test]
fn every_value_reaches_its_key_and_is_told_once() {
    let variables = [
        (SWITCH, "1"),
        (POLICY, "isl_or_load"),
        (THRESHOLD, "4096"),
        (RATIO, "0.6"),
        (PREFILL_BUSY, "16"),
        (DECODE_BUSY, "0.5"),
    ];
    let loaded = with(LEAST, &variables, &[]);
    let routing = &loaded.settings.models[0].routing;
    let Rule::IslOrLoad(isl, PrefillLoad { prefill_busy_threshold }) = routing.policy.rule else {
        panic!("{:?}", routing.policy.rule)
    };
    assert_eq!((isl.eff_isl_threshold, isl.eff_isl_ratio_threshold.get()), (4096, 0.6));
    assert_eq!(prefill_busy_threshold.get(), 16.0);
    assert!(matches!(routing.guards.decode_kv, KvGuard::Above(share) if share.get() == 0.5));
    assert_eq!(routing.guards.local_prefill_budget, Budget::ByPolicy);
    let native = |variable: &str, key: &str, value: &str| {
        let upper = key.to_uppercase();
        format!(
            "{variable} is read as `routing.{key}: {value}`; the native variable is \
             POINTSMAN__ROUTING__{upper}"
        )
    };
    assert_eq!(
        loaded.notices,
        [
            native(THRESHOLD, "eff_isl_threshold", "4096"),
            native(RATIO, "eff_isl_ratio_threshold", "0.6"),
            native(PREFILL_BUSY, "prefill_busy_threshold", "16"),
            native(DECODE_BUSY, "decode_busy_threshold", "0.5"),
            native(POLICY, "policy", "isl_or_load"),
            format!("{SWITCH} changes nothing: {POLICY} names the policy"),
        ]
    );
}

#[test]
fn the_json_object_says_the_same_and_single_variables_override_it() {
    let config =
        r#"{"policy": "isl_or_load", "eff_isl_threshold": 4096, "prefill_busy_threshold": 2}"#;
    let loaded = with(LEAST, &[(SWITCH, "1"), (CONFIG, config), (THRESHOLD, "7")], &[]);
    let Rule::IslOrLoad(isl, load) = loaded.settings.models[0].routing.policy.rule else {
        panic!("not isl_or_load")
    };
    assert_eq!((isl.eff_isl_threshold, load.prefill_busy_threshold.get()), (7, 2.0));
    let rule = rule(&[(CONFIG, config), (POLICY, "prefill_load")]);
    assert!(matches!(rule, Rule::PrefillLoad(_)));
}

#[test]
fn the_other_switch_is_short_prompt() {
    let short = |short_prefill_tokens| Rule::ShortPrompt(ShortPrompt { short_prefill_tokens });
    assert_eq!(rule(&[(SHORT_SWITCH, "true"), (SHORT, "99")]), short(99));
    assert_eq!(rule(&[(SHORT_SWITCH, "true")]), short(512));
    assert_eq!(rule(&[(SHORT_SWITCH, "false"), (SHORT, "99")]), Rule::AlwaysRemote);
}

#[test]
fn the_gate_needs_switch_and_threshold() {
    let gate = |variables: &[(&str, &str)]| {
        let loaded = with(LEAST, variables, &[]);
        (loaded.settings.models[0].routing.isl_gate, loaded.notices.len())
    };
    assert_eq!(gate(&[(GATE_SWITCH, "1"), (GATE, "1000")]), (IslGate::UnifiedUpTo(1000), 2));
    assert_eq!(gate(&[(GATE_SWITCH, "0"), (GATE, "1000")]), (IslGate::Off, 2));
    assert_eq!(gate(&[(GATE, "1000")]), (IslGate::Off, 1));
    assert_eq!(
        refused(LEAST, &[(GATE_SWITCH, "1")], &[]),
        format!("{GATE_SWITCH} is on; {GATE} must be set, to an integer")
    );
}

#[test]
fn aliases_override_the_file_and_native_variables_override_aliases() {
    let file = least_and("routing: {policy: isl_bounding, eff_isl_threshold: 1}\n");
    let threshold = |variables: &[(&str, &str)]| {
        let loaded = with(&file, variables, &[]);
        match loaded.settings.models[0].routing.policy.rule {
            Rule::IslBounding(isl) => (isl.eff_isl_threshold, loaded.notices),
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(threshold(&[(THRESHOLD, "2")]).0, 2);
    let native = "POINTSMAN__ROUTING__EFF_ISL_THRESHOLD";
    assert_eq!(
        threshold(&[(THRESHOLD, "2"), (native, "3")]),
        (3, vec![format!("{THRESHOLD} changes nothing: {native} is set")])
    );
}

#[test]
fn a_wrong_value_names_variable_value_and_what_is_allowed() {
    for (variable, key, values, must) in [
        (THRESHOLD, "eff_isl_threshold", ["-1", "1.5"], "an integer of at least 0"),
        (RATIO, "eff_isl_ratio_threshold", ["1.01", "-0.1"], "a number from 0 to 1"),
        (PREFILL_BUSY, "prefill_busy_threshold", ["-1", "-0.5"], "a number of at least 0"),
        (DECODE_BUSY, "decode_busy_threshold", ["90", "-1"], "`off` or a number from 0 to 1"),
        (SHORT, "short_prefill_tokens", ["-1", "4294967296"], "an integer of at least 0"),
    ] {
        let expected = |shown: &str| {
            format!(
                "routing.{key}: {shown} is not allowed; must be {must} (environment variable \
                 {variable})"
            )
        };
        for value in values {
            assert_eq!(refused(LEAST, &[(variable, value)], &[]), expected(value));
        }
        for text in ["NaN", "inf", "-inf", "many"] {
            let shown = format!("{text:?}");
            assert_eq!(refused(LEAST, &[(variable, text)], &[]), expected(&shown));
        }
        for float in [".nan", ".inf"] {
            assert_eq!(refused(LEAST, &[(variable, float)], &[]), expected(float));
        }
        assert_eq!(
            refused(LEAST, &[(variable, "")], &[]),
            format!("{variable} is empty; give it a value or unset it")
        );
    }
}

#[test]
fn a_wrong_value_stops_the_start_even_where_it_would_be_overridden() {
    let variables = [(RATIO, "NaN"), ("POINTSMAN__ROUTING__EFF_ISL_RATIO_THRESHOLD", "0.5")];
    assert!(refused(LEAST, &variables, &[]).contains(RATIO));
}

#[test]
fn wrong_switches_policies_and_objects_are_named() {
    assert_eq!(
        refused(LEAST, &[(SWITCH, "maybe")], &[]),
        format!(
            "{SWITCH} \"maybe\" is not allowed; must be true or false (1 or 0, yes or no, on or off)"
        )
    );
    assert_eq!(
        refused(LEAST, &[(POLICY, "isl-bounding")], &[]),
        format!(
            "{POLICY} \"isl-bounding\" is not allowed; must be `isl_bounding`, `prefill_load` or \
             `isl_or_load`; did you mean `isl_bounding`?"
        )
    );
    let keys = "policy, eff_isl_threshold, eff_isl_ratio_threshold, prefill_busy_threshold, \
                decode_busy_threshold";
    for value in ["5", "{", "[]"] {
        assert_eq!(
            refused(LEAST, &[(CONFIG, value)], &[]),
            format!("{CONFIG} is not allowed; must be a JSON object of {keys}")
        );
    }
    assert_eq!(
        refused(LEAST, &[(CONFIG, r#"{"treshold": 1}"#)], &[]),
        format!("{CONFIG} has the unknown key `treshold`; known: {keys}")
    );
    assert_eq!(
        refused(LEAST, &[(CONFIG, r#"{"eff_isl_ratio_threshold": 2}"#)], &[]),
        format!(
            "routing.eff_isl_ratio_threshold: 2 is not allowed; must be a number from 0 to 1 \
             (environment variable {CONFIG})"
        )
    );
}

#[test]
fn two_switches_that_ask_for_different_policies_are_refused() {
    assert_eq!(
        refused(LEAST, &[(SWITCH, "1"), (SHORT_SWITCH, "1")], &[]),
        format!("{SWITCH} and {SHORT_SWITCH} ask for different policies; switch on only one")
    );
    assert_eq!(
        refused(LEAST, &[(POLICY, "isl_bounding"), (SHORT_SWITCH, "1")], &[]),
        format!("{POLICY} and {SHORT_SWITCH} ask for different policies; set only one")
    );
}

#[test]
fn a_policy_that_looks_at_load_needs_its_threshold_here_too() {
    assert_eq!(
        refused(LEAST, &[(POLICY, "prefill_load")], &[]),
        "routing.prefill_busy_threshold: missing; policy `prefill_load` needs it, a number of at \
         least 0"
    );
}

#[test]
fn every_variable_that_is_set_is_in_a_notice() {
    let config = r#"{"policy": "isl_or_load", "prefill_busy_threshold": 1}"#;
    for (variables, policy) in [
        (vec![(SWITCH, "0"), (SHORT_SWITCH, "0")], "always_remote"),
        (vec![(SWITCH, "0"), (SHORT_SWITCH, "1"), (SHORT, "5")], "short_prompt"),
        (vec![(SWITCH, "1"), (SHORT_SWITCH, "0")], "isl_bounding"),
        (vec![(SWITCH, "1"), (SHORT_SWITCH, "0"), (POLICY, "isl_bounding")], "isl_bounding"),
        (vec![(SWITCH, "0"), (CONFIG, config)], "always_remote"),
        (vec![(SWITCH, "1"), (CONFIG, config), (POLICY, "prefill_load")], "prefill_load"),
        (vec![(GATE_SWITCH, "1"), (GATE, "5")], "predicted"),
        (vec![(GATE_SWITCH, "0"), (GATE, "5")], "predicted"),
    ] {
        let loaded = with(LEAST, &variables, &[]);
        assert_eq!(loaded.settings.models[0].routing.policy.rule.as_str(), policy, "{variables:?}");
        for (variable, _) in variables {
            let begins = |notice: &String| notice.split(' ').next() == Some(variable);
            assert!(loaded.notices.iter().any(begins), "{variable}: {:?}", loaded.notices);
        }
    }
}
