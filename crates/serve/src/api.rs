//! Paths to answers. Everything with a `model` in its body goes to a worker; the rest is here.

use std::sync::Arc;

use http::{HeaderValue, Method, Request, header};
use hyper::body::Incoming;
use pointsman_wire::dialect::Api;
use pointsman_wire::openai::{self, ModelCard};
use serde_json::json;

use crate::error::{Refusal, Reply, json, whole};
use crate::fleet::Group;
use crate::router::Router;
use crate::{admin, life};

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

/// Answers one request.
pub(crate) async fn answer(router: Arc<Router>, request: Request<Incoming>) -> Reply {
    let (head, body) = request.into_parts();
    let path = head.uri.path();
    if let Some(rest) = path.strip_prefix("/v1/pointsman/") {
        let rest = rest.to_owned();
        return admin::answer(&router, &rest, head, body).await;
    }
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
        "/v1/models" => return only(&Method::GET, &head.method, || models(&router)),
        "/v1/completions" => Api::Completions,
        "/v1/chat/completions" => Api::Chat,
        _ if PASSED_ON.contains(&path) => Api::Other,
        _ => match path.strip_prefix("/v1/models/") {
            Some(name) => {
                let name = admin::decoded(name);
                return only(&Method::GET, &head.method, || model(&router, &name));
            }
            None => return not_found(path),
        },
    };
    if head.method != Method::POST {
        return wrong_method(&Method::POST);
    }
    life::serve(router, api, head, body).await
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

/// One entry for each name that a group goes by.
fn cards(router: &Router, mut each: impl FnMut(&ModelCard<'_>)) {
    for group in &router.fleet.groups {
        let max_model_len = shortest_context(group);
        let mut listed: Vec<String> = Vec::new();
        let mut card = |id: &str, parent: Option<&str>| {
            if !listed.iter().any(|name| name == id) {
                let created = group.created;
                each(&ModelCard { id, created, owned_by: "pointsman", parent, max_model_len });
                listed.push(id.to_owned());
            }
        };
        let s = &group.settings;
        card(&s.name, None);
        s.aliases.iter().for_each(|alias| card(alias, None));
        s.adapters.iter().for_each(|adapter| card(adapter, Some(&s.name)));
        for worker in group.roster.load().workers() {
            for model in &worker.learned.load().models {
                card(&model.id, model.parent.is_some().then_some(s.name.as_str()));
            }
        }
    }
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

fn models(router: &Router) -> Reply {
    let mut entries = Vec::new();
    cards(router, |card| entries.push(openai::model(card)));
    let mut body = br#"{"object":"list","data":["#.to_vec();
    body.extend(entries.join(&b","[..]));
    body.extend(b"]}");
    json(200, body)
}

fn model(router: &Router, name: &str) -> Reply {
    let mut found = None;
    cards(router, |card| {
        if card.id == name {
            found = Some(openai::model(card));
        }
    });
    match found {
        Some(body) => json(200, body),
        None => Refusal::no_model(name).reply(),
    }
}
