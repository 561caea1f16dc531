//! Reads a vLLM worker's `/metrics` text into the few figures that routing uses.

/// What an engine process says of one of its ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct EngineLoad {
    /// Sequences in the running batch.
    pub running: Option<f64>,
    /// Requests that wait.
    pub waiting: Option<f64>,
    /// Share of KV blocks in use, 0 to 1.
    pub kv_usage: Option<f64>,
    /// Tokens in a block.
    pub block_size: Option<u32>,
    /// KV capacity.
    pub num_gpu_blocks: Option<u64>,
    /// Prompt tokens computed here since the start.
    pub prompt_local_compute: Option<f64>,
    /// Prompt tokens found in the prefix cache since the start.
    pub prompt_local_cache_hit: Option<f64>,
    /// Prompt tokens pulled from another worker since the start.
    pub prompt_external: Option<f64>,
}

/// Reads the figures of one rank (the `engine` label). Unknown lines are skipped.
pub fn read_vllm(text: &str, rank: u32) -> EngineLoad {
    let _ = (text, rank);
    EngineLoad::default()
}
