//! Captured metrics and discovery answers are read as they were meant.
#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use common::{json, response, text};
use pointsman_wire::discovery::{self, ServedModel, Version};
use pointsman_wire::load::{EngineLoad, read_vllm};

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
        ..idle
    };
    assert_eq!(read_vllm(&text("metrics/vllm_metrics_decode.txt"), 0), decode);
    let prefill = EngineLoad {
        num_gpu_blocks: Some(1024),
        prompt_local_compute: Some(1050.0),
        prompt_local_cache_hit: Some(992.0),
        prompt_external: Some(0.0),
        ..idle
    };
    assert_eq!(read_vllm(&text("metrics/vllm_metrics_prefill.txt"), 0), prefill);
    let plain = EngineLoad {
        num_gpu_blocks: Some(96),
        prompt_local_compute: Some(1507.0),
        prompt_local_cache_hit: Some(192.0),
        prompt_external: Some(0.0),
        ..idle
    };
    assert_eq!(read_vllm(&text("metrics/vllm_metrics.txt"), 0), plain);
    assert_eq!(read_vllm(&text("metrics/vllm_metrics.txt"), 1), EngineLoad::default());
}

#[test]
fn models_version_and_event_sources_are_read() {
    let body = |name: &str| response(&json(&format!("vllm_http/{name}.json"))).1;
    let tiny = ServedModel { id: "tiny".into(), parent: None, max_model_len: Some(1024) };
    assert_eq!(discovery::models(body("models").as_bytes()), Ok(vec![tiny]));
    assert_eq!(discovery::version(body("version").as_bytes()), Ok(Version(0, 32, 0)));
    assert_eq!(discovery::event_sources(body("kv_event_sources").as_bytes()), Ok(vec![]));
}
