//! `/metrics` in Prometheus text, under vLLM's names.

use std::fmt::Write;

use super::app::App;
use super::faults::Lies;
use super::histogram::Histogram;
use crate::engine::{Load, Totals};

/// The whole page.
pub(super) fn page(app: &App, lies: &Lies) -> String {
    let mut page = Page { text: String::with_capacity(16 * 1024), model: &app.config.model };
    let loads: Vec<(Load, Totals)> =
        app.ranks.iter().map(|rank| (rank.load(), rank.totals())).collect();
    gauges(&mut page, &loads, lies);
    counters(&mut page, &loads);
    let histograms: Vec<_> = app.ranks.iter().map(|rank| rank.latencies()).collect();
    page.histograms("time_to_first_token_seconds", histograms.iter().map(|l| &l.first_token));
    page.histograms("inter_token_latency_seconds", histograms.iter().map(|l| &l.between_tokens));
    page.histograms("e2e_request_latency_seconds", histograms.iter().map(|l| &l.whole));
    page.histograms("request_queue_time_seconds", histograms.iter().map(|l| &l.queue));
    page.histograms("request_prefill_time_seconds", histograms.iter().map(|l| &l.prefill));
    page.histograms("request_decode_time_seconds", histograms.iter().map(|l| &l.decode));
    page.histograms("request_prefill_kv_computed_tokens", histograms.iter().map(|l| &l.computed));
    page.histograms("iteration_tokens_total", histograms.iter().map(|l| &l.steps));
    let blocks = lies.num_gpu_blocks.unwrap_or(u64::from(app.config.capacity_blocks));
    cache_config(&mut page, app, blocks);
    page.text
}

fn gauges(page: &mut Page<'_>, loads: &[(Load, Totals)], lies: &Lies) {
    let running = |load: &Load| lies.running.unwrap_or(u64::from(load.running)) as f64;
    let waiting = |load: &Load| {
        lies.waiting.unwrap_or(u64::from(load.waiting) + u64::from(load.pulling)) as f64
    };
    let usage = |load: &Load| {
        let truth = f64::from(load.used_blocks) / f64::from(load.capacity_blocks);
        lies.kv_usage.unwrap_or(truth)
    };
    let of = |value: &dyn Fn(&Load) -> f64| -> Vec<f64> {
        loads.iter().map(|(load, _)| value(load)).collect()
    };
    page.family("num_requests_running", "gauge", "Number of requests in model execution batches.");
    page.per_rank("num_requests_running", "", &of(&running));
    page.family("num_requests_waiting", "gauge", "Number of requests waiting to be processed.");
    page.per_rank("num_requests_waiting", "", &of(&waiting));
    page.family("num_requests_kv_fetch_by_stage", "gauge", "Requests by stage of their KV fetch.");
    let name = "num_requests_kv_fetch_by_stage";
    let stage = |stage: &str| format!(",stage=\"{stage}\"");
    page.per_rank(name, &stage("waiting_to_start"), &of(&|_| 0.0));
    page.per_rank(name, &stage("in_progress"), &of(&|load| f64::from(load.pulling)));
    page.per_rank(name, &stage("completed_waiting"), &of(&|_| 0.0));
    page.family("kv_cache_usage_perc", "gauge", "KV-cache usage. 1 means 100 percent usage.");
    page.per_rank("kv_cache_usage_perc", "", &of(&usage));
}

fn counters(page: &mut Page<'_>, loads: &[(Load, Totals)]) {
    let of = |value: &dyn Fn(&Totals) -> u64| -> Vec<f64> {
        loads.iter().map(|(_, totals)| value(totals) as f64).collect()
    };
    let prompt = |t: &Totals| t.local_compute + t.local_cache_hit + t.external_kv_transfer;
    page.family("prompt_tokens_total", "counter", "Number of prefill tokens processed.");
    page.per_rank("prompt_tokens_total", "", &of(&prompt));
    page.family("prompt_tokens_by_source_total", "counter", "Number of prompt tokens by source.");
    let name = "prompt_tokens_by_source_total";
    let source = |source: &str| format!(",source=\"{source}\"");
    page.per_rank(name, &source("local_compute"), &of(&|t| t.local_compute));
    page.per_rank(name, &source("local_cache_hit"), &of(&|t| t.local_cache_hit));
    page.per_rank(name, &source("external_kv_transfer"), &of(&|t| t.external_kv_transfer));
    page.family("generation_tokens_total", "counter", "Number of generation tokens processed.");
    page.per_rank("generation_tokens_total", "", &of(&|t| t.generated));
    page.family("num_preemptions_total", "counter", "Cumulative number of preemptions.");
    page.per_rank("num_preemptions_total", "", &of(&|t| t.preemptions));
    page.family("prefix_cache_queries_total", "counter", "Prefix cache queries, in tokens.");
    page.per_rank("prefix_cache_queries_total", "", &of(&prompt));
    page.family("prefix_cache_hits_total", "counter", "Prefix cache hits, in tokens.");
    page.per_rank("prefix_cache_hits_total", "", &of(&|t| t.local_cache_hit));
    page.family("request_success_total", "counter", "Count of successfully processed requests.");
    let reason = |reason: &str| format!(",finished_reason=\"{reason}\"");
    page.per_rank("request_success_total", &reason("length"), &of(&|t| t.finished));
    page.per_rank("request_success_total", &reason("abort"), &of(&|t| t.aborted));
    page.family("nixl_num_kv_expired_reqs_total", "counter", "Requests whose KV lease passed.");
    page.per_rank("nixl_num_kv_expired_reqs_total", "", &of(&|t| t.expired));
}

fn cache_config(page: &mut Page<'_>, app: &App, num_gpu_blocks: u64) {
    page.family("cache_config_info", "gauge", "Information of the LLMEngine CacheConfig");
    let size = app.config.block_size;
    for rank in 0..app.ranks.len() {
        let tokens = num_gpu_blocks * u64::from(size);
        let _ = writeln!(
            page.text,
            "vllm:cache_config_info{{block_size=\"{size}\",cache_dtype=\"auto\",\
             enable_prefix_caching=\"True\",engine=\"{rank}\",gpu_memory_utilization=\"0.92\",\
             kv_cache_size_tokens=\"{tokens}\",num_cpu_blocks=\"None\",\
             num_gpu_blocks=\"{num_gpu_blocks}\"}} 1.0"
        );
    }
}

struct Page<'a> {
    text: String,
    model: &'a str,
}

impl Page<'_> {
    fn family(&mut self, name: &str, kind: &str, help: &str) {
        // Writing to a string cannot fail.
        let _ = writeln!(self.text, "# HELP vllm:{name} {help}\n# TYPE vllm:{name} {kind}");
    }

    fn per_rank(&mut self, name: &str, labels: &str, values: &[f64]) {
        let model = self.model;
        for (rank, value) in values.iter().enumerate() {
            let _ = writeln!(
                self.text,
                "vllm:{name}{{engine=\"{rank}\",model_name=\"{model}\"{labels}}} {value:?}"
            );
        }
    }

    fn histograms<'h>(&mut self, name: &str, of: impl Iterator<Item = &'h Histogram>) {
        let unit = if name.ends_with("seconds") { "seconds" } else { "tokens" };
        self.family(name, "histogram", &format!("Histogram in {unit}."));
        let model = self.model;
        for (rank, histogram) in of.enumerate() {
            let labels = format!("engine=\"{rank}\",model_name=\"{model}\"");
            let count = histogram.count();
            for (bound, below) in histogram.buckets() {
                let _ = writeln!(
                    self.text,
                    "vllm:{name}_bucket{{{labels},le=\"{bound:?}\"}} {below}.0"
                );
            }
            let _ = writeln!(
                self.text,
                "vllm:{name}_bucket{{{labels},le=\"+Inf\"}} {count}.0\n\
                 vllm:{name}_count{{{labels}}} {count}.0\n\
                 vllm:{name}_sum{{{labels}}} {:?}",
                histogram.sum()
            );
        }
    }
}
