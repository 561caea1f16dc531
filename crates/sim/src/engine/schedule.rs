//! What one step computes: decodes first, then chunks of prompts in order of arrival, within the
//! token budget; who is put back when blocks run out; and how long the step takes.

use super::seq::Stage;
use super::types::{Batch, Event, Kind, LinkId, Nanos, Outbox, Output};
use super::{Engine, Pin};
use crate::profile::StepShape;

/// A step under way.
pub(super) struct Step {
    end: Nanos,
    /// Slot and tokens of each sequence in it.
    parts: Vec<(u32, u32)>,
}

impl Step {
    pub(super) fn end(&self) -> Nanos {
        self.end
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
        let end = now.saturating_add(self.step_time(&draft.parts));
        self.totals.steps += 1;
        self.step = Some(Step { end, parts: draft.parts });
    }

    /// Ends the step that is due: tokens come out, finished sequences leave.
    pub(super) fn finish_step(&mut self, now: Nanos, out: &mut Outbox) {
        let Some(step) = self.step.take_if(|step| step.end <= now) else { return };
        for (slot, tokens) in step.parts {
            let seq = self.seqs.get_mut(slot);
            seq.computed += tokens;
            if seq.computed < seq.tokens() {
                continue;
            }
            seq.generated += 1;
            let (id, last) = (seq.job.id, seq.generated == seq.job.output_tokens);
            self.totals.generated += 1;
            out.outputs.push(Output::Token { job: id, at: now });
            if last {
                self.finish(slot, now, out);
            }
        }
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

    fn step_time(&mut self, parts: &[(u32, u32)]) -> Nanos {
        let mut shape = StepShape::default();
        for &(slot, tokens) in parts {
            let seq = self.seqs.get(slot);
            if seq.decodes() {
                shape.decode(seq.computed + 1);
            } else {
                shape.prefill(tokens, seq.computed);
            }
        }
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
