//! One step of an engine: what it computes, and how long that takes by the constants of a profile.
//! The constants and their table are the brain's.

pub use pointsman_brain::Profile;

/// What one step computes.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StepShape {
    sequences: u32,
    context: u64,
    prefill_tokens: u32,
    prefill_tokens_by_context: f64,
}

impl StepShape {
    /// Adds a sequence that decodes one token with this much context.
    pub fn decode(&mut self, context: u32) {
        self.sequences += 1;
        self.context += u64::from(context);
    }

    /// Adds a chunk of a prompt, `before` tokens into it.
    pub fn prefill(&mut self, tokens: u32, before: u32) {
        self.prefill_tokens += tokens;
        // Each of its tokens counts the context at the end of the chunk: so the times per output token
        // of real GPUs come out, and with that of the token itself they are up to 8 % too low.
        self.prefill_tokens_by_context += f64::from(tokens) * f64::from(before + tokens);
    }

    /// The next step of the same sequences: each has one token more.
    pub fn grow(&mut self) {
        self.context += u64::from(self.sequences);
    }

    /// Seconds that the step takes.
    #[must_use]
    pub fn seconds(&self, profile: &Profile) -> f64 {
        let decode = profile.c1 * f64::from(self.sequences) + profile.c2 * self.context as f64;
        let prefill = profile.k0
            + profile.a1 * f64::from(self.prefill_tokens)
            + profile.a2 * self.prefill_tokens_by_context;
        decode + profile.c0.max(prefill)
    }
}
