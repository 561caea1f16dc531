//! Standard output. `println!` panics where nobody can read it: a closed pipe, a full disk.

use std::fmt::Display;
use std::io::Write;

use anyhow::Context;

/// Writes what the command was run for.
pub(crate) fn result(text: impl Display) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    write!(out, "{text}").and_then(|()| out.flush()).context("standard output cannot be written")
}

/// Writes a line beside what the command does, which goes on where nobody reads it.
macro_rules! notice {
    ($($text:tt)*) => {{
        let _ = crate::output::result(format_args!("{}\n", format_args!($($text)*)));
    }};
}

pub(crate) use notice;
