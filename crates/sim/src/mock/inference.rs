//! Answers one inference request: the faults that hit it, the plan, and how the reply is sent.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use bytes::Bytes;
use http::HeaderMap;

use super::app::App;
use super::body::{self, Reply};
use super::connection::Hangup;
use super::errors::Failure;
use super::faults::{Action, Cut, Leg};
use super::plan::{Plan, leg_of, plan, remote_of};
use super::reply;
use super::request::{Api, Request, parse};
use super::run::Run;
use super::side;
use super::stream::Events;

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
    };
    let parsed = parse(api, &bytes);
    let leg = parsed.as_ref().map_or(Leg::Local, |request| leg_of(&app, request));
    app.ledger.request(leg, path, headers, &bytes);
    let fault = app.fault_for(leg);
    if let Some(reply) = before_headers(fault.as_ref(), &hangup).await {
        return reply;
    }
    let reply = match parsed.and_then(|request| planned(&app, request, headers)) {
        Ok(plan) => run(app, plan, fault.as_ref(), &hangup).await,
        Err(failure) => body::failure(&failure),
    };
    match fault {
        Some(Action::CloseAfterReply) => reply.map(|body| body.then_close(&hangup)),
        _ => reply,
    }
}

/// Does what a fault does before any header is sent.
pub(super) async fn before_headers(fault: Option<&Action>, hangup: &Hangup) -> Option<Reply> {
    match fault? {
        Action::Refuse => hangup.cut(Cut::Rst),
        Action::CutBeforeHeaders { cut } => hangup.cut(*cut),
        Action::HangBeforeHeaders => {}
        Action::Status { status, body: Some(text) } => {
            return Some(body::json(*status, text.clone()));
        }
        Action::Status { status, body: None } => {
            return Some(body::failure(&Failure::injected(*status)));
        }
        _ => return None,
    }
    std::future::pending().await
}

fn planned(app: &App, request: Request, headers: &HeaderMap) -> Result<Plan, Failure> {
    if app.dead.load(Ordering::Relaxed) {
        return Err(Failure::unavailable());
    }
    let remote = (leg_of(app, &request) == Leg::Decode).then(|| remote_of(&request)).flatten();
    let request_id = headers.get("x-request-id").and_then(|id| id.to_str().ok());
    let planned = rank_of(app, headers).and_then(|rank| plan(app, request, rank, request_id));
    if let (Err(_), Some(remote)) = (&planned, remote) {
        // A refused decode leg frees what its prefill pinned.
        side::release(remote, &app.tasks, &app.stop);
    }
    planned
}

/// The rank that `X-data-parallel-rank` names, else the one with the least to do.
fn rank_of(app: &App, headers: &HeaderMap) -> Result<usize, Failure> {
    let asked = headers.get("x-data-parallel-rank").and_then(|rank| rank.to_str().ok());
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
        return body::failure(&failure);
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
