//! `pointsman up`: a router in front of an embedded fleet of mock engines with real sockets.

use std::process::ExitCode;

use anyhow::{Context, ensure};
use pointsman_config::{File, Sources};
use pointsman_sim::mock::{EngineConfig, MockEngine, Role};
use serde_json::{Value, json};

use crate::output::notice;
use crate::shutdown::Asked;
use crate::sources::{flag, load, set};
use crate::{descriptors, logging, shutdown};

/// Engines of one role at most: each has sockets and tasks of its own.
const MAX_ENGINES: u16 = 64;

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Prefill engines.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u16).range(0..=i64::from(MAX_ENGINES)))]
    prefill: u16,
    /// Decode engines.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u16).range(0..=i64::from(MAX_ENGINES)))]
    decode: u16,
    /// Ordinary engines, which do both.
    #[arg(long, default_value_t = 0, value_parser = clap::value_parser!(u16).range(0..=i64::from(MAX_ENGINES)))]
    unified: u16,
    /// Name of the model.
    #[arg(long, default_value = "mock")]
    model: String,
    /// Port of the API; 0 takes a free one.
    #[arg(long, default_value_t = 8000)]
    port: u16,
    /// How much faster than the modelled hardware the engines are; `inf` answers at once.
    #[arg(long, default_value_t = 1.0)]
    speed: f64,
    /// The policy; stands for `routing.policy`.
    #[arg(long)]
    policy: Option<String>,
    /// Set one key of the router's configuration. May be given several times.
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    ensure!(
        args.unified > 0 || (args.prefill > 0 && args.decode > 0),
        "a fleet needs a prefill and a decode engine, or a unified one"
    );
    shutdown::block_on(async {
        let (mut asked, hangups) = (Asked::listen()?, shutdown::hangups()?);
        let engines = start_engines(args).await?;
        let loaded = load(&Sources {
            file: Some(file(args, &engines)),
            env: std::env::vars_os().collect(),
            overrides: overrides(args)?,
        })?;
        logging::start(&loaded.settings.log, &loaded.notices)?;
        descriptors::take_all();
        let running = pointsman_serve::start(loaded.settings).await?;
        greet(args, &format!("http://{}", running.addr()), &engines);
        tokio::select! {
            () = asked.next() => {}
            () = shutdown::at_each(hangups, || running.reload_certificates()) => {}
        }
        asked
            .end(async {
                running.stop().await;
                for (_, engine) in engines {
                    engine.stop().await;
                }
            })
            .await;
        Ok(ExitCode::SUCCESS)
    })
}

async fn start_engines(args: &Args) -> anyhow::Result<Vec<(String, MockEngine)>> {
    let roles = [
        (Role::Prefill, "prefill", args.prefill),
        (Role::Decode, "decode", args.decode),
        (Role::Unified, "unified", args.unified),
    ];
    let mut engines = Vec::new();
    for (role, word, count) in roles {
        for i in 0..count {
            let config = EngineConfig {
                model: args.model.clone(),
                speed: args.speed,
                seed: engines.len() as u64,
                ..EngineConfig::of(role)
            };
            let engine = MockEngine::start(config).await.context("a mock engine cannot start")?;
            engines.push((format!("{word}-{i}"), engine));
        }
    }
    Ok(engines)
}

/// The configuration that an operator would write for this fleet.
fn file(args: &Args, engines: &[(String, MockEngine)]) -> File {
    let budget = EngineConfig::default().max_num_batched_tokens;
    let workers: Vec<Value> = engines
        .iter()
        .map(|(name, engine)| {
            let role = name.split('-').next();
            json!({
                "name": name,
                "url": engine.url(),
                "role": role,
                "kv_events": "auto",
                // What an engine does not tell, and load-based policies go by.
                "max_num_batched_tokens": budget,
            })
        })
        .collect();
    let model = json!({"name": args.model, "tokenizer": "builtin", "workers": workers});
    let tree = json!({
        "listen": {"address": "127.0.0.1", "port": args.port},
        "models": [model],
    });
    File::Text { name: "the embedded fleet".to_owned(), text: tree.to_string() }
}

fn overrides(args: &Args) -> anyhow::Result<Vec<pointsman_config::Override>> {
    let mut overrides = set(&args.set)?;
    overrides.extend(args.policy.as_ref().map(|policy| flag("--policy", "routing.policy", policy)));
    Ok(overrides)
}

fn greet(args: &Args, url: &str, engines: &[(String, MockEngine)]) {
    notice!("pointsman is ready on {url}");
    for (name, engine) in engines {
        notice!("  {name:<10} {}", engine.url());
    }
    notice!("");
    notice!("try:      curl {url}/v1/chat/completions -H 'content-type: application/json' \\");
    let body = json!({
        "model": args.model,
        "messages": [{"role": "user", "content": "Which way does this request go?"}],
        "max_tokens": 16,
    });
    notice!("            -d '{body}' -i");
    notice!("metrics:  {url}/metrics");
    notice!("workers:  {url}/v1/pointsman/workers");
    notice!("Ctrl-C ends it.");
}
