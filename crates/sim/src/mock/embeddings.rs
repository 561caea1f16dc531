//! `/v1/embeddings`: a small vector that depends on the input alone.

use bytes::Bytes;
use http::HeaderMap;
use serde_json::{Value, json};

use super::app::{App, now};
use super::body::{self, Reply};
use super::connection::Hangup;
use super::errors::Failure;
use super::faults::{Action, Leg};
use super::inference::before_headers;
use super::request::{parse_json, token_ids};
use crate::content::digest;
use crate::rng::Rng;

const DIMENSIONS: usize = 8;

pub(super) async fn answer(
    app: &App,
    headers: &HeaderMap,
    bytes: &Bytes,
    hangup: &std::sync::Arc<Hangup>,
) -> Reply {
    app.ledger.request(Leg::Local, "/v1/embeddings", headers, bytes);
    let fault = app.fault_for(Leg::Local);
    if let Some(reply) = before_headers(app, fault.as_ref(), hangup).await {
        return reply;
    }
    let reply = match embed(app, bytes) {
        Ok(answer) => body::json(200, answer.to_string()),
        Err(failure) => body::failure(app.config.dialect, &failure),
    };
    match fault {
        Some(Action::CloseAfterReply) => reply.map(|body| body.then_close(hangup)),
        _ => reply,
    }
}

fn embed(app: &App, bytes: &Bytes) -> Result<Value, Failure> {
    let members = parse_json(bytes)?;
    let model = members.get("model").and_then(|model| model.as_str().map(str::to_owned));
    if let Some(model) = model.filter(|model| *model != app.config.model) {
        return Err(Failure::no_such_model(&model, &app.config.model));
    }
    let inputs = match members.get("input") {
        Some(Value::Array(items)) if !items.iter().all(Value::is_u64) => items,
        Some(one) => vec![one],
        None => {
            return Err(Failure::schema("missing", "body.input", "Field required", "'<dict>'"));
        }
    };
    let mut tokens = 0;
    let mut data = Vec::with_capacity(inputs.len());
    for (index, input) in inputs.iter().enumerate() {
        let ids = match input.as_str() {
            Some(text) => app.model.encode_prompt(text, None).ok().map(|e| e.ids.to_vec()),
            None => token_ids(input),
        };
        let ids = ids.ok_or_else(|| Failure::bad(Some("input"), "input is no text"))?;
        tokens += ids.len();
        let mut rng = Rng::new(digest(&ids));
        let vector: Vec<f64> = (0..DIMENSIONS).map(|_| rng.unit() * 2.0 - 1.0).collect();
        data.push(json!({"index": index, "object": "embedding", "embedding": vector}));
    }
    Ok(json!({
        "id": format!("embd-{}", app.fresh_hex()), "object": "list", "created": now(),
        "model": app.config.model, "data": data,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0,
                  "prompt_tokens_details": null},
    }))
}
