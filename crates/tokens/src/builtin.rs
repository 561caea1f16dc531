//! The tiny model compiled into this crate; its folder's README says how it was made.

use std::path::PathBuf;

use crate::Error;
use crate::files::{self, CONFIG, Files, TOKENIZER, TokenizerConfig};

const TOKENIZER_JSON: &[u8] = include_bytes!("../builtin/tokenizer.json");
const CONFIG_JSON: &[u8] = include_bytes!("../builtin/tokenizer_config.json");

/// Name and contents of the files of the built-in model, for a directory that other programs read.
pub fn builtin_dir_files() -> &'static [(&'static str, &'static [u8])] {
    &[(TOKENIZER, TOKENIZER_JSON), (CONFIG, CONFIG_JSON)]
}

pub(crate) fn files() -> Result<Files, Error> {
    let config_file = PathBuf::from("built-in").join(CONFIG);
    let config = serde_json::from_slice(CONFIG_JSON).map_err(|e| Error::file(&config_file, e))?;
    Ok(Files {
        tokenizer_file: PathBuf::from("built-in").join(TOKENIZER),
        tokenizer: TOKENIZER_JSON.to_vec(),
        config: TokenizerConfig::read(&config),
        templates: files::config_templates(&config_file, &config),
    })
}
