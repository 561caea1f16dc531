//! What a load from memory costs on this machine: the floor under every figure.

use std::hint::black_box;

use serde::{Deserialize, Serialize};

use crate::cpu::timed;
use crate::workload::Rng;

/// Far above any cache.
const BYTES: usize = 256 << 20;
/// One step per cache line.
const WORDS_PER_LINE: usize = 16;
const STEPS: usize = 2_000_000;
const TRIES: usize = 3;

/// Nanoseconds of CPU time, the least of several tries.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Floor {
    /// A load that depends on the one before.
    pub(crate) dependent_ns: f64,
    /// A load among eight independent chains of them.
    pub(crate) of_eight_ns: f64,
    /// A byte read in order.
    pub(crate) streamed_byte_ns: f64,
    /// A dependent `or` and multiplication of 64 bits, four cycles: whether the core itself was slowed.
    pub(crate) multiply_ns: f64,
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
    let sum = || black_box(buffer.iter().fold(0_u32, |sum, word| sum.wrapping_add(*word)));
    let streamed_byte_ns = least_ns(sum) / BYTES as f64;
    let multiply = || (0..STEPS as u64).fold(black_box(3_u64), |x, step| x.wrapping_mul(x | step));
    let multiply_ns = least_ns(multiply) / STEPS as f64;
    Floor { dependent_ns, of_eight_ns, streamed_byte_ns, multiply_ns }
}

/// Nanoseconds per step of all chains together.
fn chase<const N: usize>(buffer: &[u32], start: [u32; N]) -> f64 {
    let steps = || {
        let mut at = start;
        for _ in 0..STEPS {
            for at in &mut at {
                *at = buffer[*at as usize];
            }
        }
        black_box(at);
    };
    least_ns(steps) / STEPS as f64
}

fn least_ns<T>(mut work: impl FnMut() -> T) -> f64 {
    (0..TRIES).map(|_| timed(&mut work).0.as_nanos() as f64).fold(f64::INFINITY, f64::min)
}
