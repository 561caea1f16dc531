//! KV events that are lost, repeated, swapped, late: what the router believes that an engine holds is
//! what it holds, or less.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod support;

use std::time::Duration;

use pointsman_sim::mock::{EngineConfig, EventEncoding, EventFaults, Faults, HashForm, KvEvents};
use serde_json::{Value, json};
use support::fleet::{completion, prompt};
use support::{Fleet, Request, Spec, unified, wait_until, wait_until_within};

/// Tokens of a block of the mock engine.
const BLOCK: usize = 16;

fn events(events: EventFaults) -> Faults {
    Faults { events, ..Faults::default() }
}

async fn send(fleet: &Fleet, prompt: &[u32]) {
    let (head, body) = Request::completion(&completion(prompt, 4, false)).send(fleet.addr()).await;
    assert_eq!(head.status, 200, "{body:?}");
}

/// Prompts of several blocks; every third one continues the one before it.
fn prompts(from: u32, count: u32) -> Vec<Vec<u32>> {
    let one = |seed: u32| match seed % 3 {
        2 => [prompt(seed - 1, 80), prompt(seed + 100, 64)].concat(),
        _ => prompt(seed, 80 + 16 * (seed % 3)),
    };
    (from..from + count).map(one).collect()
}

async fn send_all(fleet: &Fleet, prompts: &[Vec<u32>]) {
    for prompt in prompts {
        send(fleet, prompt).await;
    }
}

/// Tokens of a prompt that the router believes to be on `u0`.
async fn believed(fleet: &Fleet, prompt: &[u32]) -> usize {
    let body = completion(prompt, 4, false);
    let (head, record) = Request::post("/v1/pointsman/explain", &body).json(fleet.addr()).await;
    assert_eq!(head.status, 200, "{record}");
    record["candidates"][0]["overlap_tokens"].as_u64().unwrap() as usize
}

/// Tokens of a prompt that are on an engine.
fn held(cache: &Value, prompt: &[u32]) -> usize {
    let chains = cache["ranks"][0]["chains"].as_array().unwrap();
    let common = |chain: &Value| {
        let tokens = chain["tokens"].as_array().unwrap();
        let same = tokens.iter().zip(prompt).take_while(|(held, asked)| **held == **asked);
        same.count() / BLOCK * BLOCK
    };
    chains.iter().map(common).max().unwrap_or(0)
}

async fn worker(fleet: &Fleet) -> Value {
    fleet.router.worker("u0").await.unwrap()
}

/// Waits until what is believed is what is held, block by block.
async fn until_all_is_known(fleet: &Fleet, prompts: &[Vec<u32>]) {
    until_all_is_known_within(support::SOON, fleet, prompts).await;
}

async fn until_all_is_known_within(time: Duration, fleet: &Fleet, prompts: &[Vec<u32>]) {
    wait_until_within(time, async || {
        let (worker, stats) = (worker(fleet).await, fleet.stats("u0"));
        if worker["index_blocks"] != stats["cached_blocks"] || worker["index_stale"] != false {
            let known = (&worker["index_blocks"], &worker["index_stale"]);
            return Err(format!("blocks and stale {known:?}, held {}", stats["cached_blocks"]));
        }
        let cache = fleet.get("u0").mock.cache();
        for prompt in prompts {
            let (believed, held) = (believed(fleet, prompt).await, held(&cache, prompt));
            if believed != held {
                return Err(format!("{believed} tokens believed, {held} held"));
            }
        }
        Ok(())
    })
    .await;
}

/// No prompt is believed to be more on the engine than it is.
async fn assert_nothing_is_overcounted(fleet: &Fleet, prompts: &[Vec<u32>]) {
    for prompt in prompts {
        let believed = believed(fleet, prompt).await;
        // Read afterwards: what the engine has stored meanwhile it does not lose in these tests.
        let held = held(&fleet.get("u0").mock.cache(), prompt);
        assert!(believed <= held, "{believed} tokens believed, {held} held");
    }
}

async fn until_stale(fleet: &Fleet) {
    wait_until(async || match worker(fleet).await["index_stale"].as_bool() {
        Some(true) => Ok(()),
        _ => Err("the index does not say that events are missing".to_owned()),
    })
    .await;
    let metrics = fleet.router.metrics().await;
    assert_eq!(metrics.count("pointsman_index_stale", &[("worker", "u0")]), 1);
}

async fn one_engine(spec: Spec) -> Fleet {
    let fleet = Fleet::start([spec]).await;
    until_subscribed(&fleet).await;
    fleet
}

/// What is published before is lost, where there is no replay.
async fn until_subscribed(fleet: &Fleet) {
    wait_until(async || match &fleet.stats("u0")["ranks"][0]["events"]["subscribers"] {
        some if *some == 1 => Ok(()),
        other => Err(format!("the publisher has {other} subscribers")),
    })
    .await;
}

#[tokio::test]
async fn what_an_engine_holds_is_known_from_its_events() {
    for (encoding, hashes) in [
        (EventEncoding::Map, HashForm::Int),
        (EventEncoding::Map, HashForm::Bytes),
        (EventEncoding::Array, HashForm::Int),
        (EventEncoding::Array, HashForm::Bytes),
    ] {
        let with = |engine: &mut EngineConfig| {
            engine.kv_events = Some(KvEvents { encoding, hashes, ..KvEvents::default() });
        };
        let fleet = one_engine(unified("u0").engine(with)).await;
        let prompts = prompts(0, 6);
        send_all(&fleet, &prompts).await;
        until_all_is_known(&fleet, &prompts).await;
    }
}

#[tokio::test]
async fn events_of_before_the_router_came_are_read_from_the_replay() {
    let fleet = one_engine(unified("u0")).await;
    let prompts = prompts(0, 6);
    for prompt in &prompts {
        let request = Request::completion(&completion(prompt, 4, false));
        assert_eq!(request.send(fleet.get("u0").mock.addr()).await.0.status, 200);
    }
    // Added anew, it is followed from the oldest event on.
    fleet.remove("u0").await;
    fleet.add("u0").await;
    wait_until(async || match fleet.router.worker("u0").await {
        Some(worker) if worker["condition"] == "up" => Ok(()),
        other => Err(format!("{other:?}")),
    })
    .await;
    until_all_is_known(&fleet, &prompts).await;
}

#[tokio::test]
async fn events_that_are_lost_are_replayed() {
    let fleet = one_engine(unified("u0")).await;
    let prompts = prompts(0, 12);
    send_all(&fleet, &prompts[..4]).await;
    until_all_is_known(&fleet, &prompts[..4]).await;
    fleet.set_faults("u0", events(EventFaults { drop_next: 3, ..EventFaults::default() }));
    send_all(&fleet, &prompts[4..]).await;
    until_all_is_known(&fleet, &prompts).await;
    assert_eq!(fleet.stats("u0")["ranks"][0]["events"]["lost"], 3);
    let metrics = fleet.router.metrics().await;
    let kinds = |kind| metrics.count("pointsman_kv_events_total", &[("kind", kind)]);
    assert!(kinds("replay") >= 2, "one at the start, one for the gap");
    assert_eq!(kinds("lost"), 0);
}

#[tokio::test]
async fn of_a_stream_that_loses_every_third_message_nothing_is_missed_in_the_end() {
    let fleet = one_engine(unified("u0")).await;
    let prompts = prompts(0, 24);
    let lossy = EventFaults { drop_probability: 0.33, ..EventFaults::default() };
    fleet.set_faults("u0", events(lossy));
    send_all(&fleet, &prompts[..20]).await;
    assert_nothing_is_overcounted(&fleet, &prompts[..20]).await;
    fleet.set_faults("u0", Faults::default());
    send_all(&fleet, &prompts[20..]).await;
    until_all_is_known(&fleet, &prompts).await;
}

#[tokio::test]
async fn events_that_are_lost_without_a_replay_are_shown_and_not_believed() {
    let fleet = one_engine(unified("u0").without_replay()).await;
    let prompts = prompts(0, 12);
    send_all(&fleet, &prompts[..4]).await;
    until_all_is_known(&fleet, &prompts[..4]).await;
    fleet.set_faults("u0", events(EventFaults { drop_next: 3, ..EventFaults::default() }));
    send_all(&fleet, &prompts[4..9]).await;
    until_stale(&fleet).await;
    assert_nothing_is_overcounted(&fleet, &prompts).await;
    // What comes after the gap is known.
    send_all(&fleet, &prompts[9..]).await;
    wait_until(async || {
        let cache = fleet.get("u0").mock.cache();
        for prompt in &prompts[9..] {
            let (believed, held) = (believed(&fleet, prompt).await, held(&cache, prompt));
            if believed != held {
                return Err(format!("{believed} tokens believed, {held} held"));
            }
        }
        Ok(())
    })
    .await;
    assert_nothing_is_overcounted(&fleet, &prompts).await;
}

#[tokio::test]
async fn events_that_come_twice_count_once() {
    for spec in [unified("u0"), unified("u0").without_replay()] {
        let fleet = one_engine(spec).await;
        let prompts = prompts(0, 8);
        fleet.set_faults("u0", events(EventFaults { duplicate_next: 6, ..EventFaults::default() }));
        send_all(&fleet, &prompts).await;
        until_all_is_known(&fleet, &prompts).await;
    }
}

#[tokio::test]
async fn events_in_the_wrong_order_are_put_right_by_a_replay() {
    let fleet = one_engine(unified("u0")).await;
    let prompts = prompts(0, 12);
    fleet.set_faults("u0", events(EventFaults { reorder_next: 3, ..EventFaults::default() }));
    send_all(&fleet, &prompts).await;
    until_all_is_known(&fleet, &prompts).await;
}

#[tokio::test]
async fn events_in_the_wrong_order_without_a_replay_are_not_overcounted() {
    let fleet = one_engine(unified("u0").without_replay()).await;
    let prompts = prompts(0, 12);
    fleet.set_faults("u0", events(EventFaults { reorder_next: 3, ..EventFaults::default() }));
    send_all(&fleet, &prompts).await;
    until_stale(&fleet).await;
    assert_nothing_is_overcounted(&fleet, &prompts).await;
}

#[tokio::test]
async fn a_publisher_that_starts_anew_is_known_to_be_empty() {
    for spec in [unified("u0"), unified("u0").without_replay()] {
        let fleet = one_engine(spec).await;
        let prompts = prompts(0, 9);
        send_all(&fleet, &prompts[..6]).await;
        until_all_is_known(&fleet, &prompts[..6]).await;
        fleet.set_faults("u0", Faults { restart_publisher: true, ..Faults::default() });
        assert_eq!(fleet.stats("u0")["cached_blocks"], 0);
        wait_until(async || match worker(&fleet).await["index_blocks"].as_u64() {
            Some(0) => Ok(()),
            blocks => Err(format!("{blocks:?} blocks are still known")),
        })
        .await;
        until_subscribed(&fleet).await;
        send_all(&fleet, &prompts[6..]).await;
        wait_until(async || {
            let cache = fleet.get("u0").mock.cache();
            for prompt in &prompts {
                let (believed, held) = (believed(&fleet, prompt).await, held(&cache, prompt));
                if believed != held {
                    return Err(format!("{believed} tokens believed, {held} held"));
                }
            }
            Ok(())
        })
        .await;
    }
}

#[tokio::test]
async fn a_replay_that_is_not_answered_is_given_up_and_asked_for_again_later() {
    let fleet = one_engine(unified("u0")).await;
    let prompts = prompts(0, 9);
    send_all(&fleet, &prompts[..3]).await;
    until_all_is_known(&fleet, &prompts[..3]).await;
    let faults = EventFaults { drop_next: 2, replay_silent: true, ..EventFaults::default() };
    fleet.set_faults("u0", events(faults));
    send_all(&fleet, &prompts[3..]).await;
    assert_nothing_is_overcounted(&fleet, &prompts).await;
    until_stale(&fleet).await;
    assert_nothing_is_overcounted(&fleet, &prompts).await;
    fleet.set_faults("u0", Faults::default());
    until_all_is_known_within(Duration::from_secs(25), &fleet, &prompts).await;
}

#[tokio::test]
async fn a_replay_that_does_not_go_back_far_enough_is_shown_and_not_believed() {
    let fleet = one_engine(unified("u0")).await;
    let prompts = prompts(0, 12);
    send_all(&fleet, &prompts[..4]).await;
    until_all_is_known(&fleet, &prompts[..4]).await;
    let faults = EventFaults { drop_next: 4, replay_limit: Some(1), ..EventFaults::default() };
    fleet.set_faults("u0", events(faults));
    send_all(&fleet, &prompts[4..]).await;
    until_stale(&fleet).await;
    assert_nothing_is_overcounted(&fleet, &prompts).await;
}

#[tokio::test]
async fn a_flood_of_events_that_overruns_its_queue_is_caught_up_with() {
    // A cache that is always full, and a publisher that drops what its queue does not hold.
    let small = |engine: &mut EngineConfig| {
        engine.capacity_blocks = 120;
        engine.kv_events = Some(KvEvents { high_water_mark: 4, ..KvEvents::default() });
    };
    let fleet = one_engine(unified("u0").engine(small)).await;
    let prompts = prompts(0, 120);
    let mut senders = Vec::new();
    for chunk in prompts.chunks(12) {
        let (addr, chunk) = (fleet.addr(), chunk.to_vec());
        senders.push(tokio::spawn(async move {
            for prompt in chunk {
                let request = Request::completion(&completion(&prompt, 4, false));
                assert_eq!(request.send(addr).await.0.status, 200);
            }
        }));
    }
    for sender in senders {
        sender.await.unwrap();
    }
    // A message after the last one dropped, so that its loss can be seen.
    send(&fleet, &prompt(150, 64)).await;
    until_all_is_known(&fleet, &prompts).await;
    fleet.assert_nothing_leaks().await;
}

#[tokio::test]
async fn requests_are_served_while_nobody_answers_for_events() {
    let off = unified("u0").worker(json!({"kv_events": {"endpoint": "tcp://127.0.0.1:1"}}));
    let fleet = Fleet::start([off]).await;
    let prompts = prompts(0, 3);
    send_all(&fleet, &prompts).await;
    for prompt in &prompts {
        assert_eq!(believed(&fleet, prompt).await, 0);
    }
    fleet.assert_nothing_leaks().await;
}
