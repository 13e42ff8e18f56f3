//! The values of cells, and the rows that they make.

use std::{borrow::Cow, sync::Arc};

use serde::{Deserialize, Serialize};

use super::{
    Cell,
    keys::{
        CONVERSATION, DELIVERED, Key, MEMBERSHIP, PUBLIC, READ, SENDS, log_key, participant_key,
    },
    today,
};
use crate::{
    model::{
        Attachment, AttachmentId, ClientId, Content, ConversationId, Details, Entry, GatewayId,
        Kind, Level, MessageId, Millis, Participant, Posting, Role, Seq, UserId,
    },
    msgpack,
    store::{ConversationRow, Error, LogRow, ParticipantRow, PublicRow, Result, RingRow},
};

/// The initial capacity of a value, enough for most messages.
const VALUE_BYTES: usize = 384;

fn number(number: u64) -> Vec<u8> {
    number.to_be_bytes().to_vec()
}

/// Encodes a value as a MessagePack array of all fields in order. New fields are added at the end, with a default. Only the last
/// field may be left out: a field after one that is left out would be read in its place.
pub(super) fn encode<T: Serialize>(value: &T) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(VALUE_BYTES);
    let encoded = rmp_serde::encode::write(&mut bytes, value);
    debug_assert!(encoded.is_ok(), "a row must always encode: {encoded:?}");
    bytes
}

pub(super) fn corrupt(operation: &'static str, reason: impl ToString) -> Error {
    Error::Corrupt {
        operation,
        reason: reason.to_string(),
    }
}

pub(super) fn decode<'a, T: Deserialize<'a>>(
    operation: &'static str,
    bytes: &'a [u8],
) -> Result<T> {
    msgpack::from_slice(bytes).map_err(|e| corrupt(operation, e))
}

pub(super) fn take<const N: usize>(
    operation: &'static str,
    bytes: &[u8],
    at: usize,
) -> Result<[u8; N]> {
    bytes
        .get(at..at + N)
        .and_then(|part| part.try_into().ok())
        .ok_or_else(|| corrupt(operation, "a key or value is too short"))
}

pub(super) fn take_u64(operation: &'static str, bytes: &[u8], at: usize) -> Result<u64> {
    take(operation, bytes, at).map(u64::from_be_bytes)
}

pub(super) fn take_conversation(
    operation: &'static str,
    bytes: &[u8],
    at: usize,
) -> Result<ConversationId> {
    take(operation, bytes, at).map(|id| ConversationId(uuid::Uuid::from_bytes(id)))
}

#[expect(
    clippy::trivially_copy_pass_by_ref,
    reason = "serde passes a reference"
)]
pub(super) fn is_zero(number: &u64) -> bool {
    *number == 0
}

#[derive(Serialize, Deserialize)]
struct StoredEntry<'a>(
    MessageId,
    ClientId,
    UserId,
    Millis,
    Seq, // settled
    #[serde(borrow)] StoredContent<'a>,
    u64,                                                    // texts
    #[serde(default, skip_serializing_if = "is_zero")] Seq, // end of its settle
);

#[derive(Serialize, Deserialize)]
enum StoredContent<'a> {
    #[serde(rename = "t")]
    Text(
        #[serde(borrow)] Cow<'a, str>,
        Vec<StoredAttachment>,
        Option<Seq>,
    ),
    /// The change as JSON: it is rare, and readable without this program.
    #[serde(rename = "s")]
    System(String),
}

#[derive(Serialize, Deserialize)]
pub(super) struct StoredAttachment(
    String,
    Option<String>,
    Option<String>,
    Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")] Option<StoredFile>,
);

/// The id of an uploaded file, and the description, width and height.
#[derive(Serialize, Deserialize, Default, PartialEq)]
struct StoredFile(
    Option<AttachmentId>,
    Option<String>,
    Option<u32>,
    Option<u32>,
);

pub(super) fn stored_attachments(attachments: &[Attachment]) -> Vec<StoredAttachment> {
    let stored = |a: Attachment| {
        let file = StoredFile(a.id, a.alt, a.width, a.height);
        let file = (file != StoredFile::default()).then_some(file);
        StoredAttachment(a.url, a.name, a.mime, a.size, file)
    };
    attachments.iter().cloned().map(stored).collect()
}

pub(super) fn attachments(stored: Vec<StoredAttachment>) -> Vec<Attachment> {
    let attachment = |StoredAttachment(url, name, mime, size, file)| {
        let StoredFile(id, alt, width, height) = file.unwrap_or_default();
        Attachment {
            id,
            url,
            name,
            mime,
            size,
            alt,
            width,
            height,
        }
    };
    stored.into_iter().map(attachment).collect()
}

pub(super) fn log_cells(conversation: ConversationId, rows: &[LogRow]) -> Vec<Cell> {
    let day = today();
    let mut cells = Vec::with_capacity(rows.len() * 2 + 1);
    for row in rows {
        let entry = &row.record;
        let content = match &entry.content {
            Content::Text {
                body,
                attachments,
                reply_to,
            } => StoredContent::Text(body.into(), stored_attachments(attachments), *reply_to),
            Content::System(change) => {
                StoredContent::System(serde_json::to_string(change).unwrap_or_default())
            }
        };
        let stored = StoredEntry(
            entry.message_id,
            entry.client_id,
            entry.sender.clone(),
            entry.at,
            row.settled,
            content,
            entry.texts,
            row.settle_end,
        );
        cells.push(
            log_key(conversation, entry.seq)
                .u64(row.epoch)
                .cell(0, encode(&stored)),
        );
        cells.push(
            Key::new(SENDS)
                .u32(day)
                .conversation(conversation)
                .user(&entry.sender)
                .bytes(entry.client_id.0.as_bytes())
                .u64(row.epoch)
                .cell(0, number(entry.seq)),
        );
    }
    cells
}

pub(super) fn log_row(operation: &'static str, cell: &Cell) -> Result<LogRow> {
    let seq = take_u64(operation, &cell.key, 17)?;
    let epoch = take_u64(operation, &cell.key, 25)?;
    let StoredEntry(message_id, client_id, sender, at, settled, content, texts, settle_end) =
        decode(operation, &cell.value)?;
    let content = match content {
        StoredContent::Text(body, stored, reply_to) => Content::Text {
            body: body.into_owned(),
            attachments: attachments(stored),
            reply_to,
        },
        StoredContent::System(json) => {
            Content::System(serde_json::from_str(&json).map_err(|e| corrupt(operation, e))?)
        }
    };
    let entry = Arc::new(Entry {
        seq,
        message_id,
        client_id,
        sender,
        at,
        content,
        texts,
    });
    Ok(LogRow {
        record: entry,
        epoch,
        settled,
        settle_end,
    })
}

/// Returns the cell that erases the text and the attachments of a row. `None` if the row is no message.
pub(super) fn erased_row(operation: &'static str, cell: &Cell) -> Result<Option<Cell>> {
    let mut stored: StoredEntry<'_> = decode(operation, &cell.value)?;
    let StoredContent::Text(body, attachments, _) = &mut stored.5 else {
        return Ok(None);
    };
    *body = "".into();
    attachments.clear();
    Ok(Some(Cell {
        key: cell.key.clone(),
        timestamp: 1,
        value: encode(&stored),
    }))
}

#[derive(Serialize, Deserialize)]
struct StoredConversation(Kind, Option<String>, Millis, UserId, Posting, bool, u64);

#[derive(Serialize, Deserialize)]
struct StoredMembership(Role, Seq, Option<Seq>);

#[derive(Serialize, Deserialize)]
struct StoredPublic(bool, Kind, Option<String>, Millis);

pub(super) fn conversation_cells(
    conversation: ConversationId,
    row: &ConversationRow,
    cells: &mut Vec<Cell>,
) {
    let d = row.details.clone();
    if d.kind != Kind::Dm {
        let public = StoredPublic(d.public, d.kind, d.name.clone(), d.created_at);
        cells.push(
            Key::new(PUBLIC)
                .conversation(conversation)
                .cell(row.seq, encode(&public)),
        );
    }
    let stored = StoredConversation(
        d.kind,
        d.name,
        d.created_at,
        d.created_by,
        d.posting,
        d.public,
        row.participant_count,
    );
    cells.push(
        Key::new(CONVERSATION)
            .conversation(conversation)
            .cell(row.seq, encode(&stored)),
    );
}

pub(super) fn conversation_row(cell: &Cell) -> Result<ConversationRow> {
    let StoredConversation(kind, name, created_at, created_by, posting, public, count) =
        decode("conversation", &cell.value)?;
    Ok(ConversationRow {
        details: Details {
            kind,
            name,
            created_at,
            created_by,
            posting,
            public,
        },
        participant_count: count,
        seq: cell.timestamp,
    })
}

/// Returns the conversation of the cell, with its row if it is public now.
pub(super) fn public_row(cell: &Cell) -> Result<(ConversationId, Option<PublicRow>)> {
    const OPERATION: &str = "public_conversations";
    let conversation = take_conversation(OPERATION, &cell.key, 1)?;
    let StoredPublic(public, kind, name, created_at) = decode(OPERATION, &cell.value)?;
    let row = PublicRow {
        conversation,
        kind,
        name,
        created_at,
    };
    Ok((conversation, public.then_some(row)))
}

pub(super) fn participant_cells(
    conversation: ConversationId,
    row: &ParticipantRow,
    cells: &mut Vec<Cell>,
) {
    let p = &row.participant;
    let key = || participant_key(conversation, &p.user);
    let membership = StoredMembership(p.role, p.joined_seq, p.left_seq);
    cells.push(
        key()
            .bytes(&[MEMBERSHIP])
            .cell(row.seq, encode(&membership)),
    );
    cells.push(key().bytes(&[READ]).cell(p.read_seq, Vec::new()));
    cells.push(key().bytes(&[DELIVERED]).cell(p.delivered_seq, Vec::new()));
}

/// Groups the cells of participants, in key order, into rows. A row has at most three cells, so a scan of three times
/// the limit contains enough whole rows.
pub(super) fn participant_rows(cells: &[Cell], user_at: usize) -> Result<Vec<ParticipantRow>> {
    const OPERATION: &str = "participants";
    let mut rows: Vec<ParticipantRow> = Vec::new();
    for group in cells.chunk_by(|a, b| a.key[..a.key.len() - 1] == b.key[..b.key.len() - 1]) {
        let mut found: Option<(StoredMembership, Seq)> = None;
        let (mut read_seq, mut delivered_seq) = (0, 0);
        for cell in group {
            match cell.key.last().copied() {
                Some(MEMBERSHIP) => {
                    found = Some((decode(OPERATION, &cell.value)?, cell.timestamp));
                }
                Some(READ) => read_seq = cell.timestamp,
                Some(DELIVERED) => delivered_seq = cell.timestamp,
                _ => return Err(corrupt(OPERATION, "unknown column")),
            }
        }
        let Some((StoredMembership(role, joined_seq, left_seq), seq)) = found else {
            continue;
        };
        let key = &group[0].key;
        let name =
            std::str::from_utf8(&key[user_at..key.len() - 2]).map_err(|e| corrupt(OPERATION, e))?;
        let user = UserId::new(name).map_err(|e| corrupt(OPERATION, e))?;
        let participant = Participant {
            user,
            role,
            joined_seq,
            left_seq,
            delivered_seq,
            read_seq,
        };
        rows.push(ParticipantRow { participant, seq });
    }
    Ok(rows)
}

#[derive(Serialize, Deserialize)]
struct StoredRing<'a>(Level, Cow<'a, [GatewayId]>);

pub(super) fn stored_ring(level: Level, members: &[GatewayId]) -> Vec<u8> {
    encode(&StoredRing(level, members.into()))
}

pub(super) fn ring_row(cell: &Cell) -> Result<RingRow> {
    let StoredRing(level, members) = decode("ring", &cell.value)?;
    Ok(RingRow {
        version: cell.timestamp,
        members: members.into_owned(),
        level,
    })
}
