//! `routing` as the brain takes it.

use std::hash::{BuildHasher, RandomState};
use std::num::NonZeroU32;

use http::HeaderName;
use pointsman_brain as brain;
use pointsman_brain::{Factor, Share};

use super::Resolver;
use crate::settings::Session;
use crate::tree::Key;
use crate::written::{self, LocalPrefillBudget, PolicyName, PrefillQueue, SessionAffinity, Shadow};

impl Resolver<'_> {
    /// The brain's settings, and what names sessions and tenants; `None` after a problem.
    pub(super) fn routing(
        &mut self,
        key: &Key,
        written: &written::Routing,
    ) -> Option<(brain::Settings, Session, Option<HeaderName>)> {
        let policy = self.policy(key, &written.parameters);
        let shadow: Vec<Option<brain::Policy>> = (0..)
            .zip(&written.shadow)
            .map(|(i, shadow)| self.shadow(&key.name("shadow").index(i), shadow, written))
            .collect();
        let predicted = self.predicted(key, written);
        let session = self.session(key, &written.session_affinity);
        let breaker = self.breaker(key, &written.breaker);
        let tenant = match &written.admission.tenant_header {
            Some(name) => {
                Some(self.header(&key.name("admission").name("tenant_header"), name, "x-tenant")?)
            }
            None => None,
        };
        let session = session?;
        let settings = brain::Settings {
            policy: policy?,
            shadow: shadow.into_iter().collect::<Option<Vec<_>>>()?,
            guards: guards(written),
            admission: admission(&written.admission),
            isl_gate: written
                .isl_gate
                .on()
                .map_or(brain::IslGate::Off, brain::IslGate::UnifiedUpTo),
            cost: brain::CostSettings {
                overlap_weight: factor(written.cost.overlap_weight),
                active_requests_weight: factor(written.cost.active_requests_weight),
                temperature: factor(written.cost.temperature),
            },
            session_affinity: session != Session::Off,
            max_sessions: written.max_sessions,
            retries: written.retries,
            breaker,
            require_remote: written.require_remote,
            allow_path_override: written.allow_path_override,
            output_allowance_tokens: written.output_allowance_tokens,
            // The hasher's keys are random per process.
            seed: written.seed.unwrap_or_else(|| RandomState::new().hash_one(())),
            predicted: predicted?,
            ..brain::Settings::default()
        };
        Some((settings, session, tenant))
    }

    /// The cold policy reads the parameters of `routing`; it has to do without thresholds that have
    /// no default.
    fn predicted(&mut self, key: &Key, written: &written::Routing) -> Option<brain::Predicted> {
        let parameters = &written.parameters;
        let cold = written::Policy {
            policy: written.predicted.cold_policy,
            prefill_busy_threshold: parameters.prefill_busy_threshold.or(Some(1.0)),
            ..parameters.clone()
        };
        Some(brain::Predicted {
            stickiness: factor(written.predicted.stickiness),
            lambda: factor(written.predicted.lambda),
            hold_late: written.predicted.hold_late,
            cold: self.rule(key, &cold)?,
        })
    }

    fn policy(&mut self, key: &Key, written: &written::Policy) -> Option<brain::Policy> {
        let bounds = brain::Bounds {
            floor_tokens: written.floor_tokens,
            ceiling_tokens: written.ceiling_tokens.on(),
        };
        Some(brain::Policy { rule: self.rule(key, written)?, bounds })
    }

    fn rule(&mut self, key: &Key, written: &written::Policy) -> Option<brain::Rule> {
        let isl = brain::IslBounding {
            eff_isl_threshold: written.eff_isl_threshold,
            eff_isl_ratio_threshold: share(written.eff_isl_ratio_threshold),
        };
        Some(match written.policy {
            PolicyName::AlwaysRemote => brain::Rule::AlwaysRemote,
            PolicyName::AlwaysLocal => brain::Rule::AlwaysLocal,
            PolicyName::ShortPrompt => brain::Rule::ShortPrompt(brain::ShortPrompt {
                short_prefill_tokens: written.short_prefill_tokens,
            }),
            PolicyName::IslBounding => brain::Rule::IslBounding(isl),
            PolicyName::PrefillLoad => {
                brain::Rule::PrefillLoad(self.load(key, written, "prefill_load")?)
            }
            PolicyName::IslOrLoad => {
                brain::Rule::IslOrLoad(isl, self.load(key, written, "isl_or_load")?)
            }
            PolicyName::IslAndLoad => {
                brain::Rule::IslAndLoad(isl, self.load(key, written, "isl_and_load")?)
            }
            PolicyName::UncachedTokens => brain::Rule::UncachedTokens(brain::UncachedTokens {
                non_cached_tokens: written.non_cached_tokens,
                prompt_tokens: written.prompt_tokens,
            }),
            PolicyName::Predicted => brain::Rule::Predicted,
            PolicyName::MaxLocalPrefill => brain::Rule::MaxLocalPrefill(brain::MaxLocalPrefill {
                max_local_prefill_length: written.max_local_prefill_length,
            }),
        })
    }

    fn load(
        &mut self,
        key: &Key,
        written: &written::Policy,
        policy: &str,
    ) -> Option<brain::PrefillLoad> {
        let threshold = written.prefill_busy_threshold.and_then(Factor::new);
        if threshold.is_none() {
            let message = format!("missing; policy `{policy}` needs it, a number of at least 0");
            self.problem(&key.name("prefill_busy_threshold"), message);
        }
        threshold.map(|prefill_busy_threshold| brain::PrefillLoad { prefill_busy_threshold })
    }

    fn shadow(
        &mut self,
        key: &Key,
        shadow: &Shadow,
        routing: &written::Routing,
    ) -> Option<brain::Policy> {
        match shadow {
            Shadow::Name(policy) => {
                self.policy(key, &written::Policy { policy: *policy, ..routing.parameters.clone() })
            }
            Shadow::Full(policy) => self.policy(key, policy),
        }
    }

    fn session(&mut self, key: &Key, written: &SessionAffinity) -> Option<Session> {
        match written {
            SessionAffinity::Off => Some(Session::Off),
            SessionAffinity::User => Some(Session::User),
            SessionAffinity::PrefixTokens(tokens) => {
                Some(Session::Prefix { tokens: NonZeroU32::new(*tokens)? })
            }
            SessionAffinity::Header(name) => {
                let key = key.name("session_affinity").name("header");
                self.header(&key, name, "x-session-id").map(Session::Header)
            }
        }
    }

    fn header(&mut self, key: &Key, name: &str, such_as: &str) -> Option<HeaderName> {
        let header = HeaderName::from_bytes(name.as_bytes());
        if header.is_err() {
            self.refuse(key, name, &format!("the name of a request header, such as {such_as}"));
        }
        header.ok()
    }

    fn breaker(&mut self, key: &Key, written: &written::Breaker) -> brain::BreakerSettings {
        let (open, open_max) = (written.open.0, written.open_max.0);
        if open > open_max {
            let message = format!(
                "{} is below `open`; must be at least {}",
                humantime::format_duration(open_max),
                humantime::format_duration(open)
            );
            self.problem(&key.name("breaker").name("open_max"), message);
        }
        brain::BreakerSettings {
            failures: written.failures,
            open,
            open_max,
            failed_checks: written.failed_checks,
        }
    }
}

fn guards(written: &written::Routing) -> brain::GuardSettings {
    let decode_kv = written.decode_busy_threshold.on().map(share);
    brain::GuardSettings {
        decode_kv: decode_kv.map_or(brain::KvGuard::Off, brain::KvGuard::Above),
        local_prefill_budget: match written.local_prefill_budget {
            LocalPrefillBudget::ByPolicy => brain::Budget::ByPolicy,
            LocalPrefillBudget::Off => brain::Budget::Off,
            LocalPrefillBudget::Chunks(chunks) => brain::Budget::Chunks(factor(chunks)),
            LocalPrefillBudget::Tokens(tokens) => brain::Budget::Tokens(tokens),
        },
    }
}

fn admission(written: &written::Admission) -> brain::Admission {
    brain::Admission {
        hold_busy: written.hold_busy,
        prefill_queue: match written.prefill_queue {
            PrefillQueue::Off => brain::Queue::Off,
            PrefillQueue::Chunks(chunks) => brain::Queue::Chunks(factor(chunks)),
            PrefillQueue::Tokens(tokens) => brain::Queue::Tokens(tokens),
        },
        max_waiting: usize::try_from(written.max_waiting).unwrap_or(usize::MAX),
        max_wait: written.max_wait.0,
    }
}

/// The check has refused what is not a share.
fn share(value: f64) -> Share {
    Share::new(value).unwrap_or(Share::ONE)
}

/// The check has refused what is not a factor.
fn factor(value: f64) -> Factor {
    Factor::new(value).unwrap_or(Factor::ONE)
}
