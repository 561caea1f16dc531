//! Models: their names are unique, and what they need to serve is there.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use pointsman_brain as brain;
use pointsman_brain::{Profile, Role};

use super::Resolver;
use crate::scalar::OffOr;
use crate::settings::{Estimates, KvEvents, Model, Tokenizer, Worker};
use crate::tree::{Key, quoted};
use crate::written::{self, Written};

/// Ranks of all workers of one model together: what a slot number can count.
const MAX_RANKS: u32 = u16::MAX as u32;

/// Readings of an engine's load that may fail before the last one that did not is too old.
const READINGS_MISSED: u32 = 5;

impl Resolver<'_> {
    /// Every model that is in order; problems say why others are missing.
    pub(super) fn models(&mut self, written: &Written) -> Vec<Model> {
        let key = Key::root().name("models");
        if written.models.is_empty() {
            self.problem(&key, "missing or empty; must list at least one model");
        }
        self.unique_names(&key, &written.models);
        let models: Vec<Model> = (0..)
            .zip(&written.models)
            .filter_map(|(i, model)| self.model(&key.index(i), model, written))
            .collect();
        self.unique_workers(&key, &written.models);
        models
    }

    /// No two models answer to one name.
    fn unique_names(&mut self, key: &Key, models: &[written::Model]) {
        let mut taken: BTreeMap<&str, Key> = BTreeMap::new();
        for (i, model) in models.iter().enumerate() {
            let key = key.index(i);
            let list = |list: &'static str| {
                let key = key.name(list);
                move |(j, name)| (key.index(j), name)
            };
            let aliases = model.aliases.iter().enumerate().map(list("aliases"));
            let adapters = model.adapters.iter().enumerate().map(list("adapters"));
            let own = std::iter::once((key.name("name"), &model.name));
            for (at, name) in own.chain(aliases).chain(adapters) {
                if name.trim().is_empty() {
                    self.problem(&at, "empty; must be the name that clients send");
                } else if let Some(first) = taken.get(name.as_str()) {
                    let message = format!("{} is taken; {first} has that name", quoted(name));
                    self.problem(&at, message);
                } else {
                    taken.insert(name, at);
                }
            }
        }
    }

    /// No two workers have one name, over all models, nor one URL within a model.
    fn unique_workers(&mut self, key: &Key, models: &[written::Model]) {
        let mut names: BTreeMap<String, Key> = BTreeMap::new();
        for (i, model) in models.iter().enumerate() {
            let mut urls: BTreeMap<String, Key> = BTreeMap::new();
            for (j, worker) in model.workers.iter().enumerate() {
                let at = key.index(i).name("workers").index(j);
                let Some(url) = super::worker::parse_url(&worker.url).ok() else { continue };
                let place = super::worker::place(&url);
                if let Some(first) = urls.get(&place) {
                    let message = format!("{} is taken; {first} has that URL", quoted(&worker.url));
                    self.problem(&at.name("url"), message);
                    continue;
                }
                urls.insert(place.clone(), at.clone());
                let name = worker.name.clone().unwrap_or(place);
                if let Some(first) = names.get(&name) {
                    let message = format!(
                        "{} is taken; {first} has that name, give one of them another `name`",
                        quoted(&name)
                    );
                    self.problem(&at.name("name"), message);
                    continue;
                }
                names.insert(name, at);
            }
        }
    }

    fn model(&mut self, key: &Key, model: &written::Model, written: &Written) -> Option<Model> {
        let workers: Vec<Option<Worker>> = (0..)
            .zip(&model.workers)
            .map(|(i, worker)| self.worker(&key.name("workers").index(i), worker))
            .collect();
        self.check_roles(key, model, written.admin.worker_api);
        self.check_engines(key, model);
        let ranks: u32 = model.workers.iter().map(|worker| u32::from(worker.ranks)).sum();
        if ranks > MAX_RANKS {
            let message = format!("{ranks} ranks together; must be at most {MAX_RANKS}");
            self.problem(&key.name("workers"), message);
        }
        let (routing_key, routing) = match &model.routing {
            Some(own) => (key.name("routing"), own),
            None => (Key::root().name("routing"), &written.routing),
        };
        let profile = self.profile(key, model);
        let (routing, session, tenant) = self.routing(&routing_key, routing)?;
        let interval = written.metrics.scrape_interval.on().map(|span| span.0);
        let routing = brain::Settings {
            profile: profile?,
            slo: slo(&model.slo),
            reading_max_age: interval.unwrap_or_default().saturating_mul(READINGS_MISSED),
            ..routing
        };
        Some(Model {
            name: model.name.clone(),
            aliases: model.aliases.clone(),
            adapters: model.adapters.clone(),
            tokenizer: tokenizer(&model.tokenizer),
            estimates: Estimates {
                image_tokens: model.estimates.image_tokens,
                audio_tokens: model.estimates.audio_tokens,
                video_tokens: model.estimates.video_tokens,
                other_tokens: model.estimates.other_tokens,
            },
            routing,
            session,
            tenant,
            workers: workers.into_iter().collect::<Option<Vec<_>>>()?,
        })
    }

    /// The constants that predictions start from.
    fn profile(&mut self, key: &Key, model: &written::Model) -> Option<Profile> {
        let start = match &model.model_profile {
            None => Profile::default(),
            Some(name) => match Profile::named(name) {
                Some(profile) => profile,
                None => {
                    let names: Vec<_> = Profile::names().map(|name| format!("`{name}`")).collect();
                    let must = format!("one of {}", names.join(", "));
                    self.refuse(&key.name("model_profile"), name, &must);
                    return None;
                }
            },
        };
        let written::Constants {
            k0_ms,
            a1_ms,
            a2_ms,
            c0_ms,
            c1_ms,
            c2_ms,
            kv_bytes_per_token,
            x0_ms,
            bandwidth_gb_s,
        } = model.constants;
        let seconds = |ms: Option<f64>, start: f64| ms.map_or(start, |ms| ms * 1e-3);
        let profile = Profile {
            k0: seconds(k0_ms, start.k0),
            a1: seconds(a1_ms, start.a1),
            a2: seconds(a2_ms, start.a2),
            c0: seconds(c0_ms, start.c0),
            c1: seconds(c1_ms, start.c1),
            c2: seconds(c2_ms, start.c2),
            x0: seconds(x0_ms, start.x0),
            bandwidth: bandwidth_gb_s.map_or(start.bandwidth, |gb| gb * 1e9),
            kv_bytes_per_token: kv_bytes_per_token.unwrap_or(start.kv_bytes_per_token),
        };
        if !profile.is_usable() {
            self.problem(&key.name("constants"), "each constant must be above 0");
            return None;
        }
        Some(profile)
    }

    /// KV goes from an engine to its like alone.
    fn check_engines(&mut self, key: &Key, model: &written::Model) {
        let pairs = |worker: &&written::Worker| {
            worker.role != written::Role::Unified && worker.engine != written::Engine::Openai
        };
        let mut pairing = model.workers.iter().filter(pairs);
        let speaks = |worker: &written::Worker| (worker.engine, worker.kv_connector);
        let Some(first) = pairing.next().map(speaks) else { return };
        if pairing.any(|worker| speaks(worker) != first) {
            let message = "prefill and decode workers of one model hand KV to one another; \
                           must all have the same `engine` and `kv_connector`";
            self.problem(&key.name("workers"), message);
        }
    }

    /// Prefill and decode need one another; a model needs somebody.
    fn check_roles(&mut self, key: &Key, model: &written::Model, worker_api: bool) {
        if model.expect_workers {
            if !worker_api {
                let message =
                    "true, but no worker can join; must be false, or `admin.worker_api` true";
                self.problem(&key.name("expect_workers"), message);
            }
            return;
        }
        let has = |role| model.workers.iter().any(|worker| worker.role == role);
        let later = "if workers join at run time, set `expect_workers: true`";
        let message = match (
            has(written::Role::Prefill),
            has(written::Role::Decode),
            has(written::Role::Unified),
        ) {
            (false, false, false) => format!("missing or empty; {later}"),
            (true, false, _) => {
                format!("some have `role: prefill`, but none has `role: decode`; {later}")
            }
            (false, true, _) => format!(
                "some have `role: decode`, but none has `role: prefill`; ordinary engines have \
                 `role: unified`; {later}"
            ),
            _ => return,
        };
        self.problem(&key.name("workers"), message);
    }
}

fn slo(slo: &written::Slo) -> brain::Slo {
    // The check has refused what is no time.
    let span = |ms: OffOr<f64>| ms.on().and_then(|ms| Duration::try_from_secs_f64(ms * 1e-3).ok());
    brain::Slo { ttft: span(slo.ttft_ms), itl: span(slo.itl_ms) }
}

fn tokenizer(tokenizer: &written::Tokenizer) -> Tokenizer {
    match tokenizer {
        written::Tokenizer::Engine => Tokenizer::Engine,
        written::Tokenizer::Builtin => Tokenizer::Builtin,
        written::Tokenizer::Dir(dir) => Tokenizer::Dir(PathBuf::from(dir)),
        written::Tokenizer::BytesPerToken(bytes_per_token) => {
            Tokenizer::Estimate { bytes_per_token: *bytes_per_token }
        }
    }
}

/// The role as the brain calls it.
pub(super) fn role(role: written::Role) -> Role {
    match role {
        written::Role::Prefill => Role::Prefill,
        written::Role::Decode => Role::Decode,
        written::Role::Unified => Role::Unified,
    }
}

/// What a worker's events are where nothing was written.
pub(super) fn default_events(engine: written::Engine) -> KvEvents {
    match engine {
        written::Engine::Vllm | written::Engine::Sglang | written::Engine::Trtllm => KvEvents::Auto,
        written::Engine::Openai => KvEvents::Off,
    }
}
