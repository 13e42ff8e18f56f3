//! The columns of inbox rows.

use std::sync::Arc;

use scylla::{
    DeserializeRow,
    value::{CqlTimestamp, CqlTimeuuid},
};
use uuid::Uuid;

use super::{
    batches::Unit,
    changes::deleted_of,
    columns::{STATEMENT_BYTES, big, from_json, json, name_of, named, unset, unsigned, user},
    statements::{Statements, Write},
};
use crate::{
    model::{ConversationId, Last, MessageId, Seq, UserId},
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
        texts: Option<u64>,
    ) -> Unit {
        let Some(texts) = texts else {
            return Self::inbox_mark(&self.set_inbox_read, conversation, user, seq);
        };
        let name = user.as_str().to_owned();
        let values = Box::new((big(seq), big(seq), big(texts), name, conversation.0));
        Unit::one(&self.set_inbox_read_texts, values, STATEMENT_BYTES)
    }

    fn inbox_summary(
        &self,
        conversation: ConversationId,
        user: &UserId,
        summary: &InboxSummary,
    ) -> Unit {
        let name = user.as_str().to_owned();
        if summary.texts.is_some() {
            let text = json(summary);
            let bytes = STATEMENT_BYTES + text.len();
            let values = (summary_timestamp(summary), text, name, conversation.0);
            return Unit::one(&self.set_inbox_summary, Box::new(values), bytes);
        }
        let last = summary.last.as_ref();
        let bytes = STATEMENT_BYTES
            + summary.name.as_ref().map_or(0, String::len)
            + last.map_or(0, |l| l.preview.len());
        let values = (
            big(summary.seq),
            name_of(&summary.kind),
            unset(summary.name.clone()),
            big(summary.joined_seq),
            big(summary.seq),
            unset(last.map(|l| big(l.seq))),
            unset(last.map(|l| CqlTimeuuid::from(l.message_id.0))),
            unset(last.map(|l| CqlTimestamp(l.at))),
            unset(last.map(|l| l.sender.as_str().to_owned())),
            unset(last.map(|l| name_of(&l.kind))),
            unset(last.map(|l| l.preview.clone())),
            name,
            conversation.0,
        );
        Unit::one(&self.set_inbox_old_summary, Box::new(values), bytes)
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

    /// Returns the unit that empties a preview of level 1, because it may be of an entry that is deleted now. Its
    /// timestamp is above that of every such preview up to the seq of the new summary, or up to the highest deleted
    /// seq, late ones included.
    pub(super) fn clear_old_preview(&self, write: &InboxWrite) -> Option<Unit> {
        let newest = write.summary.as_ref().filter(|s| s.texts.is_some());
        let newest = newest.map(|summary| summary.seq);
        let deleted = write.deleted.as_ref();
        let deleted = deleted.and_then(|(_, deleted)| deleted.highest.last().copied());
        let timestamp = big(newest.max(deleted)?.saturating_add(1));
        let name = write.user.as_str().to_owned();
        let values = Box::new((timestamp, String::new(), name, write.conversation.0));
        Some(Unit::one(&self.set_inbox_preview, values, STATEMENT_BYTES))
    }
}

#[derive(DeserializeRow)]
pub(super) struct InboxColumns {
    conversation_id: Uuid,
    kind: Option<String>,
    name: Option<String>,
    joined_seq: Option<i64>,
    seq: Option<i64>,
    last_seq: Option<i64>,
    last_message_id: Option<CqlTimeuuid>,
    last_at: Option<CqlTimestamp>,
    last_sender: Option<String>,
    last_kind: Option<String>,
    last_preview: Option<String>,
    read_seq: Option<i64>,
    left_seq: Option<i64>,
    summary: Option<String>,
    read_texts: Option<i64>,
    /// The read seq that `read_texts` was written with, which is its timestamp.
    read_texts_seq: Option<i64>,
    deleted: Option<String>,
    rev: Option<i64>,
    /// 0 if the conversation is not muted.
    muted_until: Option<i64>,
    push: Option<bool>,
    settings_version: Option<i64>,
}

impl InboxColumns {
    pub(super) fn row(self, operation: &'static str) -> Result<InboxRow> {
        let new: Option<InboxSummary> = match &self.summary {
            Some(text) => Some(from_json(operation, text)?),
            None => None,
        };
        let old = self.old_summary(operation)?;
        let is_newer =
            |old: &InboxSummary| new.as_ref().is_none_or(|new| new.version() < old.version());
        let old = old.filter(is_newer);
        let texts = self.read_texts.map(unsigned);
        Ok(InboxRow {
            conversation: ConversationId(self.conversation_id),
            summary: old.or(new),
            read_seq: self.read_seq.map_or(0, unsigned),
            read_texts: texts.filter(|_| self.read_texts_seq == self.read_seq),
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

    /// Returns the summary that a gateway wrote at level 1.
    fn old_summary(&self, operation: &'static str) -> Result<Option<InboxSummary>> {
        let (Some(kind), Some(joined_seq), Some(seq)) = (&self.kind, self.joined_seq, self.seq)
        else {
            return Ok(None);
        };
        let last = match self {
            Self {
                last_seq: Some(seq),
                last_message_id: Some(message_id),
                last_at: Some(CqlTimestamp(at)),
                last_sender: Some(sender),
                last_kind: Some(kind),
                last_preview: Some(preview),
                ..
            } => Some(Last {
                seq: unsigned(*seq),
                message_id: MessageId((*message_id).into()),
                at: *at,
                sender: user(operation, sender)?,
                kind: named(operation, kind)?,
                preview: preview.clone(),
                deleted: false,
            }),
            _ => None,
        };
        Ok(Some(InboxSummary {
            seq: unsigned(seq),
            kind: named(operation, kind)?,
            name: self.name.clone(),
            joined_seq: unsigned(joined_seq),
            last,
            changes: 0,
            texts: None,
        }))
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
            texts: Some(7),
        };
        assert_eq!(
            json(&summary),
            r#"{"seq":9,"kind":"group","name":null,"joined_seq":2,"last":null,"changes":1,"texts":7}"#
        );
        assert_eq!(summary_timestamp(&summary), 9 * 2_048 + 1);
    }
}
