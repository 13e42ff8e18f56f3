//! Requests inward: an operation goes to the conversation's owner, an inbox read to the user's home.

use std::sync::Arc;

use arc_swap::ArcSwap;
use futures_util::{StreamExt, stream};

use super::{home::Home, presence::Presence, ring::Ring};
use crate::{
    chat::{Conversations, Error, Head, Operation, Outcome, Sent},
    fanout::{Hub, Subscriber},
    model::{ConversationId, Draft, GatewayId, Kind, Topic, UserId},
    protocol::{InboxItem, PresenceItem},
    store::{InboxRow, PublicRow, Store},
};

/// Channel heads asked at once for one inbox.
const HEADS_AT_ONCE: usize = 16;

/// The way to everything a session can ask for.
pub struct Router {
    me: GatewayId,
    ring: Arc<ArcSwap<Ring>>,
    store: Arc<dyn Store>,
    conversations: Conversations,
    home: Arc<Home>,
    presence: Presence,
    hub: Arc<Hub>,
}

/// One page of an inbox, newest first.
pub struct Inbox {
    pub items: Vec<InboxItem>,
    /// Where the next page begins.
    pub next: Option<String>,
}

impl Router {
    #[must_use]
    pub fn new(
        me: GatewayId,
        ring: Arc<ArcSwap<Ring>>,
        store: Arc<dyn Store>,
        conversations: Conversations,
        home: Arc<Home>,
        hub: Arc<Hub>,
    ) -> Self {
        let presence = Presence::new(store.clone(), hub.clone());
        Self {
            me,
            ring,
            store,
            conversations,
            home,
            presence,
            hub,
        }
    }

    #[must_use]
    pub fn me(&self) -> GatewayId {
        self.me
    }

    /// Asks the owner of `conversation`.
    ///
    /// # Errors
    /// As the operation; `Unavailable` when the owner cannot be reached.
    pub async fn ask(
        &self,
        conversation: ConversationId,
        actor: UserId,
        operation: Operation,
    ) -> Result<Outcome, Error> {
        self.owned_here(conversation)?;
        self.conversations.ask(conversation, actor, operation).await
    }

    /// As `ask`, for a message.
    ///
    /// # Errors
    /// As `ask`.
    pub async fn send(&self, conversation: ConversationId, draft: Draft) -> Result<Sent, Error> {
        self.owned_here(conversation)?;
        self.conversations.send(conversation, draft).await
    }

    fn owned_here(&self, conversation: ConversationId) -> Result<(), Error> {
        if self.ring.load().owner(conversation) == Some(self.me) {
            Ok(())
        } else {
            Err(Error::Unavailable {
                reason: "another gateway owns the conversation",
            })
        }
    }

    /// Subscribes a session to its user, at the user's home. When it returns, everything published from
    /// now on reaches the session: rule [register], then read.
    pub fn register(&self, session: &Arc<Subscriber>) {
        self.hub
            .subscribe(&Topic::User(session.user.clone()), session);
        self.presence.came(&session.user);
    }

    /// Ends everything that `register` and `subscribe` began.
    pub fn leave(&self, session: &Subscriber) {
        self.hub.leave(session);
        self.presence.went(&session.user);
    }

    /// All conversations of a user, as stored and as published since.
    ///
    /// # Errors
    /// When the store cannot be read.
    pub async fn inbox_rows(&self, user: &UserId) -> Result<Vec<InboxRow>, Error> {
        Ok(self.home.inbox(user).await?)
    }

    /// One page of the inbox, newest first, channels merged in.
    ///
    /// # Errors
    /// `Invalid` when `before` is not a `next` of an earlier page; `Unavailable` when the store or an owner cannot
    /// be reached.
    pub async fn inbox(
        &self,
        user: &UserId,
        before: Option<&str>,
        limit: usize,
    ) -> Result<Inbox, Error> {
        let before = before.map(parse_position).transpose()?;
        let rows = self.inbox_rows(user).await?;
        let items: Vec<Result<Option<InboxItem>, Error>> = stream::iter(rows)
            .map(|row| self.item(user, row))
            .buffered(HEADS_AT_ONCE)
            .collect()
            .await;
        let mut items: Vec<InboxItem> = items
            .into_iter()
            .filter_map(Result::transpose)
            .collect::<Result<_, _>>()?;
        items.sort_unstable_by_key(|item| std::cmp::Reverse(position(item)));
        if let Some(before) = before {
            items.retain(|item| position(item) < before);
        }
        let next = (items.len() > limit)
            .then(|| items.get(limit.saturating_sub(1)).map(format_position))
            .flatten();
        items.truncate(limit);
        Ok(Inbox { items, next })
    }

    async fn item(&self, user: &UserId, row: InboxRow) -> Result<Option<InboxItem>, Error> {
        let Some(face) = row.face else {
            return Ok(None);
        };
        let conversation = row.conversation;
        let (name, last) = match face.kind {
            Kind::Dm | Kind::Group => (face.name, face.last),
            Kind::Channel => match self.ask(conversation, user.clone(), Operation::Head).await {
                Ok(Outcome::Head(Head { details, last, .. })) => (details.name, last),
                // Left at this moment, or removed.
                Ok(_) | Err(Error::UnknownConversation | Error::Forbidden(_)) => return Ok(None),
                Err(error) => return Err(error),
            },
        };
        let last_seq = last.as_ref().map_or(0, |l| l.seq);
        let read_seq = row.read_seq.max(face.joined_seq);
        Ok(Some(InboxItem {
            conversation,
            kind: face.kind,
            name,
            last_seq,
            rev: 0,
            last_message: last,
            read_seq,
            unread: last_seq.saturating_sub(read_seq),
            joined_seq: face.joined_seq,
        }))
    }

    /// Subscribes a session to a channel it may read, and answers with the channel's head as of then.
    ///
    /// # Errors
    /// As reading the channel; `Invalid` if it is no channel.
    pub async fn subscribe(
        &self,
        session: &Arc<Subscriber>,
        conversation: ConversationId,
    ) -> Result<Head, Error> {
        let topic = Topic::Channel(conversation);
        let head = || self.ask(conversation, session.user.clone(), Operation::Head);
        // Asked twice: first whether it may, then, subscribed, where the channel has got to.
        let Outcome::Head(first) = head().await? else {
            return Err(Error::UnknownConversation);
        };
        if first.details.kind != Kind::Channel {
            return Err(Error::Invalid("only channels can be looked into".into()));
        }
        self.hub.subscribe(&topic, session);
        match head().await {
            Ok(Outcome::Head(head)) => Ok(head),
            other => {
                self.hub.unsubscribe(&topic, session);
                other.and(Err(Error::UnknownConversation))
            }
        }
    }

    /// Subscribes a session to a channel whose participant its user is.
    pub fn follow(&self, session: &Arc<Subscriber>, channel: ConversationId) {
        self.hub.subscribe(&Topic::Channel(channel), session);
    }

    pub fn unsubscribe(&self, session: &Subscriber, channel: ConversationId) {
        self.hub.unsubscribe(&Topic::Channel(channel), session);
    }

    /// Whether each user is online; and from now on, when that changes.
    ///
    /// # Errors
    /// When the store cannot be read.
    pub async fn watch(
        &self,
        session: &Arc<Subscriber>,
        users: &[UserId],
    ) -> Result<Vec<PresenceItem>, Error> {
        let mut items = Vec::with_capacity(users.len());
        for user in users {
            self.hub.subscribe(&Topic::Presence(user.clone()), session);
            items.push(self.presence.of(user).await?);
        }
        Ok(items)
    }

    pub fn unwatch(&self, session: &Subscriber, users: &[UserId]) {
        for user in users {
            self.hub
                .unsubscribe(&Topic::Presence(user.clone()), session);
        }
    }

    /// # Errors
    /// When the store cannot be read.
    pub async fn presence(&self, user: &UserId) -> Result<PresenceItem, Error> {
        Ok(self.presence.of(user).await?)
    }

    /// # Errors
    /// When the store cannot be read.
    pub async fn public(
        &self,
        after: Option<ConversationId>,
        limit: usize,
    ) -> Result<Vec<PublicRow>, Error> {
        Ok(self.store.public_conversations(after, limit).await?)
    }

    /// Stores when users were last seen. To be called every few seconds.
    pub async fn flush_presence(&self) {
        self.presence.flush().await;
    }

    /// # Errors
    /// Why nothing can be stored now.
    pub fn ready(&self) -> Result<(), crate::store::Error> {
        self.store.healthy()
    }
}

/// An inbox is ordered by the time of its newest entries, for people; the id makes it a total order.
type Position = (crate::model::Millis, ConversationId);

fn position(item: &InboxItem) -> Position {
    (
        item.last_message.as_ref().map_or(0, |last| last.at),
        item.conversation,
    )
}

fn format_position(item: &InboxItem) -> String {
    let (at, id) = position(item);
    format!("{at}:{id}")
}

fn parse_position(text: &str) -> Result<Position, Error> {
    text.split_once(':')
        .and_then(|(at, id)| Some((at.parse().ok()?, id.parse().ok()?)))
        .ok_or_else(|| Error::Invalid("before is not the next of an earlier page".into()))
}
