//! What a worker can do, as it was told or says itself, in words for people.

use pointsman_config::{Engine, KvEvents, Role};
use pointsman_wire::dialect::{Order, Takes};
use serde::Serialize;

use crate::fleet::Worker;

/// What a worker can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Capabilities {
    /// It may run the prefill of a request itself.
    pub(crate) local_prefill: bool,
    /// What it tells of its cache.
    pub(crate) events: Tells,
    /// It fetches only the KV that it lacks; None if nobody has said.
    pub(crate) skips_cached_blocks: Option<bool>,
    /// How the legs of a remote path start; None if it takes part in none.
    pub(crate) legs: Option<Legs>,
    /// Where it takes token ids instead of text.
    pub(crate) takes_ids: Ids,
}

/// What a worker tells of its cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Tells {
    /// Everything.
    All,
    /// All but the blocks that it got from another worker.
    Computed,
    /// Nothing.
    Nothing,
}

/// How the legs of a remote path start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Legs {
    /// One after the other.
    PrefillFirst,
    /// At once.
    Together,
}

/// Where a worker takes token ids.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Ids {
    /// Nowhere that is known.
    Nowhere,
    /// Not for chats.
    Completions,
    /// Everywhere.
    CompletionsAndChat,
}

impl Capabilities {
    pub(crate) fn of(worker: &Worker) -> Capabilities {
        let (s, dialect) = (&worker.settings, worker.dialect());
        let publishes = worker.learned.load().publishes_events;
        Capabilities {
            local_prefill: worker.local_prefill(),
            events: match (worker.tells_all(), publishes) {
                (true, _) => Tells::All,
                (false, true) => Tells::Computed,
                (false, false) => Tells::Nothing,
            },
            skips_cached_blocks: match s.role {
                Role::Decode => worker.skips_cached_blocks(),
                Role::Prefill | Role::Unified => None,
            },
            legs: dialect.order().filter(|_| s.role != Role::Unified).map(|order| match order {
                Order::PrefillFirst => Legs::PrefillFirst,
                Order::Together => Legs::Together,
            }),
            takes_ids: match dialect.takes_ids() {
                Takes::Nothing => Ids::Nowhere,
                Takes::Completions => Ids::Completions,
                Takes::CompletionsAndChat => Ids::CompletionsAndChat,
            },
        }
    }

    /// All of it in one line.
    pub(crate) fn line(&self, role: Role) -> String {
        let mut words = vec![match self.events {
            Tells::All => "tells its KV events",
            Tells::Computed => "tells KV events of what it computed",
            Tells::Nothing => "tells no KV events",
        }];
        if role == Role::Decode {
            words.push(if self.local_prefill { "prefills locally" } else { "never prefills" });
            words.push(match self.skips_cached_blocks {
                Some(true) => "fetches what it lacks",
                Some(false) => "fetches whole prompts",
                None => "fetches nobody knows how much",
            });
        }
        match self.legs {
            Some(Legs::PrefillFirst) => words.push("prefill leg first"),
            Some(Legs::Together) => words.push("both legs at once"),
            None => {}
        }
        words.push(match self.takes_ids {
            Ids::Nowhere => "takes text",
            Ids::Completions => "takes token ids of completions",
            Ids::CompletionsAndChat => "takes token ids",
        });
        words.join(", ")
    }

    /// What follows from it that one might not expect, one sentence each.
    pub(crate) fn consequences(&self, worker: &Worker) -> Vec<String> {
        let s = &worker.settings;
        let mut lines: Vec<String> = Vec::new();
        if s.role == Role::Decode && !self.local_prefill {
            lines.push(match s.engine {
                Engine::Sglang => {
                    "it refuses a request that was not prefilled elsewhere: `n` above 1 and log \
                     probabilities of prompts need a `unified` worker"
                        .to_owned()
                }
                _ => "it takes no request that was not prefilled elsewhere".to_owned(),
            });
        }
        if s.role == Role::Decode && self.local_prefill && s.engine != Engine::Vllm {
            lines.push("batches and `n` above 1 always go local".to_owned());
        }
        match self.skips_cached_blocks {
            Some(false) => lines.push(match s.engine {
                Engine::Sglang => "each remote turn moves its whole prompt: start it with \
                     --disaggregation-decode-enable-radix-cache"
                    .to_owned(),
                _ => "each remote turn moves its whole prompt".to_owned(),
            }),
            None if s.role == Role::Decode => lines.push(
                "transfers are reckoned as if it fetched only what it lacks: set \
                 skips_cached_blocks if you know better"
                    .to_owned(),
            ),
            _ => {}
        }
        if s.engine == Engine::Trtllm && s.role == Role::Decode {
            lines.push(
                "it does not tell which blocks it received: the router notes them itself, up to its \
                 capacity"
                    .to_owned(),
            );
        }
        if s.engine == Engine::Trtllm && s.kv_events == KvEvents::Auto {
            lines.push(
                "its KV events go to whoever asks first: no other router and no `trtllm-serve \
                 disaggregated` may ask for them"
                    .to_owned(),
            );
        }
        lines
    }
}
