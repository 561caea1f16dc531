//! A reply passing from an engine to its client, watched but not altered.
//!
//! Invariants: bytes go out in the order they came, whole events at a time; dropping the relay (the
//! client left) drops the engine's connection and settles the booking; a stream that breaks ends
//! with an error event, never silently and never with `[DONE]`; at most one event is held back.

use std::collections::VecDeque;
use std::pin::{Pin, pin};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http_body::{Body, Frame};
use hyper::body::Incoming;
use pointsman_brain::{Cause, End};
use pointsman_wire::openai::ApiError;
use pointsman_wire::sse::{self, Hold, Watch};
use tokio::time::{Instant, Sleep, sleep_until};

use crate::overdue;
use crate::run::Run;

/// The longest event that is kept together; a longer one passes in pieces.
const MAX_EVENT_BYTES: usize = 1024 * 1024;

/// Chunks that go out together at most.
const JOIN_CHUNKS: usize = 64;

/// Turns of the scheduler that a chunk waits for the next one. The engine's connection hands over one
/// chunk a turn, even if many came together, and a chunk that goes out alone costs a write.
const JOIN_TURNS: u8 = 3;

/// An engine's reply on its way.
pub(crate) struct Relay {
    body: Incoming,
    out: VecDeque<Bytes>,
    /// The beginning of an event whose end has not come yet.
    partial: BytesMut,
    /// An event longer than is kept together is out in part.
    within_event: bool,
    /// Turns since the last chunk came.
    turns: u8,
    watch: Option<Watch>,
    /// It ended in its middle, and the client is still to be told.
    broken: bool,
    /// The client's connection had its turn to send what came before the break.
    sent_before: bool,
    run: Option<Run>,
    timer: Pin<Box<Sleep>>,
    idle: Duration,
    deadline: Instant,
}

/// Bounds on a reply's time.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Patience {
    /// Silence within the stream.
    pub(crate) idle: Duration,
    /// The end of the whole request.
    pub(crate) deadline: Instant,
}

/// A stream up to its first content.
pub(crate) struct Opened {
    /// Each chunk with where its last whole event ends.
    held: Vec<(Bytes, usize)>,
    watch: Watch,
    body: Incoming,
}

impl Opened {
    /// Whether it ended as a stream does, and nothing had been said.
    pub(crate) fn is_empty(&self) -> bool {
        self.watch.hold() == Hold::Release && self.watch.content_events() == 0
    }
}

/// Reads a stream up to its first content, so that whatever fails before can still be made good.
pub(crate) async fn open(
    mut body: Incoming,
    patience: Patience,
    limit: usize,
) -> Result<Opened, Cause> {
    use http_body_util::BodyExt;
    let mut watch = Watch::new();
    let (mut held, mut bytes) = (Vec::new(), 0);
    while watch.hold() == Hold::Hold && bytes < limit {
        let until = patience.deadline.min(Instant::now() + patience.idle);
        let frame = match overdue::within(until, pin!(body.frame())).await {
            Err(_elapsed) => return Err(Cause::Timeout),
            Ok(None | Some(Err(_))) => return Err(Cause::Cut),
            Ok(Some(Ok(frame))) => frame,
        };
        if let Ok(data) = frame.into_data() {
            let seen = watch.feed(&data);
            bytes += data.len();
            held.push((data, seen.whole));
        }
    }
    match watch.hold() {
        Hold::Error => Err(Cause::Status(500)),
        Hold::Hold | Hold::Release => Ok(Opened { held, watch, body }),
    }
}

impl Relay {
    /// Goes on with an opened event stream.
    pub(crate) fn stream(opened: Opened, mut run: Run, patience: Patience) -> Relay {
        run.first_token(opened.watch.tokens());
        let mut relay = Relay::over(opened.body, run, patience);
        for (chunk, whole) in opened.held {
            relay.pass(chunk, whole);
        }
        // The first event waits for nothing.
        relay.turns = JOIN_TURNS;
        relay.watch = Some(opened.watch);
        relay
    }

    /// Passes on a body of any other kind.
    pub(crate) fn plain(body: Incoming, run: Run, patience: Patience) -> Relay {
        Relay::over(body, run, patience)
    }

    fn over(body: Incoming, run: Run, patience: Patience) -> Relay {
        let Patience { idle, deadline } = patience;
        Relay {
            body,
            out: VecDeque::new(),
            partial: BytesMut::new(),
            within_event: false,
            turns: 0,
            watch: None,
            broken: false,
            sent_before: false,
            run: Some(run),
            timer: Box::pin(sleep_until(deadline.min(Instant::now() + idle))),
            idle,
            deadline,
        }
    }

    /// What waits to go out, in one piece.
    fn take_out(&mut self) -> Option<Bytes> {
        if self.out.len() < 2 {
            return self.out.pop_front();
        }
        let bytes = self.out.iter().map(Bytes::len).sum();
        let mut joined = BytesMut::with_capacity(bytes);
        for chunk in self.out.drain(..) {
            joined.extend_from_slice(&chunk);
        }
        Some(joined.freeze())
    }

    /// Queues what of a chunk ends whole events, and keeps the rest.
    fn pass(&mut self, chunk: Bytes, whole: usize) {
        if whole == 0 && self.partial.len() + chunk.len() < MAX_EVENT_BYTES {
            self.partial.extend_from_slice(&chunk);
            return;
        }
        if !self.partial.is_empty() {
            self.out.push_back(self.partial.split().freeze());
        }
        self.within_event = whole == 0;
        let mut chunk = chunk;
        if whole > 0 {
            self.partial.extend_from_slice(&chunk.split_off(whole));
        }
        self.out.push_back(chunk);
    }

    fn received(&mut self, chunk: Bytes) {
        let now = Instant::now();
        self.timer.as_mut().reset(self.deadline.min(now + self.idle));
        let Some(watch) = &mut self.watch else {
            self.out.push_back(chunk);
            return;
        };
        let seen = watch.feed(&chunk);
        if let Some(run) = &mut self.run {
            run.streamed(seen.content_events, watch.tokens());
        }
        self.pass(chunk, seen.whole);
        if self.run.as_ref().is_some_and(Run::is_cut) {
            self.cut_short();
        }
    }

    /// The router itself ends a stream whose engine would go on.
    fn cut_short(&mut self) {
        let unfinished = self.watch.as_mut().is_some_and(|watch| watch.finish() == sse::End::Cut);
        let Some(run) = self.run.take_if(|_| unfinished) else { return };
        let message = format!(
            "the reply broke off after {} tokens: the router is shutting down; send the request again",
            run.tokens()
        );
        self.last_word(&ApiError::new(503, message));
        run.end(End::Failed, None);
    }

    /// Ends a stream with an error as an event of its own.
    fn last_word(&mut self, error: &ApiError) {
        self.partial.clear();
        if self.within_event {
            // Ends the event that is out in part.
            self.out.push_back(Bytes::from_static(b"\n\n"));
        }
        self.out.push_back(error.event());
    }

    /// The engine's side has ended, well or not.
    fn ended(&mut self, broken: Option<Cause>) {
        let Some(mut run) = self.run.take() else { return };
        // The router's own limit is not the worker's fault.
        let late = broken == Some(Cause::Timeout) && Instant::now() >= self.deadline;
        let blame = |cause: Cause| (!late).then_some(cause);
        let Some(watch) = &mut self.watch else {
            // Of such a reply nobody could tell from its bytes that something is missing.
            self.broken = broken.is_some();
            let end = if broken.is_some() { End::Failed } else { End::Finished };
            return run.end(end, broken.and_then(blame));
        };
        if let Some(usage) = watch.usage() {
            run.usage(usage);
        }
        let end = watch.finish();
        if end == sse::End::Cut || broken == Some(Cause::Timeout) {
            let cause = broken.unwrap_or(Cause::Cut);
            self.last_word(&broken_off(cause, late, &run));
            return run.end(End::Failed, blame(cause));
        }
        if !self.partial.is_empty() {
            self.out.push_back(self.partial.split().freeze());
        }
        let end = if end == sse::End::Clean { End::Finished } else { End::Failed };
        run.end(end, None);
    }
}

fn broken_off(cause: Cause, late: bool, run: &Run) -> ApiError {
    let status = if cause == Cause::Timeout { 504 } else { 502 };
    let (worker, tokens) = (run.worker(), run.tokens());
    let message = if late {
        format!("the reply broke off after {tokens} tokens: a request may not take longer")
    } else {
        format!(
            "the reply broke off: worker `{worker}` {cause} after {tokens} tokens; \
             send the request again"
        )
    };
    ApiError::new(status, message)
}

/// A reply of which something is missing; its connection is cut, so that the client knows.
#[derive(Debug, thiserror::Error)]
#[error("the worker's reply broke off")]
pub(crate) struct Broken;

impl Body for Relay {
    type Data = Bytes;
    type Error = Broken;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Broken>>> {
        let this = self.get_mut();
        loop {
            if this.run.is_none() || this.turns >= JOIN_TURNS || this.out.len() >= JOIN_CHUNKS {
                this.turns = 0;
                if let Some(chunk) = this.take_out() {
                    return Poll::Ready(Some(Ok(Frame::data(chunk))));
                }
            }
            if this.run.is_none() {
                if this.broken && !std::mem::replace(&mut this.sent_before, true) {
                    // An error ends the connection with whatever has not been sent, even the head.
                    cx.waker().wake_by_ref();
                    return Poll::Pending;
                }
                let broken = std::mem::take(&mut this.broken);
                return Poll::Ready(broken.then_some(Err(Broken)));
            }
            match Pin::new(&mut this.body).poll_frame(cx) {
                Poll::Ready(Some(Ok(frame))) => {
                    if let Ok(data) = frame.into_data() {
                        this.received(data);
                        this.turns = 0;
                    }
                }
                Poll::Ready(None) => this.ended(None),
                Poll::Ready(Some(Err(_))) => this.ended(Some(Cause::Cut)),
                Poll::Pending if !this.out.is_empty() => {
                    this.turns += 1;
                    if this.turns < JOIN_TURNS {
                        cx.waker().wake_by_ref();
                        return Poll::Pending;
                    }
                }
                Poll::Pending => {
                    if this.timer.as_mut().poll(cx).is_pending() {
                        return Poll::Pending;
                    }
                    match overdue::further(this.timer.deadline()) {
                        Some(further) => this.timer.as_mut().reset(further),
                        None => this.ended(Some(Cause::Timeout)),
                    }
                }
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.run.is_none() && self.out.is_empty() && !self.broken
    }
}
