//! The sequences that stream from one worker, laid out for one question: what would a delay of all
//! of them cost? With `w_j = 1 / (k_j + r_j)` and `s(x) = 1 / (1 + exp(-x / width))`:
//! `sum_j [ s(after_j/S_j - 1) - s(base_j/S_j - 1) + 0.15 (after_j - base_j)/S_j ]`, where
//! `base_j = (e_j + W + r_j t) w_j`, `after_j = base_j + delay w_j`, `S_j` the sequence's own ITL SLO.
//! `s` is a rational approximation, off by less than 0.0001.

/// Sequences that are worked on together.
const LANES: usize = 8;

/// Sequences that a worker has room for from the start.
const ROOM: usize = 64;

/// Weight of the delay itself, beside that of what it does to an SLO.
const SLOPE: f64 = 0.15;

/// The sequences of one worker, one row each.
#[derive(Clone, Debug, Default)]
pub(crate) struct Running {
    /// The booking, by its place.
    places: Vec<u32>,
    /// Time of the first token, in seconds.
    first: Vec<f64>,
    /// `r_j`: tokens that are still expected.
    left: Vec<f32>,
    /// `w_j`: one over the tokens that the sequence will have had.
    weight: Vec<f32>,
    /// `1 / S_j`; 0 without an SLO.
    strict: Vec<f32>,
    /// `sum w_j / S_j`
    slope: f64,
    /// Sequences without an SLO.
    plain: u32,
}

/// What a delay is judged against.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Setting {
    /// Time of asking, in seconds.
    pub(crate) now: f64,
    /// `W`: what the worker has to compute before, in seconds.
    pub(crate) wait: f64,
    /// `t`: one decode step, in seconds.
    pub(crate) step: f64,
    /// Width of `s`.
    pub(crate) width: f64,
    /// Cost of one second for a sequence without an SLO.
    pub(crate) per_second: f64,
}

impl Running {
    /// Nobody yet, with room for some.
    pub(crate) fn with_room() -> Running {
        Running {
            places: Vec::with_capacity(ROOM),
            first: Vec::with_capacity(ROOM),
            left: Vec::with_capacity(ROOM),
            weight: Vec::with_capacity(ROOM),
            strict: Vec::with_capacity(ROOM),
            ..Running::default()
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.places.len()
    }

    /// Adds a sequence; its row.
    pub(crate) fn join(&mut self, place: u32, first: f64, strict: f32, osl: f64) -> u32 {
        let (left, weight) = expected(0, osl);
        self.places.push(place);
        self.first.push(first);
        self.left.push(left);
        self.weight.push(weight);
        self.strict.push(strict);
        self.count(weight, strict, 1.0);
        (self.places.len() - 1) as u32
    }

    /// A sequence has `tokens` tokens so far.
    pub(crate) fn progress(&mut self, row: u32, tokens: u32, osl: f64) {
        let row = row as usize;
        let (left, weight) = expected(tokens, osl);
        let (Some(old), Some(strict)) =
            (self.weight.get(row).copied(), self.strict.get(row).copied())
        else {
            return;
        };
        self.slope += f64::from(strict) * (f64::from(weight) - f64::from(old));
        if let (Some(l), Some(w)) = (self.left.get_mut(row), self.weight.get_mut(row)) {
            (*l, *w) = (left, weight);
        }
    }

    /// Removes a sequence; the place of the one that has its row from here on, if another has.
    pub(crate) fn leave(&mut self, row: u32) -> Option<u32> {
        let row = row as usize;
        if row >= self.places.len() {
            return None;
        }
        self.places.swap_remove(row);
        self.first.swap_remove(row);
        self.left.swap_remove(row);
        let weight = self.weight.swap_remove(row);
        let strict = self.strict.swap_remove(row);
        self.count(weight, strict, -1.0);
        self.places.get(row).copied()
    }

    fn count(&mut self, weight: f32, strict: f32, times: f64) {
        self.slope += times * f64::from(weight) * f64::from(strict);
        if strict == 0.0 {
            self.plain = self.plain.saturating_add_signed(times as i32);
        }
        if self.places.is_empty() {
            self.slope = 0.0;
        }
    }

    /// The least that a delay can cost; takes no time.
    pub(crate) fn harm_at_least(&self, delay: f64, setting: &Setting) -> f64 {
        SLOPE * delay * self.slope.max(0.0) + f64::from(self.plain) * setting.per_second * delay
    }

    /// What a delay costs beyond that: what it does to the SLOs.
    pub(crate) fn harm_beyond_least(&self, delay: f64, setting: &Setting) -> f64 {
        if self.plain as usize == self.len() {
            return 0.0;
        }
        let by = Judged {
            now: setting.now,
            wait: setting.wait as f32,
            step: setting.step as f32,
            delay: delay as f32,
            // tanh(x/2) = 2 s(x) - 1, so halves of the distance from the SLO, in widths.
            scale: (0.5 / setting.width) as f32,
        };
        let (firsts, first_rest) = self.first.as_chunks::<LANES>();
        let (lefts, left_rest) = self.left.as_chunks::<LANES>();
        let (weights, weight_rest) = self.weight.as_chunks::<LANES>();
        let (stricts, strict_rest) = self.strict.as_chunks::<LANES>();
        let mut sums = [0.0_f32; LANES];
        for (((first, left), weight), strict) in firsts.iter().zip(lefts).zip(weights).zip(stricts)
        {
            let harms = by.harms(first, left, weight, strict);
            for (sum, harm) in sums.iter_mut().zip(harms) {
                *sum += harm;
            }
        }
        let rest = first_rest.iter().zip(left_rest).zip(weight_rest).zip(strict_rest);
        let rest = rest.map(|(((f, l), w), s)| by.harms(&[*f], &[*l], &[*w], &[*s])[0]);
        f64::from(sums.iter().sum::<f32>() + rest.sum::<f32>()).max(0.0)
    }
}

/// What is the same for every sequence.
struct Judged {
    now: f64,
    wait: f32,
    step: f32,
    delay: f32,
    scale: f32,
}

impl Judged {
    /// `s(after/S - 1) - s(base/S - 1)` of some sequences, in steps that a compiler does side by side.
    #[inline]
    fn harms<const N: usize>(
        &self,
        first: &[f64; N],
        left: &[f32; N],
        weight: &[f32; N],
        strict: &[f32; N],
    ) -> [f32; N] {
        let age = first.map(|first| (self.now - first) as f32);
        let pace: [f32; N] = std::array::from_fn(|i| weight[i] * strict[i] * self.scale);
        let base: [f32; N] = std::array::from_fn(|i| {
            (age[i] + self.wait + left[i] * self.step) * pace[i] - self.scale
        });
        let after: [f32; N] = std::array::from_fn(|i| base[i] + self.delay * pace[i]);
        std::array::from_fn(|i| step_up(base[i], after[i]))
    }
}

/// `r_j` and `1 / (k_j + r_j)` after `tokens` tokens, of which `osl` are expected.
fn expected(tokens: u32, osl: f64) -> (f32, f32) {
    let (k, osl) = (f64::from(tokens), osl.max(1.0));
    let left = (osl - k).max(osl / 4.0);
    (left as f32, (1.0 / (k + left)) as f32)
}

/// `(tanh b - tanh a) / 2` by a Padé approximant, with one division for both.
#[inline]
fn step_up(a: f32, b: f32) -> f32 {
    let (an, ad) = tanh_parts(a);
    let (bn, bd) = tanh_parts(b);
    0.5 * (bn * ad - an * bd) / (ad * bd)
}

/// Numerator and denominator of tanh; beyond the bound both signs are within 0.0001 of 1.
#[inline]
fn tanh_parts(x: f32) -> (f32, f32) {
    const BOUND: f32 = 4.9;
    let x = x.clamp(-BOUND, BOUND);
    let q = x * x;
    let numerator = x * (135_135.0 + q * (17_325.0 + q * (378.0 + q)));
    let denominator = 135_135.0 + q * (62_370.0 + q * (3_150.0 + q * 28.0));
    (numerator, denominator)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;

    fn s(x: f64, width: f64) -> f64 {
        1.0 / (1.0 + (-x / width).exp())
    }

    #[test]
    fn the_approximation_is_as_good_as_stated() {
        for i in -4_000..4_000 {
            let x = f64::from(i) / 200.0;
            let approximated = f64::from(step_up(-100.0, x as f32 / 2.0));
            assert!((approximated - s(x, 1.0)).abs() < 1e-4, "{x}: {approximated}");
        }
    }

    /// Row by row and word by word as on the page.
    fn literally(rows: &[(f64, u32, f64)], delay: f64, osl: f64, at: &Setting) -> f64 {
        let one = |&(first, tokens, slo): &(f64, u32, f64)| {
            if slo == 0.0 {
                return at.per_second * delay;
            }
            let k = f64::from(tokens);
            let r = (osl - k).max(osl / 4.0);
            let base = (at.now - first + at.wait + r * at.step) / (k + r);
            let after = base + delay / (k + r);
            s(after / slo - 1.0, at.width) - s(base / slo - 1.0, at.width)
                + 0.15 * (after - base) / slo
        };
        rows.iter().map(one).sum()
    }

    #[test]
    fn the_harm_is_what_the_page_says_while_sequences_come_grow_and_go() {
        let mut random = Random::new(11);
        for osl in [1.0, 80.0, 400.0] {
            let mut running = Running::default();
            let mut rows: Vec<(f64, u32, f64)> = Vec::new();
            for step in 0..600_u32 {
                let draw = random.unit();
                let row = (random.unit() * rows.len() as f64) as usize;
                if draw < 0.5 || rows.is_empty() {
                    let slo = [0.0, 0.025, 0.05][step as usize % 3];
                    let first = 1e6 + f64::from(step) * 0.01;
                    let strict = if slo > 0.0 { (1.0 / slo) as f32 } else { 0.0 };
                    assert_eq!(running.join(step, first, strict, osl) as usize, rows.len());
                    rows.push((first, 0, slo));
                } else if draw < 0.8 {
                    rows[row].1 += 40;
                    running.progress(row as u32, rows[row].1, osl);
                } else {
                    running.leave(row as u32);
                    rows.swap_remove(row);
                }
                let setting = Setting {
                    now: 1e6 + f64::from(step) * 0.01,
                    wait: 0.02,
                    step: 0.02,
                    width: 0.1,
                    per_second: 0.1,
                };
                for delay in [0.0, 0.01, 0.3, 5.0] {
                    let least = running.harm_at_least(delay, &setting);
                    let harm = least + running.harm_beyond_least(delay, &setting);
                    let expected = literally(&rows, delay, osl, &setting);
                    let close = 1e-4 * (rows.len() as f64 + 1.0) + 1e-3 * expected;
                    assert!((harm - expected).abs() < close, "{harm} {expected} {delay}");
                    assert!(least >= 0.0 && least <= harm);
                }
            }
        }
    }

    #[test]
    fn the_row_that_moves_into_a_gap_is_told() {
        let mut running = Running::default();
        for place in [7, 8, 9] {
            running.join(place, 0.0, 0.0, 10.0);
        }
        assert_eq!(running.leave(0), Some(9));
        assert_eq!(running.leave(1), None);
        assert_eq!(running.leave(5), None);
        assert_eq!(running.len(), 1);
    }
}
