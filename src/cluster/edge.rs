//! This gateway's sockets, as far as other gateways are concerned: what they are interested in is told to each topic's
//! home or owner, and what comes from there is put into the sockets' queues.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
};

use tokio::sync::Notify;

use super::{
    lock,
    message::{Delivered, Interest},
};
use crate::{
    chat::{Audience, Body, Error, Head, MembershipChange, MembershipNotice, Publication, Receipt},
    fanout::{Encoded, Hub, Subscriber, TooMany},
    model::{
        Content, ConversationId, Cursor, Entry, Kind, Seq, SystemChange, Topic, UserId,
        limits::CHANNELS_AT_ONCE,
    },
    protocol::{CloseCode, ConversationChange, ConversationEvent, Event, Message},
};

/// Entries of a channel noted beyond a gap.
const BEYOND_MAX: usize = 1_024;

pub struct Edge {
    hub: Arc<Hub>,
    /// Held while a topic's first or last subscriber is told of, so that the two are never told in the wrong order.
    telling: Mutex<()>,
    channels: Mutex<BTreeMap<ConversationId, Passed>>,
    times: AtomicU64,
    /// Channels whose owner is yet to be told, and after which entry they are wanted; none: whoever is subscribed must be
    /// told to read.
    to_follow: Mutex<BTreeMap<ConversationId, Option<Seq>>>,
    /// Fires when there is one more.
    pub(super) following: Notify,
}

/// Up to where a channel's entries have been passed on to its sockets here; from when its owner was first asked to send
/// them until nobody here is subscribed any more.
#[derive(Default)]
struct Passed {
    /// Which time that is: an answer to a question of an earlier time says nothing.
    time: u64,
    /// None: its owner has not confirmed yet.
    upto: Option<Seq>,
    beyond: BTreeSet<Seq>,
    /// For inboxes. It counts while it is as new as `upto`: then it is what the owner would say.
    head: Option<Arc<Head>>,
}

impl Passed {
    fn passed_entry(&mut self, entry: &Entry) {
        self.head = self.head.take().and_then(|head| after(&head, entry));
        self.passed(entry.seq);
    }

    fn passed(&mut self, seq: Seq) {
        if self.upto.is_none_or(|upto| seq > upto) {
            self.beyond.insert(seq);
        }
        self.advance();
        while self.beyond.len() > BEYOND_MAX {
            self.beyond.pop_first();
        }
    }

    fn confirmed(&mut self, head: Seq) {
        self.upto = Some(self.upto.map_or(head, |upto| upto.max(head)));
        self.advance();
    }

    fn advance(&mut self) {
        let Some(upto) = &mut self.upto else { return };
        while let Some(&seq) = self.beyond.first()
            && seq <= *upto + 1
        {
            *upto = seq.max(*upto);
            self.beyond.pop_first();
        }
    }
}

/// Of channels.
pub(super) type Heads = HashMap<ConversationId, Arc<Head>>;

/// A channel's head once this entry has followed, if that can be told.
fn after(head: &Head, entry: &Entry) -> Option<Arc<Head>> {
    let changes_details = matches!(entry.content, Content::System(SystemChange::Updated { .. }));
    (entry.seq == head.head + 1 && !changes_details).then(|| {
        Arc::new(Head {
            details: head.details.clone(),
            head: entry.seq,
            last: Some(entry.last()),
        })
    })
}

impl Edge {
    #[must_use]
    pub fn new(hub: Arc<Hub>) -> Self {
        Self {
            hub,
            telling: Mutex::default(),
            channels: Mutex::default(),
            times: AtomicU64::new(0),
            to_follow: Mutex::default(),
            following: Notify::new(),
        }
    }

    pub(super) fn hub(&self) -> &Arc<Hub> {
        &self.hub
    }

    /// Subscribes a session. Whoever is to know of it is told after that.
    pub(super) fn subscribe(&self, topic: &Topic, session: &Arc<Subscriber>) {
        let _telling = lock(&self.telling);
        self.hub.subscribe(topic, session);
    }

    /// Tells something, while no topic's last subscriber goes.
    pub(super) fn telling<T>(&self, tell: impl FnOnce() -> T) -> T {
        let _telling = lock(&self.telling);
        tell()
    }

    /// Subscribes a session that connects to the channels that its user is in. Others need not wait for all of them.
    pub(super) fn follow(&self, channels: &[Topic], session: &Arc<Subscriber>) {
        for channels in channels.chunks(CHANNELS_AT_ONCE) {
            let _telling = lock(&self.telling);
            self.hub.follow(channels, session);
        }
        self.hub.followed(session);
    }

    /// Ends all subscriptions of a session. Others need not wait for all of them.
    pub(super) fn leave(&self, session: &Subscriber, tell: impl Fn(&Topic)) {
        for topics in self.hub.leave(session).chunks(CHANNELS_AT_ONCE) {
            let left = |hub: &Hub| {
                hub.left(topics, session);
                topics.to_vec()
            };
            self.end(left, &tell);
        }
    }

    /// Subscribes a session to what it asked for: see [`Hub::request`].
    ///
    /// # Errors
    /// `TooLarge` if the session would have asked for more than `max` of `what`.
    pub(super) fn request(
        &self,
        topics: &[Topic],
        session: &Arc<Subscriber>,
        what: &'static str,
        max: usize,
    ) -> Result<(), Error> {
        let _telling = lock(&self.telling);
        let requested = self.hub.request(topics, session, max);
        requested.map_err(|TooMany| Error::TooLarge {
            what: what.into(),
            max,
        })
    }

    /// Ends subscriptions by `end`, and tells of those topics in which nobody here is interested any more.
    pub(super) fn end(&self, end: impl FnOnce(&Hub) -> Vec<Topic>, tell: impl Fn(&Topic)) {
        let _telling = lock(&self.telling);
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

    /// Everything that sockets here are interested in; told in one go, see `telling`.
    pub(super) fn interests(&self) -> Vec<Interest> {
        let channels = lock(&self.channels);
        let mut topics = self.hub.topics();
        topics.sort_unstable();
        let interest = |topic| {
            let passed = match &topic {
                Topic::Channel(channel) => channels.get(channel).and_then(|p| p.upto),
                Topic::User(_) | Topic::Presence(_) => None,
            };
            Interest { topic, passed }
        };
        topics.into_iter().map(interest).collect()
    }

    /// Whether the channel's owner knows that its entries are wanted here.
    pub(super) fn follows(&self, channel: ConversationId) -> bool {
        let channels = lock(&self.channels);
        channels.get(&channel).is_some_and(|p| p.upto.is_some())
    }

    /// To be called before the channel's owner is asked; what it returns belongs to the answer. None: nobody here is
    /// interested any more.
    pub(super) fn asking(&self, channel: ConversationId) -> Option<u64> {
        let mut channels = lock(&self.channels);
        // Looked at under the lock: whoever leaves now forgets it again after that.
        if self.hub.subscribers(&Topic::Channel(channel)) == 0 {
            return None;
        }
        let passed = channels.entry(channel).or_insert_with(|| Passed {
            time: self.times.fetch_add(1, Ordering::Relaxed),
            ..Passed::default()
        });
        Some(passed.time)
    }

    /// The channel's owner knows, and publishes here whatever comes after `head`: unless it was told meanwhile that nobody
    /// here is interested any more.
    pub(super) fn confirmed(&self, channel: ConversationId, time: u64, head: Seq) {
        let mut channels = lock(&self.channels);
        if let Some(passed) = channels.get_mut(&channel).filter(|p| p.time == time) {
            passed.confirmed(head);
        }
    }

    /// The heads of those channels whose entries all pass by here, and which channels the others are.
    pub(super) fn heads(
        &self,
        channels: impl Iterator<Item = ConversationId>,
    ) -> (Heads, Vec<ConversationId>) {
        let passed = lock(&self.channels);
        let (mut heads, mut unknown) = (Heads::new(), Vec::new());
        for channel in channels {
            let known = passed.get(&channel).and_then(|passed| {
                let head = passed.head.as_ref()?;
                (passed.upto == Some(head.head)).then(|| head.clone())
            });
            match known {
                Some(head) => drop(heads.insert(channel, head)),
                None => unknown.push(channel),
            }
        }
        (heads, unknown)
    }

    /// Keeps what the owner said, to a question of this time.
    pub(super) fn learned(&self, channel: ConversationId, time: u64, head: &Arc<Head>) {
        let mut channels = lock(&self.channels);
        if let Some(passed) = channels.get_mut(&channel).filter(|p| p.time == time) {
            passed.head = Some(head.clone());
        }
    }

    /// Channels whose owner is yet to be told.
    pub(super) fn take_to_follow(&self) -> BTreeMap<ConversationId, Option<Seq>> {
        std::mem::take(&mut *lock(&self.to_follow))
    }

    pub(super) fn follow_later(&self, channel: ConversationId, after: Option<Seq>) {
        let mut to_follow = lock(&self.to_follow);
        let earliest = to_follow.entry(channel).or_insert(after);
        *earliest = after.zip(*earliest).map(|(a, b)| a.min(b));
    }

    pub(super) fn deliver(&self, delivered: Delivered) {
        match delivered {
            Delivered::Publication(publication) => self.publication(&publication),
            Delivered::Presence(item) => {
                let topic = Topic::Presence(item.user.clone());
                self.hub
                    .deliver(&topic, &Encoded::new(Event::Presence(item)));
            }
            Delivered::Resync { channel, head } => {
                self.resync(channel, head);
            }
        }
    }

    /// Whoever is in the channel must read it up to `head`.
    pub(super) fn resync(&self, channel: ConversationId, head: Seq) {
        let event = Event::Resync {
            conversation: channel,
            head,
        };
        self.hub
            .deliver(&Topic::Channel(channel), &Encoded::new(event));
        let mut channels = lock(&self.channels);
        if let Some(passed) = channels.get_mut(&channel).filter(|p| p.upto.is_some()) {
            passed.confirmed(head);
        }
    }

    /// Puts a publication into the queues of the sockets it concerns.
    pub(super) fn publication(&self, publication: &Publication) {
        let Publication {
            conversation,
            at,
            audience,
            body,
            ..
        } = publication;
        let conversation = *conversation;
        match body {
            Body::Entry(entry) => {
                let message = Message::of(conversation, entry.as_ref().clone());
                self.send(conversation, audience, Event::Message(Box::new(message)));
                if matches!(audience, Audience::Channel) {
                    if let Some(passed) = lock(&self.channels).get_mut(&conversation) {
                        passed.passed_entry(entry);
                    }
                    if entry.content.makes_private() {
                        self.end_spectators(conversation);
                    }
                }
            }
            Body::Membership(notice) => self.membership(conversation, *at, notice, audience),
            Body::Receipt(receipt) => {
                let Receipt {
                    user,
                    read_seq,
                    delivered_seq,
                } = receipt.clone();
                let receipt = Event::Receipt {
                    conversation,
                    user,
                    read_seq,
                    delivered_seq,
                };
                self.send(conversation, audience, receipt);
            }
            Body::Typing(user) => {
                let user = user.clone();
                self.send(conversation, audience, Event::Typing { conversation, user });
            }
            Body::Read => {}
        }
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
                        if !self.follows(conversation) {
                            self.follow_later(conversation, Some(seq - 1));
                            self.following.notify_one();
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

    /// The owner is told by the next version: until then it sends what nobody here takes.
    fn forget_unless_subscribed(&self, channel: ConversationId) {
        if self.hub.subscribers(&Topic::Channel(channel)) == 0 {
            lock(&self.channels).remove(&channel);
        }
    }

    /// A channel is no longer public: whoever looks into it without being in it is told that this is over.
    pub(super) fn end_spectators(&self, channel: ConversationId) {
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

    pub(super) fn disconnect(&self, user: &UserId) -> usize {
        self.hub.disconnect(user, CloseCode::Disconnected)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        model::{Details, SessionId},
        protocol::Codec,
    };

    /// Somebody asks, everyone leaves, somebody else comes: the answer to the first one's question is of before the owner
    /// was told that nobody is interested.
    #[test]
    fn an_answer_of_an_earlier_time_says_nothing() {
        let edge = Edge::new(Arc::default());
        let channel = ConversationId(uuid::Uuid::from_u128(1));
        let topic = Topic::Channel(channel);
        let session = |n| {
            let id = SessionId(n);
            let user = UserId::new("alice").unwrap();
            Arc::new(Subscriber::new(id, user, Codec::Json, 1 << 20))
        };
        let (first, second) = (session(1), session(2));
        assert_eq!(edge.asking(channel), None, "nobody is here");
        edge.subscribe(&topic, &first);
        let asked = edge.asking(channel).unwrap();
        edge.leave(&first, |_| {});
        edge.subscribe(&topic, &second);
        edge.confirmed(channel, asked, 10);
        assert!(!edge.follows(channel), "the owner was told otherwise since");
        let again = edge.asking(channel).unwrap();
        edge.confirmed(channel, asked, 10);
        assert!(!edge.follows(channel));
        edge.confirmed(channel, again, 10);
        assert!(edge.follows(channel));
    }

    fn text(seq: Seq) -> Content {
        Content::text(format!("number {seq}"))
    }

    fn passes(edge: &Edge, conversation: ConversationId, seq: Seq, content: Content) {
        let entry = Entry {
            seq,
            message_id: crate::clock::message_id(1),
            client_id: crate::model::ClientId(uuid::Uuid::nil()),
            sender: UserId::new("alice").unwrap(),
            at: 1,
            content,
        };
        let audience = Audience::Channel;
        edge.publication(&Publication::entry(conversation, entry.into(), audience));
    }

    /// What the owner said counts for as long as everything that followed has passed by here.
    #[test]
    fn a_head_is_known_while_nothing_is_missing() {
        let edge = Edge::new(Arc::default());
        let channel = ConversationId(uuid::Uuid::from_u128(1));
        let user = UserId::new("alice").unwrap();
        let session = Arc::new(Subscriber::new(
            SessionId(1),
            user.clone(),
            Codec::Json,
            1 << 20,
        ));
        edge.subscribe(&Topic::Channel(channel), &session);
        let details = Details {
            kind: Kind::Channel,
            name: None,
            created_at: 1,
            created_by: user,
            posting: crate::model::Posting::Everyone,
            public: false,
        };
        let said = |head| {
            Arc::new(Head {
                details: details.clone(),
                head,
                last: None,
            })
        };
        let known = || {
            let (heads, _) = edge.heads(std::iter::once(channel));
            heads.get(&channel).map(|head| head.head)
        };
        let time = edge.asking(channel).unwrap();
        passes(&edge, channel, 11, text(11));
        edge.confirmed(channel, time, 10);
        edge.learned(channel, time, &said(10));
        assert_eq!(known(), None, "11 had passed before the answer came");
        edge.learned(channel, time, &said(11));
        assert_eq!(known(), Some(11));
        passes(&edge, channel, 12, text(12));
        assert_eq!(known(), Some(12));
        passes(&edge, channel, 14, text(14));
        assert_eq!(known(), None, "13 is missing");
        passes(&edge, channel, 13, text(13));
        edge.learned(channel, time, &said(14));
        assert_eq!(known(), Some(14));
        let renamed = SystemChange::Updated {
            name: Some("new".into()),
            posting: None,
            public: None,
        };
        passes(&edge, channel, 15, Content::System(renamed));
        assert_eq!(known(), None, "the details are other ones");
        edge.learned(channel, time + 1, &said(15));
        assert_eq!(known(), None, "an answer of another time");
    }

    #[test]
    fn what_was_passed_on_has_no_gaps() {
        let mut passed = Passed::default();
        passed.passed(11);
        assert_eq!(passed.upto, None);
        passed.confirmed(10);
        assert_eq!(passed.upto, Some(11), "what came early counts");
        passed.passed(13);
        assert_eq!(passed.upto, Some(11));
        passed.passed(12);
        assert_eq!(passed.upto, Some(13));
        passed.passed(5);
        passed.confirmed(9);
        assert_eq!(passed.upto, Some(13), "nothing goes back");
    }
}
