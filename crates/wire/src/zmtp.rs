//! ZMTP 3.0 with the NULL mechanism, sans-IO: enough for PUB/SUB and DEALER/ROUTER against libzmq.
//!
//! Invariants: one `Connection` is one peer; a peer cannot make it buffer more than the limits, nor
//! break it by sending in other pieces. Not here: sockets, reconnecting, routing between peers.

use bytes::{Buf, BufMut, Bytes, BytesMut};

/// Bounds on what a peer may send.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Most frames of one message.
    pub max_frames: usize,
    /// Largest message, all frames together.
    pub max_message: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Limits { max_frames: 64, max_message: 64 << 20 }
    }
}

/// A socket's type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SocketType {
    /// Publisher.
    Pub,
    /// Subscriber.
    Sub,
    /// Asynchronous requester.
    Dealer,
    /// Asynchronous replier.
    Router,
}

impl SocketType {
    /// Its name on the wire.
    pub fn name(self) -> &'static str {
        match self {
            SocketType::Pub => "PUB",
            SocketType::Sub => "SUB",
            SocketType::Dealer => "DEALER",
            SocketType::Router => "ROUTER",
        }
    }

    fn talks_to(self, peer: &[u8]) -> bool {
        let peers: &[&[u8]] = match self {
            SocketType::Pub => &[b"SUB", b"XSUB"],
            SocketType::Sub => &[b"PUB", b"XPUB"],
            SocketType::Dealer => &[b"ROUTER", b"DEALER", b"REP"],
            SocketType::Router => &[b"DEALER", b"REQ", b"ROUTER"],
        };
        peers.contains(&peer)
    }
}

/// A connection that cannot go on.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ZmtpError {
    /// Not a ZMTP 3 peer.
    #[error("the peer does not speak ZMTP 3")]
    NotZmtp,
    /// Another security mechanism than NULL.
    #[error("the peer wants the security mechanism {0}; only NULL is spoken here")]
    Mechanism(String),
    /// A socket type that does not go with ours.
    #[error("a {peer} socket cannot talk to our {own} socket")]
    Incompatible {
        /// Ours.
        own: &'static str,
        /// Theirs.
        peer: String,
    },
    /// A message beyond the limits.
    #[error("a message is beyond the limit of {0}")]
    TooLarge(usize),
    /// Bytes that are no ZMTP.
    #[error("malformed ZMTP: {0}")]
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
    /// (PUB) the peer wants this topic prefix.
    Subscribe(Bytes),
    /// (PUB) it wants it no more.
    Unsubscribe(Bytes),
}

const GREETING_LEN: usize = 64;
/// Signature, version 3.0, mechanism NULL, not a server; the rest is zero.
const GREETING: [u8; GREETING_LEN] = {
    let mut greeting = [0; GREETING_LEN];
    greeting[0] = 0xff;
    greeting[8] = 1;
    greeting[9] = 0x7f;
    greeting[10] = 3;
    greeting[12] = b'N';
    greeting[13] = b'U';
    greeting[14] = b'L';
    greeting[15] = b'L';
    greeting
};

const MORE: u8 = 1;
const LONG: u8 = 2;
const COMMAND: u8 = 4;

/// Commands (handshake, subscriptions, pings) have no need to be larger.
const MAX_COMMAND: usize = 64 << 10;

#[derive(Debug)]
enum Stage {
    Greeting,
    Handshake,
    Open,
    Failed(ZmtpError),
}

/// One connection to one peer.
#[derive(Debug)]
pub struct Connection {
    kind: SocketType,
    limits: Limits,
    stage: Stage,
    input: BytesMut,
    output: BytesMut,
    /// Sent before the handshake's end.
    waiting: BytesMut,
    /// Frames of a message whose last one has not come yet.
    message: Vec<Bytes>,
    message_len: usize,
}

impl Connection {
    /// A fresh connection; its greeting waits in the output.
    pub fn new(kind: SocketType, limits: Limits) -> Connection {
        Connection {
            kind,
            limits,
            stage: Stage::Greeting,
            input: BytesMut::new(),
            output: BytesMut::from(&GREETING[..]),
            waiting: BytesMut::new(),
            message: Vec::new(),
            message_len: 0,
        }
    }

    /// Our socket type.
    pub fn kind(&self) -> SocketType {
        self.kind
    }

    /// Takes bytes that came from the peer. Call `poll` until it gives nothing before the next.
    pub fn feed(&mut self, bytes: &[u8]) {
        self.input.extend_from_slice(bytes);
    }

    /// The next thing the peer did; None: write the output and feed more bytes. After an error the
    /// connection is of no more use.
    pub fn poll(&mut self) -> Result<Option<Event>, ZmtpError> {
        let event = self.advance();
        if let Err(error) = &event {
            self.stage = Stage::Failed(error.clone());
        }
        event
    }

    /// Sends a message. Before the handshake's end it waits.
    pub fn send<F: AsRef<[u8]>>(&mut self, frames: &[F]) {
        let last = frames.len().saturating_sub(1);
        for (index, frame) in frames.iter().enumerate() {
            let flags = if index == last { 0 } else { MORE };
            put_frame(self.outbox(), flags, frame.as_ref());
        }
    }

    /// (SUB) wants a topic prefix; the empty one is everything.
    pub fn subscribe(&mut self, topic: &[u8]) {
        self.send(&[[&[1], topic].concat()]);
    }

    /// Bytes to write to the peer; empty if there are none.
    pub fn take_output(&mut self) -> Bytes {
        self.output.split().freeze()
    }

    /// How many bytes wait to be written, so that a slow peer can be noticed.
    pub fn unsent(&self) -> usize {
        self.output.len() + self.waiting.len()
    }

    fn outbox(&mut self) -> &mut BytesMut {
        match self.stage {
            Stage::Open => &mut self.output,
            _ => &mut self.waiting,
        }
    }

    fn advance(&mut self) -> Result<Option<Event>, ZmtpError> {
        if let Stage::Failed(error) = &self.stage {
            return Err(error.clone());
        }
        if matches!(self.stage, Stage::Greeting) && !self.greeting()? {
            return Ok(None);
        }
        while let Some((flags, body)) = self.frame()? {
            let event = if flags & COMMAND != 0 {
                self.command(body)?
            } else if matches!(self.stage, Stage::Open) {
                self.message_frame(flags, body)?
            } else {
                return Err(ZmtpError::Malformed("a message before the handshake's end"));
            };
            if event.is_some() {
                return Ok(event);
            }
        }
        Ok(None)
    }

    /// Reads the peer's greeting; false while it is not all there.
    fn greeting(&mut self) -> Result<bool, ZmtpError> {
        let seen = |at: usize| self.input.get(at).copied();
        let wrong = |at: usize, good: fn(u8) -> bool| seen(at).is_some_and(|byte| !good(byte));
        if wrong(0, |byte| byte == 0xff) || wrong(9, |byte| byte & 1 == 1) || wrong(10, |v| v >= 3)
        {
            return Err(ZmtpError::NotZmtp);
        }
        if self.input.len() < GREETING_LEN {
            return Ok(false);
        }
        let greeting = self.input.split_to(GREETING_LEN);
        let mechanism = greeting.get(12..32).unwrap_or_default();
        let name = mechanism.split(|byte| *byte == 0).next().unwrap_or_default();
        if name != b"NULL" {
            return Err(ZmtpError::Mechanism(printable(name)));
        }
        self.stage = Stage::Handshake;
        let mut ready = b"\x05READY\x0bSocket-Type".to_vec();
        put_property_value(&mut ready, self.kind.name().as_bytes());
        if matches!(self.kind, SocketType::Dealer | SocketType::Router) {
            ready.extend(b"\x08Identity");
            put_property_value(&mut ready, b"");
        }
        put_frame(&mut self.output, COMMAND, &ready);
        Ok(true)
    }

    /// Takes a whole frame off the input.
    fn frame(&mut self) -> Result<Option<(u8, Bytes)>, ZmtpError> {
        let mut head = &self.input[..];
        let Ok(flags) = head.try_get_u8() else { return Ok(None) };
        if flags & !(MORE | LONG | COMMAND) != 0 || flags & COMMAND != 0 && flags & MORE != 0 {
            return Err(ZmtpError::Malformed("unknown frame flags"));
        }
        let size =
            if flags & LONG == 0 { head.try_get_u8().map(u64::from) } else { head.try_get_u64() };
        let Ok(size) = size else { return Ok(None) };
        let limit = if flags & COMMAND != 0 {
            MAX_COMMAND
        } else {
            self.limits.max_message.saturating_sub(self.message_len)
        };
        let Some(size) = usize::try_from(size).ok().filter(|size| *size <= limit) else {
            return Err(ZmtpError::TooLarge(limit));
        };
        if head.len() < size {
            return Ok(None);
        }
        let head_len = self.input.len() - head.len();
        self.input.advance(head_len);
        Ok(Some((flags, self.input.split_to(size).freeze())))
    }

    fn message_frame(&mut self, flags: u8, body: Bytes) -> Result<Option<Event>, ZmtpError> {
        if self.message.len() == self.limits.max_frames {
            return Err(ZmtpError::TooLarge(self.limits.max_frames));
        }
        self.message_len += body.len();
        self.message.push(body);
        if flags & MORE != 0 {
            return Ok(None);
        }
        self.message_len = 0;
        let message = std::mem::take(&mut self.message);
        if self.kind != SocketType::Pub {
            return Ok(Some(Event::Message(message)));
        }
        // All that a subscriber of version 3.0 sends are subscriptions, as messages.
        Ok(match <[Bytes; 1]>::try_from(message) {
            Ok([mut frame]) => match frame.try_get_u8() {
                Ok(1) => Some(Event::Subscribe(frame)),
                Ok(0) => Some(Event::Unsubscribe(frame)),
                _ => None,
            },
            Err(_) => None,
        })
    }

    fn command(&mut self, mut body: Bytes) -> Result<Option<Event>, ZmtpError> {
        let malformed = ZmtpError::Malformed("a command without a name");
        let Some(name) = take_short(&mut body) else { return Err(malformed) };
        match (&name[..], &self.stage) {
            (b"READY", Stage::Handshake) => {
                self.ready(body)?;
                self.stage = Stage::Open;
                self.output.unsplit(self.waiting.split());
                Ok(Some(Event::Ready))
            }
            (b"ERROR", _) => {
                let reason = take_short(&mut body).unwrap_or_default();
                Err(ZmtpError::Refused(printable(&reason)))
            }
            (_, Stage::Handshake) => Err(ZmtpError::Malformed("not READY in the handshake")),
            (b"PING", _) => {
                // Two bytes of time to live, then a context to be sent back.
                let context = body.get(2..).unwrap_or_default();
                let pong = [b"\x04PONG", context].concat();
                put_frame(&mut self.output, COMMAND, &pong);
                Ok(None)
            }
            (b"SUBSCRIBE", _) if self.kind == SocketType::Pub => Ok(Some(Event::Subscribe(body))),
            (b"CANCEL", _) if self.kind == SocketType::Pub => Ok(Some(Event::Unsubscribe(body))),
            _ => Ok(None),
        }
    }

    /// Checks the peer's properties.
    fn ready(&self, mut body: Bytes) -> Result<(), ZmtpError> {
        let malformed = || ZmtpError::Malformed("READY has a property that is cut off");
        while body.has_remaining() {
            let name = take_short(&mut body).ok_or_else(malformed)?;
            let len = body.try_get_u32().map_err(|_| malformed())? as usize;
            if len > body.len() {
                return Err(malformed());
            }
            let value = body.split_to(len);
            if name.eq_ignore_ascii_case(b"Socket-Type") {
                return if self.kind.talks_to(&value) {
                    Ok(())
                } else {
                    Err(ZmtpError::Incompatible { own: self.kind.name(), peer: printable(&value) })
                };
            }
        }
        Err(ZmtpError::Malformed("READY has no Socket-Type"))
    }
}

/// Takes a string with a length of one byte.
fn take_short(body: &mut Bytes) -> Option<Bytes> {
    let len = usize::from(body.try_get_u8().ok()?);
    (len <= body.len()).then(|| body.split_to(len))
}

fn put_frame(out: &mut BytesMut, flags: u8, body: &[u8]) {
    match u8::try_from(body.len()) {
        Ok(size) => out.extend_from_slice(&[flags, size]),
        Err(_) => {
            out.put_u8(flags | LONG);
            out.put_u64(body.len() as u64);
        }
    }
    out.extend_from_slice(body);
}

fn put_property_value(out: &mut Vec<u8>, value: &[u8]) {
    #[allow(clippy::cast_possible_truncation)]
    out.put_u32(value.len() as u32);
    out.extend(value);
}

/// What a peer said, fit for a log line.
fn printable(bytes: &[u8]) -> String {
    const MOST: usize = 100;
    bytes.escape_ascii().to_string().chars().take(MOST).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Carries what each has to say to the other, in pieces of a size, until both are silent.
    fn talk(a: &mut Connection, b: &mut Connection, piece: usize) -> (Vec<Event>, Vec<Event>) {
        let (mut of_a, mut of_b) = (vec![], vec![]);
        loop {
            let (to_b, to_a) = (a.take_output(), b.take_output());
            if to_a.is_empty() && to_b.is_empty() {
                return (of_a, of_b);
            }
            for (bytes, end, events) in [(to_a, &mut *a, &mut of_a), (to_b, &mut *b, &mut of_b)] {
                for piece in bytes.chunks(piece) {
                    end.feed(piece);
                    while let Some(event) = end.poll().unwrap() {
                        events.push(event);
                    }
                }
            }
        }
    }

    fn pair(a: SocketType, b: SocketType) -> (Connection, Connection) {
        (Connection::new(a, Limits::default()), Connection::new(b, Limits::default()))
    }

    #[test]
    fn a_subscriber_hears_a_publisher() {
        let (mut publisher, mut subscriber) = pair(SocketType::Pub, SocketType::Sub);
        subscriber.subscribe(b"kv");
        let (heard, _) = talk(&mut publisher, &mut subscriber, 7);
        assert_eq!(heard, [Event::Ready, Event::Subscribe(Bytes::from_static(b"kv"))]);
        let large = vec![9; 70_000];
        publisher.send(&[&b"kv@m"[..], &[0; 8], &large]);
        let (_, heard) = talk(&mut publisher, &mut subscriber, 999);
        let frames = vec![Bytes::from_static(b"kv@m"), Bytes::from_static(&[0; 8]), large.into()];
        assert_eq!(heard, [Event::Message(frames)]);
    }

    #[test]
    fn a_router_and_a_dealer_exchange_messages() {
        let (mut router, mut dealer) = pair(SocketType::Router, SocketType::Dealer);
        dealer.send(&[&b""[..], b"ask"]);
        let (heard, _) = talk(&mut router, &mut dealer, 64);
        let ask = vec![Bytes::new(), Bytes::from_static(b"ask")];
        assert_eq!(heard, [Event::Ready, Event::Message(ask)]);
        router.send(&["", "answer"]);
        let (_, heard) = talk(&mut router, &mut dealer, 64);
        let answer = vec![Bytes::new(), Bytes::from_static(b"answer")];
        assert_eq!(heard, [Event::Message(answer)]);
    }

    fn handshaken(kind: SocketType, peer: &str, limits: Limits) -> Connection {
        let mut connection = Connection::new(kind, limits);
        connection.feed(&GREETING);
        let mut ready = b"\x05READY\x0bSocket-Type".to_vec();
        put_property_value(&mut ready, peer.as_bytes());
        let mut frame = BytesMut::new();
        put_frame(&mut frame, COMMAND, &ready);
        connection.feed(&frame);
        connection
    }

    #[test]
    fn a_peer_that_does_not_fit_is_refused_with_the_reason() {
        let mut connection = handshaken(SocketType::Sub, "ROUTER", Limits::default());
        let error = connection.poll().unwrap_err();
        assert_eq!(error.to_string(), "a ROUTER socket cannot talk to our SUB socket");
        assert_eq!(connection.poll(), Err(error));

        let mut http = Connection::new(SocketType::Sub, Limits::default());
        http.feed(b"HTTP/1.1 400 Bad Request\r\n");
        assert_eq!(http.poll(), Err(ZmtpError::NotZmtp));

        let mut curve = Connection::new(SocketType::Sub, Limits::default());
        let mut greeting = GREETING;
        greeting[12..17].copy_from_slice(b"CURVE");
        curve.feed(&greeting);
        assert_eq!(curve.poll(), Err(ZmtpError::Mechanism("CURVE".into())));

        let mut old = Connection::new(SocketType::Sub, Limits::default());
        old.feed(b"\xff\0\0\0\0\0\0\0\x01\x7f\x01");
        assert_eq!(old.poll(), Err(ZmtpError::NotZmtp));
    }

    #[test]
    fn messages_beyond_the_limits_are_refused_before_they_are_read() {
        let limits = Limits { max_frames: 2, max_message: 100 };
        let mut large = handshaken(SocketType::Dealer, "ROUTER", limits);
        assert_eq!(large.poll(), Ok(Some(Event::Ready)));
        large.feed(b"\x02\xff\xff\xff\xff\xff\xff\xff\xff");
        assert_eq!(large.poll(), Err(ZmtpError::TooLarge(100)));

        let mut sum = handshaken(SocketType::Dealer, "ROUTER", limits);
        assert_eq!(sum.poll(), Ok(Some(Event::Ready)));
        sum.feed(&[&[MORE, 60][..], &[0; 60], &[0, 41]].concat());
        assert_eq!(sum.poll(), Err(ZmtpError::TooLarge(40)));

        let mut many = handshaken(SocketType::Dealer, "ROUTER", limits);
        assert_eq!(many.poll(), Ok(Some(Event::Ready)));
        many.feed(&[MORE, 0, MORE, 0, MORE, 0]);
        assert_eq!(many.poll(), Err(ZmtpError::TooLarge(2)));
    }

    #[test]
    fn pings_are_answered_and_errors_reported() {
        let mut connection = handshaken(SocketType::Dealer, "ROUTER", Limits::default());
        assert_eq!(connection.poll(), Ok(Some(Event::Ready)));
        connection.take_output();
        connection.feed(b"\x04\x0a\x04PING\0\x05abc");
        assert_eq!(connection.poll(), Ok(None));
        assert_eq!(&connection.take_output()[..], b"\x04\x08\x04PONGabc");
        connection.feed(b"\x04\x0a\x05ERROR\x03bad");
        assert_eq!(connection.poll(), Err(ZmtpError::Refused("bad".into())));
    }

    proptest! {
        #[test]
        fn messages_survive_any_split(
            messages in prop::collection::vec(
                prop::collection::vec(prop::collection::vec(any::<u8>(), 0..300), 1..4), 0..6),
            piece in 1usize..400,
        ) {
            let (mut router, mut dealer) = pair(SocketType::Router, SocketType::Dealer);
            for message in &messages {
                dealer.send(message);
            }
            let (heard, _) = talk(&mut router, &mut dealer, piece);
            let sent = messages.into_iter()
                .map(|frames| Event::Message(frames.into_iter().map(Bytes::from).collect()));
            let expected: Vec<_> = std::iter::once(Event::Ready).chain(sent).collect();
            prop_assert_eq!(heard, expected);
        }

        #[test]
        fn random_bytes_never_panic(bytes: Vec<u8>, opened: bool, kind in prop::sample::select(vec![
            SocketType::Pub, SocketType::Sub, SocketType::Dealer, SocketType::Router])) {
            let mut connection = Connection::new(kind, Limits::default());
            if opened {
                connection.feed(&GREETING);
            }
            connection.feed(&bytes);
            while let Ok(Some(_)) = connection.poll() {}
        }
    }
}
