//! How sessions come to a channel's entries: its owner must know that they are wanted here, and what came before it
//! knew is read.

use std::{sync::Arc, time::Duration};

use futures_util::future::join_all;
use tokio::time::timeout;

use super::{
    message::{PeerRequest, PeerResponse},
    router::Router,
};
use crate::{
    chat::{Audience, CatchUp, Error, GetHead, Head, Publication},
    fanout::Subscriber,
    model::{
        ConversationId, Kind, Seq, Topic, UserId,
        limits::{HEADS_AT_ONCE, RESUME_ENTRIES_MAX, SUBSCRIPTIONS_MAX},
    },
};

/// How long a new session waits for a channel's owner.
const FOLLOW_PATIENCE: Duration = Duration::from_secs(1);

impl Router {
    /// Subscribes a session to a channel it may read, and answers with the channel's head as of then.
    ///
    /// # Errors
    /// As reading the channel; `Invalid` if it is no channel; `TooLarge` if the session looks into too many.
    pub async fn subscribe(
        &self,
        session: &Arc<Subscriber>,
        conversation: ConversationId,
    ) -> Result<Head, Error> {
        let topics = &[Topic::Channel(conversation)];
        let head = || self.ask(conversation, session.user.clone(), GetHead);
        // By a request before this one.
        let subscribed_already = self.edge.hub().is_sent(&topics[0], session.session);
        let subscribed = async {
            // Rule [private]. Asked three times: whether it may, so that strangers make no gateway interested; whether it
            // still may, now that whatever ends that right comes here and ends the request; and, once events are sent to
            // it, where the channel has got to.
            let first = head().await?;
            if first.details.kind != Kind::Channel {
                return Err(Error::Invalid("only channels can be looked into".into()));
            }
            let what = "channels that a session looks into";
            self.edge
                .request(topics, session, what, SUBSCRIPTIONS_MAX)?;
            self.follow_owner(conversation).await?;
            head().await?;
            if !self.edge.hub().confirm(topics, session) {
                return Err(Error::unavailable("the subscription has ended meanwhile"));
            }
            head().await
        };
        let subscribed = subscribed.await;
        match &subscribed {
            Ok(_) => {}
            Err(Error::UnknownConversation | Error::Forbidden(_)) => {
                self.unsubscribe(session, topics);
            }
            Err(_) if subscribed_already => {}
            Err(_) => self.unsubscribe(session, topics),
        }
        subscribed
    }

    /// Ends the subscriptions of those who are not in a channel if it is not public any more: entries were left out that
    /// may have said so.
    pub(super) async fn check_spectators(&self, channel: ConversationId) {
        let asked = self.ask(channel, UserId::gateway(), GetHead).await;
        let is_public = match asked {
            Ok(head) => head.details.public,
            Err(Error::UnknownConversation | Error::Forbidden(_)) => false,
            // Nobody can say now: the channel is followed anew, and asked again then.
            Err(_) => return self.edge.follow_later(channel, None),
        };
        if !is_public {
            self.edge.end_spectators(channel);
        }
    }

    /// Subscribes a session to channels whose participant its user is. When it returns, every entry that follows
    /// reaches the session, or it is told to read them.
    pub async fn follow(&self, session: &Arc<Subscriber>, channels: &[ConversationId]) {
        let topics: Vec<Topic> = channels.iter().copied().map(Topic::Channel).collect();
        self.edge.follow(&topics, session);
        if self.cluster.is_none() {
            return;
        }
        let unknown = channels.iter().copied();
        let unknown: Vec<_> = unknown
            .filter(|&channel| !self.edge.follows(channel))
            .collect();
        // Their owners may be away for a while: the session need not wait for that.
        let followed = async {
            for channels in unknown.chunks(HEADS_AT_ONCE) {
                join_all(channels.iter().map(|&channel| self.follow_owner(channel))).await;
            }
        };
        drop(timeout(FOLLOW_PATIENCE, followed).await);
        for channel in unknown {
            if !self.edge.follows(channel) {
                self.edge.follow_later(channel, None);
            }
        }
    }

    /// Lets the channel's owner know that its entries are wanted here, if it does not.
    async fn follow_owner(&self, channel: ConversationId) -> Result<(), Error> {
        if self.cluster.is_some() && !self.edge.follows(channel) {
            self.tell_owner(channel).await?;
        }
        Ok(())
    }

    /// Tells the owner, and answers with the channel's head: what comes after it comes here. None: nobody here is
    /// interested any more.
    async fn tell_owner(&self, channel: ConversationId) -> Result<Option<Seq>, Error> {
        let Some(time) = self.edge.asking(channel) else {
            return Ok(None);
        };
        let ask = |version| PeerRequest::Follow { channel, version };
        match self.ask_wherever(|ring| ring.owner(channel), ask).await? {
            PeerResponse::Head(head) => {
                let head = head?;
                self.edge.confirmed(channel, time, head);
                Ok(Some(head))
            }
            _ => Err(Error::Closed),
        }
    }

    /// Follows the channels whose owner could not be told yet; for every few moments.
    pub(super) fn follow_pending(self: &Arc<Self>) {
        for (channel, after) in self.edge.take_to_follow() {
            let router = self.clone();
            self.tasks.spawn_until_drained(async move {
                let followed = async {
                    match router.tell_owner(channel).await? {
                        Some(head) => router.pass_on_after(channel, after, head).await,
                        None => Ok(()),
                    }
                };
                if followed.await.is_err_and(|error| error.is_unavailable()) {
                    router.edge.follow_later(channel, after);
                }
            });
        }
    }

    /// Whoever is subscribed to a channel here gets what came before its owner knew that.
    async fn pass_on_after(
        &self,
        channel: ConversationId,
        after: Option<Seq>,
        head: Seq,
    ) -> Result<(), Error> {
        let Some(after) = after.filter(|after| head <= after.saturating_add(RESUME_ENTRIES_MAX))
        else {
            self.edge.resync(channel, head);
            self.check_spectators(channel).await;
            return Ok(());
        };
        let limit = usize::try_from(RESUME_ENTRIES_MAX).unwrap_or(usize::MAX);
        let missed = CatchUp { after, limit };
        match self.ask(channel, UserId::gateway(), missed).await {
            Ok(page) if page.reaches_head(after) => {
                for entry in page.entries {
                    self.edge.publication(&Publication::Entry {
                        conversation: channel,
                        entry,
                        audience: Audience::Channel,
                    });
                }
            }
            Err(error) if error.is_unavailable() => return Err(error),
            // Too much for one answer: whoever is subscribed reads it.
            Ok(_) | Err(_) => {
                self.edge.resync(channel, head);
                self.check_spectators(channel).await;
            }
        }
        Ok(())
    }
}
