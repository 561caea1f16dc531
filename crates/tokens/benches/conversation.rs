//! What the next turn of a growing conversation costs, with the prefix cache and without.
//!
//! Each iteration's last message is one never seen before. `POINTSMAN_BENCH_MODEL` names a model
//! directory to measure instead of the built-in model.

#![allow(missing_docs)]

use std::fmt::Write;
use std::hint::black_box;
use std::path::Path;

use criterion::{BatchSize, BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use pointsman_tokens::{CacheLimits, Chat, Error, Model};

const WORDS: [&str; 24] = [
    "the", "router", "takes", "requests", "and", "finds", "a", "path", "for", "each", "when",
    "prefill", "is", "busy", "it", "waits", "until", "some", "worker", "answers", "quickly,",
    "however", "long", "that",
];

fn load(limits: CacheLimits) -> Result<Model, Error> {
    match std::env::var("POINTSMAN_BENCH_MODEL") {
        Ok(dir) => Model::from_dir(Path::new(&dir), limits),
        Err(_) => Model::builtin(limits),
    }
}

/// Sentences that differ by `seed`, of about `words` tokens.
fn prose(seed: usize, words: usize) -> String {
    let mut state = seed as u64 ^ 0x9e37_79b9_7f4a_7c15;
    let mut text = String::new();
    for i in 0..words {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let word = WORDS[(state >> 33) as usize % WORDS.len()];
        let _ = write!(text, "{}{word}", if i == 0 { "" } else { " " });
        if i % 17 == 16 {
            let _ = write!(text, " {}.", state >> 54);
        }
    }
    text
}

/// Messages of `turns` turns of 100 and 300 words, and a last question.
fn messages(turns: usize, last: &str) -> String {
    let mut text = "[".to_owned();
    for i in 0..turns {
        let (question, answer) = (prose(2 * i, 100), prose(2 * i + 1, 300));
        let _ = write!(text, r#"{{"role":"user","content":"{question}"}},"#);
        let _ = write!(text, r#"{{"role":"assistant","content":"{answer}"}},"#);
    }
    let _ = write!(text, r#"{{"role":"user","content":"{last}"}}]"#);
    text
}

fn turns(c: &mut Criterion) {
    let mut group = c.benchmark_group("next_turn");
    group.sample_size(20);
    for (name, limits) in [("cached", CacheLimits::default()), ("whole", CacheLimits { bytes: 0 })]
    {
        let Ok(model) = load(limits) else { continue };
        let mut seed = 1_000;
        for turns in [0, 1, 5, 20] {
            let known = messages(turns, "");
            let Ok(first) = model.encode_chat(&Chat::new(known.as_bytes(), 0)) else { continue };
            group.throughput(Throughput::Elements(first.ids.len() as u64));
            group.bench_function(BenchmarkId::new(name, turns), |b| {
                let next = || {
                    seed += 1;
                    messages(turns, &prose(seed, 100))
                };
                let encode = |m: String| black_box(model.encode_chat(&Chat::new(m.as_bytes(), 0)));
                b.iter_batched(next, encode, BatchSize::SmallInput);
            });
        }
    }
    group.finish();
}

fn render(c: &mut Criterion) {
    let Ok(model) = load(CacheLimits::default()) else { return };
    let mut group = c.benchmark_group("render");
    for turns in [0, 20] {
        let messages = messages(turns, "and now?");
        let chat = Chat::new(messages.as_bytes(), 0);
        group.bench_function(turns.to_string(), |b| b.iter(|| black_box(model.render_chat(&chat))));
    }
    group.finish();
}

fn prompts(c: &mut Criterion) {
    let Ok(model) = load(CacheLimits { bytes: 0 }) else { return };
    let mut group = c.benchmark_group("cold_prompt");
    group.sample_size(20);
    for words in [100, 2_000, 8_000] {
        let text = prose(7, words);
        let Ok(encoded) = model.encode_prompt(&text, None) else { continue };
        group.throughput(Throughput::Elements(encoded.ids.len() as u64));
        group.bench_function(words.to_string(), |b| {
            b.iter(|| black_box(model.encode_prompt(&text, None)));
        });
    }
    group.finish();
}

criterion_group!(benches, turns, render, prompts);
criterion_main!(benches);
