//! What a mock engine notes for tests: violations, counters per leg, the last requests.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use http::HeaderMap;
use serde_json::{Map, Value, json};

use super::faults::Leg;

/// Violations kept with their details; further ones are only counted.
const KEPT_VIOLATIONS: usize = 1000;

/// What a router must not do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Violation {
    /// `do_remote_prefill` without what names the prefill.
    Incomplete,
    /// Params on a batch of prompts.
    Batch,
    /// Params that no prefill here ever gave.
    Unknown,
    /// Params used a second time.
    UsedTwice,
    /// Params past their lease.
    Expired,
    /// Params of another prompt.
    OtherPrompt,
    /// Params of a shorter prompt.
    LongerPrompt,
}

impl Violation {
    pub(super) fn name(self) -> &'static str {
        match self {
            Violation::Incomplete => "incomplete_params",
            Violation::Batch => "batch_with_params",
            Violation::Unknown => "unknown_params",
            Violation::UsedTwice => "params_used_twice",
            Violation::Expired => "params_expired",
            Violation::OtherPrompt => "params_of_another_prompt",
            Violation::LongerPrompt => "prompt_longer_than_prefilled",
        }
    }

    /// Whether the real engine dies of it, instead of answering wrong text.
    pub(super) fn kills(self) -> bool {
        matches!(self, Violation::Incomplete | Violation::Batch | Violation::LongerPrompt)
    }
}

struct Noted {
    violation: Violation,
    request: String,
}

struct Recorded {
    leg: Leg,
    path: String,
    headers: HeaderMap,
    body: Bytes,
}

#[derive(Default)]
struct Inner {
    violations: Vec<Noted>,
    violation_count: u64,
    requests: VecDeque<Recorded>,
    prefill: u64,
    decode_remote: u64,
    local: u64,
    faults_hit: u64,
    load_failures: u64,
}

pub(super) struct Ledger {
    keep_requests: usize,
    inner: Mutex<Inner>,
}

impl Ledger {
    pub(super) fn new(keep_requests: usize) -> Ledger {
        Ledger { keep_requests, inner: Mutex::default() }
    }

    pub(super) fn request(&self, leg: Leg, path: &str, headers: &HeaderMap, body: &Bytes) {
        let mut inner = self.lock();
        if self.keep_requests == 0 {
            return;
        }
        if inner.requests.len() >= self.keep_requests {
            inner.requests.pop_front();
        }
        let (path, headers, body) = (path.to_owned(), headers.clone(), body.clone());
        inner.requests.push_back(Recorded { leg, path, headers, body });
    }

    /// Counts a request that passed validation.
    pub(super) fn leg(&self, leg: Leg) {
        let mut inner = self.lock();
        match leg {
            Leg::Prefill => inner.prefill += 1,
            Leg::Decode => inner.decode_remote += 1,
            Leg::Local | Leg::Any => inner.local += 1,
        }
    }

    pub(super) fn violation(&self, violation: Violation, request: &str) {
        tracing::warn!(violation = violation.name(), request, "mock engine: wrong hand-off");
        let mut inner = self.lock();
        inner.violation_count += 1;
        if inner.violations.len() < KEPT_VIOLATIONS {
            inner.violations.push(Noted { violation, request: request.to_owned() });
        }
    }

    pub(super) fn fault_hit(&self) {
        self.lock().faults_hit += 1;
    }

    pub(super) fn load_failure(&self) {
        self.lock().load_failures += 1;
    }

    /// The members of `/mock/stats` that come from here.
    pub(super) fn describe(&self, into: &mut Map<String, Value>) {
        let inner = self.lock();
        let legs = json!({
            "prefill": inner.prefill, "decode_remote": inner.decode_remote, "local": inner.local,
        });
        let violation = |v: &Noted| json!({"kind": v.violation.name(), "request": v.request});
        let violations: Vec<Value> = inner.violations.iter().map(violation).collect();
        into.insert("legs".into(), legs);
        into.insert("violations".into(), violations.into());
        into.insert("violation_count".into(), inner.violation_count.into());
        into.insert("faults_hit".into(), inner.faults_hit.into());
        into.insert("kv_load_failures".into(), inner.load_failures.into());
        let requests: Vec<Value> = inner.requests.iter().map(recorded).collect();
        into.insert("requests".into(), requests.into());
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn recorded(request: &Recorded) -> Value {
    let headers: Map<String, Value> = request
        .headers
        .iter()
        .map(|(name, value)| {
            (name.to_string(), String::from_utf8_lossy(value.as_bytes()).into_owned().into())
        })
        .collect();
    let leg = serde_json::to_value(request.leg).unwrap_or_default();
    // `body` is as it came, byte for byte, for tests of what a router may not touch.
    json!({
        "leg": leg, "path": request.path, "headers": headers,
        "body": String::from_utf8_lossy(&request.body),
        "json": serde_json::from_slice::<Value>(&request.body).unwrap_or(Value::Null),
    })
}
