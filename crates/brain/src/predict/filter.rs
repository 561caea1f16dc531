//! What is learned from a stream of measurements: constants by recursive least squares, normalised
//! to their prior, and plain averages. Invariants: a constant stays within a hundredth and a hundred
//! times its prior, whatever comes in; one measurement counts for at most three times the usual error;
//! what is not a finite number above zero is not looked at.

use serde::{Deserialize, Serialize};

/// How far a constant may go from its prior, as a factor. The priors are of large GPUs: vLLM on one
/// core of a CPU takes some thirty times as long per token.
const LOWEST: f64 = 0.01;
const HIGHEST: f64 = 100.0;

/// How many times the usual error one measurement counts for at most.
const CLIP: f64 = 3.0;

/// Weight of what was learned before, for each new measurement: some five hundred count.
const MEMORY: f64 = 0.998;

/// Uncertainty of a prior, in squares of the usual error.
const PRIOR_VARIANCE: f64 = 100.0;

/// How much of that they share: a GPU that is slower than thought is so in all of them.
const PRIOR_SHARED: f64 = 0.8;

/// The usual error, relative: where it begins, its bounds, and the weight of a measurement in it.
const SIGMA_START: f64 = 0.5;
const SIGMA_LOWEST: f64 = 0.02;
const SIGMA_HIGHEST: f64 = 1.0;
const SIGMA_WEIGHT: f64 = 0.05;

/// Measurements after which a filter is warm.
pub(crate) const WARM_SAMPLES: u64 = 30;

/// Learns `N` constants, each as a multiple of its prior, from sums of them that were measured.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Filter<const N: usize> {
    theta: [f64; N],
    variance: [[f64; N]; N],
    sigma: f64,
    samples: u64,
}

/// What a filter has learned, as it is kept over a restart.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Kept {
    theta: Vec<f64>,
    variance: Vec<Vec<f64>>,
    sigma: f64,
    samples: u64,
}

impl<const N: usize> Default for Filter<N> {
    fn default() -> Self {
        let mut variance = [[PRIOR_SHARED * PRIOR_VARIANCE; N]; N];
        for (i, row) in variance.iter_mut().enumerate() {
            row[i] = PRIOR_VARIANCE;
        }
        Filter { theta: [1.0; N], variance, sigma: SIGMA_START, samples: 0 }
    }
}

impl<const N: usize> Filter<N> {
    /// The constants, as multiples of their priors.
    pub(crate) fn theta(&self) -> [f64; N] {
        self.theta
    }

    /// Standard deviation of each constant, as a multiple of its prior.
    pub(crate) fn deviation(&self) -> [f64; N] {
        std::array::from_fn(|i| self.variance[i][i].max(0.0).sqrt() * self.sigma)
    }

    pub(crate) fn samples(&self) -> u64 {
        self.samples
    }

    pub(crate) fn is_warm(&self) -> bool {
        self.samples >= WARM_SAMPLES
    }

    /// Learns that `seconds` passed where the constants at their priors say `parts`, summed.
    pub(crate) fn learn(&mut self, parts: [f64; N], seconds: f64) {
        let expected: f64 = parts.iter().zip(self.theta).map(|(part, theta)| part * theta).sum();
        let usable = |x: f64| x.is_finite() && x > 0.0;
        if !usable(seconds) || !usable(expected) || parts.iter().any(|part| *part < 0.0) {
            return;
        }
        // Errors are relative: a long prompt weighs as much as a short one.
        let x: [f64; N] = parts.map(|part| part / expected);
        let bound = CLIP * self.sigma;
        let seen = (seconds - expected) / expected;
        let error = seen.clamp(-bound, bound);

        let vx: [f64; N] = std::array::from_fn(|i| dot(&self.variance[i], &x));
        let denominator = MEMORY + dot(&x, &vx);
        if !usable(denominator) {
            return;
        }
        let gain = vx.map(|v| v / denominator);
        for (theta, gain) in self.theta.iter_mut().zip(gain) {
            *theta = (*theta + gain * error).clamp(LOWEST, HIGHEST);
        }
        // What counted for less than it said leaves as much more to learn: a prior that is far off would
        // else be settled half-way.
        let share = if seen == error { 1.0 } else { error / seen };
        self.shrink(&gain.map(|gain| share * gain), &vx);
        let square = (1.0 - SIGMA_WEIGHT) * self.sigma.powi(2) + SIGMA_WEIGHT * error.powi(2);
        self.sigma = square.sqrt().clamp(SIGMA_LOWEST, SIGMA_HIGHEST);
        self.samples += 1;
    }

    /// The variance after a measurement; never more than the prior's, so that what is not measured
    /// for long is not forgotten without end.
    fn shrink(&mut self, gain: &[f64; N], vx: &[f64; N]) {
        let mut next = [[0.0; N]; N];
        for i in 0..N {
            for j in 0..N {
                next[i][j] = (self.variance[i][j] - gain[i] * vx[j]) / MEMORY;
            }
        }
        let largest = (0..N).map(|i| next[i][i]).fold(0.0, f64::max);
        let scale = if largest > PRIOR_VARIANCE { PRIOR_VARIANCE / largest } else { 1.0 };
        let sound = (0..N).all(|i| next[i][i].is_finite() && next[i][i] > 0.0);
        if sound {
            self.variance = next.map(|row| row.map(|cell| cell * scale));
        } else {
            self.variance = Filter::<N>::default().variance;
        }
    }

    pub(crate) fn keep(&self) -> Kept {
        Kept {
            theta: self.theta.to_vec(),
            variance: self.variance.iter().map(|row| row.to_vec()).collect(),
            sigma: self.sigma,
            samples: self.samples,
        }
    }

    /// The filter that was kept; `None` if it is not one of this kind.
    pub(crate) fn restore(kept: &Kept) -> Option<Filter<N>> {
        let theta: [f64; N] = kept.theta.as_slice().try_into().ok()?;
        let rows: Vec<[f64; N]> = kept
            .variance
            .iter()
            .map(|row| row.as_slice().try_into().ok())
            .collect::<Option<_>>()?;
        let variance: [[f64; N]; N] = rows.as_slice().try_into().ok()?;
        let cells = variance.iter().flatten().all(|cell| cell.is_finite());
        let diagonal = (0..N).all(|i| variance[i][i] > 0.0 && variance[i][i] <= PRIOR_VARIANCE);
        let sound = theta.iter().all(|theta| (LOWEST..=HIGHEST).contains(theta))
            && cells
            && diagonal
            && (SIGMA_LOWEST..=SIGMA_HIGHEST).contains(&kept.sigma);
        sound.then_some(Filter { theta, variance, sigma: kept.sigma, samples: kept.samples })
    }
}

fn dot<const N: usize>(a: &[f64; N], b: &[f64; N]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// An average that follows what it is shown: exact at first, then with a fixed weight.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Average {
    pub(crate) value: f64,
    pub(crate) samples: u64,
}

impl Average {
    pub(crate) const fn starting_at(value: f64) -> Average {
        Average { value, samples: 0 }
    }

    /// Takes in `value`, with at least this weight.
    pub(crate) fn learn(&mut self, value: f64, weight: f64) {
        if value.is_finite() {
            self.samples = self.samples.saturating_add(1);
            let weight = weight.max(1.0 / self.samples as f64);
            self.value += weight * (value - self.value);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;

    /// A draw with standard deviation 1, near enough to normal.
    fn normal(random: &mut Random) -> f64 {
        (0..12).map(|_| random.unit()).sum::<f64>() - 6.0
    }

    /// Prompts of many lengths; their parts at the prior, their real time with 5 % noise.
    fn feed(filter: &mut Filter<3>, truth: [f64; 3], samples: usize, seed: u64) {
        let mut random = Random::new(seed);
        for _ in 0..samples {
            let tokens = 200.0 + random.unit().powi(3) * 30_000.0;
            let steps = (tokens / 8192.0_f64).ceil();
            let parts = [8e-3 * steps, 44.5e-6 * tokens, 9.8e-10 * tokens * tokens / 2.0];
            let seconds = dot(&parts, &truth) * (1.0 + 0.05 * normal(&mut random));
            filter.learn(parts, seconds);
        }
    }

    fn worst_error(filter: &Filter<3>, truth: [f64; 3]) -> f64 {
        let of = |tokens: f64| {
            let parts =
                [8e-3 * (tokens / 8192.0).ceil(), 44.5e-6 * tokens, 4.9e-10 * tokens.powi(2)];
            (dot(&parts, &filter.theta()) / dot(&parts, &truth) - 1.0).abs()
        };
        [500.0, 2_000.0, 8_000.0, 25_000.0].into_iter().map(of).fold(0.0, f64::max)
    }

    #[test]
    fn priors_three_times_off_either_way_are_corrected_within_sixty_measurements() {
        for off in [3.0, 1.0 / 3.0, 1.0] {
            for seed in 0..20 {
                let mut filter = Filter::default();
                feed(&mut filter, [off; 3], 60, seed);
                let error = worst_error(&filter, [off; 3]);
                assert!(error < 0.08, "{off} seed {seed}: {error} {:?}", filter.theta());
                assert!(filter.is_warm());
            }
        }
    }

    #[test]
    fn constants_that_are_off_in_different_ways_are_told_apart() {
        let truth = [0.5, 1.6, 2.5];
        let mut filter = Filter::default();
        feed(&mut filter, truth, 400, 3);
        assert!(worst_error(&filter, truth) < 0.05, "{:?}", filter.theta());
        for (theta, (truth, deviation)) in
            filter.theta().into_iter().zip(truth.into_iter().zip(filter.deviation()))
        {
            assert!((theta - truth).abs() < 4.0 * deviation + 0.05, "{theta} +- {deviation}");
        }
    }

    #[test]
    fn an_engine_on_a_cpu_is_learned_from_what_a_large_gpu_does() {
        let truth = [30.0, 30.0, 30.0];
        let mut filter = Filter::default();
        feed(&mut filter, truth, 60, 4);
        assert!(worst_error(&filter, truth) < 0.1, "{:?}", filter.theta());
    }

    #[test]
    fn what_changes_later_is_followed() {
        let mut filter = Filter::default();
        feed(&mut filter, [1.0; 3], 2_000, 1);
        feed(&mut filter, [1.5; 3], 2_000, 2);
        assert!(worst_error(&filter, [1.5; 3]) < 0.06, "{:?}", filter.theta());
    }

    #[test]
    fn one_wild_measurement_moves_little() {
        let mut filter = Filter::default();
        feed(&mut filter, [1.0; 3], 300, 5);
        let before = worst_error(&filter, [1.0; 3]);
        filter.learn([8e-3, 44.5e-3, 4.9e-4], 600.0);
        assert!(worst_error(&filter, [1.0; 3]) < before + 0.02);
    }

    #[test]
    fn what_is_no_measurement_changes_nothing() {
        let mut filter = Filter::<2>::default();
        for seconds in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 0.0, -1.0] {
            filter.learn([0.01, 0.02], seconds);
        }
        for part in [f64::NAN, f64::INFINITY, -1.0] {
            filter.learn([part, 0.02], 0.03);
        }
        filter.learn([0.0, 0.0], 0.03);
        assert_eq!((filter.theta(), filter.samples()), ([1.0, 1.0], 0));
    }

    #[test]
    fn constants_stay_within_their_bounds() {
        for (seconds, bound) in [(1e9, HIGHEST), (1e-9, LOWEST)] {
            let mut filter = Filter::<1>::default();
            for _ in 0..10_000 {
                filter.learn([0.01], seconds);
            }
            assert_eq!(filter.theta(), [bound]);
        }
    }

    #[test]
    fn a_kept_filter_comes_back_and_a_broken_one_does_not() {
        let mut filter = Filter::default();
        feed(&mut filter, [2.0; 3], 50, 9);
        let kept = filter.keep();
        let back = Filter::<3>::restore(&kept).unwrap();
        assert_eq!((back.theta(), back.samples()), (filter.theta(), 50));
        assert!(Filter::<2>::restore(&kept).is_none());
        let broken = [
            Kept { theta: vec![1.0, f64::NAN, 1.0], ..kept.clone() },
            Kept { theta: vec![1.0, 1e9, 1.0], ..kept.clone() },
            Kept { sigma: -1.0, ..kept.clone() },
            Kept { variance: vec![vec![0.0; 3]; 3], ..kept.clone() },
            Kept { variance: vec![vec![1.0; 3]; 2], ..kept },
        ];
        for kept in broken {
            assert!(Filter::<3>::restore(&kept).is_none(), "{kept:?}");
        }
    }

    #[test]
    fn an_average_is_exact_at_first_and_follows_later() {
        let mut average = Average::starting_at(256.0);
        average.learn(f64::NAN, 0.05);
        assert_eq!(average.value, 256.0);
        for value in [10.0, 20.0, 30.0] {
            average.learn(value, 0.05);
        }
        assert!((average.value - 20.0).abs() < 1e-9);
        for _ in 0..200 {
            average.learn(100.0, 0.05);
        }
        assert!((average.value - 100.0).abs() < 1.0);
    }
}
