//! Ends an owner: answers what waits, and stores for the next owner how far everything is settled.

use std::future::Future;

use futures_util::FutureExt;
use tokio::sync::mpsc;

use super::{Command, Done, Owner};
use crate::{
    chat::error::Error,
    model::{Rev, Seq},
    store,
};

impl Owner {
    /// Answers all waiting requests. After an end without failure it stores the settled seq for the next owner.
    pub(super) async fn finish(&mut self, commands: &mut mpsc::Receiver<Command>) {
        commands.close();
        let error = self.failed.clone().unwrap_or(Error::Closed);
        if !self.log.is_settled() || !self.changes.is_settled() {
            self.environment.unfinished.lost(self.id);
        }
        // No work was begun for these, so the caller may ask the next owner.
        let parked = self.parked.take();
        for command in parked.into_iter().chain(self.backlog.drain(..)) {
            drop(command.reply.send(Err(Error::Moved)));
        }
        while let Some(command) = commands.recv().await {
            drop(command.reply.send(Err(Error::Moved)));
        }
        for reply in self.log.take().flat_map(|pending| pending.replies) {
            drop(reply.send(Err(error.clone())));
        }
        for reply in self.changes.log.take().flat_map(|pending| pending.replies) {
            drop(reply.send(Err(error.clone())));
        }
        if self.failed.is_none() && !self.has_stored_settled() {
            self.store_settled().await;
        }
        self.finish_following().await;
    }

    /// Whether the next owner will have nothing to settle, unless more is appended.
    pub(super) fn has_stored_settled(&self) -> bool {
        self.stored_settled >= self.log.settled()
            && self.changes.stored_settled >= self.changes.log.settled()
    }

    pub(super) fn start_storing_settled(&mut self) {
        let stored = self.store_settled();
        let stored = stored.map(|(seq, rev)| Done::SettledStored(seq, rev));
        self.work.push(Box::pin(stored));
    }

    /// Stores the settled seq for the next owner. It returns the seq also if that failed, because then the next owner only
    /// settles some entries again.
    fn store_settled(&self) -> impl Future<Output = (Seq, Rev)> + use<> {
        debug_assert!(
            self.log.is_settled(),
            "a conversation is closed only when its log is settled"
        );
        let (id, seq, store) = (self.id, self.log.settled(), self.environment.store.clone());
        let rev = self.changes.log.settled();
        let (is_seq_new, is_rev_new) =
            (seq > self.stored_settled, rev > self.changes.stored_settled);
        async move {
            let stored = async {
                if is_seq_new {
                    store.set_settled(id, seq).await?;
                }
                if is_rev_new {
                    store.set_changes_settled(id, rev).await?;
                }
                Ok::<_, store::Error>(())
            };
            if let Err(error) = stored.await {
                tracing::debug!(conversation = %id, %error, "the settled seq could not be stored");
            }
            (seq, rev)
        }
    }
}
