//! Looks for rows of the logs beyond their recorded ends.

use scylla::{deserialize::row::DeserializeRow, statement::prepared::PreparedStatement};

use super::{
    super::Result,
    Cassandra,
    changes::ChangeColumns,
    columns::{MessageColumns, big, unsigned},
};
use crate::model::ConversationId;

const OPERATION: &str = "find_ends";
/// Partitions after the last one with rows that are looked at. A longer part of a log that is lost hides what is beyond it.
const BEYOND: u64 = 16;

impl Cassandra {
    /// Returns whether a log has rows in partitions after the recorded newest one. With `record` the newest one is recorded.
    pub(super) async fn find_heads(
        &self,
        conversation: ConversationId,
        record: bool,
    ) -> Result<bool> {
        let (messages, changes) = self.recorded_heads(conversation).await?;
        let newest = &self.statements.newest_message;
        let messages_end = self
            .newest_bucket::<MessageColumns>(
                conversation,
                newest,
                messages.map_or(1, |bucket| bucket + 1),
            )
            .await?;
        let newest = &self.statements.newest_change;
        let changes_end = self
            .newest_bucket::<ChangeColumns>(
                conversation,
                newest,
                changes.map_or(0, |bucket| bucket + 1),
            )
            .await?;
        if messages_end.is_none() && changes_end.is_none() {
            return Ok(false);
        }
        // A gateway may have begun partitions meanwhile.
        let (messages, changes) = self.recorded_heads(conversation).await?;
        let messages_end = messages_end.filter(|end| messages.is_none_or(|head| head < *end));
        let changes_end = changes_end.filter(|end| changes.is_none_or(|head| head < *end));
        if record {
            let s = &self.statements;
            let mut units = Vec::new();
            units.extend(messages_end.map(|bucket| s.head_bucket(conversation, bucket)));
            units.extend(changes_end.map(|bucket| s.changes_bucket(conversation, bucket)));
            self.batches.write(OPERATION, units).await?;
        }
        Ok(messages_end.is_some() || changes_end.is_some())
    }

    /// Returns the newest buckets of messages and of changes that are recorded.
    async fn recorded_heads(
        &self,
        conversation: ConversationId,
    ) -> Result<(Option<u64>, Option<u64>)> {
        let head: Option<(Option<i64>, Option<i64>, Option<i64>)> = self
            .read_one(OPERATION, &self.statements.head, (conversation.0,))
            .await?;
        let (messages, _, changes) = head.unwrap_or_default();
        Ok((messages.map(unsigned), changes.map(unsigned)))
    }

    /// Returns the newest bucket with a row, from a bucket on.
    async fn newest_bucket<R>(
        &self,
        conversation: ConversationId,
        newest: &PreparedStatement,
        from: u64,
    ) -> Result<Option<u64>>
    where
        R: for<'frame, 'metadata> DeserializeRow<'frame, 'metadata>,
    {
        let (mut bucket, mut found) = (from, None);
        while bucket < found.map_or(from, |found: u64| found + 1) + BEYOND {
            let values = (conversation.0, big(bucket));
            let row: Option<R> = self.read_one(OPERATION, newest, values).await?;
            if row.is_some() {
                found = Some(bucket);
            }
            bucket += 1;
        }
        Ok(found)
    }
}
