//! The built-in model: what the mock engine and `up` build on.

#![allow(clippy::unwrap_used)]

use pointsman_tokens::{CacheLimits, Chat, Encoded, Model, builtin_dir_files};

fn model() -> Model {
    Model::builtin(CacheLimits::default()).unwrap()
}

fn chat<'a>(messages: &'a str) -> Chat<'a> {
    Chat::new(messages.as_bytes(), 0)
}

#[test]
fn prompts_and_chats_encode_and_decode_back() {
    let m = model();
    let text = "Hello, world!\n  Gr\u{fc}\u{df}e \u{1f600} \u{4f60}\u{597d}";
    let Encoded { ids, partial, .. } = m.encode_prompt(text, None).unwrap();
    assert!(partial.is_none());
    assert_eq!(m.decode(&ids, true), text);
    let c = chat(r#"[{"role":"user","content":"hi"}]"#);
    assert_eq!(
        m.render_chat(&c).unwrap(),
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    );
    let ids = m.encode_chat(&c).unwrap().ids;
    assert_eq!(ids[0], 3);
    assert_eq!(m.decode(&ids, false), m.render_chat(&c).unwrap());
    assert_eq!(m.decode(&ids, true), "user\nhi\nassistant\n");
    assert_eq!(m.eos_id(), Some(4));
    assert_eq!(m.vocab_size(), 4096);
}

#[test]
fn generated_plain_words_encode_back_to_the_same_ids_in_the_next_turn() {
    let m = model();
    let words = m.plain_words();
    assert!(words.len() > 1000, "{}", words.len());
    for (i, chunk) in words.chunks(50).enumerate() {
        let reply = m.decode(chunk, true);
        assert!(reply.starts_with(' ') && reply.chars().all(|c| c == ' ' || c.is_alphabetic()));
        let one_by_one: String = chunk.iter().map(|&id| m.decode(&[id], true)).collect();
        assert_eq!(reply, one_by_one);
        let first = format!(r#"[{{"role":"user","content":"turn {i}"}}"#);
        let before = m.encode_chat(&chat(&format!("{first}]"))).unwrap().ids;
        let next = format!(r#"{first},{{"role":"assistant","content":"{reply}"}}]"#);
        let after = m.encode_chat(&chat(&next)).unwrap().ids;
        let generated: Vec<u32> = before.iter().chain(chunk).copied().collect();
        assert_eq!(after[..generated.len()], generated);
    }
}

#[test]
fn the_files_written_to_a_directory_are_the_same_model() {
    let dir = tempfile::tempdir().unwrap();
    for (name, bytes) in builtin_dir_files() {
        std::fs::write(dir.path().join(name), bytes).unwrap();
    }
    let (a, b) = (model(), Model::from_dir(dir.path(), CacheLimits { bytes: 0 }).unwrap());
    let c = chat(
        r#"[{"role":"system","content":"s"},{"role":"user","content":"q"},
        {"role":"assistant","content":null,"tool_calls":[{"id":"1","type":"function",
        "function":{"name":"f","arguments":"{\"x\": [1, 2.0]}"}}]},
        {"role":"tool","tool_call_id":"1","content":[{"type":"text","text":"42"}]}]"#,
    );
    assert_eq!(a.encode_chat(&c).unwrap().ids, b.encode_chat(&c).unwrap().ids);
    let tools = br#"[{"type":"function","function":{"name":"f","parameters":{"b":1,"a":2}}}]"#;
    let text = a.render_chat(&Chat { tools: Some(tools), ..c }).unwrap();
    assert!(text.contains(
        r#"{"type": "function", "function": {"name": "f", "description": null, "parameters": {"b": 1, "a": 2}}}"#
    ));
    assert!(text.contains(r#"<tool_call>{"name": "f", "arguments": {"x": [1, 2.0]}}</tool_call>"#));
    assert!(a.cache_stats().enabled && !b.cache_stats().enabled);
}

#[test]
fn a_second_turn_takes_the_first_ones_tokens_from_the_cache() {
    let m = model();
    let long = "word ".repeat(400);
    let one = format!(r#"[{{"role":"user","content":"{long}"}}"#);
    let first = m.encode_chat(&chat(&format!("{one}]"))).unwrap();
    assert_eq!(first.from_cache, 0);
    let two = format!(r#"{one},{{"role":"assistant","content":"{long}"}}]"#);
    let second = m.encode_chat(&chat(&two)).unwrap();
    assert!(second.from_cache > 390, "{}", second.from_cache);
    assert_eq!(m.cache_stats().hit_tokens, u64::from(second.from_cache));
}
