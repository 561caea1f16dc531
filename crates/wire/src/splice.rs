//! Sets and removes top-level members of a body; every byte that is not part of an edited member
//! (or of the separator before one) stays as the client sent it.

use std::borrow::Cow;

use bytes::Bytes;

use crate::body::Body;
use crate::json::{self, Member};

/// Edits of top-level members, applied together. Of several edits of one member the last counts.
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
        self.put(name, Some(json.into()))
    }

    /// Removes every occurrence of a member.
    pub fn remove(&mut self, name: &'a str) -> &mut Self {
        self.put(name, None)
    }

    fn put(&mut self, name: &'a str, value: Option<Cow<'a, str>>) -> &mut Self {
        match self.edits.iter_mut().find(|(known, _)| *known == name) {
            Some(edit) => edit.1 = value,
            None => self.edits.push((name, value)),
        }
        self
    }

    /// The edited bytes; the client's own, uncopied, if nothing changes.
    pub fn apply(&self, body: &Body) -> Bytes {
        let text = body.as_str();
        let members = body.members();
        // Which edit each member meets, and the last member that each edit meets.
        let mut last: Vec<Option<usize>> = vec![None; self.edits.len()];
        let mut met: Vec<Option<usize>> = Vec::with_capacity(members.len());
        for (index, member) in members.iter().enumerate() {
            let name = member.name(text);
            let edit = self.edits.iter().position(|(edited, _)| *edited == name);
            if let Some(last) = edit.and_then(|edit| last.get_mut(edit)) {
                *last = Some(index);
            }
            met.push(edit);
        }
        let appended = || self.edits.iter().zip(&last).filter(|(_, last)| last.is_none());
        let appends = appended().any(|((_, value), _)| value.is_some());
        if !appends && met.iter().all(Option::is_none) {
            return body.bytes().clone();
        }

        let added: usize =
            self.edits.iter().map(|(name, value)| cost(name, value.as_deref())).sum();
        let mut out = Splice::start(text, members, added);
        for (index, (member, edit)) in members.iter().zip(met).enumerate() {
            let fate = edit.and_then(|edit| Some((self.edits.get(edit)?, last.get(edit)?)));
            match fate {
                None => out.keep(member, None),
                Some(((_, Some(value)), last)) if *last == Some(index) => {
                    out.keep(member, Some(value));
                }
                Some(_) => out.skip(member),
            }
        }
        for ((name, value), _) in appended() {
            if let Some(value) = value {
                out.append(name, value);
            }
        }
        out.finish()
    }
}

/// What a member costs that is appended: quotes, a colon, a comma.
fn cost(name: &str, value: Option<&str>) -> usize {
    value.map_or(0, |value| name.len() + value.len() + 4)
}

/// The edited text as it grows.
struct Splice<'t> {
    text: &'t str,
    out: String,
    /// Where the text goes on that is not written or skipped yet.
    at: usize,
    /// A member was written.
    any: bool,
}

impl<'t> Splice<'t> {
    /// With everything up to the first member, or just behind the brace.
    fn start(text: &'t str, members: &[Member], added: usize) -> Splice<'t> {
        let at = members.first().map_or_else(
            || text.find('{').map_or(0, |brace| brace + 1),
            |first| first.key.start.saturating_sub(1),
        );
        let mut out = String::with_capacity(text.len() + added);
        out.push_str(text.get(..at).unwrap_or_default());
        Splice { text, out, at, any: false }
    }

    /// A member, with the separator before it unless it is the first that is kept, and with
    /// another value if one is given.
    fn keep(&mut self, member: &Member, value: Option<&str>) {
        let start = member.key.start.saturating_sub(1);
        let from = if self.any { self.at } else { start };
        let to = if value.is_some() { member.value.start } else { member.value.end };
        self.out.push_str(self.text.get(from..to).unwrap_or_default());
        self.out.push_str(value.unwrap_or_default());
        self.skip(member);
        self.any = true;
    }

    fn skip(&mut self, member: &Member) {
        self.at = member.value.end;
    }

    fn append(&mut self, name: &str, value: &str) {
        if self.any {
            self.out.push(',');
        }
        self.any = true;
        self.out.push_str(&json::quote(name));
        self.out.push(':');
        self.out.push_str(value);
    }

    fn finish(mut self) -> Bytes {
        self.out.push_str(self.text.get(self.at..).unwrap_or_default());
        self.out.into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::body::Limits;
    use proptest::prelude::*;
    use serde_json::{Map, Value};

    fn apply(text: &str, edit: impl FnOnce(&mut Edit<'_>)) -> String {
        let body = Body::parse(text.to_owned().into(), &Limits::default()).unwrap();
        let mut edits = Edit::new();
        edit(&mut edits);
        String::from_utf8(edits.apply(&body).to_vec()).unwrap()
    }

    #[test]
    fn untouched_bytes_survive_exactly() {
        let text = "\n{ \"z\" : 1.0e0 ,\t\"a\":-0.10, \"s\":\"\\u00e9\\/\", \"big\":123456789012345678901234567890, \"a\":2 } ";
        assert_eq!(
            apply(text, |edit| {
                edit.set("new", "{}");
            }),
            text.replace(" } ", ",\"new\":{} } ").replace(" ,\"new", ",\"new")
        );
        assert_eq!(
            apply(text, |edit| {
                edit.remove("big").set("z", "7");
            }),
            "\n{ \"z\" : 7 ,\t\"a\":-0.10, \"s\":\"\\u00e9\\/\", \"a\":2 } "
        );
    }

    #[test]
    fn without_a_change_the_bytes_are_not_copied() {
        let bytes = Bytes::from_static(b"{\"a\":1}");
        let body = Body::parse(bytes.clone(), &Limits::default()).unwrap();
        let edited = Edit::new().remove("b").apply(&body);
        assert_eq!(edited.as_ptr(), bytes.as_ptr());
    }

    #[test]
    fn every_spelling_and_every_copy_of_a_member_goes() {
        let text = r#"{"a":1,"kv_transfer_p\u0061rams":{},"b":2,"kv_transfer_params":null}"#;
        let removed = apply(text, |edit| {
            edit.remove("kv_transfer_params");
        });
        assert_eq!(removed, r#"{"a":1,"b":2}"#);
        let set = apply(text, |edit| {
            edit.set("kv_transfer_params", "7");
        });
        assert_eq!(set, r#"{"a":1,"b":2,"kv_transfer_params":7}"#);
    }

    #[test]
    fn first_last_and_only_members_can_go() {
        let removed = |text: &str, name: &'static str| {
            apply(text, |edit| {
                edit.remove(name);
            })
        };
        assert_eq!(removed("{\"a\":1 , \"b\":2}", "a"), "{\"b\":2}");
        assert_eq!(removed("{\"a\":1 , \"b\":2}", "b"), "{\"a\":1}");
        assert_eq!(removed("{ \"a\":1 }", "a"), "{  }");
        assert_eq!(
            apply("{ }", |edit| {
                edit.set("a", "1").set("b", "2");
            }),
            "{\"a\":1,\"b\":2 }"
        );
    }

    fn member() -> impl Strategy<Value = (String, String)> {
        let key = prop_oneof![
            Just("\"a\"".to_owned()),
            Just("\"\\u0061\"".to_owned()),
            Just("\"max_tokens\"".to_owned()),
            Just("\"x\\n\"".to_owned()),
            "[b-e]{1,3}".prop_map(|key| format!("\"{key}\"")),
        ];
        let value = prop_oneof![
            Just("1.50".to_owned()),
            Just("-0".to_owned()),
            Just("1E+2".to_owned()),
            Just("99999999999999999999".to_owned()),
            Just("\"}\\\\\\\",{é\"".to_owned()),
            Just("[ 1, {\"a\" :2} ]".to_owned()),
            Just("{ \"max_tokens\": null}".to_owned()),
            Just("true".to_owned()),
        ];
        (key, value, "[ \n]{0,2}", "[ \t]{0,2}")
            .prop_map(|(key, value, a, b)| (key.clone(), format!("{key}{a}:{b}{value}")))
    }

    fn edits() -> impl Strategy<Value = Vec<(&'static str, Option<&'static str>)>> {
        let name = prop::sample::select(vec!["a", "b", "max_tokens", "x\n", "new", "q\"é"]);
        let value = prop::sample::select(vec![None, Some("1"), Some("{\"k\":[]}"), Some("\"t\"")]);
        prop::collection::vec((name, value), 0..5)
    }

    proptest! {
        #[test]
        fn an_edit_of_the_text_equals_an_edit_of_the_value(
            members in prop::collection::vec((member(), "[ \r]{0,2}", "[ \n]{0,2}"), 0..8),
            edits in edits(),
            outer in "[ \t]{0,2}",
        ) {
            let inside: Vec<String> =
                members.iter().map(|((_, text), a, b)| format!("{a}{text}{b}")).collect();
            let text = format!("{outer}{{{}}}{outer}", inside.join(","));
            let edited = apply(&text, |edit| {
                for (name, value) in &edits {
                    match value {
                        Some(value) => edit.set(name, *value),
                        None => edit.remove(name),
                    };
                }
            });

            let mut expected: Map<String, Value> = serde_json::from_str(&text).unwrap();
            for (name, value) in &edits {
                match value {
                    Some(value) => expected.insert((*name).into(), serde_json::from_str(value).unwrap()),
                    None => expected.remove(*name),
                };
            }
            let parsed: Map<String, Value> = serde_json::from_str(&edited).unwrap();
            prop_assert_eq!(parsed, expected);

            // Untouched members stand in their order, byte for byte.
            let mut rest = edited.as_str();
            for ((key, member), _, _) in &members {
                let name: String = serde_json::from_str(key).unwrap();
                if !edits.iter().any(|(edited, _)| *edited == name) {
                    let at = rest.find(member.as_str());
                    prop_assert!(at.is_some(), "{member} missing from {edited}");
                    rest = &rest[at.unwrap() + member.len()..];
                }
            }
            // And without edits of what is there nothing at all changes.
            if edits.is_empty() {
                prop_assert_eq!(edited, text);
            }
        }
    }
}
