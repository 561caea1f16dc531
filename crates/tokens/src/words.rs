//! Tokens that are plain words, for generating text that encodes back to the ids it was made of.

use crate::tokenizer::Tokenizer;

/// Most words looked for.
const MAX_WORDS: usize = 4096;

/// Stands before the words: some tokenizers treat the start of a text in a special way.
const BEFORE: &str = "1";

/// Words tried together, joined in this order and in reverse.
const GROUP: usize = 16;

pub(crate) fn find(tokenizer: &Tokenizer) -> Vec<u32> {
    let mut words: Vec<(u32, String)> = Vec::new();
    for id in 0..tokenizer.vocab_size() {
        if words.len() == MAX_WORDS {
            break;
        }
        let Some(text) = tokenizer.token_of(id).as_deref().and_then(word) else { continue };
        let word = (id, text);
        // Twice, so that it also stands after itself.
        if encodes_back(tokenizer, &[word.clone(), word.clone()]) {
            words.push(word);
        }
    }
    let mut found = Vec::with_capacity(words.len());
    for group in words.chunks(GROUP) {
        let reversed: Vec<_> = group.iter().rev().cloned().collect();
        if encodes_back(tokenizer, group) && encodes_back(tokenizer, &reversed) {
            found.extend(group.iter().map(|(id, _)| *id));
        }
    }
    found
}

/// The text of a token that is a space and at least two ASCII letters, in the usual spellings.
fn word(token: &str) -> Option<String> {
    let letters = [' ', '\u{120}', '\u{2581}'].iter().find_map(|&s| token.strip_prefix(s))?;
    let plain = letters.len() > 1 && letters.bytes().all(|b| b.is_ascii_alphabetic());
    plain.then(|| format!(" {letters}"))
}

/// Whether the words, after something that is no word, encode to their ids and decode to their text.
fn encodes_back(tokenizer: &Tokenizer, words: &[(u32, String)]) -> bool {
    let text = words.iter().fold(BEFORE.to_owned(), |text, (_, word)| text + word);
    let (Ok(before), Ok(got)) = (tokenizer.encode(BEFORE, false), tokenizer.encode(&text, false))
    else {
        return false;
    };
    let ids = words.iter().map(|(id, _)| *id);
    got.iter().copied().eq(before.into_iter().chain(ids)) && tokenizer.decode(&got, false) == text
}
