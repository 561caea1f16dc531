//! In plain words: what of the settings can never fire, or always does, given the workers there are.
//! Looks at what workers are, not at their health; says nothing of an empty fleet.

use crate::fleet::{Fleet, Role, WorkerSpec};
use crate::policy::{IslBounding, Policy, Rule};
use crate::settings::{IslGate, KvGuard, Settings};

pub(crate) fn never_fires(settings: &Settings, fleet: &Fleet) -> Vec<String> {
    let roster = Roster::new(fleet);
    if roster.workers == 0 {
        return Vec::new();
    }
    let mut lines = Vec::new();
    roster.paths(settings, &mut lines);
    roster.gate(settings, &mut lines);
    roster.guards(settings, &mut lines);
    // Without both paths no policy is asked, and the lines above say so.
    if roster.has_remote() && roster.locals > 0 {
        roster.policy("policy", &settings.policy, &mut lines);
        for shadow in &settings.shadow {
            roster.policy("shadow policy", shadow, &mut lines);
        }
    }
    lines
}

/// What the fleet can do at all.
struct Roster {
    workers: usize,
    prefills: usize,
    decodes: usize,
    unified: usize,
    /// Workers that can take the local path; of them, those that publish KV events, and those
    /// whose KV capacity is known.
    locals: usize,
    locals_with_events: usize,
    locals_with_capacity: usize,
    prefills_with_budget: usize,
}

impl Roster {
    fn new(fleet: &Fleet) -> Roster {
        let count = |is: &dyn Fn(&WorkerSpec) -> bool| {
            fleet.iter().filter(|(_, worker)| is(&worker.spec)).count()
        };
        let with_capacity = fleet.iter().filter(|(_, worker)| {
            worker.spec.can_prefill_locally() && worker.capacity_blocks().is_some()
        });
        Roster {
            workers: count(&|_| true),
            prefills: count(&|spec| spec.role == Role::Prefill),
            decodes: count(&|spec| spec.role == Role::Decode),
            unified: count(&|spec| spec.role == Role::Unified),
            locals: count(&WorkerSpec::can_prefill_locally),
            locals_with_events: count(&|spec| spec.can_prefill_locally() && spec.publishes_events),
            locals_with_capacity: with_capacity.count(),
            prefills_with_budget: count(&|spec| {
                spec.role == Role::Prefill && spec.max_num_batched_tokens.is_some()
            }),
        }
    }

    fn has_remote(&self) -> bool {
        self.prefills > 0 && self.decodes > 0
    }

    fn paths(&self, settings: &Settings, lines: &mut Vec<String>) {
        if !self.has_remote() {
            let missing = if self.prefills == 0 { "prefill" } else { "decode" };
            let effect = if settings.require_remote {
                "every request is refused, because require_remote is set"
            } else {
                "every request goes local and no policy is asked"
            };
            lines.push(format!("there is no {missing} worker, so no remote path: {effect}"));
        }
        if self.locals == 0 {
            lines.push(
                "no decode worker can prefill locally and there is no unified worker: \
                 no request can go local"
                    .to_owned(),
            );
        }
        if self.prefills == 1 && settings.retries > 0 {
            lines.push(
                "there is one prefill worker: after it fails, no other one can be tried".to_owned(),
            );
        }
        if settings.session_affinity && settings.max_sessions == 0 {
            lines.push("session_affinity can never hold: max_sessions is 0".to_owned());
        }
    }

    fn gate(&self, settings: &Settings, lines: &mut Vec<String>) {
        let IslGate::UnifiedUpTo(bound) = settings.isl_gate else { return };
        if self.unified == 0 {
            lines.push(format!(
                "isl_gate is always waived for prompts of at most {bound} tokens: \
                 there is no unified worker"
            ));
        }
        if self.unified == self.workers {
            lines.push(format!(
                "isl_gate is always waived for prompts of more than {bound} tokens: \
                 there are unified workers only"
            ));
        }
    }

    fn guards(&self, settings: &Settings, lines: &mut Vec<String>) {
        if settings.guards.decode_kv != KvGuard::Off
            && self.locals > 0
            && self.locals_with_capacity == 0
        {
            lines.push(
                "guard decode_kv can never veto: the KV capacity of no worker that can prefill \
                 locally is known"
                    .to_owned(),
            );
        }
    }

    fn policy(&self, kind: &str, policy: &Policy, lines: &mut Vec<String>) {
        let name = policy.rule.as_str();
        let bounds = &policy.bounds;
        if bounds.ceiling_tokens == Some(0) {
            lines.push(format!("{kind} {name} can never go local: ceiling_tokens is 0"));
            return;
        }
        if let Some(ceiling) = bounds.ceiling_tokens
            && ceiling <= bounds.floor_tokens
        {
            lines.push(format!(
                "{kind} {name}: the rule is never asked, because ceiling_tokens {ceiling} <= \
                 floor_tokens {}",
                bounds.floor_tokens
            ));
            return;
        }
        let or_floor = if bounds.floor_tokens > 0 { " other than by floor_tokens" } else { "" };
        if let Some(cause) = self.never_local(&policy.rule) {
            lines.push(format!("{kind} {name} can never go local{or_floor}: {cause}"));
        }
        if let Rule::UncachedTokens(rule) = &policy.rule
            && rule.non_cached_tokens == 0
        {
            lines.push(format!("{kind} {name} always goes local: non_cached_tokens is 0"));
        }
    }

    fn never_local(&self, rule: &Rule) -> Option<String> {
        match rule {
            Rule::IslBounding(isl) => self.isl_never(isl),
            Rule::PrefillLoad(_) => self.load_never(),
            Rule::IslOrLoad(isl, _) => match (self.isl_never(isl), self.load_never()) {
                (Some(isl), Some(load)) => Some(format!("{isl}, and {load}")),
                _ => None,
            },
            Rule::IslAndLoad(isl, _) => self.isl_never(isl).or_else(|| self.load_never()),
            // A prompt without overlap can still be shorter than either threshold.
            Rule::AlwaysRemote
            | Rule::AlwaysLocal
            | Rule::ShortPrompt(_)
            | Rule::UncachedTokens(_)
            | Rule::Predicted => None,
            Rule::MaxLocalPrefill(_) => self.no_events(),
        }
    }

    fn isl_never(&self, isl: &IslBounding) -> Option<String> {
        if isl.eff_isl_threshold == 0 {
            return Some("eff_isl_threshold is 0".to_owned());
        }
        if isl.eff_isl_ratio_threshold.get() == 0.0 {
            return Some("eff_isl_ratio_threshold is 0".to_owned());
        }
        // Any share from 0 to 1 keeps a prompt without overlap, whose ratio is 1, remote.
        self.no_events()
    }

    fn load_never(&self) -> Option<String> {
        (self.prefills_with_budget == 0)
            .then(|| "max_num_batched_tokens of no prefill worker is known".to_owned())
    }

    fn no_events(&self) -> Option<String> {
        (self.locals_with_events == 0).then(|| {
            "no worker that can prefill locally publishes KV events, so nothing counts as cached \
             unless approximate mode fills in"
                .to_owned()
        })
    }
}
