//! What one step computes: decodes first, then chunks of prompts in order of arrival, within the
//! token budget; who is put back when blocks run out; and how long the step takes. Steps of one
//! batch that only decodes are planned together, as a run that can be cut short.

use super::seq::Stage;
use super::types::{Batch, Event, Kind, LinkId, Nanos, Outbox, Output};
use super::{Engine, Pin};
use crate::profile::StepShape;

/// Steps that are planned together at most.
const MAX_RUN: u32 = 4096;

/// A step under way, or a run of them: each then does the same.
pub(super) struct Step {
    /// When the first begins.
    start: Nanos,
    /// When each of the run ends; the last time is the end of all.
    ends: Vec<Nanos>,
    /// Slot and tokens of each sequence in one of them.
    parts: Vec<(u32, u32)>,
    /// Sequences that one of them decodes, and prompt tokens that it computes.
    work: Work,
}

#[derive(Clone, Copy, Default)]
struct Work {
    batch: u64,
    prompt_tokens: u64,
}

impl Step {
    pub(super) fn end(&self) -> Nanos {
        self.ends.last().copied().unwrap_or_default()
    }

    /// Steps that are over by then, and when the last of them ended.
    pub(super) fn over(&self, now: Nanos) -> Option<(u32, Nanos)> {
        let over = self.ends.partition_point(|&end| end <= now);
        Some((over as u32, self.ends[over.checked_sub(1)?]))
    }

    pub(super) fn drop_slot(&mut self, slot: u32) {
        self.parts.retain(|&(other, _)| other != slot);
    }

    pub(super) fn tokens(&self) -> u32 {
        self.parts.iter().map(|&(_, tokens)| tokens).sum()
    }
}

/// A step being put together.
struct Draft {
    budget: u32,
    parts: Vec<(u32, u32)>,
    preempted: bool,
}

impl Engine {
    /// Starts a step at `now` unless one is under way or there is nothing to do.
    pub(super) fn start_step(&mut self, now: Nanos, out: &mut Outbox) {
        if self.step.is_some() {
            return;
        }
        let budget = self.spec.max_num_batched_tokens;
        let mut draft = Draft { budget, parts: Vec::new(), preempted: false };
        self.schedule_running(&mut draft, true);
        self.schedule_running(&mut draft, false);
        if !draft.preempted {
            self.admit_waiting(&mut draft, now, out);
        }
        if draft.parts.is_empty() {
            return;
        }
        if !self.events.is_empty() {
            let events = std::mem::take(&mut self.events);
            out.batches.push(Batch { at: now, events });
        }
        let ends = self.ends(now, &draft);
        let work = self.work(&draft.parts);
        self.step = Some(Step { start: now, ends, parts: draft.parts, work });
    }

    /// When the steps of this batch end: one, or as many as leave the batch as it is.
    fn ends(&mut self, now: Nanos, draft: &Draft) -> Vec<Nanos> {
        let mut shape = self.shape(&draft.parts);
        let mut end = now.saturating_add(self.draw(&shape));
        let mut ends = vec![end];
        let arrival = self.pulling.first().map_or(Nanos::MAX, |&(at, _)| at);
        for _ in 1..self.run_length(draft) {
            if end >= arrival {
                break;
            }
            shape.grow();
            end = end.saturating_add(self.draw(&shape));
            ends.push(end);
        }
        ends
    }

    /// Steps until a sequence of this batch ends or fills a block; 1 where something else than
    /// decoding goes on, a first token is to be told, or the next step may take in others.
    fn run_length(&self, draft: &Draft) -> u32 {
        let Draft { parts, preempted, .. } = draft;
        if self.spec.every_token || *preempted || parts.len() < self.running.len() {
            return 1;
        }
        let steps = parts.iter().map(|&(slot, _)| {
            let seq = self.seqs.get(slot);
            // The step that fills a block starts afresh: the block is named with it.
            let room = seq.blocks.len() as u32 * self.spec.block_size - seq.computed - 1;
            let further = seq.generated > 0 && seq.decodes();
            if further { room.min(seq.job.output_tokens - seq.generated).max(1) } else { 1 }
        });
        steps.min().unwrap_or(1).min(MAX_RUN)
    }

    /// Ends the step that is due: tokens come out, finished sequences leave.
    pub(super) fn finish_step(&mut self, now: Nanos, out: &mut Outbox) {
        let Some(step) = self.step.take_if(|step| step.end() <= now) else { return };
        let steps = step.ends.len() as u32;
        self.count(&step, steps, now);
        for (slot, tokens) in step.parts {
            if !self.pass(slot, tokens, steps) {
                continue;
            }
            let seq = self.seqs.get(slot);
            let (id, last) = (seq.job.id, seq.generated == seq.job.output_tokens);
            if seq.generated == 1 || self.spec.every_token {
                out.outputs.push(Output::Token { job: id, at: now });
            }
            if last {
                self.finish(slot, now, out);
            }
        }
    }

    /// The first `steps` of a run have ended, the last of them at `at`.
    fn count(&mut self, step: &Step, steps: u32, at: Nanos) {
        let (steps, time) = (u64::from(steps), at - step.start);
        let Work { batch, prompt_tokens } = step.work;
        self.totals.steps += steps;
        self.stepped = at;
        if prompt_tokens > 0 {
            self.totals.prefilled += prompt_tokens * steps;
            self.totals.prefill_time += time;
            return;
        }
        let decode = &mut self.totals.decode;
        decode.steps += steps;
        decode.batch += batch * steps;
        decode.batch_squared += batch * batch * steps;
        decode.time += time;
        decode.batch_time += batch * time;
    }

    fn work(&self, parts: &[(u32, u32)]) -> Work {
        let mut work = Work::default();
        for &(slot, tokens) in parts {
            match self.seqs.get(slot).decodes() {
                true => work.batch += 1,
                false => work.prompt_tokens += u64::from(tokens),
            }
        }
        work
    }

    /// So many steps have passed for a sequence; whether it got a token with each.
    fn pass(&mut self, slot: u32, tokens: u32, steps: u32) -> bool {
        let seq = self.seqs.get_mut(slot);
        let streams = seq.computed + tokens == seq.tokens();
        seq.computed += tokens * steps;
        if streams {
            seq.generated += steps;
            self.totals.generated += u64::from(steps);
        }
        streams
    }

    /// Ends a run of steps with the one under way, because a job comes, leaves, or gives blocks back.
    /// The caller does so before that, where not every token is told.
    pub fn cut_run(&mut self, now: Nanos) {
        let Some(mut step) = self.step.take() else { return };
        if let Some((steps, at)) = step.over(now).filter(|_| step.ends.len() > 1) {
            self.count(&step, steps, at);
            for &(slot, tokens) in &step.parts {
                self.pass(slot, tokens, steps);
            }
            step.start = at;
            step.ends.drain(..steps as usize);
        }
        step.ends.truncate(1);
        self.step = Some(step);
    }

    /// One pass over the running sequences: those that decode, or those that still prefill.
    fn schedule_running(&mut self, draft: &mut Draft, decodes: bool) {
        let mut at = 0;
        while at < self.running.len() && draft.budget > 0 {
            let slot = self.running[at];
            let seq = self.seqs.get(slot);
            let tokens = (seq.tokens() - seq.computed).min(draft.budget);
            if seq.decodes() != decodes {
                at += 1;
                continue;
            }
            if self.make_room(slot, tokens, draft) {
                draft.budget -= tokens;
                draft.parts.push((slot, tokens));
                at += 1;
            }
            // Else the sequence was put back itself, so `at` is past the end.
        }
    }

    /// Gives a running sequence blocks for its next tokens, putting back younger ones if it must.
    /// False when it was put back itself.
    fn make_room(&mut self, slot: u32, tokens: u32, draft: &mut Draft) -> bool {
        loop {
            if self.extend(slot, tokens) {
                return true;
            }
            let Some(victim) = self.running.pop() else { return false };
            draft.preempted = true;
            if let Some(at) = draft.parts.iter().position(|&(other, _)| other == victim) {
                draft.budget += draft.parts.remove(at).1;
            }
            self.put_back(victim);
            if victim == slot {
                return false;
            }
        }
    }

    fn put_back(&mut self, slot: u32) {
        let seq = self.seqs.get_mut(slot);
        let blocks = std::mem::take(&mut seq.blocks);
        seq.stage = Stage::Waiting;
        seq.computed = 0;
        seq.named = 0;
        seq.pulled = false;
        seq.unnameable = false;
        if let Kind::Pull(_) = seq.job.kind {
            // The parameters are spent: it computes its prompt here.
            seq.job.kind = Kind::Local;
        }
        self.pool.release(&blocks);
        self.waiting.push_front(slot);
        self.totals.preemptions += 1;
    }

    fn admit_waiting(&mut self, draft: &mut Draft, now: Nanos, out: &mut Outbox) {
        while draft.budget > 0 && self.running.len() < self.spec.max_num_seqs as usize {
            if let Some(slot) = self.pulled.pop_front() {
                self.run(slot);
                draft.budget -= 1;
                draft.parts.push((slot, 1));
                continue;
            }
            let Some(&slot) = self.waiting.front() else { return };
            let Some(hits) = self.admit(slot) else { return };
            self.waiting.pop_front();
            self.note_start(slot, hits, now, out);
            if let Kind::Pull(link) = self.seqs.get(slot).job.kind {
                self.start_pull(slot, link, now);
                continue;
            }
            let seq = self.seqs.get(slot);
            let tokens = (seq.tokens() - seq.computed).min(draft.budget);
            self.run(slot);
            self.extend(slot, tokens);
            draft.budget -= tokens;
            draft.parts.push((slot, tokens));
        }
    }

    fn run(&mut self, slot: u32) {
        self.seqs.get_mut(slot).stage = Stage::Running;
        self.running.push(slot);
    }

    /// Takes the cached prefix of a waiting sequence if all its known tokens fit; the hits in
    /// blocks, or none when there is no room yet.
    fn admit(&mut self, slot: u32) -> Option<u32> {
        let seq = self.seqs.get(slot);
        // At least one token is computed, for its logits.
        let most = (seq.tokens() - 1) / self.spec.block_size;
        let names = &seq.job.content.names;
        let mut hits = Vec::new();
        self.pool.find(&names[..names.len().min(most as usize)], &mut hits);
        let count = hits.len() as u32;
        let lacking = self.blocks_for(seq.tokens()) - count;
        if lacking > self.pool.free() - self.pool.idle_among(&hits) {
            return None;
        }
        self.pool.hold(&hits);
        let seq = self.seqs.get_mut(slot);
        seq.blocks = hits;
        seq.computed = count * self.spec.block_size;
        seq.named = count;
        Some(count)
    }

    fn note_start(&mut self, slot: u32, hits: u32, now: Nanos, out: &mut Outbox) {
        let seq = self.seqs.get_mut(slot);
        if std::mem::replace(&mut seq.started, true) {
            return;
        }
        let cached_tokens = hits * self.spec.block_size;
        let rest = u64::from(seq.job.prompt_tokens - cached_tokens);
        self.totals.local_cache_hit += u64::from(cached_tokens);
        match seq.job.kind {
            Kind::Pull(_) => self.totals.external_kv_transfer += rest,
            Kind::Local | Kind::HandOff => self.totals.local_compute += rest,
        }
        out.outputs.push(Output::Started { job: seq.job.id, at: now, cached_tokens });
    }

    /// Reserves the blocks of a whole prompt and queues their transfer.
    fn start_pull(&mut self, slot: u32, link: LinkId, now: Nanos) {
        let seq = self.seqs.get_mut(slot);
        let lacking = seq.job.prompt_tokens.div_ceil(self.spec.block_size) - seq.named;
        let events = &mut self.events;
        self.pool.take(lacking, &mut seq.blocks, |name| events.push(Event::Removed { name }));
        let (hop, busy) = self.spec.profile.transfer_time(lacking * self.spec.block_size);
        let free_at = self.link_free_at.entry(link).or_insert(now);
        *free_at = now.max(*free_at).saturating_add(nanos(busy));
        let ready = free_at.saturating_add(nanos(hop));
        seq.stage = Stage::Pulling(ready);
        self.pulling.insert((ready, slot));
    }

    /// Blocks for `tokens` more tokens of a sequence; false when they are not free.
    fn extend(&mut self, slot: u32, tokens: u32) -> bool {
        let seq = self.seqs.get_mut(slot);
        let upto = seq.computed + tokens;
        let lacking = upto.div_ceil(self.spec.block_size).saturating_sub(seq.blocks.len() as u32);
        if lacking > self.pool.free() {
            return false;
        }
        let events = &mut self.events;
        self.pool.take(lacking, &mut seq.blocks, |name| events.push(Event::Removed { name }));
        self.announce(slot, upto);
        true
    }

    /// Names the full blocks among a sequence's first `tokens` tokens.
    pub(super) fn announce(&mut self, slot: u32, tokens: u32) {
        let seq = self.seqs.get_mut(slot);
        let names = &seq.job.content.names;
        let full = (tokens / self.spec.block_size).min(names.len() as u32);
        if seq.unnameable || full <= seq.named {
            return;
        }
        let first = seq.named;
        for at in first as usize..full as usize {
            let parent = at.checked_sub(1).map(|before| names[before]);
            self.pool.name(seq.blocks[at], names[at], parent);
        }
        seq.named = full;
        let content = seq.job.content.clone();
        self.events.push(Event::Stored { content, first, count: full - first });
    }

    fn finish(&mut self, slot: u32, now: Nanos, out: &mut Outbox) {
        let mut seq = self.seqs.remove(slot);
        let id = seq.job.id;
        self.by_id.remove(&id);
        self.running.retain(|&other| other != slot);
        self.totals.finished += 1;
        let mut pinned = None;
        if seq.job.kind == Kind::HandOff {
            let rest = seq.blocks.split_off(self.blocks_for(seq.job.prompt_tokens) as usize);
            self.pool.release(&rest);
            let blocks: Box<[u32]> = seq.blocks.into();
            let expires = now.saturating_add(self.spec.lease);
            self.leases.insert((expires, id));
            self.pins.insert(id, Pin { blocks: blocks.clone(), expires });
            pinned = Some(blocks);
        } else {
            self.pool.release(&seq.blocks);
        }
        out.outputs.push(Output::Finished { job: id, at: now, pinned });
    }

    fn shape(&self, parts: &[(u32, u32)]) -> StepShape {
        let mut shape = StepShape::default();
        for &(slot, tokens) in parts {
            let seq = self.seqs.get(slot);
            if seq.decodes() {
                shape.decode(seq.computed + 1);
            } else {
                shape.prefill(tokens, seq.computed);
            }
        }
        shape
    }

    /// How long a step of this shape takes, noise included.
    fn draw(&mut self, shape: &StepShape) -> Nanos {
        let noise = if self.spec.noise > 0.0 {
            (1.0 + self.spec.noise * self.rng.normal()).max(0.1)
        } else {
            1.0
        };
        nanos(shape.seconds(&self.spec.profile) * noise)
    }
}

fn nanos(seconds: f64) -> Nanos {
    (seconds * 1e9).round() as Nanos
}
