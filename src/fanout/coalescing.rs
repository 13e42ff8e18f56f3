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

use super::encoded::Encoded;
use crate::model::Topic;

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
    /// None: all have gone out.
    events: Option<Encoded>,
    going: Going,
}

/// Locked while what was held back of a topic goes out, so that two never do at the same time.
pub(super) type Going = Arc<Mutex<()>>;

/// What is to become of an event.
pub(super) enum Fate {
    /// It goes out at once.
    Goes,
    /// It is held back, with others that somebody lets go.
    Held,
    /// It is the first one held back: the others are to be let go when it is time.
    First(Going),
    /// They are many: they are to be let go now.
    Full(Going),
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
        match self.topics.entry(topic.clone()) {
            Entry::Vacant(_) if !soon => Fate::Goes,
            Entry::Vacant(place) => {
                let (events, going) = (Some(event.clone()), Going::default());
                place.insert(Held {
                    events,
                    going: going.clone(),
                });
                Fate::First(going)
            }
            Entry::Occupied(mut held) => {
                let held = held.get_mut();
                let bytes = match &mut held.events {
                    None => held.events.insert(event.clone()).bytes(),
                    Some(events) => {
                        events.append(event.clone());
                        events.bytes()
                    }
                };
                if bytes < HELD_BYTES_MAX {
                    Fate::Held
                } else {
                    Fate::Full(held.going.clone())
                }
            }
        }
    }

    /// Set while events of the topic are held back, or going out.
    pub(super) fn going(&self, topic: &Topic) -> Option<Going> {
        self.topics.get(topic).map(|held| held.going.clone())
    }

    pub(super) fn held(&self, topic: &Topic) -> Option<Encoded> {
        self.topics.get(topic)?.events.clone()
    }

    /// To be called with `going` locked, until they are out.
    pub(super) fn take(&self, topic: &Topic) -> Option<Encoded> {
        self.topics.get_mut(topic)?.events.take()
    }

    /// True if nothing was held back since the last ones went out: what comes next is a first one again.
    pub(super) fn ended(&self, topic: &Topic) -> bool {
        self.topics
            .remove_if(topic, |_, held| held.events.is_none())
            .is_some()
    }
}
