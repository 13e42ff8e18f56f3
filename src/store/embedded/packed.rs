//! Packs the cells of an inbox row into one of the database. So a page of an inbox costs one lookup for each row, and a
//! whole inbox one step for each, however many columns are filled. The writer reads what is stored before it writes a
//! cell of an inbox anyway, so packing costs it nothing.
//!
//! A packed row has its columns in ascending order, each as a letter, a timestamp, the length of the content and the
//! content. Its key is that of its cells, with another first letter and without the column.

use std::io;

use fjall::{Keyspace, Readable as _, Snapshot, UserValue};

use super::super::cells::{Cell, INBOX, Range};

/// The first byte of the keys of packed rows.
const PACKED: u8 = b'j';
/// Bytes of a column without its content.
const HEADER_BYTES: usize = 1 + size_of::<u64>() + size_of::<u32>();

/// A column of a packed row.
#[derive(Clone, Copy)]
struct Column<'a> {
    letter: u8,
    timestamp: u64,
    content: &'a [u8],
}

/// Returns this key, or the beginning of one, in the table of packed rows. `None` if it is no key of an inbox; then nothing
/// is copied, because the writer asks for every cell.
fn packed(key: &[u8]) -> Option<Vec<u8>> {
    match key.split_first() {
        Some((&INBOX, rest)) => Some([&[PACKED], rest].concat()),
        _ => None,
    }
}

/// Returns the key of the packed row of a cell, and the cell's column. `None` if it is no cell of an inbox.
pub(super) fn row_and_column(key: &[u8]) -> Option<(Vec<u8>, u8)> {
    let (&column, row) = key.split_last()?;
    Some((packed(row)?, column))
}

/// Returns the range of packed rows for a range of cells of inboxes. `None` for other cells.
pub(super) fn range(cells: &Range) -> Option<Range> {
    Some(Range {
        from: packed(&cells.from)?,
        to: packed(&cells.to).unwrap_or_else(|| vec![PACKED + 1]),
    })
}

/// Returns the cells of inboxes in a range of packed rows.
pub(super) fn scan(
    snapshot: &Snapshot,
    keyspace: &Keyspace,
    range: Range,
    limit: usize,
    newest_first: bool,
) -> fjall::Result<Vec<Cell>> {
    let mut cells = Vec::new();
    let rows = snapshot.range(keyspace, range.from..range.to);
    let mut add = |row: fjall::Guard| {
        let (key, row) = row.into_inner()?;
        let before = cells.len();
        unpack(&key, &row, &mut cells)?;
        if newest_first {
            cells[before..].reverse();
        }
        Ok::<_, fjall::Error>(cells.len() >= limit)
    };
    let mut rows: Box<dyn Iterator<Item = _>> = if newest_first {
        Box::new(rows.rev())
    } else {
        Box::new(rows)
    };
    while let Some(row) = rows.next()
        && !add(row)?
    {}
    cells.truncate(limit);
    Ok(cells)
}

/// Returns the cells of inboxes with these keys.
pub(super) fn get(
    snapshot: &Snapshot,
    keyspace: &Keyspace,
    keys: Vec<Vec<u8>>,
) -> fjall::Result<Vec<Cell>> {
    let mut cells = Vec::with_capacity(keys.len());
    // The keys are in order, so those of a row follow each other.
    let mut last: Option<(Vec<u8>, Option<UserValue>)> = None;
    for key in keys {
        let Some((row, letter)) = row_and_column(&key) else {
            continue;
        };
        if last.as_ref().is_none_or(|(last, _)| *last != row) {
            let value = snapshot.get(keyspace, &row)?;
            last = Some((row, value));
        }
        if let Some((_, Some(value))) = &last {
            cells.extend(cell(key, letter, value)?);
        }
    }
    Ok(cells)
}

/// Puts a cell into a packed row, unless the row has a newer one. Returns whether it did.
///
/// # Errors
/// The row is damaged.
pub(super) fn put(row: &mut Vec<u8>, letter: u8, cell: &Cell) -> fjall::Result<bool> {
    let new = Column {
        letter,
        timestamp: cell.timestamp,
        content: &cell.value,
    };
    let mut merged = Vec::with_capacity(row.len() + HEADER_BYTES + new.content.len());
    let mut is_put = false;
    for column in columns(row) {
        let column = column?;
        if column.letter == letter {
            if (column.timestamp, column.content) > (new.timestamp, new.content) {
                return Ok(false);
            }
            continue;
        }
        if column.letter > letter && !is_put {
            new.write(&mut merged);
            is_put = true;
        }
        column.write(&mut merged);
    }
    if !is_put {
        new.write(&mut merged);
    }
    *row = merged;
    Ok(true)
}

/// Adds the cells of a packed row.
///
/// # Errors
/// The row is damaged.
fn unpack(key: &[u8], row: &[u8], cells: &mut Vec<Cell>) -> fjall::Result<()> {
    for column in columns(row) {
        let column = column?;
        let mut key_of_cell = Vec::with_capacity(key.len() + 1);
        key_of_cell.push(INBOX);
        key_of_cell.extend_from_slice(key.get(1..).unwrap_or_default());
        key_of_cell.push(column.letter);
        cells.push(column.cell(key_of_cell));
    }
    Ok(())
}

/// Returns the cells of a packed row. `None` if this is none.
pub(super) fn parts(row: &Cell) -> Option<fjall::Result<Vec<Cell>>> {
    if row.key.first() != Some(&PACKED) {
        return None;
    }
    let stored = super::stored_value(row);
    let mut cells = Vec::new();
    Some(unpack(&row.key, &stored, &mut cells).map(|()| cells))
}

/// Returns the cell of a column in a packed row.
///
/// # Errors
/// The row is damaged.
fn cell(key: Vec<u8>, letter: u8, row: &[u8]) -> fjall::Result<Option<Cell>> {
    for column in columns(row) {
        let column = column?;
        if column.letter == letter {
            return Ok(Some(column.cell(key)));
        }
    }
    Ok(None)
}

/// Iterates over the columns of a packed row.
fn columns(mut row: &[u8]) -> impl Iterator<Item = fjall::Result<Column<'_>>> {
    std::iter::from_fn(move || {
        if row.is_empty() {
            return None;
        }
        let column = Column::split_first(&mut row);
        if column.is_none() {
            row = &[];
        }
        Some(column.ok_or_else(|| {
            io::Error::new(io::ErrorKind::InvalidData, "an inbox row is damaged").into()
        }))
    })
}

impl<'a> Column<'a> {
    /// Splits the first column off a packed row.
    fn split_first(row: &mut &'a [u8]) -> Option<Self> {
        let (&letter, rest) = row.split_first()?;
        let (timestamp, rest) = rest.split_first_chunk()?;
        let (length, rest) = rest.split_first_chunk()?;
        let length = usize::try_from(u32::from_be_bytes(*length)).ok()?;
        let (content, rest) = rest.split_at_checked(length)?;
        *row = rest;
        Some(Self {
            letter,
            timestamp: u64::from_be_bytes(*timestamp),
            content,
        })
    }

    fn write(&self, row: &mut Vec<u8>) {
        // A cell is at most a few kilobytes long.
        let length = u32::try_from(self.content.len()).unwrap_or(u32::MAX);
        row.push(self.letter);
        row.extend_from_slice(&self.timestamp.to_be_bytes());
        row.extend_from_slice(&length.to_be_bytes());
        row.extend_from_slice(self.content);
    }

    fn cell(&self, key: Vec<u8>) -> Cell {
        Cell {
            key,
            timestamp: self.timestamp,
            value: self.content.to_vec(),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn cell(user: &str, row: u8, letter: u8, timestamp: u64, value: &[u8]) -> Cell {
        let mut key = vec![INBOX];
        key.extend_from_slice(user.as_bytes());
        key.push(0);
        key.extend_from_slice(&[row; 16]);
        key.push(letter);
        Cell {
            key,
            timestamp,
            value: value.to_vec(),
        }
    }

    fn plain(cells: &[Cell]) -> Vec<(Vec<u8>, u64, Vec<u8>)> {
        let plain = |cell: &Cell| (cell.key.clone(), cell.timestamp, cell.value.clone());
        cells.iter().map(plain).collect()
    }

    proptest! {
        /// A packed row has the same cells as a map in which the highest timestamp wins, then the greater content.
        #[test]
        fn a_packed_row_is_a_map_of_cells(
            writes in prop::collection::vec((0..4_u8, 0..4_u64, prop::collection::vec(0..3_u8, 0..3)), 0..20),
        ) {
            let (mut row, mut map) = (Vec::new(), std::collections::BTreeMap::new());
            let mut key = Vec::new();
            for (letter, timestamp, content) in writes {
                let cell = cell("alice", 7, letter, timestamp, &content);
                key = row_and_column(&cell.key).unwrap().0;
                let newest = map.entry(letter).or_insert((timestamp, content.clone()));
                let is_put = *newest <= (timestamp, content.clone());
                *newest = newest.clone().max((timestamp, content));
                prop_assert_eq!(put(&mut row, letter, &cell).unwrap(), is_put);
            }
            let mut cells = Vec::new();
            unpack(&key, &row, &mut cells).unwrap();
            let expected = map.iter().map(|(letter, (timestamp, content))| {
                super::tests::cell("alice", 7, *letter, *timestamp, content)
            });
            prop_assert_eq!(plain(&cells), plain(&expected.collect::<Vec<_>>()));
            for length in 0..row.len() {
                let whole = unpack(&key, &row[..length], &mut Vec::new());
                let is_whole = length == 0 || whole.is_ok();
                prop_assert!(is_whole || row[..length] != row[..]);
            }
        }
    }

    #[test]
    fn a_damaged_row_is_an_error() {
        let mut row = Vec::new();
        put(&mut row, b'g', &cell("alice", 7, b'g', 1, b"content")).unwrap();
        row.pop();
        assert!(unpack(b"key", &row, &mut Vec::new()).is_err());
        assert!(put(&mut row, b'r', &cell("alice", 7, b'r', 1, b"")).is_err());
    }
}
