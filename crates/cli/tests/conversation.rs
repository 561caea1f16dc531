//! Conversations: which way each turn goes under the default thresholds, and that what the router
//! takes for cached is what the engines report as cached.
#![allow(clippy::expect_used, clippy::panic, reason = "it is all test")]

mod cache;
mod support;

use cache::{caught_up, explain};
use serde_json::{Value, json};
use support::fleet::MODEL;
use support::{Body, Fleet, Head, Request, decode, prefill};

/// Words of the first message, and of each one after it.
const OPENING_WORDS: usize = 300;
const FURTHER_WORDS: usize = 60;

/// Turns of each conversation.
const TURNS: usize = 6;

fn words(count: usize, seed: usize) -> String {
    let word = |at| format!("word{} ", (seed * 7919 + at * 104_729) % 5003);
    (0..count).map(word).collect()
}

fn two_and_two() -> [support::Spec; 4] {
    // What an engine does not tell; without it the budget guard goes by a fallback.
    let told = json!({"max_num_batched_tokens": 8192});
    [prefill("p0"), prefill("p1"), decode("d0"), decode("d1")].map(|spec| spec.worker(told.clone()))
}

/// A conversation under way.
struct Talk {
    messages: Vec<Value>,
    /// Prompt tokens that some engine had to compute, over all turns.
    computed: u64,
}

/// One turn as it was seen from outside.
struct Turn {
    head: Head,
    explained: Value,
    prompt_tokens: u64,
    /// Prompt tokens that the engine reports as not cached.
    uncached: u64,
}

impl Talk {
    fn new() -> Talk {
        let system = json!({"role": "system", "content": "You answer in plain words."});
        Talk { messages: vec![system], computed: 0 }
    }

    /// Says something and takes the answer into the conversation; odd turns are streamed.
    async fn turn(&mut self, fleet: &Fleet, text: String, stream: bool) -> Turn {
        self.messages.push(json!({"role": "user", "content": text}));
        let mut body = json!({"model": MODEL, "messages": self.messages, "max_tokens": 40});
        if stream {
            body["stream"] = json!(true);
            body["stream_options"] = json!({"include_usage": true});
        }
        let before = computed(fleet);
        let explained = explain(fleet, &body).await;
        let (head, reply) = Request::chat(&body).send(fleet.addr()).await;
        assert_eq!(head.status, 200, "{reply:?}");
        let (answer, usage) = if stream { streamed(&reply) } else { whole(&reply) };
        self.messages.push(json!({"role": "assistant", "content": answer}));
        let number = |value: &Value| value.as_u64().unwrap_or_else(|| panic!("{usage}"));
        let prompt_tokens = number(&usage["prompt_tokens"]);
        let uncached = prompt_tokens - number(&usage["prompt_tokens_details"]["cached_tokens"]);
        assert_eq!(computed(fleet) - before, uncached, "{usage}");
        self.computed += uncached;
        Turn { head, explained, prompt_tokens, uncached }
    }
}

fn whole(reply: &Body) -> (String, Value) {
    let json = reply.json();
    let answer = json["choices"][0]["message"]["content"].as_str().expect("an answer");
    (answer.to_owned(), json["usage"].clone())
}

fn streamed(reply: &Body) -> (String, Value) {
    assert!(reply.is_done(), "{reply:?}");
    let usage = reply.chunks().last().map(|chunk| chunk["usage"].clone());
    (reply.content(), usage.expect("an event with usage"))
}

/// Prompt tokens that the engines have computed so far.
fn computed(fleet: &Fleet) -> u64 {
    let of = |engine: &support::fleet::Engine| engine.mock.stats()["local_compute_tokens"].as_u64();
    fleet.engines.iter().filter_map(of).sum()
}

/// Six turns: remote on the first, local on the later ones; every count agrees with the engines'.
async fn goes_remote_first_and_local_then(fleet: &Fleet) {
    let mut talk = Talk::new();
    let mut worker = String::new();
    for number in 0..TURNS {
        caught_up(fleet).await;
        let count = if number == 0 { OPENING_WORDS } else { FURTHER_WORDS };
        let turn = talk.turn(fleet, words(count, number), number % 2 == 1).await;
        let (path, reason) = match number {
            0 => ("remote", "eff_isl_ratio_over"),
            _ => ("local", "eff_isl_under"),
        };
        assert_eq!((turn.head.path(), turn.head.reason()), (path, reason), "turn {number}");
        let record = &turn.explained;
        assert_eq!((&record["path"], &record["reason"]), (&json!(path), &json!(reason)));
        assert_eq!(record["isl_tokens"], turn.prompt_tokens);
        assert_eq!(record["effective_isl_tokens"], turn.uncached, "turn {number}");
        assert_eq!(record["decode_worker"], turn.head.worker());
        let because = record["because"].as_str().unwrap_or_default();
        assert!(because.contains(&turn.uncached.to_string()), "{because}");
        if number == 0 {
            turn.head.worker().clone_into(&mut worker);
            assert_eq!(turn.uncached, turn.prompt_tokens);
        }
        assert_eq!(turn.head.worker(), worker, "the conversation stays where its cache is");
    }
    assert_metrics_say_why(fleet, talk.computed).await;
    fleet.assert_nothing_leaks().await;
}

async fn assert_metrics_say_why(fleet: &Fleet, computed: u64) {
    let metrics = fleet.router.metrics().await;
    let (turns, later) = (TURNS as u64, TURNS as u64 - 1);
    let decided = |path, reason| {
        let labels =
            [("model", MODEL), ("path", path), ("policy", "isl_bounding"), ("reason", reason)];
        metrics.count("pointsman_decisions_total", &labels)
    };
    assert_eq!(decided("remote", "eff_isl_ratio_over"), 1);
    assert_eq!(decided("local", "eff_isl_under"), later);
    assert_eq!(metrics.count("pointsman_decisions_total", &[]), turns);
    assert_eq!(metrics.count("pointsman_effective_isl_tokens_count", &[]), turns);
    assert_eq!(metrics.count("pointsman_effective_isl_tokens_sum", &[]), computed);
    // Of replies that are not streamed nobody knows when the first token came.
    let ttft = |path| metrics.count("pointsman_ttft_seconds_count", &[("path", path)]);
    assert_eq!((ttft("remote"), ttft("local")), (0, 3));
    assert_eq!(metrics.not_zero("pointsman_fallbacks_total"), [""; 0]);
    assert_eq!(metrics.not_zero("pointsman_guard_vetoes_total"), [""; 0]);
}

#[tokio::test]
async fn a_conversation_goes_remote_on_its_first_turn_and_local_on_the_later_ones() {
    let fleet = Fleet::start(two_and_two()).await;
    goes_remote_first_and_local_then(&fleet).await;
    let remote: u64 = ["p0", "p1"].iter().map(|name| fleet.legs(name, "prefill")).sum();
    let local: u64 = ["d0", "d1"].iter().map(|name| fleet.legs(name, "local")).sum();
    assert_eq!((remote, local), (1, 5));
}

#[tokio::test]
async fn the_same_conversation_with_the_engines_own_tokenizer() {
    let over = json!({"model": {"tokenizer": "engine"}});
    let fleet = Fleet::with(two_and_two(), over).await;
    goes_remote_first_and_local_then(&fleet).await;
}

#[tokio::test]
async fn the_same_conversation_on_engines_with_larger_blocks_and_the_older_events() {
    use pointsman_sim::mock::{EventEncoding, HashForm, KvEvents};
    let old = |spec: support::Spec| {
        spec.engine(|engine| {
            engine.block_size = 64;
            engine.version = "0.23.0".to_owned();
            engine.kv_events = Some(KvEvents {
                encoding: EventEncoding::Array,
                hashes: HashForm::Bytes,
                topic: "kv-events".to_owned(),
                ..KvEvents::default()
            });
        })
    };
    let fleet = Fleet::start(two_and_two().map(old)).await;
    goes_remote_first_and_local_then(&fleet).await;
}

#[tokio::test]
async fn a_turn_with_much_that_is_new_goes_remote_again_and_its_pulled_tokens_count_as_cached() {
    let fleet = Fleet::start(two_and_two()).await;
    let mut talk = Talk::new();
    talk.turn(&fleet, words(2000, 0), false).await;
    caught_up(&fleet).await;
    let turn = talk.turn(&fleet, words(FURTHER_WORDS, 1), false).await;
    assert_eq!(turn.head.reason(), "eff_isl_under");

    // A third of the prompt is new, and more than the absolute threshold.
    caught_up(&fleet).await;
    let turn = talk.turn(&fleet, words(1000, 2), false).await;
    assert_eq!((turn.head.path(), turn.head.reason()), ("remote", "eff_isl_over"));
    let record = &turn.explained;
    let worker = record["prefill_worker"].as_str().expect("a prefill worker");
    let computes = cache::candidates(record, worker)[0];
    // The prefill worker has the first turn in its cache, the decode worker the first two.
    assert_eq!(computes["effective_isl_tokens"], turn.uncached);
    assert!(record["effective_isl_tokens"].as_u64() < Some(turn.uncached), "{record}");
    let metrics = fleet.router.metrics().await;
    assert_eq!(metrics.count("pointsman_effective_isl_tokens_sum", &[]), talk.computed);

    caught_up(&fleet).await;
    let turn = talk.turn(&fleet, words(FURTHER_WORDS, 3), true).await;
    assert_eq!(turn.head.reason(), "eff_isl_under");
    assert_eq!(turn.explained["effective_isl_tokens"], turn.uncached);
    fleet.assert_nothing_leaks().await;
}

#[tokio::test]
async fn two_conversations_with_a_beginning_in_common_share_its_cache() {
    let fleet = Fleet::start(two_and_two()).await;
    let opening = words(OPENING_WORDS, 0);
    Talk::new().turn(&fleet, opening.clone(), false).await;
    caught_up(&fleet).await;
    let turn = Talk::new().turn(&fleet, opening + "And something else.", false).await;
    assert_eq!((turn.head.path(), turn.head.reason()), ("local", "eff_isl_under"));
    assert_eq!(turn.explained["effective_isl_tokens"], turn.uncached);
}

#[tokio::test]
async fn adapters_and_salts_share_nothing_with_the_base_model() {
    let adapted = |spec: support::Spec| spec.engine(|engine| engine.adapters = vec!["sql".into()]);
    let fleet = Fleet::start([prefill("p0"), decode("d0")].map(adapted)).await;
    let messages = json!([{"role": "user", "content": words(OPENING_WORDS, 0)}]);
    let base = json!({"model": MODEL, "messages": messages, "max_tokens": 4});
    let (mut adapter, mut salted) = (base.clone(), base.clone());
    adapter["model"] = json!("sql");
    salted["cache_salt"] = json!("tenant-1");
    for body in [&base, &adapter, &salted] {
        for expected in ["remote", "local"] {
            caught_up(&fleet).await;
            let effective = explain(&fleet, body).await["effective_isl_tokens"].as_u64();
            let (head, reply) = Request::chat(body).json(fleet.addr()).await;
            assert_eq!(head.path(), expected, "{reply}");
            let usage = &reply["usage"];
            let cached = usage["prompt_tokens_details"]["cached_tokens"].as_u64();
            let uncached = usage["prompt_tokens"].as_u64().zip(cached).map(|(all, had)| all - had);
            assert_eq!(effective, uncached, "{usage}");
        }
    }
    fleet.assert_nothing_leaks().await;
}

fn without_events() -> [support::Spec; 4] {
    two_and_two().map(|spec| spec.engine(|engine| engine.kv_events = None))
}

/// Without events the router goes by what it has sent where.
#[tokio::test]
async fn without_events_the_second_turn_goes_local_by_the_routers_own_record() {
    for (approximate, second) in [("capacity", "local"), ("off", "remote")] {
        let over = json!({"kv": {"approximate": approximate}});
        let fleet = Fleet::with(without_events(), over).await;
        let mut talk = Talk::new();
        let turn = talk.turn(&fleet, words(OPENING_WORDS, 0), false).await;
        assert_eq!(turn.head.path(), "remote");
        let turn = talk.turn(&fleet, words(FURTHER_WORDS, 1), false).await;
        assert_eq!(turn.head.path(), second, "approximate: {approximate}");
        let metrics = fleet.router.metrics().await;
        let signal = [("signal", "kv_events")];
        assert_eq!(metrics.count("pointsman_fallbacks_total", &signal), 2);
        fleet.assert_nothing_leaks().await;
    }
}

#[tokio::test]
async fn a_record_of_placements_counts_until_its_time_is_over() {
    let over = json!({"kv": {"approximate": "ttl", "approximate_ttl": "3s"}});
    let fleet = Fleet::with(without_events(), over).await;
    let body = json!({"model": MODEL, "prompt": words(OPENING_WORDS, 0), "max_tokens": 4});
    let (head, reply) = Request::completion(&body).send(fleet.addr()).await;
    assert_eq!((head.status, head.path()), (200, "remote"), "{reply:?}");
    assert_eq!(explain(&fleet, &body).await["path"], "local");
    support::wait_until(async || match &explain(&fleet, &body).await["path"] {
        path if path == "remote" => Ok(()),
        path => Err(format!("the path {path}")),
    })
    .await;
}

#[tokio::test]
async fn an_estimate_from_bytes_is_marked_and_knows_no_prefix() {
    let over = json!({"model": {"tokenizer": {"bytes_per_token": 4}}});
    let fleet = Fleet::with(two_and_two(), over).await;
    let body = json!({"model": MODEL, "max_tokens": 4,
                      "messages": [{"role": "user", "content": "a".repeat(4000)}]});
    for _ in 0..2 {
        let record = explain(&fleet, &body).await;
        assert_eq!(record["estimated"], true);
        let estimate = record["isl_tokens"].as_u64().expect("a number");
        assert!((1000..1020).contains(&estimate), "{estimate}");
        assert_eq!(record["effective_isl_tokens"], estimate);
        assert_eq!(record["fallbacks"], json!(["tokenizer"]));
        let (head, _) = Request::chat(&body).send(fleet.addr()).await;
        assert_eq!((head.path(), head.reason()), ("remote", "eff_isl_ratio_over"));
        caught_up(&fleet).await;
    }
    let metrics = fleet.router.metrics().await;
    let signal = [("signal", "tokenizer")];
    assert_eq!(metrics.count("pointsman_fallbacks_total", &signal), 2);
}
