//! The log of changes, the states of entries and their reactions, as columns.

use std::sync::Arc;

use scylla::{DeserializeRow, value::CqlTimestamp};

use super::{
    batches::Unit,
    columns::{
        STATEMENT_BYTES, big, bucket_of, from_json, json, settle_end, shard_of, unsigned, user,
    },
    statements::Statements,
};
use crate::{
    model::{Change, ContentState, ConversationId, DeletedSeqs, EntryState, Kind, Rev, Seq},
    store::{ChangeRow, ReactorRow, Result},
};

/// Whether this is the first change of a bucket. Its bucket must be recorded before it is written. The record of the
/// first bucket is also how a takeover sees that there are changes.
pub(super) fn opens_bucket(rev: Rev) -> bool {
    rev == 1 || (rev > 0 && bucket_of(rev) != bucket_of(rev - 1))
}

/// Returns the timestamp of the content of a state: twice its rev, so that erasing it has a timestamp of its own, above
/// the content and below the next change.
fn content_timestamp(rev: Rev, erased: bool) -> i64 {
    big(rev * 2 + u64::from(erased))
}

impl Statements {
    fn change(&self, conversation: ConversationId, row: &ChangeRow) -> Unit {
        let change = &row.record;
        let op = json(&change.op);
        let bytes = 2 * STATEMENT_BYTES + op.len();
        let values = Box::new((
            conversation.0,
            big(bucket_of(change.rev)),
            big(change.rev),
            big(row.epoch),
            change.by.as_str().to_owned(),
            CqlTimestamp(change.at),
            big(row.settled),
            op,
            settle_end(row.settle_end),
        ));
        Unit::one(&self.insert_change, values, bytes)
    }

    /// Returns one unit for each bucket of the rows.
    pub(super) fn changes(&self, conversation: ConversationId, rows: &[ChangeRow]) -> Vec<Unit> {
        let buckets = rows.chunk_by(|a, b| bucket_of(a.record.rev) == bucket_of(b.record.rev));
        let unit = |rows: &[ChangeRow]| {
            let mut unit = Unit::default();
            unit.extend(rows.iter().map(|row| self.change(conversation, row)));
            unit
        };
        buckets.map(unit).collect()
    }

    /// Returns the unit that erases the content of an edit. `None` if the row is another change.
    pub(super) fn erase_change(
        &self,
        conversation: ConversationId,
        row: &ChangeRow,
    ) -> Option<Unit> {
        let Change { rev, op, .. } = &*row.record;
        let erased = json(&op.erased_edit()?);
        let bytes = 2 * STATEMENT_BYTES + erased.len();
        let (bucket, rev, epoch) = (big(bucket_of(*rev)), big(*rev), big(row.epoch));
        let values = Box::new((erased, conversation.0, bucket, rev, epoch));
        Some(Unit::one(&self.erase_change, values, bytes))
    }

    /// Returns the unit for the parts of an entry's state.
    pub(super) fn state(&self, conversation: ConversationId, seq: Seq, state: &EntryState) -> Unit {
        let bucket = big(bucket_of(seq));
        let part = |statement, timestamp: i64, text: String| {
            let bytes = STATEMENT_BYTES + text.len();
            let values = Box::new((timestamp, text, conversation.0, bucket, big(seq)));
            Unit::one(statement, values, bytes)
        };
        let mut unit = Unit::default();
        unit.extend(state.content.as_ref().map(|content| {
            let timestamp = content_timestamp(content.rev, false);
            part(&self.set_content_state, timestamp, json(content))
        }));
        unit.extend(state.reactions.as_ref().map(|reactions| {
            let text = json(reactions);
            part(&self.set_reaction_state, big(reactions.rev), text)
        }));
        unit
    }

    /// Returns the unit that erases the content of a state. `None` if there is none.
    pub(super) fn erase_state(
        &self,
        conversation: ConversationId,
        seq: Seq,
        state: &EntryState,
    ) -> Option<Unit> {
        let content = state.content.as_ref().filter(|c| !c.is_deleted())?;
        let erased = ContentState {
            content: None,
            ..content.clone()
        };
        let text = json(&erased);
        let bytes = STATEMENT_BYTES + text.len();
        let timestamp = content_timestamp(content.rev, true);
        let bucket = big(bucket_of(seq));
        let values = Box::new((timestamp, text, conversation.0, bucket, big(seq)));
        Some(Unit::one(&self.set_content_state, values, bytes))
    }

    /// Returns the units for a reaction: its row by entry, and its row by user.
    pub(super) fn reactor(
        &self,
        conversation: ConversationId,
        kind: Kind,
        row: &ReactorRow,
    ) -> [Unit; 2] {
        let rev = big(row.rev);
        let seq = big(row.seq);
        let name = || row.user.as_str().to_owned();
        let by_entry = Box::new((
            rev,
            row.on,
            CqlTimestamp(row.at),
            rev,
            conversation.0,
            seq,
            shard_of(kind, &row.user),
            row.emoji.clone(),
            name(),
        ));
        let bucket = big(bucket_of(row.seq));
        let by_user = Box::new((
            rev,
            row.on,
            conversation.0,
            bucket,
            name(),
            seq,
            row.emoji.clone(),
        ));
        [
            Unit::one(&self.set_reactor, by_entry, 2 * STATEMENT_BYTES),
            Unit::one(&self.set_user_reaction, by_user, 2 * STATEMENT_BYTES),
        ]
    }

    pub(super) fn changes_bucket(&self, conversation: ConversationId, bucket: u64) -> Unit {
        let values = Box::new((big(bucket), big(bucket), conversation.0));
        Unit::one(&self.set_changes_head_bucket, values, STATEMENT_BYTES)
    }

    pub(super) fn deleted(
        &self,
        conversation: ConversationId,
        deleted: &(Rev, DeletedSeqs),
    ) -> Unit {
        let text = json(deleted);
        let bytes = STATEMENT_BYTES + text.len();
        let values = Box::new((big(deleted.0), text, conversation.0));
        Unit::one(&self.set_deleted, values, bytes)
    }
}

/// Reads the column of deleted seqs: the rev and the seqs.
pub(super) fn deleted_of(
    operation: &'static str,
    column: Option<&str>,
) -> Result<(Rev, DeletedSeqs)> {
    column.map_or(Ok(Default::default()), |text| from_json(operation, text))
}

#[derive(DeserializeRow)]
pub(super) struct ChangeColumns {
    rev: i64,
    epoch: i64,
    author: Option<String>,
    at: Option<CqlTimestamp>,
    settled: Option<i64>,
    change: Option<String>,
    settle_end: Option<i64>,
}

impl ChangeColumns {
    pub(super) fn rev(&self) -> Rev {
        unsigned(self.rev)
    }

    /// Returns the row of the log. `None` if a part of it is missing: who erased it, or read a part of it, copied the rest.
    pub(super) fn row(self, operation: &'static str) -> Result<Option<ChangeRow>> {
        let Self {
            author: Some(author),
            at: Some(at),
            settled: Some(settled),
            change: Some(change),
            ..
        } = self
        else {
            return Ok(None);
        };
        let change = Change {
            rev: unsigned(self.rev),
            by: user(operation, &author)?,
            at: at.0,
            op: from_json(operation, &change)?,
        };
        Ok(Some(ChangeRow {
            record: Arc::new(change),
            epoch: unsigned(self.epoch),
            settled: unsigned(settled),
            settle_end: self.settle_end.map_or(0, unsigned),
        }))
    }
}

#[derive(DeserializeRow)]
pub(super) struct ReactorColumns {
    emoji: String,
    user_id: String,
    rev: Option<i64>,
    active: Option<bool>,
    at: Option<CqlTimestamp>,
}

impl ReactorColumns {
    pub(super) fn row(self, operation: &'static str, seq: Seq) -> Result<ReactorRow> {
        Ok(ReactorRow {
            seq,
            emoji: self.emoji,
            user: user(operation, &self.user_id)?,
            rev: self.rev.map_or(0, unsigned),
            on: self.active == Some(true),
            at: self.at.map_or(0, |at| at.0),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{ChangeOp, DeletedEntry, EditedContent, ReactionState, Reactions, UserId};

    /// These texts are the stored format: they must stay readable.
    #[test]
    fn the_stored_texts_of_changes_stay_as_they_are() {
        let edit = ChangeOp::Edit {
            seq: 7,
            content: Some(EditedContent {
                body: "new".into(),
                attachments: Vec::new(),
            }),
            edits: vec![2],
            dropped: Vec::new(),
        };
        let mut deleted = DeletedSeqs::default();
        deleted.add(7);
        let delete = ChangeOp::Delete {
            entries: vec![DeletedEntry {
                seq: 7,
                files: Vec::new(),
                edits: vec![2],
            }],
            deleted: deleted.clone(),
        };
        let reactions = Reactions::from([("x".into(), 1)]);
        let react = ChangeOp::React {
            seq: 7,
            emoji: "x".into(),
            on: true,
            reactions: reactions.clone(),
        };
        let content = ContentState {
            rev: 2,
            by: UserId::new("alice").unwrap(),
            at: 5,
            content: None,
            edits: vec![2],
        };
        let texts = [
            (
                json(&edit),
                r#"{"Edit":{"seq":7,"content":{"body":"new","attachments":[]},"edits":[2]}}"#,
            ),
            (
                json(&delete),
                r#"{"Delete":{"entries":[{"seq":7,"edits":[2]}],"deleted":{"highest":[7],"count":1}}}"#,
            ),
            (
                json(&react),
                r#"{"React":{"seq":7,"emoji":"x","on":true,"reactions":{"x":1}}}"#,
            ),
            (
                json(&content),
                r#"{"rev":2,"by":"alice","at":5,"content":null,"edits":[2]}"#,
            ),
            (
                json(&ReactionState { rev: 3, reactions }),
                r#"{"rev":3,"reactions":{"x":1}}"#,
            ),
            (json(&(4, deleted)), r#"[4,{"highest":[7],"count":1}]"#),
        ];
        for (text, expected) in texts {
            assert_eq!(text, expected);
        }
    }

    #[test]
    fn the_first_change_and_the_first_of_each_bucket_open_one() {
        let opening: Vec<Rev> = (0..=8_200).filter(|rev| opens_bucket(*rev)).collect();
        assert_eq!(opening, [1, 4_096, 8_192]);
    }
}
