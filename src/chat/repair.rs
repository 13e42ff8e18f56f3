//! "Crash repair" of docs/storage.md: an owner that died may have committed entries whose inbox rows were not written.
//! Repeating a repair changes nothing, because rows carry a seq as their timestamp.

use std::sync::Arc;

use futures_util::{FutureExt, StreamExt, stream};
use metrics::counter;

use super::{
    conversations::Conversations,
    error::Error,
    operation::{GetHistory, Load, LogRange, Page},
    publish::{Audience, Changed, Confirmation, Publication, Recipients},
};
use crate::{
    model::{
        ConversationId, Cursor, Entry, GatewayId, Kind, Seq, UserId, limits::PAGE_ENTRIES_MAX,
    },
    store::{self, InboxKey, Store},
};

/// Conversations that are repaired at the same time.
const REPAIRS_AT_ONCE: usize = 32;

impl Conversations {
    /// Writes the inbox rows that the gateway `gone` may have left unwritten. Returns whether that is complete.
    ///
    /// # Errors
    /// The store did not answer. The repair must be tried again before anyone is served.
    pub async fn repair(&self, gone: GatewayId) -> Result<bool, Error> {
        let (store, inbox) = (&self.environment().store, &self.environment().inbox);
        let touched = store.activity(gone).await?;
        let complete = repair_all(gone, touched, |id| self.queue_again(id)).await?;
        while !inbox.flush().await {
            store.healthy()?;
        }
        if complete {
            store.forget_activity(gone).await?;
        }
        Ok(complete)
    }

    /// Repairs one conversation that this gateway owns, and writes its inbox rows.
    ///
    /// # Errors
    /// `Unavailable` if the store or the owner did not answer. The repair must be tried again.
    pub async fn repair_one(&self, conversation: ConversationId) -> Result<(), Error> {
        self.queue_again(conversation).await?;
        // After success the caller does not repair the conversation again, so the rows must be stored.
        if self.environment().inbox.flush().await {
            Ok(())
        } else {
            Err(Error::unavailable("the store did not answer"))
        }
    }

    /// Publishes the entries that any participant's row lacks, and queues their inbox rows.
    async fn queue_again(&self, conversation: ConversationId) -> Result<(), Error> {
        let store = &*self.environment().store;
        let loaded = self.ask(conversation, UserId::gateway(), Load).await;
        if let Err(error) = loaded
            && error.is_unavailable()
        {
            return Err(error);
        }
        let Some((participants, kind, name)) = participants(store, conversation).await? else {
            return Ok(());
        };
        let Some(asker) = participants.first().map(|(user, ..)| user.clone()) else {
            return Ok(());
        };
        let members = (kind != Kind::Channel).then(|| {
            Arc::new(Recipients {
                kind,
                name,
                users: participants,
            })
        });
        let shown = match &members {
            Some(members) => shown_to_all(store, conversation, &members.users).await?,
            None => Seq::MAX,
        };
        let mut range = LogRange::Newest;
        loop {
            let limit = PAGE_ENTRIES_MAX;
            let history = GetHistory { range, limit };
            let page = match self.ask(conversation, asker.clone(), history).await {
                Ok(page) => page,
                Err(Error::UnknownConversation | Error::Forbidden(_)) => return Ok(()),
                Err(error) => return Err(error),
            };
            let first = page.entries.first().map_or(0, |entry| entry.seq);
            // The senders' read marks may be missing too, and are the only rows of a channel that may be. For them the
            // last page is read, even if it is longer than one answer. If a row lacks more, reading begins further
            // back.
            let from = shown.min(page.head.saturating_sub(PAGE_ENTRIES_MAX as Seq));
            if range == LogRange::Newest && from.saturating_add(1) < first {
                range = LogRange::After(from);
                continue;
            }
            // The last write of the dead owner may land after its row was read here, so the newest entry is published in
            // any case: rule [newest].
            let lacks = |entry: &Entry| entry.seq > shown || entry.seq == page.head;
            self.publish_again(conversation, members.as_ref(), &page, lacks)
                .await?;
            match page.entries.last() {
                Some(last) if last.seq < page.head => range = LogRange::After(last.seq),
                _ => {
                    let changes = self.publish_changes_again(conversation, members, &page);
                    return changes.await;
                }
            }
        }
    }

    /// Publishes that the newest changes happened, with the newest entry as it is now, and queues the rev for the inbox
    /// rows. Rule [repair]: the rows may lack it. Users who lack changes ask for them.
    async fn publish_changes_again(
        &self,
        conversation: ConversationId,
        members: Option<Arc<Recipients>>,
        page: &Page,
    ) -> Result<(), Error> {
        let Some(members) = members.filter(|_| page.rev > 0) else {
            return Ok(());
        };
        let newest = page.entries.last();
        let changed = Changed {
            after: page.rev,
            items: Vec::new(),
            newest: newest.map(|entry| Arc::new(entry.newest(page.state(entry.seq)))),
            deleted: None,
        };
        let audience = Audience::Members(members.clone());
        let at = Cursor(0, page.rev);
        let changed = Arc::new(changed);
        let publication = Publication::changed(conversation, at, changed, audience, true);
        let environment = self.environment();
        let guard = match environment.publish.publish(publication) {
            Confirmation::Pending(delivered) => Some(delivered.await.map_err(|_| Error::Closed)?),
            Confirmation::Immediate => None,
        };
        environment.inbox.queue_rev(conversation, members, page.rev);
        drop(guard);
        Ok(())
    }

    /// Queues the inbox rows of entries, and before that publishes those that `lacks` names: a session may have read an
    /// inbox without them. Receivers ignore an entry whose seq they already have.
    async fn publish_again(
        &self,
        conversation: ConversationId,
        members: Option<&Arc<Recipients>>,
        page: &Page,
        lacks: impl Fn(&Entry) -> bool,
    ) -> Result<(), Error> {
        let environment = self.environment();
        let publish = |entry: &Arc<Entry>| {
            let members = members.filter(|_| lacks(entry))?;
            let audience = Audience::Members(members.clone());
            let publication = Publication::entry(conversation, entry.clone(), audience);
            Some(environment.publish.publish(publication))
        };
        let published: Vec<_> = page.entries.iter().map(publish).collect();
        for (entry, published) in page.entries.iter().zip(published) {
            let guard = match published {
                Some(Confirmation::Pending(delivered)) => {
                    Some(delivered.await.map_err(|_| Error::Closed)?)
                }
                Some(Confirmation::Immediate) | None => None,
            };
            let inbox = &environment.inbox;
            let newest = entry.newest(page.state(entry.seq));
            let sender = Some(&entry.sender);
            inbox.queue(conversation, members.cloned(), sender, newest);
            drop(guard);
        }
        Ok(())
    }
}

/// Repairs conversations to which the gateway `gone` wrote. Returns whether all are repaired: those that nobody can load are
/// left, and the others do not wait for them.
///
/// # Errors
/// An owner or the store did not answer. All others are tried all the same.
pub(crate) async fn repair_all<F>(
    gone: GatewayId,
    touched: Vec<ConversationId>,
    repair: impl Fn(ConversationId) -> F,
) -> Result<bool, Error>
where
    F: Future<Output = Result<(), Error>>,
{
    if touched.is_empty() {
        return Ok(true);
    }
    tracing::info!(gateway = %gone, conversations = touched.len(), "crash repair began");
    let repaired = touched
        .into_iter()
        .map(|id| repair(id).map(move |done| (id, done)));
    let mut repaired = stream::iter(repaired).buffer_unordered(REPAIRS_AT_ONCE);
    let (mut damaged, mut failed) = (0, None);
    while let Some((conversation, done)) = repaired.next().await {
        match done {
            Err(error) if error.is_lasting() => {
                damaged += 1;
                tracing::error!(%conversation, %error, "crash repair leaves out a conversation: run chat-gateway store check");
            }
            Err(error) => failed = Some(error),
            Ok(()) => counter!("chat_conversations_repaired_total").increment(1),
        }
    }
    if let Some(error) = failed {
        return Err(error);
    }
    tracing::info!(gateway = %gone, damaged, "crash repair ended");
    Ok(damaged == 0)
}

/// Returns the seq up to which the rows of all these users show the conversation.
async fn shown_to_all(
    store: &dyn Store,
    conversation: ConversationId,
    users: &[(UserId, Seq)],
) -> store::Result<Seq> {
    let mut shown = Seq::MAX;
    for (user, _) in users {
        let key = InboxKey::unknown(conversation);
        let row = store.inbox_rows(user, &[key]).await?.pop();
        let last = row
            .and_then(|row| row.summary)
            .and_then(|summary| summary.last)
            .map_or(0, |last| last.seq);
        shown = shown.min(last);
    }
    Ok(shown)
}

/// Users with the seqs at which they joined.
type Present = Vec<(UserId, Seq)>;

/// Returns the users who are in a conversation, with its kind and name. `None` if there is no such conversation. For a
/// channel it returns only some of them, because one user who may read it is enough.
async fn participants(
    store: &dyn Store,
    conversation: ConversationId,
) -> store::Result<Option<(Present, Kind, Option<String>)>> {
    let Some(row) = store.conversation(conversation).await? else {
        return Ok(None);
    };
    let mut present = Present::new();
    let mut after: Option<UserId> = None;
    loop {
        const PAGE: usize = 500;
        let page = store
            .participants(conversation, row.details.kind, after.as_ref(), PAGE)
            .await?;
        after = page.last().map(|r| r.participant.user.clone());
        let full = page.len() == PAGE;
        let inside = page
            .into_iter()
            .map(|r| r.participant)
            .filter(|p| p.is_in());
        present.extend(inside.map(|p| (p.user, p.joined_seq)));
        if !full || (row.details.kind == Kind::Channel && !present.is_empty()) {
            return Ok(Some((present, row.details.kind, row.details.name)));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use uuid::Uuid;

    use super::*;

    /// Repairs ten times as many conversations as at once. Returns the outcome, and how many were asked for.
    async fn repaired(
        outcome: impl Fn(usize) -> Result<(), Error>,
    ) -> (Result<bool, Error>, usize) {
        let ids = (0..REPAIRS_AT_ONCE * 10).map(|n| ConversationId(Uuid::from_u128(n as u128)));
        let asked = AtomicUsize::new(0);
        let repair = async |id: ConversationId| {
            asked.fetch_add(1, Ordering::Relaxed);
            outcome(id.0.as_u128() as usize)
        };
        let done = repair_all(GatewayId(Uuid::nil()), ids.collect(), repair).await;
        (done, asked.into_inner())
    }

    #[tokio::test]
    async fn conversations_that_fail_leave_none_of_the_others_out() {
        let all = REPAIRS_AT_ONCE * 10;
        assert_eq!(repaired(|_| Ok(())).await, (Ok(true), all));
        // Even if more are damaged than are repaired at once.
        let damaged = |n| if n < 50 { Err(Error::DAMAGED) } else { Ok(()) };
        assert_eq!(repaired(damaged).await, (Ok(false), all));
        let busy = |n| if n == 0 { Err(Error::BUSY) } else { damaged(n) };
        assert_eq!(repaired(busy).await, (Err(Error::BUSY), all));
    }

    #[test]
    fn damage_is_known_by_its_text() {
        let bytes = rmp_serde::to_vec_named(&Error::DAMAGED_CHANGES).unwrap();
        assert!(rmp_serde::from_slice::<Error>(&bytes).unwrap().is_lasting());
        assert!(!Error::Moved.is_lasting() && !Error::BUSY.is_lasting());
    }
}
