//! A TCP proxy in front of an engine, for what happens on the network rather than in the engine.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpSocket, TcpStream, tcp};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::timeout;

/// What a valve lets through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Open,
    /// Connections stay, nothing passes either way.
    Frozen,
    /// Nobody accepts: new connections hang, the others go on.
    Deaf,
}

/// Long enough for a connection on loopback to be made, if anybody made it.
const CONNECT_WAIT: Duration = Duration::from_millis(200);

/// A running proxy.
pub struct Valve {
    addr: SocketAddr,
    state: watch::Sender<State>,
    /// Bytes of the engine that pass on each connection before it is cut.
    cut_after: Arc<AtomicUsize>,
    accepting: JoinHandle<()>,
    /// Connections that fill the queue of a deaf valve.
    queued: Vec<TcpStream>,
}

impl Valve {
    pub fn new(to: SocketAddr) -> Valve {
        let socket = TcpSocket::new_v4().expect("a socket");
        socket.bind(([127, 0, 0, 1], 0).into()).expect("a free port");
        let listener = socket.listen(1).expect("it can listen");
        let addr = listener.local_addr().expect("it has an address");
        let state = watch::Sender::new(State::Open);
        let cut_after = Arc::new(AtomicUsize::new(usize::MAX));
        let accepting = tokio::spawn(accept(listener, to, state.clone(), Arc::clone(&cut_after)));
        Valve { addr, state, cut_after, accepting, queued: Vec::new() }
    }

    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Lets nothing pass, either way.
    pub fn freeze(&self) {
        self.state.send_replace(State::Frozen);
    }

    /// Ends each further connection after so many bytes of the engine's.
    pub fn cut_after(&self, bytes: usize) {
        self.cut_after.store(bytes, Ordering::Relaxed);
    }

    /// Lets everything pass again.
    pub fn open(&mut self) {
        self.queued.clear();
        self.state.send_replace(State::Open);
    }

    /// Lets new connections hang, as a host does that drops what comes in.
    pub async fn deafen(&mut self) {
        self.state.send_replace(State::Deaf);
        while let Ok(stream) = timeout(CONNECT_WAIT, TcpStream::connect(self.addr)).await {
            self.queued.push(stream.expect("the valve listens"));
            assert!(self.queued.len() < 16, "somebody accepts");
        }
    }
}

impl Drop for Valve {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

async fn accept(
    listener: TcpListener,
    to: SocketAddr,
    state: watch::Sender<State>,
    cut_after: Arc<AtomicUsize>,
) {
    let mut changes = state.subscribe();
    loop {
        let hears = changes.wait_for(|state| *state != State::Deaf).await.is_ok();
        if !hears {
            return;
        }
        let stream = tokio::select! {
            accepted = listener.accept() => accepted,
            _ = changes.changed() => continue,
        };
        if let Ok((stream, _peer)) = stream {
            let left = cut_after.load(Ordering::Relaxed);
            tokio::spawn(pass(stream, to, state.subscribe(), left));
        }
    }
}

async fn pass(client: TcpStream, to: SocketAddr, state: watch::Receiver<State>, left: usize) {
    // A client of an engine that is gone sees its connection end.
    let Ok(engine) = TcpStream::connect(to).await else { return };
    let _ = (client.set_nodelay(true), engine.set_nodelay(true));
    let (from_client, to_client) = client.into_split();
    let (from_engine, to_engine) = engine.into_split();
    // When one side ends, so does the other.
    tokio::select! {
        () = pump(from_client, to_engine, state.clone(), usize::MAX) => {}
        () = pump(from_engine, to_client, state, left) => {}
    }
}

async fn pump(
    mut from: tcp::OwnedReadHalf,
    mut to: tcp::OwnedWriteHalf,
    mut state: watch::Receiver<State>,
    mut left: usize,
) {
    let mut buffer = vec![0; 16 * 1024];
    while left > 0 {
        let Ok(count @ 1..) = from.read(&mut buffer).await else { return };
        if state.wait_for(|state| *state != State::Frozen).await.is_err() {
            return;
        }
        let count = count.min(left);
        left -= count;
        if to.write_all(&buffer[..count]).await.is_err() {
            return;
        }
    }
}
