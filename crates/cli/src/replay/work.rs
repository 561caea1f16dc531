//! The replays of one command, over the cores, with a progress bar.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::Context;
use indicatif::{ProgressBar, ProgressStyle};
use pointsman_sim::replay::{Scenario, Summary, Workload, goodput};

use super::policies::Named;
use crate::report::Row;

/// Pause between two redraws of the bar.
const REDRAW: Duration = Duration::from_millis(120);

/// What is to be done.
pub(super) struct Plan {
    /// Name and requests of each trace.
    pub(super) traces: Vec<(String, Workload)>,
    pub(super) policies: Vec<Named>,
    pub(super) scenario: Scenario,
    pub(super) seeds: u64,
    pub(super) goodput: bool,
    /// Replays at the same time.
    pub(super) jobs: usize,
}

/// One replay: of a trace, under a policy, with a seed.
#[derive(Clone, Copy)]
struct Item<'a> {
    trace: &'a (String, Workload),
    policy: &'a Named,
    seed: u64,
}

/// Does all of it; rows come in the order of traces, policies, seeds.
pub(super) fn run(plan: &Plan) -> anyhow::Result<Vec<Row>> {
    let mut items = Vec::new();
    for trace in &plan.traces {
        for policy in &plan.policies {
            items.extend((1..=plan.seeds).map(|seed| Item { trace, policy, seed }));
        }
    }
    let bar = bar(items.len() as u64)?;
    let next = AtomicUsize::new(0);
    let rows = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..plan.jobs.clamp(1, items.len().max(1)) {
            scope.spawn(|| {
                while let Some(item) = items.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let place = items.iter().position(|other| std::ptr::eq(other, item));
                    let row = one(plan, *item, &bar);
                    bar.inc(1);
                    if let Ok(mut rows) = rows.lock() {
                        rows.push((place, row));
                    }
                }
            });
        }
    });
    bar.finish_and_clear();
    let mut rows = rows.into_inner().ok().context("a replay broke off")?;
    rows.sort_by_key(|(place, _)| *place);
    Ok(rows.into_iter().map(|(_, row)| row).collect())
}

fn bar(count: u64) -> anyhow::Result<ProgressBar> {
    let style = ProgressStyle::with_template("{bar:30} {pos}/{len} {elapsed_precise} {msg}")?;
    let bar = ProgressBar::new(count).with_style(style);
    bar.enable_steady_tick(REDRAW);
    Ok(bar)
}

fn one(plan: &Plan, item: Item<'_>, bar: &ProgressBar) -> Row {
    let Item { trace: (trace, workload), policy, seed } = item;
    let scenario = Scenario { settings: policy.settings.clone(), seed, ..plan.scenario.clone() };
    let told = format!("{trace} {} seed {seed}", policy.name);
    bar.set_message(told.clone());
    let served = workload.serve(&scenario);
    let found = plan.goodput.then(|| {
        goodput(workload, &scenario, |replay| {
            bar.set_message(format!("{told} goodput, replay {replay}"));
        })
    });
    Row {
        trace: trace.clone(),
        policy: policy.name.clone(),
        seed,
        rate: scenario.rate,
        goodput_rate: found.map(|found| found.rate),
        summary: Summary::of(&served),
        // The curves of a report are those of the first seed.
        served: if seed == 1 { served } else { Vec::new() },
    }
}
