//! What an engine's figures mean to the brain. Sums that only mean something together are handed on
//! together, or not at all.

use std::num::NonZeroU32;

use pointsman_brain::{DecodeTotals, PrefillTotals, Reading, Share};
use pointsman_wire::load::EngineLoad;

/// A reading of vLLM's `/metrics`.
pub(crate) fn of_vllm(load: &EngineLoad) -> Reading {
    let used_blocks = load.kv_usage.zip(load.num_gpu_blocks).map(|(u, blocks)| u * blocks as f64);
    let context = used_blocks.zip(load.block_size).map(|(blocks, size)| blocks * f64::from(size));
    let prompts = load.prompt_local_compute;
    Reading {
        capacity_blocks: load.num_gpu_blocks,
        context_tokens: context.map(|tokens| tokens as u64),
        prefill: prefill(load, true),
        decode: prompts.and_then(|tokens| decode(load, Some(tokens as u64))),
        ..common(load)
    }
}

/// A reading of SGLang's `/v1/loads`.
pub(crate) fn of_sglang(load: &EngineLoad, block_size: NonZeroU32) -> Reading {
    let capacity = load.capacity_tokens.map(|tokens| tokens as u64 / u64::from(block_size.get()));
    Reading {
        capacity_blocks: capacity,
        context_tokens: load.used_tokens.map(|tokens| tokens as u64),
        prefill: prefill(load, false),
        decode: decode(load, None),
        ..common(load)
    }
}

/// A reading of TensorRT-LLM's `/metrics`.
pub(crate) fn of_trtllm(load: &EngineLoad) -> Reading {
    Reading { capacity_blocks: load.num_gpu_blocks, ..common(load) }
}

fn common(load: &EngineLoad) -> Reading {
    let whole = |value: Option<f64>| value.map(|value| value as u32);
    Reading {
        kv_usage: load.kv_usage.and_then(Share::clamped),
        running: whole(load.running),
        waiting: whole(load.waiting),
        waiting_prefill_tokens: load.waiting_prefill_tokens.map(|tokens| tokens as u64),
        ..Reading::default()
    }
}

fn prefill(load: &EngineLoad, per_prompt: bool) -> Option<PrefillTotals> {
    let (tokens, seconds) = load.prefill_tokens.zip(load.prefill_seconds)?;
    Some(PrefillTotals { tokens: tokens as u64, seconds, per_prompt })
}

fn decode(load: &EngineLoad, prompt_tokens: Option<u64>) -> Option<DecodeTotals> {
    let (steps, tokens) = load.steps.zip(load.decode_tokens)?;
    let seconds = load.decode_seconds?;
    Some(DecodeTotals { steps: steps as u64, tokens: tokens as u64, seconds, prompt_tokens })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_that_belong_together_are_handed_on_together() {
        let vllm = EngineLoad {
            kv_usage: Some(0.5),
            num_gpu_blocks: Some(100),
            block_size: Some(16),
            prompt_local_compute: Some(7.0),
            prefill_tokens: Some(7.0),
            prefill_seconds: Some(0.25),
            steps: Some(4.0),
            decode_tokens: Some(9.0),
            decode_seconds: Some(1.5),
            ..EngineLoad::default()
        };
        let all = Reading {
            kv_usage: Share::new(0.5),
            capacity_blocks: Some(100),
            context_tokens: Some(800),
            prefill: Some(PrefillTotals { tokens: 7, seconds: 0.25, per_prompt: true }),
            decode: Some(DecodeTotals {
                steps: 4,
                tokens: 9,
                seconds: 1.5,
                prompt_tokens: Some(7),
            }),
            ..Reading::default()
        };
        assert_eq!(of_vllm(&vllm), all);
        let parts = EngineLoad { steps: None, prefill_seconds: None, block_size: None, ..vllm };
        let nothing = Reading { context_tokens: None, prefill: None, decode: None, ..all };
        assert_eq!(of_vllm(&parts), nothing);
        // Else it would not be known whether prompts were computed beside.
        let silent = EngineLoad { prompt_local_compute: None, ..vllm };
        assert_eq!(of_vllm(&silent), Reading { decode: None, ..all });

        let sglang = EngineLoad {
            capacity_tokens: Some(20_000.0),
            used_tokens: Some(300.0),
            waiting_prefill_tokens: Some(40.0),
            ..EngineLoad::default()
        };
        let told = of_sglang(&sglang, NonZeroU32::MIN.saturating_add(15));
        assert_eq!((told.capacity_blocks, told.context_tokens), (Some(1250), Some(300)));
        assert_eq!((told.waiting_prefill_tokens, told.decode), (Some(40), None));
    }
}
