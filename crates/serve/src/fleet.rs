//! Who serves what: groups (one per base model), their workers, and the names that lead to them.
//!
//! Invariants: a request sees one immutable `Roster`; a slot belongs to at most one worker rank at a
//! time; everything a worker needs in the background ends when its `gone` token is cancelled.
//! Not here: what the background tasks do (`watch`, `events`), and choosing (the brain).

use std::collections::{BTreeMap, HashMap};
use std::num::NonZeroU32;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use arc_swap::ArcSwap;
use http::{HeaderMap, HeaderValue, Uri, header};
use pointsman_brain::{self as brain, Brain, Slot, Time, WorkerSpec};
use pointsman_config as config;
use pointsman_kv as kv;
use pointsman_wire::dialect::{Connector, Dialect, Sglang, Trtllm, Vllm};
use pointsman_wire::discovery::Version;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use crate::clock::Clock;
use crate::headers;
use crate::hold::Hold;
use crate::mark::Marks;
use crate::prompt::Tokenizer;
use crate::snapshot::Seeds;
use crate::sparing::Sparing;

/// Tokens of a KV block where neither the configuration nor the engine has said: vLLM's default.
const USUAL_BLOCK_SIZE: NonZeroU32 = NonZeroU32::MIN.saturating_add(15);

/// Where vLLM's chats take token ids from.
const VLLM_CHAT_TAKES_IDS: Version = Version(0, 28, 0);

/// Worker ranks of one group at most.
pub(crate) const MAX_RANKS: usize = 4096;

/// One engine endpoint.
#[derive(Debug)]
pub(crate) struct Worker {
    pub(crate) settings: config::Worker,
    pub(crate) slots: Vec<Slot>,
    pub(crate) learned: ArcSwap<Learned>,
    pub(crate) gone: CancellationToken,
    /// Told when its event stream ended: another engine may stand behind the URL.
    pub(crate) look_again: Notify,
    /// Its first health check is done.
    pub(crate) seen: AtomicBool,
    /// By rank: the KV events have a gap that could not be filled.
    stale: Box<[AtomicBool]>,
    pub(crate) marks: Marks,
    host: Option<HeaderValue>,
    authorization: Option<HeaderValue>,
    /// What is said of it in the log.
    pub(crate) complaints: Sparing,
}

/// What a worker has told of itself.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Learned {
    /// The models that it lists, base and adapters; empty until it has been asked.
    pub(crate) models: Vec<pointsman_wire::discovery::ServedModel>,
    pub(crate) version: Option<Version>,
    /// Whether it reads prompts as the router does; None until it has said.
    pub(crate) same_tokens: Option<bool>,
    pub(crate) block_size: Option<NonZeroU32>,
    pub(crate) capacity_blocks: Option<u64>,
    pub(crate) publishes_events: bool,
    /// Token budget of one step.
    pub(crate) max_num_batched_tokens: Option<NonZeroU32>,
    /// Whether it computes prompts itself though it is a decode worker.
    pub(crate) local_prefill: Option<bool>,
    /// Whether it fetches only the KV that it lacks.
    pub(crate) skips_cached_blocks: Option<bool>,
    /// Where decode workers meet it.
    pub(crate) bootstrap_port: Option<u16>,
    /// What decode workers have to call its engines, by rank.
    pub(crate) engine_ids: BTreeMap<u32, String>,
    /// Its data-parallel ranks.
    pub(crate) ranks: Option<u32>,
    /// What it is started as, if that is not what it is to be.
    pub(crate) other_role: Option<String>,
}

impl Worker {
    fn new(settings: config::Worker, slots: Vec<Slot>) -> Worker {
        let learned = Learned {
            // Of what is polled nobody knows whether there is any before some has come.
            publishes_events: settings.kv_events != config::KvEvents::Off
                && settings.engine != config::Engine::Trtllm,
            ..Learned::default()
        };
        Worker {
            stale: slots.iter().map(|_| AtomicBool::new(false)).collect(),
            marks: Marks::new(slots.len()),
            host: headers::host(&settings.url),
            authorization: settings.api_key.as_ref().and_then(headers::bearer),
            complaints: Sparing::default(),
            settings,
            slots,
            learned: ArcSwap::from_pointee(learned),
            seen: AtomicBool::new(false),
            gone: CancellationToken::new(),
            look_again: Notify::new(),
        }
    }

    pub(crate) fn name(&self) -> &str {
        &self.settings.name
    }

    /// Whether the index holds less than this rank does, because events are lost.
    pub(crate) fn is_stale(&self, slot: Slot) -> bool {
        self.stale_flag(slot).is_some_and(|flag| flag.load(Ordering::Relaxed))
    }

    pub(crate) fn set_stale(&self, slot: Slot, stale: bool) {
        if let Some(flag) = self.stale_flag(slot) {
            flag.store(stale, Ordering::Relaxed);
        }
    }

    fn stale_flag(&self, slot: Slot) -> Option<&AtomicBool> {
        self.stale.get(self.slots.iter().position(|own| *own == slot)?)
    }

    /// The worker's URL with a path and query put after it.
    pub(crate) fn uri(&self, path_and_query: &str) -> Result<Uri, http::Error> {
        let base = self.settings.url.path().trim_end_matches('/');
        Uri::builder()
            .scheme(self.settings.url.scheme_str().unwrap_or("http"))
            .authority(self.settings.url.authority().map_or("", |a| a.as_str()))
            .path_and_query(format!("{base}{path_and_query}"))
            .build()
    }

    /// Puts the worker's own host and key in place of whatever the client sent.
    pub(crate) fn address(&self, headers: &mut HeaderMap) {
        if let Some(value) = &self.host {
            headers.insert(header::HOST, value.clone());
        }
        if let Some(value) = &self.authorization {
            headers.insert(header::AUTHORIZATION, value.clone());
        }
    }

    pub(crate) fn dialect(&self) -> Dialect {
        match self.settings.engine {
            config::Engine::OpenAi => Dialect::OpenAi,
            config::Engine::Vllm => Dialect::Vllm(Vllm {
                chat_takes_ids: self.takes_ids(),
                lease_ms: self.lease_ms(),
                connector: match self.settings.kv_connector {
                    config::KvConnector::Nixl => Connector::Nixl,
                    config::KvConnector::Mooncake => Connector::Mooncake,
                },
            }),
            config::Engine::Sglang => Dialect::Sglang(Sglang {
                asks_for_local: self.settings.role == config::Role::Decode,
            }),
            config::Engine::Trtllm => Dialect::Trtllm(Trtllm {
                takes_encoder_handles: self.settings.takes_encoder_handles,
                lease_ms: self.lease_ms(),
            }),
        }
    }

    fn lease_ms(&self) -> u64 {
        u64::try_from(self.settings.kv_lease.as_millis()).unwrap_or(u64::MAX)
    }

    /// Whether its events tell of all that it holds: TensorRT-LLM says nothing of blocks that came from
    /// another worker.
    pub(crate) fn tells_all(&self) -> bool {
        let s = &self.settings;
        let silent = s.engine == config::Engine::Trtllm && s.role == config::Role::Decode;
        self.learned.load().publishes_events && !silent
    }

    /// Whether it may run the prefill of a request itself.
    pub(crate) fn local_prefill(&self) -> bool {
        self.settings.local_prefill.or(self.learned.load().local_prefill).unwrap_or(false)
    }

    /// Whether it fetches only the KV that it lacks; None if nobody has said.
    pub(crate) fn skips_cached_blocks(&self) -> Option<bool> {
        // vLLM's connectors do; the others say or are told.
        let usual = (self.settings.engine == config::Engine::Vllm).then_some(true);
        self.settings.skips_cached_blocks.or(self.learned.load().skips_cached_blocks.or(usual))
    }

    /// Whether it has been asked what it is.
    pub(crate) fn is_known(&self) -> bool {
        self.learned.load().version.is_some()
    }

    /// Whether prompts may go to it as the router's tokens.
    pub(crate) fn takes_ids(&self) -> bool {
        let learned = self.learned.load();
        match self.settings.takes_prompt_ids {
            config::Detect::No => false,
            config::Detect::Yes => learned.same_tokens != Some(false),
            config::Detect::Auto => {
                let known = learned.version.is_some_and(|version| version >= VLLM_CHAT_TAKES_IDS);
                known && learned.same_tokens == Some(true)
            }
        }
    }

    /// Whether it serves a model of this name; yes until it has said what it serves.
    pub(crate) fn serves(&self, name: &str) -> bool {
        let learned = self.learned.load();
        learned.models.is_empty() || learned.models.iter().any(|model| model.id == name)
    }

    /// What the brain is told of each of its ranks.
    pub(crate) fn spec(&self) -> WorkerSpec {
        let learned = self.learned.load();
        let s = &self.settings;
        WorkerSpec {
            role: match s.role {
                config::Role::Prefill => brain::Role::Prefill,
                config::Role::Decode => brain::Role::Decode,
                config::Role::Unified => brain::Role::Unified,
            },
            local_prefill: self.local_prefill(),
            block_size: learned.block_size.or(s.block_size).unwrap_or(USUAL_BLOCK_SIZE),
            capacity_blocks: learned.capacity_blocks.or(s.capacity_blocks.map(Into::into)),
            max_num_batched_tokens: s
                .max_num_batched_tokens
                .or(learned.max_num_batched_tokens)
                .map(Into::into),
            publishes_events: learned.publishes_events,
            skips_cached_blocks: self.skips_cached_blocks().unwrap_or(true),
            answers_when_fetched: s.engine == config::Engine::Sglang,
        }
    }
}

/// One data-parallel rank of a worker.
#[derive(Clone, Debug)]
pub(crate) struct Rank {
    pub(crate) worker: Arc<Worker>,
    pub(crate) slot: Slot,
    /// Which rank; `None` where the worker has only one and no header is to be sent.
    pub(crate) rank: Option<u32>,
}

/// The worker ranks of a group at one moment.
#[derive(Clone, Debug, Default)]
pub(crate) struct Roster {
    /// By slot.
    pub(crate) ranks: Vec<Option<Rank>>,
    /// The block size of each slot; 0 where there is no worker.
    pub(crate) block_sizes: Vec<u32>,
}

impl Roster {
    pub(crate) fn get(&self, slot: Slot) -> Option<&Rank> {
        self.ranks.get(usize::from(slot.0))?.as_ref()
    }

    /// The workers, each once, in the order of their slots.
    pub(crate) fn workers(&self) -> impl Iterator<Item = &Arc<Worker>> {
        self.ranks
            .iter()
            .flatten()
            .filter(|rank| rank.worker.slots.first() == Some(&rank.slot))
            .map(|rank| &rank.worker)
    }

    pub(crate) fn worker(&self, name: &str) -> Option<&Arc<Worker>> {
        self.workers().find(|worker| worker.name() == name)
    }

    /// Each block size in use, once.
    pub(crate) fn distinct_block_sizes(&self) -> impl Iterator<Item = u32> {
        let sizes = &self.block_sizes;
        sizes
            .iter()
            .enumerate()
            .filter(|(i, size)| **size > 0 && !sizes[..*i].contains(size))
            .map(|(_, size)| *size)
    }
}

/// Everything about one base model.
pub(crate) struct Group {
    pub(crate) settings: config::Model,
    pub(crate) tokenizer: Tokenizer,
    pub(crate) hasher: kv::Hasher,
    pub(crate) seeds: Seeds,
    pub(crate) reader: kv::Reader,
    pub(crate) roster: ArcSwap<Roster>,
    pub(crate) created: u64,
    /// Names of the shadow policies, in the brain's order.
    pub(crate) shadows: Vec<&'static str>,
    pub(crate) hold: Hold,
    pub(crate) complaints: Sparing,
    /// What stands in for the events of a worker that publishes none.
    approximate: config::Approximate,
    clock: Clock,
    brain: Mutex<Brain>,
    writer: Mutex<kv::Writer>,
    /// Taken for one window of events, in the order of asking.
    turns: tokio::sync::Mutex<()>,
    /// Taken by whoever changes the roster, so that changes do not overwrite each other.
    changes: Mutex<()>,
}

/// Why a worker cannot be added.
#[derive(Debug, thiserror::Error)]
pub enum AddError {
    /// The name is taken.
    #[error("model `{model}` already has a worker named `{worker}`")]
    Duplicate {
        /// The model.
        model: String,
        /// The worker.
        worker: String,
    },
    /// The engine is there already.
    #[error("{url} is worker `{worker}` of model `{model}` already")]
    Taken {
        /// The URL.
        url: String,
        /// The model.
        model: String,
        /// The worker.
        worker: String,
    },
    /// There is no room.
    #[error("model `{0}` has {MAX_RANKS} worker ranks already")]
    Full(String),
}

impl Group {
    pub(crate) fn new(
        settings: config::Model,
        tokenizer: Tokenizer,
        brain: Brain,
        seeds: Seeds,
        approximate: config::Approximate,
        clock: Clock,
    ) -> Group {
        let index = kv::IndexSettings { seed: seeds.names, ..kv::IndexSettings::default() };
        let (writer, reader) = kv::index_with(index);
        Group {
            hold: Hold::new(settings.routing.admission.max_waiting),
            complaints: Sparing::default(),
            settings,
            tokenizer,
            hasher: kv::Hasher::new(seeds.hasher),
            seeds,
            reader,
            roster: ArcSwap::default(),
            created: u64::try_from(crate::prompt::unix_seconds()).unwrap_or(0),
            shadows: brain.settings().shadow.iter().map(|shadow| shadow.rule.as_str()).collect(),
            approximate,
            clock,
            brain: Mutex::new(brain),
            writer: Mutex::new(writer),
            turns: tokio::sync::Mutex::new(()),
            changes: Mutex::new(()),
        }
    }

    pub(crate) fn name(&self) -> &str {
        &self.settings.name
    }

    /// The brain, for one short call. A panic elsewhere must not stop every later request.
    pub(crate) fn brain(&self) -> MutexGuard<'_, Brain> {
        self.brain.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The turn of somebody who has much to write: first come, first served, so that no publisher
    /// keeps others away. For one window of events, or one slot of a snapshot.
    pub(crate) async fn turn(&self) -> tokio::sync::MutexGuard<'_, ()> {
        self.turns.lock().await
    }

    /// The index's writer, for one window of events or one placement.
    pub(crate) fn writer(&self) -> MutexGuard<'_, kv::Writer> {
        self.writer.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn now(&self) -> Time {
        self.clock.now()
    }

    /// Whether a name that clients may send is an adapter on top of the base model.
    pub(crate) fn is_adapter(&self, name: &str) -> bool {
        if self.settings.adapters.iter().any(|adapter| adapter == name) {
            return true;
        }
        let base = name == self.settings.name || self.settings.aliases.iter().any(|a| a == name);
        !base
            && self.roster.load().workers().any(|worker| {
                let learned = worker.learned.load();
                learned.models.iter().any(|model| model.id == name && model.parent.is_some())
            })
    }

    /// The model that a name is another one of; an adapter is a model of its own.
    pub(crate) fn base_of(&self, name: &str) -> Option<&str> {
        (!self.is_adapter(name)).then_some(self.name())
    }

    /// Adds a worker; its background tasks are the caller's to start.
    pub(crate) fn add(&self, settings: config::Worker) -> Result<Arc<Worker>, AddError> {
        let _changing = self.changes.lock().unwrap_or_else(PoisonError::into_inner);
        let mut roster = Roster::clone(&self.roster.load());
        if roster.worker(&settings.name).is_some() {
            let (model, worker) = (self.name().to_owned(), settings.name);
            return Err(AddError::Duplicate { model, worker });
        }
        if let Some(worker) = roster.workers().find(|worker| worker.settings.url == settings.url) {
            let (model, worker) = (self.name().to_owned(), worker.name().to_owned());
            return Err(AddError::Taken { url: settings.url.to_string(), model, worker });
        }
        let ranks = u32::from(settings.ranks.get());
        let slots = free_slots(&mut roster, ranks as usize)
            .ok_or_else(|| AddError::Full(self.name().to_owned()))?;
        let worker = Arc::new(Worker::new(settings, slots));
        let spec = worker.spec();
        let now = self.now();
        for (rank, &slot) in (0..ranks).zip(&worker.slots) {
            let at = usize::from(slot.0);
            roster.block_sizes[at] = spec.block_size.get();
            roster.ranks[at] =
                Some(Rank { worker: Arc::clone(&worker), slot, rank: (ranks > 1).then_some(rank) });
            self.brain().add(slot, spec, now);
            self.stand_in(slot, &worker, &spec);
        }
        self.roster.store(Arc::new(roster));
        Ok(worker)
    }

    /// Removes a worker; requests on it run to their end.
    pub(crate) fn remove(&self, name: &str) -> Option<Arc<Worker>> {
        let _changing = self.changes.lock().unwrap_or_else(PoisonError::into_inner);
        let mut roster = Roster::clone(&self.roster.load());
        let worker = Arc::clone(roster.worker(name)?);
        worker.gone.cancel();
        for &slot in &worker.slots {
            let at = usize::from(slot.0);
            roster.ranks[at] = None;
            roster.block_sizes[at] = 0;
        }
        self.roster.store(Arc::new(roster));
        for &slot in &worker.slots {
            self.brain().remove(slot);
            self.writer().clear(kv::Slot(slot.0));
        }
        Some(worker)
    }

    /// Takes over what a worker has told of itself.
    pub(crate) fn learn(&self, worker: &Arc<Worker>, learned: Learned) {
        self.amend(worker, |known| *known = learned);
    }

    /// Takes over a part of it, whatever others learn of the rest at the same time.
    pub(crate) fn amend(&self, worker: &Arc<Worker>, change: impl FnOnce(&mut Learned)) {
        let _changing = self.changes.lock().unwrap_or_else(PoisonError::into_inner);
        let mut learned = Learned::clone(&worker.learned.load());
        change(&mut learned);
        if worker.gone.is_cancelled() || **worker.learned.load() == learned {
            return;
        }
        worker.learned.store(Arc::new(learned));
        let spec = worker.spec();
        let mut roster = Roster::clone(&self.roster.load());
        for &slot in &worker.slots {
            roster.block_sizes[usize::from(slot.0)] = spec.block_size.get();
            self.brain().update(slot, spec);
            self.stand_in(slot, worker, &spec);
        }
        self.roster.store(Arc::new(roster));
    }

    /// What was placed on a worker stands in for its events, where there are none; where there are,
    /// the index is told how many blocks they can be of.
    fn stand_in(&self, slot: Slot, worker: &Worker, spec: &WorkerSpec) {
        let stand_in = match self.approximate {
            config::Approximate::Record { ttl, unknown_blocks } if !worker.tells_all() => {
                Some(kv::Approximate {
                    capacity_blocks: Some(spec.capacity_blocks.unwrap_or(unknown_blocks.get())),
                    ttl_ns: ttl.map(|ttl| u64::try_from(ttl.as_nanos()).unwrap_or(u64::MAX)),
                })
            }
            _ => None,
        };
        let mut writer = self.writer();
        writer.set_approximate(kv::Slot(slot.0), stand_in);
        if let Some(blocks) = spec.capacity_blocks.filter(|_| spec.publishes_events) {
            writer.expect(kv::Slot(slot.0), blocks);
        }
    }

    /// Whether placements on a worker are to be recorded.
    pub(crate) fn records(&self, worker: &Worker) -> bool {
        !worker.tells_all() && self.approximate != config::Approximate::Off
    }

    /// Forgets placements whose time is over.
    pub(crate) fn forget_expired(&self) {
        if matches!(self.approximate, config::Approximate::Record { ttl: Some(_), .. }) {
            self.writer().expire(self.now().0);
        }
    }
}

/// The lowest free slots, with room made for them.
fn free_slots(roster: &mut Roster, wanted: usize) -> Option<Vec<Slot>> {
    let taken = roster.ranks.iter().flatten().count();
    if taken + wanted > MAX_RANKS {
        return None;
    }
    let mut slots = Vec::with_capacity(wanted);
    for at in 0_u16.. {
        if slots.len() == wanted {
            break;
        }
        if roster.ranks.len() <= usize::from(at) {
            roster.ranks.push(None);
            roster.block_sizes.push(0);
        }
        if roster.ranks[usize::from(at)].is_none() {
            slots.push(Slot(at));
        }
    }
    Some(slots)
}

/// All groups, and the names that lead to them.
pub(crate) struct Fleet {
    pub(crate) groups: Vec<Arc<Group>>,
    names: ArcSwap<HashMap<String, Arc<Group>>>,
}

impl Fleet {
    pub(crate) fn new(groups: Vec<Arc<Group>>) -> Fleet {
        let fleet = Fleet { groups, names: ArcSwap::default() };
        fleet.rename();
        fleet
    }

    /// The group that serves a name.
    pub(crate) fn named(&self, name: &str) -> Option<Arc<Group>> {
        self.names.load().get(name).cloned()
    }

    /// The only group, where there is one.
    pub(crate) fn only(&self) -> Option<&Arc<Group>> {
        match self.groups.as_slice() {
            [group] => Some(group),
            _ => None,
        }
    }

    /// The group of a base model.
    pub(crate) fn group(&self, name: &str) -> Option<&Arc<Group>> {
        self.groups.iter().find(|group| group.name() == name)
    }

    /// Reads every name again; what the configuration names comes before what workers name.
    pub(crate) fn rename(&self) {
        let mut names = HashMap::new();
        for group in &self.groups {
            for worker in group.roster.load().workers() {
                for model in &worker.learned.load().models {
                    names.entry(model.id.clone()).or_insert_with(|| Arc::clone(group));
                }
            }
        }
        for group in &self.groups {
            let s = &group.settings;
            for name in std::iter::once(&s.name).chain(&s.aliases).chain(&s.adapters) {
                names.insert(name.clone(), Arc::clone(group));
            }
        }
        self.names.store(Arc::new(names));
    }
}
