//! One model's tokenizer, chat template and prefix cache.

use std::path::Path;
use std::sync::{Arc, OnceLock};

use crate::cache::Cache;
use crate::cuts::Cuts;
use crate::files::{Files, TokenizerConfig};
use crate::templates::Templates;
use crate::tokenizer::Tokenizer;
use crate::{Chat, Encoded, Error, Partial, builtin, bytes_estimate, words};

/// Bounds of the prefix cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheLimits {
    /// Most bytes that cached text and ids may take; 0 turns the cache off.
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
    /// Pieces of text held.
    pub entries: u64,
    /// Bytes held.
    pub bytes: u64,
    /// Tokens taken from the cache.
    pub hit_tokens: u64,
    /// Tokens computed.
    pub computed_tokens: u64,
    /// Pieces dropped to stay within the limits.
    pub evicted: u64,
}

/// Tokenizer, chat template and prefix cache of one model.
#[derive(Debug)]
pub struct Model {
    tokenizer: Tokenizer,
    config: TokenizerConfig,
    templates: Templates,
    cache: Option<(Cuts, Cache)>,
    words: OnceLock<Vec<u32>>,
}

impl Model {
    /// Reads a model directory: `tokenizer.json`, and if there `tokenizer_config.json`,
    /// `special_tokens_map.json`, `chat_template.jinja`, `chat_template.json` and
    /// `additional_chat_templates/`.
    ///
    /// A chat template that does not compile is no error here, as prompts can still be encoded: see
    /// [`Model::chat_template_problem`].
    pub fn from_dir(dir: &Path, limits: CacheLimits) -> Result<Model, Error> {
        Model::from_files(Files::read(dir)?, limits)
    }

    /// The tiny model compiled into this crate.
    pub fn builtin(limits: CacheLimits) -> Result<Model, Error> {
        Model::from_files(builtin::files()?, limits)
    }

    fn from_files(files: Files, limits: CacheLimits) -> Result<Model, Error> {
        let tokenizer = Tokenizer::load(&files.tokenizer_file, &files.tokenizer, &files.config)?;
        let cuts = if limits.bytes == 0 { None } else { Cuts::new(&tokenizer) };
        Ok(Model {
            tokenizer,
            templates: Templates::compile(&files.templates),
            config: files.config,
            cache: cuts.map(|cuts| (cuts, Cache::new(limits))),
            words: OnceLock::new(),
        })
    }

    /// Ids of a plain prompt. `add_special_tokens` is the request's field; `None` means the
    /// engine's default for completions, true.
    pub fn encode_prompt(
        &self,
        text: &str,
        add_special_tokens: Option<bool>,
    ) -> Result<Encoded, Error> {
        self.encode_text(text, add_special_tokens.unwrap_or(true))
    }

    /// Ids of a chat: the template's text, encoded.
    pub fn encode_chat(&self, chat: &Chat<'_>) -> Result<Encoded, Error> {
        let rendered = self.templates.render(chat, &self.config)?;
        match rendered.partial {
            None => self.encode_text(&rendered.text, chat.add_special_tokens),
            Some((partial, end)) => {
                self.encode_until(&rendered.text, end, partial, chat.add_special_tokens)
            }
        }
    }

    /// The text that the template makes of a chat.
    pub fn render_chat(&self, chat: &Chat<'_>) -> Result<String, Error> {
        Ok(self.templates.render(chat, &self.config)?.text)
    }

    fn encode_text(&self, text: &str, add_special_tokens: bool) -> Result<Encoded, Error> {
        let around =
            if add_special_tokens { self.tokenizer.around() } else { Some((&[][..], &[][..])) };
        let Some((before, after)) = around else {
            let ids = self.tokenizer.encode(text, add_special_tokens)?;
            return Ok(Encoded { ids: ids.into(), from_cache: 0, partial: None });
        };
        let mut ids = Vec::with_capacity(text.len() / 3 + before.len() + after.len());
        ids.extend_from_slice(before);
        let mut held = 0;
        match &self.cache {
            None => ids.extend(self.tokenizer.encode(text, false)?),
            Some((cuts, cache)) => {
                for piece in cuts.pieces(text) {
                    held += cache.append(piece, &mut ids, |t| self.tokenizer.encode(t, false))?;
                }
            }
        }
        ids.extend_from_slice(after);
        let from_cache = u32::try_from(held).unwrap_or(u32::MAX);
        Ok(Encoded { ids: Arc::from(ids), from_cache, partial: None })
    }

    /// Ids of `text` up to byte `end`, as far as they do not depend on what follows.
    fn encode_until(
        &self,
        text: &str,
        end: usize,
        mut partial: Partial,
        add_special_tokens: bool,
    ) -> Result<Encoded, Error> {
        let mut ids = Vec::new();
        if add_special_tokens {
            let Some((before, _)) = self.tokenizer.around() else {
                return Err(Error::Tokenizer("special tokens are not put around a text".into()));
            };
            ids.extend_from_slice(before);
        }
        let mut start = 0;
        let mut held = 0;
        if let Some((cuts, cache)) = &self.cache {
            for piece in cuts.pieces(text) {
                if start + piece.len() > end {
                    break;
                }
                held += cache.append(piece, &mut ids, |t| self.tokenizer.encode(t, false))?;
                start += piece.len();
            }
        }
        ids.extend(self.tokenizer.encode_until(&text[start..], end - start)?);
        partial.text_tokens = bytes_estimate(text.len() - end);
        let from_cache = u32::try_from(held).unwrap_or(u32::MAX);
        Ok(Encoded { ids: ids.into(), from_cache, partial: Some(partial) })
    }

    /// Text of ids; an unknown id gives nothing. `skip_special_tokens` as in the API (engines
    /// default to true).
    pub fn decode(&self, ids: &[u32], skip_special_tokens: bool) -> String {
        self.tokenizer.decode(ids, skip_special_tokens)
    }

    /// One more than the largest id, unless the vocabulary has gaps.
    pub fn vocab_size(&self) -> u32 {
        self.tokenizer.vocab_size()
    }

    /// Ids of plain words: the text of each is a space and letters, and re-encodes to that one id
    /// wherever it stands after other such words. Found at the first call.
    pub fn plain_words(&self) -> &[u32] {
        self.words.get_or_init(|| words::find(&self.tokenizer))
    }

    /// The id of the end-of-sequence token, if the model names one.
    pub fn eos_id(&self) -> Option<u32> {
        let (_, token) = self.config.named_tokens.iter().find(|(name, _)| name == "eos_token")?;
        self.tokenizer.id_of(token)
    }

    /// Why this model's texts are encoded by the slow library, which takes some hundred times as
    /// long, if so. Texts with rare or recent characters always are.
    pub fn slow_because(&self) -> Option<&str> {
        self.tokenizer.slow_because()
    }

    /// Whether chats can be encoded.
    pub fn has_chat_template(&self) -> bool {
        self.templates.any()
    }

    /// Why a chat template of this model cannot be used, if so.
    pub fn chat_template_problem(&self) -> Option<&Error> {
        self.templates.problem()
    }

    /// What the prefix cache holds and did.
    pub fn cache_stats(&self) -> CacheStats {
        self.cache.as_ref().map(|(_, cache)| cache.stats()).unwrap_or_default()
    }
}
