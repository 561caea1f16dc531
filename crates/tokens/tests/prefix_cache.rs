//! The prefix cache is exact: with it every prompt has the ids that it has without.

#![allow(clippy::unwrap_used)]

use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock};

use pointsman_tokens::{CacheLimits, Chat, Model};
use proptest::prelude::*;

/// A model with the cache and the same without.
struct Pair {
    name: String,
    cached: Model,
    plain: Model,
}

const NONE: CacheLimits = CacheLimits { bytes: 0 };
/// Small enough that entries are dropped during the test.
const SMALL: CacheLimits = CacheLimits { bytes: 256 << 10 };

fn parity() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/parity")
}

fn load(name: &str, dir: &Path, limits: CacheLimits) -> Pair {
    Pair {
        name: name.to_owned(),
        cached: Model::from_dir(dir, limits).unwrap(),
        plain: Model::from_dir(dir, NONE).unwrap(),
    }
}

/// The small tokenizers with templates, and those of `POINTSMAN_TEST_TOKENIZERS` (model directories,
/// separated by colons) with a ChatML template.
static PAIRS: LazyLock<Vec<Pair>> = LazyLock::new(|| {
    let mut pairs = Vec::new();
    for (model, template) in
        [("bytes", "qwen"), ("split", "llama3"), ("sentence", "gemma"), ("meta", "mistral")]
    {
        let dir = tempfile::tempdir().unwrap();
        for file in ["tokenizer.json", "tokenizer_config.json"] {
            std::fs::copy(parity().join("models").join(model).join(file), dir.path().join(file))
                .unwrap();
        }
        let source = parity().join(format!("templates/{template}.jinja"));
        std::fs::copy(source, dir.path().join("chat_template.jinja")).unwrap();
        pairs.push(load(model, dir.path(), SMALL));
    }
    let more = std::env::var("POINTSMAN_TEST_TOKENIZERS").unwrap_or_default();
    for dir in more.split(':').filter(|d| !d.is_empty()) {
        pairs.push(load(dir, Path::new(dir), SMALL));
    }
    pairs.push(Pair {
        name: "built-in".to_owned(),
        cached: Model::builtin(SMALL).unwrap(),
        plain: Model::builtin(NONE).unwrap(),
    });
    pairs
});

/// Text as users write it and as they should not.
fn text() -> impl Strategy<Value = String> {
    let special = prop::sample::select(vec![
        "<|im_start|>",
        "<|im_end|>",
        "<|im_end|>\n",
        " <s>",
        "</s> ",
        "[INST]",
        "[/INST]",
        "[TOOL_RESULTS]",
        "[/AVAILABLE_TOOLS]",
        "  [TOOL_RESULTS]  ",
        "<|eot_id|>",
        "<start_of_turn>",
        "<think>",
        "</think>\n\n",
        "<tool_call>",
        "Zürich",
        "Zu\u{308}rich",
        "<|im_",
        "end|>",
        "<unk>",
        "<0x0A>",
        "<｜User｜>",
        "▁",
        "Ġ",
        "<|im_start|><|im_end|>",
        "<<|im_end|>>",
        "</s></s>",
        "<s><s>",
    ]);
    let piece = prop_oneof![
        3 => special.prop_map(str::to_owned),
        3 => "[ a-zA-Z0-9.,'\n\t]{0,40}",
        2 => "\\PC{0,20}",
        1 => "[ \n\r\t\u{a0}\u{2003}\u{85}\u{1c}]{1,6}",
        1 => any::<String>(),
        1 => "[a-z ]{200,400}",
    ];
    prop::collection::vec(piece, 0..8).prop_map(|pieces| pieces.concat())
}

fn conversation() -> impl Strategy<Value = Vec<String>> {
    prop::collection::vec(text(), 1..7)
}

fn messages(turns: &[String]) -> String {
    let role = |i: usize| if i.is_multiple_of(2) { "user" } else { "assistant" };
    let list: Vec<_> = turns
        .iter()
        .enumerate()
        .map(|(i, t)| serde_json::json!({"role": role(i), "content": t}))
        .collect();
    serde_json::to_string(&list).unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn growing_conversations_have_the_ids_of_the_whole(turns in conversation(), bos in any::<bool>()) {
        for pair in PAIRS.iter() {
            for len in 1..=turns.len() {
                let messages = messages(&turns[..len]);
                let chat = Chat {
                    add_special_tokens: bos,
                    add_generation_prompt: len % 2 == 1,
                    ..Chat::new(messages.as_bytes(), 0)
                };
                let (a, b) = (pair.cached.encode_chat(&chat), pair.plain.encode_chat(&chat));
                let (a, b) = (a.unwrap(), b.unwrap());
                prop_assert_eq!(&a.ids, &b.ids, "{}: {}", &pair.name, messages);
                prop_assert_eq!(b.from_cache, 0);
            }
        }
    }

    #[test]
    fn plain_prompts_have_the_ids_of_the_whole(pieces in conversation(), bos in any::<bool>()) {
        for pair in PAIRS.iter() {
            for len in 1..=pieces.len() {
                let prompt = pieces[..len].concat();
                let a = pair.cached.encode_prompt(&prompt, Some(bos)).unwrap();
                let b = pair.plain.encode_prompt(&prompt, Some(bos)).unwrap();
                prop_assert_eq!(a.ids, b.ids, "{}: {:?}", &pair.name, prompt);
            }
        }
    }
}

#[test]
fn the_cache_is_on_where_it_is_exact_and_off_where_it_is_not() {
    for pair in PAIRS.iter() {
        assert!(pair.cached.cache_stats().enabled, "{}", pair.name);
    }
    let from = parity().join("models/bytes");
    let dir = tempfile::tempdir().unwrap();
    let enabled_with = |from_text: &str, to: &str| {
        let json = std::fs::read_to_string(from.join("tokenizer.json")).unwrap();
        assert!(json.contains(from_text), "{from_text}");
        std::fs::write(dir.path().join("tokenizer.json"), json.replace(from_text, to)).unwrap();
        Model::from_dir(dir.path(), SMALL).unwrap().cache_stats().enabled
    };
    assert!(enabled_with("x", "x"));
    assert!(!enabled_with("\"single_word\":false", "\"single_word\":true"));
    assert!(!enabled_with("\"lstrip\":false", "\"lstrip\":true"));
    assert!(!enabled_with("\"normalized\":false", "\"normalized\":true"));
    assert!(!enabled_with("\"dropout\":null", "\"dropout\":0.1"));
}

#[test]
fn what_the_cache_holds_stays_within_its_limit() {
    let limit = 512 << 10;
    let model = Arc::new(Model::builtin(CacheLimits { bytes: limit }).unwrap());
    let threads: Vec<_> = (0..4)
        .map(|t| {
            let model = model.clone();
            std::thread::spawn(move || {
                for i in 0..60 {
                    let long = format!("thread {t} turn {i} ").repeat(40 + i * 7);
                    let turns = [long.clone(), "short".to_owned(), long];
                    let messages = messages(&turns);
                    let chat = Chat::new(messages.as_bytes(), 0);
                    let ids = model.encode_chat(&chat).unwrap().ids;
                    let text = model.render_chat(&chat).unwrap();
                    assert_eq!(model.decode(&ids, false), text);
                    assert!(model.cache_stats().bytes <= limit as u64);
                }
            })
        })
        .collect();
    threads.into_iter().for_each(|t| t.join().unwrap());
    let stats = model.cache_stats();
    assert!(stats.evicted > 0 && stats.hit_tokens > 0 && stats.entries > 0, "{stats:?}");
}
