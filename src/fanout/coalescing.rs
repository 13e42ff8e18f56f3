//! Coalescing: events of a busy topic with many sockets are written together, because fan-out costs one write per
//! socket and not one per event. The first event after a pause is sent at once. Events that follow within the window
//! wait until it ends, in order. (Nagle's algorithm, RFC 896, for a topic; like `write_delay` of Centrifugo.)

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use dashmap::{DashMap, mapref::entry::Entry};
use foldhash::quality::RandomState;

use super::encoded::{Encoded, Frame};
use crate::{model::Topic, protocol::Codec};

/// Bytes of a topic, approximately, at which its waiting events are flushed before the window ends.
const HELD_BYTES_MAX: usize = 64 << 10;

/// The shortest window. Timers are not more precise, so shorter ones are treated as none.
const WINDOW_MIN: Duration = Duration::from_millis(1);

/// The settings of the window: the time from the end of one write to a topic's sockets until the next.
#[derive(Debug, Clone, Copy, Default)]
pub struct Coalesce {
    /// The window per socket. Each socket costs a write, so the writes of one topic use a bounded part of a processor's
    /// time, and events of a small topic wait only briefly.
    pub per_socket: Duration,
    /// The longest window, for any number of sockets. Zero turns coalescing off.
    pub max: Duration,
}

impl Coalesce {
    /// Returns the window of a topic with this many sockets. `None` means that its events are sent at once.
    pub(super) fn window(&self, sockets: usize) -> Option<Duration> {
        let sockets = u32::try_from(sockets).unwrap_or(u32::MAX);
        let window = self.per_socket.saturating_mul(sockets).min(self.max);
        (window >= WINDOW_MIN).then_some(window)
    }
}

/// The events that wait now, by topic.
#[derive(Default)]
pub(super) struct Coalescing {
    pub(super) when: Coalesce,
    topics: DashMap<Topic, HeldFrames, RandomState>,
}

/// The waiting events of one topic. It exists from the first event that came within the window until a window ends
/// without any.
struct HeldFrames {
    /// `None` if all events are flushed.
    events: Option<Encoded>,
    bytes: usize,
    flushing: Flushing,
}

/// A topic's flush lock. It is held while the waiting events are written or queued, so that no flush overtakes another.
pub(super) type Flushing = Arc<Mutex<()>>;

/// The decision about an event.
pub(super) enum Fate {
    /// The event is sent now.
    Now,
    /// The event waits with others, and their flush is scheduled.
    Held,
    /// The event is the first one that waits. The caller must schedule a flush.
    First(Flushing),
    /// [`HELD_BYTES_MAX`] is reached. The caller must flush now.
    Full(Flushing),
}

impl Coalescing {
    pub(super) fn new(when: Coalesce) -> Self {
        Self {
            when,
            ..Self::default()
        }
    }

    /// Adds an event to the waiting ones of its topic. If none wait, it does so only if the event comes `soon` after
    /// the last write.
    pub(super) fn hold(&self, topic: &Topic, event: &Encoded, soon: bool) -> Fate {
        let bytes = event.bytes();
        match self.topics.entry(topic.clone()) {
            Entry::Vacant(_) if !soon => Fate::Now,
            Entry::Vacant(place) => {
                let flushing = Flushing::default();
                place.insert(HeldFrames {
                    events: Some(event.clone()),
                    bytes,
                    flushing: flushing.clone(),
                });
                Fate::First(flushing)
            }
            Entry::Occupied(mut held) => {
                let held = held.get_mut();
                match &mut held.events {
                    Some(events) => events.append(event.clone()),
                    None => held.events = Some(event.clone()),
                }
                held.bytes += bytes;
                if held.bytes < HELD_BYTES_MAX {
                    Fate::Held
                } else {
                    Fate::Full(held.flushing.clone())
                }
            }
        }
    }

    /// Returns the flush lock while events of the topic wait or are flushed.
    pub(super) fn flushing(&self, topic: &Topic) -> Option<Flushing> {
        self.topics.get(topic).map(|held| held.flushing.clone())
    }

    /// Returns the waiting events without taking them, for a session that ends its subscription before the flush.
    pub(super) fn held(&self, topic: &Topic, codec: Codec) -> Option<Frame> {
        let held = self.topics.get(topic)?;
        Some(held.events.as_ref()?.frame(codec).clone())
    }

    /// Takes the waiting events. The caller holds `flushing` until they are written or queued.
    pub(super) fn take(&self, topic: &Topic) -> Option<Encoded> {
        let mut held = self.topics.get_mut(topic)?;
        held.bytes = 0;
        held.events.take()
    }

    /// Forgets the topic if no event came since the last flush. Returns true if it did: the next event is a first one
    /// again.
    pub(super) fn ended(&self, topic: &Topic) -> bool {
        self.topics
            .remove_if(topic, |_, held| held.events.is_none())
            .is_some()
    }
}
