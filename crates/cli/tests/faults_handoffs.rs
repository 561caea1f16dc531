//! Hand-offs that fail again and again: prompts are not computed in vain for ever, and whoever can do
//! without hand-offs goes on.

mod support;

use pointsman_sim::mock::{Action, Faults, Leg};
use serde_json::{Value, json};
use support::fleet::{rule, unwatched};
use support::{Fleet, Request, decode, prefill};

/// Failed hand-offs that end them, for a while or for as long as a test takes.
const FAILURES: usize = 3;

fn settings(open: &str) -> Value {
    let breaker = json!({"failures": FAILURES, "open": open, "open_max": open});
    unwatched(json!({"routing": {"policy": "always_remote", "breaker": breaker}}))
}

/// Sends a prompt that nobody has seen; path and reason.
async fn ask(fleet: &Fleet, number: usize) -> (String, String) {
    let prompt = format!("{number} is a number, and {number} is its name");
    let body = json!({"model": support::fleet::MODEL, "prompt": prompt, "max_tokens": 2});
    let (head, reply) = Request::completion(&body).json(fleet.addr()).await;
    assert_eq!(head.status, 200, "{reply}");
    (head.path().to_owned(), head.reason().to_owned())
}

fn went(path: &str, reason: &str) -> (String, String) {
    (path.to_owned(), reason.to_owned())
}

#[tokio::test]
async fn a_decode_worker_that_fails_every_hand_off_gets_no_more_of_them() {
    let status = Action::Status { status: 500, body: None };
    let broken = decode("d0").faults(rule(Leg::Decode, status));
    let fleet = Fleet::with([prefill("p0"), broken], settings("1h")).await;
    for number in 0..FAILURES {
        assert_eq!(ask(&fleet, number).await, went("local", "retry_local"));
    }
    for number in FAILURES..3 * FAILURES {
        assert_eq!(ask(&fleet, number).await, went("local", "no_prefill"));
    }
    assert_eq!(fleet.legs("p0", "prefill"), FAILURES as u64);
    assert_eq!(fleet.router.worker("d0").await.unwrap()["condition"], "up");
    fleet.assert_nothing_leaks_but_pins(FAILURES as u64).await;
}

#[tokio::test]
async fn hand_offs_are_taken_up_again_when_they_can_be_fetched() {
    let unreachable = Faults { side_channel_down: true, ..Faults::default() };
    let specs = [prefill("p0").faults(unreachable), decode("d0")];
    // Open for less than a request takes: each one is a probe.
    let fleet = Fleet::with(specs, settings("1ms")).await;
    for number in 0..FAILURES + 2 {
        assert_eq!(ask(&fleet, number).await, went("local", "retry_local"));
        tokio::time::sleep(std::time::Duration::from_millis(2)).await;
    }
    fleet.set_faults("p0", Faults::default());
    for number in 10..13 {
        assert_eq!(ask(&fleet, number).await, went("remote", "always_remote"));
    }
    fleet.assert_nothing_leaks_but_pins(FAILURES as u64 + 2).await;
}
