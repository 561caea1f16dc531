//! What a load from memory costs on this machine: the floor under every figure.

use std::hint::black_box;
use std::time::Instant;

use serde::{Deserialize, Serialize};

use crate::workload::Rng;

/// Far above any cache.
const BYTES: usize = 256 << 20;
/// One step per cache line.
const WORDS_PER_LINE: usize = 16;
const STEPS: usize = 2_000_000;

/// Nanoseconds, of wall time.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Floor {
    /// A load that depends on the one before.
    pub(crate) dependent_ns: f64,
    /// A load among eight independent chains of them.
    pub(crate) of_eight_ns: f64,
    /// A byte read in order.
    pub(crate) streamed_byte_ns: f64,
}

/// Chases pointers through one random cycle over all lines of the buffer.
pub(crate) fn measure() -> Floor {
    let lines = BYTES / (WORDS_PER_LINE * 4);
    let mut order: Vec<u32> = (0..lines as u32).collect();
    let mut rng = Rng::new(1);
    // Sattolo: a permutation that is one cycle.
    for i in (1..lines).rev() {
        order.swap(i, rng.below(i));
    }
    let mut buffer = vec![0_u32; lines * WORDS_PER_LINE];
    for (line, next) in order.iter().enumerate() {
        buffer[line * WORDS_PER_LINE] = *next * WORDS_PER_LINE as u32;
    }
    drop(order);
    let dependent_ns = chase(&buffer, [0]);
    let start: [u32; 8] = std::array::from_fn(|i| (i * lines / 8 * WORDS_PER_LINE) as u32);
    let of_eight_ns = chase(&buffer, start) / 8.0;
    let begin = Instant::now();
    black_box(buffer.iter().fold(0_u32, |sum, word| sum.wrapping_add(*word)));
    let streamed_byte_ns = begin.elapsed().as_nanos() as f64 / BYTES as f64;
    Floor { dependent_ns, of_eight_ns, streamed_byte_ns }
}

/// Nanoseconds per step of all chains together.
fn chase<const N: usize>(buffer: &[u32], mut at: [u32; N]) -> f64 {
    let begin = Instant::now();
    for _ in 0..STEPS {
        for at in &mut at {
            *at = buffer[*at as usize];
        }
    }
    black_box(at);
    begin.elapsed().as_nanos() as f64 / STEPS as f64
}
