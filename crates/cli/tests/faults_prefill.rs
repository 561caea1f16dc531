//! The remote prefill leg fails, in every way: what the client gets, and that nothing leaks.

mod support;

use pointsman_sim::mock::{Action, Leg};
use support::fleet::{completion, prompt, rule};
use support::{Fleet, Request, decode, prefill};

#[tokio::test]
async fn a_healthy_fleet_serves_a_cold_prompt_remotely_and_nothing_leaks() {
    let fleet = Fleet::start([prefill("p0"), decode("d0")]).await;
    let request = Request::completion(&completion(&prompt(1, 200), 8, false));
    let (head, reply) = request.json(fleet.addr()).await;
    assert_eq!((head.status, head.path(), head.worker()), (200, "remote", "d0"), "{reply}");
    let expected = fleet.expected(&request).await;
    assert_eq!(reply["choices"], expected["choices"]);
    assert_eq!((fleet.legs("p0", "prefill"), fleet.legs("d0", "decode_remote")), (1, 1));
    fleet.assert_nothing_leaks().await;
}

#[tokio::test]
async fn a_stream_of_a_healthy_fleet_is_whole() {
    let fleet = Fleet::start([prefill("p0"), decode("d0")]).await;
    let request = Request::completion(&completion(&prompt(1, 200), 8, true));
    let (head, body) = request.send(fleet.addr()).await;
    assert_eq!((head.status, head.path()), (200, "remote"));
    assert!(body.is_done(), "{body:?}");
    let alone = Request::completion(&completion(&prompt(1, 200), 8, false));
    let expected = fleet.expected(&alone).await;
    assert_eq!(body.content(), expected["choices"][0]["text"].as_str().unwrap());
    fleet.assert_nothing_leaks().await;
}

#[tokio::test]
async fn one_prefill_worker_that_resets_leads_to_the_local_path() {
    let fleet =
        Fleet::start([prefill("p0").faults(rule(Leg::Prefill, Action::Refuse)), decode("d0")])
            .await;
    let (head, reply) =
        Request::completion(&completion(&prompt(1, 200), 8, false)).json(fleet.addr()).await;
    assert_eq!((head.status, head.path(), head.reason()), (200, "local", "retry_local"), "{reply}");
    fleet.assert_nothing_leaks().await;
}
