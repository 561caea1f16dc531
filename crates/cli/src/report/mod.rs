//! Results of a replay or of a load, as JSON, as a table, and as a page.

mod curves;
mod page;
mod svg;
mod table;
mod words;

use pointsman_sim::replay::{Served, Summary};
use serde::Serialize;

pub(crate) use page::page;
pub(crate) use table::table;

/// One policy on one trace, with one seed.
#[derive(Clone, Debug)]
pub(crate) struct Row {
    pub(crate) trace: String,
    pub(crate) policy: String,
    pub(crate) seed: u64,
    pub(crate) rate: f64,
    /// The highest rate at which enough requests meet both SLOs, where it was looked for.
    pub(crate) goodput_rate: Option<f64>,
    pub(crate) summary: Summary,
    /// What each request got, for curves; may be empty.
    pub(crate) served: Vec<Served>,
}

/// What the results are about.
#[derive(Clone, Debug)]
pub(crate) struct About {
    pub(crate) title: String,
    pub(crate) rate: f64,
    /// Keys under `routing` of each policy.
    pub(crate) keys: Vec<(String, Vec<(String, String)>)>,
}

/// A row as JSON. Times in milliseconds; what was not looked for is null.
#[derive(Serialize)]
struct Written<'a> {
    trace: &'a str,
    policy: &'a str,
    seed: u64,
    rate: f64,
    goodput_rate: Option<f64>,
    slo_attainment: f64,
    ttft_p50_ms: f64,
    ttft_p95_ms: f64,
    ttft_p99_ms: f64,
    itl_mean_ms: f64,
    itl_p99_ms: f64,
    local_share: f64,
    ttft_error_median: Option<f64>,
}

/// All rows as one JSON object.
pub(crate) fn json(rows: &[Row]) -> String {
    let written: Vec<Written<'_>> = rows.iter().map(Written::of).collect();
    serde_json::json!({ "results": written }).to_string()
}

impl Written<'_> {
    fn of(row: &Row) -> Written<'_> {
        let Summary { slo_attainment, ttft_ms, itl_mean_ms, itl_p99_ms, .. } = row.summary;
        let Summary { local_share, ttft_error_median, .. } = row.summary;
        Written {
            trace: &row.trace,
            policy: &row.policy,
            seed: row.seed,
            rate: row.rate,
            goodput_rate: row.goodput_rate,
            slo_attainment,
            ttft_p50_ms: ttft_ms[0],
            ttft_p95_ms: ttft_ms[1],
            ttft_p99_ms: ttft_ms[2],
            itl_mean_ms,
            itl_p99_ms,
            local_share,
            ttft_error_median,
        }
    }
}
