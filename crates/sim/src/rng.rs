//! A small seeded generator (SplitMix64): the same draws on every platform and release.

/// Draws.
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    /// From a seed; equal seeds draw equal numbers.
    #[must_use]
    pub fn new(seed: u64) -> Rng {
        Rng(seed)
    }

    /// 64 even bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// Even over `0 .. below`; 0 when `below` is 0.
    pub fn below(&mut self, below: u64) -> u64 {
        ((u128::from(self.bits()) * u128::from(below)) >> 64) as u64
    }

    /// Even over `[0, 1)`.
    pub fn unit(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Standard normal.
    pub fn normal(&mut self) -> f64 {
        let radius = (-2.0 * (1.0 - self.unit()).ln()).sqrt();
        radius * (std::f64::consts::TAU * self.unit()).cos()
    }
}

/// A good 64-bit mix of one number.
#[must_use]
pub fn mix(x: u64) -> u64 {
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}
