//! Results as Markdown: medians over the rounds, and ratios to nginx in brackets.

use std::fmt::Write as _;

use crate::bench::{Results, TOKENS};
use crate::load::{Case, Latency, Outcome};
use crate::proxies::{DIRECT, NGINX};

/// What kind of reply a case asks for.
pub(crate) fn kind(case: Case) -> String {
    match case.stream {
        None => "whole".to_owned(),
        Some(how) if how.pause_ms > 0 => format!("streamed, every {} ms", how.pause_ms),
        Some(how) if how.per_write > 1 => format!("streamed, {} together", how.per_write),
        Some(_) => "streamed".to_owned(),
    }
}

/// All tables.
pub(crate) fn markdown(results: &Results) -> String {
    let view = View { results };
    let is_plain = |case: Case| case.stream.is_none();
    let is_stream = |case: Case| case.stream.is_some();
    [
        view.table(
            "Requests per CPU-second of the proxy",
            is_plain,
            |case, target| view.proxied(case, target, |o| per_second(o.requests as f64, o)),
            thousands,
        ),
        view.table(
            "Streamed tokens per CPU-second of the proxy",
            is_stream,
            |case, target| view.proxied(case, target, |o| per_second(o.tokens as f64, o)),
            thousands,
        ),
        view.table(
            "CPU microseconds per streamed token beyond those of a request that is not streamed",
            is_stream,
            |case, target| view.per_token(case, target),
            |us| format!("{us:.2}"),
        ),
        view.table(
            "Streamed tokens per read of the client",
            is_stream,
            |case, target| view.median(case, target, |o| Some(o.tokens as f64 / o.reads as f64)),
            |tokens| format!("{tokens:.1}"),
        ),
        view.latencies("p50", |latency| latency.p50),
        view.latencies("p99", |latency| latency.p99),
        view.footprints(),
    ]
    .join("\n")
}

fn per_second(count: f64, outcome: &Outcome) -> Option<f64> {
    (outcome.cpu > 0.0).then(|| count / outcome.cpu)
}

fn thousands(number: f64) -> String {
    format!("{:.1} k", number / 1e3)
}

struct View<'a> {
    results: &'a Results,
}

impl View<'_> {
    /// The median over the rounds of one case and target.
    fn median(
        &self,
        case: usize,
        target: usize,
        value: impl Fn(&Outcome) -> Option<f64>,
    ) -> Option<f64> {
        median(self.rounds(case, target).iter().filter_map(value).collect())
    }

    fn rounds(&self, case: usize, target: usize) -> &[Outcome] {
        self.results.outcomes.get(case).and_then(|all| all.get(target)).map_or(&[], Vec::as_slice)
    }

    /// The same, of a target that is a process.
    fn proxied(
        &self,
        case: usize,
        target: usize,
        value: impl Fn(&Outcome) -> Option<f64>,
    ) -> Option<f64> {
        self.results.footprints.get(target)?.as_ref()?;
        self.median(case, target, value)
    }

    /// CPU microseconds of one token, without those of the request.
    fn per_token(&self, case: usize, target: usize) -> Option<f64> {
        let this = *self.results.cases.get(case)?;
        let plain = Case { stream: None, ..this };
        let plain = self.results.cases.iter().position(|case| *case == plain)?;
        let each = |count: f64, o: &Outcome| (count > 0.0).then(|| 1e6 * o.cpu / count);
        let request = self.proxied(plain, target, |o| each(o.requests as f64, o))?;
        let token = self.proxied(case, target, |o| each(o.tokens as f64, o))?;
        Some(token - request / TOKENS as f64)
    }

    /// Latency beyond the direct connection's in the same round, in microseconds.
    fn added(&self, case: usize, target: usize, of: impl Fn(&Latency) -> f64) -> Option<f64> {
        let direct = self.target(DIRECT)?;
        let streamed = self.results.cases.get(case)?.stream.is_some();
        let latency = |o: &Outcome| of(if streamed { &o.first } else { &o.whole });
        let rounds = self.rounds(case, target).iter().zip(self.rounds(case, direct));
        if target == direct {
            return median(rounds.map(|(this, _)| latency(this)).collect());
        }
        median(rounds.map(|(this, direct)| latency(this) - latency(direct)).collect())
    }

    fn target(&self, name: &str) -> Option<usize> {
        self.results.targets.iter().position(|target| *target == name)
    }

    /// One line per case that is wanted, one column per target that has a value.
    fn table(
        &self,
        title: &str,
        wanted: impl Fn(Case) -> bool,
        value: impl Fn(usize, usize) -> Option<f64>,
        shown: impl Fn(f64) -> String,
    ) -> String {
        let cases: Vec<usize> =
            (0..).zip(&self.results.cases).filter(|(_, c)| wanted(**c)).map(|(at, _)| at).collect();
        let columns: Vec<usize> = (0..self.results.targets.len())
            .filter(|target| cases.iter().any(|case| value(*case, *target).is_some()))
            .collect();
        let nginx = self.target(NGINX);
        let mut out = self.head(title, &["reply", "clients", "prompt"], &columns);
        for case in cases {
            let Some(this) = self.results.cases.get(case) else { continue };
            let (kind, kib) = (kind(*this), this.prompt_bytes / 1024);
            let _ = write!(out, "| {kind} | {} | {kib} KiB |", this.clients);
            let base = nginx.and_then(|nginx| value(case, nginx)).filter(|base| *base > 0.0);
            for column in &columns {
                let cell = value(case, *column).map_or("-".to_owned(), &shown);
                let name = self.results.targets.get(*column).copied().unwrap_or_default();
                let ratio = base.zip(value(case, *column)).map(|(base, value)| value / base);
                let _ = match ratio.filter(|_| name != NGINX && name != DIRECT) {
                    Some(ratio) => write!(out, " {cell} ({ratio:.2}) |"),
                    None => write!(out, " {cell} |"),
                };
            }
            out.push('\n');
        }
        out
    }

    fn latencies(&self, name: &str, of: impl Fn(&Latency) -> f64) -> String {
        self.table(
            &format!(
                "Added {name} in microseconds (column direct: the whole), to the end of a whole \
                 reply, to the first event of a streamed one"
            ),
            |_| true,
            |case, target| self.added(case, target, &of),
            |us| format!("{us:.0}"),
        )
    }

    fn footprints(&self) -> String {
        let columns: Vec<usize> = (0..)
            .zip(&self.results.footprints)
            .filter(|(_, footprint)| footprint.is_some())
            .map(|(at, _)| at)
            .collect();
        let mut out = self.head("Memory and start", &[""], &columns);
        let mut line = |title: &str, shown: &dyn Fn(&crate::bench::Footprint) -> String| {
            let _ = write!(out, "| {title} |");
            for footprint in self.results.footprints.iter().flatten() {
                let _ = write!(out, " {} |", shown(footprint));
            }
            out.push('\n');
        };
        let mib = |kib: u64| format!("{:.1} MiB", kib as f64 / 1024.0);
        line("RSS, idle", &|footprint| mib(footprint.idle_kib));
        line("RSS, highest of the run", &|footprint| mib(footprint.peak_kib));
        line("ready after", &|f| format!("{:.0} ms", f.ready.as_secs_f64() * 1e3));
        out
    }

    fn head(&self, title: &str, first: &[&str], columns: &[usize]) -> String {
        let names = columns.iter().filter_map(|column| self.results.targets.get(*column).copied());
        let names: Vec<&str> = first.iter().copied().chain(names).collect();
        format!("### {title}\n\n| {} |\n|{}\n", names.join(" | "), " --- |".repeat(names.len()))
    }
}

/// The middle of the finite values.
pub(crate) fn median(mut values: Vec<f64>) -> Option<f64> {
    values.retain(|value| value.is_finite());
    values.sort_unstable_by(f64::total_cmp);
    let middle = *values.get(values.len() / 2)?;
    match values.len() % 2 {
        0 => Some(f64::midpoint(*values.get(values.len() / 2 - 1)?, middle)),
        _ => Some(middle),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::{Footprint, cases};

    #[test]
    fn rates_are_medians_and_ratios_are_to_nginx() {
        let outcome = |requests, cpu| Outcome { requests, cpu, ..Outcome::default() };
        let nginx = vec![outcome(1000, 0.1), outcome(5000, 0.1), outcome(2000, 0.1)];
        let ours = vec![outcome(1000, 0.1); 3];
        let mut outcomes = vec![vec![Vec::new(); 3]; cases().len()];
        outcomes[0] = vec![vec![outcome(9, 0.0)], nginx, ours];
        let footprint = Some(Footprint::default());
        let results = Results {
            targets: vec![DIRECT, NGINX, "local"],
            cases: cases(),
            outcomes,
            footprints: vec![None, footprint, footprint],
        };
        let text = markdown(&results);
        assert!(text.contains("| whole | 1 | 1 KiB | 20.0 k | 10.0 k (0.50) |"), "{text}");
    }

    #[test]
    fn the_median_of_an_even_number_lies_between() {
        assert_eq!(median(vec![4.0, 1.0, 2.0, 3.0]), Some(2.5));
        assert_eq!(median(vec![]), None);
    }
}
