//! The owner's part of following: its consumers' offsets and lagging rows are in the store whenever they must be.

use std::sync::Arc;

use super::{Done, Owner, retrying::retry_while_owner};
use crate::{
    chat::{
        error::Error,
        following::{Followed, Following},
        lease::Ownership,
        open::Loading,
        publish::Audience,
    },
    model::{ConsumerName, ConversationId, Cursor},
    mutation::{Mutation, broken},
    store::{self, ConsumerState, Store},
};

/// The offsets of consumers that have none. They are stored before the first append.
pub(super) struct FirstOffsets {
    following: Arc<Following>,
    offsets: Vec<(ConversationId, ConsumerName, Cursor)>,
}

impl FirstOffsets {
    pub(super) async fn store(
        &self,
        store: &dyn Store,
        ownership: &Ownership,
    ) -> store::Result<()> {
        retry_while_owner(ownership, || store.set_offsets(&self.offsets)).await?;
        self.following.offsets_stored(&self.offsets);
        Ok(())
    }
}

impl Owner {
    /// Rule [version]: whoever writes the state then checks the lease, so that a later owner's state wins.
    ///
    /// # Errors
    /// `Moved` if this gateway has written under a later version of the ring.
    pub(super) fn consumer_state(
        &self,
        enabled: bool,
        reason: Option<String>,
    ) -> Result<ConsumerState, Error> {
        let version = self.environment.versions.next(self.ownership.epoch());
        Ok(ConsumerState {
            version: version.ok_or(Error::Moved)?,
            enabled,
            reason,
        })
    }

    /// Rule [first]: an offset is stored before anything is appended, so a crash never looks like a new consumer.
    pub(super) fn first_offsets(&self) -> Option<FirstOffsets> {
        let following = &self.followed.as_ref()?.0;
        let offsets = following.first_offsets();
        (!offsets.is_empty()).then(|| FirstOffsets {
            following: following.clone(),
            offsets,
        })
    }

    pub(super) async fn store_first_offsets(&mut self, loading: &mut Loading) -> store::Result<()> {
        if let Some(first) = self.first_offsets() {
            let (store, ownership) = (self.environment.store.clone(), self.ownership.clone());
            let stored =
                loading.retry_while_owner(&ownership, || store.set_offsets(&first.offsets));
            stored.await?;
            first.following.offsets_stored(&first.offsets);
        }
        Ok(())
    }

    /// Tells the consumers how far the logs are. If one is behind, this owner's activity names that (rule [found-load]),
    /// before whoever asked for the conversation forgets the activity of a dead gateway.
    pub(super) async fn begin_following(&mut self, loading: &mut Loading) -> Result<(), Error> {
        self.tell_consumers();
        let is_behind = self.followed.as_ref().is_some_and(|f| f.0.is_behind());
        if is_behind && !broken(Mutation::ConsumerFound) {
            let (id, environment) = (self.id, self.environment.clone());
            let ownership = self.ownership.clone();
            let named = loading.retry_while_owner(&ownership, || {
                let activity = environment.activity();
                environment.store.append(id, &[], Some(activity))
            });
            named.await?;
        }
        Ok(())
    }

    /// Answers a scan of lagging rows.
    pub(super) fn asked_by_scan(&self) {
        if let Some(Followed(following)) = &self.followed {
            following.asked();
        }
    }

    /// Tells the consumers how far the logs are.
    pub(super) fn tell_consumers(&mut self) {
        if let Some(Followed(following)) = &self.followed {
            let kind = self.participants.as_ref().map(|p| p.details.kind);
            let pushed = self.participants.as_mut().filter(|_| following.is_pushed);
            let recipients = match pushed.and_then(|p| p.audience_committed()) {
                Some(Audience::Members(members)) => Some(members),
                _ => None,
            };
            let heads = Cursor(self.log.head(), self.changes.applied);
            following.moved(heads, kind, recipients);
        }
    }

    /// Whether the store knows the progress of the consumers.
    pub(super) fn has_stored_progress(&self) -> bool {
        self.followed.as_ref().is_none_or(|f| f.0.is_stored())
    }

    pub(super) fn start_storing_progress(&mut self) {
        let stored = self.store_progress();
        self.work.push(Box::pin(async move {
            match stored.await {
                Ok(()) => Done::ProgressStored,
                Err(error) => Done::Lost(error),
            }
        }));
    }

    /// Stores the offsets, and a lagging row for each consumer that is behind.
    fn store_progress(&self) -> impl Future<Output = store::Result<()>> + use<> {
        let following = self.followed.as_ref().map(|followed| followed.0.clone());
        let (environment, ownership) = (self.environment.clone(), self.ownership.clone());
        async move {
            let Some(following) = following else {
                return Ok(());
            };
            let progress = following.to_store(None);
            if !progress.is_empty() {
                let store = &*environment.store;
                retry_while_owner(&ownership, || following.store(&progress, store)).await?;
            }
            Ok(())
        }
    }

    /// Leaves nothing unnamed: either the progress is stored, or the next owner is asked to load the conversation.
    pub(super) async fn finish_following(&mut self) {
        let Some(Followed(following)) = &self.followed else {
            return;
        };
        let following = following.clone();
        if self.failed.is_none()
            && !broken(Mutation::ConsumerClose)
            && let Err(error) = self.store_progress().await
        {
            tracing::warn!(conversation = %self.id, %error, "the progress of the consumers could not be stored");
        }
        if following.is_behind() && (self.failed.is_some() || !following.is_stored()) {
            self.environment.unfinished.lost(self.id);
        }
    }
}
