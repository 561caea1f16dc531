//! `isl_bounding`: local iff `u_d < eff_isl_threshold`
//! and `u_d / max(ISL, 1) < eff_isl_ratio_threshold`, both strict.

use super::{Facts, Verdict};
use crate::units::Share;
use crate::why::Why;

/// Parameters of `isl_bounding`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct IslBounding {
    /// The effective ISL must be below this.
    pub eff_isl_threshold: u32,
    /// Its share of the ISL must be below this.
    pub eff_isl_ratio_threshold: Share,
}

impl Default for IslBounding {
    fn default() -> Self {
        const RATIO: Share = Share::constant(0.7);
        IslBounding { eff_isl_threshold: 2048, eff_isl_ratio_threshold: RATIO }
    }
}

impl IslBounding {
    pub(super) fn verdict(&self, facts: &Facts) -> Verdict {
        let &Facts { isl, u, .. } = facts;
        let ratio_bound = self.eff_isl_ratio_threshold.get();
        if u >= self.eff_isl_threshold {
            Verdict::Remote(Why::EffIslOver { u, bound: self.eff_isl_threshold })
        } else if f64::from(u) / f64::from(isl.max(1)) >= ratio_bound {
            Verdict::Remote(Why::EffIslRatioOver { u, isl, bound: ratio_bound })
        } else {
            Verdict::Local(Why::EffIslUnder { u, isl })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::prompt;
    use super::*;
    use crate::fleet::Path::{self, Local, Remote};

    const UNDER: (Path, &str) = (Local, "eff_isl_under");
    const OVER: (Path, &str) = (Remote, "eff_isl_over");
    const RATIO_OVER: (Path, &str) = (Remote, "eff_isl_ratio_over");

    #[test]
    fn both_thresholds_are_strict() {
        // (threshold, ratio, ISL, overlap, verdict)
        let cases = [
            // The absolute threshold, with room in the ratio.
            (2048, 0.7, 10_000, 10_000 - 2047, UNDER),
            (2048, 0.7, 10_000, 10_000 - 2048, OVER),
            (2048, 0.7, 10_000, 10_000 - 2049, OVER),
            // The ratio, with room in the absolute threshold.
            (2048, 0.7, 1000, 301, UNDER),
            (2048, 0.7, 1000, 300, RATIO_OVER),
            (2048, 0.7, 1000, 299, RATIO_OVER),
            (2048, 0.7, 10, 3, RATIO_OVER),
            (2048, 0.7, 10, 4, UNDER),
            (2048, 0.7, 2920, 876, RATIO_OVER),
            // Both at once: the absolute one is named.
            (2048, 0.7, 2048, 0, OVER),
            // Nothing is cached: the ratio is 1.
            (2048, 0.7, 1, 0, RATIO_OVER),
            (2048, 0.7, 2047, 0, RATIO_OVER),
            (2048, 1.0, 2047, 0, RATIO_OVER),
            (2048, 1.0, 1, 0, RATIO_OVER),
            (2048, 1.0, 2047, 1, UNDER),
            // Everything is cached, or more than everything, or there is nothing.
            (2048, 0.7, 100_000, 100_000, UNDER),
            (2048, 0.7, 100, 5000, UNDER),
            (2048, 0.7, 0, 0, UNDER),
            (2048, 0.7, 0, 16, UNDER),
            // Thresholds of nothing let nothing through.
            (0, 0.7, 100, 100, OVER),
            (2048, 0.0, 100, 100, RATIO_OVER),
            (2048, 0.0, 0, 0, RATIO_OVER),
            (0, 0.0, 0, 0, OVER),
            // The largest prompt there can be.
            (u32::MAX, 0.7, u32::MAX, 0, OVER),
            (u32::MAX, 1.0, u32::MAX, 1, UNDER),
        ];
        for (eff_isl_threshold, ratio, isl, overlap, verdict) in cases {
            let eff_isl_ratio_threshold = Share::new(ratio).unwrap();
            let rule = IslBounding { eff_isl_threshold, eff_isl_ratio_threshold };
            let case = format!("ISL {isl}, overlap {overlap}, {eff_isl_threshold}, {ratio}");
            assert_eq!(rule.verdict(&prompt(isl, overlap)).labels(), verdict, "{case}");
        }
    }

    #[test]
    fn a_ratio_of_exactly_seven_tenths_is_remote_at_every_scale() {
        let rule = IslBounding { eff_isl_threshold: u32::MAX, ..IslBounding::default() };
        for tenth in (1..400_000_000).step_by(9_999_991).chain(1..2000) {
            let (isl, u) = (10 * tenth, 7 * tenth);
            assert_eq!(rule.verdict(&prompt(isl, isl - u)).labels(), RATIO_OVER, "{u} / {isl}");
            assert_eq!(rule.verdict(&prompt(isl, isl - u + 1)).labels(), UNDER, "{u} - 1 / {isl}");
        }
    }

    #[test]
    fn the_defaults_are_the_published_ones() {
        let rule = IslBounding::default();
        assert_eq!((rule.eff_isl_threshold, rule.eff_isl_ratio_threshold.get()), (2048, 0.7));
    }
}
