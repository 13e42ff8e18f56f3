//! Writes inbox rows behind: they are queued by conversation, the newest entry wins, and they are written in batches. No
//! sender waits for them. The rows that a crash loses are written again by the crash repair.

use std::{
    collections::{BTreeMap, HashSet},
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use futures_util::{StreamExt, stream};
use metrics::{counter, gauge};
use tokio::{
    sync::Notify,
    time::{Instant, sleep, timeout_at},
};

use super::{publish::Recipients, ranks::RankClock};
use crate::{
    clock,
    memory::Memory,
    model::{
        ConversationId, Kind, Newest, Rev, Seq, UserId,
        limits::{INBOX_CONVERSATIONS_PENDING_MAX, USER_ID_BYTES_MAX},
        weight::ALLOCATION_BYTES,
    },
    mutation::{Mutation, broken},
    store::{self, InboxWrite, Store},
    tasks::lock,
};

/// The time that rows wait for newer ones of their conversation.
const FLUSH_EVERY: Duration = Duration::from_millis(30);
/// The time between two writes of revs.
const REVS_EVERY: Duration = Duration::from_secs(2);
/// Rows of one write to the store.
const BATCH_ROWS: usize = 500;
/// Writes in progress at once.
const BATCHES_IN_FLIGHT_MAX: usize = 4;
/// The time between a failed write and the next one.
const RETRY_AFTER: Duration = Duration::from_millis(500);

/// The writer of inbox rows.
pub struct InboxWriter {
    store: Arc<dyn Store>,
    /// The clock that gives entries their ranks, which are the order of the rows.
    ranks: RankClock,
    bytes_max: usize,
    queued: Mutex<BTreeMap<ConversationId, QueuedRows>>,
    /// The newest published rev of conversations, with the users whose rows get it.
    revs: Mutex<BTreeMap<ConversationId, (Arc<Recipients>, Rev)>>,
    /// The weight of the queued rows and of those that are being written.
    bytes: AtomicUsize,
    wake: Notify,
    flushing: tokio::sync::Mutex<()>,
    /// Whether the last write has failed.
    behind: AtomicBool,
}

/// The queued rows of one conversation, as the values from which they are made.
#[derive(Default, Clone)]
struct QueuedRows {
    /// The newest entry, with the users whose rows show it. `None` for a channel, whose entries change no row.
    newest: Option<(Arc<Recipients>, Arc<Newest>)>,
    /// The read marks of senders, who have read everything up to their own message.
    read_by_senders: BTreeMap<UserId, (Seq, u64)>,
    /// The newest rev, with the users whose rows get it.
    rev: Option<(Arc<Recipients>, Rev)>,
    /// The weight when it was last computed.
    bytes: usize,
}

impl InboxWriter {
    #[must_use]
    pub fn new(store: Arc<dyn Store>, memory: Memory) -> Self {
        Self {
            store,
            ranks: RankClock::default(),
            bytes_max: memory.inbox(),
            queued: Mutex::default(),
            revs: Mutex::default(),
            bytes: AtomicUsize::new(0),
            wake: Notify::new(),
            flushing: tokio::sync::Mutex::default(),
            behind: AtomicBool::new(false),
        }
    }

    /// Returns the clock that gives entries their ranks.
    #[must_use]
    pub fn ranks(&self) -> &RankClock {
        &self.ranks
    }

    /// Reads which ranks earlier processes may have given, so that those of new entries are above them. To be called before
    /// anything is appended.
    ///
    /// # Errors
    /// The error of the store.
    pub async fn recall_ranks(&self) -> store::Result<()> {
        if broken(Mutation::RankReserved) {
            return Ok(());
        }
        if let Some(until) = self.store.last_seen(&UserId::of_ranks()).await? {
            self.ranks.observe(clock::rank(until));
            self.ranks.reserved(until);
        }
        Ok(())
    }

    /// Rule [rank-reserved]: before rows are written, the store knows a time above their ranks.
    async fn reserve_ranks(&self) -> store::Result<()> {
        if let Some(until) = self.ranks.unreserved(clock::wall()) {
            self.store
                .set_last_seen(&[(UserId::of_ranks(), until)])
                .await?;
            self.ranks.reserved(until);
        }
        Ok(())
    }

    /// Queues the rows that a published entry changes. The newest version of the newest entry wins. The sender has read it;
    /// `None` if that was queued before.
    pub(super) fn queue(
        &self,
        conversation: ConversationId,
        members: Option<Arc<Recipients>>,
        sender: Option<&UserId>,
        newest: Newest,
    ) {
        let (seq, texts) = (newest.last.seq, newest.texts);
        let mut queued = self.queued();
        if queued.is_empty() {
            self.wake.notify_one();
        }
        let rows = queued.entry(conversation).or_default();
        let before = rows.bytes;
        let newer = |(_, known): &(_, Arc<Newest>)| known.version() < newest.version();
        if let Some(members) = members
            && rows.newest.as_ref().is_none_or(newer)
        {
            rows.newest = Some((members, Arc::new(newest)));
        }
        if let Some(sender) = sender {
            let read = rows.read_by_senders.entry(sender.clone()).or_default();
            *read = (seq, texts).max(*read);
        }
        let grown = rows.weigh().wrapping_sub(before);
        self.bytes.fetch_add(grown, Ordering::Relaxed);
    }

    /// Queues the rev of published changes for the rows of a conversation. They are written seldom, because homes remember
    /// them meanwhile.
    pub(super) fn queue_rev(
        &self,
        conversation: ConversationId,
        members: Arc<Recipients>,
        rev: Rev,
    ) {
        let mut revs = lock(&self.revs);
        // A delivery or a repair of an earlier change may end later.
        if revs
            .get(&conversation)
            .is_some_and(|(_, known)| *known > rev)
        {
            return;
        }
        let weight = members.weight();
        let before = revs.insert(conversation, (members, rev));
        let before = before.map_or(0, |(members, _)| members.weight());
        let grown = weight.wrapping_sub(before);
        self.bytes.fetch_add(grown, Ordering::Relaxed);
    }

    /// Replaces a queued entry that was changed. Its stored row has the change already.
    pub(super) fn correct(&self, conversation: ConversationId, newest: &Newest) {
        let mut queued = self.queued();
        if let Some(rows) = queued.get_mut(&conversation)
            && let Some((_, known)) = &mut rows.newest
            && known.last.seq == newest.last.seq
            && known.changes < newest.changes
        {
            *known = Arc::new(newest.clone());
            let before = rows.bytes;
            let grown = rows.weigh().wrapping_sub(before);
            self.bytes.fetch_add(grown, Ordering::Relaxed);
        }
    }

    /// Adds the revs that wait to the queued rows.
    fn queue_revs(&self) {
        let revs = std::mem::take(&mut *lock(&self.revs));
        let mut queued = self.queued();
        for (conversation, (members, rev)) in revs {
            let weight = members.weight();
            let rows = queued.entry(conversation).or_default();
            let before = rows.bytes + weight;
            // Rows of a failed write may have a higher one.
            if rows.rev.as_ref().is_none_or(|(_, known)| *known <= rev) {
                rows.rev = Some((members, rev));
            }
            let grown = rows.weigh().wrapping_sub(before);
            self.bytes.fetch_add(grown, Ordering::Relaxed);
        }
    }

    /// Returns whether so many rows are queued that no further message should be accepted.
    pub(super) fn is_full(&self) -> bool {
        self.bytes.load(Ordering::Relaxed) > self.bytes_max
            || self.queued().len() >= INBOX_CONVERSATIONS_PENDING_MAX
    }

    /// Returns whether queued rows reach the store soon. They do not after a failed write.
    #[must_use]
    pub fn is_current(&self) -> bool {
        !self.behind.load(Ordering::Acquire)
    }

    /// Writes queued rows. It never returns.
    pub async fn run(&self) {
        let mut revs_due = Instant::now() + REVS_EVERY;
        loop {
            drop(timeout_at(revs_due, self.wake.notified()).await);
            loop {
                if Instant::now() >= revs_due {
                    revs_due = Instant::now() + REVS_EVERY;
                    self.queue_revs();
                }
                if self.queued().is_empty() {
                    break;
                }
                sleep(FLUSH_EVERY).await;
                if !self.flush_queued().await {
                    sleep(RETRY_AFTER).await;
                }
            }
        }
    }

    /// Writes all rows that are queued, and the revs. Returns false if some of them must be written again. It is
    /// cancel-safe.
    pub async fn flush(&self) -> bool {
        self.queue_revs();
        self.flush_queued().await
    }

    async fn flush_queued(&self) -> bool {
        let _one_at_a_time = self.flushing.lock().await;
        let mut taken = Taken {
            writer: self,
            rows: std::mem::take(&mut *self.queued()),
        };
        gauge!("chat_inbox_conversations_pending").set(taken.rows.len() as f64);
        let ahead = clock::time_of(self.ranks.highest()).saturating_sub(clock::wall());
        gauge!("chat_ranks_ahead_seconds").set(ahead.max(0) as f64 / 1_000.0);
        // Also without rows: those of memberships and edits are written elsewhere.
        let unreserved = self.reserve_ranks().await.err();
        // The rows of a group weigh much more than the values they are made from, so they are made batch by batch.
        let may_write = unreserved.is_none();
        let writable = taken.rows.iter().filter(|_| may_write);
        let mut rows = writable.flat_map(|(id, p)| p.writes(*id));
        let batches = std::iter::from_fn(|| {
            let batch: Vec<_> = rows.by_ref().take(BATCH_ROWS).collect();
            counter!("chat_inbox_rows_written_total").increment(batch.len() as u64);
            (!batch.is_empty()).then_some(batch)
        });
        let failed = stream::iter(batches)
            .map(|batch| self.store.write_inbox(batch))
            .buffer_unordered(BATCHES_IN_FLIGHT_MAX)
            .fold(unreserved, async |failed, written| failed.or(written.err()))
            .await;
        self.behind.store(failed.is_some(), Ordering::Release);
        if let Some(error) = failed {
            tracing::warn!(%error, "inbox rows were not written; they will be tried again");
            return false;
        }
        let bytes: usize = taken.rows.values().map(|rows| rows.bytes).sum();
        self.bytes.fetch_sub(bytes, Ordering::Relaxed);
        taken.rows.clear();
        true
    }

    fn queued(&self) -> MutexGuard<'_, BTreeMap<ConversationId, QueuedRows>> {
        lock(&self.queued)
    }
}

/// Rows that are being written. Those that are left when this is dropped are queued again.
struct Taken<'a> {
    writer: &'a InboxWriter,
    rows: BTreeMap<ConversationId, QueuedRows>,
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        if self.rows.is_empty() {
            return;
        }
        let mut queued = self.writer.queued();
        for (id, older) in std::mem::take(&mut self.rows) {
            let newer = queued.entry(id).or_default();
            let before = newer.bytes + older.bytes;
            newer.add_older(older);
            let grown = newer.weigh().wrapping_sub(before);
            self.writer.bytes.fetch_add(grown, Ordering::Relaxed);
        }
        self.writer.wake.notify_one();
    }
}

impl QueuedRows {
    /// Computes the weight anew.
    fn weigh(&mut self) -> usize {
        const READ_BYTES: usize =
            size_of::<(UserId, (Seq, u64))>() + 8 + ALLOCATION_BYTES + USER_ID_BYTES_MAX;
        let newest = self.newest.as_ref();
        let newest = newest.map_or(0, |(members, newest)| {
            members.weight() + newest.last.weight()
        });
        let read = self.read_by_senders.len() * READ_BYTES;
        let rev = self.rev.as_ref().map_or(0, |(members, _)| members.weight());
        self.bytes = size_of::<(ConversationId, Self)>() + newest + read + rev;
        self.bytes
    }

    fn writes(&self, conversation: ConversationId) -> Vec<InboxWrite> {
        let mut reads = self.read_by_senders.clone();
        let mut writes = Vec::new();
        let newest = self.newest.as_ref();
        let kind = newest.map_or(Kind::Channel, |(members, _)| members.kind);
        let rev = self.rev.as_ref().map(|(_, rev)| *rev);
        if let Some((members, newest)) = &self.newest {
            writes.extend(members.users.iter().map(|(user, joined_seq)| {
                let read = reads.remove(user);
                InboxWrite {
                    summary: Some(members.summary(user, *joined_seq, newest)),
                    read_seq: read.map(|(seq, _)| seq),
                    read_texts: read.map_or(0, |(_, texts)| texts),
                    rev,
                    ..InboxWrite::of(user.clone(), conversation, members.kind)
                }
            }));
        }
        if let Some((members, rev)) = &self.rev {
            let shown = newest.filter(|(shown, _)| !Arc::ptr_eq(shown, members));
            let shown: HashSet<_> = shown.iter().flat_map(|(shown, _)| &shown.users).collect();
            let is_written = newest.is_some() && shown.is_empty();
            let users = members
                .users
                .iter()
                .filter(|user| !is_written && !shown.contains(user));
            writes.extend(users.map(|(user, _)| InboxWrite {
                rev: Some(*rev),
                ..InboxWrite::of(user.clone(), conversation, members.kind)
            }));
        }
        writes.extend(reads.into_iter().map(|(user, (seq, texts))| InboxWrite {
            read_seq: Some(seq),
            read_texts: texts,
            ..InboxWrite::of(user, conversation, kind)
        }));
        writes
    }

    /// Adds rows that were queued before these.
    fn add_older(&mut self, older: Self) {
        if self.newest.is_none() {
            self.newest = older.newest;
        }
        let rev = |rev: &Option<(_, Rev)>| rev.as_ref().map(|(_, rev)| *rev);
        if rev(&self.rev) < rev(&older.rev) {
            self.rev = older.rev;
        }
        for (user, read) in older.read_by_senders {
            let newer = self.read_by_senders.entry(user).or_default();
            *newer = read.max(*newer);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        clock,
        model::{ClientId, Content, Entry},
        store::simulated::{Faults, Simulated},
        tasks::Tasks,
    };

    fn user() -> UserId {
        UserId::new("alice").unwrap()
    }

    fn queue(writer: &InboxWriter, conversation: ConversationId, seq: Seq) {
        let members = Recipients {
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
            texts: 0,
        };
        writer.queue(
            conversation,
            Some(Arc::new(members)),
            Some(&entry.sender),
            entry.newest(None),
        );
    }

    #[tokio::test(start_paused = true)]
    async fn what_waits_is_bounded_by_its_weight() {
        let store = Simulated::new(1, Faults::NONE);
        let cut = store.cut();
        let memory = Memory::of_mib(1);
        let writer = InboxWriter::new(Arc::new(store), memory);
        cut.store(true, Ordering::Relaxed);
        let mut conversations = 0_u128;
        while !writer.is_full() {
            conversations += 1;
            queue(
                &writer,
                ConversationId(uuid::Uuid::from_u128(conversations)),
                7,
            );
            assert!(conversations < 1_000, "a row weighs some hundred bytes");
            let given_up = tokio::time::timeout(Duration::from_millis(1), writer.flush()).await;
            assert!(given_up.is_err(), "the store does not answer");
        }
        assert!(writer.bytes.load(Ordering::Relaxed) < memory.inbox() + 2_000);
        cut.store(false, Ordering::Relaxed);
        assert!(writer.flush().await);
        assert_eq!(writer.bytes.load(Ordering::Relaxed), 0);
        assert!(!writer.is_full());
    }

    #[tokio::test(start_paused = true)]
    async fn what_waits_is_bounded_by_its_conversations() {
        let store = Arc::new(Simulated::new(1, Faults::NONE));
        let writer = InboxWriter::new(store, Memory::of_mib(1 << 20));
        let id = |number: usize| ConversationId(uuid::Uuid::from_u128(number as u128));
        for number in 1..INBOX_CONVERSATIONS_PENDING_MAX {
            queue(&writer, id(number), 7);
        }
        // Newer entries of the same conversations need no room.
        queue(&writer, id(1), 8);
        assert!(!writer.is_full());
        queue(&writer, id(INBOX_CONVERSATIONS_PENDING_MAX), 7);
        assert!(writer.is_full());
    }

    /// The rows of a flush that was cancelled are written, also if nobody requests another flush.
    #[tokio::test(start_paused = true)]
    async fn a_flush_that_nobody_waits_for_any_more_loses_no_rows() {
        let store = Simulated::new(1, Faults::NONE);
        let (cut, seen) = (store.cut(), store.share());
        let writer = Arc::new(InboxWriter::new(Arc::new(store), Memory::of_mib(64)));
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
        assert_eq!(writer.bytes.load(Ordering::Relaxed), 0, "nothing waits");
        let rows = seen.inbox(&user()).await.unwrap();
        let last = rows[0]
            .summary
            .as_ref()
            .and_then(|summary| summary.last.as_ref());
        assert_eq!(last.map(|last| last.seq), Some(7));
    }
}
