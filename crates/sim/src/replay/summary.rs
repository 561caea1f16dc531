//! Figures of a replay.

use pointsman_brain::Path;

use super::Served;

/// Requests after which predictions count: earlier ones are the warm-up.
const WARM_UP: usize = 300;

/// Requests that missed an SLO, by what they missed and by path.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Misses {
    /// TTFT missed, on the local path.
    pub ttft_local: usize,
    /// TTFT missed, on the remote path.
    pub ttft_remote: usize,
    /// ITL alone missed, on the local path.
    pub itl_local: usize,
    /// ITL alone missed, on the remote path.
    pub itl_remote: usize,
    /// No last token.
    pub failed: usize,
}

impl Misses {
    /// All of them.
    #[must_use]
    pub fn total(&self) -> usize {
        self.ttft_local + self.ttft_remote + self.itl_local + self.itl_remote + self.failed
    }

    fn count(&mut self, served: &Served) {
        let local = served.path == Some(Path::Local);
        let place = match (served.finished, served.meets_ttft(), served.meets_itl()) {
            (true, true, true) => return,
            (false, ..) => &mut self.failed,
            (true, false, _) if local => &mut self.ttft_local,
            (true, false, _) => &mut self.ttft_remote,
            (true, true, false) if local => &mut self.itl_local,
            (true, true, false) => &mut self.itl_remote,
        };
        *place += 1;
    }
}

/// What one policy did to one trace. Times in milliseconds.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Summary {
    /// Share of requests that met both SLOs.
    pub slo_attainment: f64,
    /// TTFT below which half, 95 % and 99 % of the requests are.
    pub ttft_ms: [f64; 3],
    /// Mean over requests of the time between tokens.
    pub itl_mean_ms: f64,
    /// The same, below which 99 % of the requests are.
    pub itl_p99_ms: f64,
    /// Share of requests that went local.
    pub local_share: f64,
    /// Median of `|predicted / actual - 1|` of TTFT, after the warm-up; none without predictions.
    pub ttft_error_median: Option<f64>,
    /// Where the misses come from.
    pub misses: Misses,
}

impl Summary {
    /// The figures of these requests.
    #[must_use]
    pub fn of(served: &[Served]) -> Summary {
        let count = served.len().max(1) as f64;
        let share =
            |of: fn(&Served) -> bool| served.iter().filter(|s| of(s)).count() as f64 / count;
        let ttft = sorted(served.iter().filter_map(|served| served.ttft));
        let itl = sorted(served.iter().filter_map(|served| served.itl));
        let warm = served.get(WARM_UP.min(served.len() / 10)..).unwrap_or_default();
        let errors = sorted(warm.iter().filter_map(|served| {
            Some((served.predicted_ttft? / served.ttft.filter(|ttft| *ttft > 0.0)? - 1.0).abs())
        }));
        let mut misses = Misses::default();
        for served in served {
            misses.count(served);
        }
        Summary {
            slo_attainment: share(Served::meets_both),
            ttft_ms: [0.5, 0.95, 0.99].map(|share| percentile(&ttft, share) * 1e3),
            // A sum of nothing is -0.
            itl_mean_ms: (itl.iter().sum::<f64>() + 0.0) / itl.len().max(1) as f64 * 1e3,
            itl_p99_ms: percentile(&itl, 0.99) * 1e3,
            local_share: share(|served| served.path == Some(Path::Local)),
            ttft_error_median: (!errors.is_empty()).then(|| percentile(&errors, 0.5)),
            misses,
        }
    }
}

fn sorted(values: impl Iterator<Item = f64>) -> Vec<f64> {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values
}

/// The value below which this share of the sorted ones are; 0 of none.
#[must_use]
pub fn percentile(sorted: &[f64], share: f64) -> f64 {
    let at = (share * sorted.len() as f64).ceil() as usize;
    sorted.get(at.saturating_sub(1)).copied().unwrap_or(0.0)
}
