//! Mock engines of this process with a router in front, and the look for leaks.

use std::net::SocketAddr;

use pointsman_sim::mock::{
    Action, Connector, Dialect, EngineConfig, Fault, Faults, KvSocket, Leg, MockEngine, Role,
};
use serde_json::{Value, json};

use super::client::{Body, Request};
use super::router::Router;
use super::valve::Valve;
use super::{merge, wait_until};

/// The model of every fleet.
pub const MODEL: &str = "mock";

/// One engine to be.
pub struct Spec {
    name: String,
    engine: EngineConfig,
    worker: Value,
    valve: bool,
    replays: bool,
}

fn spec(role: Role, word: &str, name: &str) -> Spec {
    let engine =
        EngineConfig { speed: f64::INFINITY, model: MODEL.into(), ..EngineConfig::of(role) };
    Spec {
        name: name.to_owned(),
        engine,
        worker: json!({"name": name, "role": word}),
        valve: false,
        replays: true,
    }
}

pub fn prefill(name: &str) -> Spec {
    spec(Role::Prefill, "prefill", name)
}

pub fn decode(name: &str) -> Spec {
    spec(Role::Decode, "decode", name)
}

pub fn unified(name: &str) -> Spec {
    spec(Role::Unified, "unified", name)
}

impl Spec {
    /// Changes the engine's settings.
    #[must_use]
    pub fn engine(mut self, change: impl FnOnce(&mut EngineConfig)) -> Spec {
        change(&mut self.engine);
        self
    }

    /// Faults from the start on.
    #[must_use]
    pub fn faults(self, faults: Faults) -> Spec {
        self.engine(|engine| engine.faults = faults)
    }

    /// Keys of the worker in the router's configuration.
    #[must_use]
    pub fn worker(mut self, keys: Value) -> Spec {
        merge(&mut self.worker, keys);
        self
    }

    /// An engine of SGLang.
    #[must_use]
    pub fn sglang(self) -> Spec {
        self.engine(|engine| engine.dialect = Dialect::Sglang).worker(json!({"engine": "sglang"}))
    }

    /// A short lease, where what is left pinned nobody can name and release.
    #[must_use]
    pub fn short_lease(self) -> Spec {
        self.engine(|engine| engine.lease = std::time::Duration::from_secs(2))
    }

    /// Puts a valve between the router and the engine.
    #[must_use]
    pub fn behind_a_valve(mut self) -> Spec {
        self.valve = true;
        self
    }

    /// Tells the router where the events are and nothing of the replay.
    #[must_use]
    pub fn without_replay(mut self) -> Spec {
        self.replays = false;
        self
    }

    async fn start(self, seed: u64) -> Engine {
        let mut engine = EngineConfig { seed, ..self.engine };
        let mock = MockEngine::start(engine.clone()).await.expect("the engine starts");
        let valve = self.valve.then(|| Valve::new(mock.addr()));
        let addr = valve.as_ref().map_or(mock.addr(), Valve::addr);
        let mut worker = json!({"url": format!("http://{addr}"), "kv_events": "auto"});
        if let (false, Some(endpoint)) = (self.replays, mock.kv_endpoint()) {
            worker["kv_events"] = json!({"endpoint": endpoint});
        }
        if engine.connector == Connector::Mooncake {
            worker["kv_connector"] = json!("mooncake");
            if engine.role == Role::Prefill {
                // It is told, not found: another start has to use it again.
                engine.bootstrap_port = mock.bootstrap_port();
                worker["bootstrap_port"] = json!(engine.bootstrap_port);
            }
        }
        merge(&mut worker, self.worker);
        Engine { name: self.name, mock, worker, config: engine, valve }
    }
}

/// A running engine and what the router was told of it.
pub struct Engine {
    pub name: String,
    pub mock: MockEngine,
    pub worker: Value,
    pub config: EngineConfig,
    pub valve: Option<Valve>,
}

/// What is left of an engine that was killed.
pub struct Killed {
    at: usize,
    name: String,
    worker: Value,
    config: EngineConfig,
    valve: Option<Valve>,
    api: u16,
    /// Ports of its event sockets.
    pub events: Option<(u16, u16)>,
}

fn port(endpoint: &str) -> u16 {
    endpoint.rsplit(':').next().and_then(|port| port.parse().ok()).expect("a port at the end")
}

/// Engines and the router in front of them.
pub struct Fleet {
    pub engines: Vec<Engine>,
    pub router: Router,
}

/// A rule for every request that it hits.
pub fn rule(leg: Leg, action: Action) -> Faults {
    Faults { rules: vec![Fault { leg, count: None, action }], ..Faults::default() }
}

/// A rule for the first `count` requests that it hits.
pub fn times(count: u32, leg: Leg, action: Action) -> Faults {
    Faults { rules: vec![Fault { leg, count: Some(count), action }], ..Faults::default() }
}

impl Fleet {
    /// Starts everything, with the default settings.
    pub async fn start(specs: impl IntoIterator<Item = Spec>) -> Fleet {
        Fleet::with(specs, json!({})).await
    }

    /// Starts everything; `config` goes over the settings key by key, `config.model` over the model's.
    pub async fn with(specs: impl IntoIterator<Item = Spec>, config: Value) -> Fleet {
        let mut engines = Vec::new();
        for spec in specs {
            let seed = engines.len() as u64;
            engines.push(spec.start(seed).await);
        }
        let workers: Vec<&Value> = engines.iter().map(|engine| &engine.worker).collect();
        let tree = configuration(&json!(workers), config);
        let router = Router::start(&tree).await;
        Fleet { engines, router }
    }

    /// Starts a further engine that the router does not know.
    pub async fn join(&mut self, spec: Spec) -> &Engine {
        let engine = spec.start(self.engines.len() as u64).await;
        self.engines.push(engine);
        self.engines.last().expect("it was pushed")
    }

    /// Ends an engine as if its process were killed.
    pub async fn kill(&mut self, name: &str) -> Killed {
        let at = self.engines.iter().position(|engine| engine.name == name);
        let at = at.unwrap_or_else(|| panic!("no engine is named {name}"));
        let engine = self.engines.remove(at);
        let (api, kv) = (engine.mock.addr().port(), engine.mock.kv_endpoint().map(port));
        let replay = engine.mock.replay_endpoint().map(port);
        engine.mock.stop().await;
        let Engine { name, worker, config, valve, .. } = engine;
        Killed { at, name, worker, config, valve, api, events: kv.zip(replay) }
    }

    /// Starts a killed engine again on the port of its API, empty.
    pub async fn revive(&mut self, killed: Killed, same_event_ports: bool) {
        let Killed { at, name, worker, mut config, valve, api, events } = killed;
        config.port = api;
        if let (true, Some(kv), Some((publish, replay))) =
            (same_event_ports, &mut config.kv_events, events)
        {
            kv.publish = KvSocket::Bind(publish);
            kv.replay_port = replay;
        }
        let mock = MockEngine::start(config.clone()).await.expect("the engine starts again");
        self.engines.insert(at, Engine { name, mock, worker, config, valve });
    }

    pub fn addr(&self) -> SocketAddr {
        self.router.addr()
    }

    /// The address of one worker in the worker API, and what follows it.
    fn worker_path(name: &str, rest: &str) -> String {
        format!("/v1/pointsman/workers/{MODEL}/{name}{rest}")
    }

    /// Removes a worker from the router; its engine goes on.
    pub async fn remove(&self, name: &str) {
        self.admin(&Request::new("DELETE", &Fleet::worker_path(name, ""), Vec::new())).await;
    }

    /// Adds an engine's worker to the router.
    pub async fn add(&self, name: &str) {
        let mut worker = self.get(name).worker.clone();
        worker["model"] = json!(MODEL);
        self.admin(&Request::post("/v1/pointsman/workers", &worker)).await;
    }

    /// Starts or stops draining a worker.
    pub async fn drain(&self, name: &str, on: bool) {
        let method = if on { "POST" } else { "DELETE" };
        self.admin(&Request::new(method, &Fleet::worker_path(name, "/drain"), Vec::new())).await;
    }

    async fn admin(&self, request: &Request) {
        let (head, body) = request.send(self.addr()).await;
        assert!((200..300).contains(&head.status), "{body:?}");
    }

    pub fn get(&self, name: &str) -> &Engine {
        let found = self.engines.iter().find(|engine| engine.name == name);
        found.unwrap_or_else(|| panic!("no engine is named {name}"))
    }

    pub fn valve(&mut self, name: &str) -> &mut Valve {
        let found = self.engines.iter_mut().find(|engine| engine.name == name);
        found.and_then(|engine| engine.valve.as_mut()).expect("an engine behind a valve")
    }

    /// Replaces an engine's faults.
    pub fn set_faults(&self, name: &str, faults: Faults) {
        self.get(name).mock.set_faults(faults);
    }

    /// An engine's `/mock/stats`.
    pub fn stats(&self, name: &str) -> Value {
        self.get(name).mock.stats()
    }

    /// Requests of one leg (`prefill`, `decode_remote`, `local`) that an engine took up.
    pub fn legs(&self, name: &str, leg: &str) -> u64 {
        self.stats(name)["legs"][leg].as_u64().unwrap_or_else(|| panic!("no leg {leg}"))
    }

    /// Requests that reached an engine, taken up or not.
    pub fn requests(&self, name: &str) -> Vec<Value> {
        self.stats(name)["requests"].as_array().cloned().unwrap_or_default()
    }

    /// What an engine was sent, as JSON.
    pub fn bodies(&self, name: &str) -> Vec<Value> {
        self.requests(name).iter().map(|request| request["json"].clone()).collect()
    }

    /// An engine of this kind by itself.
    pub async fn alone(&self) -> Engine {
        let dialect = self.engines.first().map(|engine| engine.config.dialect);
        let alone = unified("alone").engine(|engine| {
            engine.dialect = dialect.unwrap_or(engine.dialect);
        });
        alone.start(1000).await
    }

    /// What such an engine says to a request, nothing being wrong.
    pub async fn expected(&self, request: &Request) -> Value {
        let engine = self.alone().await;
        let (head, json) = request.json(engine.mock.addr()).await;
        assert_eq!(head.status, 200, "{json}");
        engine.mock.stop().await;
        json
    }

    /// A reply that is no stream says what an engine alone would have said.
    pub async fn assert_as_alone(&self, request: &Request, reply: &Value) {
        let expected = self.expected(request).await;
        assert_eq!(reply["choices"], expected["choices"], "{reply}");
        let tokens = |json: &Value| json["usage"]["completion_tokens"].clone();
        assert_eq!(tokens(reply), tokens(&expected));
    }

    /// A stream is whole and says what an engine alone would have said.
    pub async fn assert_streamed_as_alone(&self, path: &str, request: &Value, body: &Body) {
        assert!(body.is_done(), "{body:?}");
        let mut whole = request.clone();
        whole["stream"] = json!(false);
        let expected = self.expected(&Request::post(path, &whole)).await;
        let choice = &expected["choices"][0];
        let text = choice["text"].as_str().or_else(|| choice["message"]["content"].as_str());
        assert_eq!(body.content(), text.expect("a reply with text"));
    }

    /// The answer to a completion, a stream or not, says what an engine alone would have said.
    pub async fn assert_completed_as_alone(&self, request: &Value, body: &Body) {
        if request["stream"] == true {
            self.assert_streamed_as_alone("/v1/completions", request, body).await;
        } else {
            self.assert_as_alone(&Request::completion(request), &body.json()).await;
        }
    }

    /// `leg_failures_total`
    pub async fn failures(&self, leg: &str, cause: &str) -> u64 {
        let metrics = self.router.metrics().await;
        metrics.count("pointsman_leg_failures_total", &[("leg", leg), ("cause", cause)])
    }

    /// Waits until nothing is booked, running or pinned anywhere.
    ///
    /// # Panics
    /// With what is left, if it does not go away; at once where an engine saw what it never should.
    pub async fn assert_nothing_leaks(&self) {
        self.assert_nothing_leaks_but_pins(0).await;
    }

    /// The same where so many prompts stay pinned until their lease ends, because nobody can name them
    /// or nobody may release them any more.
    pub async fn assert_nothing_leaks_but_pins(&self, pins: u64) {
        self.assert_no_violation();
        wait_until(async || {
            let mut leaks = self.router_leaks().await;
            leaks.extend(self.engine_leaks(&["live", "in_flight"]));
            let pinned = self.engines.iter().map(|engine| engine.mock.stats()["pins"].as_u64());
            let pinned: u64 = pinned.flatten().sum();
            if pinned != pins {
                leaks.push(format!("{pinned} prompts are pinned, not {pins}"));
            }
            if leaks.is_empty() { Ok(()) } else { Err(leaks.join("; ")) }
        })
        .await;
        self.assert_no_violation();
    }

    pub fn assert_no_violation(&self) {
        for engine in &self.engines {
            let stats = engine.mock.stats();
            assert_eq!(stats["violations"], json!([]), "violations on {}", engine.name);
            assert_eq!(stats["broken_invariants"], json!([]), "invariants of {}", engine.name);
        }
    }

    /// Everything that is booked, running or pinned.
    pub async fn leaks(&self) -> Vec<String> {
        let mut leaks = self.router_leaks().await;
        leaks.extend(self.engine_leaks(&["live", "in_flight", "pins", "pinned_blocks"]));
        leaks
    }

    /// Which of these statistics of engines are not 0.
    pub fn engine_leaks(&self, keys: &[&str]) -> Vec<String> {
        let mut leaks = Vec::new();
        for engine in &self.engines {
            let stats = engine.mock.stats();
            let left = keys.iter().filter(|key| stats[**key] != 0);
            leaks.extend(left.map(|key| format!("{} has {key} {}", engine.name, stats[*key])));
        }
        leaks
    }

    /// What the router itself still holds.
    pub async fn router_leaks(&self) -> Vec<String> {
        let (status, metrics) = (self.router.status().await, self.router.metrics().await);
        let mut leaks = Vec::new();
        if status["requests_in_flight"] != 0 {
            leaks.push(format!("requests_in_flight is {}", status["requests_in_flight"]));
        }
        for model in status["models"].as_array().into_iter().flatten() {
            if model["live_bookings"] != 0 || model["ledger"] != "sound" {
                leaks
                    .push(format!("{} booked, ledger {}", model["live_bookings"], model["ledger"]));
            }
        }
        for name in [
            "requests_in_flight",
            "live_bookings",
            "worker_active_requests",
            "reserved_prefill_tokens",
            "reserved_kv_blocks",
        ] {
            leaks.extend(metrics.not_zero(&format!("pointsman_{name}")));
        }
        leaks
    }
}

/// Settings of a router that meets faults in requests alone: no health checks, fresh connections.
pub fn unwatched(more: Value) -> Value {
    let mut settings =
        json!({"health": {"interval": "1h"}, "upstream": {"max_idle_per_worker": 0}});
    merge(&mut settings, more);
    settings
}

/// The configuration of a router for tests.
pub fn configuration(workers: &Value, over: Value) -> Value {
    let mut over = over;
    let model_over = over.as_object_mut().and_then(|over| over.remove("model"));
    let mut model = json!({"name": MODEL, "tokenizer": "builtin", "workers": workers});
    merge(&mut model, model_over.unwrap_or(json!({})));
    let mut tree = json!({
        "listen": {"address": "127.0.0.1", "port": 0},
        "admin": {"worker_api": true},
        "health": {"interval": "500ms"},
        "log": {"filter": "info,pointsman_serve=debug"},
        "routing": {"policy": "isl_bounding", "seed": 7},
    });
    merge(&mut tree, over);
    tree["models"] = json!([model]);
    tree
}

/// A prompt of token ids that no other `seed` has a block in common with.
pub fn prompt(seed: u32, tokens: u32) -> Vec<u32> {
    (0..tokens).map(|at| 100 + (seed * 7919 + at * 31) % 200).collect()
}

/// A completion request.
pub fn completion(prompt: &[u32], max_tokens: u32, stream: bool) -> Value {
    json!({"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "stream": stream,
           "temperature": 0})
}

/// A chat request.
pub fn chat(text: &str, max_tokens: u32, stream: bool) -> Value {
    json!({"model": MODEL, "messages": [{"role": "user", "content": text}],
           "max_tokens": max_tokens, "stream": stream, "temperature": 0})
}
