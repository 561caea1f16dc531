//! Requests that an engine refuses: its own words reach the client, and nothing stays behind.
#![allow(clippy::expect_used, clippy::panic, reason = "it is all test")]

mod support;

use serde_json::json;
use support::fleet::{MODEL, completion, prompt};
use support::{Fleet, Request, decode, prefill};

/// Members that the router sets on the prefill leg, so that only the decode leg is refused.
#[tokio::test]
async fn a_decode_leg_that_is_refused_leaves_nothing_pinned() {
    let fleet = Fleet::start([prefill("p0"), decode("d0")]).await;
    let wrong = [
        ("max_tokens", json!(0)),
        ("max_tokens", json!("many")),
        ("n", json!(0)),
        ("stop", json!(["a", "b", "c", "d", "e"])),
        ("logprobs", json!("all")),
    ];
    for (seed, (member, value)) in (0..).zip(&wrong) {
        let mut body = completion(&prompt(seed, 200), 8, false);
        body[member] = value.clone();
        let request = Request::completion(&body);
        let (head, refused) = request.json(fleet.addr()).await;
        let (alone, expected) = request.json(fleet.get("d0").mock.addr()).await;
        assert_eq!((head.status, alone.status), (400, 400), "{member}: {refused}");
        assert_eq!(refused, expected);
    }
    let prefilled = fleet.legs("p0", "prefill");
    assert_eq!(prefilled, wrong.len() as u64, "each was prefilled, and so pinned");
    fleet.assert_nothing_leaks().await;
    assert_eq!(fleet.stats("p0")["expired"], 0, "released, not expired");
}

/// What makes a call complete with its first token, at which a prefill leg ends too.
#[tokio::test]
async fn a_call_of_a_single_token_is_handed_over_as_any_other_answer() {
    let fleet = Fleet::start([prefill("p0"), decode("d0")]).await;
    let body = json!({
        "model": MODEL,
        "messages": [{"role": "user", "content": "What time is it?"}],
        "tools": [{"type": "function", "function": {
            "name": "get_time", "parameters": {"type": "object", "properties": {}}}}],
        "tool_choice": {"type": "function", "function": {"name": "get_time"}},
    });
    let (head, reply) = Request::chat(&body).json(fleet.addr()).await;
    assert_eq!((head.status, head.path()), (200, "remote"), "{reply}");
    assert_eq!(reply["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"], "{}");
    fleet.assert_nothing_leaks().await;
}
