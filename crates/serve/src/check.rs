//! Whether a fleet is what its configuration says: each worker asked, each policy looked through.

use std::fmt;
use std::sync::Arc;

use pointsman_brain::Condition;
use pointsman_config::{Engine, KvEvents, Role, Settings};

use crate::bootstrap;
use crate::capabilities::Capabilities;
use crate::fleet::{Group, Worker};
use crate::prompt::Tokenizer;
use crate::router::Router;
use crate::start::{StartError, assemble};
use crate::{listener, watch};

/// What was found.
#[derive(Debug, Default)]
pub struct Findings {
    lines: Vec<String>,
    problems: usize,
    warnings: usize,
}

impl Findings {
    /// Whether nothing keeps the router from serving.
    pub fn is_sound(&self) -> bool {
        self.problems == 0
    }

    fn say(&mut self, line: String) {
        self.lines.push(line);
    }

    fn problem(&mut self, text: impl fmt::Display) {
        self.problems += 1;
        self.lines.push(format!("    PROBLEM  {text}"));
    }

    fn note(&mut self, text: impl fmt::Display) {
        self.lines.push(format!("    note     {text}"));
    }

    fn warning(&mut self, text: impl fmt::Display) {
        self.warnings += 1;
        self.lines.push(format!("    warning  {text}"));
    }
}

impl fmt::Display for Findings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for line in &self.lines {
            writeln!(f, "{line}")?;
        }
        writeln!(f, "{} problems, {} warnings", self.problems, self.warnings)
    }
}

/// Asks every worker once and reports.
pub async fn check(settings: Settings) -> Result<Findings, StartError> {
    let _usable = listener::doors(&settings)?;
    let router = Arc::new(assemble(settings, None)?);
    router.look_at_configured_workers()?;
    watch::first_look(&router).await;
    let mut findings = Findings::default();
    for group in &router.fleet.groups {
        check_group(&router, group, &mut findings);
    }
    router.end().await;
    Ok(findings)
}

fn check_group(router: &Router, group: &Group, findings: &mut Findings) {
    let brain = group.brain();
    findings.say(format!(
        "model {}  (policy {})",
        group.name(),
        brain.settings().policy.rule.as_str()
    ));
    let readiness = brain.can_serve(group.now());
    let never = brain.never_fires();
    let conditions: Vec<_> = brain.workers().map(|view| (view.slot, view.condition)).collect();
    drop(brain);
    for worker in group.roster.load().workers() {
        let up = conditions
            .iter()
            .any(|(slot, condition)| worker.slots.contains(slot) && *condition == Condition::Up);
        if let Some(trouble) = router.upstream.trouble(&worker.settings.url) {
            findings.say(worker_line(worker));
            findings.problem(trouble);
            continue;
        }
        check_worker(group, worker, up, findings);
    }
    if let Tokenizer::Local(model) = &group.tokenizer {
        if let Some(reason) = model.slow_because() {
            findings.warning(format!("tokenising is slow: {reason}"));
        }
        match model.chat_template_problem() {
            Some(problem) => findings.warning(format!("chats are estimated: {problem}")),
            None if !model.has_chat_template() => {
                findings.warning("chats are estimated: the model directory has no chat template");
            }
            None => {}
        }
    }
    if !readiness.ready {
        findings.problem("no request can be served: see the workers above");
    }
    for line in never {
        findings.warning(line);
    }
}

fn worker_line(worker: &Worker) -> String {
    let (s, version) = (&worker.settings, worker.learned.load().version);
    let version = version.map_or(String::new(), |v| format!(" {}.{}.{}", v.0, v.1, v.2));
    let (role, engine) = (s.role.as_str(), s.engine.as_str());
    format!("  {role:<8} {}  {}  {engine}{version}", worker.name(), s.url)
}

fn check_worker(group: &Group, worker: &Worker, up: bool, findings: &mut Findings) {
    let s = &worker.settings;
    let learned = worker.learned.load();
    findings.say(worker_line(worker));
    if !up {
        return findings.problem("does not answer its health check");
    }
    let can = Capabilities::of(worker);
    findings.say(format!("    can      {}", can.line(s.role)));
    for line in can.consequences(worker) {
        findings.note(line);
    }
    let ranks = 0..u32::from(s.ranks.get());
    if let Some(problem) = ranks.into_iter().find_map(|rank| bootstrap::problem(worker, Some(rank)))
    {
        findings.problem(problem);
    }
    if let Some(mode) = &learned.other_role {
        findings.problem(format!(
            "runs with --disaggregation-mode {mode}, which is no `role: {}`",
            s.role.as_str()
        ));
    }
    if let Some(ranks) = learned.ranks.filter(|ranks| *ranks != u32::from(s.ranks.get())) {
        findings.warning(format!(
            "has {ranks} data-parallel ranks and `ranks` is {}: set it to {ranks}, so that each rank's \
             load and cache are known",
            s.ranks
        ));
    }
    check_names(group, worker, findings);
    if s.engine != Engine::OpenAi {
        check_signals(worker, findings);
    }
}

/// Whether the engine knows every name that it is asked for.
fn check_names(group: &Group, worker: &Worker, findings: &mut Findings) {
    let (s, learned) = (&worker.settings, worker.learned.load());
    let names: Vec<&str> = learned.models.iter().map(|model| model.id.as_str()).collect();
    let m = &group.settings;
    // A request reaches the engine as it came, so the engine has to know every name itself.
    let unknown =
        std::iter::once(&m.name).chain(&m.aliases).filter(|n| !names.contains(&n.as_str()));
    // SGLang and TensorRT-LLM serve whatever name is asked for.
    let strict = matches!(s.engine, Engine::Vllm | Engine::OpenAi);
    for name in unknown.filter(|_| strict && !names.is_empty()) {
        findings.problem(format!(
            "serves {names:?} and not `{name}`: requests for it get a 404; \
             start the engine with `--served-model-name` and all names"
        ));
    }
    for adapter in m.adapters.iter().filter(|adapter| !names.contains(&adapter.as_str())) {
        findings.warning(format!("does not list adapter `{adapter}`: it gets no requests for it"));
    }
}

/// What the engine says of its load and its cache.
fn check_signals(worker: &Worker, findings: &mut Findings) {
    let (s, learned) = (&worker.settings, worker.learned.load());
    if learned.capacity_blocks.is_none() && s.capacity_blocks.is_none() {
        findings.warning("tells no KV capacity: the decode_kv guard is skipped on it");
    }
    if s.kv_events == KvEvents::Auto && !learned.publishes_events {
        match s.engine {
            Engine::Vllm => findings.warning(
                "tells no KV event endpoint (before vLLM 0.31 or without --kv-events-config): \
                 its cache is guessed from placements",
            ),
            Engine::Sglang => findings.warning(
                "tells no KV event endpoint that can be connected to (--kv-events-config with \
                 `tcp://*:port`): its cache is guessed from placements",
            ),
            // They are not asked for here; see the note.
            Engine::Trtllm | Engine::OpenAi => {}
        }
    }
    if s.role == Role::Prefill && worker.spec().max_num_batched_tokens.is_none() {
        findings.warning(
            "its token budget is unknown: load-based policies take it for calm; \
             set max_num_batched_tokens",
        );
    }
}
