//! ZMTP 3.0 with the NULL mechanism, sans-IO: enough for PUB/SUB and DEALER/ROUTER against libzmq.

use bytes::{Bytes, BytesMut};

/// Bounds on what a peer may send.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Largest frame.
    pub max_frame: usize,
    /// Most frames of one message.
    pub max_frames: usize,
    /// Largest message, all frames together.
    pub max_message: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Limits { max_frame: 64 << 20, max_frames: 64, max_message: 64 << 20 }
    }
}

/// A socket's type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SocketType {
    /// Publisher.
    Pub,
    /// Subscriber.
    Sub,
    /// Publisher that sees subscriptions.
    XPub,
    /// Subscriber that sends its own subscriptions.
    XSub,
    /// Asynchronous requester.
    Dealer,
    /// Asynchronous replier.
    Router,
    /// Strict requester.
    Req,
    /// Strict replier.
    Rep,
}

/// A connection that cannot go on.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ZmtpError {
    /// Not a ZMTP 3 peer.
    #[error("the peer does not speak ZMTP 3")]
    NotZmtp,
    /// Another security mechanism than NULL.
    #[error("the peer wants the security mechanism {0}")]
    Mechanism(String),
    /// A socket type that does not go with ours.
    #[error("a {peer} socket cannot talk to a {own} socket")]
    Incompatible {
        /// Ours.
        own: &'static str,
        /// Theirs.
        peer: String,
    },
    /// A frame or message beyond the limits.
    #[error("a message is larger than the limit of {0}")]
    TooLarge(usize),
    /// Bytes that are no ZMTP.
    #[error("malformed: {0}")]
    Malformed(&'static str),
    /// The peer refused us.
    #[error("the peer refused the connection: {0}")]
    Refused(String),
}

/// What the peer did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// The handshake is done; messages may be sent.
    Ready,
    /// A whole message.
    Message(Vec<Bytes>),
    /// (PUB, XPUB) the peer wants this topic prefix.
    Subscribe(Bytes),
    /// (PUB, XPUB) it wants it no more.
    Unsubscribe(Bytes),
}

/// One connection to one peer.
#[derive(Debug)]
pub struct Connection {
    kind: SocketType,
    output: BytesMut,
}

impl Connection {
    /// A fresh connection; its greeting waits in the output.
    pub fn new(kind: SocketType, limits: Limits) -> Connection {
        let _ = limits;
        Connection { kind, output: BytesMut::new() }
    }

    /// Our socket type.
    pub fn kind(&self) -> SocketType {
        self.kind
    }

    /// Takes bytes that came from the peer.
    pub fn feed(&mut self, bytes: &[u8]) {
        let _ = bytes;
    }

    /// The next thing the peer did; None: feed more bytes.
    pub fn poll(&mut self) -> Result<Option<Event>, ZmtpError> {
        Ok(None)
    }

    /// Sends a message. Before the handshake's end it waits.
    pub fn send<F: AsRef<[u8]>>(&mut self, frames: &[F]) {
        let _ = frames;
    }

    /// (SUB) wants a topic prefix.
    pub fn subscribe(&mut self, topic: &[u8]) {
        let _ = topic;
    }

    /// Bytes to write to the peer; empty if there are none.
    pub fn take_output(&mut self) -> Bytes {
        self.output.split().freeze()
    }
}
