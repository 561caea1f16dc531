//! The JSON of replies, member for member and in the order of vLLM 0.32.

use std::collections::BTreeMap;

use serde::Serialize;
use serde_json::Value;

/// Always `null` here.
pub(super) type Absent = Option<()>;

#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct PromptDetails {
    pub(super) cached_tokens: u32,
    pub(super) created_cache_tokens: Option<u32>,
    pub(super) multimodal_tokens: Absent,
}

#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct Usage {
    pub(super) prompt_tokens: u32,
    pub(super) total_tokens: u32,
    pub(super) completion_tokens: u32,
    pub(super) prompt_tokens_details: Option<PromptDetails>,
    pub(super) completion_tokens_details: Absent,
}

/// Usage in a stream's last event leaves out what is null.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct FinalUsage {
    pub(super) prompt_tokens: u32,
    pub(super) total_tokens: u32,
    pub(super) completion_tokens: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) prompt_tokens_details: Option<FinalPromptDetails>,
}

#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct FinalPromptDetails {
    pub(super) cached_tokens: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) created_cache_tokens: Option<u32>,
}

/// Usage so far, in each event of a stream; chats have one member more.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct RunningUsage {
    pub(super) prompt_tokens: u32,
    pub(super) total_tokens: u32,
    pub(super) completion_tokens: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) completion_tokens_details: Option<Absent>,
}

#[derive(Serialize)]
pub(super) struct Reply<'a, C> {
    pub(super) id: &'a str,
    pub(super) object: &'a str,
    pub(super) created: u64,
    pub(super) model: &'a str,
    pub(super) choices: Vec<C>,
    pub(super) service_tier: Absent,
    pub(super) system_fingerprint: Option<&'a str>,
    pub(super) usage: Usage,
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    pub(super) prompt: Option<ChatPrompt>,
    pub(super) kv_transfer_params: Option<HandOff>,
    pub(super) ec_transfer_params: Absent,
    pub(super) metrics: Absent,
}

/// Per prompt token an object from its id to its log probability, null for the first.
pub(super) type PromptLogprobs = Vec<Option<BTreeMap<u32, PromptLogprob>>>;

#[derive(Serialize)]
pub(super) struct PromptLogprob {
    pub(super) logprob: f64,
    pub(super) rank: usize,
    pub(super) decoded_token: String,
}

/// What a chat reply says of its prompt; a completion says it in each choice.
#[derive(Serialize)]
pub(super) struct ChatPrompt {
    pub(super) prompt_logprobs: Option<PromptLogprobs>,
    pub(super) prompt_token_ids: Option<Vec<u32>>,
    pub(super) prompt_text: Absent,
}

#[derive(Serialize)]
pub(super) struct CompletionChoice {
    pub(super) index: u32,
    pub(super) text: String,
    pub(super) logprobs: Option<CompletionLogprobs>,
    pub(super) finish_reason: &'static str,
    pub(super) stop_reason: Option<Value>,
    pub(super) token_ids: Option<Vec<u32>>,
    pub(super) prompt_logprobs: Option<PromptLogprobs>,
    pub(super) prompt_token_ids: Option<Vec<u32>>,
    pub(super) routed_experts: Absent,
}

#[derive(Serialize)]
pub(super) struct ChatChoice {
    pub(super) index: u32,
    pub(super) message: Message,
    pub(super) logprobs: Option<ChatLogprobs>,
    pub(super) finish_reason: &'static str,
    pub(super) stop_reason: Option<Value>,
    pub(super) token_ids: Option<Vec<u32>>,
    pub(super) routed_experts: Absent,
}

#[derive(Serialize)]
pub(super) struct Message {
    pub(super) role: &'static str,
    pub(super) content: Option<String>,
    pub(super) refusal: Absent,
    pub(super) annotations: Absent,
    pub(super) audio: Absent,
    pub(super) function_call: Absent,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) tool_calls: Vec<ToolCall>,
    pub(super) reasoning: Absent,
}

#[derive(Serialize)]
pub(super) struct ToolCall {
    pub(super) id: String,
    #[serde(rename = "type")]
    pub(super) kind: &'static str,
    pub(super) function: FunctionCall,
}

#[derive(Serialize)]
pub(super) struct FunctionCall {
    pub(super) name: String,
    pub(super) arguments: String,
}

#[derive(Default, Serialize)]
pub(super) struct CompletionLogprobs {
    pub(super) text_offset: Vec<usize>,
    pub(super) token_logprobs: Vec<Option<f64>>,
    pub(super) tokens: Vec<String>,
    pub(super) top_logprobs: Vec<Option<serde_json::Map<String, Value>>>,
}

#[derive(Serialize)]
pub(super) struct ChatLogprobs {
    pub(super) content: Vec<TokenLogprob>,
}

#[derive(Serialize)]
pub(super) struct TokenLogprob {
    pub(super) token: String,
    pub(super) logprob: f64,
    pub(super) bytes: Vec<u8>,
    pub(super) top_logprobs: Vec<TopLogprob>,
}

#[derive(Serialize)]
pub(super) struct TopLogprob {
    pub(super) token: String,
    pub(super) logprob: f64,
    pub(super) bytes: Vec<u8>,
}

/// `kv_transfer_params` of a prefill leg's reply.
#[derive(Clone, Debug, Serialize)]
pub(super) struct HandOff {
    pub(super) do_remote_prefill: bool,
    pub(super) do_remote_decode: bool,
    pub(super) remote_block_ids: Vec<Vec<u32>>,
    pub(super) remote_engine_id: String,
    pub(super) remote_request_id: String,
    pub(super) remote_host: String,
    pub(super) remote_port: u16,
    pub(super) tp_size: u32,
    pub(super) dcp_size: u32,
    pub(super) pp_size: u32,
    pub(super) remote_num_tokens: u32,
    pub(super) remote_blocks_expiry_time: Absent,
    pub(super) transfer_mode: &'static str,
    pub(super) remote_prefill_cached_tokens: u32,
}

#[derive(Serialize)]
pub(super) struct Chunk<'a, C> {
    pub(super) id: &'a str,
    pub(super) object: &'a str,
    pub(super) created: u64,
    pub(super) model: &'a str,
    pub(super) choices: &'a [C],
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) usage: Option<AnyUsage>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) system_fingerprint: Option<&'a str>,
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    pub(super) prompt: Option<ChunkPrompt<'a>>,
}

#[derive(Clone, Copy, Serialize)]
#[serde(untagged)]
pub(super) enum AnyUsage {
    Running(RunningUsage),
    Final(FinalUsage),
}

/// Members of a chat stream's first event.
#[derive(Serialize)]
pub(super) struct ChunkPrompt<'a> {
    pub(super) prompt_token_ids: Option<&'a [u32]>,
    pub(super) prompt_text: Absent,
}

#[derive(Serialize)]
pub(super) struct CompletionDelta<'a> {
    pub(super) index: u32,
    pub(super) text: String,
    pub(super) logprobs: Option<CompletionLogprobs>,
    pub(super) finish_reason: Option<&'static str>,
    pub(super) stop_reason: Option<Value>,
    pub(super) prompt_token_ids: Option<&'a [u32]>,
    pub(super) token_ids: Option<[u32; 1]>,
}

#[derive(Serialize)]
pub(super) struct ChatDelta {
    pub(super) index: u32,
    pub(super) delta: Delta,
    pub(super) logprobs: Option<ChatLogprobs>,
    pub(super) finish_reason: Option<&'static str>,
    /// Only in the choice's last event.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) stop_reason: Option<Option<Value>>,
    /// Not in the first event, which has only the role.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) token_ids: Option<Option<[u32; 1]>>,
}

#[derive(Default, Serialize)]
pub(super) struct Delta {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) content: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) tool_calls: Vec<ToolCallDelta>,
}

#[derive(Serialize)]
pub(super) struct ToolCallDelta {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) id: Option<String>,
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    pub(super) kind: Option<&'static str>,
    pub(super) index: u32,
    pub(super) function: FunctionDelta,
}

#[derive(Serialize)]
pub(super) struct FunctionDelta {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) name: Option<String>,
    pub(super) arguments: String,
}
