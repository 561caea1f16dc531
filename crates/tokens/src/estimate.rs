//! Input length in tokens when nothing better than a byte count is known.

/// Bytes of prompt text per token assumed by [`bytes_estimate`].
pub const BYTES_PER_TOKEN: usize = 4;

/// Estimate of the number of tokens in `bytes` bytes of prompt text: rounded up.
pub fn bytes_estimate(bytes: usize) -> u32 {
    u32::try_from(bytes.div_ceil(BYTES_PER_TOKEN)).unwrap_or(u32::MAX)
}
