//! The subscriber's side of KV events.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, dead_code, unreachable_pub)]

use bytes::Bytes;
use pointsman_wire::kv_events::{Batch, BlockName, Event as KvEvent};
use pointsman_wire::zmtp::{Connection, Event, Limits, SocketType};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::common::PATIENCE;

/// A ZMQ socket with one peer.
pub struct Peer {
    stream: TcpStream,
    connection: Connection,
}

impl Peer {
    pub async fn connect(endpoint: &str, kind: SocketType) -> Peer {
        let addr = endpoint.strip_prefix("tcp://").unwrap();
        Peer::over(TcpStream::connect(addr).await.unwrap(), kind)
    }

    pub fn over(stream: TcpStream, kind: SocketType) -> Peer {
        Peer { stream, connection: Connection::new(kind, Limits::default()) }
    }

    /// A subscriber of one topic.
    pub async fn subscribe(endpoint: &str, topic: &str) -> Peer {
        let mut peer = Peer::connect(endpoint, SocketType::Sub).await;
        peer.want(topic).await;
        peer
    }

    pub async fn want(&mut self, topic: &str) {
        self.connection.subscribe(topic.as_bytes());
        self.flush().await;
        assert!(matches!(self.event().await, Some(Event::Ready)));
        self.flush().await;
    }

    pub async fn flush(&mut self) {
        let output = self.connection.take_output();
        self.stream.write_all(&output).await.unwrap();
    }

    /// What the peer does next; none when it has gone.
    pub async fn event(&mut self) -> Option<Event> {
        let next = async {
            loop {
                if let Some(event) = self.connection.poll().unwrap() {
                    return Some(event);
                }
                let output = self.connection.take_output();
                self.stream.write_all(&output).await.unwrap();
                let mut bytes = [0; 65_536];
                match self.stream.read(&mut bytes).await {
                    Ok(0) | Err(_) => return None,
                    Ok(count) => self.connection.feed(&bytes[..count]),
                }
            }
        };
        tokio::time::timeout(PATIENCE, next).await.expect("no message in time")
    }

    pub async fn message(&mut self) -> Option<Vec<Bytes>> {
        match self.event().await? {
            Event::Message(frames) => Some(frames),
            other => panic!("{other:?}"),
        }
    }

    /// Asks a replay socket; everything up to the end marker.
    pub async fn replay(&mut self, from: u64) -> Vec<Vec<Bytes>> {
        self.connection.send(&[&b""[..], &from.to_be_bytes()]);
        self.flush().await;
        let mut all = Vec::new();
        loop {
            let frames = self.message().await.unwrap();
            let end = frames[frames.len() - 2][..] == [0xff; 8];
            all.push(frames);
            if end {
                return all;
            }
        }
    }
}

pub fn sequence(frames: &[Bytes]) -> u64 {
    u64::from_be_bytes(frames[1].as_ref().try_into().unwrap())
}

/// An event with its borrowed parts copied.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Told {
    Stored { hashes: Vec<u64>, parent: Option<u64>, tokens: Vec<u32>, lora: Option<String> },
    Removed(Vec<u64>),
    Cleared,
}

pub fn events(payload: &[u8]) -> Vec<Told> {
    let batch = Batch::decode(payload).unwrap();
    let told = |event: KvEvent<'_>| match event {
        KvEvent::Stored(stored) => Told::Stored {
            hashes: stored.hashes.map(|name| name.id()).collect(),
            parent: stored.parent.map(|name| name.id()),
            tokens: stored.tokens.collect(),
            lora: stored.lora_name.map(str::to_owned),
        },
        KvEvent::Removed(removed) => Told::Removed(removed.hashes.map(|name| name.id()).collect()),
        KvEvent::Cleared => Told::Cleared,
        KvEvent::Unknown(what) => panic!("{what}"),
    };
    batch.events().map(|event| told(event.unwrap())).collect()
}

/// Whether the first block name is a digest.
pub fn names_are_digests(payload: &[u8]) -> bool {
    let batch = Batch::decode(payload).unwrap();
    let first = batch.events().next().unwrap().unwrap();
    match first {
        KvEvent::Stored(mut stored) => {
            matches!(stored.hashes.next(), Some(BlockName::Digest(bytes)) if bytes.len() == 32)
        }
        _ => false,
    }
}
