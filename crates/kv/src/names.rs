//! The small names that the whole crate speaks in: slots, tiers, and the two kinds of hash.
//!
//! Invariant: an [`EngineHash`] is a name that one worker gave a block and means nothing outside
//! that worker; a [`BlockHash`] is ours and names a whole prefix, whoever holds it.

use xxhash_rust::xxh3::xxh3_64;

/// Dense number of a worker rank within its group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Slot(pub u16);

/// Where a block lies on a worker, fastest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Tier {
    /// Accelerator memory.
    Device,
    /// Host memory.
    Host,
    /// Local or shared storage.
    Disk,
}

impl Tier {
    /// How many tiers there are.
    pub const COUNT: usize = 3;
    /// All tiers, fastest first.
    pub const ALL: [Self; Self::COUNT] = [Self::Device, Self::Host, Self::Disk];

    /// Position in [`Tier::ALL`].
    #[must_use]
    pub fn index(self) -> usize {
        self as usize
    }

    /// The tier that an engine's `medium` field means.
    ///
    /// Absent (vLLM up to 0.10.1) is the device. A medium that nobody here knows counts as the
    /// slowest tier, so that it is never valued above what it is.
    #[must_use]
    pub fn of_medium(medium: Option<&str>) -> Self {
        let Some(medium) = medium else { return Self::Device };
        let is = |names: &[&str]| names.iter().any(|n| medium.eq_ignore_ascii_case(n));
        if is(&["gpu", "device", "hbm", "npu", "xpu", "tpu", ""]) {
            Self::Device
        } else if is(&["cpu", "cpu_pinned", "cpu_tier1", "host", "dram"]) {
            Self::Host
        } else {
            Self::Disk
        }
    }
}

/// The name an engine gave a block: per worker, never an identity.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct EngineHash(pub u64);

impl EngineHash {
    /// From a signed integer, as SGLang sends them.
    #[must_use]
    pub fn from_i64(value: i64) -> Self {
        Self(value.cast_unsigned())
    }

    /// From a byte digest.
    ///
    /// A 32-byte digest becomes its last 8 bytes, big-endian, which is the integer that vLLM
    /// would have sent for it; any other length becomes its xxh3.
    #[must_use]
    pub fn from_bytes(digest: &[u8]) -> Self {
        match digest {
            [head @ .., a, b, c, d, e, f, g, h] if head.len() == 24 => {
                Self(u64::from_be_bytes([*a, *b, *c, *d, *e, *f, *g, *h]))
            }
            other => Self(xxh3_64(other)),
        }
    }
}

/// Chained hash of a whole prefix, up to and including one block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockHash(pub u64);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_32_byte_digest_is_named_like_the_integer_that_vllm_would_send() {
        let mut digest = [0xAB_u8; 32];
        digest[24..].copy_from_slice(&7_u64.to_be_bytes());
        assert_eq!(EngineHash::from_bytes(&digest), EngineHash(7));
    }

    #[test]
    fn digests_of_other_lengths_get_distinct_names() {
        let names: Vec<_> = [&b""[..], b"a", &[1; 16], &[2; 16], &[1; 20], &[1; 64]]
            .iter()
            .map(|d| EngineHash::from_bytes(d))
            .collect();
        for (i, a) in names.iter().enumerate() {
            assert!(!names[..i].contains(a));
        }
    }

    #[test]
    fn negative_hashes_keep_their_bits() {
        assert_eq!(EngineHash::from_i64(-1), EngineHash(u64::MAX));
    }

    #[test]
    fn an_unknown_medium_is_never_valued_above_the_slowest_tier() {
        assert_eq!(Tier::of_medium(None), Tier::Device);
        assert_eq!(Tier::of_medium(Some("GPU")), Tier::Device);
        assert_eq!(Tier::of_medium(Some("CPU")), Tier::Host);
        assert_eq!(Tier::of_medium(Some("punched cards")), Tier::Disk);
    }
}
