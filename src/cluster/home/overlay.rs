//! What was published in the last moments, and the stored inbox rows may not have yet. It is recorded before it is
//! delivered, laid over the rows that are read, and dropped when it is old enough to be stored (rule [overlay] of
//! docs/cluster.md).

use std::{
    collections::{BTreeMap, HashMap},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use dashmap::DashMap;
use foldhash::quality::RandomState;
use metrics::counter;
use tokio::time::{Instant, sleep};

use super::memberships::{InboxIndex, SummaryVersion};
use crate::{
    chat::{
        Audience, Body, Changed, InboxWriter, MembershipChange, MembershipNotice, Publication,
        Recipients,
    },
    model::{
        ConversationId, Cursor, DeletedSeqs, Kind, Newest, Rev, Seq, UserId,
        limits::{DELETED_SEQS_KEPT, NAME_BYTES_MAX, PREVIEW_CHARS, USER_ID_BYTES_MAX},
        weight::ALLOCATION_BYTES,
    },
    store::{InboxRow, InboxSummary, InboxWrite},
};

/// The time for which a publication is laid over the stored rows, at least. It is twice that at most.
const OVERLAY: Duration = Duration::from_secs(30);
/// The same while the overlay weighs too much. The inbox writers of other gateways, which write every 30 ms and may have
/// failed once or twice, have written by then.
const HEAVY: Duration = Duration::from_secs(5);
/// The same as [`HEAVY`] for a gateway that is alone: its own inbox writer says when it has written.
const HEAVY_ALONE: Duration = Duration::from_millis(500);
/// The time between two checks of the weight.
const WEIGHED_EVERY: Duration = Duration::from_millis(100);

/// The weight of one entry with its slots in the maps and its user's name, which is counted once for each entry.
const ENTRY_BYTES: usize = 2 * size_of::<(ConversationId, OverlayEntry)>()
    + 2 * size_of::<(UserId, BTreeMap<ConversationId, OverlayEntry>)>()
    + 3 * ALLOCATION_BYTES
    + USER_ID_BYTES_MAX;
/// The bytes of a preview, at most: each of its characters has at most four.
const PREVIEW_BYTES_MAX: usize = 4 * PREVIEW_CHARS;
/// The bytes of the deleted seqs of one conversation, at most. Its users share them.
const DELETED_BYTES_MAX: usize =
    size_of::<DeletedSeqs>() + DELETED_SEQS_KEPT * size_of::<Seq>() + 2 * ALLOCATION_BYTES;

/// Two generations of recorded publications: the current one and the one before it.
pub(super) struct Overlay {
    generations: [Generation; 2],
    current: AtomicUsize,
    /// The weight of both generations above which they are dropped sooner.
    bytes_max: usize,
}

#[derive(Default)]
struct Generation {
    users: DashMap<UserId, BTreeMap<ConversationId, OverlayEntry>, RandomState>,
    bytes: AtomicUsize,
}

/// What the stored row of one user and conversation may not say yet.
#[derive(Default)]
struct OverlayEntry {
    /// The newest entry, its recipients, and the seq at which the user joined.
    newest: Option<(Arc<Recipients>, Arc<Newest>, Seq)>,
    /// The newest entry that the user has read, because they sent it or joined by it.
    read: Option<Read>,
    /// The newest rev. Zero if nothing changed.
    rev: Rev,
    /// The deleted entries as of a rev.
    deleted: Option<(Rev, Arc<DeletedSeqs>)>,
    membership: Option<Box<InboxRow>>,
}

/// A read mark: the seq of an entry, and its `texts`.
type Read = (Seq, u64);

impl Overlay {
    pub(crate) fn new(bytes_max: usize) -> Self {
        Self {
            generations: Default::default(),
            current: AtomicUsize::new(0),
            bytes_max,
        }
    }

    fn current(&self) -> &Generation {
        &self.generations[self.current.load(Ordering::Acquire)]
    }

    /// Records what a publication means for the inboxes of its users, here and in the index of the users who are known.
    pub(super) fn record(&self, publication: &Publication, index: &InboxIndex) {
        let Publication {
            conversation,
            at: Cursor(seq, rev),
            audience,
            body,
            ..
        } = publication;
        match body {
            Body::Entry(entry) => match audience {
                Audience::Members(recipients) => {
                    self.record_entry(*conversation, recipients, entry.newest(None), index);
                }
                Audience::Channel => {
                    self.record_read(*conversation, &entry.sender, (entry.seq, entry.texts));
                }
                Audience::User(_) => {}
            },
            Body::Changed(changed) => {
                if let Audience::Members(recipients) = audience {
                    self.record_changed(*conversation, recipients, (*rev, changed), index);
                }
            }
            Body::Membership(notice) => {
                for user in audience.users() {
                    if let Some(write) = membership(*conversation, *seq, notice, user) {
                        self.record_write(&write, index);
                    }
                }
            }
            Body::Read(texts) => {
                for user in audience.users() {
                    self.record_read(*conversation, user, (*seq, *texts));
                }
            }
            Body::Receipt(_) | Body::Typing(_) | Body::Reacted(_) | Body::File(_) => {}
        }
    }

    /// Records that a user has read a channel up to an entry, because they sent it.
    pub(crate) fn record_read(&self, channel: ConversationId, user: &UserId, read: Read) {
        let generation = self.current();
        let mut entries = generation.users.entry(user.clone()).or_default();
        let entry = entries.entry(channel).or_default();
        if entry.read.is_none() {
            generation.bytes.fetch_add(ENTRY_BYTES, Ordering::Relaxed);
        }
        entry.raise_read(read);
    }

    fn record_entry(
        &self,
        conversation: ConversationId,
        recipients: &Arc<Recipients>,
        newest: Newest,
        index: &InboxIndex,
    ) {
        let newest = Arc::new(newest);
        let last = &newest.last;
        let generation = self.current();
        let (mut new, mut other_list) = (0, false);
        for (user, joined_seq) in &recipients.users {
            let mut entries = generation.users.entry(user.clone()).or_default();
            let entry = entries.entry(conversation).or_default();
            new += usize::from(entry.newest.is_none());
            other_list |= entry.raise_newest(recipients, &newest, *joined_seq);
            if *user == last.sender || *joined_seq == last.seq {
                entry.raise_read((last.seq, newest.texts));
            }
        }
        if new > 0 || other_list {
            // The users of an entry share the list of recipients and the preview, which may yet become longer.
            let shared = recipients.weight() + last.weight() + PREVIEW_BYTES_MAX;
            let bytes = shared + new * ENTRY_BYTES;
            generation.bytes.fetch_add(bytes, Ordering::Relaxed);
        }
        for (user, joined_seq) in &recipients.users {
            let summary = SummaryVersion {
                seq: last.seq,
                kind: recipients.kind,
                joined_seq: *joined_seq,
                last: Some((last.seq, last.message_id.rank())),
            };
            index.record(user, conversation, Some(summary), None, 0);
        }
    }

    /// Records changes up to a rev: the rev itself, the newest entry if it changed, and the deleted entries.
    fn record_changed(
        &self,
        conversation: ConversationId,
        recipients: &Arc<Recipients>,
        (rev, changed): (Rev, &Changed),
        index: &InboxIndex,
    ) {
        let generation = self.current();
        let (mut new, mut shared) = (0, 0);
        for (user, joined_seq) in &recipients.users {
            let mut entries = generation.users.entry(user.clone()).or_default();
            let entry = entries.entry(conversation).or_default();
            new += usize::from(entry.rev == 0);
            if let Some(newest) = &changed.newest {
                let is_new = entry.newest.is_none();
                if entry.raise_newest(recipients, newest, *joined_seq) || is_new {
                    shared = recipients.weight() + newest.last.weight() + PREVIEW_BYTES_MAX;
                }
            }
            if let Some(deleted) = &changed.deleted
                && entry.deleted.as_ref().is_none_or(|(known, _)| *known < rev)
            {
                entry.deleted = Some((rev, deleted.clone()));
            }
            entry.rev = entry.rev.max(rev);
        }
        let deleted = usize::from(new > 0) * DELETED_BYTES_MAX;
        let bytes = shared + deleted + new * ENTRY_BYTES;
        generation.bytes.fetch_add(bytes, Ordering::Relaxed);
        for (user, _) in &recipients.users {
            index.record(user, conversation, None, None, rev);
        }
    }

    fn record_write(&self, write: &InboxWrite, index: &InboxIndex) {
        let generation = self.current();
        let mut entries = generation.users.entry(write.user.clone()).or_default();
        let entry = entries.entry(write.conversation).or_default();
        let row = entry.membership.get_or_insert_with(|| {
            let bytes = ENTRY_BYTES + size_of::<InboxRow>() + NAME_BYTES_MAX;
            generation.bytes.fetch_add(bytes, Ordering::Relaxed);
            Box::new(InboxRow::empty(write.conversation))
        });
        row.merge(write);
        drop(entries);
        let summary = write.summary.as_ref().map(SummaryVersion::of);
        if summary.is_some() || write.left_seq.is_some() {
            index.record(&write.user, write.conversation, summary, write.left_seq, 0);
        }
    }

    /// Lays what is recorded of a user over their stored rows, of all conversations or of `some`.
    pub(super) fn lay_over(
        &self,
        user: &UserId,
        some: Option<&[ConversationId]>,
        rows: &mut Vec<InboxRow>,
    ) {
        let numbered = rows.iter().enumerate();
        let mut places: HashMap<_, _> = numbered.map(|(n, row)| (row.conversation, n)).collect();
        let mut lay_over = |(&conversation, entry): (&ConversationId, &OverlayEntry)| {
            let place = *places.entry(conversation).or_insert_with(|| {
                rows.push(InboxRow::empty(conversation));
                rows.len() - 1
            });
            entry.lay_over(&mut rows[place], user);
        };
        let current = self.current.load(Ordering::Acquire);
        for generation in [&self.generations[1 - current], &self.generations[current]] {
            let Some(entries) = generation.users.get(user) else {
                continue;
            };
            match some {
                None => entries.iter().for_each(&mut lay_over),
                Some(some) => {
                    let recorded = some.iter().filter_map(|id| entries.get_key_value(id));
                    recorded.for_each(&mut lay_over);
                }
            }
        }
        rows.iter_mut().for_each(InboxRow::hide_deleted);
    }

    /// Drops the older generation every [`OVERLAY`], and sooner if both weigh too much.
    pub(crate) async fn keep(&self, inbox: &InboxWriter, alone: bool) {
        let heavy = if alone { HEAVY_ALONE } else { HEAVY };
        loop {
            let rotated = Instant::now();
            sleep(heavy).await;
            while rotated.elapsed() < OVERLAY && !self.is_heavy() {
                sleep(WEIGHED_EVERY).await;
            }
            if rotated.elapsed() < OVERLAY {
                // What is dropped was recorded before the last rotation, so its rows are queued or written by now.
                inbox.flush().await;
                counter!("chat_overlays_turned_early_total").increment(1);
            }
            if inbox.is_current() {
                self.rotate();
            }
        }
    }

    fn is_heavy(&self) -> bool {
        let bytes = self.generations.iter();
        let bytes: usize = bytes.map(|g| g.bytes.load(Ordering::Relaxed)).sum();
        bytes > self.bytes_max
    }

    /// Drops the older generation, and makes it the current one.
    fn rotate(&self) {
        let before = 1 - self.current.load(Ordering::Acquire);
        let generation = &self.generations[before];
        generation.users.clear();
        generation.users.shrink_to_fit();
        generation.bytes.store(0, Ordering::Relaxed);
        self.current.store(before, Ordering::Release);
    }
}

impl OverlayEntry {
    /// Takes over the newest entry, unless a newer version is known (rule [face-k]): an entry that was published again may
    /// come after a newer one, or after its own edit. Returns whether another list of recipients was replaced.
    fn raise_newest(
        &mut self,
        recipients: &Arc<Recipients>,
        newest: &Arc<Newest>,
        joined_seq: Seq,
    ) -> bool {
        let version = |newest: &Newest| (newest.last.seq, newest.changes);
        let known = self.newest.as_ref();
        if known.is_some_and(|(_, known, _)| version(known) > version(newest)) {
            return false;
        }
        // Users who have left keep the list that they had.
        let other_list = known.is_some_and(|(known, ..)| !Arc::ptr_eq(known, recipients));
        self.newest = Some((recipients.clone(), newest.clone(), joined_seq));
        other_list
    }

    fn raise_read(&mut self, (seq, texts): Read) {
        if self.read.is_none_or(|(known, _)| known <= seq) {
            self.read = Some((seq, texts));
        }
    }

    fn lay_over(&self, row: &mut InboxRow, user: &UserId) {
        if let Some(membership) = &self.membership {
            row.merge(&InboxWrite {
                summary: membership.summary.clone(),
                read_seq: Some(membership.read_seq),
                read_texts: membership.read_texts,
                left_seq: membership.left_seq,
                ..InboxWrite::of(user.clone(), row.conversation, Kind::Group)
            });
        }
        let summary = self
            .newest
            .as_ref()
            .map(|(recipients, newest, joined)| recipients.summary(user, *joined, newest));
        let deleted = self.deleted.as_ref();
        row.merge(&InboxWrite {
            summary,
            read_seq: self.read.map(|(seq, _)| seq),
            read_texts: self.read.map_or(0, |(_, texts)| texts),
            deleted: deleted.map(|(rev, deleted)| (*rev, deleted.as_ref().clone())),
            rev: Some(self.rev),
            ..InboxWrite::of(user.clone(), row.conversation, Kind::Group)
        });
    }
}

/// Returns what a change of membership writes into the user's inbox, if the published entry does not say it all.
fn membership(
    conversation: ConversationId,
    seq: Seq,
    notice: &MembershipNotice,
    user: &UserId,
) -> Option<InboxWrite> {
    let MembershipNotice { change, details } = notice;
    let write = InboxWrite::of(user.clone(), conversation, details.kind);
    match (change, details.kind) {
        (MembershipChange::Added, Kind::Channel) => Some(InboxWrite {
            summary: Some(InboxSummary {
                seq,
                kind: details.kind,
                name: details.name.clone(),
                joined_seq: seq,
                last: None,
                changes: 0,
                texts: 0,
            }),
            // The stored row has the number of messages up to the join. Until then it counts as read by its seq.
            ..write
        }),
        (MembershipChange::Removed, _) => Some(InboxWrite {
            left_seq: Some(seq),
            ..write
        }),
        (MembershipChange::Added, Kind::Dm | Kind::Group) | (MembershipChange::Updated, _) => None,
    }
}

#[cfg(test)]
mod tests;
