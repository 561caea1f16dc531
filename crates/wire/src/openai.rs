//! What the OpenAI API's clients expect besides completions: error bodies and events, model lists.

use bytes::Bytes;
use serde_json::{Value, json};

/// An error as an OpenAI-compatible server answers it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApiError {
    /// HTTP status; clients choose their exception by it.
    pub status: u16,
    /// What happened and what to do.
    pub message: String,
    /// A short class, derived from the status unless set.
    pub kind: Option<&'static str>,
    /// The offending field.
    pub param: Option<String>,
}

impl ApiError {
    /// An error with this status.
    pub fn new(status: u16, message: impl Into<String>) -> ApiError {
        ApiError { status, message: message.into(), kind: None, param: None }
    }

    /// Names the offending field.
    #[must_use]
    pub fn param(mut self, param: impl Into<String>) -> ApiError {
        self.param = Some(param.into());
        self
    }

    /// The class vLLM gives to this status.
    pub fn kind(&self) -> &'static str {
        self.kind.unwrap_or(match self.status {
            401 => "AuthenticationError",
            403 => "PermissionDeniedError",
            404 => "NotFoundError",
            429 => "RateLimitError",
            400..=499 => "BadRequestError",
            503 => "ServiceUnavailableError",
            504 => "TimeoutError",
            _ => "InternalServerError",
        })
    }

    fn value(&self) -> Value {
        json!({"error": {
            "message": self.message, "type": self.kind(), "param": self.param, "code": self.status,
        }})
    }

    /// The JSON body.
    pub fn body(&self) -> Bytes {
        self.value().to_string().into()
    }

    /// The same as one SSE event, for a stream that has begun.
    pub fn event(&self) -> Bytes {
        format!("data: {}\n\n", self.value()).into()
    }
}

/// The end of a stream.
pub const DONE_EVENT: &[u8] = b"data: [DONE]\n\n";

/// One entry of `/v1/models`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelCard<'a> {
    /// The name clients use.
    pub id: &'a str,
    /// Unix seconds.
    pub created: u64,
    /// Who serves it.
    pub owned_by: &'a str,
    /// The base model of a LoRA adapter.
    pub parent: Option<&'a str>,
    /// Context length, if known.
    pub max_model_len: Option<u32>,
}

/// The body of `/v1/models`.
pub fn models<'a>(cards: impl IntoIterator<Item = ModelCard<'a>>) -> Bytes {
    let data: Vec<Value> = cards.into_iter().map(|card| model_value(&card)).collect();
    json!({"object": "list", "data": data}).to_string().into()
}

/// The body of `/v1/models/{id}`.
pub fn model(card: &ModelCard<'_>) -> Bytes {
    model_value(card).to_string().into()
}

fn model_value(card: &ModelCard<'_>) -> Value {
    json!({
        "id": card.id, "object": "model", "created": card.created, "owned_by": card.owned_by,
        "root": card.parent.unwrap_or(card.id), "parent": card.parent,
        "max_model_len": card.max_model_len,
    })
}
