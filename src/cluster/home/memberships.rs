//! The conversations that each user is in, as their home remembers them, in the order in which inboxes show them. They are
//! read from the store when a session first registers or asks for its inbox, and every publication that the home records
//! is applied to them. So a user who returns costs the store no read, and a page of an inbox only a read of its own rows.
//! Rule [remember] of docs/cluster.md says why that misses nothing.

use std::{
    convert::Infallible,
    sync::{Arc, Mutex},
    time::Duration,
};

use quick_cache::{
    Weighter,
    sync::{Cache, EntryAction},
};

use crate::{
    cluster::wire::question::{InboxOrder, InboxRef, Position},
    model::{
        ConversationId, Kind, Rank, Rev, Seq, UserId, limits::USER_ID_BYTES_MAX,
        weight::ALLOCATION_BYTES,
    },
    store::{InboxKey, InboxRow, InboxSummary},
    tasks::lock,
};

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
pub(crate) struct Known(Mutex<Rows>);

/// The rows of one user.
#[derive(Debug, Default)]
pub(crate) struct Rows {
    /// Whether the rows of the store are among them. Before that, they are only what was published since `begin`.
    read: bool,
    /// The rows, ordered by conversation.
    rows: Vec<Row>,
    /// The keys of the conversations that the user is in, in ascending order.
    order: Vec<OrderKey>,
}

/// What orders the conversations that a user is in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum OrderKey {
    Channel(ConversationId),
    /// The position of a dm or group.
    At(Rank, ConversationId),
}

/// The fields of an inbox row that decide whether the user is in the conversation, and how far it has come. Late and
/// repeated changes have no effect.
#[derive(Debug, Clone, Copy)]
struct Row {
    conversation: ConversationId,
    summary: Option<SummaryVersion>,
    left_seq: Option<Seq>,
    rev: Rev,
    /// Whether the user has set something for the conversation. If not, pages do not look for it.
    has_settings: bool,
}

/// The fields of an [`InboxSummary`] that a [`Row`] needs.
#[derive(Debug, Clone, Copy)]
pub(super) struct SummaryVersion {
    pub seq: Seq,
    pub kind: Kind,
    pub joined_seq: Seq,
    /// The newest entry of a dm or group, and its rank.
    pub last: Option<(Seq, Rank)>,
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

impl Rows {
    fn weight(&self) -> u64 {
        let rows = self.rows.capacity() * size_of::<Row>();
        (USER_BYTES + rows + self.order.capacity() * size_of::<OrderKey>()) as u64
    }
}

impl InboxIndex {
    pub(crate) fn new(bytes_max: usize) -> Self {
        let users = (bytes_max / USER_BYTES / 2).min(USERS_EXPECTED_MAX);
        Self(Cache::with_weighter(users, bytes_max as u64, ByRows))
    }

    /// Takes something of a user's conversations, if they are remembered.
    pub(crate) fn of<T>(&self, user: &UserId, take: impl FnOnce(&Rows) -> T) -> Option<T> {
        let kept = self.0.get(user)?;
        let rows = lock(&kept.known.0);
        rows.read.then(|| take(&rows))
    }

    /// Begins to record what is published to a user. To be called before the store is read.
    pub(crate) fn begin(&self, user: &UserId) -> Arc<Known> {
        let new = || {
            let known = Arc::default();
            let weight = USER_BYTES as u64;
            Ok::<_, Infallible>(Kept { known, weight })
        };
        let Ok(kept) = self.0.get_or_insert_with(user, new);
        kept.known
    }

    /// Adds the rows read from the store, with the overlay over them, and takes something of the user's conversations.
    pub(crate) fn learn<T>(
        &self,
        user: &UserId,
        known: &Arc<Known>,
        read: &[InboxRow],
        take: impl FnOnce(&Rows) -> T,
    ) -> T {
        let mut rows = lock(&known.0);
        rows.learn(read);
        let (taken, is_empty, weight) = (take(&rows), rows.rows.is_empty(), rows.weight());
        drop(rows);
        self.weigh(user, known, is_empty, weight);
        taken
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
        let before = rows.weight();
        rows.raise(conversation, summary, left_seq, rev);
        let weight = rows.weight();
        drop(rows);
        if weight > before {
            self.weigh(user, &known, false, weight);
        }
    }

    /// Notes that a user has set something for a conversation. To be called after it was written.
    pub(crate) fn has_settings(&self, user: &UserId, conversation: ConversationId) {
        self.record(user, conversation, None, None, 0);
        if let Some(Kept { known, .. }) = self.0.get(user) {
            lock(&known.0).row(conversation).has_settings = true;
        }
    }

    /// Tells the cache what a user weighs. A user who was forgotten meanwhile stays forgotten, because what was published
    /// since is missing. A user who is in no conversation is forgotten.
    fn weigh(&self, user: &UserId, known: &Arc<Known>, is_empty: bool, weight: u64) {
        let weigh = |_: &_, kept: &mut Kept| {
            if !Arc::ptr_eq(&kept.known, known) {
                return EntryAction::Retain(());
            }
            kept.weight = weight;
            if is_empty {
                EntryAction::Remove
            } else {
                EntryAction::Retain(())
            }
        };
        drop(self.0.entry(user, Some(Duration::ZERO), weigh));
    }

    /// Forgets all other users.
    pub(crate) fn retain(&self, stays: impl Fn(&UserId) -> bool) {
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
                has_settings: false,
            };
            self.rows.insert(index, row);
            index
        });
        &mut self.rows[index]
    }

    /// Adds the rows of the store.
    fn learn(&mut self, read: &[InboxRow]) {
        for row in read {
            let summary = row.summary.as_ref().map(SummaryVersion::of);
            let mine = self.row(row.conversation);
            mine.raise(summary, row.left_seq, row.newest_rev());
            mine.has_settings |= !row.settings.is_unset();
        }
        self.rows.shrink_to_fit();
        self.order = self.rows.iter().filter_map(Row::order_key).collect();
        self.order.sort_unstable();
        self.order.shrink_to_fit();
        self.read = true;
    }

    /// Applies a change to the row of a conversation.
    fn raise(
        &mut self,
        conversation: ConversationId,
        summary: Option<SummaryVersion>,
        left_seq: Option<Seq>,
        rev: Rev,
    ) {
        let row = self.row(conversation);
        let before = row.order_key();
        row.raise(summary, left_seq, rev);
        let after = row.order_key();
        // `learn` puts all in order.
        if self.read && before != after {
            self.move_in_order(before, after);
        }
    }

    /// Moves a conversation to another place. That costs most for an old conversation: all newer ones are moved.
    fn move_in_order(&mut self, before: Option<OrderKey>, after: Option<OrderKey>) {
        let order = &mut self.order;
        let from = before.and_then(|key| order.binary_search(&key).ok());
        let to = after.map(|key| (key, order.partition_point(|other| *other < key)));
        match (from, to) {
            (Some(from), Some((key, to))) if from < to => {
                order[from..to].rotate_left(1);
                order[to - 1] = key;
            }
            (Some(from), Some((key, to))) => {
                order[to..=from].rotate_right(1);
                order[to] = key;
            }
            (Some(from), None) => drop(order.remove(from)),
            (None, Some((key, to))) => order.insert(to, key),
            (None, None) => {}
        }
    }

    /// Returns the conversations from which the page before a position is chosen.
    pub(crate) fn order(&self, before: Option<Position>, limit: usize) -> InboxOrder {
        let is_channel = |key: &OrderKey| matches!(key, OrderKey::Channel(_));
        let (channels, others) = self.order.split_at(self.order.partition_point(is_channel));
        let end = match before {
            Some((rank, id)) => others.partition_point(|other| *other < OrderKey::At(rank, id)),
            None => others.len(),
        };
        let newest = others[..end].iter().rev().take(limit.saturating_add(1));
        InboxOrder {
            newest: newest.filter_map(OrderKey::position).collect(),
            channels: channels.iter().filter_map(OrderKey::channel).collect(),
        }
    }

    /// Returns the keys of the rows of these conversations, with what is known of them.
    pub(crate) fn keys(&self, conversations: &[ConversationId]) -> Vec<InboxKey> {
        let key = |&conversation: &ConversationId| {
            let found = self
                .rows
                .binary_search_by_key(&conversation, |row| row.conversation);
            let row = found.ok().and_then(|index| self.rows.get(index));
            let Some(row) = row else {
                return InboxKey::unknown(conversation);
            };
            InboxKey {
                conversation,
                may_have_left: row.left_seq.is_some(),
                may_have_changes: row.rev > 0,
                may_have_settings: row.has_settings,
            }
        };
        conversations.iter().map(key).collect()
    }

    pub(crate) fn refs(&self) -> Vec<InboxRef> {
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

    /// Returns the summary, if the user is in the conversation.
    fn joined(&self) -> Option<SummaryVersion> {
        let is_in = |summary: &SummaryVersion| {
            self.left_seq
                .is_none_or(|left_seq| left_seq < summary.joined_seq)
        };
        self.summary.filter(is_in)
    }

    fn inbox_ref(&self) -> Option<InboxRef> {
        let summary = self.joined()?;
        Some(InboxRef {
            conversation: self.conversation,
            kind: summary.kind,
            last_seq: summary.last.map(|(seq, _)| seq),
            rev: self.rev,
        })
    }

    fn order_key(&self) -> Option<OrderKey> {
        let summary = self.joined()?;
        let rank = summary.last.map_or(0, |(_, rank)| rank);
        Some(match summary.kind {
            Kind::Channel => OrderKey::Channel(self.conversation),
            Kind::Dm | Kind::Group => OrderKey::At(rank, self.conversation),
        })
    }
}

impl OrderKey {
    fn position(&self) -> Option<Position> {
        match *self {
            Self::Channel(_) => None,
            Self::At(rank, conversation) => Some((rank, conversation)),
        }
    }

    fn channel(&self) -> Option<ConversationId> {
        match *self {
            Self::Channel(conversation) => Some(conversation),
            Self::At(..) => None,
        }
    }
}

impl SummaryVersion {
    pub(crate) fn of(summary: &InboxSummary) -> Self {
        Self {
            seq: summary.seq,
            kind: summary.kind,
            joined_seq: summary.joined_seq,
            last: summary
                .last
                .as_ref()
                .map(|last| (last.seq, last.message_id.rank())),
        }
    }
}

#[cfg(test)]
mod tests;
