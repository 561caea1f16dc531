//! What the outside sees of a request: counters, the decision's log line, reply headers, and the
//! words of refusals.

use std::fmt::Write as _;
use std::time::Duration;

use http::{HeaderMap, HeaderName, HeaderValue, Uri};
use pointsman_brain::{
    Cause, Decision as Decided, FirstToken, Flag, Ladder, Leg, NoPath, Signal as Missing,
};

use crate::error::{Refusal, Reply};
use crate::fleet::{Group, Rank};
use crate::headers;
use crate::life::Life;
use crate::metrics::{Answer, ByKey, ByPath, Decision, Guard, Shadow, Signal};
use crate::router::Router;
use crate::run::Work;

/// The label of an endpoint; few, so that clients cannot make up series.
pub(crate) fn endpoint(uri: &Uri) -> &'static str {
    match uri.path() {
        "/v1/chat/completions" => "chat",
        "/v1/completions" => "completions",
        "/v1/embeddings" => "embeddings",
        "/generate" => "generate",
        _ => "other",
    }
}

/// Counts a reply that is passed on.
pub(crate) fn answered(life: &Life, endpoint: &'static str, reply: Reply) -> Reply {
    count(&life.router, endpoint, life.group.name(), reply.status().as_u16());
    reply
}

/// Counts a refusal and makes it a reply.
pub(crate) fn refused(
    router: &Router,
    endpoint: &'static str,
    group: Option<&Group>,
    refusal: &Refusal,
) -> Reply {
    count(router, endpoint, group.map_or("", Group::name), refusal.error.status);
    refusal.reply()
}

fn count(router: &Router, endpoint: &'static str, model: &str, status: u16) {
    let labels = Answer { model: model.to_owned(), endpoint, status };
    router.metrics.requests.get_or_create(&labels).inc();
}

/// Counts a request that a limit kept out.
pub(crate) fn limit(router: &Router, limit: &'static str) {
    router.metrics.requests_refused.get_or_create(&Signal { signal: limit }).inc();
}

/// Counts a reply for the key that asked; keys are few, as they are configured.
pub(crate) fn by_key(router: &Router, key: String, status: u16) {
    router.metrics.key_requests.get_or_create(&ByKey { key, status }).inc();
}

/// Counts and logs one decision.
pub(crate) fn decision(life: &Life, decision: &Decided) {
    let metrics = &life.router.metrics;
    let model = || life.group.name().to_owned();
    let path = decision.path.as_str();
    let reason = decision.why.as_str();
    let labels = Decision { model: model(), path, policy: decision.policy, reason };
    metrics.decisions.get_or_create(&labels).inc();
    metrics.effective_isl_tokens.observe(f64::from(decision.prefill_tokens));
    // Guards that were waived vetoed nothing; the fallback says so.
    let waived = decision.fallbacks.contains(Missing::Guards);
    for guard in decision.vetoes.iter().filter(|_| !waived) {
        metrics.guard_vetoes.get_or_create(&Guard { guard: guard.as_str() }).inc();
    }
    for signal in decision.fallbacks.iter() {
        metrics.fallbacks.get_or_create(&Signal { signal: signal.as_str() }).inc();
    }
    for (policy, path) in life.group.shadows.iter().zip(decision.shadows.iter()) {
        let labels = Shadow { model: model(), policy, path: path.as_str() };
        metrics.shadow_decisions.get_or_create(&labels).inc();
    }
    tracing::debug!(
        request = life.id,
        model = life.model,
        path,
        reason,
        because = %decision.why,
        policy = decision.policy,
        isl_tokens = decision.isl_tokens,
        effective_isl_tokens = decision.effective_isl_tokens,
        prefill = life.worker(decision.prefill),
        decode = life.worker(Some(decision.decode)),
        guards = ?decision.vetoes,
        fallbacks = ?decision.fallbacks,
        held_ms = millis(decision.waited.as_secs_f64()),
        predicted_ttft_ms = millis(decision.ttft_seconds),
        predicted_itl_ms = millis(decision.itl_seconds),
        local_cost = decision.scores.local.map(|score| score.j),
        remote_cost = decision.scores.remote.map(|score| score.j),
        "decided"
    );
}

/// Counts and logs how far the predicted time to a first token was off.
pub(crate) fn first_token(work: &Work, decision: &Decided, worker: &str, first: &FirstToken) {
    let path = first.path.as_str();
    let ratio = work.router.metrics.ttft_prediction_error_ratio.get_or_create(&ByPath { path });
    ratio.observe(first.error());
    tracing::debug!(
        request = work.id,
        model = work.group.name(),
        path,
        worker,
        predicted_ttft_ms = millis(first.predicted),
        actual_ttft_ms = millis(first.actual),
        predicted_itl_ms = millis(decision.itl_seconds),
        "first token"
    );
}

/// Milliseconds, to the microsecond.
fn millis(seconds: f64) -> f64 {
    (seconds * 1e6).round() / 1e3
}

/// Puts the decision into a reply's headers.
pub(crate) fn mark(to: &mut HeaderMap, decision: &Decided, rank: &Rank) {
    let fixed = |to: &mut HeaderMap, name: HeaderName, value: &'static str| {
        to.insert(name, HeaderValue::from_static(value));
    };
    fixed(to, headers::PATH, decision.path.as_str());
    fixed(to, headers::REASON, decision.why.as_str());
    if let Ok(value) = HeaderValue::from_str(rank.worker.name()) {
        to.insert(headers::WORKER, value);
    }
    // Formatting a float costs more than all of the decision.
    let micros = (decision.ttft_in_all_seconds() * 1e6).round() as u64;
    if let Ok(value) = HeaderValue::from_str(&format!("{}.{:03}", micros / 1000, micros % 1000)) {
        to.insert(headers::TTFT, value);
    }
}

/// The refusal of a request that no plan fits.
pub(crate) fn no_path(life: &Life, no_path: &NoPath) -> Refusal {
    let whole = life.request.each_disaggregable().and(life.request.disaggregable());
    if let (NoPath::NotDisaggregable, Err(why)) = (no_path, whole) {
        return needs_one_worker(why);
    }
    if no_path.is_request_fault() {
        return Refusal::new(400, no_path.to_string());
    }
    complain(life, &no_path.to_string());
    Refusal::new(503, format!("model `{}`: {no_path}; try again later", life.model))
        .retry_after(life.router.settings.limits.retry_after)
}

/// The refusal of a request that cannot be split, and why not, on a fleet that can only split.
fn needs_one_worker(why: &str) -> Refusal {
    let (what, instead) = match why {
        "batch" => ("a batch of prompts needs", "; send the prompts one by one"),
        "choices" => ("several choices need", "; ask for one at a time"),
        "prompt_logprobs" => ("log probabilities of a prompt need", ""),
        "prompt_embeds" => ("a prompt of embeddings needs", ""),
        "beam_search" => ("a beam search needs", ""),
        "truncated_prompt" => ("a prompt that is to be truncated needs", ""),
        _ => ("this endpoint needs", ""),
    };
    let message =
        format!("{what} a worker that can prefill locally, and this fleet has none{instead}");
    let refusal = Refusal::new(400, message);
    if why == "choices" { refusal.param("n") } else { refusal }
}

/// The refusal of a request that waits when the router is to end.
pub(crate) fn sent_away(life: &Life) -> Refusal {
    let message = format!("model `{}`: the router is shutting down; try another one", life.model);
    Refusal::new(503, message).retry_after(life.router.settings.limits.retry_after)
}

/// The refusal of a request that no worker was free for in its time.
pub(crate) fn held_too_long(life: &Life, limit: Duration) -> Refusal {
    let model = &life.model;
    self::limit(&life.router, "max_wait");
    tracing::debug!(request = life.id, model, "no worker was free within {limit:?}");
    let message = format!("model `{model}`: no worker was free within {limit:?}; try again later");
    Refusal::new(503, message).retry_after(retry_after(life, life.group.hold.retry_after()))
}

/// The refusal of a request for which the line of those that wait has no place.
pub(crate) fn no_place(life: &Life, why: &'static str, drained_in: Duration) -> Refusal {
    let (model, most) = (&life.model, life.group.settings.routing.admission.max_waiting);
    limit(&life.router, why);
    tracing::debug!(request = life.id, model, why, "no place to wait");
    let message = format!(
        "model `{model}`: all workers are busy and {most} requests wait before this one, the most \
         that may; try again later"
    );
    Refusal::new(429, message).retry_after(retry_after(life, drained_in))
}

/// No sooner than is configured.
fn retry_after(life: &Life, measured: Duration) -> Duration {
    measured.max(life.router.settings.limits.retry_after)
}

/// The refusal of a request that every try has failed.
pub(crate) fn gave_up(life: &Life, ladder: &Ladder) -> Refusal {
    failed(503, "every try failed", life, ladder)
        .retry_after(life.router.settings.limits.retry_after)
}

/// The refusal of a request whose time ran out before a reply began.
pub(crate) fn late(life: &Life, ladder: &Ladder) -> Refusal {
    let limit = life.router.settings.timeouts.request;
    failed(504, &format!("no reply within {limit:?}"), life, ladder)
}

fn failed(status: u16, what: &str, life: &Life, ladder: &Ladder) -> Refusal {
    let mut message = format!("model `{}`: {what}:", life.model);
    for (i, (attempt, rank)) in ladder.causes().iter().zip(&life.tried).enumerate() {
        let separator = if i == 0 { "" } else { ";" };
        let (leg, worker) = (attempt.leg.as_str(), rank.worker.name());
        let _infallible = write!(message, "{separator} {leg} worker `{worker}` {}", attempt.cause);
    }
    complain(life, &message);
    Refusal::new(status, message)
}

/// Says in the log that a leg failed, of each worker once a second. What a client is refused for is none of
/// the worker's doing, but for the key that the router itself sends.
pub(crate) fn leg_failed(group: &Group, leg: Leg, rank: &Rank, cause: Cause) {
    let (model, worker, leg) = (group.name(), rank.worker.name(), leg.as_str());
    let clients = cause.is_client_error() && !matches!(cause, Cause::Status(401 | 403));
    let turn = if clients { None } else { rank.worker.complaints.turn(group.now()) };
    match turn {
        Some(unwritten) => tracing::warn!(model, worker, leg, unwritten, "the worker {cause}"),
        None => tracing::debug!(model, worker, leg, "the worker {cause}"),
    }
}

/// The refusal of a request that has no answer yet at the end of the grace period.
pub(crate) fn cut_off() -> Refusal {
    Refusal::new(503, "the router is shutting down; send the request again")
}

/// Says in the log what became of a request, once a second: when all workers are gone, it is the same of
/// every one.
fn complain(life: &Life, message: &str) {
    let group = &life.group;
    match group.complaints.turn(group.now()) {
        Some(unwritten) => {
            tracing::warn!(request = life.id, model = life.model, unwritten, "{message}");
        }
        None => tracing::debug!(request = life.id, model = life.model, "{message}"),
    }
}
