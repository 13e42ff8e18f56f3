//! Durable rows, in terms of the domain. A store keeps what it is given and decides nothing: the owner of a
//! conversation decides who may write, which entries are committed, and what a reader may see.
//!
//! Rows that are overwritten carry the seq that wrote them, and the highest seq wins in any order of arrival. A late,
//! repeated or reordered write therefore changes nothing.

pub mod cassandra;
mod cells;
pub mod conformance;
mod consumers;
pub mod embedded;
mod files;
mod public;
mod reactors;
mod rows;
pub mod simulated;

use async_trait::async_trait;
use consumers::FOREVER;
pub use consumers::{
    ConsumerState, ConsumerStore, EventAt, InboxSettings, LaggingRow, SKIPPED_DAYS, SkippedRow,
    SkippedShard, TokenRow, Version, consumer_shard,
};
pub use files::{FileRow, FileStore, REFERENCES_MAX, Reference, WORK_SHARDS, WorkShard};
pub(crate) use rows::first_of_tail;
pub use rows::{
    Activity, Applied, AppliedChanges, ChangeRow, ChangesTail, ConversationRow, Erasure, Heartbeat,
    InboxKey, InboxRow, InboxSummary, InboxWrite, LogPage, LogRow, LogTail, Mark, ParticipantRow,
    PublicPage, PublicRow, ReactorRow, ReactorsPage, RingRow, Row, SendRow, Tail,
};

use crate::model::{ClientId, ConversationId, GatewayId, Kind, Millis, Rev, Seq, UserId};

#[derive(Debug, Clone, thiserror::Error)]
pub enum Error {
    /// The outcome is unknown. A write may be repeated with the same key and content.
    #[error("{operation}: the store did not answer in time or refused the request: {reason}")]
    Unavailable {
        operation: &'static str,
        reason: String,
    },
    /// A write to the disk failed. Acknowledged writes are safe; the store accepts no more until a restart.
    #[error("the store refuses writes after a failure of the disk: {reason}")]
    Poisoned { reason: String },
    /// The store cannot be opened, because of its settings or its surroundings.
    #[error("{reason}")]
    Unusable { reason: String },
    /// Stored data is missing or cannot be decoded.
    #[error("{operation}: stored data is damaged: {reason}")]
    Corrupt {
        operation: &'static str,
        reason: String,
    },
}

pub type Result<T> = std::result::Result<T, Error>;

/// The contract of every backend. [`conformance`] checks it.
#[async_trait]
pub trait Store: FileStore + ConsumerStore {
    /// Writes log rows with a `sends` row for each, and `activity` if given. Durable when it returns.
    async fn append(
        &self,
        conversation: ConversationId,
        rows: &[LogRow],
        activity: Option<Activity>,
    ) -> Result<()>;

    /// Writes log rows as `append` does, after their `sends` and the references of their files. A takeover finds out by
    /// rule \[settle-whole\] whether it sees all of them.
    async fn settle(&self, conversation: ConversationId, rows: &[LogRow]) -> Result<()>;

    /// Returns the rows of the newest `seqs` positions of the log, of all epochs, oldest first.
    async fn tail(&self, conversation: ConversationId, seqs: u64) -> Result<LogTail>;

    /// Returns the entries from `from` to `to` inclusive with their states. It is one read of at most two partitions.
    async fn log(&self, conversation: ConversationId, from: Seq, to: Seq) -> Result<LogPage>;

    /// Returns whether there are rows of a log beyond its recorded end. That is so after a restore in which the record is older
    /// than the log. With `record` the ends are recorded anew.
    async fn find_ends(&self, _conversation: ConversationId, _record: bool) -> Result<bool> {
        Ok(false)
    }

    /// Records that everything up to `seq` is committed and applied. The value only increases.
    async fn set_settled(&self, conversation: ConversationId, seq: Seq) -> Result<()>;

    /// Writes rows of the log of changes, and `activity` if given. Durable when it returns.
    async fn append_changes(
        &self,
        conversation: ConversationId,
        rows: &[ChangeRow],
        activity: Option<Activity>,
    ) -> Result<()>;

    /// Returns the rows of the newest `revs` positions of the log of changes, of all epochs, oldest first.
    async fn changes_tail(&self, conversation: ConversationId, revs: u64) -> Result<ChangesTail>;

    /// Returns the changes from `from` to `to` inclusive, with the highest epoch at each rev, oldest first.
    async fn changes(
        &self,
        conversation: ConversationId,
        from: Rev,
        to: Rev,
    ) -> Result<Vec<ChangeRow>>;

    /// Records that all changes up to `rev` are committed and applied. The value only increases.
    async fn set_changes_settled(&self, conversation: ConversationId, rev: Rev) -> Result<()>;

    /// Writes the effects of committed changes. Durable when it returns.
    async fn apply_changes(
        &self,
        conversation: ConversationId,
        kind: Kind,
        applied: &AppliedChanges,
    ) -> Result<()>;

    /// Erases the texts of deleted entries: in the rows of all epochs at each seq (rule [epochs]), in copies at other
    /// seqs that `sends` names (rule [sends]), and in the changes that edited it (rule [edits]). Durable when it returns.
    async fn erase(&self, conversation: ConversationId, erasures: &[Erasure]) -> Result<()>;

    /// Returns at most `limit` users who reacted to an entry, of one emoji or of all, after the position `after`, in the
    /// store's own order.
    ///
    /// # Errors
    /// [`Error::Corrupt`] never because of `after`: a position that is none reads from the start.
    async fn reactors(
        &self,
        conversation: ConversationId,
        kind: Kind,
        seq: Seq,
        emoji: Option<&str>,
        after: Option<&str>,
        limit: usize,
    ) -> Result<ReactorsPage>;

    /// Returns the reactions of one user to the entries from `from` to `to` inclusive, each with whether it is on. The owner
    /// bounds their number for each entry.
    async fn reactions_of(
        &self,
        conversation: ConversationId,
        user: &UserId,
        from: Seq,
        to: Seq,
    ) -> Result<Vec<(Seq, String, bool)>>;

    /// Returns the rows of this client id, one for each epoch that wrote it in the last seven days.
    async fn sends(
        &self,
        conversation: ConversationId,
        sender: &UserId,
        client_id: ClientId,
    ) -> Result<Vec<SendRow>>;

    async fn conversation(&self, conversation: ConversationId) -> Result<Option<ConversationRow>>;

    /// Writes the effects of a committed entry. Durable when it returns.
    async fn apply(&self, conversation: ConversationId, applied: &Applied) -> Result<()>;

    /// Returns current and former participants after `after`, in the store's own order.
    async fn participants(
        &self,
        conversation: ConversationId,
        kind: Kind,
        after: Option<&UserId>,
        limit: usize,
    ) -> Result<Vec<ParticipantRow>>;

    async fn participant(
        &self,
        conversation: ConversationId,
        kind: Kind,
        user: &UserId,
    ) -> Result<Option<ParticipantRow>>;

    /// Raises watermarks, in the participant's row and in the inbox row. Durable when it returns.
    async fn mark(&self, conversation: ConversationId, kind: Kind, mark: &Mark) -> Result<()>;

    /// Returns all conversations of a user. It reads one partition.
    async fn inbox(&self, user: &UserId) -> Result<Vec<InboxRow>>;

    /// Returns the number of rows of a user's inbox, or `most` if there are more.
    async fn inbox_count(&self, user: &UserId, most: usize) -> Result<usize>;

    /// Returns the rows of some conversations of a user, without those that do not exist. It reads one partition, and
    /// costs the same for an inbox of any size.
    async fn inbox_rows(&self, user: &UserId, keys: &[InboxKey]) -> Result<Vec<InboxRow>>;

    /// Inserts or updates inbox rows. Not durable by itself: the repair after a crash writes them again.
    async fn write_inbox(&self, writes: Vec<InboxWrite>) -> Result<()>;

    /// Returns at most `limit` public groups and channels after `after`, in the store's own order. It skips
    /// conversations that are no longer public, and reads at most [`SCAN_ROWS_MAX`] rows. So a page may have fewer
    /// conversations, or none, and still a `next`.
    ///
    /// [`SCAN_ROWS_MAX`]: crate::model::limits::SCAN_ROWS_MAX
    async fn public_conversations(
        &self,
        after: Option<ConversationId>,
        limit: usize,
    ) -> Result<PublicPage>;

    /// Returns the conversations to which `gateway` wrote in the last minutes of its life, by its own clock.
    async fn activity(&self, gateway: GatewayId) -> Result<Vec<ConversationId>>;

    async fn forget_activity(&self, gateway: GatewayId) -> Result<()>;

    /// Returns the gateways with activity: those that run, and those that ended and are not repaired yet.
    async fn active_gateways(&self) -> Result<Vec<GatewayId>>;

    async fn last_seen(&self, user: &UserId) -> Result<Option<Millis>>;

    /// Records when users were last seen. The values only increase. Not durable by itself.
    async fn set_last_seen(&self, seen: &[(UserId, Millis)]) -> Result<()>;

    async fn ring(&self) -> Result<Option<RingRow>>;

    /// Replaces the ring if its version is still that of `before`, and returns whether it did. This is the only
    /// conditional write. The level never falls: if `next` has a lower one, the level of `before` stays.
    async fn propose_ring(&self, before: Option<&RingRow>, next: &RingRow) -> Result<bool>;

    /// Writes a heartbeat to a quorum. The counter only increases. The level of one gateway never changes.
    async fn beat(&self, gateway: GatewayId, beat: &Heartbeat) -> Result<()>;

    async fn heartbeat(&self, gateway: GatewayId) -> Result<Option<Heartbeat>>;

    /// Removes expired rows. Called every few minutes.
    async fn sweep(&self) -> Result<()>;

    /// Whether other processes may use the store at the same time.
    fn is_shared(&self) -> bool;

    /// Updates the store's gauges. Called every few seconds.
    fn measure(&self) {}

    /// Checks whether writes can succeed.
    ///
    /// # Errors
    /// The reason why they cannot.
    fn healthy(&self) -> Result<()>;

    /// Waits until everything written is durable, then closes the store.
    async fn close(&self) -> Result<()>;
}
