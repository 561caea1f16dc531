//! The brain from outside: decisions, guards, bursts, failures, health, and the ledger's invariant.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod bursts;
mod choice;
mod fleets;
mod guards;
mod health;
mod hold;
mod ladder;
mod ledger;
mod paths;
mod policies;
mod predicted;
mod records;
mod sessions;
mod signals;
mod transfers;
