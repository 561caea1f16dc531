//! Reads vLLM's `/metrics`, SGLang's `/v1/loads` and TensorRT-LLM's `/metrics` into the few figures that routing uses.
//!
//! Invariant: a figure that is missing, malformed, negative or not finite is None, never a guess.

use serde_json::Value;

use crate::discovery::DiscoveryError;

/// SGLang's endpoint, with the sections that are read here.
pub const SGLANG_LOADS: &str = "/v1/loads?include=core,disagg,queues";

/// What an engine process says of one of its ranks. Sums are since its start, in tokens and seconds.
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
    /// KV capacity in tokens, where it is not told in blocks.
    pub capacity_tokens: Option<f64>,
    /// Tokens whose KV is in use, where it is not told in blocks.
    pub used_tokens: Option<f64>,
    /// Prompt tokens that wait to be computed.
    pub waiting_prefill_tokens: Option<f64>,
    /// Prompt tokens whose computing was timed.
    pub prefill_tokens: Option<f64>,
    /// How long that took. vLLM adds up what each prompt took, SGLang the steps.
    pub prefill_seconds: Option<f64>,
    /// Steps. vLLM counts all that gave a token, SGLang those that computed no prompt.
    pub steps: Option<f64>,
    /// Tokens after the first of a sequence.
    pub decode_tokens: Option<f64>,
    /// Sum of the times between them.
    pub decode_seconds: Option<f64>,
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

/// Reads one rank's figures from SGLang's `/v1/loads`. A rank that is not listed, or that has no
/// capacity because it has only begun, says nothing.
///
/// # Errors
/// The reply is not of that shape.
pub fn read_sglang(body: &[u8], rank: u32) -> Result<EngineLoad, DiscoveryError> {
    let error = |why: &str| DiscoveryError { what: "/v1/loads", why: why.to_owned() };
    let reply: Value = serde_json::from_slice(body).map_err(|_| error("the reply is not JSON"))?;
    let loads = reply.get("loads").and_then(Value::as_array);
    let loads = loads.ok_or_else(|| error("the reply has no list `loads`"))?;
    let of_rank = |load: &&Value| load.get("dp_rank").and_then(Value::as_u64) == Some(rank.into());
    Ok(loads.iter().find(of_rank).map(EngineLoad::of_sglang).unwrap_or_default())
}

/// Reads TensorRT-LLM's `/metrics`: statistics of iterations, of which the last counts. It hands them out
/// once, so that there may be none. From its sources; no reply was captured.
///
/// # Errors
/// The reply is not of that shape.
pub fn read_trtllm(body: &[u8]) -> Result<EngineLoad, DiscoveryError> {
    let error = |why: &str| DiscoveryError { what: "/metrics", why: why.to_owned() };
    let reply: Value = serde_json::from_slice(body).map_err(|_| error("the reply is not JSON"))?;
    let iterations = reply.as_array().ok_or_else(|| error("the reply is not a list"))?;
    Ok(iterations.last().map(EngineLoad::of_trtllm).unwrap_or_default())
}

/// What is neither negative nor beyond all numbers.
fn sound(value: f64) -> Option<f64> {
    (value.is_finite() && value >= 0.0).then_some(value)
}

impl EngineLoad {
    fn of_sglang(load: &Value) -> EngineLoad {
        let number = |name| load.get(name).and_then(Value::as_f64).and_then(sound);
        let capacity_tokens = number("max_total_num_tokens").filter(|tokens| *tokens > 0.0);
        if capacity_tokens.is_none() {
            return EngineLoad::default();
        }
        // Sums over decode steps: 1, B, t, B^2, B t, tokens; t in microseconds.
        let moments = load.get("decode_moments").and_then(Value::as_array);
        let moment = |at: usize| moments?.get(at)?.as_f64().and_then(sound);
        EngineLoad {
            running: number("num_running_reqs"),
            waiting: number("num_waiting_reqs"),
            kv_usage: number("token_usage").filter(|share| *share <= 1.0),
            capacity_tokens,
            used_tokens: number("num_used_tokens"),
            waiting_prefill_tokens: number("num_waiting_uncached_tokens"),
            prefill_tokens: number("total_prefill_uncached_tokens"),
            prefill_seconds: number("total_prefill_busy_us").map(|us| us / 1e6),
            steps: moment(0),
            decode_tokens: moment(1),
            decode_seconds: moment(4).map(|us| us / 1e6),
            ..EngineLoad::default()
        }
    }

    fn of_trtllm(iteration: &Value) -> EngineLoad {
        let number = |of: &Value, name| of.get(name).and_then(Value::as_f64).and_then(sound);
        let kv = iteration.get("kvCacheStats").unwrap_or(&Value::Null);
        let whole = |name| kv.get(name).and_then(Value::as_u64).filter(|count| *count > 0);
        let used = number(kv, "usedNumBlocks").zip(whole("maxNumBlocks"));
        EngineLoad {
            running: number(iteration, "numActiveRequests"),
            waiting: number(iteration, "numQueuedRequests"),
            kv_usage: used.map(|(used, all)| used / all as f64).filter(|share| *share <= 1.0),
            num_gpu_blocks: whole("maxNumBlocks"),
            block_size: whole("tokensPerBlock").and_then(|size| u32::try_from(size).ok()),
            ..EngineLoad::default()
        }
    }

    fn take(&mut self, sample: &Sample<'_>) {
        let value = sound(sample.value);
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
            "request_prefill_kv_computed_tokens_sum" => self.prefill_tokens = value,
            "request_prefill_time_seconds_sum" => self.prefill_seconds = value,
            "iteration_tokens_total_count" => self.steps = value,
            // The latter up to 0.10.
            "inter_token_latency_seconds_count" | "time_per_output_token_seconds_count" => {
                self.decode_tokens = value;
            }
            "inter_token_latency_seconds_sum" | "time_per_output_token_seconds_sum" => {
                self.decode_seconds = value;
            }
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

    #[test]
    fn a_reply_of_another_shape_and_a_server_that_has_only_begun_say_nothing() {
        let read = |body: &str, rank| read_sglang(body.as_bytes(), rank);
        assert!(read("nothing", 0).is_err() && read("[]", 0).is_err());
        assert_eq!(read(r#"{"loads":[]}"#, 0), Ok(EngineLoad::default()));
        let begun = r#"{"loads":[{"dp_rank":0,"num_running_reqs":0,"max_total_num_tokens":0}]}"#;
        assert_eq!(read(begun, 0), Ok(EngineLoad::default()));
        let odd = r#"{"loads":[{"dp_rank":1,"max_total_num_tokens":8,"num_running_reqs":-1,
            "token_usage":7.5,"num_used_tokens":"x","decode_moments":[1,null]}]}"#;
        assert_eq!(read(odd, 0), Ok(EngineLoad::default()));
        let rest =
            EngineLoad { capacity_tokens: Some(8.0), steps: Some(1.0), ..EngineLoad::default() };
        assert_eq!(read(odd, 1), Ok(rest));
    }

    #[test]
    fn of_iterations_the_last_counts() {
        let body =
            br#"[{"numActiveRequests":9},{"iter":2,"numActiveRequests":3,"numQueuedRequests":1,
            "kvCacheStats":{"maxNumBlocks":100,"usedNumBlocks":25,"tokensPerBlock":32}}]"#;
        let load = read_trtllm(body).unwrap();
        assert_eq!((load.running, load.waiting, load.kv_usage), (Some(3.0), Some(1.0), Some(0.25)));
        assert_eq!((load.num_gpu_blocks, load.block_size), (Some(100), Some(32)));
        assert_eq!(read_trtllm(b"[]").unwrap(), EngineLoad::default());
        assert!(read_trtllm(b"{}").is_err() && read_trtllm(b"vllm:x 1").is_err());
    }

    proptest! {
        #[test]
        fn random_text_never_panics(text: String, line in r#"vllm:[a-z_]{0,9}\{[a-z="\\,}]{0,30}\}? ?[0-9.]{0,4}"#) {
            let _ = read_vllm(&text, 0);
            let _ = read_vllm(&line, 0);
            let _ = read_sglang(text.as_bytes(), 0);
        }
    }
}
