//! Prompts as token ids: on every leg where the engine takes them and reads prompts as the router does,
//! and otherwise on none.
#![allow(clippy::expect_used, clippy::panic, reason = "it is all test")]

mod support;

use serde_json::{Value, json};
use support::fleet::MODEL;
use support::{Fleet, Request, Spec, decode, prefill};

const TEXT: &str = "Which way does a prompt of these words go?";

fn pair() -> [Spec; 2] {
    [prefill("p0"), decode("d0")]
}

async fn fleet(specs: [Spec; 2]) -> Fleet {
    Fleet::with(specs, json!({"routing": {"allow_path_override": true}})).await
}

fn completion() -> (&'static str, Value) {
    ("/v1/completions", json!({"model": MODEL, "prompt": TEXT, "max_tokens": 4}))
}

fn chat() -> (&'static str, Value) {
    let messages = json!([{"role": "user", "content": TEXT}]);
    ("/v1/chat/completions", json!({"model": MODEL, "messages": messages, "max_tokens": 4}))
}

/// The bodies of the legs of one request on each path: prefill, decode, local.
async fn legs(fleet: &Fleet, (path, body): (&str, Value)) -> [Value; 3] {
    for wish in ["remote", "local"] {
        let request = Request::post(path, &body).header("x-pointsman-path", wish);
        let (head, reply) = request.json(fleet.addr()).await;
        assert_eq!((head.status, head.path()), (200, wish), "{reply}");
    }
    let sent = |name: &str| -> Vec<Value> {
        let read = |request: &Value| {
            serde_json::from_str(request["body"].as_str().expect("a body")).expect("JSON")
        };
        fleet.requests(name).iter().map(read).collect()
    };
    let mut legs = [sent("p0"), sent("d0")].concat().into_iter();
    std::array::from_fn(|_| legs.next().expect("three legs"))
}

/// The engine's own tokens of a prompt.
async fn tokens(fleet: &Fleet, body: &Value) -> Value {
    let engine = fleet.get("p0").mock.addr();
    let (head, reply) = Request::post("/tokenize", body).json(engine).await;
    assert_eq!(head.status, 200, "{reply}");
    reply["tokens"].clone()
}

#[tokio::test]
async fn each_leg_of_a_completion_carries_the_engines_own_tokens() {
    let fleet = fleet(pair()).await;
    let asked = completion();
    let own = tokens(&fleet, &asked.1).await;
    for leg in legs(&fleet, asked).await {
        assert_eq!(leg["prompt"], own);
    }
    fleet.assert_nothing_leaks().await;
}

#[tokio::test]
async fn each_leg_of_a_chat_carries_the_engines_own_tokens_beside_its_messages() {
    let fleet = fleet(pair()).await;
    let asked = chat();
    let (own, messages) = (tokens(&fleet, &asked.1).await, asked.1["messages"].clone());
    for leg in legs(&fleet, asked).await {
        assert_eq!(leg["kv_transfer_params"]["prompt_token_ids"], own);
        assert_eq!(leg["messages"], messages);
    }
    fleet.assert_nothing_leaks().await;
}

/// Sends both kinds on both paths, and finds no ids in any leg.
async fn no_leg_carries_tokens(fleet: &Fleet) {
    for leg in legs(fleet, completion()).await {
        assert_eq!(leg["prompt"], TEXT);
    }
}

#[tokio::test]
async fn an_engine_of_an_older_version_gets_text() {
    let old = |spec: Spec| spec.engine(|engine| engine.version = "0.27.1".to_owned());
    no_leg_carries_tokens(&fleet(pair().map(old)).await).await;
}

#[tokio::test]
async fn where_one_worker_takes_no_tokens_none_gets_any() {
    let [p0, d0] = pair();
    no_leg_carries_tokens(&fleet([p0.worker(json!({"takes_prompt_ids": false})), d0]).await).await;
}

#[tokio::test]
async fn what_more_than_messages_enters_a_prompt_is_left_to_the_engine() {
    let fleet = fleet(pair()).await;
    let (path, mut body) = chat();
    body["chat_template_kwargs"] = json!({"greeting": "none"});
    for leg in legs(&fleet, (path, body)).await {
        assert_eq!(leg["kv_transfer_params"].get("prompt_token_ids"), None);
    }
}
