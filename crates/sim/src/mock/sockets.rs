//! The ZMQ ends of a rank: a PUB socket that listens or connects, and a replay ROUTER that listens.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use pointsman_wire::zmtp::{Connection, Event, Limits, SocketType};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::config::EventEncoding;
use super::publisher::{Message, Publisher};

/// Pause before a connecting PUB socket tries again, as libzmq does by default.
const RECONNECT: Duration = Duration::from_millis(100);
/// Bytes read at once from a peer, who only sends subscriptions and replay requests.
const READ_BYTES: usize = 4096;
/// End marker of a replay in place of a sequence number.
const END: [u8; 8] = [0xff; 8];

/// Where the PUB socket is.
pub(super) enum Publishing {
    Listen(TcpListener),
    Connect(String),
}

/// Serves one rank's sockets until stopped.
pub(super) fn serve(
    publisher: &Arc<Publisher>,
    publishing: Publishing,
    replay: TcpListener,
    tasks: &TaskTracker,
    stop: &CancellationToken,
) {
    let pub_side = publisher.clone();
    let (peers, token) = (tasks.clone(), stop.clone());
    tasks.spawn(stop.clone().run_until_cancelled_owned(async move {
        match publishing {
            Publishing::Listen(listener) => loop {
                let stream = accept(&listener).await;
                let publisher = pub_side.clone();
                peers.spawn(token.clone().run_until_cancelled_owned(async move {
                    end_of("subscriber", publish_to(&publisher, stream).await);
                }));
            },
            Publishing::Connect(addr) => loop {
                if let Ok(stream) = TcpStream::connect(&addr).await {
                    end_of("subscriber", publish_to(&pub_side, stream).await);
                }
                tokio::time::sleep(RECONNECT).await;
            },
        }
    }));
    let replay_side = publisher.clone();
    let (peers, token) = (tasks.clone(), stop.clone());
    tasks.spawn(stop.clone().run_until_cancelled_owned(async move {
        loop {
            let stream = accept(&replay).await;
            let publisher = replay_side.clone();
            peers.spawn(token.clone().run_until_cancelled_owned(async move {
                end_of("replay client", replay_to(&publisher, stream).await);
            }));
        }
    }));
}

/// The next peer. An accept fails when the process is out of descriptors: wait for some.
pub(super) async fn accept(listener: &TcpListener) -> TcpStream {
    loop {
        match listener.accept().await {
            Ok((stream, _)) => return stream,
            Err(_) => tokio::time::sleep(RECONNECT).await,
        }
    }
}

fn end_of(who: &str, result: io::Result<()>) {
    if let Err(error) = result {
        tracing::debug!(%error, "mock engine: {who} gone");
    }
}

/// One subscriber; leaving it takes it off the publisher's list.
struct Joined<'a> {
    publisher: &'a Publisher,
    id: u64,
}

impl Drop for Joined<'_> {
    fn drop(&mut self) {
        self.publisher.leave(self.id);
    }
}

async fn publish_to(publisher: &Publisher, mut stream: TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let (id, mut messages) = publisher.join();
    let joined = Joined { publisher, id };
    let mut peer = Connection::new(SocketType::Pub, Limits::default());
    let mut buffer = vec![0; READ_BYTES];
    loop {
        stream.write_all(&peer.take_output()).await?;
        tokio::select! {
            read = stream.read(&mut buffer) => match read? {
                0 => return Ok(()),
                count => {
                    peer.feed(&buffer[..count]);
                    while let Some(event) = peer.poll().map_err(io::Error::other)? {
                        match event {
                            Event::Subscribe(topic) => publisher.subscribe(joined.id, topic),
                            Event::Unsubscribe(topic) => publisher.unsubscribe(joined.id, &topic),
                            Event::Ready | Event::Message(_) => {}
                        }
                    }
                }
            },
            message = messages.recv() => match message {
                None => return Ok(()),
                Some(message) => peer.send(&message as &Message),
            },
        }
    }
}

async fn replay_to(publisher: &Publisher, mut stream: TcpStream) -> io::Result<()> {
    let mut peer = Connection::new(SocketType::Router, Limits::default());
    let mut buffer = vec![0; READ_BYTES];
    loop {
        stream.write_all(&peer.take_output()).await?;
        let count = stream.read(&mut buffer).await?;
        if count == 0 {
            return Ok(());
        }
        peer.feed(&buffer[..count]);
        while let Some(event) = peer.poll().map_err(io::Error::other)? {
            if let Event::Message(frames) = event {
                answer_replay(publisher, &mut peer, &frames);
            }
        }
    }
}

/// Needs an empty delimiter and the first sequence number, as vLLM's publisher does.
fn answer_replay(publisher: &Publisher, peer: &mut Connection, frames: &[Bytes]) {
    let [delimiter, from] = frames else { return };
    let (true, Ok(from)) = (delimiter.is_empty(), <[u8; 8]>::try_from(from.as_ref())) else {
        return;
    };
    let Some(messages) = publisher.replay(u64::from_be_bytes(from)) else { return };
    let settings = publisher.settings();
    // The topic came into replies with vLLM 0.26, after maps with 0.24.
    let topic = match settings.encoding {
        EventEncoding::Map => Some(settings.topic.as_bytes()),
        // SGLang has no topic there either.
        EventEncoding::SignedMap | EventEncoding::Array => None,
    };
    for (sequence, payload) in messages {
        let sequence = sequence.to_be_bytes();
        let rest: [&[u8]; 2] = [&sequence, &payload];
        let frames: Vec<&[u8]> = [&b""[..]].into_iter().chain(topic).chain(rest).collect();
        peer.send(&frames);
    }
    let end: [&[u8]; 2] = [&END, b""];
    let frames: Vec<&[u8]> =
        [&b""[..]].into_iter().chain(topic.map(|_| &b""[..])).chain(end).collect();
    peer.send(&frames);
}
