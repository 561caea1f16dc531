//! Error bodies as vLLM sends them.

use bytes::Bytes;
use serde::Serialize;
use serde_json::{Value, json};

use super::config::Dialect;

/// A refused request.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Failure {
    pub(super) status: u16,
    kind: &'static str,
    message: String,
    param: Option<String>,
}

#[derive(Serialize)]
struct Body<'a> {
    error: Inner<'a>,
}

#[derive(Serialize)]
struct Inner<'a> {
    message: &'a str,
    #[serde(rename = "type")]
    kind: &'a str,
    param: Option<&'a str>,
    code: u16,
}

impl Failure {
    /// 400 by the engine.
    pub(super) fn bad(param: Option<&str>, message: impl Into<String>) -> Failure {
        let param = param.map(str::to_owned);
        Failure { status: 400, kind: "BadRequestError", message: message.into(), param }
    }

    /// 400 with `(parameter=..., value=...)` at the end of the message.
    pub(super) fn value(param: &str, value: impl std::fmt::Display, message: &str) -> Failure {
        Failure::bad(Some(param), format!("{message} (parameter={param}, value={value})"))
    }

    /// 400 by the schema of the body, one error.
    pub(super) fn schema(kind: &str, loc: &str, msg: &str, input: &str) -> Failure {
        let detail =
            format!("{{'type': '{kind}', 'loc': '{loc}', 'msg': '{msg}', 'input': {input}}}");
        Failure {
            status: 400,
            kind: "Bad Request",
            message: format!("1 validation error:\n  {detail}"),
            param: Some(loc.to_owned()),
        }
    }

    /// 400 by the schema of the body: a member that is one text or a list of up to `most` has more.
    pub(super) fn too_many(loc: &str, most: usize, count: usize) -> Failure {
        let input = format!("'<list of {count} items>'");
        let message = format!(
            "2 validation errors:\n  {{'type': 'string_type', 'loc': '{loc}', 'msg': 'Input should be \
             a valid string', 'input': {input}}}\n  {{'type': 'too_long', 'loc': '{loc}', 'msg': 'List \
             should have at most {most} items after validation, not {count}', 'input': {input}, 'ctx': \
             {{'field_type': 'List', 'max_length': {most}, 'actual_length': {count}}}}}"
        );
        Failure { status: 400, kind: "Bad Request", message, param: Some(loc.to_owned()) }
    }

    pub(super) fn not_json(column: usize) -> Failure {
        let detail = "{'type': 'json_invalid', 'loc': 'body.COL', 'msg': 'JSON decode error', 'input': \
                      '<dict of 0 items>', 'ctx': {'error': 'Expecting value'}}";
        Failure {
            status: 400,
            kind: "Bad Request",
            message: format!(
                "1 validation error:\n  {}",
                detail.replace("COL", &column.to_string())
            ),
            param: Some(format!("body.{column}")),
        }
    }

    pub(super) fn media_type() -> Failure {
        let message =
            "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed";
        Failure { status: 400, kind: "Bad Request", message: message.to_owned(), param: None }
    }

    pub(super) fn no_such_model(model: &str, known: &str) -> Failure {
        Failure {
            status: 404,
            kind: "NotFoundError",
            message: format!("The model `{model}` does not exist. Valid aliases: {known}."),
            param: Some("model".to_owned()),
        }
    }

    /// 403 of what is served only where it was asked for at the start.
    pub(super) fn no_scale_out() -> Failure {
        let message = "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out \
                       to enable them.";
        Failure::of(403, "PermissionDeniedError", message)
    }

    /// 500 of an SGLang request whose legs did not meet, or whose KV did not arrive.
    pub(super) fn bootstrap(leg: &str) -> Failure {
        let message = format!(
            "{leg} handshake failed for request rank=0 with exception KVTransferError: \
             Lost connection with the other instance"
        );
        Failure::of(500, "INTERNAL_SERVER_ERROR", &message)
    }

    /// 500 of a request whose KV could not be loaded.
    pub(super) fn internal() -> Failure {
        Failure::of(500, "InternalServerError", "Internal server error")
    }

    /// 500 of the request that killed the engine.
    pub(super) fn engine_dead() -> Failure {
        let message =
            "EngineCore encountered an issue. See stack trace (above) for the root cause.";
        Failure::of(500, "InternalServerError", message)
    }

    /// 503 of a process whose engine is dead.
    pub(super) fn unavailable() -> Failure {
        Failure::of(503, "ServiceUnavailableError", "The engine is dead.")
    }

    /// A fault's status, without a body of its own.
    pub(super) fn injected(status: u16) -> Failure {
        let kind = match status {
            401 => "AuthenticationError",
            403 => "PermissionDeniedError",
            404 => "NotFoundError",
            429 => "RateLimitError",
            503 => "ServiceUnavailableError",
            400..=499 => "BadRequestError",
            _ => "InternalServerError",
        };
        Failure::of(status, kind, "fault injected by the mock engine")
    }

    fn of(status: u16, kind: &'static str, message: &str) -> Failure {
        Failure { status, kind, message: message.to_owned(), param: None }
    }

    /// The body as an engine sends it.
    pub(super) fn body(&self, dialect: Dialect) -> Bytes {
        if dialect != Dialect::Vllm {
            return self.flat().to_string().into();
        }
        let error = Inner {
            message: &self.message,
            kind: self.kind,
            param: self.param.as_deref(),
            code: self.status,
        };
        serde_json::to_vec(&Body { error }).unwrap_or_default().into()
    }

    /// SGLang and TensorRT-LLM have no key around it.
    fn flat(&self) -> Value {
        json!({
            "object": "error", "message": self.message, "type": self.kind, "param": null,
            "code": self.status,
        })
    }

    /// The same inside a stream; the engine's own serialiser puts a space after each colon there.
    pub(super) fn event(&self, dialect: Dialect) -> Bytes {
        if dialect != Dialect::Vllm {
            return format!("data: {}\n\n", json!({"error": self.flat()})).into();
        }
        let text = |value: Value| value.to_string();
        let param = text(self.param.clone().map_or(Value::Null, Value::String));
        format!(
            "data: {{\"error\": {{\"message\": {}, \"type\": \"{}\", \"param\": {param}, \"code\": {}}}}}\n\n",
            text(Value::String(self.message.clone())),
            self.kind,
            self.status,
        )
        .into()
    }
}
