//! The way of a session to a channel's entries: the owner must know that they are wanted here, and the entries from before
//! it knew are read.

use std::{collections::HashMap, sync::Arc, time::Duration};

use futures_util::future::join_all;
use tokio::time::timeout;

use super::{gateways::Gateways, here::Here, router::Router};
use crate::{
    chat::{CatchUp, Error, GetHead, Head},
    cluster::{sockets::events::missed_entries, wire::question::WantChannel},
    fanout::Subscriber,
    model::{
        ConversationId, Cursor, Kind, Seq, Topic, UserId,
        limits::{HEADS_AT_ONCE, RESUME_ENTRIES_MAX, SUBSCRIPTIONS_MAX},
    },
    mutation::{Mutation, broken},
};

/// The time for which a new session waits for the owners of its channels.
const TELL_PATIENCE: Duration = Duration::from_secs(1);

/// The channels to which sockets here are subscribed, by right or as spectators.
pub struct Channels {
    router: Arc<Router>,
}

impl Channels {
    pub(crate) fn new(router: Arc<Router>) -> Self {
        Self { router }
    }

    fn gateways(&self) -> &Gateways {
        &self.router.gateways
    }

    fn here(&self) -> &Here {
        &self.router.here
    }

    /// Subscribes a session to a channel that it may read, and returns the channel's head as of then.
    ///
    /// # Errors
    /// The errors of reading the channel; `Invalid` if it is no channel; `TooLarge` if the session looks into too many
    /// channels.
    pub async fn subscribe(
        &self,
        session: &Arc<Subscriber>,
        conversation: ConversationId,
    ) -> Result<Head, Error> {
        let topics = &[Topic::Channel(conversation)];
        let head = || self.router.ask(conversation, session.user.clone(), GetHead);
        // An earlier request may have subscribed it.
        let subscribed_already = self
            .here()
            .sockets
            .hub()
            .is_sent(&topics[0], session.session);
        let subscribed = async {
            // Rule [private]. The owner is asked three times. First whether the session may read, so that strangers make no
            // gateway interested. Then whether it still may, because from now on an entry that ends this right comes here
            // and ends the request. And for the head, once events are sent to the session.
            let first = head().await?;
            if first.details.kind != Kind::Channel {
                return Err(Error::Invalid("only channels can be looked into".into()));
            }
            let what = "channels that a session looks into";
            self.here()
                .sockets
                .request(topics, session, what, SUBSCRIPTIONS_MAX)?;
            self.tell_owner_unless_known(conversation).await?;
            head().await?;
            if !self.here().sockets.hub().confirm(topics, session) {
                return Err(Error::unavailable("the subscription has ended meanwhile"));
            }
            head().await
        };
        let subscribed = subscribed.await;
        match &subscribed {
            Ok(_) => {}
            Err(Error::UnknownConversation | Error::Forbidden(_)) => {
                self.router.unsubscribe(session, topics);
            }
            Err(_) if subscribed_already => {}
            Err(_) => self.router.unsubscribe(session, topics),
        }
        subscribed
    }

    /// Ends the subscriptions of sessions that look into a channel if it is no longer public. To be called when entries were
    /// left out, because one of them may have said so.
    pub(crate) async fn check_spectators(&self, channel: ConversationId) {
        let asked = self.router.ask(channel, UserId::gateway(), GetHead).await;
        let is_public = match asked {
            Ok(head) => head.details.public,
            Err(Error::UnknownConversation | Error::Forbidden(_)) => false,
            // Nobody can say now. The owner is told anew that the channel is wanted here, and asked again then.
            Err(_) => return self.here().sockets.tell_later(channel, None),
        };
        if !is_public {
            self.here().sockets.end_spectators(channel);
        }
    }

    /// Subscribes a session to channels that its user is in. When this returns, every entry that follows reaches the
    /// session, or the session is told to read it.
    pub async fn subscribe_own(&self, session: &Arc<Subscriber>, channels: &[ConversationId]) {
        let topics: Vec<Topic> = channels.iter().copied().map(Topic::Channel).collect();
        self.here().sockets.subscribe_own(&topics, session);
        if self.gateways().others.is_none() {
            return;
        }
        let unknown = channels.iter().copied();
        let unknown: Vec<_> = unknown
            .filter(|&channel| !self.here().sockets.owner_knows(channel))
            .collect();
        // An owner may be away for a while, and the session need not wait for that.
        let told = async {
            for channels in unknown.chunks(HEADS_AT_ONCE) {
                join_all(
                    channels
                        .iter()
                        .map(|&channel| self.tell_owner_unless_known(channel)),
                )
                .await;
            }
        };
        drop(timeout(TELL_PATIENCE, told).await);
        for channel in unknown {
            if !self.here().sockets.owner_knows(channel) {
                self.here().sockets.tell_later(channel, None);
            }
        }
    }

    /// Returns the positions of those channels that come here without a gap. What comes after a position reaches
    /// every session that had subscribed before this call. The owners know the positions of all other channels.
    #[must_use]
    pub fn positions(&self, channels: Vec<ConversationId>) -> HashMap<ConversationId, Cursor> {
        // A gateway that was paused or cut off may have missed anything.
        if !self.router.may_serve() {
            return HashMap::new();
        }
        let (heads, _) = self.here().sockets.heads(channels, None, usize::MAX);
        let position = |(channel, head): (_, Arc<Head>)| (channel, Cursor(head.head, head.rev));
        heads.into_iter().map(position).collect()
    }

    /// Tells the channel's owner that its entries are wanted here, unless it knows.
    async fn tell_owner_unless_known(&self, channel: ConversationId) -> Result<(), Error> {
        if self.gateways().others.is_some() && !self.here().sockets.owner_knows(channel) {
            self.tell_owner(channel).await?;
        }
        Ok(())
    }

    /// Tells the owner that a channel is wanted here, and returns the channel's position: all entries and changes after it
    /// come here. `None` if nobody here is interested any more.
    async fn tell_owner(&self, channel: ConversationId) -> Result<Option<Cursor>, Error> {
        let Some(subscription) = self.here().sockets.subscription(channel) else {
            return Ok(None);
        };
        let ask = |version| WantChannel { channel, version };
        let asked = self.router.ask_responsible(|ring| ring.owner(channel), ask);
        let head = asked.await?;
        self.here().sockets.confirmed(channel, subscription, head);
        Ok(Some(head))
    }

    /// Tells the owners that could not be told yet which channels are wanted here. To be called every few moments.
    pub(crate) fn tell_waiting(self: &Arc<Self>) {
        for (channel, after) in self.here().sockets.take_untold() {
            let channels = self.clone();
            let tasks = &self.here().tasks;
            tasks.spawn_until_drained(async move {
                let caught_up = async {
                    match channels.tell_owner(channel).await? {
                        Some(head) => channels.deliver_after(channel, after, head).await,
                        None => Ok(()),
                    }
                };
                if caught_up.await.is_err_and(|error| error.is_unavailable()) {
                    channels.here().sockets.tell_later(channel, after);
                }
            });
        }
    }

    /// Delivers to a channel's subscribers here what came before its owner knew of them. They ask for the changes
    /// themselves, because each has reached another rev.
    async fn deliver_after(
        &self,
        channel: ConversationId,
        after: Option<Seq>,
        Cursor(head, rev): Cursor,
    ) -> Result<(), Error> {
        self.deliver_entries_after(channel, after, head).await?;
        if rev > 0 && !broken(Mutation::Subscribe) {
            self.here().sockets.tell_rev(channel, rev);
        }
        Ok(())
    }

    async fn deliver_entries_after(
        &self,
        channel: ConversationId,
        after: Option<Seq>,
        head: Seq,
    ) -> Result<(), Error> {
        let Some(after) = after.filter(|after| head <= after.saturating_add(RESUME_ENTRIES_MAX))
        else {
            self.here().sockets.resync(channel, head);
            self.check_spectators(channel).await;
            return Ok(());
        };
        let limit = usize::try_from(RESUME_ENTRIES_MAX).unwrap_or(usize::MAX);
        let missed = CatchUp { after, limit };
        match self.router.ask(channel, UserId::gateway(), missed).await {
            Ok(page) if page.reaches_head(after) => {
                for publication in missed_entries(channel, page) {
                    self.here().sockets.deliver_publication(&publication);
                }
            }
            Err(error) if error.is_unavailable() => return Err(error),
            // Too much for one answer, so the subscribers read it.
            Ok(_) | Err(_) => {
                self.here().sockets.resync(channel, head);
                self.check_spectators(channel).await;
            }
        }
        Ok(())
    }
}
