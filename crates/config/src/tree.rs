//! What a layer said: a tree of values that each know where they were written.
//!
//! Invariant: merging never loses an origin. Numbers keep NaN and infinity, so that a check can
//! name them. What the keys mean is not known here.

use std::fmt;
use std::sync::Arc;

/// A value and where it was written.
#[derive(Clone, Debug)]
pub(crate) struct Node {
    pub(crate) value: Value,
    pub(crate) origin: Origin,
}

/// A value as YAML has them.
#[derive(Clone, Debug)]
pub(crate) enum Value {
    Null,
    Bool(bool),
    Int(i128),
    Float(f64),
    Text(String),
    List(Vec<Node>),
    Map(Vec<(String, Node)>),
}

/// Where a value was written.
#[derive(Clone, Debug)]
pub(crate) enum Origin {
    /// Nowhere: it was made on the way.
    Nowhere,
    /// In the configuration file.
    File { name: Arc<str>, line: u64, column: u64 },
    /// In an environment variable of this name.
    Variable(Arc<str>),
    /// By this flag.
    Flag(Arc<str>),
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Origin::Nowhere => Ok(()),
            Origin::File { name, line, column } => write!(f, "{name}:{line}:{column}"),
            Origin::Variable(name) => write!(f, "environment variable {name}"),
            Origin::Flag(flag) => write!(f, "flag {flag}"),
        }
    }
}

/// One step from a node to one of its parts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    Name(String),
    Index(usize),
}

/// The way from the root to a node: `models[0].workers[2].url`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Key(Vec<Step>);

impl Key {
    /// The root.
    pub(crate) fn root() -> Self {
        Key::default()
    }

    /// Reads `models[0].name` or `models.0.name`; `None` where a step is missing.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let mut steps = Vec::new();
        for part in text.split('.') {
            let mut pieces = part.split('[');
            let name = pieces.next().unwrap_or_default().trim();
            if name.is_empty() {
                return None;
            }
            steps.push(Step::from_text(name));
            for piece in pieces {
                steps.push(Step::Index(piece.strip_suffix(']')?.parse().ok()?));
            }
        }
        Some(Key(steps))
    }

    /// Reads the part of a variable's name after the prefix: `MODELS__0__NAME`.
    pub(crate) fn parse_variable(text: &str) -> Option<Self> {
        let steps: Vec<Step> =
            text.split("__").map(|part| Step::from_text(&part.to_lowercase())).collect();
        let complete = steps.iter().all(|s| !matches!(s, Step::Name(name) if name.is_empty()));
        complete.then_some(Key(steps))
    }

    pub(crate) fn name(&self, name: &str) -> Self {
        let mut key = self.clone();
        key.0.push(Step::Name(name.to_owned()));
        key
    }

    pub(crate) fn index(&self, index: usize) -> Self {
        let mut key = self.clone();
        key.0.push(Step::Index(index));
        key
    }
}

impl Step {
    fn from_text(text: &str) -> Self {
        text.parse().map_or_else(|_| Step::Name(text.to_owned()), Step::Index)
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, step) in self.0.iter().enumerate() {
            match step {
                Step::Name(name) if i == 0 => f.write_str(name)?,
                Step::Name(name) => write!(f, ".{name}")?,
                Step::Index(index) => write!(f, "[{index}]")?,
            }
        }
        Ok(())
    }
}

impl Node {
    /// A mapping without entries.
    pub(crate) fn empty() -> Self {
        Node { value: Value::Map(Vec::new()), origin: Origin::Nowhere }
    }

    /// The entry of this name, if this is a mapping that has it.
    pub(crate) fn get(&self, name: &str) -> Option<&Node> {
        match &self.value {
            Value::Map(entries) => entries.iter().find(|(k, _)| k == name).map(|(_, node)| node),
            _ => None,
        }
    }

    /// The entry of this name, to be changed.
    pub(crate) fn get_mut(&mut self, name: &str) -> Option<&mut Node> {
        match &mut self.value {
            Value::Map(entries) => entries.iter_mut().find(|(k, _)| k == name).map(|(_, n)| n),
            _ => None,
        }
    }

    /// The elements, none where this is no list.
    pub(crate) fn items_mut(&mut self) -> &mut [Node] {
        match &mut self.value {
            Value::List(items) => items,
            _ => &mut [],
        }
    }

    /// Where the value at `key` was written, or the innermost part of the way that exists.
    pub(crate) fn origin_of(&self, key: &Key) -> &Origin {
        let mut node = self;
        for step in &key.0 {
            let next = match (step, &node.value) {
                (Step::Name(name), _) => node.get(name),
                (Step::Index(index), Value::List(items)) => items.get(*index),
                (Step::Index(_), _) => None,
            };
            match next {
                Some(next) => node = next,
                None => break,
            }
        }
        &node.origin
    }

    /// Lays `over` on top: mappings entry by entry, anything else as a whole.
    pub(crate) fn merge(&mut self, over: Node) {
        let (Value::Map(entries), Value::Map(above)) = (&mut self.value, &over.value) else {
            *self = over;
            return;
        };
        for (name, node) in above {
            match entries.iter_mut().find(|(k, _)| k == name) {
                Some((_, below)) => below.merge(node.clone()),
                None => entries.push((name.clone(), node.clone())),
            }
        }
    }

    /// Lays `over` on the place at `key`, making mappings and lists on the way. A list grows by
    /// one element at a time; the number of its elements is the error otherwise.
    pub(crate) fn set(&mut self, key: &Key, over: Node) -> Result<(), usize> {
        let mut node = self;
        for step in &key.0 {
            node = match step {
                Step::Name(name) => node.entry(name).ok_or(0_usize)?,
                Step::Index(index) => node.element(*index)?,
            };
        }
        node.merge(over);
        Ok(())
    }

    fn entry(&mut self, name: &str) -> Option<&mut Node> {
        if !matches!(self.value, Value::Map(_)) {
            *self = Node::empty();
        }
        let Value::Map(entries) = &mut self.value else { return None };
        let at = entries.iter().position(|(k, _)| k == name).unwrap_or(entries.len());
        if at == entries.len() {
            let origin = Origin::Nowhere;
            entries.push((name.to_owned(), Node { value: Value::Null, origin }));
        }
        entries.get_mut(at).map(|(_, node)| node)
    }

    fn element(&mut self, index: usize) -> Result<&mut Node, usize> {
        if !matches!(self.value, Value::List(_)) {
            *self = Node { value: Value::List(Vec::new()), origin: Origin::Nowhere };
        }
        let Value::List(items) = &mut self.value else { return Err(0) };
        if index > items.len() {
            return Err(items.len());
        }
        if index == items.len() {
            items.push(Node { value: Value::Null, origin: Origin::Nowhere });
        }
        Ok(&mut items[index])
    }

    /// The tree for serde. NaN and infinity become null: the check has refused them before.
    pub(crate) fn to_json(&self) -> serde_json::Value {
        use serde_json::{Number, Value as Json};
        match &self.value {
            Value::Null => Json::Null,
            Value::Bool(b) => Json::Bool(*b),
            Value::Int(i) => Number::from_i128(*i).map_or(Json::Null, Json::Number),
            Value::Float(x) => Number::from_f64(*x).map_or(Json::Null, Json::Number),
            Value::Text(text) => Json::String(text.clone()),
            Value::List(items) => Json::Array(items.iter().map(Node::to_json).collect()),
            Value::Map(entries) => {
                Json::Object(entries.iter().map(|(k, n)| (k.clone(), n.to_json())).collect())
            }
        }
    }
}

/// The longest part of a text that a message repeats.
const SHOWN_CHARS: usize = 80;

/// The value as a message shows it: scalars in YAML's spelling, user and password of a URL hidden.
impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Value::Null => f.write_str("null"),
            Value::Bool(b) => write!(f, "{b}"),
            Value::Int(i) => write!(f, "{i}"),
            Value::Float(x) if x.is_nan() => f.write_str(".nan"),
            Value::Float(x) if x.is_infinite() => {
                f.write_str(if *x > 0.0 { ".inf" } else { "-.inf" })
            }
            Value::Float(x) => write!(f, "{x:?}"),
            Value::Text(text) => f.write_str(&quoted(text)),
            Value::List(_) => f.write_str("a list"),
            Value::Map(_) => f.write_str("a mapping"),
        }
    }
}

/// A text as messages show it: in quotes, cut to a readable length, without a URL's credentials.
pub(crate) fn quoted(text: &str) -> String {
    let mut shown = text.to_owned();
    if let (Some(scheme), Some(at)) = (text.find("://"), text.rfind('@'))
        && scheme + 3 < at
    {
        shown.replace_range(scheme + 3..at, "***");
    }
    if shown.chars().count() > SHOWN_CHARS {
        shown = shown.chars().take(SHOWN_CHARS).chain("...".chars()).collect();
    }
    format!("{shown:?}")
}
