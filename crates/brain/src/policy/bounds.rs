//! Bounds of any policy: remote if `u_d >= ceiling_tokens`, else local if `u_d <= floor_tokens`,
//! else what the rule says. A floor of 0 is off.

use super::{Facts, Verdict};
use crate::why::Why;

/// Bounds that any policy takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Bounds {
    /// An effective ISL of at most this goes local; 0 is off.
    pub floor_tokens: u32,
    /// An effective ISL of at least this goes remote; comes before the floor.
    pub ceiling_tokens: Option<u32>,
}

impl Bounds {
    pub(crate) fn verdict(&self, facts: &Facts) -> Option<Verdict> {
        let u = facts.u;
        if let Some(bound) = self.ceiling_tokens
            && u >= bound
        {
            return Some(Verdict::Remote(Why::Ceiling { u, bound }));
        }
        let bound = self.floor_tokens;
        (bound > 0 && u <= bound).then_some(Verdict::Local(Why::Floor { u, bound }))
    }
}

#[cfg(test)]
mod tests {
    use super::super::UncachedTokens;
    use super::super::testing::{prompt, under_load};
    use super::super::{IslBounding, MaxLocalPrefill, Policy, PrefillLoad, Rule, ShortPrompt};
    use super::*;
    use crate::fleet::Path::{Local, Remote};
    use crate::signals::Fallbacks;
    use crate::units::{Factor, Share};

    const LOAD: PrefillLoad = PrefillLoad { prefill_busy_threshold: Factor::ONE };

    fn every_rule() -> [Rule; 9] {
        [
            Rule::AlwaysRemote,
            Rule::AlwaysLocal,
            Rule::ShortPrompt(ShortPrompt::default()),
            Rule::IslBounding(IslBounding::default()),
            Rule::PrefillLoad(LOAD),
            Rule::IslOrLoad(IslBounding::default(), LOAD),
            Rule::IslAndLoad(IslBounding::default(), LOAD),
            Rule::UncachedTokens(UncachedTokens::default()),
            Rule::MaxLocalPrefill(MaxLocalPrefill::default()),
        ]
    }

    fn decide(policy: Policy, facts: Facts) -> (crate::fleet::Path, &'static str) {
        policy.verdict(&facts, &mut Fallbacks::default()).labels()
    }

    #[test]
    fn any_rule_takes_a_floor_that_is_inclusive() {
        let bounds = Bounds { floor_tokens: 64, ceiling_tokens: None };
        for rule in every_rule() {
            let policy = Policy { rule, bounds };
            for (isl, overlap) in [(0, 0), (63, 0), (64, 0), (1000, 936), (1000, 9999)] {
                let case = format!("{} ISL {isl}, overlap {overlap}", rule.as_str());
                assert_eq!(decide(policy, prompt(isl, overlap)), (Local, "floor"), "{case}");
            }
            let unbounded = Policy { rule, bounds: Bounds::default() };
            for facts in [prompt(65, 0), prompt(1000, 935)] {
                assert_eq!(decide(policy, facts), decide(unbounded, facts), "{}", rule.as_str());
            }
        }
    }

    #[test]
    fn any_rule_takes_a_ceiling_that_is_inclusive() {
        let bounds = Bounds { floor_tokens: 0, ceiling_tokens: Some(4096) };
        for rule in every_rule() {
            let policy = Policy { rule, bounds };
            for facts in [prompt(4096, 0), prompt(4097, 0), prompt(9000, 4904), prompt(100_000, 0)]
            {
                let busy = under_load(facts, 100_000, Some(8192));
                assert_eq!(decide(policy, busy), (Remote, "ceiling"), "{}", rule.as_str());
            }
            let unbounded = Policy { rule, bounds: Bounds::default() };
            for facts in [prompt(4095, 0), prompt(9000, 4905)] {
                let busy = under_load(facts, 100_000, Some(8192));
                assert_eq!(decide(policy, busy), decide(unbounded, busy), "{}", rule.as_str());
            }
        }
    }

    #[test]
    fn a_floor_of_zero_is_off_even_where_nothing_is_left_to_compute() {
        let policy = Policy { rule: Rule::AlwaysRemote, bounds: Bounds::default() };
        assert_eq!(decide(policy, prompt(1000, 1000)), (Remote, "always_remote"));
    }

    #[test]
    fn a_floor_lets_a_short_cold_prompt_go_local_that_no_ratio_would() {
        let isl = IslBounding { eff_isl_ratio_threshold: Share::ONE, ..IslBounding::default() };
        let rule = Rule::IslBounding(isl);
        let without = Policy { rule, bounds: Bounds::default() };
        assert_eq!(decide(without, prompt(100, 0)), (Remote, "eff_isl_ratio_over"));
        let with = Policy { rule, bounds: Bounds { floor_tokens: 100, ceiling_tokens: None } };
        assert_eq!(decide(with, prompt(100, 0)), (Local, "floor"));
        assert_eq!(decide(with, prompt(101, 0)), (Remote, "eff_isl_ratio_over"));
    }

    #[test]
    fn a_long_cold_prompt_goes_local_when_prefill_is_busy_unless_a_ceiling_forbids_it() {
        let rule = Rule::PrefillLoad(LOAD);
        let busy = under_load(prompt(100_000, 0), 8193, Some(8192));
        // (ceiling, path, label)
        let cases = [
            (None, Local, "prefill_busy"),
            (Some(100_001), Local, "prefill_busy"),
            (Some(100_000), Remote, "ceiling"),
            (Some(99_999), Remote, "ceiling"),
            (Some(0), Remote, "ceiling"),
        ];
        for (ceiling_tokens, path, label) in cases {
            let policy = Policy { rule, bounds: Bounds { floor_tokens: 0, ceiling_tokens } };
            assert_eq!(decide(policy, busy), (path, label), "{ceiling_tokens:?}");
        }
    }

    #[test]
    fn where_the_bounds_cross_the_ceiling_comes_first() {
        let bounds = Bounds { floor_tokens: 100, ceiling_tokens: Some(50) };
        let policy = Policy { rule: Rule::AlwaysLocal, bounds };
        assert_eq!(decide(policy, prompt(49, 0)), (Local, "floor"));
        assert_eq!(decide(policy, prompt(50, 0)), (Remote, "ceiling"));
        assert_eq!(decide(policy, prompt(100, 0)), (Remote, "ceiling"));
    }
}
