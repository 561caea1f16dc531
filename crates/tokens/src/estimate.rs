//! Input length in tokens when nothing better than a byte count is known.

/// Bytes of prompt text per token assumed by [`bytes_estimate`]. English prose is at 4 to 4.5 bytes a
/// token with vocabularies of 100 thousand and more, code and JSON at 3 to 3.5, Chinese at 3 to 4.
pub const BYTES_PER_TOKEN: usize = 4;

/// Estimate of the tokens in `bytes` bytes of prompt text, rounded up. Give it the length of the text:
/// an image in a body is no text.
pub fn bytes_estimate(bytes: usize) -> u32 {
    u32::try_from(bytes.div_ceil(BYTES_PER_TOKEN)).unwrap_or(u32::MAX)
}
