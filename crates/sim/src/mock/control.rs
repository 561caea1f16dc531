//! `/mock/...`: faults, and what tests look at.

use bytes::Bytes;
use serde_json::{Map, Value, json};

use super::app::App;
use super::body::{self, Reply};
use super::errors::Failure;
use super::faults::Faults;
use super::rank::Rank;

/// `POST /mock/faults`
pub(super) fn set_faults(app: &App, bytes: &Bytes) -> Reply {
    match serde_json::from_slice::<Faults>(bytes) {
        Ok(faults) => {
            app.set_faults(faults);
            get_faults(app)
        }
        Err(error) => {
            body::failure(app.config.dialect, &Failure::bad(None, format!("faults: {error}")))
        }
    }
}

/// `GET /mock/faults`
pub(super) fn get_faults(app: &App) -> Reply {
    body::json(200, serde_json::to_vec(&app.faults()).unwrap_or_default())
}

/// `GET /mock/stats`
pub(super) fn stats(app: &App) -> Value {
    let mut stats = Map::new();
    let ranks: Vec<Value> = (0..app.ranks.len()).map(|at| rank_stats(app, at)).collect();
    for key in SUMMED {
        let sum: u64 = ranks.iter().filter_map(|rank| rank[*key].as_u64()).sum();
        stats.insert((*key).to_owned(), sum.into());
    }
    let in_flight = app.in_flight.load(std::sync::atomic::Ordering::Relaxed);
    stats.insert("in_flight".into(), in_flight.into());
    stats.insert("role".into(), serde_json::to_value(app.config.role).unwrap_or_default());
    stats.insert("model".into(), app.config.model.clone().into());
    stats.insert("dead".into(), app.dead.load(std::sync::atomic::Ordering::Relaxed).into());
    let broken: Vec<String> = app.ranks.iter().filter_map(|rank| rank.check().err()).collect();
    stats.insert("broken_invariants".into(), broken.into());
    app.ledger.describe(&mut stats);
    stats.insert("ranks".into(), ranks.into());
    Value::Object(stats)
}

/// Members of a rank's statistics that the engine's are the sums of.
const SUMMED: &[&str] = &[
    "live",
    "running",
    "waiting",
    "pulling",
    "pins",
    "pinned_blocks",
    "used_blocks",
    "cached_blocks",
    "cached_chains",
    "capacity_blocks",
    "local_compute_tokens",
    "local_cache_hit_tokens",
    "external_kv_transfer_tokens",
    "generated_tokens",
    "preemptions",
    "finished",
    "aborted",
    "expired",
];

fn rank_stats(app: &App, at: usize) -> Value {
    let rank: &Rank = &app.ranks[at];
    let (load, totals) = (rank.load(), rank.totals());
    let events = app.publishers.get(at).map(|publisher| {
        let (next, subscribers, counters) = publisher.state();
        json!({
            "next_sequence": next, "subscribers": subscribers, "published": counters.published,
            "lost": counters.lost, "dropped": counters.dropped, "replays": counters.replays,
        })
    });
    json!({
        "rank": rank.index,
        "live": load.running + load.waiting + load.pulling,
        "running": load.running,
        "waiting": load.waiting,
        "pulling": load.pulling,
        "pins": load.pins,
        "pinned_blocks": load.pinned_blocks,
        "used_blocks": load.used_blocks,
        "cached_blocks": load.cached_blocks,
        "cached_chains": rank.cached_chains().len(),
        "capacity_blocks": load.capacity_blocks,
        "local_compute_tokens": totals.local_compute,
        "local_cache_hit_tokens": totals.local_cache_hit,
        "external_kv_transfer_tokens": totals.external_kv_transfer,
        "generated_tokens": totals.generated,
        "preemptions": totals.preemptions,
        "finished": totals.finished,
        "aborted": totals.aborted,
        "expired": totals.expired,
        "events": events,
    })
}

/// `GET /mock/cache`: every resident prefix that no longer one continues.
pub(super) fn cache(app: &App) -> Value {
    let size = app.config.block_size as usize;
    let rank = |rank: &Rank| {
        let chain =
            |(names, content): (Vec<u64>, Option<std::sync::Arc<crate::engine::Content>>)| {
                let tokens = content.as_ref().and_then(|c| c.tokens.get(..names.len() * size));
                json!({
                    "hashes": names,
                    "tokens": tokens,
                    "lora": content.as_ref().and_then(|c| c.lora.as_deref()),
                    "salt": content.as_ref().and_then(|c| c.salt.as_deref()),
                })
            };
        let chains: Vec<Value> = rank.cached_chains().into_iter().map(chain).collect();
        json!({"rank": rank.index, "block_size": size, "chains": chains})
    };
    json!({"ranks": app.ranks.iter().map(|one| rank(one)).collect::<Vec<_>>()})
}
