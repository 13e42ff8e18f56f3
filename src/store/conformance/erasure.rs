//! The promises about erasing the texts of deleted entries.

use std::sync::Arc;

#[cfg(test)]
use super::changes::{summary, summary_write};
use super::{
    Checked,
    changes::{attachment, change, content_state, edited, reaction, reaction_state, revs, states},
    client_id, row, seqs, somebody,
};
#[cfg(test)]
use crate::{model::DeletedSeqs, store::AppliedChanges};
use crate::{
    model::{ChangeOp, Content, ConversationId, Entry, EntryState, Kind},
    store::{ChangeRow, Erasure, LogRow, Result, Store},
};

/// A deleted message with everything that was stored of it.
pub struct Doomed {
    pub id: ConversationId,
    /// The entry, a row of another owner at the same seq, and a copy of the entry at another seq.
    pub rows: Vec<LogRow>,
    edit: ChangeRow,
    state: EntryState,
    pub erasure: Erasure,
}

/// Writes a message whose texts contain `marker`, with an edit, a copy at another seq, and rows of other epochs.
///
/// # Errors
/// The error of the store.
pub async fn write_marked(store: &dyn Store, marker: &str) -> Result<Doomed> {
    let id = ConversationId::random();
    let mut entry = Entry::clone(&row(4_095, 1, "").record);
    entry.texts = 4_000;
    entry.content = Content::Text {
        body: format!("body {marker}"),
        attachments: vec![attachment(marker)],
        reply_to: Some(17),
    };
    let at = |seq, epoch| LogRow {
        record: Arc::new(Entry {
            seq,
            ..entry.clone()
        }),
        epoch,
        settled: 4_000,
        settle_end: 0,
    };
    let other = LogRow {
        epoch: 2,
        ..row(4_095, 2, &format!("other {marker}"))
    };
    let rows = vec![at(4_095, 1), other, at(4_096, 3)];
    // The rows of other messages at the places of the copies are not touched.
    let near = [row(4_094, 1, "near"), row(4_096, 4, "near")];
    for row in rows.iter().chain(&near) {
        store.append(id, std::slice::from_ref(row), None).await?;
    }
    let edit = ChangeOp::Edit {
        seq: 4_095,
        content: Some(edited(marker)),
        edits: vec![2],
        dropped: Vec::new(),
    };
    let edit = change(2, 1, edit);
    let erasure = Erasure {
        seq: 4_095,
        sender: entry.sender.clone(),
        client_id: entry.client_id,
        edits: vec![2],
    };
    store
        .append_changes(id, &[reaction(1, 1), edit.clone(), reaction(3, 1)], None)
        .await?;
    let state = content_state(2, Some(edited(marker)));
    let changed = vec![(4_095, state.clone()), (4_096, reaction_state(3))];
    store
        .apply_changes(id, Kind::Group, &states(changed))
        .await?;
    Ok(Doomed {
        id,
        rows,
        edit,
        state,
        erasure,
    })
}

/// Writes a message with `marker` and previews of it, and deletes it as an owner does.
///
/// # Errors
/// The error of an operation that should succeed.
#[cfg(test)]
pub(in crate::store) async fn write_and_erase(store: &dyn Store, marker: &str) -> Checked {
    let doomed = write_marked(store, marker).await?;
    let bob = somebody();
    let write = summary_write(&bob, doomed.id, &summary(4_095, 0, 4_000, marker));
    store.write_inbox(vec![write]).await?;
    let mut deleted = DeletedSeqs::default();
    deleted.add(4_095);
    let mut write = summary_write(&bob, doomed.id, &summary(4_095, 2, 4_000, ""));
    write.deleted = Some((4, deleted.clone()));
    let applied = AppliedChanges {
        states: vec![(4_095, content_state(4, None))],
        inbox: vec![write],
        deleted: Some((4, deleted)),
        ..AppliedChanges::default()
    };
    store
        .apply_changes(doomed.id, Kind::Group, &applied)
        .await?;
    store.erase(doomed.id, &[doomed.erasure]).await
}

fn erased(row: &LogRow) -> LogRow {
    let mut entry = Entry::clone(&row.record);
    if let Content::Text {
        body, attachments, ..
    } = &mut entry.content
    {
        body.clear();
        attachments.clear();
    }
    LogRow {
        record: Arc::new(entry),
        ..row.clone()
    }
}

pub(super) async fn what_is_erased_stays_erased(store: &dyn Store) -> Checked {
    let doomed = write_marked(store, "marker").await?;
    let Doomed { id, rows, edit, .. } = &doomed;
    let whole = async || -> Result<String> {
        let log = store.tail(*id, 100).await?;
        let changes = store.changes_tail(*id, 100).await?;
        Ok(format!("{log:?} {changes:?}"))
    };
    assert!(whole().await?.contains("marker"));
    // An entry that was never edited, and one that does not exist.
    let nothing = Erasure {
        seq: 9_999,
        sender: somebody(),
        client_id: client_id(),
        edits: vec![77],
    };
    store.erase(*id, &[doomed.erasure.clone(), nothing]).await?;
    for _ in 0..2 {
        let read = whole().await?;
        assert!(!read.contains("marker"), "{read}");
        let tail = store.tail(*id, 100).await?;
        assert_eq!(seqs(&tail.tail.rows), [4_094, 4_095, 4_095, 4_096, 4_096]);
        assert_eq!(
            tail.tail.rows[1..4],
            [erased(&rows[0]), erased(&rows[1]), erased(&rows[2])]
        );
        assert!(
            tail.tail
                .rows
                .iter()
                .all(|row| row.epoch != 4 || row.record.content == Content::text("near"))
        );
        let changes = store.changes(*id, 1, 3).await?;
        assert_eq!(revs(&changes), [1, 2, 3]);
        assert!(
            matches!(&changes[1].record.op, ChangeOp::Edit { content: None, edits, .. }
            if *edits == [2])
        );
        assert_eq!(changes[2], reaction(3, 1));
        assert!(tail.states[0].1.is_deleted());
        assert_eq!(tail.states[1], (4_096, reaction_state(3)));
        // Late writes bring nothing back, and erasing again changes nothing.
        store.append(*id, &rows[..2], None).await?;
        store.append(*id, &rows[2..], None).await?;
        store
            .append_changes(*id, std::slice::from_ref(edit), None)
            .await?;
        let late = states(vec![(4_095, doomed.state.clone())]);
        store.apply_changes(*id, Kind::Group, &late).await?;
        store
            .erase(*id, std::slice::from_ref(&doomed.erasure))
            .await?;
    }
    let deleted = states(vec![(4_095, content_state(4, None))]);
    store.apply_changes(*id, Kind::Group, &deleted).await?;
    assert_eq!(
        store.tail(*id, 100).await?.states[0],
        (4_095, content_state(4, None))
    );
    Ok(())
}
