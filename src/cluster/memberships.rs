//! The conversations that each user is in, as their home remembers them. They are read from the store when a session first
//! registers, and every publication that the home records is applied to them. So a user who returns costs the store no
//! read. Rule [remember] of docs/cluster.md says why that misses nothing.

use std::{
    convert::Infallible,
    sync::{Arc, Mutex},
    time::Duration,
};

use quick_cache::{
    Weighter,
    sync::{Cache, EntryAction},
};
use serde::{Deserialize, Serialize};

use super::lock;
use crate::{
    model::{
        ConversationId, Kind, Rev, Seq, UserId, limits::USER_ID_BYTES_MAX, weight::ALLOCATION_BYTES,
    },
    store::{InboxRow, InboxSummary},
};

/// A conversation that a user is in, as their inbox refers to it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct InboxRef {
    pub conversation: ConversationId,
    pub kind: Kind,
    /// The newest entry of a dm or group. Only the owner of a channel knows that of the channel.
    pub last_seq: Option<Seq>,
    /// The rev of the newest change of a dm or group. It is zero for a channel, and from gateways of earlier builds.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub rev: Rev,
}

fn is_zero(rev: &Rev) -> bool {
    *rev == 0
}

/// The conversations of the users who were here last, as many as fit.
pub(super) struct InboxIndex(Cache<UserId, Kept, ByRows>);

#[derive(Clone)]
struct Kept {
    known: Arc<Known>,
    /// The weight in bytes as of the last `weigh`. The cache relies on it not to change by itself.
    weight: u64,
}

/// The conversations of one user, as far as they are known.
#[derive(Debug, Default)]
pub(super) struct Known(Mutex<Rows>);

#[derive(Debug, Default)]
struct Rows {
    /// Whether the rows of the store are among them. Before that, they are only what was published since `begin`.
    read: bool,
    /// The rows, ordered by conversation.
    rows: Vec<Row>,
}

/// The fields of an inbox row that decide whether the user is in the conversation, and how far it has come. Late and
/// repeated changes have no effect.
#[derive(Debug, Clone, Copy)]
struct Row {
    conversation: ConversationId,
    summary: Option<SummaryVersion>,
    left_seq: Option<Seq>,
    rev: Rev,
}

/// The fields of an [`InboxSummary`] that a [`Row`] needs.
#[derive(Debug, Clone, Copy)]
pub(super) struct SummaryVersion {
    pub seq: Seq,
    pub kind: Kind,
    pub joined_seq: Seq,
    pub last_seq: Option<Seq>,
}

#[derive(Clone)]
struct ByRows;

impl Weighter<UserId, Kept> for ByRows {
    fn weight(&self, _: &UserId, kept: &Kept) -> u64 {
        kept.weight
    }
}

/// The weight of a user without rows: the cache's slot and key, and an empty [`Known`].
const USER_BYTES: usize = size_of::<(UserId, Kept)>()
    + size_of::<Known>()
    + 4 * ALLOCATION_BYTES
    + USER_ID_BYTES_MAX
    + 64;
/// The users for which the cache makes room when it is created.
const USERS_EXPECTED_MAX: usize = 100_000;

fn weight(rows: usize) -> u64 {
    (USER_BYTES + rows * size_of::<Row>()) as u64
}

impl InboxIndex {
    pub(super) fn new(bytes_max: usize) -> Self {
        let users = (bytes_max / USER_BYTES / 2).min(USERS_EXPECTED_MAX);
        Self(Cache::with_weighter(users, bytes_max as u64, ByRows))
    }

    /// Returns the conversations of a user, if they are remembered.
    pub(super) fn of(&self, user: &UserId) -> Option<Vec<InboxRef>> {
        let kept = self.0.get(user)?;
        let rows = lock(&kept.known.0);
        rows.read.then(|| rows.refs())
    }

    /// Begins to record what is published to a user. To be called before the store is read.
    pub(super) fn begin(&self, user: &UserId) -> Arc<Known> {
        let new = || {
            let known = Arc::default();
            let weight = weight(0);
            Ok::<_, Infallible>(Kept { known, weight })
        };
        let Ok(kept) = self.0.get_or_insert_with(user, new);
        kept.known
    }

    /// Adds the rows read from the store, with the overlay over them, and returns the user's conversations.
    pub(super) fn learn(
        &self,
        user: &UserId,
        known: &Arc<Known>,
        read: &[InboxRow],
    ) -> Vec<InboxRef> {
        let mut rows = lock(&known.0);
        for row in read {
            let summary = row.summary.as_ref().map(SummaryVersion::of);
            rows.row(row.conversation)
                .raise(summary, row.left_seq, row.rev);
        }
        rows.rows.shrink_to_fit();
        rows.read = true;
        let (refs, count) = (rows.refs(), rows.rows.len());
        drop(rows);
        self.weigh(user, known, count);
        refs
    }

    /// Records what was published to a user, if the user is remembered.
    pub(super) fn record(
        &self,
        user: &UserId,
        conversation: ConversationId,
        summary: Option<SummaryVersion>,
        left_seq: Option<Seq>,
        rev: Rev,
    ) {
        let Some(Kept { known, .. }) = self.0.get(user) else {
            return;
        };
        let mut rows = lock(&known.0);
        let before = rows.rows.len();
        rows.row(conversation).raise(summary, left_seq, rev);
        let count = rows.rows.len();
        drop(rows);
        if count > before {
            self.weigh(user, &known, count);
        }
    }

    /// Tells the cache what a user weighs. A user who was forgotten meanwhile stays forgotten, because what was published
    /// since is missing. A user who is in no conversation is forgotten.
    fn weigh(&self, user: &UserId, known: &Arc<Known>, rows: usize) {
        let weigh = |_: &_, kept: &mut Kept| {
            if !Arc::ptr_eq(&kept.known, known) {
                return EntryAction::Retain(());
            }
            kept.weight = weight(rows);
            if rows == 0 {
                EntryAction::Remove
            } else {
                EntryAction::Retain(())
            }
        };
        drop(self.0.entry(user, Some(Duration::ZERO), weigh));
    }

    /// Forgets all other users.
    pub(super) fn retain(&self, stays: impl Fn(&UserId) -> bool) {
        self.0.retain(|user, _| stays(user));
    }
}

impl Rows {
    /// Returns the row of a conversation; a new one, if there is none yet.
    fn row(&mut self, conversation: ConversationId) -> &mut Row {
        let found = self
            .rows
            .binary_search_by_key(&conversation, |row| row.conversation);
        let index = found.unwrap_or_else(|index| {
            let row = Row {
                conversation,
                summary: None,
                left_seq: None,
                rev: 0,
            };
            self.rows.insert(index, row);
            index
        });
        &mut self.rows[index]
    }

    fn refs(&self) -> Vec<InboxRef> {
        self.rows.iter().filter_map(Row::inbox_ref).collect()
    }
}

impl Row {
    /// Applies a change by the same rules as [`InboxRow::merge`].
    fn raise(&mut self, summary: Option<SummaryVersion>, left_seq: Option<Seq>, rev: Rev) {
        if let Some(summary) = summary
            && self.summary.is_none_or(|mine| mine.seq <= summary.seq)
        {
            self.summary = Some(summary);
        }
        self.left_seq = self.left_seq.max(left_seq);
        self.rev = self.rev.max(rev);
    }

    fn inbox_ref(&self) -> Option<InboxRef> {
        let summary = self.summary?;
        let is_in = self.left_seq.is_none_or(|left| left < summary.joined_seq);
        is_in.then_some(InboxRef {
            conversation: self.conversation,
            kind: summary.kind,
            last_seq: summary.last_seq,
            rev: self.rev,
        })
    }
}

impl SummaryVersion {
    pub(super) fn of(summary: &InboxSummary) -> Self {
        Self {
            seq: summary.seq,
            kind: summary.kind,
            joined_seq: summary.joined_seq,
            last_seq: summary.last.as_ref().map(|last| last.seq),
        }
    }
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;

    use super::*;

    fn user() -> UserId {
        UserId::new("alice").unwrap()
    }

    fn group(number: u128) -> ConversationId {
        ConversationId(Uuid::from_u128(number))
    }

    fn summary(joined_seq: Seq, last_seq: Seq) -> SummaryVersion {
        SummaryVersion {
            seq: last_seq,
            kind: Kind::Group,
            joined_seq,
            last_seq: Some(last_seq),
        }
    }

    fn row(conversation: ConversationId, joined_seq: Seq) -> InboxRow {
        let summary = InboxSummary {
            seq: joined_seq,
            kind: Kind::Group,
            name: None,
            joined_seq,
            last: None,
            changes: 0,
            texts: None,
        };
        let mut row = InboxRow::empty(conversation);
        row.summary = Some(summary);
        row
    }

    fn last_seqs(index: &InboxIndex) -> Option<Vec<Option<Seq>>> {
        let refs = index.of(&user())?;
        Some(refs.iter().map(|r| r.last_seq).collect())
    }

    #[test]
    fn what_is_published_while_the_store_is_read_is_known() {
        let index = InboxIndex::new(1 << 20);
        let known = index.begin(&user());
        index.record(&user(), group(1), Some(summary(1, 7)), None, 0);
        index.record(&user(), group(2), Some(summary(1, 1)), None, 0);
        assert_eq!(index.of(&user()), None, "not read yet");
        index.learn(&user(), &known, &[row(group(1), 1)]);
        assert_eq!(last_seqs(&index), Some(vec![Some(7), Some(1)]));
    }

    #[test]
    fn what_comes_late_changes_nothing() {
        let index = InboxIndex::new(1 << 20);
        let known = index.begin(&user());
        index.learn(&user(), &known, &[row(group(1), 1)]);
        let record = |summary, left| index.record(&user(), group(1), summary, left, 0);
        record(Some(summary(1, 9)), None);
        record(Some(summary(1, 8)), None);
        assert_eq!(last_seqs(&index), Some(vec![Some(9)]));
        record(None, Some(10));
        record(Some(summary(1, 10)), None);
        assert_eq!(last_seqs(&index), Some(vec![]), "removed by entry 10");
        record(Some(summary(12, 12)), None);
        record(None, Some(10));
        assert_eq!(last_seqs(&index), Some(vec![Some(12)]), "added again");
    }

    /// A returning cursor is compared with the rev, so it never falls and is not lost while the store is read.
    #[test]
    fn the_rev_is_the_newest_that_was_read_or_published() {
        let index = InboxIndex::new(1 << 20);
        let known = index.begin(&user());
        index.record(&user(), group(1), None, None, 7);
        let mut read = row(group(1), 1);
        read.rev = 5;
        index.learn(&user(), &known, &[read]);
        let rev = || index.of(&user()).unwrap()[0].rev;
        assert_eq!(rev(), 7, "published while the row was read");
        index.record(&user(), group(1), None, None, 6);
        assert_eq!(rev(), 7, "it came late");
        index.record(&user(), group(1), Some(summary(1, 9)), None, 0);
        assert_eq!(rev(), 7, "an entry is no change");
        index.record(&user(), group(1), None, None, 8);
        assert_eq!(rev(), 8);
    }

    #[test]
    fn who_is_forgotten_while_the_store_is_read_stays_forgotten() {
        let index = InboxIndex::new(1 << 20);
        let known = index.begin(&user());
        index.retain(|_| false);
        index.record(&user(), group(1), Some(summary(1, 7)), None, 0);
        index.learn(&user(), &known, &[row(group(1), 1)]);
        assert_eq!(index.of(&user()), None);
        let known = index.begin(&user());
        index.learn(&user(), &known, &[]);
        assert_eq!(index.of(&user()), None, "nothing to remember");
    }
}
