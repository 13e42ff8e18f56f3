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
        Audience, Body, InboxWriter, MembershipChange, MembershipNotice, Publication, Recipients,
    },
    model::{
        ConversationId, Cursor, Kind, Newest, Seq, UserId,
        limits::{NAME_BYTES_MAX, PREVIEW_CHARS, USER_ID_BYTES_MAX},
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
    read_seq: Option<Seq>,
    membership: Option<Box<InboxRow>>,
}

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
            at: Cursor(seq, _),
            audience,
            body,
            ..
        } = publication;
        match body {
            Body::Entry(entry) => {
                if let Audience::Members(recipients) = audience {
                    self.record_entry(*conversation, recipients, entry.newest(None), index);
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
                    let write = InboxWrite {
                        read_seq: Some(*seq),
                        ..InboxWrite::of(user.clone(), *conversation, Kind::Channel)
                    };
                    self.record_write(&write, index);
                }
            }
            Body::Receipt(_) | Body::Typing(_) | Body::Changed(_) | Body::Reacted(_) => {}
        }
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
            // An entry that was published again may come after a newer one.
            let newer = |(_, known, _): &(_, Arc<Newest>, _)| known.last.seq <= last.seq;
            if entry.newest.as_ref().is_none_or(newer) {
                // Users who have left keep the list that they had.
                let known = entry.newest.as_ref();
                other_list |= known.is_some_and(|(known, ..)| !Arc::ptr_eq(known, recipients));
                entry.newest = Some((recipients.clone(), newest.clone(), *joined_seq));
            }
            if *user == last.sender {
                entry.read_seq = entry.read_seq.max(Some(last.seq));
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
                last_seq: Some(last.seq),
            };
            index.record(user, conversation, Some(summary), None);
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
            index.record(&write.user, write.conversation, summary, write.left_seq);
        }
    }

    /// Lays what is recorded of a user over their stored rows.
    pub(super) fn lay_over(&self, user: &UserId, rows: &mut Vec<InboxRow>) {
        let numbered = rows.iter().enumerate();
        let mut places: HashMap<_, _> = numbered.map(|(n, row)| (row.conversation, n)).collect();
        let current = self.current.load(Ordering::Acquire);
        for generation in [&self.generations[1 - current], &self.generations[current]] {
            let Some(entries) = generation.users.get(user) else {
                continue;
            };
            for (&conversation, entry) in entries.iter() {
                let place = *places.entry(conversation).or_insert_with(|| {
                    rows.push(InboxRow::empty(conversation));
                    rows.len() - 1
                });
                entry.lay_over(&mut rows[place], user);
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
        row.merge(&InboxWrite {
            summary,
            read_seq: self.read_seq,
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

    fn publish(overlay: &Overlay, number: u128) {
        let members = Arc::new(Recipients {
            kind: Kind::Group,
            name: None,
            users: vec![(user(), 1)],
        });
        let last = Last {
            seq: 7,
            message_id: clock::message_id(1),
            at: 1,
            sender: user(),
            kind: EntryKind::Text,
            preview: "hi".into(),
            deleted: false,
        };
        let newest = Newest {
            last,
            changes: 0,
            texts: None,
        };
        let id = ConversationId(uuid::Uuid::from_u128(number));
        overlay.record_entry(id, &members, newest, &InboxIndex::new(1 << 20));
    }

    fn recorded(overlay: &Overlay) -> usize {
        let mut rows = Vec::new();
        overlay.lay_over(&user(), &mut rows);
        rows.len()
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
