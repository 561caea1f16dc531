//! The flags that name where settings come from, shared by the commands that read a configuration.

use std::path::PathBuf;

use anyhow::anyhow;
use pointsman_config::{File, Loaded, Override, Sources};

/// Where settings come from.
#[derive(Debug, clap::Args)]
pub(crate) struct ConfigArgs {
    /// The configuration file, YAML or JSON.
    #[arg(short, long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Set one key: `--set limits.max_in_flight=100`. May be given several times.
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,
}

impl ConfigArgs {
    /// Reads file, environment and flags; `named` are the flags with names of their own.
    pub(crate) fn load(&self, named: Vec<Override>) -> anyhow::Result<Loaded> {
        let mut overrides = set(&self.set)?;
        overrides.extend(named);
        load(&Sources {
            file: self.config.clone().map(File::Path),
            env: std::env::vars_os().collect(),
            overrides,
        })
    }
}

/// Reads the arguments of `--set`.
pub(crate) fn set(arguments: &[String]) -> anyhow::Result<Vec<Override>> {
    let parse = |argument: &String| Override::parse("--set", argument);
    arguments.iter().map(parse).collect::<Result<_, _>>().map_err(|problem| anyhow!("{problem}"))
}

/// Reads sources; every problem goes into one message, a line each.
pub(crate) fn load(sources: &Sources) -> anyhow::Result<Loaded> {
    pointsman_config::load(sources)
        .map_err(|problems| anyhow!("the configuration cannot be used:\n{problems}"))
}

/// A flag that stands for a key.
pub(crate) fn flag(flag: &str, key: &str, value: &impl ToString) -> Override {
    Override { flag: flag.to_owned(), key: key.to_owned(), value: value.to_string() }
}
