//! Prompts from pieces: token ids for an engine with a tokenizer, block names for a simulation.

use super::Piece;
use crate::rng::mix;

/// The token ids of a prompt, all out of `vocabulary`. Equal pieces give equal tokens.
///
/// With plain words for a vocabulary, the prompt's text re-tokenises to these ids.
#[must_use]
pub fn tokens(pieces: &[Piece], vocabulary: &[u32]) -> Vec<u32> {
    let count = vocabulary.len() as u64;
    let of = |piece: &Piece| {
        let seed = mix(piece.hash_id ^ 0x7069_6563_6573);
        let draw = move |at| ((u128::from(mix(seed ^ at)) * u128::from(count)) >> 64) as usize;
        (0..u64::from(piece.tokens)).map(draw)
    };
    pieces.iter().flat_map(of).map(|at| vocabulary.get(at).copied().unwrap_or_default()).collect()
}

/// The names of a prompt's full blocks, without making its tokens: equal prefixes have equal names.
#[must_use]
pub fn block_names(pieces: &[Piece], block_size: u32) -> Box<[u64]> {
    let mut names = Vec::new();
    let (mut name, mut missing) = (mix(u64::from(block_size)), block_size);
    for piece in pieces {
        let mut at = 0;
        while at < piece.tokens && block_size > 0 {
            let taken = missing.min(piece.tokens - at);
            // What goes into a block: which part of which piece.
            let part = u64::from(at) << 32 | u64::from(taken);
            name = mix(name ^ mix(piece.hash_id ^ mix(part)));
            at += taken;
            missing -= taken;
            if missing == 0 {
                names.push(name);
                missing = block_size;
            }
        }
    }
    names.into()
}
