//! `pointsman key`: an API key and its hash.

use std::fmt::Write as _;
use std::io::Read as _;
use std::process::ExitCode;

use anyhow::{Context as _, bail};
use ring::digest::{SHA256, digest};
use ring::rand::{SecureRandom as _, SystemRandom};

use crate::output;

/// Random bytes of a key.
const KEY_BYTES: usize = 32;

/// The longest key that is read.
const MAX_KEY_BYTES: u64 = 4096;

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Read a key from standard input instead of making one, and print its hash alone.
    #[arg(long)]
    hash: bool,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    if args.hash {
        let mut text = String::new();
        std::io::stdin()
            .take(MAX_KEY_BYTES)
            .read_to_string(&mut text)
            .context("no key was read")?;
        let key = text.trim();
        if key.is_empty() {
            bail!("standard input holds no key");
        }
        output::result(format_args!("{}\n", hash(key)))?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut random = [0; KEY_BYTES];
    if SystemRandom::new().fill(&mut random).is_err() {
        bail!("the system gives no random numbers");
    }
    let key = format!("pk-{}", hex(&random));
    output::result(format_args!("key     {key}\nsha256  {}\n", hash(&key)))?;
    Ok(ExitCode::SUCCESS)
}

fn hash(key: &str) -> String {
    hex(digest(&SHA256, key.as_bytes()).as_ref())
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _infallible = write!(text, "{byte:02x}");
        text
    })
}
