//! A fleet of TensorRT-LLM workers: context, then generation; answers that are complete after the
//! context; each way in which either leg can fail; KV events that have to be asked for.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod command;
mod support;

use pointsman_sim::mock::{
    Action, Cut, Dialect, EngineConfig, EventFaults, Faults, Leg, MockEngine, Role,
};
use serde_json::{Value, json};
use support::fleet::{MODEL, chat, completion, prompt, rule, unwatched};
use support::{Fleet, Request, Spec, wait_for, wait_until};

/// Makes a worker one of TensorRT-LLM.
fn trtllm(spec: Spec) -> Spec {
    spec.engine(|engine| engine.dialect = Dialect::Trtllm).worker(json!({"engine": "trtllm"}))
}

fn prefill(name: &str) -> Spec {
    trtllm(support::prefill(name))
}

fn decode(name: &str) -> Spec {
    trtllm(support::decode(name))
}

fn request(seed: u32) -> Request {
    Request::completion(&completion(&prompt(seed, 200), 8, false))
}

fn settings(more: Value) -> Value {
    let mut settings = unwatched(json!({"timeouts": {"prefill": "600ms"}}));
    support::merge(&mut settings, more);
    settings
}

#[tokio::test]
async fn a_cold_prompt_is_computed_by_one_worker_and_answered_by_the_other() {
    let fleet = Fleet::start([prefill("p0"), decode("d0")]).await;
    for stream in [false, true] {
        let asked = completion(&prompt(u32::from(stream), 200), 8, stream);
        let (head, body) = Request::completion(&asked).send(fleet.addr()).await;
        assert_eq!((head.status, head.path(), head.worker()), (200, "remote", "d0"), "{body:?}");
        fleet.assert_completed_as_alone(&asked, &body).await;
    }
    let (contexts, generations) = (fleet.bodies("p0"), fleet.bodies("d0"));
    let sent = &contexts[1]["disaggregated_params"];
    assert_eq!(
        (&sent["request_type"], &contexts[1]["stream"]),
        (&json!("context_only"), &json!(false))
    );
    let carried = &generations[1]["disaggregated_params"];
    assert_eq!(carried["request_type"], json!("generation_only"));
    assert_eq!(carried["disagg_request_id"], sent["disagg_request_id"]);
    for field in [
        "first_gen_tokens",
        "ctx_request_id",
        "encoded_opaque_state",
        "draft_tokens",
        "ctx_dp_rank",
    ] {
        assert!(carried.get(field).is_some(), "{field} in {carried}");
    }
    assert_eq!(generations[1]["stream"], json!(true));
    let numbers: Vec<_> =
        contexts.iter().map(|body| &body["disaggregated_params"]["disagg_request_id"]).collect();
    assert_ne!(numbers[0], numbers[1]);
    fleet.assert_nothing_leaks().await;
}

#[tokio::test]
async fn the_prompt_goes_on_as_the_ids_that_were_computed() {
    let fleet = Fleet::start([prefill("p0"), decode("d0")]).await;
    let text = "a prompt of words that only the first worker reads ".repeat(12);
    let mut asked = completion(&[], 6, false);
    asked["prompt"] = json!(text);
    let (head, reply) = Request::completion(&asked).json(fleet.addr()).await;
    assert_eq!((head.status, head.path()), (200, "remote"), "{reply}");
    fleet.assert_as_alone(&Request::completion(&asked), &reply).await;
    assert_eq!(fleet.bodies("p0")[0]["prompt"], asked["prompt"]);
    let ids = fleet.bodies("d0")[0]["prompt"].clone();
    assert_eq!(
        ids.as_array().unwrap().len() as u64,
        reply["usage"]["prompt_tokens"].as_u64().unwrap()
    );

    let asked = chat(&text, 6, true);
    let (head, body) = Request::chat(&asked).send(fleet.addr()).await;
    assert_eq!((head.status, head.path()), (200, "remote"), "{body:?}");
    fleet.assert_streamed_as_alone("/v1/chat/completions", &asked, &body).await;
    let generation = &fleet.bodies("d0")[1];
    assert!(generation["prompt_token_ids"].is_array());
    assert_eq!(generation["messages"], asked["messages"]);
    fleet.assert_nothing_leaks().await;
}

#[tokio::test]
async fn a_reply_that_ends_with_its_first_token_needs_no_generation() {
    let fleet = Fleet::start([prefill("p0"), decode("d0")]).await;
    fleet.set_faults("p0", rule(Leg::Prefill, Action::EosAtOnce));
    let asked = completion(&prompt(1, 200), 8, false);
    let (head, body) = Request::completion(&asked).send(fleet.addr()).await;
    assert_eq!((head.status, head.path(), head.worker()), (200, "remote", "p0"));
    let reply = body.json();
    assert_eq!(reply["choices"][0]["finish_reason"], json!("stop"));
    assert!(reply["choices"][0].get("disaggregated_params").is_none(), "{reply}");
    assert!(reply.get("prompt_token_ids").is_none(), "{reply}");

    let mut streamed = completion(&prompt(2, 200), 8, true);
    streamed["stream_options"] = json!({"include_usage": true});
    let (head, body) = Request::completion(&streamed).send(fleet.addr()).await;
    assert_eq!(head.header("content-type"), Some("text/event-stream; charset=utf-8"));
    assert!(body.is_done(), "{body:?}");
    let chunks = body.chunks();
    assert_eq!(chunks[0]["choices"][0]["finish_reason"], json!("stop"));
    assert_eq!((chunks.len(), chunks[1]["usage"]["completion_tokens"].as_u64()), (2, Some(1)));

    let streamed = chat(&"some words of a user ".repeat(30), 8, true);
    let (_, body) = Request::chat(&streamed).send(fleet.addr()).await;
    assert!(body.is_done(), "{body:?}");
    assert_eq!(body.chunks()[0]["choices"][0]["delta"]["role"], json!("assistant"));
    assert_eq!(fleet.requests("d0").len(), 0);
    fleet.assert_nothing_leaks().await;
}

#[tokio::test]
async fn a_limit_of_one_token_is_for_the_generation_worker() {
    let fleet = Fleet::start([prefill("p0"), decode("d0")]).await;
    let asked = Request::completion(&completion(&prompt(1, 200), 1, false));
    let (head, reply) = asked.json(fleet.addr()).await;
    assert_eq!((head.path(), head.worker()), ("remote", "d0"));
    fleet.assert_as_alone(&asked, &reply).await;
    fleet.assert_nothing_leaks().await;
}

#[tokio::test]
async fn several_choices_and_several_prompts_go_local() {
    let fleet = Fleet::start([prefill("p0"), decode("d0")]).await;
    let mut choices = completion(&prompt(1, 200), 4, false);
    choices["n"] = json!(2);
    let mut batch = completion(&prompt(1, 200), 4, false);
    batch["prompt"] = json!([prompt(1, 200), prompt(2, 100)]);
    for (at, asked) in [choices, batch].into_iter().enumerate() {
        let (head, reply) = Request::completion(&asked).json(fleet.addr()).await;
        assert_eq!((head.status, head.path(), head.reason()), (200, "local", "batch"), "{reply}");
        assert_eq!(reply["choices"].as_array().unwrap().len(), 2, "{reply}");
        assert_eq!(fleet.bodies("d0")[at], asked, "nothing is added");
    }
    fleet.assert_nothing_leaks().await;
}

#[tokio::test]
async fn a_clients_own_params_never_pass_and_its_encoder_handles_only_where_they_may() {
    let forged = json!({"request_type": "generation_only", "ctx_request_id": 1,
        "encoded_opaque_state": "127.0.0.1|1|x|y", "multimodal_embedding_handles": [{"h": 1}]});
    let mut asked = completion(&prompt(1, 200), 4, false);
    asked["n"] = json!(2);
    asked["disaggregated_params"] = forged;
    let closed = Fleet::start([prefill("p0"), decode("d0")]).await;
    let (head, _) = Request::completion(&asked).json(closed.addr()).await;
    assert_eq!((head.status, head.path()), (200, "local"));
    assert!(closed.bodies("d0")[0].get("disaggregated_params").is_none());
    closed.assert_nothing_leaks().await;
    let open = |spec: Spec| spec.worker(json!({"takes_encoder_handles": true}));
    let open = Fleet::start([open(prefill("p0")), open(decode("d0"))]).await;
    let (head, _) = Request::completion(&asked).json(open.addr()).await;
    assert_eq!(head.status, 200);
    assert_eq!(
        open.bodies("d0")[0]["disaggregated_params"],
        json!({"request_type": "context_and_generation", "multimodal_embedding_handles": [{"h": 1}]})
    );
    open.assert_nothing_leaks().await;
}

// ---- legs that fail --------------------------------------------------------------------------

async fn another_prefills_or_the_local_path(faults: Faults, cause: &str) {
    let specs = [prefill("p0"), prefill("p1"), decode("d0")];
    let fleet = Fleet::with(specs, settings(json!({}))).await;
    fleet.set_faults("p0", faults.clone());
    let asked = request(1);
    let (head, reply) = asked.json(fleet.addr()).await;
    assert_eq!(
        (head.status, head.path(), head.reason()),
        (200, "remote", "retry_prefill"),
        "{reply}"
    );
    fleet.assert_as_alone(&asked, &reply).await;
    assert_eq!(fleet.failures("prefill", cause).await, 1);
    fleet.assert_no_violation();

    let fleet = Fleet::with([prefill("p0"), decode("d0")], settings(json!({}))).await;
    fleet.set_faults("p0", faults);
    let (head, reply) = asked.json(fleet.addr()).await;
    assert_eq!((head.status, head.path(), head.reason()), (200, "local", "retry_local"), "{reply}");
    fleet.assert_as_alone(&asked, &reply).await;
    fleet.assert_no_violation();
}

#[tokio::test]
async fn a_prefill_worker_that_is_dead_is_passed_over() {
    another_prefills_or_the_local_path(Faults { down: true, ..Faults::default() }, "connect").await;
}

#[tokio::test]
async fn a_prefill_worker_that_dies_with_the_request_is_passed_over() {
    let cut = rule(Leg::Prefill, Action::CutBeforeHeaders { cut: Cut::Rst });
    another_prefills_or_the_local_path(cut, "cut").await;
}

#[tokio::test]
async fn a_prefill_worker_that_answers_500_is_passed_over() {
    let broken = rule(Leg::Prefill, Action::Status { status: 500, body: None });
    another_prefills_or_the_local_path(broken, "server_error").await;
}

#[tokio::test]
async fn a_prefill_worker_that_hands_nothing_over_is_passed_over() {
    another_prefills_or_the_local_path(rule(Leg::Prefill, Action::NoParams), "protocol").await;
}

#[tokio::test]
async fn what_the_prefill_worker_refuses_is_the_clients_answer() {
    let fleet = Fleet::with([prefill("p0"), decode("d0")], settings(json!({}))).await;
    fleet.set_faults("p0", rule(Leg::Prefill, Action::Status { status: 400, body: None }));
    let (head, body) = request(1).send(fleet.addr()).await;
    assert_eq!((head.status, &body.json()["object"]), (400, &json!("error")));
    assert_eq!(fleet.requests("d0").len(), 0);
    fleet.assert_nothing_leaks().await;
}

#[tokio::test]
async fn another_decode_worker_goes_on_with_what_was_computed() {
    let fleet = Fleet::with([prefill("p0"), decode("d0"), decode("d1")], settings(json!({}))).await;
    fleet.set_faults("d0", Faults { down: true, ..Faults::default() });
    let asked = completion(&prompt(1, 200), 8, true);
    let (head, body) = Request::completion(&asked).send(fleet.addr()).await;
    assert_eq!((head.path(), head.reason(), head.worker()), ("remote", "retry_decode", "d1"));
    fleet.assert_streamed_as_alone("/v1/completions", &asked, &body).await;
    assert_eq!(fleet.legs("p0", "prefill"), 1);
    fleet.assert_nothing_leaks().await;
}

#[tokio::test]
async fn a_decode_worker_that_dies_with_the_request_is_passed_over_and_its_hand_off_not_used_again()
{
    let fleet = Fleet::with([prefill("p0"), decode("d0"), decode("d1")], settings(json!({}))).await;
    fleet.set_faults("d0", rule(Leg::Decode, Action::CutBeforeHeaders { cut: Cut::Rst }));
    let asked = completion(&prompt(1, 200), 8, true);
    let (head, body) = Request::completion(&asked).send(fleet.addr()).await;
    assert_eq!((head.status, head.path(), head.worker()), (200, "local", "d1"), "{body:?}");
    fleet.assert_streamed_as_alone("/v1/completions", &asked, &body).await;
    // It may have been pulled.
    assert_eq!(fleet.bodies("d1"), [asked]);
    assert_eq!(fleet.failures("decode", "cut").await, 1);
    fleet.assert_no_violation();
}

#[tokio::test]
async fn a_decode_worker_that_cannot_fetch_the_kv_computes_the_prompt_itself() {
    let fleet = Fleet::with([prefill("p0"), decode("d0")], settings(json!({}))).await;
    fleet.set_faults("d0", rule(Leg::Decode, Action::Status { status: 500, body: None }));
    let asked = request(1);
    let (head, reply) = asked.json(fleet.addr()).await;
    assert_eq!((head.status, head.path(), head.reason()), (200, "local", "retry_local"), "{reply}");
    fleet.assert_as_alone(&asked, &reply).await;
    assert_eq!(fleet.failures("decode", "kv_load").await, 1);
    fleet.assert_no_violation();
}

#[tokio::test]
async fn a_decode_worker_that_dies_in_its_stream_ends_it_with_an_error_event() {
    let fleet = Fleet::with([prefill("p0"), decode("d0")], settings(json!({}))).await;
    let cut = Action::CutMidStream { after_tokens: 3, cut: Cut::Rst };
    fleet.set_faults("d0", rule(Leg::Decode, cut));
    let asked = completion(&prompt(1, 200), 16, true);
    let (_, body) = Request::completion(&asked).send(fleet.addr()).await;
    let chunks = body.chunks();
    assert_eq!(chunks[chunks.len() - 1]["error"]["code"], json!(502), "{body:?}");
    fleet.assert_nothing_leaks().await;
}

#[tokio::test]
async fn a_context_that_nobody_decodes_is_pulled_so_that_it_frees_its_kv() {
    // Every decode worker refuses the leg by its shape alone.
    let fleet = Fleet::with([prefill("p0"), decode("d0")], settings(json!({}))).await;
    let refuse = support::fleet::times(1, Leg::Decode, Action::Status { status: 400, body: None });
    fleet.set_faults("d0", refuse);
    let (head, _) = request(1).send(fleet.addr()).await;
    assert_eq!(head.status, 400);
    wait_for("the release", async || (fleet.requests("d0").len() == 2).then_some(())).await;
    assert_eq!(fleet.bodies("d0")[1]["max_tokens"], json!(1));
    fleet.assert_nothing_leaks().await;
}

// ---- what is known of caches -----------------------------------------------------------------

async fn overlap(fleet: &Fleet, prompt: &[u32], worker: &str) -> u64 {
    let asked = Request::post("/v1/pointsman/explain", &completion(prompt, 4, false));
    let (_, record) = asked.json(fleet.addr()).await;
    let candidates = record["candidates"].as_array().unwrap();
    let of = candidates.iter().find(|candidate| candidate["worker"] == worker);
    of.and_then(|candidate| candidate["overlap_tokens"].as_u64())
        .unwrap_or_else(|| panic!("no overlap of {worker} in {record}"))
}

async fn has_overlap(fleet: &Fleet, prompt: &[u32], worker: &str, tokens: u64) {
    wait_until(async || match overlap(fleet, prompt, worker).await {
        found if found == tokens => Ok(()),
        found => Err(format!("an overlap of {found} and not of {tokens} on {worker}")),
    })
    .await;
}

#[tokio::test]
async fn blocks_that_a_decode_worker_received_are_known_though_it_does_not_tell() {
    let fleet = Fleet::start([prefill("p0"), decode("d0")]).await;
    let turn = prompt(1, 400);
    let (head, _) = Request::completion(&completion(&turn, 8, false)).json(fleet.addr()).await;
    assert_eq!(head.path(), "remote");
    has_overlap(&fleet, &turn, "d0", 400).await;
    let mut next = turn;
    next.extend(prompt(2, 30));
    let (head, _) = Request::completion(&completion(&next, 8, false)).json(fleet.addr()).await;
    assert_eq!((head.path(), head.reason()), ("local", "eff_isl_under"));
    fleet.assert_nothing_leaks().await;
}

#[tokio::test]
async fn what_a_prefill_worker_computed_is_known_by_its_polled_events() {
    let specs = [prefill("p0"), decode("d0")];
    let fleet = Fleet::with(specs, json!({"kv": {"approximate": "off"}})).await;
    let turn = prompt(1, 400);
    let (head, _) = Request::completion(&completion(&turn, 8, false)).json(fleet.addr()).await;
    assert_eq!(head.path(), "remote");
    has_overlap(&fleet, &turn, "p0", 400).await;
    let worker = fleet.router.worker("p0").await.unwrap();
    assert_eq!(
        (&worker["publishes_events"], &worker["index_stale"]),
        (&json!(true), &json!(false))
    );
    // The engine told how many blocks it has, and what they hold.
    assert_eq!(worker["capacity_blocks"], json!(40_000));
    assert_eq!(worker["reading"]["running"], json!(0), "{worker}");
}

#[tokio::test]
async fn a_gap_in_polled_events_makes_a_worker_count_as_empty() {
    let specs = [prefill("p0"), decode("d0")];
    let fleet = Fleet::with(specs, json!({"kv": {"approximate": "off"}})).await;
    let (first, second, third) = (prompt(1, 160), prompt(2, 160), prompt(3, 160));
    let send = async |prompt: &[u32]| {
        let asked = completion(prompt, 4, false);
        assert_eq!(Request::completion(&asked).json(fleet.addr()).await.0.status, 200);
    };
    send(&first).await;
    has_overlap(&fleet, &first, "p0", 160).await;
    let lost = EventFaults { drop_next: 1, ..EventFaults::default() };
    fleet.set_faults("p0", Faults { events: lost, ..Faults::default() });
    send(&second).await;
    send(&third).await;
    has_overlap(&fleet, &third, "p0", 160).await;
    assert_eq!(overlap(&fleet, &first, "p0").await, 0);
    let metrics = fleet.router.metrics().await;
    let gaps = metrics.count("pointsman_kv_events_total", &[("worker", "p0"), ("kind", "gap")]);
    assert_eq!(gaps, 1);
}

#[tokio::test]
async fn events_of_the_first_rank_count_and_those_of_others_leave_no_gap() {
    let ranked = |spec: Spec| spec.engine(|engine| engine.ranks = 2);
    let specs = [ranked(prefill("p0")), decode("d0")];
    let fleet = Fleet::with(specs, json!({"kv": {"approximate": "off"}})).await;
    let (elsewhere, here) = (prompt(1, 160), prompt(2, 160));
    let engine = fleet.get("p0").mock.addr();
    for (prompt, rank) in [(&elsewhere, "1"), (&here, "0"), (&elsewhere, "1")] {
        let asked = Request::completion(&completion(prompt, 4, false));
        let (head, reply) = asked.header("x-data-parallel-rank", rank).json(engine).await;
        assert_eq!(head.status, 200, "{reply}");
    }
    has_overlap(&fleet, &here, "p0", 160).await;
    assert_eq!(overlap(&fleet, &elsewhere, "p0").await, 0);
    let metrics = fleet.router.metrics().await;
    let events =
        |kind| metrics.count("pointsman_kv_events_total", &[("worker", "p0"), ("kind", kind)]);
    assert_eq!((events("gap"), events("restart"), events("lost")), (0, 0, 0));
    assert!(events("skipped") > 0);
}

#[tokio::test]
async fn an_engine_that_starts_anew_counts_as_empty() {
    let specs = [prefill("p0"), decode("d0")];
    let fleet = Fleet::with(specs, json!({"kv": {"approximate": "off"}})).await;
    let turn = prompt(1, 160);
    Request::completion(&completion(&turn, 4, false)).json(fleet.addr()).await;
    has_overlap(&fleet, &turn, "p0", 160).await;
    fleet.set_faults("p0", Faults { restart_publisher: true, ..Faults::default() });
    has_overlap(&fleet, &turn, "p0", 0).await;
}

#[tokio::test]
async fn what_a_worker_can_do_is_known() {
    let fleet = Fleet::start([prefill("p0"), decode("d0")]).await;
    has_overlap(&fleet, &prompt(1, 16), "d0", 0).await;
    let worker = wait_for("events of d0", async || {
        let worker = fleet.router.worker("d0").await?;
        (worker["publishes_events"] == true).then_some(worker)
    })
    .await;
    assert_eq!(
        worker["capabilities"],
        json!({"local_prefill": true, "events": "computed", "skips_cached_blocks": null,
               "legs": "prefill_first", "takes_ids": "completions_and_chat"})
    );
}

#[tokio::test]
async fn check_takes_no_events_away_from_the_router_that_serves() {
    let engine = MockEngine::start(EngineConfig {
        dialect: Dialect::Trtllm,
        model: MODEL.into(),
        ..EngineConfig::of(Role::Unified)
    });
    let engine = engine.await.unwrap();
    let worker = json!({"role": "unified", "url": engine.url(), "engine": "trtllm"});
    let config = json!({"models": [{"name": MODEL, "tokenizer": "builtin", "workers": [worker]}]});
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("pointsman.yaml");
    std::fs::write(&file, config.to_string()).unwrap();
    let file = file.to_string_lossy().into_owned();
    let checked = move || command::run(&["check", "-c", &file], &[], "");
    let ended = tokio::task::spawn_blocking(checked).await.unwrap();
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert!(ended.out.contains("note     its KV events go to whoever asks first"), "{}", ended.out);
    let (_, events) = Request::post("/kv_cache_events", &json!({})).json(engine.addr()).await;
    assert_eq!(events[0]["data"]["type"], json!("created"));
}
