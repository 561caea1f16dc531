//! Captured metrics and discovery answers are read as they were meant.
#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use common::{json, response, text};
use pointsman_wire::discovery::{self, ServedModel, Version};
use pointsman_wire::load::{EngineLoad, read_sglang, read_vllm};

#[test]
fn the_metrics_of_each_role_are_read() {
    let idle = EngineLoad {
        running: Some(0.0),
        waiting: Some(0.0),
        kv_usage: Some(0.0),
        block_size: Some(32),
        ..EngineLoad::default()
    };
    let decode = EngineLoad {
        num_gpu_blocks: Some(1024),
        prompt_local_compute: Some(0.0),
        prompt_local_cache_hit: Some(0.0),
        prompt_external: Some(1021.0),
        // What was pulled counts too, which is why this says nothing of a decode worker.
        prefill_tokens: Some(1021.0),
        prefill_seconds: Some(0.009_511_993_000_160_146),
        steps: Some(16.0),
        decode_tokens: Some(15.0),
        decode_seconds: Some(0.057_510_739_999_997_895),
        ..idle
    };
    assert_eq!(read_vllm(&text("metrics/vllm_metrics_decode.txt"), 0), decode);
    let prefill = EngineLoad {
        num_gpu_blocks: Some(1024),
        prompt_local_compute: Some(1050.0),
        prompt_local_cache_hit: Some(992.0),
        prompt_external: Some(0.0),
        prefill_tokens: Some(1050.0),
        prefill_seconds: Some(0.037_321_672_000_871_33),
        steps: Some(17.0),
        decode_tokens: Some(15.0),
        decode_seconds: Some(0.055_920_555_999_364_296),
        ..idle
    };
    assert_eq!(read_vllm(&text("metrics/vllm_metrics_prefill.txt"), 0), prefill);
    let plain = EngineLoad {
        num_gpu_blocks: Some(96),
        prompt_local_compute: Some(1507.0),
        prompt_local_cache_hit: Some(192.0),
        prompt_external: Some(0.0),
        prefill_tokens: Some(1507.0),
        prefill_seconds: Some(21.480_368_894_000_55),
        steps: Some(70.0),
        decode_tokens: Some(51.0),
        decode_seconds: Some(0.203_149_443_999_791_4),
        ..idle
    };
    assert_eq!(read_vllm(&text("metrics/vllm_metrics.txt"), 0), plain);
    assert_eq!(read_vllm(&text("metrics/vllm_metrics.txt"), 1), EngineLoad::default());
}

#[test]
fn the_loads_of_each_role_are_read() {
    let read = |name: &str, rank| {
        let body = response(&json(name)).1;
        read_sglang(body.as_bytes(), rank).unwrap()
    };
    let idle = EngineLoad {
        running: Some(0.0),
        waiting: Some(0.0),
        kv_usage: Some(0.0),
        capacity_tokens: Some(20_000.0),
        used_tokens: Some(0.0),
        waiting_prefill_tokens: Some(0.0),
        ..EngineLoad::default()
    };
    let plain = EngineLoad {
        prefill_tokens: Some(11.0),
        prefill_seconds: Some(0.033_115),
        steps: Some(6.0),
        decode_tokens: Some(6.0),
        decode_seconds: Some(0.039_592),
        ..idle
    };
    assert_eq!(read("sglang/v1_loads.json", 0), plain);
    let prefill = EngineLoad {
        waiting: Some(1.0),
        prefill_tokens: Some(755.0),
        prefill_seconds: Some(0.082_281),
        ..idle
    };
    assert_eq!(read("sglang_pd/loads_prefill.json", 0), prefill);
    let decode = EngineLoad {
        prefill_tokens: Some(0.0),
        prefill_seconds: Some(0.0),
        steps: Some(28.0),
        decode_tokens: Some(28.0),
        decode_seconds: Some(0.205_975),
        ..idle
    };
    assert_eq!(read("sglang_pd/loads_decode.json", 0), decode);
    assert_eq!(read("sglang_pd/loads_decode.json", 1), EngineLoad::default());
}

#[test]
fn models_version_and_event_sources_are_read() {
    let body = |name: &str| response(&json(&format!("vllm_http/{name}.json"))).1;
    let tiny = ServedModel { id: "tiny".into(), parent: None, max_model_len: Some(1024) };
    assert_eq!(discovery::models(body("models").as_bytes()), Ok(vec![tiny]));
    assert_eq!(discovery::version(body("version").as_bytes()), Ok(Version(0, 32, 0)));
    assert_eq!(discovery::event_sources(body("kv_event_sources").as_bytes()), Ok(vec![]));
}
