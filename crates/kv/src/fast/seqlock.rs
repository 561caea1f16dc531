//! The protocol between the one writer and its readers: a sequence count around plain atomics.
//!
//! Invariant: data between [`open`] and [`close`] is seen by a reader wholly or not at all.
//! Readers write nothing. No unsafe code: every shared word is an atomic, so a torn view is a
//! wrong value that [`read`] throws away, never undefined behaviour.

use super::sync::{AtomicU64, Ordering, fence};

/// Tries of a reader before it gives up on data that is being written all the time.
const TRIES: u32 = 64;

/// The writer is about to change the data that `count` guards.
pub(super) fn open(count: &AtomicU64) {
    count.store(count.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
    // The odd count is seen by whoever sees any of the changes that follow.
    fence(Ordering::Release);
}

/// The writer has changed the data that `count` guards.
pub(super) fn close(count: &AtomicU64) {
    count.store(count.load(Ordering::Relaxed).wrapping_add(1), Ordering::Release);
}

/// The writer is about to write words, outside of [`open`] and [`close`], that a reader may still
/// look at under a count that has moved on: whoever sees the new words sees that count too.
pub(super) fn reuse() {
    fence(Ordering::Release);
}

/// A view of the data that `count` guards, by relaxed loads in `view`; `None` if the writer never
/// left it alone for long enough.
pub(super) fn read<T>(count: &AtomicU64, mut view: impl FnMut() -> T) -> Option<T> {
    for _ in 0..TRIES {
        let before = count.load(Ordering::Acquire);
        if before & 1 == 0 {
            let seen = view();
            fence(Ordering::Acquire);
            if count.load(Ordering::Relaxed) == before {
                return Some(seen);
            }
        }
        std::hint::spin_loop();
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reader_never_sees_half_a_change() {
        let (count, a, b) = (AtomicU64::new(0), AtomicU64::new(0), AtomicU64::new(0));
        let rounds = if cfg!(miri) { 50 } else { 20_000 };
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for i in 1..=rounds {
                    open(&count);
                    a.store(i, Ordering::Relaxed);
                    b.store(i * 3, Ordering::Relaxed);
                    close(&count);
                }
            });
            for _ in 0..rounds {
                let both = || (a.load(Ordering::Relaxed), b.load(Ordering::Relaxed));
                if let Some((a, b)) = read(&count, both) {
                    assert_eq!(a * 3, b);
                }
            }
        });
    }

    #[test]
    fn data_under_change_is_not_seen_at_all() {
        let count = AtomicU64::new(0);
        open(&count);
        assert_eq!(read(&count, || ()), None);
        close(&count);
        assert_eq!(read(&count, || ()), Some(()));
    }
}
