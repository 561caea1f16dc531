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
    pub(super) fn verdict(&self, facts: &Facts) -> Option<Verdict> {
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
