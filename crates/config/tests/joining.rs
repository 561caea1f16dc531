//! A worker that joins at run time.

use pointsman_config::{KvEvents, Role, joining};

#[test]
fn a_worker_joins_with_the_keys_of_the_file() {
    let joining = joining(r#"{"model": "m", "role": "decode", "url": "http://a:1", "ranks": 2}"#)
        .unwrap_or_else(|problems| panic!("{problems}"));
    assert_eq!(joining.model, "m");
    assert_eq!((joining.worker.role, joining.worker.ranks.get()), (Role::Decode, 2));
    assert_eq!((joining.worker.name.as_str(), joining.worker.kv_events), ("a:1", KvEvents::Auto));
}

#[test]
fn wrong_bodies_are_told_what_is_wrong() {
    let refused = |text: &str| joining(text).expect_err("a problem").to_string();
    assert_eq!(
        refused("{"),
        "not valid JSON: EOF while parsing an object at line 1 column 1 (body)"
    );
    assert_eq!(refused("[]"), "a list is not allowed; must be a JSON object (body:1:1)");
    assert_eq!(
        refused(r#"{"model": 5, "rle": "decode"}"#),
        "model: 5 is not allowed; must be the name of a model (body:1:11)\n\
         rle: unknown key; did you mean `role`? (body:1:21)\n\
         url: missing; must be a text (body:1:1)\n\
         role: missing; must be `prefill`, `decode` or `unified` (body:1:1)"
    );
    assert_eq!(
        refused(r#"{"role": "unified", "url": "http://a:1"}"#),
        "model: missing; must be the name of a model (body:1:1)"
    );
    assert_eq!(
        refused(r#"{"model": "m", "role": "unified", "url": "ftp://a:1"}"#),
        "url: \"ftp://a:1\" is not allowed; must be an http:// or https:// URL, such as http://10.0.0.5:8100 \
         (body:1:42)"
    );
}

#[test]
fn whoever_adds_a_worker_cannot_read_the_routers_variables_and_files() {
    for key in ["api_key_env", "api_key_file"] {
        let text =
            format!(r#"{{"model": "m", "role": "unified", "url": "http://a:1", "{key}": "HOME"}}"#);
        let found = joining(&text).expect_err("a problem").to_string();
        assert!(found.starts_with(&format!("{key}: cannot be given at run time")), "{found}");
    }
}

#[test]
fn whoever_adds_a_worker_cannot_make_the_router_listen_or_touch_a_file() {
    for events in [
        r#"{"endpoint": "ipc:///tmp/x"}"#,
        r#"{"endpoint": "tcp://*:1", "mode": "bind"}"#,
        r#"{"endpoint": "tcp://a:1", "replay_endpoint": "ipc:///tmp/x"}"#,
    ] {
        let text = format!(
            r#"{{"model": "m", "role": "unified", "url": "http://a:1", "kv_events": {events}}}"#
        );
        let found = joining(&text).expect_err("a problem").to_string();
        assert!(found.starts_with("kv_events may only name tcp:// sockets"), "{found}");
    }
}

#[test]
fn a_body_is_strict_json_and_not_deep() {
    for text in ["- - a".to_owned(), "- ".repeat(100), "[".repeat(100_000), "a: &x b".to_owned()] {
        let found = joining(&text).expect_err("a problem").to_string();
        assert!(found.starts_with("not valid JSON"), "{found}");
    }
}
