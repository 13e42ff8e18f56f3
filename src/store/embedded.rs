//! The embedded store: one process, one directory, crate `fjall`.
//!
//! One thread does all writes. It commits everything that waits as one batch with one fsync (group commit), and answers
//! only then. fjall may stall a writer by sleeping, and reads may touch the disk, so neither runs on a thread of the
//! runtime.

mod check;
mod compaction;
mod damage;
mod journals;
mod memtables;
mod packed;
mod writer;

use std::{
    cell::RefCell,
    fs,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, OnceLock, RwLock, RwLockReadGuard},
    thread::{self, JoinHandle},
};

use async_trait::async_trait;
pub use check::{Checked, accept, check};
pub use compaction::compact;
use compaction::{CLOSE_PATIENCE, Compactor};
use damage::Damage;
use fjall::{Database, Keyspace, KeyspaceCreateOptions, Readable, Snapshot};
use memtables::Memtables;
use tokio::{
    sync::{mpsc, oneshot},
    time::timeout,
};
use writer::{Command, Writer};

use super::{
    Error, Result,
    cells::{Cell, CellStore, Cells, LOG, Range},
};
use crate::{
    private,
    tasks::{lock, read, write},
};

/// Writes that wait for the writer thread. Above this, callers wait.
const WRITES_QUEUED_MAX: usize = 4_096;
/// Bytes of all journals above which fjall makes writers wait for a flush.
const JOURNAL_BYTES_MAX: u64 = 256 << 20;
pub type Embedded = CellStore<Fjall>;

/// A fjall database with its writer thread.
pub struct Fjall {
    /// `None` when it is closed.
    database: RwLock<Option<Database>>,
    keyspaces: Keyspaces,
    writes: mpsc::Sender<Command>,
    poisoned: Arc<OnceLock<String>>,
    damage: Arc<Damage>,
    path: PathBuf,
    compactor: Compactor,
    /// The thread that writes. It has the database too.
    writer: Mutex<Option<JoinHandle<()>>>,
    /// Ends its thread when it is dropped.
    _memtables: Memtables,
}

impl Embedded {
    /// Opens or creates the store in `path`. `cache_bytes` is the size of fjall's block cache.
    ///
    /// # Errors
    /// [`Error::Unusable`] if the directory cannot be used or is in use by another process, and [`Error::Corrupt`] if it
    /// is damaged.
    pub fn open(path: &Path, cache_bytes: u64) -> Result<Self> {
        let failed = |e: fjall::Error| damage::not_opened(path, &e);
        fs::create_dir_all(path).map_err(|e| failed(e.into()))?;
        private::restrict_files(path);
        private::restrict_all(&path.join("keyspaces"));
        private::restrict(path);
        let (database, keyspaces) = open_database(path, cache_bytes)?;
        let (writes, commands) = mpsc::channel(WRITES_QUEUED_MAX);
        let compactor = Compactor::start(path, &database, &keyspaces).map_err(failed)?;
        let memtables = Memtables::start(keyspaces.clone()).map_err(|e| failed(e.into()))?;
        let fjall = Fjall {
            damage: Arc::new(Damage::new(keyspaces.clone())),
            database: RwLock::new(None),
            keyspaces,
            writes,
            poisoned: Arc::new(OnceLock::new()),
            path: path.to_owned(),
            compactor,
            writer: Mutex::default(),
            _memtables: memtables,
        };
        let writer = fjall.writer(database.clone());
        let writer = thread::Builder::new()
            .name("store-writer".into())
            .spawn(move || writer.run(commands));
        *lock(&fjall.writer) = Some(writer.map_err(|e| failed(e.into()))?);
        let database = RwLock::new(Some(database));
        Ok(CellStore(Fjall { database, ..fjall }))
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

/// Opens or creates the database, unless it is damaged.
fn open_database(path: &Path, cache_bytes: u64) -> Result<(Database, Keyspaces)> {
    let failed = |e: fjall::Error| damage::not_opened(path, &e);
    journals::clear_beginnings(path).map_err(|e| failed(e.into()))?;
    let damages = journals::damages(path).map_err(|e| failed(e.into()))?;
    if !damages.is_empty() {
        return Err(damage::found(path, &damages));
    }
    journals::record_opening(path).map_err(|e| failed(e.into()))?;
    let folder = path.to_owned();
    let open = move || {
        let database = Database::builder(folder)
            .cache_size(cache_bytes)
            .max_cached_files(Some(crate::model::limits::STORE_FILES_OPEN_MAX))
            .max_journaling_size(JOURNAL_BYTES_MAX)
            .manual_journal_persist(true)
            .open()?;
        let log = database.keyspace("log", KeyspaceCreateOptions::default)?;
        let rows = database.keyspace("rows", KeyspaceCreateOptions::default)?;
        Ok((database, Keyspaces { log, rows }))
    };
    // In a thread, because fjall panics on some damages.
    let opened = thread::Builder::new()
        .name("store-opener".into())
        .spawn(open);
    let opened = opened.map_err(|e| failed(e.into()))?.join();
    let opened = opened.map_err(|_| damage::found(path, &["its files cannot be read".into()]))?;
    let opened = opened.map_err(failed)?;
    journals::record_open(path).map_err(|e| failed(e.into()))?;
    Ok(opened)
}

impl Fjall {
    /// Returns a writer of this database.
    fn writer(&self, database: Database) -> Writer {
        Writer {
            database,
            keyspaces: self.keyspaces.clone(),
            poisoned: self.poisoned.clone(),
            damage: self.damage.clone(),
            erased: RefCell::default(),
        }
    }

    /// Returns the keyspace of a key and a snapshot. Without one, a read might see a part of a batch that is being written.
    fn snapshot(&self, operation: &'static str, key: &[u8]) -> Result<(Keyspace, Snapshot)> {
        let snapshot = self.open().as_ref().map(Database::snapshot);
        let snapshot = snapshot.ok_or_else(|| closed(operation))?;
        Ok((self.keyspaces.of(key).clone(), snapshot))
    }

    /// Returns the database, which stays open meanwhile. `None` if it is closed.
    fn open(&self) -> RwLockReadGuard<'_, Option<Database>> {
        read(&self.database)
    }

    /// Ends the threads of the database, which still write to journals after the last write, and records the clean stop.
    /// No other process can have opened the directory: the keyspaces have its lock.
    async fn stop(&self) {
        let database = write(&self.database).take();
        let (writer, path) = (lock(&self.writer).take(), self.path.clone());
        let stop = move || {
            if let Some(writer) = writer {
                drop(writer.join());
            }
            drop(database);
            journals::record_stopped(&path)
        };
        let stopped = timeout(CLOSE_PATIENCE, tokio::task::spawn_blocking(stop)).await;
        if let Ok(Ok(Err(error))) = stopped {
            tracing::warn!(%error, "could not record the clean stop; the next start cannot tell whether journals changed");
        }
    }

    /// Reads cells outside the runtime's threads, because that may touch the disk.
    async fn read(
        &self,
        read: impl FnOnce() -> fjall::Result<Vec<Cell>> + Send + 'static,
    ) -> Result<Vec<Cell>> {
        match tokio::task::spawn_blocking(read).await {
            Ok(cells) => cells.map_err(|e| self.damage.not_read("read", &e)),
            Err(e) => {
                // fjall panics on some damages.
                if e.is_panic() {
                    self.damage.found("its files cannot be read");
                }
                Err(Error::Corrupt {
                    operation: "read",
                    reason: e.to_string(),
                })
            }
        }
    }

    async fn command<T>(
        &self,
        operation: &'static str,
        command: impl FnOnce(oneshot::Sender<Result<T>>) -> Command + Send,
    ) -> Result<T> {
        let (done, result) = oneshot::channel();
        let sent = self.writes.send(command(done)).await;
        sent.map_err(|_| closed(operation))?;
        result.await.map_err(|_| closed(operation))?
    }
}

fn closed(operation: &'static str) -> Error {
    Error::Unavailable {
        operation,
        reason: "the store is closed".into(),
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
        let (keyspace, snapshot) = self.snapshot("scan", &range.from)?;
        if let Some(range) = packed::range(&range) {
            let scan = move || packed::scan(&snapshot, &keyspace, range, limit, newest_first);
            return self.read(scan).await;
        }
        self.read(move || {
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
        let (keyspace, snapshot) = self.snapshot("get", first)?;
        if packed::row_and_column(first).is_some() {
            let get = move || packed::get(&snapshot, &keyspace, keys);
            return self.read(get).await;
        }
        self.read(move || {
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
        let bytes = self.open().as_ref().map(|d| d.journal_disk_space());
        let bytes = bytes.and_then(fjall::Result::ok).unwrap_or_default();
        metrics::gauge!("chat_store_journal_bytes").set(bytes as f64);
        metrics::gauge!("chat_store_damaged").set(f64::from(u8::from(self.damage.is_found())));
    }

    fn healthy(&self) -> Result<()> {
        match self.poisoned.get() {
            Some(reason) => Err(Error::Poisoned {
                reason: reason.clone(),
            }),
            None => self.damage.healthy(),
        }
    }

    async fn close(&self) -> Result<()> {
        let closed = self.command("close", |done| Command::Close { done }).await;
        let is_still = self.compactor.stop().await;
        if closed.is_ok() && is_still {
            self.stop().await;
        }
        closed
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

#[cfg(test)]
mod tests;
