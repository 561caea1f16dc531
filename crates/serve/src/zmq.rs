//! A ZMTP connection over tokio: bytes between a socket and the sans-IO codec of `wire`.
//!
//! Invariant: at most one message and one read buffer are in memory per connection.

use std::io;
use std::os::unix::fs::FileTypeExt;
use std::time::Duration;

use bytes::Bytes;
use pointsman_config::Endpoint;
use pointsman_wire::zmtp::{Connection, Event, Limits, SocketType, ZmtpError};
use socket2::{SockRef, TcpKeepalive};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};

/// How long a connection may be silent before the peer's host is asked, and how often then.
const KEEP_ALIVE: Duration = Duration::from_secs(10);

/// Bytes read from a socket at once.
const READ_BYTES: usize = 64 * 1024;

/// Why a connection to a publisher ended.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ZmqError {
    #[error("{0}")]
    Io(#[from] io::Error),
    #[error("{0}")]
    Protocol(#[from] ZmtpError),
    #[error("the peer closed the connection")]
    Closed,
}

/// A subscriber only listens: without this it would never learn that its publisher's host is gone.
fn keep_alive(stream: &TcpStream) -> io::Result<()> {
    let keep_alive = TcpKeepalive::new().with_time(KEEP_ALIVE).with_interval(KEEP_ALIVE);
    SockRef::from(stream).set_tcp_keepalive(&keep_alive)
}

trait Io: AsyncRead + AsyncWrite + Send + Sync + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Sync + Unpin> Io for T {}

/// One connection to one peer.
pub(crate) struct Socket {
    io: Box<dyn Io>,
    codec: Connection,
    buffer: Box<[u8]>,
}

impl Socket {
    /// Connects to a peer that listens.
    pub(crate) async fn connect(
        endpoint: &Endpoint,
        kind: SocketType,
        limits: Limits,
    ) -> Result<Socket, ZmqError> {
        let io: Box<dyn Io> = match endpoint {
            Endpoint::Tcp { host, port } => {
                let stream = TcpStream::connect((host.as_str(), *port)).await?;
                stream.set_nodelay(true)?;
                keep_alive(&stream)?;
                Box::new(stream)
            }
            Endpoint::Ipc(path) => Box::new(UnixStream::connect(path).await?),
        };
        Ok(Socket::over(io, kind, limits))
    }

    fn over(io: Box<dyn Io>, kind: SocketType, limits: Limits) -> Socket {
        let buffer = vec![0; READ_BYTES].into_boxed_slice();
        Socket { io, codec: Connection::new(kind, limits), buffer }
    }

    /// (SUB) wants a topic prefix.
    pub(crate) fn subscribe(&mut self, topic: &[u8]) {
        self.codec.subscribe(topic);
    }

    /// Queues a message; `next` or `flush` writes it.
    pub(crate) fn send(&mut self, frames: &[&[u8]]) {
        self.codec.send(frames);
    }

    /// The next whole message. Cancel-safe: a half-read message stays in the codec.
    pub(crate) async fn next(&mut self) -> Result<Vec<Bytes>, ZmqError> {
        loop {
            while let Some(event) = self.codec.poll()? {
                if let Event::Message(frames) = event {
                    return Ok(frames);
                }
            }
            self.flush().await?;
            let read = self.io.read(&mut self.buffer).await?;
            if read == 0 {
                return Err(ZmqError::Closed);
            }
            self.codec.feed(&self.buffer[..read]);
        }
    }

    /// The next whole message if it has come already. What is wrong with the connection is for `next`
    /// to say.
    pub(crate) fn buffered(&mut self) -> Option<Vec<Bytes>> {
        while let Ok(Some(event)) = self.codec.poll() {
            if let Event::Message(frames) = event {
                return Some(frames);
            }
        }
        None
    }

    async fn flush(&mut self) -> Result<(), ZmqError> {
        let output = self.codec.take_output();
        if !output.is_empty() {
            self.io.write_all(&output).await?;
            self.io.flush().await?;
        }
        Ok(())
    }
}

/// A listening socket, for publishers that connect to their subscriber.
pub(crate) enum Listener {
    Tcp(TcpListener),
    Ipc(UnixListener),
}

impl Listener {
    pub(crate) async fn bind(endpoint: &Endpoint) -> io::Result<Listener> {
        match endpoint {
            Endpoint::Tcp { host, port } => {
                let host = if host == "*" { "0.0.0.0" } else { host.as_str() };
                Ok(Listener::Tcp(TcpListener::bind((host, *port)).await?))
            }
            Endpoint::Ipc(path) => {
                // A socket left by an earlier process cannot be bound again; other files are not ours.
                if std::fs::symlink_metadata(path).is_ok_and(|file| file.file_type().is_socket()) {
                    std::fs::remove_file(path)?;
                }
                Ok(Listener::Ipc(UnixListener::bind(path)?))
            }
        }
    }

    pub(crate) async fn accept(
        &self,
        kind: SocketType,
        limits: Limits,
    ) -> Result<Socket, ZmqError> {
        let io: Box<dyn Io> = match self {
            Listener::Tcp(listener) => {
                let stream = listener.accept().await?.0;
                keep_alive(&stream)?;
                Box::new(stream)
            }
            Listener::Ipc(listener) => Box::new(listener.accept().await?.0),
        };
        Ok(Socket::over(io, kind, limits))
    }
}
