//! Policies as the flag names them, `all` or `isl_bounding:eff_isl_threshold=8192,predicted`, and
//! the settings that they mean: by the same keys, checks and defaults as the router's own.

use std::path::PathBuf;

use anyhow::{bail, ensure};
use pointsman_config::{File, Sources};
use pointsman_sim::replay::{FleetShape, Settings};
use serde_json::{Value, json};

use crate::sources::{flag, load, set};

/// Policies that one command looks at, at most.
const MAX_POLICIES: usize = 64;

/// Every policy of a fleet with prefill and decode workers.
const ALL: &[&str] = &[
    "always_remote",
    "always_local",
    "short_prompt",
    "isl_bounding",
    "prefill_load",
    "isl_or_load",
    "isl_and_load",
    "uncached_tokens",
    "max_local_prefill",
    "predicted",
];

/// Policies that differ where no worker is for prefill alone: the ordinary cost, and the cost model.
const ALL_UNIFIED: &[&str] = &["always_local", "predicted"];

/// A policy as it was named, and what it means.
#[derive(Clone, Debug)]
pub(crate) struct Named {
    /// As it was named.
    pub(crate) name: String,
    /// Keys under `routing` and their values, to be written into a configuration.
    pub(crate) keys: Vec<(String, String)>,
    pub(crate) settings: Settings,
}

/// Where settings that no policy names come from.
#[derive(Debug, clap::Args)]
pub(crate) struct RoutingArgs {
    /// A configuration file; the routing of its first model holds. Default: the defaults, and a
    /// `prefill_busy_threshold` of 1.
    #[arg(short, long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Set one key of the configuration. May be given several times.
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,
}

/// Reads the list.
pub(crate) fn read(
    list: &str,
    shape: FleetShape,
    args: &RoutingArgs,
) -> anyhow::Result<Vec<Named>> {
    let all = if shape.prefill > 0 { ALL } else { ALL_UNIFIED };
    let mut named = Vec::new();
    for word in list.split(',').map(str::trim).filter(|word| !word.is_empty()) {
        if word == "all" {
            for name in all {
                named.push(meaning(name, args)?);
            }
        } else {
            named.push(meaning(word, args)?);
        }
    }
    ensure!(!named.is_empty(), "--policies names no policy");
    ensure!(named.len() <= MAX_POLICIES, "--policies names more than {MAX_POLICIES} policies");
    Ok(named)
}

fn meaning(word: &str, args: &RoutingArgs) -> anyhow::Result<Named> {
    let mut parts = word.split(':');
    let policy = parts.next().unwrap_or_default();
    let mut keys = vec![("policy".to_owned(), policy.to_owned())];
    for part in parts {
        let Some((key, value)) = part.split_once('=') else {
            bail!("--policies: {part:?} in {word:?} is not KEY=VALUE");
        };
        keys.push((key.to_owned(), value.to_owned()));
    }
    let mut overrides = set(&args.set)?;
    let of = |(key, value): &(String, String)| flag("--policies", &format!("routing.{key}"), value);
    overrides.extend(keys.iter().map(of));
    let file = args.config.clone().map_or_else(no_file, File::Path);
    // The environment stays out of it: equal commands give equal results.
    let loaded = load(&Sources { file: Some(file), env: Vec::new(), overrides })?;
    let Some(model) = loaded.settings.models.into_iter().next() else {
        bail!("the configuration has no model");
    };
    Ok(Named { name: word.to_owned(), keys, settings: model.routing })
}

/// A configuration with workers that nobody will ask.
fn no_file() -> File {
    let worker = |role: &str, port: u16| -> Value {
        json!({"name": role, "url": format!("http://127.0.0.1:{port}"), "role": role})
    };
    let workers = [worker("prefill", 1), worker("decode", 2), worker("unified", 3)];
    let tree = json!({
        "models": [{"name": "replayed", "tokenizer": "builtin", "workers": workers}],
        "routing": {"prefill_busy_threshold": 1.0},
    });
    File::Text { name: "the settings of a replay".to_owned(), text: tree.to_string() }
}
