//! The rows of consumers, which follow the logs of all conversations, and those that only pushing reads: devices, and the
//! settings of conversations.
//!
//! Offsets and lagging rows have positions of the log as timestamps, so that late, repeated and reordered writes change
//! nothing (rules [offset] and [lagging]). All other rows have the version of their only writer (rule [version]).

use async_trait::async_trait;
use serde::{Deserialize, Serialize};

use super::Result;
use crate::model::{ConsumerName, ConversationId, Cursor, Device, Millis, Rev, Seq, UserId};

/// Days for which it is known which events a consumer skipped.
pub const SKIPPED_DAYS: u32 = 30;

/// The timestamp at which a replay is removed, above every position. ScyllaDB refuses timestamps that are above the time in
/// microseconds.
pub(super) const FOREVER: u64 = 1 << 50;

/// Returns the partition of a conversation in the tables of a consumer. It is part of the stored format and must never
/// change.
#[must_use]
pub fn consumer_shard(conversation: ConversationId) -> u8 {
    conversation.0.as_bytes()[15]
}

/// The version of a row that has no seq: the ring version times 2³², plus a counter of the only gateway that writes such a
/// row. It is the row's timestamp, so later writers win (rule [version]).
pub type Version = u64;

/// A conversation in which a consumer is behind.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LaggingRow {
    pub conversation: ConversationId,
    /// The heads that the consumer had not reached. A part that it reached is 0.
    pub heads: Cursor,
    /// When the oldest entry or change was written that is not delivered.
    pub oldest: Millis,
}

/// Whether a consumer is served.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ConsumerState {
    pub version: Version,
    pub enabled: bool,
    /// Why it is disabled, or the latest error.
    pub reason: Option<String>,
}

/// The position of an event in its conversation.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize)]
pub enum EventAt {
    Entry(Seq),
    Change(Rev),
}

/// A partition of the events that a consumer skipped on a day.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct SkippedShard {
    pub consumer: ConsumerName,
    /// Days since 1970.
    pub day: u32,
    pub shard: u8,
}

/// An event that a consumer skipped, because it was refused too often.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SkippedRow {
    pub conversation: ConversationId,
    pub at: EventAt,
    /// The status of the last answer. `None` if there was no answer.
    pub status: Option<u16>,
}

/// The owner of a device token.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TokenRow {
    pub version: Version,
    pub user: UserId,
    pub device: String,
}

impl TokenRow {
    /// Whether the token belongs to this device of this user.
    #[must_use]
    pub fn is_of(&self, user: &UserId, device: &str) -> bool {
        self.user == *user && self.device == device
    }
}

/// What a user has set for a conversation.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct InboxSettings {
    /// 0 if nothing was ever set.
    pub version: Version,
    pub muted_until: Option<Millis>,
    /// Whether messages are pushed to the user's devices.
    pub push: bool,
}

impl Default for InboxSettings {
    fn default() -> Self {
        Self {
            version: 0,
            muted_until: None,
            push: true,
        }
    }
}

impl InboxSettings {
    /// Whether nothing was ever set.
    #[must_use]
    pub fn is_unset(&self) -> bool {
        self.version == 0
    }
}

/// The rows of consumers, of every backend. All writes are durable when they return.
#[async_trait]
pub trait ConsumerStore: Send + Sync + 'static {
    /// Returns the offsets of all consumers of a conversation, replays among them, in any order. It reads one partition.
    async fn offsets(&self, conversation: ConversationId) -> Result<Vec<(ConsumerName, Cursor)>>;

    /// Raises offsets. Seq and rev are raised each by itself; a lower one changes nothing (rule [offset]). An offset of
    /// zeros is a row too.
    async fn set_offsets(&self, offsets: &[(ConversationId, ConsumerName, Cursor)]) -> Result<()>;

    /// Notes that a consumer has not reached these heads. It changes nothing if the consumer has reached them meanwhile, or
    /// if the row has higher ones (rule [lagging]). A head of 0 is not written.
    ///
    /// The heads of a replay are its end. They are written after its offset, so that each row that is found has one.
    async fn set_lagging(
        &self,
        consumer: &ConsumerName,
        conversation: ConversationId,
        heads: Cursor,
        oldest: Millis,
    ) -> Result<()>;

    /// Notes that a consumer has reached an offset. Higher heads stay, and late ones up to the offset stay removed (rule
    /// [lagging]).
    async fn clear_lagging(
        &self,
        consumer: &ConsumerName,
        conversation: ConversationId,
        upto: Cursor,
    ) -> Result<()>;

    /// Returns at most `limit` lagging conversations of a shard after `after`, in the store's own order. Fewer than `limit`
    /// are the last ones.
    async fn lagging(
        &self,
        consumer: &ConsumerName,
        shard: u8,
        after: Option<ConversationId>,
        limit: usize,
    ) -> Result<Vec<LaggingRow>>;

    /// Returns the lagging row of one conversation.
    async fn lagging_row(
        &self,
        consumer: &ConsumerName,
        conversation: ConversationId,
    ) -> Result<Option<LaggingRow>>;

    /// Removes a replay from a conversation: its offset and its lagging row. No later write of this replay is visible. It
    /// is called when the replay is at its end, or is too old. Nothing else may be removed so: the name of a replay is
    /// never used again.
    async fn remove_replay(
        &self,
        replay: &ConsumerName,
        conversation: ConversationId,
    ) -> Result<()>;

    async fn consumer_state(&self, consumer: &ConsumerName) -> Result<Option<ConsumerState>>;

    /// Returns the consumers that have a state, in any order.
    async fn consumers(&self) -> Result<Vec<(ConsumerName, ConsumerState)>>;

    async fn set_consumer_state(
        &self,
        consumer: &ConsumerName,
        state: &ConsumerState,
    ) -> Result<()>;

    /// Removes the state of a consumer, unless it has this version or a higher one.
    async fn remove_consumer_state(&self, consumer: &ConsumerName, version: Version) -> Result<()>;

    /// Notes that a consumer skipped an event on a day. It is kept for [`SKIPPED_DAYS`].
    async fn add_skipped(
        &self,
        consumer: &ConsumerName,
        day: u32,
        skipped: &SkippedRow,
    ) -> Result<()>;

    /// Returns the partitions that have skipped events, in any order. It may read more than those of one consumer.
    async fn skipped_shards(&self, consumer: &ConsumerName) -> Result<Vec<SkippedShard>>;

    /// Returns at most `limit` skipped events of a partition after `after`, in the store's own order. Fewer than `limit`
    /// are the last ones.
    async fn skipped(
        &self,
        shard: &SkippedShard,
        after: Option<(ConversationId, EventAt)>,
        limit: usize,
    ) -> Result<Vec<SkippedRow>>;

    /// Returns the devices of a user with their version. `None` if there never was one.
    async fn devices(&self, user: &UserId) -> Result<Option<(Version, Vec<Device>)>>;

    /// Replaces all devices of a user, unless they have a higher version. The caller bounds their number.
    async fn set_devices(&self, user: &UserId, version: Version, devices: &[Device]) -> Result<()>;

    /// Returns the owner of a token, given the SHA-256 of the token.
    async fn device_token(&self, hash: &[u8; 32]) -> Result<Option<TokenRow>>;

    async fn set_device_token(&self, hash: &[u8; 32], row: &TokenRow) -> Result<()>;

    /// Removes the owner of a token, unless the row has a higher version.
    async fn remove_device_token(&self, hash: &[u8; 32], version: Version) -> Result<()>;

    /// Sets what a user wants of a conversation, unless the row has a higher version. Returns whether it was written: not
    /// if the user has never been in the conversation. Then the inbox has no summary of it, and gets no row.
    async fn set_settings(
        &self,
        user: &UserId,
        conversation: ConversationId,
        settings: &InboxSettings,
    ) -> Result<bool>;
}
