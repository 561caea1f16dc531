//! One message of KV events becomes changes of the index.
//!
//! Invariant: a malformed event is counted and skipped; it changes nothing and stops nothing here. One
//! that cannot be read is told apart, because what it said is lost.

use pointsman_kv::{
    BlockExtra, EngineHash, EventKey, EventScope, Groups, GroupsVerdict, Hasher, Slot, Store, Tier,
    Writer,
};
use pointsman_wire::kv_events::{
    Batch, BlockKeys, BlockName, BlockRemoved, BlockStored, Event, EventError, ExtraKey,
};

/// What one message did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Outcome {
    /// Events that stored blocks.
    pub(crate) stored: u64,
    /// Events that removed blocks.
    pub(crate) removed: u64,
    /// Events that cleared everything.
    pub(crate) cleared: u64,
    /// Events that stored blocks of which some have no known place, or are more than the index takes.
    pub(crate) unplaced: u64,
    /// Events of kinds or KV-cache groups that are not indexed.
    pub(crate) skipped: u64,
    /// Events that make no sense.
    pub(crate) malformed: u64,
    /// Of these, those of which nothing is known, so that they may have said of blocks that they went.
    pub(crate) unreadable: u64,
}

/// Applies the messages of one publisher.
#[derive(Debug)]
pub(crate) struct Applier {
    slot: Slot,
    hasher: Hasher,
    groups: Groups,
    names: Vec<EngineHash>,
    tokens: Vec<u32>,
    extras: Vec<BlockExtra>,
}

impl Applier {
    pub(crate) fn new(slot: Slot, hasher: Hasher) -> Applier {
        let groups = Groups::default();
        Applier { slot, hasher, groups, names: vec![], tokens: vec![], extras: vec![] }
    }

    /// Applies one payload.
    pub(crate) fn apply(
        &mut self,
        payload: &[u8],
        writer: &mut Writer,
    ) -> Result<Outcome, EventError> {
        let batch = Batch::decode(payload)?;
        let mut outcome = Outcome::default();
        for event in batch.events() {
            match event {
                Ok(Event::Stored(event)) => self.stored(&event, writer, &mut outcome),
                Ok(Event::Removed(event)) => self.removed(&event, writer, &mut outcome),
                Ok(Event::Cleared) => {
                    writer.clear(self.slot);
                    outcome.cleared += 1;
                }
                Ok(Event::Unknown(_)) => outcome.skipped += 1,
                Err(_) => {
                    outcome.malformed += 1;
                    outcome.unreadable += 1;
                }
            }
        }
        Ok(outcome)
    }

    fn stored(&mut self, event: &BlockStored<'_>, writer: &mut Writer, outcome: &mut Outcome) {
        match self.groups.stored(event.group_idx, event.spec_kind) {
            GroupsVerdict::Index => {}
            GroupsVerdict::ClearAndIndex => writer.clear(self.slot),
            GroupsVerdict::Skip => {
                outcome.skipped += 1;
                return;
            }
        }
        let scope = EventScope {
            block_size: event.block_size,
            lora_name: event.lora_name,
            lora_id: event.lora_id.map(i64::from),
            has_parent: event.parent.is_some(),
        };
        let first: Vec<EventKey<'_>> =
            event.extra_keys.into_iter().next().map(keys).unwrap_or_default();
        self.names.clear();
        self.names.extend(event.hashes.map(name));
        self.tokens.clear();
        self.tokens.extend(event.tokens);
        self.extras.clear();
        for (i, block) in event.extra_keys.enumerate() {
            self.extras.push(scope.extra(&self.hasher, i == 0, &keys(block)));
        }
        if self.extras.iter().all(|extra| *extra == BlockExtra::NONE) {
            self.extras.clear();
        }
        let stored = writer.store(&Store {
            slot: self.slot,
            tier: Tier::of_medium(event.medium),
            space: scope.space(&self.hasher, &first),
            parent: event.parent.map(name),
            blocks: &self.names,
            tokens: &self.tokens,
            extra: &self.extras,
        });
        let kind = if stored.malformed > 0 {
            &mut outcome.malformed
        } else if stored.orphaned > 0 || stored.refused > 0 {
            &mut outcome.unplaced
        } else {
            &mut outcome.stored
        };
        *kind += 1;
    }

    fn removed(&mut self, event: &BlockRemoved<'_>, writer: &mut Writer, outcome: &mut Outcome) {
        if self.groups.removed(event.group_idx) == GroupsVerdict::Skip {
            outcome.skipped += 1;
            return;
        }
        self.names.clear();
        self.names.extend(event.hashes.map(name));
        writer.remove(self.slot, Tier::of_medium(event.medium), &self.names);
        outcome.removed += 1;
    }
}

fn name(name: BlockName<'_>) -> EngineHash {
    EngineHash(name.id())
}

fn keys(block: BlockKeys<'_>) -> Vec<EventKey<'_>> {
    block
        .map(|key| match key {
            ExtraKey::Text(text) => EventKey::Text(text),
            ExtraKey::Bytes(bytes) => EventKey::Bytes(bytes),
            ExtraKey::Multimodal { id, offset } => EventKey::Multimodal { id, offset },
        })
        .collect()
}
