//! KV events become changes of the index, a window of them at a time.
//!
//! Invariants: a message is read without the writer, into buffers that are used again; what the writer
//! does in one turn is bounded, and a larger event is done in pieces. A malformed event is counted and
//! changes nothing; one that cannot be read is told apart, because what it said is lost.

use std::ops::Range;

use pointsman_kv::{
    Applied, BlockExtra, EngineHash, Event as Change, EventKey, EventScope, Groups, GroupsVerdict,
    Hasher, Slot, Space, Store, Tier, Writer,
};
use pointsman_wire::kv_events::{
    Batch, BlockKeys, BlockName, BlockRemoved, BlockStored, Event, EventError, Events, ExtraKey,
    Names,
};

/// Most changes of one window.
pub(crate) const WINDOW_CHANGES: usize = 64;

/// Most blocks of one window.
const WINDOW_BLOCKS: usize = 4096;

/// Most tokens of one window, unless a single block has more.
const WINDOW_TOKENS: usize = 64 * 1024;

/// Most events that are looked at in one turn, those that change nothing included.
const WINDOW_EVENTS: usize = 4096;

/// What was read of events.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Read {
    /// Events that stored blocks.
    pub(crate) stored: u64,
    /// Events that removed blocks.
    pub(crate) removed: u64,
    /// Events that cleared everything.
    pub(crate) cleared: u64,
    /// Events of kinds or KV-cache groups that are not indexed.
    pub(crate) skipped: u64,
    /// Events that make no sense.
    pub(crate) malformed: u64,
    /// Of these, those of which nothing is known, so that they may have said of blocks that they went.
    pub(crate) unreadable: u64,
}

/// A message that is being read.
pub(crate) struct Message<'p> {
    events: Events<'p>,
    /// The event that did not fit into a window as a whole.
    begun: Option<Begun<'p>>,
    pub(crate) read: Read,
}

impl<'p> Message<'p> {
    /// A message as it came; fails where there are no events to be found.
    pub(crate) fn new(payload: &'p [u8]) -> Result<Message<'p>, EventError> {
        let events = Batch::events_of(payload)?;
        Ok(Message { events, begun: None, read: Read::default() })
    }

    /// Events that it is made of.
    pub(crate) fn len(&self) -> usize {
        self.events.left()
    }
}

/// An event of which a part has been read.
#[derive(Clone, Copy)]
#[allow(clippy::large_enum_variant, reason = "there is one of them, and it is no heap's business")]
enum Begun<'p> {
    Stored(Storing<'p>),
    Removed(Names<'p>, Tier),
}

/// A store whose blocks from here on are to be read.
#[derive(Clone, Copy)]
struct Storing<'p> {
    event: BlockStored<'p>,
    scope: EventScope<'p>,
    space: Space,
    tier: Tier,
    parent: Option<EngineHash>,
    first: bool,
}

/// One change of a window; what it is made of lies in the window's buffers.
#[derive(Debug)]
enum Entry {
    Store {
        tier: Tier,
        space: Space,
        parent: Option<EngineHash>,
        names: Range<usize>,
        tokens: Range<usize>,
        extras: Range<usize>,
    },
    Remove {
        tier: Tier,
        names: Range<usize>,
    },
    Clear,
}

/// Changes of one worker rank that are read and not applied.
#[derive(Debug)]
pub(crate) struct Window {
    slot: Slot,
    hasher: Hasher,
    groups: Groups,
    entries: Vec<Entry>,
    names: Vec<EngineHash>,
    tokens: Vec<u32>,
    extras: Vec<BlockExtra>,
}

impl Window {
    /// An empty window; `groups` says which KV-cache group is indexed, if that is known.
    pub(crate) fn new(slot: Slot, hasher: Hasher, groups: Groups) -> Window {
        let (entries, names, tokens, extras) = Default::default();
        Window { slot, hasher, groups, entries, names, tokens, extras }
    }

    pub(crate) fn groups(&self) -> Groups {
        self.groups
    }

    /// Nothing that was seen before counts.
    pub(crate) fn reset(&mut self) {
        self.empty();
        self.groups = Groups::default();
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Whether there is no room for so many changes more.
    pub(crate) fn is_short_of(&self, changes: usize) -> bool {
        self.entries.len() + changes > WINDOW_CHANGES
            || self.names.len() >= WINDOW_BLOCKS
            || self.tokens.len() >= WINDOW_TOKENS
    }

    /// Reads on in a message until the window is full, or for as long as one turn may take; whether
    /// the message is at its end.
    pub(crate) fn fill<'p>(&mut self, message: &mut Message<'p>) -> bool {
        // Of an event that turns up in place of others there may be two changes.
        for _ in 0..WINDOW_EVENTS {
            if self.is_short_of(2) {
                break;
            }
            if let Some(begun) = message.begun {
                message.begun = self.go_on(begun);
                continue;
            }
            let Some(event) = message.events.next() else { return true };
            let read = &mut message.read;
            match event {
                Ok(Event::Stored(event)) => message.begun = self.stored(&event, read),
                Ok(Event::Removed(event)) => message.begun = self.removed(&event, read),
                Ok(Event::Cleared) => {
                    self.entries.push(Entry::Clear);
                    read.cleared += 1;
                }
                Ok(Event::Unknown(_)) => read.skipped += 1,
                Err(_) => {
                    read.malformed += 1;
                    read.unreadable += 1;
                }
            }
        }
        false
    }

    /// Applies what was read, as one change to whoever asks the index; the window is empty then.
    pub(crate) fn apply(&mut self, writer: &mut Writer) -> Applied {
        let slot = self.slot;
        let mut changes = [Change::Clear { slot }; WINDOW_CHANGES];
        for (change, entry) in changes.iter_mut().zip(&self.entries) {
            *change = match entry {
                Entry::Store { tier, space, parent, names, tokens, extras } => {
                    Change::Store(Store {
                        slot,
                        tier: *tier,
                        space: *space,
                        parent: *parent,
                        blocks: &self.names[names.clone()],
                        tokens: &self.tokens[tokens.clone()],
                        extra: &self.extras[extras.clone()],
                    })
                }
                Entry::Remove { tier, names } => {
                    Change::Remove { slot, tier: *tier, blocks: &self.names[names.clone()] }
                }
                Entry::Clear => Change::Clear { slot },
            };
        }
        let applied = writer.apply(&changes[..self.entries.len()]);
        self.empty();
        applied
    }

    fn empty(&mut self) {
        self.entries.clear();
        self.names.clear();
        self.extras.clear();
        self.tokens.clear();
        // One block of absurd size must not be paid for as long as its worker lives.
        self.tokens.shrink_to(2 * WINDOW_TOKENS);
    }

    fn stored<'p>(&mut self, event: &BlockStored<'p>, read: &mut Read) -> Option<Begun<'p>> {
        let (blocks, tokens, extras) =
            (event.hashes.len(), event.tokens.len(), event.extra_keys.len());
        let whole = blocks.checked_mul(event.block_size as usize) == Some(tokens);
        if !(whole || tokens == 0) || !(extras == 0 || extras == blocks) {
            read.malformed += 1;
            return None;
        }
        match self.groups.stored(event.group_idx, event.spec_kind) {
            GroupsVerdict::Index => {}
            GroupsVerdict::ClearAndIndex => self.entries.push(Entry::Clear),
            GroupsVerdict::Skip => {
                read.skipped += 1;
                return None;
            }
        }
        read.stored += 1;
        let scope = EventScope {
            block_size: event.block_size,
            lora_name: event.lora_name,
            lora_id: event.lora_id.map(i64::from),
            has_parent: event.parent.is_some(),
        };
        let mut first = Vec::new();
        collect(event.extra_keys.into_iter().next().unwrap_or_default(), &mut first);
        self.go_on(Begun::Stored(Storing {
            event: *event,
            scope,
            space: scope.space(&self.hasher, &first),
            tier: Tier::of_medium(event.medium),
            parent: event.parent.map(name),
            first: true,
        }))
    }

    fn removed<'p>(&mut self, event: &BlockRemoved<'p>, read: &mut Read) -> Option<Begun<'p>> {
        if self.groups.removed(event.group_idx) == GroupsVerdict::Skip {
            read.skipped += 1;
            return None;
        }
        read.removed += 1;
        self.go_on(Begun::Removed(event.hashes, Tier::of_medium(event.medium)))
    }

    /// Reads as much of an event as there is room for; what is left of it.
    fn go_on<'p>(&mut self, begun: Begun<'p>) -> Option<Begun<'p>> {
        let room = (WINDOW_BLOCKS - self.names.len().min(WINDOW_BLOCKS)).max(1);
        match begun {
            Begun::Removed(mut hashes, tier) => {
                let start = self.names.len();
                self.names.extend(hashes.by_ref().take(room).map(name));
                self.entries.push(Entry::Remove { tier, names: start..self.names.len() });
                (hashes.len() > 0).then_some(Begun::Removed(hashes, tier))
            }
            Begun::Stored(storing) => self.store_piece(storing, room).map(Begun::Stored),
        }
    }

    fn store_piece<'p>(&mut self, piece: Storing<'p>, room: usize) -> Option<Storing<'p>> {
        let Storing { mut event, scope, space, tier, parent, first } = piece;
        let size = if event.tokens.len() == 0 { 0 } else { event.block_size as usize };
        let room = match WINDOW_TOKENS.saturating_sub(self.tokens.len()).checked_div(size) {
            Some(fitting) => room.min(fitting).max(1),
            None => room,
        };
        let (names, tokens, extras) = (self.names.len(), self.tokens.len(), self.extras.len());
        self.names.extend(event.hashes.by_ref().take(room).map(name));
        let blocks = self.names.len() - names;
        self.tokens.extend(event.tokens.by_ref().take(blocks.saturating_mul(size)));
        let mut keys = Vec::new();
        for (at, block) in event.extra_keys.by_ref().take(blocks).enumerate() {
            collect(block, &mut keys);
            self.extras.push(scope.extra(&self.hasher, first && at == 0, &keys));
        }
        if self.extras[extras..].iter().all(|extra| *extra == BlockExtra::NONE) {
            self.extras.truncate(extras);
        }
        self.entries.push(Entry::Store {
            tier,
            space,
            parent,
            names: names..self.names.len(),
            tokens: tokens..self.tokens.len(),
            extras: extras..self.extras.len(),
        });
        // What follows is chained to the last block of this piece.
        let parent = self.names.last().copied();
        let rest = Storing { event, scope, space, tier, parent, first: false };
        (event.hashes.len() > 0).then_some(rest)
    }
}

fn name(name: BlockName<'_>) -> EngineHash {
    EngineHash(name.id())
}

/// Puts the keys of a block in place of what is in `out`.
fn collect<'p>(block: BlockKeys<'p>, out: &mut Vec<EventKey<'p>>) {
    out.clear();
    out.extend(block.map(|key| match key {
        ExtraKey::Text(text) => EventKey::Text(text),
        ExtraKey::Bytes(bytes) => EventKey::Bytes(bytes),
        ExtraKey::Multimodal { id, offset } => EventKey::Multimodal { id, offset },
    }));
}

#[cfg(test)]
mod tests;
