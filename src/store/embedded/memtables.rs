//! Frees the memtables of the database. fjall frees a flushed memtable while it holds a lock that every read and write
//! needs, and freeing the hundreds of thousands of rows of one takes up to a tenth of a second. So this thread holds each
//! memtable until nothing else does, and frees it then.

use std::{
    sync::{Arc, mpsc},
    thread::{self, JoinHandle},
    time::Duration,
};

use fjall::AbstractTree as _;

use super::Keyspaces;

/// How often the thread looks for new memtables and for unused ones. At the highest rate of writes a memtable is used for
/// longer. If one is missed, reads and writes wait while fjall frees it.
const LOOK_EVERY: Duration = Duration::from_millis(250);

/// The thread that frees memtables. It ends when this is dropped.
pub(super) struct Memtables {
    end: Option<mpsc::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Memtables {
    pub(super) fn start(keyspaces: Keyspaces) -> std::io::Result<Self> {
        let (end, ended) = mpsc::channel::<()>();
        let run = move || {
            // A memtable lives hardly longer than without this thread, so there are no more of them than fjall has.
            let mut held = Vec::new();
            loop {
                for keyspace in [&keyspaces.log, &keyspaces.rows] {
                    let active = keyspace.tree.active_memtable();
                    if !held.iter().any(|memtable| Arc::ptr_eq(memtable, &active)) {
                        held.push(active);
                    }
                }
                held.retain(|memtable| Arc::strong_count(memtable) > 1);
                if ended.recv_timeout(LOOK_EVERY) != Err(mpsc::RecvTimeoutError::Timeout) {
                    break;
                }
            }
        };
        let thread = thread::Builder::new()
            .name("store-memtables".into())
            .spawn(run)?;
        Ok(Self {
            end: Some(end),
            thread: Some(thread),
        })
    }
}

impl Drop for Memtables {
    fn drop(&mut self) {
        drop(self.end.take());
        if let Some(thread) = self.thread.take() {
            drop(thread.join());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::embedded::open_database;

    #[test]
    fn a_flushed_memtable_is_freed() {
        let folder = tempfile::tempdir().unwrap();
        let (database, keyspaces) = open_database(folder.path(), 1 << 20).unwrap();
        let memtables = Memtables::start(keyspaces.clone()).unwrap();
        keyspaces.log.insert("key", "value").unwrap();
        let memtable = Arc::downgrade(&keyspaces.log.tree.active_memtable());
        // A version of the tree that has it may stay until later flushes.
        let is_freed = (0..1_000).any(|_| {
            keyspaces.log.insert("key", "value").unwrap();
            keyspaces.log.rotate_memtable_and_wait().unwrap();
            memtable.strong_count() == 0
        });
        assert!(is_freed, "it is held for ever");
        drop(memtables);
        drop((keyspaces, database));
    }
}
