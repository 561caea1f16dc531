//! Paths to answers. Everything with a `model` in its body goes to a worker; the rest is here.

use std::pin::pin;
use std::sync::Arc;

use http::{HeaderMap, HeaderValue, Method, Request, header};
use hyper::body::Incoming;
use pointsman_wire::dialect::Api;
use pointsman_wire::openai::{self, ModelCard};
use serde_json::json;

use crate::auth::{self, Allowed, Known};
use crate::error::{Refusal, Reply, json, whole};
use crate::fleet::Group;
use crate::listener::Serves;
use crate::router::Router;
use crate::{admin, life, report};

/// The content type of Prometheus text.
const METRICS_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Inference endpoints that engines have beside completions and chat. Nothing else of an engine can be
/// reached: many have endpoints that reset caches, load adapters or put the engine to sleep.
const PASSED_ON: [&str; 16] = [
    "/classify",
    "/detokenize",
    "/pooling",
    "/rerank",
    "/score",
    "/tokenize",
    "/v1/audio/speech",
    "/v1/embeddings",
    "/v1/images/generations",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/moderations",
    "/v1/rerank",
    "/v1/responses",
    "/v1/score",
    "/v2/rerank",
];

/// Most headers of a request: what goes to an engine has some more, and servers take a hundred.
const MAX_HEADERS: usize = 90;

/// Answers one request.
pub(crate) async fn answer(
    router: Arc<Router>,
    serves: Serves,
    request: Request<Incoming>,
) -> Reply {
    if request.headers().get_all(header::HOST).iter().nth(1).is_some() {
        // As RFC 9112 has it: of two, others on the way may have gone by either.
        return Refusal::new(400, "a request has one Host header, this one has more").reply();
    }
    if request.headers().len() > MAX_HEADERS {
        return Refusal::new(431, format!("a request has at most {MAX_HEADERS} headers")).reply();
    }
    answer_at(router, serves, request).await
}

/// Answers a request by its path.
async fn answer_at(router: Arc<Router>, serves: Serves, request: Request<Incoming>) -> Reply {
    let (mut head, body) = request.into_parts();
    let uri = head.uri.clone();
    let path = uri.path();
    let open = matches!(path, "/health" | "/live" | "/ready");
    let administration = path == "/metrics" || path.starts_with("/v1/pointsman/");
    if !open && serves != Serves::All && administration != (serves == Serves::Admin) {
        return not_found(path);
    }
    if let Some(rest) = path.strip_prefix("/v1/pointsman/") {
        return match admin_may(&router, serves, &mut head.headers) {
            Ok(()) => admin::answer(&router, rest, head, body).await,
            Err(refusal) => refusal.reply(),
        };
    }
    let known = match &router.keys {
        Some(keys) if !open && !administration => match keys.client(&mut head.headers) {
            Ok(known) => Some(known),
            Err(refusal) => {
                report::limit(&router, "api_key");
                return report::refused(&router, report::endpoint(&uri), None, &refusal);
            }
        },
        _ => None,
    };
    let allowed = known.as_ref().map_or(Allowed::ALL, Known::allowed);
    let api = match path {
        "/health" | "/live" => {
            return only(&Method::GET, &head.method, || json(200, r#"{"status":"live"}"#));
        }
        "/ready" => return only(&Method::GET, &head.method, || ready(&router)),
        "/metrics" => {
            return only(&Method::GET, &head.method, || {
                whole(200, METRICS_TYPE, router.metrics_text())
            });
        }
        "/v1/models" => return only(&Method::GET, &head.method, || models(&router, allowed)),
        "/v1/completions" => Api::Completions,
        "/v1/chat/completions" => Api::Chat,
        "/generate" => Api::Generate,
        _ if PASSED_ON.contains(&path) => Api::Other,
        _ => match path.strip_prefix("/v1/models/") {
            Some(name) => {
                let name = admin::decoded(name);
                return only(&Method::GET, &head.method, || model(&router, &name, allowed));
            }
            None => return not_found(path),
        },
    };
    if head.method != Method::POST {
        return wrong_method(&Method::POST);
    }
    let Some(known) = known else { return served(router, api, head, body).await };
    let key = known.name().to_owned();
    let reply = match known.enter() {
        Ok(client) => {
            head.extensions.insert(Arc::new(client));
            served(Arc::clone(&router), api, head, body).await
        }
        Err((limit, refusal)) => {
            report::limit(&router, limit);
            report::refused(&router, report::endpoint(&uri), None, &refusal)
        }
    };
    report::by_key(&router, key, reply.status().as_u16());
    reply
}

/// Serves a request; what has no answer at the end of the grace period is told so.
async fn served(
    router: Arc<Router>,
    api: Api,
    head: http::request::Parts,
    body: Incoming,
) -> Reply {
    let ending = Arc::clone(&router);
    let endpoint = report::endpoint(&head.uri);
    let serving = pin!(life::serve(router, api, head, body));
    tokio::select! {
        biased;
        reply = serving => reply,
        () = ending.cut_off.cancelled() => {
            report::refused(&ending, endpoint, None, &report::cut_off())
        }
    }
}

/// Whether the bearer may see and change the router's state. Where clients have keys, their port does not
/// show it to everybody.
fn admin_may(router: &Router, serves: Serves, head: &mut HeaderMap) -> Result<(), Refusal> {
    match &router.settings.admin_key {
        Some(wanted) => auth::bears(head, wanted),
        None if router.keys.is_some() && serves == Serves::All => Err(auth::unauthorized(
            "closed to clients: set `admin.key_sha256`, or serve it apart with `admin.listen`",
        )),
        None => Ok(()),
    }
}

fn only(wanted: &Method, method: &Method, answer: impl FnOnce() -> Reply) -> Reply {
    if method == wanted || (method == Method::HEAD && wanted == Method::GET) {
        answer()
    } else {
        wrong_method(wanted)
    }
}

pub(crate) fn wrong_method(allowed: &Method) -> Reply {
    let mut reply = Refusal::new(405, format!("only {allowed} is allowed here")).reply();
    if let Ok(value) = HeaderValue::from_str(allowed.as_str()) {
        reply.headers_mut().insert(header::ALLOW, value);
    }
    reply
}

pub(crate) fn not_found(path: &str) -> Reply {
    Refusal::new(404, format!("there is nothing at {path}")).reply()
}

/// Ready means that a request for each model can be served.
fn ready(router: &Router) -> Reply {
    let mut models = serde_json::Map::new();
    let mut ready = !router.is_draining();
    for group in &router.fleet.groups {
        let readiness = group.brain().can_serve(group.now());
        ready &= readiness.ready;
        models.insert(group.name().to_owned(), json!(readiness));
    }
    let status = if ready { 200 } else { 503 };
    let body = json!({"ready": ready, "draining": router.is_draining(), "models": models});
    json(status, body.to_string())
}

/// A name that a group goes by.
struct Named {
    id: String,
    /// The base model, if it is an adapter.
    parent: Option<String>,
    created: u64,
    max_model_len: Option<u32>,
}

impl Named {
    fn card(&self) -> ModelCard<'_> {
        let Named { created, max_model_len, .. } = *self;
        let parent = self.parent.as_deref();
        ModelCard { id: &self.id, created, owned_by: "pointsman", parent, max_model_len }
    }
}

/// Every name that a group goes by, once: those of the configuration, then those that workers list.
fn names(group: &Group) -> Vec<Named> {
    let (created, max_model_len) = (group.created, shortest_context(group));
    let mut names: Vec<Named> = Vec::new();
    let mut add = |id: &str, parent: Option<&str>| {
        if !names.iter().any(|named| named.id == id) {
            let (id, parent) = (id.to_owned(), parent.map(str::to_owned));
            names.push(Named { id, parent, created, max_model_len });
        }
    };
    let s = &group.settings;
    add(&s.name, None);
    s.aliases.iter().for_each(|alias| add(alias, None));
    s.adapters.iter().for_each(|adapter| add(adapter, Some(&s.name)));
    for worker in group.roster.load().workers() {
        for model in &worker.learned.load().models {
            add(&model.id, model.parent.is_some().then_some(s.name.as_str()));
        }
    }
    names
}

/// The longest request that every worker of a group takes.
fn shortest_context(group: &Group) -> Option<u32> {
    let roster = group.roster.load();
    roster
        .workers()
        .filter_map(|worker| {
            worker.learned.load().models.iter().filter_map(|model| model.max_model_len).min()
        })
        .min()
}

fn models(router: &Router, allowed: Allowed<'_>) -> Reply {
    let names: Vec<Named> = allowed_names(router, allowed).collect();
    json(200, openai::models(names.iter().map(Named::card)))
}

/// The names that somebody may use.
fn allowed_names<'a>(router: &'a Router, allowed: Allowed<'a>) -> impl Iterator<Item = Named> + 'a {
    router.fleet.groups.iter().flat_map(move |group| {
        let may = move |named: &Named| allowed.covers(&named.id, group.base_of(&named.id));
        names(group).into_iter().filter(may)
    })
}

fn model(router: &Router, name: &str, allowed: Allowed<'_>) -> Reply {
    match allowed_names(router, allowed).find(|named| named.id == name) {
        Some(named) => json(200, openai::model(&named.card())),
        None => Refusal::no_model(name).reply(),
    }
}
