//! The failure ladder of one request: what has failed so far, and what that leaves to try.
//! remote prefill failed -> another prefill worker, at most `retries` -> local -> give up.
//! Holds before the first byte has gone to the client. It starts nothing and books nothing.

use std::fmt;

use crate::fleet::Slot;
use crate::settings::Settings;

/// A part of a request's work that one worker does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Leg {
    /// Prefill of the remote path.
    Prefill,
    /// Decode of the remote path.
    Decode,
    /// The whole request on one worker.
    Local,
}

impl Leg {
    /// The leg's name.
    pub const fn as_str(self) -> &'static str {
        match self {
            Leg::Prefill => "prefill",
            Leg::Decode => "decode",
            Leg::Local => "local",
        }
    }
}

/// How a leg failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// No connection.
    Connect,
    /// No answer in time.
    Timeout,
    /// The answer was cut off.
    Cut,
    /// An answer that makes no sense (no hand-off in it, not JSON, ...).
    Protocol,
    /// An error status other than those of overload.
    Status(u16),
    /// 429 or 503: the worker is loaded, not broken.
    Overload(u16),
    /// The hand-off was not sent on before its lease ran out.
    Expired,
}

impl Cause {
    /// The cause that an error status stands for.
    pub const fn of_status(status: u16) -> Cause {
        match status {
            429 | 503 => Cause::Overload(status),
            _ => Cause::Status(status),
        }
    }

    /// Whether the request itself is at fault, so that its answer is the client's.
    pub const fn is_client_error(self) -> bool {
        matches!(self, Cause::Status(400..=499))
    }

    /// Short `snake_case` label.
    pub const fn as_str(self) -> &'static str {
        match self {
            Cause::Connect => "connect",
            Cause::Timeout => "timeout",
            Cause::Cut => "cut",
            Cause::Protocol => "protocol",
            Cause::Status(400..=499) => "client_error",
            Cause::Status(_) => "server_error",
            Cause::Overload(_) => "overload",
            Cause::Expired => "expired",
        }
    }
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Cause::Connect => f.write_str("could not be reached"),
            Cause::Timeout => f.write_str("did not answer in time"),
            Cause::Cut => f.write_str("cut its answer off"),
            Cause::Protocol => f.write_str("sent an answer that makes no sense"),
            Cause::Status(status) => write!(f, "answered {status}"),
            Cause::Overload(status) => write!(f, "is overloaded ({status})"),
            Cause::Expired => f.write_str("computed KV whose lease ran out"),
        }
    }
}

/// What is left to do after a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// Settle the booking as failed, then ask the brain again with this ladder.
    Replan,
    /// Give the client the worker's answer.
    Relay,
    /// Tell the client of each try.
    GiveUp,
}

/// One leg that failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Try {
    /// Which leg.
    pub leg: Leg,
    /// On which worker.
    pub slot: Slot,
    /// How.
    pub cause: Cause,
}

/// What failed so far of one request, before the first byte.
#[derive(Clone, Debug)]
pub struct Ladder {
    retries: u8,
    tries: Vec<Try>,
    handoff: Option<Slot>,
}

impl Ladder {
    /// A request that nothing was tried for yet.
    pub fn new(settings: &Settings) -> Ladder {
        Ladder { retries: settings.retries, tries: Vec::new(), handoff: None }
    }

    /// Notes that `leg` failed on `slot` and says what is left to do.
    pub fn failed(&mut self, leg: Leg, slot: Slot, cause: Cause) -> Next {
        self.handoff = None;
        self.tries.push(Try { leg, slot, cause });
        if cause.is_client_error() { Next::Relay } else { Next::Replan }
    }

    /// After a decode leg failed: the hand-off that `prefill` made has not been used and still can be,
    /// so that the next plan needs no prefill.
    pub fn keep_handoff(&mut self, prefill: Slot) {
        self.handoff = Some(prefill);
    }

    /// Each leg that failed, in order.
    pub fn causes(&self) -> &[Try] {
        &self.tries
    }
}
