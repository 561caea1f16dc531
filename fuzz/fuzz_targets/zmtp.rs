//! Arbitrary bytes as a ZMTP peer.
//!
//! What it did does not depend on where its bytes were split, and nothing is beyond the limits.
#![no_main]

use libfuzzer_sys::fuzz_target;
use pointsman_wire::zmtp::{Connection, Event, Limits, SocketType, ZmtpError};

const LIMITS: Limits = Limits { max_frames: 4, max_message: 512 };

fn talk(kind: SocketType, bytes: &[u8], length: usize) -> (Vec<Event>, Option<ZmtpError>, Vec<u8>) {
    let mut connection = Connection::new(kind, LIMITS);
    connection.subscribe(b"kv");
    let (mut events, mut output) = (Vec::new(), Vec::new());
    for piece in bytes.chunks(length) {
        connection.feed(piece);
        loop {
            match connection.poll() {
                Ok(Some(event)) => {
                    if let Event::Message(frames) = &event {
                        assert!(!frames.is_empty() && frames.len() <= LIMITS.max_frames);
                        let bytes: usize = frames.iter().map(|frame| frame.len()).sum();
                        assert!(bytes <= LIMITS.max_message);
                    }
                    events.push(event);
                }
                Ok(None) => break,
                Err(error) => {
                    assert_eq!(connection.poll(), Err(error.clone()));
                    return (events, Some(error), output);
                }
            }
        }
        output.extend_from_slice(&connection.take_output());
    }
    (events, None, output)
}

fuzz_target!(|input: (u8, u8, &[u8])| {
    let (kind, length, bytes) = input;
    let kinds = [SocketType::Pub, SocketType::Sub, SocketType::Dealer, SocketType::Router];
    let kind = kinds[usize::from(kind & 3)];
    let (events, error, output) = talk(kind, bytes, bytes.len().max(1));
    for length in [1, usize::from(length).max(1)] {
        let (others, other, written) = talk(kind, bytes, length);
        assert_eq!((&others, &other), (&events, &error), "pieces of {length}");
        if error.is_none() {
            assert_eq!(written, output, "pieces of {length}");
        }
    }
});
