//! What every index under test has to do.

use std::time::Duration;

use crate::workload::Window;

/// Applies windows of events, on a thread of its own.
pub(crate) type Write = Box<dyn FnMut(&Window) + Send>;
/// Answers queries and throws the answers away.
pub(crate) type Read<C> = Box<dyn FnMut(&C)>;

/// An index under test.
pub(crate) trait Subject: Sized {
    /// A query in the form that the index takes.
    type Chain: Clone + Default + Send + 'static;

    /// An empty index. It knows `WORKERS` workers and one more; for how many blocks each has room, if
    /// it wants to know.
    fn new(capacities: &[usize]) -> Self;

    /// Applies a window; the CPU time of that alone, without that of making the subject's own types
    /// of events.
    fn apply(&mut self, window: &Window) -> Duration;

    /// The query for blocks of these contents.
    fn chain(&mut self, content: &[u64], out: &mut Self::Chain);

    /// Asks, and keeps the answer.
    fn ask(&mut self, chain: &Self::Chain);

    /// The last answer: depth by worker.
    fn depths(&self, out: &mut [u32]);

    /// A writer and a reader that work at the same time.
    fn split(self) -> (Write, Read<Self::Chain>);
}
