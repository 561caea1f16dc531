//! The protocol between the one writer and its readers: a sequence count around plain atomics.
//!
//! Invariant: data between [`open`] and [`close`] is seen by a reader wholly or not at all, and what
//! is written later into memory that the data has left is not seen either: whoever sees that sees
//! the count of the leaving. Readers write nothing. No unsafe code: every shared word is an atomic, so a torn view is a
//! wrong value that [`read`] throws away, never undefined behaviour.

use super::sync::{AtomicU64, Ordering, fence, spin_loop};

/// Tries of a reader before it gives up on data that is being written all the time.
const TRIES: u32 = if cfg!(loom) { 2 } else { 64 };

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
        spin_loop();
    }
    None
}

#[cfg(all(test, not(loom)))]
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

/// Every interleaving and every order of memory that the language allows:
/// `RUSTFLAGS="--cfg loom" cargo test --release -p pointsman-kv --lib seqlock::model`.
#[cfg(all(test, loom))]
mod model {
    use super::*;
    use loom::sync::Arc;
    use loom::thread;

    const SET: Ordering = Ordering::Relaxed;

    #[test]
    fn a_reader_never_sees_half_a_change() {
        loom::model(|| {
            let words = Arc::new([0, 0, 0].map(AtomicU64::new));
            let theirs = Arc::clone(&words);
            let writer = thread::spawn(move || {
                let [count, a, b] = &*theirs;
                for i in 1..=2 {
                    open(count);
                    a.store(i, SET);
                    b.store(i * 3, SET);
                    close(count);
                }
            });
            let [count, a, b] = &*words;
            if let Some((a, b)) = read(count, || (a.load(SET), b.load(SET))) {
                assert_eq!(a * 3, b);
            }
            writer.join().unwrap();
        });
    }

    /// A run moves to another part of the memory, and its old part is written by somebody else.
    #[test]
    fn a_reader_never_takes_what_was_written_into_a_part_that_its_run_has_left() {
        loom::model(|| {
            let words = Arc::new([0, 0, 7, 0].map(AtomicU64::new));
            let theirs = Arc::clone(&words);
            let writer = thread::spawn(move || {
                let [count, address, old, new] = &*theirs;
                new.store(7, SET);
                open(count);
                address.store(1, SET);
                close(count);
                old.store(99, SET);
            });
            let [count, address, parts @ ..] = &*words;
            let view = || match address.load(SET) {
                0 => parts[0].load(SET),
                _ => parts[1].load(SET),
            };
            if let Some(seen) = read(count, view) {
                assert_eq!(seen, 7);
            }
            writer.join().unwrap();
        });
    }

    /// A run is freed, and its number is given to another with another first block.
    #[test]
    fn a_reader_that_found_an_old_number_sees_which_run_it_is() {
        loom::model(|| {
            let words = Arc::new([0, 1, 10].map(AtomicU64::new));
            let theirs = Arc::clone(&words);
            let writer = thread::spawn(move || {
                let [count, first, data] = &*theirs;
                open(count);
                first.store(0, SET);
                close(count);
                data.store(20, SET);
                open(count);
                first.store(2, SET);
                close(count);
            });
            let [count, first, data] = &*words;
            if let Some((first, data)) = read(count, || (first.load(SET), data.load(SET))) {
                assert!(first != 1 || data == 10);
                assert!(first != 2 || data == 20);
            }
            writer.join().unwrap();
        });
    }
}
