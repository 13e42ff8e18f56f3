//! The thread that writes. It commits everything that waits as one batch.

use std::{
    cell::RefCell,
    collections::{HashMap, HashSet},
    sync::{Arc, OnceLock},
};

use fjall::{Database, PersistMode, UserValue};
use foldhash::quality::RandomState;
use metrics::{counter, histogram};
use tokio::sync::{mpsc, oneshot};

use super::{
    super::{
        Error, Result,
        cells::{Cell, LOG, immutable},
    },
    Keyspaces,
    damage::{Damage, describe},
    packed, stored_value, timestamp,
};
use crate::mutation::{Mutation, broken};

/// Bytes of one group commit. Further writes wait for the next one.
const GROUP_BYTES_MAX: usize = 4 << 20;
/// Conversations with erased rows that the writer thread remembers. Above this, it treats every conversation as one.
const ERASED_CONVERSATIONS_MAX: usize = 65_536;

pub(super) enum Command {
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

/// The thread that writes.
pub(super) struct Writer {
    pub(super) database: Database,
    pub(super) keyspaces: Keyspaces,
    pub(super) poisoned: Arc<OnceLock<String>>,
    pub(super) damage: Arc<Damage>,
    pub(super) erased: RefCell<Erased>,
}

/// The conversations with rows that were erased since the start. Their rows are compared with the stored ones, because
/// a late write must not bring back what was erased. No write of an earlier process can come late.
#[derive(Default)]
pub(super) struct Erased(HashSet<Vec<u8>>);

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
    pub(super) fn run(self, mut commands: mpsc::Receiver<Command>) {
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

    pub(super) fn commit(&self, commands: Vec<Command>) {
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
            let reason = describe(&e);
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
            (None, Some(error)) => {
                // A stored value could not be read, so nothing was written.
                Err(self.writer.damage.not_read("write", &error))
            }
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
