//! The cells of inbox rows.

use serde::{Deserialize, Serialize};

use super::{
    Cell,
    keys::{DELETED, LEFT, MUTED, PUSH, READ, REV, SUMMARY, inbox_key, participant_key},
    states::{deleted_seqs, deleted_value},
    values::{corrupt, decode, encode, take_conversation},
};
use crate::{
    model::{EntryKind, Kind, Last, MessageId, Millis, Seq, UserId},
    store::{InboxKey, InboxRow, InboxSettings, InboxSummary, InboxWrite, Result},
};

const OPERATION: &str = "inbox";
/// Summaries of one seq, one for each change of the entry's content. The timestamp of a summary is its seq times this,
/// plus the number of changes.
const SUMMARY_VERSIONS: u64 = 2_048;

#[derive(Serialize, Deserialize)]
struct StoredSummary(
    Kind,
    Option<String>,
    Seq,
    Option<StoredLast>,
    u64, // texts
);

#[derive(Serialize, Deserialize)]
struct StoredLast(
    Seq,
    MessageId,
    Millis,
    UserId,
    EntryKind,
    String,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")] bool, // deleted
);

/// Returns the keys of the cells of these rows, in order, without those that need not be read.
pub(super) fn cell_keys(user: &UserId, keys: &[InboxKey]) -> Vec<Vec<u8>> {
    let mut keys = keys.to_vec();
    keys.sort_unstable_by_key(|key| key.conversation);
    keys.dedup_by_key(|key| key.conversation);
    let mut cells = Vec::with_capacity(keys.len() * 3);
    for key in keys {
        let columns = [
            (SUMMARY, true),
            (LEFT, key.may_have_left),
            (MUTED, key.may_have_settings),
            (PUSH, key.may_have_settings),
            (READ, true),
            (REV, key.may_have_changes),
            (DELETED, key.may_have_changes),
        ];
        let needed = columns.into_iter().filter(|(_, is_needed)| *is_needed);
        let row = needed.map(|(column, _)| inbox_key(user, key.conversation).bytes(&[column]).0);
        cells.extend(row);
    }
    cells
}

/// Returns the value of a read watermark of an inbox row: the number of texts.
pub(super) fn read_value(texts: u64) -> Vec<u8> {
    encode(&(texts,))
}

/// Returns the value of [`MUTED`]. It is empty if the conversation is not muted.
pub(super) fn muted_value(until: Option<Millis>) -> Vec<u8> {
    until.map_or_else(Vec::new, |until| encode(&(until,)))
}

/// Returns the value of [`PUSH`]. It is empty if messages are pushed, as without a setting.
pub(super) fn push_value(push: bool) -> Vec<u8> {
    if push { Vec::new() } else { encode(&(push,)) }
}

/// Takes over a setting of the user.
fn take_setting(settings: &mut InboxSettings, cell: &Cell) -> Result<()> {
    settings.version = settings.version.max(cell.timestamp);
    if cell.value.is_empty() {
        return Ok(());
    }
    if cell.key.last() == Some(&MUTED) {
        let (until,) = decode(OPERATION, &cell.value)?;
        settings.muted_until = Some(until);
    } else {
        (settings.push,) = decode(OPERATION, &cell.value)?;
    }
    Ok(())
}

fn summary_timestamp(summary: &InboxSummary) -> u64 {
    let changes = u64::from(summary.changes).min(SUMMARY_VERSIONS - 1);
    summary
        .seq
        .saturating_mul(SUMMARY_VERSIONS)
        .saturating_add(changes)
}

pub(super) fn inbox_cells(write: &InboxWrite, cells: &mut Vec<Cell>) {
    let key = |column| inbox_key(&write.user, write.conversation).bytes(&[column]);
    if let Some(summary) = &write.summary {
        let last = summary.last.clone().map(|l| {
            StoredLast(
                l.seq,
                l.message_id,
                l.at,
                l.sender,
                l.kind,
                l.preview,
                l.deleted,
            )
        });
        let (joined_seq, texts) = (summary.joined_seq, summary.texts);
        let stored = StoredSummary(summary.kind, summary.name.clone(), joined_seq, last, texts);
        cells.push(key(SUMMARY).cell(summary_timestamp(summary), encode(&stored)));
    }
    if let Some(seq) = write.read_seq {
        cells.push(key(READ).cell(seq, read_value(write.read_texts)));
        let participant = participant_key(write.conversation, &write.user);
        cells.push(participant.bytes(&[READ]).cell(seq, Vec::new()));
    }
    if let Some(seq) = write.left_seq {
        cells.push(key(LEFT).cell(seq, Vec::new()));
    }
    if let Some((rev, deleted)) = &write.deleted {
        cells.push(key(DELETED).cell(*rev, deleted_value(deleted)));
    }
    if let Some(rev) = write.rev {
        cells.push(key(REV).cell(rev, Vec::new()));
    }
}

/// Groups the cells of an inbox, in key order, into rows.
pub(super) fn inbox_rows(cells: &[Cell], id_at: usize) -> Result<Vec<InboxRow>> {
    let mut rows: Vec<InboxRow> = Vec::new();
    for cell in cells {
        let conversation = take_conversation(OPERATION, &cell.key, id_at)?;
        if rows
            .last()
            .is_none_or(|row| row.conversation != conversation)
        {
            rows.push(InboxRow::empty(conversation));
        }
        let Some(row) = rows.last_mut() else { continue };
        match cell.key.last().copied() {
            Some(SUMMARY) => {
                let changes = u32::try_from(cell.timestamp % SUMMARY_VERSIONS).unwrap_or_default();
                let version = (cell.timestamp / SUMMARY_VERSIONS, changes);
                row.summary = Some(summary(&cell.value, version)?);
            }
            Some(READ) => {
                row.read_seq = cell.timestamp;
                (row.read_texts,) = decode(OPERATION, &cell.value)?;
            }
            Some(LEFT) => row.left_seq = Some(cell.timestamp),
            Some(DELETED) => {
                row.deleted = (cell.timestamp, deleted_seqs(OPERATION, &cell.value)?);
            }
            Some(REV) => row.rev = cell.timestamp,
            Some(MUTED | PUSH) => take_setting(&mut row.settings, cell)?,
            _ => return Err(corrupt(OPERATION, "unknown column")),
        }
    }
    Ok(rows)
}

fn summary(value: &[u8], (seq, changes): (Seq, u32)) -> Result<InboxSummary> {
    let StoredSummary(kind, name, joined_seq, last, texts) = decode(OPERATION, value)?;
    let last = last.map(
        |StoredLast(seq, message_id, at, sender, kind, preview, deleted)| Last {
            seq,
            message_id,
            at,
            sender,
            kind,
            preview,
            deleted,
        },
    );
    Ok(InboxSummary {
        seq,
        kind,
        name,
        joined_seq,
        last,
        changes,
        texts,
    })
}
