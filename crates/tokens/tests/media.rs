//! Prompts with parts that are no text: the exact prefix before the first, the rest estimated.

#![allow(clippy::unwrap_used)]

use std::path::Path;

use pointsman_tokens::{CacheLimits, Chat, Model, Partial};

fn model(template: &str, limits: CacheLimits) -> Model {
    let parity = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/parity");
    let dir = tempfile::tempdir().unwrap();
    for file in ["tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(parity.join("models/bytes").join(file), dir.path().join(file)).unwrap();
    }
    let source = parity.join(format!("templates/{template}.jinja"));
    std::fs::copy(source, dir.path().join("chat_template.jinja")).unwrap();
    Model::from_dir(dir.path(), limits).unwrap()
}

const IMAGE: &str = r#"{"type":"image_url","image_url":{"url":"data:image/png;base64,AAAA"}}"#;

#[test]
fn the_prefix_before_the_first_image_is_exact_and_the_rest_is_counted() {
    let long = "some words before the picture ".repeat(30);
    for limits in [CacheLimits::default(), CacheLimits { bytes: 0 }] {
        let model = model("parts", limits);
        let messages = format!(
            r#"[{{"role":"user","content":"{long}"}},{{"role":"assistant","content":"ok"}},
            {{"role":"user","content":[{{"type":"text","text":"look: "}},{IMAGE},
            {{"type":"text","text":"and hear"}},{{"type":"input_audio","input_audio":{{}}}},
            {{"type":"video_url","video_url":{{"url":"x"}}}},{{"type":"file","file":{{}}}}]}}]"#
        );
        let chat = Chat::new(messages.as_bytes(), 0);
        let text = model.render_chat(&chat).unwrap();
        let end = text.find("<|vision_start|>").unwrap();
        let whole = model.encode_prompt(&text, Some(false)).unwrap().ids;
        for _ in 0..2 {
            let got = model.encode_chat(&chat).unwrap();
            let partial = got.partial.unwrap();
            let kinds = Partial { text_tokens: 0, ..partial };
            assert_eq!(
                kinds,
                Partial { images: 1, audio: 1, videos: 1, others: 1, text_tokens: 0 }
            );
            assert!(partial.text_tokens > 5, "{partial:?}");
            assert!(whole.starts_with(&got.ids));
            let prefix = model.decode(&got.ids, false);
            // A token that reaches over the edge is left out.
            assert!(text[..end].starts_with(&prefix) && end - prefix.len() < 3, "{prefix:?}");
        }
    }
}

#[test]
fn a_template_that_wants_strings_gets_the_prefix_before_that_messages_text() {
    let model = model("chatml", CacheLimits::default());
    let messages = format!(
        r#"[{{"role":"system","content":"s"}},
        {{"role":"user","content":[{{"type":"text","text":"after"}},{IMAGE},{IMAGE}]}}]"#
    );
    let got = model.encode_chat(&Chat::new(messages.as_bytes(), 0)).unwrap();
    assert_eq!(
        model.decode(&got.ids, false),
        "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\n"
    );
    assert_eq!(got.partial.unwrap().images, 2);
}

#[test]
fn an_image_in_the_first_message_leaves_what_the_template_writes_before_it() {
    let model = model("parts", CacheLimits::default());
    let messages = format!(r#"[{{"role":"user","content":[{IMAGE}]}}]"#);
    let got = model.encode_chat(&Chat::new(messages.as_bytes(), 0)).unwrap();
    let text = "<|im_start|>system\nYou are helpful.<|im_end|>\n<|im_start|>user\n";
    assert_eq!(model.decode(&got.ids, false), text);
    let kwargs = br#"{"add_vision_id": true}"#;
    let chat = Chat { chat_template_kwargs: Some(kwargs), ..Chat::new(messages.as_bytes(), 0) };
    let got = model.encode_chat(&chat).unwrap();
    assert!(model.decode(&got.ids, false).starts_with(text), "at least what is surely before it");
}
