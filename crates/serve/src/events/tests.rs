//! Endpoints, and that turns at the writer are fair.

use pointsman_config::{File, Sources};
use pointsman_wire::kv_events::{Announce, BlockName, Encoding, encode};
use serde_json::json;

use super::*;
use crate::start::assemble;

#[test]
fn a_wildcard_is_the_engines_own_host() {
    let tcp = |host: &str, port| Some(Endpoint::Tcp { host: host.to_owned(), port });
    assert_eq!(endpoint_at("tcp://*:5557", "10.0.0.7"), tcp("10.0.0.7", 5557));
    assert_eq!(endpoint_at("tcp://[::]:5557", "[::1]"), tcp("::1", 5557));
    assert_eq!(endpoint_at("tcp://host:1", "10.0.0.7"), tcp("host", 1));
    assert_eq!(endpoint_at("ipc:///run/kv", "h"), Some(Endpoint::Ipc("/run/kv".into())));
    for bad in ["tcp://host", "tcp://host:x", "inproc://a", ""] {
        assert_eq!(endpoint_at(bad, "h"), None, "{bad}");
    }
}

/// Tokens of a block.
const BLOCK: u32 = 4;

/// A router that follows nobody, with so many workers.
fn router(workers: usize) -> Arc<Router> {
    let worker = |at: usize| {
        json!({
            "name": format!("u{at}"), "url": format!("http://127.0.0.1:{}", at + 1), "role": "unified",
            "kv_events": {"endpoint": "tcp://127.0.0.1:1"},
        })
    };
    let workers: Vec<_> = (0..workers).map(worker).collect();
    let tree = json!({"models": [{"name": "m", "tokenizer": "builtin", "workers": workers}]});
    let file = File::Text { name: "test".to_owned(), text: tree.to_string() };
    let sources = Sources { file: Some(file), ..Sources::default() };
    let router = assemble(pointsman_config::load(&sources).unwrap().settings, None).unwrap();
    for worker in &router.fleet.groups[0].settings.workers {
        router.fleet.groups[0].add(worker.clone()).unwrap();
    }
    Arc::new(router)
}

/// The follower of one worker's publisher, not connected to it.
fn follower(router: &Arc<Router>, slot: u16) -> Follower {
    let group = Arc::clone(&router.fleet.groups[0]);
    let rank = group.roster.load().get(pointsman_brain::Slot(slot)).unwrap().clone();
    let pointsman_config::KvEvents::At(stream) = rank.worker.settings.kv_events.clone() else {
        panic!("its sockets are written down")
    };
    Follower::new(Arc::clone(router), group, rank, stream)
}

/// A message of so many events of one block each, none of which is in another message.
fn message(seq: u64, events: usize) -> (Stamp, Bytes) {
    let names: Vec<_> = (0..events as u64).map(|at| [BlockName::Int(seq << 32 | at)]).collect();
    let tokens: Vec<[u32; BLOCK as usize]> =
        (0..events as u32).map(|at| [seq as u32, at, 0, 0]).collect();
    let stored = |(hashes, tokens)| Announce::Stored {
        hashes,
        parent: None,
        tokens,
        block_size: BLOCK,
        lora_name: None,
        medium: None,
        cache_salt: None,
    };
    let hashes = names.iter().map(|names| &names[..]);
    let events: Vec<_> = hashes.zip(tokens.iter().map(|t| &t[..])).map(stored).collect();
    let payload = encode(1.0 + seq as f64, None, &events, Encoding::Map);
    (Stamp { seq, sent_ns: sent_ns(&payload) }, payload.into())
}

impl Follower {
    /// Hears messages and does what follows from them.
    async fn hear_all(&mut self, messages: impl IntoIterator<Item = (Stamp, Bytes)>) {
        for (stamp, payload) in messages {
            self.cursor.live(stamp, payload.len(), payload, &mut self.actions);
        }
        self.perform().await;
    }
}

/// A publisher whose messages come in one buffer, long topics and all, cannot make the router keep more
/// than the messages that are counted.
#[tokio::test]
async fn a_message_that_is_held_keeps_nothing_alive_that_came_with_it() {
    let router = router(1);
    let mut follower = follower(&router, 0);
    follower.cursor = Cursor::new(true, CursorLimits::default());
    let ((_, first), (_, later)) = (message(0, 1), message(7, 1));
    let mut buffer = vec![0; 1 << 20];
    let begin = buffer.len();
    buffer.extend_from_slice(&later);
    let buffer = Bytes::from(buffer);
    let sequence = |seq: u64| Bytes::copy_from_slice(&seq.to_be_bytes());
    follower.live(&[Bytes::new(), sequence(0), first]);
    let frames = [buffer.slice(..begin), sequence(7), buffer.slice(begin..)];
    follower.live(&frames);
    drop(frames);
    assert!(follower.asks_again(), "what is between the two is asked for, and the later one held");
    assert!(buffer.is_unique());
}

fn blocks(router: &Router, slot: u16) -> u64 {
    router.fleet.groups[0].reader.blocks(Slot(slot))
}

#[tokio::test]
async fn among_publishers_that_flood_another_is_heard_after_a_window_of_each() {
    const FLOODS: u16 = 8;
    /// Events of one window; a little less than its bound, which keeps room for an event of two changes.
    const EVENTS: usize = WINDOW_CHANGES - 2;
    let router = router(usize::from(FLOODS) + 1);
    let mut floods = Vec::new();
    for slot in 0..FLOODS {
        let mut follower = follower(&router, slot);
        floods.push(tokio::spawn(async move {
            // Far more than one turn, heard at once; and a single message of many windows.
            follower.hear_all((0..50).map(|seq| message(seq, EVENTS))).await;
            follower.hear_all([message(50, 50 * EVENTS)]).await;
        }));
    }
    // All of them are at it.
    while (0..FLOODS).any(|slot| blocks(&router, slot) == 0) {
        tokio::task::yield_now().await;
    }
    let flooded = |router: &Router| (0..FLOODS).map(|slot| blocks(router, slot)).sum::<u64>();
    let before = flooded(&router);
    let mut quiet = follower(&router, FLOODS);
    quiet.hear_all([message(0, 1)]).await;
    assert_eq!(blocks(&router, FLOODS), 1);
    let meanwhile = flooded(&router) - before;
    let bound = 2 * u64::from(FLOODS) * EVENTS as u64;
    assert!(meanwhile <= bound, "{meanwhile} blocks of others came first, more than {bound}");
    for flood in floods {
        flood.await.unwrap();
    }
    assert_eq!(flooded(&router), u64::from(FLOODS) * 100 * EVENTS as u64);
}

#[tokio::test]
async fn a_mark_is_that_of_the_blocks_and_there_is_none_in_the_middle_of_a_message() {
    let router = router(1);
    let mut follower = follower(&router, 0);
    let rank = follower.rank.clone();
    follower.write(true).await;
    assert_eq!(rank.worker.reached(rank.slot), Reached::Mark(Mark::default()));
    let (small, large) = (message(0, 3), message(1, 1000));
    let reading = tokio::spawn(async move {
        follower.hear_all([small]).await;
        follower.hear_all([large]).await;
    });
    let mut seen = Vec::new();
    while !reading.is_finished() {
        let _writer = router.fleet.groups[0].writer();
        let mark = match rank.worker.reached(rank.slot) {
            Reached::Mark(mark) => Some(mark.position.map(|position| position.last.seq)),
            _ => None,
        };
        seen.push((mark, blocks(&router, 0)));
        drop(_writer);
        tokio::task::yield_now().await;
    }
    seen.dedup();
    assert!(seen.len() > 10, "{seen:?}");
    for (mark, blocks) in seen {
        let at = match blocks {
            0 => Some(None),
            3 => Some(Some(0)),
            1003 => Some(Some(1)),
            _ => None,
        };
        assert_eq!(mark, at, "at {blocks} blocks");
    }
    let Reached::Mark(mark) = rank.worker.reached(rank.slot) else { panic!("it is done") };
    let position = mark.position.unwrap();
    assert_eq!((position.last.seq, position.first, position.complete), (1, 0, true));
}

#[tokio::test]
async fn messages_that_come_together_are_applied_together() {
    let router = router(1);
    let mut follower = follower(&router, 0);
    let reading = tokio::spawn(async move {
        follower.hear_all((0..20).map(|seq| message(seq, 3))).await;
        follower
    });
    // One turn, and what it applied is there.
    tokio::task::yield_now().await;
    assert_eq!(blocks(&router, 0), 60);
    reading.await.unwrap();
}

#[tokio::test]
async fn what_cannot_be_read_is_counted_and_forgotten_whole() {
    let router = router(1);
    let mut follower = follower(&router, 0);
    follower.hear_all([message(0, 3)]).await;
    assert_eq!(blocks(&router, 0), 3);
    let (stamp, payload) = message(1, 3);
    follower.hear_all([(stamp, payload.slice(..payload.len() - 1))]).await;
    assert_eq!(blocks(&router, 0), 0, "it may have said of blocks that they went");
    assert_eq!(follower.cursor.standing(), Standing::Partial);
    let text = router.metrics_text();
    for line in [
        "pointsman_kv_events_total{model=\"m\",worker=\"u0\",kind=\"malformed\"} 1",
        "pointsman_kv_events_total{model=\"m\",worker=\"u0\",kind=\"lost\"} 1",
        "pointsman_kv_event_blocks_total{model=\"m\",worker=\"u0\",kind=\"stored\"} 3",
    ] {
        assert!(text.contains(line), "{line} is not in\n{text}");
    }
}
