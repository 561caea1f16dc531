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

#[cfg(test)]
mod tests {
    use super::super::testing::{prompt, under_load};
    use super::*;
    use crate::fleet::Path::{Local, Remote};
    use crate::signals::Signal;
    use crate::units::Factor;

    const LOAD: PrefillLoad = PrefillLoad { prefill_busy_threshold: Factor::ONE };

    #[test]
    fn both_are_needed() {
        // (ISL, overlap, active, budget, path, label, budget missed)
        let known = Some(8192);
        let cases = [
            (1000, 301, 8192, known, Remote, "prefill_calm", false),
            (1000, 301, 8193, known, Local, "eff_isl_under_and_prefill_busy", false),
            (1000, 300, 8192, known, Remote, "eff_isl_ratio_over", false),
            (1000, 300, 8193, known, Remote, "eff_isl_ratio_over", false),
            (9000, 9000 - 2047, 8192, known, Remote, "prefill_calm", false),
            (9000, 9000 - 2047, 8193, known, Local, "eff_isl_under_and_prefill_busy", false),
            (9000, 9000 - 2048, 8193, known, Remote, "eff_isl_over", false),
            (100_000, 0, 8193, known, Remote, "eff_isl_over", false),
            (0, 0, 8193, known, Local, "eff_isl_under_and_prefill_busy", false),
            // The budget counts as missed only where it was needed.
            (1000, 301, 8193, None, Remote, "prefill_calm", true),
            (1000, 300, 8193, None, Remote, "eff_isl_ratio_over", false),
        ];
        for (isl, overlap, active, budget, path, label, missed) in cases {
            let facts = under_load(prompt(isl, overlap), active, budget);
            let mut used = Fallbacks::EMPTY;
            let verdict = verdict(&IslBounding::default(), &LOAD, &facts, &mut used);
            let case = format!("ISL {isl}, overlap {overlap}, {active} of {budget:?}");
            assert_eq!(verdict.labels(), (path, label), "{case}");
            assert_eq!(used.contains(Signal::PrefillCapacity), missed, "{case}");
        }
    }
}
