//! What the brain is told about one request.

use std::time::Duration;

use crate::fleet::{Held, Path};
use crate::ladder::Ladder;
use crate::slo::Slo;

/// Whether a request may be told to wait in the router.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Wait {
    /// It is to be decided.
    #[default]
    Never,
    /// Nobody waits: it is to only for what it finds.
    IfNeeded,
    /// Only such wait as cannot be served within their TTFT objective: what can passes them.
    BehindLate,
    /// Others wait.
    Behind,
    /// It is one of the first that wait.
    InLine,
}

/// Whether a request can be computed on one worker and decoded on another.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Split {
    /// As the policy says.
    #[default]
    Yes,
    /// If no worker can take it whole: a batch of prompts whose engines hand each over by itself. What
    /// a policy weighs is one prompt.
    IfNeeded,
    /// It cannot.
    No,
}

/// One request that wants a plan. Build it with [`Ask::new`] and set what differs.
#[derive(Clone, Copy, Debug)]
pub struct Ask<'a> {
    /// Prompt tokens; of a batch, those of all its prompts.
    pub isl_tokens: u32,
    /// The ISL was estimated from bytes.
    pub estimated: bool,
    /// Only the prefix before the first image, audio or embedding was hashed.
    pub partial: bool,
    /// What each worker holds of the prompt, by slot; a slot beyond the end holds nothing.
    pub held: &'a [Held],
    /// The most tokens a sequence may generate, if the request says so.
    pub max_new_tokens: Option<u32>,
    /// Output sequences: `n`, times the prompts of a batch.
    pub sequences: u32,
    /// Whether the prompt can be computed on one worker and decoded on another.
    pub split: Split,
    /// Whether its first token will be seen; where it is not, the prompt is taken to be computed when
    /// it is predicted to be.
    pub streams: bool,
    /// The session that the request belongs to.
    pub session: Option<u64>,
    /// What the request is to be served within, where it says so.
    pub slo: Slo,
    /// How long it has waited since it was first asked about.
    pub waited: Duration,
    /// Whether the answer may be to wait.
    pub wait: Wait,
    /// The path that the client asked for; ignored unless the settings allow it.
    pub wish: Option<Path>,
    /// What has been tried for this request so far.
    pub tries: &'a Ladder,
    /// Workers that can serve this request, by slot (LoRA residency, labels); a slot beyond the end
    /// cannot. `None`: every worker can.
    pub eligible: Option<&'a [bool]>,
}

impl<'a> Ask<'a> {
    /// A single-sequence request of `isl_tokens` tokens, of which the workers hold `held`.
    pub fn new(isl_tokens: u32, held: &'a [Held], tries: &'a Ladder) -> Ask<'a> {
        Ask {
            isl_tokens,
            estimated: false,
            partial: false,
            held,
            max_new_tokens: None,
            sequences: 1,
            split: Split::Yes,
            streams: true,
            session: None,
            slo: Slo::default(),
            waited: Duration::ZERO,
            wait: Wait::Never,
            wish: None,
            tries,
            eligible: None,
        }
    }
}
