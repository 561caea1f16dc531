//! The invariants of the engine model, as a function that tests and simulations run after a step.

use std::collections::HashSet;

use super::Engine;
use super::seq::Stage;

impl Engine {
    /// Checks that every block is free or accounted for, every sequence is in exactly one place,
    /// and no step is over its budget.
    ///
    /// # Errors
    /// What is wrong, in words.
    pub fn check(&self) -> Result<(), String> {
        self.check_blocks()?;
        self.check_places()?;
        if let Some(step) = &self.step {
            let (tokens, budget) = (step.tokens(), self.spec.max_num_batched_tokens);
            if tokens > budget {
                return Err(format!("a step of {tokens} tokens, the budget is {budget}"));
            }
        }
        if self.running.len() > self.spec.max_num_seqs as usize {
            return Err(format!("{} sequences run at once", self.running.len()));
        }
        if self.leases.len() != self.pins.len() {
            return Err(format!("{} leases, {} pins", self.leases.len(), self.pins.len()));
        }
        Ok(())
    }

    fn check_blocks(&self) -> Result<(), String> {
        let mut users = vec![0u32; self.spec.capacity_blocks as usize];
        let of_seqs = self.seqs.iter().flat_map(|seq| &seq.blocks);
        for &block in of_seqs.chain(self.pins.values().flat_map(|pin| pin.blocks.iter())) {
            users[block as usize] += 1;
        }
        self.pool.check(&users)?;
        for seq in self.seqs.iter() {
            let id = seq.job.id.0;
            if seq.computed as usize > seq.blocks.len() * self.spec.block_size as usize {
                return Err(format!("job {id} has computed beyond its blocks"));
            }
            if seq.computed > seq.tokens() || seq.generated >= seq.job.output_tokens {
                return Err(format!("job {id} went on past its end"));
            }
            if seq.stage == Stage::Waiting && !seq.blocks.is_empty() {
                return Err(format!("job {id} waits with blocks in hand"));
            }
        }
        Ok(())
    }

    fn check_places(&self) -> Result<(), String> {
        let pulling = self.pulling.iter().map(|(_, slot)| slot);
        let all = self.waiting.iter().chain(&self.pulled).chain(&self.running).chain(pulling);
        let mut seen = HashSet::new();
        for &slot in all {
            if !seen.insert(slot) {
                return Err(format!("sequence {slot} is in two places"));
            }
        }
        if seen.len() != self.by_id.len() || self.seqs.iter().count() != seen.len() {
            return Err(format!("{} sequences live, {} placed", self.by_id.len(), seen.len()));
        }
        for (&id, &slot) in &self.by_id {
            let seq = self.seqs.get(slot);
            let placed = match seq.stage {
                Stage::Vacant => false,
                Stage::Waiting => self.waiting.contains(&slot),
                Stage::Pulling(at) => self.pulling.contains(&(at, slot)),
                Stage::Pulled => self.pulled.contains(&slot),
                Stage::Running => self.running.contains(&slot),
            };
            if !placed || seq.job.id != id {
                return Err(format!("job {} is not where it says it is", id.0));
            }
        }
        Ok(())
    }
}
