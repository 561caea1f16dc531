//! Whether an engine reads a prompt as the router does, so that it can be sent the router's tokens.
//!
//! Invariant: no prompt goes as ids to an engine that was not seen to count the same ones itself: with
//! another tokenizer or template they would be another prompt.

use std::sync::Arc;
use std::time::Duration;

use http::HeaderMap;
use pointsman_tokens::{Chat, Model};
use serde_json::{Value, json};

use crate::fleet::{Group, Worker};
use crate::prompt::{Tokenizer, unix_seconds};
use crate::receive::read_tokens;
use crate::router::Router;
use crate::upstream::read;

/// Letters of several scripts, digits, runs of blanks, and marks: where tokenizers differ.
const TEXT: &str = "Which way?  It's 1234567 na\u{ef}ve \u{65e5}\u{672c}\u{8a9e} \u{1f682}\n\n\tdef f(x_1): return -0.5";

/// How long one answer may take, and how long it may be.
const WAIT: Duration = Duration::from_secs(5);
const REPLY_BYTES: usize = 64 * 1024;

/// What an engine is asked to tokenise, and the ids that the router has for it.
struct Probe {
    question: Value,
    expected: Arc<[u32]>,
}

/// Compares the engine's tokens of a text and of a chat with the router's; None if it does not say.
pub(crate) async fn same_tokens(router: &Router, group: &Group, worker: &Worker) -> Option<bool> {
    let model = match &group.tokenizer {
        Tokenizer::Local(model) => model,
        // It is asked for those of each prompt, or nobody has any.
        Tokenizer::Engine | Tokenizer::Estimate { .. } => return Some(true),
    };
    for Probe { question, expected } in probes(model, group.name()) {
        let tokens = ask(router, worker, &question).await?;
        if *tokens != *expected {
            tracing::warn!(
                model = group.name(),
                worker = worker.name(),
                question = %question,
                engine = ?tokens,
                router = ?expected,
                "the engine reads a prompt differently: is `tokenizer` of the same model, with the same \
                 chat template?"
            );
            return Some(false);
        }
    }
    Some(true)
}

/// A text, and a chat if the router can render any.
fn probes(model: &Model, name: &str) -> Vec<Probe> {
    let messages = json!([
        {"role": "user", "content": TEXT},
        {"role": "assistant", "content": "That one."},
        {"role": "user", "content": TEXT},
    ]);
    let written = messages.to_string();
    let text = model.encode_prompt(TEXT, None).ok().map(|encoded| encoded.ids);
    let chat = model.encode_chat(&Chat::new(written.as_bytes(), unix_seconds()));
    let chat = chat.ok().map(|encoded| encoded.ids);
    let asked = [("prompt", TEXT.into(), text), ("messages", messages, chat)];
    let probe = |(key, value, ids): (&str, Value, Option<Arc<[u32]>>)| {
        Some(Probe { question: json!({"model": name, key: value}), expected: ids? })
    };
    asked.into_iter().filter_map(probe).collect()
}

async fn ask(router: &Router, worker: &Worker, question: &Value) -> Option<Vec<u32>> {
    let mut head = HeaderMap::new();
    worker.address(&mut head);
    let uri = worker.uri("/tokenize").ok()?;
    let body = bytes::Bytes::from(question.to_string());
    let exchange = async {
        let response = router.upstream.post(uri, head, body, WAIT).await.ok()?;
        let ok = response.status().is_success();
        let bytes = read(response.into_body(), REPLY_BYTES).await.ok()?;
        ok.then_some(bytes)
    };
    read_tokens(&tokio::time::timeout(WAIT, exchange).await.ok()??)
}
