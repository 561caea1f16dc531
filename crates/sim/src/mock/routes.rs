//! Which path is answered by whom, and the small endpoints.

use std::convert::Infallible;
use std::sync::Arc;

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method, Request};
use http_body_util::{BodyExt, Limited};
use hyper::body::Incoming;
use serde_json::{Map, Value, json};

use super::app::{App, now};
use super::body::{self, Reply};
use super::config::Dialect;
use super::connection::{Face, Hangup};
use super::errors::Failure;
use super::request::{Api, Members, parse_json, token_ids};
use super::{control, embeddings, inference, metrics, mooncake, prompt, scale_out, sglang, trtllm};

/// Largest request body.
const BODY_BYTES: usize = 256 << 20;

/// vLLM's endpoint that takes and gives token ids.
const GENERATE: &str = "/inference/v1/generate";

/// Paths of every engine, and the methods they take.
const PATHS: &[(&str, &str)] = &[
    ("/health", "GET"),
    ("/metrics", "GET"),
    ("/v1/models", "GET"),
    ("/v1/completions", "POST"),
    ("/v1/chat/completions", "POST"),
    ("/mock/faults", "GET, POST"),
    ("/mock/stats", "GET"),
    ("/mock/cache", "GET"),
];

/// Those of one dialect.
fn own_paths(dialect: Dialect) -> &'static [(&'static str, &'static str)] {
    match dialect {
        Dialect::Vllm => &[
            ("/ping", "GET, POST"),
            ("/version", "GET"),
            ("/load", "GET"),
            ("/kv_event_sources", "GET"),
            ("/v1/embeddings", "POST"),
            ("/tokenize", "POST"),
            ("/detokenize", "POST"),
            ("/reset_prefix_cache", "POST"),
            ("/v1/completions/render", "POST"),
            ("/v1/chat/completions/render", "POST"),
            ("/v1/completions/derender", "POST"),
            (GENERATE, "POST"),
            ("/inference/v1/abort_requests", "POST"),
        ],
        Dialect::Sglang => &[
            ("/generate", "POST"),
            ("/server_info", "GET"),
            ("/model_info", "GET"),
            ("/v1/loads", "GET"),
            ("/tokenize", "POST"),
            ("/v1/tokenize", "POST"),
            ("/flush_cache", "GET, POST"),
        ],
        Dialect::Trtllm => &[("/version", "GET"), ("/kv_cache_events", "POST")],
    }
}

pub(super) async fn answer(
    app: Arc<App>,
    face: Face,
    hangup: Arc<Hangup>,
    request: Request<Incoming>,
) -> Result<Reply, Infallible> {
    let id = app.config.request_id_headers.then(|| {
        let sent = request.headers().get("x-request-id").cloned();
        let made = || HeaderValue::from_str(&app.fresh_hex().repeat(2)).ok();
        sent.or_else(made)
    });
    let mut reply = route(&app, face, hangup, request).await;
    if let Some(id) = id.flatten() {
        reply.headers_mut().insert("x-request-id", id);
    }
    Ok(reply)
}

async fn route(
    app: &Arc<App>,
    face: Face,
    hangup: Arc<Hangup>,
    request: Request<Incoming>,
) -> Reply {
    let (head, incoming) = request.into_parts();
    let path = head.uri.path();
    if face == Face::Bootstrap {
        return mooncake::answer(app, &head.method, path);
    }
    let mut paths = PATHS.iter().chain(own_paths(app.config.dialect));
    let known = paths.find(|(known, _)| *known == path);
    let Some((_, methods)) = known.filter(|_| face == Face::Api || path.starts_with("/mock/"))
    else {
        return body::json(404, r#"{"detail":"Not Found"}"#);
    };
    if !methods.split(", ").any(|method| method == head.method.as_str()) {
        let mut reply = body::json(405, r#"{"detail":"Method Not Allowed"}"#);
        reply.headers_mut().insert(http::header::ALLOW, HeaderValue::from_static(methods));
        return reply;
    }
    let bytes = match Limited::new(incoming, BODY_BYTES).collect().await {
        Ok(body) => body.to_bytes(),
        Err(error) => {
            return body::failure(
                app.config.dialect,
                &Failure::bad(None, format!("body: {error}")),
            );
        }
    };
    if head.method == Method::POST && takes_json(path) && !says_json(&head.headers) {
        return body::failure(app.config.dialect, &Failure::media_type());
    }
    let scales_out = path.starts_with("/inference/") || path.ends_with("render");
    if scales_out && !app.config.scale_out {
        return body::failure(app.config.dialect, &Failure::no_scale_out());
    }
    match path {
        GENERATE => inference::answer(app.clone(), Api::Tokens, &head.headers, bytes, hangup).await,
        _ if scales_out => scale_out::small(app, path, &bytes),
        "/v1/completions" => {
            inference::answer(app.clone(), Api::Completions, &head.headers, bytes, hangup).await
        }
        "/v1/chat/completions" => {
            inference::answer(app.clone(), Api::Chat, &head.headers, bytes, hangup).await
        }
        "/generate" => {
            inference::answer(app.clone(), Api::Generate, &head.headers, bytes, hangup).await
        }
        "/v1/embeddings" => embeddings::answer(app, &head.headers, &bytes, &hangup).await,
        _ => small(app, path, &head.method, &bytes),
    }
}

fn takes_json(path: &str) -> bool {
    ["/v1/", "/inference/"].iter().any(|of| path.starts_with(of)) || path.ends_with("tokenize")
}

/// As FastAPI decides: no content type at all passes too.
fn says_json(headers: &HeaderMap) -> bool {
    let Some(value) = headers.get(http::header::CONTENT_TYPE) else { return true };
    value.to_str().is_ok_and(|value| value.to_ascii_lowercase().starts_with("application/json"))
}

fn small(app: &App, path: &str, method: &Method, bytes: &Bytes) -> Reply {
    let faults = app.faults();
    match (app.config.dialect, path) {
        (Dialect::Sglang, "/v1/models") => return value(&sglang::models(app)),
        (Dialect::Sglang, "/server_info") => return value(&sglang::server_info(app)),
        (Dialect::Sglang, "/model_info") => return value(&sglang::model_info(app)),
        (Dialect::Sglang, "/v1/loads") => return value(&sglang::loads(app)),
        (Dialect::Sglang, "/tokenize" | "/v1/tokenize") => {
            return or_failure(app, tokenize(app, bytes));
        }
        (Dialect::Sglang, "/flush_cache") => {
            app.reset_caches();
            return body::whole(200, "text/plain; charset=utf-8", "Cache flushed.\n");
        }
        (Dialect::Trtllm, "/v1/models") => return value(&trtllm::models(app)),
        (Dialect::Trtllm, "/metrics") => return value(&trtllm::iterations(app)),
        (Dialect::Trtllm, "/kv_cache_events") => {
            let drained = app.publishers.iter().flat_map(|publisher| publisher.drain());
            return value(&drained.collect());
        }
        _ => {}
    }
    match path {
        "/health" | "/ping" => {
            let down = faults.unhealthy || app.dead.load(std::sync::atomic::Ordering::Relaxed);
            let mut reply = body::whole(if down { 503 } else { 200 }, "text/plain", "");
            reply.headers_mut().remove(http::header::CONTENT_TYPE);
            reply
        }
        "/version" => value(&json!({"version": app.config.version})),
        "/load" => {
            let load = app.in_flight.load(std::sync::atomic::Ordering::Relaxed);
            value(&json!({"server_load": load}))
        }
        "/metrics" if faults.metrics.fail => {
            body::failure(app.config.dialect, &Failure::internal())
        }
        "/metrics" => body::whole(
            200,
            "text/plain; version=0.0.4; charset=utf-8",
            metrics::page(app, &faults.metrics),
        ),
        "/kv_event_sources" => value(&event_sources(app)),
        "/v1/models" => value(&models(app)),
        "/tokenize" => or_failure(app, tokenize(app, bytes)),
        "/detokenize" => or_failure(app, detokenize(app, bytes)),
        "/reset_prefix_cache" => {
            app.reset_caches();
            body::whole(200, "text/plain", "")
        }
        "/mock/faults" if method == Method::POST => control::set_faults(app, bytes),
        "/mock/faults" => control::get_faults(app),
        "/mock/stats" => value(&control::stats(app)),
        _ => value(&control::cache(app)),
    }
}

fn value(value: &Value) -> Reply {
    body::json(200, value.to_string())
}

fn or_failure(app: &App, result: Result<Value, Failure>) -> Reply {
    match result {
        Ok(answer) => value(&answer),
        Err(failure) => body::failure(app.config.dialect, &failure),
    }
}

fn models(app: &App) -> Value {
    let base = &app.config.model;
    let card = |id: &str, parent: Option<&str>| {
        json!({
            "id": id, "object": "model", "created": now(), "owned_by": "vllm",
            "root": parent.map_or_else(|| base.clone(), |_| format!("/adapters/{id}")),
            "parent": parent,
            "max_model_len": parent.is_none().then_some(app.config.max_model_len),
            "permission": [{
                "id": format!("modelperm-{}", app.fresh_hex()), "object": "model_permission",
                "created": now(), "allow_create_engine": false, "allow_sampling": true,
                "allow_logprobs": true, "allow_search_indices": false, "allow_view": true,
                "allow_fine_tuning": false, "organization": "*", "group": null,
                "is_blocking": false,
            }],
        })
    };
    let adapters = app.config.adapters.iter().map(|adapter| card(adapter, Some(base)));
    let data: Vec<Value> = [card(base, None)].into_iter().chain(adapters).collect();
    json!({"object": "list", "data": data})
}

fn event_sources(app: &App) -> Value {
    let Some(events) = &app.config.kv_events else { return json!({}) };
    let of = |(rank, (publish, replay)): (usize, &(String, String))| {
        let source = json!({
            "endpoint": publish, "replay_endpoint": replay, "topic": events.topic,
            "buffer_steps": events.buffer_steps, "hwm": events.high_water_mark,
            "publisher": "zmq",
        });
        (rank.to_string(), source)
    };
    app.event_sources.iter().enumerate().map(of).collect::<Map<_, _>>().into()
}

fn tokenize(app: &App, bytes: &Bytes) -> Result<Value, Failure> {
    let members = parse_json(bytes)?;
    let tokens = match members.raw("messages") {
        Some(_) => prompt::chat(&members, &app.model)?,
        None => tokenize_prompt(app, &members)?,
    };
    if app.config.dialect == Dialect::Sglang {
        let length = app.config.max_model_len;
        return Ok(json!({"count": tokens.len(), "max_model_len": length, "tokens": tokens}));
    }
    let strs = members.get("return_token_strs") == Some(Value::Bool(true));
    let text = |&id: &u32| app.model.decode(&[id], false);
    let strs = strs.then(|| tokens.iter().map(text).collect::<Vec<_>>());
    Ok(json!({
        "count": tokens.len(), "max_model_len": app.config.max_model_len,
        "tokens": tokens, "token_strs": strs,
    }))
}

fn tokenize_prompt(app: &App, members: &Members) -> Result<Vec<u32>, Failure> {
    let text = members.get("prompt").and_then(|prompt| prompt.as_str().map(str::to_owned));
    let missing = || Failure::schema("missing", "body.prompt", "Field required", "'<dict>'");
    let special = members.get("add_special_tokens").as_ref().and_then(Value::as_bool);
    let encoded = app.model.encode_prompt(&text.ok_or_else(missing)?, special);
    encoded.map(|e| e.ids.to_vec()).map_err(|e| Failure::bad(None, e.to_string()))
}

fn detokenize(app: &App, bytes: &Bytes) -> Result<Value, Failure> {
    let members = parse_json(bytes)?;
    let tokens = members.get("tokens").as_ref().and_then(token_ids);
    let missing = || Failure::schema("missing", "body.tokens", "Field required", "'<dict>'");
    Ok(json!({"prompt": app.model.decode(&tokens.ok_or_else(missing)?, true)}))
}
