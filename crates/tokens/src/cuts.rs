//! Where a text may be cut so that its pieces, encoded one by one, give the ids of the whole.
//!
//! The tokenizer first takes the added tokens that are not normalised out of the raw text, leftmost
//! and longest; what stands between them is normalised, split and encoded on its own. So a cut just
//! before such a token changes nothing: to its left no match could have reached over it, to its
//! right every piece begins with the token and with nothing else at offset 0 (some pre-tokenizers
//! treat the start of the text in a special way). Left out, because they look at what is beside
//! them: tokens that take whitespace on their left, and any tokenizer with single-word tokens.

use aho_corasick::{AhoCorasick, MatchKind};

use crate::tokenizer::Tokenizer;

/// Pieces are at least this long, except the last: short ones cost more to look up than they save.
/// As a cut depends only on the text before it, a growing text keeps its cuts.
const MIN_PIECE_BYTES: usize = 256;

/// Finds the cuts of a tokenizer's texts.
#[derive(Debug)]
pub(crate) struct Cuts {
    matcher: AhoCorasick,
    /// By pattern: whether the text may be cut before it.
    before: Vec<bool>,
    min_piece: usize,
}

impl Cuts {
    /// `None` when this tokenizer's texts cannot be cut.
    pub(crate) fn new(tokenizer: &Tokenizer) -> Option<Cuts> {
        if tokenizer.is_irregular() {
            return None;
        }
        let raw: Vec<_> = tokenizer.added_tokens().map(|(_, t)| t).collect();
        let raw: Vec<_> =
            raw.into_iter().filter(|t| !t.normalized && !t.content.is_empty()).collect();
        if raw.iter().any(|t| t.single_word) {
            return None;
        }
        let starts_blank = |text: &str| text.starts_with(char::is_whitespace);
        let before: Vec<bool> =
            raw.iter().map(|t| !t.lstrip && !starts_blank(&t.content)).collect();
        if !before.contains(&true) {
            return None;
        }
        let matcher = AhoCorasick::builder()
            .match_kind(MatchKind::LeftmostLongest)
            .build(raw.iter().map(|t| t.content.as_bytes()))
            .ok()?;
        Some(Cuts { matcher, before, min_piece: MIN_PIECE_BYTES })
    }

    /// The pieces of `text`, in order and without gaps.
    pub(crate) fn pieces<'t>(&self, text: &'t str) -> impl Iterator<Item = &'t str> {
        let mut start = 0;
        let mut matches = self.matcher.find_iter(text);
        let mut done = false;
        std::iter::from_fn(move || {
            if done {
                return None;
            }
            for m in matches.by_ref() {
                let cut = m.start();
                if self.before[m.pattern().as_usize()] && cut - start >= self.min_piece {
                    let piece = &text[start..cut];
                    start = cut;
                    return Some(piece);
                }
            }
            done = true;
            (start < text.len()).then(|| &text[start..])
        })
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use proptest::prelude::*;

    use super::*;
    use crate::files::Files;

    fn tokenizers() -> Vec<(Tokenizer, Cuts)> {
        let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/parity/models");
        let load = |name| {
            let files = Files::read(&models.join(name)).unwrap();
            let tokenizer =
                Tokenizer::load(&files.tokenizer_file, &files.tokenizer, &files.config).unwrap();
            let cuts = Cuts { min_piece: 1, ..Cuts::new(&tokenizer).unwrap() };
            (tokenizer, cuts)
        };
        ["bytes", "split", "sentence", "meta"].map(load).into()
    }

    fn text(tokens: Vec<String>) -> impl Strategy<Value = String> {
        let piece = prop_oneof![
            3 => prop::sample::select(tokens),
            2 => "[ a-zA-Z0-9\n\u{2581}<>|_\\[\\]/]{0,6}",
            1 => "[ \n\t\u{a0}]{1,3}",
            1 => "\\PC{0,4}",
        ];
        prop::collection::vec(piece, 0..12).prop_map(|p| p.concat())
    }

    #[test]
    fn a_text_cut_everywhere_it_may_be_has_the_ids_of_the_whole() {
        for (tokenizer, cuts) in tokenizers() {
            let tokens = tokenizer.added_tokens().map(|(_, t)| t.content.clone()).collect();
            let mut runner = proptest::test_runner::TestRunner::default();
            let result = runner.run(&text(tokens), |text| {
                let whole = tokenizer.encode(&text, false).unwrap();
                let pieces: Vec<&str> = cuts.pieces(&text).collect();
                let ids: Vec<u32> =
                    pieces.iter().flat_map(|p| tokenizer.encode(p, false).unwrap()).collect();
                prop_assert_eq!(pieces.concat(), text);
                prop_assert_eq!(ids, whole);
                Ok(())
            });
            result.unwrap();
        }
    }
}
