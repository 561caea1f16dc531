//! From sources to settings: read the layers, lay them on one another, check, resolve.

use std::path::PathBuf;
use std::sync::Arc;

use crate::aliases;
use crate::check::check;
use crate::environment::{Environment, lay};
use crate::problem::{Problem, Problems};
use crate::resolve;
use crate::schema;
use crate::settings::Settings;
use crate::tree::{Key, Node, Origin, Value};
use crate::written::{Policy, Written};
use crate::yaml;

/// Where settings are read from; each layer overrides the one before.
#[derive(Clone, Debug, Default)]
pub struct Sources {
    /// The configuration file, YAML or JSON.
    pub file: Option<File>,
    /// The environment, as from `std::env::vars_os`.
    pub env: Vec<(std::ffi::OsString, std::ffi::OsString)>,
    /// What flags said, in order.
    pub overrides: Vec<Override>,
}

/// A configuration file.
#[derive(Clone, Debug)]
pub enum File {
    /// On disk.
    Path(PathBuf),
    /// In memory, with a name for messages.
    Text {
        /// The name.
        name: String,
        /// The content.
        text: String,
    },
}

/// One setting given by a flag.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Override {
    /// The flag as people wrote it, for messages: `--port`.
    pub flag: String,
    /// The key's path: `limits.max_in_flight`, `models[0].name`.
    pub key: String,
    /// The value, as one YAML scalar or flow collection.
    pub value: String,
}

impl Override {
    /// Reads the argument of a `--set key.path=value`.
    pub fn parse(flag: &str, argument: &str) -> Result<Self, Problem> {
        let (key, value) = argument.split_once('=').ok_or_else(|| {
            let shown = crate::tree::quoted(argument);
            Problem::whole(
                format!("{shown} is not allowed; must be key=value"),
                format!("flag {flag}"),
            )
        })?;
        Ok(Override { flag: flag.to_owned(), key: key.to_owned(), value: value.to_owned() })
    }
}

/// What `load` hands out.
#[derive(Clone, Debug)]
pub struct Loaded {
    /// The settings.
    pub settings: Settings,
    /// Lines worth one log line each, such as the native key of an alias that was used.
    pub notices: Vec<String>,
}

/// Reads, merges, checks and resolves all sources.
pub fn load(sources: &Sources) -> Result<Loaded, Problems> {
    let mut problems = Vec::new();
    let mut tree = match &sources.file {
        Some(file) => read_file(file).map_err(|problem| Problems(vec![problem]))?,
        None => Node::empty(),
    };
    let environment = Environment::new(&sources.env);
    let aliases = aliases::read(&environment, &mut problems);
    tree.merge(aliases.tree);
    environment.apply(&mut tree, &mut problems);
    for flag in &sources.overrides {
        if let Err(problem) = apply_override(&mut tree, flag) {
            problems.push(problem);
        }
    }
    check(&Key::root(), &tree, schema::root(), &mut problems);
    if !problems.is_empty() {
        return Err(Problems(problems));
    }
    inherit(&mut tree);
    let written: Written = serde_json::from_value(tree.to_json()).map_err(|error| {
        Problems(vec![Problem::whole(format!("the settings contradict their schema: {error}"), "")])
    })?;
    let settings = resolve::settings(&written, &tree, &environment)?;
    Ok(Loaded { settings, notices: aliases.notices })
}

fn read_file(file: &File) -> Result<Node, Problem> {
    let (name, text) = match file {
        File::Text { name, text } => (name.clone(), text.clone()),
        File::Path(path) => {
            let name = path.display().to_string();
            let bytes = std::fs::read(path)
                .map_err(|error| Problem::whole(format!("cannot be read: {error}"), &name))?;
            let text = String::from_utf8(bytes).map_err(|error| {
                let line = error.as_bytes()[..error.utf8_error().valid_up_to()]
                    .iter()
                    .filter(|byte| **byte == b'\n')
                    .count();
                Problem::whole("not valid UTF-8", format!("{name}:{}", line + 1))
            })?;
            (name, text)
        }
    };
    let node = yaml::parse_file(&text, &Arc::from(name.as_str())).map_err(|refused| {
        let place = format!("{name}:{}:{}", refused.line, refused.column);
        Problem::whole(format!("not valid YAML: {}", refused.message), place)
    })?;
    match node.value {
        Value::Map(_) => Ok(node),
        Value::Null => Err(Problem::whole("the file is empty; it must list the models", name)),
        other => Err(Problem::whole(format!("the file holds {other}; must be a mapping"), name)),
    }
}

fn apply_override(tree: &mut Node, flag: &Override) -> Result<(), Problem> {
    let origin = Origin::Flag(Arc::from(flag.flag.as_str()));
    let key = Key::parse(&flag.key).ok_or_else(|| {
        let shown = crate::tree::quoted(&flag.key);
        let message = format!("{shown} names no key; must be like limits.max_in_flight");
        Problem::whole(message, origin.to_string())
    })?;
    lay(tree, &key, &flag.value, &origin)
}

/// Fills what is not written at a place from where it is inherited: a model's `routing` from the
/// top-level one, a shadow policy's parameters from the `routing` around it.
fn inherit(tree: &mut Node) {
    let top = tree.get("routing").cloned();
    for model in tree.get_mut("models").map(Node::items_mut).unwrap_or_default() {
        let Some(own) = model.get_mut("routing") else { continue };
        if let Some(top) = &top {
            let mut whole = top.clone();
            whole.merge(own.clone());
            whole.origin = own.origin.clone();
            *own = whole;
        }
        inherit_parameters(own);
    }
    if let Some(top) = tree.get_mut("routing") {
        inherit_parameters(top);
    }
}

fn inherit_parameters(routing: &mut Node) {
    let names = serde_json::to_value(Policy::default()).unwrap_or_default();
    let mut parameters = routing.clone();
    if let Value::Map(entries) = &mut parameters.value {
        entries.retain(|(name, _)| names.get(name).is_some());
    }
    for shadow in routing.get_mut("shadow").map(Node::items_mut).unwrap_or_default() {
        if matches!(shadow.value, Value::Map(_)) {
            let mut whole = parameters.clone();
            whole.merge(shadow.clone());
            whole.origin = shadow.origin.clone();
            *shadow = whole;
        }
    }
}
