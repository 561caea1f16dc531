//! The atomics of the index: the standard library's, or those of the model checker, which then
//! tries every order in which writer and reader can see each other's steps.

#[cfg(loom)]
pub(super) use loom::{
    hint::spin_loop,
    sync::atomic::{AtomicU64, Ordering, fence},
};
#[cfg(not(loom))]
pub(super) use std::{
    hint::spin_loop,
    sync::atomic::{AtomicU64, Ordering, fence},
};
