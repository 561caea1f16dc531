//! The router's own endpoints below `/v1/pointsman/`: its workers, its decisions, its state.

use std::sync::Arc;

use http::Method;
use http::request::Parts;
use hyper::body::Incoming;
use pointsman_brain::{Brain, Slot, WorkerView};
use pointsman_wire::body::{Body, Limits};
use pointsman_wire::dialect::Api;
use serde_json::{Value, json};

use crate::bootstrap;
use crate::capabilities::Capabilities;
use crate::error::{Refusal, Reply, json as reply_json};
use crate::fleet::{AddError, Group, Rank};
use crate::router::Router;
use crate::{api, life, receive, report, snapshot};

/// Answers a request for `/v1/pointsman/<rest>`.
pub(crate) async fn answer(router: &Arc<Router>, rest: &str, head: Parts, body: Incoming) -> Reply {
    let get = head.method == Method::GET;
    let parts: Vec<&str> = rest.split('/').collect();
    match parts.as_slice() {
        ["status"] if get => reply_json(200, status(router).to_string()),
        ["workers"] if get => reply_json(200, json!({"workers": workers(router)}).to_string()),
        ["explain"] if head.method == Method::POST => {
            explain(router, head, body).await.unwrap_or_else(|refusal| refusal.reply())
        }
        ["index", "snapshot"] if get => {
            snapshot::reply(router).unwrap_or_else(|refusal| refusal.reply())
        }
        ["status"] | ["index", "snapshot"] => api::wrong_method(&Method::GET),
        ["workers", ..] if !router.settings.worker_api => {
            Refusal::new(403, "the worker API is off: set `admin.worker_api: true`").reply()
        }
        ["workers"] if head.method == Method::POST => {
            add(router, &head, body).await.unwrap_or_else(|refusal| refusal.reply())
        }
        ["workers" | "explain"] => api::wrong_method(&Method::POST),
        ["workers", model, name] if head.method == Method::DELETE => {
            reply(remove(router, &decoded(model), &decoded(name)))
        }
        ["workers", _, _] => api::wrong_method(&Method::DELETE),
        ["workers", model, name, "drain"] => match head.method {
            Method::POST => reply(drain(router, &decoded(model), &decoded(name), true)),
            Method::DELETE => reply(drain(router, &decoded(model), &decoded(name), false)),
            _ => api::wrong_method(&Method::POST),
        },
        _ => api::not_found(head.uri.path()),
    }
}

/// A name as it stands in a path.
pub(crate) fn decoded(segment: &str) -> String {
    percent_encoding::percent_decode_str(segment).decode_utf8_lossy().into_owned()
}

fn reply(result: Result<Value, Refusal>) -> Reply {
    match result {
        Ok(value) => reply_json(200, value.to_string()),
        Err(refusal) => refusal.reply(),
    }
}

/// What the brain would decide for a chat (a body with `messages`), a body of `/generate` (with `text`
/// or `input_ids`) or a completion, and all that goes into it. Reserves nothing.
async fn explain(router: &Arc<Router>, head: Parts, body: Incoming) -> Result<Reply, Refusal> {
    let mut ticket = life::admit(router)?;
    let body = receive::body(body, &head.headers, router).await?;
    let asked = Body::parse(body.bytes.clone(), &Limits::default())?;
    let api = match () {
        () if asked.has("messages") => Api::Chat,
        () if asked.has("text") || asked.has("input_ids") => Api::Generate,
        () => Api::Completions,
    };
    let life = life::begin(router, api, head, body, &mut ticket).await?;
    let ladder = life.ladder();
    let explained = life.group.brain().explain(&life.ask(&ladder), life.group.now());
    match explained {
        Ok(record) => {
            let mut value = json!(record);
            name_workers(&life, &mut value);
            value["request"] = json!(life.id);
            value["model"] = json!(life.model);
            Ok(reply_json(200, value.to_string()))
        }
        Err(no_path) => Err(report::no_path(&life, &no_path)),
    }
}

/// Puts workers' names beside their slots.
fn name_workers(life: &life::Life, record: &mut Value) {
    let name = |value: &Value| {
        let slot = u16::try_from(value.as_u64()?).ok()?;
        life.worker(Some(Slot(slot))).map(str::to_owned)
    };
    record["prefill_worker"] = json!(name(&record["prefill"]));
    record["decode_worker"] = json!(name(&record["decode"]));
    for candidate in record["candidates"].as_array_mut().into_iter().flatten() {
        candidate["worker"] = json!(name(&candidate["slot"]));
    }
}

fn status(router: &Router) -> Value {
    let models: Vec<Value> = router
        .fleet
        .groups
        .iter()
        .map(|group| {
            let brain = group.brain();
            json!({
                "name": group.name(),
                "policy": brain.settings().policy.rule.as_str(),
                "shadow": group.shadows,
                "readiness": brain.can_serve(group.now()),
                "live_bookings": brain.live_bookings(),
                "held_requests": group.hold.held(),
                "ledger": brain.audit().err().unwrap_or_else(|| "sound".to_owned()),
                "never_fires": brain.never_fires(),
                "slo": brain.settings().slo,
                "calibration": calibration(group, &brain),
            })
        })
        .collect();
    json!({
        "version": env!("CARGO_PKG_VERSION"),
        "draining": router.is_draining(),
        "requests_in_flight": router.gate.inside(),
        "models": models,
    })
}

/// What was measured of a group's engines, with the workers' names.
fn calibration(group: &Group, brain: &Brain) -> Value {
    let mut value = json!(brain.calibration(group.now()));
    let roster = group.roster.load();
    for worker in value["workers"].as_array_mut().into_iter().flatten() {
        let slot = worker["slot"].as_u64().and_then(|slot| u16::try_from(slot).ok());
        let rank = slot.and_then(|slot| roster.get(Slot(slot)));
        worker["name"] = json!(rank.map(|rank| rank.worker.name()));
    }
    value
}

fn workers(router: &Router) -> Vec<Value> {
    router
        .fleet
        .groups
        .iter()
        .flat_map(|group| {
            let roster = group.roster.load();
            let views: Vec<WorkerView> = group.brain().workers().collect();
            views
                .iter()
                .filter_map(|view| Some(worker(router, group, roster.get(view.slot)?, view)))
                .collect::<Vec<_>>()
        })
        .collect()
}

fn worker(router: &Router, group: &Group, rank: &Rank, view: &WorkerView) -> Value {
    let s = &rank.worker.settings;
    let learned = rank.worker.learned.load();
    let now = group.now();
    json!({
        "model": group.name(),
        "name": rank.worker.name(),
        "url": s.url.to_string(),
        "rank": rank.rank.unwrap_or(0),
        "role": view.role,
        "labels": s.labels,
        "local_prefill": view.local_prefill,
        "condition": view.condition,
        "draining": view.draining,
        "load": view.load,
        "capacity_blocks": view.capacity_blocks,
        "block_size": rank.worker.spec().block_size,
        "reading": view.reading,
        "reading_age_seconds": view.read_at.map(|at| now.since(at).as_secs_f64()),
        "reading_counts": view.reading_counts(now),
        "publishes_events": learned.publishes_events,
        "index_blocks": group.reader.blocks(pointsman_kv::Slot(rank.slot.0)),
        "index_stale": rank.worker.is_stale(rank.slot),
        "serves": learned.models.iter().map(|model| &model.id).collect::<Vec<_>>(),
        "engine": s.engine.as_str(),
        "capabilities": Capabilities::of(&rank.worker),
        "problem": router
            .upstream
            .trouble(&s.url)
            .or_else(|| bootstrap::problem(&rank.worker, rank.rank)),
        "version": learned.version.map(|v| format!("{}.{}.{}", v.0, v.1, v.2)),
    })
}

/// Adds the worker that a body describes.
async fn add(router: &Arc<Router>, head: &Parts, body: Incoming) -> Result<Reply, Refusal> {
    let body = receive::body(body, &head.headers, router).await?;
    let text = std::str::from_utf8(&body.bytes)
        .map_err(|_| Refusal::new(400, "the body is not valid UTF-8"))?;
    let joining = pointsman_config::joining(text)
        .map_err(|problems| Refusal::new(400, problems.to_string()))?;
    let Some(group) = router.fleet.named(&joining.model) else {
        let message = format!("no model is named `{}`", joining.model);
        return Err(Refusal::new(404, message).param("model"));
    };
    let settings = joining.worker;
    match router.add_worker(&group, settings) {
        Ok(worker) => {
            let body = json!({"model": group.name(), "name": worker.name(), "added": true});
            Ok(reply_json(201, body.to_string()))
        }
        Err(error @ (AddError::Duplicate { .. } | AddError::Taken { .. })) => {
            Err(Refusal::new(409, error.to_string()))
        }
        Err(error @ AddError::Full(_)) => Err(Refusal::new(400, error.to_string())),
    }
}

fn remove(router: &Router, model: &str, name: &str) -> Result<Value, Refusal> {
    let removed = router.fleet.group(model).and_then(|group| router.remove_worker(group, name));
    match removed {
        Some(_) => Ok(json!({"model": model, "name": name, "removed": true})),
        None => Err(unknown(model, name)),
    }
}

fn drain(router: &Router, model: &str, name: &str, on: bool) -> Result<Value, Refusal> {
    let group = router.fleet.group(model).ok_or_else(|| unknown(model, name))?;
    let roster = group.roster.load();
    let worker = roster.worker(name).ok_or_else(|| unknown(model, name))?;
    for slot in &worker.slots {
        group.brain().drain(*slot, on);
    }
    Ok(json!({"model": model, "name": name, "draining": on}))
}

fn unknown(model: &str, name: &str) -> Refusal {
    Refusal::new(404, format!("model `{model}` has no worker named `{name}`"))
}
