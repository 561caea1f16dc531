//! A reply as server-sent events: one event a token, in the shapes and order of vLLM.

use std::sync::Arc;

use bytes::{BufMut, Bytes, BytesMut};
use serde::Serialize;

use super::config::Dialect;
use super::connection::Hangup;
use super::errors::Failure;
use super::faults::{Action, Cut};
use super::reply::{
    cache_counts, chat_logprobs, completion_logprobs, finish_reason, stop_reason, token_counts,
};
use super::request::Api;
use super::run::{Run, Step};
use super::shape::{
    AnyUsage, ChatDelta, Chunk, ChunkPrompt, CompletionDelta, Delta, FinalPromptDetails,
    FinalUsage, FunctionDelta, RunningUsage, ToolCallDelta,
};
use super::{scale_out, sglang, trtllm};

enum Phase {
    Start,
    Tokens,
    Usage,
    Done,
    End,
}

/// A stream under way.
pub(super) struct Events {
    run: Run,
    phase: Phase,
    hangup: Arc<Hangup>,
    /// Cut after this many events with content.
    cut: Option<(u32, Cut)>,
    hang: bool,
    sent: u32,
    role_sent: bool,
}

impl Events {
    pub(super) fn new(run: Run, fault: Option<&Action>, hangup: Arc<Hangup>) -> Events {
        let cut = match fault {
            Some(Action::CutMidStream { after_tokens, cut }) => Some((*after_tokens, *cut)),
            _ => None,
        };
        let hang = matches!(fault, Some(Action::HangAfterHeaders));
        Events { run, phase: Phase::Start, hangup, cut, hang, sent: 0, role_sent: false }
    }

    /// The next bytes of the body; none at its end.
    pub(super) async fn next(&mut self) -> Option<Bytes> {
        loop {
            if self.hang {
                return std::future::pending().await;
            }
            if let Some((after, how)) = self.cut
                && self.sent >= after
            {
                self.hangup.cut(how);
                return std::future::pending().await;
            }
            match self.phase {
                Phase::Start => match self.run.start().await {
                    Ok(()) => self.phase = Phase::Tokens,
                    Err(failure) => return Some(self.fail(&failure)),
                },
                Phase::Tokens => match self.run.next().await {
                    Ok(Some(step)) => return Some(self.token(&step)),
                    Ok(None) => self.phase = Phase::Usage,
                    Err(failure) => return Some(self.fail(&failure)),
                },
                Phase::Usage => {
                    self.phase = Phase::Done;
                    if self.tells_usage() {
                        return Some(self.usage());
                    }
                }
                Phase::Done => {
                    self.phase = Phase::End;
                    return Some(Bytes::from_static(pointsman_wire::openai::DONE_EVENT));
                }
                Phase::End => return None,
            }
        }
    }

    fn dialect(&self) -> Dialect {
        self.run.app.config.dialect
    }

    /// An error inside the stream: chats have sent the role by then.
    fn fail(&mut self, failure: &Failure) -> Bytes {
        self.phase = Phase::Done;
        let mut out = BytesMut::new();
        self.roles(&mut out);
        out.put(failure.event(self.dialect()));
        out.freeze()
    }

    fn token(&mut self, step: &Step) -> Bytes {
        let mut out = BytesMut::new();
        self.roles(&mut out);
        self.sent += 1;
        match self.dialect() {
            Dialect::Vllm => {}
            Dialect::Sglang => {
                sglang::token(&self.run, step, &mut out);
                return out.freeze();
            }
            Dialect::Trtllm => {
                trtllm::token(&self.run, step, &mut out);
                return out.freeze();
            }
        }
        match self.run.plan.request.api {
            Api::Completions | Api::Generate => self.completion_token(step, &mut out),
            Api::Chat => self.chat_token(step, &mut out),
            Api::Tokens => {
                let usage = self.running_usage(step.sequence);
                scale_out::token(&self.run.plan, step.sequence, step.token, usage, &mut out);
            }
        }
        out.freeze()
    }

    /// The first event of each choice of a chat.
    fn roles(&mut self, out: &mut BytesMut) {
        let plan = &self.run.plan;
        if std::mem::replace(&mut self.role_sent, true) || plan.request.api != Api::Chat {
            return;
        }
        match self.dialect() {
            Dialect::Vllm => {}
            Dialect::Sglang => return sglang::roles(&self.run, out),
            Dialect::Trtllm => return trtllm::roles(&self.run, out),
        }
        for index in 0..plan.sequences.len() as u32 {
            let delta =
                Delta { role: Some("assistant"), content: Some(String::new()), ..Delta::default() };
            let choice = ChatDelta {
                index,
                delta,
                logprobs: None,
                finish_reason: None,
                stop_reason: None,
                token_ids: None,
            };
            let ids = plan.request.return_token_ids.then(|| &*plan.prompts[0]);
            let prompt = ChunkPrompt { prompt_token_ids: ids, prompt_text: None };
            let usage = self.running_usage(index as usize);
            self.event(&[choice], usage, false, Some(prompt), out);
        }
    }

    fn completion_token(&self, step: &Step, out: &mut BytesMut) {
        let plan = &self.run.plan;
        let sequence = &plan.sequences[step.sequence];
        let piece = &sequence.answer.pieces[step.token];
        let last = step.token + 1 == sequence.answer.pieces.len();
        let prompt = &*plan.prompts[sequence.prompt];
        let echoes = plan.request.echo && step.token == 0;
        let mut text = match echoes {
            true => self.run.app.model.decode(prompt, true),
            false => String::new(),
        };
        text.push_str(&piece.text);
        let tokens = step.token..step.token + 1;
        let ids = plan.request.return_token_ids;
        let choice = CompletionDelta {
            index: step.sequence as u32,
            text,
            logprobs: completion_logprobs(&self.run.app, plan, sequence, tokens, 0),
            finish_reason: last.then(|| finish_reason(plan, sequence)),
            stop_reason: last.then(|| stop_reason(sequence)).flatten(),
            prompt_token_ids: (ids && step.token == 0).then_some(prompt),
            token_ids: ids.then_some([piece.id]),
        };
        self.event(&[choice], self.running_usage(step.sequence), self.is_last(), None, out);
    }

    fn chat_token(&self, step: &Step, out: &mut BytesMut) {
        let plan = &self.run.plan;
        let sequence = &plan.sequences[step.sequence];
        let piece = &sequence.answer.pieces[step.token];
        let last = step.token + 1 == sequence.answer.pieces.len();
        let delta = match &sequence.answer.call {
            None => Delta { content: Some(piece.text.clone()), ..Delta::default() },
            Some(call) => {
                let first = step.token == 0;
                let function = FunctionDelta {
                    name: first.then(|| call.name.clone()),
                    arguments: piece.text.clone(),
                };
                let call = ToolCallDelta {
                    id: first.then(|| call.id.clone()),
                    kind: first.then_some("function"),
                    index: 0,
                    function,
                };
                Delta { tool_calls: vec![call], ..Delta::default() }
            }
        };
        let choice = ChatDelta {
            index: step.sequence as u32,
            delta,
            logprobs: chat_logprobs(&self.run.app, plan, sequence, step.token..step.token + 1),
            finish_reason: last.then(|| finish_reason(plan, sequence)),
            stop_reason: last.then(|| stop_reason(sequence)),
            token_ids: Some(plan.request.return_token_ids.then_some([piece.id])),
        };
        self.event(&[choice], self.running_usage(step.sequence), self.is_last(), None, out);
    }

    /// Whether every sequence has said its last token.
    fn is_last(&self) -> bool {
        self.run.plan.sequences.iter().all(|s| s.done == s.answer.pieces.len())
    }

    fn tells_usage(&self) -> bool {
        self.run.plan.request.include_usage || self.run.app.config.force_include_usage
    }

    fn running_usage(&self, sequence: usize) -> Option<AnyUsage> {
        let plan = &self.run.plan;
        let asked = plan.request.include_usage && plan.request.continuous_usage;
        if !asked && !self.run.app.config.force_include_usage {
            return None;
        }
        let sequence = &plan.sequences[sequence];
        let prompt_tokens = plan.prompts[sequence.prompt].len() as u32;
        let completion_tokens = sequence.done as u32;
        Some(AnyUsage::Running(RunningUsage {
            prompt_tokens,
            total_tokens: prompt_tokens + completion_tokens,
            completion_tokens,
            completion_tokens_details: (plan.request.api == Api::Chat).then_some(None),
        }))
    }

    fn usage(&self) -> Bytes {
        match self.dialect() {
            Dialect::Vllm => {}
            Dialect::Sglang => return sglang::usage_event(&self.run),
            Dialect::Trtllm => return trtllm::usage_event(&self.run),
        }
        let (app, plan) = (&self.run.app, &self.run.plan);
        let (prompt_tokens, completion_tokens) = token_counts(plan);
        let (cached_tokens, created_cache_tokens) = cache_counts(app, plan);
        let details = FinalPromptDetails { cached_tokens, created_cache_tokens };
        let usage = FinalUsage {
            prompt_tokens,
            total_tokens: prompt_tokens + completion_tokens,
            completion_tokens,
            prompt_tokens_details: app.config.prompt_tokens_details.then_some(details),
        };
        if plan.request.api == Api::Tokens {
            return scale_out::usage_event(plan, AnyUsage::Final(usage));
        }
        let mut out = BytesMut::new();
        let none: &[ChatDelta] = &[];
        self.event(none, Some(AnyUsage::Final(usage)), true, None, &mut out);
        out.freeze()
    }

    /// Writes one event. The fingerprint stands in the stream's last one, be it of usage or not.
    fn event<C: Serialize>(
        &self,
        choices: &[C],
        usage: Option<AnyUsage>,
        last: bool,
        prompt: Option<ChunkPrompt<'_>>,
        out: &mut BytesMut,
    ) {
        let plan = &self.run.plan;
        let signs = last && (choices.is_empty() || !self.tells_usage());
        let chunk = Chunk {
            id: &plan.id,
            object: match plan.request.api {
                Api::Completions | Api::Generate | Api::Tokens => "text_completion",
                Api::Chat => "chat.completion.chunk",
            },
            created: plan.created,
            model: &plan.model,
            choices,
            usage,
            system_fingerprint: signs.then_some(&*self.run.app.fingerprint),
            prompt,
        };
        out.put_slice(b"data: ");
        // Writing JSON to memory cannot fail.
        let _ = serde_json::to_writer(out.writer(), &chunk);
        out.put_slice(b"\n\n");
    }
}
