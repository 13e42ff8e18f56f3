//! Durable rows in the words of the domain. A store keeps what it is given and decides nothing:
//! who may write, what is committed and what a reader may see is the conversation owner's business.
//!
//! Rows that are overwritten carry the seq that wrote them, and the highest seq wins, whatever
//! arrives when: a late, repeated or reordered write changes nothing.

pub mod cassandra;
mod cells;
pub mod conformance;
pub mod embedded;
mod rows;
pub mod simulated;

use async_trait::async_trait;
pub use rows::{
    Activity, Applied, ConversationRow, Heartbeat, InboxFace, InboxRow, InboxWrite, LogRow, Mark,
    ParticipantRow, PublicPage, PublicRow, RingRow, SendRow, Tail,
};

use crate::model::{ClientId, ConversationId, Epoch, GatewayId, Kind, Millis, Seq, UserId};

#[derive(Debug, Clone, thiserror::Error)]
pub enum Error {
    /// The outcome is unknown. A write may be repeated: same key, same content.
    #[error("{operation}: the store did not answer in time or refused: {reason}")]
    Unavailable {
        operation: &'static str,
        reason: String,
    },
    /// A write to the disk failed. What was acknowledged is safe; nothing more is accepted until a restart.
    #[error("the store refuses writes after a failure of the disk: {reason}")]
    Poisoned { reason: String },
    /// What is stored cannot be understood.
    #[error("{operation}: stored data is damaged: {reason}")]
    Corrupt {
        operation: &'static str,
        reason: String,
    },
}

pub type Result<T> = std::result::Result<T, Error>;

/// What every backend promises. [`conformance`] checks it.
#[async_trait]
pub trait Store: Send + Sync + 'static {
    /// Writes log rows and the `sends` row of each, and `activity` if given. Durable when it returns.
    async fn append(
        &self,
        conversation: ConversationId,
        rows: &[LogRow],
        activity: Option<Activity>,
    ) -> Result<()>;

    /// As `append`, but all or nothing: no reader and no crash sees a part of it (across the border of a bucket:
    /// the newer part first).
    async fn settle(&self, conversation: ConversationId, rows: &[LogRow]) -> Result<()>;

    /// The rows of the newest `seqs` places in the log, of every epoch, oldest first.
    async fn tail(&self, conversation: ConversationId, seqs: u64) -> Result<Tail>;

    /// The rows from `from` to `to`, both included, of the highest epoch at each seq, oldest first.
    async fn log(&self, conversation: ConversationId, from: Seq, to: Seq) -> Result<Vec<LogRow>>;

    /// Notes that everything up to `seq` is committed and applied. Only goes up.
    async fn set_settled(&self, conversation: ConversationId, seq: Seq) -> Result<()>;

    /// Where this client id was written, by each epoch that wrote it in the last seven days.
    async fn sends(
        &self,
        conversation: ConversationId,
        sender: &UserId,
        client_id: ClientId,
    ) -> Result<Vec<SendRow>>;

    async fn conversation(&self, conversation: ConversationId) -> Result<Option<ConversationRow>>;

    /// Writes what follows from a committed entry. Durable when it returns.
    async fn apply(&self, conversation: ConversationId, applied: &Applied) -> Result<()>;

    /// Present and former participants in the store's own order, after `after`.
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

    /// Raises watermarks, in the participant's and in the inbox row. Durable when it returns.
    async fn mark(&self, conversation: ConversationId, kind: Kind, mark: &Mark) -> Result<()>;

    /// All of a user's conversations, in one partition read.
    async fn inbox(&self, user: &UserId) -> Result<Vec<InboxRow>>;

    /// Upserts inbox rows. Not durable by itself: crash repair writes them again.
    async fn write_inbox(&self, writes: Vec<InboxWrite>) -> Result<()>;

    /// At most `limit` public groups and channels in the store's own order, after `after`. It passes over those that are
    /// not public any more, of [`SCAN_ROWS_MAX`] rows altogether: then there may be fewer, or none, and a `next`.
    ///
    /// [`SCAN_ROWS_MAX`]: crate::model::limits::SCAN_ROWS_MAX
    async fn public_conversations(
        &self,
        after: Option<ConversationId>,
        limit: usize,
    ) -> Result<PublicPage>;

    /// Conversations that `gateway` wrote to in the last minutes of its life, by its own clock.
    async fn activity(&self, gateway: GatewayId) -> Result<Vec<ConversationId>>;

    async fn forget_activity(&self, gateway: GatewayId) -> Result<()>;

    /// Gateways whose activity is there: those that run, and those that are gone and not repaired yet.
    async fn active_gateways(&self) -> Result<Vec<GatewayId>>;

    async fn last_seen(&self, user: &UserId) -> Result<Option<Millis>>;

    /// Not durable by itself; only goes up.
    async fn set_last_seen(&self, seen: &[(UserId, Millis)]) -> Result<()>;

    async fn ring(&self) -> Result<Option<RingRow>>;

    /// Replaces the ring if its version is still `expected`; says whether it did. The one operation with a condition.
    async fn propose_ring(&self, expected: Option<Epoch>, next: &RingRow) -> Result<bool>;

    /// At a quorum when it returns; the counter only goes up.
    async fn beat(&self, gateway: GatewayId, beat: &Heartbeat) -> Result<()>;

    async fn heartbeat(&self, gateway: GatewayId) -> Result<Option<Heartbeat>>;

    /// Drops what has outlived its time. Called every few minutes.
    async fn sweep(&self) -> Result<()>;

    /// Whether other processes may use the store at the same time.
    fn is_shared(&self) -> bool;

    /// Sets the gauges of what the store is doing. Called every few seconds.
    fn measure(&self) {}

    /// Whether writes can succeed.
    ///
    /// # Errors
    /// Why they cannot.
    fn healthy(&self) -> Result<()>;

    /// Waits until everything written is durable, and lets go.
    async fn close(&self) -> Result<()>;
}
