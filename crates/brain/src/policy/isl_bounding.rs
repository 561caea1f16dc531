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
