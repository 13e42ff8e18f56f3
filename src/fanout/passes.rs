//! Passes: events of a topic with many sockets are written in passes over its sockets, because fan-out costs one write per
//! socket and not one per event. An event that finds no pass under way begins one. What is published during a pass waits,
//! in order, and is the next pass: so nothing waits on an idle machine, and on a busy one more events share a write.

use std::{
    collections::HashSet,
    sync::{Arc, Mutex},
};

use dashmap::{DashMap, mapref::entry::Entry};
use foldhash::quality::RandomState;

use super::{
    Subscriber,
    encoded::{Encoded, Frame},
};
use crate::{
    model::{SessionId, Topic},
    protocol::Codec,
};

/// Bytes of a topic, approximately, at which its waiting events are not left to the pass under way.
const WAITING_BYTES_MAX: usize = 64 << 10;

/// The topics with a pass under way.
#[derive(Default)]
pub(super) struct Passes {
    topics: DashMap<Topic, Passing, RandomState>,
}

/// A topic with a pass under way. It exists from the event that begins a pass until a pass ends and no event waits.
struct Passing {
    /// The events that wait for the next pass.
    waiting: Option<Encoded>,
    bytes: usize,
    pass: SharedPass,
}

/// A pass over the sockets of a topic. Its lock is held while some of them are written.
#[derive(Default)]
pub(super) struct Pass {
    events: Option<Encoded>,
    /// The sockets that were subscribed when the pass began.
    sockets: Arc<[Arc<Subscriber>]>,
    /// The number of sockets that have the events.
    done: usize,
    /// Sessions that have left the topic since, and have the events.
    left: HashSet<SessionId>,
}

pub(super) type SharedPass = Arc<Mutex<Pass>>;

/// What becomes of an event.
pub(super) enum Fate {
    /// The event waits for the pass under way.
    Waits,
    /// No pass is under way. The caller must begin one.
    First(SharedPass),
    /// [`WAITING_BYTES_MAX`] is reached. The caller must finish the pass under way and begin the next one.
    Full(SharedPass),
}

impl Passes {
    /// Adds an event to the waiting ones of its topic.
    pub(super) fn wait(&self, topic: &Topic, event: &Encoded) -> Fate {
        let bytes = event.bytes();
        match self.topics.entry(topic.clone()) {
            Entry::Vacant(place) => {
                let pass = SharedPass::default();
                place.insert(Passing {
                    waiting: Some(event.clone()),
                    bytes,
                    pass: pass.clone(),
                });
                Fate::First(pass)
            }
            Entry::Occupied(mut passing) => {
                let passing = passing.get_mut();
                match &mut passing.waiting {
                    Some(events) => events.append(event.clone()),
                    None => passing.waiting = Some(event.clone()),
                }
                passing.bytes += bytes;
                if passing.bytes < WAITING_BYTES_MAX {
                    Fate::Waits
                } else {
                    Fate::Full(passing.pass.clone())
                }
            }
        }
    }

    /// Returns the pass under way.
    pub(super) fn pass(&self, topic: &Topic) -> Option<SharedPass> {
        self.topics.get(topic).map(|passing| passing.pass.clone())
    }

    /// Returns the waiting events without taking them, for a session that ends its subscription before their pass.
    pub(super) fn waiting(&self, topic: &Topic, codec: Codec) -> Option<Frame> {
        let passing = self.topics.get(topic)?;
        Some(passing.waiting.as_ref()?.frame(codec).clone())
    }

    /// Takes the waiting events. The caller holds the lock of the pass, and begins one with them.
    pub(super) fn take(&self, topic: &Topic) -> Option<Encoded> {
        let mut passing = self.topics.get_mut(topic)?;
        passing.bytes = 0;
        passing.waiting.take()
    }

    /// Forgets the topic if no event waits. Returns true if it did: the next event begins a pass again.
    pub(super) fn ended(&self, topic: &Topic) -> bool {
        let nothing_waits = |_: &Topic, passing: &Passing| passing.waiting.is_none();
        self.topics.remove_if(topic, nothing_waits).is_some()
    }
}

impl Pass {
    pub(super) fn new(events: Encoded, sockets: Arc<[Arc<Subscriber>]>) -> Self {
        Self {
            events: Some(events),
            sockets,
            ..Self::default()
        }
    }

    /// Whether all sockets have the events.
    pub(super) fn is_over(&self) -> bool {
        self.done == self.sockets.len()
    }

    /// Writes to the next sockets, at most `count`. Returns the number of events that were written, and of those that were
    /// queued.
    pub(super) fn write(&mut self, count: usize) -> (u64, u64) {
        let Some(events) = &self.events else {
            return (0, 0);
        };
        let (mut written, mut queued) = (0, 0);
        let until = self.done.saturating_add(count).min(self.sockets.len());
        while self.done < until {
            let Subscriber {
                outbox, session, ..
            } = &*self.sockets[self.done];
            self.done += 1;
            if !self.left.is_empty() && self.left.contains(session) {
                continue;
            }
            if outbox.write_or_push(events.frame(outbox.codec())) {
                written += events.count();
            } else {
                queued += events.count();
            }
        }
        if self.is_over() {
            // The sockets and the events are not kept longer than the pass takes.
            *self = Self::default();
        }
        (written, queued)
    }

    /// Returns the events of the pass for a session that leaves the topic, if it does not have them yet. The pass does not
    /// write to it any more.
    pub(super) fn leave(&mut self, subscriber: &Subscriber) -> Option<Frame> {
        let events = self.events.as_ref()?;
        let is_next = |next: &&Arc<Subscriber>| next.session == subscriber.session;
        self.sockets[self.done..].iter().find(is_next)?;
        let first = self.left.insert(subscriber.session);
        first.then(|| events.frame(subscriber.outbox.codec()).clone())
    }
}
