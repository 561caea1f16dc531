//! What the results mean, in words, and the configuration that follows.

use std::fmt::Write;

use super::{About, Row};

/// How a policy did on one trace, over all seeds.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Standing {
    pub(super) policy: String,
    /// Mean goodput, or where it was not looked for, mean share of requests that met the SLOs.
    pub(super) score: f64,
}

/// Traces in the order of the rows.
pub(super) fn traces(rows: &[Row]) -> Vec<&str> {
    let mut names: Vec<&str> = Vec::new();
    for row in rows {
        if !names.contains(&row.trace.as_str()) {
            names.push(&row.trace);
        }
    }
    names
}

/// Whether goodput was looked for.
pub(super) fn has_goodput(rows: &[Row]) -> bool {
    rows.iter().all(|row| row.goodput_rate.is_some())
}

/// Policies on one trace, the best first.
pub(super) fn standings(rows: &[Row], trace: &str) -> Vec<Standing> {
    let by_goodput = has_goodput(rows);
    let mut found: Vec<(String, f64, usize)> = Vec::new();
    for row in rows.iter().filter(|row| row.trace == trace) {
        let score = row.goodput_rate.filter(|_| by_goodput).unwrap_or(row.summary.slo_attainment);
        match found.iter_mut().find(|(policy, ..)| *policy == row.policy) {
            Some((_, sum, count)) => (*sum, *count) = (*sum + score, *count + 1),
            None => found.push((row.policy.clone(), score, 1)),
        }
    }
    let mean =
        |(policy, sum, count): (String, f64, usize)| Standing { policy, score: sum / count as f64 };
    let mut standings: Vec<Standing> = found.into_iter().map(mean).collect();
    standings.sort_by(|a, b| b.score.total_cmp(&a.score));
    standings
}

/// The policy that is nowhere far from the best: the one whose worst share of the best is highest.
pub(super) fn recommended(rows: &[Row]) -> Option<String> {
    let all: Vec<Vec<Standing>> = traces(rows).into_iter().map(|t| standings(rows, t)).collect();
    let worst = |policy: &str| {
        let share = |standings: &Vec<Standing>| {
            let best = standings.first().map_or(0.0, |best| best.score);
            let own = standings.iter().find(|standing| standing.policy == policy)?;
            Some(if best > 0.0 { own.score / best } else { 1.0 })
        };
        all.iter().filter_map(share).fold(f64::INFINITY, f64::min)
    };
    let policies = all.first()?.iter().map(|standing| standing.policy.as_str());
    // Of equal ones the first, so that a tie does not ask for a change.
    let best = policies.reduce(|a, b| if worst(b) > worst(a) { b } else { a });
    best.map(str::to_owned)
}

/// One sentence or two on each trace.
pub(super) fn sentences(rows: &[Row], policy: &str) -> Vec<String> {
    let of = |trace: &&str| sentence(rows, trace, policy);
    traces(rows).iter().filter_map(of).collect()
}

fn sentence(rows: &[Row], trace: &str, policy: &str) -> Option<String> {
    let standings = standings(rows, trace);
    let own = standings.iter().find(|standing| standing.policy == policy)?;
    let other = standings.iter().find(|standing| standing.policy != policy);
    let shown = |score: f64| {
        if has_goodput(rows) {
            format!("{score:.2} times the recorded speed")
        } else {
            format!("{:.1} % of the requests within both SLOs", score * 100.0)
        }
    };
    let mut text = format!("On {trace}, {policy} carries {}", shown(own.score));
    match other {
        Some(other) if own.score >= other.score => {
            let _ = write!(text, "; the next best, {}, {}.", other.policy, shown(other.score));
        }
        Some(other) => {
            let _ = write!(text, "; {} does better here, {}.", other.policy, shown(other.score));
        }
        None => text.push('.'),
    }
    if has_goodput(rows) && standings.first().is_some_and(|best| best.score < 1.0) {
        text += " No policy carries the trace at the speed at which it was recorded: the fleet is too \
                 small for it, or its SLOs too strict.";
    }
    Some(text)
}

/// The lines to paste into a configuration.
pub(super) fn lines(about: &About, policy: &str) -> String {
    let keys = about.keys.iter().find(|(name, _)| name == policy).map(|(_, keys)| keys.as_slice());
    let mut text = "routing:\n".to_owned();
    for (key, value) in keys.unwrap_or_default() {
        let _ = writeln!(text, "  {key}: {value}");
    }
    text
}
