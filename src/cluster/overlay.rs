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
type Read = (Seq, Option<u64>);

impl Overlay {
    pub(super) fn new(bytes_max: usize) -> Self {
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
            Body::Read => {
                for user in audience.users() {
                    self.record_read(*conversation, user, (*seq, None));
                }
            }
            Body::Receipt(_) | Body::Typing(_) | Body::Reacted(_) | Body::File(_) => {}
        }
    }

    /// Records that a user has read a channel up to an entry, because they sent it.
    pub(super) fn record_read(&self, channel: ConversationId, user: &UserId, read: Read) {
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
                has_texts: newest.texts.is_some(),
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
    }

    /// Drops the older generation every [`OVERLAY`], and sooner if both weigh too much.
    pub(super) async fn keep(&self, inbox: &InboxWriter, alone: bool) {
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
        match self.read {
            Some((known, _)) if known > seq => {}
            Some((known, before)) if known == seq => self.read = Some((seq, texts.or(before))),
            Some(_) | None => self.read = Some((seq, texts)),
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
            read_texts: self.read.and_then(|(_, texts)| texts),
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
                texts: None,
            }),
            read_seq: Some(seq),
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
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::{
        clock,
        memory::Memory,
        model::{EntryKind, Kind, Last},
        store::simulated::{Faults, Simulated},
        tasks::Tasks,
    };

    fn user() -> UserId {
        UserId::new("alice").unwrap()
    }

    fn group(number: u128) -> ConversationId {
        ConversationId(uuid::Uuid::from_u128(number))
    }

    fn members() -> Arc<Recipients> {
        Arc::new(Recipients {
            kind: Kind::Group,
            name: None,
            users: vec![(user(), 1)],
        })
    }

    /// The entry `seq` after so many changes of its content, of which the last deletes it if `deleted`.
    fn newest(seq: Seq, changes: u32, deleted: bool) -> Newest {
        let last = Last {
            seq,
            message_id: clock::message_id(1),
            at: 1,
            sender: user(),
            kind: EntryKind::Text,
            preview: format!("{seq}.{changes}"),
            deleted,
        };
        Newest {
            last,
            changes,
            texts: Some(seq - 1),
        }
    }

    fn publish(overlay: &Overlay, number: u128) {
        let index = InboxIndex::new(1 << 20);
        overlay.record_entry(group(number), &members(), newest(7, 0, false), &index);
    }

    fn publish_changed(
        overlay: &Overlay,
        rev: Rev,
        newest: Option<Newest>,
        deleted: Option<DeletedSeqs>,
    ) {
        let changed = Changed {
            after: rev - 1,
            items: Vec::new(),
            newest: newest.map(Arc::new),
            deleted: deleted.map(Arc::new),
        };
        let audience = Audience::Members(members());
        let (changed, at) = (Arc::new(changed), Cursor(7, rev));
        let publication = Publication::changed(group(1), at, changed, audience, true);
        overlay.record(&publication, &InboxIndex::new(1 << 20));
    }

    /// Returns the row of the first group, as it is laid over this one.
    fn laid_over(overlay: &Overlay, stored: InboxRow) -> InboxRow {
        let mut rows = vec![stored];
        overlay.lay_over(&user(), None, &mut rows);
        rows.remove(0)
    }

    fn preview(row: &InboxRow) -> Option<&str> {
        let summary = row.summary.as_ref()?;
        Some(&summary.last.as_ref()?.preview)
    }

    fn recorded(overlay: &Overlay) -> usize {
        let mut rows = Vec::new();
        overlay.lay_over(&user(), None, &mut rows);
        rows.len()
    }

    #[test]
    fn some_rows_are_laid_over_like_all() {
        let overlay = Overlay::new(1 << 20);
        (1..=5).for_each(|number| publish(&overlay, number));
        overlay.rotate();
        publish_changed(&overlay, 3, Some(newest(7, 1, false)), None);
        let mut all = Vec::new();
        overlay.lay_over(&user(), None, &mut all);
        for some in [&[][..], &[group(1)], &[group(4), group(9), group(1)]] {
            let mut rows = Vec::new();
            overlay.lay_over(&user(), Some(some), &mut rows);
            rows.sort_unstable_by_key(|row| row.conversation);
            let mut expected = all.clone();
            expected.retain(|row| some.contains(&row.conversation));
            expected.sort_unstable_by_key(|row| row.conversation);
            assert_eq!(rows, expected);
        }
    }

    /// Rule [face-k]: an edit or deletion of the newest entry replaces its preview. The same entry, published again after
    /// a takeover, does not bring the old one back.
    #[test]
    fn a_preview_follows_the_edits_of_its_entry() {
        let overlay = Overlay::new(1 << 20);
        let row = || laid_over(&overlay, InboxRow::empty(group(1)));
        publish(&overlay, 1);
        assert_eq!(preview(&row()), Some("7.0"));
        publish_changed(&overlay, 3, Some(newest(7, 1, false)), None);
        publish(&overlay, 1);
        assert_eq!(preview(&row()), Some("7.1"));
        publish_changed(&overlay, 4, Some(newest(7, 2, true)), None);
        publish_changed(&overlay, 3, Some(newest(7, 1, false)), None);
        assert_eq!(preview(&row()), Some("7.2"));
        assert!(row().summary.unwrap().last.unwrap().deleted);
        publish_changed(&overlay, 5, Some(newest(6, 9, false)), None);
        assert_eq!(preview(&row()), Some("7.2"), "6 is not the newest entry");
        let index = InboxIndex::new(1 << 20);
        overlay.record_entry(group(1), &members(), newest(8, 0, false), &index);
        assert_eq!(preview(&row()), Some("8.0"));
        let mut stored = InboxRow::empty(group(1));
        stored.summary = Some(members().summary(&user(), 1, &newest(8, 1, false)));
        assert_eq!(preview(&laid_over(&overlay, stored)), Some("8.1"));
    }

    #[test]
    fn revs_and_deleted_entries_only_rise() {
        let overlay = Overlay::new(1 << 20);
        let deleted = |count| DeletedSeqs {
            highest: vec![5],
            count,
        };
        publish_changed(&overlay, 4, None, Some(deleted(2)));
        publish_changed(&overlay, 3, None, Some(deleted(1)));
        publish_changed(&overlay, 6, None, None);
        let row = laid_over(&overlay, InboxRow::empty(group(1)));
        assert_eq!((row.rev, row.deleted), (6, (4, deleted(2))));
        let mut stored = InboxRow::empty(group(1));
        (stored.rev, stored.deleted) = (9, (8, deleted(3)));
        let row = laid_over(&overlay, stored);
        assert_eq!((row.rev, row.deleted), (9, (8, deleted(3))));
    }

    /// Rule [read-texts]: the read mark of a sender has the number of messages that they have read.
    #[test]
    fn a_sender_has_read_their_own_message() {
        let overlay = Overlay::new(1 << 20);
        publish(&overlay, 1);
        let row = || laid_over(&overlay, InboxRow::empty(group(1)));
        assert_eq!((row().read_seq, row().read_texts), (7, Some(6)));
        overlay.record_read(group(1), &user(), (7, None));
        overlay.record_read(group(1), &user(), (5, Some(4)));
        assert_eq!((row().read_seq, row().read_texts), (7, Some(6)));
        overlay.record_read(group(1), &user(), (9, Some(8)));
        assert_eq!((row().read_seq, row().read_texts), (9, Some(8)));
    }

    #[test]
    fn changes_weigh_something_and_repeated_ones_do_not() {
        let overlay = Overlay::new(1 << 20);
        let weight = || overlay.current().bytes.load(Ordering::Relaxed);
        publish_changed(&overlay, 1, None, Some(DeletedSeqs::default()));
        let once = weight();
        assert!(once >= ENTRY_BYTES + DELETED_BYTES_MAX);
        (2..100).for_each(|rev| publish_changed(&overlay, rev, None, None));
        assert_eq!(weight(), once);
    }

    #[tokio::test(start_paused = true)]
    async fn what_weighs_too_much_is_dropped_sooner() {
        let store = Simulated::new(1, Faults::NONE);
        let inbox = Arc::new(InboxWriter::new(Arc::new(store), Memory::of_mib(64)));
        for heavy in [false, true] {
            let bytes_max = if heavy { 10_000 } else { 10_000_000 };
            let overlay = Arc::new(Overlay::new(bytes_max));
            (1..=100).for_each(|number| publish(&overlay, number));
            assert_eq!(overlay.is_heavy(), heavy);
            let (keeping, writer) = (overlay.clone(), inbox.clone());
            let keep = Tasks::default().spawn(async move { keeping.keep(&writer, true).await });
            sleep(Duration::from_secs(20)).await;
            assert_eq!(recorded(&overlay), if heavy { 0 } else { 100 });
            sleep(Duration::from_secs(60)).await;
            assert_eq!(recorded(&overlay), 0);
            keep.abort();
        }
    }
}
