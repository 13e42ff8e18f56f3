//! What sessions request of the homes of users: their inboxes, and presence.

use std::{sync::Arc, time::Duration};

use futures_util::future::join_all;

use super::{
    attention::Attention,
    link::CallError,
    memberships::{InboxOrder, InboxRef, Position},
    message::{InboxPart, PeerMessage, PeerRequest, PeerResponse, encode},
    router::Router,
};
use crate::{
    chat::Error,
    fanout::{Hub, Subscriber},
    model::{
        ConversationId, Topic, UserId,
        limits::{HEADS_AT_ONCE, WATCHED_MAX},
    },
    protocol::PresenceItem,
    store::InboxRow,
};

impl Router {
    /// Subscribes a session to its user, at the user's home, and reads which conversations the user is in. Everything that
    /// is published from then on reaches the session: rule [register].
    ///
    /// # Errors
    /// `Unavailable` if the home does not answer in time.
    pub async fn register(&self, session: &Arc<Subscriber>) -> Result<Vec<InboxRef>, Error> {
        let user = &session.user;
        self.sockets.subscribe(&Topic::User(user.clone()), session);
        let ask = |version| PeerRequest::Register {
            user: user.clone(),
            version,
        };
        match self.ask_home(user, ask).await? {
            PeerResponse::Places(places) => places,
            _ => Err(Error::Closed),
        }
    }

    /// Ends all subscriptions of a session.
    pub fn leave(&self, session: &Subscriber) {
        let tell_away = |away| self.tell_away(&session.user, away);
        self.sockets
            .leave(session, |topic| self.uninterested(topic), tell_away);
    }

    /// Notes whether the user of a session does not look at it. The user's home learns it if that changes something for all
    /// sessions here.
    ///
    /// # Errors
    /// `Unavailable` below the level of consumers.
    pub fn set_away(&self, session: &Subscriber, away: bool) -> Result<(), Error> {
        self.check_consumers_level()?;
        let tell = |away| self.tell_away(&session.user, away);
        self.sockets.set_away(session, away, tell);
        Ok(())
    }

    /// Tells the home of a user whether all sessions of the user here are away. If this is lost with a link, the interests
    /// that are announced for the next version of the ring say it again.
    fn tell_away(&self, user: &UserId, away: bool) {
        match (self.ring.load().home(user), &self.others) {
            (Some(home), Some(others)) if home != self.me => {
                let user = user.clone();
                let told = PeerMessage::Away { user, away };
                others.peers.send(home, encode(&told), None);
            }
            _ => self.home.presence.away(user, self.me, away),
        }
    }

    /// Returns whether a user looks, as their home, and for how long, at least, that has been so.
    #[must_use]
    pub fn attention(&self, user: &UserId) -> (Attention, Duration) {
        self.home.presence.attention(user)
    }

    /// Tells the gateway that is responsible for a topic that no socket here is interested in it any more.
    fn uninterested(&self, topic: &Topic) {
        match (self.ring.load().responsible(topic), &self.others) {
            (Some(gateway), Some(others)) if gateway != self.me => {
                others.peers.uninterested(gateway, topic);
            }
            _ => self.home.uninterested(self.me, topic),
        }
    }

    /// Reads all conversations of a user, as they are stored and as they were published since.
    ///
    /// # Errors
    /// `Unavailable` if the store cannot be read, or the user's home does not answer in time.
    pub async fn inbox_rows(&self, user: &UserId) -> Result<Vec<InboxRow>, Error> {
        self.ask_rows(user, None).await
    }

    /// Reads the rows of some conversations of a user. A home of an earlier build answers all rows.
    ///
    /// # Errors
    /// Those of [`Self::inbox_rows`].
    pub async fn ask_rows(
        &self,
        user: &UserId,
        some: Option<Vec<ConversationId>>,
    ) -> Result<Vec<InboxRow>, Error> {
        match self.ask_inbox(user, some.map(InboxPart::Rows)).await? {
            PeerResponse::Inbox(rows) => rows,
            _ => Err(Error::Closed),
        }
    }

    /// Reads the conversations from which the page of an inbox before a position is chosen.
    pub(super) async fn ask_order(
        &self,
        user: &UserId,
        before: Option<Position>,
        limit: usize,
    ) -> Result<InboxOrder, Error> {
        let part = InboxPart::Order { before, limit };
        match self.ask_inbox(user, Some(part)).await? {
            PeerResponse::InboxOrder(order) => Ok(order),
            // The home is a gateway of an earlier build.
            PeerResponse::Inbox(rows) => Ok(InboxOrder::of(&rows?, before, limit)),
            _ => Err(Error::Closed),
        }
    }

    async fn ask_inbox(
        &self,
        user: &UserId,
        part: Option<InboxPart>,
    ) -> Result<PeerResponse, Error> {
        let ask = |_| PeerRequest::Inbox {
            user: user.clone(),
            part: part.clone(),
        };
        self.ask_home(user, ask).await
    }

    /// Ends subscriptions that a session requested: to channels that its user is not in, and to the presence of users.
    pub fn unsubscribe(&self, session: &Subscriber, topics: &[Topic]) {
        let end = |hub: &Hub| hub.end_requested(topics, session);
        self.sockets.end(end, |topic| self.uninterested(topic));
    }

    /// Undoes a request for subscriptions that failed.
    fn give_up(&self, session: &Subscriber, topics: &[Topic]) {
        let end = |hub: &Hub| hub.give_up(topics, session);
        self.sockets.end(end, |topic| self.uninterested(topic));
    }

    /// Reads whether each user is online, and subscribes the session to changes of that.
    ///
    /// # Errors
    /// `TooLarge` if the session would watch too many users; `Unavailable` if the store cannot be read, or a user's home
    /// does not answer in time. Then nothing has changed.
    pub async fn watch(
        &self,
        session: &Arc<Subscriber>,
        users: &[UserId],
    ) -> Result<Vec<PresenceItem>, Error> {
        let topics: Vec<Topic> = users.iter().cloned().map(Topic::Presence).collect();
        let what = "users that a session watches";
        self.sockets.request(&topics, session, what, WATCHED_MAX)?;
        let mut items = Vec::with_capacity(users.len());
        for users in users.chunks(HEADS_AT_ONCE) {
            items.extend(join_all(users.iter().map(|user| self.watch_one(user))).await);
        }
        let items: Result<Vec<_>, Error> = items.into_iter().collect();
        match items {
            Ok(items) if self.sockets.hub().confirm(&topics, session) => Ok(items),
            Ok(_) => Err(Error::unavailable("unwatched meanwhile")),
            Err(error) => {
                self.give_up(session, &topics);
                Err(error)
            }
        }
    }

    async fn watch_one(&self, user: &UserId) -> Result<PresenceItem, Error> {
        let ask = |version| PeerRequest::Watch {
            user: user.clone(),
            version,
        };
        presence(self.ask_home(user, ask).await?)
    }

    /// Reads whether a user is online.
    ///
    /// # Errors
    /// `Unavailable` if the store cannot be read, or the user's home does not answer in time.
    pub async fn presence(&self, user: &UserId) -> Result<PresenceItem, Error> {
        let ask = |_| PeerRequest::Presence { user: user.clone() };
        presence(self.ask_home(user, ask).await?)
    }

    /// Closes all sessions of a user on all gateways. Returns their number.
    ///
    /// # Errors
    /// `Unavailable` if a gateway does not answer in time.
    pub async fn disconnect(&self, user: &UserId) -> Result<usize, Error> {
        let mut closed = self.sockets.disconnect(user);
        if let Some(others) = &self.others {
            let ring = self.ring.load_full();
            let members = ring.members().iter().filter(|&&g| g != self.me);
            let asks = members.map(|&gateway| {
                let user = user.clone();
                others.peers.ask(gateway, PeerRequest::Disconnect { user })
            });
            let answers = self.in_time(async { Ok(join_all(asks).await) });
            for answer in answers.await? {
                match answer {
                    Ok(PeerResponse::Disconnected(there)) => closed += there,
                    Ok(PeerResponse::Outcome(Err(error))) => return Err(error),
                    // The gateway is gone, and with it its sessions.
                    Ok(_) | Err(CallError::Lost) => {}
                    Err(unasked) => return Err(unasked.into()),
                }
            }
        }
        Ok(closed)
    }
}

fn presence(answer: PeerResponse) -> Result<PresenceItem, Error> {
    match answer {
        PeerResponse::Presence(item) => item,
        _ => Err(Error::Closed),
    }
}
