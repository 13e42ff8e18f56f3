//! What is published to a busy topic with many sockets goes out together: one write for each socket instead of one for
//! each event, because the writes are what fan-out costs. The first event after a rest goes at once; what follows it
//! sooner than the window is held back until the window is over, in order. (Nagle's idea, RFC 896, for a topic; as
//! `write_delay` of Centrifugo.)

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use dashmap::{DashMap, mapref::entry::Entry};
use foldhash::quality::RandomState;

use super::encoded::{Encoded, Frame};
use crate::{model::Topic, protocol::Codec};

/// About as many bytes are held back at most.
const HELD_BYTES_MAX: usize = 64 << 10;

/// Shorter than this nothing is held back: timers are not finer.
const WINDOW_MIN: Duration = Duration::from_millis(1);

/// How long events of a topic are held back: from the end of one write to its sockets to the next.
#[derive(Debug, Clone, Copy, Default)]
pub struct Coalesce {
    /// For each socket, because each is a write: so a topic's writes have a bounded part of a processor's time, whatever
    /// is published, and who is among few waits for little.
    pub per_socket: Duration,
    /// However many there are. Zero: nothing is ever held back.
    pub max: Duration,
}

impl Coalesce {
    /// None: with so few sockets, nothing is held back.
    pub(super) fn window(&self, sockets: usize) -> Option<Duration> {
        let sockets = u32::try_from(sockets).unwrap_or(u32::MAX);
        let window = self.per_socket.saturating_mul(sockets).min(self.max);
        (window >= WINDOW_MIN).then_some(window)
    }
}

/// What is held back now, by topic.
#[derive(Default)]
pub(super) struct Coalescing {
    pub(super) when: Coalesce,
    topics: DashMap<Topic, Held, RandomState>,
}

/// Of one topic, from the first event that came too soon until a window ends without any.
struct Held {
    /// None: all have been flushed.
    events: Option<Encoded>,
    bytes: usize,
    flushing: Flushing,
}

/// Locked while what was held back of a topic is written or queued: two flushes would overtake each other.
pub(super) type Flushing = Arc<Mutex<()>>;

/// What is to become of an event.
pub(super) enum Fate {
    /// It goes out now.
    Now,
    /// It is held back with others, whose flush is under way.
    Held,
    /// It is the first one held back: a flush is to begin when it is time.
    First(Flushing),
    /// It is one of many: they are to be flushed now.
    Full(Flushing),
}

impl Coalescing {
    pub(super) fn new(when: Coalesce) -> Self {
        Self {
            when,
            ..Self::default()
        }
    }

    /// Holds an event back if others of its topic are, or if it comes `soon` after the last one.
    pub(super) fn hold(&self, topic: &Topic, event: &Encoded, soon: bool) -> Fate {
        let bytes = event.bytes();
        match self.topics.entry(topic.clone()) {
            Entry::Vacant(_) if !soon => Fate::Now,
            Entry::Vacant(place) => {
                let flushing = Flushing::default();
                place.insert(Held {
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

    /// Set while events of the topic are held back, or flushed.
    pub(super) fn flushing(&self, topic: &Topic) -> Option<Flushing> {
        self.topics.get(topic).map(|held| held.flushing.clone())
    }

    /// What is held back now, for who does not wait for the flush.
    pub(super) fn held(&self, topic: &Topic, codec: Codec) -> Option<Frame> {
        let held = self.topics.get(topic)?;
        Some(held.events.as_ref()?.frame(codec).clone())
    }

    /// To be called with `flushing` locked, until they are written or queued.
    pub(super) fn take(&self, topic: &Topic) -> Option<Encoded> {
        let mut held = self.topics.get_mut(topic)?;
        held.bytes = 0;
        held.events.take()
    }

    /// True if nothing was held back since the last flush: what comes next is a first one again.
    pub(super) fn ended(&self, topic: &Topic) -> bool {
        self.topics
            .remove_if(topic, |_, held| held.events.is_none())
            .is_some()
    }
}
