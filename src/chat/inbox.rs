//! Writes inbox rows: queued by conversation, the newest entry wins, flushed in batches, never waited
//! for by a sender. What a crash loses of it, crash repair writes again.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use futures_util::{StreamExt, stream};
use metrics::{counter, gauge};
use tokio::{sync::Notify, time::sleep};

use super::publish::Members;
use crate::{
    model::{
        ConversationId, Entry, Kind, Last, Seq, UserId, limits::INBOX_CONVERSATIONS_PENDING_MAX,
    },
    store::{InboxWrite, Store},
    tasks::lock,
};

/// How long rows wait for more of their conversation.
const FLUSH_EVERY: Duration = Duration::from_millis(30);
/// Rows of one write to the store.
const BATCH_ROWS: usize = 500;
/// Writes under way at once.
const BATCHES_IN_FLIGHT_MAX: usize = 4;
/// After a failed write, before the next.
const RETRY_AFTER: Duration = Duration::from_millis(500);

pub struct InboxWriter {
    store: Arc<dyn Store>,
    pending: Mutex<BTreeMap<ConversationId, Pending>>,
    wake: Notify,
    flushing: tokio::sync::Mutex<()>,
    behind: AtomicBool,
}

#[derive(Default, Clone)]
struct Pending {
    /// Nobody's row follows a channel's entries.
    newest: Option<(Arc<Members>, Arc<Last>)>,
    /// Who sends has read what came before.
    read_by_senders: BTreeMap<UserId, Seq>,
}

impl InboxWriter {
    #[must_use]
    pub fn new(store: Arc<dyn Store>) -> Self {
        Self {
            store,
            pending: Mutex::default(),
            wake: Notify::new(),
            flushing: tokio::sync::Mutex::default(),
            behind: AtomicBool::new(false),
        }
    }

    /// Queues what a published entry means for the inbox of its audience. The newest wins.
    pub(super) fn queue(
        &self,
        conversation: ConversationId,
        members: Option<Arc<Members>>,
        entry: &Entry,
    ) {
        let mut pending = self.pending();
        if pending.is_empty() {
            self.wake.notify_one();
        }
        let pending = pending.entry(conversation).or_default();
        let newer = |(_, last): &(_, Arc<Last>)| last.seq < entry.seq;
        if let Some(members) = members
            && pending.newest.as_ref().is_none_or(newer)
        {
            pending.newest = Some((members, Arc::new(entry.last())));
        }
        let read = pending
            .read_by_senders
            .entry(entry.sender.clone())
            .or_default();
        *read = entry.seq.max(*read);
    }

    /// Whether the store is so far behind that no more should be accepted.
    pub(super) fn is_full(&self) -> bool {
        self.pending().len() >= INBOX_CONVERSATIONS_PENDING_MAX
    }

    /// Whether the store has, or is about to get, what was queued: not so while it cannot be reached.
    #[must_use]
    pub fn is_current(&self) -> bool {
        !self.behind.load(Ordering::Acquire)
    }

    /// Flushes for ever; for a task.
    pub async fn run(&self) {
        loop {
            self.wake.notified().await;
            while !self.pending().is_empty() {
                sleep(FLUSH_EVERY).await;
                if !self.flush().await {
                    sleep(RETRY_AFTER).await;
                }
            }
        }
    }

    /// Writes everything queued so far; false when some of it must be tried again. Who stops waiting for it loses nothing.
    pub async fn flush(&self) -> bool {
        let _one_at_a_time = self.flushing.lock().await;
        let mut taken = Taken {
            writer: self,
            rows: std::mem::take(&mut *self.pending()),
        };
        gauge!("chat_inbox_conversations_pending").set(taken.rows.len() as f64);
        let rows = taken.rows.iter();
        let writes: Vec<InboxWrite> = rows.flat_map(|(id, p)| p.writes(*id)).collect();
        let batches: Vec<Vec<InboxWrite>> = writes
            .chunks(BATCH_ROWS)
            .map(<[InboxWrite]>::to_vec)
            .collect();
        let results: Vec<_> = stream::iter(batches)
            .map(|batch| self.store.write_inbox(batch))
            .buffer_unordered(BATCHES_IN_FLIGHT_MAX)
            .collect()
            .await;
        counter!("chat_inbox_rows_written_total").increment(writes.len() as u64);
        let failed = results.into_iter().find_map(Result::err);
        self.behind.store(failed.is_some(), Ordering::Release);
        if let Some(error) = failed {
            tracing::warn!(%error, "inbox rows were not written; they will be tried again");
            return false;
        }
        taken.rows.clear();
        true
    }

    fn pending(&self) -> MutexGuard<'_, BTreeMap<ConversationId, Pending>> {
        lock(&self.pending)
    }
}

/// Taken to be written: what is left of it when this is dropped waits again.
struct Taken<'a> {
    writer: &'a InboxWriter,
    rows: BTreeMap<ConversationId, Pending>,
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        if self.rows.is_empty() {
            return;
        }
        let mut pending = self.writer.pending();
        for (id, older) in std::mem::take(&mut self.rows) {
            pending.entry(id).or_default().lay_over(older);
        }
        self.writer.wake.notify_one();
    }
}

impl Pending {
    fn writes(&self, conversation: ConversationId) -> Vec<InboxWrite> {
        let mut reads = self.read_by_senders.clone();
        let mut writes = Vec::new();
        let newest = self.newest.as_ref();
        let kind = newest.map_or(Kind::Channel, |(members, _)| members.kind);
        if let Some((members, last)) = &self.newest {
            writes.extend(members.users.iter().map(|(user, joined_seq)| InboxWrite {
                user: user.clone(),
                conversation,
                kind: members.kind,
                face: Some(members.face(user, *joined_seq, last)),
                read_seq: reads.remove(user),
                left_seq: None,
            }));
        }
        writes.extend(reads.into_iter().map(|(user, seq)| InboxWrite {
            user,
            conversation,
            kind,
            face: None,
            read_seq: Some(seq),
            left_seq: None,
        }));
        writes
    }

    fn lay_over(&mut self, older: Self) {
        if self.newest.is_none() {
            self.newest = older.newest;
        }
        for (user, seq) in older.read_by_senders {
            let read = self.read_by_senders.entry(user).or_default();
            *read = seq.max(*read);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        clock,
        model::{ClientId, Content},
        store::simulated::{Faults, Simulated},
        tasks::Tasks,
    };

    fn user() -> UserId {
        UserId::new("alice").unwrap()
    }

    fn queue(writer: &InboxWriter, conversation: ConversationId, seq: Seq) {
        let members = Members {
            kind: Kind::Group,
            name: None,
            users: vec![(user(), 1)],
        };
        let entry = Entry {
            seq,
            message_id: clock::message_id(1),
            client_id: ClientId(uuid::Uuid::nil()),
            sender: user(),
            at: 1,
            content: Content::text("hi"),
        };
        writer.queue(conversation, Some(Arc::new(members)), &entry);
    }

    /// Whoever asks for a flush may stop waiting, and nobody else may ask for one: the rows are written all the same.
    #[tokio::test(start_paused = true)]
    async fn a_flush_that_nobody_waits_for_any_more_loses_no_rows() {
        let store = Simulated::new(1, Faults::NONE);
        let (cut, seen) = (store.cut(), store.share());
        let writer = Arc::new(InboxWriter::new(Arc::new(store)));
        let conversation = ConversationId(uuid::Uuid::from_u128(1));
        let running = writer.clone();
        let running = Tasks::default().spawn(async move { running.run().await });
        cut.store(true, Ordering::Relaxed);
        queue(&writer, conversation, 7);
        let given_up = tokio::time::timeout(Duration::from_millis(1), writer.flush()).await;
        assert!(given_up.is_err(), "the store does not answer");
        cut.store(false, Ordering::Relaxed);
        sleep(Duration::from_secs(5)).await;
        running.abort();
        let rows = seen.inbox(&user()).await.unwrap();
        let last = rows[0].face.as_ref().and_then(|face| face.last.as_ref());
        assert_eq!(last.map(|last| last.seq), Some(7));
    }
}
