//! SGLang: one body goes to both workers at the same time, with the place where they meet.
//!
//! The decode worker's answer is the client's; the prefill worker's is one token of it and is drained.
//! Neither may be left alone: whoever waits for a partner that is gone does so for minutes.

use std::fmt::Write as _;

use super::{Api, LegContext, LegRequest, Meeting, Request, ids_json, is_filled_list};
use crate::json::{self, Object};
use crate::splice::Edit;

/// What an SGLang worker was found, or told, to be able to do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sglang {
    /// A request that it is to compute as a whole has to say so (`do_local_prefill`): a decode worker
    /// with `--disaggregation-decode-enable-conditional-agg`.
    pub asks_for_local: bool,
}

/// Prompts of a batch that is split; what is added to its legs grows with them.
pub(super) const MOST_PROMPTS: usize = 4096;

/// Rooms are below this: SGLang keeps them as signed 64-bit numbers.
pub const ROOM_BITS: u32 = 63;

impl Meeting<'_> {
    /// A room for each prompt, so that what is left of it by the prefill worker's ranks is its rank:
    /// this is how SGLang finds the rank where none is written.
    fn rooms(&self, rank: Option<u32>, prompts: u64) -> impl Iterator<Item = u64> {
        let ranks = u64::from(self.prefill_ranks.get());
        let last = (1_u64 << ROOM_BITS).saturating_sub(ranks.saturating_mul(prompts));
        let room = (self.number & ((1 << ROOM_BITS) - 1)).min(last);
        let first = match rank {
            Some(rank) if ranks > 1 => room - room % ranks + u64::from(rank) % ranks,
            _ => room,
        };
        (0..prompts).map(move |prompt| first + prompt * ranks)
    }
}

impl Sglang {
    /// Whether it is an answer of this engine: with choices, or of `/generate`, one or one a prompt.
    pub(super) fn hands_over(self, body: &[u8]) -> bool {
        let Ok(text) = json::text(body) else { return false };
        match Object::parse(text) {
            Some(answer) => {
                answer.get("choices").is_some_and(is_filled_list)
                    || answer.get("meta_info").is_some()
            }
            None => is_filled_list(text.trim_start()),
        }
    }

    /// The requests to the prefill and the decode worker.
    pub(super) fn together(
        self,
        request: &Request,
        meeting: &Meeting<'_>,
        prefill: &LegContext<'_>,
        decode: &LegContext<'_>,
    ) -> (LegRequest, LegRequest) {
        let host = crate::json::quote(meeting.host);
        let port = meeting.port.to_string();
        let room = rooms_json(request, meeting, prefill.rank);
        let edit = |leg: &LegContext<'_>| {
            let mut edit = Edit::new();
            edit.set("bootstrap_host", host.clone());
            edit.set("bootstrap_port", port.clone());
            edit.set("bootstrap_room", room.clone());
            with_rank(&mut edit, leg);
            with_ids(&mut edit, request, leg);
            edit
        };
        let mut to_decode = edit(decode);
        if let Some(rank) = prefill.rank {
            to_decode.set("disagg_prefill_dp_rank", rank.to_string());
        }
        (send(&edit(prefill), request, prefill), send(&to_decode, request, decode))
    }

    /// The client's request.
    pub(super) fn local_leg(self, request: &Request, leg: &LegContext<'_>) -> LegRequest {
        let mut edit = Edit::new();
        if self.asks_for_local {
            edit.set("do_local_prefill", "true");
        }
        with_rank(&mut edit, leg);
        with_ids(&mut edit, request, leg);
        send(&edit, request, leg)
    }
}

/// The room of a prompt; of a batch a list of them. Host and port are those of all.
fn rooms_json(request: &Request, meeting: &Meeting<'_>, rank: Option<u32>) -> String {
    let prompts = request.prompts();
    let mut json = String::new();
    for (at, room) in meeting.rooms(rank, prompts as u64).enumerate() {
        let _infallible = write!(json, "{}{room}", if at == 0 { "" } else { "," });
    }
    if prompts > 1 { format!("[{json}]") } else { json }
}

/// Ranks stand in the body.
fn with_rank(edit: &mut Edit<'_>, leg: &LegContext<'_>) {
    if let Some(rank) = leg.rank {
        edit.set("routed_dp_rank", rank.to_string());
    }
}

/// Token ids instead of text, where the endpoint has a place for them.
fn with_ids(edit: &mut Edit<'_>, request: &Request, leg: &LegContext<'_>) {
    let Some(ids) = leg.prompt_ids else { return };
    let body = request.body();
    let is_text = |name| body.raw(name).is_some_and(|raw| raw.starts_with('"'));
    match request.api() {
        // `echo` gives back the text, which ids no longer hold.
        Api::Completions if is_text("prompt") && !body.flag("echo").unwrap_or(false) => {
            edit.set("prompt", ids_json(ids));
        }
        Api::Generate if is_text("text") => {
            edit.remove("text").set("input_ids", ids_json(ids));
        }
        _ => {}
    }
}

fn send(edit: &Edit<'_>, request: &Request, leg: &LegContext<'_>) -> LegRequest {
    let headers = super::headers(&LegContext { rank: None, ..*leg });
    LegRequest { body: edit.apply(request.body()), headers }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn an_answer_has_choices_or_is_that_of_generate() {
        let hands_over = |body: &str| Sglang::default().hands_over(body.as_bytes());
        for body in [
            r#"{"choices":[{"index":0}]}"#,
            r#"{"text":"","meta_info":{}}"#,
            r#"[{"meta_info":{}}]"#,
        ] {
            assert!(hands_over(body), "{body}");
        }
        for body in ["", "hello", "{}", "[]", r#"{"choices":[]}"#, r#"{"choices":1}"#, "[1"] {
            assert!(!hands_over(body), "{body}");
        }
    }

    proptest! {
        #[test]
        fn rooms_are_63_bits_wide_differ_and_lead_to_the_rank(
            number: u64, ranks in 1_u32..300, rank in 0_u32..300, prompts in 1_u64..100,
        ) {
            let rank = rank % ranks;
            for number in [number, u64::MAX] {
                let meeting = Meeting {
                    host: "h", port: 1, number, prefill_ranks: ranks.try_into().unwrap(), engine_id: None,
                };
                let rooms: Vec<u64> = meeting.rooms((ranks > 1).then_some(rank), prompts).collect();
                prop_assert_eq!(rooms.len() as u64, prompts);
                prop_assert!(rooms.is_sorted_by(|a, b| a < b), "{:?}", rooms);
                for room in rooms {
                    prop_assert!(room < 1 << ROOM_BITS);
                    prop_assert!(ranks == 1 || room % u64::from(ranks) == u64::from(rank));
                }
            }
        }
    }
}
