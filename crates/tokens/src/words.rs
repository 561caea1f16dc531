//! Tokens that are plain words, for generating text that encodes back to the ids it was made of.

use crate::tokenizer::Tokenizer;

/// Most words looked for.
const MAX_WORDS: usize = 4096;

/// Words tried together, joined in this order and in reverse.
const GROUP: usize = 16;

pub(crate) fn find(tokenizer: &Tokenizer) -> Vec<u32> {
    let mut words: Vec<(u32, String)> = Vec::new();
    for id in 0..tokenizer.vocab_size() {
        if words.len() == MAX_WORDS {
            break;
        }
        let Some(text) = tokenizer.token_of(id).as_deref().and_then(word) else { continue };
        // Twice, so that it also stands after itself.
        let twice = tokenizer.encode(&format!("{text}{text}"), false).unwrap_or_default();
        if twice == [id, id]
            && tokenizer.decode(&[id, id], true).trim_start()
                == format!("{text}{text}").trim_start()
        {
            words.push((id, text));
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

fn encodes_back(tokenizer: &Tokenizer, words: &[(u32, String)]) -> bool {
    let text: String = words.iter().map(|(_, text)| text.as_str()).collect();
    let ids = words.iter().map(|(id, _)| *id);
    tokenizer.encode(&text, false).is_ok_and(|got| got.into_iter().eq(ids))
}
