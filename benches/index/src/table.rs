//! Figures as Markdown: the comparison, where a peer wins, what was to be reached, and the limits that
//! the machine sets.

use std::fmt::Write as _;

use crate::Name;
use crate::agree::{Agreement, Scenario};
use crate::floor::Floor;
use crate::measure::{Figures, Latency, OwnFigures};
use crate::workload::{LENGTHS, WORKERS};

/// All subjects' figures; the first are ours.
type All = [(Name, Figures)];

/// One row of the comparison.
struct Row {
    title: String,
    higher_is_better: bool,
    /// One for each subject.
    values: Vec<f64>,
}

impl Row {
    /// How many times better than `peer` ours is.
    fn lead(&self, peer: usize) -> f64 {
        let (ours, peer) = (self.values[0], self.values[peer]);
        if self.higher_is_better { ours / peer } else { peer / ours }
    }
}

/// Everything.
pub(crate) fn markdown(all: &All, floor: &Floor) -> String {
    let rows = rows(all);
    let parts = [compared(all, &rows), agreement(all), peers_win(all, &rows)];
    let mut out = parts.join("\n");
    if let Some((_, ours)) = all.first() {
        let own = ours.own.unwrap_or_default();
        let _ = write!(out, "\n{}\n{}", musts(ours, &own), limits(ours, &own, floor));
    }
    out
}

fn rows(all: &All) -> Vec<Row> {
    let row = |title: &str, higher_is_better: bool, of: &dyn Fn(&Figures) -> f64| Row {
        title: title.to_owned(),
        higher_is_better,
        values: all.iter().map(|(_, figures)| of(figures)).collect(),
    };
    let cleared = all.first().map_or(0, |(_, f)| f.cleared);
    let mut rows = vec![
        row("resident bytes per pair, filled", false, &|f| f.bytes_filled),
        row("resident bytes per pair, after churn", false, &|f| f.bytes_churned),
        row("store, M blocks/s, 8-block events, from empty", true, &|f| f.fill),
        row("store, M blocks/s, 8-block events, steady", true, &|f| f.store_8),
        row("store, M blocks/s, 1-block events, steady", true, &|f| f.store_1),
        row("remove, M blocks/s, 1-block events", true, &|f| f.remove_1),
        row(&format!("clear of a worker, {} k blocks, ms", cleared / 1000), false, &|f| f.clear_ms),
    ];
    type Which = fn(&Figures) -> &[Latency; LENGTHS.len()];
    let kinds: [(&str, Which); 3] = [
        ("random chains", |f| &f.random),
        ("caches evicted", |f| &f.cold),
        ("beside a writer", |f| &f.beside),
    ];
    for (kind, which) in kinds {
        for (at, length) in LENGTHS.iter().enumerate() {
            let title = |part| format!("query, {length} blocks, {kind}, {part}, us");
            rows.push(row(&title("p50"), false, &|f| which(f)[at].p50));
            rows.push(row(&title("p99"), false, &|f| which(f)[at].p99));
        }
    }
    rows.push(row("hot queries, M/s", true, &|f| f.hot));
    rows
}

fn head(all: &All, first: &str) -> String {
    let titles: Vec<&str> = all.iter().map(|(name, _)| name.title()).collect();
    let rule = " ---: |".repeat(all.len());
    format!("| {first} | {} |\n| --- |{rule}\n", titles.join(" | "))
}

fn compared(all: &All, rows: &[Row]) -> String {
    let mut out = String::from("### Compared\n\n");
    if let Some((_, ours)) = all.first() {
        let millions = |count: u64| count as f64 / 1e6;
        let _ = writeln!(
            out,
            "{WORKERS} workers, {:.1} M pairs of {:.1} M distinct blocks. In brackets: how many times better \
             pointsman-kv is; below 1 the peer is.\n",
            millions(ours.pairs),
            millions(ours.distinct)
        );
    }
    out += &head(all, "");
    for row in rows {
        let _ = write!(out, "| {} |", row.title);
        for (at, value) in row.values.iter().enumerate() {
            match at {
                0 => _ = write!(out, " {} |", shown(*value)),
                _ => _ = write!(out, " {} ({:.2}) |", shown(*value), row.lead(at)),
            }
        }
        out.push('\n');
    }
    out
}

fn shown(value: f64) -> String {
    match value {
        0.0..10.0 => format!("{value:.2}"),
        10.0..100.0 => format!("{value:.1}"),
        _ => format!("{value:.0}"),
    }
}

fn agreement(all: &All) -> String {
    let mut out = String::from(
        "### Right answers\n\nAgainst a literal model, in small fleets: part of the depth there is that answers \
         lack, and what they say beyond it.\n\n",
    );
    out += &head(all, "");
    for scenario in Scenario::ALL {
        let _ = write!(out, "| {} |", scenario.describe());
        for (_, figures) in all {
            let found = figures.agreement.iter().find(|a| a.scenario == scenario);
            let _ = write!(out, " {} |", found.map(verdict).unwrap_or_default());
        }
        out.push('\n');
    }
    let _ = write!(out, "| answers of the big index equal to ours |");
    for (_, figures) in all {
        let pairs = figures.depths.iter().zip(all.first().map_or(&[][..], |(_, f)| &f.depths));
        let same = pairs.clone().filter(|(a, b)| a == b).count();
        let _ = write!(out, " {same} of {} |", pairs.count());
    }
    out.push('\n');
    out
}

fn verdict(agreement: &Agreement) -> String {
    let part = |count: u64| 100.0 * count as f64 / agreement.expected.max(1) as f64;
    match (agreement.lost, agreement.overstated) {
        (0, 0) => "exact".to_owned(),
        (lost, 0) => format!("lacks {:.2} %", part(lost)),
        (0, over) => format!("overstates {:.2} %", part(over)),
        (lost, over) => format!("lacks {:.2} %, overstates {:.2} %", part(lost), part(over)),
    }
}

fn peers_win(all: &All, rows: &[Row]) -> String {
    let mut out = String::from("### Where a peer wins\n\n");
    let before = out.len();
    for row in rows {
        for (at, (name, _)) in all.iter().enumerate().skip(1) {
            if row.lead(at) < 1.0 {
                let _ = writeln!(
                    out,
                    "- {}: {} has {}, pointsman-kv {} ({:.2} times as good)",
                    row.title,
                    name.title(),
                    shown(row.values[at]),
                    shown(row.values[0]),
                    1.0 / row.lead(at)
                );
            }
        }
    }
    if out.len() == before {
        out += "In no row.\n";
    }
    out
}

fn musts(ours: &Figures, own: &OwnFigures) -> String {
    let mut out = String::from(
        "### What is to be reached\n\n| figure | must | stretch | here | |\n| --- | ---: | ---: | ---: | --- |\n",
    );
    let mut line = |title: &str, at_most: bool, must: f64, stretch: f64, here: f64| {
        let reached = |goal: f64| if at_most { here <= goal } else { here >= goal };
        let verdict = match (reached(stretch), reached(must)) {
            (true, _) => "stretch reached",
            (_, true) => "reached",
            _ => "missed",
        };
        let _ = writeln!(out, "| {title} | {must} | {stretch} | {} | {verdict} |", shown(here));
    };
    let worst =
        |of: &dyn Fn(&Latency) -> f64, all: &[Latency]| all.iter().map(of).fold(0.0, f64::max);
    let (p50, p99) = (|l: &Latency| l.p50, |l: &Latency| l.p99);
    line("bytes per pair, filled", true, 20.0, 16.0, ours.bytes_filled);
    line("store, 8-block events, M blocks/s, from empty", false, 10.0, 20.0, ours.fill);
    line("store, 8-block events, M blocks/s, steady", false, 10.0, 20.0, ours.store_8);
    line("remove, 1-block events, M/s", false, 8.0, 15.0, ours.remove_1);
    line("vLLM event bytes to applied, M blocks/s", false, 4.0, 6.0, own.from_bytes);
    line("query p50, random chains, slowest length, us", true, 1.0, 0.5, worst(&p50, &ours.random));
    line("query p99, random chains, slowest length, us", true, 2.0, 1.2, worst(&p99, &ours.random));
    line("query p50, caches evicted, slowest length, us", true, 1.0, 0.5, worst(&p50, &ours.cold));
    line("query p99, caches evicted, slowest length, us", true, 2.0, 1.2, worst(&p99, &ours.cold));
    line("hot queries, M/s", false, 5.0, 15.0, ours.hot);
    line(
        "clear, 200 k blocks, ms",
        true,
        5.0,
        2.0,
        ours.clear_ms * 200e3 / ours.cleared.max(1) as f64,
    );
    let wrong: u64 = ours.agreement.iter().map(|a| a.lost + a.overstated).sum();
    let verdict = if wrong == 0 { "reached" } else { "missed" };
    let _ =
        writeln!(out, "| against a literal model | equal | | {wrong} blocks differ | {verdict} |");
    out
}

/// Blocks per entry of a worker's map at the load that linear hashing keeps.
const LOAD: f64 = 0.8;
/// Bytes of a name's slot and of a hash.
const WORD: f64 = 8.0;

fn limits(ours: &Figures, own: &OwnFigures, floor: &Floor) -> String {
    let Floor { dependent_ns, of_eight_ns, streamed_byte_ns, multiply_ns } = *floor;
    let mut out = format!(
        "### Limits of this machine\n\nA dependent load from 256 MiB takes {dependent_ns:.0} ns, one of eight \
         independent ones {of_eight_ns:.1} ns; reading in order {:.1} GB/s; an `or` and a multiplication, \
         four cycles, {multiply_ns:.2} ns. One message block of vLLM 0.32 is {:.0} \
         bytes and takes {:.0} ns to read; hashing it {:.0} ns.\n\n| figure | here | limit | because |\n\
         | --- | ---: | ---: | --- |\n",
        1.0 / streamed_byte_ns,
        own.message_bytes,
        own.decode_ns,
        own.hash_ns,
    );
    let mut line = |title: &str, here: f64, limit: f64, why: &str| {
        let _ = writeln!(out, "| {title} | {} | {} | {why} |", shown(here), shown(limit));
    };
    let distinct = ours.distinct as f64 / ours.pairs.max(1) as f64;
    let per_second = |ns: f64| 1e3 / ns;
    line(
        "bytes per pair",
        ours.bytes_filled,
        WORD / LOAD + WORD * distinct,
        "a slot of 8 bytes per pair in tables that are 80 % full, 8 bytes of hash per distinct block",
    );
    line(
        "store, 8-block events, M blocks/s",
        ours.store_8,
        per_second(own.hash_ns + of_eight_ns),
        "hashing, and one random line of the worker's names per block, eight at a time",
    );
    line(
        "store without hashing, M blocks/s",
        per_second((1e3 / ours.store_8 - own.hash_ns).max(0.01)),
        per_second(of_eight_ns),
        "the same, hashing taken off",
    );
    line(
        "remove, M/s",
        ours.remove_1,
        per_second(2.0 * of_eight_ns),
        "one random line of names and one of the run's holders, eight at a time",
    );
    line(
        "vLLM event bytes to applied, M blocks/s",
        own.from_bytes,
        per_second(own.decode_ns + own.hash_ns + of_eight_ns),
        "reading, hashing, and the line of names",
    );
    line(
        "query p50, caches evicted, 4096 blocks, us",
        ours.cold[LENGTHS.len() - 1].p50,
        dependent_ns * 4.0 / 1e3,
        "table, run, its last hash and its holders, each after the other; a query that leaves the run searches on top",
    );
    line(
        "clear, ms",
        ours.clear_ms,
        ours.cleared as f64 * WORD / LOAD * streamed_byte_ns / 1e6,
        "the worker's names are read once, in order",
    );
    out
}
