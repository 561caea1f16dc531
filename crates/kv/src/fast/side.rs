//! What a worker holds of a run when that is not simply its beginning on the device.
//!
//! One bit per block and tier. Invariant: bits beyond the run's length are zero.

use crate::names::Tier;

/// Held blocks of one worker on one run, per tier.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Side {
    tiers: [Vec<u64>; Tier::COUNT],
}

impl Side {
    /// A side that says what `cut` blocks on the device say.
    pub(super) fn plain(cut: u16) -> Self {
        let mut side = Self::default();
        let (words, rest) = (usize::from(cut / 64), cut % 64);
        let device = &mut side.tiers[Tier::Device.index()];
        device.resize(words, u64::MAX);
        if rest > 0 {
            device.push((1 << rest) - 1);
        }
        side
    }

    pub(super) fn has(&self, tier: Tier, offset: u16) -> bool {
        let word = self.tiers[tier.index()].get(usize::from(offset / 64)).copied();
        word.is_some_and(|word| word >> (offset % 64) & 1 == 1)
    }

    pub(super) fn has_any(&self, offset: u16) -> bool {
        Tier::ALL.iter().any(|tier| self.has(*tier, offset))
    }

    pub(super) fn set(&mut self, tier: Tier, offset: u16) {
        let (tier, at) = (&mut self.tiers[tier.index()], usize::from(offset / 64));
        if tier.len() <= at {
            tier.resize(at + 1, 0);
        }
        tier[at] |= 1 << (offset % 64);
    }

    pub(super) fn unset(&mut self, tier: Tier, offset: u16) {
        let tier = &mut self.tiers[tier.index()];
        if let Some(word) = tier.get_mut(usize::from(offset / 64)) {
            *word &= !(1 << (offset % 64));
            while tier.last() == Some(&0) {
                tier.pop();
            }
        }
    }

    /// Blocks held contiguously from the start, per level.
    pub(super) fn cuts(&self) -> [u16; Tier::COUNT] {
        [1, 2, 3].map(|tiers| {
            let longest = self.tiers[..tiers].iter().map(Vec::len).max().unwrap_or(0);
            let mut cut = 0;
            for at in 0..longest {
                let of = |tier: &Vec<u64>| tier.get(at).copied().unwrap_or(0);
                let held = self.tiers[..tiers].iter().map(of).fold(0, |all, word| all | word);
                let ones = held.trailing_ones();
                cut += ones;
                if ones < 64 {
                    break;
                }
            }
            u16::try_from(cut).unwrap_or(u16::MAX)
        })
    }

    /// How many blocks on the device, if that is all, and there is no hole before them.
    pub(super) fn as_plain(&self) -> Option<u16> {
        let [device, host, disk] = &self.tiers;
        if !host.is_empty() || !disk.is_empty() {
            return None;
        }
        let cut = self.cuts()[0];
        let held: u32 = device.iter().map(|word| word.count_ones()).sum();
        (held == u32::from(cut)).then_some(cut)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plain_side_is_plain_at_every_length() {
        for cut in [0, 1, 63, 64, 65, 128, 1000, u16::MAX] {
            let side = Side::plain(cut);
            assert_eq!(side.as_plain(), Some(cut));
            assert_eq!(side.cuts(), [cut; 3]);
            assert!(!side.has_any(cut));
        }
    }

    #[test]
    fn holes_and_tiers_make_the_cuts() {
        let mut side = Side::plain(130);
        side.unset(Tier::Device, 70);
        assert_eq!(side.cuts(), [70; 3]);
        assert_eq!(side.as_plain(), None);
        side.set(Tier::Host, 70);
        assert_eq!(side.cuts(), [70, 130, 130]);
        side.set(Tier::Disk, 130);
        assert_eq!(side.cuts(), [70, 130, 131]);
        side.set(Tier::Device, 70);
        side.unset(Tier::Host, 70);
        side.unset(Tier::Disk, 130);
        assert_eq!(side, Side::plain(130));
    }
}
