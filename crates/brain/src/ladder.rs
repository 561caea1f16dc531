//! The failure ladder of one request: what has failed so far, and what that leaves to try.
//! Prefill failed: another prefill worker, at most `retries` times, then the local path.
//! Decode or local failed: plan again without that worker, at most `retries` times; after a decode leg
//! the same prompt is not prefilled remotely again while it can be computed locally, and a decode worker
//! that could not fetch the KV can do so itself.
//! It holds until the first byte has gone to the client. It starts nothing and books nothing.

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
    /// The router itself has no file descriptors left for a connection.
    Descriptors,
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
    /// The decode worker failed with KV that it was to fetch, and could not do so as far as anybody can
    /// tell: held against neither worker.
    KvLoad,
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
            Cause::Descriptors => "descriptors",
            Cause::Timeout => "timeout",
            Cause::Cut => "cut",
            Cause::Protocol => "protocol",
            Cause::Status(400..=499) => "client_error",
            Cause::Status(_) => "server_error",
            Cause::Overload(_) => "overload",
            Cause::Expired => "expired",
            Cause::KvLoad => "kv_load",
        }
    }
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Cause::Connect => f.write_str("could not be reached"),
            Cause::Descriptors => f.write_str(
                "could not be asked: the router has no file descriptors left and needs a higher limit",
            ),
            Cause::Timeout => f.write_str("did not answer in time"),
            Cause::Cut => f.write_str("cut its answer off"),
            Cause::Protocol => f.write_str("sent an answer that makes no sense"),
            Cause::Status(status) => write!(f, "answered {status}"),
            Cause::Overload(status) => write!(f, "is overloaded ({status})"),
            Cause::Expired => f.write_str("computed KV whose lease ran out"),
            Cause::KvLoad => f.write_str("failed with KV that was computed elsewhere"),
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

impl fmt::Display for Try {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} on worker {}: {}", self.leg.as_str(), self.slot, self.cause)
    }
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

impl Try {
    fn lies_in_the_handoff(&self) -> bool {
        self.leg == Leg::Decode && self.cause == Cause::KvLoad
    }
}

/// What failed so far of one request, before the first byte.
#[derive(Clone, Debug)]
pub struct Ladder {
    retries: u8,
    rung: Rung,
    tries: Vec<Try>,
    handoff: Option<Slot>,
}

/// What the next plan may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rung {
    /// Whatever the policy says.
    Policy,
    /// Another prefill worker, or else local.
    Remote,
    /// Local, if the guards allow.
    Local,
    /// Local, if the guards allow; else whatever the policy says.
    LocalFirst,
}

impl Ladder {
    /// A request that nothing was tried for yet.
    pub fn new(settings: &Settings) -> Ladder {
        Ladder { retries: settings.retries, rung: Rung::Policy, tries: Vec::new(), handoff: None }
    }

    /// Notes that `leg` failed on `slot` and says what is left to do.
    pub fn failed(&mut self, leg: Leg, slot: Slot, cause: Cause) -> Next {
        self.handoff = None;
        self.tries.push(Try { leg, slot, cause });
        if cause.is_client_error() {
            return Next::Relay;
        }
        let prefills = self.tries.iter().filter(|tried| tried.leg == Leg::Prefill).count();
        let others = self.tries.len() - prefills;
        let retries = usize::from(self.retries);
        match (leg, self.rung) {
            (Leg::Prefill, Rung::Local) => return Next::GiveUp,
            // Computed in vain once: the same prompt is not prefilled remotely again.
            (Leg::Prefill, _) if cause == Cause::Expired || prefills > retries => {
                self.rung = Rung::Local;
            }
            (Leg::Prefill, _) => self.rung = Rung::Remote,
            (Leg::Decode, _) if cause == Cause::KvLoad => {
                self.rung = if others > retries { Rung::Local } else { Rung::LocalFirst };
            }
            (Leg::Decode | Leg::Local, _) if others > retries => return Next::GiveUp,
            // Computed in vain once: a further remote prefill would be the second of the same prompt.
            (Leg::Decode, _) => self.rung = Rung::LocalFirst,
            (Leg::Local, Rung::Policy | Rung::LocalFirst) => {}
            (Leg::Local, Rung::Remote | Rung::Local) => self.rung = Rung::Local,
        }
        Next::Replan
    }

    /// After a decode leg failed: the hand-off that `prefill` made was not used and still can be, so
    /// that the next plan is another decode worker and no prefill. Holds for one plan.
    pub fn keep_handoff(&mut self, prefill: Slot) {
        self.handoff = Some(prefill);
    }

    /// Each leg that failed, in order.
    pub fn causes(&self) -> &[Try] {
        &self.tries
    }

    /// Whether a worker is out of the question.
    pub(crate) fn has_failed(&self, slot: Slot) -> bool {
        self.tries.iter().any(|tried| tried.slot == slot && !tried.lies_in_the_handoff())
    }

    /// Whether a worker could not fetch KV that was computed elsewhere.
    pub(crate) fn could_not_fetch(&self, slot: Slot) -> bool {
        self.tries.iter().any(|tried| tried.slot == slot && tried.lies_in_the_handoff())
    }

    pub(crate) fn rung(&self) -> Rung {
        self.rung
    }

    pub(crate) fn handoff(&self) -> Option<Slot> {
        self.handoff
    }
}
