//! What one session is subscribed to, and why.

use std::collections::HashSet;

use crate::model::Topic;

/// Why a session is subscribed to a topic.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Reason {
    /// Its user is in the channel, or the topic is the user's own.
    Participant,
    /// It asked for it, and the request is still under way.
    Asking,
    /// It asked for it: a spectator of a public channel, or somebody who watches a user.
    Asked,
}

/// The session would have asked for more topics than it may.
#[derive(Debug, PartialEq, Eq)]
pub struct TooMany;

#[derive(Debug)]
pub(super) struct Subscription {
    pub topic: Topic,
    pub reason: Reason,
}

#[derive(Debug)]
pub(super) struct Subscriptions {
    pub list: Vec<Subscription>,
    /// How many of the list were asked for.
    channels_requested: usize,
    users_requested: usize,
    /// Channels that its user was removed from while it connects; `None` once it is connected.
    pub removed: Option<Vec<Topic>>,
}

impl Subscriptions {
    pub(super) fn new() -> Self {
        Self {
            list: Vec::new(),
            channels_requested: 0,
            users_requested: 0,
            removed: Some(Vec::new()),
        }
    }

    /// How many topics of this one's kind the session asked for.
    pub(super) fn requested(&mut self, like: &Topic) -> &mut usize {
        match like {
            Topic::Channel(_) => &mut self.channels_requested,
            Topic::Presence(_) | Topic::User(_) => &mut self.users_requested,
        }
    }

    pub(super) fn add(&mut self, topic: Topic, reason: Reason) {
        if reason != Reason::Participant {
            *self.requested(&topic) += 1;
        }
        if self.list.is_empty() {
            // What most sessions have: their user's own topic.
            self.list.reserve_exact(1);
        }
        self.list.push(Subscription { topic, reason });
    }

    /// The session is subscribed already: a spectator who joins is a participant from now on.
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

    /// Its user was added again.
    pub(super) fn not_removed(&mut self, topic: &Topic) {
        if let Some(removed) = &mut self.removed {
            removed.retain(|known| known != topic);
        }
    }

    /// Takes those of these topics that are subscribed to for such a reason, in one pass.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{ConversationId, UserId};

    fn user(name: &str) -> Topic {
        Topic::Presence(UserId::new(name).unwrap())
    }

    #[test]
    fn what_was_asked_for_is_counted_until_it_ends_or_becomes_a_right() {
        let channel = Topic::Channel(ConversationId::random());
        let mut subscriptions = Subscriptions::new();
        subscriptions.add(channel.clone(), Reason::Asking);
        subscriptions.add(user("alice"), Reason::Asked);
        assert_eq!(*subscriptions.requested(&channel), 1);
        subscriptions.promote(&channel, Reason::Participant);
        subscriptions.promote(&channel, Reason::Participant);
        assert_eq!(*subscriptions.requested(&channel), 0);
        assert_eq!(*subscriptions.requested(&user("bob")), 1);
        let asked = |reason| reason != Reason::Participant;
        let ended = subscriptions.end(&[channel.clone(), user("alice"), user("bob")], asked);
        assert_eq!(ended, [user("alice")]);
        assert_eq!(*subscriptions.requested(&user("bob")), 0);
        assert_eq!(subscriptions.end(&[channel], |_| true).len(), 1);
    }
}
