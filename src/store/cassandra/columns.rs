//! Conversion between rows of the domain and columns.

use std::sync::Arc;

use scylla::{
    DeserializeRow,
    value::{CqlTimestamp, CqlTimeuuid, MaybeUnset},
};
use serde::{
    Deserialize, Serialize,
    de::{DeserializeOwned, value::StrDeserializer},
};
use uuid::Uuid;

use super::{
    super::{Activity, ConversationRow, Error, LogRow, ParticipantRow, PublicRow, Result},
    batches::Unit,
    statements::Statements,
};
use crate::model::{
    Attachment, ClientId, Content, ContentState, ConversationId, Details, Entry, EntryKind,
    EntryState, Kind, MessageId, Participant, ReactionState, Seq, UserId,
};

/// Positions of one partition of `messages`.
const BUCKET: u64 = 4_096;
/// Partitions of a channel's participants.
const CHANNEL_SHARDS: i32 = 64;
/// Partitions of the public listing.
pub(super) const PUBLIC_SHARDS: i32 = 16;
/// The estimated size of a statement without its text.
pub(super) const STATEMENT_BYTES: usize = 100;

pub(super) fn bucket_of(seq: Seq) -> u64 {
    seq / BUCKET
}

/// Whether this is the first entry of a bucket other than the first. Its bucket must be recorded before it is written.
pub(super) fn opens_bucket(seq: Seq) -> bool {
    seq > 0 && seq.is_multiple_of(BUCKET)
}

pub(super) fn first_of(bucket: u64) -> Seq {
    bucket * BUCKET
}

pub(super) fn shards_of(kind: Kind) -> i32 {
    match kind {
        Kind::Dm | Kind::Group => 1,
        Kind::Channel => CHANNEL_SHARDS,
    }
}

/// Returns the partition of a participant. It is part of the stored format and must never change.
pub(super) fn shard_of(kind: Kind, user: &UserId) -> i32 {
    match kind {
        Kind::Dm | Kind::Group => 0,
        Kind::Channel => {
            let hash = xxhash_rust::xxh3::xxh3_64(user.as_str().as_bytes());
            i32::try_from(hash % CHANNEL_SHARDS.unsigned_abs() as u64).unwrap_or_default()
        }
    }
}

/// Returns the partition of a public conversation. It is part of the stored format and must never change.
pub(super) fn public_shard_of(conversation: ConversationId) -> i32 {
    i32::from(conversation.0.as_bytes()[0]) % PUBLIC_SHARDS
}

/// Converts a number for CQL, which has no unsigned ones.
pub(super) fn big(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

pub(super) fn unsigned(number: i64) -> u64 {
    u64::try_from(number).unwrap_or_default()
}

pub(super) fn small(number: usize) -> i32 {
    i32::try_from(number).unwrap_or(i32::MAX)
}

/// Converts days since 1970 for CQL.
pub(super) fn day_column(day: u32) -> i32 {
    i32::try_from(day).unwrap_or(i32::MAX)
}

/// Leaves the end of a settle unset in a row that was appended.
pub(super) fn settle_end(position: u64) -> MaybeUnset<i64> {
    unset((position > 0).then(|| big(position)))
}

/// Leaves an absent column unset, because writing a null would create a tombstone.
pub(super) fn unset<T>(value: Option<T>) -> MaybeUnset<T> {
    value.map_or(MaybeUnset::Unset, MaybeUnset::Set)
}

/// Returns the name of an enumeration's value, as in the protocol.
pub(super) fn name_of<T: Serialize>(value: &T) -> String {
    match serde_json::to_value(value) {
        Ok(serde_json::Value::String(name)) => name,
        other => {
            debug_assert!(false, "an enumeration of names, not {other:?}");
            String::new()
        }
    }
}

pub(super) fn corrupt(operation: &'static str, reason: impl ToString) -> Error {
    Error::Corrupt {
        operation,
        reason: reason.to_string(),
    }
}

/// Returns the JSON of a value that always has one. Equal values have equal texts.
pub(super) fn json<T: Serialize>(value: &T) -> String {
    let text = serde_json::to_string(value);
    debug_assert!(text.is_ok(), "a value must always encode: {text:?}");
    text.unwrap_or_default()
}

pub(super) fn from_json<T: DeserializeOwned>(operation: &'static str, text: &str) -> Result<T> {
    serde_json::from_str(text).map_err(|e| corrupt(operation, e))
}

pub(super) fn named<'a, T: Deserialize<'a>>(operation: &'static str, name: &'a str) -> Result<T> {
    T::deserialize(StrDeserializer::<serde::de::value::Error>::new(name))
        .map_err(|e| corrupt(operation, e))
}

pub(super) fn user(operation: &'static str, name: &str) -> Result<UserId> {
    UserId::new(name).map_err(|e| corrupt(operation, e))
}

impl Statements {
    fn message(&self, conversation: ConversationId, row: &LogRow) -> Unit {
        let LogRow {
            record: entry,
            epoch,
            settled,
            settle_end: end,
        } = row;
        let (kind, body, attachments, reply_to) = match &entry.content {
            Content::Text {
                body,
                attachments,
                reply_to,
            } => {
                let attachments = (!attachments.is_empty())
                    .then(|| serde_json::to_string(attachments).unwrap_or_default());
                (
                    EntryKind::Text,
                    body.clone(),
                    attachments,
                    reply_to.map(big),
                )
            }
            Content::System(change) => {
                let change = serde_json::to_string(change).unwrap_or_default();
                (EntryKind::System, change, None, None)
            }
        };
        let bytes = body.len() + attachments.as_ref().map_or(0, String::len) + 2 * STATEMENT_BYTES;
        let values = Box::new((
            conversation.0,
            big(bucket_of(entry.seq)),
            big(entry.seq),
            big(*epoch),
            CqlTimeuuid::from(entry.message_id.0),
            entry.sender.as_str().to_owned(),
            entry.client_id.0,
            name_of(&kind),
            body,
            unset(attachments),
            unset(reply_to),
            CqlTimestamp(entry.at),
            big(*settled),
            big(entry.texts),
            settle_end(*end),
        ));
        Unit::one(&self.insert_message, values, bytes)
    }

    /// Returns one unit for each bucket of the rows.
    pub(super) fn messages(&self, conversation: ConversationId, rows: &[LogRow]) -> Vec<Unit> {
        let buckets = rows.chunk_by(|a, b| bucket_of(a.record.seq) == bucket_of(b.record.seq));
        let unit = |rows: &[LogRow]| {
            let mut unit = Unit::default();
            unit.extend(rows.iter().map(|row| self.message(conversation, row)));
            unit
        };
        buckets.map(unit).collect()
    }

    pub(super) fn send(&self, conversation: ConversationId, row: &LogRow) -> Unit {
        let entry = &row.record;
        let values = Box::new((
            conversation.0,
            entry.sender.as_str().to_owned(),
            entry.client_id.0,
            big(row.epoch),
            big(entry.seq),
        ));
        Unit::one(
            &self.insert_send,
            values,
            STATEMENT_BYTES + entry.sender.as_str().len(),
        )
    }

    /// Returns the units that record that a gateway wrote to a conversation.
    pub(super) fn activity(&self, conversation: ConversationId, activity: Activity) -> [Unit; 2] {
        let Activity { gateway, minute } = activity;
        let minute = i32::try_from(minute).unwrap_or(i32::MAX);
        let row = Box::new((gateway.0, minute, conversation.0));
        let minute = Box::new((gateway.0, minute));
        [
            Unit::one(&self.insert_activity, row, 100),
            Unit::one(&self.insert_activity_minute, minute, 50),
        ]
    }

    pub(super) fn head_bucket(&self, conversation: ConversationId, bucket: u64) -> Unit {
        let values = Box::new((big(bucket), big(bucket), conversation.0));
        Unit::one(&self.set_head_bucket, values, STATEMENT_BYTES)
    }

    pub(super) fn details(&self, conversation: ConversationId, row: &ConversationRow) -> Vec<Unit> {
        let ConversationRow {
            details: d,
            participant_count,
            seq,
        } = row;
        let details = Box::new((
            big(*seq),
            name_of(&d.kind),
            unset(d.name.clone()),
            CqlTimestamp(d.created_at),
            d.created_by.as_str().to_owned(),
            name_of(&d.posting),
            d.public,
            big(*participant_count),
            big(*seq),
            conversation.0,
        ));
        let bytes = 2 * STATEMENT_BYTES + d.name.as_ref().map_or(0, String::len);
        let mut units = vec![Unit::one(&self.set_details, details, bytes)];
        if d.kind != Kind::Dm {
            let public = Box::new((
                big(*seq),
                d.public,
                name_of(&d.kind),
                unset(d.name.clone()),
                CqlTimestamp(d.created_at),
                public_shard_of(conversation),
                conversation.0,
            ));
            units.push(Unit::one(&self.set_public, public, bytes));
        }
        units
    }

    pub(super) fn participant_row(
        &self,
        conversation: ConversationId,
        kind: Kind,
        row: &ParticipantRow,
    ) -> Unit {
        let ParticipantRow {
            participant: p,
            seq,
        } = row;
        let membership = (
            big(*seq),
            name_of(&p.role),
            big(p.joined_seq),
            unset(p.left_seq.map(big)),
            big(*seq),
            conversation.0,
            shard_of(kind, &p.user),
            p.user.as_str().to_owned(),
        );
        let mut unit = Unit::one(&self.set_membership, Box::new(membership), STATEMENT_BYTES);
        let (read, delivered) = (Some(p.read_seq), Some(p.delivered_seq));
        let marks = self.marks(conversation, kind, &p.user, read, delivered);
        unit.extend(marks);
        unit
    }

    /// Returns the unit that raises a participant's watermarks.
    pub(super) fn marks(
        &self,
        conversation: ConversationId,
        kind: Kind,
        user: &UserId,
        read: Option<Seq>,
        delivered: Option<Seq>,
    ) -> Option<Unit> {
        let shard = shard_of(kind, user);
        let mark = |statement, seq| {
            let name = user.as_str().to_owned();
            let values = Box::new((big(seq), big(seq), conversation.0, shard, name));
            Unit::one(statement, values, STATEMENT_BYTES)
        };
        let mut unit = Unit::default();
        unit.extend(read.map(|seq| mark(&self.set_participant_read, seq)));
        unit.extend(delivered.map(|seq| mark(&self.set_participant_delivered, seq)));
        (!unit.statements.is_empty()).then_some(unit)
    }
}

/// Reads the state of an entry from its columns.
pub(super) fn state_of(
    operation: &'static str,
    content: Option<&str>,
    reactions: Option<&str>,
) -> Result<EntryState> {
    let content: Option<ContentState> = content.map(|t| from_json(operation, t)).transpose()?;
    let reactions: Option<ReactionState> =
        reactions.map(|t| from_json(operation, t)).transpose()?;
    Ok(EntryState { content, reactions })
}

/// A row of `messages`: an entry as an owner wrote it, or with epoch 0 the state of an entry.
#[derive(DeserializeRow)]
pub(super) struct MessageColumns {
    seq: i64,
    epoch: i64,
    message_id: Option<CqlTimeuuid>,
    sender: Option<String>,
    client_id: Option<Uuid>,
    kind: Option<String>,
    body: Option<String>,
    attachments: Option<String>,
    reply_to: Option<i64>,
    at: Option<CqlTimestamp>,
    settled: Option<i64>,
    texts: Option<i64>,
    settle_end: Option<i64>,
    content_state: Option<String>,
    reaction_state: Option<String>,
}

impl MessageColumns {
    pub(super) fn seq(&self) -> Seq {
        unsigned(self.seq)
    }

    /// Returns the state of the row's entry, if the row is a state.
    pub(super) fn state(&self, operation: &'static str) -> Result<Option<(Seq, EntryState)>> {
        let parts = (
            self.content_state.as_deref(),
            self.reaction_state.as_deref(),
        );
        match parts {
            (None, None) => Ok(None),
            (content, reactions) => {
                let state = state_of(operation, content, reactions)?;
                Ok(Some((unsigned(self.seq), state)))
            }
        }
    }

    /// Returns the row of the log. `None` if the row is no entry.
    pub(super) fn row(self, operation: &'static str) -> Result<Option<LogRow>> {
        let Self {
            message_id: Some(message_id),
            sender: Some(sender),
            client_id: Some(client_id),
            kind: Some(kind),
            body: Some(body),
            at: Some(at),
            settled: Some(settled),
            texts: Some(texts),
            ..
        } = self
        else {
            return Ok(None);
        };
        let json = |e: serde_json::Error| corrupt(operation, e);
        let content = match named(operation, &kind)? {
            EntryKind::Text => Content::Text {
                body,
                // The attachments of an erased message are an empty text.
                attachments: match self.attachments.filter(|text| !text.is_empty()) {
                    Some(text) => serde_json::from_str::<Vec<Attachment>>(&text).map_err(json)?,
                    None => Vec::new(),
                },
                reply_to: self.reply_to.map(unsigned),
            },
            EntryKind::System => Content::System(serde_json::from_str(&body).map_err(json)?),
        };
        let entry = Arc::new(Entry {
            seq: unsigned(self.seq),
            message_id: MessageId(message_id.into()),
            client_id: ClientId(client_id),
            sender: user(operation, &sender)?,
            at: at.0,
            content,
            texts: unsigned(texts),
        });
        Ok(Some(LogRow {
            record: entry,
            epoch: unsigned(self.epoch),
            settled: unsigned(settled),
            settle_end: self.settle_end.map_or(0, unsigned),
        }))
    }
}

/// A conversation's row. It may contain a bucket or a settled seq without details.
#[derive(DeserializeRow)]
pub(super) struct ConversationColumns {
    kind: Option<String>,
    name: Option<String>,
    created_at: Option<CqlTimestamp>,
    created_by: Option<String>,
    posting: Option<String>,
    public: Option<bool>,
    participant_count: Option<i64>,
    seq: Option<i64>,
}

impl ConversationColumns {
    pub(super) fn row(self, operation: &'static str) -> Result<Option<ConversationRow>> {
        let Self {
            kind: Some(kind),
            name,
            created_at: Some(CqlTimestamp(created_at)),
            created_by: Some(created_by),
            posting: Some(posting),
            public: Some(public),
            participant_count: Some(participant_count),
            seq: Some(seq),
        } = self
        else {
            return Ok(None);
        };
        Ok(Some(ConversationRow {
            details: Details {
                kind: named(operation, &kind)?,
                name,
                created_at,
                created_by: user(operation, &created_by)?,
                posting: named(operation, &posting)?,
                public,
            },
            participant_count: unsigned(participant_count),
            seq: unsigned(seq),
        }))
    }
}

#[derive(DeserializeRow)]
pub(super) struct ParticipantColumns {
    pub user_id: String,
    role: Option<String>,
    joined_seq: Option<i64>,
    left_seq: Option<i64>,
    seq: Option<i64>,
    delivered_seq: Option<i64>,
    read_seq: Option<i64>,
}

impl ParticipantColumns {
    /// Converts the columns. `None` for a watermark without a stored membership.
    pub(super) fn row(self, operation: &'static str) -> Result<Option<ParticipantRow>> {
        let Self {
            user_id,
            role: Some(role),
            joined_seq: Some(joined_seq),
            left_seq,
            seq: Some(seq),
            delivered_seq,
            read_seq,
        } = self
        else {
            return Ok(None);
        };
        let participant = Participant {
            user: user(operation, &user_id)?,
            role: named(operation, &role)?,
            joined_seq: unsigned(joined_seq),
            left_seq: left_seq.map(unsigned),
            delivered_seq: delivered_seq.map_or(0, unsigned),
            read_seq: read_seq.map_or(0, unsigned),
        };
        Ok(Some(ParticipantRow {
            participant,
            seq: unsigned(seq),
        }))
    }
}

#[derive(DeserializeRow)]
pub(super) struct PublicColumns {
    pub conversation_id: Uuid,
    public: Option<bool>,
    kind: Option<String>,
    name: Option<String>,
    created_at: Option<CqlTimestamp>,
}

impl PublicColumns {
    /// Converts the columns. `None` if the conversation is no longer public.
    pub(super) fn row(self, operation: &'static str) -> Result<Option<PublicRow>> {
        match self {
            Self {
                conversation_id,
                public: Some(true),
                kind: Some(kind),
                name,
                created_at: Some(CqlTimestamp(created_at)),
            } => Ok(Some(PublicRow {
                conversation: ConversationId(conversation_id),
                kind: named(operation, &kind)?,
                name,
                created_at,
            })),
            _ => Ok(None),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// These values are part of the stored format: they must never change.
    #[test]
    fn shards_and_buckets_stay_where_they_are() {
        let user = |name: &str| UserId::new(name).unwrap();
        let shards = ["alice", "bob", "carol"].map(|n| shard_of(Kind::Channel, &user(n)));
        assert_eq!(shards, SHARDS);
        assert_eq!(shard_of(Kind::Group, &user("alice")), 0);
        assert_eq!(
            (bucket_of(4_095), bucket_of(4_096), first_of(1)),
            (0, 1, 4_096)
        );
        assert!(opens_bucket(4_096) && !opens_bucket(0) && !opens_bucket(4_097));
    }

    const SHARDS: [i32; 3] = [48, 37, 36];
}
