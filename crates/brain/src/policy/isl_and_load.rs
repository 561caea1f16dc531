//! `isl_and_load`: local iff `isl_bounding` and `prefill_load`.

use super::{Facts, IslBounding, PrefillLoad, Verdict};
use crate::signals::Fallbacks;
use crate::why::Why;

pub(super) fn verdict(
    isl: &IslBounding,
    load: &PrefillLoad,
    facts: &Facts,
    used: &mut Fallbacks,
) -> Verdict {
    let by_isl = isl.verdict(facts);
    if let Verdict::Remote(_) = by_isl {
        return by_isl;
    }
    match load.verdict(facts, used) {
        calm @ Verdict::Remote(_) => calm,
        Verdict::Local(_) => Verdict::Local(Why::EffIslUnderAndPrefillBusy {
            u: facts.u,
            active: facts.prefill_active,
        }),
    }
}
