//! Answers one inference request: the faults that hit it, the plan, and how the reply is sent.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use bytes::Bytes;
use http::HeaderMap;

use super::app::App;
use super::body::{self, Reply};
use super::config::Dialect;
use super::connection::Hangup;
use super::errors::Failure;
use super::faults::{Action, Cut, Leg};
use super::plan::{Plan, leg_of, plan, remote_of};
use super::reply;
use super::request::{Api, Request, parse};
use super::run::Run;
use super::stream::Events;
use super::{mooncake, sglang, side};

pub(super) async fn answer(
    app: Arc<App>,
    api: Api,
    headers: &HeaderMap,
    bytes: Bytes,
    hangup: Arc<Hangup>,
) -> Reply {
    let path = match api {
        Api::Chat => "/v1/chat/completions",
        Api::Completions => "/v1/completions",
        Api::Generate => "/generate",
        Api::Tokens => "/inference/v1/generate",
    };
    let mut parsed = parse(app.config.dialect, api, &bytes);
    if let Ok(request) = &mut parsed {
        mooncake::read(&app.config, &mut request.kv);
    }
    let leg = parsed.as_ref().map_or(Leg::Local, |request| leg_of(&app, request));
    app.ledger.request(leg, path, headers, &bytes);
    let fault = app.fault_for(leg);
    if let Some(reply) = before_headers(&app, fault.as_ref(), &hangup).await {
        return reply;
    }
    let reply = match parsed.and_then(|request| planned(&app, request, headers)) {
        Ok(mut plan) => {
            change(&mut plan, &app, fault.as_ref());
            run(app, plan, fault.as_ref(), &hangup).await
        }
        Err(failure) => body::failure(app.config.dialect, &failure),
    };
    match fault {
        Some(Action::CloseAfterReply) => reply.map(|body| body.then_close(&hangup)),
        _ => reply,
    }
}

/// Does what a fault does before any header is sent.
pub(super) async fn before_headers(
    app: &App,
    fault: Option<&Action>,
    hangup: &Hangup,
) -> Option<Reply> {
    match fault? {
        Action::Refuse => hangup.cut(Cut::Rst),
        Action::CutBeforeHeaders { cut } => hangup.cut(*cut),
        Action::HangBeforeHeaders => {}
        Action::Status { status, body: Some(text) } => {
            return Some(body::json(*status, text.clone()));
        }
        Action::Status { status, body: None } => {
            return Some(body::failure(app.config.dialect, &Failure::injected(*status)));
        }
        _ => return None,
    }
    std::future::pending().await
}

/// Does what a fault does to the plan.
fn change(plan: &mut Plan, app: &App, fault: Option<&Action>) {
    match fault {
        Some(Action::EosAtOnce) => {
            plan.sequences.iter_mut().for_each(|sequence| sequence.end_at_once(&app.words));
        }
        Some(Action::OtherRoom) => {
            if let Some(transfer) = &mut plan.request.kv.transfer_id {
                transfer.push('x');
            }
            if let Some(bootstrap) = &mut plan.request.kv.bootstrap {
                // Far from those of other prompts.
                bootstrap.rooms.iter_mut().for_each(|room| *room ^= 1 << 40);
            }
        }
        _ => {}
    }
}

fn planned(app: &App, request: Request, headers: &HeaderMap) -> Result<Plan, Failure> {
    if app.dead.load(Ordering::Relaxed) {
        return Err(Failure::unavailable());
    }
    let remote = (leg_of(app, &request) == Leg::Decode).then(|| remote_of(&request)).flatten();
    let request_id = headers.get("x-request-id").and_then(|id| id.to_str().ok());
    let asked = match app.config.dialect {
        Dialect::Sglang => sglang::rank_asked(&request),
        Dialect::Vllm | Dialect::Trtllm => {
            let asked = headers.get("x-data-parallel-rank");
            asked.and_then(|rank| rank.to_str().ok()).map(str::to_owned)
        }
    };
    let rank = rank_of(app, asked.as_deref());
    let planned = rank.and_then(|rank| plan(app, request, rank, request_id));
    let frees = app.config.dialect == Dialect::Vllm;
    if let (Err(_), Some(remote), true) = (&planned, remote, frees) {
        // A refused decode leg frees what its prefill pinned.
        side::release(remote, mooncake::is_used(&app.config), &app.tasks, &app.stop);
    }
    planned
}

/// The rank that is asked for, else the one with the least to do.
fn rank_of(app: &App, asked: Option<&str>) -> Result<usize, Failure> {
    let count = app.ranks.len();
    if let Some(asked) = asked {
        let rank = asked.trim().parse::<usize>().ok().filter(|&rank| rank < count);
        return rank.ok_or_else(|| {
            let message = format!("data_parallel_rank {asked} is out of range [0, {count}).");
            Failure::bad(None, message)
        });
    }
    if count == 1 {
        return Ok(0);
    }
    let burden = |rank: &usize| {
        let load = app.ranks[*rank].load();
        (load.waiting + load.pulling) * 4 + load.running
    };
    Ok((0..count).min_by_key(burden).unwrap_or(0))
}

async fn run(app: Arc<App>, plan: Plan, fault: Option<&Action>, hangup: &Arc<Hangup>) -> Reply {
    let streams = plan.request.stream;
    let mut run = Run::new(&app, plan, fault);
    if streams {
        return body::events(Events::new(run, fault, hangup.clone()));
    }
    if matches!(fault, Some(Action::HangAfterHeaders)) {
        return body::unfinished("application/json", Bytes::new(), None);
    }
    if let Err(failure) = to_the_end(&mut run).await {
        return body::failure(app.config.dialect, &failure);
    }
    if matches!(fault, Some(Action::NoParams)) {
        run.plan.sequences.iter_mut().for_each(|sequence| sequence.pinned = None);
    }
    let bytes = reply::body(&app, &run.plan);
    match fault {
        Some(Action::CutMidStream { cut, .. }) => {
            let half = bytes.slice(..bytes.len() / 2);
            body::unfinished("application/json", half, Some((hangup.clone(), *cut)))
        }
        _ => body::json(200, bytes),
    }
}

async fn to_the_end(run: &mut Run) -> Result<(), Failure> {
    run.start().await?;
    while run.next().await?.is_some() {}
    Ok(())
}
