//! What tokenising costs with a model directory, on texts never seen before and on a conversation's
//! next turn, in CPU time, beside the library that is always right and what the machine can do.
//!
//! `cargo run --release -p pointsman-tokens --example cost -- MODEL_DIR [TEXT_FILE...]`; without
//! texts, on this project's own documents and sources.

#![allow(clippy::print_stdout, reason = "a command speaks on standard output")]

use std::error::Error;
use std::hint::black_box;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::time::{ClockId, clock_gettime};
use pointsman_tokens::{BYTES_PER_TOKEN, CacheLimits, Chat, Model};
use tokenizers::Tokenizer;

/// Cold tokens, about.
const SIZES: [usize; 3] = [100, 2_000, 8_000];

/// Most texts of one size.
const RUNS: usize = 200;

/// Texts that the slow library is given; it takes long.
const SLOW_RUNS: usize = 20;

/// Turns of the conversation, and tokens of each message.
const TURNS: usize = 20;
const MESSAGE_TOKENS: usize = 200;

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args_os().skip(1).map(PathBuf::from);
    let dir = args.next().ok_or("name a model directory")?;
    let mut files: Vec<PathBuf> = args.collect();
    if files.is_empty() {
        let here = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        files.extend(["docs", "crates/serve/src", "crates/kv/src"].map(|part| here.join(part)));
    }
    let mut text = String::new();
    for file in &files {
        read(file, &mut text)?;
    }
    floor(&text);
    let before = resident_kib();
    let begin = Instant::now();
    let model = Model::from_dir(&dir, CacheLimits::default())?;
    println!(
        "model loaded in {:.0} ms, {} MiB",
        ms(begin.elapsed()),
        (resident_kib() - before) >> 10
    );
    match model.slow_because() {
        None => println!("the quick way is taken"),
        Some(reason) => println!("the slow way is taken: {reason}"),
    }
    let slow = Tokenizer::from_file(dir.join("tokenizer.json")).map_err(|e| e.to_string())?;
    println!(
        "\n| cold tokens | p50 | p99 | bytes/s | the slow library, p50 | times |\n|{}",
        " --- |".repeat(6)
    );
    let mut at = 0;
    for tokens in SIZES {
        cold(&model, &slow, &text, &mut at, tokens)?;
    }
    println!("\ntokenised with, at the end: {} MiB resident", resident_kib() >> 10);
    if model.has_chat_template() {
        next_turn(&model, &text)?;
    } else {
        println!("no next turn: the model directory has no chat template");
    }
    Ok(())
}

/// What tells how fast the machine is: a scan for a byte that is not there, and a chain of
/// multiplications, each of which waits for the last.
fn floor(text: &str) {
    const STEPS: u64 = 50_000_000;
    let (begin, mut passes) = (Instant::now(), 0);
    while begin.elapsed() < Duration::from_millis(200) {
        black_box(memchr::memchr(0xff, black_box(text.as_bytes())));
        passes += 1;
    }
    let rate = (text.len() * passes) as f64 / begin.elapsed().as_secs_f64();
    let (begin, mut x) = (Instant::now(), 1u64);
    for _ in 0..STEPS {
        x = black_box(x.wrapping_mul(6_364_136_223_846_793_005)).rotate_left(17);
    }
    black_box(x);
    let step = begin.elapsed().as_secs_f64() * 1e9 / STEPS as f64;
    println!(
        "texts: {} KiB; memchr {:.1} GB/s; a dependent step {step:.2} ns",
        text.len() >> 10,
        rate / 1e9
    );
}

fn cold(
    model: &Model,
    slow: &Tokenizer,
    text: &str,
    at: &mut usize,
    tokens: usize,
) -> Result<(), Box<dyn Error>> {
    let (mut quick, mut slowly, mut bytes, mut count) = (Vec::new(), Vec::new(), 0, 0);
    // Each size has a part of the texts for itself, so that no text was seen before.
    let end = (*at + text.len() / SIZES.len()).min(text.len());
    while quick.len() < RUNS
        && let Some(piece) = piece(text, at, tokens * BYTES_PER_TOKEN, end)
    {
        let begin = cpu()?;
        let encoded = model.encode_prompt(piece, Some(false))?;
        quick.push(ms(cpu()? - begin));
        bytes += piece.len();
        count += encoded.ids.len();
        if slowly.len() < SLOW_RUNS {
            let begin = cpu()?;
            let other = slow.encode_fast(piece, false).map_err(|e| e.to_string())?;
            slowly.push(ms(cpu()? - begin));
            if other.get_ids() != &*encoded.ids {
                return Err(format!("the ids of a text differ: {piece:?}").into());
            }
        }
    }
    *at = end;
    let runs = quick.len();
    let rate = bytes as f64 / quick.iter().sum::<f64>() / 1e3;
    let (p50, p99) = (percentile(&mut quick, 0.5), percentile(&mut quick, 0.99));
    let other = percentile(&mut slowly, 0.5);
    println!(
        "| {} | {p50:.3} ms | {p99:.3} ms | {rate:.0} MB | {other:.2} ms | {runs} |",
        count / runs.max(1)
    );
    Ok(())
}

/// The next piece of at least `bytes` bytes of `text`, within `..end`.
fn piece<'t>(text: &'t str, at: &mut usize, bytes: usize, end: usize) -> Option<&'t str> {
    let from = text.ceil_char_boundary(*at);
    let to = text.ceil_char_boundary(from + bytes);
    *at = to;
    if from + bytes <= to && to <= end { text.get(from..to) } else { None }
}

/// A conversation that grows by a question that was never asked before.
fn next_turn(model: &Model, text: &str) -> Result<(), Box<dyn Error>> {
    let mut at = 0;
    let mut next = || piece(text, &mut at, MESSAGE_TOKENS * BYTES_PER_TOKEN, text.len());
    let mut messages = Vec::new();
    for turn in 0..2 * TURNS {
        let role = if turn % 2 == 0 { "user" } else { "assistant" };
        messages.push(message(role, next().ok_or("too little text")?)?);
    }
    let mut times = Vec::new();
    let mut known = (0, 0);
    while times.len() < RUNS
        && let Some(question) = next()
    {
        messages.push(message("user", question)?);
        let body = format!("[{}]", messages.join(","));
        messages.pop();
        let begin = cpu()?;
        let encoded = model.encode_chat(&Chat::new(body.as_bytes(), 0))?;
        // The first turn fills the cache.
        if encoded.from_cache > 0 {
            times.push(ms(cpu()? - begin));
            known = (encoded.from_cache, encoded.ids.len());
        }
    }
    println!(
        "next turn of a conversation: {} of {} tokens known, p50 {:.3} ms, parsing and template included",
        known.0,
        known.1,
        percentile(&mut times, 0.5)
    );
    let body = format!("[{}]", messages.join(","));
    let mut times = Vec::new();
    for _ in 0..RUNS {
        let begin = cpu()?;
        black_box(model.render_chat(&Chat::new(body.as_bytes(), 0))?);
        times.push(ms(cpu()? - begin));
    }
    println!("of which parsing and template: p50 {:.3} ms", percentile(&mut times, 0.5));
    Ok(())
}

fn message(role: &str, content: &str) -> Result<String, Box<dyn Error>> {
    Ok(format!("{{\"role\":\"{role}\",\"content\":{}}}", serde_json::to_string(content)?))
}

fn percentile(times: &mut [f64], share: f64) -> f64 {
    times.sort_unstable_by(f64::total_cmp);
    let at = (times.len() as f64 * share) as usize;
    times.get(at.min(times.len().saturating_sub(1))).copied().unwrap_or(f64::NAN)
}

/// CPU time of this thread, so that a busy machine does not matter.
fn cpu() -> nix::Result<Duration> {
    Ok(clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID)?.into())
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// Resident memory; 0 where the system does not tell.
fn resident_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    line.and_then(|line| line.split_ascii_whitespace().next()?.parse().ok()).unwrap_or(0)
}

/// Appends a file, or the files of a folder in order.
fn read(path: &Path, text: &mut String) -> std::io::Result<()> {
    if !path.is_dir() {
        // What is no text is left out.
        text.push_str(&std::fs::read_to_string(path).unwrap_or_default());
        return Ok(());
    }
    let mut entries: Vec<PathBuf> =
        std::fs::read_dir(path)?.map(|e| Ok(e?.path())).collect::<std::io::Result<_>>()?;
    entries.sort();
    entries.iter().try_for_each(|entry| read(entry, text))
}
