//! Reads of changes and reactions.

use super::{
    super::{ChangesTail, ReactorRow, ReactorsPage, Result, Tail, first_of_tail, reactors},
    Cassandra,
    changes::{ChangeColumns, ReactorColumns, deleted_of},
    columns::{big, bucket_of, first_of, shard_of, shards_of, small, unsigned},
};
use crate::model::{ConversationId, Kind, Seq, UserId};

impl Cassandra {
    pub(super) async fn newest_changes(
        &self,
        conversation: ConversationId,
        revs: u64,
    ) -> Result<ChangesTail> {
        const OPERATION: &str = "changes_tail";
        let s = &self.statements;
        let head: Option<(Option<i64>, Option<i64>, Option<String>)> = self
            .read_one(OPERATION, &s.changes_head, (conversation.0,))
            .await?;
        let (bucket, settled, deleted) = head.unwrap_or_default();
        let deleted = deleted_of(OPERATION, deleted.as_deref())?;
        let settled = settled.map_or(0, unsigned);
        let (mut rows, mut first) = (Vec::new(), 1);
        if let Some(bucket) = bucket.map(unsigned) {
            let newest: Option<ChangeColumns> = self
                .read_one(OPERATION, &s.newest_change, (conversation.0, big(bucket)))
                .await?;
            // A bucket is recorded before its first row is written, so it may still be empty.
            let newest = match newest {
                Some(row) => row.rev(),
                None => first_of(bucket).saturating_sub(1),
            };
            first = first_of_tail(newest, revs);
            if newest > 0 {
                let found = self.change_range(OPERATION, conversation, first, newest);
                rows = found.await?;
            }
        }
        rows.reverse();
        let tail = Tail {
            first,
            rows,
            settled,
        };
        Ok(ChangesTail { tail, deleted })
    }

    pub(super) async fn reactors_page(
        &self,
        conversation: ConversationId,
        kind: Kind,
        seq: Seq,
        emoji: Option<&str>,
        mut after: Option<reactors::Position>,
        limit: usize,
    ) -> Result<ReactorsPage> {
        let mut scan = reactors::ReactorsScan::new(limit);
        let mut shard = after.as_ref().map_or(0, |p| shard_of(kind, &p.user));
        let shards = shards_of(kind);
        while shard < shards {
            let place = (conversation.0, big(seq), shard);
            let rows = self.reactors_in(place, emoji, after.as_ref(), scan.rows_wanted());
            match scan.add(rows.await?, shard + 1 == shards) {
                reactors::Step::Complete => break,
                reactors::Step::After(position) => after = Some(position),
                reactors::Step::Exhausted => (shard, after) = (shard + 1, None),
            }
        }
        Ok(scan.into_page())
    }

    /// Returns the rows of one partition after a position, removed reactions among them.
    async fn reactors_in(
        &self,
        (conversation, seq, shard): (uuid::Uuid, i64, i32),
        emoji: Option<&str>,
        after: Option<&reactors::Position>,
        count: usize,
    ) -> Result<Vec<ReactorRow>> {
        const OPERATION: &str = "reactors";
        let s = &self.statements;
        let user = after.map_or("", |p| p.user.as_str());
        // Every emoji and every user is after the empty one.
        let from = emoji.or(after.map(|p| p.emoji.as_str())).unwrap_or("");
        let values = (conversation, seq, shard, from, user, small(count));
        let statement = match emoji {
            Some(_) => &s.reactors_of_emoji,
            None => &s.reactors,
        };
        let rows: Vec<ReactorColumns> = self.read(OPERATION, statement, values).await?;
        let rows = rows.into_iter();
        rows.map(|row| row.row(OPERATION, unsigned(seq))).collect()
    }

    pub(super) async fn user_reactions(
        &self,
        conversation: ConversationId,
        user: &UserId,
        from: Seq,
        to: Seq,
    ) -> Result<Vec<(Seq, String, bool)>> {
        let mut found = Vec::new();
        for bucket in bucket_of(from)..=bucket_of(to) {
            let user = user.as_str();
            let values = (conversation.0, big(bucket), user, big(from), big(to));
            let rows: Vec<(i64, String, Option<bool>)> = self
                .read("reactions_of", &self.statements.user_reactions, values)
                .await?;
            let row = |(seq, emoji, active)| (unsigned(seq), emoji, active == Some(true));
            found.extend(rows.into_iter().map(row));
        }
        Ok(found)
    }
}
