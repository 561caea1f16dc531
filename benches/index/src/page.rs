//! The page of the documentation that the figures go onto.
//!
//! Invariant: only what stands between the two marks is replaced; the rest of the page is written by
//! hand.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::Context;

const BEGIN: &str = "<!-- figures: written by the bench -->";
const END: &str = "<!-- end of the figures -->";

const INTRODUCTION: &str = "# Prefix index

The prefix index (`pointsman-kv`) beside `smg-radix-tree` and the two indexers of `dynamo-kv-router`, from
crates.io, through one workload in one run.

## What is measured

64 workers hold about 10 M (worker, block) pairs, in blocks of 16 tokens. A ninth of the pairs each is of
prompts of 64, 512 and 4096 blocks that 1, 8 and 64 workers hold; every second prompt begins with one of 64
common beginnings of 32 blocks. One token of eight has an id above 65 535. Workers announce their blocks in
messages of eight events, worker by worker in random order. Then the index churns at constant size: each
worker's oldest prompts go leaf first, one block per event, while other prompts come, in events of eight
blocks and then of one.

- Each subject runs in a process of its own. Bytes are the growth of its resident memory.
- Rates are per second of CPU time of the one thread that works; latencies are wall time of single calls.
- Half of the queries are prompts that some worker holds, half leave such a prompt at a random block.
  *Random chains* are asked one after the other. *Caches evicted*: 64 MiB are read before each query, so that
  even the code and the page tables come from memory. *Beside a writer*: 64 chains again and again, while
  another thread stores and removes at full speed. *Hot*: 16 chains again and again.
- Everything here waits for memory, and a machine that others use too is slow at that. The limits at the end
  are measured in the same run; compare with them, and columns with each other.
- All engines name a block alike, because dynamo's indexers need that; what happens when they do not is
  under *Right answers*.

What is inside the measured time differs with what each takes:

| subject | takes | inside | outside |
| --- | --- | --- | --- |
| pointsman-kv | tokens, names; batches of 64 events | hashing of the tokens | making the events; a query's chain |
| smg-radix-tree | content hashes, keys | the call | hashing; for *beside a writer* it stands behind a lock taken per batch |
| dynamo CRTC | content hashes, names, owned events | taking events off its channel, dropping them | hashing, making the events, sending |
| dynamo Positional | content hashes, chained hashes as names, owned events | dropping the events | hashing, making the events |

To run it: `cd benches/index && cargo run --release` (`--quick` for a trial, `--write` to put the figures here).
";

/// Writes the figures onto the page, which is made if there is none.
pub(crate) fn write(page: &Path, tables: &str, quick: bool) -> anyhow::Result<()> {
    let figures = format!("{BEGIN}\n\n{}\n{tables}\n{END}", circumstances(quick)?);
    let old = fs::read_to_string(page).unwrap_or_default();
    if let Some(dir) = page.parent() {
        fs::create_dir_all(dir)?;
    }
    fs::write(page, replaced(&old, &figures)).with_context(|| page.display().to_string())
}

fn replaced(old: &str, figures: &str) -> String {
    let marked = old.split_once(BEGIN).and_then(|(before, rest)| {
        let (_, after) = rest.split_once(END)?;
        Some(format!("{before}{figures}{after}"))
    });
    marked.unwrap_or_else(|| format!("{INTRODUCTION}\n## Figures\n\n{figures}\n"))
}

/// When, on what, and with which versions.
fn circumstances(quick: bool) -> anyhow::Result<String> {
    let cpuinfo = fs::read_to_string("/proc/cpuinfo")?;
    let cpu = cpuinfo.lines().find_map(|line| line.strip_prefix("model name")).unwrap_or_default();
    let cores = cpuinfo.lines().filter(|line| line.starts_with("processor")).count();
    let meminfo = fs::read_to_string("/proc/meminfo")?;
    let memory = meminfo.split_whitespace().nth(1).and_then(|kib| kib.parse::<u64>().ok());
    let kernel = fs::read_to_string("/proc/sys/kernel/osrelease")?;
    let changed = !output("git", &["status", "--porcelain", "--untracked-files=no"]).is_empty();
    let commit = output("git", &["rev-parse", "--short=12", "HEAD"]);
    let lines = [
        ("date", output("date", &["-u", "+%F"])),
        ("commit", format!("{commit}{}", if changed { ", with changes" } else { "" })),
        ("machine", format!("{cores} cores of {}", cpu.trim_start_matches(['\t', ' ', ':']))),
        ("memory", format!("{} GiB", memory.unwrap_or_default() >> 20)),
        ("kernel", kernel.trim().to_owned()),
        ("compiler", output("rustc", &["--version"])),
        ("size", if quick { "a trial" } else { "whole" }.to_owned()),
        (
            "processes ready, of 1, 5 and 15 minutes",
            fs::read_to_string("/proc/loadavg")?.trim().to_owned(),
        ),
    ];
    let line = |(name, value): &(&str, String)| format!("- {name}: {value}\n");
    Ok(lines.iter().map(line).collect())
}

/// What a command says; empty if it cannot be run.
fn output(program: &str, args: &[&str]) -> String {
    let output = Command::new(program).args(args).output().ok();
    let said = output.map(|output| output.stdout).unwrap_or_default();
    String::from_utf8_lossy(&said).trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_by_hand_stays() {
        let first = replaced("", &format!("{BEGIN}\none\n{END}"));
        let edited = first.replace("# Prefix index", "# The prefix index") + "\nBy hand.\n";
        let second = replaced(&edited, &format!("{BEGIN}\ntwo\n{END}"));
        assert_eq!(second, edited.replace("\none\n", "\ntwo\n"));
        assert!(second.starts_with("# The prefix index") && second.ends_with("\nBy hand.\n"));
    }
}
