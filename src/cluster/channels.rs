//! How sessions come to a channel's entries: its owner must know that they are wanted here, and what came before it
//! knew is read.

use std::{sync::Arc, time::Duration};

use futures_util::future::join_all;
use tokio::time::timeout;

use super::{
    message::{Answer, Ask},
    router::{HEADS_AT_ONCE, Router},
};
use crate::{
    chat::{Audience, Error, Head, Operation, Outcome, Publication},
    fanout::Subscriber,
    model::{ConversationId, Kind, Seq, Topic, UserId, limits::RESUME_ENTRIES_MAX},
};

/// How long a new session waits for a channel's owner.
const FOLLOW_PATIENCE: Duration = Duration::from_secs(1);

impl Router {
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
        self.edge.subscribe(&topic, session);
        let followed = async {
            self.follow_owner(conversation).await?;
            head().await
        };
        match followed.await {
            Ok(Outcome::Head(head)) => Ok(head),
            other => {
                self.unsubscribe(session, conversation);
                other.and(Err(Error::UnknownConversation))
            }
        }
    }

    /// Subscribes a session to channels whose participant its user is. When it returns, every entry that follows
    /// reaches the session, or it is told to read them.
    pub async fn follow(&self, session: &Arc<Subscriber>, channels: &[ConversationId]) {
        for channel in channels {
            self.edge.subscribe(&Topic::Channel(*channel), session);
        }
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
        let ask = |version| Ask::Follow { channel, version };
        match self.ask_wherever(|ring| ring.owner(channel), ask).await? {
            Answer::Head(head) => {
                let head = head?;
                self.edge.confirmed(channel, time, head);
                Ok(Some(head))
            }
            _ => Err(Error::CLOSED),
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
                if let Err(Error::Unavailable { .. }) = followed.await {
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
            return Ok(());
        };
        let limit = usize::try_from(RESUME_ENTRIES_MAX).unwrap_or(usize::MAX);
        let operation = Operation::CatchUp { after, limit };
        if let Outcome::History(page) = self.ask(channel, UserId::gateway(), operation).await? {
            if !page.reaches_head(after) {
                self.edge.resync(channel, page.head);
                return Ok(());
            }
            for entry in page.entries {
                self.edge.publication(&Publication::Entry {
                    conversation: channel,
                    entry,
                    audience: Audience::Channel,
                });
            }
        }
        Ok(())
    }
}
