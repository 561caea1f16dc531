//! One end of a ZMTP conversation over a blocking socket, for `tests/interop/zmtp.py`, which holds
//! the other end with libzmq. Prints `listening <address>` if it binds, and each message it gets as
//! hex frames.
#![allow(clippy::print_stdout)]

use std::env;
use std::error::Error;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};

use pointsman_wire::zmtp::{Connection, Event, Limits, SocketType};

/// What the other end must do by then; a test that hangs says nothing.
const PATIENCE: std::time::Duration = std::time::Duration::from_secs(20);

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    match args[..] {
        ["sub", how, address, topic, count] => {
            subscriber(&mut Peer::open(SocketType::Sub, how, address)?, topic, count.parse()?)
        }
        ["pub", how, address, topic, count] => {
            publisher(&mut Peer::open(SocketType::Pub, how, address)?, topic, count.parse()?)
        }
        ["dealer", how, address, count] => {
            dealer(&mut Peer::open(SocketType::Dealer, how, address)?, count.parse()?)
        }
        ["router", how, address, count] => {
            router(&mut Peer::open(SocketType::Router, how, address)?, count.parse()?)
        }
        _ => {
            Err("usage: zmtp_peer sub|pub|dealer|router connect|bind ADDRESS [TOPIC] COUNT".into())
        }
    }
}

struct Peer {
    stream: TcpStream,
    connection: Connection,
}

impl Peer {
    fn open(kind: SocketType, how: &str, address: &str) -> Result<Peer, Box<dyn Error>> {
        let stream = if how == "bind" {
            let listener = TcpListener::bind(address)?;
            println!("listening {}", listener.local_addr()?);
            listener.accept()?.0
        } else {
            TcpStream::connect(address)?
        };
        stream.set_read_timeout(Some(PATIENCE))?;
        Ok(Peer { stream, connection: Connection::new(kind, Limits::default()) })
    }

    fn flush(&mut self) -> Result<(), Box<dyn Error>> {
        Ok(self.stream.write_all(&self.connection.take_output())?)
    }

    fn next(&mut self) -> Result<Event, Box<dyn Error>> {
        let mut buffer = [0; 4096];
        loop {
            let event = self.connection.poll()?;
            self.flush()?;
            if let Some(event) = event {
                return Ok(event);
            }
            let count = self.stream.read(&mut buffer)?;
            if count == 0 {
                return Err("the other end closed".into());
            }
            self.connection.feed(buffer.get(..count).unwrap_or_default());
        }
    }

    fn message(&mut self) -> Result<Vec<bytes::Bytes>, Box<dyn Error>> {
        loop {
            if let Event::Message(frames) = self.next()? {
                let hex = |frame: &bytes::Bytes| frame.iter().map(|b| format!("{b:02x}")).collect();
                println!("{}", frames.iter().map(hex).collect::<Vec<String>>().join(" "));
                return Ok(frames);
            }
        }
    }
}

fn subscriber(peer: &mut Peer, topic: &str, count: usize) -> Result<(), Box<dyn Error>> {
    peer.connection.subscribe(topic.as_bytes());
    (0..count).try_for_each(|_| peer.message().map(drop))
}

/// Publishes once it is subscribed to, messages of growing size.
fn publisher(peer: &mut Peer, topic: &str, count: usize) -> Result<(), Box<dyn Error>> {
    while !matches!(peer.next()?, Event::Subscribe(_)) {}
    for number in 0..count {
        let payload = vec![b'p'; number * 100];
        peer.connection.send(&[topic.as_bytes(), &(number as u64).to_be_bytes(), &payload]);
    }
    peer.flush()?;
    // Until the other end has read all and closes.
    while peer.next().is_ok() {}
    Ok(())
}

/// Asks once, prints so many answers.
fn dealer(peer: &mut Peer, count: usize) -> Result<(), Box<dyn Error>> {
    peer.connection.send(&[&b""[..], &0u64.to_be_bytes()]);
    (0..count).try_for_each(|_| peer.message().map(drop))
}

/// Answers each message with itself.
fn router(peer: &mut Peer, count: usize) -> Result<(), Box<dyn Error>> {
    for _ in 0..count {
        let frames = peer.message()?;
        peer.connection.send(&frames);
        peer.flush()?;
    }
    while peer.next().is_ok() {}
    Ok(())
}
