//! The KV-event stream of one rank: numbers, encodes and keeps batches, hands them to subscribers,
//! and loses, repeats or swaps them when told to. Sockets are in `sockets`.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use pointsman_wire::kv_events::{Announce, BlockName, Encoding, encode};
use tokio::sync::mpsc;

use super::config::{EventEncoding, HashForm, KvEvents};
use super::faults::EventFaults;
use super::polled::Polled;
use crate::content::long_name;
use crate::engine::Event;
use crate::rng::Rng;

/// A published message: topic, sequence number, payload.
pub(super) type Message = [Bytes; 3];

/// The tier that blocks of the model are in.
const MEDIUM: Option<&str> = Some("GPU");

struct Subscriber {
    id: u64,
    topics: Vec<Bytes>,
    queue: mpsc::Sender<Message>,
}

#[derive(Default)]
struct Inner {
    next: u64,
    kept: VecDeque<(u64, Bytes)>,
    subscribers: Vec<Subscriber>,
    next_subscriber: u64,
    faults: EventFaults,
    /// Waits to be sent after the one that follows it.
    swapped: Option<Message>,
    counters: Counters,
}

/// What became of messages.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Counters {
    pub(super) published: u64,
    /// By a fault.
    pub(super) lost: u64,
    /// Because a subscriber was too slow.
    pub(super) dropped: u64,
    pub(super) replays: u64,
}

pub(super) struct Publisher {
    settings: KvEvents,
    block_size: u32,
    topic: Bytes,
    inner: Mutex<Inner>,
    rng: Mutex<Rng>,
    /// Where events are asked for instead.
    polled: Option<Mutex<Polled>>,
}

impl Publisher {
    pub(super) fn new(settings: KvEvents, block_size: u32, seed: u64) -> Publisher {
        Publisher {
            topic: Bytes::from(settings.topic.clone()),
            settings,
            block_size,
            inner: Mutex::default(),
            rng: Mutex::new(Rng::new(seed)),
            polled: None,
        }
    }

    /// One whose events are asked for; they tell their rank if there are several.
    pub(super) fn polled(self, capacity_blocks: u32, rank: Option<u32>) -> Publisher {
        let polled = Polled::new(capacity_blocks, self.settings.buffer_steps, rank);
        Publisher { polled: Some(Mutex::new(polled)), ..self }
    }

    /// The events since this was last asked for; none where they are published.
    pub(super) fn drain(&self) -> Vec<serde_json::Value> {
        self.lock_polled().map(|mut polled| polled.drain()).unwrap_or_default()
    }

    /// Blocks that came from another engine.
    pub(super) fn received(&self, names: &[u64]) {
        if let Some(mut polled) = self.lock_polled() {
            polled.received(names);
        }
    }

    fn lock_polled(&self) -> Option<MutexGuard<'_, Polled>> {
        let polled = self.polled.as_ref()?;
        Some(polled.lock().unwrap_or_else(PoisonError::into_inner))
    }

    pub(super) fn settings(&self) -> &KvEvents {
        &self.settings
    }

    pub(super) fn set_faults(&self, faults: EventFaults) {
        self.lock().faults = faults;
    }

    /// Sequence number of the next batch, peers that have subscribed, and what became of messages.
    pub(super) fn state(&self) -> (u64, usize, Counters) {
        let inner = self.lock();
        let subscribed = inner.subscribers.iter().filter(|one| !one.topics.is_empty()).count();
        (inner.next, subscribed, inner.counters)
    }

    /// Starts the sequence again with nothing kept; subscribers are disconnected.
    pub(super) fn restart(&self) {
        let mut inner = self.lock();
        inner.next = 0;
        inner.kept.clear();
        inner.swapped = None;
        inner.subscribers.clear();
        drop(inner);
        if let Some(mut polled) = self.lock_polled() {
            polled.restart();
        }
    }

    pub(super) fn publish(&self, timestamp: f64, rank: u32, events: &[Event]) {
        if let Some(mut polled) = self.lock_polled() {
            let mut inner = self.lock();
            let lost = inner.faults.drop_next > 0;
            inner.faults.drop_next = inner.faults.drop_next.saturating_sub(1);
            return polled.note(events, self.block_size, lost);
        }
        let payload = self.encode(timestamp, rank, events);
        let mut inner = self.lock();
        let sequence = inner.next;
        inner.next += 1;
        inner.counters.published += 1;
        if inner.kept.len() >= self.settings.buffer_steps {
            inner.kept.pop_front();
        }
        inner.kept.push_back((sequence, payload.clone()));
        let message = [self.topic.clone(), sequence.to_be_bytes().to_vec().into(), payload];
        self.send_with_faults(&mut inner, message);
    }

    fn send_with_faults(&self, inner: &mut Inner, message: Message) {
        let lost = inner.faults.drop_next > 0 || {
            let chance = inner.faults.drop_probability;
            chance > 0.0 && self.rng.lock().unwrap_or_else(PoisonError::into_inner).unit() < chance
        };
        if lost {
            inner.faults.drop_next = inner.faults.drop_next.saturating_sub(1);
            inner.counters.lost += 1;
            return;
        }
        if inner.swapped.is_none() && inner.faults.reorder_next > 0 {
            inner.faults.reorder_next -= 1;
            inner.swapped = Some(message);
            return;
        }
        if inner.faults.duplicate_next > 0 {
            inner.faults.duplicate_next -= 1;
            inner.send(&message);
        }
        inner.send(&message);
        if let Some(earlier) = inner.swapped.take() {
            inner.send(&earlier);
        }
    }

    /// The messages from this sequence number on, as far as they are kept; none when the replay
    /// socket does not answer.
    pub(super) fn replay(&self, from: u64) -> Option<Vec<(u64, Bytes)>> {
        let mut inner = self.lock();
        if inner.faults.replay_silent {
            return None;
        }
        inner.counters.replays += 1;
        let limit = inner.faults.replay_limit.map_or(usize::MAX, |limit| limit as usize);
        let wanted: Vec<_> = inner.kept.iter().filter(|(at, _)| *at >= from).cloned().collect();
        let skip = wanted.len().saturating_sub(limit);
        Some(wanted.into_iter().skip(skip).collect())
    }

    /// A subscriber without topics yet; its messages come out of the receiver.
    pub(super) fn join(&self) -> (u64, mpsc::Receiver<Message>) {
        let (queue, messages) = mpsc::channel(self.settings.high_water_mark.max(1));
        let mut inner = self.lock();
        let id = inner.next_subscriber;
        inner.next_subscriber += 1;
        inner.subscribers.push(Subscriber { id, topics: Vec::new(), queue });
        (id, messages)
    }

    pub(super) fn subscribe(&self, id: u64, topic: Bytes) {
        if let Some(subscriber) = self.lock().subscribers.iter_mut().find(|s| s.id == id) {
            subscriber.topics.push(topic);
        }
    }

    pub(super) fn unsubscribe(&self, id: u64, topic: &Bytes) {
        if let Some(subscriber) = self.lock().subscribers.iter_mut().find(|s| s.id == id)
            && let Some(at) = subscriber.topics.iter().position(|own| own == topic)
        {
            subscriber.topics.remove(at);
        }
    }

    pub(super) fn leave(&self, id: u64) {
        self.lock().subscribers.retain(|subscriber| subscriber.id != id);
    }

    fn encode(&self, timestamp: f64, rank: u32, events: &[Event]) -> Bytes {
        // Names are borrowed by the announcements, so they are laid out first.
        let named: Vec<(Names, Option<Names>)> =
            events.iter().map(|event| self.names_of(event)).collect();
        let borrowed: Vec<Vec<BlockName<'_>>> =
            named.iter().map(|(names, _)| names.borrow()).collect();
        let announced: Vec<Announce<'_>> = events
            .iter()
            .zip(&borrowed)
            .zip(&named)
            .map(|((event, hashes), (_, parent))| self.announce(event, hashes, parent.as_ref()))
            .collect();
        let encoding = match self.settings.encoding {
            EventEncoding::Map => Encoding::Map,
            EventEncoding::SignedMap => Encoding::SignedMap,
            EventEncoding::Array => Encoding::Array,
        };
        encode(timestamp, Some(rank), &announced, encoding).into()
    }

    fn names_of(&self, event: &Event) -> (Names, Option<Names>) {
        match event {
            Event::Stored { content, first, count } => {
                let range = *first as usize..(first + count) as usize;
                let parent = range.start.checked_sub(1).map(|at| &content.names[at..=at]);
                (self.names(&content.names[range]), parent.map(|parent| self.names(parent)))
            }
            Event::Removed { name } => (self.names(&[*name]), None),
            Event::Cleared => (self.names(&[]), None),
        }
    }

    fn names(&self, names: &[u64]) -> Names {
        match self.settings.hashes {
            HashForm::Int => Names::Int(names.to_vec()),
            HashForm::Bytes => Names::Bytes(names.iter().map(|&name| long_name(name)).collect()),
        }
    }

    fn announce<'a>(
        &self,
        event: &'a Event,
        hashes: &'a [BlockName<'a>],
        parent: Option<&'a Names>,
    ) -> Announce<'a> {
        match event {
            Event::Stored { content, first, count } => {
                let size = self.block_size as usize;
                let tokens = *first as usize * size..(first + count) as usize * size;
                Announce::Stored {
                    hashes,
                    parent: parent.and_then(|parent| parent.borrow().pop()),
                    tokens: &content.tokens[tokens],
                    block_size: self.block_size,
                    lora_name: content.lora.as_deref(),
                    medium: MEDIUM,
                    cache_salt: content.salt.as_deref(),
                }
            }
            Event::Removed { .. } => Announce::Removed { hashes, medium: MEDIUM },
            Event::Cleared => Announce::Cleared,
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    /// To every subscriber that wants it and has room, as a PUB socket does.
    fn send(&mut self, message: &Message) {
        for subscriber in &self.subscribers {
            if subscriber.topics.iter().any(|topic| message[0].starts_with(topic))
                && subscriber.queue.try_send(message.clone()).is_err()
            {
                self.counters.dropped += 1;
            }
        }
    }
}

/// Block names in the form that is published.
enum Names {
    Int(Vec<u64>),
    Bytes(Vec<[u8; 32]>),
}

impl Names {
    fn borrow(&self) -> Vec<BlockName<'_>> {
        match self {
            Names::Int(names) => names.iter().map(|&name| BlockName::Int(name)).collect(),
            Names::Bytes(names) => names.iter().map(|name| BlockName::Digest(name)).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_subscriber_that_does_not_read_loses_what_does_not_fit_its_queue() {
        let settings = KvEvents { high_water_mark: 2, ..KvEvents::default() };
        let publisher = Publisher::new(settings, 16, 0);
        let (slow, mut messages) = publisher.join();
        publisher.subscribe(slow, Bytes::new());
        for _ in 0..5 {
            publisher.publish(0.0, 0, &[Event::Cleared]);
        }
        assert_eq!(publisher.state().2.dropped, 3);
        let mut sequences = Vec::new();
        while let Ok([_, sequence, _]) = messages.try_recv() {
            sequences.push(sequence[7]);
        }
        assert_eq!(sequences, [0, 1]);
        publisher.leave(slow);
        publisher.publish(0.0, 0, &[Event::Cleared]);
        assert_eq!(publisher.state().2.dropped, 3);
    }
}
