//! The environment as it was handed in, and the layer that its `POINTSMAN__` variables make.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::sync::Arc;

use crate::problem::Problem;
use crate::tree::{Key, Node, Origin};
use crate::yaml;

/// What the native variables begin with.
pub(crate) const PREFIX: &str = "POINTSMAN__";

/// Variables by name. Names that are not UTF-8 are nobody's that we know.
pub(crate) struct Environment(BTreeMap<String, OsString>);

impl Environment {
    pub(crate) fn new(variables: &[(OsString, OsString)]) -> Self {
        let named = |(name, value): &(OsString, OsString)| {
            name.to_str().map(|name| (name.to_owned(), value.clone()))
        };
        Environment(variables.iter().filter_map(named).collect())
    }

    pub(crate) fn has(&self, name: &str) -> bool {
        self.0.contains_key(name)
    }

    /// The text of a variable, if it is set. Empty and non-UTF-8 values are problems.
    pub(crate) fn text(&self, name: &str, problems: &mut Vec<Problem>) -> Option<&str> {
        let value = self.0.get(name)?;
        text(name, value).map_err(|problem| problems.push(problem)).ok()
    }

    /// Lays every native variable on the tree, parents before their parts.
    pub(crate) fn apply(&self, tree: &mut Node, problems: &mut Vec<Problem>) {
        for (name, value) in &self.0 {
            let Some(path) = name.strip_prefix(PREFIX) else { continue };
            if let Err(problem) = apply_one(name, path, value, tree) {
                problems.push(problem);
            }
        }
    }
}

fn apply_one(name: &str, path: &str, value: &OsStr, tree: &mut Node) -> Result<(), Problem> {
    let origin = Origin::Variable(Arc::from(name));
    let Some(key) = Key::parse_variable(path) else {
        let message = format!("{name} names no key; must be like {PREFIX}LIMITS__MAX_IN_FLIGHT");
        return Err(Problem::whole(message, ""));
    };
    let text = text(name, value)?;
    lay(tree, &key, text, &origin)
}

fn text<'v>(name: &str, value: &'v OsStr) -> Result<&'v str, Problem> {
    match value.to_str() {
        None => Err(Problem::whole(format!("{name} is not valid UTF-8"), "")),
        Some(text) if text.trim().is_empty() => {
            Err(Problem::whole(format!("{name} is empty; give it a value or unset it"), ""))
        }
        Some(text) => Ok(text),
    }
}

/// Lays one value, written as YAML, on the place at `key`.
pub(crate) fn lay(tree: &mut Node, key: &Key, text: &str, origin: &Origin) -> Result<(), Problem> {
    let node = yaml::parse_value(text, origin).map_err(|refused| {
        let shown = crate::tree::quoted(text);
        Problem::at(key, format!("{shown} cannot be read: {}", refused.message), origin)
    })?;
    tree.set(key, node).map_err(|len| {
        let message = format!("no such place; elements before it: {len}");
        Problem::at(key, message, origin)
    })
}
