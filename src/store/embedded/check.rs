//! Checks a directory that no process has open: reads every file, key and value.

use std::{
    fs::{File, TryLockError},
    path::Path,
};

use fjall::Readable as _;

use super::{
    super::{
        Error, Result,
        cells::{Cell, CellCheck},
    },
    Keyspaces, cell, damage, journals, open_database, packed,
};

const CACHE_BYTES: u64 = 32 << 20;
/// Damages that are listed. Further ones are only counted.
const DAMAGES_MAX: usize = 100;

/// What a check of a directory found.
#[derive(Debug, Default)]
pub struct Checked {
    pub tables: usize,
    pub cells: u64,
    /// A text for each damage, up to a maximum.
    pub damages: Vec<String>,
    pub further_damages: u64,
}

impl Checked {
    fn add(&mut self, damage: String) {
        if self.damages.len() < DAMAGES_MAX {
            self.damages.push(damage);
        } else {
            self.further_damages += 1;
        }
    }
}

/// Reads everything in a directory. If its journals are damaged, or if it cannot be opened, that is all that is found: opening
/// it would lose the rest of the journals.
///
/// # Errors
/// [`Error::Unusable`] if it is no directory of a store, or in use.
pub fn check(path: &Path) -> Result<Checked> {
    is_store(path)?;
    let failed = |e: fjall::Error| damage::not_opened(path, &e);
    let mut checked = Checked::default();
    for damage in journals::damages(path).map_err(|e| failed(e.into()))? {
        checked.add(damage);
    }
    if !checked.damages.is_empty() {
        return Ok(checked);
    }
    let (database, keyspaces) = match open_database(path, CACHE_BYTES) {
        Err(Error::Corrupt { reason, .. }) => {
            checked.add(reason);
            return Ok(checked);
        }
        opened => opened?,
    };
    let (tables, damages) = damage::damaged_tables(&keyspaces);
    checked.tables = tables;
    for damage in damages {
        checked.add(damage);
    }
    if checked.damages.is_empty() {
        let snapshot = database.snapshot();
        check_cells(&snapshot, &keyspaces, &mut checked);
    }
    drop(database);
    journals::record_stopped(path).map_err(|e| failed(e.into()))?;
    drop(keyspaces);
    Ok(checked)
}

/// Lets a directory with damaged journals be opened with what is left.
///
/// # Errors
/// [`Error::Unusable`] if it is no directory of a store, or cannot be written.
pub fn accept(path: &Path) -> Result<()> {
    is_store(path)?;
    let failed = |e: std::io::Error| damage::not_opened(path, &e.into());
    // fjall locks the same file. The lock ends when the file is closed.
    let lock = path.join("lock");
    let lock = File::options().write(true).open(&lock).map_err(|error| {
        let why = format!(
            "{}: {error}; if no gateway uses the directory, make an empty one",
            lock.display()
        );
        damage::found(path, &[why])
    })?;
    lock.try_lock().map_err(|e| match e {
        TryLockError::WouldBlock => damage::not_opened(path, &fjall::Error::Locked),
        TryLockError::Error(error) => failed(error),
    })?;
    let missing = journals::accept(path).map_err(failed)?;
    if missing.is_empty() {
        return Ok(());
    }
    Err(damage::found(path, &missing))
}

fn is_store(path: &Path) -> Result<()> {
    if path.join("keyspaces").is_dir() {
        return Ok(());
    }
    let reason = format!("{} is not the directory of a store", path.display());
    Err(Error::Unusable { reason })
}

/// Reads all cells. The log comes first, because the marks of other rows refer to it.
fn check_cells(snapshot: &fjall::Snapshot, keyspaces: &Keyspaces, checked: &mut Checked) {
    let mut check = CellCheck::default();
    for keyspace in [&keyspaces.log, &keyspaces.rows] {
        for guard in snapshot.iter(keyspace) {
            match cell(guard) {
                Ok(cell) => {
                    for part in parts(cell, checked) {
                        checked.cells += 1;
                        check.add(&part);
                    }
                }
                Err(error) => {
                    let name: &str = keyspace.name();
                    checked.add(format!("{name}: {}", damage::describe(&error)));
                    break;
                }
            }
            for damage in check.take() {
                checked.add(damage);
            }
        }
        check.end();
        for damage in check.take() {
            checked.add(damage);
        }
    }
}

/// Returns the cells of a packed row, or the cell itself.
fn parts(cell: Cell, checked: &mut Checked) -> Vec<Cell> {
    match packed::parts(&cell) {
        None => vec![cell],
        Some(Ok(parts)) => parts,
        Some(Err(error)) => {
            checked.add(format!("inbox: {}", damage::describe(&error)));
            Vec::new()
        }
    }
}
