//! Reads a vLLM worker's `/metrics` text into the few figures that routing uses.
//!
//! Invariant: a figure that is missing, malformed, negative or not finite is None, never a guess.

/// What an engine process says of one of its ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct EngineLoad {
    /// Sequences in the running batch.
    pub running: Option<f64>,
    /// Requests that wait.
    pub waiting: Option<f64>,
    /// Share of KV blocks in use, 0 to 1. On a prefill worker it counts what waits to be pulled.
    pub kv_usage: Option<f64>,
    /// Tokens in a block.
    pub block_size: Option<u32>,
    /// KV capacity in blocks.
    pub num_gpu_blocks: Option<u64>,
    /// Prompt tokens computed here since the start.
    pub prompt_local_compute: Option<f64>,
    /// Prompt tokens found in the prefix cache since the start.
    pub prompt_local_cache_hit: Option<f64>,
    /// Prompt tokens pulled from another worker since the start.
    pub prompt_external: Option<f64>,
}

/// Reads the figures of one rank (the `engine` label; rank 0 if an engine has none). Unknown lines
/// are skipped.
pub fn read_vllm(text: &str, rank: u32) -> EngineLoad {
    let mut load = EngineLoad::default();
    for sample in text.lines().filter_map(Sample::parse) {
        let of_rank = sample.label("engine").map_or(rank == 0, |engine| engine.parse() == Ok(rank));
        if of_rank {
            load.take(&sample);
        }
    }
    load
}

impl EngineLoad {
    fn take(&mut self, sample: &Sample<'_>) {
        let value = (sample.value.is_finite() && sample.value >= 0.0).then_some(sample.value);
        match sample.name {
            "num_requests_running" => self.running = value,
            "num_requests_waiting" => self.waiting = value,
            // The latter up to 0.9.
            "kv_cache_usage_perc" | "gpu_cache_usage_perc" => {
                self.kv_usage = value.filter(|share| *share <= 1.0);
            }
            "cache_config_info" => {
                let label = |name| sample.label(name);
                self.block_size = label("block_size").and_then(|size| size.parse().ok());
                self.num_gpu_blocks = label("num_gpu_blocks").and_then(|count| count.parse().ok());
            }
            "prompt_tokens_by_source_total" => match sample.label("source") {
                Some("local_compute") => self.prompt_local_compute = value,
                Some("local_cache_hit") => self.prompt_local_cache_hit = value,
                Some("external_kv_transfer") => self.prompt_external = value,
                _ => {}
            },
            _ => {}
        }
    }
}

/// One line `vllm:name{label="value",...} number`.
struct Sample<'a> {
    name: &'a str,
    labels: &'a str,
    value: f64,
}

impl<'a> Sample<'a> {
    fn parse(line: &'a str) -> Option<Sample<'a>> {
        let line = line.strip_prefix("vllm:")?;
        let (head, labels, rest) = match line.split_once('{') {
            // The closing brace is the last: values may hold braces.
            Some((name, rest)) => {
                let (labels, rest) = rest.rsplit_once('}')?;
                (name, labels, rest)
            }
            None => {
                let (name, rest) = line.split_once(' ')?;
                (name, "", rest)
            }
        };
        let value = rest.split_ascii_whitespace().next()?.parse().ok()?;
        Some(Sample { name: head, labels, value })
    }

    /// A label's value as it is written (none of those read here needs an escape).
    fn label(&self, name: &str) -> Option<&'a str> {
        let mut rest = self.labels;
        loop {
            let (key, after) = rest.split_once("=\"")?;
            let end = closing_quote(after)?;
            if key.trim_start_matches([',', ' ']) == name {
                return after.get(..end);
            }
            rest = after.get(end + 1..)?;
        }
    }
}

fn closing_quote(text: &str) -> Option<usize> {
    let mut escaped = false;
    text.bytes().position(|byte| {
        let quote = byte == b'"' && !escaped;
        escaped = byte == b'\\' && !escaped;
        quote
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn labels_in_any_order_and_with_odd_values_are_read() {
        let text = "\
# HELP vllm:num_requests_running x\n\
vllm:num_requests_running{model_name=\"a\\\"} ,engine=\\\"9\\\"\",engine=\"1\"} 3.0\n\
vllm:num_requests_running{engine=\"0\"} 2 1700000000\n\
vllm:num_requests_waiting 4\n\
vllm:num_requests_waiting_by_reason{engine=\"0\"} 9\n";
        assert_eq!(read_vllm(text, 1).running, Some(3.0));
        let first = read_vllm(text, 0);
        assert_eq!((first.running, first.waiting), (Some(2.0), Some(4.0)));
        assert_eq!(read_vllm(text, 2), EngineLoad::default());
    }

    #[test]
    fn figures_that_make_no_sense_are_none() {
        let text = "\
vllm:num_requests_running NaN\n\
vllm:num_requests_waiting -1\n\
vllm:kv_cache_usage_perc 1.5\n\
vllm:cache_config_info{block_size=\"None\",num_gpu_blocks=\"None\"} 1\n";
        assert_eq!(read_vllm(text, 0), EngineLoad::default());
    }

    proptest! {
        #[test]
        fn random_text_never_panics(text: String, line in r#"vllm:[a-z_]{0,9}\{[a-z="\\,}]{0,30}\}? ?[0-9.]{0,4}"#) {
            let _ = read_vllm(&text, 0);
            let _ = read_vllm(&line, 0);
        }
    }
}
