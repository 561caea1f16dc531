//! What an engine says of its own work, as measurements: what lies between two readings of its counters.
//! Invariants: a counter that went back or jumped teaches nothing, nor does a stretch whose work is
//! not known: prompts of others, steps that prompts shared, decoding beside prompts. Which constants
//! hold is not known here.

use std::ops::RangeInclusive;
use std::time::Duration;

use super::desk::{DecodeSample, PrefillSample};
use super::physics::{Batch, Prefill};
use crate::fleet::{DecodeTotals, PrefillTotals, Reading};

/// Readings further apart than this are not compared.
const LONGEST: Duration = Duration::from_secs(60);

/// Decode steps between two readings that can be compared, at least.
const FEWEST_STEPS: u64 = 8;

/// How much of the time between two readings decode steps fill. With less, the context that was
/// reported at its ends says little of them; more cannot be.
const BUSY: RangeInclusive<f64> = 0.5..=1.1;

/// How much of the prompt tokens that this router sent the engine counted, where it counts all it
/// does, and where it leaves out steps that it cannot time.
const ALL: RangeInclusive<f64> = 0.8..=1.25;
const SOME: RangeInclusive<f64> = 0.25..=1.25;

/// The last thing that the engine said of its counters.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Told {
    prefill: Option<PrefillTotals>,
    decode: Option<DecodeTotals>,
    context_tokens: Option<u64>,
    /// What this router had seen it compute by then.
    done: Prefill,
    /// Two of this router's prompts were there at once since then.
    pub(super) shared: bool,
}

/// What this router saw of the time since the last reading.
#[derive(Clone, Copy, Debug)]
pub(super) struct Seen {
    pub(super) elapsed: Duration,
    /// What the worker has computed in all.
    pub(super) done: Prefill,
    /// What streamed, on average.
    pub(super) streamed: Batch,
    /// No prompt was computed.
    pub(super) calm: bool,
    /// Prompts that are there now.
    pub(super) queued: usize,
}

impl Told {
    /// Takes the next reading; what can be learned of the time since the last one.
    pub(super) fn next(
        &mut self,
        reading: &Reading,
        seen: &Seen,
    ) -> (Option<PrefillSample>, Option<DecodeSample>) {
        let next = Told {
            prefill: reading.prefill,
            decode: reading.decode,
            context_tokens: reading.context_tokens,
            done: seen.done,
            shared: seen.queued > 1,
        };
        let before = std::mem::replace(self, next);
        if seen.elapsed > LONGEST {
            return (None, None);
        }
        (before.prefilled(self, seen), before.decoded(self, seen))
    }

    fn prefilled(&self, next: &Told, seen: &Seen) -> Option<PrefillSample> {
        let (before, after) = (self.prefill?, next.prefill?);
        let tokens = after.tokens.checked_sub(before.tokens)? as f64;
        let seconds = positive(after.seconds - before.seconds)?;
        let mut sent = seen.done;
        sent.take(self.done);
        let part = tokens / sent.tokens.max(1.0);
        let known = if after.per_prompt { ALL } else { SOME }.contains(&part);
        if !known || after.per_prompt && self.shared {
            return None;
        }
        // Of the prompts that were left out nothing is known, so they were like the others.
        let part = if after.per_prompt { 1.0 } else { part };
        let work = Prefill {
            steps: sent.steps * part,
            tokens: sent.tokens * part,
            token_context: sent.token_context * part,
        };
        Some(PrefillSample { seconds, work, beside: Batch::default(), mid_step: false })
    }

    fn decoded(&self, next: &Told, seen: &Seen) -> Option<DecodeSample> {
        let (before, after) = (self.decode?, next.decode?);
        let steps = after.steps.checked_sub(before.steps)?;
        let tokens = after.tokens.checked_sub(before.tokens)?;
        let total = positive(after.seconds - before.seconds)?;
        let calm = match (before.prompt_tokens, after.prompt_tokens) {
            (None, None) => true,
            (before, after) => seen.calm && before == after,
        };
        if !calm || steps < FEWEST_STEPS || tokens < steps {
            return None;
        }
        let (steps, tokens) = (steps as f64, tokens as f64);
        let seconds = total / tokens;
        if !BUSY.contains(&(steps * seconds / seen.elapsed.as_secs_f64())) {
            return None;
        }
        let sequences = tokens / steps;
        let told = self.context_tokens.zip(next.context_tokens);
        let told = told.map(|(before, after)| (before as f64 + after as f64) / 2.0);
        // Blocks that sequences share are told once.
        let all_seen = seen.streamed.sequences >= ALL.start() * sequences;
        let context = match told {
            Some(told) => told.max(seen.streamed.context),
            None if all_seen => seen.streamed.context,
            None => return None,
        };
        Some(DecodeSample { seconds, batch: Batch { sequences, context } })
    }
}

fn positive(seconds: f64) -> Option<f64> {
    (seconds > 0.0 && seconds.is_finite()).then_some(seconds)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(seconds: f64) -> Seen {
        Seen {
            elapsed: Duration::from_secs_f64(seconds),
            done: Prefill::default(),
            streamed: Batch::default(),
            calm: true,
            queued: 0,
        }
    }

    fn decode(steps: u64, tokens: u64, seconds: f64) -> Reading {
        let prompt_tokens = Some(70);
        Reading {
            decode: Some(DecodeTotals { steps, tokens, seconds, prompt_tokens }),
            context_tokens: Some(1000),
            ..Reading::default()
        }
    }

    /// What the second reading teaches.
    fn learned(first: &Reading, second: &Reading, seen: &Seen) -> Option<DecodeSample> {
        let mut told = Told::default();
        assert_eq!(told.next(first, &after(1.0)), (None, None), "nothing to compare with");
        told.next(second, seen).1
    }

    #[test]
    fn what_lies_between_two_readings_is_a_measurement() {
        // Four sequences, 40 steps of 20 ms each.
        let sample = learned(&decode(100, 300, 5.0), &decode(140, 460, 8.2), &after(1.0));
        let batch = Batch { sequences: 4.0, context: 1000.0 };
        assert!(sample.is_some_and(|s| (s.seconds - 0.02).abs() < 1e-9 && s.batch == batch));
    }

    #[test]
    fn counters_that_begin_anew_or_jump_teach_nothing() {
        let first = decode(100, 300, 5.0);
        for (what, second) in [
            ("the engine restarted", decode(40, 160, 3.2)),
            ("the engine restarted and is ahead in one of them", decode(140, 460, 3.2)),
            ("tokens without steps", decode(100, 460, 8.2)),
            ("nothing happened", first),
            ("more seconds than have passed", decode(140, 460, 80.0)),
            ("more steps than there was time for", decode(100_100, 400_300, 8_005.0)),
            ("too few steps", decode(105, 320, 5.4)),
            ("hardly busy", decode(110, 340, 5.8)),
            ("no number", decode(140, 460, f64::NAN)),
            ("beyond all numbers", decode(140, 460, f64::INFINITY)),
        ] {
            assert_eq!(learned(&first, &second, &after(1.0)), None, "{what}");
        }
        let long = after(LONGEST.as_secs_f64() + 1.0);
        assert_eq!(learned(&first, &decode(3140, 12_460, 245.0), &long), None, "too long ago");
    }

    #[test]
    fn decoding_beside_prompts_teaches_nothing() {
        let first = decode(100, 300, 5.0);
        let second = decode(140, 460, 8.2);
        let busy = Seen { calm: false, ..after(1.0) };
        assert_eq!(learned(&first, &second, &busy), None, "a prompt of this router");
        let mut others = second;
        others.decode = others.decode.map(|d| DecodeTotals { prompt_tokens: Some(71), ..d });
        assert_eq!(learned(&first, &others, &after(1.0)), None, "a prompt of another one");
        // An engine that counts only steps without prompts may compute some between them.
        let apart = |reading: Reading| {
            let decode = reading.decode.map(|d| DecodeTotals { prompt_tokens: None, ..d });
            Reading { decode, ..reading }
        };
        assert!(learned(&apart(first), &apart(second), &busy).is_some());
    }

    #[test]
    fn prompts_are_a_measurement_where_it_is_known_which_they_were() {
        let prompts = |tokens, seconds, per_prompt| Reading {
            prefill: Some(PrefillTotals { tokens, seconds, per_prompt }),
            ..Reading::default()
        };
        let sent = Seen { done: Prefill::new(1000, 1000, 2048), ..after(1.0) };
        let learned = |reading: &Reading, shared| {
            let mut told = Told::default();
            told.next(&prompts(0, 0.0, true), &after(1.0));
            told.shared = shared;
            told.next(reading, &sent).0.map(|sample| (sample.seconds, sample.work.tokens))
        };
        assert_eq!(learned(&prompts(1000, 0.1, true), false), Some((0.1, 1000.0)));
        assert_eq!(learned(&prompts(1000, 0.1, true), true), None, "two in one step");
        assert_eq!(learned(&prompts(1500, 0.1, true), false), None, "prompts of others");
        assert_eq!(learned(&prompts(500, 0.1, true), false), None, "another engine");
        assert_eq!(learned(&prompts(500, 0.1, false), true), Some((0.1, 500.0)), "those it timed");
        assert_eq!(learned(&prompts(100, 0.1, false), false), None, "too few of them");
        assert_eq!(learned(&prompts(1000, -0.1, true), false), None, "began anew");
    }
}
