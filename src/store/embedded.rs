//! The embedded store: one process, one directory, crate `fjall`.
//!
//! One thread does all writes. It commits everything that waits as one batch with one fsync (group commit), and answers
//! only then. fjall may stall a writer by sleeping, and reads may touch the disk, so neither runs on a thread of the
//! runtime.

mod compaction;
mod memtables;
mod packed;

use std::{
    cell::RefCell,
    collections::{HashMap, HashSet},
    path::Path,
    sync::{Arc, OnceLock},
    thread,
};

use async_trait::async_trait;
use compaction::Compactor;
pub use compaction::compact;
use fjall::{
    Database, Keyspace, KeyspaceCreateOptions, PersistMode, Readable, Snapshot, UserValue,
};
use foldhash::quality::RandomState;
use memtables::Memtables;
use metrics::{counter, histogram};
use tokio::sync::{mpsc, oneshot};

use super::{
    Error, Result,
    cells::{Cell, CellStore, Cells, LOG, Range, immutable},
};
use crate::mutation::{Mutation, broken};

/// Writes that wait for the writer thread. Above this, callers wait.
const WRITES_QUEUED_MAX: usize = 4_096;
/// Bytes of one group commit. Further writes wait for the next one.
const GROUP_BYTES_MAX: usize = 4 << 20;
/// Bytes of all journals above which fjall makes writers wait for a flush.
const JOURNAL_BYTES_MAX: u64 = 256 << 20;
/// Conversations with erased rows that the writer thread remembers. Above this, it treats every conversation as one.
const ERASED_CONVERSATIONS_MAX: usize = 65_536;

pub type Embedded = CellStore<Fjall>;

/// A fjall database with its writer thread.
pub struct Fjall {
    database: Database,
    keyspaces: Keyspaces,
    writes: mpsc::Sender<Command>,
    poisoned: Arc<OnceLock<String>>,
    compactor: Compactor,
    /// Ends its thread when it is dropped.
    _memtables: Memtables,
}

enum Command {
    Write {
        cells: Vec<Cell>,
        durable: bool,
        done: oneshot::Sender<Result<()>>,
    },
    Swap {
        expected: Option<u64>,
        cell: Cell,
        done: oneshot::Sender<Result<bool>>,
    },
    Remove {
        keys: Vec<Vec<u8>>,
        done: oneshot::Sender<Result<()>>,
    },
    RemoveUnchanged {
        cells: Vec<Cell>,
        done: oneshot::Sender<Result<()>>,
    },
    Close {
        done: oneshot::Sender<Result<()>>,
    },
}

impl Embedded {
    /// Opens or creates the store in `path`. `cache_bytes` is the size of fjall's block cache.
    ///
    /// # Errors
    /// [`Error::Unavailable`] if the directory cannot be used, is in use by another process, or is damaged.
    pub fn open(path: &Path, cache_bytes: u64) -> Result<Self> {
        let failed = |e: fjall::Error| Error::Unavailable {
            operation: "open",
            reason: match e {
                fjall::Error::Locked => {
                    format!("{} is in use by another process", path.display())
                }
                other => format!("{}: {other}", path.display()),
            },
        };
        std::fs::create_dir_all(path).map_err(|e| failed(e.into()))?;
        let (database, keyspaces) = open_database(path, cache_bytes).map_err(failed)?;
        packed::convert(&database, &keyspaces.rows).map_err(failed)?;
        let (writes, commands) = mpsc::channel(WRITES_QUEUED_MAX);
        let compactor = Compactor::start(path, &database, &keyspaces).map_err(failed)?;
        let memtables = Memtables::start(keyspaces.clone()).map_err(|e| failed(e.into()))?;
        let fjall = Fjall {
            database,
            keyspaces,
            writes,
            poisoned: Arc::new(OnceLock::new()),
            compactor,
            _memtables: memtables,
        };
        let writer = fjall.writer();
        thread::Builder::new()
            .name("store-writer".into())
            .spawn(move || writer.run(commands))
            .map_err(|e| failed(e.into()))?;
        Ok(CellStore(fjall))
    }
}

/// The keyspaces of the log and of all other rows.
#[derive(Clone)]
struct Keyspaces {
    log: Keyspace,
    rows: Keyspace,
}

impl Keyspaces {
    /// Returns the keyspace of a key.
    fn of(&self, key: &[u8]) -> &Keyspace {
        match key.first() {
            Some(&LOG) => &self.log,
            _ => &self.rows,
        }
    }
}

/// Opens or creates the database.
fn open_database(path: &Path, cache_bytes: u64) -> fjall::Result<(Database, Keyspaces)> {
    let database = Database::builder(path)
        .cache_size(cache_bytes)
        .max_cached_files(Some(crate::model::limits::STORE_FILES_OPEN_MAX))
        .max_journaling_size(JOURNAL_BYTES_MAX)
        .manual_journal_persist(true)
        .open()?;
    let log = database.keyspace("log", KeyspaceCreateOptions::default)?;
    let rows = database.keyspace("rows", KeyspaceCreateOptions::default)?;
    Ok((database, Keyspaces { log, rows }))
}

impl Fjall {
    /// Returns a writer of this database.
    fn writer(&self) -> Writer {
        Writer {
            database: self.database.clone(),
            keyspaces: self.keyspaces.clone(),
            poisoned: self.poisoned.clone(),
            erased: RefCell::default(),
        }
    }

    /// Returns the keyspace of a key and a snapshot. Without one, a read might see a part of a batch that is being written.
    fn snapshot(&self, key: &[u8]) -> (Keyspace, Snapshot) {
        (self.keyspaces.of(key).clone(), self.database.snapshot())
    }

    async fn command<T>(
        &self,
        operation: &'static str,
        command: impl FnOnce(oneshot::Sender<Result<T>>) -> Command + Send,
    ) -> Result<T> {
        let (done, result) = oneshot::channel();
        let gone = || Error::Unavailable {
            operation,
            reason: "the store is closed".into(),
        };
        self.writes.send(command(done)).await.map_err(|_| gone())?;
        result.await.map_err(|_| gone())?
    }
}

#[async_trait]
impl Cells for Fjall {
    async fn write(&self, operation: &'static str, cells: Vec<Cell>, durable: bool) -> Result<()> {
        self.command(operation, |done| Command::Write {
            cells,
            durable,
            done,
        })
        .await
    }

    async fn scan(&self, range: Range, limit: usize, newest_first: bool) -> Result<Vec<Cell>> {
        let (keyspace, snapshot) = self.snapshot(&range.from);
        if let Some(range) = packed::range(&range) {
            let scan = move || packed::scan(&snapshot, &keyspace, range, limit, newest_first);
            return read(scan).await;
        }
        read(move || {
            let found = snapshot.range(&keyspace, range.from..range.to);
            if newest_first {
                found.rev().take(limit).map(cell).collect()
            } else {
                found.take(limit).map(cell).collect()
            }
        })
        .await
    }

    async fn get(&self, keys: Vec<Vec<u8>>) -> Result<Vec<Cell>> {
        let Some(first) = keys.first() else {
            return Ok(Vec::new());
        };
        let (keyspace, snapshot) = self.snapshot(first);
        if packed::row_and_column(first).is_some() {
            return read(move || packed::get(&snapshot, &keyspace, keys)).await;
        }
        read(move || {
            let found = keys.into_iter().filter_map(|key| {
                let value = snapshot.get(&keyspace, &key).transpose()?;
                Some(value.map(|value| stored_cell(key, &value)))
            });
            found.collect()
        })
        .await
    }

    async fn swap(&self, expected: Option<u64>, cell: Cell) -> Result<bool> {
        self.command("swap", |done| Command::Swap {
            expected,
            cell,
            done,
        })
        .await
    }

    async fn remove(&self, keys: Vec<Vec<u8>>) -> Result<()> {
        self.command("remove", |done| Command::Remove { keys, done })
            .await
    }

    async fn remove_unchanged(&self, cells: Vec<Cell>) -> Result<()> {
        self.command("remove", |done| Command::RemoveUnchanged { cells, done })
            .await
    }

    async fn erased(&self) -> Result<()> {
        self.compactor.request().await
    }

    fn measure(&self) {
        metrics::gauge!("chat_store_journal_bytes")
            .set(self.database.journal_disk_space().unwrap_or_default() as f64);
    }

    fn healthy(&self) -> Result<()> {
        match self.poisoned.get() {
            Some(reason) => Err(Error::Poisoned {
                reason: reason.clone(),
            }),
            None => Ok(()),
        }
    }

    async fn close(&self) -> Result<()> {
        let closed = self.command("close", |done| Command::Close { done }).await;
        self.compactor.stop().await;
        closed
    }
}

/// Reads cells outside the runtime's threads, because that may touch the disk.
async fn read(
    read: impl FnOnce() -> fjall::Result<Vec<Cell>> + Send + 'static,
) -> Result<Vec<Cell>> {
    let failed = |reason| Error::Unavailable {
        operation: "read",
        reason,
    };
    match tokio::task::spawn_blocking(read).await {
        Ok(cells) => cells.map_err(|e| failed(e.to_string())),
        Err(e) => Err(failed(e.to_string())),
    }
}

fn cell(guard: fjall::Guard) -> fjall::Result<Cell> {
    let (key, value) = guard.into_inner()?;
    Ok(stored_cell(key.to_vec(), &value))
}

/// Encodes the value of a cell.
fn stored_value(cell: &Cell) -> Vec<u8> {
    let mut value = Vec::with_capacity(8 + cell.value.len());
    value.extend_from_slice(&cell.timestamp.to_be_bytes());
    value.extend_from_slice(&cell.value);
    value
}

/// Decodes a stored value: a timestamp of eight bytes, then the content.
fn stored_cell(key: Vec<u8>, value: &[u8]) -> Cell {
    Cell {
        key,
        timestamp: timestamp(value),
        value: value.get(8..).unwrap_or_default().to_vec(),
    }
}

fn timestamp(value: &[u8]) -> u64 {
    value
        .get(..8)
        .and_then(|b| b.try_into().ok())
        .map_or(0, u64::from_be_bytes)
}

/// The thread that writes.
struct Writer {
    database: Database,
    keyspaces: Keyspaces,
    poisoned: Arc<OnceLock<String>>,
    erased: RefCell<Erased>,
}

/// The conversations with rows that were erased since the start. Their rows are compared with the stored ones, because
/// a late write must not bring back what was erased. No write of an earlier process can come late.
#[derive(Default)]
struct Erased(HashSet<Vec<u8>>);

impl Erased {
    /// Returns the part of a key that names the conversation.
    fn conversation(key: &[u8]) -> &[u8] {
        key.get(1..17).unwrap_or_default()
    }

    fn add(&mut self, key: &[u8]) {
        if self.0.len() < ERASED_CONVERSATIONS_MAX {
            self.0.insert(Self::conversation(key).to_vec());
        }
    }

    fn may_contain(&self, key: &[u8]) -> bool {
        self.0.len() >= ERASED_CONVERSATIONS_MAX || self.0.contains(Self::conversation(key))
    }
}

impl Writer {
    fn run(self, mut commands: mpsc::Receiver<Command>) {
        while let Some(first) = commands.blocking_recv() {
            let mut group = vec![first];
            let mut bytes = group[0].bytes();
            while bytes < GROUP_BYTES_MAX
                && let Ok(next) = commands.try_recv()
            {
                bytes += next.bytes();
                group.push(next);
            }
            let closing = group.extract_if(.., |c| matches!(c, Command::Close { .. }));
            let closing: Vec<_> = closing.collect();
            if !group.is_empty() {
                self.commit(group);
            }
            if !closing.is_empty() {
                // Even if this group failed, all writes before it are made durable.
                self.commit(closing);
                return;
            }
        }
    }

    fn commit(&self, commands: Vec<Command>) {
        histogram!("chat_store_group_commands").record(commands.len() as f64);
        let mut group = Group::new(self);
        for command in commands {
            group.add(command);
        }
        group.commit();
    }

    /// Commits a batch. After a failed write or fsync the content of the disk is unknown (Rebello et al., "Can
    /// Applications Recover from fsync Failures?", ATC 2020), so the store refuses all writes until a restart has read
    /// it.
    fn write(&self, batch: fjall::OwnedWriteBatch, sync: bool) -> Result<()> {
        let mut written = batch.commit();
        if written.is_ok() && sync {
            counter!("chat_store_fsyncs_total").increment(1);
            written = self.database.persist(PersistMode::SyncData);
        }
        written.map_err(|e| {
            let reason = e.to_string();
            if self.poisoned.set(reason.clone()).is_ok() {
                tracing::error!(error = %reason, "the store failed to write; it refuses writes until a restart");
            }
            Error::Poisoned { reason }
        })
    }

    /// Whether a cell must be compared with the stored one.
    fn is_compared(&self, cell: &Cell) -> bool {
        if !immutable(&cell.key) {
            return true;
        }
        if cell.timestamp > 0 {
            self.erased.borrow_mut().add(&cell.key);
            return true;
        }
        cell.key.first() == Some(&LOG) && self.erased.borrow().may_contain(&cell.key)
    }
}

/// The commands of one commit.
struct Group<'a> {
    writer: &'a Writer,
    batch: fjall::OwnedWriteBatch,
    /// Values that this batch writes. The database does not return them before the commit.
    newer: HashMap<Vec<u8>, UserValue, RandomState>,
    /// The packed rows of inboxes that this batch writes. They are added to it in the end.
    packed: HashMap<Vec<u8>, Vec<u8>, RandomState>,
    /// Whether a command must be durable before it is answered.
    sync: bool,
    rows: u64,
    answers: Vec<Box<dyn FnOnce(Result<()>)>>,
    /// Set if stored timestamps could not be read. Then nothing of the group is written, and callers may retry.
    read_error: Option<fjall::Error>,
}

impl<'a> Group<'a> {
    fn new(writer: &'a Writer) -> Self {
        Self {
            writer,
            batch: writer.database.batch(),
            newer: HashMap::default(),
            packed: HashMap::default(),
            sync: false,
            rows: 0,
            answers: Vec::new(),
            read_error: None,
        }
    }

    fn add(&mut self, command: Command) {
        match command {
            Command::Write {
                cells,
                durable,
                done,
            } => {
                self.sync |= durable;
                self.rows += cells.len() as u64;
                for cell in cells {
                    if let Err(e) = self.put(cell) {
                        self.read_error.get_or_insert(e);
                    }
                }
                self.answer(done);
            }
            Command::Swap {
                expected,
                cell,
                done,
            } => {
                self.sync = true;
                let swapped = self.swap(expected, cell).unwrap_or_else(|e| {
                    self.read_error.get_or_insert(e);
                    false
                });
                self.answers.push(Box::new(move |result| {
                    drop(done.send(result.map(|()| swapped)))
                }));
            }
            Command::Remove { keys, done } => {
                for key in keys {
                    debug_assert!(packed::row_and_column(&key).is_none());
                    self.newer.remove(&key);
                    self.batch.remove(self.writer.keyspaces.of(&key), key);
                }
                self.answer(done);
            }
            Command::RemoveUnchanged { cells, done } => {
                for cell in cells {
                    if let Err(e) = self.remove_unchanged(cell) {
                        self.read_error.get_or_insert(e);
                    }
                }
                self.answer(done);
            }
            Command::Close { done } => {
                self.sync = true;
                self.answer(done);
            }
        }
    }

    fn answer(&mut self, done: oneshot::Sender<Result<()>>) {
        self.answers
            .push(Box::new(move |result| drop(done.send(result))));
    }

    fn swap(&mut self, expected: Option<u64>, cell: Cell) -> fjall::Result<bool> {
        debug_assert!(packed::row_and_column(&cell.key).is_none());
        if self.stored(&cell.key)?.map(|value| timestamp(&value)) != expected {
            return Ok(false);
        }
        self.put(cell)?;
        Ok(true)
    }

    fn remove_unchanged(&mut self, cell: Cell) -> fjall::Result<()> {
        debug_assert!(packed::row_and_column(&cell.key).is_none());
        let stored = self.stored(&cell.key)?;
        if stored.is_some_and(|stored| *stored == *stored_value(&cell)) {
            self.newer.remove(&cell.key);
            let keyspace = self.writer.keyspaces.of(&cell.key);
            self.batch.remove(keyspace, cell.key);
        }
        Ok(())
    }

    fn put(&mut self, cell: Cell) -> fjall::Result<()> {
        if let Some((row, letter)) = packed::row_and_column(&cell.key) {
            return self.put_packed(row, letter, &cell);
        }
        let value = stored_value(&cell);
        let keyspace = self.writer.keyspaces.of(&cell.key);
        if !self.writer.is_compared(&cell) {
            self.batch.insert(keyspace, cell.key, value);
            return Ok(());
        }
        // The timestamp comes first, so this compares it, and the content only if the timestamps are equal.
        if self
            .stored(&cell.key)?
            .is_some_and(|stored| *stored > *value)
        {
            return Ok(());
        }
        let value = UserValue::from(value);
        self.newer.insert(cell.key.clone(), value.clone());
        self.batch.insert(keyspace, cell.key, value);
        Ok(())
    }

    /// Puts a cell of an inbox into its row.
    fn put_packed(&mut self, key: Vec<u8>, letter: u8, cell: &Cell) -> fjall::Result<()> {
        if let Some(row) = self.packed.get_mut(&key) {
            packed::put(row, letter, cell)?;
            return Ok(());
        }
        let stored = self.stored(&key)?;
        let mut row = stored.map_or_else(Vec::new, |row| row.to_vec());
        if packed::put(&mut row, letter, cell)? {
            self.packed.insert(key, row);
        }
        Ok(())
    }

    /// Returns the newest value of this key, here or in the database.
    fn stored(&self, key: &[u8]) -> fjall::Result<Option<UserValue>> {
        if let Some(value) = self.newer.get(key) {
            return Ok(Some(value.clone()));
        }
        if cfg!(test) && broken(Mutation::Read) {
            return Err(std::io::Error::other("no more files").into());
        }
        self.writer.keyspaces.of(key).get(key)
    }

    /// Writes the batch and answers all commands.
    fn commit(mut self) {
        for (key, row) in self.packed {
            let keyspace = self.writer.keyspaces.of(&key);
            self.batch.insert(keyspace, key, row);
        }
        counter!("chat_store_rows_written_total", "table" => "cells").increment(self.rows);
        let result = match (self.writer.poisoned.get().cloned(), self.read_error) {
            (Some(reason), _) => Err(Error::Poisoned { reason }),
            (None, Some(error)) => Err(Error::Unavailable {
                operation: "write",
                reason: format!("cannot read what is stored: {error}"),
            }),
            (None, None) => self.writer.write(self.batch, self.sync),
        };
        for answer in self.answers {
            answer(result.clone());
        }
    }
}

impl Command {
    fn bytes(&self) -> usize {
        match self {
            Self::Write { cells, .. } => cells.iter().map(|c| c.key.len() + c.value.len()).sum(),
            Self::Swap { cell, .. } => cell.value.len(),
            Self::Remove { keys, .. } => keys.iter().map(Vec::len).sum(),
            Self::RemoveUnchanged { cells, .. } => cells.iter().map(|c| c.key.len()).sum(),
            Self::Close { .. } => 0,
        }
    }
}

#[cfg(test)]
mod tests;
