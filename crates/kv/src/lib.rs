//! What the router knows of every worker's KV cache.
//!
//! Block hashing ([`Hasher`]), the prefix index ([`index`]) and the event-stream cursor
//! ([`Cursor`]). No async, IO, clock, env or logging: time and randomness come in as arguments.
//! Decoding of engine messages is not here (the wire crate), nor are sockets.
//!
//! ```
//! use pointsman_kv::{EngineHash, Hasher, Overlap, Slot, SpaceKey, Store, Tier, index};
//!
//! let space = Hasher::new(42).space(&SpaceKey::plain(4));
//! let (mut writer, reader) = index();
//! let prompt: Vec<u32> = (0..10).collect();
//! writer.store(&Store {
//!     slot: Slot(0),
//!     tier: Tier::Device,
//!     space,
//!     parent: None,
//!     blocks: &[EngineHash(7)],
//!     tokens: &prompt[..4],
//!     extra: &[],
//! });
//! let (mut chain, mut overlap) = (Vec::new(), Overlap::new());
//! space.chain(&prompt, &mut chain);
//! reader.overlap(&chain, &mut overlap);
//! assert_eq!(overlap.get(Slot(0)).device, 1);
//! ```

mod cursor;
mod event;
mod fast;
mod hash;
mod index;
#[cfg(test)]
mod model;
mod names;
mod placed;
#[cfg(test)]
mod reference;

pub use cursor::{
    Action, ClearCause, Cursor, CursorLimits, CursorStats, Position, Stamp, Standing,
};
pub use event::{EventKey, EventScope, Groups, GroupsVerdict, IndexedGroup};
pub use hash::{BlockExtra, ExtraBuilder, Hasher, Space, SpaceKey};
pub use index::{
    Applied, Approximate, Depth, Event, IndexSettings, Overlap, Reader, Removed, Restored,
    SlotStats, SnapshotError, Stats, Store, Stored, Writer, index, index_with,
};
pub use names::{BlockHash, EngineHash, Slot, Tier};
