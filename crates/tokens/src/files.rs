//! The files of a model directory, as transformers looks for them.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use minijinja::value::Value;
use tokenizers::AddedToken;

use crate::json::{self, member, members};
use crate::{Error, json::is_object};

pub(crate) const TOKENIZER: &str = "tokenizer.json";
pub(crate) const CONFIG: &str = "tokenizer_config.json";
const SPECIAL_TOKENS: &str = "special_tokens_map.json";
const TEMPLATE: &str = "chat_template.jinja";
const PROCESSOR_TEMPLATE: &str = "chat_template.json";
const MORE_TEMPLATES: &str = "additional_chat_templates";

/// Largest file that is read. The largest tokenizers have some 30 MB.
const MAX_FILE_BYTES: u64 = 256 << 20;

/// Most templates of one model.
const MAX_TEMPLATES: usize = 64;

/// Everything read from a model directory.
#[derive(Debug)]
pub(crate) struct Files {
    /// Where `tokenizer.json` is, for errors.
    pub(crate) tokenizer_file: PathBuf,
    pub(crate) tokenizer: Vec<u8>,
    pub(crate) config: TokenizerConfig,
    pub(crate) templates: Vec<Source>,
}

/// What `tokenizer_config.json` says.
#[derive(Debug, Default)]
pub(crate) struct TokenizerConfig {
    /// `bos_token` and the like: variables of the template.
    pub(crate) named_tokens: Vec<(String, String)>,
    /// `added_tokens_decoder`: its flags override those of `tokenizer.json`.
    pub(crate) added_tokens: Vec<AddedToken>,
    /// Tokens with a role; special if `tokenizer.json` has them only as plain vocabulary.
    pub(crate) special_tokens: Vec<AddedToken>,
    /// Special tokens in a text are split like any text.
    pub(crate) split_special_tokens: bool,
}

/// A template's text.
#[derive(Debug)]
pub(crate) struct Source {
    /// `default`, `tool_use`, ... or [`Source::PROCESSOR`].
    pub(crate) name: String,
    pub(crate) file: PathBuf,
    pub(crate) text: String,
}

impl Source {
    pub(crate) const DEFAULT: &'static str = "default";
    pub(crate) const TOOL_USE: &'static str = "tool_use";
    /// A multimodal processor's template: used for requests without tools.
    pub(crate) const PROCESSOR: &'static str = "\0processor";
}

impl Files {
    pub(crate) fn read(dir: &Path) -> Result<Files, Error> {
        let tokenizer_file = dir.join(TOKENIZER);
        let tokenizer = read(&tokenizer_file)?;
        let config_file = dir.join(CONFIG);
        let raw = read_optional(&config_file)?;
        let mut templates = Vec::new();
        let mut config = TokenizerConfig::default();
        if let Some(raw) = raw {
            let value = parse(&config_file, &raw)?;
            config = TokenizerConfig::read(&value);
            templates = config_templates(&config_file, &value);
            let legacy = dir.join(SPECIAL_TOKENS);
            if member(&value, "added_tokens_decoder").is_none()
                && let Some(raw) = read_optional(&legacy)?
            {
                config.named_tokens.extend(named_tokens(&parse(&legacy, &raw)?));
            }
        }
        let own = template_files(dir)?;
        if !own.is_empty() {
            templates = own;
        }
        let processor = dir.join(PROCESSOR_TEMPLATE);
        if let Some(raw) = read_optional(&processor)? {
            let value = parse(&processor, &raw)?;
            if let Some(text) = member(&value, "chat_template") {
                let text = text.to_string();
                templates.push(Source { name: Source::PROCESSOR.into(), file: processor, text });
            }
        }
        Ok(Files { tokenizer_file, tokenizer, config, templates })
    }
}

impl TokenizerConfig {
    pub(crate) fn read(value: &Value) -> TokenizerConfig {
        let named_tokens = named_tokens(value);
        let mut added_tokens = Vec::new();
        if let Some(decoder) = member(value, "added_tokens_decoder") {
            let mut tokens = members(&decoder);
            tokens.sort_by_key(|(id, _)| id.parse::<u32>().unwrap_or(u32::MAX));
            added_tokens.extend(tokens.iter().filter_map(|(_, t)| added_token(t)));
        }
        let mut special_tokens = Vec::new();
        let extra = ["extra_special_tokens", "additional_special_tokens"];
        let extra = extra.iter().find_map(|key| member(value, key));
        let extra = extra.and_then(|v| json::items(&v).map(Iterator::collect::<Vec<_>>));
        for token in extra.unwrap_or_default() {
            let token = match token.as_str() {
                Some(content) => Some(AddedToken::from(content, true)),
                None => added_token(&token),
            };
            special_tokens.extend(token);
        }
        for (_, content) in &named_tokens {
            special_tokens.push(AddedToken::from(content.as_str(), true));
        }
        let split = member(value, "split_special_tokens").is_some_and(|v| v.is_true());
        TokenizerConfig { named_tokens, added_tokens, special_tokens, split_special_tokens: split }
    }
}

/// `*_token` members: strings, or objects with a `content`.
fn named_tokens(value: &Value) -> Vec<(String, String)> {
    let mut found = Vec::new();
    for (key, token) in members(value) {
        if !key.ends_with("_token") {
            continue;
        }
        let content = if is_object(&token) { member(&token, "content") } else { Some(token) };
        if let Some(content) = content.as_ref().and_then(Value::as_str) {
            found.push((key, content.to_owned()));
        }
    }
    found
}

fn added_token(value: &Value) -> Option<AddedToken> {
    let content = member(value, "content")?;
    let flag = |key| member(value, key).map(|v| v.is_true());
    let special = flag("special").unwrap_or(false);
    Some(
        AddedToken::from(content.as_str()?, special)
            .lstrip(flag("lstrip").unwrap_or(false))
            .rstrip(flag("rstrip").unwrap_or(false))
            .single_word(flag("single_word").unwrap_or(false))
            .normalized(flag("normalized").unwrap_or(!special)),
    )
}

pub(crate) fn config_templates(file: &Path, config: &Value) -> Vec<Source> {
    let Some(template) = member(config, "chat_template") else { return Vec::new() };
    let source =
        |name: &str, text: &str| Source { name: name.into(), file: file.into(), text: text.into() };
    if let Some(text) = template.as_str() {
        return vec![source(Source::DEFAULT, text)];
    }
    let Some(list) = json::items(&template) else { return Vec::new() };
    list.take(MAX_TEMPLATES)
        .filter_map(|t| {
            let (name, text) = (member(&t, "name")?, member(&t, "template")?);
            Some(source(name.as_str()?, text.as_str()?))
        })
        .collect()
}

fn template_files(dir: &Path) -> Result<Vec<Source>, Error> {
    let mut found = Vec::new();
    let file = dir.join(TEMPLATE);
    if let Some(raw) = read_optional(&file)? {
        found.push(source_file(Source::DEFAULT, file, raw)?);
    }
    let Ok(more) = std::fs::read_dir(dir.join(MORE_TEMPLATES)) else { return Ok(found) };
    for entry in more.filter_map(Result::ok).take(MAX_TEMPLATES) {
        let file = entry.path();
        let name = file.file_name().and_then(|n| n.to_str()).unwrap_or_default().to_owned();
        if let Some(name) = name.strip_suffix(".jinja") {
            let raw = read(&file)?;
            found.push(source_file(name, file, raw)?);
        }
    }
    Ok(found)
}

fn source_file(name: &str, file: PathBuf, raw: Vec<u8>) -> Result<Source, Error> {
    match String::from_utf8(raw) {
        // Python opens text files with universal newlines.
        Ok(text) => Ok(Source {
            name: name.to_owned(),
            file,
            text: text.replace("\r\n", "\n").replace('\r', "\n"),
        }),
        Err(e) => Err(Error::file(&file, e)),
    }
}

fn parse(file: &Path, raw: &[u8]) -> Result<Value, Error> {
    let value: Value = serde_json::from_slice(raw).map_err(|e| Error::file(file, e))?;
    if is_object(&value) { Ok(value) } else { Err(Error::file(file, "must be a JSON object")) }
}

fn read(file: &Path) -> Result<Vec<u8>, Error> {
    let failed = |source| Error::Read { file: file.to_owned(), source };
    let len = std::fs::metadata(file).map_err(failed)?.len();
    if len > MAX_FILE_BYTES {
        return Err(Error::file(file, format!("is larger than {MAX_FILE_BYTES} bytes")));
    }
    std::fs::read(file).map_err(failed)
}

fn read_optional(file: &Path) -> Result<Option<Vec<u8>>, Error> {
    match read(file) {
        Err(Error::Read { source, .. }) if source.kind() == ErrorKind::NotFound => Ok(None),
        other => other.map(Some),
    }
}
