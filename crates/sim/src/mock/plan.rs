//! From a validated request to the sequences that the engine model runs for it.

use std::sync::Arc;

use serde_json::Value;

use super::app::{App, now};
use super::config::Dialect;
use super::errors::Failure;
use super::faults::Leg;
use super::prompt::{prompts, wanted_call};
use super::request::{Api, Request};
use super::side::Remote;
use super::text::{Answer, Ask, Ending, Words, answer};
use super::{mooncake, sglang};
use crate::content::{content, digest};
use crate::engine::{Job, JobId, Kind, LinkId};

/// One choice of a reply.
pub(super) struct Sequence {
    /// Which of the request's prompts it answers.
    pub(super) prompt: usize,
    pub(super) answer: Answer,
    /// Prompt tokens that were cached, as usage tells it.
    pub(super) cached_tokens: u32,
    /// Tokens that have come out.
    pub(super) done: usize,
    /// More follow on a decode engine.
    pub(super) goes_on: bool,
    /// After a hand-off: the name under which its KV is pinned, and the blocks.
    pub(super) pinned: Option<(String, Box<[u32]>)>,
}

impl Sequence {
    /// Its first token ends it.
    pub(super) fn end_at_once(&mut self, words: &Words) {
        self.answer.end_at_once(words);
        self.goes_on = false;
    }

    /// What a prefill engine makes of an answer that goes on elsewhere.
    fn keep_first_token(&mut self) {
        if self.answer.pieces.len() > 1 {
            self.answer.pieces.truncate(1);
            self.answer.ending = Ending::Length;
            self.goes_on = true;
        }
    }
}

/// A request as the engine will run it.
pub(super) struct Plan {
    pub(super) request: Request,
    /// As the client sees it.
    pub(super) id: String,
    pub(super) created: u64,
    pub(super) model: String,
    pub(super) lora: Option<String>,
    pub(super) prompts: Vec<Arc<[u32]>>,
    pub(super) sequences: Vec<Sequence>,
    pub(super) leg: Leg,
    pub(super) rank: usize,
    /// Where to pull the prompt's KV from.
    pub(super) remote: Option<Remote>,
}

/// Which leg a request is, for an engine with a KV connector.
pub(super) fn leg_of(app: &App, request: &Request) -> Leg {
    if app.config.dialect == Dialect::Sglang {
        return sglang::leg_of(app, request);
    }
    match (&request.kv, app.has_connector()) {
        (kv, true) if kv.do_remote_prefill => Leg::Decode,
        (kv, true) if kv.do_remote_decode => Leg::Prefill,
        _ => Leg::Local,
    }
}

/// Where the request's params say that its KV is, if they say enough.
pub(super) fn remote_of(request: &Request) -> Option<Remote> {
    let kv = &request.kv;
    if let Some(bootstrap) = &kv.bootstrap {
        let (host, port, engine) = (bootstrap.host.clone(), bootstrap.port, String::new());
        return Some(Remote { host, port, engine, request: bootstrap.room(0), last_block: 0 });
    }
    if let Some(transfer) = &kv.transfer_id {
        let ((host, port), engine) = (kv.bootstrap_addr.clone()?, kv.remote_engine_id.clone()?);
        return Some(Remote { host, port, engine, request: transfer.clone(), last_block: 0 });
    }
    Some(Remote {
        host: kv.remote_host.clone()?,
        port: kv.remote_port?,
        engine: kv.remote_engine_id.clone()?,
        request: kv.remote_request_id.clone()?,
        last_block: kv.last_block?,
    })
}

/// Makes the plan of a request; `request_id` is the client's own, if it sent one.
pub(super) fn plan(
    app: &App,
    request: Request,
    rank: usize,
    request_id: Option<&str>,
) -> Result<Plan, Failure> {
    if app.config.dialect == Dialect::Sglang {
        sglang::refuse(app, &request)?;
    }
    let (model, lora) = model_of(app, request.model.as_deref())?;
    let prompts = prompts(&request, &app.model, app.config.max_model_len)?;
    let prompts: Vec<Arc<[u32]>> = prompts.into_iter().map(Arc::from).collect();
    if request.kv.bootstrap.as_ref().is_some_and(|bootstrap| !bootstrap.fits(prompts.len())) {
        return Err(Failure::bad(None, "bootstrap_room is not of as many prompts".to_owned()));
    }
    let mut sequences = sequences(app, &request, &prompts);
    if app.config.dialect != Dialect::Vllm && leg_of(app, &request) == Leg::Prefill {
        sequences.iter_mut().for_each(Sequence::keep_first_token);
    }
    let id = request_id.map_or_else(|| app.fresh_hex(), str::to_owned);
    let id = match (app.config.dialect, request.api) {
        (Dialect::Sglang, _) | (_, Api::Generate) => app.fresh_hex().repeat(2),
        (_, Api::Tokens) => format!("generate-tokens-{id}"),
        (_, Api::Chat) => format!("chatcmpl-{id}"),
        (_, Api::Completions) => format!("cmpl-{id}"),
    };
    Ok(Plan {
        id,
        created: now(),
        model,
        lora,
        leg: leg_of(app, &request),
        remote: remote_of(&request),
        prompts,
        sequences,
        rank,
        request,
    })
}

/// The served name and the adapter of a requested model.
fn model_of(app: &App, asked: Option<&str>) -> Result<(String, Option<String>), Failure> {
    let base = &app.config.model;
    match asked {
        None => Ok((base.clone(), None)),
        Some(name) if name == base => Ok((base.clone(), None)),
        Some(name) if app.config.adapters.iter().any(|adapter| adapter == name) => {
            Ok((name.to_owned(), Some(name.to_owned())))
        }
        // Whatever is asked for is what they serve.
        Some(name) if app.config.dialect != Dialect::Vllm => Ok((name.to_owned(), None)),
        Some(name) => Err(Failure::no_such_model(name, base)),
    }
}

fn sequences(app: &App, request: &Request, prompts: &[Arc<[u32]>]) -> Vec<Sequence> {
    let call = match request.api {
        Api::Chat => wanted_call(&request.members),
        Api::Completions | Api::Generate | Api::Tokens => None,
    };
    let choices = prompts
        .iter()
        .enumerate()
        .flat_map(|(p, ids)| (0..request.n).map(move |choice| (p, ids, choice)));
    choices
        .map(|(prompt, ids, choice)| Sequence {
            prompt,
            answer: answer_of(app, request, ids, choice, call.as_ref()),
            cached_tokens: 0,
            done: 0,
            goes_on: false,
            pinned: None,
        })
        .collect()
}

fn answer_of(
    app: &App,
    request: &Request,
    prompt: &[u32],
    choice: u32,
    call: Option<&Value>,
) -> Answer {
    let room = app.config.max_model_len.saturating_sub(prompt.len() as u32).max(1);
    let ask = Ask {
        prompt,
        choice,
        seed: request.seed,
        max_tokens: request.max_tokens.unwrap_or(room).min(room),
        min_tokens: request.min_tokens,
        ignore_eos: request.ignore_eos,
        stop: &request.stop,
        stop_token_ids: &request.stop_token_ids,
        keep_stop: request.include_stop,
        call,
    };
    answer(&app.words, &app.model, &ask)
}

impl Plan {
    /// The jobs of all sequences, with fresh numbers.
    pub(super) fn jobs(&self, app: &App, leg: Leg) -> Vec<Job> {
        self.sequences.iter().map(|sequence| self.job(app, leg, sequence)).collect()
    }

    fn job(&self, app: &App, leg: Leg, sequence: &Sequence) -> Job {
        let prompt = &self.prompts[sequence.prompt];
        let mut tokens = prompt.to_vec();
        tokens.extend(sequence.answer.pieces.iter().map(|piece| piece.id));
        let (size, seed) = (app.config.block_size, app.config.hash_seed);
        let salt = self.request.cache_salt.as_deref();
        let content = content(tokens, size, seed, self.lora.as_deref(), salt);
        // Only a prompt whose one token was cut by the limit is handed off; of SGLang every one.
        let hands_off =
            sequence.answer.ending == Ending::Length || app.config.dialect == Dialect::Sglang;
        let hands_off =
            hands_off && (!mooncake::is_used(&app.config) || self.request.kv.transfer_id.is_some());
        let kind = match leg {
            Leg::Prefill if hands_off => Kind::HandOff,
            Leg::Decode => Kind::Pull(self.link()),
            Leg::Prefill | Leg::Local | Leg::Any => Kind::Local,
        };
        Job {
            id: app.job_id(),
            prompt_tokens: prompt.len() as u32,
            output_tokens: sequence.answer.pieces.len() as u32,
            kind,
            content: Arc::new(content),
        }
    }

    /// Transfers from one prefill engine share a link.
    fn link(&self) -> LinkId {
        let bytes = self.remote.as_ref().map_or(&b""[..], |remote| remote.engine.as_bytes());
        LinkId(xxhash_rust::xxh3::xxh3_64(bytes))
    }

    /// Length and hash of a prompt, by which a prefill engine knows it again.
    pub(super) fn identity(&self, prompt: usize) -> (u32, u64) {
        (self.prompts[prompt].len() as u32, digest(&self.prompts[prompt]))
    }

    /// The name under which a sequence's KV is pinned.
    pub(super) fn pin_name(&self, sequence: usize, job: JobId) -> String {
        if let Some(bootstrap) = &self.request.kv.bootstrap {
            return bootstrap.room(self.sequences[sequence].prompt);
        }
        if let Some(transfer) = &self.request.kv.transfer_id {
            return transfer.clone();
        }
        let n = self.request.n as usize;
        let (prompt, choice) = (sequence / n, sequence % n);
        let parent = if n > 1 { format!("{choice}_") } else { String::new() };
        let tail = format!("{:08x}", crate::rng::mix(job.0) as u32);
        match self.request.api {
            Api::Chat | Api::Tokens => format!("{parent}{}-{tail}", self.id),
            Api::Completions | Api::Generate => format!("{parent}{}-{prompt}-{tail}", self.id),
        }
    }
}
