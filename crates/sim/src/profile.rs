//! The physics of one worker: six constants for a step, three for a link, by name of model and GPU.
//!
//! `step = c1 B + c2 S + max(c0, k0 + a1 n + a2 n ctx)`, `transfer = x0 + bytes / bw`.
//! Measured values live in the table at the bottom; nothing here learns.

/// Constants of one model on one GPU group. Times in seconds, sizes in bytes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Profile {
    /// Least time of any step (weights read once), `c0`.
    pub c0: f64,
    /// Per running sequence, `c1`.
    pub c1: f64,
    /// Per token of summed context of the running sequences, `c2`.
    pub c2: f64,
    /// Fixed cost of a step that prefills, `k0`.
    pub k0: f64,
    /// Per prefilled token, `a1`.
    pub a1: f64,
    /// Per prefilled token and token of its context, `a2`.
    pub a2: f64,
    /// Fixed cost of one KV transfer, `x0`.
    pub x0: f64,
    /// Bytes per second of one link, `bw`.
    pub bandwidth: f64,
    /// KV bytes of one token.
    pub kv_bytes_per_token: f64,
}

const MS: f64 = 1e-3;

/// The measured profiles, by name.
const TABLE: &[(&str, Profile)] = &[
    (
        "llama-3.1-70b-fp8-h100-tp4",
        Profile {
            c0: 10.4 * MS,
            c1: 0.038 * MS,
            c2: 2.9e-5 * MS,
            k0: 8.0 * MS,
            a1: 0.0445 * MS,
            a2: 9.8e-7 * MS,
            x0: 10.0 * MS,
            bandwidth: 40e9,
            kv_bytes_per_token: 327_680.0,
        },
    ),
    (
        "qwen3-32b-bf16-h100-tp2",
        Profile {
            c0: 13.4 * MS,
            c1: 0.0246 * MS,
            c2: 4.2e-5 * MS,
            k0: 4.0 * MS,
            a1: 0.0495 * MS,
            a2: 1.8e-6 * MS,
            x0: 10.0 * MS,
            bandwidth: 40e9,
            kv_bytes_per_token: 262_144.0,
        },
    ),
];

impl Default for Profile {
    fn default() -> Self {
        TABLE[0].1
    }
}

impl Profile {
    /// Looks a profile up by name; `qwen3-32b` is short for its full name.
    #[must_use]
    pub fn named(name: &str) -> Option<Profile> {
        let name = if name == "qwen3-32b" { "qwen3-32b-bf16-h100-tp2" } else { name };
        TABLE.iter().find(|(known, _)| *known == name).map(|(_, profile)| *profile)
    }

    /// Every name of the table, for messages and help.
    pub fn names() -> impl Iterator<Item = &'static str> {
        TABLE.iter().map(|(name, _)| *name)
    }

    /// The same worker `speed` times as fast; infinite speed takes no time at all.
    #[must_use]
    pub fn faster(self, speed: f64) -> Profile {
        Profile {
            c0: self.c0 / speed,
            c1: self.c1 / speed,
            c2: self.c2 / speed,
            k0: self.k0 / speed,
            a1: self.a1 / speed,
            a2: self.a2 / speed,
            x0: self.x0 / speed,
            bandwidth: self.bandwidth * speed,
            kv_bytes_per_token: self.kv_bytes_per_token,
        }
    }
}

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
        let mean_context = f64::from(before) + f64::from(tokens) / 2.0;
        self.prefill_tokens_by_context += f64::from(tokens) * mean_context;
    }
}

impl Profile {
    /// Seconds of one step.
    #[must_use]
    pub fn step_time(&self, shape: &StepShape) -> f64 {
        let decode = self.c1 * f64::from(shape.sequences) + self.c2 * shape.context as f64;
        let prefill = self.k0
            + self.a1 * f64::from(shape.prefill_tokens)
            + self.a2 * shape.prefill_tokens_by_context;
        decode + self.c0.max(prefill)
    }

    /// Seconds of a transfer: the fixed hop, and the time that the link is busy.
    #[must_use]
    pub fn transfer_time(&self, tokens: u32) -> (f64, f64) {
        (self.x0, self.kv_bytes_per_token * f64::from(tokens) / self.bandwidth)
    }
}
