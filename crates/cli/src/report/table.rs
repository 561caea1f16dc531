//! Rows as a table of plain text.

use super::Row;

pub(super) const HEAD: [&str; 11] = [
    "trace", "policy", "seed", "goodput", "SLOs met", "TTFT p50", "p95", "p99", "ITL mean", "p99",
    "local",
];

/// Columns of words; the others hold numbers and are set to the right.
const WORDS: usize = 2;

/// The table, with a line at its end on what the columns mean.
pub(crate) fn table(rows: &[Row]) -> String {
    let mut lines = vec![HEAD.map(str::to_owned)];
    lines.extend(rows.iter().map(cells));
    let width = |column: usize| lines.iter().map(|line| line[column].chars().count()).max();
    let widths: [usize; HEAD.len()] = std::array::from_fn(|column| width(column).unwrap_or(0));
    let mut text = String::new();
    for line in &lines {
        let mut shown = String::new();
        for (column, (cell, width)) in line.iter().zip(widths).enumerate() {
            if column < WORDS {
                shown += &format!("{cell:<width$}  ");
            } else {
                shown += &format!("{cell:>width$}  ");
            }
        }
        text += shown.trim_end();
        text.push('\n');
    }
    if rows.iter().any(|row| row.goodput_rate.is_some()) {
        text += "goodput: highest rate at which 95 % of the requests meet both SLOs\n";
    }
    if let Some(first) = rows.first() {
        text += &format!("all else at rate {}; times in ms\n", first.rate);
    }
    text
}

pub(super) fn cells(row: &Row) -> [String; HEAD.len()] {
    let summary = &row.summary;
    let ms = |value: f64| if value < 100.0 { format!("{value:.1}") } else { format!("{value:.0}") };
    let percent = |share: f64| format!("{:.1} %", share * 100.0);
    [
        row.trace.clone(),
        row.policy.clone(),
        row.seed.to_string(),
        row.goodput_rate.map_or_else(|| "-".to_owned(), |rate| format!("{rate:.3}")),
        percent(summary.slo_attainment),
        ms(summary.ttft_ms[0]),
        ms(summary.ttft_ms[1]),
        ms(summary.ttft_ms[2]),
        ms(summary.itl_mean_ms),
        ms(summary.itl_p99_ms),
        percent(summary.local_share),
    ]
}
