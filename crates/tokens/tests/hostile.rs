//! Requests and model directories that mean harm end in an error, soon, and never in a panic.

#![allow(clippy::unwrap_used)]

use std::path::Path;
use std::time::{Duration, Instant};

use pointsman_tokens::{CacheLimits, Chat, Error, Model, builtin_dir_files};

fn builtin() -> Model {
    Model::builtin(CacheLimits::default()).unwrap()
}

fn with_template(template: &str) -> Model {
    let dir = tempfile::tempdir().unwrap();
    for (name, bytes) in builtin_dir_files() {
        std::fs::write(dir.path().join(name), bytes).unwrap();
    }
    std::fs::write(dir.path().join("chat_template.jinja"), template).unwrap();
    Model::from_dir(dir.path(), CacheLimits::default()).unwrap()
}

fn render(model: &Model, messages: &[u8]) -> Result<String, Error> {
    model.render_chat(&Chat::new(messages, 0))
}

#[test]
fn broken_requests_are_errors_that_name_the_place() {
    let model = builtin();
    for (messages, place) in [
        (r"", "messages"),
        (r"{", "messages"),
        (r"{}", "messages"),
        (r"[]", "messages"),
        (r"[1]", "messages[0]"),
        (r#"[{"role":"user","content":"x"},{"content":"y"}]"#, "messages[1]"),
        (r#"[{"role":7}]"#, "messages[0]"),
        (r#"[{"role":"user","content":7}]"#, "messages[0].content"),
        (r#"[{"role":"user","content":[7]}]"#, "messages[0].content[0]"),
        (r#"[{"role":"user","content":[{"a":1}]}]"#, "messages[0].content[0]"),
        (
            r#"[{"role":"user","content":[{"type":"text","text":7}]}]"#,
            "messages[0].content[0].text",
        ),
        (r#"[{"role":"assistant","tool_calls":7}]"#, "messages[0].tool_calls"),
        (r#"[{"role":"assistant","tool_calls":[{}]}]"#, "messages[0].tool_calls[0]"),
        (r#"[{"role":"user","content":"\ud83d"}]"#, "messages"),
        (r#"[{"role":"user","content":"\udc00\ud800"}]"#, "messages"),
    ] {
        match render(&model, messages.as_bytes()) {
            Err(e @ Error::Request { .. }) => {
                assert!(e.to_string().starts_with(&format!("{place}: ")), "{messages}: {e}");
                assert!(e.is_request());
            }
            other => panic!("{messages}: {other:?}"),
        }
    }
    let one = br#"[{"role":"user","content":"x"}]"#;
    let base = Chat::new(one, 0);
    for chat in [
        Chat { tools: Some(b"7"), ..base },
        Chat { tools: Some(b"[7]"), ..base },
        Chat { chat_template_kwargs: Some(b"[]"), ..base },
        Chat { chat_template_kwargs: Some(br#"{"messages":1}"#), ..base },
        Chat { chat_template_kwargs: Some(br#"{"chat_template":"{{ 1 }}"}"#), ..base },
        Chat { continue_final_message: true, ..base },
        Chat { documents: Some(b"\xff"), ..base },
    ] {
        assert!(matches!(model.encode_chat(&chat), Err(Error::Request { .. })), "{chat:?}");
    }
    assert!(render(&model, b"[{\"role\":\"user\",\"content\":\"\xff\"}]").is_err());
}

#[test]
fn deep_nesting_is_refused_everywhere() {
    let model = builtin();
    let deep = format!("{}1{}", "[".repeat(200_000), "]".repeat(200_000));
    let messages = format!(r#"[{{"role":"user","content":{deep}}}]"#);
    assert!(render(&model, messages.as_bytes()).is_err());
    let objects = format!("{}1{}", r#"{"a":"#.repeat(100_000), "}".repeat(100_000));
    let one = br#"[{"role":"user","content":"x"}]"#;
    let tools = format!(r#"[{{"function":{{"name":"f","parameters":{objects}}}}}]"#);
    let chat = Chat { tools: Some(tools.as_bytes()), ..Chat::new(one, 0) };
    assert!(model.encode_chat(&chat).is_err());
    // Arguments are JSON within JSON: what cannot be read is an empty object, as in vLLM.
    let arguments = serde_json::to_string(&objects).unwrap();
    let messages = format!(
        r#"[{{"role":"assistant","tool_calls":[{{"function":{{"name":"f","arguments":{arguments}}}}}]}}]"#
    );
    assert!(render(&model, messages.as_bytes()).unwrap().contains(r#""arguments": {}"#));
}

#[test]
fn templates_that_do_not_end_are_stopped() {
    for template in [
        "{% for i in range(99999) %}{% for j in range(99999) %}{{ i }}{% endfor %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% set ns = namespace(x='x') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}",
        "{{ 'x' * 99999999999 }}",
        "{{ ('x' * 1000000) | replace('x', 'y' * 1000000) }}",
        "{{ [1] * 999999999 }}",
        "{% set ns = namespace(x=[]) %}{% for i in range(400) %}{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x | tojson }}",
        "{% set ns = namespace(x=[1]) %}{% for i in range(40) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x | tojson }}",
        "{{ messages | tojson(indent=999999999) | tojson(indent=9999999) * 1000000 }}",
        "{{ raise_exception('\u{1f600}' * 100) }}",
        "{{ range(10**18) | list }}",
    ] {
        let start = Instant::now();
        let model = with_template(template);
        let got = render(&model, br#"[{"role":"user","content":"x"}]"#);
        assert!(
            matches!(got, Err(Error::Template { .. })),
            "{template}: {:?}",
            got.map(|t| t.len())
        );
        assert!(start.elapsed() < Duration::from_secs(60), "{template}: {:?}", start.elapsed());
    }
}

#[test]
fn large_conversations_pass() {
    let model = builtin();
    let long = "0123456789 ".repeat(100_000);
    let messages = format!(r#"[{{"role":"user","content":"{long}"}}]"#);
    let ids = model.encode_chat(&Chat::new(messages.as_bytes(), 0)).unwrap().ids;
    assert!(ids.len() > 100_000);
    let many = vec![r#"{"role":"user","content":"hello there"}"#; 20_000].join(",");
    let many = format!("[{many}]");
    assert!(render(&model, many.as_bytes()).unwrap().len() > 20_000 * 11);
    for text in [
        "a".repeat(300_000),
        " ".repeat(300_000),
        "\u{1f468}\u{200d}".repeat(50_000),
        "<|im_end|>".repeat(20_000),
    ] {
        let ids = model.encode_prompt(&text, None).unwrap().ids;
        assert_eq!(model.decode(&ids, false), text);
    }
}

#[test]
fn broken_model_directories_are_errors_that_name_the_file() {
    let dir = tempfile::tempdir().unwrap();
    let error = |dir: &Path| Model::from_dir(dir, CacheLimits::default()).unwrap_err().to_string();
    assert!(error(dir.path()).contains("tokenizer.json"));
    for (name, bytes) in builtin_dir_files() {
        std::fs::write(dir.path().join(name), bytes).unwrap();
    }
    let write = |name: &str, text: &[u8]| std::fs::write(dir.path().join(name), text).unwrap();
    write("tokenizer_config.json", b"{");
    assert!(error(dir.path()).contains("tokenizer_config.json"));
    write("tokenizer_config.json", br#"{"chat_template": [7, {"name": "x"}], "bos_token": 7}"#);
    let model = Model::from_dir(dir.path(), CacheLimits::default()).unwrap();
    assert!(!model.has_chat_template());
    assert!(matches!(
        render(&model, br#"[{"role":"user","content":"x"}]"#),
        Err(Error::NoTemplate)
    ));
    assert_eq!(model.eos_id(), None);
    write("chat_template.jinja", b"{% if %}");
    let model = Model::from_dir(dir.path(), CacheLimits::default()).unwrap();
    let problem = model.chat_template_problem().unwrap().to_string();
    assert!(problem.contains("chat_template.jinja") && problem.contains("line 1"), "{problem}");
    assert!(render(&model, br#"[{"role":"user","content":"x"}]"#).is_err());
    assert!(model.encode_prompt("still works", None).is_ok());
    write("chat_template.jinja", b"\xff");
    assert!(error(dir.path()).contains("chat_template.jinja"));
    write("chat_template.jinja", b"{{ 1 }}");
    for broken in [
        &b"{}"[..],
        b"[]",
        b"{\"model\": {\"type\": \"BPE\", \"vocab\": {\"a\": 9}, \"merges\": [\"a b\"]}}",
    ] {
        write("tokenizer.json", broken);
        assert!(error(dir.path()).contains("tokenizer.json"));
    }
}

#[test]
fn ids_out_of_range_decode_to_nothing() {
    let model = builtin();
    assert_eq!(model.decode(&[u32::MAX, 999_999], false), "");
    assert_eq!(model.decode(&[], true), "");
}
