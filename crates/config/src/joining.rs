//! A worker that joins at run time: the same keys, ranges and messages as in the file.
//!
//! Invariant: whoever adds a worker over HTTP cannot make the router read a file or a variable.

use std::sync::Arc;

use crate::check::check;
use crate::environment::Environment;
use crate::problem::{Problem, Problems};
use crate::resolve;
use crate::schema;
use crate::settings::{Endpoint, KvEvents, SocketMode, Worker};
use crate::tree::{Key, Node, Value};
use crate::written;
use crate::yaml;

/// A worker and the model that it joins.
#[derive(Clone, Debug, PartialEq)]
pub struct Joining {
    /// Any name of the model.
    pub model: String,
    /// The worker. Whether its name and URL are free is for the caller to see.
    pub worker: Worker,
}

/// Keys that name something on the router's machine.
const NOT_AT_RUN_TIME: [&str; 2] = ["api_key_env", "api_key_file"];

/// Reads `{"model": "...", "role": "...", "url": "...", ...}`: `model`, and the keys of a worker.
pub fn joining(text: &str) -> Result<Joining, Problems> {
    let one = |message: String, place: String| Problems(vec![Problem::whole(message, place)]);
    // Strict JSON, which bounds its own nesting; YAML's aliases and shorthands are for files.
    serde_json::from_str::<serde::de::IgnoredAny>(text)
        .map_err(|error| one(format!("not valid JSON: {error}"), "body".to_owned()))?;
    let mut tree = yaml::parse_file(text, &Arc::from("body")).map_err(|refused| {
        let place = format!("body:{}:{}", refused.line, refused.column);
        one(format!("not valid JSON: {}", refused.message), place)
    })?;
    let Value::Map(entries) = &mut tree.value else {
        let message = format!("{} is not allowed; must be a JSON object", tree.value);
        return Err(one(message, tree.origin.to_string()));
    };
    let at = entries.iter().position(|(name, _)| name == "model");
    let model = at.map(|at| entries.remove(at).1);
    let mut problems = Vec::new();
    let model = model_name(model.as_ref(), &tree, &mut problems);
    for name in NOT_AT_RUN_TIME {
        if let Some(node) = tree.get(name) {
            let message = "cannot be given at run time; must be left out";
            problems.push(Problem::at(&Key::root().name(name), message, &node.origin));
        }
    }
    check(&Key::root(), &tree, schema::worker(), &mut problems);
    let (Some(model), true) = (model, problems.is_empty()) else {
        return Err(Problems(problems));
    };
    let written: written::Worker = serde_json::from_value(tree.to_json())
        .map_err(|error| one(format!("the body contradicts its schema: {error}"), String::new()))?;
    let worker = resolve::worker(&written, &tree, &Environment::new(&[]))?;
    if !reaches_out_only(&worker) {
        let message = "may only name tcp:// sockets that the router connects to at run time";
        return Err(one(format!("kv_events {message}"), "body".to_owned()));
    }
    Ok(Joining { model, worker })
}

/// Whether following the worker opens no socket and touches no file on the router's machine.
fn reaches_out_only(worker: &Worker) -> bool {
    let KvEvents::At(stream) = &worker.kv_events else { return true };
    let tcp = |endpoint: &Endpoint| matches!(endpoint, Endpoint::Tcp { .. });
    stream.mode == SocketMode::Connect
        && tcp(&stream.endpoint)
        && stream.replay.as_ref().is_none_or(tcp)
}

fn model_name(model: Option<&Node>, tree: &Node, problems: &mut Vec<Problem>) -> Option<String> {
    let key = Key::root().name("model");
    let must = "must be the name of a model";
    let (message, origin) = match model {
        None => (format!("missing; {must}"), &tree.origin),
        Some(Node { value: Value::Text(name), .. }) if !name.is_empty() => {
            return Some(name.clone());
        }
        Some(node) => (format!("{} is not allowed; {must}", node.value), &node.origin),
    };
    problems.push(Problem::at(&key, message, origin));
    None
}
