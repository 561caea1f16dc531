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
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_names_class_field_and_status() {
        let error = ApiError::new(429, "busy \"now\"\n").param("model");
        let expected = json!({"error": {
            "message": "busy \"now\"\n", "type": "RateLimitError", "param": "model", "code": 429,
        }});
        assert_eq!(serde_json::from_slice::<Value>(&error.body()).unwrap(), expected);
        let event = error.event();
        let data = event.strip_prefix(b"data: ").unwrap().strip_suffix(b"\n\n").unwrap();
        assert!(!data.contains(&b'\n'));
        assert_eq!(serde_json::from_slice::<Value>(data).unwrap(), expected);
    }

    #[test]
    fn adapters_stand_in_the_model_list_with_their_base() {
        let base =
            ModelCard { id: "m", created: 1, owned_by: "us", parent: None, max_model_len: Some(8) };
        let adapter = ModelCard { id: "sql", parent: Some("m"), ..base };
        let list: Value = serde_json::from_slice(&models([base, adapter])).unwrap();
        assert_eq!(list["object"], "list");
        assert_eq!(
            (&list["data"][0]["root"], &list["data"][0]["parent"]),
            (&json!("m"), &json!(null))
        );
        assert_eq!(
            (&list["data"][1]["id"], &list["data"][1]["parent"]),
            (&json!("sql"), &json!("m"))
        );
        assert_eq!(serde_json::from_slice::<Value>(&model(&adapter)).unwrap(), list["data"][1]);
    }
}
