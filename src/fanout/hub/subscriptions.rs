//! Begins and ends the subscriptions of sessions.

use std::{collections::HashSet, sync::Arc};

use super::{Hub, Subscribers, lock};
use crate::{
    fanout::subscriber::{Reason, Removed, Subscriber, Subscriptions},
    model::{SessionId, Topic, limits::REMOVED_WHILE_CONNECTING_MAX},
    mutation::{Mutation, broken},
    protocol::CloseCode,
};

/// The error of a request for more topics than one session may have.
#[derive(Debug, PartialEq, Eq)]
pub struct TooMany;

impl Hub {
    /// Subscribes a session by right: to a channel of its user, or to the user's own topic. It makes a spectator a
    /// participant. It is idempotent, and does nothing for a session that has left.
    pub fn subscribe(&self, topic: &Topic, subscriber: &Arc<Subscriber>) {
        if let Some(subscriptions) = &mut *lock(&subscriber.subscriptions) {
            subscriptions.not_removed(topic);
            self.insert(topic, subscriber, subscriptions, Reason::Participant);
        }
    }

    /// Subscribes a session that connects to the channels of its user, except those from which the user was removed
    /// since the session was registered: the removal may arrive before this call.
    pub fn subscribe_own(&self, channels: &[Topic], subscriber: &Arc<Subscriber>) {
        if let Some(subscriptions) = &mut *lock(&subscriber.subscriptions) {
            let removed = subscriptions.removed.take();
            let is_removed = |topic: &Topic| {
                let removed = removed.as_deref().is_some_and(|r| r.0.contains(topic));
                removed && !broken(Mutation::Removed)
            };
            for topic in channels.iter().filter(|topic| !is_removed(topic)) {
                self.insert(topic, subscriber, subscriptions, Reason::Participant);
            }
            subscriptions.removed = removed;
        }
    }

    /// Ends the connecting phase: the session is subscribed to all channels of its user, so removals need not be
    /// remembered.
    pub fn connected(&self, subscriber: &Subscriber) {
        if let Some(subscriptions) = &mut *lock(&subscriber.subscriptions) {
            subscriptions.removed = None;
        }
    }

    /// Subscribes a session to topics that it requests, all of one kind: to all of them or to none. Presence events are
    /// sent at once. Events of a channel are sent only after `confirm`, because the session may turn out not to be
    /// allowed to see them.
    ///
    /// # Errors
    /// [`TooMany`] if the session would exceed `max` requested topics of this kind.
    pub fn request(
        &self,
        topics: &[Topic],
        subscriber: &Arc<Subscriber>,
        max: usize,
    ) -> Result<(), TooMany> {
        let mut subscriptions = lock(&subscriber.subscriptions);
        let Some(subscriptions) = &mut *subscriptions else {
            return Ok(());
        };
        let missing: HashSet<&Topic> = topics
            .iter()
            .filter(|topic| !self.is_subscribed(topic, subscriber.session))
            .collect();
        let requested = topics.first().map_or(0, |t| *subscriptions.requested(t));
        if requested as usize + missing.len() > max {
            return Err(TooMany);
        }
        for topic in missing {
            self.insert(topic, subscriber, subscriptions, Reason::Asking);
        }
        Ok(())
    }

    /// Confirms a request: from now on, events of these topics are sent to the session. Returns false if one of the
    /// subscriptions has ended meanwhile.
    #[must_use]
    pub fn confirm(&self, topics: &[Topic], subscriber: &Arc<Subscriber>) -> bool {
        let mut subscriptions = lock(&subscriber.subscriptions);
        let Some(subscriptions) = &mut *subscriptions else {
            return false;
        };
        let mut missing: HashSet<&Topic> = topics.iter().collect();
        for subscription in &mut subscriptions.list {
            if missing.remove(&subscription.topic) && subscription.reason == Reason::Asking {
                subscription.reason = Reason::Asked;
                self.activate(&subscription.topic, subscriber);
            }
        }
        missing.is_empty()
    }

    /// Makes a session that requested the topic a receiver of its events.
    fn activate(&self, topic: &Topic, subscriber: &Arc<Subscriber>) {
        if let Some(mut subscribers) = self.topics.get_mut(topic)
            && subscribers.asks_no_more(subscriber.session)
        {
            subscribers.shared.take();
            let subscriber = subscriber.clone();
            subscribers.sessions.insert(subscriber.session, subscriber);
        }
    }

    /// Ends the subscriptions of a request that failed, except those that another request confirmed. Returns the ended
    /// ones.
    pub fn give_up(&self, topics: &[Topic], subscriber: &Subscriber) -> Vec<Topic> {
        self.end(topics, subscriber, |reason| reason == Reason::Asking)
    }

    /// Ends requested subscriptions to these topics, but not those of a participant. Returns the ended ones.
    pub fn end_requested(&self, topics: &[Topic], subscriber: &Subscriber) -> Vec<Topic> {
        self.end(topics, subscriber, |reason| reason != Reason::Participant)
    }

    /// Ends the subscription of a session whose user was removed from the channel.
    pub fn removed(&self, channel: &Topic, subscriber: &Subscriber) {
        let mut subscriptions = lock(&subscriber.subscriptions);
        let Some(subscriptions) = &mut *subscriptions else {
            return;
        };
        let channel = std::slice::from_ref(channel);
        self.end_of(subscriptions, channel, subscriber, |_| true);
        // A subscribed session needs this too: while it connects, an older list may still subscribe it again.
        if let Some(Removed(removed)) = subscriptions.removed.as_deref_mut() {
            if removed.len() < REMOVED_WHILE_CONNECTING_MAX {
                removed.extend_from_slice(channel);
            } else {
                subscriber.outbox.close(CloseCode::GoingAway);
            }
        }
    }

    /// Ends the subscriptions of all spectators of the channel. Returns their sessions.
    pub fn end_spectators(&self, channel: &Topic) -> Vec<Arc<Subscriber>> {
        let sessions = self.topics.get(channel).map(|s| s.everyone());
        let mut spectators = sessions.unwrap_or_default();
        spectators.retain(|session| {
            let ended = self.end_requested(std::slice::from_ref(channel), session);
            !ended.is_empty()
        });
        spectators
    }

    #[must_use]
    pub fn is_subscribed(&self, topic: &Topic, session: SessionId) -> bool {
        let subscribers = self.topics.get(topic);
        subscribers.is_some_and(|subscribers| {
            subscribers.sessions.contains_key(&session) || subscribers.asks(session)
        })
    }

    /// Returns whether events of the topic are sent to the session.
    #[must_use]
    pub fn is_sent(&self, topic: &Topic, session: SessionId) -> bool {
        let subscribers = self.topics.get(topic);
        subscribers.is_some_and(|subscribers| subscribers.sessions.contains_key(&session))
    }

    fn insert(
        &self,
        topic: &Topic,
        subscriber: &Arc<Subscriber>,
        subscriptions: &mut Subscriptions,
        reason: Reason,
    ) {
        let entry = self.topics.entry(topic.clone());
        let mut subscribers = entry.or_insert_with(Subscribers::of_one);
        let waits = reason == Reason::Asking && matches!(topic, Topic::Channel(_));
        let known = if waits && !broken(Mutation::Asking) {
            let asking = subscribers.asking.get_or_insert_default();
            asking.insert(subscriber.session, subscriber.clone());
            false
        } else {
            subscribers.shared.take();
            let asked = subscribers.asks_no_more(subscriber.session);
            let session = subscriber.session;
            asked
                | subscribers
                    .sessions
                    .insert(session, subscriber.clone())
                    .is_some()
        };
        drop(subscribers);
        if known {
            subscriptions.promote(topic, reason);
        } else {
            subscriptions.add(topic.clone(), reason);
        }
    }

    fn end(
        &self,
        topics: &[Topic],
        subscriber: &Subscriber,
        which: impl Fn(Reason) -> bool,
    ) -> Vec<Topic> {
        match &mut *lock(&subscriber.subscriptions) {
            Some(subscriptions) => self.end_of(subscriptions, topics, subscriber, which),
            None => Vec::new(),
        }
    }

    /// Ends those subscriptions to these topics whose reason matches. Returns their topics.
    fn end_of(
        &self,
        subscriptions: &mut Subscriptions,
        topics: &[Topic],
        subscriber: &Subscriber,
        which: impl Fn(Reason) -> bool,
    ) -> Vec<Topic> {
        let ended = subscriptions.end(topics, which);
        for topic in &ended {
            // No pass begins until the session is removed. Those under way and waiting have events that were published while it
            // was subscribed.
            let passing = self.passes.passing(topic);
            if let Some(passing) = &passing
                && self.is_sent(topic, subscriber.session)
            {
                passing.leave(subscriber);
            }
            self.remove(topic, subscriber.session);
        }
        ended
    }

    /// Ends all subscriptions of a session that leaves; nothing subscribes it again. The caller passes the returned
    /// topics to [`Hub::left`].
    pub fn leave(&self, subscriber: &Subscriber) -> Vec<Topic> {
        let subscriptions = lock(&subscriber.subscriptions).take();
        let subscriptions = subscriptions.map_or_else(Vec::new, |s| s.list);
        subscriptions.into_iter().map(|s| s.topic).collect()
    }

    /// Removes a session that leaves from the subscribers of these topics.
    pub fn left(&self, topics: &[Topic], subscriber: &Subscriber) {
        for topic in topics {
            self.remove(topic, subscriber.session);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        fanout::hub::tests::subscriber,
        model::{ConversationId, UserId},
    };

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

    /// A removal from a channel may arrive before the session that connects is subscribed to its user's channels.
    #[tokio::test]
    async fn who_is_removed_while_connecting_is_not_subscribed() {
        let hub = Arc::new(Hub::default());
        let [gone, back, stays] = [(); 3].map(|()| Topic::Channel(ConversationId::random()));
        let one = subscriber(1);
        hub.removed(&gone, &one);
        hub.subscribe(&gone, &one);
        hub.removed(&gone, &one);
        hub.removed(&back, &one);
        hub.subscribe(&back, &one);
        hub.subscribe_own(std::slice::from_ref(&gone), &one);
        hub.subscribe_own(&[back.clone(), stays.clone()], &one);
        hub.connected(&one);
        let counts = [&gone, &back, &stays].map(|topic| hub.subscribers(topic));
        assert_eq!(counts, [0, 1, 1]);
        // `channels` assumes that one of the two is the user's own topic, which this test does not subscribe to.
        assert_eq!(one.channels(), 1);
        // A connected session is subscribed or it is not: no removal is remembered.
        hub.removed(&gone, &one);
        hub.subscribe(&gone, &one);
        assert_eq!(hub.subscribers(&gone), 1);
    }

    /// Rule [private]: a session gets no events of a channel before its request is confirmed.
    #[tokio::test]
    async fn who_asks_to_look_into_a_channel_is_sent_nothing_yet() {
        let hub = Arc::new(Hub::default());
        let channel = [Topic::Channel(ConversationId::random())];
        let session = subscriber(1);
        let sent = || hub.is_sent(&channel[0], session.session);
        assert_eq!(hub.request(&channel, &session, 1), Ok(()));
        assert_eq!(
            hub.subscribers(&channel[0]),
            1,
            "this gateway is interested"
        );
        assert!(!sent());
        assert_eq!(hub.end_spectators(&channel[0]).len(), 1);
        assert!(!hub.confirm(&channel, &session) && !sent());
        assert_eq!(hub.subscribers(&channel[0]), 0);
        assert_eq!(hub.request(&channel, &session, 1), Ok(()));
        assert!(hub.confirm(&channel, &session) && sent());
        assert_eq!(hub.request(&channel, &session, 1), Ok(()));
        assert!(sent(), "asking again changes nothing");
        let other = subscriber(2);
        assert_eq!(hub.request(&channel, &other, 1), Ok(()));
        hub.subscribe(&channel[0], &other);
        assert!(hub.is_sent(&channel[0], other.session), "it has joined");
        assert_eq!(hub.end_spectators(&channel[0]).len(), 1);
        hub.left(&hub.leave(&other), &other);
        assert_eq!(hub.subscribers(&channel[0]), 0);
    }

    #[tokio::test]
    async fn a_request_that_fails_ends_only_what_it_began() {
        let hub = Arc::new(Hub::default());
        let [one, other] = [(); 2].map(|()| Topic::Channel(ConversationId::random()));
        let session = subscriber(1);
        let request = |topic: &Topic| hub.request(std::slice::from_ref(topic), &session, 1);
        assert_eq!(request(&one), Ok(()));
        assert_eq!(request(&one), Ok(()), "twice is one place");
        assert_eq!(request(&other), Err(TooMany));
        assert!(hub.confirm(std::slice::from_ref(&one), &session));
        assert!(hub.give_up(std::slice::from_ref(&one), &session).is_empty());
        assert_eq!(hub.subscribers(&one), 1, "the other request succeeded");
        assert_eq!(hub.end_spectators(&one).len(), 1);
        assert_eq!(request(&other), Ok(()));
        assert_eq!(hub.give_up(std::slice::from_ref(&other), &session).len(), 1);
        assert!(!hub.confirm(std::slice::from_ref(&other), &session));
        hub.subscribe(&one, &session);
        assert!(hub.end_spectators(&one).is_empty());
    }
}
