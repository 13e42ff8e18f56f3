//! The values of changes and of the states of entries.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::{
    Cell,
    keys::{CONTENT, REACTIONS, change_key, log_key},
    values::{
        StoredAttachment, attachments, decode, encode, is_zero, log_row, stored_attachments,
        take_u64,
    },
};
use crate::{
    model::{
        AttachmentId, Change, ChangeOp, ContentState, ConversationId, DeletedEntry, DeletedSeqs,
        EditedContent, EntryState, Millis, ReactionState, Reactions, Rev, Seq, UserId,
    },
    store::{ChangeRow, LogPage, Result},
};

/// The epoch of states in the keys of the log. No owner has it, and it sorts before all epochs.
const STATE_EPOCH: u64 = 0;
/// The position of the column in the key of a state.
const STATE_COLUMN_AT: usize = 33;

#[derive(Serialize, Deserialize)]
struct StoredEdited(String, Vec<StoredAttachment>);

impl StoredEdited {
    fn of(content: &EditedContent) -> Self {
        Self(
            content.body.clone(),
            stored_attachments(&content.attachments),
        )
    }

    fn content(self) -> EditedContent {
        EditedContent {
            body: self.0,
            attachments: attachments(self.1),
        }
    }
}

#[derive(Serialize, Deserialize)]
struct StoredChange(
    UserId,
    Millis,
    Rev, // settled
    StoredOp,
    #[serde(default, skip_serializing_if = "is_zero")] Rev, // end of its settle
);

#[derive(Serialize, Deserialize)]
enum StoredOp {
    #[serde(rename = "e")]
    Edit(
        Seq,
        Option<StoredEdited>,
        Vec<Rev>,
        #[serde(default, skip_serializing_if = "Vec::is_empty")] Vec<AttachmentId>, // dropped
    ),
    #[serde(rename = "d")]
    Delete(Vec<StoredDeletedEntry>, StoredDeleted),
    #[serde(rename = "r")]
    React(Seq, String, bool, Reactions),
}

#[derive(Serialize, Deserialize)]
struct StoredDeletedEntry(
    Seq,
    Vec<Rev>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")] Vec<AttachmentId>, // files
);

#[derive(Serialize, Deserialize)]
struct StoredDeleted(Vec<Seq>, u64);

#[derive(Serialize, Deserialize)]
struct StoredContentState(UserId, Millis, Option<StoredEdited>, Vec<Rev>);

pub(super) fn deleted_value(deleted: &DeletedSeqs) -> Vec<u8> {
    encode(&StoredDeleted(deleted.highest.clone(), deleted.count))
}

pub(super) fn deleted_seqs(operation: &'static str, value: &[u8]) -> Result<DeletedSeqs> {
    let StoredDeleted(highest, count) = decode(operation, value)?;
    Ok(DeletedSeqs { highest, count })
}

pub(super) fn change_cell(conversation: ConversationId, row: &ChangeRow) -> Cell {
    let change = &row.record;
    let op = match &change.op {
        ChangeOp::Edit {
            seq,
            content,
            edits,
            dropped,
        } => StoredOp::Edit(
            *seq,
            content.as_ref().map(StoredEdited::of),
            edits.clone(),
            dropped.clone(),
        ),
        ChangeOp::Delete { entries, deleted } => StoredOp::Delete(
            entries
                .iter()
                .map(|e| StoredDeletedEntry(e.seq, e.edits.clone(), e.files.clone()))
                .collect(),
            StoredDeleted(deleted.highest.clone(), deleted.count),
        ),
        ChangeOp::React {
            seq,
            emoji,
            on,
            reactions,
        } => StoredOp::React(*seq, emoji.clone(), *on, reactions.clone()),
    };
    let stored = StoredChange(
        change.by.clone(),
        change.at,
        row.settled,
        op,
        row.settle_end,
    );
    change_key(conversation, change.rev)
        .u64(row.epoch)
        .cell(0, encode(&stored))
}

pub(super) fn change_row(operation: &'static str, cell: &Cell) -> Result<ChangeRow> {
    let rev = take_u64(operation, &cell.key, 17)?;
    let epoch = take_u64(operation, &cell.key, 25)?;
    let StoredChange(by, at, settled, op, settle_end) = decode(operation, &cell.value)?;
    let op = match op {
        StoredOp::Edit(seq, content, edits, dropped) => ChangeOp::Edit {
            seq,
            content: content.map(StoredEdited::content),
            edits,
            dropped,
        },
        StoredOp::Delete(entries, StoredDeleted(highest, count)) => ChangeOp::Delete {
            entries: entries
                .into_iter()
                .map(|StoredDeletedEntry(seq, edits, files)| DeletedEntry { seq, edits, files })
                .collect(),
            deleted: DeletedSeqs { highest, count },
        },
        StoredOp::React(seq, emoji, on, reactions) => ChangeOp::React {
            seq,
            emoji,
            on,
            reactions,
        },
    };
    Ok(ChangeRow {
        record: Arc::new(Change { rev, by, at, op }),
        epoch,
        settled,
        settle_end,
    })
}

/// Returns the cell that erases the content of an edit. `None` if the row is another change.
pub(super) fn erased_change(operation: &'static str, cell: &Cell) -> Result<Option<Cell>> {
    let StoredChange(by, at, settled, op, settle_end) = decode(operation, &cell.value)?;
    let StoredOp::Edit(seq, _, edits, dropped) = op else {
        return Ok(None);
    };
    let erased = StoredOp::Edit(seq, None, edits, dropped);
    let stored = StoredChange(by, at, settled, erased, settle_end);
    Ok(Some(Cell {
        key: cell.key.clone(),
        timestamp: 1,
        value: encode(&stored),
    }))
}

/// Adds the cells of the parts of a state. The timestamp of reactions is their rev. That of the content is twice its
/// rev, so that erasing it has a timestamp of its own, above the content and below the next change.
pub(super) fn state_cells(
    conversation: ConversationId,
    seq: Seq,
    state: &EntryState,
    cells: &mut Vec<Cell>,
) {
    let key = |column| log_key(conversation, seq).u64(STATE_EPOCH).bytes(&[column]);
    if let Some(content) = &state.content {
        let stored = StoredContentState(
            content.by.clone(),
            content.at,
            content.content.as_ref().map(StoredEdited::of),
            content.edits.clone(),
        );
        cells.push(key(CONTENT).cell(content.rev * 2, encode(&stored)));
    }
    if let Some(ReactionState { rev, reactions }) = &state.reactions {
        cells.push(key(REACTIONS).cell(*rev, encode(&(reactions,))));
    }
}

/// Whether a cell of the log is a part of a state. If not, it is a row.
pub(super) fn is_state(cell: &Cell) -> bool {
    cell.key.len() > STATE_COLUMN_AT
}

/// Returns the cell that erases the content of a state. `None` if there is none in the cell.
pub(super) fn erased_state(operation: &'static str, cell: &Cell) -> Result<Option<Cell>> {
    if cell.key.get(STATE_COLUMN_AT) != Some(&CONTENT) {
        return Ok(None);
    }
    let StoredContentState(by, at, content, edits) = decode(operation, &cell.value)?;
    let erased = || Cell {
        key: cell.key.clone(),
        timestamp: cell.timestamp | 1,
        value: encode(&StoredContentState(by, at, None, edits)),
    };
    Ok(content.map(|_| erased()))
}

/// Returns the rows of the log among its cells, of all epochs, and the states of the entries.
pub(super) fn log_page(operation: &'static str, cells: &[Cell]) -> Result<LogPage> {
    let mut page = LogPage::default();
    for cell in cells {
        if !is_state(cell) {
            page.rows.push(log_row(operation, cell)?);
            continue;
        }
        let seq = take_u64(operation, &cell.key, 17)?;
        if page.states.last().is_none_or(|(last, _)| *last != seq) {
            page.states.push((seq, EntryState::default()));
        }
        if let Some((_, state)) = page.states.last_mut() {
            add_part(operation, cell, state)?;
        }
    }
    Ok(page)
}

fn add_part(operation: &'static str, cell: &Cell, state: &mut EntryState) -> Result<()> {
    match cell.key.get(STATE_COLUMN_AT) {
        Some(&CONTENT) => {
            let StoredContentState(by, at, content, edits) = decode(operation, &cell.value)?;
            state.content = Some(ContentState {
                rev: cell.timestamp / 2,
                by,
                at,
                content: content.map(StoredEdited::content),
                edits,
            });
        }
        Some(&REACTIONS) => {
            let (reactions,) = decode(operation, &cell.value)?;
            state.reactions = Some(ReactionState {
                rev: cell.timestamp,
                reactions,
            });
        }
        _ => return Err(super::values::corrupt(operation, "unknown column")),
    }
    Ok(())
}
