//! What names a session: a header, the `user` field, or the first tokens of the prompt.

use std::hash::{DefaultHasher, Hash, Hasher};

use http::HeaderMap;
use pointsman_config::Session;
use pointsman_wire::dialect::Request;

use crate::prompt::Prompt;

/// The session of a request, as a number; `None` if it has none.
pub(crate) fn key(
    setting: &Session,
    head: &HeaderMap,
    request: &Request,
    prompt: &Prompt,
) -> Option<u64> {
    match setting {
        Session::Off => None,
        Session::Header(name) => head.get(name).map(|value| hash(&value.as_bytes())),
        Session::User => request.body().user().map(|user| hash(&user)),
        Session::Prefix { tokens } => {
            let [ids] = prompt.ids.as_slice() else { return None };
            ids.get(..usize::try_from(tokens.get()).ok()?).map(|prefix| hash(&prefix))
        }
    }
}

fn hash(value: &impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}
