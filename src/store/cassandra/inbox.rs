//! The columns of inbox rows.

use std::sync::Arc;

use scylla::DeserializeRow;
use uuid::Uuid;

use super::{
    batches::Unit,
    changes::deleted_of,
    columns::{STATEMENT_BYTES, big, from_json, json, unsigned},
    statements::{Statements, Write},
};
use crate::{
    model::{ConversationId, Seq, UserId},
    store::{InboxRow, InboxSettings, InboxSummary, InboxWrite, Result},
};

/// Summaries of one seq, one for each change of the entry's content. The timestamp of a summary is its seq times this,
/// plus the number of changes.
const SUMMARY_VERSIONS: u64 = 2_048;

fn summary_timestamp(summary: &InboxSummary) -> i64 {
    let changes = u64::from(summary.changes).min(SUMMARY_VERSIONS - 1);
    let timestamp = summary.seq.saturating_mul(SUMMARY_VERSIONS);
    big(timestamp.saturating_add(changes))
}

impl Statements {
    /// Returns the unit that raises a watermark of an inbox row with this statement.
    fn inbox_mark(
        statement: &Arc<Write>,
        conversation: ConversationId,
        user: &UserId,
        seq: Seq,
    ) -> Unit {
        let name = user.as_str().to_owned();
        let values = Box::new((big(seq), big(seq), name, conversation.0));
        Unit::one(statement, values, STATEMENT_BYTES)
    }

    /// Returns the unit that raises the read watermark of an inbox row.
    pub(super) fn inbox_read(
        &self,
        conversation: ConversationId,
        user: &UserId,
        seq: Seq,
        texts: u64,
    ) -> Unit {
        let name = user.as_str().to_owned();
        let values = Box::new((big(seq), big(seq), big(texts), name, conversation.0));
        Unit::one(&self.set_inbox_read, values, STATEMENT_BYTES)
    }

    fn inbox_summary(
        &self,
        conversation: ConversationId,
        user: &UserId,
        summary: &InboxSummary,
    ) -> Unit {
        let name = user.as_str().to_owned();
        let text = json(summary);
        let bytes = STATEMENT_BYTES + text.len();
        let values = (summary_timestamp(summary), text, name, conversation.0);
        Unit::one(&self.set_inbox_summary, Box::new(values), bytes)
    }

    /// Returns the units for an inbox row and for the participant's watermark.
    pub(super) fn inbox_write(&self, write: &InboxWrite) -> Vec<Unit> {
        let InboxWrite {
            user,
            conversation,
            kind,
            summary,
            read_seq,
            read_texts,
            left_seq,
            deleted,
            rev,
        } = write;
        let id = *conversation;
        let mut row = Unit::default();
        row.extend(summary.iter().map(|s| self.inbox_summary(id, user, s)));
        row.extend(read_seq.map(|seq| self.inbox_read(id, user, seq, *read_texts)));
        let mark = |statement, value| Self::inbox_mark(statement, id, user, value);
        row.extend(left_seq.map(|seq| mark(&self.set_inbox_left, seq)));
        row.extend(deleted.iter().map(|deleted| {
            let text = json(deleted);
            let bytes = STATEMENT_BYTES + text.len();
            let name = user.as_str().to_owned();
            let values = Box::new((big(deleted.0), text, name, id.0));
            Unit::one(&self.set_inbox_deleted, values, bytes)
        }));
        row.extend(rev.map(|rev| mark(&self.set_inbox_rev, rev)));
        let mut units = Vec::with_capacity(2);
        if !row.statements.is_empty() {
            units.push(row);
        }
        units.extend(self.marks(id, *kind, user, *read_seq, None));
        units
    }
}

#[derive(DeserializeRow)]
pub(super) struct InboxColumns {
    conversation_id: Uuid,
    summary: Option<String>,
    read_seq: Option<i64>,
    read_texts: Option<i64>,
    left_seq: Option<i64>,
    deleted: Option<String>,
    rev: Option<i64>,
    /// 0 if the conversation is not muted.
    muted_until: Option<i64>,
    push: Option<bool>,
    settings_version: Option<i64>,
}

impl InboxColumns {
    pub(super) fn row(self, operation: &'static str) -> Result<InboxRow> {
        let summary = self.summary.as_deref();
        Ok(InboxRow {
            conversation: ConversationId(self.conversation_id),
            summary: summary.map(|text| from_json(operation, text)).transpose()?,
            read_seq: self.read_seq.map_or(0, unsigned),
            read_texts: self.read_texts.map_or(0, unsigned),
            left_seq: self.left_seq.map(unsigned),
            deleted: deleted_of(operation, self.deleted.as_deref())?,
            rev: self.rev.map_or(0, unsigned),
            settings: self.settings(),
        })
    }

    fn settings(&self) -> InboxSettings {
        match (self.push, self.settings_version) {
            (Some(push), Some(version)) => InboxSettings {
                version: unsigned(version),
                muted_until: self.muted_until.filter(|until| *until > 0),
                push,
            },
            _ => InboxSettings::default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Kind;

    /// This text is the stored format: it must stay readable.
    #[test]
    fn the_stored_text_of_a_summary_stays_as_it_is() {
        let summary = InboxSummary {
            seq: 9,
            kind: Kind::Group,
            name: None,
            joined_seq: 2,
            last: None,
            changes: 1,
            texts: 7,
        };
        assert_eq!(
            json(&summary),
            r#"{"seq":9,"kind":"group","name":null,"joined_seq":2,"last":null,"changes":1,"texts":7}"#
        );
        assert_eq!(summary_timestamp(&summary), 9 * 2_048 + 1);
    }
}
