//! What is drawn of the requests that a policy served: percentiles, and shares over time.

use pointsman_sim::replay::{Path, Served, percentile};

/// Points of one curve.
const POINTS: usize = 100;

/// Stretches of time that shares are taken over.
const STRETCHES: usize = 40;

/// Milliseconds below which each share of the requests is, by percent; those that have none are left out.
pub(super) fn percentiles(
    served: &[Served],
    of: impl Fn(&Served) -> Option<f64>,
) -> Vec<(f64, f64)> {
    let mut values: Vec<f64> = served.iter().filter_map(of).collect();
    values.sort_by(f64::total_cmp);
    if values.is_empty() {
        return Vec::new();
    }
    let point = |at: usize| at as f64 / POINTS as f64;
    let tail = [0.995, 0.999];
    let shares = (1..POINTS).map(point).chain(tail);
    shares.map(|share| (share * 100.0, percentile(&values, share) * 1e3)).collect()
}

/// Percent of the requests that went local, by the minute in which they came.
pub(super) fn local_over_time(served: &[Served]) -> Vec<(f64, f64)> {
    let last = served.iter().map(|served| served.arrived).fold(0.0, f64::max);
    let stretch = (last / STRETCHES as f64).max(1e-9);
    let mut counts = [(0u32, 0u32); STRETCHES];
    for served in served {
        let at = ((served.arrived / stretch) as usize).min(STRETCHES - 1);
        let local = u32::from(served.path == Some(Path::Local));
        counts[at] = (counts[at].0 + 1, counts[at].1 + local);
    }
    let middle = |at: usize| (at as f64 + 0.5) * stretch / 60.0;
    let share = |(at, &(all, local)): (usize, &(u32, u32))| {
        (all > 0).then(|| (middle(at), f64::from(local) / f64::from(all) * 100.0))
    };
    counts.iter().enumerate().filter_map(share).collect()
}
