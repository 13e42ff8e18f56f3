//! Packs the cells of an inbox row into one of the database. So a page of an inbox costs one lookup for each row, and a
//! whole inbox one step for each, however many columns are filled. The writer reads what is stored before it writes a
//! cell of an inbox anyway, so packing costs it nothing.
//!
//! A packed row has its columns in ascending order, each as a letter, a timestamp, the length of the content and the
//! content. Its key is that of its cells, with another first letter and without the column.

use std::io;

use fjall::{Database, Keyspace, PersistMode, Readable as _, Snapshot, UserValue};

use super::super::cells::{Cell, INBOX, Range};

/// The first byte of the keys of packed rows.
const PACKED: u8 = b'j';
/// Bytes of a column without its content.
const HEADER_BYTES: usize = 1 + size_of::<u64>() + size_of::<u32>();
/// Cells that are packed in one batch when a directory of an earlier build is opened.
const PACKED_AT_ONCE: usize = 10_000;

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

/// Packs the rows of a directory of an earlier build. If it is broken off, the next start goes on.
pub(super) fn convert(database: &Database, rows: &Keyspace) -> fjall::Result<()> {
    let mut from = vec![INBOX];
    let mut count = 0;
    loop {
        let found = database.snapshot().range(rows, from..vec![INBOX + 1]);
        let found = found.take(PACKED_AT_ONCE).map(super::cell);
        let found = found.collect::<fjall::Result<Vec<Cell>>>()?;
        let Some(last) = found.last() else {
            break;
        };
        from = [&last.key[..], &[0]].concat();
        count += found.len();
        let mut batch = database.batch();
        for row in found
            .chunk_by(|a, b| a.key.split_last().map(|a| a.1) == b.key.split_last().map(|b| b.1))
        {
            let Some((key, _)) = row.first().and_then(|cell| row_and_column(&cell.key)) else {
                continue;
            };
            let mut packed = rows.get(&key)?.map_or_else(Vec::new, |row| row.to_vec());
            for cell in row {
                let letter = cell.key.last().copied().unwrap_or_default();
                put(&mut packed, letter, cell)?;
                batch.remove(rows, cell.key.as_slice());
            }
            batch.insert(rows, key, packed);
        }
        batch.commit()?;
    }
    if count > 0 {
        database.persist(PersistMode::SyncAll)?;
        tracing::info!(
            cells = count,
            "the inboxes of an earlier build were converted"
        );
    }
    Ok(())
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

    use super::{super::Embedded, *};
    use crate::store::cells::Cells as _;

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

    #[tokio::test(flavor = "multi_thread")]
    async fn the_inboxes_of_an_earlier_build_are_packed() {
        let folder = tempfile::tempdir().unwrap();
        let old = [
            cell("alice", 7, b'g', 12, b"summary"),
            cell("alice", 7, b'r', 3, b""),
            cell("alice", 8, b'g', 1, b"other"),
            cell("bob", 7, b'g', 12, b"summary of bob"),
        ];
        {
            let (database, keyspaces) =
                super::super::open_database(folder.path(), 1 << 20).unwrap();
            for cell in &old {
                let value = [&cell.timestamp.to_be_bytes()[..], &cell.value].concat();
                keyspaces.rows.insert(cell.key.as_slice(), value).unwrap();
            }
            database.persist(PersistMode::SyncAll).unwrap();
        }
        for _ in 0..2 {
            let store = Embedded::open(folder.path(), 1 << 20).unwrap();
            let range = |from: &[u8], to: &[u8]| Range {
                from: from.to_vec(),
                to: to.to_vec(),
            };
            let alice = store.0.scan(range(b"ialice\0", b"ialice\x01"), 10, false);
            assert_eq!(plain(&alice.await.unwrap()), plain(&old[..3]));
            let all = store.0.scan(range(b"i", b"j"), 2, true).await.unwrap();
            assert_eq!(plain(&all), plain(&[old[3].clone(), old[2].clone()]));
            let missing = cell("alice", 8, b'r', 0, b"").key;
            let keys = vec![
                old[1].key.clone(),
                old[2].key.clone(),
                missing,
                old[3].key.clone(),
            ];
            let got = store.0.get(keys).await.unwrap();
            assert_eq!(plain(&got), plain(&old[1..]));
            store.0.close().await.unwrap();
        }
    }
}
