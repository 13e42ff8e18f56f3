//! The rows of the store, as values.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::{InboxSettings, Reference};
use crate::{
    model::{
        Change, ClientId, ConversationId, DeletedSeqs, Details, Entry, EntryState, Epoch,
        GatewayId, Kind, LEVEL_MAX, Last, Level, Millis, Participant, Rev, Seq, UserId,
    },
    mutation::{Mutation, broken},
};

/// A position of a log as one owner wrote it. The key is conversation, position, epoch.
#[derive(PartialEq, Eq, Debug)]
pub struct Row<T> {
    pub record: Arc<T>,
    pub epoch: Epoch,
    /// The position up to which the owner had settled everything when it wrote this row.
    pub settled: u64,
    /// The last position of the settle in which a takeover wrote this row. 0 if it is of no settle (rule \[settle-whole\]).
    pub settle_end: u64,
}

// Derived, it would require that the record can be cloned.
impl<T> Clone for Row<T> {
    fn clone(&self) -> Self {
        Self {
            record: self.record.clone(),
            ..*self
        }
    }
}

/// A row of the log of messages. Its position is the seq.
pub type LogRow = Row<Entry>;

/// A row of the log of changes. Its position is the rev.
pub type ChangeRow = Row<Change>;

/// The entries that a page is made of, with the changes of their content and reactions.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct LogPage {
    /// The row with the highest epoch at each seq, oldest first.
    pub rows: Vec<LogRow>,
    /// The states of those entries that changed, oldest first.
    pub states: Vec<(Seq, EntryState)>,
}

/// The end of the log of entries, which a takeover reads.
#[derive(PartialEq, Eq, Debug)]
pub struct LogTail {
    pub tail: Tail<Entry>,
    /// The states of those entries that changed, oldest first.
    pub states: Vec<(Seq, EntryState)>,
    /// Whether the conversation may have changes. If not, its log of changes is empty.
    pub may_have_changes: bool,
}

/// The end of the log of changes, which a takeover reads.
#[derive(PartialEq, Eq, Debug)]
pub struct ChangesTail {
    pub tail: Tail<Change>,
    /// The deleted entries of the conversation as of a rev (rule [x-kept]).
    pub deleted: (Rev, DeletedSeqs),
}

/// The effects of committed changes. Each row wins over those of lower revs.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct AppliedChanges {
    /// The parts of states that changed.
    pub states: Vec<(Seq, EntryState)>,
    pub reactors: Vec<ReactorRow>,
    pub inbox: Vec<InboxWrite>,
    /// The deleted entries of the conversation as of a rev.
    pub deleted: Option<(Rev, DeletedSeqs)>,
    /// The files that edited or deleted messages have now, or have no more.
    pub references: Vec<Reference>,
}

/// A user's reaction to an entry. It is stored by entry and by user.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ReactorRow {
    pub seq: Seq,
    pub emoji: String,
    pub user: UserId,
    pub rev: Rev,
    pub on: bool,
    pub at: Millis,
}

/// A page of the users who reacted to an entry.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ReactorsPage {
    pub items: Vec<ReactorRow>,
    /// The position after which the next page begins. `None` at the end.
    pub next: Option<String>,
}

/// A deleted entry whose texts are erased wherever they are stored.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Erasure {
    pub seq: Seq,
    /// The entry's sender and client id, by which copies at other seqs are found (rule [sends]).
    pub sender: UserId,
    pub client_id: ClientId,
    /// The revs of its edits (rule [edits]).
    pub edits: Vec<Rev>,
}

/// The end of a log, which a takeover reads.
#[derive(PartialEq, Eq, Debug)]
pub struct Tail<T> {
    /// The first position that was read.
    pub first: u64,
    pub rows: Vec<Row<T>>,
    /// The position up to which everything is settled, see [`super::Store::set_settled`].
    pub settled: u64,
}

impl<T> Tail<T> {
    /// Returns the position up to which the log is certain. Every row has the settled position of its owner, and everything up to
    /// the highest one is certain.
    pub(crate) fn certain(&self) -> u64 {
        let claimed = self.rows.iter().map(|row| row.settled).max();
        claimed.unwrap_or_default().max(self.settled)
    }
}

/// Returns the first of the newest `count` positions of a log that ends at `newest`.
pub(crate) fn first_of_tail(newest: u64, count: u64) -> u64 {
    (newest + 1).saturating_sub(count).max(1)
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SendRow {
    pub epoch: Epoch,
    pub seq: Seq,
}

/// A conversation's details. Each membership or details entry writes them; `seq` is that entry's seq.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ConversationRow {
    pub details: Details,
    pub participant_count: u64,
    pub seq: Seq,
}

/// A participant. Role, joined and left are as of entry `seq`; the watermarks have their own order.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ParticipantRow {
    pub participant: Participant,
    pub seq: Seq,
}

/// The effects of a committed entry on the conversation and its participants.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Applied {
    pub conversation: ConversationRow,
    pub participants: Vec<ParticipantRow>,
    pub inbox: Vec<InboxWrite>,
}

/// The watermarks of one participant. They only increase.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Mark {
    pub user: UserId,
    pub read_seq: Option<Seq>,
    /// [`Entry::texts`] of the entry at `read_seq` (rule [read-texts]).
    pub read_texts: u64,
    pub delivered_seq: Option<Seq>,
}

/// The inbox's view of a conversation. The one with the highest version replaces the others completely.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct InboxSummary {
    pub seq: Seq,
    pub kind: Kind,
    pub name: Option<String>,
    pub joined_seq: Seq,
    /// The newest entry. Absent for channels, whose heads are looked up when the inbox is read.
    pub last: Option<Last>,
    /// How often the content of the newest entry changed. Of two summaries with the same `seq`, the one with more
    /// changes is newer (rule [face-k]).
    pub changes: u32,
    /// [`Entry::texts`] of the newest entry.
    pub texts: u64,
}

impl InboxSummary {
    /// Returns the version of the summary. The highest one replaces the others.
    #[must_use]
    pub fn version(&self) -> (Seq, u32) {
        (self.seq, self.changes)
    }
}

/// An insert or update of one inbox row. `read_seq` also raises the participant's watermark.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct InboxWrite {
    pub user: UserId,
    pub conversation: ConversationId,
    /// The kind of the conversation, from which the place of the participant's row follows.
    pub kind: Kind,
    pub summary: Option<InboxSummary>,
    pub read_seq: Option<Seq>,
    /// [`Entry::texts`] of the entry at `read_seq`.
    pub read_texts: u64,
    pub left_seq: Option<Seq>,
    /// The deleted entries as of a rev.
    pub deleted: Option<(Rev, DeletedSeqs)>,
    /// The newest rev.
    pub rev: Option<Rev>,
}

impl InboxWrite {
    /// Returns a write that changes nothing yet.
    #[must_use]
    pub fn of(user: UserId, conversation: ConversationId, kind: Kind) -> Self {
        Self {
            user,
            conversation,
            kind,
            summary: None,
            read_seq: None,
            read_texts: 0,
            left_seq: None,
            deleted: None,
            rev: None,
        }
    }
}

/// The key of an inbox row, and what the reader knows of the row. Cells that the row does not have, or that newer ones
/// replaced, are not read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct InboxKey {
    pub conversation: ConversationId,
    /// Whether the row may have a `left_seq`.
    pub may_have_left: bool,
    /// Whether the row may have a rev or deleted entries.
    pub may_have_changes: bool,
    /// Whether the user may have set something for the conversation.
    pub may_have_settings: bool,
}

impl InboxKey {
    /// Returns the key of a row of which nothing is known.
    #[must_use]
    pub fn unknown(conversation: ConversationId) -> Self {
        Self {
            conversation,
            may_have_left: true,
            may_have_changes: true,
            may_have_settings: true,
        }
    }

    /// Returns the key of a row of which only the summary and the read watermark are needed.
    #[must_use]
    pub fn summary(conversation: ConversationId) -> Self {
        Self {
            conversation,
            may_have_left: false,
            may_have_changes: false,
            may_have_settings: false,
        }
    }
}

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct InboxRow {
    pub conversation: ConversationId,
    /// Absent if a watermark was stored before the row itself.
    pub summary: Option<InboxSummary>,
    pub read_seq: Seq,
    /// [`Entry::texts`] of the entry at `read_seq`.
    pub read_texts: u64,
    pub left_seq: Option<Seq>,
    /// The deleted entries as of a rev.
    pub deleted: (Rev, DeletedSeqs),
    /// The newest rev.
    pub rev: Rev,
    /// What the user has set for the conversation. Only [`super::ConsumerStore::set_settings`] writes it.
    #[serde(default, skip_serializing_if = "InboxSettings::is_unset")]
    pub settings: InboxSettings,
}

impl InboxRow {
    #[must_use]
    pub fn empty(conversation: ConversationId) -> Self {
        Self {
            conversation,
            summary: None,
            read_seq: 0,
            read_texts: 0,
            left_seq: None,
            deleted: (0, DeletedSeqs::default()),
            rev: 0,
            settings: InboxSettings::default(),
        }
    }

    /// Returns the newest rev that is known. The deleted entries are stored before the rev, which is written behind.
    #[must_use]
    pub fn newest_rev(&self) -> Rev {
        self.rev.max(self.deleted.0)
    }

    /// Applies a write to the row, by the rules of the store.
    pub fn merge(&mut self, write: &InboxWrite) {
        if let Some(summary) = &write.summary
            && self
                .summary
                .as_ref()
                .is_none_or(|mine| mine.version() <= summary.version())
        {
            self.summary = Some(summary.clone());
        }
        if let Some(seq) = write.read_seq
            && seq >= self.read_seq
        {
            (self.read_seq, self.read_texts) = (seq, write.read_texts);
        }
        self.left_seq = self.left_seq.max(write.left_seq);
        if let Some((rev, deleted)) = &write.deleted
            && *rev > self.deleted.0
        {
            self.deleted = (*rev, deleted.clone());
        }
        self.rev = self.rev.max(write.rev.unwrap_or_default());
    }

    /// Hides the newest entry if the row says that it was deleted. Rule \[face-deleted\]: an entry that is published again does
    /// not know of its deletion.
    pub fn hide_deleted(&mut self) {
        let deleted = &self.deleted.1;
        if let Some(last) = self.summary.as_mut().and_then(|s| s.last.as_mut())
            && deleted.highest.binary_search(&last.seq).is_ok()
            && !broken(Mutation::FaceDeleted)
        {
            (last.deleted, last.preview) = (true, String::new());
        }
    }

    /// Returns the number of people's messages that the user has not read, given the newest entry. Deleted ones do not
    /// count.
    #[must_use]
    pub fn unread(&self, joined_seq: Seq, last_seq: Seq, last_texts: u64, deleted: &[Seq]) -> u64 {
        let (read_seq, texts) = if self.read_seq >= joined_seq {
            (self.read_seq, self.read_texts)
        } else {
            // The row of the join is not stored yet. Nobody knows how many messages were before it: at most as many as entries.
            (joined_seq, joined_seq)
        };
        let is_unread = |seq: &&Seq| **seq > read_seq && **seq <= last_seq;
        let gone = deleted.iter().filter(is_unread).count() as u64;
        let since = last_texts.saturating_sub(texts);
        since.saturating_sub(gone)
    }
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PublicRow {
    pub conversation: ConversationId,
    pub kind: Kind,
    pub name: Option<String>,
    pub created_at: Millis,
}

/// A page of the public conversations.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct PublicPage {
    pub rows: Vec<PublicRow>,
    /// The id after which the next page begins. `None` at the end.
    pub next: Option<ConversationId>,
}

/// A record that a gateway wrote to a conversation in this minute. The repair after a crash reads these.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Activity {
    pub gateway: GatewayId,
    pub minute: u32,
}

/// A gateway's heartbeat. The gateway is alive if its counter increases.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Heartbeat {
    /// The address for its peers, or empty if it does not take connections.
    pub address: String,
    pub counter: u64,
    /// The highest level that the gateway supports.
    pub level: Level,
}

/// A version of the ring.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct RingRow {
    pub version: Epoch,
    pub members: Vec<GatewayId>,
    /// The level of the stored format and of the messages. It never falls.
    pub level: Level,
}

impl RingRow {
    /// Returns the first version of a store on which no gateway has run. No gateway has to be waited for, so
    /// it begins with the highest level.
    #[must_use]
    pub fn first(members: Vec<GatewayId>) -> Self {
        Self {
            version: 1,
            members,
            level: LEVEL_MAX,
        }
    }

    /// Returns the next version, with these members and the same level.
    #[must_use]
    pub fn next(&self, members: Vec<GatewayId>) -> Self {
        Self {
            version: self.version + 1,
            members,
            level: self.level,
        }
    }
}
