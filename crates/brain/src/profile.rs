//! What a model does on a group of GPUs: six constants for a step, three for a link, by name.
//!
//! `step = c1 B + c2 S + max(c0, k0 + a1 n + a2 n ctx)`, `transfer = x0 + bytes / bw`.
//! The one table of measured values; the engine model runs on it, the cost model starts from it.

use serde::{Deserialize, Serialize};

/// Constants of one model on one GPU group. Times in seconds, sizes in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Profile {
    /// Least time of any step (weights read once), `c0`.
    pub c0: f64,
    /// Per running sequence, `c1`.
    pub c1: f64,
    /// Per token of summed context of the running sequences, `c2`.
    pub c2: f64,
    /// Fixed cost of a step that prefills, `k0`.
    pub k0: f64,
    /// Per prefilled token, `a1`.
    pub a1: f64,
    /// Per prefilled token and token of its context, `a2`.
    pub a2: f64,
    /// Fixed cost of one KV transfer, `x0`.
    pub x0: f64,
    /// Bytes per second of one link, `bw`.
    pub bandwidth: f64,
    /// KV bytes of one token.
    pub kv_bytes_per_token: f64,
}

const MS: f64 = 1e-3;

/// The measured profiles, by name.
const TABLE: &[(&str, Profile)] = &[
    (
        "llama-3.1-70b-fp8-h100-tp4",
        Profile {
            c0: 10.4 * MS,
            c1: 0.038 * MS,
            c2: 2.9e-5 * MS,
            k0: 8.0 * MS,
            a1: 0.0445 * MS,
            a2: 9.8e-7 * MS,
            x0: 10.0 * MS,
            bandwidth: 40e9,
            kv_bytes_per_token: 327_680.0,
        },
    ),
    (
        "qwen3-32b-bf16-h100-tp2",
        Profile {
            c0: 13.4 * MS,
            c1: 0.0246 * MS,
            c2: 4.2e-5 * MS,
            k0: 4.0 * MS,
            a1: 0.0495 * MS,
            a2: 1.8e-6 * MS,
            x0: 10.0 * MS,
            bandwidth: 40e9,
            kv_bytes_per_token: 262_144.0,
        },
    ),
];

impl Default for Profile {
    fn default() -> Self {
        TABLE[0].1
    }
}

impl Profile {
    /// Looks a profile up by name; `qwen3-32b` is short for its full name.
    #[must_use]
    pub fn named(name: &str) -> Option<Profile> {
        let name = if name == "qwen3-32b" { "qwen3-32b-bf16-h100-tp2" } else { name };
        TABLE.iter().find(|(known, _)| *known == name).map(|(_, profile)| *profile)
    }

    /// Every name of the table, for messages and help.
    pub fn names() -> impl Iterator<Item = &'static str> {
        TABLE.iter().map(|(name, _)| *name)
    }

    /// The same worker `speed` times as fast; infinite speed takes no time at all.
    #[must_use]
    pub fn faster(self, speed: f64) -> Profile {
        Profile {
            c0: self.c0 / speed,
            c1: self.c1 / speed,
            c2: self.c2 / speed,
            k0: self.k0 / speed,
            a1: self.a1 / speed,
            a2: self.a2 / speed,
            x0: self.x0 / speed,
            bandwidth: self.bandwidth * speed,
            kv_bytes_per_token: self.kv_bytes_per_token,
        }
    }
}

impl Profile {
    /// Seconds of a transfer of this many tokens: the fixed hop, and the time that the link is busy.
    #[must_use]
    pub fn transfer_time(&self, tokens: u32) -> (f64, f64) {
        (self.x0, self.kv_bytes_per_token * f64::from(tokens) / self.bandwidth)
    }

    /// Whether it is the same but for what a number loses in text.
    pub(crate) fn is_like(&self, other: &Profile) -> bool {
        let all = |p: &Profile| {
            [p.c0, p.c1, p.c2, p.k0, p.a1, p.a2, p.x0, p.bandwidth, p.kv_bytes_per_token]
        };
        all(self).into_iter().zip(all(other)).all(|(a, b)| (a - b).abs() <= 1e-9 * b.abs())
    }

    /// Whether a cost model can start from it: each number finite and above zero.
    #[must_use]
    pub fn is_usable(&self) -> bool {
        let all = [self.c0, self.c1, self.c2, self.k0, self.a1, self.a2, self.x0];
        let link = [self.bandwidth, self.kv_bytes_per_token];
        all.into_iter().chain(link).all(|number| number.is_finite() && number > 0.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_profile_of_the_table_is_usable_and_found_by_its_name() {
        for name in Profile::names() {
            assert!(Profile::named(name).is_some_and(|profile| profile.is_usable()), "{name}");
        }
        assert_eq!(Profile::named("qwen3-32b"), Profile::named("qwen3-32b-bf16-h100-tp2"));
        assert_eq!(Profile::named("unheard-of"), None);
    }

    #[test]
    fn a_profile_with_a_number_that_is_none_is_not_usable() {
        for bad in [f64::NAN, f64::INFINITY, 0.0, -1.0] {
            assert!(!Profile { a1: bad, ..Profile::default() }.is_usable(), "{bad}");
        }
    }
}
