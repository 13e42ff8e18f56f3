//! Erasing the texts of deleted entries.

use std::collections::BTreeSet;

use super::{
    Cell, Cells,
    keys::{Range, change_key, log_key},
    sends,
    states::{erased_change, erased_state, is_state},
    values::{erased_row, log_row},
};
use crate::{
    model::{ConversationId, Rev, Seq},
    store::{Erasure, LogRow, Result},
};

const OPERATION: &str = "erase";
/// Cells of one write.
const CELLS_AT_ONCE: usize = 1_000;

/// Overwrites the texts of deleted entries wherever they are.
pub(super) async fn erase(
    cells: &impl Cells,
    conversation: ConversationId,
    erasures: &[Erasure],
) -> Result<()> {
    let mut erasing = Erasing {
        cells,
        conversation,
        queued: Vec::new(),
    };
    for erasure in erasures {
        erasing.entry(erasure).await?;
    }
    erasing.write().await?;
    cells.erased().await
}

struct Erasing<'a, C> {
    cells: &'a C,
    conversation: ConversationId,
    queued: Vec<Cell>,
}

impl<C: Cells> Erasing<'_, C> {
    async fn entry(&mut self, erasure: &Erasure) -> Result<()> {
        self.rows(erasure.seq, None).await?;
        let (id, sender, client_id) = (self.conversation, &erasure.sender, erasure.client_id);
        let copies: BTreeSet<Seq> = sends::read(self.cells, id, sender, client_id)
            .await?
            .into_iter()
            .map(|send| send.seq)
            .filter(|seq| *seq != erasure.seq)
            .collect();
        for seq in copies {
            self.rows(seq, Some(erasure)).await?;
        }
        for rev in &erasure.edits {
            self.edit(*rev).await?;
        }
        Ok(())
    }

    /// Erases all rows of a seq with the content of its state, or only the copies of an entry.
    async fn rows(&mut self, seq: Seq, copy_of: Option<&Erasure>) -> Result<()> {
        let range = Range {
            from: log_key(self.conversation, seq).0,
            to: log_key(self.conversation, seq.saturating_add(1)).0,
        };
        for cell in self.cells.scan(range, usize::MAX, false).await? {
            let erased = match (copy_of, is_state(&cell)) {
                (None, true) => erased_state(OPERATION, &cell)?,
                (Some(_), true) => None,
                (Some(entry), false) if !is_copy(&log_row(OPERATION, &cell)?, entry) => None,
                (_, false) => erased_row(OPERATION, &cell)?,
            };
            self.queued.extend(erased);
        }
        self.write_some().await
    }

    async fn edit(&mut self, rev: Rev) -> Result<()> {
        let range = Range {
            from: change_key(self.conversation, rev).0,
            to: change_key(self.conversation, rev.saturating_add(1)).0,
        };
        for cell in self.cells.scan(range, usize::MAX, false).await? {
            self.queued.extend(erased_change(OPERATION, &cell)?);
        }
        self.write_some().await
    }

    async fn write_some(&mut self) -> Result<()> {
        if self.queued.len() < CELLS_AT_ONCE {
            return Ok(());
        }
        self.write().await
    }

    async fn write(&mut self) -> Result<()> {
        let cells = std::mem::take(&mut self.queued);
        if cells.is_empty() {
            return Ok(());
        }
        self.cells.write(OPERATION, cells, true).await
    }
}

fn is_copy(row: &LogRow, of: &Erasure) -> bool {
    row.record.client_id == of.client_id && row.record.sender == of.sender
}
