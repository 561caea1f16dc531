//! What work costs, in seconds, by the constants of a worker:
//! `T_pf = m k0 + a1 u + a2 u (ctx + u/2)` with `m = ceil(u / chunk)` and `ctx = ISL - u`;
//! `t_dec(B, S) = c0 + c1 B + c2 S`; `X = x0 + kv_bytes_per_token u / bw`.
//! Work is kept as sums of what the constants multiply, so that it is worth what they are worth at
//! the time of asking. Nothing here learns.

use crate::profile::Profile;

/// Prompt tokens to compute, as what `k0`, `a1` and `a2` multiply. A sum over prompts is one too.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Prefill {
    /// `m`
    pub(crate) steps: f64,
    /// `u`
    pub(crate) tokens: f64,
    /// `u (ctx + u/2)`
    pub(crate) token_context: f64,
}

impl Prefill {
    /// `u` of `isl` tokens in steps of `chunk`. An engine computes at least the last token.
    pub(crate) fn new(u: u32, isl: u32, chunk: u32) -> Prefill {
        let u = u.max(1);
        let (tokens, context) = (f64::from(u), f64::from(isl.saturating_sub(u)));
        Prefill {
            steps: f64::from(u.div_ceil(chunk.max(1))),
            tokens,
            token_context: tokens * (context + tokens / 2.0),
        }
    }

    pub(crate) fn add(&mut self, other: Prefill) {
        self.steps += other.steps;
        self.tokens += other.tokens;
        self.token_context += other.token_context;
    }

    /// Takes out what was added; rounding leaves nothing below zero.
    pub(crate) fn take(&mut self, other: Prefill) {
        self.steps = (self.steps - other.steps).max(0.0);
        self.tokens = (self.tokens - other.tokens).max(0.0);
        self.token_context = (self.token_context - other.token_context).max(0.0);
    }

    /// What each constant contributes.
    pub(crate) fn parts(&self, by: &Constants) -> [f64; 3] {
        [by.k0 * self.steps, by.a1 * self.tokens, by.a2 * self.token_context]
    }

    pub(crate) fn seconds(&self, by: &Constants) -> f64 {
        by.k0 * self.steps + by.a1 * self.tokens + by.a2 * self.token_context
    }
}

/// Sequences and their summed context, as what `c1` and `c2` multiply.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Batch {
    /// `B`
    pub(crate) sequences: f64,
    /// `S`
    pub(crate) context: f64,
}

impl Batch {
    pub(crate) fn new(sequences: u32, context_each: u32) -> Batch {
        let sequences = f64::from(sequences.max(1));
        Batch { sequences, context: sequences * f64::from(context_each) }
    }

    pub(crate) fn plus(self, other: Batch) -> Batch {
        Batch { sequences: self.sequences + other.sequences, context: self.context + other.context }
    }

    /// Takes out what was added; rounding leaves nothing below zero.
    pub(crate) fn minus(self, other: Batch) -> Batch {
        Batch {
            sequences: (self.sequences - other.sequences).max(0.0),
            context: (self.context - other.context).max(0.0),
        }
    }

    pub(crate) fn parts(&self, by: &Constants) -> [f64; 3] {
        [by.c0, by.c1 * self.sequences, by.c2 * self.context]
    }

    /// One step of the batch.
    pub(crate) fn step(&self, by: &Constants) -> f64 {
        by.c0 + self.beside(by)
    }

    /// What the batch adds to a step that prefills.
    pub(crate) fn beside(&self, by: &Constants) -> f64 {
        by.c1 * self.sequences + by.c2 * self.context
    }
}

/// The six constants of a worker, in seconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Constants {
    pub(crate) k0: f64,
    pub(crate) a1: f64,
    pub(crate) a2: f64,
    pub(crate) c0: f64,
    pub(crate) c1: f64,
    pub(crate) c2: f64,
}

impl Constants {
    pub(crate) fn of(profile: &Profile) -> Constants {
        let Profile { k0, a1, a2, c0, c1, c2, .. } = *profile;
        Constants { k0, a1, a2, c0, c1, c2 }
    }

    /// With the prefill constants, and the decode constants, multiplied.
    pub(crate) fn scaled(&self, prefill: [f64; 3], decode: [f64; 3]) -> Constants {
        let ([k0, a1, a2], [c0, c1, c2]) = (prefill, decode);
        Constants {
            k0: self.k0 * k0,
            a1: self.a1 * a1,
            a2: self.a2 * a2,
            c0: self.c0 * c0,
            c1: self.c1 * c1,
            c2: self.c2 * c2,
        }
    }
}

/// The constants of a link: a fixed hop, and seconds per token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Link {
    pub(crate) hop: f64,
    pub(crate) per_token: f64,
}

impl Link {
    pub(crate) fn of(profile: &Profile) -> Link {
        Link { hop: profile.x0, per_token: profile.kv_bytes_per_token / profile.bandwidth }
    }

    pub(crate) fn scaled(&self, by: [f64; 2]) -> Link {
        Link { hop: self.hop * by[0], per_token: self.per_token * by[1] }
    }

    pub(crate) fn parts(&self, tokens: u32) -> [f64; 2] {
        [self.hop, self.per_token * f64::from(tokens)]
    }

    pub(crate) fn seconds(&self, tokens: u32) -> f64 {
        self.hop + self.per_token * f64::from(tokens)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn close(a: f64, b: f64) {
        assert!((a - b).abs() < 1e-9 * b.abs().max(1.0), "{a} is not {b}");
    }

    #[test]
    fn the_formulas_are_those_of_the_page() {
        let profile = Profile::default();
        let by = Constants::of(&profile);
        // 10 000 of 12 000 tokens in chunks of 8192: two steps.
        let work = Prefill::new(10_000, 12_000, 8192);
        close(work.seconds(&by), 2.0 * 8e-3 + 0.445 + 9.8e-10 * 10_000.0 * 7_000.0);
        close(work.parts(&by).iter().sum(), work.seconds(&by));
        let batch = Batch::new(32, 4_000);
        close(batch.step(&by), 10.4e-3 + 32.0 * 0.038e-3 + 128_000.0 * 2.9e-8);
        close(batch.parts(&by).iter().sum(), batch.step(&by));
        close(Link::of(&profile).seconds(10_000), 10e-3 + 3.2768e9 / 40e9);
    }

    #[test]
    fn a_prompt_that_is_held_whole_still_has_its_last_token_computed() {
        assert_eq!(Prefill::new(0, 500, 8192), Prefill::new(1, 500, 8192));
        assert_eq!(Prefill::new(5, 0, 0).steps, 5.0);
    }

    #[test]
    fn sums_never_go_below_zero() {
        let mut sum = Prefill::new(10, 10, 8);
        sum.take(Prefill::new(20, 20, 8));
        assert_eq!(sum, Prefill::default());
        assert_eq!(Batch::new(1, 5).minus(Batch::new(2, 9)), Batch::default());
    }
}
