//! Passes: events of a topic with many sockets are written in passes over its sockets, because fan-out costs one write per
//! socket and not one per event. An event that finds no pass under way begins one. What is published during a pass waits,
//! in order, and is the next pass: so nothing waits on an idle machine, and on a busy one more events share a write.

use std::{
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
};

use dashmap::{
    DashMap,
    mapref::{entry::Entry, one::Ref},
};
use foldhash::quality::RandomState;
use indexmap::IndexMap;

use super::{
    encoded::{Encoded, Frame},
    outbox::Outbox,
    subscriber::Subscriber,
};
use crate::model::{SessionId, Topic};

/// Bytes of the waiting events of a topic, approximately. Above this the publisher finishes the pass itself.
const WAITING_BYTES_MAX: usize = 64 << 10;

/// The sockets to which the events of a pass are written.
pub(super) type Sockets = IndexMap<SessionId, Arc<Subscriber>>;

/// The topics with a pass under way.
#[derive(Default)]
pub(super) struct Passes {
    topics: DashMap<Topic, Passing, RandomState>,
    /// The number of these topics, or one more while one begins.
    count: AtomicUsize,
}

/// A topic with a pass under way. It exists from the event that begins the first pass until a pass ends and no event waits.
pub(super) struct Passing {
    /// `None` until the first pass begins.
    pass: Option<Arc<Pass>>,
    /// The events that wait for the next pass.
    waiting: Option<Encoded>,
    bytes: usize,
}

/// A pass over the sockets of a topic.
pub(super) struct Pass {
    events: Encoded,
    /// The sockets that were subscribed when the pass began.
    sockets: Arc<Sockets>,
    /// For each socket, whether it has the events. It is set under the lock of the outbox that gets them. So the pass gives
    /// them to each socket once, and before those of the next pass, whoever writes them.
    done: Box<[AtomicBool]>,
}

/// The next step for an event that was added.
#[derive(PartialEq, Eq)]
pub(super) enum Fate {
    /// The event waits for the pass under way.
    Waits,
    /// No pass is under way. The caller must begin one.
    First,
    /// [`WAITING_BYTES_MAX`] is reached. The caller must finish the pass under way and begin the next one.
    Full,
}

impl Passes {
    /// Adds an event to the waiting ones of its topic.
    pub(super) fn add(&self, topic: &Topic, event: &Encoded) -> Fate {
        let bytes = event.bytes();
        match self.topics.entry(topic.clone()) {
            Entry::Vacant(place) => {
                self.count.fetch_add(1, Ordering::Relaxed);
                place.insert(Passing {
                    pass: None,
                    waiting: Some(event.clone()),
                    bytes,
                });
                Fate::First
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
                    Fate::Full
                }
            }
        }
    }

    /// Returns whether a pass of the topic is under way.
    pub(super) fn is_under_way(&self, topic: &Topic) -> bool {
        self.count.load(Ordering::Relaxed) > 0 && self.topics.contains_key(topic)
    }

    /// Returns the topic if a pass is under way. None begins while the result exists.
    pub(super) fn passing(&self, topic: &Topic) -> Option<Ref<'_, Topic, Passing>> {
        self.topics.get(topic)
    }

    /// Returns the pass under way.
    pub(super) fn pass(&self, topic: &Topic) -> Option<Arc<Pass>> {
        self.topics.get(topic)?.pass.clone()
    }

    /// Begins a pass with the waiting events after `over`, which all its sockets have got, unless another one is under way
    /// already. Returns the pass under way. `None` if no event waits: the topic is forgotten, and the next event is a first
    /// one.
    pub(super) fn begin(
        &self,
        topic: &Topic,
        over: Option<&Arc<Pass>>,
        sockets: impl FnOnce() -> Arc<Sockets>,
    ) -> Option<Arc<Pass>> {
        let Entry::Occupied(mut entry) = self.topics.entry(topic.clone()) else {
            return None;
        };
        let passing = entry.get_mut();
        if passing.pass.as_ref().map(Arc::as_ptr) != over.map(Arc::as_ptr) {
            return passing.pass.clone();
        }
        let Some(events) = passing.waiting.take() else {
            entry.remove();
            self.count.fetch_sub(1, Ordering::Relaxed);
            return None;
        };
        passing.bytes = 0;
        let pass = Arc::new(Pass::new(events, sockets()));
        passing.pass = Some(pass.clone());
        Some(pass)
    }
}

impl Passing {
    /// Gives a session that leaves the topic all events that were published before, and that it does not have yet. If it
    /// comes back before the waiting ones are written, it gets those twice; clients ignore a seq that they have.
    pub(super) fn leave(&self, subscriber: &Subscriber) {
        let outbox = &subscriber.outbox;
        if let Some(pass) = &self.pass
            && let Some(index) = pass.sockets.get_index_of(&subscriber.session)
        {
            outbox.push_once(pass.events.frame(outbox.codec()), &pass.done[index]);
        }
        if let Some(waiting) = &self.waiting {
            outbox.push(waiting.frame(outbox.codec()).clone());
        }
    }
}

impl Pass {
    fn new(events: Encoded, sockets: Arc<Sockets>) -> Self {
        Self {
            events,
            done: sockets.iter().map(|_| AtomicBool::new(false)).collect(),
            sockets,
        }
    }

    /// The number of sockets.
    pub(super) fn len(&self) -> usize {
        self.sockets.len()
    }

    /// Writes to the sockets with these indices. Returns the number of events that were written, and of those that were
    /// queued.
    pub(super) fn write(&self, indices: Range<usize>) -> (u64, u64) {
        self.give(indices, Outbox::write_or_push_once)
    }

    /// As [`Self::write`], for all sockets, but the events are only queued. It makes no system call.
    pub(super) fn queue(&self) -> (u64, u64) {
        self.give(0..self.len(), |outbox, frame, done| {
            outbox.push_once(frame, done).then_some(false)
        })
    }

    /// Gives the events to the sockets with these indices that do not have them. `give` returns whether they were written.
    fn give(
        &self,
        indices: Range<usize>,
        give: impl Fn(&Outbox, &Frame, &AtomicBool) -> Option<bool>,
    ) -> (u64, u64) {
        let (mut written, mut queued) = (0, 0);
        let indices = indices.start..indices.end.min(self.len());
        let sockets = self.sockets[indices.clone()].values();
        for (Subscriber { outbox, .. }, done) in sockets.map(|s| &**s).zip(&self.done[indices]) {
            if done.load(Ordering::Relaxed) {
                continue;
            }
            match give(outbox, self.events.frame(outbox.codec()), done) {
                Some(true) => written += self.events.count(),
                Some(false) => queued += self.events.count(),
                None => {}
            }
        }
        (written, queued)
    }
}
