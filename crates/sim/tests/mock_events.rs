//! KV events of mock engines over ZMQ: what is told, replay, ranks, both socket modes, and faults.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;
#[path = "common/zmq.rs"]
mod zmq;

use common::{call, complete, get, ids, post, prefill, quick, start, until};
use pointsman_kv::{EngineHash, Hasher, Overlap, Slot, SpaceKey, Store, Tier, index};
use pointsman_sim::mock::{
    EngineConfig, EventEncoding, HashForm, KvEvents, KvSocket, MockEngine, Role,
};
use pointsman_wire::zmtp::SocketType;
use serde_json::json;
use zmq::{Peer, Told, events, sequence};

async fn with_events(events: KvEvents) -> MockEngine {
    start(EngineConfig { kv_events: Some(events), ..quick(Role::Decode) }).await
}

async fn subscribed(engine: &MockEngine, topic: &str) -> Peer {
    let before = engine.stats()["ranks"][0]["events"]["subscribers"].as_u64().unwrap();
    let peer = Peer::subscribe(engine.kv_endpoint().unwrap(), topic).await;
    // As with any PUB socket, what is published before the subscription arrives is not sent.
    until(engine, |stats| stats["ranks"][0]["events"]["subscribers"] == before + 1).await;
    peer
}

async fn ask(engine: &MockEngine, from: u32, count: u32) {
    let body = json!({"prompt": ids(from, count), "max_tokens": 1});
    assert_eq!(complete(&engine.url(), &body).await.status, 200);
}

#[tokio::test]
async fn stored_blocks_are_told_with_their_tokens_under_every_encoding() {
    for encoding in [EventEncoding::Map, EventEncoding::Array] {
        for hashes in [HashForm::Int, HashForm::Bytes] {
            let settings =
                KvEvents { encoding, hashes, topic: "kv@x".into(), ..KvEvents::default() };
            let engine = with_events(settings).await;
            let mut peer = subscribed(&engine, "kv@").await;
            ask(&engine, 0, 40).await;
            ask(&engine, 0, 60).await;
            let first = peer.message().await.unwrap();
            assert_eq!((&first[0][..], sequence(&first)), (&b"kv@x"[..], 0));
            assert_eq!(zmq::names_are_digests(&first[2]), hashes == HashForm::Bytes);
            let [Told::Stored { hashes, parent: None, tokens, lora: None }] =
                &events(&first[2])[..]
            else {
                panic!("{first:?}");
            };
            assert_eq!(tokens, &ids(0, 32));
            let second = peer.message().await.unwrap();
            assert_eq!(sequence(&second), 1);
            let [Told::Stored { parent, tokens, .. }] = &events(&second[2])[..] else {
                panic!("{second:?}");
            };
            assert_eq!(*parent, Some(hashes[1]));
            assert_eq!(tokens, &ids(32, 16));
            engine.stop().await;
        }
    }
}

#[tokio::test]
async fn a_subscriber_gets_its_topic_alone() {
    let engine = with_events(KvEvents { topic: "kv@b".into(), ..KvEvents::default() }).await;
    let mut other = subscribed(&engine, "kv@a").await;
    let mut own = subscribed(&engine, "").await;
    ask(&engine, 0, 40).await;
    assert!(own.message().await.is_some());
    engine.stop().await;
    assert_eq!(other.message().await, None);
}

#[tokio::test]
async fn pulled_and_generated_blocks_are_told_too() {
    let p = start(quick(Role::Prefill)).await;
    let d = start(quick(Role::Decode)).await;
    let mut peer = subscribed(&d, "").await;
    let params = prefill(&p, &ids(0, 40)).await;
    let body = json!({
        "prompt": ids(0, 40), "max_tokens": 30, "ignore_eos": true, "kv_transfer_params": params,
        "return_token_ids": true,
    });
    let reply = complete(&d.url(), &body).await.json();
    let said: Vec<u32> = reply["choices"][0]["token_ids"]
        .as_array()
        .unwrap()
        .iter()
        .map(|id| id.as_u64().unwrap() as u32)
        .collect();
    let mut told = Vec::new();
    while told.len() < 64 {
        for event in events(&peer.message().await.unwrap()[2]) {
            let Told::Stored { tokens, .. } = event else { panic!("{event:?}") };
            told.extend(tokens);
        }
    }
    let all: Vec<u32> = ids(0, 40).into_iter().chain(said).collect();
    assert_eq!(told, all[..64]);
    p.stop().await;
    d.stop().await;
}

#[tokio::test]
async fn replay_sends_what_is_kept_and_an_end_marker() {
    let engine = with_events(KvEvents { buffer_steps: 3, ..KvEvents::default() }).await;
    for at in 0..5 {
        ask(&engine, at * 30, 40).await;
    }
    let mut peer = Peer::connect(engine.replay_endpoint().unwrap(), SocketType::Dealer).await;
    peer.event().await;
    let messages = peer.replay(0).await;
    let shape: Vec<(usize, bool)> = messages.iter().map(|m| (m.len(), m[0].is_empty())).collect();
    assert_eq!(shape, [(4, true); 4]);
    let sequences: Vec<u64> = messages[..3].iter().map(|m| sequence(&m[1..])).collect();
    assert_eq!(sequences, [2, 3, 4], "only three batches are kept");
    assert_eq!(messages[3][1..], [&b""[..], &[0xff; 8], b""]);
    assert_eq!(peer.replay(4).await.len(), 2);
    assert_eq!(peer.replay(1000).await.len(), 1, "a sequence of the future gets the end alone");
    engine.stop().await;
}

#[tokio::test]
async fn replay_of_older_engines_has_no_topic() {
    let settings = KvEvents { encoding: EventEncoding::Array, ..KvEvents::default() };
    let engine = with_events(settings).await;
    ask(&engine, 0, 40).await;
    let mut peer = Peer::connect(engine.replay_endpoint().unwrap(), SocketType::Dealer).await;
    peer.event().await;
    let lengths: Vec<usize> = peer.replay(0).await.iter().map(Vec::len).collect();
    assert_eq!(lengths, [3, 3]);
    engine.stop().await;
}

#[tokio::test]
async fn an_engine_can_connect_to_its_subscriber() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    let publish = KvSocket::Connect { host: addr.ip().to_string(), port: addr.port() };
    let engine = with_events(KvEvents { publish, ..KvEvents::default() }).await;
    let mut peer = Peer::over(listener.accept().await.unwrap().0, SocketType::Sub);
    peer.want("").await;
    until(&engine, |stats| stats["ranks"][0]["events"]["subscribers"] == 1).await;
    ask(&engine, 0, 40).await;
    assert_eq!(sequence(&peer.message().await.unwrap()), 0);
    let sources = get(&engine.url(), "/kv_event_sources").await.json();
    assert_eq!(sources["0"]["endpoint"], format!("tcp://{addr}"));
    engine.stop().await;
}

#[tokio::test]
async fn each_rank_has_its_own_engine_and_stream() {
    let engine = start(EngineConfig { ranks: 2, ..quick(Role::Unified) }).await;
    let mut peers = Vec::new();
    for rank in 0..2 {
        peers.push(Peer::subscribe(engine.kv_endpoint_of(rank).unwrap(), "").await);
    }
    until(&engine, |stats| (0..2).all(|rank| stats["ranks"][rank]["events"]["subscribers"] == 1))
        .await;
    let body = json!({"prompt": ids(0, 40), "max_tokens": 1}).to_string();
    for rank in ["1", "0", "1"] {
        let headers = [("X-data-parallel-rank", rank)];
        call(&engine.url(), "POST", "/v1/completions", &headers, &body).await;
    }
    for peer in &mut peers {
        assert_eq!(sequence(&peer.message().await.unwrap()), 0);
    }
    let stats = engine.stats();
    assert_eq!(stats["ranks"][0]["local_cache_hit_tokens"], 0);
    assert_eq!(stats["ranks"][1]["local_cache_hit_tokens"], 32);
    let sources = get(&engine.url(), "/kv_event_sources").await;
    let sources = pointsman_wire::discovery::event_sources(&sources.body).unwrap();
    assert_eq!(sources.len(), 2);
    engine.stop().await;
}

#[tokio::test]
async fn a_reset_is_told_with_the_next_step() {
    let engine = with_events(KvEvents::default()).await;
    let mut peer = subscribed(&engine, "").await;
    ask(&engine, 0, 40).await;
    peer.message().await.unwrap();
    assert_eq!(post(&engine.url(), "/reset_prefix_cache", &json!({})).await.status, 200);
    assert_eq!(engine.stats()["cached_blocks"], 0);
    ask(&engine, 0, 40).await;
    let told = events(&peer.message().await.unwrap()[2]);
    assert!(matches!(told[..], [Told::Cleared, Told::Stored { .. }]), "{told:?}");
    engine.stop().await;
}

#[tokio::test]
async fn events_can_be_lost_repeated_and_swapped() {
    let engine = with_events(KvEvents::default()).await;
    let mut peer = subscribed(&engine, "").await;
    let faults = [
        json!({"drop_next": 2}),
        json!({"duplicate_next": 1}),
        json!({"reorder_next": 1}),
        json!({"drop_probability": 1.0}),
        json!({}),
    ];
    let mut at = 0;
    for fault in faults {
        post(&engine.url(), "/mock/faults", &json!({"events": fault})).await;
        for _ in 0..3 {
            ask(&engine, at * 17, 40).await;
            at += 1;
        }
    }
    let mut seen = Vec::new();
    for _ in 0..11 {
        seen.push(sequence(&peer.message().await.unwrap()));
    }
    assert_eq!(seen, [2, 3, 3, 4, 5, 7, 6, 8, 12, 13, 14]);
    assert_eq!(engine.stats()["ranks"][0]["events"]["lost"], 5);
    let mut replay = Peer::connect(engine.replay_endpoint().unwrap(), SocketType::Dealer).await;
    replay.event().await;
    assert_eq!(replay.replay(0).await.len(), 16, "lost batches can be replayed");
    engine.stop().await;
}

#[tokio::test]
async fn replay_can_be_silent_or_short() {
    let engine = with_events(KvEvents::default()).await;
    for at in 0..4 {
        ask(&engine, at * 30, 40).await;
    }
    let mut peer = Peer::connect(engine.replay_endpoint().unwrap(), SocketType::Dealer).await;
    peer.event().await;
    post(&engine.url(), "/mock/faults", &json!({"events": {"replay_limit": 1}})).await;
    let messages = peer.replay(0).await;
    assert_eq!(messages.len(), 2);
    assert_eq!(sequence(&messages[0][1..]), 3);
    post(&engine.url(), "/mock/faults", &json!({"events": {"replay_silent": true}})).await;
    let quiet = tokio::time::timeout(std::time::Duration::from_millis(50), peer.replay(0)).await;
    assert!(quiet.is_err());
    engine.stop().await;
}

#[tokio::test]
async fn a_publisher_that_restarts_begins_at_zero_with_an_empty_cache() {
    let engine = with_events(KvEvents::default()).await;
    let mut peer = subscribed(&engine, "").await;
    ask(&engine, 0, 40).await;
    ask(&engine, 50, 40).await;
    peer.message().await.unwrap();
    peer.message().await.unwrap();
    post(&engine.url(), "/mock/faults", &json!({"restart_publisher": true})).await;
    assert_eq!(peer.message().await, None, "the old connection ends");
    assert_eq!(engine.stats()["cached_blocks"], 0);
    let mut peer = subscribed(&engine, "").await;
    ask(&engine, 0, 40).await;
    let message = peer.message().await.unwrap();
    assert_eq!(sequence(&message), 0);
    assert!(matches!(events(&message[2])[..], [Told::Stored { .. }]));
    engine.stop().await;
}

#[tokio::test]
async fn an_index_fed_with_the_events_equals_the_engines_cache() {
    let engine = start(EngineConfig { capacity_blocks: 24, ..quick(Role::Decode) }).await;
    let mut peer = subscribed(&engine, "").await;
    let hasher = Hasher::new(7);
    let (mut writer, reader) = index();
    let mut expected = 0;
    for at in 0..40u32 {
        let body = json!({
            "prompt": ids(at % 7 * 13, 30 + at * 37 % 150), "max_tokens": 12, "ignore_eos": true,
        });
        assert_eq!(complete(&engine.url(), &body).await.status, 200);
        let published = engine.stats()["ranks"][0]["events"]["published"].as_u64().unwrap();
        while expected < published {
            let message = peer.message().await.unwrap();
            assert_eq!(sequence(&message), expected);
            expected += 1;
            for event in events(&message[2]) {
                apply(&mut writer, &hasher, event);
            }
        }
        let stats = engine.stats();
        assert_eq!(reader.blocks(Slot(0)), stats["cached_blocks"].as_u64().unwrap());
        for chain in engine.cache()["ranks"][0]["chains"].as_array().unwrap() {
            let tokens: Vec<u32> = chain["tokens"]
                .as_array()
                .unwrap()
                .iter()
                .map(|id| id.as_u64().unwrap() as u32)
                .collect();
            let (mut hashes, mut overlap) = (Vec::new(), Overlap::new());
            hasher.space(&SpaceKey::plain(16)).chain(&tokens, &mut hashes);
            reader.overlap(&hashes, &mut overlap);
            assert_eq!(overlap.get(Slot(0)).device as usize, tokens.len() / 16);
        }
    }
    assert!(engine.stats()["preemptions"] == 0);
    engine.stop().await;
}

fn apply(writer: &mut pointsman_kv::Writer, hasher: &Hasher, event: Told) {
    match event {
        Told::Stored { hashes, parent, tokens, .. } => {
            let blocks: Vec<EngineHash> = hashes.into_iter().map(EngineHash).collect();
            let stored = writer.store(&Store {
                slot: Slot(0),
                tier: Tier::Device,
                space: hasher.space(&SpaceKey::plain(16)),
                parent: parent.map(EngineHash),
                blocks: &blocks,
                tokens: &tokens,
                extra: &[],
            });
            assert_eq!(stored.blocks as usize, blocks.len());
        }
        Told::Removed(hashes) => {
            let blocks: Vec<EngineHash> = hashes.into_iter().map(EngineHash).collect();
            writer.remove(Slot(0), Tier::Device, &blocks);
        }
        Told::Cleared => writer.clear(Slot(0)),
    }
}
