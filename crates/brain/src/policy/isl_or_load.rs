//! `isl_or_load`: local iff `isl_bounding` or `prefill_load`.

use super::{Facts, IslBounding, PrefillLoad, Verdict};
use crate::signals::Fallbacks;

pub(super) fn verdict(
    isl: &IslBounding,
    load: &PrefillLoad,
    facts: &Facts,
    used: &mut Fallbacks,
) -> Verdict {
    let by_isl = isl.verdict(facts);
    if let Verdict::Local(_) = by_isl {
        return by_isl;
    }
    match load.verdict(facts, used) {
        busy @ Verdict::Local(_) => busy,
        Verdict::Remote(_) => by_isl,
    }
}
