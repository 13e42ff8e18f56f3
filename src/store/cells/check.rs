//! Checks stored cells one by one: whether each can be decoded, and whether logs are complete.

use std::collections::HashMap;

use super::{
    Cell,
    keys::{CHANGES, CONVERSATION, INBOX, LOG, PARTICIPANT, PUBLIC, RING, SENDS, SETTLED},
    states::{change_row, log_page},
    summaries::inbox_rows,
    values::{
        conversation_row, participant_rows, public_row, ring_row, take_conversation, take_u64,
    },
};
use crate::{
    model::{ConversationId, Seq},
    store::{Error, Result},
};

const OPERATION: &str = "check";

/// A check of all cells in the order of their keys, those of the log before all others.
#[derive(Default)]
pub(in crate::store) struct CellCheck {
    /// The last seq in the log of each conversation.
    heads: HashMap<ConversationId, Seq>,
    /// The conversation whose log is being read.
    current: Option<ConversationId>,
    /// The settled seq of the current conversation: up to it the log is complete. Above it, a crash may have left gaps,
    /// which the next owner closes.
    settled: Seq,
    /// The first and last of missing seqs of the current conversation.
    gaps: Vec<(Seq, Seq)>,
    damages: Vec<String>,
}

impl CellCheck {
    pub(in crate::store) fn add(&mut self, cell: &Cell) {
        if let Err(error) = self.check(cell) {
            let reason = match error {
                Error::Corrupt { reason, .. } => reason,
                other => other.to_string(),
            };
            let table = cell.key.first().copied().map_or('?', char::from);
            let key: String = cell
                .key
                .iter()
                .skip(1)
                .map(|b| format!("{b:02x}"))
                .collect();
            self.damages
                .push(format!("the row {table} {key} cannot be decoded: {reason}"));
        }
    }

    /// Ends the log.
    pub(in crate::store) fn end(&mut self) {
        let Some(conversation) = self.current.take() else {
            return;
        };
        for (from, to) in self.gaps.drain(..) {
            if from <= self.settled {
                let to = to.min(self.settled);
                self.damages.push(format!(
                    "conversation {conversation}: entries {from} to {to} are missing"
                ));
            }
        }
        self.settled = 0;
    }

    /// Returns what was found since the last call.
    pub(in crate::store) fn take(&mut self) -> Vec<String> {
        std::mem::take(&mut self.damages)
    }

    fn check(&mut self, cell: &Cell) -> Result<()> {
        let one = std::slice::from_ref(cell);
        match cell.key.first().copied() {
            Some(LOG) => return self.entry(cell),
            Some(CHANGES) => drop(change_row(OPERATION, cell)?),
            Some(CONVERSATION) => drop(conversation_row(cell)?),
            Some(PUBLIC) => drop(public_row(cell)?),
            Some(PARTICIPANT) => drop(participant_rows(one, 17)?),
            Some(INBOX) => {
                let id_at = cell.key.len().saturating_sub(17);
                drop(inbox_rows(one, id_at)?);
            }
            Some(RING) => drop(ring_row(cell)?),
            Some(SENDS) => take_u64(OPERATION, &cell.value, 0).map(drop)?,
            Some(SETTLED) if cell.key.len() == 17 => self.mark(cell)?,
            _ => {}
        }
        Ok(())
    }

    fn entry(&mut self, cell: &Cell) -> Result<()> {
        let conversation = take_conversation(OPERATION, &cell.key, 1)?;
        if self.current != Some(conversation) {
            self.end();
            self.current = Some(conversation);
        }
        let page = log_page(OPERATION, std::slice::from_ref(cell))?;
        let Some(row) = page.rows.first() else {
            return Ok(());
        };
        let seq = row.record.seq;
        self.settled = self.settled.max(row.settled);
        let head = self.heads.entry(conversation).or_default();
        if seq > *head + 1 {
            self.gaps.push((*head + 1, seq - 1));
        }
        *head = seq.max(*head);
        Ok(())
    }

    /// Checks that the log reaches to its settled seq.
    fn mark(&mut self, cell: &Cell) -> Result<()> {
        let conversation = take_conversation(OPERATION, &cell.key, 1)?;
        let (head, settled) = (self.heads.get(&conversation).copied(), cell.timestamp);
        let head = head.unwrap_or_default();
        if head < settled {
            let first = head + 1;
            self.damages.push(format!(
                "conversation {conversation}: entries {first} to {settled} are missing"
            ));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::{super::values::log_cells, *};
    use crate::{
        model::{ClientId, Content, Entry, MessageId, UserId},
        store::LogRow,
    };

    fn rows(seqs: &[Seq], settled: Seq) -> Vec<LogRow> {
        let row = |&seq: &Seq| LogRow {
            record: Arc::new(Entry {
                seq,
                message_id: MessageId(uuid::Uuid::now_v7()),
                client_id: ClientId(uuid::Uuid::now_v7()),
                sender: UserId::new("alice").unwrap(),
                at: 1,
                content: Content::Text {
                    body: "x".into(),
                    attachments: Vec::new(),
                    reply_to: None,
                },
                texts: 0,
            }),
            epoch: 1,
            settled,
            settle_end: 0,
        };
        seqs.iter().map(row).collect()
    }

    fn damages(seqs: &[Seq], settled: Seq, mark: Seq) -> Vec<String> {
        let conversation = ConversationId::random();
        let mut check = CellCheck::default();
        let cells = log_cells(conversation, &rows(seqs, settled));
        for cell in cells.iter().filter(|cell| cell.key[0] == LOG) {
            check.add(cell);
        }
        check.end();
        let mut key = vec![SETTLED];
        key.extend_from_slice(conversation.0.as_bytes());
        check.add(&Cell {
            key,
            timestamp: mark,
            value: Vec::new(),
        });
        check.take()
    }

    #[test]
    fn gaps_below_the_settled_seq_are_damages() {
        assert_eq!(damages(&[1, 2, 3, 4], 3, 4), Vec::<String>::new());
        // A crash may leave a gap above what is settled.
        assert_eq!(damages(&[1, 2, 4], 2, 2), Vec::<String>::new());
        for (seqs, settled, mark, missing) in [
            (&[1, 2, 4][..], 3, 4, "entries 3 to 3 are missing"),
            (&[3, 4], 3, 4, "entries 1 to 2 are missing"),
            (&[1, 2], 1, 5, "entries 3 to 5 are missing"),
            (&[], 0, 2, "entries 1 to 2 are missing"),
        ] {
            let damages = damages(seqs, settled, mark);
            assert!(
                damages.len() == 1 && damages[0].ends_with(missing),
                "{damages:?}"
            );
        }
    }

    #[test]
    fn cells_that_cannot_be_decoded_are_damages() {
        let mut check = CellCheck::default();
        let conversation = ConversationId::random();
        for mut cell in log_cells(conversation, &rows(&[1], 0)) {
            cell.value.truncate(5);
            check.add(&cell);
        }
        let damages = check.take();
        assert_eq!(damages.len(), 2);
        assert!(damages[0].starts_with("the row m "), "{damages:?}");
    }
}
