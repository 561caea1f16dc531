//! Equal to what vLLM, transformers and the Python tokenizers make of the same templates, requests and
//! expressions: `parity/make_golden.py` wrote what they say.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use pointsman_tokens::{CacheLimits, Chat, Error, Model};
use serde::Deserialize;
use serde_json::value::RawValue;

#[derive(Deserialize)]
struct Golden {
    now: i64,
    models: BTreeMap<String, String>,
    requests: BTreeMap<String, BTreeMap<String, Box<RawValue>>>,
    chats: Vec<Expected>,
    variables: Box<RawValue>,
    expressions: Vec<Expression>,
}

#[derive(Deserialize)]
struct Expected {
    template: String,
    request: String,
    text: Option<String>,
    ids: Option<String>,
    with_special: Option<String>,
    error: Option<String>,
}

#[derive(Deserialize)]
struct Expression {
    source: String,
    text: Option<String>,
    error: Option<String>,
}

fn here() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/parity")
}

fn golden() -> Golden {
    serde_json::from_slice(&std::fs::read(here().join("golden.json")).unwrap()).unwrap()
}

/// A model directory with the tokenizer and either one template or named ones.
fn directory(tokenizer: &str, template: &str) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for file in ["tokenizer.json", "tokenizer_config.json"] {
        let from = here().join("models").join(tokenizer).join(file);
        std::fs::copy(from, dir.path().join(file)).unwrap();
    }
    let copy = |from: String, to: &str| {
        let from = here().join("templates").join(from);
        from.exists().then(|| std::fs::copy(from, dir.path().join(to)).unwrap())
    };
    std::fs::create_dir(dir.path().join("additional_chat_templates")).unwrap();
    copy(format!("{template}.jinja"), "chat_template.jinja");
    copy(format!("{template}-default.jinja"), "chat_template.jinja");
    copy(format!("{template}-tool_use.jinja"), "additional_chat_templates/tool_use.jinja");
    dir
}

fn chat(request: &BTreeMap<String, Box<RawValue>>, now: i64) -> Chat<'_> {
    let raw = |key: &str| request.get(key).map(|v| v.get().as_bytes());
    let flag = |key: &str, default: bool| raw(key).map_or(default, |v| v == b"true");
    Chat {
        tools: raw("tools"),
        documents: raw("documents"),
        chat_template_kwargs: raw("chat_template_kwargs"),
        reasoning_effort: raw("reasoning_effort"),
        add_generation_prompt: flag("add_generation_prompt", true),
        continue_final_message: flag("continue_final_message", false),
        ..Chat::new(raw("messages").unwrap(), now)
    }
}

fn fnv(ids: &[u32]) -> String {
    let bytes = ids.iter().flat_map(|id| id.to_le_bytes());
    let hash = bytes
        .fold(0xcbf2_9ce4_8422_2325_u64, |h, b| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3));
    format!("{hash:016x}")
}

#[test]
fn chats_render_and_encode_as_in_vllm() {
    let golden = golden();
    let mut models: BTreeMap<&str, [Model; 2]> = BTreeMap::new();
    let mut wrong = Vec::new();
    for case in &golden.chats {
        let [cached, plain] = models.entry(&case.template).or_insert_with(|| {
            let dir = directory(&golden.models[&case.template], &case.template);
            [CacheLimits::default(), CacheLimits { bytes: 0 }]
                .map(|limits| Model::from_dir(dir.path(), limits).unwrap())
        });
        let chat = chat(&golden.requests[&case.request], golden.now);
        let label = format!("{} / {}", case.template, case.request);
        let got = plain.render_chat(&chat);
        match (&case.text, got) {
            (None, Err(Error::Template { .. } | Error::Request { .. })) => {}
            // The API refuses the request; what it would be as a prompt does not matter.
            (None, _) if case.error.as_ref().is_some_and(|e| e.starts_with("ValidationE")) => {}
            (None, got) => wrong.push(format!("{label}: {:?}, got {got:?}", case.error)),
            (Some(text), Ok(got)) if *text == got => {
                for model in [&*cached, &*plain] {
                    let ids = model.encode_chat(&chat).unwrap().ids;
                    if Some(fnv(&ids)) != case.ids {
                        wrong.push(format!("{label}: other ids: {ids:?}"));
                    }
                    let special = Chat { add_special_tokens: true, ..chat };
                    let ids = model.encode_chat(&special).unwrap().ids;
                    if Some(fnv(&ids)) != case.with_special {
                        wrong.push(format!("{label}: other ids with special tokens: {ids:?}"));
                    }
                }
            }
            (Some(text), got) => wrong.push(format!("{label}:\n  {text:?}\n  {got:?}")),
        }
    }
    assert!(wrong.is_empty(), "{} of {}:\n{}", wrong.len(), golden.chats.len(), wrong.join("\n"));
}

#[test]
fn expressions_mean_what_they_mean_in_jinja() {
    let golden = golden();
    let dir = directory("bytes", "none");
    let mut wrong = Vec::new();
    for case in &golden.expressions {
        std::fs::write(dir.path().join("chat_template.jinja"), &case.source).unwrap();
        let model = Model::from_dir(dir.path(), CacheLimits::default()).unwrap();
        let chat = Chat {
            chat_template_kwargs: Some(golden.variables.get().as_bytes()),
            ..Chat::new(br#"[{"role":"user","content":""}]"#, golden.now)
        };
        match (&case.text, model.render_chat(&chat)) {
            (Some(text), Ok(got)) if *text == got => {}
            (None, Err(_)) => {}
            (text, got) => {
                let expected = text.as_ref().or(case.error.as_ref());
                wrong.push(format!("{:?}\n  {expected:?}\n  {got:?}", case.source));
            }
        }
    }
    let count = golden.expressions.len();
    assert!(wrong.is_empty(), "{} of {count}:\n{}", wrong.len(), wrong.join("\n"));
}
