//! What an SGLang worker's `/server_info` means for the router.

use std::num::NonZeroU32;

use pointsman_config::Role;
use pointsman_wire::discovery::ServerInfo;

use crate::fleet::Learned;

/// Takes over what a server says of itself. `publishes`: whether its KV events are followed, where that
/// is up to what it says.
pub(crate) fn learn(learned: &mut Learned, info: &ServerInfo, role: Role, publishes: Option<bool>) {
    let wanted = match role {
        Role::Prefill => "prefill",
        Role::Decode => "decode",
        Role::Unified => "null",
    };
    let is = info.disaggregation_mode.as_deref();
    learned.other_role = is.filter(|mode| *mode != wanted).map(str::to_owned);
    learned.version = info.version;
    learned.ranks = info.dp_size;
    learned.block_size = info.page_size.and_then(NonZeroU32::new);
    learned.capacity_blocks = info
        .max_total_tokens
        .zip(learned.block_size)
        .map(|(tokens, page)| tokens / u64::from(page.get()));
    learned.max_num_batched_tokens = info.chunked_prefill_size.and_then(NonZeroU32::new);
    learned.local_prefill = info.local_prefill;
    learned.bootstrap_port = info.bootstrap_port;
    // Without a prefix cache all of a prompt is moved, each time.
    learned.skips_cached_blocks = info.keeps_prefixes;
    if let Some(publishes) = publishes {
        learned.publishes_events = publishes;
    }
}
