//! Histograms of requests and steps, with the bucket bounds of vLLM's metrics.

/// A histogram.
#[derive(Clone, Debug)]
pub(super) struct Histogram {
    bounds: &'static [f64],
    counts: Vec<u64>,
    sum: f64,
}

impl Histogram {
    fn new(bounds: &'static [f64]) -> Histogram {
        Histogram { bounds, counts: vec![0; bounds.len() + 1], sum: 0.0 }
    }

    pub(super) fn add(&mut self, value: f64) {
        let at = self.bounds.partition_point(|&bound| bound < value);
        self.counts[at] += 1;
        self.sum += value;
    }

    pub(super) fn sum(&self) -> f64 {
        self.sum
    }

    pub(super) fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// Upper bound and cumulative count of each bucket, the open one not included.
    pub(super) fn buckets(&self) -> impl Iterator<Item = (f64, u64)> {
        let cumulative = self.counts.iter().scan(0, |sum, count| {
            *sum += count;
            Some(*sum)
        });
        self.bounds.iter().copied().zip(cumulative)
    }
}

/// Seconds that a request is in one of its states.
const STATE: &[f64] = &[
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0, 1920.0, 7680.0,
];

/// Tokens of a step.
const STEP_TOKENS: &[f64] =
    &[1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16_384.0];

/// Tokens of a prompt.
const PROMPT_TOKENS: &[f64] =
    &[1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5];

/// What a rank measures of its requests.
#[derive(Clone, Debug)]
pub(super) struct Latencies {
    /// `vllm:time_to_first_token_seconds`
    pub(super) first_token: Histogram,
    /// `vllm:inter_token_latency_seconds`
    pub(super) between_tokens: Histogram,
    /// `vllm:e2e_request_latency_seconds`
    pub(super) whole: Histogram,
    /// `vllm:request_queue_time_seconds`
    pub(super) queue: Histogram,
    /// `vllm:request_prefill_time_seconds`
    pub(super) prefill: Histogram,
    /// `vllm:request_decode_time_seconds`
    pub(super) decode: Histogram,
    /// `vllm:request_prefill_kv_computed_tokens`
    pub(super) computed: Histogram,
    /// `vllm:iteration_tokens_total`
    pub(super) steps: Histogram,
}

impl Default for Latencies {
    fn default() -> Self {
        Latencies {
            first_token: Histogram::new(&[
                0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0,
                7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
            ]),
            between_tokens: Histogram::new(&[
                0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5,
                10.0, 20.0, 40.0, 80.0,
            ]),
            whole: Histogram::new(STATE),
            queue: Histogram::new(STATE),
            prefill: Histogram::new(STATE),
            decode: Histogram::new(STATE),
            computed: Histogram::new(PROMPT_TOKENS),
            steps: Histogram::new(STEP_TOKENS),
        }
    }
}
