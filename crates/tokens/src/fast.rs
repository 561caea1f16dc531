//! The quick way to a byte-level BPE tokenizer's ids: the pipeline of the library's next version.
//!
//! Invariant: its ids are those of the tokenizer that it was made beside. It is given up for a
//! tokenizer with which it differs in any of a set of texts, and passes over texts with characters
//! that one of the two might not know yet (see [`is_settled`]). `None` means: ask the other one.

use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};

use tk_encode::pipeline::{EncodeOptions, Override, PipelineToken, PipelineTokenizer};
use tokenizers::models::ModelWrapper;
use tokenizers::{PreTokenizerWrapper, Tokenizer};

/// Most added tokens that are tried out; models reserve hundreds that differ in a number alone.
const MAX_TRIED_TOKENS: usize = 64;

/// What is tried out: all that pre-tokenizers and normalizers treat in a way of its own.
const PROBES: [&str; 12] = [
    "",
    "a",
    "Hello world, it's 12345678 o'clock; THEY'LL don't 'em I'VE.",
    "  two  spaces\tand tabs \t\t x   \n\n  \r\n\r\n lines \n\n\n",
    "func main() { write!(f, \"{}\", x[0] == y->z && !a::<b>()); } // 0xFF_u8 /* 1.5e-10 */",
    "{\"role\":\"user\",\"content\":[{\"type\":\"text\",\"n\":-12.50,\"ok\":true}]}\n",
    "camelCase HTTPServer XMLHttpRequest iPhone snake_case SCREAMING_CASE kebab-case/path//x.rs",
    "Der Bär läßt Ärger, déjà vu, naïve coöperation; e\u{301}a\u{323}\u{307} A\u{30a} \u{212b}",
    "\u{4f60}\u{597d}\u{ff0c}\u{4e16}\u{754c}\u{3002}\u{65e5}\u{672c}\u{8a9e}\u{306e}\u{30c6}\u{30ad}\u{30b9}\u{30c8} \u{d55c}\u{ad6d}\u{c5b4} 123\u{5e74}",
    "\u{41f}\u{440}\u{438}\u{432}\u{435}\u{442}, \u{3b3}\u{3b5}\u{3b9}\u{3ac} \u{5e9}\u{5dc}\u{5d5}\u{5dd} \u{645}\u{631}\u{62d}\u{628}\u{627} \u{661}\u{662}\u{663} \u{928}\u{92e}\u{938}\u{94d}\u{924}\u{947}",
    "\u{1f600}\u{1f469}\u{200d}\u{1f469}\u{200d}\u{1f467} \u{1f44d}\u{1f3fd}\u{2764}\u{fe0f} \u{1f1e9}\u{1f1ea} \u{2026}\u{2014}\u{201c}x\u{201d}\u{a0}\u{3000}y\u{bd}\u{b2}",
    "========================================aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa \
     0000000000000000000000000 ................................................ ///////////",
];

/// Characters that both ways treat alike, as first and last of each range: those whose properties
/// have been fixed for long. The library's old version knows fewer characters than its next one. Of
/// the scripts left out a text is encoded the slow way.
const SETTLED: [(char, char); 48] = [
    ('\0', '\u{17e}'),
    // Without the long s, which equals an s where case is ignored.
    ('\u{180}', '\u{377}'),
    ('\u{37a}', '\u{37f}'),
    ('\u{384}', '\u{527}'),
    ('\u{531}', '\u{556}'),
    ('\u{561}', '\u{587}'),
    ('\u{591}', '\u{5c7}'),
    ('\u{5d0}', '\u{5ea}'),
    ('\u{600}', '\u{603}'),
    ('\u{606}', '\u{61b}'),
    ('\u{61e}', '\u{6ff}'),
    ('\u{901}', '\u{939}'),
    ('\u{93c}', '\u{94d}'),
    ('\u{950}', '\u{954}'),
    ('\u{958}', '\u{972}'),
    ('\u{985}', '\u{9b9}'),
    ('\u{9bc}', '\u{9f1}'),
    ('\u{b82}', '\u{bfa}'),
    ('\u{e01}', '\u{e5b}'),
    ('\u{10d0}', '\u{10fa}'),
    ('\u{1100}', '\u{11ff}'),
    ('\u{1e00}', '\u{1f15}'),
    ('\u{1f18}', '\u{1ffe}'),
    ('\u{2000}', '\u{2064}'),
    ('\u{2070}', '\u{20b5}'),
    // Without the Kelvin sign, which equals a k where case is ignored.
    ('\u{2100}', '\u{2129}'),
    ('\u{212b}', '\u{2188}'),
    ('\u{2190}', '\u{23e7}'),
    ('\u{2460}', '\u{26ff}'),
    ('\u{2701}', '\u{2b4f}'),
    ('\u{3000}', '\u{303f}'),
    ('\u{3041}', '\u{3096}'),
    ('\u{3099}', '\u{30ff}'),
    ('\u{3105}', '\u{312c}'),
    ('\u{3131}', '\u{318e}'),
    ('\u{3200}', '\u{321e}'),
    ('\u{3220}', '\u{33ff}'),
    ('\u{4e00}', '\u{9fa5}'),
    ('\u{ac00}', '\u{d7a3}'),
    ('\u{f900}', '\u{fa2d}'),
    ('\u{fe00}', '\u{fe0f}'),
    ('\u{fe30}', '\u{fe4f}'),
    ('\u{ff01}', '\u{ffee}'),
    ('\u{fffd}', '\u{fffd}'),
    ('\u{1f1e6}', '\u{1f1ff}'),
    ('\u{1f300}', '\u{1f64f}'),
    ('\u{1f680}', '\u{1f6c5}'),
    ('\u{1f910}', '\u{1f9ff}'),
];

/// The quick tokenizer.
pub(crate) struct Fast {
    pipeline: PipelineTokenizer,
}

impl Fast {
    /// The quick tokenizer of `json`, a `tokenizer.json` of which `slow` was made; or why there is
    /// none.
    pub(crate) fn new(
        json: &str,
        slow: &Tokenizer,
        encode: impl Fn(&str) -> Option<Vec<u32>>,
    ) -> Result<Fast, String> {
        if !is_byte_level(slow) {
            return Err("it is no byte-level BPE".to_owned());
        }
        let build = || -> Result<PipelineTokenizer, String> {
            let canonical = tk_convert::canonicalize_str(json).map_err(|e| e.to_string())?;
            tk_serialize::from_json(&canonical).map_err(|e| e.to_string())
        };
        let built = catch_unwind(AssertUnwindSafe(build));
        let pipeline = built.map_err(|_| "its file is beyond the library".to_owned())??;
        let fast = Fast { pipeline };
        let tokens: BTreeSet<&str> = slow
            .get_added_vocabulary()
            .get_added_tokens_decoder()
            .values()
            .map(|token| token.content.as_str())
            .collect();
        let among = |token: &&str| format!("x {token}{token} y\n{token}\n z{token}");
        let tried = tokens.iter().take(MAX_TRIED_TOKENS).map(among);
        for text in PROBES.into_iter().map(str::to_owned).chain(tried) {
            match fast.run(&text) {
                None => return Err(format!("the quick way fails with {text:?}")),
                ids if ids != encode(&text) => return Err(format!("ids of {text:?} differ")),
                _same => {}
            }
        }
        Ok(fast)
    }

    /// The ids of `text`, no special tokens added, where they are sure to be right.
    pub(crate) fn encode(&self, text: &str) -> Option<Vec<u32>> {
        if is_settled(text) { self.run(text) } else { None }
    }

    fn run(&self, text: &str) -> Option<Vec<u32>> {
        let options = EncodeOptions {
            truncation: Override::Off,
            padding: Override::Off,
            ..EncodeOptions::no_specials()
        };
        let encode = || {
            let mut ids: Vec<PipelineToken> = Vec::with_capacity(text.len() / 3 + 1);
            self.pipeline.encode_into(text, &options, &mut ids).ok()?;
            Some(PipelineToken::cast_slice(&ids).to_vec())
        };
        catch_unwind(AssertUnwindSafe(encode)).ok()?
    }
}

/// The class of tokenizers that the quick way is for.
fn is_byte_level(slow: &Tokenizer) -> bool {
    let ModelWrapper::BPE(model) = slow.get_model() else { return false };
    let is = |step: &PreTokenizerWrapper| matches!(step, PreTokenizerWrapper::ByteLevel(_));
    let splits_bytes = match slow.get_pre_tokenizer() {
        Some(PreTokenizerWrapper::Sequence(steps)) => steps.as_ref().iter().any(is),
        Some(step) => is(step),
        None => false,
    };
    splits_bytes && !model.byte_fallback && model.dropout.is_none()
}

/// Whether all characters of a text are in [`SETTLED`].
fn is_settled(text: &str) -> bool {
    text.is_ascii() || text.chars().all(is_settled_char)
}

fn is_settled_char(c: char) -> bool {
    c.is_ascii() || {
        let after = SETTLED.partition_point(|(first, _)| *first <= c);
        after > 0 && SETTLED[after - 1].1 >= c
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::files::Files;
    use crate::tokenizer::Tokenizer;

    /// The small tokenizers that have a quick way.
    fn tokenizers() -> [Tokenizer; 2] {
        let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/parity/models");
        ["bytes", "split"].map(|name| {
            let files = Files::read(&models.join(name)).unwrap();
            let tokenizer =
                Tokenizer::load(&files.tokenizer_file, &files.tokenizer, &files.config).unwrap();
            assert_eq!(tokenizer.slow_because(), None, "{name}");
            tokenizer
        })
    }

    fn assert_same(tokenizer: &Tokenizer, text: &str) {
        let quick = tokenizer.fast().unwrap().encode(text);
        assert_eq!(quick, Some(tokenizer.encode_slowly(text, false).unwrap()), "{text:?}");
    }

    #[test]
    fn the_ranges_are_in_order_and_apart() {
        assert!(SETTLED.iter().all(|(first, last)| first <= last));
        assert!(SETTLED.windows(2).all(|pair| pair[0].1 < pair[1].0));
        assert!(is_settled("a\u{e9}\u{4f60}\u{1f600}"));
        assert!(!is_settled("\u{17f}") && !is_settled("\u{1adb}") && !is_settled("\u{325c5}"));
    }

    #[test]
    fn every_settled_character_has_the_same_ids_wherever_it_stands() {
        /// Of the scripts of thousands of characters that are all alike, one in so many.
        const STEP: usize = 97;
        let chars: Vec<char> = SETTLED
            .iter()
            .flat_map(|(first, last)| {
                let many = u32::from(*last) - u32::from(*first) > 4096;
                (*first..=*last).step_by(if many { STEP } else { 1 })
            })
            .collect();
        for tokenizer in tokenizers() {
            for some in chars.chunks(64) {
                let all = |c: &char| format!("x{c}y {c}{c}1{c}' {c}\u{301}\n{c}\u{5b0}{c}'s(a{c} ");
                let text: String = some.iter().map(all).collect();
                assert_same(&tokenizer, &text);
            }
        }
    }

    #[test]
    fn a_tokenizer_that_is_no_byte_level_bpe_has_no_quick_way() {
        let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/parity/models");
        for name in ["sentence", "meta"] {
            let files = Files::read(&models.join(name)).unwrap();
            let tokenizer =
                Tokenizer::load(&files.tokenizer_file, &files.tokenizer, &files.config).unwrap();
            assert_eq!(tokenizer.slow_because(), Some("it is no byte-level BPE"));
        }
    }

    #[test]
    fn a_quick_way_with_other_ids_is_given_up() {
        let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/parity/models");
        let json = std::fs::read_to_string(models.join("bytes/tokenizer.json")).unwrap();
        let other: tokenizers::Tokenizer = json.parse().unwrap();
        let wrong = |text: &str| {
            let mut ids = other.encode_fast(text, false).unwrap().get_ids().to_vec();
            if text.contains("camelCase") {
                ids.reverse();
            }
            Some(ids)
        };
        let reason = Fast::new(&json, &other, wrong).err().unwrap();
        assert!(reason.starts_with("ids of \"camelCase"), "{reason}");
    }
}
