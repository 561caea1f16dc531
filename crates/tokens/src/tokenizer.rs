//! The model's tokenizer: `tokenizer.json` as the Python package reads it.
//!
//! Truncation and padding of the file are off, as they are in the engines. Panics of the libraries
//! below (their regular expressions have limits) come out as errors. Not here: what is cached.

use std::borrow::Cow;
use std::collections::HashSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use tokenizers::models::ModelWrapper;
use tokenizers::{AddedToken, Tokenizer as Inner};

use crate::Error;
use crate::fast::Fast;
use crate::files::TokenizerConfig;

/// A loaded tokenizer.
pub(crate) struct Tokenizer {
    inner: Inner,
    /// The same ids, sooner; or why there is no such way.
    fast: Result<Fast, String>,
    /// Ids that the post-processor puts before and after a prompt, when it does just that.
    around: Option<(Vec<u32>, Vec<u32>)>,
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let slow = self.slow_because();
        f.debug_struct("Tokenizer").field("slow_because", &slow).finish_non_exhaustive()
    }
}

impl Tokenizer {
    /// Loads the text of `tokenizer.json`; `file` is what errors call it.
    pub(crate) fn load(
        file: &Path,
        bytes: &[u8],
        config: &TokenizerConfig,
    ) -> Result<Tokenizer, Error> {
        let load = || -> tokenizers::Result<(Inner, bool)> {
            let mut inner = Inner::from_bytes(bytes)?;
            let before = inner.get_added_vocabulary().get_added_tokens_decoder().clone();
            inner.with_truncation(None)?;
            inner.with_padding(None);
            inner.set_encode_special_tokens(config.split_special_tokens);
            inner.add_tokens(config.added_tokens.iter().cloned())?;
            let missing = missing_tokens(&inner, config);
            inner.add_tokens(missing)?;
            let as_in_file = before == *inner.get_added_vocabulary().get_added_tokens_decoder();
            Ok((inner, as_in_file))
        };
        let (inner, as_in_file) = guarded(load).map_err(|e| Error::file(file, e))?;
        let mut tokenizer = Tokenizer { inner, fast: Err(String::new()), around: None };
        tokenizer.fast = tokenizer.find_fast(bytes, as_in_file);
        tokenizer.around = tokenizer.find_around();
        Ok(tokenizer)
    }

    fn find_fast(&self, bytes: &[u8], as_in_file: bool) -> Result<Fast, String> {
        if self.is_irregular() {
            return Err("its special tokens are split, or its ids are random".to_owned());
        }
        let json = if as_in_file {
            std::str::from_utf8(bytes).map(Cow::Borrowed).map_err(|e| e.to_string())?
        } else {
            Cow::Owned(self.inner.to_string(false).map_err(|e| e.to_string())?)
        };
        Fast::new(&json, &self.inner, |text| self.encode_slowly(text, false).ok())
    }

    /// Why texts are encoded the slow way: some hundred times the quick one's time.
    pub(crate) fn slow_because(&self) -> Option<&str> {
        self.fast.as_ref().err().map(String::as_str)
    }

    pub(crate) fn encode(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>, Error> {
        let fast = self.fast.as_ref().ok().filter(|_| !add_special_tokens);
        match fast.and_then(|fast| fast.encode(text)) {
            Some(ids) => Ok(ids),
            None => self.encode_slowly(text, add_special_tokens),
        }
    }

    /// The ids that are always right.
    pub(crate) fn encode_slowly(
        &self,
        text: &str,
        add_special_tokens: bool,
    ) -> Result<Vec<u32>, Error> {
        let encoding = guarded(|| self.inner.encode_fast(text, add_special_tokens));
        Ok(encoding.map_err(Error::Tokenizer)?.get_ids().to_vec())
    }

    /// Ids of those tokens of `text` that end at or before byte `end`; no special tokens added.
    pub(crate) fn encode_until(&self, text: &str, end: usize) -> Result<Vec<u32>, Error> {
        let encoding = guarded(|| self.inner.encode(text, false)).map_err(Error::Tokenizer)?;
        let offsets = encoding.get_offsets();
        let count = offsets.iter().take_while(|(_, stop)| *stop <= end).count();
        Ok(encoding.get_ids()[..count].to_vec())
    }

    pub(crate) fn decode(&self, ids: &[u32], skip_special_tokens: bool) -> String {
        guarded(|| self.inner.decode(ids, skip_special_tokens)).unwrap_or_default()
    }

    /// One more than the largest id, unless the vocabulary has gaps.
    pub(crate) fn vocab_size(&self) -> u32 {
        let added = self.added_tokens().map(|(id, _)| id + 1).max().unwrap_or(0);
        let vocab = self.inner.get_vocab_size(false);
        u32::try_from(vocab).unwrap_or(u32::MAX).max(added)
    }

    pub(crate) fn id_of(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    pub(crate) fn token_of(&self, id: u32) -> Option<String> {
        self.inner.id_to_token(id)
    }

    /// Tokens matched in the text before anything else.
    pub(crate) fn added_tokens(&self) -> impl Iterator<Item = (u32, &AddedToken)> {
        self.inner.get_added_vocabulary().get_added_tokens_decoder().iter().map(|(id, t)| (*id, t))
    }

    /// What stands before and after a prompt encoded with special tokens. `None` when they are not
    /// simply put around it.
    pub(crate) fn around(&self) -> Option<(&[u32], &[u32])> {
        self.around.as_ref().map(|(a, b)| (a.as_slice(), b.as_slice()))
    }

    /// Whether encoding the same text twice may differ, or special tokens are not matched.
    pub(crate) fn is_irregular(&self) -> bool {
        let dropout = match self.inner.get_model() {
            ModelWrapper::BPE(bpe) => bpe.dropout.is_some(),
            _ => false,
        };
        dropout || self.inner.get_encode_special_tokens()
    }

    #[cfg(test)]
    pub(crate) fn fast(&self) -> Option<&Fast> {
        self.fast.as_ref().ok()
    }

    /// Tries texts of which none is the other's part, to tell the prompt from what is around it.
    fn find_around(&self) -> Option<(Vec<u32>, Vec<u32>)> {
        let mut found: Option<Vec<(Vec<u32>, Vec<u32>)>> = None;
        for text in ["a", "Hello world", "7 \u{e9}\n"] {
            let bare = self.encode_slowly(text, false).ok()?;
            let full = self.encode_slowly(text, true).ok()?;
            let here: Vec<_> = (0..=full.len().checked_sub(bare.len())?)
                .filter(|&at| full[at..at + bare.len()] == bare[..])
                .map(|at| (full[..at].to_vec(), full[at + bare.len()..].to_vec()))
                .collect();
            found = Some(match found {
                None => here,
                Some(before) => before.into_iter().filter(|f| here.contains(f)).collect(),
            });
        }
        found?.into_iter().next()
    }
}

/// Tokens with a role in `tokenizer_config.json` that are no added tokens yet.
fn missing_tokens(inner: &Inner, config: &TokenizerConfig) -> Vec<AddedToken> {
    let known = inner.get_added_vocabulary().get_added_tokens_decoder().values();
    let mut seen: HashSet<&str> = known.map(|t| t.content.as_str()).collect();
    config.special_tokens.iter().filter(|t| seen.insert(&t.content)).cloned().collect()
}

/// Runs `f`; a panic in it is an error.
fn guarded<T>(f: impl FnOnce() -> tokenizers::Result<T>) -> Result<T, String> {
    match catch_unwind(AssertUnwindSafe(f)) {
        Ok(result) => result.map_err(|e| e.to_string()),
        Err(panic) => {
            let text = panic.downcast_ref::<String>().map(String::as_str);
            let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
            Err(format!("failed inside: {}", text.unwrap_or("no reason given")))
        }
    }
}
