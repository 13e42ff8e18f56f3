//! This gateway's sockets, as far as other gateways are concerned. The home or owner of each topic learns what they are
//! interested in, and what comes from there is put into the sockets' queues.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, HashMap},
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
};

use foldhash::quality::RandomState;
use tokio::sync::Notify;

use super::{
    channel_progress::{ChannelProgress, Heads},
    events::{changed_event, gap},
};
use crate::{
    chat::{
        Audience, Body, Changed, Error, Head, MembershipChange, MembershipNotice, Publication,
        Receipt,
    },
    cluster::wire::{
        message::{Delivered, Interest},
        question::Position,
    },
    fanout::{Encoded, Hub, Subscriber, TooMany},
    model::{
        ConversationId, Cursor, Entry, Kind, Rev, Seq, Topic, UserId, limits::CHANNELS_AT_ONCE,
    },
    protocol::{
        CloseCode, ConversationChange, ConversationEvent, Event, Message, SettingsEvent, Switch,
    },
    tasks::lock,
};

pub struct LocalSockets {
    hub: Arc<Hub>,
    /// Held while a topic's first or last subscriber is announced, so that the two are never announced in the wrong order.
    interest_order: Mutex<()>,
    channels: Mutex<HashMap<ConversationId, ChannelProgress, RandomState>>,
    /// The number of the next [`ChannelProgress`].
    next_subscription: AtomicU64,
    /// The channels whose owner does not know yet that they are wanted here, and the entry after which they are. `None`:
    /// the subscribers must be told to read.
    untold: Mutex<BTreeMap<ConversationId, Option<Seq>>>,
    /// Fires when there is one more channel in `untold`.
    pub(crate) more_untold: Notify,
}

impl LocalSockets {
    #[must_use]
    pub fn new(hub: Arc<Hub>) -> Self {
        Self {
            hub,
            interest_order: Mutex::default(),
            channels: Mutex::default(),
            next_subscription: AtomicU64::new(0),
            untold: Mutex::default(),
            more_untold: Notify::new(),
        }
    }

    pub(crate) fn hub(&self) -> &Arc<Hub> {
        &self.hub
    }

    /// Subscribes a session. The topic's home or owner is to be told after that.
    pub(crate) fn subscribe(&self, topic: &Topic, session: &Arc<Subscriber>) {
        let _order = lock(&self.interest_order);
        self.hub.subscribe(topic, session);
    }

    /// Tells of interests by `tell`, while no topic's last subscriber can leave.
    pub(crate) fn in_interest_order<T>(&self, tell: impl FnOnce() -> T) -> T {
        let _order = lock(&self.interest_order);
        tell()
    }

    /// Subscribes a connecting session to the channels that its user is in, some at a time, so that others wait less.
    pub(crate) fn subscribe_own(&self, channels: &[Topic], session: &Arc<Subscriber>) {
        for channels in channels.chunks(CHANNELS_AT_ONCE) {
            let _order = lock(&self.interest_order);
            self.hub.subscribe_own(channels, session);
        }
        self.hub.connected(session);
    }

    /// Ends all subscriptions of a session, some at a time, so that others wait less. `tell_away` is called if the other
    /// sessions of its user are all away, and this one was not.
    pub(crate) fn leave(
        &self,
        session: &Subscriber,
        tell: impl Fn(&Topic),
        tell_away: impl Fn(bool),
    ) {
        for topics in self.hub.leave(session).chunks(CHANNELS_AT_ONCE) {
            let left = |hub: &Hub| {
                hub.left(topics, session);
                topics.to_vec()
            };
            self.end(left, &tell);
        }
        if !session.is_away() {
            let _order = lock(&self.interest_order);
            if self.hub.is_away(&session.user) {
                tell_away(true);
            }
        }
    }

    /// Notes whether a session is away. `tell` is called if it is now another answer whether all sessions of its user here
    /// are away.
    pub(crate) fn set_away(&self, session: &Subscriber, away: bool, tell: impl Fn(bool)) {
        let _order = lock(&self.interest_order);
        let before = self.hub.is_away(&session.user);
        session.set_away(away);
        let after = self.hub.is_away(&session.user);
        if before != after {
            tell(after);
        }
    }

    /// Subscribes a session to what it asked for: see [`Hub::request`].
    ///
    /// # Errors
    /// `TooLarge` if the session would have asked for more than `max` of `what`.
    pub(crate) fn request(
        &self,
        topics: &[Topic],
        session: &Arc<Subscriber>,
        what: &'static str,
        max: usize,
    ) -> Result<(), Error> {
        let _order = lock(&self.interest_order);
        let requested = self.hub.request(topics, session, max);
        requested.map_err(|TooMany| Error::TooLarge {
            what: what.into(),
            max,
        })
    }

    /// Ends subscriptions by `end`, and tells of the topics that have no subscriber here any more by `tell`.
    pub(crate) fn end(&self, end: impl FnOnce(&Hub) -> Vec<Topic>, tell: impl Fn(&Topic)) {
        let _order = lock(&self.interest_order);
        for topic in end(&self.hub) {
            if self.hub.subscribers(&topic) > 0 {
                continue;
            }
            if let Topic::Channel(channel) = topic {
                lock(&self.channels).remove(&channel);
            }
            tell(&topic);
        }
    }

    /// Returns everything that sockets here are interested in. To be called within `in_interest_order`.
    pub(crate) fn interests(&self) -> Vec<Interest> {
        let channels = lock(&self.channels);
        let mut topics = self.hub.topics();
        topics.sort_unstable();
        let interest = |topic| {
            let passed = match &topic {
                Topic::Channel(channel) => {
                    channels.get(channel).and_then(ChannelProgress::contiguous)
                }
                Topic::User(_) | Topic::Presence(_) => None,
            };
            let away = match &topic {
                Topic::User(user) => self.hub.is_away(user),
                Topic::Channel(_) | Topic::Presence(_) => false,
            };
            Interest {
                topic,
                passed,
                away,
            }
        };
        topics.into_iter().map(interest).collect()
    }

    /// Whether the channel's owner knows that its entries are wanted here.
    pub(crate) fn owner_knows(&self, channel: ConversationId) -> bool {
        let channels = lock(&self.channels);
        channels
            .get(&channel)
            .is_some_and(|p| p.contiguous().is_some())
    }

    /// Returns the subscription to which the answer of a channel's owner will belong; `None` if the channel has no
    /// subscriber here any more. To be called before the owner is asked.
    pub(crate) fn subscription(&self, channel: ConversationId) -> Option<u64> {
        let mut channels = lock(&self.channels);
        // Under the lock: a session that leaves now forgets the channel after this.
        if self.hub.subscribers(&Topic::Channel(channel)) == 0 {
            return None;
        }
        let new = || ChannelProgress::new(self.next_subscription.fetch_add(1, Ordering::Relaxed));
        let progress = channels.entry(channel).or_insert_with(new);
        Some(progress.subscription)
    }

    /// Notes that the channel's owner publishes here what follows `head`. Ignored if the owner was told meanwhile that
    /// nobody here is interested any more.
    pub(crate) fn confirmed(&self, channel: ConversationId, subscription: u64, head: Cursor) {
        let mut channels = lock(&self.channels);
        let progress = channels.get_mut(&channel);
        if let Some(progress) = progress.filter(|p| p.subscription == subscription) {
            progress.confirmed(head);
        }
    }

    /// Returns the heads of channels that come here without a gap, and the other channels. Of the heads it returns
    /// only the newest ones before a position: one more than `limit`.
    pub(crate) fn heads(
        &self,
        channels: Vec<ConversationId>,
        before: Option<Position>,
        limit: usize,
    ) -> (Heads, Vec<ConversationId>) {
        let (mut heads, mut unknown) = (Vec::new(), Vec::new());
        // Deliveries wait for this lock, so it is released now and then.
        for channels in channels.chunks(CHANNELS_AT_ONCE) {
            let known = lock(&self.channels);
            for &channel in channels {
                let Some(head) = known.get(&channel).and_then(ChannelProgress::head) else {
                    unknown.push(channel);
                    continue;
                };
                let position = (head.rank(), channel);
                if before.is_none_or(|before| position < before) {
                    heads.push((position, head.clone()));
                }
            }
            drop(known);
            if heads.len() > limit {
                heads.select_nth_unstable_by_key(limit, |(position, _)| Reverse(*position));
                heads.truncate(limit + 1);
            }
        }
        let heads = heads.into_iter();
        (
            heads.map(|((_, channel), head)| (channel, head)).collect(),
            unknown,
        )
    }

    /// Remembers the head that the owner answered to a question of this subscription.
    pub(crate) fn learned(&self, channel: ConversationId, subscription: u64, head: &Arc<Head>) {
        let mut channels = lock(&self.channels);
        let progress = channels.get_mut(&channel);
        if let Some(progress) = progress.filter(|p| p.subscription == subscription) {
            progress.learned(head.clone());
        }
    }

    /// Takes the channels whose owner does not know yet that they are wanted here.
    pub(crate) fn take_untold(&self) -> BTreeMap<ConversationId, Option<Seq>> {
        std::mem::take(&mut *lock(&self.untold))
    }

    /// Lets a channel's owner know later that its entries after `after` are wanted here.
    pub(crate) fn tell_later(&self, channel: ConversationId, after: Option<Seq>) {
        let mut untold = lock(&self.untold);
        let earliest = untold.entry(channel).or_insert(after);
        *earliest = after.zip(*earliest).map(|(a, b)| a.min(b));
    }

    /// Delivers what another gateway sent for the sockets here.
    pub(crate) fn deliver(&self, delivered: Delivered) {
        match delivered {
            Delivered::Publication(publication) => self.deliver_publication(&publication),
            Delivered::Presence(item) => {
                let topic = Topic::Presence(item.user.clone());
                self.hub
                    .deliver(&topic, &Encoded::new(Event::Presence(item)));
            }
            Delivered::Resync { channel, head } => {
                self.resync(channel, head);
            }
            Delivered::Settings {
                user,
                conversation,
                settings,
            } => {
                let event = Event::Settings(SettingsEvent {
                    conversation,
                    version: settings.version,
                    muted_until: settings.muted_until,
                    push: Switch::of(settings.push),
                });
                self.hub.deliver(&Topic::User(user), &Encoded::new(event));
            }
        }
    }

    /// Tells the channel's subscribers which rev it has reached. Those that have not reached it ask for what they lack.
    pub(crate) fn tell_rev(&self, channel: ConversationId, rev: Rev) {
        self.deliver_changed(channel, rev, &gap(rev), &Audience::Channel);
    }

    /// Tells the channel's subscribers to read it up to `head`.
    pub(crate) fn resync(&self, channel: ConversationId, head: Seq) {
        let event = Event::Resync {
            conversation: channel,
            head,
        };
        // Noted first, as entries are.
        let mut channels = lock(&self.channels);
        let progress = channels.get_mut(&channel);
        if let Some(progress) = progress.filter(|p| p.contiguous().is_some()) {
            progress.confirmed(Cursor(head, 0));
        }
        drop(channels);
        self.hub
            .deliver(&Topic::Channel(channel), &Encoded::new(event));
    }

    /// Puts a publication into the queues of the sockets it concerns.
    pub(crate) fn deliver_publication(&self, publication: &Publication) {
        let Publication {
            conversation,
            at,
            audience,
            body,
            ..
        } = publication;
        let conversation = *conversation;
        match body {
            Body::Entry(entry) => self.deliver_entry(conversation, entry, audience),
            Body::Membership(notice) => self.membership(conversation, *at, notice, audience),
            Body::Receipt(receipt) => {
                let Receipt {
                    user,
                    read_seq,
                    delivered_seq,
                    ..
                } = receipt.as_ref().clone();
                let receipt = Event::Receipt {
                    conversation,
                    user,
                    read_seq,
                    delivered_seq,
                };
                self.send(conversation, audience, receipt);
            }
            Body::Typing(user) => {
                let typing = Encoded::new(Event::Typing {
                    conversation,
                    user: user.clone(),
                });
                for other in audience.users().filter(|&other| other != user) {
                    self.hub.deliver(&Topic::User(other.clone()), &typing);
                }
            }
            Body::Changed(changed) => {
                self.deliver_changed(conversation, at.1, changed, audience);
            }
            Body::Reacted(reacted) => {
                let reacted = Event::Reacted {
                    conversation,
                    seq: reacted.seq,
                    emoji: reacted.emoji.clone(),
                    on: reacted.on,
                    rev: reacted.rev,
                };
                self.send(conversation, audience, reacted);
            }
            Body::File(notice) => {
                let notice = Event::Attachment(notice.as_ref().clone());
                self.send(conversation, audience, notice);
            }
            // It concerns inboxes only.
            Body::Read(_) => {}
        }
    }

    fn deliver_entry(&self, conversation: ConversationId, entry: &Entry, audience: &Audience) {
        let message = Message::of(conversation, entry.clone(), None, None);
        let is_channel = matches!(audience, Audience::Channel);
        // Noted first: a session that subscribes and then looks how far the channel has come must find the entry there, or
        // get it.
        if is_channel && let Some(progress) = lock(&self.channels).get_mut(&conversation) {
            progress.delivered_entry(entry);
        }
        self.send(conversation, audience, Event::Message(Box::new(message)));
        if is_channel && entry.content.makes_private() {
            self.end_spectators(conversation);
        }
    }

    fn deliver_changed(
        &self,
        conversation: ConversationId,
        rev: Rev,
        changed: &Changed,
        audience: &Audience,
    ) {
        // Noted first, as entries are.
        if matches!(audience, Audience::Channel)
            && let Some(progress) = lock(&self.channels).get_mut(&conversation)
        {
            progress.delivered_changes(rev, changed);
        }
        let event = changed_event(conversation, rev, changed.clone());
        self.send(conversation, audience, event);
    }

    /// Ends or begins a channel's subscriptions of the users whose membership changed, and tells their sockets.
    fn membership(
        &self,
        conversation: ConversationId,
        Cursor(seq, _): Cursor,
        notice: &MembershipNotice,
        audience: &Audience,
    ) {
        let MembershipNotice { change, details } = notice;
        if details.kind == Kind::Channel {
            let topic = Topic::Channel(conversation);
            for session in audience.users().flat_map(|user| self.hub.sessions_of(user)) {
                match change {
                    MembershipChange::Added => {
                        self.hub.subscribe(&topic, &session);
                        if !self.owner_knows(conversation) {
                            self.tell_later(conversation, Some(seq - 1));
                            self.more_untold.notify_one();
                        }
                    }
                    MembershipChange::Removed => self.hub.removed(&topic, &session),
                    MembershipChange::Updated => {}
                }
            }
            self.forget_unless_subscribed(conversation);
        }
        let (change, details) = match change {
            MembershipChange::Added => (ConversationChange::Added, Some(details.clone())),
            MembershipChange::Removed => (ConversationChange::Removed, None),
            MembershipChange::Updated => (ConversationChange::Updated, Some(details.clone())),
        };
        let event = ConversationEvent {
            conversation,
            change,
            details,
        };
        self.send(conversation, audience, Event::Conversation(event));
    }

    /// Forgets a channel that has no subscriber here any more. Its owner learns that with the next version of the ring; what
    /// it sends until then is ignored.
    fn forget_unless_subscribed(&self, channel: ConversationId) {
        if self.hub.subscribers(&Topic::Channel(channel)) == 0 {
            lock(&self.channels).remove(&channel);
        }
    }

    /// Ends the subscriptions of sessions that look into a channel without being in it, and tells them: it is no longer
    /// public.
    pub(crate) fn end_spectators(&self, channel: ConversationId) {
        let event = Encoded::new(Event::Conversation(ConversationEvent {
            conversation: channel,
            change: ConversationChange::Removed,
            details: None,
        }));
        for Subscriber { outbox, .. } in self
            .hub
            .end_spectators(&Topic::Channel(channel))
            .iter()
            .map(|session| &**session)
        {
            outbox.push(event.frame(outbox.codec()).clone());
        }
        self.forget_unless_subscribed(channel);
    }

    /// Queues an event for the sockets of an audience.
    fn send(&self, conversation: ConversationId, audience: &Audience, event: Event) {
        let event = Encoded::new(event);
        match audience {
            Audience::Channel => self.hub.deliver(&Topic::Channel(conversation), &event),
            Audience::Members(_) | Audience::User(_) => {
                for user in audience.users() {
                    self.hub.deliver(&Topic::User(user.clone()), &event);
                }
            }
        }
    }

    /// Closes a user's sessions here, and returns their number.
    pub(crate) fn disconnect(&self, user: &UserId) -> usize {
        self.hub.disconnect(user, CloseCode::Disconnected)
    }
}

#[cfg(test)]
mod tests;
