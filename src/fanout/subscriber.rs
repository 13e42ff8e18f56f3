//! A session as a receiver, with its subscriptions and their reasons.

use std::{
    collections::HashSet,
    sync::{
        Mutex,
        atomic::{AtomicBool, Ordering},
    },
};

use super::{lock, outbox::Outbox};
use crate::{
    model::{SessionId, Topic, UserId},
    protocol::Codec,
};

/// A session as the receiver of publications. With the layout of [`Outbox`], everything that each frame needs is in the
/// first 64 bytes after the two counters of an `Arc`, because the subscribers of a large topic do not fit into the
/// nearest caches.
#[derive(Debug)]
#[repr(C)]
pub struct Subscriber {
    pub outbox: Outbox,
    pub session: SessionId,
    pub user: UserId,
    /// `None` once the session has left, so that nothing subscribes it again.
    pub(super) subscriptions: Mutex<Option<Subscriptions>>,
    /// Whether the user does not look at this session.
    away: AtomicBool,
}

impl Subscriber {
    #[must_use]
    pub fn new(session: SessionId, user: UserId, codec: Codec, outbox_bytes_max: usize) -> Self {
        let outbox = Outbox::new(codec, outbox_bytes_max);
        Self {
            session,
            user,
            outbox,
            subscriptions: Mutex::new(Some(Subscriptions::new())),
            away: AtomicBool::new(false),
        }
    }

    /// Returns whether the user does not look at this session.
    #[must_use]
    pub fn is_away(&self) -> bool {
        self.away.load(Ordering::Acquire)
    }

    pub fn set_away(&self, away: bool) {
        self.away.store(away, Ordering::Release);
    }

    /// Returns the number of channels to which the session is subscribed as a participant.
    #[must_use]
    pub fn channels(&self) -> usize {
        let subscriptions = lock(&self.subscriptions);
        let rights = subscriptions.as_ref().map_or(0, Subscriptions::rights);
        // One of them is the user's own topic.
        rights.saturating_sub(1)
    }
}

/// The reason why a session is subscribed to a topic.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Reason {
    /// The user participates in the channel, or the topic is the user's own.
    Participant,
    /// The session requested the topic, and the request is not confirmed yet. Events of a channel are not sent to it
    /// yet.
    Asking,
    /// The session requested the topic: as a spectator of a public channel, or to watch a user.
    Asked,
}

#[derive(Debug)]
pub(super) struct Subscription {
    pub topic: Topic,
    pub reason: Reason,
}

#[derive(Debug)]
pub(super) struct Subscriptions {
    pub list: Vec<Subscription>,
    /// The numbers of requested topics in `list`: channels, then users.
    channels_requested: u32,
    users_requested: u32,
    /// Removals that arrived while the session connects. `None` once it is connected.
    pub removed: Option<Box<Removed>>,
}

/// The channels from which a session's user was removed while the session connects.
#[derive(Debug, Default)]
pub(super) struct Removed(pub Vec<Topic>);

impl Subscriptions {
    pub(super) fn new() -> Self {
        Self {
            list: Vec::new(),
            channels_requested: 0,
            users_requested: 0,
            removed: Some(Box::default()),
        }
    }

    /// Returns the number of requested topics of the same kind as `like`.
    pub(super) fn requested(&mut self, like: &Topic) -> &mut u32 {
        match like {
            Topic::Channel(_) => &mut self.channels_requested,
            Topic::Presence(_) | Topic::User(_) => &mut self.users_requested,
        }
    }

    /// Returns the number of topics that were not requested: the channels of the user, and the user's own topic.
    fn rights(&self) -> usize {
        let requested = self.channels_requested + self.users_requested;
        self.list.len() - requested as usize
    }

    pub(super) fn add(&mut self, topic: Topic, reason: Reason) {
        if reason != Reason::Participant {
            *self.requested(&topic) += 1;
        }
        if self.list.is_empty() {
            // Most sessions have only their user's own topic.
            self.list.reserve_exact(1);
        }
        self.list.push(Subscription { topic, reason });
    }

    /// Changes the reason of an existing subscription if a spectator becomes a participant.
    pub(super) fn promote(&mut self, topic: &Topic, reason: Reason) {
        let known = self.list.iter_mut().find(|known| known.topic == *topic);
        if let Some(known) = known
            && reason == Reason::Participant
            && known.reason != Reason::Participant
        {
            known.reason = Reason::Participant;
            *self.requested(topic) -= 1;
        }
    }

    /// Forgets that the user was removed from the channel, because the user was added again.
    pub(super) fn not_removed(&mut self, topic: &Topic) {
        if let Some(removed) = &mut self.removed {
            removed.0.retain(|known| known != topic);
        }
    }

    /// Removes the subscriptions to these topics whose reason matches, in one pass. Returns their topics.
    pub(super) fn end(&mut self, topics: &[Topic], which: impl Fn(Reason) -> bool) -> Vec<Topic> {
        let topics: HashSet<&Topic> = topics.iter().collect();
        let ends = |known: &mut Subscription| topics.contains(&known.topic) && which(known.reason);
        let ended: Vec<Subscription> = self.list.extract_if(.., ends).collect();
        for Subscription { topic, reason } in &ended {
            if *reason != Reason::Participant {
                *self.requested(topic) -= 1;
            }
        }
        ended.into_iter().map(|ended| ended.topic).collect()
    }
}
