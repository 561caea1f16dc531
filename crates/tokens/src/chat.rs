//! What goes in and what comes out of [`Model::encode_chat`](crate::Model::encode_chat).

use std::sync::Arc;

/// The members of a chat request that shape its prompt, as raw JSON. The strings of JSON need not
/// be validated before.
#[derive(Clone, Copy, Debug)]
pub struct Chat<'a> {
    /// `messages`: a JSON array.
    pub messages: &'a [u8],
    /// `tools`: a JSON array or `null`.
    pub tools: Option<&'a [u8]>,
    /// `documents`: a JSON array or `null`.
    pub documents: Option<&'a [u8]>,
    /// `chat_template_kwargs`: a JSON object or `null`; further variables of the template.
    pub chat_template_kwargs: Option<&'a [u8]>,
    /// `reasoning_effort`: a JSON string or `null`; a variable of the template.
    pub reasoning_effort: Option<&'a [u8]>,
    /// `add_generation_prompt` (default true).
    pub add_generation_prompt: bool,
    /// `continue_final_message` (default false).
    pub continue_final_message: bool,
    /// `add_special_tokens` (default false for chat: the template writes them itself).
    pub add_special_tokens: bool,
    /// Seconds since the Unix epoch in the engines' local time, for templates that write the date.
    pub now: i64,
}

impl<'a> Chat<'a> {
    /// A chat of these messages with the API's defaults, at time `now`.
    pub fn new(messages: &'a [u8], now: i64) -> Chat<'a> {
        Chat {
            messages,
            tools: None,
            documents: None,
            chat_template_kwargs: None,
            reasoning_effort: None,
            add_generation_prompt: true,
            continue_final_message: false,
            add_special_tokens: false,
            now,
        }
    }
}

/// Token ids of a prompt.
#[derive(Clone, Debug)]
pub struct Encoded {
    /// The ids, or with `partial` the ids of the exact prefix before the first part that is no
    /// text.
    pub ids: Arc<[u32]>,
    /// How many leading ids came from the prefix cache.
    pub from_cache: u32,
    /// Set when the prompt has parts that are no text.
    pub partial: Option<Partial>,
}

/// What follows the exact prefix of a prompt with images, audio or the like.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Partial {
    /// Parts that are images.
    pub images: u32,
    /// Parts that are audio.
    pub audio: u32,
    /// Parts that are video.
    pub videos: u32,
    /// Parts of other kinds (files, embeddings, unknown types).
    pub others: u32,
    /// Estimate of the text tokens after the prefix, the parts themselves not counted.
    pub text_tokens: u32,
}
