//! One model's tokenizer, chat template and prefix cache.

use std::path::Path;

use crate::{Chat, Encoded, Error};

/// Bounds of the prefix cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheLimits {
    /// Most bytes that cached prefixes may take; 0 turns the cache off.
    pub bytes: usize,
}

impl Default for CacheLimits {
    fn default() -> Self {
        CacheLimits { bytes: 64 << 20 }
    }
}

/// What the prefix cache holds and did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheStats {
    /// Whether this tokenizer allows exact cuts and the limits are not zero.
    pub enabled: bool,
    /// Prefixes held.
    pub entries: u64,
    /// Bytes held.
    pub bytes: u64,
    /// Tokens taken from the cache.
    pub hit_tokens: u64,
    /// Tokens computed.
    pub computed_tokens: u64,
    /// Prefixes dropped to stay within the limits.
    pub evicted: u64,
}

/// Tokenizer, chat template and prefix cache of one model.
#[derive(Debug)]
pub struct Model {
    words: Vec<u32>,
}

impl Model {
    /// Reads `tokenizer.json`, `tokenizer_config.json` and, if there, `chat_template.jinja`.
    pub fn from_dir(dir: &Path, _limits: CacheLimits) -> Result<Model, Error> {
        let file = dir.join("tokenizer.json");
        std::fs::metadata(&file).map_err(|source| Error::Read { file, source })?;
        Ok(Model { words: Vec::new() })
    }

    /// The tiny model compiled into this crate.
    pub fn builtin(_limits: CacheLimits) -> Result<Model, Error> {
        Ok(Model { words: (0..256).collect() })
    }

    /// Ids of a plain prompt. `add_special_tokens` is the request's field; `None` means the
    /// engine's default for completions, true.
    pub fn encode_prompt(
        &self,
        text: &str,
        _add_special_tokens: Option<bool>,
    ) -> Result<Encoded, Error> {
        let ids = text.bytes().map(u32::from).collect();
        Ok(Encoded { ids, from_cache: 0, partial: None })
    }

    /// Ids of a chat: the template's text, encoded.
    pub fn encode_chat(&self, chat: &Chat<'_>) -> Result<Encoded, Error> {
        self.encode_prompt(&self.render_chat(chat)?, Some(chat.add_special_tokens))
    }

    /// The text that the template makes of a chat.
    pub fn render_chat(&self, chat: &Chat<'_>) -> Result<String, Error> {
        Ok(String::from_utf8_lossy(chat.messages).into_owned())
    }

    /// Text of ids; an unknown id gives nothing. `skip_special_tokens` as in the API (engines
    /// default to true).
    pub fn decode(&self, ids: &[u32], _skip_special_tokens: bool) -> String {
        let bytes: Vec<u8> = ids.iter().filter_map(|&id| u8::try_from(id).ok()).collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// One more than the largest id.
    pub fn vocab_size(&self) -> u32 {
        256
    }

    /// Ids of plain words: the text of each is a space and letters, and re-encodes to that one id
    /// wherever it stands after other such words. Found at the first call.
    pub fn plain_words(&self) -> &[u32] {
        &self.words
    }

    /// The id of the end-of-sequence token, if the model names one.
    pub fn eos_id(&self) -> Option<u32> {
        None
    }

    /// Whether chats can be encoded.
    pub fn has_chat_template(&self) -> bool {
        true
    }

    /// What the prefix cache holds and did.
    pub fn cache_stats(&self) -> CacheStats {
        CacheStats::default()
    }
}

/// Name and contents of the files of the built-in model, for a directory that other programs read.
pub fn builtin_dir_files() -> &'static [(&'static str, &'static [u8])] {
    &[]
}
