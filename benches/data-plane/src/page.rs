//! The page of the documentation that the figures go onto.
//!
//! Invariant: only what stands between two marks is replaced; the rest of the page is written by
//! hand.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::Context;

use crate::bench::Options;

const BEGIN: &str = "<!-- figures: written by the bench -->";
const END: &str = "<!-- end of the figures -->";
const SCALE: &str = "<!-- scale: written by the bench -->";
const SCALE_END: &str = "<!-- end of scale -->";

const INTRODUCTION: &str = "# Data plane

What the whole router costs, beside a direct connection to the engines and nginx as a plain proxy, all in
one run on one machine. `local` and `remote` are the router with the full decision in the path and the
prompt's length estimated from its bytes: one leg, and a prefill leg before the decode leg. `local-tokenised`
also tokenises with the tiny built-in tokenizer and looks the prompt up.

The proxies have one core for themselves, instant engines and the load the other. Rates are per second of
the proxy's CPU time, so they do not depend on how busy the other core is. Figures are medians over the
rounds; in brackets, the ratio to nginx. Each round runs every case on every target in turn. Every byte of
every reply is compared. Ratios hold better than absolute figures, and these hold on this machine alone.

To run it: `cargo build --release -p pointsman -p pointsman-bench && target/release/data-plane`
(`--quick` for a trial, `--write` to put the figures here). It needs two cores and, for the comparison,
`apt-get install nginx-light`.
";

/// Writes the figures onto the page, which is made if there is none.
pub(crate) fn write(page: &Path, options: &Options, tables: &str) -> anyhow::Result<()> {
    let figures = format!("{BEGIN}\n\n{}\n{tables}\n{END}", circumstances(options)?);
    let old = fs::read_to_string(page).unwrap_or_default();
    save(page, &replaced(&old, &figures))
}

/// Writes the figures of scale onto the page, at its end if they are not there yet.
pub(crate) fn write_scale(page: &Path, options: &Options, tables: &str) -> anyhow::Result<()> {
    let figures = format!("{SCALE}\n\n{}\n{tables}\n{SCALE_END}", circumstances(options)?);
    let old = fs::read_to_string(page).unwrap_or_else(|_| INTRODUCTION.to_owned());
    let marked = between(&old, SCALE, SCALE_END, &figures);
    save(page, &marked.unwrap_or_else(|| format!("{old}\n## Scale\n\n{figures}\n")))
}

fn save(page: &Path, text: &str) -> anyhow::Result<()> {
    if let Some(dir) = page.parent() {
        fs::create_dir_all(dir)?;
    }
    fs::write(page, text).with_context(|| page.display().to_string())
}

fn replaced(old: &str, figures: &str) -> String {
    let marked = between(old, BEGIN, END, figures);
    marked.unwrap_or_else(|| format!("{INTRODUCTION}\n## Figures\n\n{figures}\n"))
}

/// The text with `figures` in place of what stands between the marks, and of them.
fn between(old: &str, begin: &str, end: &str, figures: &str) -> Option<String> {
    let (before, rest) = old.split_once(begin)?;
    let (_, after) = rest.split_once(end)?;
    Some(format!("{before}{figures}{after}"))
}

/// When, on what, and with which versions.
fn circumstances(options: &Options) -> anyhow::Result<String> {
    let cpuinfo = fs::read_to_string("/proc/cpuinfo")?;
    let cpu = cpuinfo.lines().find_map(|line| line.strip_prefix("model name")).unwrap_or_default();
    let cores = cpuinfo.lines().filter(|line| line.starts_with("processor")).count();
    let kernel = fs::read_to_string("/proc/sys/kernel/osrelease")?;
    let changed = !output("git", &["status", "--porcelain", "--untracked-files=no"]).is_empty();
    let commit = output("git", &["rev-parse", "--short=12", "HEAD"]);
    let times = options.times;
    let lines = [
        ("date", output("date", &["-u", "+%F"])),
        ("commit", format!("{commit}{}", if changed { ", with changes" } else { "" })),
        ("machine", format!("{cores} cores of {}", cpu.trim_start_matches(['\t', ' ', ':']))),
        ("kernel", kernel.trim().to_owned()),
        ("router", output(&options.router, &["--version"])),
        ("nginx", output(&options.nginx, &["-v"])),
        ("rounds", format!("{} of {:?} each", options.rounds, times.measured)),
        ("load before", fs::read_to_string("/proc/loadavg")?.trim().to_owned()),
    ];
    let line = |(name, value): &(&str, String)| format!("- {name}: {value}\n");
    Ok(lines.iter().map(line).collect())
}

/// What a command says, on either stream; empty if it cannot be run.
fn output(program: impl AsRef<std::ffi::OsStr>, args: &[&str]) -> String {
    let output = Command::new(program).args(args).output().ok();
    let both = output.map(|output| [output.stdout, output.stderr].concat()).unwrap_or_default();
    String::from_utf8_lossy(&both).trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_by_hand_stays() {
        let first = replaced("", &format!("{BEGIN}\none\n{END}"));
        let edited = first.replace("# Data plane", "# The data plane") + "\nBy hand.\n";
        let second = replaced(&edited, &format!("{BEGIN}\ntwo\n{END}"));
        assert_eq!(second, edited.replace("\none\n", "\ntwo\n"));
        assert!(second.starts_with("# The data plane") && second.ends_with("\nBy hand.\n"));
    }
}
