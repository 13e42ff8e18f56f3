//! The log of changes, and the rows that follow from changes.

use super::{
    Cell, Cells,
    files::{reference_cell, work_cell},
    keys::{
        CHANGES, CHANGES_SETTLED, DELETED, Key, MINE, Range, SETTLED, after, change_key, mine_key,
        reactor_key, reactors_key,
    },
    states::{change_cell, change_row, deleted_seqs, deleted_value, state_cells},
    summaries::inbox_cells,
    today,
    values::{corrupt, decode, encode, take_u64},
};
use crate::{
    model::{ConversationId, DeletedSeqs, Millis, Rev, Seq, UserId},
    store::{
        AppliedChanges, ChangeRow, ChangesTail, ReactorRow, ReactorsPage, Result, Tail,
        first_of_tail,
        reactors::{Position, ReactorsScan, Step},
    },
};

/// The marks of a conversation, which one scan reads.
#[derive(Default)]
pub(super) struct Marks {
    pub settled: Seq,
    /// The rev up to which all changes are settled. `None` if the conversation never had a change.
    pub changes_settled: Option<Rev>,
    pub deleted: (Rev, DeletedSeqs),
}

pub(super) async fn marks(
    cells: &impl Cells,
    operation: &'static str,
    conversation: ConversationId,
) -> Result<Marks> {
    let key = Key::new(SETTLED).conversation(conversation);
    let at = key.0.len();
    let mut marks = Marks::default();
    // There are three marks.
    for cell in cells.scan(Range::prefix(&key), 3, false).await? {
        match cell.key.get(at) {
            None => marks.settled = cell.timestamp,
            Some(&CHANGES_SETTLED) => marks.changes_settled = Some(cell.timestamp),
            Some(&DELETED) => {
                let deleted = deleted_seqs(operation, &cell.value)?;
                marks.deleted = (cell.timestamp, deleted);
            }
            Some(_) => return Err(corrupt(operation, "unknown mark")),
        }
    }
    Ok(marks)
}

/// Returns the cells of rows of changes. The first change of a conversation also writes the mark by which a takeover
/// sees, without another read, whether there are changes.
pub(super) fn cells_of(conversation: ConversationId, rows: &[ChangeRow]) -> Vec<Cell> {
    let mut cells: Vec<Cell> = rows
        .iter()
        .map(|row| change_cell(conversation, row))
        .collect();
    if rows.iter().any(|row| row.record.rev == 1) {
        cells.push(settled_cell(conversation, 0));
    }
    cells
}

pub(super) fn settled_cell(conversation: ConversationId, rev: Rev) -> Cell {
    Key::new(SETTLED)
        .conversation(conversation)
        .bytes(&[CHANGES_SETTLED])
        .cell(rev, Vec::new())
}

pub(super) async fn tail(
    cells: &impl Cells,
    conversation: ConversationId,
    revs: u64,
) -> Result<ChangesTail> {
    const OPERATION: &str = "changes_tail";
    let marks = marks(cells, OPERATION, conversation).await?;
    let whole = Range::prefix(&Key::new(CHANGES).conversation(conversation));
    let newest = cells.scan(whole.clone(), 1, true).await?;
    let newest = newest.first();
    let newest = newest.map_or(Ok(0), |cell| take_u64(OPERATION, &cell.key, 17))?;
    let first = first_of_tail(newest, revs);
    let mut rows = Vec::new();
    if newest > 0 {
        let from = change_key(conversation, first).0;
        let range = Range { from, to: whole.to };
        for cell in cells.scan(range, usize::MAX, false).await? {
            rows.push(change_row(OPERATION, &cell)?);
        }
    }
    Ok(ChangesTail {
        tail: Tail {
            first,
            rows,
            settled: marks.changes_settled.unwrap_or_default(),
        },
        deleted: marks.deleted,
    })
}

pub(super) async fn read(
    cells: &impl Cells,
    conversation: ConversationId,
    from: Rev,
    to: Rev,
) -> Result<Vec<ChangeRow>> {
    let range = Range {
        from: change_key(conversation, from).0,
        to: change_key(conversation, to.saturating_add(1)).0,
    };
    let mut rows: Vec<ChangeRow> = Vec::new();
    if from > to {
        return Ok(rows);
    }
    for cell in cells.scan(range, usize::MAX, false).await? {
        let row = change_row("changes", &cell)?;
        // Rows of one rev are adjacent, and the highest epoch is the last of them.
        if rows.last().is_some_and(|r| r.record.rev == row.record.rev) {
            rows.pop();
        }
        rows.push(row);
    }
    Ok(rows)
}

pub(super) fn effects(conversation: ConversationId, applied: &AppliedChanges) -> Vec<Cell> {
    let mut cells = Vec::new();
    for (seq, state) in &applied.states {
        state_cells(conversation, *seq, state, &mut cells);
    }
    for row in &applied.reactors {
        let reactor = reactor_key(conversation, row.seq, &row.emoji, &row.user);
        cells.push(reactor.cell(row.rev, encode(&(row.on, row.at))));
        let mine = mine_key(conversation, &row.user)
            .u64(row.seq)
            .text(&row.emoji);
        cells.push(mine.cell(row.rev, encode(&(row.on,))));
    }
    for write in &applied.inbox {
        inbox_cells(write, &mut cells);
    }
    for reference in &applied.references {
        cells.push(reference_cell(*reference));
        // A sweep erases the file if nothing else does before.
        cells.extend((!reference.on).then(|| work_cell(today(), reference.file)));
    }
    if let Some((rev, deleted)) = &applied.deleted {
        let key = Key::new(SETTLED)
            .conversation(conversation)
            .bytes(&[DELETED]);
        cells.push(key.cell(*rev, deleted_value(deleted)));
    }
    cells
}

pub(super) async fn reactors(
    cells: &impl Cells,
    conversation: ConversationId,
    seq: Seq,
    emoji: Option<&str>,
    after_text: Option<&str>,
    limit: usize,
) -> Result<ReactorsPage> {
    let mut key = reactors_key(conversation, seq);
    if let Some(emoji) = emoji {
        key = key.text(emoji);
    }
    let mut range = Range::prefix(&key);
    let begin = |p: &Position| after(&reactor_key(conversation, seq, &p.emoji, &p.user).0);
    if let Some(position) = after_text.and_then(|text| Position::read(text, emoji)) {
        range.from = begin(&position);
    }
    let mut scan = ReactorsScan::new(limit);
    loop {
        let found = cells.scan(range.clone(), scan.rows_wanted(), false).await?;
        let rows = found.iter().map(|cell| reactor_row(seq, cell));
        match scan.add(rows.collect::<Result<_>>()?, true) {
            Step::Complete | Step::Exhausted => return Ok(scan.into_page()),
            Step::After(position) => range.from = begin(&position),
        }
    }
}

/// Reads a text of a key, up to the zero that ends it, and returns the rest.
fn take_text<'a>(operation: &'static str, bytes: &'a [u8]) -> Result<(&'a str, &'a [u8])> {
    let end = bytes.iter().position(|b| *b == 0);
    let end = end.ok_or_else(|| corrupt(operation, "a text of a key has no end"))?;
    let text = std::str::from_utf8(&bytes[..end]).map_err(|e| corrupt(operation, e))?;
    Ok((text, &bytes[end + 1..]))
}

fn reactor_row(seq: Seq, cell: &Cell) -> Result<ReactorRow> {
    const OPERATION: &str = "reactors";
    let (emoji, rest) = take_text(OPERATION, cell.key.get(25..).unwrap_or_default())?;
    let (user, _) = take_text(OPERATION, rest)?;
    let (on, at): (bool, Millis) = decode(OPERATION, &cell.value)?;
    Ok(ReactorRow {
        seq,
        emoji: emoji.to_owned(),
        user: UserId::new(user).map_err(|e| corrupt(OPERATION, e))?,
        rev: cell.timestamp,
        on,
        at,
    })
}

pub(super) async fn reactions_of(
    cells: &impl Cells,
    conversation: ConversationId,
    user: &UserId,
    from: Seq,
    to: Seq,
) -> Result<Vec<(Seq, String, bool)>> {
    const OPERATION: &str = "reactions_of";
    let mut found = Vec::new();
    if from > to {
        return Ok(found);
    }
    let seq_at = mine_key(conversation, user).0.len();
    let key = |seq: Seq| mine_key(conversation, user).u64(seq).0;
    let (from, to) = (key(from), key(to.saturating_add(1)));
    debug_assert_eq!(from.first(), Some(&MINE));
    for cell in cells.scan(Range { from, to }, usize::MAX, false).await? {
        let (on,): (bool,) = decode(OPERATION, &cell.value)?;
        let seq = take_u64(OPERATION, &cell.key, seq_at)?;
        let (emoji, _) = take_text(OPERATION, &cell.key[seq_at + 8..])?;
        found.push((seq, emoji.to_owned(), on));
    }
    Ok(found)
}
