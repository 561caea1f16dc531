//! How an engine's event names the same space and extras that a request's chain is computed with.
//!
//! The rule: LoRA adapter and cache salt choose the space, everything else in `extra_keys` is the
//! block's extra. An event after a parent is chained to that parent, so its space (which lacks the
//! salt: engines name it in the first block only) gives nothing but the block size.
//! No decoding here; the wire crate turns bytes into these types.

use crate::hash::{BlockExtra, Hasher, Space, SpaceKey};
use std::fmt::Write as _;

/// One entry of a block's `extra_keys`, as the engine spelled it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventKey<'a> {
    /// A bare string: LoRA name, cache salt, or (vLLM up to 0.18) a multimodal identifier.
    Text(&'a str),
    /// A byte string: the digest of prompt embeddings.
    Bytes(&'a [u8]),
    /// `[identifier, offset]` of a multimodal item.
    Multimodal {
        /// The item's identifier.
        id: &'a str,
        /// Its first token, counted from the block's start.
        offset: i64,
    },
}

/// What a `BlockStored` event says about the space of its blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EventScope<'a> {
    /// The event's `block_size`.
    pub block_size: u32,
    /// The event's `lora_name` (vLLM from 0.14).
    pub lora_name: Option<&'a str>,
    /// The event's `lora_id`, used only without a name.
    pub lora_id: Option<i64>,
    /// Whether the event names a parent block.
    pub has_parent: bool,
}

impl EventScope<'_> {
    /// The space of the event's blocks, given the `extra_keys` of its first block.
    ///
    /// The salt is the last bare string of a sequence's first block that is not the LoRA name
    /// (vLLM's order is LoRA, multimodal, salt, embeddings). Blocks of an adapter that is known
    /// by number alone get a space of their own, which no request asks for: nothing is counted
    /// that might be another adapter's.
    #[must_use]
    pub fn space(&self, hasher: &Hasher, first: &[EventKey<'_>]) -> Space {
        let salt = self.salt_at(true, first).and_then(|i| match first.get(i) {
            Some(EventKey::Text(text)) => Some(*text),
            _ => None,
        });
        let mut numbered = String::new();
        let lora = match (self.lora_name, self.lora_id) {
            (Some(name), _) if !name.is_empty() => Some(name),
            (_, Some(id)) => {
                // NUL cannot be in a name that came over HTTP, so no request forges this.
                let _infallible = write!(numbered, "\0lora_id {id}");
                Some(numbered.as_str())
            }
            _ => None,
        };
        hasher.space(&SpaceKey { block_size: self.block_size, lora, salt })
    }

    /// The extra of one block; `first` says whether it is the event's first.
    #[must_use]
    pub fn extra(&self, hasher: &Hasher, first: bool, keys: &[EventKey<'_>]) -> BlockExtra {
        let (lora, salt) = (self.lora_at(keys), self.salt_at(first, keys));
        let mut extra = hasher.extra();
        for (i, key) in keys.iter().enumerate() {
            if Some(i) == lora || Some(i) == salt {
                continue;
            }
            extra = match *key {
                EventKey::Text(text) => extra.text(text),
                EventKey::Bytes(bytes) => extra.digest(bytes),
                EventKey::Multimodal { id, offset } => extra.multimodal(id, offset),
            };
        }
        extra.build()
    }

    /// Where `keys` names the LoRA adapter that the event names too.
    fn lora_at(&self, keys: &[EventKey<'_>]) -> Option<usize> {
        let name = self.lora_name.filter(|name| !name.is_empty())?;
        keys.iter().position(|key| *key == EventKey::Text(name))
    }

    /// Where `keys` holds the cache salt.
    fn salt_at(&self, first: bool, keys: &[EventKey<'_>]) -> Option<usize> {
        if !first || self.has_parent {
            return None;
        }
        let lora = self.lora_at(keys);
        keys.iter()
            .enumerate()
            .rev()
            .find(|(i, key)| matches!(key, EventKey::Text(_)) && Some(*i) != lora)
            .map(|(i, _)| i)
    }
}

/// What to do with an event of one KV-cache group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GroupsVerdict {
    /// Apply it.
    Index,
    /// Not the group that is indexed: count and drop it.
    Skip,
    /// The group to index turned up after another stood in for it: clear the slot, then apply.
    ClearAndIndex,
}

/// Which KV-cache group of a hybrid-attention model is indexed: one per publisher.
///
/// Groups announce the same block hashes with other `group_idx`; a prefix is reusable as far as
/// the full-attention group holds it, and evictions in sliding-window groups must not cut it.
/// The first full-attention group seen is the indexed one; until there is one, the first group
/// of any kind stands in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Groups {
    /// The indexed group, once there is one.
    pub indexed: Option<IndexedGroup>,
}

/// The group that is indexed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IndexedGroup {
    /// Its number.
    pub group: u32,
    /// It holds only a part of each prefix, and gives way to one of full attention.
    pub stand_in: bool,
}

impl Groups {
    /// Kinds (`kv_cache_spec_kind`) whose groups hold only a part of a prefix.
    const PARTIAL: [&str; 5] = ["sliding", "chunked", "mamba", "cross", "encoder"];

    /// A `BlockStored` event of this group and kind. An event without a group is group 0.
    pub fn stored(&mut self, group: Option<u32>, kind: Option<&str>) -> GroupsVerdict {
        let group = group.unwrap_or(0);
        let stand_in = kind.is_some_and(|k| Self::PARTIAL.iter().any(|p| k.starts_with(p)));
        match self.indexed {
            Some(held) if held.group == group => GroupsVerdict::Index,
            Some(held) if held.stand_in && !stand_in => {
                self.indexed = Some(IndexedGroup { group, stand_in });
                GroupsVerdict::ClearAndIndex
            }
            Some(_) => GroupsVerdict::Skip,
            None => {
                self.indexed = Some(IndexedGroup { group, stand_in });
                GroupsVerdict::Index
            }
        }
    }

    /// A `BlockRemoved` event of this group.
    #[must_use]
    pub fn removed(&self, group: Option<u32>) -> GroupsVerdict {
        match self.indexed {
            Some(held) if held.group != group.unwrap_or(0) => GroupsVerdict::Skip,
            _ => GroupsVerdict::Index,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scope(lora_name: Option<&str>, has_parent: bool) -> EventScope<'_> {
        EventScope { block_size: 16, lora_name, lora_id: None, has_parent }
    }

    #[test]
    fn a_salted_request_and_a_salted_event_meet_in_one_space() {
        let h = Hasher::new(1);
        let keys = [EventKey::Text("tenant-a")];
        let event = scope(None, false);
        let plain = SpaceKey::plain(16);
        assert_eq!(event.space(&h, &keys), h.space(&plain.with_salt(Some("tenant-a"))));
        assert_ne!(event.space(&h, &keys), h.space(&plain));
        assert_eq!(event.extra(&h, true, &keys), BlockExtra::NONE);
    }

    #[test]
    fn the_lora_name_in_extra_keys_is_not_taken_for_a_salt() {
        let h = Hasher::new(1);
        let event = scope(Some("sql"), false);
        let keys = [EventKey::Text("sql")];
        let lora = SpaceKey::plain(16).with_lora(Some("sql"));
        assert_eq!(event.space(&h, &keys), h.space(&lora));
        assert_eq!(event.extra(&h, true, &keys), BlockExtra::NONE);
        let keys = [EventKey::Text("sql"), EventKey::Text("sql")];
        assert_eq!(event.space(&h, &keys), h.space(&lora.with_salt(Some("sql"))));
        assert_eq!(event.extra(&h, true, &keys), BlockExtra::NONE);
    }

    #[test]
    fn lora_image_and_salt_of_one_block_each_find_their_place() {
        let h = Hasher::new(1);
        let image = EventKey::Multimodal { id: "img", offset: 3 };
        let keys = [EventKey::Text("sql"), image, EventKey::Text("salt"), EventKey::Bytes(b"e")];
        let event = scope(Some("sql"), false);
        let key = SpaceKey::plain(16).with_lora(Some("sql")).with_salt(Some("salt"));
        assert_eq!(event.space(&h, &keys), h.space(&key));
        let extra = h.extra().multimodal("img", 3).digest(b"e").build();
        assert_eq!(event.extra(&h, true, &keys), extra);
    }

    #[test]
    fn a_string_after_a_parent_is_an_extra_and_no_salt() {
        let h = Hasher::new(1);
        let keys = [EventKey::Text("old-style image hash")];
        let event = scope(None, true);
        assert_eq!(event.space(&h, &keys), h.space(&SpaceKey::plain(16)));
        let extra = h.extra().text("old-style image hash").build();
        assert_eq!(event.extra(&h, true, &keys), extra);
        assert_eq!(scope(None, false).extra(&h, false, &keys), extra);
    }

    #[test]
    fn an_adapter_known_by_number_alone_shares_with_nobody() {
        let h = Hasher::new(1);
        let event = EventScope { lora_id: Some(3), ..scope(None, false) };
        assert_ne!(event.space(&h, &[]), h.space(&SpaceKey::plain(16)));
        assert_ne!(event.space(&h, &[]), h.space(&SpaceKey::plain(16).with_lora(Some("3"))));
        let named = EventScope { lora_name: Some("sql"), ..event };
        assert_eq!(named.space(&h, &[]), scope(Some("sql"), false).space(&h, &[]));
    }

    #[test]
    fn only_the_full_attention_group_is_indexed() {
        let mut groups = Groups::default();
        assert_eq!(groups.removed(Some(1)), GroupsVerdict::Index);
        assert_eq!(groups.stored(Some(1), Some("sliding_window")), GroupsVerdict::Index);
        assert_eq!(groups.stored(Some(2), Some("mamba")), GroupsVerdict::Skip);
        assert_eq!(groups.stored(Some(0), Some("full_attention")), GroupsVerdict::ClearAndIndex);
        assert_eq!(groups.stored(Some(3), Some("full_attention")), GroupsVerdict::Skip);
        assert_eq!(groups.stored(Some(0), Some("full_attention")), GroupsVerdict::Index);
        assert_eq!(groups.removed(Some(1)), GroupsVerdict::Skip);
        assert_eq!(groups.removed(Some(0)), GroupsVerdict::Index);
        assert_eq!(groups.removed(None), GroupsVerdict::Index);
    }
}
