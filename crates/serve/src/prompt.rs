//! From a request to tokens: what a prompt is made of, counted or estimated.
//!
//! Invariant: `ids` are exact or absent; whatever is guessed is marked `estimated` or `partial`.
//! Not here: hashing (`sight`), and the tokenizers themselves (the `tokens` crate).

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use pointsman_config::{Estimates, Tokenizer as Setting};
use pointsman_tokens::{CacheLimits, Chat, Encoded, Model, Partial};
use pointsman_wire::body::{Body, Prompt as Written};
use pointsman_wire::dialect::{Api, Request};
use tokio::sync::Semaphore;

use crate::error::Refusal;

/// Texts up to this many bytes are tokenised on the spot; longer ones would hold up the thread's
/// other requests and go to a thread of their own.
const INLINE_BYTES: usize = 16 * 1024;

/// Bytes of one prompt token where the setting does not say.
const BYTES_PER_TOKEN: f64 = pointsman_tokens::BYTES_PER_TOKEN as f64;

/// How long a longer text waits for its turn; then its length is estimated.
const TURN_WAIT: Duration = Duration::from_secs(1);

/// What a request asks the engine to read.
#[derive(Clone, Debug, Default)]
pub(crate) struct Prompt {
    /// Tokens of all prompts together.
    pub(crate) isl_tokens: u32,
    /// The ids of each prompt, or of its exact prefix where `partial`.
    pub(crate) ids: Vec<Arc<[u32]>>,
    /// The count comes from bytes.
    pub(crate) estimated: bool,
    /// The prompt has parts that are no text; their length is estimated.
    pub(crate) partial: bool,
}

impl Prompt {
    /// The ids of a single prompt that is known to its last token.
    pub(crate) fn exact(&self) -> Option<&Arc<[u32]>> {
        match self.ids.as_slice() {
            [ids] if !self.estimated && !self.partial => Some(ids),
            _ => None,
        }
    }

    fn of_ids(ids: Vec<Arc<[u32]>>) -> Prompt {
        let isl_tokens = ids.iter().map(|ids| count(ids.len())).fold(0, u32::saturating_add);
        Prompt { isl_tokens, ids, estimated: false, partial: false }
    }

    fn of_bytes(bytes: usize, bytes_per_token: f64) -> Prompt {
        let tokens = (bytes as f64 / bytes_per_token).ceil();
        // Saturates at both ends; NaN cannot come from a finite ratio above zero.
        Prompt { isl_tokens: tokens as u32, estimated: true, ..Prompt::default() }
    }

    fn of_chat(encoded: Encoded, estimates: &Estimates) -> Prompt {
        let known = count(encoded.ids.len());
        let rest = encoded.partial.map_or(0, |partial| beyond_text(&partial, estimates));
        Prompt {
            isl_tokens: known.saturating_add(rest),
            partial: encoded.partial.is_some(),
            ids: vec![encoded.ids],
            estimated: false,
        }
    }
}

fn count(tokens: usize) -> u32 {
    u32::try_from(tokens).unwrap_or(u32::MAX)
}

fn beyond_text(partial: &Partial, estimates: &Estimates) -> u32 {
    [
        (partial.images, estimates.image_tokens),
        (partial.audio, estimates.audio_tokens),
        (partial.videos, estimates.video_tokens),
        (partial.others, estimates.other_tokens),
    ]
    .into_iter()
    .map(|(parts, tokens)| parts.saturating_mul(tokens))
    .fold(partial.text_tokens, u32::saturating_add)
}

/// How one model's prompts become tokens.
#[derive(Clone, Debug)]
pub(crate) enum Tokenizer {
    /// On this machine.
    Local(Arc<Model>),
    /// The engine's own `/tokenize`.
    Engine,
    /// From bytes.
    Estimate { bytes_per_token: f64 },
}

impl Tokenizer {
    pub(crate) fn new(
        setting: &Setting,
        cache_bytes: usize,
    ) -> Result<Tokenizer, pointsman_tokens::Error> {
        let limits = CacheLimits { bytes: cache_bytes };
        Ok(match setting {
            Setting::Dir(dir) => {
                let model = Model::from_dir(dir, limits)?;
                if let Some(reason) = model.slow_because() {
                    tracing::warn!(dir = %dir.display(), reason, "tokenising is slow");
                }
                Tokenizer::Local(Arc::new(model))
            }
            Setting::Builtin => Tokenizer::Local(Arc::new(Model::builtin(limits)?)),
            Setting::Engine => Tokenizer::Engine,
            Setting::Estimate { bytes_per_token } => {
                Tokenizer::Estimate { bytes_per_token: *bytes_per_token }
            }
        })
    }
}

/// Somebody who answers `/tokenize`: the ids of the request's single prompt, if they can be had.
pub(crate) trait AskEngine {
    fn tokenize(&self, request: &Request) -> impl Future<Output = Option<Vec<u32>>> + Send;
}

/// How much may be tokenised: a tokenizer takes far more memory than its text.
pub(crate) struct Bounds<'a> {
    /// One permit for each longer text that is tokenised at once.
    pub(crate) at_once: &'a Arc<Semaphore>,
    /// The prompt of a larger body is estimated.
    pub(crate) body_bytes: usize,
}

/// Counts the prompt of a request. Text that cannot be tokenised is estimated, not refused: the
/// engine has the last word on what it takes.
pub(crate) async fn read(
    tokenizer: &Tokenizer,
    estimates: &Estimates,
    request: &Request,
    engine: &impl AskEngine,
    bounds: Bounds<'_>,
) -> Result<Prompt, Refusal> {
    if request.api() == Api::Other {
        return Ok(Prompt::of_bytes(request.body().bytes().len(), BYTES_PER_TOKEN));
    }
    match tokenizer {
        Tokenizer::Local(_) if request.body().bytes().len() > bounds.body_bytes => {
            written(request, BYTES_PER_TOKEN)
        }
        Tokenizer::Local(model) => local(model, *estimates, request, bounds.at_once).await,
        Tokenizer::Estimate { bytes_per_token } => written(request, *bytes_per_token),
        Tokenizer::Engine => {
            let prompt = written(request, BYTES_PER_TOKEN)?;
            if !prompt.estimated {
                return Ok(prompt);
            }
            Ok(match engine.tokenize(request).await {
                Some(ids) => Prompt::of_ids(vec![ids.into()]),
                None => prompt,
            })
        }
    }
}

/// What the body alone tells: ids where the client sent ids, else bytes.
fn written(request: &Request, bytes_per_token: f64) -> Result<Prompt, Refusal> {
    if request.api() == Api::Chat {
        let bytes = request.body().messages_raw().map_or(0, str::len)
            + request.body().tools_raw().map_or(0, str::len);
        return Ok(Prompt::of_bytes(bytes, bytes_per_token));
    }
    Ok(match request.prompt()? {
        Written::Ids(ids) => Prompt::of_ids(vec![ids.into()]),
        Written::IdsBatch(batch) => Prompt::of_ids(batch.into_iter().map(Arc::from).collect()),
        Written::Text(text) => Prompt::of_bytes(text.len(), bytes_per_token),
        Written::TextBatch(texts) => {
            Prompt::of_bytes(texts.iter().map(|text| text.len()).sum(), bytes_per_token)
        }
        Written::Absent => Prompt::default(),
    })
}

async fn local(
    model: &Arc<Model>,
    estimates: Estimates,
    request: &Request,
    at_once: &Arc<Semaphore>,
) -> Result<Prompt, Refusal> {
    if request.body().bytes().len() <= INLINE_BYTES {
        return encode(model, &estimates, request);
    }
    let failed = || Refusal::new(500, "the prompt could not be tokenised");
    let permit = Arc::clone(at_once).acquire_owned();
    let Ok(permit) = tokio::time::timeout(TURN_WAIT, permit).await else {
        return written(request, BYTES_PER_TOKEN);
    };
    let permit = permit.map_err(|_| failed())?;
    let (model, request) = (Arc::clone(model), request.clone());
    let encoding = tokio::task::spawn_blocking(move || {
        // Held here, because the work goes on when the client has left.
        let _permit = permit;
        encode(&model, &estimates, &request)
    });
    encoding.await.unwrap_or_else(|_| Err(failed()))
}

fn encode(model: &Model, estimates: &Estimates, request: &Request) -> Result<Prompt, Refusal> {
    if request.api() == Api::Chat {
        return Ok(match chat(request.body()).map(|chat| model.encode_chat(&chat)) {
            Some(Ok(encoded)) => Prompt::of_chat(encoded, estimates),
            Some(Err(error)) => {
                tracing::debug!(%error, "a chat could not be rendered; its length is estimated");
                written(request, BYTES_PER_TOKEN)?
            }
            None => Prompt::default(),
        });
    }
    let special = request.body().flag("add_special_tokens");
    let ids = |text: &str| Some(model.encode_prompt(text, special).ok()?.ids);
    let all = match request.prompt()? {
        Written::Text(text) => ids(&text).map(|ids| vec![ids]),
        Written::TextBatch(texts) => texts.iter().map(|text| ids(text)).collect(),
        Written::Ids(_) | Written::IdsBatch(_) | Written::Absent => None,
    };
    all.map_or_else(|| written(request, BYTES_PER_TOKEN), |all| Ok(Prompt::of_ids(all)))
}

/// The members of a chat request that shape its prompt.
fn chat(body: &Body) -> Option<Chat<'_>> {
    let raw = |name| body.raw(name).map(str::as_bytes);
    let mut chat = Chat::new(body.messages_raw()?.as_bytes(), unix_seconds());
    chat.tools = raw("tools");
    chat.documents = raw("documents");
    chat.chat_template_kwargs = raw("chat_template_kwargs");
    chat.reasoning_effort = raw("reasoning_effort");
    chat.add_generation_prompt = body.flag("add_generation_prompt").unwrap_or(true);
    chat.continue_final_message = body.flag("continue_final_message").unwrap_or(false);
    chat.add_special_tokens = body.flag("add_special_tokens").unwrap_or(false);
    Some(chat)
}

pub(crate) fn unix_seconds() -> i64 {
    let elapsed = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(elapsed.as_secs()).unwrap_or(i64::MAX)
}
